//! What limits in Redis add to a request's time: the same requests through a proxy that counts for itself and through
//! one that shares, in turns. The proxies, PostgreSQL, Redis and every socket are real; the cell is this program.
//!
//! `cargo bench --bench shared_limits`; the figures belong into `benches/RESULTS.md`. `QUEEN_BENCH_TURNS` and
//! `QUEEN_BENCH_RATE` (requests a second) change its size.

#![allow(missing_docs, clippy::unwrap_used, clippy::cast_precision_loss)]

mod common;

use common::{Program, connect, listening, postgres, pxdb, tenant};
use queen_proxy::{config::proxy::ProxyConfig, dev::postgres::free_port, proxy};
use std::{
    collections::HashMap,
    process::Command,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Builder,
    task::JoinSet,
    time::{MissedTickBehavior, interval_at},
};
use uuid::Uuid;

const TURN: Duration = Duration::from_secs(3);
const CLIENTS: u32 = 8;
const FOUND: &str = r#"{"found":true,"value":{"a":1},"version":3}"#;

fn number(name: &str, usual: u32) -> u32 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

fn start_proxy(environment: &HashMap<&str, String>, limits: &str) -> (u16, Program) {
    let port = free_port();
    let spool = std::env::temp_dir().join(format!("queen-bench-spool-{}", Uuid::new_v4().simple()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("proxy").envs(environment).env("QUEEN_PROXY_PORT", port.to_string());
    command.env("QUEEN_PROXY_LIMITS", limits).env("QUEEN_PROXY_SPOOL_DIR", spool);
    (port, Program::start(&mut command))
}

async fn cell(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{FOUND}",
        FOUND.len()
    );
    let (mut unread, mut piece) = (Vec::new(), [0; 8 * 1024]);
    while let Ok(count @ 1..) = stream.read(&mut piece).await {
        unread.extend_from_slice(&piece[..count]);
        while let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
            unread.drain(..end + 4);
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}

/// A request each so often; how long each took, and how many were refused.
async fn client(port: u16, request: String, every: Duration, end: Instant) -> (Vec<Duration>, u64) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut ticks = interval_at((Instant::now() + every).into(), every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut took, mut refused) = (Vec::new(), 0);
    let mut piece = [0; 8 * 1024];
    while Instant::now() < end {
        ticks.tick().await;
        let asked = Instant::now();
        stream.write_all(request.as_bytes()).await.unwrap();
        let (mut read, mut whole) = (0, usize::MAX);
        while read < whole {
            let more = stream.read(&mut piece[read..]).await.unwrap();
            assert!(more > 0, "{}", String::from_utf8_lossy(&piece[..read]));
            read += more;
            if let Some(head) = piece[..read].windows(4).position(|four| four == b"\r\n\r\n") {
                let text = String::from_utf8_lossy(&piece[..head]).to_ascii_lowercase();
                let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                whole = head + 4 + length.parse::<usize>().unwrap();
            }
        }
        took.push(asked.elapsed());
        refused += u64::from(piece.starts_with(b"HTTP/1.1 429"));
    }
    (took, refused)
}

async fn turn(port: u16, request: &str, rate: u32) -> (Vec<Duration>, u64) {
    let end = Instant::now() + TURN;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        clients.spawn(client(port, request.to_owned(), Duration::from_secs(1) * CLIENTS / rate, end));
    }
    let mut all = (Vec::new(), 0);
    for (took, refused) in clients.join_all().await {
        all.0.extend(took);
        all.1 += refused;
    }
    all
}

async fn compare() {
    let mut server = postgres(&["control"]).await;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let cell_port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(cell(stream));
        }
    });
    let redis_port = free_port();
    let redis = Program::start(Command::new("redis-server").args([
        "--bind",
        "127.0.0.1",
        "--port",
        &redis_port.to_string(),
        "--save",
        "",
    ]));
    listening(redis_port).await;
    let mut environment = HashMap::from([
        ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
        ("QUEEN_PROXY_ADMIN_ADDR", "off".to_owned()),
        ("QUEEN_PROXY_RECONCILE_MS", "1000000000".to_owned()),
        ("QUEEN_PROXY_STORAGE_REFRESH_MS", "1000000000".to_owned()),
        ("LOG_LEVEL", "error".to_owned()),
    ]);
    environment.extend(pxdb(&server, "control"));
    let store = format!("redis://127.0.0.1:{redis_port}");
    let proxies = [start_proxy(&environment, "local"), start_proxy(&environment, &store)];
    for (port, _) in &proxies {
        listening(*port).await;
    }
    let mut control = connect(&server, "control").await;
    let rate = number("QUEEN_BENCH_RATE", 1_000);
    let lifted = r#"{"max_msgs_per_sec": null, "max_retained_bytes": null}"#;
    let key = tenant(&mut control, cell_port, lifted).await;
    let request = format!(
        "GET /api/v1/kv/ns/k HTTP/1.1\r\nHost: acme.q.example\r\nAuthorization: Bearer {key}\r\n\r\n"
    );
    let turns = number("QUEEN_BENCH_TURNS", 10);
    println!("{CLIENTS} clients, {rate} requests a second, {turns} pairs of turns of {TURN:?}");
    for (name, limit) in
        [("far below the limit", rate * 10), ("just below it", rate * 11 / 10), ("twice the limit", rate / 2)]
    {
        sqlx::query(
            "SELECT queen_proxy.set_limit_override(id, jsonb_build_object('max_req_per_sec', $1::bigint, \
             'req_burst', $1::bigint, 'max_msgs_per_sec', NULL)) FROM queen_proxy.clusters",
        )
        .bind(i64::from(limit))
        .execute(&mut control)
        .await
        .unwrap();
        let mut sums = [const { (Vec::new(), 0) }; 2];
        for number in 0..=turns {
            // Each is first as often as the other.
            for which in if number % 2 == 0 { [0, 1] } else { [1, 0] } {
                let (took, refused) = turn(proxies[which].0, &request, rate).await;
                // The first pair warms up, and hears of the limit.
                if number > 0 {
                    sums[which].0.extend(took);
                    sums[which].1 += refused;
                }
            }
        }
        let figures = sums.map(|(mut took, refused)| {
            took.sort_unstable();
            let at = |part: usize| took[took.len() * part / 1_000].as_secs_f64() * 1e6;
            ([at(500), at(990), at(999)], refused as f64 / took.len() as f64 * 100.0, took.len())
        });
        let [([p50, p99, p999], refused, _), ([shared50, shared99, shared999], shared_refused, count)] =
            figures;
        let more = |shared: f64, own: f64| (shared / own - 1.0) * 100.0;
        println!(
            "{name}: p50 {p50:.0} µs alone, {shared50:.0} µs shared ({:+.1} %); p99 {p99:.0} and {shared99:.0} \
             ({:+.1} %); p99.9 {p999:.0} and {shared999:.0} ({:+.1} %); {refused:.1} and {shared_refused:.1} % \
             refused of {count} each",
            more(shared50, p50),
            more(shared99, p99),
            more(shared999, p999),
        );
    }
    drop((proxies, redis));
    server.stop();
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("proxy") {
        let (config, _) = ProxyConfig::load(std::env::vars(), None).unwrap();
        proxy::serve(&config, None).unwrap();
        return;
    }
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(compare());
}
