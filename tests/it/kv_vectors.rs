//! The key/value store as its callers see it: the vectors of KV contract section 14, sent over HTTP through
//! the proxy into a real cell. Where a rule is about what is stored, the table itself is looked at too.

use crate::support::{Answer, Socket, Tenant, World};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::{collections::BTreeSet, sync::Arc};
use tokio::{sync::Barrier, task::JoinSet};
use uuid::Uuid;

/// What the table holds of a key, live or not.
#[derive(Debug, PartialEq)]
pub struct Row {
    value: String,
    version: i64,
    expires_at: Option<String>,
    created_at: String,
}

/// A world with one tenant, whose namespace `ns` the tests use.
pub struct Store {
    pub world: World,
    pub tenant: Tenant,
}

impl Store {
    pub async fn open() -> Self {
        let world = World::new().await;
        let tenant = unlimited(&world, "acme").await;
        Self { world, tenant }
    }

    pub async fn ask(&self, line: &str, body: &str) -> Answer {
        self.world.ask(line, &self.tenant.headers(), body).await
    }

    /// The batch route with a body as it stands.
    pub async fn post(&self, body: &str) -> Answer {
        self.ask("POST /api/v1/kv", body).await
    }

    /// The results of operations that must all be answered.
    pub async fn batch(&self, operations: Value) -> Vec<Value> {
        results(&self.post(&operations.to_string()).await)
    }

    /// The result of one operation.
    pub async fn one(&self, operation: Value) -> Value {
        self.batch(json!([operation])).await.remove(0)
    }

    pub async fn row(&self, key: &str) -> Option<Row> {
        let row: Option<(String, i64, Option<String>, String)> = sqlx::query_as(
            "SELECT value::text, version, expires_at::text, created_at::text
               FROM queen.kv WHERE namespace = 'ns' AND key = $1",
        )
        .bind(key)
        .fetch_optional(&mut self.world.cell_database().await)
        .await
        .unwrap();
        row.map(|(value, version, expires_at, created_at)| Row { value, version, expires_at, created_at })
    }

    pub async fn rows(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM queen.kv")
            .fetch_one(&mut self.world.cell_database().await)
            .await
            .unwrap()
    }

    /// Lets a key be born ten seconds earlier and expire a second ago. While the returned connection lives
    /// no sweeper can remove the row, and no caller can write it.
    pub async fn expire(&self, key: &str) -> PgConnection {
        let mut keeper = self.world.cell_database().await;
        sqlx::query("BEGIN").execute(&mut keeper).await.unwrap();
        sqlx::query("SELECT 1 FROM queen.kv WHERE namespace = 'ns' AND key = $1 FOR KEY SHARE")
            .bind(key)
            .execute(&mut keeper)
            .await
            .unwrap();
        let aged = sqlx::query(
            "UPDATE queen.kv SET created_at = created_at - interval '10 s', expires_at = now() - interval '1 s'
              WHERE namespace = 'ns' AND key = $1",
        )
        .bind(key)
        .execute(&mut self.world.cell_database().await)
        .await
        .unwrap();
        assert_eq!(aged.rows_affected(), 1, "{key}");
        keeper
    }

    /// Sends batches at the same moment, each on a connection that is already open.
    pub async fn at_once(&self, batches: Vec<Value>) -> Vec<Answer> {
        let barrier = Arc::new(Barrier::new(batches.len()));
        let mut tasks = JoinSet::new();
        for (at, batch) in batches.into_iter().enumerate() {
            let mut socket = Socket::open(self.world.port()).await;
            let body = batch.to_string();
            let request = format!(
                "POST /api/v1/kv HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{body}",
                self.tenant.headers(),
                body.len()
            );
            let barrier = Arc::clone(&barrier);
            tasks.spawn(async move {
                barrier.wait().await;
                (at, socket.ask(request).await)
            });
        }
        let mut answers = tasks.join_all().await;
        answers.sort_by_key(|(at, _)| *at);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }
}

/// A tenant that the caps of its plan do not slow down: these tests are not about them.
pub async fn unlimited(world: &World, name: &str) -> Tenant {
    let tenant = world.tenant(name).await;
    let none = r#"{"max_req_per_sec": 1000000, "req_burst": 1000000, "max_msgs_per_sec": 1000000, "msgs_burst": 1000000}"#;
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{none}')", tenant.cluster)).await;
    tenant
}

/// What the cell knows a tenant's cluster by.
pub async fn uuid_in_cell(world: &World, tenant: &Tenant) -> Uuid {
    sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
        .bind(tenant.cluster)
        .fetch_one(&mut world.control().await)
        .await
        .unwrap()
}

pub fn text(answer: &Answer) -> String {
    String::from_utf8(answer.body.clone()).unwrap()
}

pub fn results(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", text(answer));
    let body = answer.json();
    body["results"].as_array().unwrap_or_else(|| panic!("no results: {body}")).clone()
}

/// An operation on a key of `ns`, with more members.
pub fn op(name: &str, key: &str, more: Value) -> Value {
    let mut operation = json!({"op": name, "ns": "ns", "key": key});
    merge(&mut operation, more);
    operation
}

/// A put that lives forever, with more members.
pub fn put(key: &str, value: Value, more: Value) -> Value {
    let mut operation = op("put", key, json!({"forever": true}));
    operation["value"] = value;
    merge(&mut operation, more);
    operation
}

pub fn claim(key: &str, value: Value) -> Value {
    put(key, value, json!({"op": "putIfAbsent"}))
}

pub fn get(key: &str) -> Value {
    op("get", key, json!({}))
}

pub fn merge(operation: &mut Value, more: Value) {
    let Value::Object(more) = more else { panic!("members: {more}") };
    operation.as_object_mut().unwrap().extend(more);
}

/// Values of the rows of a `getMany` or `getPrefix`, by one member.
pub fn of_rows(result: &Value, member: &str) -> Vec<Value> {
    result["rows"].as_array().unwrap().iter().map(|row| row[member].clone()).collect()
}

/// `(applied, reason, value, version)`, with null for what is not there.
pub fn verdict(result: &Value) -> (bool, Value, Value, i64) {
    (
        result["applied"].as_bool().unwrap(),
        result.get("reason").cloned().unwrap_or_default(),
        result["value"].clone(),
        result["version"].as_i64().unwrap(),
    )
}

