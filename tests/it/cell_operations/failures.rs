//! A database that is slow, full, read-only, crowded or away, and a cell that is told to stop.

use super::{ACME, GLOBEX, SOON, batch, cell_sql, get, number, put, refusal, refused, sample, scrape};
use crate::support::{Answer, Passage, Socket, World, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use std::time::{Duration, Instant};

/// Sends a request without waiting for its answer.
async fn send(world: &World, line: &str, body: &str) -> Socket {
    let mut socket = Socket::open(world.cell_port).await;
    let head = world.cell_head(line, ACME);
    assert!(socket.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).await);
    socket
}

/// A transaction that holds every row there is.
async fn hold_rows(world: &World) -> PgConnection {
    let mut keeper = world.cell_database().await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM queen.kv FOR UPDATE").execute(&mut keeper).await.unwrap();
    keeper
}

const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
                        WHERE wait_event_type = 'Lock' AND datname = current_database()";

/// A call waits by itself, after its group has given up waiting for the lock.
const WAITING_ALONE: &str = "SELECT count(*) FROM pg_stat_activity
                              WHERE wait_event_type = 'Lock' AND datname = current_database()
                                AND query LIKE '%kv_apply_v1%'";

const PUT: &str = r#"{"value":2,"forever":true}"#;

fn value_of(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200);
    answer.json()["value"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_over_its_time_is_cancelled_in_the_server_and_nothing_of_it_stays() {
    let world = World::builder().proxies(0).cell_env("QUEEN_STMT_TIMEOUT_MS", 300).start().await;
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    let keeper = hold_rows(&world).await;
    let asked = Instant::now();
    let operations = json!([{"op": "put", "ns": "ns", "key": "a", "value": 2, "forever": true},
                            {"op": "put", "ns": "ns", "key": "k", "value": 2, "forever": true}]);
    let answer = batch(&world, ACME, &operations).await;
    assert_eq!(refusal(&answer), refused(503, "kv_unavailable", "kv_timeout"));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert!(asked.elapsed() >= Duration::from_millis(300) && asked.elapsed() < Duration::from_secs(5));
    assert_eq!(number(&world, WAITING).await, 0, "cancelled in the server");
    drop(keeper);
    assert_eq!(value_of(&get(&world, ACME, "k").await), json!(1));
    assert_eq!(get(&world, ACME, "a").await.json()["found"], false);
    assert_eq!(put(&world, ACME, "k").await.status, 200, "the connection is good for more");
}

/// Lets a call get as far as the database, and no word of it come back.
async fn send_and_silence(world: &World, line: &str, body: &str) -> (Socket, PgConnection) {
    let mut keeper = world.cell_database().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE queen.kv").execute(&mut keeper).await.unwrap();
    let socket = send(world, line, body).await;
    eventually("it waits in the database", SOON, async || {
        (number(world, WAITING_ALONE).await == 1).then_some(())
    })
    .await;
    world.cell_relay.as_ref().unwrap().set(Passage::Mute);
    (socket, keeper)
}

/// The answer is lost after the commit. 503 would promise that nothing has happened.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_answer_is_lost_is_never_a_503() {
    let world =
        World::builder().proxies(0).cell_behind_relay().cell_env("QUEEN_SWEEPER", "off").start().await;
    let relay = world.cell_relay.as_ref().unwrap();
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    let incr = r#"[{"op":"incr","ns":"ns","key":"k","delta":1,"forever":true}]"#;
    let claim = r#"[{"op":"putIfAbsent","ns":"ns","key":"c","value":2,"forever":true}]"#;
    for (line, body, key, value, status, retry_after) in [
        ("POST /api/v1/kv", incr, "k", 2, 409, None),
        ("POST /api/v1/kv", claim, "c", 2, 409, None),
        ("DELETE /api/v1/kv/ns/c", "", "c", 0, 409, None),
        ("PUT /api/v1/kv/ns/p", PUT, "p", 2, 504, Some("1")),
    ] {
        let stored =
            format!("SELECT coalesce(sum(value::bigint), 0)::bigint FROM queen.kv WHERE key = '{key}'");
        let (mut socket, mut keeper) = send_and_silence(&world, line, body).await;
        sqlx::raw_sql("COMMIT").execute(&mut keeper).await.unwrap();
        eventually("it is committed", SOON, async || (number(&world, &stored).await == value).then_some(()))
            .await;
        relay.set(Passage::Cut);
        let answer = socket.answer().await.unwrap();
        assert_eq!(refusal(&answer), refused(status, "kv_outcome_unknown", "kv_outcome_unknown"), "{line}");
        assert_eq!(answer.header("retry-after"), retry_after);
        let text = String::from_utf8_lossy(&answer.body).to_ascii_lowercase();
        assert!(!text.contains("timeout") && !text.contains("connection"), "{text}");
        relay.set(Passage::Open);
        eventually("the cell recovers", SOON, async || {
            (get(&world, ACME, key).await.status == 200).then_some(())
        })
        .await;
        assert_eq!(number(&world, &stored).await, value, "nobody repeated it");
    }
    let unknown = sample(&scrape(&world, world.cell_port).await, "queen_kv_outcome_unknown_total");
    assert!((unknown - 4.0).abs() < f64::EPSILON, "{unknown}");

    // A read has no outcome to be unsure of, and what never left has none either.
    let (mut socket, _keeper) = send_and_silence(&world, "GET /api/v1/kv/ns/k", "").await;
    relay.set(Passage::Cut);
    assert_eq!(refusal(&socket.answer().await.unwrap()), refused(503, "kv_unavailable", "connection"));
    assert_eq!(put(&world, ACME, "k").await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_is_given_up_and_the_outcome_is_left_open() {
    let world = World::builder()
        .proxies(0)
        .cell_behind_relay()
        .cell_env("QUEEN_STMT_TIMEOUT_MS", 3000)
        .cell_env("QUEEN_SWEEPER", "off")
        .start()
        .await;
    let asked = Instant::now();
    let incr = r#"[{"op":"incr","ns":"ns","key":"n","delta":1,"forever":true}]"#;
    let (mut socket, keeper) = send_and_silence(&world, "POST /api/v1/kv", incr).await;
    let answer = socket.answer().await.unwrap();
    assert_eq!(refusal(&answer), refused(409, "kv_outcome_unknown", "kv_outcome_unknown"));
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    let asked = Instant::now();
    let answer = get(&world, ACME, "n").await;
    assert_eq!(refusal(&answer), refused(503, "kv_unavailable", "connection"));
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    drop(keeper);
    world.cell_relay.as_ref().unwrap().set(Passage::Open);
    eventually("it is found again", SOON, async || {
        (put(&world, ACME, "n").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_and_start_under_load_leaves_every_batch_whole_and_every_promise_kept() {
    let world = World::builder().proxies(0).own_cell_postgres().start().await;
    let (port, heads) = (world.cell_port, world.cell_head("POST /api/v1/kv", ACME));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (heads, stopped) = (heads.clone(), stopped.clone());
            tokio::spawn(async move {
                let mut seen = Vec::new();
                for round in 0.. {
                    if *stopped.borrow() {
                        break;
                    }
                    let id = format!("{writer}-{round}");
                    let body = json!([
                        {"op": "put", "ns": "left", "key": id, "value": 1, "forever": true},
                        {"op": "putIfAbsent", "ns": "right", "key": id, "value": 1, "forever": true}
                    ])
                    .to_string();
                    let request = format!("{heads}Content-Length: {}\r\n\r\n{body}", body.len());
                    let asked = Instant::now();
                    let answer = Socket::open(port).await.ask(request).await;
                    assert!(asked.elapsed() < Duration::from_secs(14), "{:?}", asked.elapsed());
                    match answer.status {
                        200 | 409 => {}
                        503 => assert_eq!(answer.header("retry-after"), Some("1")),
                        status => panic!("{status}: {}", String::from_utf8_lossy(&answer.body)),
                    }
                    seen.push((id, answer.status));
                }
                seen
            })
        })
        .collect();
    let written = "SELECT count(*) FROM queen.kv";
    eventually("writes", SOON, async || (number(&world, written).await > 100).then_some(())).await;
    let mut before = 0;
    for _ in 0..2 {
        world.server.stop();
        eventually("the outage is seen", SOON, async || {
            (put(&world, GLOBEX, "k").await.status == 503).then_some(())
        })
        .await;
        world.server.start_again();
        let rows = number(&world, written).await;
        assert!(rows > before);
        before = rows;
        eventually("more writes", SOON, async || {
            (number(&world, written).await > before + 100).then_some(())
        })
        .await;
    }
    stop.send_replace(true);
    let mut seen = Vec::new();
    for writer in writers {
        seen.extend(writer.await.unwrap());
    }
    let mut db = world.cell_database().await;
    let halves: Vec<(String, i64)> = sqlx::query_as(
        "SELECT key, count(*) FROM queen.kv WHERE namespace IN ('left', 'right') GROUP BY key",
    )
    .fetch_all(&mut db)
    .await
    .unwrap();
    assert!(halves.iter().all(|(_, count)| *count == 2), "a batch is there in half");
    let stored: std::collections::HashSet<String> = halves.into_iter().map(|(key, _)| key).collect();
    for (id, status) in &seen {
        match status {
            200 => assert!(stored.contains(id), "{id} was accepted and is gone"),
            503 => assert!(!stored.contains(id), "{id} was said not to have happened"),
            _ => {}
        }
    }
    assert!(seen.iter().any(|(_, status)| *status == 503));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_database_still_answers_reads_and_takes_writes_when_it_may() {
    let world = World::builder().proxies(0).own_cell_postgres().start().await;
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    let change = async |to: &str| {
        let mut db = world.server.connect("postgres").await;
        let statement = format!("ALTER DATABASE {} SET default_transaction_read_only = {to}", world.cell_db);
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut db).await.unwrap();
        sqlx::raw_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'queen-cell'",
        )
        .execute(&mut db)
        .await
        .unwrap();
    };
    change("on").await;
    let read_only = refused(503, "kv_unavailable", "kv_read_only");
    let answer = eventually("writes are refused", SOON, async || {
        let answer = put(&world, ACME, "k").await;
        (answer.status != 200 && refusal(&answer) == read_only).then_some(answer)
    })
    .await;
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(value_of(&get(&world, ACME, "k").await), json!(1));
    // Nobody cuts the sessions this time: the cell itself gives up those that are read-only.
    let mut db = world.server.connect("postgres").await;
    let back = format!("ALTER DATABASE {} RESET default_transaction_read_only", world.cell_db);
    sqlx::raw_sql(sqlx::AssertSqlSafe(back)).execute(&mut db).await.unwrap();
    eventually("writes are taken", SOON, async || (put(&world, ACME, "k").await.status == 200).then_some(()))
        .await;
    assert!(!world.cell.as_ref().unwrap().log().contains("is off until"), "the sweeper tries again");
}

/// A full disk cannot be had in a test; the server's error for it can.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_database_refuses_whole_batches() {
    let world = World::builder().proxies(0).start().await;
    cell_sql(
        &world,
        "CREATE FUNCTION queen.full() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
         CREATE TRIGGER is_full BEFORE INSERT ON queen.kv FOR EACH ROW WHEN (NEW.key = 'z') EXECUTE FUNCTION queen.full()",
    )
    .await;
    let operations = json!([{"op": "put", "ns": "ns", "key": "a", "value": 2, "forever": true},
                            {"op": "put", "ns": "ns", "key": "z", "value": 2, "forever": true}]);
    for _ in 0..20 {
        let answer = batch(&world, ACME, &operations).await;
        assert_eq!(refusal(&answer), refused(503, "kv_unavailable", "sqlstate_53100"));
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    assert_eq!(get(&world, ACME, "a").await.json()["found"], false);
    cell_sql(&world, "DROP TRIGGER is_full ON queen.kv").await;
    assert_eq!(batch(&world, ACME, &operations).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_free_connection_callers_soon_hear_so_at_once_and_it_comes_back() {
    let world =
        World::builder().proxies(0).own_cell_postgres().cell_env("QUEEN_SWEEPER", "off").start().await;
    let mut crowd = Vec::new();
    let options = world.server.connect_options("postgres");
    while let Ok(guest) = PgConnection::connect_with(&options).await {
        crowd.push(guest);
    }
    assert!(crowd.len() > 100);
    let asked = Instant::now();
    let answer = put(&world, ACME, "k").await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert!(asked.elapsed() < Duration::from_secs(9), "{:?}", asked.elapsed());
    let asked = Instant::now();
    for _ in 0..20 {
        assert_eq!(get(&world, ACME, "k").await.status, 503);
    }
    assert!(asked.elapsed() < Duration::from_secs(30), "most of them hear at once: {:?}", asked.elapsed());
    drop(crowd);
    eventually("it comes back", SOON, async || (put(&world, ACME, "k").await.status == 200).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_running_calls_finish() {
    let mut world = World::builder().proxies(0).start().await;
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    let mut keeper = hold_rows(&world).await;
    let mut socket = send(&world, "PUT /api/v1/kv/ns/k", PUT).await;
    eventually("it waits in the database", SOON, async || (number(&world, WAITING).await == 1).then_some(()))
        .await;
    world.cell.as_ref().unwrap().signal(Signal::SIGTERM);
    eventually("the cell is stopping", SOON, async || {
        world.cell.as_ref().unwrap().log().contains("queen-cell is stopping").then_some(())
    })
    .await;
    sqlx::raw_sql("COMMIT").execute(&mut keeper).await.unwrap();
    assert_eq!(value_of(&socket.answer().await.unwrap()), json!(2));
    let status = world.cell.as_mut().unwrap().wait(Duration::from_secs(20)).expect("it ends");
    assert!(status.success(), "{status}");
    assert_eq!(number(&world, "SELECT count(*) FROM queen.kv WHERE value = '2'").await, 1);
}
