//! What the store is meant to be, without locks, SQL or concurrency.

use proptest::{collection::vec, option, prelude::*, sample::select};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const NAMESPACES: [&str; 2] = ["a", "b.c"];
const KEYS: [&str; 5] = ["B", "a", "a/b", "a\u{10ffff}", "é"];

/// Second `at` of the day the programs run on, as jsonb shows it.
pub(super) fn instant(at: i64) -> String {
    format!("2026-01-02T{:02}:{:02}:{:02}+00:00", at / 3600, at / 60 % 60, at % 60)
}

/// The version an operation is to expect; which one it is, is known when the program runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expect {
    Zero,
    /// Of the row that is there, live or not.
    Current,
    /// Of another key, or no one's.
    Foreign,
}

/// A call: operations after a pause of some seconds.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) pause: i64,
    drafts: Vec<(Value, Option<Expect>)>,
}

impl Call {
    /// The operations with versions as they are now.
    pub(super) fn operations(&self, model: &Model) -> Value {
        let of = |draft: &Value| {
            let name = (draft["ns"].as_str()?.to_owned(), draft["key"].as_str()?.to_owned());
            Some(model.0.get(&name)?.version)
        };
        let foreign = |draft: &Value| {
            model
                .0
                .iter()
                .find(|((_, key), _)| draft["key"] != key.as_str())
                .map_or(i64::MAX, |(_, row)| row.version)
        };
        let operations = self.drafts.iter().map(|(draft, expect)| {
            let mut operation = draft.clone();
            if let Some(expect) = expect {
                operation["expect"] = json!(match expect {
                    Expect::Zero => 0,
                    Expect::Current => of(draft).unwrap_or(7),
                    Expect::Foreign => foreign(draft),
                });
            }
            operation
        });
        operations.collect()
    }
}

/// Random programs on few keys, so that operations meet.
pub(super) fn program() -> impl Strategy<Value = Vec<Call>> {
    let call = (0..3_i64, vec(draft(), 1..6)).prop_map(|(pause, drafts)| Call { pause, drafts });
    vec(call, 1..16)
}

/// Quarters, so that sums are exact here and show a fraction there.
fn number(quarters: i64) -> Value {
    let text = format!(
        "{}{}.{:02}",
        if quarters < 0 { "-" } else { "" },
        quarters.abs() / 4,
        quarters.abs() % 4 * 25
    );
    let text = text.trim_end_matches('0').trim_end_matches('.');
    serde_json::from_str(text).unwrap()
}

fn draft() -> impl Strategy<Value = (Value, Option<Expect>)> {
    let name = || (select(NAMESPACES.to_vec()), select(KEYS.to_vec()));
    let value = || {
        let padded = serde_json::from_str::<Value>("1.50").unwrap();
        prop_oneof![
            3 => (-8..9_i64).prop_map(number),
            2 => select(vec![json!("x"), json!(null), json!({"a": [1, "é"]}), json!("7"), padded]),
        ]
    };
    let life = || option::weighted(0.6, 1..5_i64);
    let expect = || option::of(select(vec![Expect::Zero, Expect::Current, Expect::Current, Expect::Foreign]));
    let required = || proptest::bool::weighted(0.15);
    let bound = || option::weighted(0.4, -8..9_i64);
    let live = |operation: &mut Value, life: Option<i64>| match life {
        Some(seconds) => operation["ttlSeconds"] = json!(seconds),
        None => operation["forever"] = json!(true),
    };
    prop_oneof![
        2 => name().prop_map(|(ns, key)| (json!({"op": "get", "ns": ns, "key": key}), None)),
        1 => (select(NAMESPACES.to_vec()), vec(select(KEYS.to_vec()), 0..5))
            .prop_map(|(ns, keys)| (json!({"op": "getMany", "ns": ns, "keys": keys}), None)),
        1 => (
            select(NAMESPACES.to_vec()),
            select(vec!["a", "a/", "B", "é", "a\u{10ffff}", "x"]),
            select(vec![json!(null), json!(""), json!("a"), json!("a/b"), json!("z")]),
            select(vec![json!(null), json!(0), json!(1), json!(2), json!(5000)]),
            any::<bool>(),
        )
            .prop_map(|(ns, prefix, after, limit, bare)| {
                let page = json!({"op": "getPrefix", "ns": ns, "prefix": prefix, "after": after, "limit": limit,
                                  "keysOnly": bare});
                (page, None)
            }),
        4 => (name(), value(), life(), expect(), required()).prop_map(move |((ns, key), value, life, expect, required)| {
            let mut put = json!({"op": "put", "ns": ns, "key": key, "value": value, "required": required});
            live(&mut put, life);
            (put, expect)
        }),
        2 => (name(), value(), life(), required()).prop_map(move |((ns, key), value, life, required)| {
            let mut put = json!({"op": "putIfAbsent", "ns": ns, "key": key, "value": value, "required": required});
            live(&mut put, life);
            (put, None)
        }),
        2 => (name(), expect(), required()).prop_map(|((ns, key), expect, required)| {
            (json!({"op": "delete", "ns": ns, "key": key, "required": required}), expect)
        }),
        4 => (name(), -8..9_i64, bound(), bound(), life(), required()).prop_map(
            move |((ns, key), delta, min, max, life, required)| {
                let mut incr =
                    json!({"op": "incr", "ns": ns, "key": key, "delta": number(delta), "required": required});
                for (bound, quarters) in [("min", min), ("max", max)] {
                    if let Some(quarters) = quarters {
                        incr[bound] = number(quarters);
                    }
                }
                live(&mut incr, life);
                (incr, None)
            }
        ),
    ]
}

