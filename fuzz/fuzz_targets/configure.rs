#![no_main]
use queen_proxy_fuzz::policy::inspect;
use serde_json::Value;

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let told = inspect::configure(body);
    let Ok(root @ Value::Object(_)) = serde_json::from_slice::<Value>(body) else {
        return;
    };
    let told = told.expect("what serde_json reads is readable");
    if let Some(queue) = root.get("queue").and_then(Value::as_str) {
        assert!(told.pairs.list().iter().any(|pair| pair.queue == queue));
    }
    let options = root.get("options").filter(|options| options.is_object()).unwrap_or(&root);
    for option in ["retentionSeconds", "completedRetentionSeconds"] {
        let asked = match options.get(option) {
            Some(Value::Number(number)) => number.as_i64(),
            Some(Value::String(text)) => text.trim().parse::<i64>().ok(),
            _ => None,
        };
        if let Some(asked) = asked.filter(|asked| *asked > 0) {
            let found = told.retention.iter().find(|retention| retention.option == option);
            assert!(found.unwrap().seconds >= asked);
        }
    }
});
