//! Which queues and partitions a tenant may have (proxy contract §9.3; D9, D10).

use super::{LIMIT, PUSH, error, live, outcome, push_to, pushes, refused, set, tenant, with_admin, world};
use crate::support::{Reply, Tenant, World, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

/// Waits until these are the rows of a cluster, with their partitions.
async fn rows_become(world: &World, tenant: &Tenant, want: &[(&str, i32)]) {
    let want: Vec<(String, i32)> = want.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    eventually(&format!("{want:?}"), LIMIT, async || {
        let rows: Vec<(String, i32)> = sqlx::query_as(
            "SELECT name, partitions_count FROM queen_proxy.queues
              WHERE cluster_id = $1 AND deleted_at IS NULL ORDER BY name",
        )
        .bind(tenant.cluster)
        .fetch_all(&mut world.control().await)
        .await
        .unwrap();
        (rows == want).then_some(())
    })
    .await;
}

/// Waits until the proxy has read the rows: before that it refuses nobody.
async fn loaded(admin: u16, world: &World, tenant: &Tenant) {
    world.ask("GET /api/v1/resources/queues", &tenant.headers(), "").await;
    eventually("the rows are known", LIMIT, async || live(admin, tenant).await["queues"].as_u64()).await;
}

const CAPS: &str = r#"{"max_queues": 2, "max_partitions_per_queue": 3}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_at_the_cap_keeps_what_is_there_and_refuses_what_is_new() {
    let (builder, admin) = with_admin(World::builder());
    let (mut world, acme) = world(builder.env("QUEEN_PROXY_REGISTRY_PERSIST_MS", 100), CAPS).await;
    loaded(admin, &world, &acme).await;
    let full = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1")];
    assert_eq!(pushes(&world, &acme, &push_to(full, "x")).await.status, 200);
    let queues = refused(403, "quota_exceeded");
    let answer = pushes(&world, &acme, &push_to([("c", "1")], "x")).await;
    assert_eq!((outcome(&answer), error(&answer).as_str()), (queues.clone(), "queue limit reached (2)"));
    let answer = pushes(&world, &acme, &push_to([("a", "4")], "x")).await;
    assert_eq!((outcome(&answer), error(&answer).as_str()), (queues.clone(), "partition limit reached (3)"));
    rows_become(&world, &acme, &[("a", 3), ("b", 1)]).await;

    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let (_, mut process) = world.proxies.remove(0);
        process.signal(signal);
        assert!(process.wait(LIMIT).is_some());
        let index = world.add_proxy();
        world.wait_for_proxy(index).await;
        world.recorder().take();
        loaded(admin, &world, &acme).await;
        // Its names are not written down, only how many there were: all of them go on.
        for lane in full {
            assert_eq!(pushes(&world, &acme, &push_to([lane], "x")).await.status, 200, "{lane:?}");
        }
        for lane in [("c", "1"), ("a", "4")] {
            assert_eq!(outcome(&pushes(&world, &acme, &push_to([lane], "x")).await), queues, "{lane:?}");
        }
        let seen: Vec<_> = world.recorder().take().into_iter().map(|seen| seen.line).collect();
        assert_eq!(seen.iter().filter(|line| *line == PUSH).count(), full.len(), "{seen:?}");
        rows_become(&world, &acme, &[("a", 3), ("b", 1)]).await;
    }
    // A change of plan is heard of and forgets no name.
    set(&world, &acme, r#"{"max_queues": 1, "max_partitions_per_queue": 1}"#).await;
    eventually("the new caps", LIMIT, async || {
        let limits = crate::support::ask_admin(admin, &format!("/limits/{}", acme.slug)).await.json();
        (limits["limits"]["max_queues"] == 1).then_some(())
    })
    .await;
    for lane in full {
        assert_eq!(pushes(&world, &acme, &push_to([lane], "x")).await.status, 200, "{lane:?} under less");
    }
    for lane in [("c", "1"), ("b", "2")] {
        assert_eq!(outcome(&pushes(&world, &acme, &push_to([lane], "x")).await), queues, "{lane:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_make_a_queue_is_counted_and_a_refusal_leaves_none() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder.env("QUEEN_PROXY_REGISTRY_PERSIST_MS", 100), CAPS).await;
    let push = |queue: &str, partition: &str| push_to([(queue, partition)], "x");
    let ways: [(&str, fn(&str, &str) -> String); 6] = [
        ("/api/v1/push", |queue, partition| push_to([(queue, partition)], "x")),
        ("/api/v1/transaction", |queue, partition| {
            json!({"operations": [{"type": "push", "items": [{"queue": queue, "partition": partition, "payload": 1}]}]})
                .to_string()
        }),
        ("/api/v1/transaction", |queue, partition| {
            json!({"operations": [{"type": "push", "queue": queue, "partition": partition, "payload": 1}]})
                .to_string()
        }),
        ("/api/v1/dlq/7/replay", |queue, partition| {
            json!({"queue": queue, "partition": partition}).to_string()
        }),
        ("/streams/v1/cycle", |queue, partition| {
            json!({"push_items": [{"queue": queue, "partition": partition, "payload": 1}]}).to_string()
        }),
        // Makes the default partition, whatever it is called with.
        ("/api/v1/configure", |queue, _| json!({"queue": queue, "options": {}}).to_string()),
    ];
    for (index, (route, body)) in ways.iter().enumerate() {
        let tenant = tenant(&world, &format!("way{index}"), CAPS).await;
        loaded(admin, &world, &tenant).await;
        let ask = async |queue: &str, partition: &str| {
            outcome(&world.ask(&format!("POST {route}"), &tenant.headers(), &body(queue, partition)).await)
        };
        let (passes, denied) = ((200, String::new()), refused(403, "quota_exceeded"));
        assert_eq!(ask("a", "Default").await, passes, "{route}");
        assert_eq!(ask("b", "Default").await, passes, "{route}");
        assert_eq!(ask("c", "Default").await, denied, "{route}");
        assert_eq!(ask("a", "Default").await, passes, "{route}: what is there goes on");
        assert_eq!(live(admin, &tenant).await["queues"], 2, "{route}");
        if *route != "/api/v1/configure" {
            assert_eq!(ask("a", "2").await, passes, "{route}");
            assert_eq!(ask("a", "3").await, passes, "{route}");
            assert_eq!(ask("a", "4").await, denied, "{route}");
        }
    }

    // What is new and what is not, in one request that is refused: nothing of it is there afterwards.
    loaded(admin, &world, &acme).await;
    assert_eq!(pushes(&world, &acme, &push("a", "1")).await.status, 200);
    world.recorder().take();
    let heads = world.recorder().heads();
    let mixed = [("a", "1"), ("a", "2"), ("b", "1"), ("c", "1")];
    for _ in 0..3 {
        assert_eq!(
            outcome(&pushes(&world, &acme, &push_to(mixed, "x")).await),
            refused(403, "quota_exceeded")
        );
    }
    assert_eq!(world.recorder().heads(), heads);
    assert_eq!(live(admin, &acme).await["queues"], 1);
    // So all there is room for still fits, and is what is written.
    assert_eq!(pushes(&world, &acme, &push_to([("d", "1"), ("a", "3"), ("a", "4")], "x")).await.status, 200);
    rows_become(&world, &acme, &[("a", 3), ("d", 1)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_gone_at_the_cell_makes_room_for_another() {
    let builder = World::builder().env("QUEEN_PROXY_RECONCILE_MS", 100).env("QUEEN_PROXY_QUEUE_SETTLE_MS", 1);
    let (builder, admin) = with_admin(builder.env("QUEEN_PROXY_REGISTRY_PERSIST_MS", 100));
    let (world, acme) = world(builder, r#"{"max_queues": 1}"#).await;
    let name: uuid::Uuid =
        sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
            .bind(acme.cluster)
            .fetch_one(&mut world.control().await)
            .await
            .unwrap();
    let list = |queue: &str| {
        let queues = json!([{"name": queue, "partitions": 1, "retainedBytes": 1}]);
        world.recorder().list(name, Reply::Text(200, json!({ "queues": queues }).to_string()));
    };
    loaded(admin, &world, &acme).await;
    assert_eq!(pushes(&world, &acme, &push_to([("a", "1")], "x")).await.status, 200);
    list("a");
    rows_become(&world, &acme, &[("a", 1)]).await;
    let other = push_to([("b", "1")], "x");
    assert_eq!(outcome(&pushes(&world, &acme, &other).await), refused(403, "quota_exceeded"));
    // Deleted at the cell, behind the proxy's back.
    world.recorder().list(name, Reply::Text(200, json!({"queues": []}).to_string()));
    eventually("there is room", LIMIT, async || {
        (pushes(&world, &acme, &other).await.status == 200).then_some(())
    })
    .await;
    list("b");
    rows_become(&world, &acme, &[("b", 1)]).await;
    let first = push_to([("a", "1")], "x");
    assert_eq!(outcome(&pushes(&world, &acme, &first).await), refused(403, "quota_exceeded"));
}
