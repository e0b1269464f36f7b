//! Usage in a real control plane: batches, days, months, outages. The proxies' part runs in the test's own
//! process, under the proxies' role, on a clock of the test's.

mod batches;
mod days;
mod outages;
mod quotas;

use crate::support::{Tenant, World};
use queen_proxy::{
    config::proxy::ProxyConfig,
    control::{ControlPlane, store::StoreError},
    domain::ids::ClusterId,
    metering::{
        accumulate::Accumulators,
        flush::{Flusher, UsageStore},
        metrics::Metrics,
        sample::{Counts, Op, Sample},
    },
};
use sqlx::{AssertSqlSafe, FromRow, postgres::PgRow};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tempfile::TempDir;
use uuid::Uuid;

const LIMIT: Duration = Duration::from_secs(30);

/// A control plane with two tenants, and no proxy.
struct Scene {
    world: World,
    control: ControlPlane,
    folder: TempDir,
    acme: Tenant,
    globex: Tenant,
}

impl Scene {
    async fn new() -> Self {
        Self::of(World::builder().proxies(0).recorder().start().await).await
    }

    async fn of(mut world: World) -> Self {
        world.prepare_control_plane().await;
        world.cell_id = world.add_cell("cell", world.cell_port).await;
        let (acme, globex) = (world.tenant("acme").await, world.tenant("globex").await);
        let config = world.config(&[]);
        let control = ControlPlane::new(config.pxdb.as_ref().unwrap(), config.cache);
        Self { world, control, folder: TempDir::new().unwrap(), acme, globex }
    }

    /// A proxy's configuration with a spool of this name.
    fn config(&self, spool: &str) -> ProxyConfig {
        let spool = self.folder.path().join(spool);
        let more =
            [("QUEEN_PROXY_SPOOL_DIR", spool.to_str().unwrap()), ("QUEEN_PROXY_METER_FLUSH_MS", "100")];
        self.world.config(&more)
    }

    /// What counts and flushes in a proxy, and a switch that cuts it off.
    fn proxy(&self, spool: &str) -> Proxy {
        let accumulators: Arc<Accumulators> = Arc::default();
        let metrics: Arc<Metrics> = Arc::default();
        let store = Fickle { control: self.control.clone(), away: Arc::default() };
        let away = Arc::clone(&store.away);
        let config = self.config(spool).metering;
        let flusher =
            queen_proxy::metering::open(&config, store, Arc::clone(&accumulators), Arc::clone(&metrics));
        Proxy { accumulators, metrics, flusher: flusher.unwrap(), away }
    }

    /// The one value of a query.
    async fn value<T>(&self, query: &str) -> T
    where
        (T,): for<'r> FromRow<'r, PgRow>,
        T: Send + Unpin,
    {
        let statement = sqlx::query_scalar(AssertSqlSafe(query.to_owned()));
        let result = statement.fetch_one(&mut self.world.control().await).await;
        result.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// The one text column of a query.
    async fn rows(&self, query: &str) -> Vec<String> {
        let statement = sqlx::query_scalar(AssertSqlSafe(query.to_owned()));
        let result = statement.fetch_all(&mut self.world.control().await).await;
        result.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// `slug YYYY-MM-DD HH:MM class reqs/msgs/in/out` of every minute.
    async fn minutes(&self) -> Vec<String> {
        self.rows(
            "SELECT concat_ws(' ', c.slug, to_char(minute AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), op_class,
                              concat_ws('/', reqs, msgs, bytes_in, bytes_out))
               FROM queen_proxy.usage_minutes AS m JOIN queen_proxy.clusters AS c ON c.id = m.cluster_id
              ORDER BY 1",
        )
        .await
    }
}

/// A control plane that can be cut off.
struct Fickle {
    control: ControlPlane,
    away: Arc<AtomicBool>,
}

impl UsageStore for Fickle {
    async fn record(
        &self,
        batch: Uuid,
        rows: &str,
    ) -> Result<queen_proxy::control::store::Recorded, StoreError> {
        if self.away.load(SeqCst) {
            return Err(StoreError::Silent(Duration::ZERO));
        }
        self.control.record_usage(batch, rows).await
    }
}

/// The part of a proxy that counts and flushes.
struct Proxy {
    accumulators: Arc<Accumulators>,
    metrics: Arc<Metrics>,
    flusher: Flusher<Fickle>,
    away: Arc<AtomicBool>,
}

impl Proxy {
    fn count(&self, cluster: Uuid, op: Op, msgs: u64, now_s: u64) {
        let counts = Counts { reqs: 1, msgs, bytes_in: msgs * 10, bytes_out: 7 };
        self.accumulators.cluster(ClusterId(cluster)).record(Sample { op, counts }, now_s);
    }

    async fn tick(&mut self, now_s: u64) {
        self.flusher.tick(now_s, LIMIT).await;
    }
}
