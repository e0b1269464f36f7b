#![no_main]
use queen_proxy_fuzz::policy::batch::{Batch, cycle_pushes};
use serde_json::Value;

const NOT_GROWING: [&str; 5] = ["get", "getMany", "getPrefix", "delete", "cancel"];

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let (batch, pushes) = (Batch::read(body), cycle_pushes(body));
    let Ok(root) = serde_json::from_slice::<Value>(body) else {
        return;
    };
    if let (Some(told), Some(operations)) =
        (batch, root.as_array().or_else(|| root.get("operations").and_then(Value::as_array)))
    {
        let grows =
            |op: &Value| !op.get("op").and_then(Value::as_str).is_some_and(|op| NOT_GROWING.contains(&op));
        assert_eq!(told.growing, operations.iter().any(grows));
    }
    if let Some(told) = pushes {
        let items = root.get("push_items").and_then(Value::as_array);
        assert_eq!(told, items.is_some_and(|items| !items.is_empty()));
    }
});
