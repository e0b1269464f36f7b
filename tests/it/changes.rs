//! Changes in the control plane take effect on every proxy at once, while traffic runs.

use crate::support::{Tenant, World, eventually};
use std::time::{Duration, Instant};

const KV: &str = "/api/v1/kv/ns/k";
const PUT_BODY: &str = r#"{"value":1,"forever":true}"#;
/// The promise (D23).
const PROMISE: Duration = Duration::from_secs(1);

async fn outcome(world: &World, proxy: usize, method: &str, headers: &str) -> (u16, String) {
    let body = if method == "PUT" { PUT_BODY } else { "" };
    let answer = world.ask_proxy(proxy, &format!("{method} {KV}"), headers, body).await;
    let code = if answer.status == 200 { String::new() } else { answer.code() };
    (answer.status, code)
}

/// Waits until both proxies answer as wanted.
async fn takes_effect(world: &World, what: &str, method: &str, headers: &str, want: (u16, &str)) {
    for proxy in 0..2 {
        eventually(&format!("{what} on proxy {proxy}"), PROMISE, async || {
            let got = outcome(world, proxy, method, headers).await;
            (got == (want.0, want.1.to_owned())).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lifecycle_changes_bite_within_a_second_and_pass_again() {
    let world = World::builder().proxies(2).start().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let own = acme.headers();
    takes_effect(&world, "the new cluster", "PUT", &own, (200, "")).await;
    let tenant =
        |status: &str| format!("SELECT queen_proxy.set_tenant_status('{}', '{status}')", acme.tenant);
    let cluster =
        |status: &str| format!("SELECT queen_proxy.set_cluster_status('{}', '{status}')", acme.cluster);
    // statement, then what a put and a get answer
    let steps = [
        (tenant("suspended"), (403, "cluster_suspended"), (403, "cluster_suspended")),
        (tenant("active"), (200, ""), (200, "")),
        (tenant("grace"), (403, "push_blocked"), (200, "")),
        (cluster("suspended"), (403, "cluster_suspended"), (403, "cluster_suspended")),
        (cluster("active"), (403, "push_blocked"), (200, "")),
        (tenant("active"), (200, ""), (200, "")),
        (cluster("push_blocked"), (403, "push_blocked"), (200, "")),
        (tenant("deleting"), (403, "cluster_suspended"), (403, "cluster_suspended")),
        (tenant("active"), (403, "push_blocked"), (200, "")),
        (cluster("deleting"), (403, "cluster_suspended"), (403, "cluster_suspended")),
        (cluster("active"), (200, ""), (200, "")),
    ];
    for (statement, put, get) in steps {
        world.sql(&statement).await;
        takes_effect(&world, &statement, "PUT", &own, put).await;
        takes_effect(&world, &statement, "GET", &own, get).await;
        // Strangers learn nothing of the status, and the neighbour notices nothing.
        let stranger = outcome(&world, 0, "GET", &format!("Host: {}\r\n", acme.host())).await;
        assert_eq!(stranger, (401, "unauthorized".to_owned()), "{statement}");
        assert_eq!(outcome(&world, 1, "PUT", &globex.headers()).await.0, 200);
    }
    // A state that this version does not know is as restrictive as suspended.
    world
        .sql(&format!(
            "ALTER TABLE queen_proxy.clusters DROP CONSTRAINT clusters_status_valid;
             UPDATE queen_proxy.clusters SET status = 'frozen' WHERE id = '{0}';
             SELECT pg_notify('queen_proxy_inval', '{0}')",
            acme.cluster
        ))
        .await;
    takes_effect(&world, "an unknown status", "GET", &own, (403, "cluster_suspended")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_was_asked_for_too_early_works_once_it_is_there() {
    let world = World::builder().proxies(2).start().await;
    for proxy in 0..2 {
        assert_eq!(outcome(&world, proxy, "GET", "Host: late-prod.q.example\r\n").await.0, 421);
    }
    let late = world.tenant("late").await;
    takes_effect(&world, "the cluster", "GET", &late.headers(), (200, "")).await;
    // The same for a key that was tried before it was issued.
    let key = "qk_test_early";
    let early = format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", late.host());
    for proxy in 0..2 {
        assert_eq!(outcome(&world, proxy, "GET", &early).await.0, 401);
    }
    let digest = hex::encode(queen_proxy::identity::digest(key));
    world
        .sql(&format!(
            "SELECT queen_proxy.issue_api_key('{}', 'early', '{digest}', '{{read}}')",
            late.cluster
        ))
        .await;
    takes_effect(&world, "the key", "GET", &early, (200, "")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_features_and_scopes_decide_what_a_key_opens() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    world
        .sql(&format!(
            "INSERT INTO queen_proxy.plans (code, cell_class, features) VALUES ('no-kv', 'shared', '{{\"kv\": false}}');
             SELECT queen_proxy.assign_plan('{}', 'free')",
            acme.cluster
        ))
        .await;
    let produce = world.key(acme.cluster, &["produce"]).await.1;
    let consume = world.key(acme.cluster, &["consume"]).await.1;
    let read = world.key(acme.cluster, &["read"]).await.1;
    let admin = world.key(acme.cluster, &["admin"]).await.1;
    let routes = [
        // line, the keys that open it
        ("POST /api/v1/push", vec![&produce]),
        ("GET /api/v1/pop/queue/q", vec![&consume]),
        ("POST /api/v1/configure", vec![&admin]),
        ("GET /api/v1/resources/queues", vec![&read, &admin]),
        ("GET /api/v1/kv/ns/k", vec![&produce, &consume, &read, &admin]),
        ("PUT /api/v1/kv/ns/k", vec![&produce, &consume]),
        ("DELETE /api/v1/kv/ns/k", vec![&produce, &consume]),
        ("POST /api/v1/kv", vec![&produce, &consume]),
    ];
    for (line, opens) in &routes {
        for key in [&produce, &consume, &read, &admin] {
            let headers = format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", acme.host());
            let answer = world.ask(line, &headers, "").await;
            let want = if opens.contains(&key) { 200 } else { 403 };
            assert_eq!(answer.status, want, "{line}");
            if want == 403 {
                assert_eq!(answer.code(), "forbidden", "{line}");
            }
        }
    }
    // The free plan has neither streams nor traces, and lacks nothing for KV (D2).
    for line in [
        "POST /streams/v1/cycle",
        "GET /streams/v1/x",
        "POST /api/v1/traces",
        "POST /api/v1/timers",
        "GET /api/v1/ephemeral/pop",
    ] {
        let answer = world.ask(line, &acme.headers(), "").await;
        assert_eq!((answer.status, answer.code().as_str()), (403, "feature_gated"), "{line}");
    }
    world.sql(&format!("SELECT queen_proxy.assign_plan('{}', 'no-kv')", acme.cluster)).await;
    for (line, body) in
        [("GET /api/v1/kv/ns/k", ""), ("POST /api/v1/kv", r#"[{"op":"get","ns":"a","key":"b"}]"#)]
    {
        eventually("the plan without kv", PROMISE, async || {
            let answer = world.ask(line, &acme.headers(), body).await;
            (answer.status == 403 && answer.code() == "feature_gated").then_some(())
        })
        .await;
    }
    let facade = r#"[{"op":"put","ns":"queen-kafka","key":"qk:group"}]"#;
    assert_eq!(world.ask("POST /api/v1/kv", &acme.headers(), facade).await.status, 200);
}

/// From the commit to the effect on each of two proxies, with traffic on both. Prints the figures
/// that the README and `benches/RESULTS.md` state; asserts the promise.
#[tokio::test(flavor = "multi_thread")]
async fn commit_to_effect_is_fast_on_every_proxy() {
    const ROUNDS: usize = 60;
    let world = World::builder().proxies(2).recorder().start().await;
    let acme = world.tenant("acme").await;
    let noise = world.tenant("noise").await;
    let mut delays = Vec::new();
    let traffic = async {
        loop {
            for proxy in 0..2 {
                assert_eq!(outcome(&world, proxy, "GET", &noise.headers()).await.0, 200);
            }
        }
    };
    let rounds = async {
        let mut control = world.control().await;
        for round in 0..ROUNDS {
            let (id, key) = world.key(acme.cluster, &["read"]).await;
            let headers = format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", acme.host());
            takes_effect(&world, "the new key", "GET", &headers, (200, "")).await;
            sqlx::query("SELECT queen_proxy.revoke_api_key($1)")
                .bind(id)
                .execute(&mut control)
                .await
                .unwrap();
            let revoked = Instant::now();
            delays.extend(until(&world, &headers, (401, "unauthorized"), revoked).await);

            let status = if round % 2 == 0 { "suspended" } else { "active" };
            let want = if round % 2 == 0 { (403, "cluster_suspended") } else { (200, "") };
            sqlx::query("SELECT queen_proxy.set_cluster_status($1, $2)")
                .bind(acme.cluster)
                .bind(status)
                .execute(&mut control)
                .await
                .unwrap();
            delays.extend(until(&world, &acme.headers(), want, Instant::now()).await);
            if round % 2 == 0 {
                sqlx::query("SELECT queen_proxy.set_cluster_status($1, 'active')")
                    .bind(acme.cluster)
                    .execute(&mut control)
                    .await
                    .unwrap();
                delays.extend(until(&world, &acme.headers(), (200, ""), Instant::now()).await);
            }

            let name = format!("new{round}");
            assert_eq!(outcome(&world, 0, "GET", &format!("Host: {name}-prod\r\n")).await.0, 421);
            let new: Tenant = world.tenant(&name).await;
            delays.extend(until(&world, &new.headers(), (200, ""), Instant::now()).await);
        }
    };
    tokio::select! {
        () = rounds => {}
        () = traffic => {}
    }
    delays.sort();
    let at = |percent: usize| delays[(delays.len() - 1) * percent / 100];
    println!(
        "commit to effect over {} changes on two proxies: p50 {:?}, p99 {:?}, max {:?}",
        delays.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(at(100) < PROMISE);
}

/// How long after `since` each proxy first answers as wanted, both asked side by side.
async fn until(world: &World, headers: &str, want: (u16, &str), since: Instant) -> [Duration; 2] {
    let on = async |proxy: usize| loop {
        if outcome(world, proxy, "GET", headers).await == (want.0, want.1.to_owned()) {
            return since.elapsed();
        }
        assert!(since.elapsed() < Duration::from_secs(5), "{want:?} never came on proxy {proxy}");
    };
    let (first, second) = tokio::join!(on(0), on(1));
    [first, second]
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_plane_notifies_nobody() {
    let world = World::builder().env("QUEEN_PROXY_KEY_TOUCH_MS", 1000).start().await;
    let acme = world.tenant("acme").await;
    let mut heard = Vec::new();
    for (server, database) in [(&world.control_server, &world.control_db), (&world.server, &world.cell_db)] {
        let options = server.connect_options(database);
        let pool =
            sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
        let mut listener = sqlx::postgres::PgListener::connect_with(&pool).await.unwrap();
        listener.listen_all(["queen_proxy_inval", "queen_proxy_revoked", "fence"]).await.unwrap();
        heard.push(listener);
    }
    for _ in 0..50 {
        assert_eq!(outcome(&world, 0, "PUT", &acme.headers()).await.0, 200);
        assert_eq!(outcome(&world, 0, "GET", &acme.headers()).await.0, 200);
    }
    // The one write of the proxy itself that traffic causes.
    eventually("last_used_at is written", Duration::from_secs(10), async || {
        sqlx::query_scalar::<_, bool>("SELECT bool_or(last_used_at IS NOT NULL) FROM queen_proxy.api_keys")
            .fetch_one(&mut world.control().await)
            .await
            .unwrap()
            .then_some(())
    })
    .await;
    for (listener, mut connection) in
        heard.iter_mut().zip([world.control().await, world.cell_database().await])
    {
        sqlx::query("NOTIFY fence").execute(&mut connection).await.unwrap();
        assert_eq!(listener.recv().await.unwrap().channel(), "fence", "nothing came before it");
        let notifying: Vec<String> = sqlx::query_scalar(
            "SELECT p.proname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
              WHERE n.nspname = 'queen' AND p.prosrc ~* 'notify'",
        )
        .fetch_all(&mut connection)
        .await
        .unwrap();
        assert_eq!(notifying, [""; 0]);
    }
}
