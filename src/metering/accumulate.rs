//! What was counted and not taken yet: for each cluster, class and UTC minute.
//!
//! A request finds its cluster's meter once, in a sharded map, and adds to atomics. No lock is shared between
//! clusters; a cluster has one of its own that is taken once a minute. A counter is emptied by swapping it with
//! zero, so whatever the interleaving, each sample is handed out exactly once. A thread that is held up between
//! looking at the minute and adding may be counted a minute late.

use super::sample::{Counts, Op, Sample};
use crate::domain::ids::ClusterId;
use dashmap::DashMap;
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Rows of minutes past that a cluster holds when nobody comes to take them; more are added to the newest.
const MAX_PAST: usize = 64;

/// Minutes since the epoch, UTC.
pub type Minute = u64;

/// The minute of a time in seconds since the epoch.
pub const fn minute_of(now_s: u64) -> Minute {
    now_s / 60
}

/// Where a row belongs: cluster, minute, class. Their order is that in which rows are written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RowKey {
    /// The id of the cluster.
    pub cluster: uuid::Uuid,
    /// The minute.
    pub minute: Minute,
    /// The class.
    pub op: Op,
}

#[derive(Debug)]
struct Past {
    minute: Minute,
    op: Op,
    counts: Counts,
}

/// One cluster's counters.
#[derive(Debug, Default)]
pub struct ClusterMeter {
    minute: AtomicU64,
    counters: [[AtomicU64; 4]; Op::ALL.len()],
    past: Mutex<Vec<Past>>,
}

impl ClusterMeter {
    /// Adds a sample at a time in seconds since the epoch.
    pub fn record(&self, sample: Sample, now_s: u64) {
        let minute = minute_of(now_s);
        let current = self.minute.load(Relaxed);
        if minute != current && !self.turn_to(minute, sample) {
            return;
        }
        for (counter, more) in self.counters[sample.op.index()].iter().zip(sample.counts.to_array()) {
            if more > 0 {
                counter.fetch_add(more, Relaxed);
            }
        }
    }

    /// Makes `minute` the current one. False: it is just past, and the sample was put there.
    #[cold]
    fn turn_to(&self, minute: Minute, sample: Sample) -> bool {
        let mut past = self.past();
        let current = self.minute.load(Relaxed);
        // Threads do not reach a new minute at once. A clock that was put back further is followed.
        if minute + 1 == current {
            put(&mut past, minute, sample.op, sample.counts);
            return false;
        }
        if minute != current {
            self.empty_into(&mut past, current);
            self.minute.store(minute, Relaxed);
        }
        true
    }

    fn empty_into(&self, past: &mut Vec<Past>, minute: Minute) {
        for (op, counters) in Op::ALL.into_iter().zip(&self.counters) {
            let mut counts = [0; 4];
            for (count, counter) in counts.iter_mut().zip(counters) {
                // A look first: most of them are zero, and a swap takes the line from whoever adds to it.
                if counter.load(Relaxed) > 0 {
                    *count = counter.swap(0, Relaxed);
                }
            }
            put(past, minute, op, Counts::from_array(counts));
        }
    }

    /// Hands out everything, the present minute as well. True: there was nothing.
    fn take(&self, mut each: impl FnMut(Minute, Op, Counts)) -> bool {
        let mut past = self.past();
        self.empty_into(&mut past, self.minute.load(Relaxed));
        let nothing = past.is_empty();
        past.drain(..).for_each(|row| each(row.minute, row.op, row.counts));
        nothing
    }

    fn is_empty(&self) -> bool {
        self.past().is_empty() && self.counters.iter().flatten().all(|counter| counter.load(Relaxed) == 0)
    }

    fn past(&self) -> MutexGuard<'_, Vec<Past>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn put(past: &mut Vec<Past>, minute: Minute, op: Op, counts: Counts) {
    if counts.is_zero() {
        return;
    }
    let full = past.len() >= MAX_PAST;
    let same = |row: &&mut Past| row.op == op && (row.minute == minute || full);
    match past.iter_mut().rev().find(same) {
        Some(row) => row.counts.add(counts),
        None => past.push(Past { minute, op, counts }),
    }
}

/// The meters of all clusters that count something.
#[derive(Debug, Default)]
pub struct Accumulators(DashMap<ClusterId, Arc<ClusterMeter>>);

impl Accumulators {
    /// The meter of a cluster, to be found once per request.
    pub fn cluster(&self, id: ClusterId) -> Arc<ClusterMeter> {
        if let Some(meter) = self.0.get(&id) {
            return Arc::clone(&meter);
        }
        Arc::clone(&self.0.entry(id).or_default())
    }

    /// Hands out everything that was counted, and lets go of clusters that had nothing.
    pub fn take(&self, mut each: impl FnMut(RowKey, Counts)) {
        // A copy of the pointers: no lock of the map is held while counters are emptied.
        let meters: Vec<(ClusterId, Arc<ClusterMeter>)> =
            self.0.iter().map(|entry| (*entry.key(), Arc::clone(entry.value()))).collect();
        for (id, meter) in meters {
            let idle = meter.take(|minute, op, counts| each(RowKey { cluster: id.0, minute, op }, counts));
            drop(meter);
            if idle {
                // Under the map's lock: nobody holds it, so nobody can add to it any more.
                self.0.remove_if(&id, |_, meter| Arc::strong_count(meter) == 1 && meter.is_empty());
            }
        }
    }

