//! Asking every cell what its clusters keep, and taking in the answers (proxy contract §14).
//!
//! A turn comes every [`CapsConfig::turn`](crate::config::proxy::CapsConfig::turn) and asks for the
//! clusters that are due: all of them every `RECONCILE_MS`, those that are blocked for storage every
//! `STORAGE_REFRESH_MS`. Each cell is visited on its own, so that a slow one only misses its own turns.

use super::{Shared, client::PollError, listing::Listing};
use crate::{
    control::queues::{KnownQueue, Target, TargetCell},
    domain::ids::ClusterId,
    limits::storage::Transition,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval},
};
use uuid::Uuid;

/// Failures in a row after which the rest of a visit is given up: a dead cell must not hold places.
const GIVE_UP: u32 = 4;

/// Whom to ask, as pxdb last said; kept while it is silent.
#[derive(Default)]
struct Plan {
    read_at: Option<Instant>,
    clusters: HashMap<ClusterId, Planned>,
    turns: usize,
}

struct Planned {
    target: Target,
    asked_at: Option<Instant>,
}

/// Takes turns for as long as the process lives.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut plan = Plan::default();
    let mut visits = JoinSet::new();
    let mut tick = interval(shared.config.turn());
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        while visits.try_join_next().is_some() {}
        plan.refresh(&shared).await;
        for (cell, targets) in plan.due(&shared) {
            visits.spawn(visit(Arc::clone(&shared), cell, targets));
        }
    }
}

impl Plan {
    /// Reads whom to ask when it is time, and in between the caps of those that are blocked: a cap that
    /// was raised or lifted releases them without waiting for the next round.
    async fn refresh(&mut self, shared: &Shared) {
        let most = shared.config.max_clusters;
        if is_due(self.read_at, shared.config.reconcile_every, shared) {
            match shared.store.targets(None, most).await {
                Ok(targets) => {
                    self.read_at = Some(Instant::now());
                    self.adopt(shared, targets, most);
                }
                Err(error) => {
                    tracing::warn!(%error, "the list of clusters was not read; the last one serves");
                }
            }
        }
        let blocked = self.clusters.values().filter(|planned| shared.is_storage_blocked(&planned.target));
        let blocked: Vec<ClusterId> = blocked.map(|planned| planned.target.id).collect();
        if blocked.is_empty() {
            return;
        }
        match shared.store.targets(Some(&blocked), most).await {
            Ok(targets) => {
                for target in targets {
                    publish(shared, &target, None);
                    if let Some(planned) = self.clusters.get_mut(&target.id) {
                        planned.target = target;
                    }
                }
            }
            Err(error) => tracing::debug!(%error, "the caps of blocked clusters were not read"),
        }
    }

    fn adopt(&mut self, shared: &Shared, targets: Vec<Target>, most: usize) {
        let all = targets.len() < most;
        if !all {
            tracing::warn!(
                most,
                "there are more clusters than this proxy asks for: the others are not counted"
            );
        }
        let mut before = std::mem::take(&mut self.clusters);
        for target in targets {
            let asked_at = before.remove(&target.id).and_then(|planned| planned.asked_at);
            self.clusters.insert(target.id, Planned { target, asked_at });
        }
        if all {
            for gone in before.into_keys() {
                shared.limiter.forget(gone);
            }
        }
        shared.keep_cells(&self.clusters.values().map(|planned| planned.target.cell.id).collect());
        shared.keep_partial(|id| self.clusters.contains_key(&id));
    }

    /// The clusters to ask for now, by cell; a cell that is still being visited keeps its own for later.
    fn due(&mut self, shared: &Shared) -> Vec<(Arc<TargetCell>, Vec<Target>)> {
        let mut cells: HashMap<Uuid, (Arc<TargetCell>, Vec<Target>)> = HashMap::new();
        for Planned { target, asked_at } in self.clusters.values() {
            let refresh =
                || shared.config.turn() < shared.config.reconcile_every && shared.is_storage_blocked(target);
            if is_due(*asked_at, shared.config.reconcile_every, shared)
                || (is_due(*asked_at, shared.config.storage_refresh, shared) && refresh())
            {
                let of_cell = || (Arc::clone(&target.cell), Vec::new());
                cells.entry(target.cell.id).or_insert_with(of_cell).1.push(target.clone());
            }
        }
        let now = Instant::now();
        self.turns = self.turns.wrapping_add(1);
        cells.retain(|_, (cell, _)| shared.begin_visit(cell));
        for (_, targets) in cells.values_mut() {
            for target in &*targets {
                if let Some(planned) = self.clusters.get_mut(&target.id) {
                    planned.asked_at = Some(now);
                }
            }
            // Where visits are given up, it is not always the same ones that are left out.
            let first = self.turns.wrapping_mul(GIVE_UP as usize) % targets.len().max(1);
            targets.rotate_left(first);
        }
        cells.into_values().collect()
    }
}

/// Whether `every` has passed, as near as turns can tell.
fn is_due(last: Option<Instant>, every: Duration, shared: &Shared) -> bool {
    last.is_none_or(|last| last.elapsed() + shared.config.turn() / 2 >= every)
}

/// What the workers of one visit share.
struct Visit {
    targets: Mutex<std::vec::IntoIter<Target>>,
    failures: AtomicU32,
    answered: AtomicBool,
    /// pxdb did not speak: the rest of the visit does without the table.
    silent: AtomicBool,
    error: Mutex<Option<PollError>>,
}

