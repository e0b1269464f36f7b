//! The control plane's SQL as an operator's script uses it: the tables are those of the contract, each
//! function writes, refuses and announces what it should, and the schema gets there from nothing.

mod bootstrap;
mod deletion;
mod migrations;
mod mutators;
mod roles;
mod schema;
mod sessions;
mod usage;
mod values;

use crate::support::World;
use queen_proxy::{
    config::proxy::{ProxyConfig, PxdbConfig},
    control::{migrate::migrate, store::connect_options},
};
use serde_json::Value;
use sqlx::{
    AssertSqlSafe, FromRow, PgConnection,
    postgres::{PgListener, PgPoolOptions, PgRow},
};
use std::time::{Duration, Instant};

/// Longest wait for a notification.
const LIMIT: Duration = Duration::from_secs(20);
/// The channel on which changes of a cluster are announced.
const CHANNEL: &str = "queen_proxy_inval";
/// The channel on which ended sessions are announced.
const REVOKED: &str = "queen_proxy_revoked";

/// What a proxy of this world knows of the control plane's database.
fn pxdb(world: &World) -> PxdbConfig {
    ProxyConfig::load(world.proxy_environment(1), None).unwrap().0.pxdb.unwrap()
}

/// A control plane that is up to date, without any proxy.
struct Plane {
    world: World,
    connection: PgConnection,
}

impl Plane {
    async fn new() -> Self {
        let world = World::builder().proxies(0).recorder().start().await;
        let connection = world.control().await;
        let plane = Self { world, connection };
        plane.migrate().await;
        plane
    }

    /// Brings the schema up to date; the names of what was applied.
    async fn migrate(&self) -> Vec<&'static str> {
        migrate(&pxdb(&self.world)).await.unwrap()
    }

    async fn run(&mut self, statements: &str) {
        let result = sqlx::raw_sql(AssertSqlSafe(statements.to_owned())).execute(&mut self.connection).await;
        result.unwrap_or_else(|error| panic!("{statements}: {error}"));
    }

    /// SQLSTATE and text of a statement that has to fail.
    async fn refusal(&mut self, statement: &str) -> (String, String) {
        let result = sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut self.connection).await;
        match result {
            Err(sqlx::Error::Database(error)) => {
                (error.code().unwrap().into_owned(), error.message().to_owned())
            }
            other => panic!("{statement}: not refused: {other:?}"),
        }
    }

    /// The one value of a query.
    async fn value<T>(&mut self, query: &str) -> T
    where
        (T,): for<'r> FromRow<'r, PgRow>,
        T: Send + Unpin,
    {
        let result =
            sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_one(&mut self.connection).await;
        result.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// The one text column of a query.
    async fn rows(&mut self, query: &str) -> Vec<String> {
        let result =
            sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_all(&mut self.connection).await;
        result.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// Runs the first call in a transaction that ends only when all the others wait for it. The texts
    /// they return, the first one's first.
    async fn race(&mut self, first: &str, others: &[String]) -> Vec<Result<String, sqlx::Error>> {
        self.run("BEGIN").await;
        let mut results = vec![Ok(self.value(&format!("SELECT ({first})::text")).await)];
        let mut callers = tokio::task::JoinSet::new();
        for other in others {
            let mut connection = self.world.control().await;
            let call = AssertSqlSafe(format!("SELECT ({other})::text"));
            callers.spawn(async move { sqlx::query_scalar(call).fetch_one(&mut connection).await });
        }
        let mut watcher = self.world.control().await;
        let deadline = Instant::now() + LIMIT;
        loop {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                            WHERE datname = current_database() AND wait_event_type = 'Lock'";
            let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&mut watcher).await.unwrap();
            if usize::try_from(waiting).unwrap() == others.len() {
                break;
            }
            assert!(callers.try_join_next().is_none(), "somebody did not wait");
            assert!(Instant::now() < deadline, "{waiting} of {} wait", others.len());
        }
        self.run("COMMIT").await;
        results.extend(callers.join_all().await);
        results
    }

    /// Every row of every table.
    async fn everything(&mut self) -> Value {
        let tables = self
            .rows("SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'queen_proxy'::regnamespace")
            .await;
        let parts: Vec<String> = tables
            .iter()
            .map(|table| {
                format!("'{table}', (SELECT jsonb_agg(to_jsonb(t) ORDER BY to_jsonb(t)::text) FROM queen_proxy.{table} AS t)")
            })
            .collect();
        self.value(&format!("SELECT jsonb_build_object({})", parts.join(", "))).await
    }

    /// Somebody who hears what is announced from now on.
    async fn ear(&self) -> Ear {
        self.ear_on(CHANNEL).await
    }

    /// The same on one of the channels.
    async fn ear_on(&self, channel: &'static str) -> Ear {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect_lazy_with(connect_options(&pxdb(&self.world), "ear"));
        let mut listener = PgListener::connect_with(&pool).await.unwrap();
        listener.listen(channel).await.unwrap();
        Ear { listener, channel }
    }

    /// What the ear has heard of the commits so far, in order of the text.
    async fn heard(&mut self, ear: &mut Ear) -> Vec<String> {
        // Notifications arrive in the order of the commits: what comes before this one is all there is.
        self.run(&format!("SELECT pg_notify('{}', 'fence')", ear.channel)).await;
        let mut heard = Vec::new();
        loop {
            let note =
                tokio::time::timeout(LIMIT, ear.listener.recv()).await.expect("the fence in time").unwrap();
            if note.payload() == "fence" {
                heard.sort();
                return heard;
            }
            heard.push(note.payload().to_owned());
        }
    }
}

/// A listener on one channel.
struct Ear {
    listener: PgListener,
    channel: &'static str,
}
