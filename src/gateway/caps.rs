//! The caps of plans at work on requests: one decision for each, its answer, its line in the log (D1, D9).

use super::{
    body::{Facts, Subject},
    forward::Forward,
    refusal::{LimitRefusal, Refusal},
};
use crate::{
    domain::{cluster::Cluster, ids::ClusterId},
    limits::{
        ClusterLimits, Limiter,
        buffer::{Budget, Reservation},
        clock::Monotonic,
        decision::{Decision, Limit, Mode, Outcome},
        parked::Slot,
        shared::PATIENCE,
    },
    metering::{rollup::MonthlyBlocks, sample::RequestFacts},
    telemetry::metrics::Metrics,
};
use http::HeaderValue;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// Bodies of more bytes are read where they hold up nobody else's requests: a megabyte takes half a millisecond.
const LARGE: usize = 1 << 20;

/// What limits requests, for the whole process.
pub struct Caps {
    /// The counters.
    pub limiter: Arc<Limiter<Monotonic>>,
    /// Whether they refuse, or only count.
    pub mode: Mode,
    /// Memory for bodies that are held.
    pub buffers: Arc<Budget>,
    /// Queues and partitions that one body may name.
    pub max_pairs: usize,
    /// Clusters that have used up their month.
    pub blocks: Arc<MonthlyBlocks>,
    /// Where denials are counted.
    pub metrics: Arc<Metrics>,
    /// Called once for new counters, whose known queues have to be loaded.
    pub want_queues: Box<dyn Fn(&Arc<ClusterLimits>) + Send + Sync>,
}

/// `RateLimit-Policy` and `RateLimit`.
#[derive(Clone)]
pub(super) struct RateHeaders {
    pub policy: HeaderValue,
    pub limit: HeaderValue,
}

/// A request within its caps.
pub(super) struct Passed {
    /// The place of a waiting pop, to be given back when the answer begins.
    pub slot: Option<Slot>,
    pub rate: Option<RateHeaders>,
    pub metered: RequestFacts,
}

/// A request over one of them.
pub(super) struct Denied {
    pub refusal: Refusal,
    pub rate: Option<Box<RateHeaders>>,
}

impl From<Refusal> for Denied {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, rate: None }
    }
}

impl Caps {
    /// The counters of a cluster, whose known queues are loaded when they are first used.
    pub fn counters(&self, cluster: ClusterId) -> Arc<ClusterLimits> {
        let counters = self.limiter.cluster(cluster);
        if counters.claim_load() {
            (self.want_queues)(&counters);
        }
        counters
    }

    /// Memory for a body of this cluster.
    pub(super) fn reservation(&self, forward: &Forward) -> Reservation {
        Reservation::new(&self.buffers, &forward.counters)
    }

    /// Refuses a request whose body need not be read to do so. Takes nothing.
    pub(super) fn peek(&self, forward: &Forward) -> Result<(), Denied> {
        if self.mode == Mode::Shadow {
            return Ok(());
        }
        let decision = self.limiter.peek(&forward.counters, &forward.cluster.limits);
        self.answer(forward, &decision, "").map(|_| ())
    }

    /// Judges a request with its whole body, and takes what it needs if all limits allow it. Waits only where
    /// limits are shared and the store has to be asked, for [`PATIENCE`] at most.
    pub(super) async fn judge(
        &self,
        forward: &Forward,
        subject: Option<Subject>,
        body: &[u8],
    ) -> Result<Passed, Denied> {
        let facts = match subject {
            Some(subject) => aside(body.len(), || subject.read(body, self.max_pairs, self.mode))?,
            None => Facts::default(),
        };
        let parks_at = forward.parks.then(|| cell_name(&forward.cluster));
        let mut request = facts.request(parks_at);
        let limits = &forward.cluster.limits;
        let mut until = None;
        let verdict = loop {
            let verdict = self.limiter.evaluate(&forward.counters, &request, limits, self.mode);
            let Some(mut answered) = verdict.unsettled else { break verdict };
            let until = *until.get_or_insert_with(|| Instant::now() + PATIENCE);
            request.impatient = !matches!(timeout_at(until, answered.changed()).await, Ok(Ok(())));
        };
        let what = facts.denied_part(&verdict.decision);
        let rate = self.answer(forward, &verdict.decision, what)?;
        Ok(Passed { slot: verdict.slot, rate, metered: facts.metered(body.len()) })
    }

