//! The counters of one cluster.

use super::{
    admission::Admission,
    bucket::{Bucket, Rate},
    clock::Nanos,
    parked::Gauge,
    storage::Storage,
};
use crate::{
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
    },
    telemetry::log_gate::LogGate,
};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Counters that outlive every snapshot of their cluster. They belong to its id: one that is created
/// anew under an old name starts fresh.
#[derive(Debug)]
pub struct ClusterLimits {
    id: ClusterId,
    state: Mutex<State>,
    load_claimed: AtomicBool,
    pub(super) parked: Arc<Gauge>,
    pub(super) storage: Storage,
    pub(super) near_cap: AtomicBool,
    pub(super) used_at: AtomicU64,
    /// Bytes of bodies that are held, see [`super::buffer`].
    pub(super) buffered: AtomicU64,
    /// Lets one line about a denial a second into the log.
    pub denials: LogGate,
}

/// What is evaluated and taken from together.
#[derive(Default, Debug)]
pub(super) struct State {
    pub requests: Bucket,
    pub messages: Bucket,
    pub admission: Admission,
}

/// What stands against a cluster's caps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveView {
    /// Requests; none when unlimited.
    pub requests: Option<RateView>,
    /// Messages; none when unlimited.
    pub messages: Option<RateView>,
    /// Waiting pops.
    pub parked: u64,
    /// Queues; none before the table was read.
    pub queues: Option<u64>,
    /// Bytes kept, as the cell last said.
    pub retained_bytes: Option<u64>,
    /// Payload bytes accepted since that figure last changed.
    pub in_flight_bytes: u64,
    /// Pushes are blocked for what is kept.
    pub storage_blocked: bool,
}

/// One bucket now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateView {
    /// Tokens left, less than 0 in debt.
    pub left: i64,
    /// Tokens of a full bucket.
    pub burst: u64,
}

impl ClusterLimits {
    /// Nothing is counted yet.
    pub fn new(id: ClusterId) -> Self {
        Self {
            id,
            state: Mutex::default(),
            load_claimed: AtomicBool::new(false),
            parked: Arc::default(),
            storage: Storage::default(),
            near_cap: AtomicBool::new(false),
            used_at: AtomicU64::new(0),
            buffered: AtomicU64::new(0),
            denials: LogGate::new(),
        }
    }

    /// Whose.
    pub fn id(&self) -> ClusterId {
        self.id
    }

    /// True for one caller, who then has to bring the rows of the table to
    /// [`Limiter::load`](super::Limiter::load); until then no queue or partition is refused.
    pub fn claim_load(&self) -> bool {
        !self.load_claimed.load(Ordering::Relaxed) && !self.load_claimed.swap(true, Ordering::AcqRel)
    }

    /// Whether pushes are blocked for what the cluster keeps.
    pub fn is_storage_blocked(&self, cap: Cap) -> bool {
        self.storage.is_blocked(cap)
    }

    /// A panic under the lock leaves numbers that are at worst a little off.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn used_at(&self) -> Nanos {
        self.used_at.load(Ordering::Relaxed)
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.parked.waiting() > 0 || self.storage.is_over() || self.near_cap.load(Ordering::Acquire)
    }

    pub(super) fn live(&self, limits: &Limits, now: Nanos) -> LiveView {
        let mut state = self.lock();
        let view = |bucket: &mut Bucket, rate, burst| {
            let rate = Rate::of(rate, burst)?;
            Some(RateView { left: bucket.check(rate, now, 0).left, burst: rate.burst })
        };
        LiveView {
            requests: view(&mut state.requests, limits.max_req_per_sec, limits.req_burst),
            messages: view(&mut state.messages, limits.max_msgs_per_sec, limits.msgs_burst),
            parked: self.parked.waiting(),
            queues: state.admission.is_loaded().then(|| state.admission.queues()),
            retained_bytes: self.storage.measured(),
            in_flight_bytes: self.storage.in_flight(),
            storage_blocked: self.storage.is_blocked(limits.max_retained_bytes),
        }
    }
}
