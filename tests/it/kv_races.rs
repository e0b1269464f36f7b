//! What a loser is told under a race, and that overlapping calls queue up instead of deadlocking: KV contract
//! sections 3.5 and 3.10, Q2, vector 18.

use crate::kv_vectors::{Store, claim, op, put, results, text, uuid_in_cell, verdict};
use crate::support::{Answer, Socket, World, eventually, rounds};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The first to touch the key: its transaction is open when ours starts to wait for it.
async fn apply(database: &mut PgConnection, tenant: Uuid, operations: &Value) -> Value {
    sqlx::query_scalar("SELECT queen.kv_apply_v1($1, $2, NULL, false)")
        .bind(operations)
        .bind(tenant)
        .fetch_one(database)
        .await
        .unwrap()
}

async fn wait_until_blocked(database: &mut PgConnection) {
    const BLOCKED: &str = "SELECT count(*) FROM pg_stat_activity
                            WHERE application_name = 'queen-cell' AND wait_event_type = 'Lock'
                              AND datname = current_database()";
    eventually("the call waits for the row", Duration::from_secs(10), async || {
        let blocked: i64 = sqlx::query_scalar(BLOCKED).fetch_one(&mut *database).await.unwrap();
        (blocked > 0).then_some(())
    })
    .await;
}

/// What is there before.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    Live(i32),
    Expired,
}

