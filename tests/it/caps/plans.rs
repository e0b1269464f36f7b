//! Each of the four seeded plans (proxy contract §3), over and under each of its eleven limits.

use super::{LIMIT, PUSH, outcome, refused, retry_after};
use crate::support::{Answer, PLAN_LIMITS, Reply, Socket, Tenant, World, WorldBuilder, eventually};
use futures_util::future::join_all;
use serde_json::json;
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;
use uuid::Uuid;

/// The plans with their limits, in the order of [`PLAN_LIMITS`].
const PLANS: [(&str, [u64; 11]); 4] = [
    ("free", [5, 25, 20, 100, 20, 8, 50, 262_144, 1_000, 1_073_741_824, 604_800]),
    ("dev", [10, 50, 40, 200, 50, 16, 150, 524_288, 2_000, 3_221_225_472, 1_209_600]),
    ("pro", [50, 200, 200, 800, 200, 32, 1_000, 1_048_576, 5_000, 21_474_836_480, 2_592_000]),
    ("dedicated-s", [200, 800, 600, 2_000, 1_000, 64, 5_000, 4_194_304, 10_000, 214_748_364_800, 7_776_000]),
];

/// What a tenant hears that is over a limit.
fn refusal_of(limit: &str) -> (u16, &'static str) {
    match limit {
        "max_req_per_sec" | "req_burst" | "max_msgs_per_sec" | "msgs_burst" | "max_parked_pops" => {
            (429, "rate_limited")
        }
        "max_payload_bytes" | "max_batch_items" => (413, "payload_too_large"),
        "max_retained_bytes" => (403, "storage_quota_exceeded"),
        _ => (403, "quota_exceeded"),
    }
}

/// One tenant of a plan who goes for one of its limits.
struct Visitor {
    port: u16,
    tenant: Tenant,
    limits: [u64; 11],
}

impl Visitor {
    fn cap(&self, name: &str) -> u64 {
        self.limits[PLAN_LIMITS.iter().position(|known| *known == name).unwrap()]
    }

    fn request(&self, line: &str, body: &str) -> String {
        let length = if line.starts_with("GET") {
            String::new()
        } else {
            format!("Content-Length: {}\r\n", body.len())
        };
        format!("{line} HTTP/1.1\r\n{}{length}\r\n{body}", self.tenant.headers())
    }

    async fn ask(&self, line: &str, body: &str) -> Answer {
        Socket::open(self.port).await.ask(self.request(line, body)).await
    }

    async fn push(&self, items: &[serde_json::Value]) -> Answer {
        self.ask(PUSH, &json!({ "items": items }).to_string()).await
    }

    /// Reads on a few connections at once until one is refused; returns how many passed, how long it took, and
    /// the refusal.
    async fn exhaust(&self) -> (u64, Duration, Answer) {
        let begun = Instant::now();
        let mut clients = JoinSet::new();
        for _ in 0..4 {
            let (port, request) = (self.port, self.request("GET /api/v1/resources/queues", ""));
            clients.spawn(async move {
                let mut socket = Socket::open(port).await;
                for passed in 0_u64.. {
                    let answer = socket.ask(&request).await;
                    if answer.status != 200 {
                        return (passed, answer);
                    }
                    assert!(answer.header("ratelimit").is_some() && answer.header("retry-after").is_none());
                    // After so many requests the proxy ends a connection, and says so.
                    if answer.header("connection") == Some("close") {
                        socket = Socket::open(port).await;
                    }
                }
                unreachable!("there is an end to every bucket")
            });
        }
        let mut passed = 0;
        let mut refusal = None;
        for (count, answer) in clients.join_all().await {
            passed += count;
            refusal = Some(answer);
        }
        (passed, begun.elapsed(), refusal.unwrap())
    }

    /// The same push again and again: on a slow machine the bucket fills meanwhile.
    async fn push_until_refused(&self, items: &[serde_json::Value]) -> Answer {
        for _ in 0..50 {
            let answer = self.push(items).await;
            if answer.status != 200 {
                return answer;
            }
        }
        panic!("{} messages at a time pass for ever", items.len())
    }

