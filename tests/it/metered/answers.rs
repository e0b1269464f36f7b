//! The tables of proxy contract §13, row by row, through a running proxy.

use super::{
    Told, Totals,
    books::{Answer, Body},
    usage, world,
};
use crate::support::{Recorded, Socket, Tenant, World, free_port};
use std::{collections::HashMap, sync::Arc, time::Instant};

const PUSH: &str = r#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":2}]}"#;
/// Three messages go in.
const TXN: &str = r#"{"operations":[{"type":"push","items":[{"queue":"q","payload":1},{"queue":"q","payload":2}]},
    {"type":"ack","transactionId":"a","partitionId":"b"},{"type":"push","queue":"r","payload":3}]}"#;
const CYCLE: &str = r#"{"query_id":"x","push_items":[{"queue":"out","partition":"eu","payload":1},
    {"queue":"out","payload":2},{"queue":"out","partition":"eu","payload":3}]}"#;

/// What a request came to: its class and messages, and messages that it put in besides.
struct Case {
    name: &'static str,
    line: &'static str,
    body: &'static str,
    status: u16,
    headers: &'static str,
    answer: &'static str,
    op: &'static str,
    msgs: u64,
    besides: u64,
    reads_body: bool,
}

const fn case(
    name: &'static str,
    line: &'static str,
    body: &'static str,
    (status, answer): (u16, &'static str),
    (op, msgs): (&'static str, u64),
) -> Case {
    Case { name, line, body, status, headers: "", answer, op, msgs, besides: 0, reads_body: true }
}

impl Case {
    const fn besides(mut self, besides: u64) -> Self {
        self.besides = besides;
        self
    }

    const fn streams(mut self) -> Self {
        self.reads_body = false;
        self
    }

    const fn headers(mut self, headers: &'static str) -> Self {
        self.headers = headers;
        self
    }

    /// An answer without a body has one framing.
    fn framings(&self) -> usize {
        if self.status == 204 || self.line.starts_with("HEAD ") { 1 } else { 6 }
    }

    /// The answer's body: whole, byte by byte, and cut in places that differ from case to case.
    fn framed(&self, framing: usize) -> Body {
        let bytes = self.answer.as_bytes();
        let cut = |at: usize| {
            let (first, rest) = bytes.split_at(at.min(bytes.len()));
            Body::Pieces(vec![first.to_vec(), rest.to_vec()])
        };
        match framing {
            0 => Body::Whole(bytes.to_vec()),
            1 => Body::Pieces(bytes.iter().map(|&byte| vec![byte]).collect()),
            2 => cut(1),
            3 => cut(self.name.len() * 7 % bytes.len().max(1)),
            4 => cut(bytes.len().saturating_sub(1)),
            _ => Body::UntilClose(bytes.to_vec()),
        }
    }
}

const POP: &str = "GET /api/v1/pop/queue/q?batch=10";
const REPLAY: &str = "POST /api/v1/dlq/7/replay";
const RETRY: &str = "POST /api/v1/messages/p/t/retry";

/// §13, the classes and the answers.
#[rustfmt::skip]
const CASES: &[Case] = &[
    case("push-stored", "POST /api/v1/push", PUSH, (201, r#"[{"status":"queued"},{"status":"buffered"},{"status":"duplicate"},{"status":"failed"}]"#), ("push", 2)),
    case("push-200", "POST /api/v1/push", PUSH, (200, r#"[{"index":0,"status":"queued","x":{"status":"queued"}},{"status":"queued"}]"#), ("push", 2)),
    case("push-buffered", "POST /api/v1/push", PUSH, (201, r#"[{"status":"buffered"},{"status":"buffered"}]"#), ("push", 2)),
    case("push-duplicates", "POST /api/v1/push", PUSH, (201, r#"[{"status":"duplicate"},{"status":"duplicate"}]"#), ("push", 0)),
    case("push-unreadable", "POST /api/v1/push", PUSH, (201, "<html>queued</html>"), ("push", 0)),
    case("push-shape", "POST /api/v1/push", PUSH, (201, r#"{"status":"queued"}"#), ("push", 0)),
    case("push-cut", "POST /api/v1/push", PUSH, (201, r#"[{"status":"queued"}"#), ("push", 0)),
    case("push-gzip", "POST /api/v1/push", PUSH, (201, r#"[{"status":"queued"}]"#), ("push", 0)).headers("content-encoding: gzip\r\n"),
    case("push-400", "POST /api/v1/push", "not json", (400, r#"[{"status":"queued"}]"#), ("push", 0)),
    case("push-500", "POST /api/v1/push", PUSH, (500, r#"[{"status":"queued"}]"#), ("push", 0)),
    case("push-503", "POST /api/v1/push", PUSH, (503, "{}"), ("push", 0)),
    case("ephemeral-push", "POST /api/v1/ephemeral/push", r#"{"queue":"q","messages":[1,2,3]}"#, (200, r#"{"pushed":3}"#), ("push", 3)),
    case("ephemeral-less", "POST /api/v1/ephemeral/push", r#"{"queue":"q","messages":[1,2,3]}"#, (201, r#"{"dropped":1,"pushed":2}"#), ("push", 2)),
    case("ephemeral-unreadable", "POST /api/v1/ephemeral/push", r#"{"queue":"q","messages":[1]}"#, (200, "{}"), ("push", 0)),
    case("ephemeral-429", "POST /api/v1/ephemeral/push", r#"{"queue":"q","messages":[1]}"#, (429, r#"{"pushed":1}"#), ("push", 0)),
    case("txn", "POST /api/v1/transaction", TXN, (200, r#"{"success":true,"results":[{"type":"push"},{"type":"push"},{"type":"ack"},{"type":"push"}]}"#), ("txn", 3)),
    case("txn-duplicates", "POST /api/v1/transaction", TXN, (201, r#"{"results":[{"type":"push","duplicate":true},{"type":"ack","duplicate":true},{"type":"push"}],"success":true}"#), ("txn", 2)),
    case("txn-rolled-back", "POST /api/v1/transaction", TXN, (200, r#"{"success":false,"results":[{"type":"push"}],"error":"x"}"#), ("txn", 0)),
    case("txn-unknown", "POST /api/v1/transaction", TXN, (200, r#"{"transactionId":"x"}"#), ("txn", 0)),
    case("txn-409", "POST /api/v1/transaction", TXN, (409, r#"{"success":true}"#), ("txn", 0)),
    case("pop", POP, "", (200, r#"{"messages":[{"id":"a","data":{"messages":[1,2]}},{"id":"b","data":"]}"}],"success":true}"#), ("delivery", 2)),
    case("pop-partition", "GET /api/v1/pop/queue/q/partition/eu?wait=true&timeout=1000", "", (200, r#"{"messages":[{"data":"\u00e9"}]}"#), ("delivery", 1)),
    case("pop-empty", POP, "", (200, r#"{"messages":[],"success":false}"#), ("delivery", 0)),
    case("pop-no-body", POP, "", (200, ""), ("delivery", 0)),
    case("pop-204", POP, "", (204, ""), ("delivery", 0)),
    case("pop-404", POP, "", (404, r#"{"messages":[1]}"#), ("delivery", 0)),
    case("pop-unreadable", POP, "", (200, r#"{"messages":{}}"#), ("delivery", 0)),
    case("ephemeral-pop", "GET /api/v1/ephemeral/pop?queue=q", "", (200, r#"{"messages":[1,2,3]}"#), ("delivery", 3)),
    case("cycle", "POST /streams/v1/cycle", CYCLE, (200, r#"{"success":true,"push_results":[{"queue":"out","partition":"eu","status":"queued"},{"queue":"out","partition":"Default","status":"duplicate"}]}"#), ("read", 0)).besides(2),
    case("cycle-all", "POST /streams/v1/cycle", CYCLE, (200, r#"{"push_results":[{"queueName":"out","partitionName":"eu","status":"queued"},{"queue":"out","status":"queued"}]}"#), ("read", 0)).besides(3),
    case("cycle-failed", "POST /streams/v1/cycle", CYCLE, (200, r#"{"success":false,"push_results":[{"queue":"out","status":"queued"}]}"#), ("read", 0)),
    case("cycle-no-sinks", "POST /streams/v1/cycle", r#"{"query_id":"x"}"#, (200, "not read"), ("read", 0)),
    case("cycle-500", "POST /streams/v1/cycle", CYCLE, (500, r#"{"push_results":[{"queue":"out","status":"queued"}]}"#), ("read", 0)),
    case("stream-state", "POST /streams/v1/state", r#"{"a":1}"#, (200, r#"{"messages":[1]}"#), ("read", 0)).streams(),
    case("replay", REPLAY, "{}", (200, r#"{"success":true,"result":"moved"}"#), ("configure", 0)).besides(1),
    case("replay-elsewhere", REPLAY, r#"{"queue":"q","partition":"p"}"#, (200, r#"{"result":"moved"}"#), ("configure", 0)).besides(1),
    case("replay-gone", REPLAY, "{}", (200, r#"{"success":true,"result":"not_found"}"#), ("configure", 0)),
    case("replay-failed", REPLAY, "{}", (200, r#"{"success":false,"result":"moved"}"#), ("configure", 0)),
    case("replay-404", REPLAY, "{}", (404, r#"{"result":"moved"}"#), ("configure", 0)),
    case("retry", RETRY, "", (200, r#"{"success":true,"result":"moved"}"#), ("configure", 0)).besides(1).streams(),
    case("configure", "POST /api/v1/configure", r#"{"queue":"q"}"#, (200, r#"{"messages":[1]}"#), ("configure", 0)),
    case("delete-queue", "DELETE /api/v1/resources/queues/q", "", (200, "{}"), ("configure", 0)),
    case("delete-dlq", "DELETE /api/v1/dlq", "", (200, "{}"), ("configure", 0)),
    case("ack", "POST /api/v1/ack", r#"{"transactionId":"a"}"#, (200, r#"{"success":true}"#), ("read", 0)).streams(),
    case("lease", "POST /api/v1/lease/x/extend", "{}", (200, "{}"), ("read", 0)).streams(),
    case("fetch", "POST /api/v1/fetch", "{}", (200, r#"{"messages":[1]}"#), ("read", 0)).streams(),
    case("kv-get", "GET /api/v1/kv/ns/k", "", (200, r#"{"found":true}"#), ("read", 0)),
    case("kv-put", "PUT /api/v1/kv/ns/k", r#"{"value":1}"#, (200, r#"{"ok":true}"#), ("read", 0)).streams(),
    case("kv-batch", "POST /api/v1/kv", r#"[{"op":"put","ns":"a","key":"b","value":1}]"#, (200, "[{}]"), ("read", 0)).streams(),
    case("list", "GET /api/v1/resources/queues", "", (200, r#"{"queues":[]}"#), ("read", 0)),
    case("head", "HEAD /api/v1/messages/p/t", "", (200, "{}"), ("read", 0)),
];

/// Cells that fail, and what the client sees.
const FAILURES: &[(&str, &str, &str, u16, &str)] = &[
    ("fails-close-push", "POST /api/v1/push", PUSH, 502, "push"),
    ("fails-close-txn", "POST /api/v1/transaction", TXN, 502, "txn"),
    ("fails-close-pop", POP, "", 502, "delivery"),
    ("fails-close-cycle", "POST /streams/v1/cycle", CYCLE, 502, "read"),
    ("fails-close-replay", REPLAY, "{}", 502, "configure"),
    ("fails-garbage-push", "POST /api/v1/push", PUSH, 502, "push"),
    ("fails-401-push", "POST /api/v1/push", PUSH, 502, "push"),
    ("fails-never-push", "POST /api/v1/push", PUSH, 504, "push"),
    ("fails-never-kv", "GET /api/v1/kv/ns/k", "", 504, "read"),
];

fn failure(name: &str) -> Told {
    match name.split('-').nth(1) {
        Some("close") => Told::Close,
        Some("garbage") => Told::Garbage,
        Some("401") => Told::answer(401, "[]"),
        Some("never") => Told::Never,
        _ => panic!("{name}"),
    }
}

/// How the cell answers the request that names its case and framing.
fn tell(request: &Recorded) -> Told {
    let value = |name| request.all(name).first().copied().unwrap_or_default();
    let (name, framing) = (value("x-case"), value("x-framing").parse().unwrap_or(0));
    if name.starts_with("fails-") {
        return failure(name);
    }
    if name == "broken" {
        return Told::body(201, Body::Broken(br#"[{"status":"queued"}"#.to_vec()));
    }
    let Some(case) = CASES.iter().find(|case| case.name == name) else {
        return Told::answer(200, r#"[{"status":"queued"}]"#);
    };
    // An answer that may have to be read must come as plain text (trap 13).
    if !matches!(case.op, "read") && name != "configure" && !name.starts_with("delete") {
        assert_eq!(request.all("accept-encoding"), ["identity"], "{name}");
    }
    Told::Answer(Answer { status: case.status, headers: case.headers.to_owned(), body: case.framed(framing) })
}

async fn ask(world: &World, tenant: &Tenant, name: &str, framing: usize, line: &str, body: &str) -> u16 {
    let headers =
        format!("{}x-case: {name}\r\nx-framing: {framing}\r\nAccept-Encoding: gzip\r\n", tenant.headers());
    let mut socket = Socket::open(world.port()).await;
    let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    socket.send(format!("{line} HTTP/1.1\r\n{headers}{length}\r\n{body}")).await;
    let head = line.starts_with("HEAD ");
    let answer = if head { socket.answer_to_head().await } else { socket.answer().await };
    let answer = answer.unwrap_or_else(|| panic!("no answer: {name}"));
    if let Some(case) = CASES.iter().find(|case| case.name == name)
        && !head
    {
        assert_eq!(String::from_utf8_lossy(&answer.body), case.answer, "{name}: as the cell sent it");
    }
    answer.status
}

/// The sum of a metric over its labels, or of one line of it.
fn metric(text: &str, name: &str) -> f64 {
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_row_of_the_tables_bills_what_it_says_wherever_the_body_is_cut() {
    let builder = World::builder()
        .env("QUEEN_PROXY_METER_FLUSH_MS", 100)
        .env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 1_500)
        .admin();
    let (mut world, _books) = world(builder, tell).await;
    let began = Instant::now();
    let mut expected = Totals::new();
    for case in CASES {
        let tenant = world.tenant(case.name).await;
        let asks = case.framings();
        for framing in 0..asks {
            let status = ask(&world, &tenant, case.name, framing, case.line, case.body).await;
            assert_eq!(status, case.status, "{}", case.name);
        }
        let asks = asks as u64;
        let bytes_in = if case.reads_body { case.body.len() as u64 } else { 0 };
        let bytes_out = if case.line.starts_with("HEAD ") { 0 } else { case.answer.len() as u64 };
        let row = [1, case.msgs, bytes_in, bytes_out].map(|number| number * asks);
        expected.insert((tenant.slug.clone(), case.op.to_owned()), row);
        if case.besides > 0 {
            expected.insert((tenant.slug, "push".to_owned()), [0, case.besides * asks, 0, 0]);
        }
    }
    for &(name, line, body, status, op) in FAILURES {
        let tenant = world.tenant(name).await;
        assert_eq!(ask(&world, &tenant, name, 0, line, body).await, status, "{name}");
        expected.insert((tenant.slug, op.to_owned()), [1, 0, 0, 0]);
    }
    // Nobody listens there.
    let nobody = world.add_cell("nobody", free_port()).await;
    let books = std::mem::replace(&mut world.cell_id, nobody);
    let tenant = world.tenant("nobody").await;
    assert_eq!(ask(&world, &tenant, "nobody", 0, "POST /api/v1/push", PUSH).await, 502);
    expected.insert((tenant.slug, "push".to_owned()), [1, 0, 0, 0]);
    world.cell_id = books;
    // The cell breaks off in the middle of an answer.
    let tenant = world.tenant("broken").await;
    let request = format!(
        "POST /api/v1/push HTTP/1.1\r\n{}x-case: broken\r\nContent-Length: {}\r\n\r\n{PUSH}",
        tenant.headers(),
        PUSH.len()
    );
    let mut socket = Socket::open(world.port()).await;
    socket.send(request).await;
    assert!(socket.answer().await.is_none(), "the client sees that it is broken");
    expected.insert((tenant.slug, "push".to_owned()), [1, 0, PUSH.len() as u64, 20]);

    // The figures know it a flush later, all of it.
    let text = async || crate::support::metrics(world.admin).await;
    let sum = |at: usize| expected.values().map(|row| row[at]).sum::<u64>();
    #[allow(clippy::cast_precision_loss)]
    let reqs = sum(0) as f64;
    crate::support::eventually("the figures", std::time::Duration::from_secs(20), async || {
        (metric(&text().await, "queen_proxy_usage_requests_total") >= reqs).then_some(())
    })
    .await;
    let figures = text().await;
    for (name, at) in [
        ("queen_proxy_usage_requests_total", 0),
        ("queen_proxy_usage_messages_total", 1),
        ("queen_proxy_usage_in_bytes_total", 2),
        ("queen_proxy_usage_out_bytes_total", 3),
    ] {
        #[allow(clippy::cast_precision_loss)]
        let total = sum(at) as f64;
        assert!((metric(&figures, name) - total).abs() < 0.5, "{name} is not {total}:\n{figures}");
    }
    let unreadable = ["push-unreadable", "push-shape", "push-cut", "push-gzip", "ephemeral-unreadable"];
    let unreadable = unreadable.len() + ["txn-unknown", "pop-unreadable"].len();
    #[allow(clippy::cast_precision_loss)]
    let unreadable = (unreadable * 6 + ["broken"].len()) as f64;
    assert!((metric(&figures, "queen_proxy_usage_unreadable_total") - unreadable).abs() < 0.5, "{figures}");

    for reason in ["monthly_quota", "storage"] {
        let line = format!("queen_proxy_push_blocked_clusters{{reason=\"{reason}\"}} 0");
        assert!(figures.lines().any(|found| found == line), "{line}");
    }

    let log = world.proxies[0].1.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 60).unwrap();
    assert!((1..=most).contains(&lines("an answer bills no messages")), "once a minute");
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 30).unwrap();
    assert!((1..=most).contains(&lines("wait in the cell's buffer")), "once in half a minute");

    world.stop_proxy(0);
    let usage = usage(&world).await;
    for (key, row) in &expected {
        assert_eq!(usage.get(key), Some(row), "{key:?}");
    }
    assert_eq!(usage, expected, "and nothing else");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_proxy_refuses_is_not_metered() {
    let builder = World::builder().env("QUEEN_PROXY_MAX_BODY_BYTES", 65_536);
    let asked = Arc::new(std::sync::Mutex::new(HashMap::<String, u64>::new()));
    let seen = Arc::clone(&asked);
    let (mut world, _books) = world(builder, move |request| {
        *seen.lock().unwrap().entry(request.line.clone()).or_default() += 1;
        Told::answer(201, r#"[{"status":"queued"}]"#)
    })
    .await;
    let tenant = world.tenant("refused").await;
    let caps = r#"{"max_payload_bytes": 20, "max_batch_items": 3, "max_parked_pops": 0,
        "max_req_per_sec": null, "max_msgs_per_sec": null}"#;
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{caps}')", tenant.cluster)).await;
    let read_only = world.key(tenant.cluster, &["read"]).await.1;
    let own = tenant.headers();
    let with =
        |credential: &str| format!("Host: {}\r\nAuthorization: Bearer {credential}\r\n", tenant.host());
    let large = format!(r#"{{"items":[{{"queue":"q","payload":"{}"}}]}}"#, "x".repeat(70_000));
    for (line, headers, body, status) in [
        ("POST /api/v1/push", &with("qk_test_0123456789abcdef"), PUSH, 401),
        ("POST /api/v1/push", &format!("Host: {}\r\n", tenant.host()), PUSH, 401),
        ("POST /api/v1/push", &with(&read_only), PUSH, 403),
        ("GET /api/v1/status", &own, "", 404),
        ("POST /api/v1/pus%68", &own, PUSH, 404),
        ("POST /api/v1/timers", &own, "[]", 403),
        ("POST /api/v1/push", &own, &large, 413),
        (
            "POST /api/v1/push",
            &own,
            r#"{"items":[{"queue":"q","payload":"0123456789012345678901234"}]}"#,
            413,
        ),
        (
            "POST /api/v1/push",
            &own,
            r#"{"items":[{"queue":"q"},{"queue":"q"},{"queue":"q"},{"queue":"q"}]}"#,
            413,
        ),
        ("POST /api/v1/dlq/7/replay", &own, r#"{"queue":"q"}"#, 400),
        ("GET /api/v1/pop/queue/q?wait=true", &own, "", 429),
        ("GET /api/v1/pop/queue/q", &format!("{own}Content-Length: 5\r\nContent-Length: 6\r\n"), "", 400),
    ] {
        let answer = world.ask(line, headers, body).await;
        assert_eq!(answer.status, status, "{line}: {}", String::from_utf8_lossy(&answer.body));
    }
    // One passes, the next one is over the rate.
    let limited = world.tenant("limited").await;
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 1}"#;
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{caps}')", limited.cluster)).await;
    let mut socket = Socket::open(world.port()).await;
    let request = format!("GET /api/v1/kv/ns/k HTTP/1.1\r\n{}\r\n", limited.headers());
    let mut passed = 0;
    let refused = loop {
        let status = socket.ask(&request).await.status;
        if status != 201 {
            break status;
        }
        passed += 1;
    };
    assert_eq!(refused, 429);
    // A cluster that may not push.
    world.sql(&format!("SELECT queen_proxy.set_cluster_status('{}', 'push_blocked')", tenant.cluster)).await;
    crate::support::eventually("the block", std::time::Duration::from_secs(10), async || {
        (world.ask("POST /api/v1/push", &own, PUSH).await.status == 403).then_some(())
    })
    .await;
    let through: u64 = {
        let asked = asked.lock().unwrap();
        asked.iter().filter(|(line, _)| line.contains("push")).map(|(_, count)| *count).sum()
    };
    world.stop_proxy(0);
    let mut expected = Totals::new();
    expected.insert((limited.slug, "read".to_owned()), [passed, 0, 0, passed * 21]);
    // Pushes may have passed before the block was heard of.
    if through > 0 {
        let row = [through, through, through * PUSH.len() as u64, through * 21];
        expected.insert((tenant.slug, "push".to_owned()), row);
    }
    assert_eq!(usage(&world).await, expected);
}
