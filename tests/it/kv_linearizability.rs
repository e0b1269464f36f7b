//! Concurrent clients on few keys, through the proxy, while sessions are cut, sockets close, the database
//! restarts or crashes and the cell is killed: every history must be one that a single store, asked by one
//! client at a time, could have had.
//!
//! Full size: `QUEEN_TEST_ROUNDS=4000 cargo test --test it linearizab -- --nocapture`. A failure names its
//! seed; `QUEEN_TEST_SEED=<seed>` runs the same program again, first.

mod checker;
mod client;
mod program;

use crate::kv_vectors::unlimited;
use crate::support::{Tenant, World, rounds};
use checker::{Event, is_linearizable};
use client::Shared;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use program::{Fault, KEYS, Program};
use sqlx::PgConnection;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize},
    },
    time::Instant,
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::{JoinSet, block_in_place},
};

/// What the histories of a run had in them.
#[derive(Debug, Default)]
struct Tally {
    histories: u32,
    operations: usize,
    unanswered: usize,
    sessions_cut: usize,
    restarts: usize,
    crashes: usize,
    cells_killed: usize,
}

struct Run {
    world: World,
    tenant: Tenant,
    /// Ends sessions; made anew when it was ended itself.
    operator: Option<PgConnection>,
    tally: Tally,
}

impl Run {
    async fn start() -> Self {
        let world = World::builder().own_cell_postgres().start().await;
        let tenant = unlimited(&world, "acme").await;
        // A crash must not take what was committed: the servers of tests run without this otherwise.
        let durable =
            sqlx::AssertSqlSafe(format!("ALTER DATABASE {} SET synchronous_commit = on", world.cell_db));
        sqlx::query(durable).execute(&mut world.server.connect("postgres").await).await.unwrap();
        let mut run = Self { world, tenant, operator: None, tally: Tally::default() };
        run.fault(Fault::CutSessions).await;
        run
    }

    /// One history; its events by key.
    async fn history(&mut self, seed: u64, program: Program) -> [Vec<Event>; KEYS] {
        let (numbers, sent) = unbounded_channel();
        let shared = Arc::new(Shared {
            port: self.world.port(),
            headers: self.tenant.headers(),
            keys: std::array::from_fn(|key| format!("{}-{seed}-{key}", self.tally.histories)),
            clock: AtomicU64::new(0),
            sent: AtomicUsize::new(0),
            numbers,
            documents: program.documents,
        });
        let mut clients = JoinSet::new();
        for (number, steps) in program.clients.into_iter().enumerate() {
            clients.spawn(client::run(Arc::clone(&shared), number, steps));
        }
        drop(shared);
        let (done, ()) = tokio::join!(clients.join_all(), self.faults(program.faults, sent));
        let mut events: [Vec<Event>; KEYS] = Default::default();
        for (key, event) in done.into_iter().flatten() {
            self.tally.operations += 1;
            self.tally.unanswered += usize::from(event.end.is_none());
            events[key].push(event);
        }
        self.tally.histories += 1;
        events
    }

    /// Lets things go wrong at the given requests, until the clients are done.
    async fn faults(&mut self, mut faults: Vec<(usize, Fault)>, mut sent: UnboundedReceiver<usize>) {
        while let Some(number) = sent.recv().await {
            let due: Vec<Fault> =
                faults.extract_if(.., |(at, _)| *at <= number).map(|(_, fault)| fault).collect();
            for fault in due {
                self.fault(fault).await;
            }
        }
    }

    async fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::CutSessions => {
                const CUT: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                                    WHERE application_name = 'queen-cell' AND datname = current_database()";
                let operator = match &mut self.operator {
                    Some(operator) => operator,
                    none => none.insert(self.world.cell_database().await),
                };
                sqlx::query(CUT).execute(operator).await.unwrap();
                self.tally.sessions_cut += 1;
            }
            Fault::Restart => {
                self.operator = None;
                block_in_place(|| {
                    self.world.server.stop();
                    self.world.server.start_again();
                });
                self.tally.restarts += 1;
            }
            Fault::Crash => {
                self.operator = None;
                let postmaster: String =
                    sqlx::query_scalar("SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)")
                        .fetch_one(&mut self.world.cell_database().await)
                        .await
                        .unwrap();
                kill(Pid::from_raw(postmaster.parse().unwrap()), Signal::SIGQUIT).unwrap();
                block_in_place(|| {
                    self.world.server.stop();
                    self.world.server.start_again();
                });
                self.tally.crashes += 1;
            }
            Fault::KillCell => {
                self.world.restart_cell().await;
                self.tally.cells_killed += 1;
            }
        }
    }
}

/// The first seed of a run: given, or of the moment.
fn first_seed() -> u64 {
    let given =
        std::env::var("QUEEN_TEST_SEED").ok().map(|text| text.parse().expect("QUEEN_TEST_SEED: a number"));
    given.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0 >> 16)
}

fn show(events: &[Event]) -> String {
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.start);
    let lines = events.iter().map(|event| match event.end {
        Some((end, answer)) => format!("{:>3}..{end:<3} {:?} => {answer:?}\n", event.start, event.kind),
        None => format!("{:>3}..    {:?}\n", event.start, event.kind),
    });
    lines.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_history_is_linearizable_whatever_breaks() {
    let (histories, first, started) = (rounds(40), first_seed(), Instant::now());
    println!("seeds from {first}");
    let mut run = Run::start().await;
    for seed in (first..).take(histories as usize) {
        let program = Program::of(seed);
        for events in run.history(seed, program.clone()).await {
            assert!(
                is_linearizable(&events),
                "not linearizable: QUEEN_TEST_SEED={seed}\n{}\n{program:?}",
                show(&events)
            );
        }
    }
    println!("{:?} in {:.1?}", run.tally, started.elapsed());
    let tally = &run.tally;
    assert!(
        tally.sessions_cut > 0 && tally.restarts > 0 && tally.crashes > 0 && tally.cells_killed > 0,
        "{tally:?}"
    );
    assert!(tally.unanswered > 0 && tally.unanswered * 2 < tally.operations, "{tally:?}");
}

/// The whole apparatus must notice a store that is wrong: here one that judges before it locks.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_lock_is_found_out() {
    let mut run = Run::start().await;
    let mut careless = String::new();
    for file in queen_proxy::cell::CELL_SQL {
        careless += &file.replace("        FOR UPDATE;", ";\n        PERFORM pg_sleep(0.002);");
    }
    assert!(careless.contains("pg_sleep"), "the lock is no longer where it was");
    sqlx::raw_sql(sqlx::AssertSqlSafe(careless)).execute(&mut run.world.cell_database().await).await.unwrap();
    for seed in 0..400 {
        let program = Program { faults: Vec::new(), ..Program::of(seed) };
        if run.history(seed, program).await.iter().any(|events| !is_linearizable(events)) {
            return;
        }
    }
    panic!("400 histories of a store without locks, and none looked wrong");
}
