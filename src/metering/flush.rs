//! From the accumulators to the control plane.
//!
//! Every flush writes what was counted to disk before it is sent, the open minute as well, each batch in a file
//! of its own. So `kill -9` loses what was counted since the last flush and no more. The file of the open minute
//! is replaced by each flush and is not sent before its minute is over; from then on it does not change. Whatever
//! happens between the commit and the removal of the file, the batch is sent again under the same id, and the
//! control plane counts it once.
//!
//! Each step leaves a state from which the next one goes on, also when it is cancelled at an `await`.

use super::{
    accumulate::{Accumulators, Minute, minute_of},
    batch::{Batch, CHUNK, Decoded},
    metrics::Metrics,
    spool::{Spool, began_ms},
};
use crate::{
    control::{
        ControlPlane,
        store::{Recorded, StoreError},
    },
    telemetry::log_gate::LogGate,
};
use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{task::spawn_blocking, time::Instant};
use uuid::Uuid;

/// The control plane remembers batches for 35 days (`maintain_usage`). What is older than this could be counted
/// twice, so it is set aside.
const MAX_AGE_MS: u64 = 30 * 24 * 3600 * 1000;
/// Batches that are refused one after the other before the rest waits for the next flush.
const MAX_FAILURES: u32 = 3;
const MINUTE: Duration = Duration::from_secs(60);

static NOT_SENT: LogGate = LogGate::every(MINUTE);
static NOT_SPOOLED: LogGate = LogGate::every(MINUTE);
static DROPPED: LogGate = LogGate::every(MINUTE);

/// Where usage goes.
pub trait UsageStore: Send + Sync + 'static {
    /// Adds a JSON array of rows, once for each id.
    fn record(&self, batch: Uuid, rows: &str) -> impl Future<Output = Result<Recorded, StoreError>> + Send;
}

impl UsageStore for ControlPlane {
    async fn record(&self, batch: Uuid, rows: &str) -> Result<Recorded, StoreError> {
        self.record_usage(batch, rows).await
    }
}

/// A batch that is not on disk.
#[derive(Debug)]
struct Held {
    batch: Batch,
    /// Its file, where a younger state of it is.
    name: Option<String>,
    bytes: u64,
    began_ms: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Flusher<S> {
    store: S,
    accumulators: Arc<Accumulators>,
    metrics: Arc<Metrics>,
    spool: Arc<Mutex<Option<Spool>>>,
    limit: u64,
    /// The minute that is not over, and its file.
    open: Batch,
    open_name: Option<String>,
    held: VecDeque<Held>,
}

impl<S: UsageStore> Flusher<S> {
    /// Usage that cannot be delivered yet takes up to `limit` bytes, on disk, or in memory while the disk does not
    /// take it.
    pub(super) fn new(
        store: S,
        accumulators: Arc<Accumulators>,
        metrics: Arc<Metrics>,
        spool: Option<Spool>,
        limit: u64,
    ) -> Self {
        Self {
            store,
            accumulators,
            metrics,
            spool: Arc::new(Mutex::new(spool)),
            limit,
            open: Batch::new(),
            open_name: None,
            held: VecDeque::new(),
        }
    }

    /// One flush: minutes before the present one are sent, after what could not be sent before. It takes about
    /// `patience` at most, and the rest waits for the next one.
    pub async fn tick(&mut self, now_s: u64, patience: Duration) {
        self.collect(now_s, minute_of(now_s));
        self.keep().await;
        self.checkpoint(now_s).await;
        self.deliver(now_s, patience).await;
        self.drop_what_is_too_much().await;
        self.report().await;
    }

    /// The last flush: everything is sent, also the open minute.
    pub async fn finish(&mut self, now_s: u64, patience: Duration) {
        self.collect(now_s, Minute::MAX);
        self.keep().await;
        self.deliver(now_s, patience).await;
        self.drop_what_is_too_much().await;
        self.report().await;
    }

    /// Takes what was counted; minutes before `open` become a batch that does not change any more.
    fn collect(&mut self, now_s: u64, open: Minute) {
        let rows = &mut self.open.rows;
        self.metrics.change(|numbers| {
            self.accumulators.take(|key, counts| {
                numbers.usage[key.op.index()].add(counts);
                rows.entry(key).or_default().add(counts);
            });
        });
        if !self.open.rows.keys().any(|key| key.minute < open) {
            return;
        }
        let next = Batch::new();
        let mut batch = std::mem::replace(&mut self.open, next);
        (batch.rows, self.open.rows) =
            std::mem::take(&mut batch.rows).into_iter().partition(|(key, _)| key.minute < open);
        let name = self.open_name.take();
        self.held.push_back(Held { batch, name, bytes: 0, began_ms: now_s * 1000 });
    }

