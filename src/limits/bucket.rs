//! The token bucket of request and message rates (proxy contract §9.2, D8).
//!
//! A level is kept in billionths of a token: a rate of `r` tokens a second adds exactly `r` of them
//! each nanosecond, so no rounding ever adds up to anything.

use super::clock::{Nanos, SECOND};
use crate::domain::limits::Cap;

/// The least and the most seconds a client is asked to wait (contract: 1–60).
pub const MAX_RETRY_AFTER: u64 = 60;

/// A rate with its burst, as the plan says now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    /// Tokens a second; 0 denies everything.
    pub per_second: u64,
    /// Tokens that may be taken at once; 0 denies everything.
    pub burst: u64,
}

impl Rate {
    /// None when the rate is unlimited, whatever the burst. An unlimited burst is twice the rate;
    /// negative numbers are 0.
    pub fn of(rate: Cap, burst: Cap) -> Option<Self> {
        let Cap::At(per_second) = rate else {
            return None;
        };
        let per_second = u64::try_from(per_second).unwrap_or(0);
        let burst = match burst {
            Cap::Unlimited => per_second.saturating_mul(2),
            Cap::At(burst) => u64::try_from(burst).unwrap_or(0),
        };
        Some(Self { per_second, burst })
    }

    pub(super) fn capacity(self) -> i128 {
        tokens(self.burst)
    }

    /// One part of it when `parts` share it, rounded down, but never nothing where there is something.
    pub(super) fn part(self, parts: u64) -> Self {
        let part = |whole: u64| (whole / parts.max(1)).max(whole.min(1));
        Self { per_second: part(self.per_second), burst: part(self.burst) }
    }

    /// What a bucket at this level, in billionths of a token, says to a request for `n` tokens.
    pub(super) fn reading(self, level: i128, n: u64) -> Reading {
        let needed = self.needed(n);
        let never = self.per_second == 0 || self.burst == 0;
        let denied = n > 0 && (never || level < needed);
        let wait = if never { None } else { self.seconds_for(needed - level) };
        Reading {
            rate: self,
            left: clamp(level.div_euclid(i128::from(SECOND))),
            denied,
            unsettled: false,
            retry_after: wait.unwrap_or(u64::MAX).clamp(1, MAX_RETRY_AFTER),
            full_in: self.seconds_for(self.capacity() - level).unwrap_or(MAX_RETRY_AFTER),
        }
    }

    /// The level at which `n` tokens may be taken: a batch larger than the burst passes when the bucket is full.
    pub(super) fn needed(self, n: u64) -> i128 {
        tokens(n).min(self.capacity())
    }

    /// The deepest debt that deliveries make: a minute's refill.
    pub(super) fn deepest(self) -> i128 {
        (tokens(self.burst.min(1)) - tokens(self.per_second.saturating_mul(MAX_RETRY_AFTER))).min(0)
    }

    /// Whole seconds, rounded up, until `deficit` has been refilled; `None` when it never is.
    fn seconds_for(self, deficit: i128) -> Option<u64> {
        let a_second = tokens(self.per_second);
        if a_second == 0 {
            return None;
        }
        let seconds = deficit.max(0) / a_second + i128::from(deficit.max(0) % a_second > 0);
        Some(u64::try_from(seconds).unwrap_or(u64::MAX))
    }
}

/// What a bucket says to a request for some tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reading {
    /// The rate it was asked under.
    pub rate: Rate,
    /// Whole tokens left if the request is refused; less than 0 in debt.
    pub left: i64,
    /// The request does not pass now.
    pub denied: bool,
    /// It is not known yet whether it passes: the store of [`super::shared`] has to be asked.
    pub unsettled: bool,
    /// Seconds to wait, 1–60. Whoever waits that long passes if nobody else took anything, unless the
    /// answer is 60: a debt of a batch larger than the burst may take longer, and a rate of 0 never
    /// lets anything pass.
    pub retry_after: u64,
    /// Seconds until the bucket is full, which is never more than a client has to wait in the end.
    pub full_in: u64,
}

/// One bucket. It has no state until a rate first applies, and then starts full.
#[derive(Default, Debug)]
pub struct Bucket(Option<State>);

#[derive(Clone, Copy, Debug)]
struct State {
    rate: Rate,
    level: i128,
    at: Nanos,
}

impl Bucket {
    /// Whether `n` tokens may be taken now; takes none. 0 tokens are always free. More tokens than
    /// the burst pass when the bucket is full.
    pub fn check(&mut self, rate: Rate, now: Nanos, n: u64) -> Reading {
        rate.reading(self.level(rate, now), n)
    }

    /// Billionths of a token in it now.
    pub(super) fn level(&mut self, rate: Rate, now: Nanos) -> i128 {
        self.at(rate, now).level
    }

    /// A bucket of which it is known how much was in it at a time, in billionths of a token.
    pub(super) fn known(rate: Rate, level: i128, at: Nanos) -> Self {
        Self(Some(State { rate, level: level.min(rate.capacity()), at }))
    }

    /// Takes what a check allowed.
    pub fn take(&mut self, n: u64) {
        if let Some(state) = &mut self.0 {
            state.level -= tokens(n);
        }
    }

    /// Books `n` tokens that were spent already (deliveries). The debt this makes ends at a minute's
    /// refill: a consumer that catches up must not lock its producers out for hours, and a
    /// `Retry-After` stays true. A deeper debt, left by a large batch, stays as it is.
    pub fn debit(&mut self, rate: Rate, now: Nanos, n: u64) {
        let state = self.at(rate, now);
        let deepest = rate.deepest();
        if state.level > deepest {
            state.level = (state.level - tokens(n)).max(deepest);
        }
    }

    /// Brings the state up to now: what time has passed refills at the rate that was in force. Another
    /// rate applies from here on; a higher burst brings no tokens, a lower one takes them.
    fn at(&mut self, rate: Rate, now: Nanos) -> &mut State {
        let state = self.0.get_or_insert(State { rate, level: rate.capacity(), at: now });
        let passed = now.saturating_sub(state.at);
        let refill = i128::from(state.rate.per_second).saturating_mul(i128::from(passed));
        state.level = state.level.saturating_add(refill).min(state.rate.capacity()).min(rate.capacity());
        state.rate = rate;
        state.at = state.at.max(now);
        state
    }
}

/// Billionths of a token.
pub(super) fn tokens(n: u64) -> i128 {
    i128::from(n) * i128::from(SECOND)
}

fn clamp(n: i128) -> i64 {
    i64::try_from(n).unwrap_or(if n < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
#[path = "bucket_tests.rs"]
mod tests;
