//! Usage: counted from what happened, never lost, never twice (proxy contract §13).
//!
//! A request finds its cluster's meter once ([`Meter::cluster`]), follows the exchange with the cell
//! ([`sample::Watch`]), and records what it came to ([`ClusterMeter::record`]). Every flush interval what was
//! counted goes to disk and, when its minute is over, to the control plane ([`flush`]). An hourly pass rolls up
//! and says which clusters have used up their month ([`rollup`]).

pub mod accumulate;
mod batch;
pub mod flush;
pub mod metrics;
pub mod rollup;
pub mod sample;
pub mod scan;
pub mod spool;

use crate::{
    config::proxy::MeteringConfig,
    control::{ControlPlane, now_s},
    domain::ids::ClusterId,
    telemetry::log_gate::LogGate,
};
use accumulate::{Accumulators, ClusterMeter};
use flush::{Flusher, UsageStore};
use metrics::{Metrics, Snapshot};
use rollup::{MonthlyBlocks, RollUp};
use sample::Usage;
use spool::{Spool, SpoolError};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};

/// What a line that repeats waits for.
const MINUTE: Duration = Duration::from_secs(60);
const HALF_MINUTE: Duration = Duration::from_secs(30);
static UNREADABLE: LogGate = LogGate::every(MINUTE);
static BUFFERED: LogGate = LogGate::every(HALF_MINUTE);

/// See the module. A handle: clones share everything.
#[derive(Clone, Debug)]
pub struct Meter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// None without a control plane: then everybody counts on the same meter, and nobody reads it.
    accumulators: Option<Arc<Accumulators>>,
    nobody: Arc<ClusterMeter>,
    blocks: Arc<MonthlyBlocks>,
    metrics: Arc<Metrics>,
    stop: watch::Sender<bool>,
    tasks: Mutex<Option<Tasks>>,
}

#[derive(Debug)]
struct Tasks {
    flusher: JoinHandle<()>,
    rollup: JoinHandle<()>,
}

impl Meter {
    /// Counts, flushes and rolls up on `runtime`, where the control plane's connections live. Fails when the
    /// spool belongs to another proxy; a folder that cannot be used costs the protection against a crash, and is
    /// logged.
    pub fn start(
        runtime: &Handle,
        control: &ControlPlane,
        config: &MeteringConfig,
    ) -> Result<Self, SpoolError> {
        let accumulators = Arc::new(Accumulators::default());
        let metrics = Arc::new(Metrics::default());
        let blocks = Arc::new(MonthlyBlocks::default());
        let (stop, stopped) = watch::channel(false);
        let flusher = open(config, control.clone(), Arc::clone(&accumulators), Arc::clone(&metrics))?;
        let rollup = RollUp::new(
            control.clone(),
            config.keep_days,
            config.warn_percent,
            Arc::clone(&blocks),
            Arc::clone(&metrics),
        );
        let tasks = Tasks {
            flusher: runtime.spawn(run(flusher, config.flush_every, stopped)),
            rollup: runtime.spawn(rollup.run(config.rollup_every)),
        };
        Ok(Self(Arc::new(Inner {
            accumulators: Some(accumulators),
            nobody: Arc::default(),
            blocks,
            metrics,
            stop,
            tasks: Mutex::new(Some(tasks)),
        })))
    }

    /// One that has nobody to tell, for a proxy without a control plane: answers need not be read.
    pub fn discarding() -> Self {
        Self(Arc::new(Inner {
            accumulators: None,
            nobody: Arc::default(),
            blocks: Arc::default(),
            metrics: Arc::default(),
            stop: watch::channel(false).0,
            tasks: Mutex::new(None),
        }))
    }

    /// Whether anybody wants to know what a request came to.
    pub fn is_on(&self) -> bool {
        self.0.accumulators.is_some()
    }

    /// The meter of a cluster, to be found once per request.
    pub fn cluster(&self, id: ClusterId) -> Arc<ClusterMeter> {
        match &self.0.accumulators {
            Some(accumulators) => accumulators.cluster(id),
            None => Arc::clone(&self.0.nobody),
        }
    }

    /// Records what a request came to, now, and logs what is odd about it.
    pub fn record(&self, cluster: &ClusterMeter, usage: &Usage) {
        let now = now_s();
        usage.samples().for_each(|sample| cluster.record(sample, now));
        if let Some(reason) = usage.unreadable {
            self.0.metrics.unreadable();
            if let Some(hidden) = UNREADABLE.pass() {
                let op = usage.first.op.as_str();
                tracing::warn!(%reason, op, hidden, "meter: an answer bills no messages");
            }
        }
        if usage.mostly_buffered
            && let Some(hidden) = BUFFERED.pass()
        {
            tracing::info!(hidden, "meter: most messages of a push wait in the cell's buffer");
        }
    }

    /// Which clusters have used up their month.
    pub fn blocks(&self) -> &Arc<MonthlyBlocks> {
        &self.0.blocks
    }

    /// The numbers of the metrics.
    pub fn metrics(&self) -> Snapshot {
        self.0.metrics.snapshot()
    }

    /// Writes everything that was counted, also of the open minute, within `deadline`. What the control plane
    /// does not take is on disk by then. Requests that end later are not counted.
    pub async fn shutdown(&self, deadline: Duration) {
        let tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut tasks) = tasks else { return };
        tasks.rollup.abort();
        self.0.stop.send_replace(true);
        if timeout(deadline, &mut tasks.flusher).await.is_err() {
            tasks.flusher.abort();
            tracing::warn!("meter: the last usage was not written in time; the next start sends the spool");
        }
    }
}

/// A flusher on the spool that the configuration names.
pub fn open<S: UsageStore>(
    config: &MeteringConfig,
    store: S,
    accumulators: Arc<Accumulators>,
    metrics: Arc<Metrics>,
) -> Result<Flusher<S>, SpoolError> {
    let spool = match Spool::open(&config.spool_dir) {
        Ok(spool) => Some(spool),
        Err(error @ SpoolError::InUse(_)) => return Err(error),
        Err(error) => {
            tracing::error!(%error, "spool: usage is kept in memory only, and a crash loses it");
            None
        }
    };
    Ok(Flusher::new(store, accumulators, metrics, spool, config.spool_max_bytes))
}

async fn run<S: UsageStore>(mut flusher: Flusher<S>, every: Duration, mut stopped: watch::Receiver<bool>) {
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // A flush that waits for the control plane must not hold up the last one. It begins no statement in the
        // second half of the interval, because the next write to disk must not be late: a crash loses what came after
        // the last one.
        tokio::select! {
            biased;
            _ = stopped.wait_for(|&stopped| stopped) => break,
            () = async {
                due.tick().await;
                flusher.tick(now_s(), every / 2).await;
            } => {}
        }
    }
    flusher.finish(now_s(), MINUTE).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metering::sample::{MeteredRoute, RequestFacts, Watch};
    use uuid::Uuid;

    #[tokio::test]
    async fn without_a_control_plane_nothing_is_kept() {
        let meter = Meter::discarding();
        let usage = Watch::new(MeteredRoute::Push, RequestFacts::default(), 64).finish();
        for number in 0..1_000 {
            let cluster = meter.cluster(ClusterId(Uuid::from_u128(number)));
            meter.record(&cluster, &usage);
        }
        assert_eq!(Arc::strong_count(&meter.0.nobody), 1, "everybody had the same");
        assert!(meter.blocks().is_empty());
        meter.shutdown(Duration::ZERO).await;
    }
}
