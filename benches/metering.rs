//! What metering adds to a request: CPU of a proxy with metering and one without, in turns, on small answers; and
//! their memory while pops of 64 MiB pass. The proxies, PostgreSQL and every socket are real; the cell is this program.
//!
//! `cargo bench --bench metering`; the figures belong into `benches/RESULTS.md`. Two processes differ by some per cent
//! whatever they do, so both proxies are in one whose CPU is looked at, and there are several of those.
//! `cargo bench --bench metering -- instructions` counts instructions of requests under valgrind's callgrind
//! (`apt-get install valgrind`).

#![allow(missing_docs, clippy::unwrap_used, clippy::cast_precision_loss)]

mod common;

use common::{Program, connect, listening, postgres, pxdb, tenant};
use queen_proxy::{
    config::proxy::ProxyConfig,
    control::now_s,
    dev::postgres::free_port,
    domain::ids::ClusterId,
    metering::{
        Meter,
        accumulate::Accumulators,
        sample::{MeteredRoute, RequestFacts, Watch},
    },
    proxy,
};
use std::{
    collections::HashMap,
    fs,
    hint::black_box,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Builder,
    task::JoinSet,
};
use uuid::Uuid;

/// As our programs do.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Processes, each with both proxies.
const PROCESSES: usize = 8;
/// Pairs of turns in each, by load.
const TURNS: usize = 8;
const TURN: Duration = Duration::from_millis(1_000);
const CLIENTS: usize = 8;
const MIB: usize = 1 << 20;

const PUSHED: &str = r#"[{"index":0,"transactionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3d","messageId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3e","status":"queued"}]"#;
const POPPED: &str = r#"{"messages":[{"id":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3e","transactionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3d","partitionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3f","partition":"Default","data":{"order":17,"customer":"acme","lines":[{"sku":"a-1","count":2},{"sku":"b-7","count":1}]},"leaseId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c40"}],"success":true}"#;
const FOUND: &str = r#"{"found":true,"value":{"a":1},"version":3}"#;
const PUSH: &str = r#"{"items":[{"queue":"orders","partition":"Default","transactionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3d","payload":{"order":17,"customer":"acme"}}]}"#;

/// Where the second proxy of a process listens.
const SECOND_PORT: &str = "BENCH_SECOND_PORT";

/// A process with one proxy, or two.
struct Proxy {
    program: Program,
    port: u16,
    second: u16,
}

impl Proxy {
    fn start(mode: &str, environment: &HashMap<&str, String>) -> Self {
        Self::run(Command::new(std::env::current_exe().unwrap()).arg(mode), environment)
    }

    /// Under callgrind, which writes what it has counted into files of this name.
    fn start_counted(mode: &str, environment: &HashMap<&str, String>, counts: &Path) -> Self {
        let mut command = Command::new("valgrind");
        command.arg("--tool=callgrind").arg(format!("--callgrind-out-file={}", counts.display()));
        let command = command.arg(std::env::current_exe().unwrap()).arg(mode).stderr(Stdio::null());
        Self::run(command.env("QUEEN_PROXY_WORKER_THREADS", "1"), environment)
    }

    fn run(command: &mut Command, environment: &HashMap<&str, String>) -> Self {
        let (port, second) = (free_port(), free_port());
        command.envs(environment).env("QUEEN_PROXY_PORT", port.to_string());
        command.env(SECOND_PORT, second.to_string());
        let spool = std::env::temp_dir().join(format!("queen-bench-spool-{}", Uuid::new_v4().simple()));
        command.env("QUEEN_PROXY_SPOOL_DIR", spool);
        Self { program: Program::start(command), port, second }
    }

    /// Instructions since this was asked the last time; `number` says how often it was.
    fn instructions(&self, counts: &Path, number: usize) -> u64 {
        let id = self.program.0.id().to_string();
        let told = Command::new("callgrind_control").args(["--dump", &id]).output().unwrap();
        assert!(told.status.success(), "{told:?}");
        let text = fs::read_to_string(format!("{}.{number}", counts.display())).unwrap();
        let sums = text.lines().filter_map(|line| line.strip_prefix("totals: "));
        sums.map(|sum| sum.trim().parse::<u64>().unwrap()).sum()
    }

