//! The one SQL entry: an operation array goes in as text, a result array comes out as text.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgDatabaseError, PgPool, PgPoolOptions, Postgres};
use tokio::time::timeout;
use uuid::Uuid;

use super::config::CellConfig;
use super::console::Page;
use super::errors::KvError;
use super::json::compact;
use super::request::Call;
use super::schema::connect_options;

/// Applies a call. Text casts on both sides keep every number as it was written.
const APPLY: &str = "SELECT queen.kv_apply_v1($2::text::jsonb, $1::uuid, NULL, false)::text";

/// The same under the limits of a bundle.
const BUNDLE: &str = "SELECT queen.kv_apply_v1($2::text::jsonb, $1::uuid, NULL, true)::text";

const LIST: &str = "SELECT queen.kv_list_v1($1::uuid, $2, $3, $4, $5, $6, $7)::text";

const NAMESPACES: &str = "SELECT queen.kv_namespaces_v1($1::uuid)::text";

const TERSE: &str = "SELECT set_config('log_error_verbosity', 'terse', false) \
                       FROM pg_roles WHERE rolname = current_user AND rolsuper";

/// Longest wait for a free connection.
pub(super) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// How much longer than the server's own statement timeout we wait before a connection counts as dead.
pub(super) const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Longest health check, from the request to its verdict.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection that rested longer is tested before use; testing all would double the round trips.
const TEST_AFTER_IDLE: Duration = Duration::from_secs(5);

/// What a tenant asks of the database.
#[derive(Debug)]
pub(super) enum Question {
    /// Operations of a key/value route.
    Apply(Call),
    /// Operations of a bundle.
    Bundle(Call),
    /// A page of a namespace.
    List(Page),
    /// All namespaces.
    Namespaces,
}

/// What a call came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The answer as compact JSON text; of operations, the array of their result elements.
    Results(String),
    /// A `required` operation lost and nothing was applied: compact text of the verdict (section 6.5).
    Lost(String),
}

/// Connections to the database of the cell.
#[derive(Debug, Clone)]
pub(super) struct Store {
    pool: PgPool,
    /// Health checks are open to strangers, so they may not take a connection from a KV call.
    health: PgPool,
    answer_timeout: Duration,
}

impl Store {
    /// Prepares the pools. Connections are made when they are first needed.
    pub(super) fn open(config: &CellConfig) -> Self {
        let options =
            connect_options(config).options([("statement_timeout", config.stmt_timeout_ms.to_string())]);
        let pool = PgPoolOptions::new()
            .max_connections(config.pool_size)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .test_before_acquire(false)
            .after_connect(|connection, _| {
                Box::pin(async move {
                    // A lost `required` carries key and value in the DETAIL of its error, which the server
                    // would log. Only a superuser may say so here; for others their role has to.
                    sqlx::query(TERSE).execute(connection).await?;
                    Ok(())
                })
            })
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for > TEST_AFTER_IDLE {
                        sqlx::Connection::ping(connection).await?;
                    }
                    Ok(true)
                })
            })
            .connect_lazy_with(options.clone());
        let health = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(HEALTH_TIMEOUT)
            .connect_lazy_with(options);
        Self { pool, health, answer_timeout: config.statement_timeout() + ANSWER_GRACE }
    }

    /// Asks for `tenant`. Operations apply all or none.
    ///
    /// The statement runs in a task of its own: a client that hangs up would otherwise leave a connection
    /// with half an answer on it, which the pool has to wait out.
    pub(super) async fn ask(&self, tenant: Uuid, question: Question) -> Result<Outcome, KvError> {
        let connection = self.pool.acquire().await.map_err(|error| self.refusal(&error))?;
        let run = run(connection, tenant, question, self.answer_timeout);
        tokio::spawn(run).await.map_err(|_| KvError::failed("kv_error"))?
    }

    /// Whether the database answers within two seconds.
    pub(super) async fn is_healthy(&self) -> bool {
        let probe = sqlx::query("SELECT 1").execute(&self.health);
        matches!(timeout(HEALTH_TIMEOUT, probe).await, Ok(Ok(_)))
    }

    /// Closes the pools, waiting for connections in use.
    pub(super) async fn close(&self) {
        tokio::join!(self.pool.close(), self.health.close());
    }

    /// Why no connection was to be had. A pool that ran into its time limit without being full was waiting
    /// for the server, not for other calls.
    fn refusal(&self, error: &sqlx::Error) -> KvError {
        let full = self.pool.size() >= self.pool.options().get_max_connections();
        match error {
            sqlx::Error::PoolTimedOut if full => KvError::unavailable("kv_pool_exhausted"),
            sqlx::Error::Database(_) => from_sqlx(error),
            _ => KvError::unavailable("connection"),
        }
    }
}

