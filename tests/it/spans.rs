//! Spans at a collector (a stand-in that records what it gets; protobuf has texts and ids in it byte for byte), of a program with the
//! feature `opentelemetry`: `cargo test --features opentelemetry --test it spans`.

use crate::support::{Recorder, Reply, World, eventually};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn has(body: &[u8], part: &[u8]) -> bool {
    body.windows(part.len()).any(|window| window == part)
}

/// The ids of a span as they stand in OTLP: trace, span.
fn ids(trace: &str, span: &str) -> Vec<u8> {
    [vec![0x0a, 16], bytes(trace), vec![0x12, 8], bytes(span)].concat()
}

async fn world(collector: u16, one_in: u32) -> World {
    World::builder()
        .recorder()
        .env("QUEEN_PROXY_OTLP_ENDPOINT", format!("http://127.0.0.1:{collector}"))
        .env("QUEEN_PROXY_OTLP_ONE_IN", one_in)
        .start()
        .await
}

/// Everything the collector has been sent.
async fn spans(collector: &Recorder, until: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut all = Vec::new();
    eventually("the collector has the spans", SOON, async || {
        for request in collector.take() {
            assert_eq!(request.line, "POST /v1/traces");
            assert_eq!(request.all("content-type"), ["application/x-protobuf"]);
            all.extend(request.body);
        }
        until(&all).then_some(())
    })
    .await;
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_a_span_whose_child_the_cell_makes() {
    let collector = Recorder::start().await;
    let mut world = world(collector.port, 1).await;
    let tenant = world.tenant("acme").await;
    let secret_name = "a-name-of-theirs";
    let headers = format!("{}traceparent: 00-{TRACE}-b7ad6b7169203331-00\r\n", tenant.headers());
    let answer = world.ask(&format!("GET /api/v1/kv/ns/{secret_name}"), &headers, "").await;
    assert_eq!(answer.status, 200);
    // Without a trace of the client's there is a new one.
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &tenant.headers(), "").await.status, 200);
    let stranger = tenant.headers().replace(&tenant.key, "qk_live_nobody");
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &stranger, "").await.status, 401);
    // What HTTP does not define names no span, however long it is; and another trace's state stays out.
    let odd = "A-METHOD-OF-THEIRS".repeat(100);
    let stated = format!("{}tracestate: theirs=1\r\n", tenant.headers());
    assert_eq!(world.ask(&format!("{odd} /api/v1/kv/ns/k"), &stated, "").await.status, 404);
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &stated, "").await.status, 200);
    world.recorder().reply(Reply::Close);
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &tenant.headers(), "").await.status, 502);

    let seen = world.recorder().take();
    let parents: Vec<&str> = seen.iter().map(|request| request.all("traceparent")[0]).collect();
    let split: Vec<Vec<&str>> = parents.iter().map(|parent| parent.split('-').collect()).collect();
    assert_eq!(split[0][..2], ["00", TRACE]);
    assert_eq!(split[0][3], "01");
    assert_ne!(split[0][2], "b7ad6b7169203331");
    assert_ne!(split[1][1], TRACE);
    assert!(seen.iter().all(|request| request.all("tracestate").is_empty()));

    let sent = spans(&collector, |sent| has(sent, b"unauthorized") && has(sent, b"bad_gateway")).await;
    for parent in &split {
        assert!(has(&sent, &ids(parent[1], parent[2])), "{parent:?}");
    }
    // The client's own span is the parent of the first one.
    assert!(has(&sent, &[vec![0x22, 8], bytes("b7ad6b7169203331")].concat()));
    let id = answer.header("x-queen-request-id").unwrap();
    for text in
        ["GET kv", "_OTHER", "queen-proxy", "acme-prod", "queen.cluster", "http.response.status_code", id]
    {
        assert!(has(&sent, text.as_bytes()), "{text}");
    }
    for text in [secret_name, "A-METHOD-OF-THEIRS", "qk_", "Bearer", &world.cell_secret] {
        assert!(!has(&sent, text.as_bytes()), "{text}");
    }

    // What is not sent yet is sent at the end.
    world.recorder().reply(Reply::Json("{}"));
    let last = world.ask("GET /api/v1/kv/ns/k", &tenant.headers(), "").await;
    let (_, process) = &mut world.proxies[0];
    process.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(process.wait(SOON).unwrap().success());
    let id = last.header("x-queen-request-id").unwrap();
    spans(&collector, |sent| has(sent, id.as_bytes())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_draws_and_not_the_client() {
    let collector = Recorder::start().await;
    let mut world = world(collector.port, 1_000_000).await;
    let tenant = world.tenant("acme").await;
    let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
    let headers = format!("{}traceparent: {parent}\r\n", tenant.headers());
    for _ in 0..20 {
        assert_eq!(world.ask("GET /api/v1/kv/ns/k", &headers, "").await.status, 200);
    }
    assert!(world.recorder().take().iter().all(|request| request.all("traceparent") == [&parent]));
    // Whatever waits to be sent is sent at the end.
    world.stop_proxy(0);
    assert_eq!(collector.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_hangs_holds_up_neither_requests_nor_the_end() {
    let collector = Recorder::start().await;
    collector.reply(Reply::Never);
    let mut world = world(collector.port, 1).await;
    let tenant = world.tenant("acme").await;
    for _ in 0..50 {
        assert_eq!(world.ask("GET /api/v1/kv/ns/k", &tenant.headers(), "").await.status, 200);
    }
    eventually("the collector is asked", SOON, async || (collector.count() > 0).then_some(())).await;
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &tenant.headers(), "").await.status, 200);
    let began = Instant::now();
    let (_, process) = &mut world.proxies[0];
    process.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(process.wait(SOON).unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
}
