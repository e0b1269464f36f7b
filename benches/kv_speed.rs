//! The cell against its floor: single `put` and `get` calls over HTTP on connections that stay, against
//! `pgbench` with the same upsert and select of one key as prepared statements, on the same server with the same
//! number of clients, in turn. PostgreSQL keeps its safe defaults (`fsync`, `synchronous_commit`).
//!
//! `cargo bench --bench kv_speed`; the figures belong into `benches/RESULTS.md`. `QUEEN_BENCH_CLIENTS` (64),
//! `QUEEN_BENCH_SECONDS` (6, of each load) and `QUEEN_BENCH_ROUNDS` (3) make it another size. Further
//! settings of the cell may be given in the environment: `QUEEN_KV_POOL_SIZE=64 cargo bench …`.

#![allow(missing_docs, clippy::unwrap_used, clippy::cast_precision_loss)]

mod common;

use common::{Program, connect, listening};
use queen_proxy::dev::postgres::{Postgres, Settings, USER, free_port};
use sqlx::PgConnection;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio, exit},
    str::FromStr,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

const KEYS: u64 = 100_000;
const VALUE: &str = r#"{"name": "counter of something", "n": 12345, "note": "abcdefghijklmnopqrstuvwxyz"}"#;
const TENANT: &str = "00000000-0000-0000-0000-000000000001";
/// Cells to compare: their name, and what their environment adds.
const CELLS: [(&str, &[(&str, &str)]); 2] =
    [("cell", &[("QUEEN_KV_GROUP_CALLS", "1")]), ("cell, grouped", &[("QUEEN_KV_GROUP_CALLS", "32")])];

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Put,
    Get,
}

impl Operation {
    /// For pgbench; `:'tenant'` and the like would be text, so constants are written in.
    fn script(self) -> String {
        let statement = match self {
            Self::Put => format!(
                "INSERT INTO queen.kv AS t \
                 (tenant_id, namespace, key, value, version, expires_at, created_at, updated_at) \
                 VALUES ('{TENANT}', 'bench', 'key-' || :k::text, '{VALUE}', \
                         nextval('queen.kv_version_seq'), NULL, now(), now()) \
                 ON CONFLICT (tenant_id, namespace, key) DO UPDATE SET value = excluded.value, \
                     version = excluded.version, expires_at = excluded.expires_at, \
                     created_at = CASE WHEN queen.kv_live_v1(t.expires_at, now()) \
                                       THEN t.created_at ELSE now() END, updated_at = now() \
                 RETURNING t.version;"
            ),
            Self::Get => format!(
                "SELECT value, version, expires_at, updated_at FROM queen.kv \
                  WHERE tenant_id = '{TENANT}' AND namespace = 'bench' AND key = 'key-' || :k::text \
                    AND queen.kv_live_v1(expires_at, now());"
            ),
        };
        format!("\\set k random(1, {KEYS})\n{statement}\n")
    }

    fn request(self, key: u64) -> String {
        match self {
            Self::Put => {
                let body = format!(r#"{{"value":{VALUE},"forever":true}}"#);
                format!(
                    "PUT /api/v1/kv/bench/key-{key} HTTP/1.1\r\nHost: cell\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                )
            }
            Self::Get => format!("GET /api/v1/kv/bench/key-{key} HTTP/1.1\r\nHost: cell\r\n\r\n"),
        }
    }
}

/// A cell as a process.
struct Cell {
    program: Program,
    port: u16,
}

impl Cell {
    async fn start(server: &Postgres, more: &[(&str, &str)]) -> Self {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_queen-cell"));
        command.arg("serve").env("RUST_LOG", "error").stderr(Stdio::null());
        command
            .envs([("HOST", "127.0.0.1"), ("PG_HOST", "127.0.0.1"), ("PG_USER", USER), ("PG_DB", "cell")])
            .env("PORT", port.to_string())
            .env("PG_PORT", server.port().to_string())
            .env("PG_PASSWORD", server.password().expose())
            // No limit of rates is in the way.
            .env("QUEEN_KV_CELL_RATE", "0");
        for name in ["READ_RATE", "READ_BURST", "WRITE_RATE", "WRITE_BURST"] {
            command.env(format!("QUEEN_KV_{name}"), "1000000");
        }
        let program = Program::start(command.envs(more.iter().copied()));
        listening(port).await;
        Self { program, port }
    }
}

/// One request on a connection that stays.
async fn ask(stream: &mut TcpStream, request: &[u8], answer: &mut Vec<u8>) {
    stream.write_all(request).await.unwrap();
    answer.clear();
    loop {
        assert!(stream.read_buf(answer).await.unwrap() > 0, "the cell ended the connection");
        let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(&answer[..end]).unwrap();
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().unwrap())
        });
        if answer.len() >= end + 4 + length.unwrap() {
            assert!(head.starts_with("HTTP/1.1 200"), "{}", String::from_utf8_lossy(answer));
            return;
        }
    }
}