#[derive(Clone, Debug)]
struct Stored {
    value: Value,
    version: i64,
    expires: Option<i64>,
    created: i64,
    updated: i64,
}

/// Rows by namespace and key, which Rust orders by bytes too.
#[derive(Clone, Debug, Default)]
pub(super) struct Model(BTreeMap<(String, String), Stored>);

/// What a call must come to.
#[derive(Debug)]
pub(super) enum Verdict {
    /// All elements, and the versions that must be new.
    Results {
        results: Value,
        fresh: Vec<i64>,
    },
    /// The detail of the first required operation that lost.
    Lost(Value),
    Duplicate,
}

fn quarters(value: &Value) -> Option<i64> {
    let number = value.as_number()?.as_f64()? * 4.0;
    #[allow(clippy::cast_possible_truncation)] // small quarters are exact
    Some(number as i64)
}

impl Model {
    /// The rows as the table shows them.
    pub(super) fn rows(&self) -> Vec<Value> {
        let row = |((ns, key), row): (&(String, String), &Stored)| {
            json!({"ns": ns, "key": key, "value": row.value, "version": row.version,
                   "expires": row.expires.map(instant), "created": instant(row.created),
                   "updated": instant(row.updated)})
        };
        self.0.iter().map(row).collect()
    }

    fn live(&self, ns: &str, key: &str, now: i64) -> Option<&Stored> {
        let row = self.0.get(&(ns.to_owned(), key.to_owned()))?;
        row.expires.is_none_or(|expires| expires > now).then_some(row)
    }

    /// Runs a call. What `given` says of an operation is its new version, should it apply.
    pub(super) fn apply(&mut self, calls: &Value, now: i64, given: impl Fn(usize) -> Option<i64>) -> Verdict {
        let calls = calls.as_array().unwrap();
        let mut written = BTreeSet::new();
        let mut order = Vec::new();
        for (at, call) in calls.iter().enumerate() {
            let text = |member: &str| call[member].as_str().unwrap_or_default();
            let many = matches!(text("op"), "getMany" | "getPrefix");
            if !many && text("op") != "get" && !written.insert((text("ns"), text("key"))) {
                return Verdict::Duplicate;
            }
            order.push((many, text("ns"), if many { text("prefix") } else { text("key") }, at));
        }
        order.sort_unstable();
        let (mut results, mut fresh) = (vec![Value::Null; calls.len()], Vec::new());
        for (many, ns, _, at) in order {
            let call = &calls[at];
            let mut result = match call["op"].as_str().unwrap() {
                "get" => self.get(ns, call["key"].as_str().unwrap(), now),
                _ if many => self.read(call, ns, now),
                _ => {
                    let version = given(at).unwrap_or(-1);
                    let result = self.write(call, now, version);
                    if result["applied"] == true && call["op"] != "delete" {
                        fresh.push(version);
                    } else if result["applied"] == false && call["required"] == true {
                        return Verdict::Lost(json!({
                            "index": at, "op": call["op"], "ns": ns, "key": call["key"],
                            "reason": result["reason"], "version": result["version"], "value": result["value"]}));
                    }
                    result
                }
            };
            result["index"] = json!(at);
            result["op"] = call["op"].clone();
            results[at] = result;
        }
        Verdict::Results { results: Value::Array(results), fresh }
    }

    fn get(&self, ns: &str, key: &str, now: i64) -> Value {
        match self.live(ns, key, now) {
            None => json!({"found": false, "key": key}),
            Some(row) => {
                let mut found = shown(key, row, false);
                found["found"] = json!(true);
                found
            }
        }
    }

