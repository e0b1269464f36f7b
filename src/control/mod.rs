//! The only room with SQL of schema `queen_proxy`: queries, caches, listener, migrations.

pub mod cache;
mod deny_list;
mod few;
pub mod listener;
pub mod migrate;
mod pins;
pub mod queues;
mod revoking;
pub mod snapshot;
pub mod store;
mod versions;

use crate::{
    config::proxy::{CacheConfig, PxdbConfig},
    domain::{
        cluster::{ApiKey, Cluster},
        ids::{ClusterId, KeyId, UserId},
        lookup::Lookup,
        scopes::Role,
        slug::Slug,
    },
    telemetry::log_gate::LogGate,
};
use cache::{Cache, CacheView, Cached, Key, Loaded};
use dashmap::DashSet;
pub use deny_list::{DenyList, Revocation, now_s};
pub use revoking::NotRevoked;
use revoking::Revoking;
use snapshot::ClusterRow;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use store::{Login, Maintained, Recorded, Store, StoreError};
use tokio::{runtime::Handle, time::interval};
use uuid::Uuid;

/// The sha256 of a whole key.
pub type KeyDigest = [u8; 32];

/// How long what is known of a user counts.
const USER_TTL: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(30);

impl Cached for Cluster {
    fn cluster(&self) -> ClusterId {
        self.id
    }
}

impl Cached for ApiKey {
    fn cluster(&self) -> ClusterId {
        self.cluster
    }
}

/// A user's role on one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    cluster: ClusterId,
    /// The role.
    pub role: Role,
}

impl Cached for Grant {
    fn cluster(&self) -> ClusterId {
        self.cluster
    }
}

/// A user that exists.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// Whether `users.is_operator` is set.
    pub is_operator: bool,
}

impl Cached for User {
    /// Of no cluster: users are asked for again when their entry expires.
    fn cluster(&self) -> ClusterId {
        ClusterId(Uuid::nil())
    }
}

/// What the data plane asks of the control plane.
#[derive(Clone)]
pub struct ControlPlane {
    clusters: Cache<Slug, Cluster>,
    clusters_by_id: Cache<ClusterId, Cluster>,
    keys: Cache<KeyDigest, ApiKey>,
    grants: Cache<(UserId, ClusterId), Grant>,
    users: Cache<UserId, User>,
    deny_list: DenyList,
    used: Arc<DashSet<KeyId>>,
    store: Store,
    listening: Arc<AtomicBool>,
    /// When the listener last heard of its server, in seconds since the epoch; 0 is never.
    heard_s: Arc<AtomicU64>,
    runtime: Handle,
    revoking: Revoking,
}

/// What all caches have in common.
struct Caching {
    config: CacheConfig,
    limit: Duration,
    cold: usize,
    runtime: Handle,
    store: Store,
}

impl Caching {
    fn of<K: Key, V: Cached, L>(
        &self,
        name: &'static str,
        load: impl Fn(Store, K) -> L + Send + Sync + 'static,
    ) -> Cache<K, V>
    where
        L: Future<Output = Result<Option<V>, StoreError>> + Send + 'static,
    {
        let store = self.store.clone();
        Cache::new(name, self.config, self.limit, self.cold, self.runtime.clone(), move |key| {
            let loading = load(store.clone(), key);
            Box::pin(async move { answer(name, loading.await) })
        })
    }
}

