#![no_main]
use http::Method;
use queen_proxy_fuzz::policy::{
    path::is_canonical,
    route::{RouteClass, classify, is_data_plane, long_poll_wait_ms},
};

libfuzzer_sys::fuzz_target!(|input: (&str, &str, &str)| {
    let (method, path, query) = input;
    let Ok(method) = Method::from_bytes(method.as_bytes()) else {
        return;
    };
    let class = classify(&method, path);
    if class != RouteClass::Blocked {
        assert!(is_data_plane(path), "{path:?}");
    }
    if class == RouteClass::Read {
        assert!(method == Method::GET || method == Method::HEAD || path == "/api/v1/resources/kv/list");
    }
    if long_poll_wait_ms(path, Some(query)).is_some() {
        assert!(query.contains("wait=true"));
    }
    if is_canonical(path) && !path.starts_with("/api/v1/kv/") {
        assert!(path.starts_with('/') && path.is_ascii());
        let decoded = path.replace("%2e", ".").replace("%2E", ".");
        assert!(decoded.split('/').all(|segment| segment != "." && segment != ".."));
    }
});