    /// User and system time so far.
    fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.program.0.id())).unwrap();
        // After the name in parentheses: utime and stime are the 12th and the 13th, in hundredths.
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        let ticks: u64 = fields[11..=12].iter().map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// `VmRSS` or `VmHWM`, in bytes.
    fn memory(&self, which: &str) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.program.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(which)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    }
}

/// Answers by the path; `batch=64` is a pop of 64 MiB.
async fn cell(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut unread = Vec::new();
    let mut piece = [0; 16 * 1024];
    let message = [br#"{"data":""#, "an event in some words, ".repeat(MIB / 24).as_bytes(), b"\"},"].concat();
    loop {
        let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") else {
            match stream.read(&mut piece).await {
                Ok(count @ 1..) => unread.extend_from_slice(&piece[..count]),
                _ => return,
            }
            continue;
        };
        let head = String::from_utf8_lossy(&unread[..end]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
        while unread.len() < end + 4 + length {
            match stream.read(&mut piece).await {
                Ok(count @ 1..) => unread.extend_from_slice(&piece[..count]),
                _ => return,
            }
        }
        unread.drain(..end + 4 + length);
        let line = head.lines().next().unwrap();
        if line.contains("batch=64") {
            let (first, last) = (br#"{"messages":["#, b"1]}");
            let length = first.len() + 64 * message.len() + last.len();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            );
            let mut sent =
                stream.write_all(head.as_bytes()).await.is_ok() && stream.write_all(first).await.is_ok();
            for _ in 0..64 {
                sent = sent && stream.write_all(&message).await.is_ok();
            }
            if !sent || stream.write_all(last).await.is_err() {
                return;
            }
            continue;
        }
        let body = match line {
            _ if line.contains("/push") => PUSHED,
            _ if line.contains("/pop/") => POPPED,
            _ => FOUND,
        };
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// One request after the other until the turn is over, or there were so many; how many.
async fn client(port: u16, request: Vec<u8>, answer: usize, end: Instant, most: u64) -> u64 {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut piece = [0; 8 * 1024];
    let mut count = 0;
    while count < most && Instant::now() < end {
        stream.write_all(&request).await.unwrap();
        let mut read = 0;
        let mut head = None;
        while head.is_none_or(|head| read < head + answer) {
            let more = stream.read(&mut piece[read..]).await.unwrap();
            assert!(more > 0, "{}", String::from_utf8_lossy(&piece[..read]));
            read += more;
            head = piece[..read].windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
        }
        assert!(piece.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&piece[..read]));
        count += 1;
    }
    count
}

/// CPU of the process and requests of a turn of one proxy in it.
async fn turn(proxy: &Proxy, port: u16, request: &[u8], answer: usize) -> (Duration, u64) {
    let before = proxy.cpu();
    let end = Instant::now() + TURN;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        clients.spawn(client(port, request.to_vec(), answer, end, u64::MAX));
    }
    let count = clients.join_all().await.iter().sum();
    (proxy.cpu().saturating_sub(before), count)
}

/// What one load cost in the turns of one process: µs a request with metering and without, and how often.
async fn turns(proxy: &Proxy, request: &[u8], answer: usize) -> ([f64; 2], u64) {
    let mut sums = [(Duration::ZERO, 0); 2];
    for number in 0..=TURNS {
        // Each is first as often as the other.
        for which in if number % 2 == 0 { [0, 1] } else { [1, 0] } {
            let port = [proxy.port, proxy.second][which];
            let (cpu, count) = turn(proxy, port, request, answer).await;
            // The first pair warms up.
            if number > 0 {
                sums[which] = (sums[which].0 + cpu, sums[which].1 + count);
            }
        }
    }
    (sums.map(|(cpu, count)| cpu.as_secs_f64() * 1e6 / count as f64), sums[0].1 + sums[1].1)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The mean and its standard error.
fn mean(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (variance / count).sqrt())
}

/// The work of metering alone, in ns a request.
fn alone(route: MeteredRoute, answer: &str) -> f64 {
    const TIMES: u32 = 300_000;
    let accumulators = Accumulators::default();
    let id = ClusterId(Uuid::from_u128(7));
    let pass = || {
        let began = Instant::now();
        for _ in 0..TIMES {
            let mut watch =
                Watch::new(route, RequestFacts { bytes_in: 100, ..RequestFacts::default() }, 1_024);
            watch.head(200, None);
            watch.piece(black_box(answer.as_bytes()));
            let usage = watch.finish();
            let now = now_s();
            let meter = accumulators.cluster(id);
            usage.samples().for_each(|sample| meter.record(sample, now));
        }
        began.elapsed().as_nanos() as f64 / f64::from(TIMES)
    };
    median((0..7).map(|_| pass()).collect())
}

async fn pop_64_mib(port: u16, headers: String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let request = format!("GET /api/v1/pop/queue/q?batch=64 HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut piece = vec![0; 1 << 16];
    let mut sum = 0;
    loop {
        match stream.read(&mut piece).await.unwrap() {
            0 => break,
            count => sum += count,
        }
    }
    assert!(sum > 63 * MIB, "{sum} bytes");
}

/// Instructions by request, of metered and unmetered proxies.
async fn count(environment: &HashMap<&str, String>, loads: &[(&str, String, &str)]) {
    const REQUESTS: u64 = 2_000;
    let folder = tempfile::tempdir().unwrap();
    let mut sums = Vec::new();
    for mode in ["metered", "unmetered"] {
        let counts = folder.path().join(mode);
        let proxy = Proxy::start_counted(mode, environment, &counts);
        listening(proxy.port).await;
        let mut number = 0;
        for (_, request, answer) in loads {
            let mut sum = 0;
            // The first ones fill caches.
            for requests in [200, REQUESTS] {
                let end = Instant::now() + Duration::from_secs(300);
                let done =
                    client(proxy.port, request.clone().into_bytes(), answer.len(), end, requests).await;
                assert_eq!(done, requests);
                number += 1;
                sum = proxy.instructions(&counts, number);
            }
            sums.push(sum as f64 / REQUESTS as f64);
        }
    }
    let (on, off) = sums.split_at(loads.len());
    for (((name, ..), on), off) in loads.iter().zip(on).zip(off) {
        println!(
            "{name}: {on:.0} instructions a request with metering, {off:.0} without: {:+.2} %",
            (on / off - 1.0) * 100.0
        );
    }
}

async fn compare(counts_instructions: bool) {
    let mut server = postgres(&["control"]).await;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let cell_port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(cell(stream));
        }
    });
    let mut environment = HashMap::from([
        ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
        ("QUEEN_PROXY_ADMIN_ADDR", "off".to_owned()),
        ("QUEEN_PROXY_RECONCILE_MS", "1000000000".to_owned()),
        ("QUEEN_PROXY_STORAGE_REFRESH_MS", "1000000000".to_owned()),
        // Fifteen times as often as usual, so that each turn has its share of flushes.
        ("QUEEN_PROXY_METER_FLUSH_MS", "1000".to_owned()),
    ]);
    environment.extend(pxdb(&server, "control"));
    // Creates the schema.
    let first = Proxy::start("metered", &environment);
    listening(first.port).await;
    drop(first);
    let mut control = connect(&server, "control").await;
    let overrides = r#"{"max_req_per_sec": null, "max_msgs_per_sec": null, "max_retained_bytes": null}"#;
    let key = tenant(&mut control, cell_port, overrides).await;
    let headers = format!("Host: acme.q.example\r\nAuthorization: Bearer {key}\r\n");
    let push = format!("POST /api/v1/push HTTP/1.1\r\n{headers}Content-Length: {}\r\n\r\n{PUSH}", PUSH.len());
    let pop = format!("GET /api/v1/pop/queue/orders?batch=1 HTTP/1.1\r\n{headers}\r\n");
    let get = format!("GET /api/v1/kv/ns/k HTTP/1.1\r\n{headers}\r\n");

    if counts_instructions {
        let loads = [("push", push, PUSHED), ("pop", pop, POPPED), ("kv get", get, FOUND)];
        count(&environment, &loads).await;
        server.stop();
        return;
    }
    println!("{CLIENTS} clients, {PROCESSES} processes with {TURNS} pairs of turns of {TURN:?}");
    let loads = [
        ("push", push, PUSHED, MeteredRoute::Push),
        ("pop", pop, POPPED, MeteredRoute::Pop),
        ("kv get", get, FOUND, MeteredRoute::Other(queen_proxy::metering::sample::Op::Read)),
    ];
    let mut costs = vec![Vec::new(); loads.len()];
    let mut requests = vec![0; loads.len()];
    for number in 0..PROCESSES {
        // Which of them is started first must not decide.
        let proxy = Proxy::start(["metered-first", "unmetered-first"][number % 2], &environment);
        listening(proxy.port).await;
        listening(proxy.second).await;
        for (load, (_, request, answer, _)) in loads.iter().enumerate() {
            let (cost, count) = turns(&proxy, request.as_bytes(), answer.len()).await;
            costs[load].push(cost);
            requests[load] += count;
        }
    }
    for ((costs, requests), (name, _, answer, route)) in costs.iter().zip(requests).zip(loads) {
        let of = |which: usize| median(costs.iter().map(|cost| cost[which]).collect());
        let added: Vec<f64> = costs.iter().map(|[on, off]| (on / off - 1.0) * 100.0).collect();
        let (added, error) = mean(&added);
        let alone = alone(route, answer) / 1e3;
        println!(
            "{name}: {:.2} µs CPU a request with metering, {:.2} µs without ({requests} requests): {added:+.2} % \
             (± {error:.2}, one standard error); the work alone {alone:.3} µs, {:.2} %",
            of(0),
            of(1),
            alone / of(1) * 100.0,
        );
    }
    for name in ["metered", "unmetered"] {
        let proxy = Proxy::start(name, &environment);
        listening(proxy.port).await;
        let before = proxy.memory("VmRSS");
        for _ in 0..4 {
            pop_64_mib(proxy.port, headers.clone()).await;
        }
        let after_four = proxy.memory("VmHWM");
        let mut pops = JoinSet::new();
        for _ in 0..8 {
            pops.spawn(pop_64_mib(proxy.port, headers.clone()));
        }
        pops.join_all().await;
        let [before, after_four, after, now] =
            [before, after_four, proxy.memory("VmHWM"), proxy.memory("VmRSS")]
                .map(|bytes| bytes as f64 / MIB as f64);
        println!(
            "{name}: {before:.1} MiB resident; peak {after_four:.1} MiB with four pops of 64 MiB in turn, \
             {after:.1} MiB with eight more at once; {now:.1} MiB afterwards"
        );
    }
    server.stop();
}