async fn run(
    mut connection: PoolConnection<Postgres>,
    tenant: Uuid,
    question: Question,
    limit: Duration,
) -> Result<Outcome, KvError> {
    match timeout(limit, execute(&mut connection, tenant, question)).await {
        Ok(Ok(Some(results))) => Ok(Outcome::Results(compact(results))),
        Ok(Ok(None)) => Err(KvError::failed("kv_result_missing")),
        Ok(Err(sqlx::Error::Database(error))) if error.code().as_deref() == Some("23514") => {
            let detail = error.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            Ok(Outcome::Lost(verdict(detail)))
        }
        Ok(Err(error)) => {
            if !matches!(error, sqlx::Error::Database(_)) {
                discard(connection);
            }
            Err(from_sqlx(&error))
        }
        Err(_) => {
            // The server did not even report its own timeout: nothing more will come on this socket.
            discard(connection);
            Err(KvError::unavailable("kv_timeout"))
        }
    }
}

async fn execute(
    connection: &mut PgConnection,
    tenant: Uuid,
    question: Question,
) -> Result<Option<String>, sqlx::Error> {
    let query = |statement| sqlx::query_scalar(statement).bind(tenant);
    match question {
        Question::Apply(call) => query(APPLY).bind(call.into_text()),
        Question::Bundle(call) => query(BUNDLE).bind(call.into_text()),
        Question::List(page) => query(LIST)
            .bind(page.namespace)
            .bind(page.prefix)
            .bind(page.after)
            .bind(page.limit)
            .bind(page.keys_only)
            .bind(page.include_expired),
        Question::Namespaces => query(NAMESPACES),
    }
    .fetch_one(connection)
    .await
}

/// Closes the socket without another word to the server.
fn discard(connection: PoolConnection<Postgres>) {
    drop(connection.detach());
}

fn from_sqlx(error: &sqlx::Error) -> KvError {
    match error {
        sqlx::Error::Database(error) => {
            let detail = error.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            KvError::from_sql(error.code().as_deref().unwrap_or_default(), error.message(), detail)
        }
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::PoolClosed => {
            KvError::unavailable("connection")
        }
        _ => KvError::failed("kv_result_unreadable"),
    }
}

/// The answer to a lost `required`, from the detail of the error. Members are spliced as text; a detail that
/// cannot be read leaves the bare verdict, and a `value` too large for it is simply not there.
fn verdict(detail: Option<&str>) -> String {
    const BARE: &str = r#"{"ok":false,"reason":"kv_precondition""#;
    let members: HashMap<String, &RawValue> =
        detail.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let mut text = BARE.to_owned();
    for (name, wire_name) in
        [("index", "failedIndex"), ("reason", "kvReason"), ("version", "version"), ("value", "value")]
    {
        if let Some(value) = members.get(name) {
            text.extend([",\"", wire_name, "\":", value.get()]);
        }
    }
    text.push('}');
    compact(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        for (detail, expected) in [
            (
                Some(
                    r#"{"op": "put", "ns": "n", "key": "k", "index": 2, "value": {"a": [1.50, null]}, "reason": "version", "version": 12}"#,
                ),
                r#"{"ok":false,"reason":"kv_precondition","failedIndex":2,"kvReason":"version","version":12,"value":{"a":[1.50,null]}}"#,
            ),
            (
                Some(r#"{"index": 0, "value": null, "reason": "absent", "version": 0}"#),
                r#"{"ok":false,"reason":"kv_precondition","failedIndex":0,"kvReason":"absent","version":0,"value":null}"#,
            ),
            (
                Some(r#"{"index": 0, "reason": "exists", "version": 5}"#),
                r#"{"ok":false,"reason":"kv_precondition","failedIndex":0,"kvReason":"exists","version":5}"#,
            ),
            (Some(r#"{"index": 0, "val"#), r#"{"ok":false,"reason":"kv_precondition"}"#),
            (None, r#"{"ok":false,"reason":"kv_precondition"}"#),
        ] {
            assert_eq!(verdict(detail), expected);
        }
    }
}
