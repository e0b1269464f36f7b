#![no_main]
use queen_proxy_fuzz::policy::host::{canonical_host, slug_of_host};

libfuzzer_sys::fuzz_target!(|host: &str| {
    let canonical = canonical_host(host);
    let Some(slug) = slug_of_host(host) else {
        return;
    };
    let slug = slug.as_str();
    assert!((1..=63).contains(&slug.len()));
    assert!(slug.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
    assert!(canonical.to_ascii_lowercase().starts_with(slug), "nothing but what stands there");
    for spelling in [
        canonical.to_ascii_uppercase(),
        format!("{canonical}:443"),
        format!("{canonical}."),
        format!(" {canonical}.:1 "),
    ] {
        let other = slug_of_host(&spelling);
        assert_eq!(other.as_ref().map(|other| other.as_str()), Some(slug), "{spelling:?}");
    }
});
