//! The proxy's queries on schema `queen_proxy`. Each is one statement with a bounded wait.

use super::snapshot::{self, ClusterRow};
use crate::{
    config::proxy::PxdbConfig,
    domain::{
        cluster::ApiKey,
        ids::{ClusterId, KeyId, UserId},
        scopes::{Role, Scopes},
        slug::Slug,
    },
};
use sqlx::{
    Postgres, Row,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgRow, PgSslMode},
};
use std::{fmt, future::Future, time::Duration};
use tokio::time::timeout;
use uuid::Uuid;

/// Why the database gave no answer. The text is for the log: it names no host, role or value.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It did not answer in time.
    #[error("no answer from the control plane's database within {0:?}")]
    Silent(Duration),
    /// It, or the way to it, failed.
    #[error("the control plane's database failed: {0}")]
    Failed(Cause),
    /// It answered with something that cannot be right.
    #[error("the control plane holds a malformed row: {0}")]
    Malformed(&'static str),
}

impl StoreError {
    /// Whether the database did not speak at all, as opposed to saying something unusable.
    pub fn is_silence(&self) -> bool {
        match self {
            Self::Silent(_) => true,
            Self::Failed(cause) => cause.silence,
            Self::Malformed(_) => false,
        }
    }

    /// Whether the database refused a value or a row of the statement, which others may not share.
    pub fn is_about_values(&self) -> bool {
        matches!(self, Self::Failed(cause) if cause.values)
    }
}

/// What is safe to log of a driver's error: an SQLSTATE, or the kind. Its own text may quote values.
#[derive(Debug)]
pub struct Cause {
    text: String,
    silence: bool,
    values: bool,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let mut values = false;
        let (text, silence) = match &error {
            sqlx::Error::Database(database) => {
                let state = database.code().unwrap_or_default();
                // Data exceptions and broken constraints.
                values = ["22", "23"].iter().any(|class| state.starts_with(class));
                // Connections, resources, intervention (also a cancelled statement), system.
                let silence = ["08", "53", "57", "58"].iter().any(|class| state.starts_with(class));
                let words = match &*state {
                    "3D000" => " (there is no such database)",
                    "28000" | "28P01" => " (the role or its password is not accepted)",
                    "42501" => " (the role lacks a right)",
                    "42P01" | "3F000" => " (the schema is not there)",
                    _ => "",
                };
                (format!("SQLSTATE {state}{words}"), silence)
            }
            sqlx::Error::ColumnDecode { index, .. } => (format!("column {index} does not decode"), false),
            sqlx::Error::ColumnNotFound(name) => (format!("column {name} is missing"), false),
            sqlx::Error::Io(io) => (format!("input/output: {}", io.kind()), true),
            sqlx::Error::PoolTimedOut => ("no free connection in the pool in time".to_owned(), true),
            sqlx::Error::Tls(_) => ("TLS".to_owned(), true),
            sqlx::Error::Protocol(_) => ("protocol".to_owned(), true),
            _ => ("driver".to_owned(), true),
        };
        Self::Failed(Cause { text, silence, values })
    }
}

/// What a sign-in needs to know of a user.
pub struct Login {
    /// Who.
    pub user: UserId,
    /// The bcrypt hash of the password, for those who have one.
    pub password_hash: Option<String>,
}

/// What came of a batch of usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// Rows that were added.
    pub written: u64,
    /// Rows that cannot be: their cluster is gone, or they hold what no row holds.
    pub dropped: u64,
    /// The batch had been there before, and was not added again.
    pub repeated: bool,
}

/// What the upkeep of usage did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Maintained {
    /// Days that hold what their minutes say.
    pub rolled: u64,
    /// Minutes that were deleted.
    pub pruned: u64,
    /// Ids of batches that were forgotten.
    pub swept: u64,
}