/// Vector 1, also against an expired row, where the loser must hear of the winner and not of the dead row.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_claims_at_once_one_wins_and_every_loser_hears_of_it() {
    let store = Store::open().await;
    for round in 0..8 {
        let key = format!("claim-{round}");
        if round % 2 == 1 {
            store.one(op("put", &key, json!({"value": "dead", "ttlSeconds": 60}))).await;
            drop(store.expire(&key).await);
        }
        let answers =
            store.at_once((0..16).map(|who| json!([claim(&key, json!({"by": who}))])).collect()).await;
        let verdicts: Vec<_> = answers.iter().map(|answer| verdict(&results(answer)[0])).collect();
        let winners: Vec<usize> = (0..16).filter(|who| verdicts[*who].0).collect();
        assert_eq!(winners.len(), 1, "round {round}: {verdicts:?}");
        let version = verdicts[winners[0]].3;
        for (who, verdict) in verdicts.iter().enumerate() {
            let applied = who == winners[0];
            let reason = if applied { Value::Null } else { json!("exists") };
            assert_eq!(
                *verdict,
                (applied, reason, json!({"by": winners[0]}), version),
                "round {round}, {who}"
            );
        }
        assert_eq!(store.row(&key).await.unwrap().version, version);
    }
    assert_eq!(store.rows().await, 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_updates_of_one_version_one_wins_and_a_ceiling_admits_exactly_its_number() {
    let store = Store::open().await;
    for round in 0..6 {
        let (fenced, counter) = (format!("fenced-{round}"), format!("counter-{round}"));
        let seen = store.one(put(&fenced, json!("first"), json!({}))).await["version"].as_i64().unwrap();
        let batches = (0..16).map(|who| {
            json!([
                put(&fenced, json!(who), json!({"expect": seen})),
                op("incr", &counter, json!({"delta": 1, "max": 10, "forever": true})),
            ])
        });
        let answers = store.at_once(batches.collect()).await;
        let pairs: Vec<_> = answers.iter().map(results).collect();
        let updates: Vec<_> = pairs.iter().map(|pair| verdict(&pair[0])).collect();
        let winner = updates.iter().find(|update| update.0).expect("a winner");
        assert_ne!(winner.3, seen);
        for loser in updates.iter().filter(|update| !update.0) {
            assert_eq!(*loser, (false, json!("version"), winner.2.clone(), winner.3), "round {round}");
        }
        assert_eq!(updates.iter().filter(|update| update.0).count(), 1, "round {round}");
        let mut admitted: Vec<_> = pairs.iter().filter(|pair| pair[1]["applied"] == true).collect();
        admitted.sort_by_key(|pair| pair[1]["value"].as_i64());
        let counts: Vec<_> = admitted.iter().map(|pair| pair[1]["value"].clone()).collect();
        assert_eq!(json!(counts), json!([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), "round {round}");
        for refused in pairs.iter().filter(|pair| pair[1]["applied"] == false) {
            assert_eq!((&refused[1]["reason"], &refused[1]["value"]), (&json!("limit"), &json!(10)));
        }
    }
}

/// Vectors 3, 4 and 7.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_key_is_gone_before_it_is_swept_and_the_next_write_is_its_birth() {
    let store = Store::open().await;
    let reads = json!([
        get("k"),
        {"op": "getMany", "ns": "ns", "keys": ["k", "live"]},
        {"op": "getPrefix", "ns": "ns", "prefix": "k"},
    ]);
    store
        .batch(json!([
            op("put", "k", json!({"value": {"a": 1}, "ttlSeconds": 1})),
            put("live", json!(1), json!({}))
        ]))
        .await;
    let keeper = store.expire("k").await;
    let dead = store.row("k").await.unwrap();
    let results = store.batch(reads).await;
    assert_eq!(results[0], json!({"index": 0, "op": "get", "found": false, "key": "k"}));
    assert_eq!((&results[1]["missing"], of_rows(&results[1], "key")), (&json!(["k"]), vec![json!("live")]));
    assert_eq!(
        results[2],
        json!({"index": 2, "op": "getPrefix", "rows": [], "truncated": false, "nextAfter": null})
    );
    let miss = store.ask("GET /api/v1/kv/ns/k", "").await;
    assert_eq!((miss.status, miss.json()["found"].clone(), miss.header("etag")), (200, false.into(), None));
    assert_eq!(store.row("k").await.unwrap(), dead, "reading leaves the row as it is");
    drop(keeper);
    let fenced = store.one(op("delete", "k", json!({"expect": 0}))).await;
    assert_eq!(verdict(&fenced), (true, Value::Null, Value::Null, 0));

    let reborn = store.one(op("putIfAbsent", "k", json!({"value": {"a": 2}, "ttlSeconds": 600}))).await;
    assert_eq!((reborn["applied"].clone(), reborn["op"].clone()), (json!(true), json!("putIfAbsent")));
    let alive = store.row("k").await.unwrap();
    assert_eq!(reborn["version"], alive.version);
    assert_ne!(alive.version, dead.version);
    assert!(alive.created_at > dead.created_at, "{alive:?} after {dead:?}");

    drop(store.expire("k").await);
    let counted = store.one(op("incr", "k", json!({"delta": 1, "ttlSeconds": 600}))).await;
    assert_eq!((verdict(&counted).0, &counted["value"], counted.get("reason")), (true, &json!(1), None));
    let counter = store.row("k").await.unwrap();
    assert!(counter.created_at > dead.created_at && counter.expires_at > alive.expires_at, "{counter:?}");

    drop(store.expire("k").await);
    let late = store.one(op("delete", "k", json!({}))).await;
    assert_eq!(verdict(&late), (false, json!("absent"), Value::Null, 0));
    assert_eq!(store.row("k").await, None, "though absent for the caller, it is removed");
}

/// Vectors 2 and 22, with what a loser is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_write_applies_to_the_version_it_expects_and_creates_nothing() {
    let store = Store::open().await;
    let early = store.one(put("k", json!(1), json!({"expect": 90101}))).await;
    assert_eq!(
        early,
        json!({"index": 0, "op": "put", "applied": false, "reason": "absent", "key": "k", "value": null, "version": 0})
    );
    assert_eq!(store.rows().await, 0);

    let first = store.one(put("k", json!({"by": "a"}), json!({"expect": 0}))).await;
    let version = first["version"].as_i64().unwrap();
    assert_eq!(
        first,
        json!({"index": 0, "op": "put", "applied": true, "key": "k", "value": {"by": "a"}, "version": version})
    );
    let found = store.one(get("k")).await;
    assert_eq!(
        (&found["found"], &found["expiresAt"], &found["version"]),
        (&json!(true), &Value::Null, &json!(version))
    );
    assert!(found["updatedAt"].as_str().unwrap().ends_with("+00:00"), "{found}");

    let current = (json!({"by": "a"}), version);
    for (operation, reason) in [
        (put("k", json!(2), json!({"expect": 0})), "exists"),
        (claim("k", json!(2)), "exists"),
        (put("k", json!(2), json!({"expect": version + 1})), "version"),
        (op("delete", "k", json!({"expect": version + 1})), "version"),
        (op("delete", "k", json!({"expect": 0})), "exists"),
    ] {
        let lost = verdict(&store.one(operation.clone()).await);
        assert_eq!(lost, (false, json!(reason), current.0.clone(), current.1), "{operation}");
    }
    let born = store.row("k").await.unwrap().created_at;
    let second =
        store.one(op("put", "k", json!({"value": null, "ttlSeconds": 600, "expect": version}))).await;
    let next = second["version"].as_i64().unwrap();
    assert_eq!((verdict(&second), next != version), ((true, Value::Null, Value::Null, next), true));
    let row = store.row("k").await.unwrap();
    assert_eq!((row.created_at, row.expires_at.is_some()), (born, true), "an update is no birth");
    let gone = store.one(op("delete", "k", json!({"expect": next}))).await;
    assert_eq!(verdict(&gone), (true, Value::Null, Value::Null, next));
    for operation in [op("delete", "k", json!({"expect": next})), op("delete", "k", json!({}))] {
        assert_eq!(verdict(&store.one(operation).await), (false, json!("absent"), Value::Null, 0));
    }
    assert_eq!(store.rows().await, 0);
}

