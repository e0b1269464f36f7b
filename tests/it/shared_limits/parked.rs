//! Places of waiting pops over three proxies.

use super::{LIMIT, PROXIES, tenant, world};
use crate::support::{Answer, Redis, Reply, Socket, Tenant, World, eventually};
use nix::sys::signal::Signal;
use redis::AsyncCommands;
use std::time::{Duration, Instant};

const CAP: usize = 4;

fn poll(tenant: &Tenant) -> String {
    format!("GET /api/v1/pop/queue/q?wait=true&timeout=60000 HTTP/1.1\r\n{}\r\n", tenant.headers())
}

/// Polls at a proxy: those that wait now, and the refusals.
async fn park(world: &World, proxy: usize, tenant: &Tenant, count: usize) -> (Vec<Socket>, Vec<Answer>) {
    let (mut waiting, mut refusals) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let before = world.recorder().count();
        let mut socket = Socket::open(world.proxies[proxy].0).await;
        socket.send(poll(tenant)).await;
        // It is at the cell, or there is an answer.
        let refusal = tokio::select! {
            answer = socket.answer() => answer,
            () = arrives(world, before) => None,
        };
        match refusal {
            Some(answer) => refusals.push(answer),
            None => waiting.push(socket),
        }
    }
    (waiting, refusals)
}

async fn arrives(world: &World, before: usize) {
    eventually("the poll is at the cell", LIMIT, async || (world.recorder().count() > before).then_some(()))
        .await;
}

/// Parks as many as there are places, as soon as those of others are free.
async fn park_all(world: &World, proxy: usize, tenant: &Tenant) -> Vec<Socket> {
    let mut waiting = Vec::new();
    eventually("all places are there", LIMIT, async || {
        let (more, refusals) = park(world, proxy, tenant, CAP - waiting.len()).await;
        waiting.extend(more);
        assert!(refusals.iter().all(|refusal| refusal.status == 429));
        (waiting.len() == CAP).then_some(())
    })
    .await;
    waiting
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_holds_over_all_proxies_and_places_come_back() {
    let redis = Redis::start().await;
    let world = world(&redis).await;
    let caps = format!(r#"{{"max_parked_pops": {CAP}}}"#);
    let (acme, globex) = (tenant(&world, "acme", &caps).await, tenant(&world, "globex", &caps).await);
    world.recorder().reply(Reply::Held);
    let (first, none) = park(&world, 0, &acme, 2).await;
    assert!(none.is_empty());
    // What the first proxy holds beyond its two comes back in a moment.
    let mut second = Vec::new();
    eventually("the other two places", LIMIT, async || {
        second.extend(park(&world, 1, &acme, 2 - second.len()).await.0);
        (second.len() == 2).then_some(())
    })
    .await;
    for proxy in 0..PROXIES {
        let (waiting, refusals) = park(&world, proxy, &acme, 1).await;
        assert!(waiting.is_empty(), "proxy {proxy}");
        assert_eq!((refusals[0].status, refusals[0].header("retry-after")), (429, Some("5")));
    }
    // Another cluster has places of its own.
    let others = park_all(&world, 2, &globex).await;
    drop(first);
    drop(second);
    let all = park_all(&world, 2, &acme).await;
    assert!(park(&world, 0, &acme, 1).await.0.is_empty());
    // A proxy that is killed holds its places for as long as it may be alive.
    let mut world = world;
    world.proxies[2].1.signal(Signal::SIGKILL);
    world.proxies[2].1.wait(LIMIT).expect("an end");
    let killed = Instant::now();
    drop((all, others));
    assert!(park(&world, 1, &acme, 1).await.0.is_empty());
    let _all = park_all(&world, 1, &acme).await;
    let after = killed.elapsed();
    println!("places of a killed proxy are back after {after:.2?}");
    assert!((Duration::from_secs(2)..Duration::from_secs(6)).contains(&after), "{after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_places_held_are_never_more_than_the_cap_and_go_back_at_the_end() {
    let redis = Redis::start().await;
    let mut world = world(&redis).await;
    let acme = tenant(&world, "acme", r#"{"max_parked_pops": 5, "max_req_per_sec": 100000}"#).await;
    world.recorder().reply(Reply::Late(Duration::from_millis(20)));
    let length = crate::support::seconds(3);
    let looking = async {
        let mut connection = redis.connect().await;
        let key = format!("queen-proxy:parked:{}", acme.cluster);
        let (began, mut most) = (Instant::now(), 0);
        while began.elapsed() < length {
            let held: Vec<i64> = connection.hvals(&key).await.unwrap();
            most = most.max(held.iter().sum());
        }
        most
    };
    let request = poll(&acme);
    let (told, most) = tokio::join!(super::load::run_with(&world, &request, &[3; PROXIES], length), looking);
    println!("{} waited, {} were refused, {most} places at most", told.passed, told.refused);
    assert!(told.other.is_empty() && told.passed > 0 && told.refused > 0, "{:?}", told.other);
    // A proxy that a busy machine cut off from the store has a part of its own meanwhile.
    let cut_off = world.proxies.iter().any(|(_, process)| process.log().contains("the store is away"));
    assert!(most == 5 || cut_off, "{most}");
    for proxy in 0..PROXIES {
        world.stop_proxy(proxy);
    }
    let mut connection = redis.connect().await;
    let keys: Vec<String> = connection.keys("*").await.unwrap();
    assert_eq!(keys, [format!("queen-proxy:requests:{}", acme.cluster)], "nobody holds anything any more");
    let level: i64 = connection.hget(&keys[0], "level").await.unwrap();
    assert!(level > 150_000_000_000, "tokens that were held are back: {level}");
}
