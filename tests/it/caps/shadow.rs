//! The shadow mode (D1): every decision is made, told and counted, and only the hard ones refuse.

use super::{
    LIMIT, live, metric, metric_becomes, outcome, push, push_to, pushes, refused, set, with_admin, world,
};
use crate::support::{Reply, Socket, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn soft_limits_are_told_and_passed_and_hard_ones_refuse() {
    let (builder, admin) = with_admin(World::builder().env("QUEEN_PROXY_ENFORCE", "false"));
    let (world, acme) = world(builder, "{}").await;
    let health = world.ask("GET /healthz", "Host: any\r\n", "").await.json();
    assert_eq!(health["enforce"], false);
    let rate = r#""max_req_per_sec": 0"#;
    let wide = push_to([("a", "1"), ("a", "2"), ("b", "1")], "x");
    let long = r#"{"queue":"a","options":{"retentionSeconds":90}}"#.to_owned();
    let get = String::new();
    let soft = [
        ("req", rate, "GET /api/v1/resources/queues", &get),
        ("msgs", r#""max_msgs_per_sec": 0"#, "POST /api/v1/push", &wide),
        ("queues", r#""max_queues": 1"#, "POST /api/v1/push", &wide),
        ("partitions", r#""max_partitions_per_queue": 1"#, "POST /api/v1/push", &wide),
        ("retention", r#""max_retention_seconds": 60"#, "POST /api/v1/configure", &long),
        ("parked", r#""max_parked_pops": 0"#, "GET /api/v1/pop/queue/a?wait=true", &get),
    ];
    let known = async |caps: &str| {
        set(&world, &acme, &format!("{{{caps}}}")).await;
        let (name, value) = caps.split_once(": ").unwrap();
        eventually(caps, LIMIT, async || {
            // A first request makes the proxy read the known queues.
            world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await;
            let limits = crate::support::ask_admin(admin, &format!("/limits/{}", acme.slug)).await.json();
            let told = &limits["limits"][name.trim_matches('"')];
            (*told == value.parse::<u64>().unwrap() && limits["live"]["queues"].is_u64()).then_some(())
        })
        .await;
    };
    let series = |limit: &str, outcome: &str| {
        format!(r#"queen_proxy_limit_denials_total{{limit="{limit}",outcome="{outcome}"}}"#)
    };
    for (kind, caps, line, body) in soft {
        known(caps).await;
        world.recorder().take();
        let before = metric(admin, &series(kind, "would_block")).await.unwrap_or(0.0);
        let answer = world.ask(line, &acme.headers(), body).await;
        assert_eq!(outcome(&answer), (200, String::new()), "{kind}");
        assert_eq!(answer.header("retry-after"), None, "{kind}");
        assert_eq!(world.recorder().take().len(), 1, "{kind}");
        assert_eq!(metric(admin, &series(kind, "would_block")).await, Some(before + 1.0), "{kind}");
        assert_eq!(metric(admin, &series(kind, "refused")).await, None, "{kind}");
        // One line a second for each cluster, so again until it is its turn.
        let line_of = format!("kind=\"{kind}\" blocked=false would_block=true");
        eventually(&line_of, LIMIT, async || {
            world.ask(line, &acme.headers(), body).await;
            world.proxies[0].1.log().contains(&line_of).then_some(())
        })
        .await;
    }
    let hard = [
        ("payload", r#""max_payload_bytes": 2"#, push(1, "x"), (413, "payload_too_large")),
        ("batch", r#""max_batch_items": 2"#, push(3, "x"), (413, "payload_too_large")),
        ("storage", r#""max_retained_bytes": 0"#, push(1, "x"), (403, "storage_quota_exceeded")),
    ];
    for (kind, caps, body, (status, code)) in hard {
        known(caps).await;
        world.recorder().take();
        assert_eq!(outcome(&pushes(&world, &acme, &body).await), refused(status, code), "{kind}");
        assert_eq!(world.recorder().take().len(), 0, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poll_beyond_the_cap_is_let_in_and_counted_as_waiting() {
    let (builder, admin) = with_admin(World::builder().env("QUEEN_PROXY_ENFORCE", "false"));
    let (world, acme) = world(builder, r#"{"max_parked_pops": 1}"#).await;
    world.recorder().reply(Reply::Held);
    let mut polls = Vec::new();
    for _ in 0..3 {
        let mut socket = Socket::open(world.port()).await;
        socket.send(format!("GET /api/v1/pop/queue/q?wait=true HTTP/1.1\r\n{}\r\n", acme.headers())).await;
        polls.push(socket);
    }
    metric_becomes(admin, "queen_proxy_parked_pops", 3.0).await;
    assert_eq!(live(admin, &acme).await["parked"], 3);
    eventually("they are at the cell", LIMIT, async || (world.recorder().count() == 3).then_some(())).await;
    world.recorder().release(Reply::Json(r#"{"messages":[]}"#));
    for socket in &mut polls {
        assert_eq!(socket.answer().await.unwrap().status, 200);
    }
    metric_becomes(admin, "queen_proxy_parked_pops", 0.0).await;
}
