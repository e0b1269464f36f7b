//! The last hour in points, for the charts of `/status`.

use serde::Serialize;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Time between two points.
pub const EVERY: Duration = Duration::from_secs(10);
/// Points of an hour, and the one before.
const KEPT: usize = 361;
/// Points over which rates and quantiles "now" are taken: a minute.
const NOW: usize = 6;

/// What was counted since the start, and what stood, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Point {
    /// Seconds since the epoch.
    pub at_s: u64,
    /// Requests by [`crate::gateway::traffic::Outcome::ALL`].
    pub outcomes: [u64; 4],
    /// Requests that were refused or failed, by status and code.
    pub refusals: HashMap<(u16, &'static str), u64>,
    /// The proxy's own share of requests: how many took no longer than each bound in seconds.
    pub own: Vec<(f64, u64)>,
    /// Waiting pops.
    pub parked: u64,
    /// Requests whose answer has not ended.
    pub in_flight: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct History(Mutex<VecDeque<Point>>);

/// Columns of the charts: each value belongs to the time at its place.
#[derive(Debug, Default, Serialize)]
pub struct Series {
    at_s: Vec<u64>,
    answered: Vec<f64>,
    refused: Vec<f64>,
    failed: Vec<f64>,
    gone: Vec<f64>,
    own_p99_ms: Vec<Option<f64>>,
    parked: Vec<u64>,
    in_flight: Vec<u64>,
}

/// The last minute.
#[derive(Debug, Default, Serialize)]
pub struct Now {
    answered_per_s: f64,
    refused_per_s: f64,
    failed_per_s: f64,
    gone_per_s: f64,
    own_p50_ms: Option<f64>,
    own_p99_ms: Option<f64>,
}

/// How often something was refused, or failed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Refusals {
    status: u16,
    code: &'static str,
    last_minute: u64,
    last_hour: u64,
    since_start: u64,
}

impl History {
    /// Adds a point, and drops those that are too old.
    pub fn push(&self, point: Point) {
        let mut points = self.points();
        if points.len() == KEPT {
            points.pop_front();
        }
        points.push_back(point);
    }

    /// The charts.
    pub fn series(&self) -> Series {
        let points = self.points();
        let mut series = Series::default();
        for (older, newer) in points.iter().zip(points.iter().skip(1)) {
            let [answered, refused, failed, gone] = rates(older, newer);
            series.at_s.push(newer.at_s);
            series.answered.push(answered);
            series.refused.push(refused);
            series.failed.push(failed);
            series.gone.push(gone);
            series.own_p99_ms.push(quantile_ms(0.99, &older.own, &newer.own));
            series.parked.push(newer.parked);
            series.in_flight.push(newer.in_flight);
        }
        series
    }

    /// The last minute, up to `point`.
    pub fn now(&self, point: &Point) -> Now {
        let points = self.points();
        let Some(older) = back(&points, NOW) else { return Now::default() };
        let [answered_per_s, refused_per_s, failed_per_s, gone_per_s] = rates(older, point);
        let own_ms = |quantile| quantile_ms(quantile, &older.own, &point.own);
        Now {
            answered_per_s,
            refused_per_s,
            failed_per_s,
            gone_per_s,
            own_p50_ms: own_ms(0.5),
            own_p99_ms: own_ms(0.99),
        }
    }

    /// Refusals up to `point`, those of the last minute first.
    pub fn refusals(&self, point: &Point) -> Vec<Refusals> {
        let points = self.points();
        let since = |older: Option<&Point>, key: &(u16, &'static str), total: u64| {
            let before = older.and_then(|point| point.refusals.get(key)).copied().unwrap_or(0);
            total.saturating_sub(before)
        };
        let mut refusals: Vec<Refusals> = point
            .refusals
            .iter()
            .map(|(key, total)| Refusals {
                status: key.0,
                code: key.1,
                last_minute: since(back(&points, NOW), key, *total),
                last_hour: since(points.front(), key, *total),
                since_start: *total,
            })
            .collect();
        refusals.sort_by_key(|row| std::cmp::Reverse((row.last_minute, row.last_hour, row.since_start)));
        refusals
    }

