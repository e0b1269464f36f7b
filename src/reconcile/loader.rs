//! Reading a cluster's live rows when its counters are first used, off the request path
//! (proxy contract §9.3).

use super::Shared;
use crate::{control::store::StoreError, limits::ClusterLimits};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::sleep};

const BACKOFF: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Counters that wait for their rows, each once. Those that nobody uses any more are let go.
#[derive(Debug)]
pub(super) struct Wanted {
    queue: Mutex<VecDeque<Weak<ClusterLimits>>>,
    max: usize,
    more: Notify,
    left_out: AtomicU64,
}

impl Wanted {
    /// At most `max` wait.
    pub fn new(max: usize) -> Self {
        Self { queue: Mutex::default(), max, more: Notify::new(), left_out: AtomicU64::new(0) }
    }

    /// Adds counters, without waiting. There is no room only when more counters are in use than are kept.
    pub fn add(&self, cluster: Weak<ClusterLimits>) {
        let mut queue = self.lock();
        if queue.len() >= self.max {
            queue.retain(|waiting| waiting.strong_count() > 0);
        }
        if queue.len() >= self.max {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.push_back(cluster);
        drop(queue);
        self.more.notify_one();
    }

    async fn next(&self) -> Arc<ClusterLimits> {
        loop {
            let notified = self.more.notified();
            if let Some(cluster) = self.pop() {
                return cluster;
            }
            notified.await;
        }
    }

    /// The first that is still in use.
    fn pop(&self) -> Option<Arc<ClusterLimits>> {
        let mut queue = self.lock();
        loop {
            if let Some(cluster) = queue.pop_front()?.upgrade() {
                return Some(cluster);
            }
        }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// How many found no room.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<ClusterLimits>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads rows for as long as the process lives. Until a cluster's are read nothing of it is refused.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut backoff = BACKOFF;
    loop {
        let cluster = shared.wanted.next().await;
        let most = shared.config.max_names;
        match shared.store.queues(cluster.id(), shared.config.settle, most).await {
            Ok(rows) => {
                let rows = rows.iter().map(|row| (row.name.as_str(), u64::from(row.partitions)));
                shared.limiter.load(&cluster, rows);
                backoff = BACKOFF;
            }
            Err(error) => {
                if let Some(hidden) = shared.gates.load.pass() {
                    tracing::warn!(%error, cluster = %cluster.id(), hidden, "a cluster's queues were not read");
                }
                if matches!(error, StoreError::Malformed(_)) {
                    // It would say the same again: nothing of this cluster is refused.
                    continue;
                }
                shared.wanted.add(Arc::downgrade(&cluster));
                // Held on to, the counters would never be let go.
                drop(cluster);
                sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF_MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Wanted;
    use crate::{
        domain::ids::ClusterId,
        limits::{Limiter, Settings, clock::Manual},
    };
    use std::sync::Arc;
    use uuid::Uuid;

    #[tokio::test]
    async fn first_come_first_served_and_the_unused_are_skipped() {
        let limiter = Limiter::new(Settings::default(), Manual::default());
        let [a, b, c, d] = [1, 2, 3, 4].map(|id| limiter.cluster(ClusterId(Uuid::from_u128(id))));
        let wanted = Wanted::new(2);
        for cluster in [&a, &b, &c] {
            wanted.add(Arc::downgrade(cluster));
        }
        assert_eq!((wanted.len(), wanted.left_out()), (2, 1));
        limiter.forget(a.id());
        drop(a);
        wanted.add(Arc::downgrade(&d));
        assert_eq!((wanted.len(), wanted.left_out()), (2, 1), "the unused make room");
        assert_eq!(wanted.next().await.id(), b.id());
        assert_eq!(wanted.next().await.id(), d.id());
        assert_eq!(wanted.len(), 0);
    }
}
