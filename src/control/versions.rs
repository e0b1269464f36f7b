//! What changed since when: lets a load find out that it was overtaken by an invalidation.

use crate::domain::ids::ClusterId;
use dashmap::DashMap;
use std::{
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    time::Duration,
};
use tokio::time::Instant;

/// No load lives this long, so an older invalidation overtakes nobody.
const KEEP: Duration = Duration::from_secs(120);

/// A counter that each invalidation raises, and its last value for each kind of invalidation.
#[derive(Default)]
pub(super) struct Versions {
    counter: AtomicU64,
    everything: AtomicU64,
    clusters: DashMap<ClusterId, (u64, Instant)>,
}

impl Versions {
    /// The present version, to be taken before a load begins.
    pub(super) fn now(&self) -> u64 {
        self.counter.load(SeqCst)
    }

    pub(super) fn invalidate(&self, cluster: ClusterId) {
        // Under the entry's lock, so that two invalidations of a cluster cannot swap places.
        let mut entry = self.clusters.entry(cluster).or_insert((0, Instant::now()));
        *entry = (self.counter.fetch_add(1, SeqCst) + 1, Instant::now());
    }

    pub(super) fn expire_all(&self) {
        let version = self.counter.fetch_add(1, SeqCst) + 1;
        self.everything.fetch_max(version, SeqCst);
    }

    /// Whether everything was expired after `version`.
    pub(super) fn expired_since(&self, version: u64) -> bool {
        self.everything.load(SeqCst) > version
    }

    /// Whether this cluster, or everything, was invalidated after `version`.
    pub(super) fn changed_since(&self, cluster: ClusterId, version: u64) -> bool {
        self.expired_since(version) || self.clusters.get(&cluster).is_some_and(|entry| entry.0 > version)
    }

    /// Whether anything at all was invalidated after `version`.
    pub(super) fn anything_since(&self, version: u64) -> bool {
        self.now() > version
    }

    pub(super) fn sweep(&self) {
        self.clusters.retain(|_, (_, at)| at.elapsed() < KEEP);
    }
}
