//! Who may do how much: the ladder of KV contract section 7.3, below its first rung.
//!
//! Decisions are made on what is in memory, before any connection is taken; a refresh brings in what an
//! operator configured and the sweeper measured. Time comes from the caller.

mod bucket;
mod occupancy;
mod quota;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use uuid::Uuid;

use self::bucket::Bucket;
pub use self::bucket::Rate;
use self::occupancy::Occupancy;
pub(super) use self::occupancy::Usage;
pub(super) use self::quota::Quota;
use super::demand::Demand;

/// What the ladder goes by (KV contract, section 12).
#[derive(Debug, Clone)]
pub struct LadderSettings {
    /// Whether a tenant without a row in `queen.kv_quota` is refused what makes its data grow
    /// (`QUEEN_KV_REQUIRE_GRANT`).
    pub require_grant: bool,
    /// Calls that only read, of one tenant, unless its quota says otherwise (`QUEEN_KV_READ_RATE`, `_BURST`).
    pub reads: Rate,
    /// Calls that write, likewise (`QUEEN_KV_WRITE_RATE`, `_BURST`).
    pub writes: Rate,
    /// Calls of all tenants together, also as the burst; 0 is no ceiling (`QUEEN_KV_CELL_RATE`).
    pub cell_rate: u32,
    /// Tenants without a row in the side tables that are known at a time; also the most rows a refresh reads
    /// (`QUEEN_KV_MAX_TENANTS`).
    pub max_tenants: u32,
    /// Time between two looks at the quotas (`QUEEN_KV_QUOTA_REFRESH_MS`).
    pub refresh_every: Duration,
    /// A blocked tenant is released at this share of its cap, 1 to 99 (`QUEEN_KV_QUOTA_RELEASE_PERCENT`).
    pub release_percent: u8,
    /// From this share of any cap on, usage is measured as often as quotas are looked at, 1 to 100
    /// (`QUEEN_KV_QUOTA_HOT_PERCENT`).
    pub hot_percent: u8,
}

impl Default for LadderSettings {
    fn default() -> Self {
        Self {
            require_grant: false,
            reads: Rate { per_second: 200, burst: 400 },
            writes: Rate { per_second: 100, burst: 200 },
            cell_rate: 2_000,
            max_tenants: 10_000,
            refresh_every: Duration::from_secs(30),
            release_percent: 90,
            hot_percent: 80,
        }
    }
}

/// Why the ladder refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Rung 2: no grant, or one that is switched off.
    NotGranted,
    /// Rung 2b: as many tenants are known as may be.
    NoRoom,
    /// Rung 3, with the time until the next token.
    Rate(Duration),
    /// Rung 4: the tenant's cap of rows or bytes.
    Full,
}

/// What is known of a tenant.
#[derive(Debug, Default)]
struct Standing {
    /// What the last refresh found of it, if anything.
    quota: Option<Quota>,
    reads: Bucket,
    writes: Bucket,
    occupancy: Occupancy,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Ladder {
    settings: LadderSettings,
    tenants: DashMap<Uuid, Standing>,
    /// Tenants in the map that the last refresh did not find.
    newcomers: AtomicUsize,
    cell: Bucket,
    hot: AtomicBool,
}

impl Ladder {
    pub(super) fn new(settings: LadderSettings) -> Self {
        Self {
            settings,
            tenants: DashMap::new(),
            newcomers: AtomicUsize::new(0),
            cell: Bucket::default(),
            hot: AtomicBool::new(false),
        }
    }

    /// Judges a call of `tenant` at `now`, outermost reason first. When it passes, a token is spent and
    /// `demand.adds` is charged.
    pub(super) fn admit(&self, tenant: Uuid, demand: &Demand, now: Duration) -> Result<(), Refusal> {
        if let Some(mut standing) = self.tenants.get_mut(&tenant) {
            return self.judge(&mut standing, demand, now);
        }
        match self.tenants.entry(tenant) {
            Entry::Occupied(mut standing) => self.judge(standing.get_mut(), demand, now),
            Entry::Vacant(place) => {
                self.check_grant(None, demand)?;
                let most = self.settings.max_tenants as usize;
                self.newcomers
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |known| {
                        (known < most).then_some(known + 1)
                    })
                    .map_err(|_| Refusal::NoRoom)?;
                self.judge(&mut place.insert(Standing::default()), demand, now)
            }
        }
    }

    fn judge(&self, standing: &mut Standing, demand: &Demand, now: Duration) -> Result<(), Refusal> {
        let quota = standing.quota.as_ref();
        self.check_grant(quota, demand)?;
        let (bucket, rate) = if demand.writes {
            (&standing.writes, quota.and_then(|quota| quota.writes).unwrap_or(self.settings.writes))
        } else {
            (&standing.reads, quota.and_then(|quota| quota.reads).unwrap_or(self.settings.reads))
        };
        // A tenant that is over its own rate takes nothing from the others.
        bucket.peek(now, rate).map_err(Refusal::Rate)?;
        if self.settings.cell_rate > 0 {
            let rate = Rate { per_second: self.settings.cell_rate, burst: self.settings.cell_rate };
            self.cell.take(now, rate).map_err(Refusal::Rate)?;
        }
        bucket.take(now, rate).map_err(Refusal::Rate)?;
        let caps = quota.map(|quota| quota.caps).unwrap_or_default();
        if standing.occupancy.charge(caps, demand.adds) { Ok(()) } else { Err(Refusal::Full) }
    }

    /// Rung 2. Reading and deleting need no grant: a tenant can always see its data and clean up.
    fn check_grant(&self, quota: Option<&Quota>, demand: &Demand) -> Result<(), Refusal> {
        let granted = match quota {
            Some(quota) => quota.enabled && (quota.granted || !self.settings.require_grant),
            None => !self.settings.require_grant,
        };
        if granted || !demand.grows { Ok(()) } else { Err(Refusal::NotGranted) }
    }

    /// Takes back what an admitted call was charged, when nothing of it was stored.
    pub(super) fn refund(&self, tenant: Uuid, charge: Usage) {
        if let Some(mut standing) = self.tenants.get_mut(&tenant) {
            standing.occupancy.refund(charge);
        }
    }

    /// Takes over the quotas and measurements of all tenants. Those that are not among them fall back to
    /// the cell's defaults, and are forgotten once nothing sets them apart from a tenant never seen.
    pub(super) fn refresh(&self, quotas: &[Quota], now: Duration) {
        let mut found: std::collections::HashSet<Uuid> = quotas.iter().map(|quota| quota.tenant).collect();
        for quota in quotas {
            let mut standing = self.tenants.entry(quota.tenant).or_default();
            standing.occupancy.refresh(quota.caps, quota.measured, self.settings.release_percent);
            standing.quota = Some(quota.clone());
        }
        let mut newcomers = 0;
        self.tenants.retain(|tenant, standing| {
            if found.remove(tenant) {
                return true;
            }
            standing.quota = None;
            standing.occupancy = Occupancy::default();
            let stays = !(standing.reads.is_full(now) && standing.writes.is_full(now));
            newcomers += usize::from(stays);
            stays
        });
        // One that came in between is missing from this count until the next refresh.
        self.newcomers.store(newcomers, Ordering::Relaxed);
        let hot = quotas.iter().any(|quota| quota.fill() * 100.0 >= f64::from(self.settings.hot_percent));
        self.hot.store(hot, Ordering::Relaxed);
    }

    /// Whether some tenant is near a cap.
    pub(super) fn is_hot(&self) -> bool {
        self.hot.load(Ordering::Relaxed)
    }
}
