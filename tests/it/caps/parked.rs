//! Pops that wait at a cell: their places are given back however they end.

use super::{LIMIT, error, live, metric_becomes, outcome, refused, retry_after, tenant, with_admin, world};
use crate::support::{Reply, Socket, Tenant, World, eventually, rounds};
use nix::sys::signal::Signal;
use std::time::Duration;

const WAITING: &str = "queen_proxy_parked_pops";
const EMPTY: Reply = Reply::Json(r#"{"messages":[]}"#);

/// Pops that have been sent and not answered.
struct Polls(Vec<Socket>);

impl Polls {
    async fn send(port: u16, tenant: &Tenant, count: usize) -> Self {
        let mut polls = Vec::with_capacity(count);
        for _ in 0..count {
            let mut socket = Socket::open(port).await;
            socket.send(poll(tenant)).await;
            polls.push(socket);
        }
        Self(polls)
    }

    /// Every one of them is answered with this status.
    async fn hear(self, status: u16) {
        for mut socket in self.0 {
            assert_eq!(socket.answer().await.expect("an answer").status, status);
        }
    }
}

/// Waits until the cell has that many polls, and forgets them: a place is taken before.
async fn at_the_cell(world: &World, polls: usize) {
    eventually("they are at the cell", LIMIT, async || (world.recorder().count() >= polls).then_some(()))
        .await;
    world.recorder().take();
}

fn poll(tenant: &Tenant) -> String {
    format!("GET /api/v1/pop/queue/q?wait=true&timeout=60000 HTTP/1.1\r\n{}\r\n", tenant.headers())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_is_given_back_by_every_end_of_a_poll() {
    let (builder, admin) = with_admin(World::builder().env("QUEEN_PROXY_LONGPOLL_MARGIN_MS", 100));
    let (world, acme) = world(builder, r#"{"max_parked_pops": 2}"#).await;
    world.recorder().reply(Reply::Held);
    let full = async || {
        let polls = Polls::send(world.port(), &acme, 2).await;
        metric_becomes(admin, WAITING, 2.0).await;
        at_the_cell(&world, 2).await;
        let refusal = Socket::open(world.port()).await.ask(poll(&acme)).await;
        assert_eq!((outcome(&refusal), retry_after(&refusal)), (refused(429, "rate_limited"), 5));
        assert_eq!(error(&refusal), "as many consumers wait as max_parked_pops allows (2)");
        assert_eq!(live(admin, &acme).await["parked"], 2);
        polls
    };
    // Answered, in each of the ways a cell answers, also wrong ones.
    for (reply, status) in [
        (EMPTY, 200),
        (Reply::Text(204, "a body where none may be".to_owned()), 204),
        (Reply::Text(500, "{}".to_owned()), 500),
        (Reply::Unauthorized, 502),
        (Reply::Garbage, 502),
        (Reply::Close, 502),
    ] {
        let polls = full().await;
        world.recorder().release(reply);
        polls.hear(status).await;
        metric_becomes(admin, WAITING, 0.0).await;
    }
    // Given up by the client, by an end of its connection or of its sending.
    drop(full().await);
    metric_becomes(admin, WAITING, 0.0).await;
    eventually("the cell's requests are cancelled", LIMIT, async || {
        (world.recorder().abandoned() == 2).then_some(())
    })
    .await;
    // Given up by the proxy, because the cell is late.
    let line = "GET /api/v1/pop/queue/q?wait=true&timeout=100";
    assert_eq!(outcome(&world.ask(line, &acme.headers(), "").await), refused(504, "upstream_timeout"));
    metric_becomes(admin, WAITING, 0.0).await;
    world.recorder().take();
    // A pop that does not wait takes no place, however many do.
    let polls = full().await;
    assert_eq!(world.ask("GET /api/v1/pop/queue/q", &acme.headers(), "").await.status, 200);
    world.recorder().release(EMPTY);
    polls.hear(200).await;
    metric_becomes(admin, WAITING, 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_has_a_cap_of_its_own_over_all_its_clusters() {
    let (builder, admin) = with_admin(World::builder().env("QUEEN_PROXY_CELL_MAX_PARKED", 3));
    let (world, acme) = world(builder, r#"{"max_parked_pops": 2}"#).await;
    let globex = tenant(&world, "globex", "{}").await;
    world.recorder().reply(Reply::Held);
    let first = Polls::send(world.port(), &acme, 2).await;
    metric_becomes(admin, WAITING, 2.0).await;
    let second = Polls::send(world.port(), &globex, 1).await;
    metric_becomes(admin, WAITING, 3.0).await;
    let refusal = Socket::open(world.port()).await.ask(poll(&globex)).await;
    assert_eq!((outcome(&refusal), retry_after(&refusal)), (refused(429, "rate_limited"), 5));
    assert_eq!(error(&refusal), "as many consumers wait as the cell takes");
    at_the_cell(&world, 3).await;
    drop(first);
    metric_becomes(admin, WAITING, 1.0).await;
    let third = Polls::send(world.port(), &globex, 2).await;
    metric_becomes(admin, WAITING, 3.0).await;
    at_the_cell(&world, 2).await;
    world.recorder().release(EMPTY);
    second.hear(200).await;
    third.hear(200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_wait_and_leave_nothing_behind() {
    // 5,000 at full size.
    let count = usize::try_from(rounds(200)).unwrap();
    let builder = World::builder().env("QUEEN_PROXY_SHUTDOWN_DRAIN_MS", 300);
    let (builder, admin) = with_admin(builder.env("QUEEN_PROXY_CELL_MAX_PARKED", count));
    let (mut world, acme) = world(builder, &format!(r#"{{"max_parked_pops": {count}}}"#)).await;
    let limit = LIMIT + Duration::from_millis(10 * count as u64);
    let waiting = async |want: usize| {
        eventually(&format!("{want} wait"), limit, async || {
            (live(admin, &acme).await["parked"] == want).then_some(())
        })
        .await;
    };
    world.recorder().reply(Reply::Held);
    assert_eq!(world.ask("GET /api/v1/pop/queue/q", &acme.headers(), "").await.status, 200);
    let before = world.proxies[0].1.resident();
    for wave in 1..=3 {
        world.recorder().take();
        let mut polls = Polls::send(world.port(), &acme, count).await;
        waiting(count).await;
        let held = world.proxies[0].1.resident().saturating_sub(before);
        println!("wave {wave}: {count} polls wait, {} bytes each", held / count as u64);
        // No place is left, and nobody who waits is thrown out for that.
        assert_eq!(Socket::open(world.port()).await.ask(poll(&acme)).await.status, 429);
        eventually("all are at the cell", limit, async || (world.recorder().count() == count).then_some(()))
            .await;
        // A third of the clients are killed: their requests are cancelled at the cell.
        let abandoned = world.recorder().abandoned();
        let killed = count / 3;
        polls.0.truncate(count - killed);
        waiting(count - killed).await;
        eventually("cancelled", limit, async || {
            (world.recorder().abandoned() == abandoned + killed).then_some(())
        })
        .await;
        match wave {
            1 => {
                // The cell drains: all of them are answered.
                world.recorder().release(EMPTY);
                polls.hear(200).await;
            }
            2 => {
                // The cell goes away.
                world.recorder().release(Reply::Close);
                polls.hear(502).await;
            }
            _ => {
                let rest = count - killed;
                let (_, mut process) = world.proxies.remove(0);
                process.signal(Signal::SIGTERM);
                let status = process.wait(limit).expect("an end in time");
                assert!(status.success(), "{status}");
                eventually("cancelled at the end", limit, async || {
                    (world.recorder().abandoned() == abandoned + count).then_some(())
                })
                .await;
                assert_eq!(polls.0.len(), rest);
                return;
            }
        }
        waiting(0).await;
        metric_becomes(admin, WAITING, 0.0).await;
        metric_becomes(admin, "queen_proxy_requests_in_flight", 0.0).await;
    }
}
