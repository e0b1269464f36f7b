//! The month: a warning, a block that every proxy learns, events once, the release.

use super::{push, stored, world};
use crate::support::{PROXY, World, eventually};
use serde_json::{Value, json};
use std::{process::Command, time::Duration};

const LIMIT: Duration = Duration::from_secs(20);

/// What a follower of the outbox prints now.
fn events(world: &World) -> Vec<Value> {
    let followed = Command::new(PROXY)
        .args(["admin", "outbox", "follow", "--json", "--once"])
        .env_clear()
        .envs(world.proxy_environment(1))
        .output()
        .unwrap();
    assert!(followed.status.success(), "{}", String::from_utf8_lossy(&followed.stderr));
    let text = String::from_utf8(followed.stdout).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["kind"].as_str().unwrap().starts_with("cluster_monthly")).collect()
}

/// Waits until the events that wait have come to so many.
async fn emitted(world: &World, count: i64) {
    let query = "SELECT count(*) FROM queen_proxy.outbox WHERE kind LIKE 'cluster_monthly%'";
    eventually("the event", LIMIT, async || {
        let found: i64 = sqlx::query_scalar(query).fetch_one(&mut world.control().await).await.unwrap();
        (found == count).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_month_that_is_used_up_warns_blocks_on_every_proxy_and_is_released_by_a_raise() {
    let builder = World::builder()
        .proxies(2)
        .env("QUEEN_PROXY_METER_FLUSH_MS", 100)
        .env("QUEEN_PROXY_ROLLUP_MS", 1_000);
    let (mut world, _cell) = world(builder, stored).await;
    let acme = world.tenant("acme").await;
    let quota = async |world: &World, quota: u32| {
        let set = format!(
            "SELECT queen_proxy.set_limit_override('{}', '{{\"monthly_msgs_quota\": {quota}, \"max_req_per_sec\": null}}')",
            acme.cluster
        );
        world.sql(&set).await;
    };
    quota(&world, 10).await;
    let month = "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM')";
    let month: String = sqlx::query_scalar(month).fetch_one(&mut world.control().await).await.unwrap();
    let event = |kind: &str, msgs: u32| {
        let payload = json!({
            "cluster_id": acme.cluster, "cluster_slug": acme.slug, "tenant_id": acme.tenant, "month": month,
            "msgs": msgs, "quota": 10, "percent": msgs * 10,
        });
        (format!("cluster_monthly_quota_{kind}"), payload)
    };
    let follow = |world: &World| -> Vec<(String, Value)> {
        let events = events(world).into_iter();
        events.map(|event| (event["kind"].as_str().unwrap().to_owned(), event["payload"].clone())).collect()
    };

    // A proxy that ends writes the minute that is open.
    assert_eq!(push(&world, 0, &acme, 7).await, 201);
    world.stop_proxy(0);
    assert_eq!(push(&world, 1, &acme, 1).await, 201);
    world.stop_proxy(1);
    for proxy in 0..2 {
        world.restart_proxy(proxy);
        world.wait_for_proxy(proxy).await;
    }
    emitted(&world, 1).await;
    assert_eq!(follow(&world), [event("warning", 8)]);
    assert_eq!(push(&world, 0, &acme, 2).await, 201, "a warning blocks nothing");
    world.stop_proxy(0);

    // The other one learns it while it runs.
    let refused = eventually("the block", LIMIT, async || {
        let answer = world.ask_proxy(1, "POST /api/v1/push", &acme.headers(), &super::push_of(1)).await;
        (answer.status == 403).then_some(answer)
    })
    .await;
    assert_eq!(refused.code(), "quota_exceeded");
    emitted(&world, 2).await;
    let blocked = follow(&world);
    assert_eq!(blocked[0].0, "cluster_monthly_quota_blocked");
    assert_eq!(blocked[0].1["month"], month.as_str());
    world.restart_proxy(0);
    world.wait_for_proxy(0).await;
    for proxy in 0..2 {
        eventually("the block", LIMIT, async || (push(&world, proxy, &acme, 1).await == 403).then_some(()))
            .await;
        // What takes out, or cleans up, goes on.
        for line in ["GET /api/v1/pop/queue/q", "GET /api/v1/kv/ns/k", "DELETE /api/v1/kv/ns/k"] {
            let answer = world.ask_proxy(proxy, line, &acme.headers(), "").await;
            assert_eq!(answer.status, 201, "{line}");
        }
    }

    quota(&world, 1_000).await;
    for proxy in 0..2 {
        eventually("the release", LIMIT, async || (push(&world, proxy, &acme, 1).await == 201).then_some(()))
            .await;
    }
    // Lowered again within the month: it blocks, and nobody is told a second time.
    quota(&world, 1).await;
    for proxy in 0..2 {
        eventually("the block", LIMIT, async || (push(&world, proxy, &acme, 1).await == 403).then_some(()))
            .await;
    }
    assert_eq!(follow(&world), []);
}