    /// Goes to the limit, where nothing is refused, and over it; returns the refusal.
    async fn go_over(&self, limit: &str) -> Answer {
        let cap = self.cap(limit);
        let count = usize::try_from(cap).unwrap();
        let lane = |queue: usize, partition: usize| json!({"queue": format!("q{queue}"), "partition": format!("p{partition}"), "payload": 1});
        let same = |items: usize| vec![lane(0, 0); items];
        match limit {
            "req_burst" => {
                let (passed, took, refusal) = self.exhaust().await;
                let refilled = took.as_secs() * self.cap("max_req_per_sec") + self.cap("max_req_per_sec");
                assert!((cap..=cap + refilled).contains(&passed), "{passed} in {took:?}");
                refusal
            }
            "max_req_per_sec" => {
                self.exhaust().await;
                // From here on only the rate counts: under it for a second, then over it.
                let told = retry_after(&self.exhaust().await.2);
                tokio::time::sleep(Duration::from_secs(told)).await;
                let mut socket = Socket::open(self.port).await;
                let request = self.request("GET /api/v1/resources/queues", "");
                let mut pace = tokio::time::interval(Duration::from_millis(1_250 / cap));
                pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                for _ in 0..cap.min(40) {
                    pace.tick().await;
                    assert_eq!(socket.ask(&request).await.status, 200, "under the rate");
                }
                let (passed, took, refusal) = self.exhaust().await;
                // What had come in by then, and what came in meanwhile.
                let most = (took.as_secs() + told + 2) * cap + cap;
                assert!(passed <= most, "{passed} of {most} in {took:?}");
                refusal
            }
            "msgs_burst" => {
                assert_eq!(self.push(&same(count)).await.status, 200);
                self.push_until_refused(&same(count)).await
            }
            "max_msgs_per_sec" => {
                let burst = usize::try_from(self.cap("msgs_burst")).unwrap();
                assert_eq!(self.push(&same(burst)).await.status, 200);
                // All it had is gone: what comes in within the time that is told passes.
                let refusal = self.push_until_refused(&same(count)).await;
                assert_eq!(outcome(&refusal), refused(429, "rate_limited"));
                tokio::time::sleep(Duration::from_secs(retry_after(&refusal))).await;
                assert_eq!(self.push(&same(count)).await.status, 200);
                self.push_until_refused(&same(burst)).await
            }
            "max_queues" => {
                let all: Vec<_> = (0..count).map(|queue| lane(queue, 0)).collect();
                assert_eq!(self.push(&all).await.status, 200);
                self.ask("POST /api/v1/configure", r#"{"queue":"one more"}"#).await
            }
            "max_partitions_per_queue" => {
                let all: Vec<_> = (0..count).map(|partition| lane(0, partition)).collect();
                assert_eq!(self.push(&all[..count - 1]).await.status, 200);
                assert_eq!(self.push(&all[count - 1..]).await.status, 200);
                self.push(&[lane(0, count)]).await
            }
            "max_payload_bytes" => {
                let payload = |bytes: usize| json!({"queue": "q", "payload": "x".repeat(bytes - 2)});
                assert_eq!(self.push(&[payload(count)]).await.status, 200);
                self.push(&[payload(count + 1)]).await
            }
            "max_batch_items" => {
                assert_eq!(self.push(&same(count)).await.status, 200);
                self.push(&same(count + 1)).await
            }
            "max_retention_seconds" => {
                let configure = |seconds: u64| {
                    json!({"queue": "q", "options": {"retentionSeconds": 1, "completedRetentionSeconds": seconds}})
                        .to_string()
                };
                assert_eq!(self.ask("POST /api/v1/configure", &configure(cap)).await.status, 200);
                self.ask("POST /api/v1/configure", &configure(cap + 1)).await
            }
            _ => unreachable!("{limit} has a test of its own"),
        }
    }
}

/// Status, code and headers of a refusal.
fn assert_refused(answer: &Answer, plan: &str, limit: &str) {
    let (status, code) = refusal_of(limit);
    assert_eq!(outcome(answer), refused(status, code), "{plan} {limit}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{plan} {limit}");
    assert!(Uuid::parse_str(answer.header("x-queen-request-id").unwrap()).is_ok());
    let document = answer.json();
    let members: BTreeSet<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, BTreeSet::from(["error", "code"]), "{plan} {limit}");
    if status == 429 {
        let wait = retry_after(answer);
        assert!(
            if limit == "max_parked_pops" { wait == 5 } else { (1..=60).contains(&wait) },
            "{plan} {limit}: {wait}"
        );
    } else {
        assert_eq!(answer.header("retry-after"), None, "{plan} {limit}");
    }
    // The rates that applied: all but the one who is blocked before they are asked.
    let rates = answer.header("ratelimit-policy").is_some() && answer.header("ratelimit").is_some();
    assert_eq!(rates, limit != "max_retained_bytes" && limit != "max_parked_pops", "{plan} {limit}");
}

/// A tenant on a plan as it stands.
async fn visitor(world: &World, plan: &str, limits: [u64; 11], limit: &str) -> Visitor {
    let tenant = world.tenant(&format!("{plan}-{}", limit.replace('_', "-"))).await;
    world
        .sql(&format!(
            "SELECT queen_proxy.assign_plan('{0}', '{plan}'); SELECT queen_proxy.set_limit_override('{0}', '{{}}')",
            tenant.cluster
        ))
        .await;
    Visitor { port: world.port(), tenant, limits }
}

