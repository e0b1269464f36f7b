//! The tables of KV contract section 3.6, row by row: what a write does to a row that is absent, live or
//! expired, and what it answers. The instant of a call is a parameter, so nothing waits for an expiry.

use crate::support::World;
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

const BIRTH: &str = "2026-03-01T00:00:00+00:00";
/// The row below lives ten seconds.
const ALIVE: &str = "2026-03-01T00:00:09+00:00";
/// Exactly at its end it is gone.
const EXPIRED: &str = "2026-03-01T00:00:10+00:00";

/// The row before: its value, should there be one, and the instant of the call.
#[derive(Clone, Copy, Debug)]
enum Before {
    Absent,
    Live(&'static str),
    Expired(&'static str),
}

/// What becomes of the row.
#[derive(Clone, Copy, Debug)]
enum Effect {
    /// It stays as it was, physically.
    Stays,
    /// There is none afterwards.
    Gone,
    /// Born at this call, with the operation's expiry.
    Born,
    /// Replaced with the operation's expiry; the birth stays.
    Replaced,
    /// Only value, version and `updated_at` change.
    Counted,
}

/// `version` of the answer.
#[derive(Clone, Copy, Debug)]
enum Version {
    Zero,
    /// Of the row before.
    Seen,
    New,
}

type Case = (&'static str, Before, &'static str, Effect, Option<&'static str>, &'static str, Version);

const NUMBER: Before = Before::Live("4.50");
const TEXT: Before = Before::Live("\"x\"");
const DEAD: Before = Before::Expired("4.50");
const DEAD_TEXT: Before = Before::Expired("\"x\"");

/// What is expected, before, members of the operation, effect, reason, value and version of the answer. `N` is
/// the version before, `M` another.
const CASES: [Case; 35] = {
    use Before::Absent;
    use Effect::{Born, Counted, Gone, Replaced, Stays};
    use Version::{New, Seen, Zero};
    [
        ("put", Absent, "", Born, None, "7", New),
        ("put", NUMBER, "", Replaced, None, "7", New),
        ("put", DEAD, "", Born, None, "7", New),
        ("put", Absent, r#""expect":0"#, Born, None, "7", New),
        ("put", DEAD, r#""expect":0"#, Born, None, "7", New),
        ("put", NUMBER, r#""expect":0"#, Stays, Some("exists"), "4.50", Seen),
        ("put", NUMBER, r#""expect":N"#, Replaced, None, "7", New),
        ("put", NUMBER, r#""expect":M"#, Stays, Some("version"), "4.50", Seen),
        ("put", Absent, r#""expect":M"#, Gone, Some("absent"), "null", Zero),
        ("put", DEAD, r#""expect":N"#, Stays, Some("absent"), "null", Zero),
        ("putIfAbsent", Absent, "", Born, None, "7", New),
        ("putIfAbsent", DEAD, "", Born, None, "7", New),
        ("putIfAbsent", NUMBER, "", Stays, Some("exists"), "4.50", Seen),
        ("putIfAbsent", TEXT, r#""expect":0"#, Stays, Some("exists"), "\"x\"", Seen),
        ("delete", NUMBER, "", Gone, None, "4.50", Seen),
        ("delete", Absent, "", Gone, Some("absent"), "null", Zero),
        ("delete", DEAD, "", Gone, Some("absent"), "null", Zero),
        ("delete", Absent, r#""expect":0"#, Gone, None, "null", Zero),
        ("delete", DEAD, r#""expect":0"#, Stays, None, "null", Zero),
        ("delete", NUMBER, r#""expect":0"#, Stays, Some("exists"), "4.50", Seen),
        ("delete", NUMBER, r#""expect":N"#, Gone, None, "4.50", Seen),
        ("delete", NUMBER, r#""expect":M"#, Stays, Some("version"), "4.50", Seen),
        ("delete", Absent, r#""expect":M"#, Gone, Some("absent"), "null", Zero),
        ("delete", DEAD, r#""expect":N"#, Stays, Some("absent"), "null", Zero),
        ("incr", Absent, r#""delta":2,"min":2,"max":2"#, Born, None, "2", New),
        ("incr", Absent, r#""delta":2,"max":1.99"#, Gone, Some("limit"), "0", Zero),
        ("incr", Absent, r#""delta":-2,"min":-1"#, Gone, Some("limit"), "0", Zero),
        ("incr", DEAD, r#""delta":2"#, Born, None, "2", New),
        ("incr", DEAD_TEXT, r#""delta":2"#, Born, None, "2", New),
        ("incr", DEAD, r#""delta":2,"max":1"#, Stays, Some("limit"), "0", Zero),
        ("incr", NUMBER, r#""delta":1.50,"max":6"#, Counted, None, "6", New),
        ("incr", NUMBER, r#""delta":-5,"min":0"#, Stays, Some("limit"), "4.5", Seen),
        ("incr", NUMBER, r#""delta":0,"min":9,"max":1"#, Stays, Some("limit"), "4.5", Seen),
        ("incr", TEXT, r#""delta":1,"max":0"#, Stays, Some("type"), "0", Seen),
        ("incr", Before::Live("null"), r#""delta":1"#, Stays, Some("type"), "0", Seen),
    ]
};

struct Table {
    database: PgConnection,
    tenant: Uuid,
}

impl Table {
    async fn apply(&mut self, operations: &str, now: &str) -> Result<Value, sqlx::Error> {
        let answer: String =
            sqlx::query_scalar("SELECT queen.kv_apply_v1($1::text::jsonb, $2, $3::timestamptz, false)::text")
                .bind(operations)
                .bind(self.tenant)
                .bind(now)
                .fetch_one(&mut self.database)
                .await?;
        Ok(serde_json::from_str(&answer).unwrap())
    }

    /// The row as it is stored: value, version, expiry, birth, last write.
    async fn row(&mut self) -> Option<Value> {
        let row: Option<String> = sqlx::query_scalar(
            "SELECT jsonb_build_array(value, version, expires_at, created_at, updated_at)::text
               FROM queen.kv WHERE tenant_id = $1",
        )
        .bind(self.tenant)
        .fetch_optional(&mut self.database)
        .await
        .unwrap();
        row.map(|row| serde_json::from_str(&row).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_row_of_the_tables_of_writes() {
    // The rows lie in the past, where a sweeper would find them.
    let world = World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "off").start().await;
    let mut table = Table { database: world.cell_database().await, tenant: Uuid::nil() };
    sqlx::query("SET TimeZone = 'UTC'").execute(&mut table.database).await.unwrap();
    for (name, before, members, effect, reason, value, version) in CASES {
        for (required, forever) in [(false, false), (false, true), (true, false)] {
            let what = format!("{name} {{{members}}} on {before:?}, required {required}, forever {forever}");
            table.tenant = Uuid::new_v4();
            let (now, stored) = match before {
                Before::Absent => (ALIVE, None),
                Before::Live(value) => (ALIVE, Some(value)),
                Before::Expired(value) => (EXPIRED, Some(value)),
            };
            let mut seen = 0;
            if let Some(value) = stored {
                let put = format!(r#"[{{"op":"put","ns":"n","key":"k","value":{value},"ttlSeconds":10}}]"#);
                seen = table.apply(&put, BIRTH).await.unwrap()[0]["version"].as_i64().unwrap();
            }
            let old = table.row().await;
            let mut all = vec![format!(r#""op":"{name}","ns":"n","key":"k","required":{required}"#)];
            if name != "delete" {
                all.push(if forever { r#""forever":true"# } else { r#""ttlSeconds":60"# }.to_owned());
            }
            if name.starts_with("put") {
                all.push(r#""value":7"#.to_owned());
            }
            if !members.is_empty() {
                all.push(members.replace('N', &seen.to_string()).replace('M', &(seen + 1).to_string()));
            }
            let answer = table.apply(&format!("[{{{}}}]", all.join(",")), now).await;

            let value: Value = serde_json::from_str(value).unwrap();
            let new = table.row().await;
            let lost = reason.is_some() && required;
            let written = new.as_ref().map_or(Value::Null, |row| row[1].clone());
            let version = match version {
                Version::Zero => json!(0),
                Version::Seen => json!(seen),
                Version::New => written.clone(),
            };
            if lost {
                let error = answer.unwrap_err().into_database_error().unwrap();
                let detail = error.downcast_ref::<sqlx::postgres::PgDatabaseError>().detail().unwrap();
                let expected = json!({"index": 0, "op": name, "ns": "n", "key": "k", "reason": reason,
                                      "version": version, "value": value});
                assert_eq!(
                    (error.code().as_deref(), error.message()),
                    (Some("23514"), "kv_precondition_failed")
                );
                assert_eq!(serde_json::from_str::<Value>(detail).unwrap(), expected, "{what}");
                assert_eq!(new, old, "{what}: nothing is changed");
                continue;
            }
            let mut expected = json!([{"index": 0, "op": name, "key": "k", "applied": reason.is_none(),
                                       "value": value, "version": version}]);
            if let Some(reason) = reason {
                expected[0]["reason"] = json!(reason);
            }
            assert_eq!(answer.unwrap(), expected, "{what}");
            let end = if forever { Value::Null } else { json!(now.replace("00:00:", "00:01:")) };
            let row = match (effect, &old) {
                (Effect::Stays, old) => old.clone(),
                (Effect::Gone, _) => None,
                (Effect::Born, _) => Some(json!([value, written, end, now, now])),
                (Effect::Replaced, _) => Some(json!([value, written, end, BIRTH, now])),
                (Effect::Counted, old) => Some(json!([value, written, old.as_ref().unwrap()[2], BIRTH, now])),
            };
            assert_eq!(new, row, "{what}");
            if matches!(effect, Effect::Born | Effect::Replaced | Effect::Counted) {
                assert_ne!(written, json!(seen), "{what}: a version of its own");
            }
        }
    }
}
