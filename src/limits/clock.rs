//! Time for the limiters: nanoseconds since some start, never going back.

use std::time::Instant;

/// Nanoseconds since the clock's start; 64 bits last for 584 years.
pub type Nanos = u64;

/// Nanoseconds of a second.
pub const SECOND: Nanos = 1_000_000_000;

/// Where the limiters read the time.
pub trait Clock: Send + Sync {
    /// Now. Never less than an earlier answer.
    fn now(&self) -> Nanos;
}

/// The machine's monotonic clock. Copies tell the same time.
#[derive(Clone, Copy, Debug)]
pub struct Monotonic(Instant);

impl Default for Monotonic {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Monotonic {
    fn now(&self) -> Nanos {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }
}

/// A clock that stands still until it is moved: for tests and benches.
#[derive(Debug, Default)]
pub struct Manual(std::sync::atomic::AtomicU64);

impl Manual {
    /// Moves the time on.
    pub fn advance(&self, nanos: Nanos) {
        self.0.fetch_add(nanos, std::sync::atomic::Ordering::SeqCst);
    }
}

impl Clock for Manual {
    fn now(&self) -> Nanos {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
}

impl<C: Clock> Clock for std::sync::Arc<C> {
    fn now(&self) -> Nanos {
        (**self).now()
    }
}