/// Vectors 5, 6, 8 and 9.
#[tokio::test(flavor = "multi_thread")]
async fn a_counter_admits_up_to_its_bounds_and_keeps_the_lifetime_it_was_born_with() {
    let store = Store::open().await;
    let incr = |key: &str, more: Value| store.one(op("incr", key, more));
    for (value, applied) in [(1, true), (2, true), (3, true), (3, false)] {
        let counted = incr("limited", json!({"delta": 1, "max": 3, "ttlSeconds": 60})).await;
        assert_eq!((&counted["value"], &counted["applied"]), (&json!(value), &json!(applied)), "{counted}");
        let reason = if applied { None } else { Some(&json!("limit")) };
        assert_eq!(counted.get("reason"), reason);
    }
    assert_eq!(store.one(get("limited")).await["value"], 3);

    for bounds in
        [json!({"delta": 10, "max": 5, "forever": true}), json!({"delta": -10, "min": 0, "forever": true})]
    {
        assert_eq!(verdict(&incr("absent", bounds).await), (false, json!("limit"), json!(0), 0));
    }
    assert_eq!(store.row("absent").await, None);

    let object = store.one(put("object", json!({"a": 1}), json!({}))).await;
    let version = object["version"].as_i64().unwrap();
    let mistyped = verdict(&incr("object", json!({"delta": 1, "forever": true})).await);
    assert_eq!(mistyped, (false, json!("type"), json!(0), version));
    assert_eq!(store.row("object").await.unwrap().value, r#"{"a": 1}"#);

    incr("lived", json!({"delta": 1, "ttlSeconds": 60})).await;
    let born = store.row("lived").await.unwrap();
    for (at, more) in [json!({"delta": 1, "ttlSeconds": 86400}), json!({"delta": 1, "forever": true})]
        .into_iter()
        .enumerate()
    {
        let counted = incr("lived", more).await;
        let row = store.row("lived").await.unwrap();
        assert_eq!((counted["value"].as_u64().unwrap(), &row.expires_at), (at as u64 + 2, &born.expires_at));
        assert_eq!((counted["version"].as_i64(), &row.created_at), (Some(row.version), &born.created_at));
    }
}

/// Vector 10: a prefix is not a pattern.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_taken_literally_and_its_rows_come_in_byte_order() {
    let store = Store::open().await;
    let keys = [
        "a%b",
        "a%bc",
        "axb",
        "a_b",
        "aQb",
        "b\u{10ffff}",
        "b\u{10ffff}\u{10ffff}",
        "b\u{d7ff}",
        "b\u{e000}",
        "é",
        "Z",
    ];
    store.batch(keys.iter().map(|key| put(key, json!(key), json!({}))).collect()).await;
    let cases: [(&str, &[&str]); 7] = [
        ("a%b", &["a%b", "a%bc"]),
        ("a_b", &["a_b"]),
        ("a", &["a%b", "a%bc", "aQb", "a_b", "axb"]),
        ("b\u{d7ff}", &["b\u{d7ff}"]),
        ("b\u{10ffff}", &["b\u{10ffff}", "b\u{10ffff}\u{10ffff}"]),
        ("é", &["é"]),
        ("nothing", &[]),
    ];
    for (prefix, expected) in cases {
        let page = store.one(json!({"op": "getPrefix", "ns": "ns", "prefix": prefix})).await;
        let expected: Vec<Value> = expected.iter().map(|key| json!(key)).collect();
        assert_eq!(
            (of_rows(&page, "key"), of_rows(&page, "value")),
            (expected.clone(), expected),
            "{prefix}"
        );
        assert_eq!((&page["truncated"], &page["nextAfter"]), (&json!(false), &Value::Null), "{prefix}");
    }
    let bare = store.one(json!({"op": "getPrefix", "ns": "ns", "prefix": "a_", "keysOnly": true})).await;
    assert_eq!(bare["rows"][0].get("value"), None, "left out, not null");
}

/// Vector 13, with the walk to the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_prefix_is_read_page_by_page() {
    let store = Store::open().await;
    let keys: Vec<String> = (0..1200).map(|n| format!("k{n:04}")).collect();
    for some in keys.chunks(240) {
        store.batch(some.iter().map(|key| put(key, json!(key), json!({}))).collect()).await;
    }
    // limit and cursor sent, first row, number of rows
    let cases = [
        (json!({"limit": 5000}), 0, 1000),
        (json!({}), 0, 100),
        (json!({"limit": 0}), 0, 1),
        (json!({"limit": 7, "after": "k0006"}), 7, 7),
        (json!({"limit": 1000, "after": "k0999"}), 1000, 200),
        (json!({"limit": 200, "after": "k0999"}), 1000, 200),
        (json!({"after": "a, which lies outside"}), 0, 100),
        (json!({"after": "k1199"}), 1200, 0),
    ];
    for (more, start, count) in cases {
        let mut operation = json!({"op": "getPrefix", "ns": "ns", "prefix": "k"});
        merge(&mut operation, more);
        let page = store.one(operation.clone()).await;
        let expected: Vec<Value> = keys[start..start + count].iter().map(|key| json!(key)).collect();
        assert_eq!(of_rows(&page, "key"), expected, "{operation}");
        let more = start + count < keys.len();
        let next = if more { expected[count - 1].clone() } else { Value::Null };
        assert_eq!((&page["truncated"], &page["nextAfter"]), (&json!(more), &next), "{operation}");
    }
}

/// Vector 14 and the first recommendation of Q5: a page is cut by bytes, never to nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_ends_at_four_mebibytes_and_a_walk_still_comes_to_its_end() {
    const BUDGET: usize = 4 << 20;
    let store = Store::open().await;
    let value = "v".repeat(60 << 10);
    for n in 0..80 {
        let stored = store
            .ask(
                &format!("PUT /api/v1/kv/ns/big{n:02}"),
                &json!({"value": value, "forever": true}).to_string(),
            )
            .await;
        assert_eq!(stored.status, 200, "{}", text(&stored));
    }
    let prefix = json!({"op": "getPrefix", "ns": "ns", "prefix": "big", "limit": 900});
    let page = store.one(prefix.clone()).await;
    let count = page["rows"].as_array().unwrap().len();
    let bytes = count * (value.len() + 2);
    assert!(
        count < 80 && (BUDGET..=BUDGET + value.len() + 2).contains(&bytes),
        "{count} rows, {bytes} bytes"
    );
    assert_eq!(
        (&page["truncated"], &page["nextAfter"]),
        (&json!(true), &json!(format!("big{:02}", count - 1)))
    );

    // Reads before it in the order of application have spent the budget: the walker still gets on.
    let keys: Vec<String> = (0..80).map(|n| format!("big{n:02}")).collect();
    for (after, first) in [(Value::Null, &keys[0]), (json!(keys[0]), &keys[1])] {
        let mut page = prefix.clone();
        merge(&mut page, json!({"after": after}));
        let results = store.batch(json!([page, {"op": "getMany", "ns": "ns", "keys": keys}])).await;
        assert_eq!((of_rows(&results[1], "key").len(), &results[1]["truncated"]), (count, &json!(true)));
        assert_eq!(results[1]["missing"], json!([]), "cut off is not missing");
        assert_eq!(of_rows(&results[0], "key").first(), Some(&json!(first)));
        assert_eq!(Some(&results[0]["nextAfter"]), of_rows(&results[0], "key").last());
    }

    let mut rest = prefix;
    merge(&mut rest, json!({"after": page["nextAfter"]}));
    let rest = store.one(rest).await;
    let walked = [of_rows(&page, "key"), of_rows(&rest, "key")].concat();
    assert_eq!((json!(walked), &rest["nextAfter"]), (json!(keys), &Value::Null));
}

