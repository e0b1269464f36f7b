#![no_main]
use queen_proxy_fuzz::policy::inspect;

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let told = inspect::ephemeral_push(body);
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(body)
        && let Some(messages) = value.get("messages").and_then(|messages| messages.as_array())
    {
        assert!(told.unwrap() >= messages.len() as u64);
    }
});