    /// Moves what is held to disk, as far as it fits and the disk takes it.
    async fn keep(&mut self) {
        for index in (0..self.held.len()).rev() {
            if self.held[index].name.is_none() {
                self.held[index].name = self.fresh_name(self.held[index].began_ms).await;
            }
            let encoded = self.held[index].batch.encode();
            self.held[index].bytes = encoded.len() as u64;
            let others = self.held_bytes() - self.held[index].bytes;
            if self.write(self.held[index].name.clone(), encoded, others).await {
                self.held.remove(index);
            }
        }
    }

    /// Writes the open minute to its file.
    async fn checkpoint(&mut self, now_s: u64) {
        if self.open.rows.is_empty() {
            return;
        }
        if self.open_name.is_none() {
            self.open_name = self.fresh_name(now_s * 1000).await;
        }
        self.write(self.open_name.clone(), self.open.encode(), self.held_bytes()).await;
    }

    /// A batch has its name before it has its file: one that was cancelled must know what it left behind.
    async fn fresh_name(&self, began_ms: u64) -> Option<String> {
        self.on_disk(move |spool| spool.fresh_name(began_ms)).await
    }

    /// Whether it is on disk now; not when there is no spool, or no room in it. `others` is what is held besides.
    async fn write(&self, name: Option<String>, encoded: Vec<u8>, others: u64) -> bool {
        let Some(name) = name else { return false };
        let limit = self.limit;
        let stored = self.on_disk(move |spool| {
            let without = spool.bytes() - spool.size(&name);
            let fits = without + others + encoded.len() as u64 <= limit;
            fits.then(|| spool.store(&name, &encoded))
        });
        match stored.await.flatten() {
            None => false,
            Some(Ok(())) => true,
            Some(Err(error)) => {
                if let Some(hidden) = NOT_SPOOLED.pass() {
                    tracing::warn!(%error, hidden, "spool: usage cannot be written to disk, and is kept in memory");
                }
                false
            }
        }
    }

    fn held_bytes(&self) -> u64 {
        self.held.iter().map(|held| held.bytes).sum()
    }

    /// Sends what is over, oldest first, until something fails or the time is up.
    async fn deliver(&mut self, now_s: u64, patience: Duration) {
        let begin = Instant::now();
        let mut failures = 0;
        let mut tried = 0;
        let names = self.on_disk(|spool| spool.names()).await.unwrap_or_default();
        // What is in these files is not all of their batch.
        let unfinished: HashSet<&String> =
            self.held.iter().filter_map(|held| held.name.as_ref()).chain(&self.open_name).collect();
        let mut waiting: VecDeque<Source> = names
            .into_iter()
            .filter(|name| !unfinished.contains(name))
            .map(Source::File)
            .chain(self.held.iter().map(|held| Source::Memory(held.batch.id)))
            .collect();
        while let Some(source) = waiting.pop_front() {
            // At least one each time, or a short interval would never get anywhere.
            if tried > 0 && begin.elapsed() >= patience {
                break;
            }
            let Some(Decoded { batch, bad_lines }) = self.fetch(&source, now_s).await else { continue };
            tried += 1;
            match self.send(&batch).await {
                Ok(()) => {
                    failures = 0;
                    self.done(source, bad_lines).await;
                    self.metrics.change(|numbers| numbers.last_success_s = now_s);
                }
                Err(error) => {
                    failures += 1;
                    if let Some(hidden) = NOT_SENT.pass() {
                        tracing::warn!(%error, hidden, "meter: usage was not written, and is sent again");
                    }
                    if error.is_silence() || failures >= MAX_FAILURES {
                        break;
                    }
                }
            }
        }
        if tried > 0 {
            let took = begin.elapsed();
            self.metrics.change(|numbers| {
                numbers.flushes += 1;
                numbers.flush_failures += u64::from(failures > 0);
                numbers.flush_last = took;
                numbers.flush_sum += took;
            });
        }
    }