/// What our call must come to.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// It applies and answers this value.
    Applies(i32),
    /// It loses with this reason and value to the version of the first.
    Loses(&'static str, Option<i32>),
    /// It finds nothing.
    Absent,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_waited_for_another_is_told_what_that_one_left() {
    use Before::{Expired, Live, Nothing};
    use Outcome::{Absent, Applies, Loses};
    let store = Store::open().await;
    let tenant = uuid_in_cell(&store.world, &store.tenant).await;
    let (mut first, mut watcher) = (store.world.cell_database().await, store.world.cell_database().await);
    let incr = |more: Value| {
        op("incr", "k", {
            let mut members = json!({"delta": 1, "forever": true});
            crate::kv_vectors::merge(&mut members, more);
            members
        })
    };
    let (one, nine) = (|| claim("k", json!(1)), || put("k", json!(9), json!({})));
    let remove = || op("delete", "k", json!({}));
    // `SEEN` stands for the version that was there before.
    let seen = |operation: &str| match operation {
        "put" => put("k", json!(2), json!({"expect": "SEEN"})),
        _ => op("delete", "k", json!({"expect": "SEEN"})),
    };
    // before, calls of the first, whether it commits, our operation, the outcome
    let cases = [
        (Nothing, vec![one()], true, claim("k", json!(2)), Loses("exists", Some(1))),
        (Nothing, vec![nine()], true, put("k", json!(2), json!({"expect": 0})), Loses("exists", Some(9))),
        (Nothing, vec![one()], false, claim("k", json!(2)), Applies(2)),
        (Nothing, vec![incr(json!({"delta": 5}))], true, incr(json!({"max": 5})), Loses("limit", Some(5))),
        (Nothing, vec![incr(json!({"delta": 5}))], false, incr(json!({"max": 5})), Applies(1)),
        (Nothing, vec![put("k", json!({"a": 1}), json!({}))], true, incr(json!({})), Loses("type", Some(0))),
        (Nothing, vec![one(), remove()], true, claim("k", json!(2)), Applies(2)),
        (Live(4), vec![nine()], true, seen("put"), Loses("version", Some(9))),
        (Live(4), vec![nine()], true, seen("delete"), Loses("version", Some(9))),
        (Live(4), vec![nine()], false, seen("put"), Applies(2)),
        (Live(4), vec![nine()], true, remove(), Applies(9)),
        (Live(4), vec![incr(json!({}))], true, incr(json!({"max": 5})), Loses("limit", Some(5))),
        (Live(4), vec![remove()], true, seen("put"), Absent),
        (Live(4), vec![remove()], true, seen("delete"), Absent),
        (Live(4), vec![remove()], true, remove(), Absent),
        (Live(4), vec![remove()], true, claim("k", json!(2)), Applies(2)),
        (Live(4), vec![remove()], true, incr(json!({})), Applies(1)),
        (Live(4), vec![remove()], false, claim("k", json!(2)), Loses("exists", Some(4))),
        // The row that the caller waited for is gone, and another one is there in its place.
        (Live(4), vec![remove(), nine()], true, seen("put"), Loses("version", Some(9))),
        (Live(4), vec![remove(), nine()], true, seen("delete"), Loses("version", Some(9))),
        (Live(4), vec![remove(), nine()], true, claim("k", json!(2)), Loses("exists", Some(9))),
        (Live(4), vec![remove(), nine()], true, incr(json!({"max": 5})), Loses("limit", Some(9))),
        (Live(4), vec![remove(), nine()], true, remove(), Applies(9)),
        (Expired, vec![one()], true, claim("k", json!(2)), Loses("exists", Some(1))),
        (Expired, vec![one()], true, seen("put"), Loses("version", Some(1))),
        (Expired, vec![one()], false, claim("k", json!(2)), Applies(2)),
        (Expired, vec![incr(json!({}))], true, incr(json!({"max": 1})), Loses("limit", Some(1))),
        (Expired, vec![remove()], true, remove(), Absent),
        (Expired, vec![remove()], true, claim("k", json!(2)), Applies(2)),
    ];
    for (before, calls, commits, ours, outcome) in cases {
        let what = format!("{before:?}, {}, commits {commits}, then {ours}", json!(calls));
        for required in [false, true] {
            store.one(remove()).await;
            let mut version = json!(90_101);
            if before != Nothing {
                let value = if let Live(value) = before { value } else { 4 };
                version = store.one(put("k", json!(value), json!({}))).await["version"].clone();
                if before == Expired {
                    drop(store.expire("k").await);
                }
            }
            let mut ours = ours.clone();
            if ours["expect"] == "SEEN" {
                ours["expect"] = version.clone();
            }
            ours["required"] = json!(required);

            sqlx::query("BEGIN").execute(&mut first).await.unwrap();
            let mut left = version.clone();
            for call in &calls {
                left = apply(&mut first, tenant, &json!([call])).await[0]["version"].clone();
            }
            let left = if commits { left } else { version };
            let batch = json!([ours]).to_string();
            let (answer, ()) = tokio::join!(store.post(&batch), async {
                wait_until_blocked(&mut watcher).await;
                let end = if commits { "COMMIT" } else { "ROLLBACK" };
                sqlx::query(end).execute(&mut first).await.unwrap();
            });
            check(&answer, required, outcome, &left, &what);
        }
    }
}

fn check(answer: &Answer, required: bool, outcome: Outcome, left: &Value, what: &str) {
    let (reason, value, version) = match outcome {
        Outcome::Applies(value) => {
            let result = results(answer).remove(0);
            assert_eq!(
                (&result["applied"], &result["value"]),
                (&json!(true), &json!(value)),
                "{what}: {result}"
            );
            return;
        }
        Outcome::Loses(reason, value) => (reason, json!(value), left.clone()),
        Outcome::Absent => ("absent", Value::Null, json!(0)),
    };
    if required {
        let expected = json!({"ok": false, "reason": "kv_precondition", "failedIndex": 0, "kvReason": reason,
                              "version": version, "value": value});
        assert_eq!((answer.status, answer.json()), (200, expected), "{what}");
    } else {
        let expected = (false, json!(reason), value, version.as_i64().unwrap());
        assert_eq!(verdict(&results(answer)[0]), expected, "{what}");
    }
}

/// A connection to a cell itself, as the proxy has it.
struct Direct {
    socket: Socket,
    head: String,
}

impl Direct {
    async fn open(world: &World, port: u16, tenant: Uuid) -> Self {
        let head = format!(
            "POST /api/v1/kv HTTP/1.1\r\nHost: cell\r\nAuthorization: Bearer {}\r\nx-queen-tenant: {tenant}\r\n",
            world.cell_secret
        );
        Self { socket: Socket::open(port).await, head }
    }

    async fn ask(&mut self, batch: &Value) -> Answer {
        let body = batch.to_string();
        self.socket.ask(format!("{}Content-Length: {}\r\n\r\n{body}", self.head, body.len())).await
    }
}

/// Deadlocks of this database. The statistics of a session are written when it ends or is idle, so this only
/// confirms the answers.
async fn deadlocks(database: &mut PgConnection) -> i64 {
    sqlx::query_scalar("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        .fetch_one(database)
        .await
        .unwrap()
}

/// The same for calls of one operation, which share commits: 24 clients of two cells, whose groups hold the same rows.
/// Full size: `QUEEN_TEST_ROUNDS=2000 cargo test --test it never_deadlock`.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_share_commits_never_deadlock_and_each_counts_once() {
    const CLIENTS: u32 = 24;
    let rounds = rounds(40);
    let world = World::builder().proxies(0).start().await;
    let (port, _second) = world.another_cell().await;
    let tenant = Uuid::new_v4();
    let shared = ["B", "Z", "_", "a", "b", "z", "É", "é"];
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let port = if client % 2 == 0 { world.cell_port } else { port };
        let mut cell = Direct::open(&world, port, tenant).await;
        clients.spawn(async move {
            for round in 0..rounds {
                let key = shared[((client + round * 7) % 8) as usize];
                let plain = put(&format!("plain-{}", (client * 5 + round) % 8), json!(round), json!({}));
                for call in [op("incr", key, json!({"delta": 1, "forever": true})), plain] {
                    let answer = cell.ask(&json!([call])).await;
                    assert_eq!(answer.status, 200, "{client} {round}: {}", text(&answer));
                    assert_eq!(results(&answer)[0]["applied"], true, "{client} {round}");
                }
            }
        });
    }
    clients.join_all().await;
    let mut database = world.cell_database().await;
    let sum: i64 =
        sqlx::query_scalar("SELECT sum(value::text::bigint)::bigint FROM queen.kv WHERE key = ANY($1)")
            .bind(&shared[..])
            .fetch_one(&mut database)
            .await
            .unwrap();
    assert_eq!(sum, i64::from(CLIENTS * rounds));
    assert_eq!(deadlocks(&mut database).await, 0);
}

