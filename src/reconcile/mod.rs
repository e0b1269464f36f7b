//! What the limiters need of pxdb and of the cells, all of it off the request path: the rows of the queue
//! cache are loaded and written, cells are asked what their clusters keep (proxy contract §9.3, §14).
//!
//! Every proxy of a control plane does all of this for itself, because the limiters live in each process.
//! What they write meets in one table: every statement leaves alone what somebody wrote since the rows
//! were read, so the same listing written twice changes nothing the second time.

mod client;
mod listing;
mod loader;
mod persister;
mod poller;

use crate::{
    config::proxy::CapsConfig,
    control::{
        queues::{Target, TargetCell},
        store::Store,
    },
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
    },
    limits::{ClusterLimits, Limiter, LiveView, clock::Monotonic},
    telemetry::log_gate::LogGate,
};
use client::{CellClient, PollError};
use loader::Wanted;
use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use uuid::Uuid;

/// How often unused counters are looked for (proxy contract §9.2).
const PRUNE: Duration = Duration::from_secs(120);
/// Reads of rows at once, on behalf of counters that are new.
const LOADERS: usize = 2;
/// Cells of [`Figures`].
const MAX_CELLS_SHOWN: usize = 256;

/// The work in the background. Dropping it ends the work without writing what waits.
pub struct Reconcile {
    shared: Arc<Shared>,
    background: Mutex<JoinSet<()>>,
    stop: watch::Sender<Option<Instant>>,
}

/// Figures for metrics.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Queue rows that wait to be written.
    pub rows_pending: usize,
    /// Rows that found no room among these, since the start.
    pub rows_left_out: u64,
    /// Rows not written because their cluster is no more or the database refuses them, since the start.
    pub rows_dropped: u64,
    /// Clusters whose rows are still to be read, so that nothing of them is refused.
    pub loads_pending: usize,
    /// Clusters that found no room among these, since the start.
    pub loads_left_out: u64,
    /// Listings asked for, since the start.
    pub polls: u64,
    /// Those without a usable answer.
    pub polls_failed: u64,
    /// At most 256 cells.
    pub cells: Vec<CellFigure>,
}

/// How it stands with one cell.
#[derive(Clone, Debug)]
pub struct CellFigure {
    /// `cells.slug`
    pub slug: Box<str>,
    /// How long ago a visit had a usable answer; none when there was none yet.
    pub answered: Option<Duration>,
}

/// What the tasks share.
struct Shared {
    store: Store,
    limiter: Arc<Limiter<Monotonic>>,
    config: CapsConfig,
    client: CellClient,
    places: Semaphore,
    cells: Mutex<HashMap<Uuid, CellState>>,
    /// Clusters whose cells were warned about.
    partial: Mutex<HashSet<ClusterId>>,
    wanted: Wanted,
    in_hand: AtomicUsize,
    dropped: AtomicU64,
    polls: AtomicU64,
    polls_failed: AtomicU64,
    gates: Gates,
}

#[derive(Default)]
struct Gates {
    load: LogGate,
    persist: LogGate,
    refused: LogGate,
    rows: LogGate,
}

struct CellState {
    slug: Box<str>,
    visited: bool,
    failing: bool,
    answered_at: Option<Instant>,
}

impl Reconcile {
    /// Starts the work on a runtime that lives as long as the process.
    pub fn start(
        runtime: &Handle,
        store: Store,
        limiter: Arc<Limiter<Monotonic>>,
        config: CapsConfig,
    ) -> Self {
        let shared = Arc::new(Shared {
            store,
            limiter,
            client: CellClient::new(config.cell_polls, config.tenant_header),
            places: Semaphore::new(config.polls),
            cells: Mutex::default(),
            partial: Mutex::default(),
            wanted: Wanted::new(config.max_clusters),
            in_hand: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            polls_failed: AtomicU64::new(0),
            gates: Gates::default(),
            config,
        });
        let (stop, stopping) = watch::channel(None);
        let mut background = JoinSet::new();
        background.spawn_on(poller::run(Arc::clone(&shared)), runtime);
        background.spawn_on(persister::run(Arc::clone(&shared), stopping), runtime);
        background.spawn_on(prune(Arc::clone(&shared)), runtime);
        for _ in 0..LOADERS {
            background.spawn_on(loader::run(Arc::clone(&shared)), runtime);
        }
        Self { shared, background: Mutex::new(background), stop }
    }

