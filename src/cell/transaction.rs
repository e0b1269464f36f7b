//! Bundles of POST /api/v1/transaction (KV contract, section 10). This cell has no queues yet, so it takes the
//! bundles that carry key/value operations alone, and says of everything else what is missing.

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::answers::answer;
use super::errors::KvError;
use super::members::{Elements, Members};
use super::request::{Call, EdgeLimits};
use super::store::Outcome;

/// Most operations of the rider; SQL has the same figure.
const MOST_OPS: usize = 64;
/// Most keys of the rider; SQL has the same figure.
const MOST_KEYS: usize = 256;

/// Reads a bundle. The slots of `operations` come first in the flat index space; there are none yet, so the
/// position of an operation in `kv` is its flat index too.
pub(super) fn bundle(body: &[u8], limits: EdgeLimits) -> Result<Call, KvError> {
    const SHAPE: KvError =
        KvError::bad("kv_bad_body", "an object with the array \"operations\" and the riders beside it");
    let body: &RawValue = serde_json::from_slice(body).map_err(|_| SHAPE)?;
    let members = Members::of(body).ok_or(SHAPE)?;
    let operations = members.get("operations").and_then(|raw| Elements::of(raw, 1)).ok_or(SHAPE)?;
    if let Some(first) = operations.kept.first() {
        return Err(KvError::bad("kv_bad_request", not_served(first)));
    }
    if rider(&members, "timers", 0)?.is_some() {
        return Err(KvError::bad("kv_bad_request", "this cell does not serve timers yet"));
    }
    if rider(&members, "requiredLeases", 0)?.is_some() {
        return Err(KvError::bad("kv_bad_request", "this cell does not serve requiredLeases yet"));
    }
    let limits = limits.at_most(MOST_OPS, MOST_KEYS);
    match rider(&members, "kv", MOST_OPS)? {
        Some(kv) => Call::of(&kv, limits),
        None => Err(KvError::bad("kv_bad_request", "the bundle holds no operation")),
    }
}

/// The elements of a top-level array, of which absent, `null` and empty all mean that there is none.
fn rider<'a>(members: &Members<'a>, name: &str, keep: usize) -> Result<Option<Elements<'a>>, KvError> {
    let Some(raw) = members.get(name).filter(|raw| raw.get() != "null") else { return Ok(None) };
    let elements = Elements::of(raw, keep)
        .ok_or(KvError::bad("kv_bad_body", "kv, timers and requiredLeases are TOP LEVEL arrays"))?;
    Ok((elements.count > 0).then_some(elements))
}

/// What is wrong with an element of `operations`.
fn not_served(operation: &RawValue) -> &'static str {
    let kind = Members::of(operation)
        .and_then(|members| serde_json::from_str::<String>(members.get("type")?.get()).ok());
    match kind.as_deref() {
        Some("push") => "this cell does not serve push operations yet",
        Some("ack") => "this cell does not serve ack operations yet",
        Some("kv" | "timer" | "timers") => {
            "kv and timers are TOP LEVEL arrays beside \"operations\", not operations"
        }
        _ => "an operation of a bundle has the type push or ack, and this cell serves neither yet",
    }
}

