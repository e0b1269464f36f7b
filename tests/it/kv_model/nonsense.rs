//! Operations with members of every type, in and out of range.

use proptest::{collection::vec, prelude::*, sample::select};
use serde_json::{Map, Value, json};

const MEMBERS: [&str; 18] = [
    "op",
    "ns",
    "key",
    "keys",
    "prefix",
    "after",
    "limit",
    "keysOnly",
    "value",
    "ttlSeconds",
    "forever",
    "expect",
    "required",
    "delta",
    "min",
    "max",
    "tenant",
    "color",
];

fn odd() -> impl Strategy<Value = Value> {
    let number = |text: &'static str| serde_json::from_str::<Value>(text).unwrap();
    let numbers = [
        "0",
        "-0",
        "-0.0",
        "1",
        "-1",
        "1.5",
        "5.0",
        "1e3",
        "1e-3",
        "1E400",
        "-1e400",
        "2147483648",
        "-2147483649",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "8e12",
        "9.2e12",
        "9.3e12",
        "1e-16383",
        "1e-16384",
        "1e131071",
        "1e4095",
        "1e999999999",
        "0.1e-20",
    ];
    let texts = ["", "x", "true", "1", "a\u{0}b", "UPPER", "a.b", "\u{10ffff}", "\u{d7ff}", "é", "%", "_"];
    prop_oneof![
        4 => select(numbers.map(number).to_vec()),
        4 => select(texts.map(Value::from).to_vec()),
        3 => select(vec![json!(true), json!(false), json!(null), json!([]), json!({}), json!([null]), json!([[]]),
                         json!({"a": {"b": [1, "c"]}}), json!(["x", "x"]), json!(["x", 1])]),
        1 => (500..520_usize, select(vec!["k", "é", "\u{10ffff}", "\u{1}"])).prop_map(|(n, c)| json!(c.repeat(n))),
        1 => (65_530..65_540_usize).prop_map(|n| json!("v".repeat(n))),
        1 => (1..100_usize).prop_map(|depth| (0..depth).fold(json!(1), |inner, _| json!([inner]))),
    ]
}

/// A sound operation of each kind.
fn sound() -> impl Strategy<Value = Value> {
    select(vec![
        json!({"op": "get", "ns": "n", "key": "k"}),
        json!({"op": "getMany", "ns": "n", "keys": ["k", "l"]}),
        json!({"op": "getPrefix", "ns": "n", "prefix": "k", "after": "k", "limit": 5, "keysOnly": true}),
        json!({"op": "put", "ns": "n", "key": "k", "value": 1, "forever": true}),
        json!({"op": "put", "ns": "n", "key": "l", "value": {"a": 1}, "ttlSeconds": 5, "expect": 0}),
        json!({"op": "putIfAbsent", "ns": "n", "key": "m", "value": null, "ttlSeconds": 5}),
        json!({"op": "delete", "ns": "n", "key": "o", "expect": 5}),
        json!({"op": "incr", "ns": "n", "key": "p", "delta": 1, "min": 0, "max": 5, "forever": true}),
    ])
}

/// A sound operation with some members replaced, added or taken away.
fn operation() -> impl Strategy<Value = Value> {
    let changes = vec((select(MEMBERS.to_vec()), proptest::option::weighted(0.8, odd())), 0..3);
    let bent = (sound(), changes).prop_map(|(operation, changes)| {
        let Value::Object(mut members) = operation else { unreachable!("all of them are objects") };
        for (name, value) in changes {
            match value {
                Some(value) => members.insert(name.to_owned(), value),
                None => members.remove(name),
            };
        }
        Value::Object(members)
    });
    let free = vec((select(MEMBERS.to_vec()), odd()), 0..8).prop_map(|members| {
        Value::Object(members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>())
    });
    prop_oneof![8 => bent, 1 => free, 1 => odd()]
}

pub(super) fn batch() -> impl Strategy<Value = Vec<Value>> {
    vec(operation(), 1..4)
}
