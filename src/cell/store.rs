//! The one SQL entry: an operation array goes in as text, a result array comes out as text.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::postgres::{PgConnection, PgDatabaseError, PgPool, PgPoolOptions};
use tokio::time::timeout;
use uuid::Uuid;

use super::config::CellConfig;
use super::console::Page;
use super::demand::Demand;
use super::errors::KvError;
use super::gate::Gate;
use super::json::compact;
use super::lanes::Lanes;
use super::metrics::PoolState;
use super::pool::{CallPool, Checkout};
use super::request::Call;
use super::schema::connect_options;

/// Applies a call. Text casts on both sides keep every number as it was written.
const APPLY: &str = "SELECT queen.kv_apply_v1($2::text::jsonb, $1::uuid, NULL, false)::text";

/// The same under the limits of a bundle.
const BUNDLE: &str = "SELECT queen.kv_apply_v1($2::text::jsonb, $1::uuid, NULL, true)::text";

const LIST: &str = "SELECT queen.kv_list_v1($1::uuid, $2, $3, $4, $5, $6, $7)::text";

const NAMESPACES: &str = "SELECT queen.kv_namespaces_v1($1::uuid)::text";

/// How much longer than the server's own statement timeout we wait before a connection counts as dead.
pub(super) const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Longest health check, from the request to its verdict.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

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

impl Question {
    /// What it asks for; the console reads. Nothing when asked again.
    pub(super) fn take_demand(&mut self) -> Demand {
        match self {
            Self::Apply(call) | Self::Bundle(call) => call.take_demand(),
            Self::List(_) | Self::Namespaces => Demand::default(),
        }
    }
}

/// What a call came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The answer as compact JSON text; of operations, the array of their result elements.
    Results(String),
    /// A `required` operation lost and nothing was applied: compact text of the verdict (section 6.5).
    Lost(String),
}

/// What a call risks when no answer comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// It only reads: then nothing has happened.
    None,
    /// It writes; whether it may be done twice is said with it.
    Writes { once_only: bool },
}

impl Effect {
    /// What a call risks that asks for `demand`.
    pub(super) fn of(demand: &Demand) -> Self {
        if demand.writes { Self::Writes { once_only: demand.once_only } } else { Self::None }
    }
}

/// Connections to the database of the cell.
#[derive(Debug, Clone)]
pub(super) struct Store {
    pool: CallPool,
    /// Where calls share a commit; `None` when each has its own.
    lanes: Option<Lanes>,
    /// Health checks are open to strangers, so they may not take a connection from a KV call.
    health: PgPool,
    answer_timeout: Duration,
}

impl Store {
    /// Prepares the pools. Connections are made when they are first needed.
    pub(super) fn open(config: &CellConfig, gate: Arc<Gate>) -> Self {
        let options =
            connect_options(config).options([("statement_timeout", config.stmt_timeout_ms.to_string())]);
        let health = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(HEALTH_TIMEOUT)
            .connect_lazy_with(options.clone());
        let answer_timeout = config.statement_timeout() + ANSWER_GRACE;
        let pool = CallPool::new(options, config.pool_size, gate);
        let lanes =
            (config.group_calls > 1).then(|| Lanes::new(&pool, config.group_calls as usize, answer_timeout));
        Self { pool, lanes, health, answer_timeout }
    }

    /// Asks for `tenant`. Operations apply all or none.
    ///
    /// The statement runs in a task of its own: a client that hangs up would otherwise leave a connection
    /// with half an answer on it, which the pool has to wait out.
    pub(super) async fn ask(
        &self,
        tenant: Uuid,
        question: Question,
        demand: &Demand,
    ) -> Result<Outcome, KvError> {
        let effect = Effect::of(demand);
        let question = match (question, &self.lanes) {
            (Question::Apply(call), Some(lanes)) => match lanes.ask(tenant, call, demand).await {
                Ok(outcome) => return outcome,
                Err(call) => Question::Apply(call),
            },
            (question, _) => question,
        };
        let checkout = self.pool.checkout().await?;
        let run = run(checkout, tenant, question, effect, self.answer_timeout);
        tokio::spawn(run).await.map_err(|_| KvError::failed("kv_error"))?
    }

    /// Whether the database answers within two seconds.
    pub(super) async fn is_healthy(&self) -> bool {
        let probe = sqlx::query("SELECT 1").execute(&self.health);
        matches!(timeout(HEALTH_TIMEOUT, probe).await, Ok(Ok(_)))
    }

    /// For the gauges.
    pub(super) fn state(&self) -> PoolState {
        let mut state = self.pool.state();
        state.waiting += self.lanes.as_ref().map_or(0, Lanes::waiting);
        state
    }

    /// Closes the pools, waiting for connections in use.
    pub(super) async fn close(&self) {
        tokio::join!(self.pool.close(), self.health.close());
    }
}

pub(super) async fn run(
    mut checkout: Checkout,
    tenant: Uuid,
    question: Question,
    effect: Effect,
    limit: Duration,
) -> Result<Outcome, KvError> {
    match timeout(limit, execute(checkout.connection(), tenant, question)).await {
        Ok(Ok(Some(results))) => Ok(Outcome::Results(compact(results))),
        Ok(Ok(None)) => Err(KvError::failed("kv_result_missing")),
        Ok(Err(sqlx::Error::Database(error))) if error.code().as_deref() == Some("23514") => {
            let detail = error.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            Ok(Outcome::Lost(verdict(detail)))
        }
        Ok(Err(error)) => {
            if ends_the_session(&error) {
                checkout.discard();
            }
            Err(from_sqlx(&error, effect))
        }
        Err(_) => {
            // The server did not even report its own time limit: nothing more will come on this socket.
            checkout.discard();
            Err(silence("kv_timeout", effect))
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

/// Whether a connection is of no use after this error. A session stays read-only although its database takes
/// writes again, which only a new one finds out.
pub(super) fn ends_the_session(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            error.code().is_some_and(|code| code.starts_with("57P") || code == "25006")
        }
        _ => true,
    }
}

/// No answer came, and what was sent may have been carried out.
pub(super) fn silence(reason: &'static str, effect: Effect) -> KvError {
    match effect {
        Effect::None => KvError::unavailable(reason),
        Effect::Writes { once_only } => KvError::OutcomeUnknown { once_only },
    }
}

/// An error that the server reports is one of before the commit, so nothing was applied. One of the
/// connection tells nothing.
pub(super) fn from_sqlx(error: &sqlx::Error, effect: Effect) -> KvError {
    match error {
        sqlx::Error::Database(error) => {
            let detail = error.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::detail);
            KvError::from_sql(error.code().as_deref().unwrap_or_default(), error.message(), detail)
        }
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::RowNotFound => {
            KvError::failed("kv_result_unreadable")
        }
        _ => silence("connection", effect),
    }
}

/// The answer to a lost `required`, from the detail of the error. Members are spliced as text; a detail that
/// cannot be read leaves the bare verdict, and a `value` too large for it is simply not there.
pub(super) fn verdict(detail: Option<&str>) -> String {
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
    fn silence_promises_nothing_about_a_write() {
        let broken = || sqlx::Error::Io(std::io::ErrorKind::BrokenPipe.into());
        for (effect, expected) in [
            (Effect::None, "Unavailable { reason: \"connection\" }"),
            (Effect::Writes { once_only: true }, "OutcomeUnknown { once_only: true }"),
            (Effect::Writes { once_only: false }, "OutcomeUnknown { once_only: false }"),
        ] {
            assert_eq!(format!("{:?}", from_sqlx(&broken(), effect)), expected);
        }
        assert!(ends_the_session(&broken()));
    }

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