/// Latencies of all calls within `window`.
async fn load_cell(port: u16, operation: Operation, clients: usize, window: Duration) -> Vec<Duration> {
    let mut tasks = JoinSet::new();
    let end = Instant::now() + window;
    for client in 0..clients {
        tasks.spawn(async move {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.set_nodelay(true).unwrap();
            let (mut latencies, mut answer) = (Vec::new(), Vec::with_capacity(1024));
            // Any sequence does that visits the keys evenly and differs by client (Knuth's multiplier).
            let mut random = client as u64 + 1;
            while Instant::now() < end {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let request = operation.request((random >> 33) % KEYS + 1);
                let started = Instant::now();
                ask(&mut stream, request.as_bytes(), &mut answer).await;
                latencies.push(started.elapsed());
            }
            latencies
        });
    }
    tasks.join_all().await.concat()
}

/// The same by pgbench.
async fn load_floor(
    pgbench: &Path,
    server: &Postgres,
    folder: &Path,
    operation: Operation,
    clients: usize,
    window: Duration,
) -> Vec<Duration> {
    let script = folder.join("script.sql");
    fs::write(&script, operation.script()).unwrap();
    let mut command = tokio::process::Command::new(pgbench);
    command
        .current_dir(folder)
        .args(["-n", "-M", "prepared", "-j", "2", "-l", "--log-prefix", "calls", "-f"])
        .arg(&script)
        .args(["-c", &clients.to_string(), "-T", &window.as_secs().to_string()])
        .args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "-U", USER, "cell"])
        .env("PGPASSWORD", server.password().expose());
    let output = command.output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut latencies = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("calls.") {
            let text = fs::read_to_string(&path).unwrap();
            // client, number of its transaction, microseconds, …
            latencies.extend(
                text.lines()
                    .map(|line| Duration::from_micros(line.split(' ').nth(2).unwrap().parse().unwrap())),
            );
            fs::remove_file(&path).unwrap();
        }
    }
    latencies
}

/// Processor time that processes have used, in seconds.
#[derive(Clone, Copy, Default)]
struct Used {
    cell: f64,
    postgres: f64,
    load: f64,
}

impl Used {
    fn now(cell: Option<u32>, postmaster: u32) -> Self {
        let own = |stat: &[u64]| (stat[13] + stat[14]) as f64 / 100.0;
        let ended = |stat: &[u64]| (stat[15] + stat[16]) as f64 / 100.0;
        let mut used = Self::default();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
            // The name of the program, in brackets, may hold spaces.
            let Some((_, rest)) = text.rsplit_once(')') else { continue };
            let stat: Vec<u64> = ["0", "0"]
                .into_iter()
                .chain(rest.split_whitespace())
                .map(|n| n.parse().unwrap_or(0))
                .collect();
            if pid == postmaster {
                used.postgres += own(&stat) + ended(&stat);
            } else if stat[3] == u64::from(postmaster) {
                used.postgres += own(&stat);
            } else if Some(pid) == cell {
                used.cell += own(&stat);
            } else if pid == std::process::id() {
                used.load += own(&stat) + ended(&stat);
            }
        }
        used
    }
}

/// What one load came to.
struct Figures {
    per_second: f64,
    p50: f64,
    p99: f64,
    used: [f64; 3],
}

impl Figures {
    fn of(mut latencies: Vec<Duration>, window: Duration, before: Used, after: Used) -> Self {
        latencies.sort_unstable();
        let quantile =
            |per_mille: usize| latencies[(latencies.len() - 1) * per_mille / 1000].as_secs_f64() * 1e3;
        let share = |used: f64| used / window.as_secs_f64() * 100.0;
        Self {
            per_second: latencies.len() as f64 / window.as_secs_f64(),
            p50: quantile(500),
            p99: quantile(990),
            used: [
                share(after.cell - before.cell),
                share(after.postgres - before.postgres),
                share(after.load - before.load),
            ],
        }
    }

    /// Each figure's median over rounds.
    fn median(all: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            let mut values: Vec<f64> = all.iter().map(figure).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        Self {
            per_second: of(|f| f.per_second),
            p50: of(|f| f.p50),
            p99: of(|f| f.p99),
            used: [of(|f| f.used[0]), of(|f| f.used[1]), of(|f| f.used[2])],
        }
    }
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name)
        .ok()
        .map_or(default, |text| text.parse().ok().unwrap_or_else(|| panic!("{name}: a number")))
}