    fn read(&self, call: &Value, ns: &str, now: i64) -> Value {
        if call["op"] == "getMany" {
            let asked: Vec<&str> =
                call["keys"].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect();
            let mut hits: Vec<&str> =
                asked.iter().copied().filter(|key| self.live(ns, key, now).is_some()).collect();
            hits.sort_unstable();
            let rows: Vec<Value> =
                hits.into_iter().map(|key| shown(key, self.live(ns, key, now).unwrap(), false)).collect();
            let missing: Vec<&str> =
                asked.into_iter().filter(|key| self.live(ns, key, now).is_none()).collect();
            return json!({"rows": rows, "missing": missing, "truncated": false});
        }
        let (prefix, after) = (call["prefix"].as_str().unwrap(), call["after"].as_str().unwrap_or_default());
        let limit =
            call["limit"].as_i64().map_or(100, |limit| usize::try_from(limit.clamp(1, 1000)).unwrap());
        let keys: Vec<&str> = self
            .0
            .keys()
            .filter(|(of, key)| of == ns && key.starts_with(prefix) && key.as_str() > after)
            .map(|(_, key)| key.as_str())
            .filter(|key| self.live(ns, key, now).is_some())
            .collect();
        let cut = keys.len() > limit;
        let kept = &keys[..keys.len().min(limit)];
        let bare = call["keysOnly"] == true;
        let rows: Vec<Value> =
            kept.iter().map(|key| shown(key, self.live(ns, key, now).unwrap(), bare)).collect();
        json!({"rows": rows, "truncated": cut, "nextAfter": cut.then(|| kept.last())})
    }

    /// Sections 3.6 and 3.7, row by row of the tables.
    fn write(&mut self, call: &Value, now: i64, version: i64) -> Value {
        let name = (call["ns"].as_str().unwrap().to_owned(), call["key"].as_str().unwrap().to_owned());
        let row = self.live(&name.0, &name.1, now).cloned();
        let (current, seen) = row.as_ref().map_or((Value::Null, 0), |row| (row.value.clone(), row.version));
        let expect = if call["op"] == "putIfAbsent" { Some(0) } else { call["expect"].as_i64() };
        let reason = match (call["op"].as_str().unwrap(), expect) {
            ("incr", _) => {
                if row.as_ref().is_some_and(|row| !row.value.is_number()) {
                    Some("type")
                } else {
                    let sum = quarters(&current).unwrap_or(0) + quarters(&call["delta"]).unwrap();
                    let low = quarters(&call["min"]).is_some_and(|min| sum < min);
                    let high = quarters(&call["max"]).is_some_and(|max| sum > max);
                    (low || high).then_some("limit")
                }
            }
            (_, Some(0)) => (seen != 0).then_some("exists"),
            (_, Some(expect)) if seen != 0 => (expect != seen).then_some("version"),
            (_, Some(_)) | ("delete", None) => (seen == 0).then_some("absent"),
            (_, None) => None,
        };
        let mut result =
            json!({"applied": reason.is_none(), "key": name.1, "value": current, "version": seen});
        if let Some(reason) = reason {
            result["reason"] = json!(reason);
        }
        if call["op"] == "incr" {
            let seen = quarters(&current).unwrap_or(0);
            let sum = if reason.is_none() { seen + quarters(&call["delta"]).unwrap() } else { seen };
            result["value"] = number(sum);
        } else if reason.is_none() && call["op"] != "delete" {
            result["value"] = call["value"].clone();
        }
        if call["op"] == "delete" {
            // Without a precondition the row goes, dead or alive.
            if call.get("expect").is_none() || (reason.is_none() && seen != 0) {
                self.0.remove(&name);
            }
        } else if reason.is_none() {
            result["version"] = json!(version);
            let mut expires = call["ttlSeconds"].as_i64().map(|seconds| now + seconds);
            if let (Some(row), true) = (&row, call["op"] == "incr") {
                expires = row.expires;
            }
            let created = row.map_or(now, |row| row.created);
            self.0.insert(
                name,
                Stored { value: result["value"].clone(), version, expires, created, updated: now },
            );
        }
        result
    }
}

fn shown(key: &str, row: &Stored, bare: bool) -> Value {
    let mut shown = json!({"key": key, "version": row.version, "expiresAt": row.expires.map(instant),
                           "updatedAt": instant(row.updated)});
    if !bare {
        shown["value"] = row.value.clone();
    }
    shown
}
