//! Real servers for the tests: a private PostgreSQL shared by the worlds that run at the same time,
//! databases of their own for each, and the programs as processes.

mod process;
mod raw;
mod recorder;
mod redis;
mod relay;
mod secrets;
mod world;

pub use process::{Process, free_port};
pub use raw::{Answer, Socket};
pub use recorder::{Recorded, Recorder, Reply, Seen, read_request};
pub use redis::Redis;
pub use relay::{Passage, Relay};
pub use world::{PROXY, Tenant, World, WorldBuilder};

use std::{
    io::Write,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The limits of a plan that proxies enforce.
pub const PLAN_LIMITS: [&str; 11] = [
    "max_req_per_sec",
    "req_burst",
    "max_msgs_per_sec",
    "msgs_burst",
    "max_queues",
    "max_partitions_per_queue",
    "max_parked_pops",
    "max_payload_bytes",
    "max_batch_items",
    "max_retained_bytes",
    "max_retention_seconds",
];

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

/// What an admin listener tells of a path.
pub async fn ask_admin(port: u16, path: &str) -> Answer {
    Socket::open(port).await.ask(format!("GET {path} HTTP/1.1\r\nHost: admin\r\n\r\n")).await
}

/// The figures of an admin listener.
pub async fn metrics(port: u16) -> String {
    String::from_utf8(ask_admin(port, "/metrics").await.body).unwrap()
}

/// The value of a series among figures; none when there is no such series.
pub fn sample<'t>(metrics: &'t str, series: &str) -> Option<&'t str> {
    metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
}

/// Runs promtool, which Debian's package `prometheus` brings; not having it fails. Its exit code and all it
/// said.
pub fn promtool(arguments: &[&str], input: &str) -> (Option<i32>, String) {
    let mut promtool = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, from the package prometheus, is on the PATH");
    promtool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    (output.status.code(), text.into_owned())
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
