//! What the limiters need of the control plane and of the cells comes in, and what they admit is written,
//! under the role of a proxy.

mod listings;
mod rows;
mod storage;

use crate::support::{Tenant, World, eventually};
use queen_proxy::{
    config::proxy::CapsConfig,
    control::{queues::KnownQueue, store::Store},
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
    },
    limits::{ClusterLimits, Limiter, LiveView, Request, clock::Monotonic, decision::Mode},
    policy::inspect,
    reconcile::Reconcile,
};
use std::{sync::Arc, time::Duration};
use tokio::runtime::Handle;
use uuid::Uuid;

const LIMIT: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_secs(3_600);

/// The background work of one proxy, with nothing in front of it.
struct Proxy {
    limiter: Arc<Limiter<Monotonic>>,
    reconcile: Reconcile,
}

impl Proxy {
    fn start(world: &World, config: CapsConfig) -> Self {
        let limiter = Arc::new(Limiter::new(config.counters(), Monotonic::default()));
        let store = Store::new(&world.pxdb_of_a_proxy());
        let reconcile = Reconcile::start(&Handle::current(), store, Arc::clone(&limiter), config);
        Self { limiter, reconcile }
    }

    /// The counters of a tenant's cluster, as a request finds them.
    fn counters(&self, tenant: &Tenant) -> Arc<ClusterLimits> {
        let cluster = self.limiter.cluster(ClusterId(tenant.cluster));
        if cluster.claim_load() {
            self.reconcile.want_rows(&cluster);
        }
        cluster
    }

    /// The same, once the rows are in.
    async fn loaded(&self, tenant: &Tenant, queues: u64) {
        self.counters(tenant);
        eventually(&format!("{queues} queues are known"), LIMIT, async || {
            (self.queues(tenant) == Some(queues)).then_some(())
        })
        .await;
    }

    /// Queues that are known; none before the rows were read.
    fn queues(&self, tenant: &Tenant) -> Option<u64> {
        self.view(tenant, &limits(&[]))?.queues
    }

    fn view(&self, tenant: &Tenant, limits: &Limits) -> Option<LiveView> {
        self.limiter.live(ClusterId(tenant.cluster), limits)
    }

    /// Whether a push to these queues and partitions passes.
    fn push(&self, tenant: &Tenant, limits: &Limits, pairs: &[(&str, &str)]) -> bool {
        let items: Vec<_> = pairs
            .iter()
            .map(|(queue, partition)| serde_json::json!({"queue": queue, "partition": partition, "payload": 1}))
            .collect();
        let body = serde_json::json!({ "items": items }).to_string();
        let messages = inspect::push(body.as_bytes(), 100).unwrap();
        let request = Request { pairs: Some(&messages.pairs), ..Request::default() };
        let verdict = self.limiter.evaluate(&self.counters(tenant), &request, limits, Mode::Enforce);
        verdict.decision.refusal(Mode::Enforce).is_none()
    }

    /// Waits until so many more listings have been asked for, and answered or not.
    async fn after_polls(&self, more: u64) {
        let polls = self.reconcile.figures().polls + more;
        eventually("more polls", LIMIT, async || (self.reconcile.figures().polls > polls).then_some(()))
            .await;
    }
}

/// Everything at once, and nothing taken for deleted that is younger than an hour.
fn eager() -> CapsConfig {
    CapsConfig {
        reconcile_every: Duration::from_millis(40),
        persist_every: Duration::from_millis(20),
        storage_refresh: Duration::from_millis(40),
        settle: NEVER,
        polls: 8,
        cell_polls: 2,
        tenant_header: true,
        cell_max_parked: 10,
        max_batch_items: 10,
        max_clusters: 100,
        max_names: 10_000,
        max_pending_rows: 10_000,
    }
}

/// The same without asking cells.
fn without_cells() -> CapsConfig {
    CapsConfig { reconcile_every: NEVER, storage_refresh: NEVER, ..eager() }
}

fn limits(set: &[(&str, i64)]) -> Limits {
    Limits::from_columns(|name| {
        let found = set.iter().find(|(set, _)| *set == name);
        Ok::<_, ()>(found.map_or(Cap::Unlimited, |(_, cap)| Cap::At(*cap)))
    })
    .unwrap()
}

/// A world whose cell is a recorder, and whose own proxy leaves it alone.
async fn world() -> World {
    let ages = NEVER.as_millis();
    World::builder()
        .recorder()
        .env("QUEEN_PROXY_RECONCILE_MS", ages)
        .env("QUEEN_PROXY_STORAGE_REFRESH_MS", ages)
        .start()
        .await
}

/// Live rows of a cluster, by name.
async fn rows(world: &World, tenant: &Tenant) -> Vec<(String, u32)> {
    read(&Store::new(&world.pxdb_of_a_proxy()), tenant).await
}

async fn read(store: &Store, tenant: &Tenant) -> Vec<(String, u32)> {
    let rows = store.queues(ClusterId(tenant.cluster), NEVER, 10_000).await.unwrap();
    let rows = rows.into_iter().map(|KnownQueue { name, partitions, .. }| (name, partitions));
    let mut rows: Vec<_> = rows.collect();
    rows.sort();
    rows
}

/// Waits until these are the live rows.
async fn rows_become(world: &World, tenant: &Tenant, want: &[(&str, u32)]) {
    let want: Vec<(String, u32)> = want.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    let store = Store::new(&world.pxdb_of_a_proxy());
    eventually(&format!("{want:?}"), LIMIT, async || (read(&store, tenant).await == want).then_some(()))
        .await;
}

/// A live row, as old as this.
async fn insert(world: &World, tenant: &Tenant, name: &str, partitions: u32, age: &str) {
    world
        .sql(&format!(
            "INSERT INTO queen_proxy.queues (cluster_id, name, partitions_count, created_at)
                  VALUES ('{}', '{name}', {partitions}, now() - interval '{age}')",
            tenant.cluster
        ))
        .await;
}

/// What the cell knows the tenant's cluster by.
async fn broker_tenant(world: &World, tenant: &Tenant) -> Uuid {
    sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
        .bind(tenant.cluster)
        .fetch_one(&mut world.control().await)
        .await
        .unwrap()
}
