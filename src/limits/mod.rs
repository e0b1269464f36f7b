//! The caps of a plan, counted in this process (proxy contract §9, §14; D1, D8–D10).
//!
//! Each cluster has one [`ClusterLimits`] that outlives every snapshot of it, found once per request
//! in a sharded map. Its buckets and its registry stand behind one small lock of its own, under which
//! all limits of a request are evaluated and only then taken from; no lock is shared by clusters. The
//! caps come with each call, so that a change of plan applies to the next request. With a store ([`shared`]) rates and
//! waiting pops are counted over all proxies; nothing else is.

pub mod admission;
pub mod bucket;
pub mod buffer;
pub mod clock;
mod cluster;
pub mod decision;
mod evaluate;
pub mod parked;
pub mod pending;
pub mod shared;
pub mod storage;
mod tokens;

use cluster::State;
pub use cluster::{ClusterLimits, LiveView, RateView};
pub use evaluate::{Request, Verdict};

use crate::domain::{
    ids::ClusterId,
    limits::{Cap, Limits},
};
use admission::{NameHash, Names};
use bucket::Rate;
use clock::{Clock, Nanos, SECOND};
use dashmap::DashMap;
use parked::Gauge;
use pending::Pending;
use shared::Shared;
use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};
use tokens::Footing;

/// Bounds and defaults; every one comes from the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Clusters whose counters are kept. Beyond it those that were idle for longest start anew.
    pub max_clusters: usize,
    /// Partition names kept for one cluster.
    pub max_names: usize,
    /// Queue rows that may wait for the persister.
    pub max_pending_rows: usize,
    /// Waiting pops of one cell (`QUEEN_PROXY_CELL_MAX_PARKED`).
    pub max_cell_parked: u64,
    /// Items of a push on a plan without a cap of its own (`QUEEN_PROXY_MAX_BATCH_ITEMS`).
    pub max_batch_items: u64,
    /// How long unused counters are kept.
    pub idle: Nanos,
    /// How long a queue may be missing in a cell's listing before it is taken for deleted.
    pub settle: Nanos,
}

/// All counters of this process.
#[derive(Debug)]
pub struct Limiter<C> {
    clock: C,
    settings: Settings,
    names: Names,
    clusters: DashMap<ClusterId, Arc<ClusterLimits>>,
    cells: DashMap<Box<str>, Arc<Gauge>>,
    pending: Pending,
    shared: Option<Arc<Shared>>,
}

impl<C: Clock> Limiter<C> {
    /// Nothing is counted yet.
    pub fn new(settings: Settings, clock: C) -> Self {
        Self {
            clock,
            settings,
            names: Names::default(),
            clusters: DashMap::new(),
            cells: DashMap::new(),
            pending: Pending::new(settings.max_pending_rows),
            shared: None,
        }
    }

    /// With rates and places of waiting pops that other proxies count too.
    #[must_use]
    pub fn sharing(mut self, shared: Option<Arc<Shared>>) -> Self {
        self.shared = shared;
        self
    }

    /// How it stands with the store, if there is one.
    pub fn shared(&self) -> Option<&Arc<Shared>> {
        self.shared.as_ref()
    }

    /// The counters of a cluster. Hold them while the request lives: what is held is never dropped.
    pub fn cluster(&self, id: ClusterId) -> Arc<ClusterLimits> {
        let now = self.clock.now();
        if let Some(found) = self.clusters.get(&id) {
            found.used_at.store(now, Ordering::Relaxed);
            return Arc::clone(&found);
        }
        if self.clusters.len() >= self.settings.max_clusters {
            self.shed();
        }
        let entry = self.clusters.entry(id).or_insert_with(|| Arc::new(ClusterLimits::new(id)));
        entry.used_at.store(now, Ordering::Relaxed);
        Arc::clone(&entry)
    }

    /// Books messages that a pop delivered.
    pub fn deliver(&self, cluster: &Arc<ClusterLimits>, limits: &Limits, messages: u64) {
        if let Some(rate) = Rate::of(limits.max_msgs_per_sec, limits.msgs_burst) {
            let mut state = cluster.lock();
            state.messages.debit(rate, self.clock.now(), messages, self.footing(false));
            self.ask(cluster, &mut state);
        }
    }

