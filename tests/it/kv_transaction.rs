//! The key/value rider of POST /api/v1/transaction, for bundles that carry nothing else: KV contract
//! section 10 and vectors 24 and 26 as far as a cell without queues can show them.

use crate::kv_vectors::{Store, claim, get, merge, op, put, text};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use uuid::Uuid;

const ROUTE: &str = "POST /api/v1/transaction";

/// Sends a bundle and takes the id out of its answer.
async fn commit(store: &Store, body: &str) -> (u16, Value) {
    let answer = store.ask(ROUTE, body).await;
    assert_eq!(answer.header("content-type"), Some("application/json"), "{}", text(&answer));
    let mut body = answer.json();
    let id = body.as_object_mut().unwrap().remove("transactionId").expect("an id");
    Uuid::try_parse(id.as_str().unwrap()).unwrap();
    (answer.status, body)
}

fn bundle(kv: &Value) -> String {
    json!({"operations": [], "requiredLeases": [], "kv": kv}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_of_key_value_operations_commits_and_answers_in_the_flat_index_space() {
    let store = Store::open().await;
    let kept =
        store.batch(json!([put("old", json!("was"), json!({})), put("kept", json!(7), json!({}))])).await;
    let kv = json!([
        op("incr", "count", json!({"delta": 2, "forever": true})),
        claim("mark", json!({"by": 1.50})),
        get("mark"),
        {"op": "getMany", "ns": "ns", "keys": ["mark", "nope"]},
        op("delete", "old", json!({})),
        claim("kept", json!(1)),
    ]);
    let (status, body) = commit(&store, &bundle(&kv)).await;
    assert_eq!((status, &body["success"], body.as_object().unwrap().len()), (200, &json!(true), 2));
    let results = body["results"].as_array().unwrap();
    let expected = ["incr", "putIfAbsent", "get", "getMany", "delete", "putIfAbsent"];
    for (at, (result, name)) in results.iter().zip(expected).enumerate() {
        assert_eq!(
            (&result["index"], &result["opIndex"], &result["type"], &result["op"]),
            (&json!(at), &json!(at), &json!("kv"), &json!(name))
        );
    }
    assert_eq!(results.len(), expected.len());
    // Beside the slot's own members an element is that of the batch route.
    let read = store.batch(json!([get("mark"), get("mark"), get("mark")])).await.remove(2);
    let mut slot = results[2].clone();
    slot.as_object_mut().unwrap().retain(|name, _| name != "type" && name != "opIndex");
    assert_eq!(slot, read);
    assert_eq!(results[3]["missing"], json!(["nope"]));
    assert_eq!(results[4]["value"], "was");
    // An operation that lost without `required` is a result; the bundle commits all the same.
    assert_eq!((&results[5]["applied"], &results[5]["reason"]), (&json!(false), &json!("exists")));
    assert_eq!((&results[5]["value"], &results[5]["version"]), (&json!(7), &kept[1]["version"]));
    assert_eq!(store.one(get("count")).await["value"], 2);

    let ids: BTreeSet<String> = {
        let mut ids = BTreeSet::new();
        for _ in 0..3 {
            let answer = store.ask(ROUTE, &bundle(&json!([get("mark")]))).await;
            ids.insert(answer.json()["transactionId"].as_str().unwrap().to_owned());
        }
        ids
    };
    assert_eq!(ids.len(), 3, "every bundle has an id of its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_whose_required_operation_loses_changes_nothing_and_hears_who_won() {
    let store = Store::open().await;
    let winner = store.one(put("taken", json!({"by": "first"}), json!({}))).await["version"].clone();
    let mut lost = claim("taken", json!(2));
    merge(&mut lost, json!({"required": true}));
    let kv = json!([put("beside", json!(1), json!({})), lost]);
    let verdict = json!({"success": false, "ok": false, "reason": "kv_precondition",
                         "error": "kv_precondition_failed", "failedIndex": 1, "kvReason": "exists",
                         "version": winner, "value": {"by": "first"}, "results": []});
    assert_eq!(commit(&store, &bundle(&kv)).await, (200, verdict));
    assert_eq!(store.row("beside").await, None);

    let big = store.one(put("big", json!("v".repeat(60_000)), json!({}))).await["version"].clone();
    let fenced = json!([put("big", json!(1), json!({"expect": 9, "required": true}))]);
    let verdict = json!({"success": false, "ok": false, "reason": "kv_precondition",
                         "error": "kv_precondition_failed", "failedIndex": 0, "kvReason": "version",
                         "version": big, "results": []});
    assert_eq!(commit(&store, &bundle(&fenced)).await, (200, verdict), "a value that does not fit stays out");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_this_cell_cannot_run_is_refused_in_the_envelope_of_the_route() {
    let store = Store::open().await;
    let put = r#"{"op":"put","ns":"ns","key":"k","value":1,"forever":true}"#;
    let prefix = r#"{"op":"getPrefix","ns":"ns","prefix":"k"}"#;
    let twice = format!("{put},{put}");
    let many = vec![r#"{"op":"get","ns":"ns","key":"k"}"#; 65].join(",");
    let keys = format!(r#"{{"op":"getMany","ns":"ns","keys":[{}]}}"#, vec!["\"k\""; 257].join(","));
    let large =
        format!(r#"{{"op":"put","ns":"ns","key":"l","value":"{}","forever":true}}"#, "v".repeat(65_535));
    let list = format!(
        r#"{{"op":"put","ns":"ns","key":"l","value":[{}],"forever":true}}"#,
        vec!["1"; 21_846].join(",")
    );
    let long = format!(r#"{{"op":"delete","ns":"ns","key":"{}"}}"#, "k".repeat(513));
    let kv = |kv: &str| format!(r#"{{"operations":[],"kv":[{kv}]}}"#);
    // status, reason, what `error` must contain
    let cases = [
        (String::new(), 400, "bad_request", "kv_bad_body"),
        ("[]".to_owned(), 400, "bad_request", "kv_bad_body"),
        (format!(r#"{{"kv":[{put}]}}"#), 400, "bad_request", "\"operations\""),
        (format!(r#"{{"operations":null,"kv":[{put}]}}"#), 400, "bad_request", "\"operations\""),
        (r#"{"operations":[]}"#.to_owned(), 400, "bad_request", "no operation"),
        (r#"{"operations":[],"kv":null}"#.to_owned(), 400, "bad_request", "no operation"),
        (r#"{"operations":[],"kv":[]}"#.to_owned(), 400, "bad_request", "no operation"),
        (r#"{"operations":[],"kv":{}}"#.to_owned(), 400, "bad_request", "TOP LEVEL"),
        (r#"{"operations":[],"kv":"x"}"#.to_owned(), 400, "bad_request", "TOP LEVEL"),
        (format!(r#"{{"operations":[{{"type":"kv","ops":[{put}]}}]}}"#), 400, "bad_request", "TOP LEVEL"),
        (
            format!(r#"{{"operations":[{{"type":"push","items":[{{"queue":"q"}}]}}],"kv":[{put}]}}"#),
            400,
            "bad_request",
            "push",
        ),
        (
            format!(r#"{{"operations":[{{"type":"ack","transactionId":"t"}}],"kv":[{put}]}}"#),
            400,
            "bad_request",
            "ack",
        ),
        (format!(r#"{{"operations":[],"timers":[{{}}],"kv":[{put}]}}"#), 400, "bad_request", "timers"),
        (
            format!(r#"{{"operations":[],"requiredLeases":["l"],"kv":[{put}]}}"#),
            400,
            "bad_request",
            "requiredLeases",
        ),
        (kv(&format!("{put},{prefix}")), 400, "bad_request", "getPrefix"),
        (kv(&twice), 400, "bad_request", "kv_duplicate_key_in_call"),
        (kv(&many), 400, "bad_request", "kv_too_many_ops"),
        (kv(&format!("{put},{keys}")), 400, "bad_request", "kv_too_many_keys"),
        (
            kv(&format!(r#"{put},{{"op":"put","ns":"ns","key":"x","value":1}}"#)),
            400,
            "bad_request",
            "kv_expiry_not_specified",
        ),
        (
            kv(&format!(r#"{put},{{"op":"get","ns":"ns","key":"x","tenant":1}}"#)),
            400,
            "bad_request",
            "kv_tenant_not_an_input",
        ),
        (
            kv(&format!(r#"{put},{{"op":"put","ns":"ns","key":"x","forever":true,"value":"\u0000"}}"#)),
            400,
            "bad_request",
            "kv_bad_body",
        ),
        (kv(&format!("{put},{large}")), 200, "payload_too_large", "kv_value_too_large"),
        (kv(&format!("{put},{list}")), 200, "payload_too_large", "kv_value_too_large"),
        (kv(&format!("{put},{long}")), 200, "payload_too_large", "kv_key_too_large"),
    ];
    for (sent, status, reason, word) in cases {
        let (found, body) = commit(&store, &sent).await;
        let error = body["error"].as_str().unwrap();
        assert_eq!((found, &body["reason"]), (status, &json!(reason)), "{sent:.200}: {body}");
        assert!(error.contains(word), "{sent:.200}: {error}");
        assert_eq!((&body["success"], &body["results"]), (&json!(false), &json!([])), "{sent:.200}");
    }
    assert_eq!(store.rows().await, 0);
    // 64 operations and 256 keys are the most a bundle may hold.
    let most = vec![r#"{"op":"get","ns":"ns","key":"k"}"#; 63].join(",");
    let keys = format!(r#"{{"op":"getMany","ns":"ns","keys":[{}]}}"#, vec!["\"k\""; 193].join(","));
    assert_eq!(commit(&store, &kv(&format!("{most},{keys}"))).await.0, 200);
    let wrong = store.world.ask("PUT /api/v1/transaction", &store.tenant.headers(), "{}").await;
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST")), "{}", text(&wrong));
}
