//! The ladder of KV contract section 7: grants, rates, caps, and a pool that is full.

use super::{ACME, GLOBEX, SOON, batch, cell_sql, delete, get, number, put, refusal, refused};
use crate::support::{Socket, World, WorldBuilder, eventually};
use serde_json::json;
use std::time::{Duration, Instant};

fn quick_world() -> WorldBuilder {
    World::builder()
        .proxies(0)
        .cell_env("QUEEN_KV_QUOTA_REFRESH_MS", 1000)
        .cell_env("QUEEN_KV_USAGE_EVERY_MS", 1000)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_given_by_hand_is_in_force_within_a_refresh_and_so_is_its_end() {
    let world = quick_world().cell_env("QUEEN_KV_REQUIRE_GRANT", "true").start().await;
    let gated = refused(403, "feature_gated", "feature_gated");
    let answer = put(&world, ACME, "k").await;
    assert_eq!(refusal(&answer), gated);
    assert!(answer.header("retry-after").is_none() && answer.header("x-queen-request-id").is_some());
    // It may look and clean up, and a measurement alone is no grant.
    assert_eq!(get(&world, ACME, "k").await.status, 200);
    assert_eq!(delete(&world, ACME, "k").await.status, 200);
    let mixed = json!([{"op": "delete", "ns": "ns", "key": "a"},
                       {"op": "incr", "ns": "ns", "key": "b", "delta": 1, "forever": true}]);
    assert_eq!(refusal(&batch(&world, ACME, &mixed).await), gated);
    cell_sql(&world, &format!("INSERT INTO queen.kv_usage (tenant_id, kv_rows) VALUES ('{GLOBEX}', 1)"))
        .await;

    cell_sql(&world, &format!("INSERT INTO queen.kv_quota (tenant_id) VALUES ('{ACME}')")).await;
    eventually("the grant", SOON, async || (put(&world, ACME, "k").await.status == 200).then_some(())).await;
    assert_eq!(refusal(&put(&world, GLOBEX, "k").await), gated);

    let rate = |per_second: &str| {
        format!("UPDATE queen.kv_quota SET max_writes_per_sec = {per_second} WHERE tenant_id = '{ACME}'")
    };
    cell_sql(&world, &rate("1")).await;
    let answer = eventually("the rate", SOON, async || {
        let answer = put(&world, ACME, "k").await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    assert_eq!(refusal(&answer), refused(429, "rate_limited", "rate_limited"));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(get(&world, ACME, "k").await.status, 200, "reads have their own");
    cell_sql(&world, &rate("NULL")).await;
    eventually("two at once", SOON, async || {
        let (first, second) = tokio::join!(put(&world, ACME, "k"), put(&world, ACME, "l"));
        ((first.status, second.status) == (200, 200)).then_some(())
    })
    .await;

    cell_sql(&world, "UPDATE queen.kv_quota SET enabled = false").await;
    eventually("the end of it", SOON, async || {
        (refusal(&put(&world, ACME, "k").await) == gated).then_some(())
    })
    .await;
}

/// Vector 29, to the end: also a tenant that deletes everything is released (Q18).
#[tokio::test(flavor = "multi_thread")]
async fn a_full_tenant_may_delete_and_writes_again_once_it_is_measured_below_its_cap() {
    let world = quick_world().start().await;
    cell_sql(&world, &format!("INSERT INTO queen.kv_quota (tenant_id, max_rows) VALUES ('{ACME}', 10)"))
        .await;
    // Until the cap is known everything passes, so wait for it in a way that leaves nothing behind.
    eventually("the cap is known", SOON, async || {
        let many: Vec<_> = (0..11)
            .map(|n| json!({"op": "put", "ns": "probe", "key": n.to_string(), "value": 1, "ttlSeconds": 1}))
            .collect();
        (batch(&world, ACME, &json!(many)).await.status == 403).then_some(())
    })
    .await;
    eventually("the probes are gone and nothing is blocked", SOON, async || {
        let empty = number(&world, "SELECT count(*) FROM queen.kv").await == 0;
        (empty && put(&world, ACME, "0").await.status == 200).then_some(())
    })
    .await;
    let mut stored = 1;
    let full = eventually("it is full", SOON, async || {
        let answer = put(&world, ACME, &stored.to_string()).await;
        if answer.status == 200 {
            stored += 1;
            return None;
        }
        // Charges for the probes may still count; a later measurement drops them.
        (stored == 10).then_some(answer)
    })
    .await;
    assert_eq!(refusal(&full), refused(403, "kv_quota_exceeded", "kv_quota_exceeded"));
    assert!(full.header("retry-after").is_none());
    assert_eq!(put(&world, GLOBEX, "0").await.status, 200);

    // Ten rows are above nine tenths of the cap: it stays blocked over several refreshes.
    let measured = format!(
        "SELECT count(*) FROM queen.kv_usage WHERE tenant_id = '{ACME}' AND kv_rows = 10 \
                            AND computed_at > now() - interval '1 second'"
    );
    for _ in 0..3 {
        eventually("a measurement of ten", SOON, async || {
            (number(&world, &measured).await == 1).then_some(())
        })
        .await;
        assert_eq!(put(&world, ACME, "more").await.status, 403);
        cell_sql(&world, "UPDATE queen.kv_usage SET computed_at = computed_at - interval '2 seconds'").await;
    }
    assert_eq!(delete(&world, ACME, "0").await.json()["applied"], true);
    eventually("nine are few enough", SOON, async || {
        (put(&world, ACME, "0").await.status == 200).then_some(())
    })
    .await;
    for key in 0..10 {
        assert_eq!(delete(&world, ACME, &key.to_string()).await.status, 200);
    }
    let all: Vec<_> = (0..10)
        .map(|n| json!({"op": "put", "ns": "ns", "key": n.to_string(), "value": 1, "forever": true}))
        .collect();
    eventually("an empty tenant has all its room", SOON, async || {
        (batch(&world, ACME, &json!(all)).await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rates_are_for_each_tenant_and_the_ceiling_is_for_all() {
    let world = World::builder()
        .proxies(0)
        .cell_env("QUEEN_KV_WRITE_RATE", 1)
        .cell_env("QUEEN_KV_WRITE_BURST", 5)
        .cell_env("QUEEN_KV_CELL_RATE", 12)
        .start()
        .await;
    let began = Instant::now();
    let mut passed = 0;
    while put(&world, ACME, "k").await.status == 200 {
        passed += 1;
    }
    let allowed = 5 + usize::try_from(began.elapsed().as_secs()).unwrap();
    assert!((5..=allowed).contains(&passed), "{passed} of {allowed}");
    assert_eq!(put(&world, GLOBEX, "k").await.status, 200);
    let mut answers = Vec::new();
    for _ in 0..40 {
        answers.push(get(&world, GLOBEX, "k").await);
    }
    let refusals: Vec<_> = answers.iter().filter(|answer| answer.status != 200).collect();
    let allowed = 12 + 12 * usize::try_from(began.elapsed().as_secs() + 1).unwrap();
    assert!(refusals.len() + allowed >= 46, "{} refusals", refusals.len());
    for answer in refusals {
        assert_eq!(refusal(answer), refused(429, "rate_limited", "rate_limited"));
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
}

/// Q9 and Q11: a bounded wait, shedding, and its end without any help.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_is_waited_for_then_shed_and_writes_recover_by_themselves() {
    let world = World::builder()
        .proxies(0)
        .cell_env("QUEEN_KV_POOL_SIZE", 1)
        // A group would give the connection back after 100 ms of waiting for a lock.
        .cell_env("QUEEN_KV_GROUP_CALLS", 1)
        .cell_env("QUEEN_KV_STANDALONE_SHED_AFTER", 2)
        .start()
        .await;
    assert_eq!(put(&world, ACME, "held").await.status, 200);
    let mut keeper = world.cell_database().await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM queen.kv FOR UPDATE").execute(&mut keeper).await.unwrap();
    let mut holding = Socket::open(world.cell_port).await;
    let body = r#"{"value":2,"forever":true}"#;
    let head = world.cell_head("PUT /api/v1/kv/ns/held", ACME);
    holding.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).await;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    eventually("the one connection waits", SOON, async || (number(&world, waits).await == 1).then_some(()))
        .await;

    let asked = Instant::now();
    let (first, second) = tokio::join!(put(&world, ACME, "a"), put(&world, GLOBEX, "b"));
    for answer in [first, second] {
        assert_eq!(refusal(&answer), refused(503, "kv_unavailable", "kv_pool_exhausted"));
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    assert!(asked.elapsed() >= Duration::from_secs(4) && asked.elapsed() < Duration::from_secs(15));

    let shed = refused(503, "kv_unavailable", "kv_standalone_paused");
    let answer = put(&world, ACME, "a").await;
    assert_eq!(refusal(&answer), shed);
    assert!(answer.json()["detail"].is_string() && answer.header("retry-after") == Some("1"));
    assert_eq!(refusal(&get(&world, ACME, "a").await), refused(503, "kv_unavailable", "kv_pool_exhausted"));

    sqlx::raw_sql("COMMIT").execute(&mut keeper).await.unwrap();
    assert_eq!(holding.answer().await.unwrap().status, 200, "the call in the connection was let finish");
    eventually("a write gets through as a probe", SOON, async || {
        (put(&world, ACME, "a").await.status == 200).then_some(())
    })
    .await;
    assert_eq!(put(&world, ACME, "b").await.status, 200, "and no write is shed any more");
}
