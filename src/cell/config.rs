//! What a cell is told at boot. Reading it from the environment or a file is the business of `crate::config`.

use std::time::Duration;

use super::errors::CellError;
use super::ladder::LadderSettings;
use super::sweeper::SweeperSettings;
use crate::domain::secret::Secret;
use crate::telemetry::log::LogSettings;

/// Settings of one cell (KV contract, section 12, and D16).
#[derive(Debug, Clone)]
pub struct CellConfig {
    /// Host name or address of the database server; a leading `/` means a socket directory (`PG_HOST`).
    pub pg_host: String,
    /// Port of the database server (`PG_PORT`).
    pub pg_port: u16,
    /// Role to log in as; it must be allowed to create the schema (`PG_USER`).
    pub pg_user: String,
    /// Password of that role, if the server asks for one (`PG_PASSWORD`).
    pub pg_password: Option<Secret>,
    /// Database (`PG_DB`).
    pub pg_db: String,
    /// Address to listen on (`HOST`).
    pub host: String,
    /// Port to listen on; 0 lets the system choose (`PORT`).
    pub port: u16,
    /// Whether `x-queen-tenant` names the tenant of a request (`QUEEN_TENANCY_HEADER`).
    pub tenancy_header: bool,
    /// The operator's word that something in front sets that header and removes the client's own
    /// (`QUEEN_KV_TRUSTED_PROXY`). The first flag without this one is refused at boot.
    pub kv_trusted_proxy: bool,
    /// What requests must carry as bearer token; `None` lets everybody in (`QUEEN_CELL_SECRET`).
    pub cell_secret: Option<Secret>,
    /// Connections to the database, at least 1; the number of KV calls that run at once (`DB_POOL_SIZE`).
    pub pool_size: u32,
    /// Most calls of one operation that share a commit when they wait together, 1 to 256; 1 gives each its own
    /// (`QUEEN_KV_GROUP_CALLS`).
    pub group_calls: u32,
    /// Longest run of one statement in milliseconds, 1 to 2147483647 (`QUEEN_STMT_TIMEOUT_MS`).
    pub stmt_timeout_ms: u64,
    /// Largest request body in bytes (`QUEEN_MAX_BODY_BYTES`).
    pub max_body_bytes: usize,
    /// Largest value in bytes of compact JSON; SQL has a ceiling of its own at 65536 bytes of stored text,
    /// so only lower figures have an effect (`QUEEN_KV_MAX_VALUE_BYTES`).
    pub kv_max_value_bytes: usize,
    /// Most operations in a call; SQL stops at 256 (`QUEEN_KV_MAX_OPS_PER_CALL`).
    pub kv_max_ops_per_call: usize,
    /// Most keys in a call, counting `getMany` and `getPrefix` by size; SQL stops at 4096
    /// (`QUEEN_KV_MAX_KEYS_PER_CALL`).
    pub kv_max_keys_per_call: usize,
    /// Refusals of writes without a connection, in a row, after which writes are shed, at least 1
    /// (`QUEEN_KV_STANDALONE_SHED_AFTER`).
    pub shed_after: u32,
    /// Grants, rates and quotas.
    pub ladder: LadderSettings,
    /// Removing what has expired, and measuring.
    pub sweeper: SweeperSettings,
    /// The log.
    pub log: LogSettings,
}

impl CellConfig {
    /// Refuses combinations a cell must not start with (section 7.2).
    pub(super) fn check(&self) -> Result<(), CellError> {
        if self.tenancy_header && !self.kv_trusted_proxy {
            return Err(CellError::UntrustedTenancy);
        }
        // An empty secret would be matched by an empty token.
        if self.cell_secret.as_ref().is_some_and(|secret| secret.expose().is_empty()) {
            return Err(CellError::Setting("QUEEN_CELL_SECRET is set but empty"));
        }
        if self.pool_size == 0 {
            return Err(CellError::Setting("DB_POOL_SIZE must be at least 1"));
        }
        if !(1..=256).contains(&self.group_calls) {
            return Err(CellError::Setting("QUEEN_KV_GROUP_CALLS must be from 1 to 256"));
        }
        if self.stmt_timeout_ms == 0 || self.stmt_timeout_ms > 2_147_483_647 {
            return Err(CellError::Setting("QUEEN_STMT_TIMEOUT_MS must be from 1 to 2147483647"));
        }
        Ok(())
    }

    /// Statement timeout as a duration.
    pub(super) fn statement_timeout(&self) -> Duration {
        Duration::from_millis(self.stmt_timeout_ms)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A cell with the contract's defaults, on a database nobody connects to.
    pub fn example() -> CellConfig {
        CellConfig {
            pg_host: "localhost".into(),
            pg_port: 5432,
            pg_user: "queen".into(),
            pg_password: Some(Secret::new("pg-password")),
            pg_db: "queen".into(),
            host: "127.0.0.1".into(),
            port: 0,
            tenancy_header: false,
            kv_trusted_proxy: false,
            cell_secret: Some(Secret::new("cell-secret")),
            pool_size: 16,
            group_calls: 32,
            stmt_timeout_ms: 30_000,
            max_body_bytes: 64 * 1024 * 1024,
            kv_max_value_bytes: 65_536,
            kv_max_ops_per_call: 256,
            kv_max_keys_per_call: 1024,
            shed_after: 5,
            ladder: LadderSettings::default(),
            sweeper: SweeperSettings::default(),
            log: LogSettings::default(),
        }
    }

    #[test]
    fn refusals_at_boot() {
        type Change = fn(&mut CellConfig);
        let cases: [(&str, Change, bool); 9] = [
            ("defaults", |_| (), true),
            ("tenancy alone", |c| c.tenancy_header = true, false),
            ("trusted alone", |c| c.kv_trusted_proxy = true, true),
            ("both", |c| (c.tenancy_header, c.kv_trusted_proxy) = (true, true), true),
            ("empty secret", |c| c.cell_secret = Some(Secret::new("")), false),
            ("no pool", |c| c.pool_size = 0, false),
            ("no group", |c| c.group_calls = 0, false),
            ("a group too large", |c| c.group_calls = 257, false),
            ("no statement timeout", |c| c.stmt_timeout_ms = 0, false),
        ];
        for (name, change, accepted) in cases {
            let mut config = example();
            change(&mut config);
            assert_eq!(config.check().is_ok(), accepted, "{name}");
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let text = format!("{:?}", example());
        assert!(!text.contains("pg-password") && !text.contains("cell-secret"), "{text}");
    }
}
