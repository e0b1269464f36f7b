//! Case 39: `kill -9` of a proxy at random moments under load. What is lost was counted within the last flush
//! interval, and nothing is counted twice.

use super::{
    Totals,
    load::{Clients, Dice, Seen, messages, world_with_books},
    usage,
};
use crate::support::{World, rounds};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant, SystemTime};

const FLUSH: Duration = Duration::from_millis(500);
/// What a machine under load may take to wake the flusher and to write a file.
const LATE: Duration = Duration::from_millis(1_500);

/// A proxy's end, and its next beginning.
struct Kill {
    proxy: usize,
    at: Instant,
    over: Instant,
}

impl Kill {
    /// Whether what this client saw may be lost.
    fn may_cost(&self, seen: &Seen) -> bool {
        self.proxy == seen.proxy && seen.at + FLUSH + LATE > self.at && seen.at <= self.over
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_proxy_loses_at_most_one_flush_interval_and_counts_nothing_twice() {
    let builder = World::builder().proxies(2).env("QUEEN_PROXY_METER_FLUSH_MS", FLUSH.as_millis());
    let (mut world, _cell, truth) = world_with_books(builder).await;
    let tenants = [world.tenant("acme").await, world.tenant("globex").await];
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let mut dice = Dice::new(seed);
    let clients = Clients::start(&world, 6, &tenants);
    let mut kills = Vec::new();
    for round in 0..rounds(3) {
        let proxy = usize::try_from(dice.below(2)).unwrap();
        // Also while it starts, and drains what the one before left.
        tokio::time::sleep(Duration::from_millis(200 + dice.below(2_500))).await;
        let at = Instant::now();
        world.proxies[proxy].1.signal(Signal::SIGKILL);
        world.restart_proxy(proxy);
        let over = Instant::now();
        // Now and then the next one falls before it is up.
        if round % 4 != 3 {
            world.wait_for_proxy(proxy).await;
        }
        kills.push(Kill { proxy, at, over });
    }
    for proxy in 0..2 {
        world.wait_for_proxy(proxy).await;
    }
    tokio::time::sleep(FLUSH).await;
    let seen = clients.stop().await;
    for proxy in 0..2 {
        world.stop_proxy(proxy);
        let left = std::fs::read_dir(world.spool(proxy)).unwrap();
        let left: Vec<_> =
            left.map(|entry| entry.unwrap().file_name()).filter(|name| name != "lock").collect();
        assert!(left.is_empty(), "nothing waits in the spool: {left:?}");
    }

    let (truth, usage) = (truth.totals(), usage(&world).await);
    let mut safe = Totals::new();
    for seen in seen.iter().filter(|seen| !kills.iter().any(|kill| kill.may_cost(seen))) {
        let row = safe.entry(seen.key.clone()).or_default();
        (row[0], row[1]) = (row[0] + 1, row[1] + seen.msgs);
    }
    for (key, true_row) in &truth {
        let counted = usage.get(key).copied().unwrap_or_default();
        let least = safe.get(key).copied().unwrap_or_default();
        for (at, what) in ["requests", "messages"].into_iter().enumerate() {
            assert!(counted[at] <= true_row[at], "{key:?}: more {what} than there were, seed {seed}");
            assert!(counted[at] >= least[at], "{key:?}: too few {what}, seed {seed}");
        }
    }
    assert!(usage.keys().all(|key| truth.contains_key(key)));
    assert!(messages(&safe) > 0 && messages(&safe) < messages(&truth), "kills hit the load");
    println!(
        "{} kills: {} messages, counted {}, at least {} had to be; seed {seed}",
        kills.len(),
        messages(&truth),
        messages(&usage),
        messages(&safe)
    );
}