    fn points(&self) -> std::sync::MutexGuard<'_, VecDeque<Point>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The point so many before the end, or the first.
fn back(points: &VecDeque<Point>, steps: usize) -> Option<&Point> {
    points.get(points.len().saturating_sub(steps))
}

#[allow(clippy::cast_precision_loss)] // exact up to 2^53
fn rates(older: &Point, newer: &Point) -> [f64; 4] {
    let seconds = newer.at_s.saturating_sub(older.at_s).max(1) as f64;
    std::array::from_fn(|at| newer.outcomes[at].saturating_sub(older.outcomes[at]) as f64 / seconds)
}

/// A quantile of what came between two states of a histogram, in milliseconds; none when nothing came. Within
/// a bucket it is taken for even, and beyond the last bound it is that bound.
#[allow(clippy::cast_precision_loss)] // as above
fn quantile_ms(quantile: f64, older: &[(f64, u64)], newer: &[(f64, u64)]) -> Option<f64> {
    let before = |at: usize| older.get(at).map_or(0, |(_, count)| *count);
    let counts: Vec<(f64, f64)> = newer
        .iter()
        .enumerate()
        .map(|(at, (bound, count))| (*bound, count.saturating_sub(before(at)) as f64))
        .collect();
    let all = counts.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
    let rank = quantile * all;
    let (mut lower_bound, mut lower_count) = (0.0, 0.0);
    for (bound, count) in counts {
        if count >= rank && count > lower_count {
            if bound.is_infinite() {
                break;
            }
            let share = (rank - lower_count) / (count - lower_count);
            return Some((lower_bound + (bound - lower_bound) * share) * 1e3);
        }
        if bound.is_finite() {
            lower_bound = bound;
        }
        lower_count = count;
    }
    Some(lower_bound * 1e3)
}

#[cfg(test)]
mod tests {
    use super::{History, KEPT, Point, quantile_ms};
    use std::collections::HashMap;

    fn point(at_s: u64, answered: u64, limited: u64) -> Point {
        Point {
            at_s,
            outcomes: [answered, limited, 0, 0],
            refusals: HashMap::from([((429, "rate_limited"), limited)]),
            ..Point::default()
        }
    }

    #[test]
    fn quantiles() {
        let newer = [(0.001, 50), (0.01, 90), (1.0, 100), (f64::INFINITY, 100)];
        for (quantile, expected) in [(0.5, 1.0), (0.25, 0.5), (0.9, 10.0), (0.95, 505.0), (1.0, 1000.0)] {
            let found = quantile_ms(quantile, &[], &newer).unwrap();
            assert!((found - expected).abs() < 1e-9, "{quantile}: {found}");
        }
        assert_eq!(quantile_ms(0.5, &newer, &newer), None);
        let beyond = [(0.001, 0), (1.0, 0), (f64::INFINITY, 7)];
        assert_eq!(quantile_ms(0.5, &[], &beyond), Some(1000.0));
    }

    #[test]
    fn an_hour_is_kept() {
        let history = History::default();
        for step in 0..(KEPT as u64 + 40) {
            history.push(point(step * 10, step * 20, step));
        }
        let series = history.series();
        assert_eq!(series.at_s.len(), KEPT - 1);
        assert!(series.answered.iter().all(|rate| (rate - 2.0).abs() < 1e-9));
        let last = KEPT as u64 + 40;
        let now = point(last * 10, last * 20, last + 100);
        let rates = history.now(&now);
        assert!((rates.answered_per_s - 2.0).abs() < 1e-9, "{rates:?}");
        let rows = history.refusals(&now);
        assert_eq!((rows[0].last_minute, rows[0].last_hour, rows[0].since_start), (106, 461, last + 100));
    }

    #[test]
    fn nothing_yet() {
        let history = History::default();
        assert!(history.now(&point(1, 1, 1)).answered_per_s.abs() < f64::EPSILON);
        assert_eq!(history.refusals(&point(1, 1, 1))[0].last_minute, 1);
        assert!(history.series().at_s.is_empty());
    }
}
