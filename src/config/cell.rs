//! The cell's settings (KV contract §12).

use super::source::{ConfigError, Shown, Source};
use crate::cell::{CellConfig, LadderSettings, Rate, SweeperSettings};
use std::{path::Path, time::Duration};

const PREFIX: &str = "QUEEN_";

/// Reads the settings of `queen-cell serve` and what `check` prints of them.
pub fn load(
    environment: impl IntoIterator<Item = (String, String)>,
    file: Option<&Path>,
) -> Result<(CellConfig, Vec<Shown>), ConfigError> {
    let mut s = Source::new(PREFIX, environment, file);
    // KV has connections of its own beside the broker's; their number is its concurrency.
    let broker_pool = s.number("DB_POOL_SIZE", 160u32, 1..=10_000);
    let config = CellConfig {
        pg_host: s.text("PG_HOST", "localhost", false),
        pg_port: s.number("PG_PORT", 5432, 1..=u16::MAX),
        pg_user: s.text("PG_USER", "postgres", false),
        pg_password: s.secret("PG_PASSWORD", "PG_PASSWORD_FILE"),
        pg_db: s.text("PG_DB", "postgres", false),
        host: s.text("HOST", "0.0.0.0", false),
        port: s.number("PORT", 6632, 1..=u16::MAX),
        tenancy_header: s.flag("QUEEN_TENANCY_HEADER", false),
        kv_trusted_proxy: s.flag("QUEEN_KV_TRUSTED_PROXY", false),
        cell_secret: s.secret("QUEEN_CELL_SECRET", "QUEEN_CELL_SECRET_FILE"),
        pool_size: s.number("QUEEN_KV_POOL_SIZE", (broker_pool / 10).clamp(4, 32), 1..=1_000),
        group_calls: s.number("QUEEN_KV_GROUP_CALLS", 32, 1..=256),
        stmt_timeout_ms: s.number("QUEEN_STMT_TIMEOUT_MS", 30_000, 1..=3_600_000),
        max_body_bytes: s.number("QUEEN_MAX_BODY_BYTES", 64 << 20, 1..=1 << 30),
        kv_max_value_bytes: s.number("QUEEN_KV_MAX_VALUE_BYTES", 65_536, 1..=1 << 30),
        kv_max_ops_per_call: s.number("QUEEN_KV_MAX_OPS_PER_CALL", 256, 1..=1 << 20),
        log: super::logging(&mut s),
        kv_max_keys_per_call: s.number("QUEEN_KV_MAX_KEYS_PER_CALL", 1_024, 1..=1 << 20),
        shed_after: s.number("QUEEN_KV_STANDALONE_SHED_AFTER", 5, 1..=1_000_000),
        ladder: LadderSettings {
            require_grant: s.flag("QUEEN_KV_REQUIRE_GRANT", false),
            reads: Rate {
                per_second: s.number("QUEEN_KV_READ_RATE", 200, 1..=1_000_000),
                burst: s.number("QUEEN_KV_READ_BURST", 400, 1..=1_000_000),
            },
            writes: Rate {
                per_second: s.number("QUEEN_KV_WRITE_RATE", 100, 1..=1_000_000),
                burst: s.number("QUEEN_KV_WRITE_BURST", 200, 1..=1_000_000),
            },
            cell_rate: s.number("QUEEN_KV_CELL_RATE", 2_000, 0..=1_000_000),
            max_tenants: s.number("QUEEN_KV_MAX_TENANTS", 10_000, 1..=1_000_000),
            refresh_every: millis(&mut s, "QUEEN_KV_QUOTA_REFRESH_MS", 30_000, 1_000),
            release_percent: s.number("QUEEN_KV_QUOTA_RELEASE_PERCENT", 90, 1..=99),
            hot_percent: s.number("QUEEN_KV_QUOTA_HOT_PERCENT", 80, 1..=100),
        },
        sweeper: SweeperSettings {
            enabled: s.flag("QUEEN_SWEEPER", true),
            expire_every: millis(&mut s, "QUEEN_KV_EXPIRE_EVERY_MS", 1_000, 10),
            expire_batch: s.number("QUEEN_KV_EXPIRE_BATCH", 1_000, 1..=100_000),
            usage_every: millis(&mut s, "QUEEN_KV_USAGE_EVERY_MS", 300_000, 1_000),
        },
    };
    if config.tenancy_header && !config.kv_trusted_proxy {
        s.refuse(
            "QUEEN_TENANCY_HEADER: needs QUEEN_KV_TRUSTED_PROXY, which says that something in front \
             sets x-queen-tenant and removes the client's",
        );
    }
    Ok((config, s.finish()?))
}

/// A time in milliseconds, from `least` to a day.
fn millis(s: &mut Source, name: &'static str, default: u64, least: u64) -> Duration {
    Duration::from_millis(s.number(name, default, least..=86_400_000))
}
