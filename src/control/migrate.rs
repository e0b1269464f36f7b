//! Applies `migrations/control/` (proxy contract §1).

use super::store::{StoreError, connect_options, within};
use crate::config::proxy::PxdbConfig;
use sqlx::{Connection, Executor, PgConnection};
use std::time::Duration;

/// Each file once, in this order. A file that was applied is never read again: change by adding one.
const FILES: [(&str, &str); 7] = [
    ("001_init", include_str!("../../migrations/control/001_init.sql")),
    ("002_functions", include_str!("../../migrations/control/002_functions.sql")),
    ("003_bootstrap", include_str!("../../migrations/control/003_bootstrap.sql")),
    ("004_sessions", include_str!("../../migrations/control/004_sessions.sql")),
    ("005_usage", include_str!("../../migrations/control/005_usage.sql")),
    ("006_delete_tenant", include_str!("../../migrations/control/006_delete_tenant.sql")),
    ("007_metering", include_str!("../../migrations/control/007_metering.sql")),
];

/// The advisory lock under which one process at a time migrates (`queen_px` in hexadecimal).
const LOCK: i64 = 0x7175_6565_6e5f_7078;
/// How long a proxy waits for another one's migration, and for its own.
const LIMIT: Duration = Duration::from_secs(60);

/// Why the schema is not ready.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// No connection, or no answer.
    #[error(transparent)]
    Database(#[from] StoreError),
    /// A file failed; nothing of it was kept.
    #[error("migration {name} failed: {message}")]
    File {
        /// The file.
        name: &'static str,
        /// What PostgreSQL said; the files hold no secrets.
        message: String,
    },
}

/// Brings the schema up to date and returns the names it applied. A database that is up to date is
/// only read, so that a role without DDL rights can start.
pub async fn migrate(config: &PxdbConfig) -> Result<Vec<&'static str>, MigrateError> {
    let options = connect_options(config, "queen-proxy-migrate");
    let mut connection = within(config.timeout, PgConnection::connect_with(&options)).await?;
    if pending(&mut connection).await?.is_empty() {
        return Ok(Vec::new());
    }
    within(LIMIT, connection.execute("SET statement_timeout = 0")).await?;
    let lock = sqlx::query("SELECT pg_advisory_lock($1)").bind(LOCK);
    within(LIMIT, lock.execute(&mut connection)).await?;
    let mut applied = Vec::new();
    // Asked again under the lock: another proxy may just have done it.
    for (name, text) in pending(&mut connection).await? {
        // One message is one transaction on the server, so no cancelled future can leave it open.
        let file = format!(
            "BEGIN;\n{text}\n;INSERT INTO queen_proxy.schema_migrations (name) VALUES ('{name}');\nCOMMIT;"
        );
        let run = sqlx::raw_sql(sqlx::AssertSqlSafe(file)).execute(&mut connection);
        match tokio::time::timeout(LIMIT, run).await {
            Ok(Ok(_)) => applied.push(name),
            Ok(Err(sqlx::Error::Database(error))) => {
                return Err(MigrateError::File { name, message: error.message().to_owned() });
            }
            Ok(Err(error)) => return Err(StoreError::from(error).into()),
            Err(_) => return Err(StoreError::Silent(LIMIT).into()),
        }
    }
    // Closing the connection gives the lock back.
    let _ = connection.close().await;
    Ok(applied)
}

async fn pending(connection: &mut PgConnection) -> Result<Vec<(&'static str, &'static str)>, StoreError> {
    let there = "SELECT to_regclass('queen_proxy.schema_migrations') IS NOT NULL";
    let there: bool = within(LIMIT, sqlx::query_scalar(there).fetch_one(&mut *connection)).await?;
    let applied: Vec<String> = if there {
        let names = sqlx::query_scalar("SELECT name FROM queen_proxy.schema_migrations");
        within(LIMIT, names.fetch_all(connection)).await?
    } else {
        Vec::new()
    };
    Ok(FILES.into_iter().filter(|(name, _)| !applied.iter().any(|done| done == name)).collect())
}

#[cfg(test)]
mod tests {
    use super::FILES;

    #[test]
    fn names_are_unique_and_ordered() {
        assert!(FILES.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