    /// What a decision means for the request, and its line in the log.
    fn answer(
        &self,
        forward: &Forward,
        decision: &Decision,
        what: &'static str,
    ) -> Result<Option<RateHeaders>, Denied> {
        let rate = decision.headers().and_then(|(policy, limit)| {
            let (policy, limit) = (HeaderValue::try_from(policy).ok()?, HeaderValue::try_from(limit).ok()?);
            Some(RateHeaders { policy, limit })
        });
        let refusal = decision.refusal(self.mode);
        for denial in decision.denials() {
            let refused = refusal.is_some_and(|refusal| refusal.limit == denial.limit);
            self.note(forward, denial, refused);
        }
        match refusal {
            Some(outcome) => {
                let refusal = Refusal::Limit(LimitRefusal { outcome, what });
                Err(Denied { refusal, rate: rate.map(Box::new) })
            }
            None => Ok(rate),
        }
    }

    fn note(&self, forward: &Forward, denial: &Outcome, blocked: bool) {
        let would_block = !blocked && (self.mode == Mode::Shadow && !denial.limit.is_hard());
        if !blocked && !would_block {
            return;
        }
        self.metrics.denied(denial.limit.kind(), blocked);
        if let Some(hidden) = forward.counters.denials.pass() {
            tracing::warn!(
                target: "limits",
                cluster = %forward.cluster.slug,
                kind = denial.limit.kind(),
                blocked,
                would_block,
                max = denial.max,
                used = denial.used,
                retry_after_s = denial.retry_after,
                hidden,
                "over a limit"
            );
        }
    }
}

/// What tells cells apart: the host of their URL.
fn cell_name(cluster: &Cluster) -> &str {
    cluster.cell.host.to_str().unwrap_or_default()
}

/// Does work on a body of that many bytes where it holds up nobody.
fn aside<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes > LARGE && can_step_aside() { tokio::task::block_in_place(work) } else { work() }
}

/// Whether this thread may leave its other tasks to another one.
fn can_step_aside() -> bool {
    tokio::runtime::Handle::try_current()
        .is_ok_and(|handle| handle.runtime_flavor() == tokio::runtime::RuntimeFlavor::MultiThread)
}

/// The words of a limit's refusal.
pub(super) fn text(refusal: &LimitRefusal) -> String {
    let LimitRefusal { outcome, what } = refusal;
    let Outcome { max, used, index, .. } = *outcome;
    let index = index.unwrap_or(0);
    match outcome.limit {
        Limit::Requests => "request rate limit reached".to_owned(),
        Limit::Messages => "message rate limit reached".to_owned(),
        Limit::Parked => format!("as many consumers wait as max_parked_pops allows ({max})"),
        Limit::CellParked => "as many consumers wait as the cell takes".to_owned(),
        Limit::PayloadBytes => {
            format!("{what}[{index}]: a payload of {used} bytes exceeds max_payload_bytes ({max})")
        }
        Limit::BatchItems => format!("a batch of {used} items exceeds max_batch_items ({max})"),
        Limit::Retention => format!("{what} of {used} s exceeds the plan's max_retention_seconds ({max})"),
        Limit::RetainedBytes => format!("pushes blocked: the cluster keeps max_retained_bytes ({max})"),
        Limit::Queues => format!("queue limit reached ({max})"),
        Limit::Partitions => format!("partition limit reached ({max})"),
    }
}
