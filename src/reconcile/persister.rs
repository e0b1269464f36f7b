//! Writing the counts that requests projected (proxy contract §9.3).

use super::Shared;
use crate::{
    control::{queues::NewCount, store::StoreError},
    limits::pending::QueueRow,
};
use std::sync::{Arc, atomic::Ordering};
use tokio::{
    sync::watch,
    time::{Duration, Instant, MissedTickBehavior, interval, sleep},
};

/// Rows of one statement.
const BATCH: usize = 1_000;
/// Between two tries at shutdown.
const AGAIN: Duration = Duration::from_millis(100);

/// Writes until `stop` says until when the rest may be tried.
pub(super) async fn run(shared: Arc<Shared>, mut stop: watch::Receiver<Option<Instant>>) {
    let mut tick = interval(shared.config.persist_every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let deadline = loop {
        let stopped = *stop.borrow_and_update();
        if let Some(deadline) = stopped {
            break deadline;
        }
        tokio::select! {
            changed = stop.changed() => if changed.is_err() { return },
            _ = tick.tick() => {
                if let Err(error) = flush(&shared).await
                    && let Some(hidden) = shared.gates.persist.pass()
                {
                    tracing::warn!(%error, rows = shared.rows_pending(), hidden, "queue rows were not written");
                }
            }
        }
    };
    while Instant::now() < deadline && (flush(&shared).await.is_err() || !shared.limiter.pending().is_empty())
    {
        sleep(AGAIN).await;
    }
}

/// Writes all that waits now. On failure what was not written waits again.
async fn flush(shared: &Shared) -> Result<(), StoreError> {
    loop {
        let rows = shared.limiter.pending().drain(BATCH);
        let last = rows.len() < BATCH;
        if rows.is_empty() {
            return Ok(());
        }
        shared.in_hand.store(rows.len(), Ordering::Relaxed);
        let written = write(shared, rows).await;
        shared.in_hand.store(0, Ordering::Relaxed);
        written?;
        if last {
            return Ok(());
        }
    }
}

/// Writes one batch. Rows of clusters that are no more are dropped; a batch that the database refuses for
/// what is in it is halved, so that a row which can never be stored is found and does not stop the others.
async fn write(shared: &Shared, rows: Vec<QueueRow>) -> Result<(), StoreError> {
    let mut batches = vec![rows];
    while let Some(mut batch) = batches.pop() {
        let counts: Vec<_> = batch.iter().map(new_count).collect();
        match shared.store.persist_queues(&counts).await {
            Ok(orphans) => {
                for cluster in orphans {
                    shared.dropped.fetch_add(1, Ordering::Relaxed);
                    shared.limiter.forget(cluster);
                }
            }
            Err(error) if error.is_about_values() => {
                if batch.len() > 1 {
                    batches.push(batch.split_off(batch.len() / 2));
                    batches.push(batch);
                } else {
                    shared.dropped.fetch_add(1, Ordering::Relaxed);
                    if let Some(hidden) = shared.gates.refused.pass() {
                        let cluster = batch.first().map(|row| row.cluster.to_string());
                        tracing::error!(%error, cluster, hidden, "a queue row cannot be stored");
                    }
                }
            }
            Err(error) => {
                batches.push(batch);
                for row in batches.into_iter().flatten() {
                    shared.limiter.pending().add(row);
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

fn new_count(row: &QueueRow) -> NewCount<'_> {
    NewCount { cluster: row.cluster, name: &row.name, partitions: row.partitions }
}