/// Vectors 15 and 16.
#[tokio::test(flavor = "multi_thread")]
async fn the_results_of_a_batch_stand_where_its_operations_stood() {
    let store = Store::open().await;
    store.batch(json!([put("other", json!("old"), json!({}))])).await;
    let results = store
        .batch(json!([
            put("a", json!(1), json!({})),
            claim("b", json!(2)),
            get("a"),
            {"op": "getMany", "ns": "ns", "keys": ["nope", "b", "a"]},
            {"op": "getPrefix", "ns": "ns", "prefix": "a"},
            op("incr", "count", json!({"delta": 5, "ttlSeconds": 60})),
            op("delete", "other", json!({})),
        ]))
        .await;
    let names: Vec<_> =
        results.iter().map(|result| (result["index"].clone(), result["op"].clone())).collect();
    let expected = ["put", "putIfAbsent", "get", "getMany", "getPrefix", "incr", "delete"];
    assert_eq!(
        names,
        expected.iter().enumerate().map(|(at, name)| (json!(at), json!(name))).collect::<Vec<_>>()
    );
    assert_eq!(
        (&results[2]["found"], &results[2]["value"]),
        (&json!(true), &json!(1)),
        "a get after the put sees it"
    );
    assert_eq!(
        (of_rows(&results[3], "key"), &results[3]["missing"]),
        (vec![json!("a"), json!("b")], &json!(["nope"]))
    );
    assert_eq!(of_rows(&results[4], "value"), [json!(1)]);
    assert_eq!((&results[5]["value"], &results[6]["value"]), (&json!(5), &json!("old")));

    let results = store
        .batch(json!([
            {"op": "getMany", "ns": "ns", "keys": ["late", "late"]},
            get("late"),
            put("late", json!(3), json!({})),
            get("late"),
        ]))
        .await;
    assert_eq!(of_rows(&results[0], "value"), [json!(3), json!(3)], "getMany sees every write of its batch");
    assert_eq!((&results[1]["found"], &results[3]["found"]), (&json!(false), &json!(true)));
}

