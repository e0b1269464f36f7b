//! Bytes of bodies that are held while they are read and judged: one budget for the process, of which no
//! cluster gets more than its share.

use super::ClusterLimits;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// See the module.
#[derive(Debug)]
pub struct Budget {
    held: AtomicU64,
    max: u64,
    share: u64,
}

/// Bytes taken from a budget; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    cluster: Arc<ClusterLimits>,
    bytes: u64,
}

impl Budget {
    /// `max` bytes in all. One cluster may hold a quarter of them, and always one body of `largest` bytes.
    pub fn new(max: u64, largest: u64) -> Self {
        Self { held: AtomicU64::new(0), max, share: (max / 4).max(largest).min(max) }
    }

    /// Bytes that may be held.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Bytes held now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl Reservation {
    /// Holds nothing yet.
    pub fn new(budget: &Arc<Budget>, cluster: &Arc<ClusterLimits>) -> Self {
        Self { budget: Arc::clone(budget), cluster: Arc::clone(cluster), bytes: 0 }
    }

    /// Takes that many bytes more; false, and nothing taken, when they are not there.
    pub fn grow(&mut self, bytes: u64) -> bool {
        if !add(&self.cluster.buffered, bytes, self.budget.share) {
            return false;
        }
        if !add(&self.budget.held, bytes, self.budget.max) {
            self.cluster.buffered.fetch_sub(bytes, Ordering::AcqRel);
            return false;
        }
        self.bytes += bytes;
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.cluster.buffered.fetch_sub(self.bytes, Ordering::AcqRel);
        self.budget.held.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

fn add(counter: &AtomicU64, bytes: u64, max: u64) -> bool {
    let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= max);
    counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{Budget, Reservation};
    use crate::{domain::ids::ClusterId, limits::ClusterLimits};
    use std::sync::Arc;
    use uuid::Uuid;

    #[test]
    fn nobody_holds_more_than_the_share_and_all_together_no_more_than_the_budget() {
        let budget = Arc::new(Budget::new(1_000, 100));
        let cluster = |n| Arc::new(ClusterLimits::new(ClusterId(Uuid::from_u128(n))));
        let (a, clusters) = (cluster(0), [cluster(1), cluster(2), cluster(3)]);
        let mut first = Reservation::new(&budget, &a);
        let mut second = Reservation::new(&budget, &a);
        assert!(first.grow(200) && second.grow(50) && !second.grow(1), "a quarter is 250");
        let others: Vec<_> = clusters
            .iter()
            .map(|cluster| {
                let mut reservation = Reservation::new(&budget, cluster);
                assert!(reservation.grow(250));
                reservation
            })
            .collect();
        let mut late = Reservation::new(&budget, &cluster(4));
        assert!(!late.grow(1));
        assert_eq!(budget.held(), 1_000);
        drop(first);
        assert!(late.grow(200) && !late.grow(1));
        drop((second, others, late));
        assert_eq!(budget.held(), 0);
        assert!(Reservation::new(&budget, &a).grow(250), "the share is free again");
        // One body always fits.
        let small = Arc::new(Budget::new(100, 80));
        assert!(Reservation::new(&small, &a).grow(80));
    }
}