    /// The batch of a source; none: there is nothing to send.
    async fn fetch(&self, source: &Source, now_s: u64) -> Option<Decoded> {
        let name = match source {
            Source::Memory(id) => {
                let held = self.held.iter().find(|held| held.batch.id == *id)?;
                if held.batch.rows.len() > CHUNK
                    && let Some(name) = held.name.clone()
                {
                    // Of the younger state there, other rows would be in the second piece.
                    self.on_disk(move |spool| spool.remove(&name)).await;
                }
                return Some(Decoded { batch: held.batch.clone(), bad_lines: 0 });
            }
            Source::File(name) => name.clone(),
        };
        if began_ms(&name).is_none_or(|began| began + MAX_AGE_MS < now_s * 1000) {
            tracing::error!(name, "spool: usage is older than 30 days and might be counted twice");
            self.give_up(&name).await;
            return None;
        }
        let file = name.clone();
        let loaded = self.on_disk(move |spool| spool.load(&file)).await?;
        match loaded.map(|bytes| Batch::decode(&bytes)) {
            Ok(Some(decoded)) => Some(decoded),
            Ok(None) => {
                self.give_up(&name).await;
                None
            }
            Err(error) => {
                if let Some(hidden) = NOT_SPOOLED.pass() {
                    tracing::warn!(name, %error, hidden, "spool: a file cannot be read");
                }
                None
            }
        }
    }

    /// Sets a file aside that cannot be sent.
    async fn give_up(&self, name: &str) {
        let name = name.to_owned();
        let lost = self.on_disk(move |spool| {
            let batch = spool.load(&name).ok().and_then(|bytes| Batch::decode(&bytes));
            spool.set_aside(&name);
            batch
        });
        if let Some(Some(lost)) = lost.await {
            self.count_dropped(&lost.batch);
        }
    }

    async fn send(&self, batch: &Batch) -> Result<(), StoreError> {
        for (id, rows) in batch.chunks() {
            let recorded = self.store.record(id, &rows).await?;
            self.metrics.change(|numbers| {
                if recorded.repeated {
                    numbers.batches_repeated += 1;
                } else {
                    numbers.rows_written += recorded.written;
                    numbers.rows_refused += recorded.dropped;
                }
            });
            if recorded.dropped > 0 && !recorded.repeated {
                tracing::info!(rows = recorded.dropped, "meter: rows of clusters that are gone were dropped");
            }
        }
        Ok(())
    }

    /// Forgets a batch that is in the control plane.
    async fn done(&mut self, source: Source, bad_lines: usize) {
        let name = match source {
            Source::File(name) => Some(name),
            Source::Memory(id) => {
                let index = self.held.iter().position(|held| held.batch.id == id);
                // The younger state of it that may be on disk.
                index.and_then(|index| self.held.remove(index)).and_then(|held| held.name)
            }
        };
        let Some(name) = name else { return };
        if bad_lines == 0 {
            self.on_disk(move |spool| spool.remove(&name)).await;
        } else {
            tracing::error!(name, bad_lines, "spool: the readable rows of a damaged file were delivered");
            self.metrics.change(|numbers| numbers.dropped_rows += bad_lines as u64);
            self.on_disk(move |spool| spool.set_aside(&name)).await;
        }
    }

    /// The newest of what is held goes when there is too much, after it was tried once.
    async fn drop_what_is_too_much(&mut self) {
        let spooled = self.on_disk(|spool| spool.bytes()).await.unwrap_or(0);
        while spooled + self.held_bytes() > self.limit {
            let Some(held) = self.held.pop_back() else { break };
            self.count_dropped(&held.batch);
            if let Some(name) = held.name {
                self.on_disk(move |spool| spool.remove(&name)).await;
            }
            if let Some(hidden) = DROPPED.pass() {
                let (rows, messages) = (held.batch.rows.len(), held.batch.messages());
                tracing::error!(rows, messages, hidden, "meter: usage is lost, the spool is full");
            }
        }
    }

    fn count_dropped(&self, batch: &Batch) {
        self.metrics.change(|numbers| {
            numbers.dropped_rows += batch.rows.len() as u64;
            numbers.dropped_msgs = numbers.dropped_msgs.saturating_add(batch.messages());
        });
    }

    async fn report(&self) {
        let (files, bytes) =
            self.on_disk(|spool| (spool.len() as u64, spool.bytes())).await.unwrap_or_default();
        let held = self.held_bytes();
        self.metrics.change(|numbers| {
            (numbers.spool_files, numbers.spool_bytes, numbers.held_bytes) = (files, bytes, held);
        });
    }

    /// Disks make their callers wait: not on the threads that serve look-ups.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Spool) -> T + Send + 'static,
    ) -> Option<T> {
        let spool = Arc::clone(&self.spool);
        let work = move || spool.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(work);
        spawn_blocking(work).await.ok().flatten()
    }
}

/// Where a batch is that is over.
enum Source {
    File(String),
    Memory(Uuid),
}

#[cfg(test)]
#[path = "flush_tests.rs"]
mod tests;
