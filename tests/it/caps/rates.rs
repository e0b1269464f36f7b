//! Rates of requests and messages (proxy contract §9.2; D8, D9; scenarios 17–22 of `notes/cases.md`).

use super::{
    LIMIT, PUSH, error, live, outcome, push, push_to, pushes, refused, retry_after, set, tenant, with_admin,
    world,
};
use crate::support::{Answer, PLAN_LIMITS, Reply, Socket, Tenant, World, eventually};
use std::time::{Duration, Instant};

async fn read(world: &World, tenant: &Tenant) -> Answer {
    world.ask("GET /api/v1/resources/queues", &tenant.headers(), "").await
}

/// Asks until it is refused, and returns how often it passed before.
async fn exhaust(socket: &mut Socket, request: &str) -> (usize, Answer) {
    for passed in 0.. {
        let answer = socket.ask(request).await;
        if answer.status != 200 {
            return (passed, answer);
        }
    }
    unreachable!("there is an end to every bucket")
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_as_long_as_told_passes() {
    let (world, acme) = world(World::builder(), r#"{"max_req_per_sec": 2, "req_burst": 5}"#).await;
    let globex = tenant(&world, "globex", r#"{"max_msgs_per_sec": 4, "msgs_burst": 7}"#).await;
    let port = world.port();
    let requests = async {
        let mut socket = Socket::open(port).await;
        let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers());
        for round in 0..3 {
            let (_, refusal) = exhaust(&mut socket, &request).await;
            assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
            assert_eq!(retry_after(&refusal), 1, "half a second, in whole ones");
            tokio::time::sleep(Duration::from_secs(retry_after(&refusal))).await;
            assert_eq!(socket.ask(&request).await.status, 200, "round {round}");
        }
    };
    let messages = async {
        let mut socket = Socket::open(port).await;
        let body = push(7, "x");
        let request =
            format!("{PUSH} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{body}", globex.headers(), body.len());
        assert_eq!(socket.ask(&request).await.status, 200);
        for round in 0..2 {
            let refusal = socket.ask(&request).await;
            assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
            let told = retry_after(&refusal);
            assert!((1..=2).contains(&told), "seven at four a second: {told}");
            tokio::time::sleep(Duration::from_secs(told)).await;
            assert_eq!(socket.ask(&request).await.status, 200, "round {round}");
        }
    };
    tokio::join!(requests, messages);
}

#[tokio::test(flavor = "multi_thread")]
async fn over_many_small_intervals_the_rate_is_what_it_says() {
    let rate = 100;
    let caps = format!(r#"{{"max_req_per_sec": {rate}, "req_burst": 1}}"#);
    let (world, acme) = world(World::builder(), &caps).await;
    let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers());
    let seconds = crate::support::rounds(2);
    let mut socket = Socket::open(world.port()).await;
    let (begun, mut passed) = (Instant::now(), 0_u32);
    while begun.elapsed() < Duration::from_secs(seconds.into()) {
        passed += u32::from(socket.ask(&request).await.status == 200);
    }
    let allowed = begun.elapsed().as_secs_f64() * f64::from(rate) + 1.0;
    println!("{passed} passed of {allowed:.1} at {rate}/s over {seconds} s");
    assert!(f64::from(passed) <= allowed, "{passed} of {allowed}");
    // A bucket of one loses what nobody asks for while the last answer is on its way.
    assert!(f64::from(passed) >= allowed * 0.5, "{passed} of {allowed}");
    assert_eq!(u32::try_from(world.recorder().count()).unwrap(), passed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_limit_refuses_takes_nothing_from_the_others() {
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 100, "max_msgs_per_sec": 1, "msgs_burst": 100,
        "max_queues": 1, "max_partitions_per_queue": 2, "max_payload_bytes": 10, "max_batch_items": 50,
        "max_retained_bytes": 1000, "max_retention_seconds": 60, "max_parked_pops": 0}"#;
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, caps).await;
    // A request of its own is free of all this, and makes the proxy read the known queues.
    eventually("the rows are known", LIMIT, async || {
        pushes(&world, &acme, &push(51, "x")).await;
        live(admin, &acme).await["queues"].as_u64()
    })
    .await;
    let before = live(admin, &acme).await;
    assert_eq!(before["requests"]["left"], 100, "refusals so far took nothing");
    let refusals = [
        ("/api/v1/push", push(51, "x"), (413, "payload_too_large")),
        ("/api/v1/push", push(1, "0123456789"), (413, "payload_too_large")),
        ("/api/v1/push", push_to([("a", "1"), ("b", "1")], "x"), (403, "quota_exceeded")),
        ("/api/v1/push", push_to([("a", "1"), ("a", "2"), ("a", "3")], "x"), (403, "quota_exceeded")),
        ("/api/v1/configure", r#"{"queue":"q","retentionSeconds":61}"#.to_owned(), (403, "quota_exceeded")),
        ("/api/v1/pop/queue/q?wait=true", String::new(), (429, "rate_limited")),
    ];
    for (route, body, (status, code)) in &refusals {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let answer = world.ask(&format!("{method} {route}"), &acme.headers(), body).await;
        assert_eq!(outcome(&answer), refused(*status, code), "{route} {body}");
        assert_eq!(live(admin, &acme).await, before, "{route} {body}");
    }
    // The rate of messages refuses: the one of requests is not touched.
    assert_eq!(pushes(&world, &acme, &push(50, "x")).await.status, 200);
    assert_eq!(pushes(&world, &acme, &push(50, "x")).await.status, 200);
    let spent = live(admin, &acme).await["requests"]["left"].as_u64().unwrap();
    for _ in 0..5 {
        assert_eq!(outcome(&pushes(&world, &acme, &push(50, "x")).await), refused(429, "rate_limited"));
    }
    assert!(live(admin, &acme).await["requests"]["left"].as_u64().unwrap() >= spent);
    assert_eq!(world.recorder().take().len(), 2);
    assert_eq!(world.recorder().heads(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_denies() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, "{}").await;
    let ask = async |name: &str| match name {
        "max_parked_pops" => world.ask("GET /api/v1/pop/queue/q?wait=true", &acme.headers(), "").await,
        "max_retention_seconds" => {
            world
                .ask(
                    "POST /api/v1/configure",
                    &acme.headers(),
                    r#"{"queue":"q","options":{"retentionSeconds":1}}"#,
                )
                .await
        }
        // Each time another queue: the one before is there.
        _ => pushes(&world, &acme, &push_to([(name, "p")], "x")).await,
    };
    for name in PLAN_LIMITS {
        for cap in [0, -5] {
            // A burst counts where there is a rate.
            let rate = match name {
                "req_burst" => r#""max_req_per_sec": 1000, "#,
                "msgs_burst" => r#""max_msgs_per_sec": 1000, "#,
                _ => "",
            };
            set(&world, &acme, &format!(r#"{{{rate}"{name}": {cap}}}"#)).await;
            eventually(&format!("{name} {cap}"), LIMIT, async || {
                let limits = crate::support::ask_admin(admin, &format!("/limits/{}", acme.slug)).await.json();
                let known = limits["limits"][name] == cap && limits["live"]["queues"].is_u64();
                if !known {
                    read(&world, &acme).await;
                }
                known.then_some(())
            })
            .await;
            let heads = world.recorder().heads();
            let answer = ask(name).await;
            let (want, wait) = match name {
                "max_req_per_sec" | "req_burst" | "max_msgs_per_sec" | "msgs_burst" => {
                    (refused(429, "rate_limited"), Some("60"))
                }
                "max_parked_pops" => (refused(429, "rate_limited"), Some("5")),
                "max_payload_bytes" | "max_batch_items" => (refused(413, "payload_too_large"), None),
                "max_retained_bytes" => (refused(403, "storage_quota_exceeded"), None),
                _ => (refused(403, "quota_exceeded"), None),
            };
            assert_eq!((outcome(&answer), answer.header("retry-after")), (want, wait), "{name} {cap}");
            assert_eq!(world.recorder().heads(), heads, "{name} {cap}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_plan_takes_effect_at_once_and_gives_no_burst_away() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, r#"{"max_req_per_sec": 1, "req_burst": 2}"#).await;
    let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers());
    let mut socket = Socket::open(world.port()).await;
    exhaust(&mut socket, &request).await;
    let changed = Instant::now();
    set(&world, &acme, r#"{"max_req_per_sec": 10, "req_burst": 1000}"#).await;
    let effective = async |burst: u64| {
        eventually(&format!("a burst of {burst}"), LIMIT, async || {
            let requests = live(admin, &acme).await["requests"].clone();
            (requests["burst"] == burst).then_some(requests)
        })
        .await
    };
    let now = effective(1_000).await;
    assert!(changed.elapsed() < Duration::from_secs(1), "the promise: {:?}", changed.elapsed());
    // What it has now came in since it had nothing.
    let grown = changed.elapsed().as_secs() * 10 + 13;
    assert!(now["left"].as_u64().unwrap() <= grown, "{now} after {:?}", changed.elapsed());
    let (passed, refusal) = exhaust(&mut socket, &request).await;
    let grown = changed.elapsed().as_secs() * 10 + 13;
    assert!(passed as u64 <= grown, "{passed} after {:?}", changed.elapsed());
    assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
    // Lowered, a full bucket is cut down; lifted, nobody is refused; and back.
    set(&world, &acme, "{}").await;
    eventually("lifted", LIMIT, async || (live(admin, &acme).await["requests"].is_null()).then_some(()))
        .await;
    for _ in 0..50 {
        let answer = socket.ask(&request).await;
        assert_eq!((answer.status, answer.header("ratelimit")), (200, None));
    }
    set(&world, &acme, r#"{"max_req_per_sec": 1, "req_burst": 3}"#).await;
    assert!(effective(3).await["left"].as_u64().unwrap() <= 3);
    let (passed, _) = exhaust(&mut socket, &request).await;
    assert!(passed <= 4, "{passed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_is_made_again_starts_anew_under_its_caps() {
    let (world, acme) = world(World::builder(), r#"{"max_req_per_sec": 1, "req_burst": 3}"#).await;
    let request =
        |tenant: &Tenant| format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", tenant.headers());
    let mut socket = Socket::open(world.port()).await;
    exhaust(&mut socket, &request(&acme)).await;
    world.sql(&format!("SELECT queen_proxy.delete_tenant('{}', true)", acme.tenant)).await;
    let again = tenant(&world, "acme", r#"{"max_req_per_sec": 1, "req_burst": 2}"#).await;
    assert!(again.slug == acme.slug && again.cluster != acme.cluster);
    eventually("the new one is known", LIMIT, async || {
        let answer = world.ask("GET /auth/me", &again.headers(), "").await;
        (answer.status == 200).then_some(())
    })
    .await;
    let (passed, refusal) = exhaust(&mut socket, &request(&again)).await;
    assert!((2..=3).contains(&passed), "{passed}");
    assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
    assert_eq!(read(&world, &acme).await.status, 401, "the old key opens nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_clusters_share_a_bucket_and_all_keys_of_one_do() {
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 4, "max_msgs_per_sec": 1, "msgs_burst": 4}"#;
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, caps).await;
    let globex = tenant(&world, "globex", caps).await;
    // Another cluster of the same tenant.
    let second: uuid::Uuid =
        sqlx::query_scalar("SELECT queen_proxy.create_cluster($1, 'acme-stage', 'pro', $2)")
            .bind(acme.tenant)
            .bind(world.cell_id)
            .fetch_one(&mut world.control().await)
            .await
            .unwrap();
    let (_, key) = world.key(second, &["produce", "consume", "read", "admin"]).await;
    let stage = Tenant { cluster: second, slug: "acme-stage".to_owned(), key, ..acme.clone() };
    set(&world, &stage, caps).await;
    for other in [&globex, &stage] {
        assert_eq!(read(&world, other).await.status, 200);
    }
    let full = |view: &serde_json::Value| view["messages"]["left"] == 4;
    for _ in 0..10 {
        pushes(&world, &acme, &push(1, "x")).await;
    }
    let (_, other_key) = world.key(acme.cluster, &["produce"]).await;
    let colleague = Tenant { key: other_key, ..acme.clone() };
    let many = pushes(&world, &colleague, &push(4, "x")).await;
    assert_eq!(outcome(&many), refused(429, "rate_limited"), "another key is no other bucket");
    for other in [&globex, &stage] {
        assert!(full(&live(admin, other).await), "{}", other.slug);
        assert_eq!(pushes(&world, other, &push(4, "x")).await.status, 200, "{}", other.slug);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_are_booked_afterwards_and_pushes_pay_for_them() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, r#"{"max_msgs_per_sec": 10, "msgs_burst": 10}"#).await;
    let messages: Vec<_> = (0..25).map(|id| serde_json::json!({"id": id, "data": 1})).collect();
    let batch = serde_json::json!({"messages": messages, "success": true}).to_string();
    world.recorder().reply(Reply::Text(200, batch));
    assert_eq!(pushes(&world, &acme, &push(1, "x")).await.status, 200);
    let pop = world.ask("GET /api/v1/pop/queue/q", &acme.headers(), "").await;
    assert_eq!(pop.status, 200);
    eventually("a debt", LIMIT, async || {
        (live(admin, &acme).await["messages"]["left"].as_i64().unwrap() < 0).then_some(())
    })
    .await;
    // Pops are never refused for it.
    world.recorder().reply(Reply::Json(r#"{"messages":[]}"#));
    assert_eq!(world.ask("GET /api/v1/pop/queue/q", &acme.headers(), "").await.status, 200);
    let refusal = pushes(&world, &acme, &push(1, "x")).await;
    assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
    assert!((1..=2).contains(&retry_after(&refusal)), "{}", retry_after(&refusal));
    tokio::time::sleep(Duration::from_secs(retry_after(&refusal))).await;
    assert_eq!(pushes(&world, &acme, &push(1, "x")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_beyond_the_burst_passes_a_full_bucket_and_leaves_a_debt() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, r#"{"max_msgs_per_sec": 10, "msgs_burst": 20}"#).await;
    let large = pushes(&world, &acme, &push(1_000, "x")).await;
    assert_eq!(large.status, 200);
    assert_eq!(large.header("ratelimit-policy"), Some(r#""messages";q=20;w=2"#));
    assert_eq!(large.header("ratelimit"), Some(r#""messages";r=0;t=100"#));
    let left = live(admin, &acme).await["messages"]["left"].as_i64().unwrap();
    assert!((-980..-900).contains(&left), "{left}");
    let refusal = pushes(&world, &acme, &push(1, "x")).await;
    assert_eq!((outcome(&refusal), retry_after(&refusal)), (refused(429, "rate_limited"), 60));
    assert_eq!(error(&refusal), "message rate limit reached");
    assert_eq!(read(&world, &acme).await.status, 200, "what carries no message goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_headers_tell_the_tightest_rate_also_when_nothing_is_refused() {
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 10, "max_msgs_per_sec": 1, "msgs_burst": 100}"#;
    let (world, acme) = world(World::builder(), caps).await;
    let first = pushes(&world, &acme, &push(50, "x")).await;
    assert_eq!(first.status, 200);
    assert_eq!(first.header("ratelimit-policy"), Some(r#""requests";q=10;w=10, "messages";q=100;w=100"#));
    assert_eq!(first.header("ratelimit"), Some(r#""messages";r=50;t=50"#));
    // Of a request without messages only the rate of requests is told.
    let second = read(&world, &acme).await;
    assert_eq!(second.header("ratelimit-policy"), Some(r#""requests";q=10;w=10"#));
    let told = second.header("ratelimit").unwrap();
    assert!(told.starts_with(r#""requests";r=8;t="#) || told.starts_with(r#""requests";r=9;t="#), "{told}");
    // What goes over says as much, beside how long to wait.
    let third = pushes(&world, &acme, &push(90, "x")).await;
    assert_eq!(outcome(&third), refused(429, "rate_limited"));
    let left = third.header("ratelimit").unwrap();
    assert!(left.starts_with(r#""messages";r=5"#), "{left}");
    assert!((38..=40).contains(&retry_after(&third)), "{}", retry_after(&third));
    assert_eq!(third.header("content-type"), Some("application/json"));
}

/// Acceptance case 14 of the contract.
#[tokio::test(flavor = "multi_thread")]
async fn sixty_quick_reads_on_the_free_plan_meet_its_rate() {
    let (world, acme) = world(World::builder(), "{}").await;
    world
        .sql(&format!(
            "SELECT queen_proxy.assign_plan('{0}', 'free'); SELECT queen_proxy.set_limit_override('{0}', '{{}}')",
            acme.cluster
        ))
        .await;
    let mut socket = Socket::open(world.port()).await;
    let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers());
    let begun = Instant::now();
    let (mut passed, mut limited) = (0_u64, 0);
    for _ in 0..60 {
        let answer = socket.ask(&request).await;
        if answer.status == 200 {
            passed += 1;
        } else {
            limited += 1;
            assert_eq!(outcome(&answer), refused(429, "rate_limited"));
            assert!(String::from_utf8_lossy(&answer.body).contains(r#""code":"rate_limited""#));
            assert_eq!(retry_after(&answer), 1);
        }
    }
    let most = 25 + 5 * (begun.elapsed().as_secs() + 1);
    assert!(limited > 0 && (25..=most).contains(&passed), "{passed} passed of {most}, {limited} limited");
}

/// Acceptance case 23 of the contract.
#[tokio::test(flavor = "multi_thread")]
async fn on_a_shared_host_a_narrow_cap_is_its_own_tenants_alone() {
    let builder = World::builder().env("QUEEN_PROXY_SHARED_HOSTS", "shared.q.example");
    let (world, acme) = world(builder, r#"{"max_req_per_sec": 1000, "req_burst": 1000}"#).await;
    let globex = tenant(&world, "globex", r#"{"max_req_per_sec": 1, "req_burst": 2}"#).await;
    let shared =
        |tenant: &Tenant| format!("Host: shared.q.example\r\nAuthorization: Bearer {}\r\n", tenant.key);
    let mut limited = 0;
    for _ in 0..12 {
        let narrow = world.ask("GET /api/v1/resources/queues", &shared(&globex), "").await;
        if narrow.status != 200 {
            limited += 1;
            assert_eq!(outcome(&narrow), refused(429, "rate_limited"));
        }
        let wide = world.ask("GET /api/v1/resources/queues", &shared(&acme), "").await;
        assert_eq!(wide.status, 200);
    }
    assert!(limited > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_that_puts_messages_in_counts_them_and_only_those() {
    let caps = r#"{"max_msgs_per_sec": 1, "msgs_burst": 100}"#;
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, "{}").await;
    world.sql("UPDATE queen_proxy.plans SET features = '{\"streams\": true, \"ephemeral\": true}'").await;
    let item = r#"{"queue":"q","payload":1}"#;
    let three = format!("{item},{item},{item}");
    let routes = [
        ("/api/v1/push", format!(r#"{{"items":[{three}]}}"#), 3),
        (
            "/api/v1/transaction",
            format!(r#"{{"operations":[{{"type":"push","items":[{three}]}},{{"type":"ack"}}]}}"#),
            3,
        ),
        ("/streams/v1/cycle", format!(r#"{{"push_items":[{three}],"acks":[1]}}"#), 3),
        ("/api/v1/ephemeral/push", r#"{"messages":[1,2,3]}"#.to_owned(), 3),
        // What a cell would store of an odd body is counted: the greater of two readings, items that are none.
        ("/api/v1/push", format!(r#"{{"items":[{item}],"items":[{three},1]}}"#), 4),
        ("/api/v1/push", format!(r#"{{"\u0069tems":[{three}]}}"#), 3),
        ("/api/v1/configure", r#"{"queue":"q"}"#.to_owned(), 0),
        ("/api/v1/dlq/7/replay", r#"{"queue":"q","partition":"p"}"#.to_owned(), 0),
        ("/api/v1/ack", format!(r#"{{"items":[{three}]}}"#), 0),
        ("/api/v1/push", "no JSON".to_owned(), 0),
    ];
    for (index, (route, body, messages)) in routes.iter().enumerate() {
        let tenant = tenant(&world, &format!("route{index}"), caps).await;
        let answer = world.ask(&format!("POST {route}"), &tenant.headers(), body).await;
        assert_eq!(answer.status, 200, "{route} {body}");
        let left = live(admin, &tenant).await["messages"]["left"].as_u64().unwrap();
        assert!((100 - messages..=100).contains(&left), "{route} {body}: {left}");
        assert_eq!(left == 100, *messages == 0, "{route} {body}: {left}");
    }
    assert_eq!(
        live(admin, &acme).await,
        serde_json::Value::Null,
        "whoever has asked nothing has no counters"
    );
}
