//! Totals over three proxies.

use super::{PROXIES, load, losses, tenant, world};
use crate::support::{Redis, Socket, seconds};
use std::time::Duration;
use tokio::task::JoinSet;

/// Little enough for a slow machine to ask for more, and a burst that outlives its pauses.
const RATE: u64 = 100;
const BURST: u64 = 100;
/// A busy machine makes the store late, which is another test's.
const ATTEMPTS: u32 = 5;

fn caps() -> String {
    format!(r#"{{"max_req_per_sec": {RATE}, "req_burst": {BURST}}}"#)
}

/// 30 s at full size (`QUEEN_TEST_SECONDS`).
#[tokio::test(flavor = "multi_thread")]
async fn three_proxies_admit_what_one_limit_allows() {
    let redis = Redis::start().await;
    let world = world(&redis).await;
    for (name, clients) in [("equal", [3, 3, 3]), ("one", [8, 0, 0]), ("skewed", [8, 1, 1])] {
        for attempt in 1..=ATTEMPTS {
            let acme = tenant(&world, &format!("{name}{attempt}"), &caps()).await;
            let before = losses(&world);
            let told = load::run(&world, &acme, &clients, seconds(6)).await;
            let cut_off = losses(&world) - before;
            if cut_off == 0 {
                told.assert_within(RATE, BURST, name);
                break;
            }
            println!("{name}, attempt {attempt}: the store was late {cut_off} times; {} passed", told.passed);
            assert!(attempt < ATTEMPTS, "this machine is too busy to measure anything");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_is_there_once_and_clusters_share_nothing() {
    let redis = Redis::start().await;
    let world = world(&redis).await;
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 60}"#;
    let tenants = [tenant(&world, "acme", caps).await, tenant(&world, "globex", caps).await];
    let mut running = JoinSet::new();
    let began = std::time::Instant::now();
    for client in 0..PROXIES * 2 * 4 {
        let (of, port) = (client % 2, world.proxies[client % PROXIES].0);
        let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", tenants[of].headers());
        running.spawn(async move {
            let mut socket = Socket::open(port).await;
            let mut passed = 0;
            for _ in 0..30 {
                passed += u64::from(socket.ask(&request).await.status == 200);
            }
            (of, passed)
        });
    }
    let mut passed = [0; 2];
    while let Some(told) = running.join_next().await {
        let (of, count) = told.unwrap();
        passed[of] += count;
    }
    let refilled = began.elapsed().as_secs() + 1;
    println!("{passed:?} of 60 and {refilled} s");
    // A proxy that is cut off by a busy machine has a part of its own.
    let apart = if losses(&world) == 0 { 0 } else { 40 };
    for passed in passed {
        assert!((60 - apart..=60 + refilled + apart).contains(&passed), "{passed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_larger_than_the_burst_passes_once_and_leaves_a_debt_to_all() {
    let redis = Redis::start().await;
    let world = world(&redis).await;
    let acme = tenant(&world, "acme", r#"{"max_msgs_per_sec": 10, "msgs_burst": 20}"#).await;
    let push = async |proxy: usize, items: usize| {
        let items: Vec<_> = (0..items).map(|_| serde_json::json!({"queue": "q", "payload": 1})).collect();
        let body = serde_json::json!({ "items": items }).to_string();
        world.ask_proxy(proxy, "POST /api/v1/push", &acme.headers(), &body).await
    };
    assert_eq!(push(0, 50).await.status, 200);
    for proxy in 0..PROXIES {
        let refusal = push(proxy, 1).await;
        assert_eq!(refusal.status, 429);
        // 30 of debt and one, at ten a second.
        let wait: u64 = refusal.header("retry-after").unwrap().parse().unwrap();
        assert!((3..=4).contains(&wait), "{wait}");
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(push(2, 1).await.status, 200, "the Retry-After was true");
}
