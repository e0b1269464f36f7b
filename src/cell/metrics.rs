//! What the cell counts (KV contract, section 9.4). The names, and their units, are the contract's; those
//! that it does not know are marked.

use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use super::demand::{Demand, Op};
use super::ladder::Quota;
use super::recent::Recent;
use super::tally::Tally;

/// Tenants with series of their own: those with a quota first, then those nearest to a cap.
const MOST_TENANTS: usize = 1_000;

const QUANTILES: [(&str, f64); 2] = [("0.5", 0.5), ("0.99", 0.99)];

/// Parts of the sweeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Expire,
    Usage,
}

impl Phase {
    const ALL: [Self; 2] = [Self::Expire, Self::Usage];

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Expire => "kv_expire",
            Self::Usage => "usage",
        }
    }
}

/// Why a call was turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rejection {
    RateLimited,
    Quota,
    Pool,
    Disabled,
}

impl Rejection {
    const ALL: [Self; 4] = [Self::RateLimited, Self::Quota, Self::Pool, Self::Disabled];

    const fn label(self) -> &'static str {
        match self {
            Self::RateLimited => "rate_limited",
            Self::Quota => "quota",
            Self::Pool => "pool",
            Self::Disabled => "disabled",
        }
    }
}

/// Connections of calls, at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolState {
    pub size: usize,
    pub available: usize,
    pub waiting: usize,
}

/// How a call ended, for the counters.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallEnd<'a> {
    /// With results.
    Done(&'a Tally),
    /// A `required` operation lost: nothing was applied.
    Lost,
    /// With an error.
    Failed,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    ops: IntCounterVec,
    op_times: [Recent; Op::ALL.len()],
    op_quantiles: GaugeVec,
    bytes: IntCounterVec,
    rejected: IntCounterVec,
    pool: IntGaugeVec,
    enabled: IntGauge,
    unknown_outcomes: IntCounter,
    tenant_rows: IntGaugeVec,
    tenant_bytes: IntGaugeVec,
    tenant_ratio: GaugeVec,
    quota_success: Gauge,
    expired: IntGauge,
    expired_capped: IntGauge,
    expiry_lag: Gauge,
    cycle_times: [Recent; Phase::ALL.len()],
    cycle_quantiles: GaugeVec,
    sweeper_rows: IntCounterVec,
    sweeper_skipped: IntCounterVec,
    sweeper_failures: IntCounterVec,
    sweeper_success: GaugeVec,
    skip_locked: IntCounter,
    sweeper_sleep: Gauge,
    /// Gauges that are computed while rendering must not be computed twice at once.
    rendering: Mutex<()>,
}

