//! One limit for several proxies: rates and places of waiting pops are counted in Redis or Valkey.
//!
//! What is true is in the store, and only its scripts change it. A proxy takes tokens from there in small leases and
//! spends those, so that a request waits for the store only when nothing is held and the store may have more: for one
//! round trip, and for [`PATIENCE`] at most. A store that does not answer within that time is away; then each proxy
//! goes on with its part of every limit, and comes back by itself.

pub mod lease;
mod link;
pub mod places;
mod store;

pub use link::Link;
pub use store::Settings;

use super::{ClusterLimits, tokens::Footing};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::mpsc::UnboundedSender;

/// How long the store may take for an answer, and a request wait for it.
pub const PATIENCE: Duration = Duration::from_millis(100);

/// What requests and the link have in common.
#[derive(Debug)]
pub struct Shared {
    present: AtomicBool,
    proxies: AtomicU64,
    /// Clusters that have something to ask. Each is in there once at most.
    asks: UnboundedSender<Arc<ClusterLimits>>,
    waits: AtomicU64,
    trips: [AtomicU64; 3],
    trips_us: AtomicU64,
    losses: AtomicU64,
}

/// How a round trip to the store ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trip {
    /// With an answer.
    Answered,
    /// Without one in time.
    Late,
    /// With an error, or the end of the connection.
    Failed,
}

impl Trip {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Answered, Self::Late, Self::Failed];

    /// The word for it in metrics.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Answered => "ok",
            Self::Late => "timeout",
            Self::Failed => "error",
        }
    }
}

/// What an operator wants to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Figures {
    /// Whether the limits are shared now.
    pub present: bool,
    /// Proxies that share them, as far as it is known.
    pub proxies: u64,
    /// Round trips, in the order of [`Trip::ALL`].
    pub trips: [u64; 3],
    /// How long those with an answer took together.
    pub took: Duration,
    /// Times that a request waited for the store.
    pub waits: u64,
    /// Times that the store went away.
    pub losses: u64,
}

impl Shared {
    fn new(asks: UnboundedSender<Arc<ClusterLimits>>) -> Self {
        Self {
            present: AtomicBool::new(false),
            // Alone, until others are heard of.
            proxies: AtomicU64::new(1),
            asks,
            waits: AtomicU64::new(0),
            trips: Default::default(),
            trips_us: AtomicU64::new(0),
            losses: AtomicU64::new(0),
        }
    }

    /// On what limits stand; apart from the store for a request that has waited long enough.
    pub(super) fn footing(&self, impatient: bool) -> Footing {
        let proxies = self.proxies();
        let present = !impatient && self.present.load(Ordering::Acquire);
        if present { Footing::Shared(proxies) } else { Footing::Apart(proxies) }
    }

    /// Brings a cluster to the link; it is not there yet.
    pub(super) fn ask(&self, cluster: &Arc<ClusterLimits>) {
        // Without a link nobody is asked any more, which is so at the very end.
        let _ = self.asks.send(Arc::clone(cluster));
    }

    pub(super) fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    fn proxies(&self) -> u64 {
        self.proxies.load(Ordering::Relaxed)
    }

    fn count(&self, trip: Trip, took: Duration) {
        self.trips[trip as usize].fetch_add(1, Ordering::Relaxed);
        if trip == Trip::Answered {
            let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
            self.trips_us.fetch_add(took, Ordering::Relaxed);
        }
    }

    /// How it stands.
    pub fn figures(&self) -> Figures {
        Figures {
            present: self.present.load(Ordering::Acquire),
            proxies: self.proxies(),
            trips: [0, 1, 2].map(|at: usize| self.trips[at].load(Ordering::Relaxed)),
            took: Duration::from_micros(self.trips_us.load(Ordering::Relaxed)),
            waits: self.waits.load(Ordering::Relaxed),
            losses: self.losses.load(Ordering::Relaxed),
        }
    }
}
