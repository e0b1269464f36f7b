//! Quantiles of the last durations.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Durations kept.
const SIZE: usize = 512;

/// The last 512 durations. Recording is two atomic operations; sorting is left to whoever asks.
#[derive(Debug)]
pub(super) struct Recent {
    /// Microseconds, at least 1; 0 is a place not used yet.
    samples: Box<[AtomicU32]>,
    next: AtomicUsize,
}

impl Default for Recent {
    fn default() -> Self {
        Self { samples: (0..SIZE).map(|_| AtomicU32::new(0)).collect(), next: AtomicUsize::new(0) }
    }
}

impl Recent {
    pub(super) fn record(&self, duration: Duration) {
        let micros = u32::try_from(duration.as_micros()).unwrap_or(u32::MAX).max(1);
        let place = self.next.fetch_add(1, Ordering::Relaxed) % SIZE;
        self.samples[place].store(micros, Ordering::Relaxed);
    }

    /// Milliseconds at each share; zeros while nothing was recorded.
    pub(super) fn quantiles<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let mut known: Vec<u32> =
            self.samples.iter().map(|sample| sample.load(Ordering::Relaxed)).filter(|s| *s > 0).collect();
        known.sort_unstable();
        shares.map(|share| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "at most 512"
            )]
            let rank = (known.len() as f64 * share).ceil() as usize;
            known.get(rank.saturating_sub(1)).map_or(0.0, |micros| f64::from(*micros) / 1000.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole milliseconds at one half and at 99 percent.
    fn quantiles(millis: impl Iterator<Item = u64>) -> [String; 2] {
        let recent = Recent::default();
        millis.for_each(|millis| recent.record(Duration::from_millis(millis)));
        recent.quantiles([0.5, 0.99]).map(|found| found.to_string())
    }

    #[test]
    fn nearest_ranks() {
        for (millis, expected) in [
            (vec![], ["0", "0"]),
            (vec![7], ["7", "7"]),
            (vec![9, 1], ["1", "9"]),
            ((1..=100).rev().collect(), ["50", "99"]),
        ] {
            assert_eq!(quantiles(millis.into_iter()), expected);
        }
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let (old, new) = (std::iter::repeat_n(1000, SIZE), std::iter::repeat_n(1, SIZE));
        assert_eq!(quantiles(old.chain(new)), ["1", "1"]);
    }
}
