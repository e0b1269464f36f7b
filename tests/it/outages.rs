//! The control plane's database away, cut off and back, under traffic.

use crate::support::{Passage, Tenant, World, eventually};
use std::time::{Duration, Instant};

const GET: &str = "GET /api/v1/kv/ns/k";

async fn status(world: &World, tenant: &Tenant) -> u16 {
    world.ask(GET, &tenant.headers(), "").await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn known_tenants_outlive_the_database_for_the_whole_grace() {
    const GRACE: Duration = Duration::from_secs(6);
    let world = World::builder()
        .own_control_postgres()
        .env("QUEEN_PROXY_CACHE_TTL_MS", 200)
        .env("QUEEN_PROXY_STALE_GRACE_MS", GRACE.as_millis())
        .env("PXDB_TIMEOUT_MS", 1000)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let unseen_key = world.key(acme.cluster, &["read"]).await.1;
    assert_eq!(status(&world, &acme).await, 200);

    // What was known last was asked for before the server began to stop, which takes a while.
    let stopped = Instant::now();
    world.control_server.stop();
    let mut served = 0;
    while stopped.elapsed() < GRACE.checked_sub(Duration::from_secs(1)).unwrap() {
        let asked = Instant::now();
        assert_eq!(status(&world, &acme).await, 200, "{:?} into the outage", stopped.elapsed());
        assert!(asked.elapsed() < Duration::from_secs(2));
        served += 1;
    }
    assert!(served > 100, "{served} requests served from what was known");
    // Nothing is known of these, and nothing is made up: the answer is the same every time.
    for _ in 0..3 {
        let unknown = world.ask(GET, "Host: nobody.q.example\r\n", "").await;
        assert_eq!((unknown.status, unknown.code().as_str()), (421, "cluster_unknown"));
        assert_eq!(status(&world, &globex).await, 421);
        let headers = format!("Host: {}\r\nAuthorization: Bearer {unseen_key}\r\n", acme.host());
        assert_eq!(world.ask(GET, &headers, "").await.status, 401);
    }
    eventually("the grace ends", GRACE + Duration::from_secs(5), async || {
        (status(&world, &acme).await == 421).then_some(())
    })
    .await;
    assert!(
        stopped.elapsed() >= GRACE.checked_sub(Duration::from_millis(200)).unwrap(),
        "{:?}",
        stopped.elapsed()
    );

    world.control_server.start_again();
    // Silence was not remembered as absence: what was there works as soon as the database does.
    for tenant in [&acme, &globex] {
        eventually("recovery by itself", Duration::from_secs(5), async || {
            (status(&world, tenant).await == 200).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changed_while_the_listener_was_cut_off_is_seen_after_the_reconnect() {
    let world = World::builder().own_control_postgres().start().await;
    let acme = world.tenant("acme").await;
    let (key_id, key) = world.key(acme.cluster, &["read"]).await;
    let headers = format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", acme.host());
    assert_eq!(world.ask(GET, &headers, "").await.status, 200);
    // One transaction that first cuts the listener off and then revokes: its notification is lost.
    world
        .sql(&format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
              WHERE application_name = 'queen-proxy-listen' AND datname = current_database();
             SELECT queen_proxy.revoke_api_key('{key_id}')"
        ))
        .await;
    let revoked = Instant::now();
    eventually("the revocation", Duration::from_secs(5), async || {
        (world.ask(GET, &headers, "").await.status == 401).then_some(())
    })
    .await;
    println!("effect of a revocation while the listener was cut off: {:?}", revoked.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_restarts_under_traffic_is_not_noticed() {
    let world = World::builder().own_control_postgres().env("QUEEN_PROXY_CACHE_TTL_MS", 100).start().await;
    let acme = world.tenant("acme").await;
    assert_eq!(status(&world, &acme).await, 200);
    for _ in 0..2 {
        let traffic = async {
            for _ in 0..300 {
                assert_eq!(status(&world, &acme).await, 200);
            }
        };
        let restart = async {
            let server = std::sync::Arc::clone(&world.control_server);
            tokio::task::spawn_blocking(move || {
                server.stop();
                server.start_again();
            })
            .await
            .unwrap();
        };
        tokio::join!(traffic, restart);
    }
    // The listener has come back too: changes are heard again.
    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'suspended')", acme.tenant)).await;
    eventually("a change after the restarts", Duration::from_secs(5), async || {
        (status(&world, &acme).await == 403).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_hangs_does_not_hold_up_known_tenants() {
    let world = World::builder()
        .own_control_postgres()
        .env("QUEEN_PROXY_CACHE_TTL_MS", 100)
        .env("PXDB_TIMEOUT_MS", 2000)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    assert_eq!(status(&world, &acme).await, 200);
    // Locked tables answer nobody: to the proxy the database is black-holed.
    let mut lock = world.control().await;
    for statement in
        ["BEGIN", "LOCK TABLE queen_proxy.clusters, queen_proxy.api_keys IN ACCESS EXCLUSIVE MODE"]
    {
        sqlx::query(statement).execute(&mut lock).await.unwrap();
    }
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut served = 0;
    while started.elapsed() < Duration::from_secs(4) {
        let asked = Instant::now();
        assert_eq!(status(&world, &acme).await, 200);
        slowest = slowest.max(asked.elapsed());
        served += 1;
    }
    assert!(served > 100, "{served}");
    assert!(slowest < Duration::from_millis(1500), "{slowest:?}");
    sqlx::query("ROLLBACK").execute(&mut lock).await.unwrap();
    assert_eq!(status(&world, &acme).await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_whose_database_restarts_says_so_and_recovers_by_itself() {
    let world = World::builder().own_cell_postgres().start().await;
    let acme = world.tenant("acme").await;
    let put = async |number: usize| {
        let body = r#"{"value":1,"forever":true}"#;
        world.ask(&format!("PUT /api/v1/kv/ns/{number}"), &acme.headers(), body).await
    };
    let mut accepted = Vec::new();
    for number in 0..20 {
        assert_eq!(put(number).await.status, 200);
        accepted.push(number);
    }
    world.server.stop();
    let away = put(20).await;
    assert_eq!((away.status, away.json()["error"].clone()), (503, "kv_unavailable".into()));
    assert_eq!(away.header("retry-after"), Some("1"));
    assert_eq!(world.ask("GET /health", &acme.headers(), "").await.status, 503);
    world.server.start_again();
    let mut number = 21;
    eventually("recovery by itself", Duration::from_secs(10), async || {
        number += 1;
        let answer = put(number).await;
        assert!(matches!(answer.status, 200 | 503), "{}", answer.status);
        (answer.status == 200).then(|| accepted.push(number))
    })
    .await;
    for number in accepted {
        let answer = world.ask(&format!("GET /api/v1/kv/ns/{number}"), &acme.headers(), "").await;
        assert_eq!(answer.json()["found"], true, "{number}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_first_requests_load_a_cluster_once() {
    let world = World::builder().env("RUST_LOG", "info,queen_proxy=debug,sqlx::query=debug").start().await;
    let acme = world.tenant("acme").await;
    // The notification of acme's making would overtake the load: this one comes behind it.
    let fence = world.tenant("fence").await;
    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'suspended')", fence.tenant)).await;
    eventually("all notifications so far", Duration::from_secs(5), async || {
        (status(&world, &fence).await == 403).then_some(())
    })
    .await;
    let before = loads(&world);
    let request = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..500 {
        let request = request.clone();
        let port = world.port();
        asking.spawn(async move { crate::support::Socket::open(port).await.ask(request).await.status });
    }
    while let Some(status) = asking.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
    let after = loads(&world);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "clusters and keys loaded");
}

/// How often the first proxy has asked for a cluster and for a key.
fn loads(world: &World) -> (usize, usize) {
    let log = world.proxies[0].1.log();
    let count =
        |of: &str| log.lines().filter(|line| line.contains("sqlx::query") && line.contains(of)).count();
    (count("FROM queen_proxy.clusters c"), count("unnest(scopes)"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_hears_nothing_more_is_replaced() {
    let world = World::builder().recorder().proxies(2).relay().env("PXDB_TIMEOUT_MS", 500).start().await;
    let tenant = world.tenant("acme").await;
    let (id, key) = world.key(tenant.cluster, &["read"]).await;
    let headers = format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", tenant.host());
    let asked = async |proxy: usize| world.ask_proxy(proxy, "GET /api/v1/kv/ns/k", &headers, "").await.status;
    assert_eq!((asked(0).await, asked(1).await), (200, 200));
    world.relay().silence_listeners();
    world.sql(&format!("SELECT queen_proxy.revoke_api_key('{id}')")).await;
    // A heartbeat after 5 s of silence, its answer's time, and a new connection.
    for proxy in 0..2 {
        eventually("401 on every proxy", Duration::from_secs(10), async || {
            (asked(proxy).await == 401).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_holed_database_is_bridged_and_recovered_from() {
    let world = World::builder()
        .recorder()
        .relay()
        .env("PXDB_TIMEOUT_MS", 500)
        .env("QUEEN_PROXY_CACHE_TTL_MS", 50)
        .start()
        .await;
    let known = world.tenant("acme").await;
    let unknown = world.tenant("globex").await;
    assert_eq!(status(&world, &known).await, 200);
    world.relay().set(Passage::Silent);
    let started = Instant::now();
    // Every entry has expired many times over by the end.
    while started.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        assert_eq!(status(&world, &known).await, 200);
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    }
    let answer = world.ask("GET /api/v1/kv/ns/k", &unknown.headers(), "").await;
    assert_eq!((answer.status, answer.code()), (421, "cluster_unknown".to_owned()));
    world.relay().set(Passage::Open);
    eventually("the unknown tenant", Duration::from_secs(10), async || {
        (status(&world, &unknown).await == 200).then_some(())
    })
    .await;
    assert_eq!(status(&world, &known).await, 200);
}
