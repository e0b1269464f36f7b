//! Slots of waiting pops, per cluster and per cell (proxy contract §9.2).

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// How many requests wait.
#[derive(Default, Debug)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Requests that wait now.
    pub fn waiting(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// One more, unless that would be more than `max`.
    fn enter(&self, max: u64) -> bool {
        let one_more = |value| if value < max { Some(value + 1) } else { None };
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Which of the two gauges was full, and at how many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// The cluster's.
    Cluster(u64),
    /// The cell's.
    Cell(u64),
}

/// A held place in both gauges; dropping it gives it back.
#[derive(Debug)]
pub struct Slot {
    cluster: Arc<Gauge>,
    cell: Arc<Gauge>,
}

impl Slot {
    /// A place in both gauges, or in neither.
    pub fn enter(
        cluster: &Arc<Gauge>,
        cluster_max: u64,
        cell: &Arc<Gauge>,
        cell_max: u64,
    ) -> Result<Self, Full> {
        if !cluster.enter(cluster_max) {
            return Err(Full::Cluster(cluster.waiting()));
        }
        if !cell.enter(cell_max) {
            cluster.leave();
            return Err(Full::Cell(cell.waiting()));
        }
        Ok(Self { cluster: Arc::clone(cluster), cell: Arc::clone(cell) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.cluster.leave();
        self.cell.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::{Full, Gauge, Slot};
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        /// Three clusters on a cell come and go under caps that change: the gauges are what a list of those who
        /// wait says.
        #[test]
        fn it_does_what_the_model_does(
            steps in prop::collection::vec((0_usize..3, any::<bool>(), 0_u64..5, 0_u64..9), 0..80),
        ) {
            let (clusters, cell) = (<[Arc<Gauge>; 3]>::default(), Arc::<Gauge>::default());
            let mut waiting: Vec<(usize, Slot)> = Vec::new();
            for (cluster, enters, max, cell_max) in steps {
                let mine = |waiting: &[(usize, Slot)]| waiting.iter().filter(|(of, _)| *of == cluster).count() as u64;
                if enters {
                    let (before, all) = (mine(&waiting), waiting.len() as u64);
                    match Slot::enter(&clusters[cluster], max, &cell, cell_max) {
                        Ok(slot) => {
                            prop_assert!(before < max && all < cell_max);
                            waiting.push((cluster, slot));
                        }
                        Err(Full::Cluster(used)) => prop_assert!(used == before && before >= max),
                        Err(Full::Cell(used)) => prop_assert!(used == all && all >= cell_max && before < max),
                    }
                } else if let Some(at) = waiting.iter().position(|(of, _)| *of == cluster) {
                    waiting.swap_remove(at);
                }
                prop_assert_eq!(clusters[cluster].waiting(), mine(&waiting));
                prop_assert_eq!(cell.waiting(), waiting.len() as u64);
            }
        }
    }

    #[test]
    fn a_slot_is_in_both_gauges_or_in_none_and_given_back_once() {
        let (a, b, cell) = <(Arc<Gauge>, Arc<Gauge>, Arc<Gauge>)>::default();
        let first = Slot::enter(&a, 2, &cell, 3).unwrap();
        let _second = Slot::enter(&a, 2, &cell, 3).unwrap();
        assert_eq!(Slot::enter(&a, 2, &cell, 3).unwrap_err(), Full::Cluster(2));
        let _third = Slot::enter(&b, 2, &cell, 3).unwrap();
        assert_eq!(Slot::enter(&b, 2, &cell, 3).unwrap_err(), Full::Cell(3));
        assert_eq!((a.waiting(), b.waiting(), cell.waiting()), (2, 1, 3), "refusals leave no trace");
        drop(first);
        assert_eq!((a.waiting(), b.waiting(), cell.waiting()), (1, 1, 2));
        assert!(Slot::enter(&b, 2, &cell, 3).is_ok());
        assert_eq!(Slot::enter(&a, 0, &cell, 3).unwrap_err(), Full::Cluster(1), "zero denies");
    }

    #[test]
    fn no_crowd_gets_past_the_cap() {
        let (cluster, cell) = <(Arc<Gauge>, Arc<Gauge>)>::default();
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            let crowd: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        for _ in 0..1_000 {
                            let slot = Slot::enter(&cluster, 3, &cell, 5);
                            assert!(cluster.waiting() <= 3 && cell.waiting() <= 5);
                            drop(slot);
                        }
                    })
                })
                .collect();
            for one in crowd {
                one.join().unwrap();
            }
        });
        assert_eq!((cluster.waiting(), cell.waiting()), (0, 0));
    }
}
