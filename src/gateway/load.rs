//! What is going on, for a shutdown that waits and for figures.

use super::severing::Severing;
use dashmap::DashMap;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Waker,
};

/// See the module.
#[derive(Debug, Default)]
pub struct Load {
    pub(super) in_flight: AtomicUsize,
    pub(super) draining: AtomicBool,
    pub(super) closing: AtomicBool,
    /// The connections whose requests wait at a cell, to be woken when they have to end.
    pub(super) parked: DashMap<usize, Waker>,
    /// The same over HTTP/2, by their connections to cells.
    pub(super) severing: Arc<Severing>,
    pub(super) connections: AtomicUsize,
    pub(super) refused_in_all: AtomicU64,
    pub(super) refused_by_address: AtomicU64,
    pub(super) failed_handshakes: AtomicU64,
    pub(super) left: AtomicU64,
}

impl Load {
    /// Requests whose answer has not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Whether the proxy is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Whether what waits at cells is to end.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Ends what waits at cells, and lets nothing wait any more.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        for waiting in &self.parked {
            waiting.wake_by_ref();
        }
        self.severing.sever();
    }

    /// Connections of clients.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Connections that were refused since the start: for all there are, and for those of their address.
    pub fn refused_connections(&self) -> [u64; 2] {
        [&self.refused_in_all, &self.refused_by_address].map(|count| count.load(Ordering::Relaxed))
    }

    /// TLS handshakes that failed or took too long, since the start.
    pub fn failed_handshakes(&self) -> u64 {
        self.failed_handshakes.load(Ordering::Relaxed)
    }

    /// Requests since the start that were finished although nobody took their answer.
    pub fn finished_without_client(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }
}

/// One request in flight; counted until it is dropped, because Pingora's last phase does not run
/// after a panic.
pub(super) struct InFlight(Arc<Load>);

impl InFlight {
    pub fn new(load: &Arc<Load>) -> Self {
        load.in_flight.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(load))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}
