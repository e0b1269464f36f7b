//! Queue rows waiting for the persister: the greatest projected count of each queue, in bounded
//! number (proxy contract §9.3).

use crate::domain::ids::ClusterId;
use dashmap::{DashMap, Entry};
use std::sync::atomic::{AtomicU64, Ordering};

/// The longest name that is written, in bytes: an index row of PostgreSQL holds 2,704. Longer ones
/// are admitted and counted here, and left to the cell's listing.
const MAX_NAME_BYTES: usize = 1_024;

/// A row for `queue_proxy.queues`, whose count never goes down by it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueRow {
    /// Whose.
    pub cluster: ClusterId,
    /// Its name: not blank, without NUL, at most 1,024 bytes, so that no row spoils its batch.
    pub name: Box<str>,
    /// Partitions, projected.
    pub partitions: u64,
}

/// The rows. Each (cluster, queue) is there once.
#[derive(Debug)]
pub struct Pending {
    rows: DashMap<(ClusterId, Box<str>), u64>,
    max: usize,
    left_out: AtomicU64,
}

impl Pending {
    /// At most `max` rows wait.
    pub fn new(max: usize) -> Self {
        Self { rows: DashMap::new(), max, left_out: AtomicU64::new(0) }
    }

    /// Adds a row, or raises the count of the one that waits. A row that cannot be stored, or finds no
    /// room, is left out and counted: the reconciler finds the queue in the cell's listing.
    pub fn add(&self, row: QueueRow) {
        let storable =
            row.name.len() <= MAX_NAME_BYTES && !row.name.contains('\0') && !row.name.trim().is_empty();
        let full = self.rows.len() >= self.max;
        match self.rows.entry((row.cluster, row.name)) {
            Entry::Occupied(mut waiting) => {
                let greater = row.partitions.max(*waiting.get());
                waiting.insert(greater);
            }
            Entry::Vacant(place) if storable && !full => {
                place.insert(row.partitions);
            }
            Entry::Vacant(_) => {
                self.left_out.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Takes out at most `batch` rows. What cannot be written comes back by [`add`](Self::add).
    pub fn drain(&self, batch: usize) -> Vec<QueueRow> {
        let keys: Vec<_> = self.rows.iter().take(batch).map(|row| row.key().clone()).collect();
        let rows = keys.into_iter().filter_map(|key| self.rows.remove(&key));
        rows.map(|((cluster, name), partitions)| QueueRow { cluster, name, partitions }).collect()
    }

    /// Rows that wait.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Rows left out since the start.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Pending, QueueRow};
    use crate::domain::ids::ClusterId;
    use uuid::Uuid;

    fn row(cluster: u128, name: &str, partitions: u64) -> QueueRow {
        QueueRow { cluster: ClusterId(Uuid::from_u128(cluster)), name: name.into(), partitions }
    }

    #[test]
    fn the_greatest_count_of_each_queue_is_kept_once() {
        let pending = Pending::new(10);
        for (cluster, name, count) in [(1, "q", 2), (1, "q", 5), (1, "q", 3), (2, "q", 1), (1, "r", 1)] {
            pending.add(row(cluster, name, count));
        }
        let mut rows = pending.drain(2);
        assert_eq!((rows.len(), pending.len()), (2, 1));
        rows.extend(pending.drain(10));
        assert!(pending.is_empty());
        for wanted in [row(1, "q", 5), row(2, "q", 1), row(1, "r", 1)] {
            assert!(rows.contains(&wanted), "{wanted:?}");
        }
        pending.add(row(1, "q", 7));
        // The write failed.
        for row in rows {
            pending.add(row);
        }
        assert!(pending.drain(10).contains(&row(1, "q", 7)));
    }

    #[test]
    fn what_would_spoil_a_batch_or_finds_no_room_is_left_out() {
        let pending = Pending::new(2);
        for name in ["", "  ", "a\0b", &"x".repeat(1_025)] {
            pending.add(row(1, name, 1));
        }
        assert_eq!((pending.len(), pending.left_out()), (0, 4));
        for name in ["a", &"x".repeat(1_024), "c"] {
            pending.add(row(1, name, 1));
        }
        pending.add(row(1, "a", 9));
        assert_eq!((pending.len(), pending.left_out()), (2, 5));
        assert!(pending.drain(2).contains(&row(1, "a", 9)));
    }
}
