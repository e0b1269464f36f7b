//! Keeps an outage from filling the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Least time between two lines, unless another is asked for.
const INTERVAL: Duration = Duration::from_secs(1);

/// Lets one line a second through, or one in another interval, and counts the others.
#[derive(Debug)]
pub struct LogGate {
    interval: Duration,
    state: Mutex<State>,
}

impl Default for LogGate {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug)]
struct State {
    last: Option<Instant>,
    hidden: u64,
}

impl LogGate {
    /// An open gate.
    pub const fn new() -> Self {
        Self::every(INTERVAL)
    }

    /// An open gate for one line in each interval.
    pub const fn every(interval: Duration) -> Self {
        Self { interval, state: Mutex::new(State { last: None, hidden: 0 }) }
    }

    /// Whether a line may be written now, and how many were not since the one before.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| now.duration_since(last) < self.interval) {
            state.hidden += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second() {
        let gate = LogGate::default();
        let start = Instant::now();
        for (millis, expected) in [
            (0, Some(0)),
            (1, None),
            (999, None),
            (1000, Some(2)),
            (1500, None),
            (9000, Some(1)),
            (10_000, Some(0)),
        ] {
            let now = start + Duration::from_millis(millis);
            assert_eq!(gate.pass_at(now), expected, "{millis} ms");
        }
        let slower = LogGate::every(Duration::from_secs(60));
        for (second, expected) in [(0, Some(0)), (59, None), (60, Some(1))] {
            assert_eq!(slower.pass_at(start + Duration::from_secs(second)), expected, "{second} s");
        }
    }
}
