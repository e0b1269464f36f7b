//! A token bucket in one number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a bucket refills with, and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Tokens that come back in a second, at least 1.
    pub per_second: u32,
    /// Tokens of a full bucket, at least 1.
    pub burst: u32,
}

impl Rate {
    /// Nanoseconds for which one token is worth. Above a thousand million a second it is none: no limit.
    fn interval(self) -> u64 {
        1_000_000_000 / u64::from(self.per_second.max(1))
    }
}

/// The generic cell rate algorithm: the number is the instant at which the bucket will be full again, in
/// nanoseconds of the caller's clock. A new bucket is full.
#[derive(Debug, Default)]
pub(super) struct Bucket(AtomicU64);

impl Bucket {
    /// Takes a token at `now`, or says how long until there is one.
    pub(super) fn take(&self, now: Duration, rate: Rate) -> Result<(), Duration> {
        let mut full_at = self.0.load(Ordering::Relaxed);
        loop {
            let next = after_one(full_at, now, rate)?;
            match self.0.compare_exchange_weak(full_at, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(current) => full_at = current,
            }
        }
    }

    /// What [`Self::take`] would say, without taking.
    pub(super) fn peek(&self, now: Duration, rate: Rate) -> Result<(), Duration> {
        after_one(self.0.load(Ordering::Relaxed), now, rate).map(|_| ())
    }

    /// Whether it holds all it can, as a new one does.
    pub(super) fn is_full(&self, now: Duration) -> bool {
        self.0.load(Ordering::Relaxed) <= nanoseconds(now)
    }
}

/// When the bucket is full again after giving a token.
fn after_one(full_at: u64, now: Duration, rate: Rate) -> Result<u64, Duration> {
    let now = nanoseconds(now);
    let next = full_at.max(now).saturating_add(rate.interval());
    let latest = now.saturating_add(rate.interval().saturating_mul(u64::from(rate.burst.max(1))));
    if next > latest { Err(Duration::from_nanos(next - latest)) } else { Ok(next) }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 10, burst: 20 };

    fn taken(bucket: &Bucket, now: Duration, rate: Rate) -> usize {
        (0..100_000).take_while(|_| bucket.take(now, rate).is_ok()).count()
    }

    #[test]
    fn a_full_bucket_gives_its_burst_and_then_its_rate() {
        let bucket = Bucket::default();
        for (millis, expected) in [(5_000, 20), (5_000, 0), (5_099, 0), (5_100, 1), (6_100, 10), (60_000, 20)]
        {
            assert_eq!(taken(&bucket, Duration::from_millis(millis), RATE), expected, "at {millis} ms");
        }
    }

    #[test]
    fn a_refusal_says_how_long() {
        let (bucket, now) = (Bucket::default(), Duration::from_secs(1));
        assert_eq!(taken(&bucket, now, RATE), 20);
        assert_eq!(bucket.peek(now, RATE), Err(Duration::from_millis(100)));
        let later = now + Duration::from_millis(60);
        assert_eq!(bucket.take(later, RATE), Err(Duration::from_millis(40)));
        assert_eq!(bucket.peek(now + Duration::from_millis(100), RATE), Ok(()));
    }

    #[test]
    fn fullness() {
        let bucket = Bucket::default();
        assert!(bucket.is_full(Duration::ZERO));
        bucket.take(Duration::ZERO, RATE).unwrap();
        assert!(!bucket.is_full(Duration::from_millis(99)));
        assert!(bucket.is_full(Duration::from_millis(100)));
    }

    #[test]
    fn odd_rates() {
        for (per_second, burst, expected) in [(1, 1, 1), (3, 3, 3), (u32::MAX, 1, 100_000), (0, 0, 1)] {
            let bucket = Bucket::default();
            assert_eq!(taken(&bucket, Duration::from_secs(9), Rate { per_second, burst }), expected);
        }
    }

    #[test]
    fn many_takers_get_no_more_than_there_is() {
        let bucket = Bucket::default();
        let total: usize = std::thread::scope(|scope| {
            let takers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| taken(&bucket, Duration::from_secs(1), RATE))).collect();
            takers.into_iter().map(|taker| taker.join().unwrap()).sum()
        });
        assert_eq!(total, 20);
    }
}