fn builder() -> WorldBuilder {
    World::builder().recorder()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_seeded_plans_are_the_contracts() {
    let world = builder().proxies(0).start().await;
    world.prepare_control_plane().await;
    for (plan, limits) in PLANS {
        for (name, want) in PLAN_LIMITS.into_iter().zip(limits) {
            let query = format!("SELECT {name}::bigint FROM queen_proxy.plans WHERE code = $1");
            let value: Option<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
                .bind(plan)
                .fetch_one(&mut world.control().await)
                .await
                .unwrap();
            assert_eq!(value, Some(i64::try_from(want).unwrap()), "{plan} {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_limit_of_every_plan_refuses_beyond_it_and_nothing_up_to_it() {
    let (builder, admin) = super::with_admin(builder());
    let world = builder.start().await;
    let mut visits = Vec::new();
    for (plan, limits) in PLANS {
        for limit in PLAN_LIMITS {
            if limit == "max_retained_bytes" || limit == "max_parked_pops" {
                continue;
            }
            let visitor = visitor(&world, plan, limits, limit).await;
            visits.push(async move {
                // Until the table is read, queues are not counted. Refused, this costs nothing.
                eventually("the rows are known", 3 * LIMIT, async || {
                    visitor
                        .ask("POST /api/v1/configure", r#"{"queue":"q","retentionSeconds":99999999}"#)
                        .await;
                    super::live(admin, &visitor.tenant).await["queues"].as_u64()
                })
                .await;
                let answer = visitor.go_over(limit).await;
                assert_refused(&answer, plan, limit);
                (plan, limit)
            });
        }
    }
    let visited: BTreeSet<_> = join_all(visits).await.into_iter().collect();
    assert_eq!(visited.len(), 4 * 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_plan_keeps_blocks_at_its_cap() {
    let (builder, admin) = super::with_admin(builder().env("QUEEN_PROXY_RECONCILE_MS", 200));
    let world = builder.start().await;
    for (plan, limits) in PLANS {
        let visitor = visitor(&world, plan, limits, "max_retained_bytes").await;
        let cap = visitor.cap("max_retained_bytes");
        let name: Uuid =
            sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
                .bind(visitor.tenant.cluster)
                .fetch_one(&mut world.control().await)
                .await
                .unwrap();
        assert_eq!(visitor.push(&[]).await.status, 200);
        for (bytes, blocked) in [(cap - 1, false), (cap + 1, true)] {
            let listing = json!({"queues": [{"name": "q", "partitions": 1, "retainedBytes": bytes}]});
            world.recorder().list(name, Reply::Text(200, listing.to_string()));
            eventually(&format!("{bytes} bytes"), LIMIT, async || {
                (super::live(admin, &visitor.tenant).await["retained_bytes"] == bytes).then_some(())
            })
            .await;
            let answer = visitor.push(&[]).await;
            if blocked {
                assert_refused(&answer, plan, "max_retained_bytes");
            } else {
                assert_eq!(answer.status, 200, "{plan}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_pops_wait_as_a_plan_says() {
    let (builder, admin) = super::with_admin(builder().env("QUEEN_PROXY_CELL_MAX_PARKED", 1_000_000));
    let world = builder.start().await;
    world.recorder().reply(Reply::Held);
    for (plan, limits) in PLANS {
        let visitor = visitor(&world, plan, limits, "max_parked_pops").await;
        // So many at once are over its rate.
        super::lift_rates(&world, &visitor.tenant).await;
        let cap = visitor.cap("max_parked_pops");
        let request = visitor.request("GET /api/v1/pop/queue/q?wait=true&timeout=80000", "");
        let mut polls = Vec::new();
        for _ in 0..cap {
            let mut socket = Socket::open(visitor.port).await;
            socket.send(&request).await;
            polls.push(socket);
        }
        eventually(&format!("{plan}: {cap} wait"), 3 * LIMIT, async || {
            (super::live(admin, &visitor.tenant).await["parked"] == cap).then_some(())
        })
        .await;
        eventually("they are at the cell", 3 * LIMIT, async || {
            (world.recorder().count() as u64 == cap).then_some(())
        })
        .await;
        world.recorder().take();
        let answer = Socket::open(visitor.port).await.ask(&request).await;
        assert_refused(&answer, plan, "max_parked_pops");
        world.recorder().release(Reply::Json(r#"{"messages":[]}"#));
        for socket in &mut polls {
            assert_eq!(socket.answer().await.expect("an answer").status, 200, "{plan}");
        }
    }
}
