//! Time since the cell started. What decides by time takes it as an argument, so that tests can set it.

use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now(self) -> Duration {
        self.0.elapsed()
    }
}
