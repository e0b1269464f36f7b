//! Stops asking for what keeps failing, and lets a probe through now and then so that it ends by itself.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Opens after a number of failures in a row, closes with the first success (KV contract, section 7.6 and
/// Q11).
#[derive(Debug)]
pub(super) struct Latch {
    after: u32,
    probe_every: Duration,
    failures: AtomicU32,
    /// When the next probe may go, in milliseconds of the caller's clock.
    probe_at: AtomicU64,
}

impl Latch {
    pub(super) fn new(after: u32, probe_every: Duration) -> Self {
        Self { after, probe_every, failures: AtomicU32::new(0), probe_at: AtomicU64::new(0) }
    }

    /// Whether an attempt would be allowed at `now`.
    pub(super) fn allows(&self, now: Duration) -> bool {
        self.failures.load(Ordering::Relaxed) < self.after
            || millis(now) >= self.probe_at.load(Ordering::Relaxed)
    }

    /// Allows an attempt at `now`. While the latch is open, that is one in each period.
    pub(super) fn admit(&self, now: Duration) -> bool {
        if self.failures.load(Ordering::Relaxed) < self.after {
            return true;
        }
        let next = millis(now + self.probe_every);
        self.probe_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| (millis(now) >= at).then_some(next))
            .is_ok()
    }

    /// An attempt failed at `now`. Returns whether that opened the latch.
    pub(super) fn failed(&self, now: Duration) -> bool {
        // Written before the count: whoever sees the latch open sees when to probe.
        self.probe_at.fetch_max(millis(now + self.probe_every), Ordering::Relaxed);
        self.failures.fetch_add(1, Ordering::Release).saturating_add(1) == self.after
    }

    /// An attempt succeeded. Returns whether that closed the latch.
    pub(super) fn succeeded(&self) -> bool {
        // Mostly there is nothing to reset; a read does not take the cache line from the other cores.
        self.failures.load(Ordering::Relaxed) > 0 && self.failures.swap(0, Ordering::Relaxed) >= self.after
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn latch() -> Latch {
        Latch::new(3, at(1000))
    }

    #[test]
    fn it_opens_at_the_last_failure_of_a_row() {
        let latch = latch();
        assert!(!latch.failed(at(1)) && !latch.failed(at(2)));
        assert!(latch.admit(at(3)) && latch.allows(at(3)));
        assert!(!latch.succeeded(), "it was not open");
        assert!(!latch.failed(at(4)) && !latch.failed(at(5)), "counted anew");
        assert!(latch.failed(at(6)));
        assert!(!latch.admit(at(7)) && !latch.allows(at(7)));
        assert!(!latch.failed(at(8)), "it was open");
    }

    #[test]
    fn one_probe_a_period_and_a_success_ends_it() {
        let latch = latch();
        (0..3).for_each(|_| _ = latch.failed(at(500)));
        for (now, expected) in [(1499, false), (1500, true), (1500, false), (2499, false), (2500, true)] {
            assert_eq!(latch.allows(at(now)), expected, "{now}");
            assert_eq!(latch.admit(at(now)), expected, "{now}");
        }
        // The probe failed late: the next one waits a whole period again.
        latch.failed(at(3400));
        assert!(!latch.admit(at(4399)));
        assert!(latch.admit(at(4400)));
        assert!(latch.succeeded());
        assert!((0..100).all(|_| latch.admit(at(4400))));
    }
}
