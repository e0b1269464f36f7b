#![no_main]
use queen_proxy_fuzz::policy::inspect::{self, Destination};
use serde_json::Value;

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let told = inspect::replay(body);
    let Ok(root @ Value::Object(_)) = serde_json::from_slice::<Value>(body) else {
        return;
    };
    let named =
        |member| root.get(member).and_then(Value::as_str).map(str::trim).filter(|name| !name.is_empty());
    match (named("queue"), named("partition"), told.expect("what serde_json reads is readable")) {
        (Some(queue), Some(partition), Destination::Named(pairs)) => {
            assert!(pairs.list().iter().any(|pair| pair.queue == queue && pair.partition == partition));
        }
        (Some(_), Some(_), Destination::Origin) => panic!("a destination was not seen"),
        (Some(_), None, Destination::Origin) | (None, Some(_), Destination::Origin) => {
            panic!("half was not seen")
        }
        _ => {}
    }
});
