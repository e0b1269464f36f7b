//! Removes expired rows and measures tenants (KV contract, sections 9.1 to 9.3).
//!
//! Every cell does both, without a leader: the steps get out of each other's way in SQL. Each phase has a
//! task, a connection and a cadence of its own, so neither waits for the other, and the prune keeps its pace
//! when nobody writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::time::sleep;

use super::gate::Gate;
use super::line::{Line, LineError};
use super::metrics::Phase;

/// Number of shards, fixed for ever by the generated column.
const SHARDS: u16 = 64;

/// Pause between two steps of a cycle that has more to do, and least pause between two cycles.
const BREATH: Duration = Duration::from_millis(5);

/// Longest the measuring of all tenants may take: it reads the whole table.
pub(super) const USAGE_LIMIT: Duration = Duration::from_secs(300);

const EXPIRE: &str = "SELECT queen.kv_expire_step_v1($1, NULL, $2)::text";
const USAGE: &str = "SELECT queen.kv_usage_step_v1($1, NULL, $2)::text";

/// How the sweeper works (KV contract, section 12).
#[derive(Debug, Clone)]
pub struct SweeperSettings {
    /// Whether this cell sweeps; expired rows are invisible all the same (`QUEEN_SWEEPER`).
    pub enabled: bool,
    /// Time from the start of a prune to the start of the next (`QUEEN_KV_EXPIRE_EVERY_MS`).
    pub expire_every: Duration,
    /// Most rows that one step removes, at least 1 (`QUEEN_KV_EXPIRE_BATCH`).
    pub expire_batch: u32,
    /// Time between two measurements of all tenants; shorter while one is near a cap
    /// (`QUEEN_KV_USAGE_EVERY_MS`).
    pub usage_every: Duration,
}

impl Default for SweeperSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            expire_every: Duration::from_secs(1),
            expire_batch: 1_000,
            usage_every: Duration::from_secs(300),
        }
    }
}

/// Answer of `kv_expire_step_v1`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pruned {
    deleted: u64,
    done: bool,
    unpruned: u64,
    unpruned_capped: bool,
    lag_ms: u64,
}

impl Pruned {
    /// Whether another step would find anything to do. Without the second half a cell would turn in circles
    /// around rows that somebody holds.
    fn ends_the_cycle(&self) -> bool {
        self.done || self.deleted == 0
    }
}

/// Answer of `kv_usage_step_v1`, of which the figures themselves are read from the table.
#[derive(Debug, Deserialize)]
struct Measured {
    tenants: Vec<IgnoredAny>,
}

/// Whether a phase still runs. Objects or privileges that are missing switch it off for this process; the
/// other phase and serving go on.
#[derive(Debug)]
struct Health {
    phase: Phase,
    off: bool,
    failing: bool,
}

impl Health {
    fn new(phase: Phase) -> Self {
        Self { phase, off: false, failing: false }
    }

    fn worked(&mut self, gate: &Gate, took: Duration) {
        gate.metrics.cycle(self.phase, took);
        if std::mem::take(&mut self.failing) {
            tracing::info!(phase = self.phase.label(), "the sweeper works again");
        }
    }

    fn failed(&mut self, gate: &Gate, error: &LineError) {
        gate.metrics.cycle_failed(self.phase);
        let phase = self.phase.label();
        if error.is_permanent() {
            self.off = true;
            tracing::warn!(phase, %error, "this phase of the sweeper is off until the cell is started again");
        } else if !self.failing {
            self.failing = true;
            tracing::warn!(phase, %error, "the sweeper tries again until it works");
        }
    }
}

/// Prunes for ever.
pub(super) async fn prune(gate: Arc<Gate>, settings: SweeperSettings, mut line: Line) {
    let mut health = Health::new(Phase::Expire);
    // Cells that start together begin at different shards.
    let mut first = u16::from(uuid::Uuid::new_v4().as_bytes()[0]) % SHARDS;
    loop {
        let started = Instant::now();
        if health.off {
            gate.metrics.cycle_skipped(Phase::Expire);
        } else {
            let outcome = loop {
                let batch = i32::try_from(settings.expire_batch).unwrap_or(i32::MAX);
                first = (first + 1) % SHARDS;
                match ask::<Pruned>(&mut line, EXPIRE, shards_from(first), batch).await {
                    Ok(step) => {
                        gate.metrics.swept(Phase::Expire, step.deleted);
                        if step.ends_the_cycle() {
                            break Ok(step);
                        }
                    }
                    Err(error) => break Err(error),
                }
                sleep(BREATH).await;
            };
            match outcome {
                Ok(last) => {
                    let rows = i64::try_from(last.unpruned).unwrap_or(i64::MAX);
                    gate.metrics.backlog(rows, last.unpruned_capped, Duration::from_millis(last.lag_ms));
                    gate.metrics.locked_rows(last.unpruned);
                    health.worked(&gate, started.elapsed());
                }
                Err(error) => health.failed(&gate, &error),
            }
        }
        let pause = settings.expire_every.saturating_sub(started.elapsed()).max(BREATH);
        gate.metrics.sweeper_sleeps(pause);
        sleep(pause).await;
    }
}