    /// Has the rows of a cluster read and loaded: for whom
    /// [`claim_load`](ClusterLimits::claim_load) said so. Does not wait.
    pub fn want_rows(&self, cluster: &Arc<ClusterLimits>) {
        self.shared.wanted.add(Arc::downgrade(cluster));
    }

    /// Writes the rows that wait, trying again until the limit, and ends the work.
    pub async fn shutdown(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        self.stop.send_replace(Some(deadline));
        // The persister drops its receiver when it has ended.
        let _ = timeout_at(deadline, self.stop.closed()).await;
        lock(&self.background).abort_all();
        let rows = self.shared.rows_pending();
        if rows > 0 {
            tracing::warn!(rows, "queue rows were not written before the end; the next listings bring them");
        }
    }

    /// How it stands.
    pub fn figures(&self) -> Figures {
        let shared = &self.shared;
        let cells = lock(&shared.cells);
        let cells = cells.values().take(MAX_CELLS_SHOWN).map(|cell| CellFigure {
            slug: cell.slug.clone(),
            answered: cell.answered_at.map(|at| at.elapsed()),
        });
        Figures {
            rows_pending: shared.rows_pending(),
            rows_left_out: shared.limiter.pending().left_out(),
            rows_dropped: shared.dropped.load(Ordering::Relaxed),
            loads_pending: shared.wanted.len(),
            loads_left_out: shared.wanted.left_out(),
            polls: shared.polls.load(Ordering::Relaxed),
            polls_failed: shared.polls_failed.load(Ordering::Relaxed),
            cells: cells.collect(),
        }
    }
}

async fn prune(shared: Arc<Shared>) {
    let mut tick = interval(PRUNE);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let pruned = shared.limiter.prune();
        tracing::debug!(pruned, left = shared.limiter.clusters(), "unused counters");
    }
}

impl Shared {
    fn rows_pending(&self) -> usize {
        self.limiter.pending().len() + self.in_hand.load(Ordering::Relaxed)
    }

    /// What is counted of a cluster under its storage cap alone.
    fn view(&self, target: &Target) -> Option<LiveView> {
        let cap = |name: &str| {
            Ok::<_, Infallible>(if name == "max_retained_bytes" { target.retained } else { Cap::Unlimited })
        };
        let Ok(limits) = Limits::from_columns(cap);
        self.limiter.live(target.id, &limits)
    }

    fn is_storage_blocked(&self, target: &Target) -> bool {
        self.view(target).is_some_and(|view| view.storage_blocked)
    }

    /// Claims a cell for a visit; false while another is under way.
    fn begin_visit(&self, cell: &TargetCell) -> bool {
        let mut cells = lock(&self.cells);
        let state = cells.entry(cell.id).or_insert_with(|| CellState {
            slug: cell.slug.clone(),
            visited: false,
            failing: false,
            answered_at: None,
        });
        !std::mem::replace(&mut state.visited, true)
    }

    /// Notes how a visit went, and logs it when that is new.
    fn end_visit(&self, cell: &TargetCell, answered: bool, error: Option<PollError>) {
        let mut cells = lock(&self.cells);
        let Some(state) = cells.get_mut(&cell.id) else { return };
        state.visited = false;
        if answered {
            state.answered_at = Some(Instant::now());
        }
        let failing = !answered && error.is_some();
        if std::mem::replace(&mut state.failing, failing) == failing {
            return;
        }
        match error.filter(|_| failing) {
            Some(error) => tracing::warn!(cell = %cell.slug, %error, "the cell tells nothing of its queues"),
            None => tracing::info!(cell = %cell.slug, "the cell tells of its queues again"),
        }
    }

    /// Forgets all other cells, except those that are being visited.
    fn keep_cells(&self, kept: &HashSet<Uuid>) {
        lock(&self.cells).retain(|id, state| state.visited || kept.contains(id));
    }

    fn keep_partial(&self, keep: impl Fn(ClusterId) -> bool) {
        lock(&self.partial).retain(|id| keep(*id));
    }

    fn is_first_partial(&self, cluster: ClusterId) -> bool {
        lock(&self.partial).insert(cluster)
    }
}

/// No panic leaves these in a state that matters.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