/// Vectors 12 and 17, and the limits of a call.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_with_one_bad_operation_stores_nothing() {
    let store = Store::open().await;
    let good = put("a", json!(1), json!({}));
    let many_keys: Vec<String> = (0..1025).map(|n| n.to_string()).collect();
    let many_ops: Vec<Value> = (0..257).map(|n| put(&n.to_string(), json!(n), json!({}))).collect();
    let page = json!({"op": "getPrefix", "ns": "ns", "prefix": "a", "limit": 5000});
    let cases = [
        (json!([good, op("put", "b", json!({"value": 1}))]), "kv_expiry_not_specified"),
        (json!([put("k", json!(1), json!({})), op("delete", "k", json!({}))]), "kv_duplicate_key_in_call"),
        (
            json!([claim("k", json!(1)), op("incr", "k", json!({"delta": 1, "forever": true}))]),
            "kv_duplicate_key_in_call",
        ),
        (json!(many_ops), "kv_too_many_ops"),
        (json!([good, {"op": "getMany", "ns": "ns", "keys": many_keys}]), "kv_too_many_keys"),
        (json!([page, page, good]), "kv_too_many_keys"),
    ];
    for (operations, reason) in cases {
        let answer = store.post(&operations.to_string()).await;
        assert_eq!(
            (answer.status, answer.json()["reason"].clone()),
            (400, json!(reason)),
            "{}",
            text(&answer)
        );
        assert_eq!(answer.json()["error"], "kv_bad_request");
    }
    assert_eq!(store.rows().await, 0);
    let reads = store.batch(json!([get("k"), get("k"), put("k", json!(1), json!({}))])).await;
    assert_eq!(reads.len(), 3, "reading a key twice is no duplicate");
    assert_eq!(store.post("[]").await.json(), json!({"results": []}));
    assert_eq!(store.post(r#"{"operations":[],"more":1}"#).await.json(), json!({"results": []}));
}

/// Vectors 11 and 32, and the inputs of section 3.11 that Q3 makes refusals.
#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_operation_is_told_its_reason_and_no_name_comes_back() {
    // `@` stands for the names.
    let cases: &[(&str, &str)] = &[
        (r#"{"op":"put",@,"value":1}"#, "kv_expiry_not_specified"),
        (r#"{"op":"put",@,"value":1,"forever":true,"ttlSeconds":5}"#, "kv_expiry_not_specified"),
        (r#"{"op":"put",@,"value":1,"forever":false}"#, "kv_expiry_not_specified"),
        (r#"{"op":"put",@,"value":1,"forever":"true"}"#, "kv_expiry_not_specified"),
        (r#"{"op":"putIfAbsent",@,"value":1,"forever":null}"#, "kv_expiry_not_specified"),
        (r#"{"op":"incr",@,"delta":1}"#, "kv_expiry_not_specified"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":0}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":-1}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":1.5}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":"60"}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":null}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"ttlSeconds":99999999999999999999}"#, "kv_bad_ttl"),
        (r#"{"op":"put",@,"value":1,"forever":true,"expect":null}"#, "kv_bad_expect"),
        (r#"{"op":"put",@,"value":1,"forever":true,"expect":-1}"#, "kv_bad_expect"),
        (r#"{"op":"put",@,"value":1,"forever":true,"expect":1.5}"#, "kv_bad_expect"),
        (r#"{"op":"put",@,"value":1,"forever":true,"expect":"1"}"#, "kv_bad_expect"),
        (r#"{"op":"put",@,"value":1,"forever":true,"expect":9223372036854775808}"#, "kv_bad_expect"),
        (r#"{"op":"putIfAbsent",@,"value":1,"forever":true,"expect":1}"#, "kv_bad_expect"),
        (r#"{"op":"delete",@,"expect":null}"#, "kv_bad_expect"),
        (r#"{"op":"incr",@,"delta":1,"forever":true,"expect":0}"#, "kv_bad_request"),
        (r#"{"op":"incr",@,"forever":true}"#, "kv_bad_request"),
        (r#"{"op":"incr",@,"forever":true,"delta":"1"}"#, "kv_bad_request"),
        (r#"{"op":"incr",@,"forever":true,"delta":1,"min":null}"#, "kv_bad_request"),
        (r#"{"op":"incr",@,"forever":true,"delta":1,"max":"9"}"#, "kv_bad_request"),
        (r#"{"op":"put",@,"forever":true}"#, "kv_bad_request"),
        (r#"{"op":"put",@,"value":1,"forever":true,"required":1}"#, "kv_bad_request"),
        (r#"{"op":"put",@,"value":1,"forever":true,"required":null}"#, "kv_bad_request"),
        (r#"{"op":"put",@,"value":1,"forever":true,"tenant":"x"}"#, "kv_tenant_not_an_input"),
        (r#"{"op":"get",@,"tenantId":null}"#, "kv_tenant_not_an_input"),
        (r#"{"op":"delete",@,"_tenant":1}"#, "kv_tenant_not_an_input"),
        (r#"{"op":"nope",@}"#, "kv_unknown_op"),
        (r#"{"op":7,@}"#, "kv_unknown_op"),
        (r"{@}", "kv_unknown_op"),
        ("7", "kv_bad_request"),
        (r#"{"op":"getMany",@}"#, "kv_bad_request"),
        (r#"{"op":"getMany",@,"keys":{}}"#, "kv_bad_request"),
        (r#"{"op":"getMany",@,"keys":["secret",null]}"#, "kv_bad_key"),
        (r#"{"op":"getMany",@,"keys":[7]}"#, "kv_bad_key"),
        (r#"{"op":"getMany","keys":[]}"#, "kv_bad_namespace"),
        (r#"{"op":"getPrefix",@}"#, "kv_prefix_required"),
        (r#"{"op":"getPrefix",@,"prefix":""}"#, "kv_prefix_required"),
        (r#"{"op":"getPrefix",@,"prefix":"secret","limit":5.5}"#, "kv_bad_request"),
        (r#"{"op":"getPrefix",@,"prefix":"secret","limit":true}"#, "kv_bad_request"),
        (r#"{"op":"getPrefix",@,"prefix":"secret","limit":9999999999}"#, "kv_bad_request"),
        (r#"{"op":"getPrefix",@,"prefix":"secret","keysOnly":"yes"}"#, "kv_bad_request"),
        (r#"{"op":"get","ns":"secret-ns"}"#, "kv_bad_key"),
        (r#"{"op":"get","ns":"secret-ns","key":""}"#, "kv_bad_key"),
        (r#"{"op":"get","ns":"secret-ns","key":7}"#, "kv_bad_key"),
        (r#"{"op":"get","key":"secret-key"}"#, "kv_bad_namespace"),
        (r#"{"op":"get","ns":"","key":"secret-key"}"#, "kv_bad_namespace"),
        (r#"{"op":"get","ns":"Upper","key":"secret-key"}"#, "kv_bad_namespace"),
        (r#"{"op":"get","ns":7,"key":"secret-key"}"#, "kv_bad_namespace"),
        (r#"{"op":"put",@,"value":"a\u0000b","forever":true}"#, "kv_bad_body"),
        (r#"{"op":"put",@,"value":"\ud800","forever":true}"#, "kv_bad_body"),
        (r#"{"op":"put",@,"value":1e-20000,"forever":true}"#, "kv_bad_body"),
    ];
    let store = Store::open().await;
    for (operation, reason) in cases {
        let operation = operation.replace('@', r#""ns":"secret-ns","key":"secret-key""#);
        let answer = store.post(&format!("[{operation}]")).await;
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["error"], &body["reason"]),
            (400, &json!("kv_bad_request"), &json!(reason)),
            "{operation}"
        );
        assert!(!text(&answer).contains("secret"), "{operation}: {}", text(&answer));
    }
    for body in ["7", "null", "", "[", "{}", r#"{"operations":null}"#, r#"{"operations":{}}"#, "[] []"] {
        let answer = store.post(body).await;
        assert_eq!((answer.status, answer.json()["reason"].clone()), (400, json!("kv_bad_body")), "{body}");
    }
    assert_eq!(store.rows().await, 0);
}

/// A kilobyte of exponents is megabytes of digits, and a member that nobody reads is parsed all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_text_that_would_grow_in_the_database_is_stopped_before_it() {
    let store = Store::open().await;
    let bomb = vec!["1e131071"; 7_000].join(",");
    let started = std::time::Instant::now();
    let put = format!(r#"[{{"op":"put","ns":"ns","key":"k","forever":true,"value":[{bomb}]}}]"#);
    let answer = store.post(&put).await;
    assert_eq!((answer.status, answer.json()["reason"].clone()), (413, json!("kv_value_too_large")));
    for field in ["delta", "min", "max"] {
        let (delta, extra) = if field == "delta" {
            ("1e131071".to_owned(), String::new())
        } else {
            ("1".to_owned(), format!(r#","{field}":1e131071"#))
        };
        let incr = format!(r#"[{{"op":"incr","ns":"ns","key":"k","forever":true,"delta":{delta}{extra}}}]"#);
        let answer = store.post(&incr).await;
        assert_eq!(
            (answer.status, answer.json()["reason"].clone()),
            (400, json!("kv_bad_request")),
            "{field}"
        );
    }
    let junk = format!(r#"[{{"op":"get","ns":"ns","key":"k","junk":[{}]}}]"#, vec!["1"; 1_000_000].join(","));
    assert_eq!(store.post(&junk).await.status, 200);
    assert!(started.elapsed() < std::time::Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(store.rows().await, 0);
}

/// An overload in another schema matches an unqualified call better than the built-in: it must not be found.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_elses_function_is_called_by_ours() {
    let store = Store::open().await;
    let overload =
        "CREATE FUNCTION public.format(text, integer) RETURNS text LANGUAGE sql AS $$ SELECT 'HIJACKED' $$;
         CREATE FUNCTION public.format(text, text) RETURNS text LANGUAGE sql AS $$ SELECT 'HIJACKED' $$;";
    let mut database = store.world.cell_database().await;
    sqlx::raw_sql(overload).execute(&mut database).await.unwrap();
    let answer = store.post(r#"[{"op":"nope"}]"#).await;
    assert_eq!(answer.json()["reason"], "kv_unknown_op");
    assert!(!text(&answer).contains("HIJACKED"), "{}", text(&answer));
    // Also for somebody who calls the function with a path of their own.
    let refused =
        sqlx::query("SELECT queen.kv_apply_v1('[{\"op\":\"nope\"}]', gen_random_uuid(), NULL, false)")
            .execute(&mut database)
            .await
            .unwrap_err();
    assert!(!format!("{refused:?}").contains("HIJACKED"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_numbers_in_any_notation_and_members_unknown_to_the_store_are_taken() {
    let store = Store::open().await;
    for (operation, applied) in [
        (r#"{"op":"put","ns":"ns","key":"a","value":1,"ttlSeconds":60.0}"#, true),
        (r#"{"op":"put","ns":"ns","key":"b","value":1,"ttlSeconds":6e1,"forever":false}"#, true),
        (r#"{"op":"put","ns":"ns","key":"c","value":1,"forever":true,"expect":0.0}"#, true),
        (r#"{"op":"putIfAbsent","ns":"ns","key":"d","value":1,"forever":true,"expect":0}"#, true),
        (r#"{"op":"put","ns":"ns","key":"a","value":1,"forever":true,"expect":9223372036854775807}"#, false),
        (r#"{"op":"put","ns":"ns","key":"e","value":1,"forever":true,"color":"blue","expiresAt":1}"#, true),
        (r#"{"op":"incr","ns":"ns","key":"f","delta":0,"min":9,"forever":true}"#, false),
    ] {
        let answer = store.post(&format!("[{operation}]")).await;
        assert_eq!(results(&answer)[0]["applied"], applied, "{operation}");
    }
    let expiring: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM queen.kv WHERE expires_at BETWEEN updated_at + interval '60 s' AND updated_at + interval '60 s'",
    )
    .fetch_one(&mut store.world.cell_database().await)
    .await
    .unwrap();
    assert_eq!(expiring, 2);
}

/// Vectors 19 and 21, and every form a key can take in a path.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_in_the_path_is_the_key_in_a_batch() {
    let store = Store::open().await;
    let cases = [
        ("order/9f1/items", "order/9f1/items"),
        ("a/b", "a/b"),
        ("a%2Fb", "a/b"),
        ("a%2fb", "a/b"),
        ("a//b", "a//b"),
        ("/a", "/a"),
        ("a/", "a/"),
        ("x+y", "x+y"),
        ("x%2By", "x+y"),
        ("x%20y", "x y"),
        ("a%252Fb", "a%2Fb"),
        ("100%25", "100%"),
        ("caf%C3%A9", "café"),
        ("%F0%9F%91%91", "👑"),
        ("a%5Cb", "a\\b"),
        ("a%22b%0Ac", "a\"b\nc"),
        ("a%3Fb%23c", "a?b#c"),
        ("a;b:c@d!$&'()*,=~", "a;b:c@d!$&'()*,=~"),
        ("...", "..."),
        ("a..b/.c", "a..b/.c"),
    ];
    let mut names = BTreeSet::new();
    for (at, (path, name)) in cases.into_iter().enumerate() {
        let line = format!("/api/v1/kv/ns/{path}");
        let stored = store.ask(&format!("PUT {line}"), &format!(r#"{{"value":{at},"forever":true}}"#)).await;
        assert_eq!(
            (stored.status, stored.json()["key"].clone()),
            (200, json!(name)),
            "{path}: {}",
            text(&stored)
        );
        let found = store.one(get(name)).await;
        assert_eq!((&found["value"], &found["version"]), (&json!(at), &stored.json()["version"]), "{path}");
        let by_path = store.ask(&format!("GET {line}"), "").await;
        assert_eq!(
            (by_path.json()["key"].clone(), by_path.json()["value"].clone()),
            (json!(name), json!(at)),
            "{path}"
        );
        assert_eq!(by_path.header("etag").unwrap(), format!("\"{}\"", found["version"]), "{path}");
        names.insert(name);
    }
    assert_eq!(store.rows().await, i64::try_from(names.len()).unwrap());
    for path in ["a/../b", "a/%2e%2E/b", ".", "..", "a/.", "..%2Fb"] {
        let refused = store.ask(&format!("GET /api/v1/kv/ns/{path}"), "").await;
        assert_eq!((refused.status, refused.code().as_str()), (404, "route_blocked"), "{path}");
    }
    let miss = store.ask("GET /api/v1/kv/ns/nothing", "").await;
    assert_eq!((miss.status, miss.header("etag")), (200, None));
    assert_eq!(miss.json(), json!({"index": 0, "op": "get", "found": false, "key": "nothing"}));

    for (applied, reason) in [(true, Value::Null), (false, json!("absent"))] {
        let gone = store.ask("DELETE /api/v1/kv/ns/a/b", "").await;
        assert_eq!(
            (gone.status, gone.json()["applied"].clone(), gone.json()["reason"].clone()),
            (200, json!(applied), reason)
        );
        assert_eq!(gone.header("etag"), None);
    }
    for body in ["null", "{}", " "] {
        store.one(put("a/b", json!(1), json!({}))).await;
        let gone = store.ask("DELETE /api/v1/kv/ns/a%2Fb", body).await;
        assert_eq!((gone.status, gone.json()["applied"].clone()), (200, json!(true)), "{body}");
    }
}

/// Vector 20 and the other refusals of the path routes.
#[tokio::test(flavor = "multi_thread")]
async fn a_path_route_takes_no_query_and_no_name_from_its_body() {
    let store = Store::open().await;
    let forever = r#"{"value":1,"forever":true}"#;
    for (line, body, reason) in [
        ("GET /api/v1/kv/ns/k?prefix=x", "", "kv_no_query_string"),
        ("GET /api/v1/kv/UPPER/k?", "", "kv_bad_namespace"),
        ("PUT /api/v1/kv/ns/k?ttlSeconds=5", forever, "kv_no_query_string"),
        ("DELETE /api/v1/kv/ns/k?expect=1", "", "kv_no_query_string"),
        ("PUT /api/v1/kv/ns/k", r#"{"key":"other","value":1,"forever":true}"#, "kv_field_in_path"),
        ("PUT /api/v1/kv/ns/k", r#"{"ns":"ns","value":1,"forever":true}"#, "kv_field_in_path"),
        ("PUT /api/v1/kv/ns/k", r#"{"namespace":null,"value":1,"forever":true}"#, "kv_field_in_path"),
        ("PUT /api/v1/kv/ns/k", r#"{"op":"put","value":1,"forever":true}"#, "kv_field_in_path"),
        ("DELETE /api/v1/kv/ns/k", r#"{"key":"k"}"#, "kv_field_in_path"),
        ("PUT /api/v1/kv/ns/k", r#"{"value":1}"#, "kv_expiry_not_specified"),
        ("PUT /api/v1/kv/ns/k", r#"{"value":1,"forever":true,"expect":null}"#, "kv_bad_expect"),
        ("PUT /api/v1/kv/ns/k", r#"{"forever":true}"#, "kv_bad_request"),
        ("PUT /api/v1/kv/ns/k", "[]", "kv_bad_body"),
        ("PUT /api/v1/kv/ns/k", "", "kv_bad_body"),
        ("DELETE /api/v1/kv/ns/k", "[]", "kv_bad_body"),
        ("GET /api/v1/kv/UPPER/k", "", "kv_bad_namespace"),
        ("GET /api/v1/kv/ns/a%00b", "", "kv_bad_key"),
        ("GET /api/v1/kv/ns/%FF", "", "kv_bad_key"),
    ] {
        let answer = store.ask(line, body).await;
        let envelope = answer.json();
        assert_eq!(
            (answer.status, &envelope["error"], &envelope["reason"]),
            (400, &json!("kv_bad_request"), &json!(reason)),
            "{line} {body}"
        );
    }
    assert_eq!(store.rows().await, 0);
    let stored =
        store.ask("PUT /api/v1/kv/ns/k?", r#"{"value":1,"forever":true,"tenant":"x","color":1}"#).await;
    assert_eq!(
        (stored.status, stored.json()["applied"].clone()),
        (200, json!(true)),
        "a bare ? and unknown members pass"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_come_back_digit_for_digit() {
    let store = Store::open().await;
    let huge = format!("1{}", "0".repeat(400));
    let deep = format!("0.{}", "0123456789".repeat(12));
    let cases = [
        ("12345678901234567890.123456789", "12345678901234567890.123456789"),
        (&huge, &huge),
        ("1e400", &huge),
        (&deep, &deep),
        ("-0.0", "0.0"), // jsonb knows no negative zero
        ("1.50", "1.50"),
        ("9007199254740993", "9007199254740993"),
        ("-18446744073709551617", "-18446744073709551617"),
        ("1E-20", "0.00000000000000000001"),
    ];
    for (at, (sent, kept)) in cases.into_iter().enumerate() {
        let given = format!(r#"{{"n": {sent}, "list": [{sent}]}}"#);
        let wanted = format!(r#""value":{{"n":{kept},"list":[{kept}]}}"#);
        let line = format!("/api/v1/kv/ns/path{at}");
        let stored =
            store.ask(&format!("PUT {line}"), &format!(r#"{{"value":{given},"forever":true}}"#)).await;
        let read = store.ask(&format!("GET {line}"), "").await;
        let batched = store
            .post(&format!(r#"[{{"op":"put","ns":"ns","key":"batch{at}","value":{given},"forever":true}}]"#))
            .await;
        let many = store.post(&format!(r#"[{{"op":"getMany","ns":"ns","keys":["batch{at}"]}}]"#)).await;
        for answer in [stored, read, batched, many] {
            assert!(text(&answer).contains(&wanted), "{sent}: {}", text(&answer));
        }
    }
    for (key, deltas, sum) in [
        ("tenths", ["0.1", "0.2"], "0.3"),
        ("halves", ["1.50", "1.50"], "3"),
        ("large", ["9007199254740993", "1"], "9007199254740994"),
        ("wide", ["12345678901234567890.123456789", "-0.000000001"], "12345678901234567890.123456788"),
        ("zero", ["0.5", "-0.5"], "0"),
    ] {
        let mut last = String::new();
        for delta in deltas {
            let body = format!(r#"[{{"op":"incr","ns":"ns","key":"{key}","delta":{delta},"forever":true}}]"#);
            last = text(&store.post(&body).await);
        }
        let read = text(&store.ask(&format!("GET /api/v1/kv/ns/{key}"), "").await);
        for body in [last, read] {
            assert!(
                body.contains(&format!(r#""value":{sum},"#)) || body.contains(&format!(r#""value":{sum}}}"#)),
                "{key}: {body}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_member_written_twice_the_last_one_counts() {
    let store = Store::open().await;
    let path = store
        .ask("PUT /api/v1/kv/ns/k", r#"{"value":1,"ttlSeconds":5,"value":{"a":1,"a":2},"ttlSeconds":600}"#)
        .await;
    assert_eq!((path.status, path.json()["value"].clone()), (200, json!({"a": 2})));
    let refused = store.ask("PUT /api/v1/kv/ns/k", r#"{"value":1,"forever":true,"forever":false}"#).await;
    assert_eq!((refused.status, refused.json()["reason"].clone()), (400, json!("kv_expiry_not_specified")));
    for (body, wanted) in [
        (r#"[{"op":"put","op":"get","ns":"ns","key":"x","key":"k"}]"#, ("get", json!({"a": 2}))),
        (
            r#"[{"op":"get","\u006fp":"put","ns":"ns","key":"k","value":1,"val\u0075e":2,"forever":true}]"#,
            ("put", json!(2)),
        ),
        (r#"{"operations":7,"operations":[{"op":"get","ns":"ns","key":"k"}]}"#, ("get", json!(2))),
    ] {
        let found = results(&store.post(body).await).remove(0);
        assert_eq!(
            (&found["op"], &found["key"], &found["value"]),
            (&json!(wanted.0), &json!("k"), &wanted.1),
            "{body}"
        );
    }
    assert_eq!(store.rows().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_operation_that_loses_undoes_its_call_and_answers_200() {
    let store = Store::open().await;
    let required = json!({"required": true});
    let winner = store.one(put("taken", json!({"by": "first"}), json!({}))).await["version"].clone();
    let mut lost = claim("taken", json!(2));
    merge(&mut lost, required.clone());
    let verdict = json!({"ok": false, "reason": "kv_precondition", "failedIndex": 1, "kvReason": "exists",
                         "version": winner, "value": {"by": "first"}});
    let answer = store.post(&json!([put("beside", json!(1), json!({})), lost]).to_string()).await;
    assert_eq!((answer.status, answer.json()), (200, verdict.clone()));
    assert_eq!(store.row("beside").await, None);

    for (line, body, reason) in [
        ("PUT /api/v1/kv/ns/taken", r#"{"value":1,"forever":true,"expect":0,"required":true}"#, "exists"),
        ("PUT /api/v1/kv/ns/taken", r#"{"value":1,"forever":true,"expect":9,"required":true}"#, "version"),
        ("DELETE /api/v1/kv/ns/taken", r#"{"expect":9,"required":true}"#, "version"),
    ] {
        let answer = store.ask(line, body).await;
        let mut verdict = verdict.clone();
        merge(&mut verdict, json!({"failedIndex": 0, "kvReason": reason}));
        assert_eq!((answer.status, answer.json()), (200, verdict), "{line} {body}");
    }
    let absent = store.ask("DELETE /api/v1/kv/ns/nothing", r#"{"required":true}"#).await;
    assert_eq!(
        absent.json(),
        json!({"ok": false, "reason": "kv_precondition", "failedIndex": 0, "kvReason": "absent",
                                     "version": 0, "value": null})
    );

    // The first in the order of application is the one reported, not the first of the array.
    let two = json!([
        op("incr", "z", json!({"delta": 9, "max": 1, "forever": true, "required": true})),
        op("delete", "a", required.clone()),
    ]);
    let answer = store.post(&two.to_string()).await.json();
    assert_eq!((&answer["failedIndex"], &answer["kvReason"]), (&json!(1), &json!("absent")));

    // A value that does not fit the verdict is left out; what a client switches on stays (Q6).
    let big = store.one(put("big", json!("v".repeat(60_000)), json!({}))).await;
    let mut lost = claim("big", json!(1));
    merge(&mut lost, required);
    let answer = store.post(&json!([lost]).to_string()).await;
    assert!(answer.body.len() < 8192, "{} bytes", answer.body.len());
    let answer = answer.json();
    assert_eq!(
        (&answer["ok"], &answer["kvReason"], &answer["version"]),
        (&json!(false), &json!("exists"), &big["version"])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_is_refused_with_413_at_the_first_byte_over() {
    let store = Store::open().await;
    let string = |bytes: usize| format!("\"{}\"", "v".repeat(bytes - 2));
    // As stored text: a space after each comma.
    let list = |items: usize| format!("[{}]", vec!["1"; items].join(","));
    let wide = "é".repeat(256);
    let refused = Some("kv_value_too_large");
    for (value, key, reason) in [
        (string(65_536), "k", None),
        (string(65_537), "k", refused),
        (list(21_845), "k", None), // 65 535 bytes as stored
        (list(21_846), "k", refused),
        ("1".to_owned(), &wide, None),
        ("1".to_owned(), &format!("{wide}x"), Some("kv_key_too_large")),
    ] {
        let path = percent_encoding::utf8_percent_encode(key, percent_encoding::NON_ALPHANUMERIC);
        let by_path = store
            .ask(&format!("PUT /api/v1/kv/ns/{path}"), &format!(r#"{{"value":{value},"forever":true}}"#))
            .await;
        let batch = format!(r#"[{{"op":"put","ns":"ns","key":"{key}","value":{value},"forever":true}}]"#);
        for answer in [by_path, store.post(&batch).await] {
            let body = answer.json();
            match reason {
                None => assert_eq!(answer.status, 200, "{}", text(&answer)),
                Some(reason) => assert_eq!(
                    (answer.status, &body["error"], &body["reason"]),
                    (413, &json!("payload_too_large"), &json!(reason)),
                    "{} bytes under a key of {}",
                    value.len(),
                    key.len()
                ),
            }
        }
    }
    assert_eq!(store.rows().await, 2);
}

/// Vector 27.
#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_with_the_same_names_never_meet() {
    let world = World::new().await;
    let tenants = [unlimited(&world, "acme").await, unlimited(&world, "globex").await];
    let read = json!([
        get("k"),
        {"op": "getMany", "ns": "ns", "keys": ["k", "n"]},
        {"op": "getPrefix", "ns": "ns", "prefix": "k"},
    ])
    .to_string();
    for (at, own) in tenants.iter().enumerate() {
        let write =
            json!([claim("k", json!(own.slug)), op("incr", "n", json!({"delta": at + 1, "forever": true})),]);
        let written = results(&world.ask("POST /api/v1/kv", &own.headers(), &write.to_string()).await);
        assert_eq!(
            (&written[0]["applied"], &written[1]["value"]),
            (&json!(true), &json!(at + 1)),
            "{}",
            own.slug
        );
    }
    let uuids = [uuid_in_cell(&world, &tenants[0]).await, uuid_in_cell(&world, &tenants[1]).await];
    for (at, own) in tenants.iter().enumerate() {
        let (other, foreign) = (&tenants[1 - at], uuids[1 - at]);
        for forged in [
            String::new(),
            format!("x-queen-tenant: {foreign}\r\n"),
            format!("X-Queen-Tenant: {foreign}\r\nx-queen-tenant: {}\r\n", other.tenant),
            format!("x_queen_tenant: {foreign}\r\n"),
            format!("Connection: x-queen-tenant, authorization\r\nx-queen-tenant: {foreign}\r\n"),
            format!("x-queen-cluster: {}\r\n", other.slug),
            format!("X-Forwarded-Host: {0}\r\nForwarded: host={0}\r\n", other.host()),
        ] {
            let headers = format!("{}{forged}", own.headers());
            let found = results(&world.ask("POST /api/v1/kv", &headers, &read).await);
            assert_eq!(found[0]["value"], json!(own.slug), "{headers}");
            assert_eq!(of_rows(&found[1], "value"), [json!(own.slug), json!(at + 1)], "{headers}");
            assert_eq!(of_rows(&found[2], "value"), [json!(own.slug)], "{headers}");
            let by_path = world.ask("GET /api/v1/kv/ns/k", &headers, "").await;
            assert_eq!(by_path.json()["value"], json!(own.slug), "{headers}");
            let written = world
                .ask(&format!("PUT /api/v1/kv/ns/mine-{at}"), &headers, r#"{"value":1,"forever":true}"#)
                .await;
            assert_eq!(written.status, 200, "{headers}");
        }
    }
    let stored: Vec<(Uuid, String)> =
        sqlx::query_as("SELECT tenant_id, key FROM queen.kv ORDER BY tenant_id, key")
            .fetch_all(&mut world.cell_database().await)
            .await
            .unwrap();
    let mut expected: Vec<(Uuid, String)> = (0..2)
        .flat_map(|at| ["k".to_owned(), "n".to_owned(), format!("mine-{at}")].map(|key| (uuids[at], key)))
        .collect();
    expected.sort();
    assert_eq!(stored, expected);

    let gone = world.ask("DELETE /api/v1/kv/ns/k", &tenants[0].headers(), "").await;
    assert_eq!(gone.json()["value"], json!(tenants[0].slug));
    let kept = world.ask("GET /api/v1/kv/ns/k", &tenants[1].headers(), "").await;
    assert_eq!(kept.json()["value"], json!(tenants[1].slug));
}

/// Vector 30 and section 7.1: the cell refuses a malformed tenant everywhere, the proxy replaces it.
#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_tenant_header_is_refused_by_the_cell_and_replaced_by_the_proxy() {
    let store = Store::open().await;
    let bearer = format!("Authorization: Bearer {}\r\n", store.world.cell_secret);
    let direct = async |line: &str, headers: &str, body: &str| {
        let length = body.len();
        let request = format!(
            "{line} HTTP/1.1\r\nHost: cell\r\n{bearer}{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        Socket::open(store.world.cell_port).await.ask(request).await
    };
    let forever = r#"{"value":1,"forever":true}"#;
    let routes = [
        ("POST /api/v1/kv", "[]"),
        ("POST /api/v1/kv", r#"[{"op":"get","ns":"ns","key":"k"}]"#),
        ("GET /api/v1/kv/ns/k", ""),
        ("PUT /api/v1/kv/ns/k", forever),
        ("DELETE /api/v1/kv/ns/k", ""),
        ("GET /api/v1/resources/kv/namespaces", ""),
        ("POST /api/v1/resources/kv/list", r#"{"namespace":"ns"}"#),
    ];
    let uuid = uuid_in_cell(&store.world, &store.tenant).await;
    let malformed = ["nope", "é", &uuid.to_string()[1..], &uuid.simple().to_string(), &format!("{{{uuid}}}")]
        .map(str::to_owned);
    for (line, body) in routes {
        for tenant in &malformed {
            let refused = direct(line, &format!("x-queen-tenant: {tenant}\r\n"), body).await;
            assert_eq!(refused.status, 400, "{line} for {tenant}");
            assert_eq!(
                text(&refused),
                r#"{"error":"invalid x-queen-tenant header (must be a UUID)"}"#,
                "{line} for {tenant}"
            );
        }
    }
    assert_eq!(store.rows().await, 0);
    for tenant in &malformed {
        let headers = format!("{}x-queen-tenant: {tenant}\r\n", store.tenant.headers());
        let stored = store.world.ask("PUT /api/v1/kv/ns/k", &headers, forever).await;
        assert_eq!(stored.status, 200, "{tenant}: {}", text(&stored));
    }
    assert_eq!(store.rows().await, 1);
    assert_eq!(store.one(get("k")).await["found"], true);

    // What the header may be: any case, and missing or blank for the default tenant.
    let shouted = format!("x-queen-tenant:  {} \r\n", uuid.to_string().to_uppercase());
    assert_eq!(direct("GET /api/v1/kv/ns/k", &shouted, "").await.json()["found"], true);
    for headers in [
        "",
        "x-queen-tenant:\r\n",
        "x-queen-tenant:  \r\n",
        "x-queen-tenant: 00000000-0000-0000-0000-000000000001\r\n",
    ] {
        let found = direct("GET /api/v1/kv/ns/default", headers, "").await.json();
        assert_eq!(found["found"], !headers.is_empty(), "{headers}");
        assert_eq!(direct("PUT /api/v1/kv/ns/default", headers, forever).await.status, 200, "{headers}");
    }
    assert_eq!(store.rows().await, 2);
}
