//! Strangers in great number cost a bounded amount and are in nobody's way (scenario 23 of `notes/cases.md`).

use super::{PUSH, live, metric, push, pushes, with_admin, world};
use crate::support::{Socket, World, rounds};
use std::time::Duration;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn random_keys_and_hosts_leave_no_counters_and_real_tenants_in_peace() {
    const CONNECTIONS: u32 = 8;
    // A million at full size.
    let each = rounds(2_400) / CONNECTIONS;
    let (builder, admin) = with_admin(World::builder().env("QUEEN_PROXY_NEGATIVE_MAX_ENTRIES", 1_000));
    let (world, acme) = world(builder, r#"{"max_req_per_sec": 100000, "req_burst": 100000}"#).await;
    let (mine, port) = (acme.host(), world.port());
    assert_eq!(pushes(&world, &acme, &push(1, "x")).await.status, 200);
    let before = world.proxies[0].1.resident();
    let mut flood = tokio::task::JoinSet::new();
    for _ in 0..CONNECTIONS {
        let mine = mine.clone();
        flood.spawn(async move {
            let mut socket = Socket::open(port).await;
            for round in 0..each {
                let random = Uuid::new_v4().simple().to_string();
                let (host, want) =
                    if round % 2 == 0 { (mine.clone(), 401) } else { (format!("{random}.q.example"), 421) };
                let head = format!("Host: {host}\r\nAuthorization: Bearer qk_none_{random}\r\n");
                let answer =
                    socket.ask(format!("{PUSH} HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\n{{}}")).await;
                assert_eq!(answer.status, want);
                if answer.header("connection") == Some("close") {
                    socket = Socket::open(port).await;
                }
            }
        });
    }
    let mut served = 0;
    while !flood.is_empty() {
        let body = push(1, "x");
        let ask = pushes(&world, &acme, &body);
        let answer = tokio::time::timeout(Duration::from_secs(5), ask).await.expect("not held up");
        assert_eq!(answer.status, 200);
        served += 1;
        while let Some(done) = flood.try_join_next() {
            done.unwrap();
        }
    }
    assert!(served > 10, "{served}");
    let grown = world.proxies[0].1.resident().saturating_sub(before);
    println!("{} strangers, {served} pushes served, {} KiB more", each * CONNECTIONS, grown >> 10);
    assert!(grown < 48 << 20, "{grown} bytes");
    assert_eq!(metric(admin, "queen_proxy_limited_clusters").await, Some(1.0), "only the tenant is counted");
    assert_eq!(live(admin, &acme).await["requests"]["burst"], 100_000);
    // Not one stranger's request became one of the tenant's.
    assert_eq!(world.recorder().take().len(), served + 1);
}
