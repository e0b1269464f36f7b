//! What the limits say to one request: each with its numbers, so that the refusal, the log line of
//! the shadow mode and the `RateLimit` headers are made from one thing.

use super::bucket::Reading;
use std::fmt::Write;

/// The limits that one request meets, in the order in which one is named when several deny.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// `max_retained_bytes`: asked again here, since many bodies may have been on their way when the
    /// first look let them in.
    RetainedBytes,
    /// `max_req_per_sec`, `req_burst`.
    Requests,
    /// `max_payload_bytes`.
    PayloadBytes,
    /// `max_batch_items`.
    BatchItems,
    /// `max_retention_seconds`.
    Retention,
    /// `max_queues`.
    Queues,
    /// `max_partitions_per_queue`.
    Partitions,
    /// `max_msgs_per_sec`, `msgs_burst`.
    Messages,
    /// `max_parked_pops`.
    Parked,
    /// The cell's own cap on waiting pops.
    CellParked,
}

impl Limit {
    const COUNT: usize = Self::CellParked as usize + 1;

    /// The word for it in logs and metrics.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::RetainedBytes => "storage",
            Self::Requests => "req",
            Self::PayloadBytes => "payload",
            Self::BatchItems => "batch",
            Self::Retention => "retention",
            Self::Queues => "queues",
            Self::Partitions => "partitions",
            Self::Messages => "msgs",
            Self::Parked => "parked",
            Self::CellParked => "cell_parked",
        }
    }

    /// Whether it refuses in shadow mode too.
    pub const fn is_hard(self) -> bool {
        matches!(self, Self::RetainedBytes | Self::PayloadBytes | Self::BatchItems)
    }
}

/// Whether would-be refusals refuse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// They do.
    Enforce,
    /// Only the hard ones do.
    Shadow,
}

/// One limit that applies to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Which.
    pub limit: Limit,
    /// The cap; of a rate its burst.
    pub max: u64,
    /// What stands against it: bytes, items, seconds, queues, partitions, waiting pops; of a rate the
    /// tokens that are gone.
    pub used: u64,
    /// The request is over it.
    pub denied: bool,
    /// Seconds after which to try again, 1–60; only where waiting helps.
    pub retry_after: Option<u64>,
    /// Which message, pair or retention of the request it is about.
    pub index: Option<usize>,
    /// For a rate, seconds until nothing is used.
    pub reset: u64,
    /// For a rate, seconds it takes to refill the whole burst.
    pub window: u64,
}

impl Outcome {
    pub(super) fn plain(limit: Limit, max: u64, used: u64, denied: bool) -> Self {
        Self { limit, max, used, denied, retry_after: None, index: None, reset: 0, window: 0 }
    }

    pub(super) fn of_rate(limit: Limit, reading: Reading) -> Self {
        let max = reading.rate.burst;
        Self {
            limit,
            max,
            used: max.saturating_sub(u64::try_from(reading.left).unwrap_or(0)),
            denied: reading.denied,
            retry_after: reading.denied.then_some(reading.retry_after),
            index: None,
            reset: reading.full_in,
            window: max.div_ceil(reading.rate.per_second.max(1)),
        }
    }
}

/// Every limit that applies to a request, with what it says.
#[derive(Clone, Copy, Default, Debug)]
pub struct Decision([Option<Outcome>; Limit::COUNT]);

impl Decision {
    pub(super) fn set(&mut self, outcome: Outcome) {
        self.0[outcome.limit as usize] = Some(outcome);
    }

    /// The limits that apply, in order.
    pub fn outcomes(&self) -> impl Iterator<Item = &Outcome> {
        self.0.iter().flatten()
    }

    /// One of them.
    pub fn outcome(&self, limit: Limit) -> Option<&Outcome> {
        self.0[limit as usize].as_ref()
    }

    /// Those that the request is over.
    pub fn denials(&self) -> impl Iterator<Item = &Outcome> {
        self.outcomes().filter(|outcome| outcome.denied)
    }

    /// The one to answer with, if the request is refused: the first; for waiting, as long as the
    /// longest wait among those that waiting helps.
    pub fn refusal(&self, mode: Mode) -> Option<Outcome> {
        let refuses = |outcome: &&Outcome| mode == Mode::Enforce || outcome.limit.is_hard();
        let mut first = *self.denials().find(refuses)?;
        if first.retry_after.is_some() {
            first.retry_after = self.denials().filter_map(|outcome| outcome.retry_after).max();
        }
        Some(first)
    }