async fn visit(shared: Arc<Shared>, cell: Arc<TargetCell>, targets: Vec<Target>) {
    let workers = targets.len().min(shared.config.cell_polls);
    let visit = Arc::new(Visit {
        targets: Mutex::new(targets.into_iter()),
        failures: AtomicU32::new(0),
        answered: AtomicBool::new(false),
        silent: AtomicBool::new(false),
        error: Mutex::new(None),
    });
    let mut running = JoinSet::new();
    for _ in 0..workers {
        running.spawn(work(Arc::clone(&shared), Arc::clone(&visit)));
    }
    while running.join_next().await.is_some() {}
    let error = *visit.error.lock().unwrap_or_else(PoisonError::into_inner);
    shared.end_visit(&cell, visit.answered.load(Ordering::Relaxed), error);
}

async fn work(shared: Arc<Shared>, visit: Arc<Visit>) {
    loop {
        let next = visit.targets.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(target) = next else { return };
        shared.polls.fetch_add(1, Ordering::Relaxed);
        if visit.failures.load(Ordering::Relaxed) >= GIVE_UP {
            shared.polls_failed.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        let Ok(_place) = shared.places.acquire().await else { return };
        match poll(&shared, &visit, &target).await {
            Ok(()) => {
                visit.failures.store(0, Ordering::Relaxed);
                visit.answered.store(true, Ordering::Relaxed);
            }
            Err(error) => {
                shared.polls_failed.fetch_add(1, Ordering::Relaxed);
                if error.is_of_cell() {
                    visit.failures.fetch_add(1, Ordering::Relaxed);
                }
                tracing::debug!(%error, cluster = %target.slug, cell = %target.cell.slug, "no listing");
                *visit.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        }
    }
}

/// Asks for one cluster. Without a usable answer nothing changes.
async fn poll(shared: &Shared, visit: &Visit, target: &Target) -> Result<(), PollError> {
    // Before the cell is asked: what is written after this is not judged by the answer.
    let rows = if visit.silent.load(Ordering::Relaxed) { None } else { rows(shared, visit, target).await };
    let body = shared.client.listing(target).await?;
    let listing = spawn_blocking(move || Listing::parse(&body)).await;
    let listing = listing.ok().flatten().ok_or(PollError::NoListing)?;
    if let Some(rows) = &rows {
        let corrections = listing.corrections(rows);
        if !corrections.is_empty()
            && let Err(error) = shared.store.correct_queues(target.id, &corrections).await
        {
            tracing::warn!(%error, cluster = %target.slug, "a listing was not written; the next one will be");
        }
    }
    take_in(shared, target, rows.as_deref().unwrap_or_default(), &listing);
    Ok(())
}

async fn rows(shared: &Shared, visit: &Visit, target: &Target) -> Option<Vec<KnownQueue>> {
    match shared.store.queues(target.id, shared.config.settle, shared.config.max_names).await {
        Ok(rows) => Some(rows),
        Err(error) => {
            visit.silent.fetch_or(error.is_silence(), Ordering::Relaxed);
            if let Some(hidden) = shared.gates.rows.pass() {
                tracing::warn!(%error, cluster = %target.slug, hidden, "a cluster's queues were not read");
            }
            None
        }
    }
}

fn take_in(shared: &Shared, target: &Target, rows: &[KnownQueue], listing: &Listing) {
    if listing.complete {
        let known: HashMap<&str, u32> = rows.iter().map(|row| (row.name.as_str(), row.partitions)).collect();
        let told = listing.queues.iter().map(|(name, partitions)| {
            let known = || known.get(name.as_str()).copied().map_or(0, u64::from);
            (name.as_str(), partitions.unwrap_or_else(known))
        });
        // Another proxy admitted these a moment ago.
        let fresh = rows.iter().filter(|row| !row.settled && !listing.queues.contains_key(&row.name));
        let told = told.chain(fresh.map(|row| (row.name.as_str(), u64::from(row.partitions))));
        let freed = shared.limiter.reconcile(target.id, told, target.partitions);
        if freed > 0 {
            tracing::info!(target: "limits", cluster = %target.slug, freed, "queues are gone and make room");
        }
    }
    if listing.partial && shared.is_first_partial(target.id) {
        tracing::warn!(
            cluster = %target.slug, cell = %target.cell.slug,
            "the cell does not tell the bytes of keys or of timers: they are not counted"
        );
    }
    // Queues are what tells bytes on an older cell: when the last one is gone, nothing is kept.
    let emptied = || {
        let counted = shared.view(target).is_some_and(|view| view.retained_bytes.is_some());
        (counted && listing.complete && listing.queues.is_empty()).then_some(0)
    };
    publish(shared, target, listing.bytes.or_else(emptied));
}

/// Hands a total, or only the cap, to the counters, and logs the flip of the block.
fn publish(shared: &Shared, target: &Target, total: Option<u64>) {
    match shared.limiter.publish(target.id, total, target.retained) {
        Some(Transition::Blocked { total, cap }) => {
            tracing::warn!(target: "limits", cluster = %target.slug, total, cap, "pushes are blocked: storage is full");
        }
        Some(Transition::Released { total }) => {
            tracing::info!(target: "limits", cluster = %target.slug, total, "pushes pass again: storage has room");
        }
        None => {}
    }
}
