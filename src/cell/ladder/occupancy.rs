//! How full a tenant is: the last measurement, and what this cell has let in since (KV contract, section 7.5).
//!
//! The figures are soft. A charge is an upper bound, other cells charge on their own, and a measurement may
//! be a sample. Blocking is fast, releasing waits for a measurement.

/// Rows and bytes of a tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Rows.
    pub rows: u64,
    /// Bytes of values.
    pub bytes: u64,
}

impl Usage {
    fn plus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_add(other.rows), bytes: self.bytes.saturating_add(other.bytes) }
    }

    fn minus(self, other: Self) -> Self {
        Self { rows: self.rows.saturating_sub(other.rows), bytes: self.bytes.saturating_sub(other.bytes) }
    }
}

/// Most that a tenant may have; `None` is no cap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Caps {
    pub rows: Option<u64>,
    pub bytes: Option<u64>,
}

/// A measurement and when the database took it; 0 is never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Measurement {
    pub usage: Usage,
    pub computed_at_ms: i64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Occupancy {
    measured: Measurement,
    /// Charges from before the last refresh that no measurement has seen.
    older: Usage,
    /// Charges since the last refresh.
    recent: Usage,
    rows_blocked: bool,
    bytes_blocked: bool,
}

impl Occupancy {
    /// Charges what a call may add; `false` when that is over a cap, and from then on until a refresh.
    /// Exactly the cap is allowed. What adds nothing always passes.
    pub(super) fn charge(&mut self, caps: Caps, charge: Usage) -> bool {
        let after = self.measured.usage.plus(self.older).plus(self.recent).plus(charge);
        let refuses = |blocked: &mut bool, adds: u64, after: u64, cap: Option<u64>| {
            *blocked |= adds > 0 && cap.is_some_and(|cap| after > cap);
            adds > 0 && *blocked
        };
        let rows = refuses(&mut self.rows_blocked, charge.rows, after.rows, caps.rows);
        let bytes = refuses(&mut self.bytes_blocked, charge.bytes, after.bytes, caps.bytes);
        if rows || bytes {
            return false;
        }
        self.recent = self.recent.plus(charge);
        true
    }

    /// Takes a charge back: nothing of the call was stored.
    pub(super) fn refund(&mut self, charge: Usage) {
        let owed = charge.minus(self.recent);
        self.recent = self.recent.minus(charge);
        self.older = self.older.minus(owed);
    }