impl ControlPlane {
    /// Opens the pool on the current runtime, which must live as long as the process, and keeps
    /// the loads there. Nothing is asked of the database yet.
    pub fn new(pxdb: &PxdbConfig, config: CacheConfig) -> Self {
        let store = Store::new(pxdb);
        let used: Arc<DashSet<KeyId>> = Arc::default();
        let caching = Caching {
            config,
            // A connection, an answer, and the cell's name, whose slowness says nothing of the database.
            limit: pxdb.timeout * 2 + 2 * snapshot::RESOLVE,
            // For each kind of key: the rest of the pool is for refreshes of what is known.
            cold: usize::try_from(pxdb.pool_size / 2).unwrap_or(1).max(1),
            runtime: Handle::current(),
            store: store.clone(),
        };
        let seen = Arc::clone(&used);
        // Nobody notifies of a user, and an operator's power must not outlive a doubt.
        let brief = CacheConfig { ttl: config.ttl.min(USER_TTL), stale_grace: Duration::ZERO, ..config };
        let briefly = Caching { config: brief, runtime: Handle::current(), store: store.clone(), ..caching };
        Self {
            clusters: caching
                .of("clusters", async |store: Store, slug| snapshot(store.cluster(slug).await?).await),
            clusters_by_id: caching.of("clusters by id", async |store: Store, id| {
                snapshot(store.cluster_by_id(id).await?).await
            }),
            keys: caching.of("keys", move |store, digest| {
                let seen = Arc::clone(&seen);
                async move {
                    let key = store.key(&digest).await?;
                    if let Some(key) = &key {
                        seen.insert(key.id);
                    }
                    Ok(key)
                }
            }),
            grants: caching.of("roles", async |store: Store, (user, cluster)| {
                Ok(store.role(user, cluster).await?.map(|role| Grant { cluster, role }))
            }),
            users: briefly.of("users", async |store: Store, user| {
                Ok(store.is_operator(user).await?.map(|is_operator| User { is_operator }))
            }),
            deny_list: DenyList::new(store.clone()),
            used,
            listening: Arc::default(),
            heard_s: Arc::default(),
            runtime: Handle::current(),
            revoking: Revoking::start(store.clone()),
            store,
        }
    }

    /// The cluster with this slug.
    pub async fn cluster(&self, slug: Slug) -> Lookup<Cluster> {
        self.clusters.get(slug).await
    }

    /// The cluster with this id.
    pub async fn cluster_by_id(&self, id: ClusterId) -> Lookup<Cluster> {
        self.clusters_by_id.get(id).await
    }

    /// The unrevoked key with this digest.
    pub async fn key(&self, digest: KeyDigest) -> Lookup<ApiKey> {
        self.keys.get(digest).await
    }

    /// A user's role on a cluster.
    pub async fn grant(&self, user: UserId, cluster: ClusterId) -> Lookup<Grant> {
        self.grants.get((user, cluster)).await
    }

    /// A user.
    pub async fn user(&self, user: UserId) -> Lookup<User> {
        self.users.get(user).await
    }

    /// Revoked sessions.
    pub fn deny_list(&self) -> &DenyList {
        &self.deny_list
    }

    /// What a sign-in needs to know of the user with this email, in lower case.
    pub async fn login(&self, email: String) -> Result<Option<Login>, StoreError> {
        self.here(|store| async move { store.login(&email).await }).await
    }

    /// Notes that a user signed in.
    pub async fn record_login(&self, user: UserId) -> Result<(), StoreError> {
        self.here(|store| async move { store.record_login(user).await }).await
    }

    /// A user's account and clusters as JSON; all clusters for a live operator.
    pub async fn account(&self, user: UserId, operators: bool) -> Result<Option<String>, StoreError> {
        self.here(|store| async move { store.account(user, operators).await }).await
    }

    /// Revokes a token: here at once, in the table now or as soon as the database takes it, and from there
    /// on every proxy. Returns after the first try; an error says that it is revoked here only.
    pub async fn revoke(&self, jti: String, expires: u64, user: UserId) -> Result<(), NotRevoked> {
        self.deny_list.pin(&jti, expires);
        self.revoking.write(self.store.clone(), &self.runtime, jti, expires, user).await
    }

    /// Adds a batch of usage. Call it on the runtime of the control plane, as the two after it.
    pub async fn record_usage(&self, batch: Uuid, rows: &str) -> Result<Recorded, StoreError> {
        self.store.record_usage(batch, rows).await
    }

    /// Rolls up and prunes usage; none: another proxy is doing it.
    pub async fn maintain_usage(&self, keep_days: i32) -> Result<Option<Maintained>, StoreError> {
        self.store.maintain_usage(keep_days).await
    }

    /// The clusters that have used up their monthly quota.
    pub async fn over_monthly_quota(&self, warn_percent: i32) -> Result<Vec<ClusterId>, StoreError> {
        self.store.over_monthly_quota(warn_percent).await
    }

