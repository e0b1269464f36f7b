//! What the gateway's filters and the stream under them tell each other about one client connection.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
};

/// How far the request on an HTTP/1 connection is, and what it means when its client closes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Its head is awaited, or incomplete.
    Head,
    /// Its body may be incomplete: a client that closes has broken it off.
    Receiving,
    /// It is complete. A client that closes may still want the answer, which it is asked by interim
    /// answers.
    Asked,
    /// The same with HTTP/1.0, which has no interim answers.
    AskedOld,
    /// It is complete, by HTTP/1.0, and may wait for long: who closes has left.
    Parked,
    /// It is complete and goes to its end, whatever becomes of its client.
    Finishing,
}

impl Phase {
    const ALL: [Self; 6] =
        [Self::Head, Self::Receiving, Self::Asked, Self::AskedOld, Self::Parked, Self::Finishing];
}

/// The kind of a request that is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::gateway) struct Complete {
    /// It stores something: what the cell does is counted also when nobody hears of it (proxy contract §13).
    pub stores: bool,
    /// It waits at the cell for something to happen.
    pub parks: bool,
    /// Its client understands interim answers.
    pub interim: bool,
}

/// One connection. The numbers order nothing: each is looked at by the task that serves the connection.
#[derive(Debug, Default)]
pub(in crate::gateway) struct Connection {
    secure: Option<Secure>,
    storing: Mutex<InFlight>,
    phase: AtomicU8,
    head_bytes: AtomicUsize,
    chunked: AtomicBool,
    answering: AtomicBool,
    parks: AtomicBool,
    over: AtomicBool,
}

/// What TLS told.
#[derive(Debug)]
pub(super) struct Secure {
    /// The host that was asked for, canonical.
    pub name: Option<Box<str>>,
    /// Whether HTTP/2 is spoken, and so by many requests at a time.
    pub http2: bool,
}

/// Requests of an HTTP/2 connection that go to their end, whatever becomes of their client.
#[derive(Debug, Default)]
struct InFlight {
    began: u64,
    numbers: Vec<u64>,
    /// Who waits for one of them to end.
    waker: Option<Waker>,
}

/// Such a request, until it is dropped.
#[derive(Debug)]
pub(in crate::gateway) struct Storing {
    connection: Arc<Connection>,
    number: u64,
}

impl Drop for Storing {
    fn drop(&mut self) {
        let mut storing = self.connection.storing();
        storing.numbers.retain(|number| *number != self.number);
        if let Some(waker) = storing.waker.take() {
            waker.wake();
        }
    }
}

impl Connection {
    /// One that TLS protects.
    pub(super) fn secure(secure: Secure) -> Self {
        Self { secure: Some(secure), ..Self::default() }
    }

    /// Whether TLS protects it.
    pub fn is_secure(&self) -> bool {
        self.secure.is_some()
    }

    /// The host that the client asked for when TLS began, canonical.
    pub fn name(&self) -> Option<&str> {
        self.secure.as_ref()?.name.as_deref()
    }

    fn storing(&self) -> MutexGuard<'_, InFlight> {
        self.storing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request goes to its end; if so, the task is woken when one has ended.
    pub(super) fn is_storing(&self, cx: &Context<'_>) -> bool {
        let mut storing = self.storing();
        let any = !storing.numbers.is_empty();
        if any {
            storing.waker = Some(cx.waker().clone());
        }
        any
    }

    pub(super) fn oldest_storing(&self) -> Option<u64> {
        self.storing().numbers.first().copied()
    }

    pub(super) fn newest_storing(&self) -> u64 {
        self.storing().began
    }

    /// The next request's head is awaited.
    pub(super) fn await_head(&self) {
        self.head_bytes.store(0, Ordering::Relaxed);
        self.answering.store(false, Ordering::Relaxed);
        self.set_phase(Phase::Head);
    }

    /// A head has been read and understood, and whether its body comes in chunks.
    pub fn head_is_complete(&self, chunked: bool) {
        self.chunked.store(chunked, Ordering::Relaxed);
        self.set_phase(Phase::Receiving);
    }

    /// A whole request has been read. What is returned is kept until the request is over.
    pub fn request_is_complete(self: &Arc<Self>, request: Complete) -> Option<Storing> {
        if self.secure.as_ref().is_some_and(|secure| secure.http2) {
            return request.stores.then(|| {
                let mut storing = self.storing();
                storing.began += 1;
                let number = storing.began;
                storing.numbers.push(number);
                drop(storing);
                Storing { connection: Arc::clone(self), number }
            });
        }
        self.parks.store(request.parks, Ordering::Relaxed);
        self.set_phase(match request {
            Complete { stores: true, .. } => Phase::Finishing,
            Complete { interim: true, .. } => Phase::Asked,
            Complete { parks: true, .. } => Phase::Parked,
            _ => Phase::AskedOld,
        });
        None
    }

    pub(super) fn is_chunked(&self) -> bool {
        self.chunked.load(Ordering::Relaxed)
    }

    pub(super) fn phase(&self) -> Phase {
        // What is stored is one of them.
        Phase::ALL[usize::from(self.phase.load(Ordering::Relaxed)) % Phase::ALL.len()]
    }

    fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Bytes of a head that is not complete.
    pub(super) fn head_bytes(&self) -> usize {
        self.head_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn head_grew(&self, bytes: usize) {
        self.head_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether a complete request waits at a cell, and nothing of its answer has come.
    pub(super) fn is_parked(&self) -> bool {
        self.parks.load(Ordering::Relaxed)
            && !self.is_answering()
            && !matches!(self.phase(), Phase::Head | Phase::Receiving)
    }

    /// Whether the answer has begun.
    pub(super) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Relaxed)
    }

    /// The answer begins; interim ones are none.
    pub fn answers(&self) {
        self.answering.store(true, Ordering::Relaxed);
    }

    /// No other request can come.
    pub(super) fn ends(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Complete, Connection, Phase};
    use std::sync::Arc;

    #[test]
    fn every_phase_is_told_as_it_was_set() {
        let connection = Connection::default();
        assert_eq!(connection.phase(), Phase::Head);
        for phase in Phase::ALL {
            connection.set_phase(phase);
            assert_eq!(connection.phase(), phase);
        }
    }

    #[test]
    fn what_stores_goes_to_its_end_and_what_waits_is_given_up() {
        let of = |stores, parks, interim| {
            let connection = Arc::new(Connection::default());
            let _ = connection.request_is_complete(Complete { stores, parks, interim });
            connection.phase()
        };
        assert_eq!(of(true, false, true), Phase::Finishing);
        assert_eq!(of(true, false, false), Phase::Finishing);
        assert_eq!(of(false, true, true), Phase::Asked);
        assert_eq!(of(false, true, false), Phase::Parked);
        assert_eq!(of(false, false, false), Phase::AskedOld);
    }
}
