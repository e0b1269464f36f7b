//! Boot: is the server fit, and does it have our objects?

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, raw_sql};
use tokio::time::timeout;

use super::config::CellConfig;
use super::errors::CellError;

/// Schema files in the order they are applied. Each may be run again at any time.
pub const CELL_SQL: [&str; 8] = [
    include_str!("../../migrations/cell/024_kv.sql"),
    include_str!("../../migrations/cell/024_kv_check.sql"),
    include_str!("../../migrations/cell/024_kv_apply.sql"),
    include_str!("../../migrations/cell/024_kv_group.sql"),
    include_str!("../../migrations/cell/024_kv_console.sql"),
    include_str!("../../migrations/cell/025_kv_switches.sql"),
    include_str!("../../migrations/cell/026_kv_sweep.sql"),
    include_str!("../../migrations/cell/027_kv_quota.sql"),
];

/// Oldest server, as `server_version_num`: exact `extract(epoch …)` came with 14.
const OLDEST_SERVER: i32 = 140_000;

/// Longest wait for the first connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Takes one cell at a time through the schema; the number is "queencel" in ASCII.
const LOCK: &str = "SELECT pg_advisory_xact_lock(8175552184879113580)";

/// Connection options shared by boot and pool: UTC (timestamps in results follow the session), the isolation
/// level the functions are written for, a name to find us by.
pub(super) fn connect_options(config: &CellConfig) -> PgConnectOptions {
    let mut options = PgConnectOptions::new_without_pgpass()
        .port(config.pg_port)
        .username(&config.pg_user)
        .database(&config.pg_db)
        .application_name("queen-cell")
        .options([
            ("TimeZone", "UTC"),
            ("default_transaction_isolation", "read committed"),
            ("client_min_messages", "warning"),
            // Whoever may create functions in another schema of the path could slip a better match for an
            // unqualified call under ours.
            ("search_path", "pg_catalog"),
        ])
        // Statements are constants, but a slow-statement warning would repeat the whole schema file.
        .disable_statement_logging();
    options = if config.pg_host.starts_with('/') {
        options.socket(&config.pg_host)
    } else {
        options.host(&config.pg_host)
    };
    // Set even when there is none: the driver would take PGPASSWORD, which is somebody else's.
    options.password(config.pg_password.as_ref().map_or("", |password| password.expose()))
}

/// Checks the server and applies the schema, all files in one transaction.
///
/// The connection is our own and dies with this future, so a boot that is cut short leaves nothing open.
pub(super) async fn prepare(config: &CellConfig) -> Result<(), CellError> {
    // Waiting behind another cell's boot or a long reader is fine, waiting for ever is not.
    let options = connect_options(config).options([("lock_timeout", "30s")]);
    let mut connection = timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options))
        .await
        .map_err(|_| CellError::ConnectTimeout)?
        .map_err(CellError::Connect)?;

    let (version, encoding): (i32, String) = sqlx::query_as(
        "SELECT current_setting('server_version_num')::int, current_setting('server_encoding')",
    )
    .fetch_one(&mut connection)
    .await
    .map_err(CellError::Schema)?;
    fit(version, &encoding)?;

    let mut transaction = connection.begin().await.map_err(CellError::Schema)?;
    sqlx::query(LOCK).execute(&mut *transaction).await.map_err(CellError::Schema)?;
    for file in CELL_SQL {
        raw_sql(file).execute(&mut *transaction).await.map_err(CellError::Schema)?;
    }
    transaction.commit().await.map_err(CellError::Schema)?;
    // The schema is in place; how the connection ends does not matter any more.
    let _ = connection.close().await;
    Ok(())
}

/// Whether a server of this version and encoding can hold the store. Prefix ranges step through Unicode
/// code points, which only UTF8 stores in that order.
fn fit(version: i32, encoding: &str) -> Result<(), CellError> {
    if version < OLDEST_SERVER {
        return Err(CellError::ServerTooOld { major: version / 10_000 });
    }
    if encoding != "UTF8" {
        return Err(CellError::ServerEncoding { found: encoding.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_fitness() {
        for (version, encoding, expected) in [
            (140_000, "UTF8", None),
            (180_001, "UTF8", None),
            (130_022, "UTF8", Some("PostgreSQL 13 is too old, 14 is the oldest that works")),
            (90_624, "UTF8", Some("PostgreSQL 9 is too old, 14 is the oldest that works")),
            (150_018, "LATIN1", Some("the database is encoded in LATIN1, the store needs UTF8")),
        ] {
            let found = fit(version, encoding).err().map(|error| error.to_string());
            assert_eq!(found.as_deref(), expected);
        }
    }
}
