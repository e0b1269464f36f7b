//! What metering tells of itself; whoever exports it takes a [`Snapshot`].

use super::sample::{Counts, Op};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// The numbers as they stand. Counters begin at zero with the process.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What was counted, by class in the order of [`Op::ALL`]; up to one flush interval behind.
    pub usage: [Counts; Op::ALL.len()],
    /// Successful answers whose messages could not be read; they billed none.
    pub unreadable: u64,
    /// Flushes that reached the control plane, or tried to.
    pub flushes: u64,
    /// Those that failed.
    pub flush_failures: u64,
    /// How long the last of them took.
    pub flush_last: Duration,
    /// How long all of them took.
    pub flush_sum: Duration,
    /// When usage was last written, in seconds since the epoch; zero: never.
    pub last_success_s: u64,
    /// Rows that the control plane added.
    pub rows_written: u64,
    /// Rows that it could not add: their cluster is gone, or they are malformed.
    pub rows_refused: u64,
    /// Batches that had arrived before although nobody had said so.
    pub batches_repeated: u64,
    /// Files in the spool, with the one of the open minute.
    pub spool_files: u64,
    /// Their bytes.
    pub spool_bytes: u64,
    /// Bytes of batches that are in memory because the disk does not take them.
    pub held_bytes: u64,
    /// Rows that were given up: for the bound of the spool, for their age, or as unreadable lines.
    pub dropped_rows: u64,
    /// Messages in them, as far as they are known.
    pub dropped_msgs: u64,
    /// When days were last rolled up by this proxy, in seconds since the epoch; zero: never. Its age is the lag.
    pub rollup_last_success_s: u64,
    /// Passes of the roll-up or the monthly check that failed.
    pub rollup_failures: u64,
    /// Clusters that are blocked for their monthly quota.
    pub clusters_blocked: u64,
}

/// See [`Snapshot`]. Written once per flush, except for [`Metrics::unreadable`].
#[derive(Debug, Default)]
pub struct Metrics {
    numbers: Mutex<Snapshot>,
    unreadable: AtomicU64,
}

impl Metrics {
    /// The numbers as they stand.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.numbers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        snapshot.unreadable = self.unreadable.load(Relaxed);
        snapshot
    }

    /// Counts an answer that could not be read.
    pub fn unreadable(&self) {
        self.unreadable.fetch_add(1, Relaxed);
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.numbers.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
