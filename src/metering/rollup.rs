//! The hourly pass: days from minutes, old minutes away, and who has used up the month.

use super::metrics::Metrics;
use crate::{
    control::{ControlPlane, now_s, store::StoreError},
    domain::ids::ClusterId,
};
use arc_swap::ArcSwap;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::sleep;

/// After a pass that failed, unless passes are due more often.
const AGAIN: Duration = Duration::from_secs(60);
/// After midnight, when a month may begin: a moment for clocks that differ.
const MIDNIGHT_SLACK_S: u64 = 2;
const DAY_S: u64 = 86_400;

/// The clusters whose pushes are blocked until the month ends or the quota is raised. Reading is wait-free. As
/// many ids as there are such clusters in the control plane.
#[derive(Debug, Default)]
pub struct MonthlyBlocks(ArcSwap<HashSet<ClusterId>>);

impl MonthlyBlocks {
    /// Whether a cluster has used up its monthly quota.
    pub fn is_blocked(&self, cluster: ClusterId) -> bool {
        self.0.load().contains(&cluster)
    }

    /// How many have.
    pub fn len(&self) -> usize {
        self.0.load().len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn replace(&self, blocked: HashSet<ClusterId>) {
        let before = self.0.load_full();
        for cluster in blocked.difference(&before) {
            tracing::warn!(%cluster, "limits: blocked, the monthly quota is used up");
        }
        for cluster in before.difference(&blocked) {
            tracing::info!(%cluster, "limits: the monthly block is lifted");
        }
        self.0.store(Arc::new(blocked));
    }
}

/// One proxy's part in the pass.
pub struct RollUp {
    control: ControlPlane,
    keep_days: i32,
    warn_percent: i32,
    blocks: Arc<MonthlyBlocks>,
    metrics: Arc<Metrics>,
}

impl RollUp {
    /// `keep_days` is how long minutes are kept, `warn_percent` at how much of the quota a warning is due.
    pub fn new(
        control: ControlPlane,
        keep_days: i32,
        warn_percent: i32,
        blocks: Arc<MonthlyBlocks>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { control, keep_days, warn_percent, blocks, metrics }
    }

    /// Rolls up and prunes, unless another proxy is doing it, and learns which clusters are blocked. A part that
    /// fails changes nothing.
    pub async fn pass(&self) -> Result<(), StoreError> {
        let maintained = self.maintain().await;
        let checked = self.check().await;
        if maintained.is_err() || checked.is_err() {
            self.metrics.change(|numbers| numbers.rollup_failures += 1);
        }
        maintained.and(checked)
    }

    async fn maintain(&self) -> Result<(), StoreError> {
        match self.control.maintain_usage(self.keep_days).await? {
            Some(done) => {
                tracing::debug!(done.rolled, done.pruned, done.swept, "meter: usage rolled up");
                self.metrics.change(|numbers| numbers.rollup_last_success_s = now_s());
            }
            None => tracing::debug!("meter: another proxy is rolling up"),
        }
        Ok(())
    }

    async fn check(&self) -> Result<(), StoreError> {
        let over = self.control.over_monthly_quota(self.warn_percent).await?;
        self.blocks.replace(over.into_iter().collect());
        self.metrics.change(|numbers| numbers.clusters_blocked = self.blocks.len() as u64);
        Ok(())
    }

    /// A pass at once, every `every`, and after each midnight (UTC): a block does not outlive its month.
    pub(super) async fn run(self, every: Duration) {
        loop {
            let pause = match self.pass().await {
                Ok(()) => every.min(until_midnight(now_s())),
                Err(error) => {
                    tracing::warn!(%error, "meter: roll-up or monthly check failed");
                    every.min(AGAIN)
                }
            };
            sleep(pause).await;
        }
    }
}

fn until_midnight(now_s: u64) -> Duration {
    Duration::from_secs(DAY_S - now_s % DAY_S + MIDNIGHT_SLACK_S)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn the_next_midnight() {
        for (now_s, expected) in [(0, 86_402), (1, 86_401), (86_399, 3), (86_400, 86_402), (86_401, 86_401)] {
            assert_eq!(until_midnight(now_s), Duration::from_secs(expected), "{now_s}");
        }
    }

    #[test]
    fn blocks_are_replaced_as_a_whole() {
        let blocks = MonthlyBlocks::default();
        let [one, two] = [1, 2].map(|number| ClusterId(Uuid::from_u128(number)));
        assert!(blocks.is_empty() && !blocks.is_blocked(one));
        blocks.replace(HashSet::from([one]));
        assert!(blocks.is_blocked(one) && !blocks.is_blocked(two));
        blocks.replace(HashSet::from([two]));
        assert!(!blocks.is_blocked(one) && blocks.is_blocked(two));
        assert_eq!(blocks.len(), 1);
    }
}
