//! Our proxy beside what others put at the edge: the same upstream and the same load for each in turn, on this
//! machine. What is measured and what came out is in `RESULTS.md` beside this file.
//!
//! `cargo bench --bench edge`; `cargo bench --bench edge -- --help` tells how to run a part of it.

#![allow(missing_docs, clippy::unwrap_used, clippy::cast_precision_loss)]

#[path = "../common/mod.rs"]
mod common;

mod bare;
mod candidates;
mod control;
mod load;
mod measure;
mod names;
mod probe;
mod ready;
mod report;
mod upstream;

use candidates::{Candidate, Running, Stand};
use clap::{Parser, Subcommand, ValueEnum};
use load::{Load, Outcome, Until};
use measure::Cpu;
use queen_proxy::process::stop_signal;
use report::{Report, Sample};
use std::{
    env,
    net::SocketAddr,
    path::PathBuf,
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};
use tokio::{process::Command, runtime::Builder, time::sleep};

/// As our programs do.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a gateway says to the cell in place of the client's key.
const SECRET: &str = "a-secret-of-the-cell";

#[derive(Parser, Clone)]
#[command(about = "Our proxy beside others at the edge: CPU, rate, latency and memory as Markdown tables")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    options: Options,
}

#[derive(clap::Args, Clone)]
struct Options {
    /// Only these candidates
    #[arg(long, value_delimiter = ',', default_values_t = Candidate::value_variants().to_vec(), value_enum)]
    only: Vec<Candidate>,
    /// Only these loads
    #[arg(long, value_delimiter = ',', default_values_t = Load::value_variants().to_vec(), value_enum)]
    loads: Vec<Load>,
    /// How often each candidate has its turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How long a turn is
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Threads, or processes, of each candidate that serve requests
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Connections of clients
    #[arg(long, default_value_t = 32)]
    connections: usize,
    /// Clusters, and keys
    #[arg(long, default_value_t = 10_000)]
    clusters: usize,
    /// Polls that wait at once
    #[arg(long, default_value_t = 10_000)]
    polls: usize,
    /// Small and short: whether it runs at all
    #[arg(long)]
    quick: bool,
    /// A queen-proxy other than the one that Cargo has just built
    #[arg(long)]
    proxy: Option<PathBuf>,
    /// What Cargo says to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn proxy(&self) -> PathBuf {
        self.proxy.clone().unwrap_or_else(|| env!("CARGO_BIN_EXE_queen-proxy").into())
    }

    fn with_quick(mut self) -> Self {
        if self.quick {
            (self.rounds, self.seconds, self.clusters, self.polls) = (1, 0.3, 100, 200);
        }
        self
    }
}

/// The programs around it, each a process of its own so that nobody's time is counted as another's.
#[derive(Subcommand, Clone)]
#[command(disable_help_subcommand = true)]
enum Part {
    #[command(hide = true)]
    Upstream { port: u16 },
    #[command(hide = true)]
    Bare { port: u16, upstream: SocketAddr, threads: usize },
    #[command(hide = true)]
    Load {
        to: SocketAddr,
        load: Load,
        #[arg(long)]
        connections: usize,
        #[arg(long)]
        clusters: usize,
        #[arg(long)]
        seconds: Option<f64>,
        #[arg(long)]
        asked: Option<usize>,
    },
    #[command(hide = true)]
    Park { to: SocketAddr, count: usize, clusters: usize },
}

/// Has a load run against a candidate.
async fn drive(running: &Running, load: Load, options: &Options, until: &str) -> Outcome {
    let output = Command::new(env::current_exe().unwrap())
        .args(["load", &running.address.to_string(), load.to_possible_value().unwrap().get_name()])
        .args([format!("--connections={}", options.connections), format!("--clusters={}", options.clusters)])
        .arg(until)
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}, {}: {complaint}", running.candidate.name(), load.name());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// One turn of one candidate with requests.
async fn turn(running: &Running, load: Load, options: &Options) -> Sample {
    let id = running.program.as_ref().map(candidates::Program::id);
    let before = id.map(Cpu::of);
    let outcome = drive(running, load, options, &format!("--seconds={}", options.seconds)).await;
    let cpu = id.zip(before).map(|(id, before)| Cpu::of(id).since(&before));
    let requests = outcome.requests as f64;
    Sample {
        cpu_us: cpu.map(|cpu| cpu as f64 / 1e3 / requests),
        rate: Some(requests / outcome.seconds),
        p50_us: Some(outcome.p50 as f64 / 1e3),
        p99_us: Some(outcome.p99 as f64 / 1e3),
        p999_us: Some(outcome.p999 as f64 / 1e3),
        resident_mib: id.map(|id| measure::resident(id) as f64 / f64::from(1 << 20)),
        poll_kib: None,
    }
}

