//! Rows of `kv_quota_refresh_v1`.

use serde::Deserialize;
use uuid::Uuid;

use super::bucket::Rate;
use super::occupancy::{Caps, Measurement, Usage};

/// Configuration and measurement of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Whose.
    pub tenant: Uuid,
    /// Whether there is a row in `queen.kv_quota`; without one there is only a measurement.
    pub(super) granted: bool,
    pub(super) enabled: bool,
    pub(super) caps: Caps,
    pub(super) reads: Option<Rate>,
    pub(super) writes: Option<Rate>,
    pub(super) measured: Measurement,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    tenant: Uuid,
    granted: bool,
    enabled: bool,
    max_rows: Option<i64>,
    max_bytes: Option<i64>,
    max_reads_per_sec: Option<i64>,
    max_writes_per_sec: Option<i64>,
    kv_rows: i64,
    kv_bytes: i64,
    computed_at_ms: i64,
}

impl Quota {
    /// Reads the answer of `kv_quota_refresh_v1`.
    pub(crate) fn read(text: &str) -> Result<Vec<Self>, serde_json::Error> {
        let rows: Vec<Row> = serde_json::from_str(text)?;
        Ok(rows.into_iter().map(Self::from).collect())
    }

    /// What is measured.
    pub(crate) fn usage(&self) -> Usage {
        self.measured.usage
    }

    /// The greatest share of any cap that is used up; 0 without caps.
    pub(crate) fn fill(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a share of two figures")]
        let share = |used: u64, cap: Option<u64>| cap.map_or(0.0, |cap| used as f64 / cap.max(1) as f64);
        let usage = self.measured.usage;
        share(usage.rows, self.caps.rows).max(share(usage.bytes, self.caps.bytes))
    }
}

impl From<Row> for Quota {
    fn from(row: Row) -> Self {
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        // The contract knows only rates above 0; anything else leaves the cell's own. To shut a tenant out
        // there is `enabled`.
        let rate = |number: Option<i64>| {
            let number = u32::try_from(number?).ok().filter(|number| *number > 0)?;
            Some(Rate { per_second: number, burst: number })
        };
        Self {
            tenant: row.tenant,
            granted: row.granted,
            enabled: row.enabled,
            caps: Caps { rows: row.max_rows.map(count), bytes: row.max_bytes.map(count) },
            reads: rate(row.max_reads_per_sec),
            writes: rate(row.max_writes_per_sec),
            measured: Measurement {
                usage: Usage { rows: count(row.kv_rows), bytes: count(row.kv_bytes) },
                computed_at_ms: row.computed_at_ms,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(members: &str) -> Quota {
        let text = format!(
            r#"[{{"tenant":"00000000-0000-0000-0000-000000000007","granted":true,"enabled":true,
                "maxTimers":null,"maxHorizonS":null,"timerRows":0,"computedAtMs":5,{members}}}]"#
        );
        Quota::read(&text).unwrap().remove(0)
    }

    #[test]
    fn rows_as_sql_writes_them() {
        let quota = read(
            r#""maxRows":10,"maxBytes":null,"maxReadsPerSec":3,"maxWritesPerSec":0,"kvRows":4,"kvBytes":9"#,
        );
        assert_eq!(quota.tenant, Uuid::from_u128(7));
        assert_eq!(quota.caps, Caps { rows: Some(10), bytes: None });
        assert_eq!((quota.reads, quota.writes), (Some(Rate { per_second: 3, burst: 3 }), None));
        assert_eq!(quota.measured, Measurement { usage: Usage { rows: 4, bytes: 9 }, computed_at_ms: 5 });
        assert!(Quota::read("[]").unwrap().is_empty());
        assert!(Quota::read(r#"[{"tenant":"x"}]"#).is_err());
    }

    #[test]
    fn the_share_of_the_fuller_cap() {
        for (caps, used, expected) in [
            (r#""maxRows":10,"maxBytes":100"#, r#""kvRows":4,"kvBytes":90"#, 0.9),
            (r#""maxRows":10,"maxBytes":null"#, r#""kvRows":4,"kvBytes":90"#, 0.4),
            (r#""maxRows":null,"maxBytes":null"#, r#""kvRows":4,"kvBytes":90"#, 0.0),
            (r#""maxRows":0,"maxBytes":null"#, r#""kvRows":2,"kvBytes":0"#, 2.0),
            (r#""maxRows":-5,"maxBytes":null"#, r#""kvRows":0,"kvBytes":0"#, 0.0),
        ] {
            let quota = read(&format!(r#"{caps},"maxReadsPerSec":null,"maxWritesPerSec":-1,{used}"#));
            assert!((quota.fill() - expected).abs() < 1e-9, "{caps}: {}", quota.fill());
        }
    }
}