    /// Runs a query on our runtime, where the pool's connections live; a request that goes away does not
    /// end it half-way.
    async fn here<T: Send + 'static, L>(&self, query: impl FnOnce(Store) -> L) -> Result<T, StoreError>
    where
        L: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let query = self.runtime.spawn(query(self.store.clone()));
        query.await.unwrap_or(Err(StoreError::Malformed("a query panicked")))
    }

    /// The queries themselves, for work that no request waits for.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Whether changes are heard of at once; otherwise they are found when entries expire.
    pub fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }

    /// When the listener last had a word from its server, a change or an answer to its heartbeat, in seconds
    /// since the epoch; 0 is never.
    pub fn heard_s(&self) -> u64 {
        self.heard_s.load(Ordering::Relaxed)
    }

    fn heard(&self) {
        self.heard_s.store(now_s(), Ordering::Relaxed);
    }

    /// Age of the oldest answer in each of [`Self::caches`]. Looks at every entry: for whoever watches.
    pub fn oldest_entries(&self) -> [Option<Duration>; 5] {
        [
            self.clusters.oldest(),
            self.clusters_by_id.oldest(),
            self.keys.oldest(),
            self.grants.oldest(),
            self.users.oldest(),
        ]
    }

    /// How the caches stand.
    pub fn caches(&self) -> [CacheView; 5] {
        [
            self.clusters.view(),
            self.clusters_by_id.view(),
            self.keys.view(),
            self.grants.view(),
            self.users.view(),
        ]
    }

    /// Drops what is cached of a cluster, of its keys and of the roles on it.
    pub fn invalidate(&self, cluster: ClusterId) {
        self.clusters.invalidate(cluster);
        self.clusters_by_id.invalidate(cluster);
        self.keys.invalidate(cluster);
        self.grants.invalidate(cluster);
    }

    fn expire_all(&self) {
        self.clusters.expire_all();
        self.clusters_by_id.expire_all();
        self.keys.expire_all();
        self.grants.expire_all();
        self.users.expire_all();
        self.deny_list.expire_all();
    }

    /// Writes `last_used_at` of the keys that were looked up, every `every`; best effort.
    pub async fn touch_keys(self, every: Duration) {
        let mut tick = interval(every);
        loop {
            tick.tick().await;
            let ids: Vec<KeyId> = self.used.iter().map(|id| *id).collect();
            if ids.is_empty() {
                continue;
            }
            match self.store.touch_keys(&ids).await {
                Ok(()) => {
                    for id in &ids {
                        self.used.remove(id);
                    }
                }
                Err(error) => tracing::debug!(%error, "last_used_at was not written"),
            }
        }
    }

    /// Deletes deny-list rows whose tokens have expired, at once and then every `every`; zero is never.
    pub async fn sweep_revoked(self, every: Duration) {
        if every.is_zero() {
            return;
        }
        let mut tick = interval(every.max(Duration::from_secs(1)));
        loop {
            tick.tick().await;
            match self.store.sweep_revoked().await {
                Ok(rows) => tracing::debug!(rows, "deny-list swept"),
                Err(error) => tracing::debug!(%error, "the deny-list was not swept"),
            }
        }
    }

    /// Lets go of what can no longer serve, for as long as the process lives.
    pub async fn sweep(self) {
        let mut tick = interval(SWEEP);
        loop {
            tick.tick().await;
            self.clusters.sweep();
            self.clusters_by_id.sweep();
            self.keys.sweep();
            self.grants.sweep();
            self.users.sweep();
            self.deny_list.sweep();
        }
    }
}

async fn snapshot(row: Option<ClusterRow>) -> Result<Option<Cluster>, StoreError> {
    match row {
        Some(row) => Ok(Some(row.into_cluster().await?)),
        None => Ok(None),
    }
}

/// Strangers can ask for such an answer as often as they like.
static UNUSABLE: LogGate = LogGate::new();

/// Only "no such row" is an absence; failures are told apart by whether the database spoke.
fn answer<V>(what: &'static str, loaded: Result<Option<V>, StoreError>) -> Loaded<V> {
    match loaded {
        Ok(Some(value)) => Loaded::Found(value),
        Ok(None) => Loaded::Absent,
        Err(error) if error.is_silence() => {
            tracing::debug!(%error, what, "look-up failed");
            Loaded::Silent
        }
        Err(error) => {
            if let Some(hidden) = UNUSABLE.pass() {
                tracing::error!(%error, what, hidden, "the control plane's answer cannot be used");
            }
            Loaded::Unusable
        }
    }
}