/// Serves with metering or without, on the first port of this process or the second.
fn serve(metered: bool, first: bool) {
    let mut environment: HashMap<String, String> = std::env::vars().collect();
    if !first {
        let port = environment[SECOND_PORT].clone();
        environment.insert("QUEEN_PROXY_PORT".to_owned(), port);
        let spool = format!("{}-second", environment["QUEEN_PROXY_SPOOL_DIR"]);
        environment.insert("QUEEN_PROXY_SPOOL_DIR".to_owned(), spool);
    }
    let (config, _) = ProxyConfig::load(environment, None).unwrap();
    let served = if metered {
        proxy::serve(&config, None)
    } else {
        proxy::serve_metered_by(&config, None, |_, _| Ok(Meter::discarding()))
    };
    served.unwrap();
}

fn main() {
    let mode = std::env::args().nth(1).unwrap_or_default();
    if let Some(first) = mode.strip_suffix("-first") {
        let metered_first = first == "metered";
        std::thread::scope(|scope| {
            // The metered one is always the first port.
            let ways = if metered_first { [true, false] } else { [false, true] };
            for metered in ways {
                scope.spawn(move || serve(metered, metered));
            }
        });
        return;
    }
    if mode == "metered" || mode == "unmetered" {
        serve(mode == "metered", true);
        return;
    }
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(compare(mode == "instructions"));
}