/// The answer to a bundle that ran (sections 10.3 and 10.4).
pub(super) fn outcome(outcome: Outcome) -> Result<Response, KvError> {
    let id = Uuid::now_v7();
    let text = match outcome {
        Outcome::Results(results) => {
            let slots = slots(&results).ok_or(KvError::failed("kv_result_unreadable"))?;
            format!(r#"{{"transactionId":"{id}","success":true,"results":[{slots}]}}"#)
        }
        Outcome::Lost(verdict) => {
            let members = verdict.strip_prefix('{').ok_or(KvError::failed("kv_result_unreadable"))?;
            format!(
                r#"{{"transactionId":"{id}","success":false,"error":"kv_precondition_failed","results":[],{members}"#
            )
        }
    };
    Ok(answer(StatusCode::OK, text))
}

/// Result elements with what tells the riders apart.
fn slots(results: &str) -> Option<String> {
    let elements: Vec<&RawValue> = serde_json::from_str(results).ok()?;
    let mut text = String::with_capacity(results.len() + elements.len() * 32);
    for (position, element) in elements.into_iter().enumerate() {
        if position > 0 {
            text.push(',');
        }
        text.push_str(element.get().strip_suffix('}')?);
        text.extend([r#","type":"kv","opIndex":"#, &position.to_string(), "}"]);
    }
    Some(text)
}

/// A refusal in the envelope of this route.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Refusal<'a> {
    transaction_id: Uuid,
    success: bool,
    reason: &'a str,
    error: &'a str,
    results: [(); 0],
}

/// The answer to a bundle that was not run, or that failed (section 10.4, Q13). What the database has judged
/// and undone is a verdict, status 200; the ladder and what may pass by itself answer as on the KV routes.
pub(super) fn refusal(error: KvError, request_id: &str) -> Response {
    let worded = |reason: &str, detail: Option<&str>| {
        detail.map_or_else(|| reason.to_owned(), |detail| format!("{reason}: {detail}"))
    };
    let (status, word) = error.status_and_word();
    let (status, reason, text) = match &error {
        KvError::Bad { reason, detail } => (status, "bad_request", worded(reason, detail.as_deref())),
        KvError::BodyBroken => (status, "bad_request", "kv_bad_body".to_owned()),
        KvError::TooLarge { reason, detail } => {
            (StatusCode::OK, "payload_too_large", worded(reason, detail.as_deref()))
        }
        KvError::Failed { reason } if reason == "kv_result_misaligned" => {
            (StatusCode::OK, "misaligned", reason.to_string())
        }
        KvError::Failed { reason } if !reason.starts_with("sqlstate_") => {
            (status, "db_error", reason.to_string())
        }
        KvError::Failed { reason } | KvError::Misconfigured { reason } => {
            (StatusCode::OK, "db_error", reason.to_string())
        }
        _ => (status, word, word.to_owned()),
    };
    let body = Refusal { transaction_id: Uuid::now_v7(), success: false, reason, error: &text, results: [] };
    // Plain text fields cannot fail to serialise.
    let body = serde_json::to_string(&body).unwrap_or_default();
    let mut response = error.into_response(request_id);
    *response.status_mut() = status;
    *response.body_mut() = Body::from(body);
    response
}

#[cfg(test)]
mod tests {
    use super::super::ladder::Refusal as Denied;
    use super::*;
    use crate::cell::config::tests::example;

    #[test]
    fn bundles() {
        let limits = EdgeLimits::from(&example());
        let many = |count: usize| format!(r#"{{"operations":[],"kv":[{}]}}"#, vec!["0"; count].join(","));
        let keys =
            format!(r#"{{"operations":[],"kv":[{{"op":"getMany","keys":[{}]}}]}}"#, vec!["0"; 257].join(","));
        for (body, expected) in [
            (
                r#"{"operations":[],"requiredLeases":[],"timers":null,"kv":[{"op":"get","ns":"n","key":"k","junk":1}]}"#,
                r#"[{"op":"get","ns":"n","key":"k"}]"#,
            ),
            (&many(64), &format!("[{}]", vec!["0"; 64].join(","))),
            (&many(65), "kv_too_many_ops: 65 operations, at most 64"),
            (&keys, "kv_too_many_keys: 257 keys, at most 256"),
            (r#"{"operations":[]}"#, "kv_bad_request: the bundle holds no operation"),
            (r#"{"operations":[],"kv":null,"timers":[]}"#, "kv_bad_request: the bundle holds no operation"),
            (
                r#"{"operations":[],"kv":{}}"#,
                "kv_bad_body: kv, timers and requiredLeases are TOP LEVEL arrays",
            ),
            (
                r#"{"operations":[],"kv":"x"}"#,
                "kv_bad_body: kv, timers and requiredLeases are TOP LEVEL arrays",
            ),
            (
                r#"{"operations":[],"kv":[0],"timers":7}"#,
                "kv_bad_body: kv, timers and requiredLeases are TOP LEVEL arrays",
            ),
            (
                r#"{"operations":[],"kv":[0],"timers":[{}]}"#,
                "kv_bad_request: this cell does not serve timers yet",
            ),
            (
                r#"{"operations":[],"kv":[0],"requiredLeases":["x"]}"#,
                "kv_bad_request: this cell does not serve requiredLeases yet",
            ),
            (
                r#"{"operations":[{"type":"push","items":[]}],"kv":[0]}"#,
                "kv_bad_request: this cell does not serve push operations yet",
            ),
            (
                r#"{"operations":[{"type":"ack"}]}"#,
                "kv_bad_request: this cell does not serve ack operations yet",
            ),
            (
                r#"{"operations":[{"type":"kv","op":"get"}]}"#,
                r#"kv_bad_request: kv and timers are TOP LEVEL arrays beside "operations", not operations"#,
            ),
            (
                r#"{"operations":[7]}"#,
                "kv_bad_request: an operation of a bundle has the type push or ack, and this cell serves neither yet",
            ),
        ] {
            let found = match bundle(body.as_bytes(), limits) {
                Ok(call) => call.into_text(),
                Err(KvError::Bad { reason, detail }) => format!("{reason}: {}", detail.unwrap()),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(found, expected, "{body}");
        }
        for body in
            ["", "[]", "null", "{}", r#"{"kv":[0]}"#, r#"{"operations":null}"#, r#"{"operations":{}}"#]
        {
            let refused = bundle(body.as_bytes(), limits);
            assert!(
                matches!(&refused, Err(KvError::Bad { reason, .. }) if reason == "kv_bad_body"),
                "{body}"
            );
        }
    }

    #[test]
    fn slots_of_results() {
        assert_eq!(slots("[]").as_deref(), Some(""));
        assert_eq!(
            slots(r#"[{"op":"get","index":0,"value":{"n":1.50}},{"index":1}]"#).as_deref(),
            Some(
                r#"{"op":"get","index":0,"value":{"n":1.50},"type":"kv","opIndex":0},{"index":1,"type":"kv","opIndex":1}"#
            )
        );
        assert_eq!(slots("7"), None);
    }

    #[tokio::test]
    async fn refusals_on_the_wire() {
        let cases = [
            (
                KvError::from_sql("22023", "kv_bad_ttl", Some("operation 0: x")),
                400,
                "bad_request",
                "kv_bad_ttl: operation 0: x",
            ),
            (
                KvError::from_sql("22001", "kv_key_too_large", Some("600 bytes")),
                200,
                "payload_too_large",
                "kv_key_too_large: 600 bytes",
            ),
            (
                KvError::from_sql("XX000", "kv_result_misaligned", None),
                200,
                "misaligned",
                "kv_result_misaligned",
            ),
            (KvError::from_sql("42883", "no function", None), 200, "db_error", "sqlstate_42883"),
            (KvError::from_sql("25006", "read only", None), 503, "kv_unavailable", "kv_unavailable"),
            (KvError::Paused { in_transaction: true }, 403, "kv_disabled", "kv_disabled"),
            (KvError::Refused(Denied::Full), 403, "kv_quota_exceeded", "kv_quota_exceeded"),
            (KvError::Refused(Denied::NotGranted), 403, "feature_gated", "feature_gated"),
            (KvError::OutcomeUnknown { once_only: true }, 409, "kv_outcome_unknown", "kv_outcome_unknown"),
            (KvError::from_sql("40P01", "deadlock", None), 503, "kv_unavailable", "kv_unavailable"),
            (KvError::unavailable("connection"), 503, "kv_unavailable", "kv_unavailable"),
            (KvError::failed("kv_result_missing"), 500, "db_error", "kv_result_missing"),
            (KvError::BodyBroken, 400, "bad_request", "kv_bad_body"),
            (KvError::Unauthorized, 401, "unauthorized", "unauthorized"),
            (KvError::MethodNotAllowed { allow: "POST" }, 405, "method_not_allowed", "method_not_allowed"),
        ];
        for (error, status, reason, text) in cases {
            let response = refusal(error, "abc");
            assert_eq!(response.status().as_u16(), status, "{text}");
            assert_eq!(response.headers().contains_key("retry-after"), status == 503, "{text}");
            let body = crate::cell::body::read(response.into_body(), 4096).await.unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!((&body["reason"], &body["error"]), (&reason.into(), &text.into()));
            assert_eq!((&body["success"], &body["results"]), (&false.into(), &serde_json::json!([])));
            assert!(Uuid::try_parse(body["transactionId"].as_str().unwrap()).is_ok());
        }
    }
}