    /// Takes over what a refresh found. A new measurement has seen what was charged before the last refresh;
    /// what was charged after it may be missing from it and stays.
    pub(super) fn refresh(&mut self, caps: Caps, measured: Measurement, release_percent: u8) {
        self.older = if measured.computed_at_ms == self.measured.computed_at_ms {
            self.older.plus(self.recent)
        } else {
            self.recent
        };
        self.recent = Usage::default();
        self.measured = measured;
        let stays = |blocked: bool, usage: u64, cap: Option<u64>| {
            cap.is_some_and(|cap| {
                let release_at = u128::from(cap) * u128::from(release_percent) / 100;
                usage > cap || (blocked && u128::from(usage) > release_at)
            })
        };
        self.rows_blocked = stays(self.rows_blocked, measured.usage.rows, caps.rows);
        self.bytes_blocked = stays(self.bytes_blocked, measured.usage.bytes, caps.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN_ROWS: Caps = Caps { rows: Some(10), bytes: None };

    fn rows(rows: u64) -> Usage {
        Usage { rows, bytes: 0 }
    }

    fn bytes(bytes: u64) -> Usage {
        Usage { rows: 0, bytes }
    }

    fn at(computed_at_ms: i64, usage: Usage) -> Measurement {
        Measurement { usage, computed_at_ms }
    }

    #[test]
    fn the_cap_itself_is_allowed_and_the_first_refusal_lasts() {
        let mut tenant = Occupancy::default();
        assert!(tenant.charge(TEN_ROWS, rows(10)));
        assert!(!tenant.charge(TEN_ROWS, rows(1)));
        // Room by refund does not end a block, and what adds nothing is never refused.
        tenant.refund(rows(5));
        assert!(!tenant.charge(TEN_ROWS, rows(1)));
        assert!(tenant.charge(TEN_ROWS, rows(0)));
        assert!(tenant.charge(TEN_ROWS, bytes(1_000_000)));
    }

    #[test]
    fn a_refusal_charges_nothing() {
        let mut tenant = Occupancy::default();
        let caps = Caps { rows: Some(10), bytes: Some(10) };
        assert!(!tenant.charge(caps, Usage { rows: 3, bytes: 11 }));
        assert!(tenant.charge(caps, rows(10)), "the three rows were not charged");
        assert!(!tenant.charge(caps, bytes(1)), "bytes are blocked");
    }

    #[test]
    fn release_is_by_measurement_alone_and_late() {
        for (measured, released) in [(11, false), (10, false), (9, true), (0, true)] {
            let mut tenant = Occupancy::default();
            assert!(!tenant.charge(TEN_ROWS, rows(11)));
            tenant.refresh(TEN_ROWS, at(1, rows(measured)), 90);
            assert_eq!(tenant.charge(TEN_ROWS, rows(1)), released, "{measured}");
        }
    }

    #[test]
    fn a_measurement_over_the_cap_blocks_and_one_at_it_does_not() {
        for (cap, measured, blocked) in [(10, 10, false), (10, 11, true), (0, 0, false), (0, 1, true)] {
            let mut tenant = Occupancy::default();
            let caps = Caps { rows: Some(cap), bytes: None };
            tenant.refresh(caps, at(1, rows(measured)), 90);
            assert_eq!(tenant.rows_blocked, blocked, "{measured} of {cap}");
        }
        let mut tenant = Occupancy::default();
        tenant.refresh(Caps::default(), at(1, Usage { rows: u64::MAX, bytes: u64::MAX }), 90);
        assert!(tenant.charge(Caps::default(), Usage { rows: 1, bytes: 1 }), "no cap, no block");
    }

    #[test]
    fn a_lifted_cap_releases_at_the_next_refresh() {
        let mut tenant = Occupancy::default();
        assert!(!tenant.charge(TEN_ROWS, rows(11)));
        tenant.refresh(Caps { rows: Some(100), bytes: None }, at(0, rows(0)), 90);
        assert!(tenant.charge(Caps { rows: Some(100), bytes: None }, rows(11)));
    }

    #[test]
    fn charges_last_until_a_measurement_has_seen_them() {
        let mut tenant = Occupancy::default();
        assert!(tenant.charge(TEN_ROWS, rows(8)));
        // The same measurement again: it knows nothing of the eight.
        tenant.refresh(TEN_ROWS, at(0, rows(0)), 90);
        assert!(!tenant.charge(TEN_ROWS, rows(3)));
        tenant.refresh(TEN_ROWS, at(0, rows(0)), 90);
        assert!(tenant.charge(TEN_ROWS, rows(2)));
        // A new one has seen the eight; the two came after the last refresh and still count.
        tenant.refresh(TEN_ROWS, at(1, rows(1)), 90);
        assert!(!tenant.charge(TEN_ROWS, rows(8)));
        tenant.refresh(TEN_ROWS, at(2, rows(1)), 90);
        assert!(tenant.charge(TEN_ROWS, rows(9)));
    }

    #[test]
    fn overwriting_for_ever_does_not_fill_a_tenant() {
        let mut tenant = Occupancy::default();
        for round in 1..100 {
            assert!(tenant.charge(TEN_ROWS, rows(4)), "round {round}");
            tenant.refresh(TEN_ROWS, at(round, rows(1)), 90);
        }
    }

    #[test]
    fn a_refund_reaches_charges_of_before_the_refresh_and_never_goes_below_zero() {
        let mut tenant = Occupancy::default();
        assert!(tenant.charge(TEN_ROWS, rows(6)));
        tenant.refresh(TEN_ROWS, at(0, rows(0)), 90);
        assert!(tenant.charge(TEN_ROWS, rows(2)));
        tenant.refund(rows(6));
        assert!(tenant.charge(TEN_ROWS, rows(8)));
        tenant.refund(rows(100));
        assert!(tenant.charge(TEN_ROWS, rows(10)));
    }
}
