//! What a tenant keeps at its cell blocks what would add to it (proxy contract §14).

use super::{LIMIT, error, live, outcome, push, pushes, refused, set, with_admin, world};
use crate::support::{Reply, Tenant, World, eventually};
use uuid::Uuid;

/// What the cell tells of a cluster: its queues, keys and timers keep so many bytes.
async fn tell(world: &World, tenant: &Tenant, bytes: u64) {
    let name: Uuid = sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
        .bind(tenant.cluster)
        .fetch_one(&mut world.control().await)
        .await
        .unwrap();
    let listing = format!(
        r#"{{"queues":[{{"name":"q","partitions":1,"retainedBytes":{}}}],"kvBytes":1,"timerBytes":2}}"#,
        bytes - 3
    );
    world.recorder().list(name, Reply::Text(200, listing));
}

fn asking() -> (crate::support::WorldBuilder, u16) {
    let builder = World::builder().env("QUEEN_PROXY_RECONCILE_MS", 100);
    with_admin(builder.env("QUEEN_PROXY_STORAGE_REFRESH_MS", 500))
}

async fn told(admin: u16, tenant: &Tenant, bytes: u64) {
    eventually(&format!("{bytes} bytes"), LIMIT, async || {
        (live(admin, tenant).await["retained_bytes"] == bytes).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_grows_is_blocked_at_the_cap_and_passes_again_at_nine_tenths() {
    let (builder, admin) = asking();
    let (world, acme) = world(builder, r#"{"max_retained_bytes": 1000}"#).await;
    world.sql("UPDATE queen_proxy.plans SET features = '{\"streams\": true, \"ephemeral\": true, \"timers\": true}'").await;
    let blocked = refused(403, "storage_quota_exceeded");
    let passes = (200, String::new());
    assert_eq!(pushes(&world, &acme, &push(1, "x")).await.status, 200);
    for (bytes, want) in
        [(999, &passes), (1_001, &blocked), (901, &blocked), (900, &passes), (2_000, &blocked)]
    {
        tell(&world, &acme, bytes).await;
        told(admin, &acme, bytes).await;
        let answer = pushes(&world, &acme, "{\"items\":[]}").await;
        assert_eq!(outcome(&answer), *want, "{bytes}");
    }
    let heads = |world: &World| {
        // The proxy's own questions are not the tenant's.
        let seen = world.recorder().take();
        seen.into_iter().filter(|request| !request.line.contains("stats=cached")).count()
    };
    heads(&world);
    let put = r#"[{"op":"put","ns":"a","key":"b","value":1}]"#;
    let growing = [
        ("POST /api/v1/push", r#"{"items":[]}"#),
        ("POST /api/v1/transaction", r#"{"operations":[]}"#),
        ("POST /api/v1/dlq/7/replay", "{}"),
        ("POST /api/v1/messages/p/t/retry", "{}"),
        ("POST /api/v1/kv", put),
        ("PUT /api/v1/kv/a/b", "1"),
        ("POST /api/v1/timers", r#"[{"op":"set","key":"b"}]"#),
        ("POST /api/v1/ephemeral/push", r#"{"messages":[1]}"#),
        ("POST /streams/v1/cycle", r#"{"push_items":[{"queue":"q","payload":1}]}"#),
    ];
    for (line, body) in growing {
        let answer = world.ask(line, &acme.headers(), body).await;
        assert_eq!(outcome(&answer), blocked, "{line}");
        assert_eq!(error(&answer), "pushes blocked: the cluster keeps max_retained_bytes");
    }
    assert_eq!(heads(&world), 0, "none of it reached the cell");
    let emptying = [
        ("GET /api/v1/pop/queue/q", ""),
        ("POST /api/v1/ack", "{}"),
        ("POST /api/v1/configure", r#"{"queue":"q"}"#),
        ("DELETE /api/v1/resources/queues/q", ""),
        ("POST /api/v1/kv", r#"[{"op":"get","ns":"a","key":"b"},{"op":"delete","ns":"a","key":"b"}]"#),
        ("DELETE /api/v1/kv/a/b", ""),
        ("POST /api/v1/timers", r#"[{"op":"cancel","key":"b"}]"#),
        ("POST /streams/v1/cycle", r#"{"push_items":[],"acks":[1]}"#),
        ("GET /api/v1/resources/queues", ""),
    ];
    for (line, body) in emptying {
        assert_eq!(outcome(&world.ask(line, &acme.headers(), body).await), passes, "{line}");
    }
    assert_eq!(heads(&world), emptying.len());
    // A raised cap, and one that is lifted, release it though the cell still tells the same.
    for (caps, want) in [
        (r#"{"max_retained_bytes": 3000}"#, &passes),
        (r#"{"max_retained_bytes": 1000}"#, &blocked),
        ("{}", &passes),
    ] {
        set(&world, &acme, caps).await;
        eventually(caps, LIMIT, async || {
            (outcome(&pushes(&world, &acme, "{\"items\":[]}").await) == *want).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn between_two_answers_of_the_cell_what_was_accepted_counts() {
    let (builder, admin) = asking();
    let (world, acme) = world(builder, r#"{"max_retained_bytes": 1000}"#).await;
    assert_eq!(pushes(&world, &acme, "{\"items\":[]}").await.status, 200);
    tell(&world, &acme, 600).await;
    told(admin, &acme, 600).await;
    let ten = "x".repeat(98);
    let (mut accepted, mut answer) = (0, pushes(&world, &acme, &push(1, &ten)).await);
    while answer.status == 200 && accepted < 10 {
        accepted += 1;
        answer = pushes(&world, &acme, &push(1, &ten)).await;
    }
    assert_eq!(
        (accepted, outcome(&answer)),
        (4, refused(403, "storage_quota_exceeded")),
        "4 × 100 bytes fill it"
    );
    let now = live(admin, &acme).await;
    assert_eq!((&now["in_flight_bytes"], &now["storage_blocked"]), (&400.into(), &true.into()));
    // The cell has measured anew: what it tells is what counts.
    tell(&world, &acme, 700).await;
    told(admin, &acme, 700).await;
    assert_eq!(live(admin, &acme).await["in_flight_bytes"], 0);
    assert_eq!(pushes(&world, &acme, &push(1, &ten)).await.status, 200);
}

/// Acceptance case 15 of the contract.
#[tokio::test(flavor = "multi_thread")]
async fn an_override_of_64_bytes_blocks_pushes_alone_until_it_is_removed() {
    let (builder, _) = asking();
    let (world, acme) = world(builder, "{}").await;
    tell(&world, &acme, 500).await;
    let becomes = async |status: u16| {
        eventually(&format!("a push is {status}"), LIMIT, async || {
            (pushes(&world, &acme, &push(1, "x")).await.status == status).then_some(())
        })
        .await;
    };
    becomes(200).await;
    set(&world, &acme, r#"{"max_retained_bytes": 64}"#).await;
    becomes(403).await;
    let answer = pushes(&world, &acme, &push(1, "x")).await;
    assert_eq!(outcome(&answer), refused(403, "storage_quota_exceeded"));
    assert_eq!(world.ask("GET /api/v1/pop/queue/q", &acme.headers(), "").await.status, 200);
    set(&world, &acme, "{}").await;
    becomes(200).await;
}