fn find_pgbench() -> Option<PathBuf> {
    let on_path: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    on_path
        .into_iter()
        .chain(installed.map(|version| version.path().join("bin")))
        .map(|folder| folder.join("pgbench"))
        .find(|program| program.exists())
}

/// Moves what earlier loads left behind out of the way of the next.
async fn settle(postgres: &mut PgConnection) {
    for statement in ["VACUUM (ANALYZE) queen.kv", "CHECKPOINT"] {
        sqlx::query(statement).execute(&mut *postgres).await.unwrap();
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let Some(pgbench) = find_pgbench() else {
        eprintln!(
            "no pgbench found: install it, for example with `apt-get install postgresql postgresql-client`"
        );
        exit(1);
    };
    let clients = number("QUEEN_BENCH_CLIENTS", 64_usize);
    let window = Duration::from_secs(number("QUEEN_BENCH_SECONDS", 6));
    let rounds = number("QUEEN_BENCH_ROUNDS", 3_usize);

    let folder = std::env::temp_dir().join(format!("queen-bench-{}", uuid::Uuid::new_v4().simple()));
    let logs = folder.with_extension("logs");
    fs::create_dir(&logs).unwrap();
    let server =
        Postgres::start(Settings { folder: folder.clone(), port: free_port(), throw_away: false }).unwrap();
    let postmaster = fs::read_to_string(folder.join("data/postmaster.pid")).unwrap();
    let postmaster: u32 = postmaster.lines().next().unwrap().trim().parse().unwrap();
    let mut postgres = connect(&server, "postgres").await;
    sqlx::query("CREATE DATABASE cell").execute(&mut postgres).await.unwrap();
    let mut cells = Vec::new();
    for (name, environment) in CELLS {
        cells.push((name, Cell::start(&server, environment).await));
    }
    let mut postgres = connect(&server, "cell").await;
    let version: String = sqlx::query_scalar("SHOW server_version").fetch_one(&mut postgres).await.unwrap();
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "INSERT INTO queen.kv (namespace, key, value, version)
         SELECT 'bench', 'key-' || n, '{VALUE}', nextval('queen.kv_version_seq')
           FROM generate_series(1, {KEYS}) AS n"
    )))
    .execute(&mut postgres)
    .await
    .unwrap();

    let row = |name: &str, f: &Figures| {
        println!(
            "{name:28} {:9.0} {:8.2} {:8.2} {:8.0} {:8.0} {:8.0}",
            f.per_second, f.p50, f.p99, f.used[0], f.used[1], f.used[2]
        );
    };
    println!("PostgreSQL {version}, {clients} clients, {rounds} rounds of {window:?}, {KEYS} keys");
    println!("                               calls/s   p50 ms   p99 ms  % of a core: cell, postgres, load");
    let mut all: BTreeMap<(Operation, &str), Vec<Figures>> = BTreeMap::new();
    for round in 1..=rounds {
        for operation in [Operation::Put, Operation::Get] {
            settle(&mut postgres).await;
            let before = Used::now(None, postmaster);
            let latencies = load_floor(&pgbench, &server, &logs, operation, clients, window).await;
            let figures = Figures::of(latencies, window, before, Used::now(None, postmaster));
            row(&format!("{round} {operation:?} pgbench"), &figures);
            all.entry((operation, "pgbench")).or_default().push(figures);
            for (name, cell) in &cells {
                settle(&mut postgres).await;
                let pid = Some(cell.program.0.id());
                let before = Used::now(pid, postmaster);
                let latencies = load_cell(cell.port, operation, clients, window).await;
                let figures = Figures::of(latencies, window, before, Used::now(pid, postmaster));
                row(&format!("{round} {operation:?} {name}"), &figures);
                all.entry((operation, name)).or_default().push(figures);
            }
        }
    }
    println!("medians");
    for ((operation, name), figures) in &all {
        let (floor, found) = (Figures::median(&all[&(*operation, "pgbench")]), Figures::median(figures));
        row(&format!("  {operation:?} {name}"), &found);
        if *name != "pgbench" {
            println!(
                "    {:.2} of the calls/s of pgbench, {:.2} times its p99",
                found.per_second / floor.per_second,
                found.p99 / floor.p99
            );
        }
    }
    drop(cells);
    drop(postgres);
    drop(server);
    let _ = fs::remove_dir_all(folder);
    let _ = fs::remove_dir_all(logs);
}
