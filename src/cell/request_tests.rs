//! Cases of request parsing: what reaches SQL, and what is refused before.

use super::super::demand::Op;
use super::super::ladder::Usage;
use super::*;

const LIMITS: EdgeLimits = EdgeLimits { ops: 3, keys: 1024, value_bytes: 16 };

/// The text for SQL, or the reason of the refusal.
fn outcome(result: Result<Option<Call>, KvError>) -> String {
    match result {
        Ok(Some(call)) => call.into_text(),
        Ok(None) => "nothing".to_owned(),
        Err(KvError::Bad { reason, .. } | KvError::TooLarge { reason, .. }) => reason.into_owned(),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn batch_bodies() {
    for (body, expected) in [
        // What is no object is refused in SQL, with its position; its size is gone by then.
        (r#" [1, "long"] "#, "[0,0]"),
        (r#"{"operations":[{"op":"x"}],"more":1}"#, r#"[{"op":"x"}]"#),
        (r#"{"operations":1,"operations":[]}"#, "nothing"),
        (r#"{"operations":[],"operations":1}"#, "kv_bad_body"),
        ("[]", "nothing"),
        ("", "kv_bad_body"),
        ("{}", "kv_bad_body"),
        ("null", "kv_bad_body"),
        ("[1", "kv_bad_body"),
        ("[1] x", "kv_bad_body"),
        (r#"{"operations":null}"#, "kv_bad_body"),
        (r#"{"operations":{}}"#, "kv_bad_body"),
        ("[1,2,3]", "[0,0,0]"),
        ("[1,2,3,4]", "kv_too_many_ops"),
        // Numbers and spacing inside a value reach SQL as they came.
        (r#"[{"value":[1.10, 2] }]"#, r#"[{"value":[1.10, 2]}]"#),
        // Members that nobody reads do not; of those that must not be there only the name does.
        (r#"[{"junk":[1,1,1],"key":"k","op":"get"}]"#, r#"[{"op":"get","key":"k"}]"#),
        (r#"[{"tenant":[1,1,1]}]"#, r#"[{"tenant":null}]"#),
        (r#"[{"tenantId":1,"_tenant":2,"op":"x"}]"#, r#"[{"op":"x","tenantId":null,"_tenant":null}]"#),
        (r#"[{"value":1e16}]"#, "kv_value_too_large"),
        (r#"[{"value":1e131071}]"#, "kv_value_too_large"),
        (r#"[{"delta":1e4095}]"#, r#"[{"delta":1e4095}]"#),
        (r#"[{"delta":1e4096}]"#, "kv_bad_request"),
        (r#"[{"min":1e-131071}]"#, "kv_bad_request"),
        (r#"[{"max":[1e131071]}]"#, "kv_bad_request"),
        (r#"[{"value":12345678901234567890}]"#, "kv_value_too_large"),
        (r#"[{"value":12345678901234567}]"#, "kv_value_too_large"),
        (r#"[{"value":1234567890123456}]"#, r#"[{"value":1234567890123456}]"#),
        // The last of two members counts, also when a name is written with an escape.
        (r#"[{"value":"01234567890123456789","value":1}]"#, r#"[{"value":1}]"#),
        (r#"[{"value":1,"v\u0061lue":"01234567890123456789"}]"#, "kv_value_too_large"),
        (r#"[{"\ud800":1}]"#, "kv_bad_body"),
    ] {
        assert_eq!(outcome(batch(body.as_bytes(), LIMITS)), expected, "{body}");
    }
    assert_eq!(outcome(batch(b"[\"\xff\"]", LIMITS)), "kv_bad_body");
    let long = "x".repeat(9000);
    for (name, reason) in [
        ("key", "kv_key_too_large"),
        ("prefix", "kv_key_too_large"),
        ("op", "kv_bad_request"),
        ("ns", "kv_bad_request"),
        ("after", "kv_bad_request"),
        ("expect", "kv_bad_request"),
    ] {
        let body = format!(r#"[{{"{name}":"{long}"}}]"#);
        assert_eq!(outcome(batch(body.as_bytes(), LIMITS)), reason, "{name}");
    }
}

#[test]
fn key_sums() {
    for (body, keys) in [
        (r#"{"op":"get","key":"a"}"#, 1),
        (r#"{"op":"getMany","keys":["a","a",1]}"#, 3),
        (r#"{"op":"getMany"}"#, 0),
        (r#"{"op":"getMany","keys":"abc"}"#, 0),
        (r#"{"op":"getPrefix"}"#, 100),
        (r#"{"op":"getPrefix","limit":null}"#, 100),
        (r#"{"op":"getPrefix","limit":"7"}"#, 100),
        (r#"{"op":"getPrefix","limit":7}"#, 7),
        (r#"{"op":"getPrefix","limit":7.0}"#, 7),
        (r#"{"op":"getPrefix","limit":7.5}"#, 100),
        (r#"{"op":"getPrefix","limit":1e3}"#, 1000),
        (r#"{"op":"getPrefix","limit":5000}"#, 1000),
        (r#"{"op":"getPrefix","limit":0}"#, 1),
        (r#"{"op":"getPrefix","limit":-9}"#, 1),
        (r#"{"op":"getPrefix","limit":1e400}"#, 100),
        (r#"{"op":"getMany","op":"getPrefix","limit":5}"#, 5),
    ] {
        let raw: &RawValue = serde_json::from_str(body).unwrap();
        let members = Members::of(raw).unwrap();
        assert_eq!(key_count(&operation_name(&members), &members), keys, "{body}");
    }
    let two_pages = r#"[{"op":"getPrefix","limit":1000},{"op":"getPrefix","limit":1000}]"#;
    assert_eq!(outcome(batch(two_pages.as_bytes(), LIMITS)), "kv_too_many_keys");
}

#[test]
fn path_puts() {
    for (body, expected) in [
        (
            r#"{"value":1.50,"forever":true}"#,
            r#"[{"op":"put","ns":"n","key":"a\"/é","value":1.50,"forever":true}]"#,
        ),
        (r#"{"ttlSeconds":null,"tenant":"x"}"#, r#"[{"op":"put","ns":"n","key":"a\"/é","ttlSeconds":null}]"#),
        (r#"{"value":"01234567890123456789"}"#, "kv_value_too_large"),
        (r#"{"key":"other"}"#, "kv_field_in_path"),
        (r#"{"op":null}"#, "kv_field_in_path"),
        (r#"{"ns":"x"}"#, "kv_field_in_path"),
        (r#"{"namespace":"x"}"#, "kv_field_in_path"),
        ("[]", "kv_bad_body"),
        ("null", "kv_bad_body"),
        ("", "kv_bad_body"),
    ] {
        assert_eq!(outcome(put("n", "a\"/é", body.as_bytes(), LIMITS).map(Some)), expected, "{body}");
    }
}

#[test]
fn path_deletes_and_gets() {
    let bare = r#"[{"op":"delete","ns":"n","key":"k"}]"#;
    for (body, expected) in [
        ("", bare),
        (" \n", bare),
        (" null ", bare),
        ("{}", bare),
        (r#"{"value":1}"#, bare),
        (
            r#"{"required":true,"expect":7}"#,
            r#"[{"op":"delete","ns":"n","key":"k","expect":7,"required":true}]"#,
        ),
        (r#"{"key":"k"}"#, "kv_field_in_path"),
        ("[]", "kv_bad_body"),
        ("1", "kv_bad_body"),
        ("{", "kv_bad_body"),
    ] {
        assert_eq!(outcome(delete("n", "k", body.as_bytes(), LIMITS).map(Some)), expected, "{body}");
    }
    assert_eq!(outcome(get("n", "k").map(Some)), r#"[{"op":"get","ns":"n","key":"k"}]"#);
}

/// The demand that goes with the text: by route, and with a value's size as it is checked.
#[test]
fn what_a_call_asks_for() {
    let demand = |call: Result<Call, KvError>| call.unwrap().take_demand();
    let put = demand(put("ns", "k", br#"{"value": [1, 2], "forever": true}"#, LIMITS));
    assert_eq!((put.adds, put.once_only), (Usage { rows: 1, bytes: 5 }, false));
    let fenced = demand(super::put("ns", "k", br#"{"value":1,"forever":true,"expect":0}"#, LIMITS));
    assert!(fenced.once_only && fenced.grows);
    let get = demand(get("ns", "k"));
    assert_eq!((get.writes, get.ops.as_slice()), (false, &[Op::Get][..]));
    let delete = demand(delete("ns", "k", b"", LIMITS));
    assert_eq!((delete.writes, delete.grows, delete.adds), (true, false, Usage::default()));
    let body = br#"[{"op":"get","ns":"n","key":"a"},7,{"op":"putIfAbsent","ns":"n","key":"b","value":"xy"},
                    {"op":"put","ns":"n","key":"c","value":{ "a" : 1 }},{"op":"incr","ns":"n","key":"d"}]"#;
    let batch = demand(batch(body, EdgeLimits { ops: 5, ..LIMITS }).map(Option::unwrap));
    assert_eq!(batch.ops, [Op::Get, Op::Put, Op::Put, Op::Incr]);
    assert_eq!((batch.adds, batch.bytes_in), (Usage { rows: 3, bytes: 11 }, 11));
    assert!(batch.writes && batch.once_only);
}