/// A pool of connections to pxdb and the queries on it.
#[derive(Clone, Debug)]
pub struct Store {
    pool: PgPool,
    limit: Duration,
    /// For work that reads months of rows: one connection, opened for it, with a limit of its own.
    slow: PgPool,
    slow_limit: Duration,
}

/// The connections of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolView {
    /// Open ones.
    pub open: u32,
    /// Of these, those that nobody uses.
    pub idle: u32,
    /// Most that there may be.
    pub most: u32,
}

/// How long the upkeep of usage may take.
const SLOW: Duration = Duration::from_secs(600);
/// The connection for it is closed when it was not used for as long.
const SLOW_IDLE: Duration = Duration::from_secs(10);

/// How to reach pxdb, under a name that shows in `pg_stat_activity`.
pub fn connect_options(config: &PxdbConfig, application: &str) -> PgConnectOptions {
    let ssl = match (config.ssl, config.ssl_verify) {
        (false, _) => PgSslMode::Disable,
        (true, false) => PgSslMode::Require,
        (true, true) => PgSslMode::VerifyFull,
    };
    // Set even when there is none: the driver would take PGPASSWORD, which is somebody else's.
    let password = config.password.as_ref().map_or("", |password| password.expose());
    let mut options = PgConnectOptions::new_without_pgpass()
        .password(password)
        .host(&config.host)
        .port(config.port)
        .username(&config.user)
        .database(&config.database)
        .ssl_mode(ssl)
        .application_name(application)
        .options([("statement_timeout", config.timeout.as_millis().to_string())]);
    if let Some(pem) = &config.ssl_root_cert {
        options = options.ssl_root_cert_from_pem(pem.clone().into_bytes());
    }
    options
}

