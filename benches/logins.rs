//! What a flood of sign-ins does to tenants: latency of a tenant's requests, sent at a steady rate, without
//! and with 200 sign-ins at once, in turn. Everything is real: PostgreSQL, cell and proxy as processes.
//!
//! `cargo bench --bench logins`; the figures belong into `benches/RESULTS.md`.

#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Program, connect, listening, postgres, pxdb, tenant};
use queen_proxy::dev::postgres::{USER, free_port};
use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};

const ROUNDS: usize = 8;
const WINDOW: Duration = Duration::from_secs(8);
/// Requests a second: about a tenth of what one core carries, so that waiting is seen and not made.
const RATE: u32 = 400;
const SIGN_INS: usize = 200;
const CLIENTS: u32 = 8;
/// Into how many parts a window is cut, to see when the slowest answers are.
const PARTS: usize = 16;

fn start(binary: &str, environment: &[(&str, String)]) -> Program {
    let mut command = Command::new(binary);
    command.arg("serve").env("RUST_LOG", "error").stderr(Stdio::null());
    Program::start(command.envs(environment.iter().map(|(name, value)| (*name, value))))
}

/// One request on a connection that stays; returns the status.
async fn ask(stream: &mut TcpStream, request: &[u8]) -> u16 {
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let size = stream.read(&mut piece).await.unwrap();
        answer.extend_from_slice(&piece[..size]);
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
            });
            if body.len() >= length.unwrap_or(0) {
                return head.split(' ').nth(1).unwrap().parse().unwrap();
            }
        }
        assert!(size > 0, "the proxy ended the connection");
    }
}

/// One answer to a tenant, and when in the window its request was due.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Answer {
    latency: Duration,
    due: Duration,
}

/// A tenant's requests during one window, the slowest last.
async fn traffic(port: u16, request: Vec<u8>) -> Vec<Answer> {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for client in 0..CLIENTS {
        let request = request.clone();
        tasks.spawn(async move {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.set_nodelay(true).unwrap();
            let period = Duration::from_secs(1) * CLIENTS / RATE;
            sleep(period * client / CLIENTS).await;
            let mut tick = interval(period);
            tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut answers = Vec::new();
            while start.elapsed() < WINDOW {
                // From when it was due: a late answer delays the next request, which counts as well.
                let due = tick.tick().await;
                assert_eq!(ask(&mut stream, &request).await, 200);
                answers.push(Answer { latency: due.elapsed(), due: due.into_std() - start });
            }
            answers
        });
    }
    let mut all = tasks.join_all().await.concat();
    all.sort_unstable();
    all
}

/// 200 sign-ins at once; how many were worked on and how many refused.
async fn flood(port: u16) -> (usize, usize) {
    let mut tasks = JoinSet::new();
    // Each from an address of its own and for an account of its own, or the throttles would cut them off.
    for n in 0..SIGN_INS {
        let body = format!("email=nobody{n}%40acme.example&password=wrong");
        let request = format!(
            "POST /auth/login HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 203.0.{}.{}\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n{body}",
            n / 250,
            n % 250 + 1,
            body.len()
        );
        tasks.spawn(async move {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            ask(&mut stream, request.as_bytes()).await
        });
    }
    let mut counts = (0, 0);
    for status in tasks.join_all().await {
        match status {
            401 => counts.0 += 1,
            503 => counts.1 += 1,
            other => panic!("{other}"),
        }
    }
    counts
}

