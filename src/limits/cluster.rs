//! The counters of one cluster.

use super::{
    admission::Admission,
    bucket::Rate,
    clock::Nanos,
    parked::Gauge,
    shared::places::Places,
    storage::Storage,
    tokens::{Footing, Tokens},
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
use tokio::sync::watch;

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
    pub requests: Tokens,
    pub messages: Tokens,
    pub admission: Admission,
    /// Of the places of waiting pops, those that this proxy has of all.
    pub places: Places,
    /// It is on its way to the store with what it has to ask.
    pub queued: bool,
    /// Tells those who wait that the store has answered, or will not.
    answered: Option<watch::Sender<()>>,
}

impl State {
    /// The store has answered, or will not.
    pub fn tell(&self) {
        if let Some(answered) = &self.answered {
            answered.send_replace(());
        }
    }

    /// Hears of the next answer.
    pub fn listen(&mut self) -> watch::Receiver<()> {
        self.answered.get_or_insert_with(|| watch::Sender::new(())).subscribe()
    }

    /// Whether the store should be asked.
    pub fn asks(&mut self) -> bool {
        self.requests.asks() || self.messages.asks() || self.places.asks()
    }
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

    pub(super) fn live(&self, limits: &Limits, now: Nanos, footing: Footing) -> LiveView {
        let mut state = self.lock();
        let view = |tokens: &mut Tokens, rate, burst| {
            let reading = tokens.check(Rate::of(rate, burst)?, now, 0, footing);
            Some(RateView { left: reading.left, burst: reading.rate.burst })
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