impl Store {
    /// A pool that opens connections when they are needed. Must be called inside the runtime that
    /// lives as long as the process.
    pub fn new(config: &PxdbConfig) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(config.pool_size)
            .acquire_timeout(config.timeout)
            .connect_lazy_with(connect_options(config, "queen-proxy"));
        let slow_limit = SLOW.max(config.timeout);
        let patient = PxdbConfig { timeout: slow_limit, ..config.clone() };
        let slow = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(config.timeout)
            .idle_timeout(SLOW_IDLE)
            .connect_lazy_with(connect_options(&patient, "queen-proxy-usage"));
        Self { pool, limit: config.timeout, slow, slow_limit }
    }

    /// How the pool stands.
    pub fn pool(&self) -> PoolView {
        PoolView {
            open: self.pool.size(),
            idle: u32::try_from(self.pool.num_idle()).unwrap_or(u32::MAX),
            most: self.pool.options().get_max_connections(),
        }
    }

    /// The cluster with this slug, as it stands in the tables.
    pub async fn cluster(&self, slug: Slug) -> Result<Option<ClusterRow>, StoreError> {
        self.cluster_where(Some(slug), None).await
    }

    /// The cluster with this id, as it stands in the tables.
    pub async fn cluster_by_id(&self, id: ClusterId) -> Result<Option<ClusterRow>, StoreError> {
        self.cluster_where(None, Some(id)).await
    }

    async fn cluster_where(
        &self,
        slug: Option<Slug>,
        id: Option<ClusterId>,
    ) -> Result<Option<ClusterRow>, StoreError> {
        let row = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/cluster.sql"))
                    .bind(slug.as_ref().map(Slug::as_str))
                    .bind(id.map(|id| id.0))
                    .fetch_optional(&mut **connection)
                    .await
            })
            .await?;
        row.map(|row| snapshot::decode(&row)).transpose()
    }

    /// A user's role on a cluster. A word that is no role of this version is none.
    pub async fn role(&self, user: UserId, cluster: ClusterId) -> Result<Option<Role>, StoreError> {
        let word: Option<String> = self
            .ask(async |connection| {
                sqlx::query_scalar(include_str!("sql/cluster_role.sql"))
                    .bind(user.0)
                    .bind(cluster.0)
                    .fetch_optional(&mut **connection)
                    .await
            })
            .await?;
        Ok(word.as_deref().and_then(Role::parse))
    }

    /// Whether a user is an operator; none: there is no such user.
    pub async fn is_operator(&self, user: UserId) -> Result<Option<bool>, StoreError> {
        self.ask(async |connection| {
            sqlx::query_scalar(include_str!("sql/user.sql"))
                .bind(user.0)
                .fetch_optional(&mut **connection)
                .await
        })
        .await
    }

    /// What a sign-in needs to know of the user with this email, which is in lower case.
    pub async fn login(&self, email: &str) -> Result<Option<Login>, StoreError> {
        let row = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/login.sql")).bind(email).fetch_optional(&mut **connection).await
            })
            .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(Login { user: UserId(row.try_get("id")?), password_hash: row.try_get("password_hash")? }))
    }

    /// Notes that a user signed in.
    pub async fn record_login(&self, user: UserId) -> Result<(), StoreError> {
        self.ask(async |connection| {
            sqlx::query("SELECT queen_proxy.record_user_login($1)")
                .bind(user.0)
                .execute(&mut **connection)
                .await
        })
        .await?;
        Ok(())
    }

    /// A user's account and the clusters they have a role on, as JSON; an operator's are all when
    /// `operators` are live. None: there is no such user.
    pub async fn account(&self, user: UserId, operators: bool) -> Result<Option<String>, StoreError> {
        self.ask(async |connection| {
            sqlx::query_scalar(include_str!("sql/account.sql"))
                .bind(user.0)
                .bind(operators)
                .fetch_optional(&mut **connection)
                .await
        })
        .await
    }

    /// Puts a token of this user on the deny-list until `expires`, in seconds of the epoch.
    pub async fn revoke_session(&self, jti: &str, expires: u64, user: UserId) -> Result<(), StoreError> {
        // Exact up to the year 285 million.
        #[allow(clippy::cast_precision_loss)]
        let expires = expires as f64;
        self.ask(async |connection| {
            sqlx::query("SELECT queen_proxy.revoke_session($1, to_timestamp($2), 'user', $3)")
                .bind(jti)
                .bind(expires)
                .bind(user.0)
                .execute(&mut **connection)
                .await
        })
        .await?;
        Ok(())
    }

    /// Whether a token's id is on the deny-list.
    pub async fn is_revoked(&self, jti: &str) -> Result<bool, StoreError> {
        self.ask(async |connection| {
            sqlx::query_scalar(include_str!("sql/is_revoked.sql"))
                .bind(jti)
                .fetch_one(&mut **connection)
                .await
        })
        .await
    }

    /// When the tokens with these ids end that are on the deny-list, in seconds of the epoch.
    pub async fn ends_of_revoked(&self, jtis: &[String]) -> Result<Vec<(String, u64)>, StoreError> {
        let rows = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/ends_of_revoked.sql"))
                    .bind(jtis)
                    .fetch_all(&mut **connection)
                    .await
            })
            .await?;
        let end = |row: PgRow| {
            let expires: f64 = row.try_get("expires")?;
            // Infinity and what lies before the epoch come out as the nearest there is.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let expires = expires.ceil() as u64;
            Ok((row.try_get("jti")?, expires))
        };
        rows.into_iter().map(end).collect()
    }

    /// The unrevoked key with this digest.
    pub async fn key(&self, digest: &[u8; 32]) -> Result<Option<ApiKey>, StoreError> {
        let row = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/key_by_hash.sql"))
                    .bind(hex::encode(digest))
                    .fetch_optional(&mut **connection)
                    .await
            })
            .await?;
        let Some(row) = row else { return Ok(None) };
        let scopes: Vec<String> = row.try_get("scopes")?;
        Ok(Some(ApiKey {
            id: KeyId(row.try_get("id")?),
            cluster: ClusterId(row.try_get("cluster_id")?),
            scopes: Scopes::from_words(scopes.iter().map(String::as_str)),
        }))
    }

    /// Deletes deny-list rows whose tokens have expired; returns how many.
    pub async fn sweep_revoked(&self) -> Result<i32, StoreError> {
        self.ask(async |connection| {
            sqlx::query_scalar("SELECT queen_proxy.sweep_revoked_tokens()").fetch_one(&mut **connection).await
        })
        .await
    }

    /// Marks these keys as used now.
    pub async fn touch_keys(&self, keys: &[KeyId]) -> Result<(), StoreError> {
        let ids: Vec<Uuid> = keys.iter().map(|key| key.0).collect();
        self.ask(async |connection| {
            sqlx::query(include_str!("sql/touch_keys.sql")).bind(&ids).execute(&mut **connection).await
        })
        .await?;
        Ok(())
    }

    /// Adds a batch of usage: a JSON array of rows. A batch counts once, however often it is sent.
    pub async fn record_usage(&self, batch: Uuid, rows: &str) -> Result<Recorded, StoreError> {
        let row = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/record_usage.sql"))
                    .bind(batch)
                    .bind(rows)
                    .fetch_one(&mut **connection)
                    .await
            })
            .await?;
        Ok(Recorded {
            written: count(&row, "written")?,
            dropped: count(&row, "dropped")?,
            repeated: row.try_get("repeated")?,
        })
    }

    /// Rolls up days, prunes minutes, forgets old batches; none: another proxy is doing it.
    pub async fn maintain_usage(&self, keep_days: i32) -> Result<Option<Maintained>, StoreError> {
        let row = self
            .ask_slowly(async |connection| {
                sqlx::query("SELECT ran, rolled, pruned, swept FROM queen_proxy.maintain_usage($1)")
                    .bind(keep_days)
                    .fetch_one(&mut **connection)
                    .await
            })
            .await?;
        if !row.try_get::<bool, _>("ran")? {
            return Ok(None);
        }
        Ok(Some(Maintained {
            rolled: count(&row, "rolled")?,
            pruned: count(&row, "pruned")?,
            swept: count(&row, "swept")?,
        }))
    }

    /// The clusters that have used up their monthly quota. Emits the events that are due.
    pub async fn over_monthly_quota(&self, warn_percent: i32) -> Result<Vec<ClusterId>, StoreError> {
        let ids: Vec<Uuid> = self
            .ask_slowly(async |connection| {
                sqlx::query_scalar("SELECT cluster_id FROM queen_proxy.check_monthly_quotas($1)")
                    .bind(warn_percent)
                    .fetch_all(&mut **connection)
                    .await
            })
            .await?;
        Ok(ids.into_iter().map(ClusterId).collect())
    }

    async fn ask_slowly<T>(
        &self,
        statement: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreError> {
        run(&self.slow, self.limit, self.slow_limit, statement).await
    }

    /// Runs one statement. A connection that did not answer in time is closed, not given back: it
    /// may hang for as long as the network keeps it.
    pub(super) async fn ask<T>(
        &self,
        statement: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreError> {
        run(&self.pool, self.limit, self.limit, statement).await
    }
}

async fn run<T>(
    pool: &PgPool,
    connecting: Duration,
    answering: Duration,
    statement: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, sqlx::Error>,
) -> Result<T, StoreError> {
    let mut connection = within(connecting, pool.acquire()).await?;
    let answer = within(answering, statement(&mut connection)).await;
    if matches!(answer, Err(StoreError::Silent(_))) {
        connection.close_on_drop();
    }
    answer
}

fn count(row: &PgRow, column: &str) -> Result<u64, StoreError> {
    let number: i32 = row.try_get(column)?;
    u64::try_from(number).map_err(|_| StoreError::Malformed("a negative count"))
}

pub(super) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    match timeout(limit, work).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(StoreError::Silent(limit)),
    }
}
