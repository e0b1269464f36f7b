//! The only room with SQL of schema `queen_proxy`: queries, caches, listener, migrations.

pub mod cache;
pub mod listener;
pub mod migrate;
pub mod snapshot;
pub mod store;
mod versions;

use crate::{
    config::proxy::{CacheConfig, PxdbConfig},
    domain::{
        cluster::{ApiKey, Cluster},
        ids::{ClusterId, KeyId},
        lookup::Lookup,
        slug::Slug,
    },
    telemetry::log_gate::LogGate,
};
use cache::{Cache, Cached, Loaded};
use dashmap::DashSet;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use store::{Store, StoreError};
use tokio::{runtime::Handle, time::interval};

/// The sha256 of a whole key.
pub type KeyDigest = [u8; 32];

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

/// What the data plane asks of the control plane.
#[derive(Clone)]
pub struct ControlPlane {
    clusters: Cache<Slug, Cluster>,
    keys: Cache<KeyDigest, ApiKey>,
    used: Arc<DashSet<KeyId>>,
    store: Store,
    listening: Arc<AtomicBool>,
}

impl ControlPlane {
    /// Opens the pool on the current runtime, which must live as long as the process, and keeps
    /// the loads there. Nothing is asked of the database yet.
    pub fn new(pxdb: &PxdbConfig, cache: CacheConfig) -> Self {
        let store = Store::new(pxdb);
        let used = Arc::new(DashSet::new());
        let runtime = Handle::current();
        // Half of the pool is left for refreshes of known tenants.
        let cold = usize::try_from(pxdb.pool_size / 2).unwrap_or(1).max(1);
        // A connection, an answer and the cell's name.
        let limit = pxdb.timeout * 2;
        let clusters = {
            let store = store.clone();
            Cache::new("clusters", cache, limit, cold, runtime.clone(), move |slug| {
                let store = store.clone();
                Box::pin(async move { answer("cluster", load_cluster(&store, slug).await) })
            })
        };
        let keys = {
            let (store, used) = (store.clone(), Arc::clone(&used));
            Cache::new("keys", cache, limit, cold, runtime, move |digest| {
                let (store, used) = (store.clone(), Arc::clone(&used));
                Box::pin(async move {
                    let found = store.key(&digest).await;
                    if let Ok(Some(key)) = &found {
                        used.insert(key.id);
                    }
                    answer("key", found)
                })
            })
        };
        Self { clusters, keys, used, store, listening: Arc::default() }
    }

    /// The cluster with this slug.
    pub async fn cluster(&self, slug: Slug) -> Lookup<Cluster> {
        self.clusters.get(slug).await
    }

    /// The unrevoked key with this digest.
    pub async fn key(&self, digest: KeyDigest) -> Lookup<ApiKey> {
        self.keys.get(digest).await
    }

    /// Whether changes are heard of at once; otherwise they are found when entries expire.
    pub fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }

    /// Drops what is cached of a cluster and of its keys.
    pub fn invalidate(&self, cluster: ClusterId) {
        self.clusters.invalidate(cluster);
        self.keys.invalidate(cluster);
    }

    fn expire_all(&self) {
        self.clusters.expire_all();
        self.keys.expire_all();
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

    /// Lets go of what can no longer serve, for as long as the process lives.
    pub async fn sweep(self) {
        let mut tick = interval(SWEEP);
        loop {
            tick.tick().await;
            self.clusters.sweep();
            self.keys.sweep();
        }
    }
}

async fn load_cluster(store: &Store, slug: Slug) -> Result<Option<Cluster>, StoreError> {
    match store.cluster(slug).await? {
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