/// Measures for ever, the first time at once.
pub(super) async fn measure(
    gate: Arc<Gate>,
    settings: SweeperSettings,
    refresh_every: Duration,
    mut line: Line,
) {
    let mut health = Health::new(Phase::Usage);
    loop {
        let started = Instant::now();
        if health.off {
            gate.metrics.cycle_skipped(Phase::Usage);
        } else {
            // The list of tenants in the answer is for people; the table is what counts.
            match ask::<Measured>(&mut line, USAGE, shards_from(0), 10_000).await {
                Ok(measured) => {
                    gate.metrics.swept(Phase::Usage, measured.tenants.len() as u64);
                    health.worked(&gate, started.elapsed());
                }
                Err(error) => health.failed(&gate, &error),
            }
        }
        // Looked at often, because a tenant may come near its cap in the middle of a pause.
        loop {
            let period = usage_period(&settings, refresh_every, gate.ladder.is_hot());
            let left = period.saturating_sub(started.elapsed());
            if left.is_zero() {
                break;
            }
            sleep(left.min(Duration::from_secs(1))).await;
        }
    }
}

/// Time between two measurements.
fn usage_period(settings: &SweeperSettings, refresh_every: Duration, hot: bool) -> Duration {
    if hot { settings.usage_every.min(refresh_every) } else { settings.usage_every }
}

/// All shards, beginning with `first`: the budget of a step goes to those in front.
fn shards_from(first: u16) -> Vec<i16> {
    (0..SHARDS).filter_map(|offset| i16::try_from((first + offset) % SHARDS).ok()).collect()
}

async fn ask<T: for<'a> Deserialize<'a>>(
    line: &mut Line,
    statement: &'static str,
    shards: Vec<i16>,
    most: i32,
) -> Result<T, LineError> {
    let text = line.ask(sqlx::query_scalar(statement).bind(shards).bind(most)).await?;
    serde_json::from_str(&text).map_err(|_| LineError::Unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_ends_when_nothing_is_left_or_nothing_moves() {
        for (deleted, done, ends) in
            [(1000, false, false), (1000, true, true), (0, false, true), (0, true, true), (1, false, false)]
        {
            let text = format!(
                r#"{{"deleted":{deleted},"done":{done},"unpruned":3,"unprunedCapped":false,"lagMs":1500,"now":"x"}}"#
            );
            let step: Pruned = serde_json::from_str(&text).unwrap();
            assert_eq!(step.ends_the_cycle(), ends, "{text}");
        }
    }

    #[test]
    fn every_shard_is_in_every_cycle() {
        for first in [0, 1, 63] {
            let mut shards = shards_from(first);
            assert_eq!(shards[0], i16::try_from(first).unwrap());
            shards.sort_unstable();
            assert_eq!(shards, (0..64).collect::<Vec<i16>>());
        }
    }

    #[test]
    fn a_tenant_near_its_cap_makes_measuring_more_frequent_but_never_less() {
        let settings =
            |every| SweeperSettings { usage_every: Duration::from_secs(every), ..SweeperSettings::default() };
        let refresh = Duration::from_secs(30);
        for (every, hot, expected) in [(300, false, 300), (300, true, 30), (10, true, 10)] {
            assert_eq!(usage_period(&settings(every), refresh, hot).as_secs(), expected);
        }
    }

    #[test]
    fn only_what_no_repetition_mends_switches_a_phase_off() {
        for (error, permanent) in [
            (LineError::Refused("42883".into()), true),
            (LineError::Refused("42501".into()), true),
            (LineError::Refused("25006".into()), false),
            (LineError::Refused("57P01".into()), false),
            (LineError::Refused("40P01".into()), false),
            (LineError::Lost, false),
            (LineError::Late(Duration::from_secs(1)), false),
        ] {
            assert_eq!(error.is_permanent(), permanent, "{error}");
        }
    }
}