/// The same from a process of its own that stands back: the machines of those who flood us are not ours, and the clock
/// of the tenant's client must not wait for them.
async fn flood_from_elsewhere(port: u16) -> String {
    let mut command = tokio::process::Command::new("nice");
    command.args(["-n", "19"]).arg(std::env::current_exe().unwrap()).args(["flood", &port.to_string()]);
    let output = command.stderr(Stdio::inherit()).output().await.unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn quantile(sorted: &[Answer], per_mille: usize) -> f64 {
    sorted[(sorted.len() - 1) * per_mille / 1000].latency.as_secs_f64() * 1e3
}

/// How many of the slowest hundredth were due in each part of the window.
fn slowest_by_time(sorted: &[Answer]) -> [usize; PARTS] {
    let mut parts = [0; PARTS];
    let part = WINDOW / u32::try_from(PARTS).unwrap();
    for answer in &sorted[sorted.len() * 99 / 100..] {
        let at = answer.due.as_nanos() / part.as_nanos();
        parts[usize::try_from(at).unwrap().min(PARTS - 1)] += 1;
    }
    parts
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, port, ..] = arguments.as_slice()
        && mode == "flood"
    {
        let (worked_on, refused) = flood(port.parse().unwrap()).await;
        print!("{worked_on} / {refused}");
        return;
    }
    let mut server = postgres(&["control", "cell"]).await;
    let (cell_port, port) = (free_port(), free_port());
    let _cell = start(
        env!("CARGO_BIN_EXE_queen-cell"),
        &[
            ("HOST", "127.0.0.1".to_owned()),
            ("PORT", cell_port.to_string()),
            ("PG_HOST", "127.0.0.1".to_owned()),
            ("PG_PORT", server.port().to_string()),
            ("PG_USER", USER.to_owned()),
            ("PG_PASSWORD", server.password().expose().to_owned()),
            ("PG_DB", "cell".to_owned()),
            ("QUEEN_TENANCY_HEADER", "true".to_owned()),
            ("QUEEN_KV_TRUSTED_PROXY", "true".to_owned()),
            ("QUEEN_KV_READ_RATE", "1000000".to_owned()),
            ("QUEEN_KV_READ_BURST", "1000000".to_owned()),
            ("QUEEN_KV_CELL_RATE", "0".to_owned()),
        ],
    );
    let queue = std::env::var("SIGN_IN_QUEUE").unwrap_or_else(|_| "256".to_owned());
    let mut environment = Vec::from(pxdb(&server, "control"));
    environment.extend([
        ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
        ("QUEEN_PROXY_PORT", port.to_string()),
        ("QUEEN_PROXY_JWT_SECRET", "the signing secret of this bench".to_owned()),
        ("QUEEN_PROXY_LOGIN_QUEUE", queue.clone()),
        ("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1".to_owned()),
        ("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT_AND_ADDRESS", "1000000".to_owned()),
        ("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", "1000000".to_owned()),
        ("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT", "1000000".to_owned()),
    ]);
    let _proxy = start(env!("CARGO_BIN_EXE_queen-proxy"), &environment);
    for port in [cell_port, port] {
        listening(port).await;
    }
    let mut control = connect(&server, "control").await;
    let key = tenant(&mut control, cell_port, r#"{"max_req_per_sec": null}"#).await;
    let request = format!(
        "GET /api/v1/kv/ns/k HTTP/1.1\r\nHost: acme.q.example\r\nAuthorization: Bearer {key}\r\n\r\n"
    )
    .into_bytes();

    traffic(port, request.clone()).await;
    println!("queue {queue}, {RATE} requests/s, windows of {WINDOW:?}");
    println!("round  quiet p50/p99/p99.9 ms   flood p50/p99/p99.9 ms   worked on/refused");
    let (mut quiet_p99, mut flood_p99) = (Vec::new(), Vec::new());
    let mut slow = [[0; PARTS]; 2];
    for round in 1..=ROUNDS {
        let quiet = traffic(port, request.clone()).await;
        let (flooded, counts) = tokio::join!(traffic(port, request.clone()), flood_from_elsewhere(port));
        for (slow, sorted) in slow.iter_mut().zip([&quiet, &flooded]) {
            let parts = slowest_by_time(sorted);
            slow.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
        let of =
            |sorted: &[Answer]| [500, 990, 999].map(|q| format!("{:.2}", quantile(sorted, q))).join(" / ");
        println!("{round:5}  {:24} {:24} {counts}", of(&quiet), of(&flooded));
        quiet_p99.push(quantile(&quiet, 990));
        flood_p99.push(quantile(&flooded, 990));
    }
    let (quiet, flood) = (median(quiet_p99), median(flood_p99));
    println!("slowest hundredth by part of the window: quiet {:?}, flood {:?}", slow[0], slow[1]);
    println!("median p99: quiet {quiet:.2} ms, flood {flood:.2} ms, ratio {:.2}", flood / quiet);
    server.stop();
}