    /// Takes in the live rows of the table, of a cluster that [`ClusterLimits::claim_load`] asked for;
    /// none when they cannot be read.
    pub fn load<'n>(&self, cluster: &ClusterLimits, rows: impl IntoIterator<Item = (&'n str, u64)>) {
        let rows: Vec<_> = rows.into_iter().map(|(name, count)| (self.names.hash(name), count)).collect();
        cluster.lock().admission.load(rows);
    }

    /// Takes in a cell's listing of all queues with their partitions. Returns how many queues of the
    /// registry are gone, each of which makes room for another.
    pub fn reconcile<'n>(
        &self,
        id: ClusterId,
        listing: impl IntoIterator<Item = (&'n str, u64)>,
        partitions: Cap,
    ) -> usize {
        let Some(cluster) = self.existing(id) else {
            return 0;
        };
        let listing: HashMap<NameHash, u64> =
            listing.into_iter().map(|(name, count)| (self.names.hash(name), count)).collect();
        let settled = self.clock.now().saturating_sub(self.settings.settle);
        let mut state = cluster.lock();
        if !state.admission.is_loaded() {
            return 0;
        }
        state.admission.reconcile(&listing, partitions, settled)
    }

    /// Takes in what a cell says a cluster keeps; see [`storage::Storage::publish`]. A cluster without
    /// counters gets some only when it is near its cap.
    pub fn publish(&self, id: ClusterId, total: Option<u64>, cap: Cap) -> Option<storage::Transition> {
        let cluster = match self.existing(id) {
            Some(cluster) => cluster,
            None if total.is_some_and(|total| storage::is_near(total, cap)) => self.cluster(id),
            None => return None,
        };
        let transition = cluster.storage.publish(total, cap);
        let near = cluster.storage.measured().is_some_and(|total| storage::is_near(total, cap));
        cluster.near_cap.store(near, Ordering::Release);
        transition
    }

    /// Drops counters unused for [`Settings::idle`]; those with waiting pops, a block or a total near
    /// the cap stay. Returns how many went.
    pub fn prune(&self) -> usize {
        let line = self.clock.now().saturating_sub(self.settings.idle);
        let before = self.clusters.len();
        self.clusters.retain(|_, cluster| is_held(cluster) || cluster.used_at() >= line);
        self.cells.retain(|_, gauge| gauge.waiting() > 0 || Arc::strong_count(gauge) > 1);
        before.saturating_sub(self.clusters.len())
    }

    /// Drops the counters of a cluster that is no more.
    pub fn forget(&self, id: ClusterId) {
        self.clusters.remove(&id);
    }

    /// What stands against a cluster's caps now; `None` when nothing is counted.
    pub fn live(&self, id: ClusterId, limits: &Limits) -> Option<LiveView> {
        Some(self.existing(id)?.live(limits, self.clock.now(), self.footing(false)))
    }

    /// Clusters with counters.
    pub fn clusters(&self) -> usize {
        self.clusters.len()
    }

    /// Clusters whose cell says that they keep more than their cap.
    pub fn over_storage(&self) -> usize {
        self.clusters.iter().filter(|cluster| cluster.storage.is_over()).count()
    }

    /// Waiting pops of all cells.
    pub fn parked(&self) -> u64 {
        self.cells.iter().map(|gauge| gauge.waiting()).sum()
    }

    /// Waiting pops of a cell.
    pub fn parked_at(&self, cell: &str) -> u64 {
        self.cells.get(cell).map_or(0, |gauge| gauge.waiting())
    }

    /// The rows for the persister.
    pub fn pending(&self) -> &Pending {
        &self.pending
    }

    /// On what the limits stand, for a request that would wait for the store, or has waited long enough.
    fn footing(&self, impatient: bool) -> Footing {
        self.shared.as_ref().map_or(Footing::Alone, |shared| shared.footing(impatient))
    }

    /// Sends a cluster to the store if it has something to ask.
    fn ask(&self, cluster: &Arc<ClusterLimits>, state: &mut State) {
        if self.shared.is_some() && state.asks() {
            self.tell_store(cluster, state);
        }
    }

    /// Sends a cluster to the store, if there is one and it is not on its way there.
    fn tell_store(&self, cluster: &Arc<ClusterLimits>, state: &mut State) {
        if let Some(shared) = &self.shared
            && !std::mem::replace(&mut state.queued, true)
        {
            shared.ask(cluster);
        }
    }

    fn existing(&self, id: ClusterId) -> Option<Arc<ClusterLimits>> {
        self.clusters.get(&id).map(|found| Arc::clone(&found))
    }

    fn cell(&self, name: &str) -> Arc<Gauge> {
        if let Some(found) = self.cells.get(name) {
            return Arc::clone(&found);
        }
        Arc::clone(&self.cells.entry(name.into()).or_default())
    }

    /// Makes room for an eighth, so that a flood of new clusters pays for it once in that many.
    fn shed(&self) {
        let mut ages: Vec<Nanos> =
            self.clusters.iter().filter(|entry| !is_held(entry)).map(|entry| entry.used_at()).collect();
        let excess = (self.clusters.len() + 1).saturating_sub(self.settings.max_clusters);
        let shed = (self.settings.max_clusters / 8).max(excess).min(ages.len());
        if shed == 0 {
            return;
        }
        let (_, line, _) = ages.select_nth_unstable(shed - 1);
        let line = *line;
        let mut left = shed;
        self.clusters.retain(|_, cluster| {
            let keep = left == 0 || is_held(cluster) || cluster.used_at() > line;
            left -= usize::from(!keep);
            keep
        });
    }
}

/// Counters that must not be dropped: in use, or saying something that would be lost.
fn is_held(cluster: &Arc<ClusterLimits>) -> bool {
    Arc::strong_count(cluster) > 1 || cluster.is_pinned()
}

/// The number of a cap; negative ones deny as 0 does.
fn number(cap: Cap) -> Option<u64> {
    match cap {
        Cap::Unlimited => None,
        Cap::At(cap) => Some(u64::try_from(cap).unwrap_or(0)),
    }
}

/// Sensible bounds for a process that serves one cell.
impl Default for Settings {
    fn default() -> Self {
        Self {
            max_clusters: 100_000,
            max_names: 100_000,
            max_pending_rows: 100_000,
            max_cell_parked: 5_000,
            max_batch_items: 10_000,
            idle: 600 * SECOND,
            settle: 120 * SECOND,
        }
    }
}

#[cfg(test)]
mod tests;
