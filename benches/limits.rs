//! What the caps cost: inspecting a push and checking it against every limit of a plan. No socket, no
//! Pingora pipeline.
//!
//! `cargo bench --bench limits`; the figures belong into `benches/RESULTS.md`.

#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use queen_proxy::{
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
    },
    limits::{ClusterLimits, Limiter, Request, Settings, clock::Monotonic, decision::Mode},
    policy::inspect,
};
use std::{fmt::Write, hint::black_box, sync::Arc};
use uuid::Uuid;

/// Pairs that are looked at in one body.
const MAX_PAIRS: usize = 20_000;

/// Every limit is there and none is in the way.
fn limits() -> Limits {
    Limits::from_columns(|_| Ok::<_, ()>(Cap::At(1_000_000_000_000))).unwrap()
}

/// A push of `items` messages over ten partitions, each payload an event of about `bytes`.
fn push(items: usize, bytes: usize) -> Vec<u8> {
    let mut body = String::from(r#"{"items":["#);
    for item in 0..items {
        let comma = if item == 0 { "" } else { "," };
        let partition = item % 10;
        write!(
            body,
            r#"{comma}{{"queue":"orders","partition":"eu-{partition}","transactionId":"{}","payload":{{"#,
            Uuid::from_u128(item as u128)
        )
        .unwrap();
        let start = body.len();
        let mut field = 0;
        while body.len() - start + 60 < bytes {
            write!(body, r#""field_{field}":{{"amount":{field}.25,"note":"caf\u00e9 {field}"}},"#).unwrap();
            field += 1;
        }
        body.push_str(r#""last":true}}"#);
    }
    body.push_str("]}");
    body.into_bytes()
}

/// A push of one message that is a long list of numbers: nothing to skip over in strides.
fn numbers(bytes: usize) -> Vec<u8> {
    let mut body = String::from(r#"{"items":[{"queue":"orders","payload":["#);
    while body.len() < bytes {
        body.push_str("3.14159,[2.71828],");
    }
    body.push_str("0]}]}");
    body.into_bytes()
}

struct Stand {
    limiter: Limiter<Monotonic>,
    cluster: Arc<ClusterLimits>,
    limits: Limits,
}

impl Stand {
    fn new() -> Self {
        let limiter = Limiter::new(Settings::default(), Monotonic::default());
        let cluster = limiter.cluster(ClusterId(Uuid::from_u128(7)));
        limiter.load(&cluster, []);
        Self { limiter, cluster, limits: limits() }
    }

    /// All that a push costs: find the counters, look, inspect, evaluate.
    fn admit(&self, body: &[u8]) -> bool {
        let cluster = self.limiter.cluster(self.cluster.id());
        let flood = self.limiter.peek(&cluster, &self.limits).refusal(Mode::Enforce);
        let read = inspect::push(body, MAX_PAIRS).unwrap();
        let request = Request {
            messages: read.count,
            is_batch: true,
            heaviest: read.heaviest,
            payload_bytes: read.payload_bytes,
            pairs: Some(&read.pairs),
            ..Request::default()
        };
        let verdict = self.limiter.evaluate(&cluster, &request, &self.limits, Mode::Enforce);
        flood.is_none() && verdict.decision.refusal(Mode::Enforce).is_none()
    }
}

fn caps(criterion: &mut Criterion) {
    let stand = Stand::new();
    let bodies = [
        ("push of 1 KiB", push(1, 900)),
        ("push of 1 MiB, 1,000 items", push(1_000, 960)),
        ("push of 1 MiB, 1 item of numbers", numbers(1 << 20)),
        ("push of 16 MiB, 10,000 items", push(10_000, 1_560)),
    ];
    for (name, body) in &bodies {
        assert!(stand.admit(body));
        let cost = allocation_counter::measure(|| assert!(stand.admit(body)));
        println!(
            "{name}: {} bytes; {} allocations, {} bytes of them",
            body.len(),
            cost.count_total,
            cost.bytes_total
        );
        assert!(cost.bytes_total < 16 * 1_024, "no payload is copied");
        let mut group = criterion.benchmark_group("caps");
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(*name, |bench| bench.iter(|| assert!(stand.admit(black_box(body)))));
        group.finish();
    }
    let (one, thousand) = (&bodies[0].1, &bodies[1].1);
    criterion.bench_function("part: inspect 1 KiB", |bench| {
        bench.iter(|| inspect::push(black_box(one), MAX_PAIRS).unwrap().count);
    });
    criterion.bench_function("part: inspect 1 MiB, 1,000 items", |bench| {
        bench.iter(|| inspect::push(black_box(thousand), MAX_PAIRS).unwrap().count);
    });
    criterion.bench_function("request without a body", |bench| {
        bench.iter(|| {
            let cluster = stand.limiter.cluster(black_box(stand.cluster.id()));
            let verdict = stand.limiter.evaluate(&cluster, &Request::default(), &stand.limits, Mode::Enforce);
            verdict.decision.refusal(Mode::Enforce).is_none()
        });
    });
    criterion.bench_function("waiting pop", |bench| {
        let request = Request { parks_at: Some("cell.internal:6711"), ..Request::default() };
        bench.iter(|| {
            let cluster = stand.limiter.cluster(black_box(stand.cluster.id()));
            stand.limiter.evaluate(&cluster, &request, &stand.limits, Mode::Enforce).slot.is_some()
        });
    });
}

criterion_group!(benches, caps);
criterion_main!(benches);