impl Metrics {
    /// All series, at zero.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let r = Registry::new();
        let metrics = Self {
            ops: put(&r, counters("queen_kv_ops_total", "Operations of KV calls.", &["op", "result"]))?,
            op_times: std::array::from_fn(|_| Recent::default()),
            op_quantiles: put(
                &r,
                gauges(
                    "queen_kv_op_duration_milliseconds",
                    "Time of recent calls, divided by their operations.",
                    &["op", "quantile"],
                ),
            )?,
            bytes: put(&r, counters("queen_kv_bytes_total", "Bytes of values sent and returned.", &["dir"]))?,
            rejected: put(
                &r,
                counters("queen_kv_read_rejected_total", "Calls turned away, reads and writes.", &["reason"]),
            )?,
            pool: put(
                &r,
                int_gauges("queen_kv_pool", "Connections of KV calls to the database.", &["state"]),
            )?,
            enabled: put(&r, IntGauge::new("queen_kv_enabled", "Whether the kill switch is on (1) or not."))?,
            unknown_outcomes: put(
                &r,
                IntCounter::new("queen_kv_outcome_unknown_total", "Writes of which no answer came back."),
            )?,
            tenant_rows: put(&r, int_gauges("queen_kv_rows", "Live rows, as last measured.", &["tenant"]))?,
            tenant_bytes: put(
                &r,
                int_gauges("queen_kv_bytes", "Stored size of live values, as last measured.", &["tenant"]),
            )?,
            tenant_ratio: put(
                &r,
                gauges(
                    "queen_kv_quota_ratio",
                    "Greatest share of a cap that is used, as last measured.",
                    &["tenant", "kind"],
                ),
            )?,
            quota_success: put(
                &r,
                Gauge::new("queen_kv_quota_last_success_timestamp_seconds", "When quotas were last read."),
            )?,
            expired: put(
                &r,
                IntGauge::new("queen_kv_expired_not_pruned", "Expired rows left by the last prune."),
            )?,
            expired_capped: put(
                &r,
                IntGauge::new(
                    "queen_kv_expired_not_pruned_capped",
                    "Whether there were more than it counts.",
                ),
            )?,
            expiry_lag: put(
                &r,
                Gauge::new("queen_kv_expiry_lag_seconds", "How long the oldest of them has been expired."),
            )?,
            cycle_times: std::array::from_fn(|_| Recent::default()),
            cycle_quantiles: put(
                &r,
                gauges(
                    "queen_sweeper_cycle_milliseconds",
                    "Time of recent cycles of the sweeper.",
                    &["phase", "quantile"],
                ),
            )?,
            sweeper_rows: put(
                &r,
                counters("queen_sweeper_rows_total", "Rows pruned, and tenants measured.", &["phase"]),
            )?,
            sweeper_skipped: put(
                &r,
                counters(
                    "queen_sweeper_phase_skipped_total",
                    "Cycles left out because the phase is switched off.",
                    &["phase"],
                ),
            )?,
            sweeper_failures: put(
                &r,
                counters("queen_sweeper_failures_total", "Cycles that ended with an error.", &["phase"]),
            )?,
            sweeper_success: put(
                &r,
                gauges(
                    "queen_sweeper_last_success_timestamp_seconds",
                    "When a cycle last ended without an error.",
                    &["phase"],
                ),
            )?,
            skip_locked: put(
                &r,
                IntCounter::new(
                    "queen_sweeper_skip_locked_total",
                    "Expired rows left because they were locked.",
                ),
            )?,
            sweeper_sleep: put(
                &r,
                Gauge::new("queen_sweeper_sleep_milliseconds", "Pause before the next prune."),
            )?,
            rendering: Mutex::new(()),
            registry: r,
        };
        metrics.touch();
        Ok(metrics)
    }

    /// Brings every series of a closed set of labels into being.
    fn touch(&self) {
        for op in Op::ALL {
            for result in ["applied", "rejected", "error"] {
                self.ops.with_label_values(&[op.label(), result]);
            }
        }
        for dir in ["in", "out"] {
            self.bytes.with_label_values(&[dir]);
        }
        for reason in Rejection::ALL {
            self.rejected.with_label_values(&[reason.label()]);
        }
        for phase in Phase::ALL {
            self.sweeper_rows.with_label_values(&[phase.label()]);
            self.sweeper_skipped.with_label_values(&[phase.label()]);
            self.sweeper_failures.with_label_values(&[phase.label()]);
            self.sweeper_success.with_label_values(&[phase.label()]);
        }
        self.enabled.set(1);
    }

    /// Counts a call that was let in. A read counts as applied also when it finds nothing.
    pub(super) fn call(&self, demand: &Demand, end: CallEnd<'_>, took: Duration) {
        self.bytes.with_label_values(&["in"]).inc_by(demand.bytes_in);
        let each = took / u32::try_from(demand.ops.len()).unwrap_or(u32::MAX).max(1);
        for (position, op) in demand.ops.iter().enumerate() {
            let result = match end {
                CallEnd::Done(tally) if tally.rejected(position) => "rejected",
                CallEnd::Done(_) => "applied",
                CallEnd::Lost => "rejected",
                CallEnd::Failed => "error",
            };
            self.ops.with_label_values(&[op.label(), result]).inc();
            self.op_times[*op as usize].record(each);
        }
        if let CallEnd::Done(tally) = end {
            self.bytes.with_label_values(&["out"]).inc_by(tally.bytes_out);
        }
    }

    pub(super) fn rejected(&self, reason: Rejection) {
        self.rejected.with_label_values(&[reason.label()]).inc();
    }

    pub(super) fn outcome_unknown(&self) {
        self.unknown_outcomes.inc();
    }

    pub(super) fn switched(&self, enabled: bool) {
        self.enabled.set(enabled.into());
    }

    pub(super) fn quotas_read(&self) {
        self.quota_success.set(unix_seconds());
    }

    /// Rows removed, or tenants measured.
    pub(super) fn swept(&self, phase: Phase, rows: u64) {
        self.sweeper_rows.with_label_values(&[phase.label()]).inc_by(rows);
    }

    /// The end of a cycle that worked.
    pub(super) fn cycle(&self, phase: Phase, took: Duration) {
        self.sweeper_success.with_label_values(&[phase.label()]).set(unix_seconds());
        self.cycle_times[phase as usize].record(took);
    }

    pub(super) fn cycle_failed(&self, phase: Phase) {
        self.sweeper_failures.with_label_values(&[phase.label()]).inc();
    }

    pub(super) fn cycle_skipped(&self, phase: Phase) {
        self.sweeper_skipped.with_label_values(&[phase.label()]).inc();
    }

    /// What a prune left behind.
    pub(super) fn backlog(&self, rows: i64, capped: bool, lag: Duration) {
        self.expired.set(rows);
        self.expired_capped.set(capped.into());
        self.expiry_lag.set(lag.as_secs_f64());
    }

    pub(super) fn locked_rows(&self, rows: u64) {
        self.skip_locked.inc_by(rows);
    }

    pub(super) fn sweeper_sleeps(&self, pause: Duration) {
        self.sweeper_sleep.set(pause.as_secs_f64() * 1000.0);
    }

    /// Everything in the text format of Prometheus.
    pub(super) fn render(&self, pool: PoolState, quotas: &[Quota]) -> Result<String, prometheus::Error> {
        let _one = self.rendering.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for op in Op::ALL {
            quantiles(&self.op_quantiles, op.label(), &self.op_times[op as usize]);
        }
        for phase in Phase::ALL {
            quantiles(&self.cycle_quantiles, phase.label(), &self.cycle_times[phase as usize]);
        }
        for (state, count) in [("size", pool.size), ("available", pool.available), ("waiting", pool.waiting)]
        {
            self.pool.with_label_values(&[state]).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.tenant_rows.reset();
        self.tenant_bytes.reset();
        self.tenant_ratio.reset();
        for quota in quotas.iter().take(MOST_TENANTS) {
            let tenant = quota.tenant.to_string();
            let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            self.tenant_rows.with_label_values(&[&tenant]).set(count(quota.usage().rows));
            self.tenant_bytes.with_label_values(&[&tenant]).set(count(quota.usage().bytes));
            self.tenant_ratio.with_label_values(&[tenant.as_str(), "kv"]).set(quota.fill());
        }
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

fn put<C: Collector + Clone + 'static>(
    registry: &Registry,
    made: Result<C, prometheus::Error>,
) -> Result<C, prometheus::Error> {
    let collector = made?;
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

fn counters(name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(name, help), labels)
}

fn gauges(name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
    GaugeVec::new(Opts::new(name, help), labels)
}

fn int_gauges(name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
    IntGaugeVec::new(Opts::new(name, help), labels)
}

fn quantiles(gauges: &GaugeVec, label: &str, times: &Recent) {
    for ((name, _), value) in QUANTILES.iter().zip(times.quantiles(QUANTILES.map(|(_, share)| share))) {
        gauges.with_label_values(&[label, *name]).set(value);
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