    /// How many clusters have a meter.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        collections::BTreeMap,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };
    use uuid::Uuid;

    fn sample(op: Op, msgs: u64) -> Sample {
        Sample { op, counts: Counts { reqs: 1, msgs, bytes_in: 3, bytes_out: 5 } }
    }

    fn id(number: u128) -> ClusterId {
        ClusterId(Uuid::from_u128(number))
    }

    /// `cluster minute class: requests/messages`
    fn taken(accumulators: &Accumulators) -> Vec<String> {
        let mut rows = BTreeMap::new();
        accumulators.take(|key, counts| {
            assert!(rows.insert(key, counts).is_none(), "one row for {key:?}");
        });
        rows.iter()
            .map(|(key, counts)| {
                let (cluster, op) = (key.cluster.as_u128(), key.op.as_str());
                format!("{cluster} {} {op}: {}/{}", key.minute, counts.reqs, counts.msgs)
            })
            .collect()
    }

    #[test]
    fn rows_are_by_cluster_minute_and_class() {
        let accumulators = Accumulators::default();
        let (one, two) = (accumulators.cluster(id(1)), accumulators.cluster(id(2)));
        one.record(sample(Op::Push, 10), 600);
        one.record(sample(Op::Push, 5), 659);
        one.record(sample(Op::Read, 0), 659);
        one.record(sample(Op::Push, 7), 660);
        // A thread that took its time, and a clock that was put back.
        one.record(sample(Op::Push, 1), 659);
        two.record(sample(Op::Delivery, 2), 660);
        two.record(sample(Op::Delivery, 3), 120);
        two.record(sample(Op::Delivery, 4), 660);
        let expected = [
            "1 10 push: 3/16",
            "1 10 read: 1/0",
            "1 11 push: 1/7",
            "2 2 delivery: 1/3",
            "2 11 delivery: 2/6",
        ];
        assert_eq!(taken(&accumulators), expected);
        assert_eq!(taken(&accumulators), [""; 0]);
        one.record(sample(Op::Push, 1), 661);
        assert_eq!(taken(&accumulators), ["1 11 push: 1/1"]);
    }

    #[test]
    fn idle_clusters_are_let_go_of_and_those_in_use_are_not() {
        let accumulators = Accumulators::default();
        let held = accumulators.cluster(id(1));
        accumulators.cluster(id(2)).record(sample(Op::Push, 1), 60);
        assert_eq!(taken(&accumulators), ["2 1 push: 1/1"]);
        assert_eq!(accumulators.len(), 2, "both counted or are held");
        taken(&accumulators);
        assert_eq!(accumulators.len(), 1);
        held.record(sample(Op::Push, 1), 60);
        assert_eq!(taken(&accumulators), ["1 1 push: 1/1"], "it is still the one in the map");
        drop(held);
        taken(&accumulators);
        assert!(accumulators.is_empty());
    }

    #[test]
    fn what_nobody_takes_is_bounded_and_not_lost() {
        let accumulators = Accumulators::default();
        let meter = accumulators.cluster(id(1));
        for minute in 0..1_000 {
            meter.record(sample(Op::Push, 1), minute * 60);
            meter.record(sample(Op::Read, 0), minute * 60);
        }
        let mut rows = Vec::new();
        accumulators.take(|key, counts| rows.push((key, counts)));
        assert!(rows.len() <= MAX_PAST + 2, "{} rows", rows.len());
        let requests: u64 = rows.iter().map(|(_, counts)| counts.reqs).sum();
        let messages: u64 = rows.iter().map(|(_, counts)| counts.msgs).sum();
        assert_eq!((requests, messages), (2_000, 1_000));
    }

    /// Threads add across minutes, with a meter of a request's length, while another takes.
    #[test]
    fn nothing_is_lost_or_doubled_when_takers_and_recorders_race() {
        const THREADS: u64 = 3;
        const SAMPLES: u64 = 40_000;
        let accumulators = Accumulators::default();
        let ended = AtomicBool::new(false);
        let mut total = Counts::default();
        thread::scope(|scope| {
            let recorders: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let accumulators = &accumulators;
                    scope.spawn(move || {
                        for number in 0..SAMPLES {
                            let meter = accumulators.cluster(id(u128::from(number % 3)));
                            meter.record(sample(Op::ALL[(number % 5) as usize], 2), number / 2 + thread * 60);
                        }
                    })
                })
                .collect();
            let taker = scope.spawn(|| {
                let mut total = Counts::default();
                let mut takes = 0;
                while !ended.load(Ordering::Acquire) {
                    accumulators.take(|_, counts| total.add(counts));
                    takes += 1;
                }
                (total, takes)
            });
            for recorder in recorders {
                recorder.join().unwrap();
            }
            ended.store(true, Ordering::Release);
            let (taken, takes) = taker.join().unwrap();
            assert!(takes > 1, "they did not race");
            total = taken;
        });
        accumulators.take(|_, counts| total.add(counts));
        let samples = THREADS * SAMPLES;
        let expected =
            Counts { reqs: samples, msgs: samples * 2, bytes_in: samples * 3, bytes_out: samples * 5 };
        assert_eq!(total, expected);
    }
}
