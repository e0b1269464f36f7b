//! Clients that ask as fast as they are answered.

use crate::support::{Socket, Tenant, World};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// What they were told.
#[derive(Default, Debug)]
pub struct Told {
    /// Requests that passed.
    pub passed: u64,
    /// Those that a limit refused.
    pub refused: u64,
    /// Status codes that are neither.
    pub other: Vec<u16>,
    /// The longest answers, longest first.
    pub slowest: Vec<Duration>,
    /// Between the first request and the last answer.
    pub took: Duration,
}

/// So many clients at each proxy, for so long.
pub async fn run(world: &World, tenant: &Tenant, clients: &[usize], length: Duration) -> Told {
    let request = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", tenant.headers());
    run_with(world, &request, clients, length).await
}

/// The same with any request.
pub async fn run_with(world: &World, request: &str, clients: &[usize], length: Duration) -> Told {
    let mut running = JoinSet::new();
    // A full bucket refills nothing while the proxies look the tenant up.
    for (proxy, clients) in clients.iter().enumerate() {
        if *clients > 0 {
            Socket::open(world.proxies[proxy].0).await.ask(request).await;
        }
    }
    let began = Instant::now();
    for (proxy, clients) in clients.iter().enumerate() {
        for _ in 0..*clients {
            let (port, request) = (world.proxies[proxy].0, request.to_owned());
            running.spawn(async move {
                let mut told = Told::default();
                let mut socket = Socket::open(port).await;
                while began.elapsed() < length {
                    let asked = Instant::now();
                    match socket.ask(&request).await.status {
                        200 => told.passed += 1,
                        429 => told.refused += 1,
                        other => told.other.push(other),
                    }
                    told.slowest.push(asked.elapsed());
                    // The proxy ends a connection after 10,000 requests.
                    if told.slowest.len() % 5_000 == 0 {
                        socket = Socket::open(port).await;
                    }
                }
                told
            });
        }
    }
    let mut all = Told::default();
    while let Some(told) = running.join_next().await {
        let told = told.unwrap();
        all.passed += told.passed;
        all.refused += told.refused;
        all.other.extend(told.other);
        all.slowest.extend(told.slowest);
    }
    all.took = began.elapsed();
    all.slowest.sort_unstable_by(|a, b| b.cmp(a));
    world.recorder().take();
    all
}

impl Told {
    /// Panics unless what passed is within 2 % of a rate and a burst that is there in full, and nothing but the
    /// limit refused.
    pub fn assert_within(&self, rate: u64, burst: u64, what: &str) {
        self.assert_between(rate, burst, burst, 0.02, what);
    }

    /// The same within 5 % where the store goes or comes: what was in the bucket may be there or not, what was on its
    /// way is lost, and proxies that are back tell what they have spent one after the other.
    pub fn assert_about(&self, rate: u64, burst: u64, what: &str) {
        self.assert_between(rate, 0, burst, 0.05, what);
    }

    #[allow(clippy::cast_precision_loss)] // far from 2^53
    fn assert_between(&self, rate: u64, least_burst: u64, burst: u64, apart: f64, what: &str) {
        let refilled = rate as f64 * self.took.as_secs_f64();
        let (passed, allowed) = (self.passed as f64, refilled + burst as f64);
        let part = passed / allowed;
        let p99 = self.slowest[self.slowest.len() / 100];
        println!(
            "{what}: {} passed of {allowed:.1} ({:+.2} %), {} refused, in {:.2?}; p99 {p99:.2?}, slowest {:.2?}",
            self.passed,
            (part - 1.0) * 100.0,
            self.refused,
            self.took,
            self.slowest[0]
        );
        assert!(self.other.is_empty(), "{what}: {:?}", self.other);
        assert!(self.refused > 0, "{what}: the clients do not ask for more than there is");
        assert!(part <= 1.0 + apart, "{what}: {passed} of {allowed:.1}");
        let needed = (refilled + least_burst as f64) * (1.0 - apart);
        assert!(passed >= needed, "{what}: {passed}, and not {needed:.1}");
    }
}
