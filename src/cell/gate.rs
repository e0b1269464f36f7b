//! The one question before anything is done for a tenant: may this call in? (KV contract, section 7)
//!
//! Routes ask `standalone`, also for the console, and `rider` for the operations of a transaction. What they
//! get back is told how the call ended.

use std::sync::Arc;

use uuid::Uuid;

use super::clock::Clock;
use super::demand::Demand;
use super::errors::KvError;
use super::ladder::{Ladder, Refusal, Usage};
use super::latch::Latch;
use super::metrics::{Metrics, Rejection};
use super::switches::Switches;

/// See the module.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) clock: Clock,
    pub(super) ladder: Ladder,
    pub(super) switches: Switches,
    /// Opened by checkouts that fail, closed by one that does not; stops standalone writes.
    pub(super) shed: Latch,
    pub(super) metrics: Arc<Metrics>,
}

impl Gate {
    /// Judges a call of the KV routes and of the console. A demand that is `Demand::default()` is a read.
    pub(super) fn standalone(self: &Arc<Self>, tenant: Uuid, demand: &Demand) -> Result<Admission, KvError> {
        let now = self.clock.now();
        // Asked twice: a write that the ladder turns away must not use up the probe.
        if demand.writes && self.switches.kv() && !self.shed.allows(now) {
            self.metrics.rejected(Rejection::Pool);
            return Err(KvError::Shed);
        }
        let admission = self.judge(tenant, demand, false)?;
        if demand.writes && !self.shed.admit(now) {
            self.metrics.rejected(Rejection::Pool);
            admission.refund();
            return Err(KvError::Shed);
        }
        Ok(admission)
    }

    /// Judges the KV operations of a transaction. They use the transaction's connection and are never shed;
    /// charge them once, for the whole bundle.
    pub(super) fn rider(self: &Arc<Self>, tenant: Uuid, demand: &Demand) -> Result<Admission, KvError> {
        self.judge(tenant, demand, true)
    }

    fn judge(
        self: &Arc<Self>,
        tenant: Uuid,
        demand: &Demand,
        in_transaction: bool,
    ) -> Result<Admission, KvError> {
        if !self.switches.kv() {
            self.metrics.rejected(Rejection::Disabled);
            return Err(KvError::Paused { in_transaction });
        }
        self.ladder.admit(tenant, demand, self.clock.now()).map_err(|refusal| {
            self.metrics.rejected(match refusal {
                Refusal::Rate(_) => Rejection::RateLimited,
                Refusal::NoRoom => Rejection::Pool,
                Refusal::NotGranted | Refusal::Full => Rejection::Quota,
            });
            KvError::Refused(refusal)
        })?;
        Ok(Admission { gate: Arc::clone(self), tenant, charge: demand.adds })
    }
}

/// A call that was let in. Dropped without a word, its charge stays: the client may have gone while the
/// database was still at it, and the next measurement will tell.
#[derive(Debug)]
#[must_use = "an admission wants to know whether anything was stored"]
pub(super) struct Admission {
    gate: Arc<Gate>,
    tenant: Uuid,
    charge: Usage,
}

impl Admission {
    /// Nothing of the call was stored, for certain.
    pub(super) fn refund(self) {
        self.gate.ladder.refund(self.tenant, self.charge);
    }

    /// Refunds when `error` says that nothing was stored.
    pub(super) fn failed(self, error: &KvError) {
        if !matches!(error, KvError::OutcomeUnknown { .. }) {
            self.refund();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::ladder::LadderSettings;
    use super::*;

    const TENANT: Uuid = Uuid::from_u128(7);

    fn gate() -> Arc<Gate> {
        Arc::new(Gate {
            clock: Clock::start(),
            ladder: Ladder::new(LadderSettings::default()),
            switches: Switches::default(),
            // No probe comes while a test runs.
            shed: Latch::new(5, Duration::from_secs(3600)),
            metrics: Arc::new(Metrics::new().unwrap()),
        })
    }

    fn write() -> Demand {
        let mut demand = Demand::default();
        demand.add("put", 1, false);
        demand
    }

    /// `standalone read, standalone write, rider write`, each as the name of its error.
    fn verdicts(gate: &Arc<Gate>) -> [String; 3] {
        let text = |verdict: Result<Admission, KvError>| {
            verdict.map_or_else(|error| format!("{error:?}"), |_| "ok".to_owned())
        };
        [
            text(gate.standalone(TENANT, &Demand::default())),
            text(gate.standalone(TENANT, &write())),
            text(gate.rider(TENANT, &write())),
        ]
    }

    #[test]
    fn shedding_stops_standalone_writes_alone() {
        let gate = gate();
        assert_eq!(verdicts(&gate), ["ok", "ok", "ok"]);
        (0..5).for_each(|_| _ = gate.shed.failed(gate.clock.now()));
        assert_eq!(verdicts(&gate), ["ok", "Shed", "ok"]);
        gate.shed.succeeded();
        assert_eq!(verdicts(&gate), ["ok", "ok", "ok"]);
    }

    #[test]
    fn the_switch_comes_before_everything_and_is_final_in_a_transaction() {
        let gate = gate();
        (0..5).for_each(|_| _ = gate.shed.failed(gate.clock.now()));
        gate.switches.decide([Some(false), None, None], gate.clock.now());
        let paused = "Paused { in_transaction: false }";
        assert_eq!(verdicts(&gate), [paused, paused, "Paused { in_transaction: true }"]);
    }
}