/// How many polls the upstream holds.
fn parked(upstream: SocketAddr) -> usize {
    let answer = probe::ask(upstream, upstream::PARKED, "");
    answer.rsplit_once("\r\n\r\n").unwrap().1.parse().unwrap()
}

async fn parked_are(upstream: SocketAddr, wanted: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let count = parked(upstream);
        if count == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{count} polls at the upstream in place of {wanted}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// What the polls of a candidate need that has just started and served each cluster.
async fn hold_polls(stand: &Stand, candidate: Candidate, options: &Options) -> Sample {
    let running = stand.run(candidate).await;
    let Some(program) = &running.program else { return Sample::default() };
    parked_are(stand.upstream(), 0).await;
    let before = measure::resident(program.id());
    let (count, clusters) = (stand.polls(), options.clusters);
    let mut clients = Command::new(env::current_exe().unwrap())
        .args(["park", &running.address.to_string(), &count.to_string(), &clusters.to_string()])
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    parked_are(stand.upstream(), count).await;
    let after = measure::resident(program.id());
    clients.kill().await.unwrap();
    drop(running);
    parked_are(stand.upstream(), 0).await;
    Sample {
        poll_kib: Some(after.saturating_sub(before) as f64 / 1024.0 / count as f64),
        resident_mib: Some(after as f64 / f64::from(1 << 20)),
        ..Sample::default()
    }
}

async fn compare(options: &Options) {
    let stand = Stand::start(options).await;
    let mut all = Vec::new();
    for candidate in &options.only {
        let running = stand.run(*candidate).await;
        let id = running.program.as_ref().map(candidates::Program::id);
        eprintln!("{} on {}, process {id:?}", candidate.name(), running.address);
        all.push(running);
    }
    let mut report = Report::default();
    for round in 0..options.rounds as usize {
        for load in &options.loads {
            // Each is first at times, so that none is always beside the same neighbour.
            for at in 0..all.len() {
                let running = &all[(at + round) % all.len()];
                let sample = match load {
                    Load::Polls => hold_polls(&stand, running.candidate, options).await,
                    _ => turn(running, *load, options).await,
                };
                eprintln!("round {}: {}, {}: {sample:?}", round + 1, load.name(), running.candidate.name());
                if sample.is_something() {
                    report.add(*load, running.candidate, sample);
                }
            }
        }
    }
    report::print_machine(options, stand.polls());
    report.print();
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.part {
        Some(Part::Upstream { port }) => upstream::serve(port),
        Some(Part::Bare { port, upstream, threads }) => bare::serve(port, upstream, threads),
        Some(Part::Load { to, load, connections, clusters, seconds, asked }) => {
            let until =
                asked.map_or(Until::Passed(Duration::from_secs_f64(seconds.unwrap_or(1.0))), Until::Asked);
            let outcome = load::run(to, load, connections, clusters, until);
            println!("{}", serde_json::to_string(&outcome).unwrap());
        }
        Some(Part::Park { to, count, clusters }) => load::park(to, count, clusters),
        None => {
            let options = cli.options.with_quick();
            if let Err(lacking) = options.only.iter().try_for_each(|candidate| candidate.check()) {
                eprintln!("edge: {lacking}");
                return ExitCode::FAILURE;
            }
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            return runtime.block_on(async {
                // What was started ends with the future that holds it.
                tokio::select! {
                    () = compare(&options) => ExitCode::SUCCESS,
                    _ = stop_signal(true) => ExitCode::FAILURE,
                }
            });
        }
    }
    ExitCode::SUCCESS
}