    /// `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers): all rates as
    /// policies, and of the rates the one with the smallest part left. None without rates.
    pub fn headers(&self) -> Option<(String, String)> {
        let rates = [(Limit::Requests, "requests"), (Limit::Messages, "messages")];
        let rates = rates.into_iter().filter_map(|(limit, name)| Some((name, self.outcome(limit)?)));
        let mut policies = String::with_capacity(64);
        for (name, rate) in rates.clone() {
            let comma = if policies.is_empty() { "" } else { ", " };
            let _ = write!(policies, "{comma}\"{name}\";q={};w={}", sf(rate.max), sf(rate.window.max(1)));
        }
        let left = |rate: &Outcome| rate.max.saturating_sub(rate.used);
        let part_left = |rate: &Outcome| (u128::from(left(rate)) << 32) / u128::from(rate.max.max(1));
        let (name, tightest) = rates.min_by_key(|(_, rate)| part_left(rate))?;
        let limit = format!("\"{name}\";r={};t={}", sf(left(tightest)), sf(tightest.reset));
        Some((policies, limit))
    }
}

/// An integer of structured fields has 15 digits at most.
fn sf(n: u64) -> u64 {
    n.min(999_999_999_999_999)
}

#[cfg(test)]
mod tests {
    use super::{Decision, Limit, Mode, Outcome};

    fn rate(limit: Limit, max: u64, used: u64, retry_after: Option<u64>) -> Outcome {
        let (reset, window, index) = (3, 5, None);
        Outcome { limit, max, used, denied: retry_after.is_some(), retry_after, index, reset, window }
    }

    #[test]
    fn the_first_denial_answers_and_soft_ones_only_when_enforcing() {
        let mut decision = Decision::default();
        assert_eq!(decision.refusal(Mode::Enforce), None);
        decision.set(Outcome::plain(Limit::Queues, 5, 5, true));
        decision.set(Outcome::plain(Limit::Partitions, 5, 5, false));
        assert_eq!(decision.refusal(Mode::Enforce).map(|o| o.limit), Some(Limit::Queues));
        assert_eq!(decision.refusal(Mode::Shadow), None);
        decision.set(Outcome::plain(Limit::BatchItems, 5, 6, true));
        decision.set(rate(Limit::Requests, 10, 10, None));
        for mode in [Mode::Enforce, Mode::Shadow] {
            assert_eq!(decision.refusal(mode).map(|o| o.limit), Some(Limit::BatchItems));
        }
        assert_eq!(decision.denials().count(), 2);
    }

    #[test]
    fn of_several_waits_the_longest_is_told() {
        let mut decision = Decision::default();
        decision.set(rate(Limit::Requests, 10, 10, Some(1)));
        decision.set(rate(Limit::Messages, 10, 30, Some(20)));
        let refusal = decision.refusal(Mode::Enforce).unwrap();
        assert_eq!((refusal.limit, refusal.retry_after), (Limit::Requests, Some(20)));
    }

    #[test]
    fn the_headers_name_the_tightest_rate() {
        let mut decision = Decision::default();
        assert_eq!(decision.headers(), None);
        decision.set(Outcome::plain(Limit::Queues, 5, 5, true));
        assert_eq!(decision.headers(), None, "only rates");
        decision.set(rate(Limit::Requests, 25, 5, None));
        let headers = decision.headers().unwrap();
        assert_eq!(headers, (r#""requests";q=25;w=5"#.into(), r#""requests";r=20;t=3"#.into()));
        decision.set(rate(Limit::Messages, u64::MAX, u64::MAX / 2, None));
        let headers = decision.headers().unwrap();
        assert_eq!(headers.0, r#""requests";q=25;w=5, "messages";q=999999999999999;w=5"#);
        assert_eq!(headers.1, r#""messages";r=999999999999999;t=3"#);
        decision.set(rate(Limit::Messages, 0, 0, Some(60)));
        assert_eq!(decision.headers().unwrap().1, r#""messages";r=0;t=3"#, "nothing is less than a part");
    }
}
