//! Real servers for the tests: a private PostgreSQL shared by the worlds that run at the same time,
//! databases of their own for each, and the programs as processes.

mod process;
mod raw;
mod recorder;
mod relay;
mod secrets;
mod world;

pub use process::{Process, free_port};
pub use raw::{Answer, Socket};
pub use recorder::{Recorded, Recorder, Reply, Seen, read_request};
pub use relay::{Passage, Relay};
pub use world::{PROXY, Tenant, World, WorldBuilder};

use std::time::{Duration, Instant};

/// Rounds of a test that is run at full size by hand: `QUEEN_TEST_ROUNDS` when set, else `usual`.
pub fn rounds(usual: u32) -> u32 {
    std::env::var("QUEEN_TEST_ROUNDS")
        .map_or(usual, |text| text.parse().expect("QUEEN_TEST_ROUNDS: a number"))
}

/// How long a load runs that is run at full size by hand: `QUEEN_TEST_SECONDS` when set, else `usual`.
pub fn seconds(usual: u64) -> Duration {
    let seconds = std::env::var("QUEEN_TEST_SECONDS");
    Duration::from_secs(seconds.map_or(usual, |text| text.parse().expect("QUEEN_TEST_SECONDS: a number")))
}

/// Waits until `probe` yields something, asking every 5 ms; panics with `what` after `limit`.
pub async fn eventually<T>(what: &str, limit: Duration, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