/// Vector 18, from two cells on one database. Without one lock order for everybody, PostgreSQL ends one of the
/// two with 40P01, a 503. Full size: `QUEEN_TEST_ROUNDS=10000 cargo test --test it never_deadlock`.
#[tokio::test(flavor = "multi_thread")]
async fn two_writers_of_overlapping_keys_in_opposite_order_never_deadlock() {
    let rounds = rounds(150);
    let world = World::builder().proxies(0).start().await;
    let (port, _second) = world.another_cell().await;
    let tenant = Uuid::new_v4();
    let mut one = Direct::open(&world, world.cell_port, tenant).await;
    let mut two = Direct::open(&world, port, tenant).await;
    let started = Instant::now();
    // The names sort differently by bytes and by the rules of a language.
    let shared = ["B", "Z", "_", "a", "b", "z", "É", "é"];
    let mut losses = [0, 0];
    for round in 0..rounds {
        let mut forth: Vec<Value> =
            shared.iter().map(|key| op("incr", key, json!({"delta": 1, "forever": true}))).collect();
        // Rows that come and go are where an order is easily lost.
        forth.extend(["x", "Y"].map(|part| claim(&format!("new-{round}-{part}"), json!(round))));
        forth.push(op("delete", &format!("new-{}-x", i64::from(round) - 1), json!({})));
        forth.push(op("delete", &format!("new-{}-Y", i64::from(round) - 1), json!({"expect": 0})));
        let mut back: Vec<Value> = forth.iter().rev().cloned().collect();
        forth.push(put("only-forth", json!(round), json!({})));
        back.insert(0, op("put", "a/only-back", json!({"value": round, "ttlSeconds": 1})));
        let (forth, back) = (json!(forth), json!(back));
        let (forth, back) = tokio::join!(one.ask(&forth), two.ask(&back));
        for answer in [&forth, &back] {
            assert_eq!(answer.status, 200, "round {round}: {}", text(answer));
        }
        let (forth, back) = (results(&forth), results(&back));
        // Whoever came first took both new keys, and the other hears of it.
        assert_eq!(forth[8]["applied"], forth[9]["applied"], "round {round}");
        assert_eq!(back[4]["applied"], back[3]["applied"], "round {round}");
        assert_ne!(forth[8]["applied"], back[4]["applied"], "round {round}");
        assert_eq!(forth[8]["version"], back[4]["version"], "round {round}");
        losses[usize::from(forth[8]["applied"] == true)] += 1;
    }
    let mut database = world.cell_database().await;
    for key in shared {
        let value: String = sqlx::query_scalar("SELECT value::text FROM queen.kv WHERE key = $1")
            .bind(key)
            .fetch_one(&mut database)
            .await
            .unwrap();
        assert_eq!(value, (2 * rounds).to_string(), "{key}");
    }
    assert_eq!(deadlocks(&mut database).await, 0);
    println!(
        "{rounds} rounds in {:.1?}, no deadlock; lost by one cell and by the other: {losses:?}",
        started.elapsed()
    );
}
