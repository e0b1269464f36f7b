//! What one request costs in our own rooms, on warm caches: host → cluster → route → key digest →
//! key → status → authorize. No socket and no Pingora pipeline; the caches are the real ones, filled
//! from a private PostgreSQL with 10,000 clusters and as many keys.
//!
//! `cargo bench --bench pure_rooms`; the figures belong into `benches/RESULTS.md`.

#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use pingora::http::RequestHeader;
use queen_proxy::{
    config::proxy::ProxyConfig,
    control::{ControlPlane, migrate::migrate},
    dev::postgres::{Postgres, Settings},
    domain::slug::Slug,
    gateway::{
        caps::Caps,
        pipeline::{Directory, Pipeline},
    },
    identity::{self, CookieNames, Identity},
    limits::{self, Limiter, buffer::Budget, clock::Monotonic, decision::Mode},
    policy::{host::slug_of_host, path, route},
    telemetry::metrics::Metrics,
};
use std::{
    hint::black_box,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};
use tokio::runtime::Runtime;

const CLUSTERS: usize = 10_000;

/// Runs a future that has nothing to wait for: a warm cache answers at the first poll.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the caches are not warm"),
    }
}

fn slug(number: usize) -> String {
    format!("tenant-{number:05}-prod")
}

fn key(number: usize) -> String {
    format!("qk_live_{number:043}")
}

fn request(number: usize) -> RequestHeader {
    let mut head = RequestHeader::build("GET", b"/api/v1/kv/orders/2026/11/30/0001", Some(8)).unwrap();
    head.insert_header("host", format!("{}.eu1.queen.example", slug(number))).unwrap();
    head.insert_header("authorization", format!("Bearer {}", key(number))).unwrap();
    head.insert_header("user-agent", "queen-mq/2.7.0").unwrap();
    head.insert_header("accept", "*/*").unwrap();
    head
}

/// Everything that has to live while the bench runs.
struct Warm {
    timeouts: queen_proxy::config::proxy::Timeouts,
    pipeline: Pipeline,
    control: ControlPlane,
    _runtime: Runtime,
    _postgres: Postgres,
}

fn warm() -> Warm {
    let folder = std::env::temp_dir().join(format!("queen-bench-{}", std::process::id()));
    let postgres = Postgres::start(Settings { folder, port: 0, throw_away: true }).unwrap();
    // Nothing expires while we measure.
    let lasting = [("QUEEN_PROXY_CACHE_TTL_MS", "3600000".to_owned())];
    let environment = common::pxdb(&postgres, "postgres").into_iter().chain(lasting);
    let environment = environment.map(|(name, value)| (name.to_owned(), value));
    let (config, _) = ProxyConfig::load(environment, None).unwrap();
    let pxdb = config.pxdb.as_ref().unwrap();
    let runtime = Runtime::new().unwrap();
    let control = runtime.block_on(async {
        migrate(pxdb).await.unwrap();
        fill(&postgres).await;
        let control = ControlPlane::new(pxdb, config.cache);
        for number in 0..CLUSTERS {
            control.cluster(Slug::parse(&slug(number)).unwrap()).await;
            control.key(identity::digest(&key(number))).await;
        }
        control
    });
    let pipeline = Pipeline {
        directory: Directory::Control(Arc::new(Identity {
            control: control.clone(),
            sessions: None,
            cookies: CookieNames::new("queen_session", false),
            operators: false,
            strict: false,
        })),
        shared_hosts: std::collections::HashSet::new(),
        default_cluster: None,
        dev_insecure: false,
        max_body_bytes: config.max_body_bytes,
        caps: Caps {
            limiter: Arc::new(Limiter::new(limits::Settings::default(), Monotonic::default())),
            mode: Mode::Enforce,
            buffers: Arc::new(Budget::new(config.buffer_bytes, config.max_body_bytes as u64)),
            max_pairs: 10_000,
            blocks: Arc::default(),
            metrics: Arc::new(Metrics::new().unwrap()),
            want_queues: Box::new(|_| {}),
        },
    };
    Warm { pipeline, timeouts: config.timeouts, control, _runtime: runtime, _postgres: postgres }
}

async fn fill(postgres: &Postgres) {
    let mut connection = common::connect(postgres, "postgres").await;
    let named = (0..CLUSTERS).map(|n| (slug(n), key(n)));
    common::clusters(&mut connection, ("http://127.0.0.1:1", "secret"), named, serde_json::json!({})).await;
}

fn rooms(criterion: &mut Criterion) {
    let warm = warm();
    let requests: Vec<RequestHeader> = (0..CLUSTERS).map(request).collect();
    // A prime step visits every cluster in an order the processor's caches do not like.
    let mut at = 0;
    let mut next = || {
        at = (at + 7919) % CLUSTERS;
        at
    };

    let number = next();
    let allocations = allocation_counter::measure(|| {
        assert!(at_once(warm.pipeline.admit(black_box(&requests[number]), &warm.timeouts)).is_ok());
    });
    println!(
        "allocations for one admitted request: {} ({} bytes)",
        allocations.count_total, allocations.bytes_total
    );

    criterion.bench_function("admit, one of 10,000 clusters in turn", |bench| {
        bench.iter(|| at_once(warm.pipeline.admit(black_box(&requests[next()]), &warm.timeouts)).is_ok());
    });
    criterion.bench_function("admit, the same cluster", |bench| {
        bench.iter(|| at_once(warm.pipeline.admit(black_box(&requests[17]), &warm.timeouts)).is_ok());
    });
    criterion.bench_function("part: host to slug", |bench| {
        bench.iter(|| slug_of_host(black_box("tenant-00017-prod.eu1.queen.example:443")));
    });
    criterion.bench_function("part: cluster from the cache", |bench| {
        let slug = Slug::parse(&slug(17)).unwrap();
        bench.iter(|| at_once(warm.control.cluster(black_box(slug))));
    });
    criterion.bench_function("part: canonical path and route", |bench| {
        let target = "/api/v1/kv/orders/2026/11/30/0001";
        bench.iter(|| {
            assert!(path::is_canonical(black_box(target)));
            route::classify(&http::Method::GET, black_box(target))
        });
    });
    criterion.bench_function("part: digest of a key", |bench| {
        let key = key(17);
        bench.iter(|| identity::digest(black_box(&key)));
    });
    criterion.bench_function("part: key from the cache", |bench| {
        let digest = identity::digest(&key(17));
        bench.iter(|| at_once(warm.control.key(black_box(digest))));
    });
}

criterion_group!(benches, rooms);
criterion_main!(benches);
