//! A client that runs its part of a program and writes down what it asked and heard.

use super::{
    checker::{Answer, Event, Held, Kind, Reason},
    program::{Action, KEYS, Route, Step},
};
use crate::support::{Answer as Http, Socket};
use serde_json::{Value, json};
use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
use tokio::sync::mpsc::UnboundedSender;

/// What the clients of a history share.
pub struct Shared {
    pub port: u16,
    pub headers: String,
    /// Names of the keys, new for each history.
    pub keys: [String; KEYS],
    /// Gives every start and end an instant of its own.
    pub clock: AtomicU64,
    /// Requests sent so far; whoever sends one tells its number.
    pub sent: AtomicUsize,
    pub numbers: UnboundedSender<usize>,
    pub documents: u64,
}

impl Shared {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }
}

/// Runs the steps one after the other; returns the events with the key of each.
pub async fn run(shared: Arc<Shared>, client: usize, steps: Vec<Step>) -> Vec<(usize, Event)> {
    let (mut events, mut seen, mut socket) = (Vec::new(), [0; KEYS], None);
    for (at, step) in steps.into_iter().enumerate() {
        // No two writes of a history have the same value.
        let fresh = i64::try_from(1000 * (client + 1) + at).unwrap();
        let value = if shared.documents >> (fresh % 64) & 1 == 1 {
            Held::Document(fresh)
        } else {
            Held::Number(fresh)
        };
        let expect = seen[step.key];
        let kind = match step.action {
            Action::Get => Kind::Get,
            Action::Put => Kind::Put(value),
            Action::Claim => Kind::Claim(value),
            // A client that has seen nothing yet expects what nobody gave.
            Action::Swap => Kind::Swap { expect: if expect == 0 { 1 << 60 } else { expect }, value },
            Action::DeleteIf => Kind::DeleteIf { expect: if expect == 0 { 1 << 60 } else { expect } },
            Action::Delete => Kind::Delete,
            Action::Incr => Kind::Incr { delta: 1 + fresh % 3, max: 5000 },
        };
        let request = request(&shared, step, kind);
        let mut open = match socket.take() {
            Some(socket) => socket,
            None => Socket::open(shared.port).await,
        };
        let start = shared.now();
        let _ = shared.numbers.send(shared.sent.fetch_add(1, Ordering::SeqCst));
        open.send(&request).await;
        let answer = if step.hangs_up { None } else { open.answer().await };
        let answer = answer.and_then(|answer| {
            let heard = heard(&answer, kind);
            let closes =
                answer.header("connection").is_some_and(|option| option.eq_ignore_ascii_case("close"));
            socket = (!closes).then_some(open);
            heard
        });
        if let Some(Answer::Found(_, version) | Answer::Applied(_, version) | Answer::Lost(_, _, version)) =
            answer
        {
            seen[step.key] = version;
        }
        events.push((step.key, Event { kind, start, end: answer.map(|answer| (shared.now(), answer)) }));
    }
    events
}

/// Long enough that an answer does not fit the buffer in which PostgreSQL keeps it until the commit.
fn document(id: i64) -> Value {
    json!({"id": id, "text": "x".repeat(12_000)})
}

fn request(shared: &Shared, step: Step, kind: Kind) -> String {
    let key = &shared.keys[step.key];
    let json_of = |value| match value {
        Held::Number(number) => json!(number),
        Held::Document(id) => document(id),
    };
    let (name, mut body) = match kind {
        Kind::Get => ("get", json!({})),
        Kind::Put(value) => ("put", json!({"value": json_of(value), "forever": true})),
        Kind::Claim(value) => ("putIfAbsent", json!({"value": json_of(value), "forever": true})),
        Kind::Swap { expect, value } => {
            ("put", json!({"value": json_of(value), "forever": true, "expect": expect}))
        }
        Kind::Delete => ("delete", json!({})),
        Kind::DeleteIf { expect } => ("delete", json!({"expect": expect})),
        Kind::Incr { delta, max } => ("incr", json!({"delta": delta, "max": max, "forever": true})),
    };
    let verb = match name {
        "get" => Some("GET"),
        "put" => Some("PUT"),
        "delete" => Some("DELETE"),
        _ => None,
    };
    let line = match (step.route, verb) {
        (Route::Path, Some(verb)) => format!("{verb} /api/v1/kv/ns/{key}"),
        (route, _) => {
            for (member, value) in [("op", name), ("ns", "ns"), ("key", key.as_str())] {
                body[member] = json!(value);
            }
            if matches!(route, Route::Bundle) {
                body = json!({"operations": [], "kv": [body]});
                "POST /api/v1/transaction".to_owned()
            } else {
                body = json!([body]);
                "POST /api/v1/kv".to_owned()
            }
        }
    };
    let body = if line.starts_with("GET") { String::new() } else { body.to_string() };
    format!("{line} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{body}", shared.headers, body.len())
}

/// What an answer says of the operation; `None` when it says that nobody knows.
fn heard(answer: &Http, kind: Kind) -> Option<Answer> {
    if answer.status >= 500 {
        return None;
    }
    let body = answer.json();
    // A write that must not be repeated blindly is answered so that no client repeats it by itself.
    if body["reason"] == "kv_outcome_unknown" {
        return None;
    }
    assert_eq!(answer.status, 200, "{kind:?}: {body}");
    assert_ne!(body["success"], false, "{kind:?}: {body}");
    let element = body.get("results").map_or(&body, |results| &results[0]);
    let held = match &element["value"] {
        Value::Number(number) => Some(Held::Number(number.as_i64().unwrap())),
        Value::Object(document) => Some(Held::Document(document["id"].as_i64().unwrap())),
        _ => None,
    };
    let version = element["version"].as_i64().unwrap_or_default();
    Some(match (&element["found"], &element["applied"]) {
        (Value::Bool(true), _) => Answer::Found(held.expect("a value"), version),
        (Value::Bool(false), _) => Answer::Missing,
        (_, Value::Bool(true)) => Answer::Applied(held, version),
        _ => {
            let reason = match element["reason"].as_str() {
                Some("exists") => Reason::Exists,
                Some("absent") => Reason::Absent,
                Some("version") => Reason::Version,
                Some("limit") => Reason::Limit,
                Some("type") => Reason::Type,
                other => panic!("{kind:?}: reason {other:?} in {body}"),
            };
            Answer::Lost(reason, held, version)
        }
    })
}
