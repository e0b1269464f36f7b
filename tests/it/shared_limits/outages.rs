//! A store that dies, hangs and comes back: no request fails or waits for it.

use super::{LIMIT, PROXIES, all_say, build, load, tenant, world};
use crate::support::{Redis, World, eventually, seconds};
use nix::sys::signal::Signal;
use std::time::Duration;

const SHARED: &str = "limits: shared with other proxies";
const AWAY: &str = "limits: the store is away";
const RATE: u64 = 100;
const BURST: u64 = 100;
const CAPS: &str = r#"{"max_req_per_sec": 100, "req_burst": 100}"#;
/// What a busy machine adds to the 100 ms for which a request may wait.
const SCHEDULING: Duration = Duration::from_millis(400);

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_dies_under_load_leaves_each_proxy_its_part() {
    let mut redis = Redis::start().await;
    let world = world(&redis).await;
    let acme = tenant(&world, "acme", CAPS).await;
    let length = seconds(6);
    let clients = [3; PROXIES];
    let killing = async {
        tokio::time::sleep(length / 3).await;
        redis.kill();
    };
    let (told, ()) = tokio::join!(load::run(&world, &acme, &clients, length), killing);
    // Parts of what was left, not of a full burst: nothing is there twice.
    told.assert_about(RATE, BURST, "killed");
    all_say(&world, AWAY, 1).await;
    let apart = load::run(&world, &acme, &clients, length / 2).await;
    apart.assert_about(RATE, BURST, "apart");
    // It comes back without a memory, and grants no second burst.
    let again = async {
        tokio::time::sleep(length / 3).await;
        redis.start_again().await;
        all_say(&world, SHARED, 2).await;
    };
    let (told, ()) = tokio::join!(load::run(&world, &acme, &clients, length), again);
    told.assert_about(RATE, BURST, "back");
    let one = load::run(&world, &acme, &[6, 0, 0], length / 2).await;
    one.assert_about(RATE, BURST, "all of it for one");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_hangs_delays_nobody() {
    let redis = Redis::start().await;
    let world = world(&redis).await;
    let acme = tenant(&world, "acme", CAPS).await;
    let length = seconds(6);
    let hanging = async {
        for round in 1..=2 {
            tokio::time::sleep(length / 5).await;
            redis.signal(Signal::SIGSTOP);
            all_say(&world, AWAY, round).await;
            tokio::time::sleep(length / 10).await;
            redis.signal(Signal::SIGCONT);
            all_say(&world, SHARED, round + 1).await;
        }
    };
    let (told, ()) = tokio::join!(load::run(&world, &acme, &[1; PROXIES], length), hanging);
    told.assert_about(RATE, BURST, "hanging");
    println!("slowest: {:.0?}", &told.slowest[..20]);
    // Each client may have waited once for each time; a few more are the machine's.
    let most = Duration::from_millis(100) + SCHEDULING;
    assert!(told.slowest[3] < most, "{:?}", &told.slowest[..10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_from_the_start_each_proxy_serves_alone() {
    let mut redis = Redis::start().await;
    redis.kill();
    let builder = World::builder().recorder().admin().env("QUEEN_PROXY_LIMITS", redis.url());
    let world = builder.start().await;
    let acme = tenant(&world, "acme", CAPS).await;
    all_say(&world, AWAY, 1).await;
    assert_eq!(world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await.status, 200);
    assert_eq!(world.figure(r#"queen_proxy_limits_store_mode{mode="local"}"#).await, 1);
    redis.start_again().await;
    eventually("it is shared", LIMIT, async || {
        (world.figure(r#"queen_proxy_limits_store_mode{mode="shared"}"#).await == 1).then_some(())
    })
    .await;
    assert_eq!(world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await.status, 200);
    assert_eq!(world.figure("queen_proxy_limits_store_replicas").await, 1);
    assert!(world.figure(r#"queen_proxy_limits_store_round_trips_total{outcome="ok"}"#).await > 0);
    let shown = crate::support::ask_admin(world.admin, "/status.json").await.json()["limits_store"].clone();
    assert_eq!(shown["present"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_with_tls_is_believed_when_its_certificate_is_good() {
    let redis = Redis::start().await;
    let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/tls/ca.pem");
    let builder = |url: &str| World::builder().recorder().env("QUEEN_PROXY_LIMITS", url);
    let url = redis.secure_url();
    let world = builder(&url).env("SSL_CERT_FILE", authority).start().await;
    let acme = tenant(&world, "acme", CAPS).await;
    all_say(&world, SHARED, 1).await;
    assert_eq!(world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await.status, 200);
    // Signed by somebody whom nobody knows, and made out to another name.
    let unknown = builder(&url).start().await;
    all_say(&unknown, AWAY, 1).await;
    let elsewhere = url.replace("localhost", "127.0.0.1");
    let elsewhere = builder(&elsewhere).env("SSL_CERT_FILE", authority).start().await;
    all_say(&elsewhere, AWAY, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_the_store_forgets_are_brought_again() {
    let redis = Redis::start().await;
    let world = build(World::builder(), &redis).await;
    let acme = tenant(&world, "acme", CAPS).await;
    let mut connection = redis.connect().await;
    for proxy in 0..PROXIES {
        redis::cmd("SCRIPT").arg("FLUSH").exec_async(&mut connection).await.unwrap();
        let answer = world.ask_proxy(proxy, "GET /api/v1/resources/queues", &acme.headers(), "").await;
        assert_eq!(answer.status, 200);
    }
    for (_, process) in &world.proxies {
        let log = process.log();
        // A machine that is busy elsewhere may have been late.
        let failures = log.lines().filter(|line| line.contains(AWAY) && !line.contains("no answer in time"));
        assert_eq!(failures.count(), 0, "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_is_wrong_is_no_reason_to_refuse_anybody_and_is_not_told() {
    let redis = Redis::start().await;
    let wrong = "a-wrong-and-secret-word";
    let url = format!("redis://somebody:{wrong}@127.0.0.1:{}/", redis.port);
    let world = World::builder().recorder().env("QUEEN_PROXY_LIMITS", &url).start().await;
    let acme = tenant(&world, "acme", CAPS).await;
    all_say(&world, AWAY, 1).await;
    assert_eq!(world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await.status, 200);
    let log = world.proxies[0].1.log();
    assert!(log.contains(&format!("redis://127.0.0.1:{}", redis.port)), "{log}");
    assert!(!log.contains(wrong) && !log.contains("somebody"), "{log}");
}
