//! The cache between the data plane and the control plane's database (D6, proxy contract §7).
//!
//! - A fresh entry is served without waiting. An expired one waits, bounded, for the one shared
//!   refresh, and serves only when the database is silent, up to the grace.
//! - Only an answer "there is no such thing" denies and is remembered, for a short time and in a
//!   bounded number. Silence is never remembered as absence.
//! - An answer that was asked for before an invalidation is thrown away and asked for again.
//! - One load at a time per key, in a task of its own: a request that goes away cancels nothing.

use super::{few::Few, versions::Versions};
use crate::{
    config::proxy::CacheConfig,
    domain::{ids::ClusterId, lookup::Lookup},
};
use dashmap::{DashMap, mapref::entry::Entry};
use std::{
    future::Future,
    hash::Hash,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, watch},
    time::{Instant, timeout},
};

/// What can be cached: it belongs to one cluster, whose invalidation drops it.
pub trait Cached: Send + Sync + 'static {
    /// That cluster.
    fn cluster(&self) -> ClusterId;
}

/// A key: cheap to copy, because it is in the map, in the index and in the task that loads it.
pub trait Key: Copy + Eq + Hash + Send + Sync + 'static {}
impl<T: Copy + Eq + Hash + Send + Sync + 'static> Key for T {}

/// What a load brings.
#[derive(Clone, Copy, Debug)]
pub enum Loaded<V> {
    /// The row.
    Found(V),
    /// There is no such row.
    Absent,
    /// The database is there, but this answer cannot be used: a concern of this key alone.
    Unusable,
    /// The database did not answer: a concern of every key.
    Silent,
}

type Loading<V> = Pin<Box<dyn Future<Output = Loaded<V>> + Send>>;

/// In silence the database is asked this often, and not for each request.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Loads of keys never seen before that may wait or run at once. Beyond it the answer is "unavailable" at
/// once: a queue that nobody bounds is memory, and a wait for everybody in it.
const MAX_STRANGERS: usize = 256;
/// Serving stale is said this often.
const WARN_AGAIN: Duration = Duration::from_secs(10);
/// How often an answer that was overtaken by an invalidation is asked for again.
const MAX_RELOADS: usize = 4;
/// How many dropped entries of one cluster are asked for again before somebody needs them.
const MAX_EAGER: usize = 32;

/// Counters since the start, for metrics and tests.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Answers that were remembered and fresh.
    pub hits: AtomicU64,
    /// Look-ups asked of the database.
    pub loads: AtomicU64,
    /// Answers served past their freshness because the database was silent.
    pub stale: AtomicU64,
    /// Answers thrown away because of an invalidation.
    pub overtaken: AtomicU64,
}

/// How a cache stands; the counts are since the start.
#[derive(Clone, Debug)]
pub struct CacheView {
    /// What is in it.
    pub name: &'static str,
    /// Entries.
    pub entries: usize,
    /// Remembered absences.
    pub absences: usize,
    /// Answers that were remembered and fresh.
    pub hits: u64,
    /// Look-ups asked of the database.
    pub loads: u64,
    /// Answers served past their freshness.
    pub stale: u64,
    /// Whether the database did not answer when it was last asked.
    pub silent: bool,
}

/// See the module.
pub struct Cache<K, V>(Arc<Inner<K, V>>);

impl<K, V> Clone for Cache<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct Inner<K, V> {
    name: &'static str,
    config: CacheConfig,
    load_limit: Duration,
    load: Box<dyn Fn(K) -> Loading<V> + Send + Sync>,
    runtime: Handle,
    present: DashMap<K, Present<V>>,
    by_cluster: DashMap<ClusterId, Few<K>>,
    absent: DashMap<K, Instant>,
    flights: DashMap<K, watch::Receiver<Option<Lookup<V>>>>,
    versions: Versions,
    /// Loads of keys never seen before wait here, so that a flood of them cannot take every
    /// connection from the refreshes of known tenants.
    cold: Semaphore,
    /// How many of them there are, waiting or under way.
    strangers: AtomicUsize,
    /// The database did not answer.
    silence: Backoff,
    /// It takes longer than a request should wait: entries that can serve do so meanwhile, while
    /// keys without one still ask, since "unavailable" costs their callers more than a wait.
    slowness: Backoff,
    stats: CacheStats,
}

struct Present<V> {
    value: Arc<V>,
    fresh_until: Instant,
    servable_until: Instant,
    version: u64,
}

impl<K: Key, V: Cached> Cache<K, V> {
    /// A cache that asks `load`, in tasks on `runtime`, each at most `load_limit` long, at most
    /// `cold_loads` of them at once for keys it has not seen.
    pub fn new(
        name: &'static str,
        config: CacheConfig,
        load_limit: Duration,
        cold_loads: usize,
        runtime: Handle,
        load: impl Fn(K) -> Loading<V> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            name,
            config,
            load_limit,
            load: Box::new(load),
            runtime,
            present: DashMap::new(),
            by_cluster: DashMap::new(),
            absent: DashMap::new(),
            flights: DashMap::new(),
            versions: Versions::default(),
            cold: Semaphore::new(cold_loads),
            strangers: AtomicUsize::new(0),
            silence: Backoff::default(),
            slowness: Backoff::default(),
            stats: CacheStats::default(),
        }))
    }

    /// The newest answer that may be used for `key`.
    pub async fn get(&self, key: K) -> Lookup<V> {
        match self.0.remembered(&key) {
            Some(answer) => {
                self.0.stats.hits.fetch_add(1, Ordering::Relaxed);
                answer
            }
            // In a box of its own: what waiting needs would make the future of every request large.
            None => Box::pin(self.refreshed(key)).await,
        }
    }

    /// The answer where none is fresh.
    async fn refreshed(&self, key: K) -> Lookup<V> {
        let older = self.0.servable(&key);
        // Where nobody may ask, waiting would only pile up requests.
        let Some(older) = older else {
            let may_ask = self.0.silence.may_ask()
                && (self.0.strangers.load(Ordering::Relaxed) < MAX_STRANGERS
                    || self.0.flights.contains_key(&key));
            return if may_ask { self.0.shared_load(key, true).await } else { Lookup::Unavailable };
        };
        if !self.0.silence.may_ask() || !self.0.slowness.may_ask() {
            return self.0.serve_stale(older);
        }
        match timeout(self.0.config.refresh_wait, self.0.shared_load(key, false)).await {
            Ok(Lookup::Unavailable) => self.0.serve_stale(older),
            Ok(answer) => answer,
            Err(_) => {
                self.0.slowness.begin();
                self.0.serve_stale(older)
            }
        }
    }

    /// Drops what is known of a cluster, and every remembered absence: the change may be what
    /// brought the absent thing into being. What was in use is asked for again at once, so that an
    /// outage that begins now finds it known.
    pub fn invalidate(&self, cluster: ClusterId) {
        self.0.versions.invalidate(cluster);
        let dropped = self.0.by_cluster.remove(&cluster).map(|(_, keys)| keys.into_vec()).unwrap_or_default();
        for key in &dropped {
            self.0.present.remove_if(key, |_, entry| entry.value.cluster() == cluster);
        }
        self.0.absent.clear();
        for key in dropped.into_iter().take(MAX_EAGER) {
            let cache = Arc::clone(&self.0);
            // Not behind strangers: these are known.
            self.0.runtime.spawn(async move { drop(cache.shared_load(key, false).await) });
        }
    }

    /// Makes every entry ask the database again before it serves; entries still bridge silence.
    pub fn expire_all(&self) {
        self.0.versions.expire_all();
        self.0.absent.clear();
    }

    /// Lets go of what can no longer serve. Called every few seconds from a background task.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut gone = Vec::new();
        self.0.present.retain(|key, entry| {
            let keep = entry.servable_until > now;
            if !keep {
                gone.push((entry.value.cluster(), *key));
            }
            keep
        });
        for (cluster, key) in gone {
            self.0.forget_index(cluster, &key);
        }
        self.0.absent.retain(|_, until| *until > now);
        self.0.versions.sweep();
    }

    /// Counters since the start.
    pub fn stats(&self) -> &CacheStats {
        &self.0.stats
    }

    /// Entries and remembered absences.
    pub fn len(&self) -> (usize, usize) {
        (self.0.present.len(), self.0.absent.len())
    }

    /// Age of the oldest answer that is held. Looks at every entry.
    pub fn oldest(&self) -> Option<Duration> {
        let fresh_until = self.0.present.iter().map(|entry| entry.fresh_until).min()?;
        Some((Instant::now() + self.0.config.ttl).saturating_duration_since(fresh_until))
    }

    /// How it stands.
    pub fn view(&self) -> CacheView {
        let (entries, absences) = self.len();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheView {
            name: self.0.name,
            entries,
            absences,
            hits: count(&self.0.stats.hits),
            loads: count(&self.0.stats.loads),
            stale: count(&self.0.stats.stale),
            silent: self.0.silence.is_on(),
        }
    }
}

impl<K: Key, V: Cached> Inner<K, V> {
    /// A fresh answer, present or absent.
    fn remembered(&self, key: &K) -> Option<Lookup<V>> {
        let now = Instant::now();
        if let Some(entry) = self.present.get(key) {
            let fresh = now < entry.fresh_until && !self.versions.expired_since(entry.version);
            return fresh.then(|| Lookup::Found(Arc::clone(&entry.value)));
        }
        let until = *self.absent.get(key)?;
        (now < until).then_some(Lookup::Absent)
    }

    fn servable(&self, key: &K) -> Option<Arc<V>> {
        let entry = self.present.get(key)?;
        (Instant::now() < entry.servable_until).then(|| Arc::clone(&entry.value))
    }

    fn serve_stale(&self, value: Arc<V>) -> Lookup<V> {
        self.stats.stale.fetch_add(1, Ordering::Relaxed);
        if self.silence.turn(&self.silence.warn_again_ms, WARN_AGAIN) {
            tracing::warn!(
                cache = self.name,
                "the control plane's database is silent: serving what was last known"
            );
        }
        Lookup::Found(value)
    }

    /// Joins the load of this key, or starts it.
    async fn shared_load(self: &Arc<Self>, key: K, cold: bool) -> Lookup<V> {
        let mut flight = match self.flights.entry(key) {
            Entry::Occupied(running) => running.get().clone(),
            Entry::Vacant(free) => {
                // The load may have ended between our look and this lock.
                if let Some(answer) = self.remembered(&key) {
                    return answer;
                }
                let (answer, flight) = watch::channel(None);
                free.insert(flight.clone());
                let landing = Landing { cache: Arc::clone(self), key, cold };
                if cold {
                    self.strangers.fetch_add(1, Ordering::Relaxed);
                }
                self.runtime.spawn(async move {
                    let loaded = landing.cache.load_and_store(key, cold).await;
                    drop(landing);
                    answer.send_replace(Some(loaded));
                });
                flight
            }
        };
        // The sender goes away without an answer only when the load panicked.
        let answer = flight.wait_for(Option::is_some).await;
        answer.ok().and_then(|answer| answer.clone()).unwrap_or(Lookup::Unavailable)
    }

    async fn load_and_store(&self, key: K, cold: bool) -> Lookup<V> {
        let _permit = if cold {
            // A queue of strangers says nothing about the database.
            match timeout(self.load_limit, self.cold.acquire()).await {
                Ok(permit) => permit.ok(),
                Err(_) => return Lookup::Unavailable,
            }
        } else {
            None
        };
        let whole = async {
            for _ in 0..MAX_RELOADS {
                let version = self.versions.now();
                self.stats.loads.fetch_add(1, Ordering::Relaxed);
                let answer = self.settle((self.load)(key).await);
                if self.store(key, &answer, version) {
                    return answer;
                }
                self.stats.overtaken.fetch_add(1, Ordering::Relaxed);
            }
            // Invalidations come faster than answers: true for this request, not to be kept.
            self.stats.loads.fetch_add(1, Ordering::Relaxed);
            self.settle((self.load)(key).await)
        };
        match timeout(self.load_limit, whole).await {
            Ok(answer) => answer,
            Err(_) => self.settle(Loaded::Silent),
        }
    }

    /// Takes note of whether the database speaks.
    fn settle(&self, loaded: Loaded<V>) -> Lookup<V> {
        if matches!(loaded, Loaded::Silent) {
            self.silence.begin();
        } else {
            self.silence.end();
            self.slowness.end();
        }
        match loaded {
            Loaded::Found(value) => Lookup::Found(Arc::new(value)),
            Loaded::Absent => Lookup::Absent,
            Loaded::Unusable | Loaded::Silent => Lookup::Unavailable,
        }
    }

    /// Keeps an answer; false when an invalidation overtook it. The check comes after the insert:
    /// an invalidation that this check misses has not removed entries yet, and will find ours.
    fn store(&self, key: K, answer: &Lookup<V>, version: u64) -> bool {
        match answer {
            Lookup::Found(value) => {
                let cluster = value.cluster();
                if self.present.contains_key(&key) || self.present.len() < self.config.max_entries {
                    let fresh_until = Instant::now() + self.config.ttl;
                    self.present.insert(
                        key,
                        Present {
                            value: Arc::clone(value),
                            fresh_until,
                            servable_until: fresh_until + self.config.stale_grace,
                            version,
                        },
                    );
                    // After the entry, so that a sweep which removes an older one leaves this in.
                    self.by_cluster.entry(cluster).or_default().insert(key);
                }
                self.absent.remove(&key);
                let overtaken = self.versions.changed_since(cluster, version);
                if overtaken {
                    self.forget(&key);
                }
                !overtaken
            }
            Lookup::Absent => {
                self.forget(&key);
                self.remember_absence(key);
                let overtaken = self.versions.anything_since(version);
                if overtaken {
                    self.absent.remove(&key);
                }
                !overtaken
            }
            Lookup::Unavailable => true,
        }
    }

    /// Beyond the cap an absence is not remembered: the answer stands, the memory stays bounded.
    fn remember_absence(&self, key: K) {
        let now = Instant::now();
        if self.absent.len() >= self.config.max_negatives {
            self.absent.retain(|_, until| *until > now);
        }
        if self.absent.len() < self.config.max_negatives {
            self.absent.insert(key, now + self.config.negative_ttl);
        }
    }

    fn forget(&self, key: &K) {
        if let Some((_, entry)) = self.present.remove(key) {
            self.forget_index(entry.value.cluster(), key);
        }
    }

    fn forget_index(&self, cluster: ClusterId, key: &K) {
        if let Entry::Occupied(mut keys) = self.by_cluster.entry(cluster) {
            if self.present.contains_key(key) {
                return; // stored anew meanwhile
            }
            keys.get_mut().remove(key);
            if keys.get().is_empty() {
                keys.remove();
            }
        }
    }
}

/// Ends a flight, also when its load panics.
struct Landing<K: Key, V: Cached> {
    cache: Arc<Inner<K, V>>,
    key: K,
    cold: bool,
}

impl<K: Key, V: Cached> Drop for Landing<K, V> {
    fn drop(&mut self) {
        self.cache.flights.remove(&self.key);
        if self.cold {
            self.cache.strangers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A trouble with the database, and whose turn it is to find out whether it has passed.
pub(super) struct Backoff {
    on: AtomicBool,
    started: Instant,
    ask_again_ms: AtomicU64,
    warn_again_ms: AtomicU64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            on: AtomicBool::new(false),
            started: Instant::now(),
            ask_again_ms: AtomicU64::new(0),
            warn_again_ms: AtomicU64::new(0),
        }
    }
}

impl Backoff {
    pub(super) fn begin(&self) {
        self.on.store(true, Ordering::Release);
        self.ask_again_ms.store(self.in_ms(RETRY_AFTER), Ordering::Release);
    }

    pub(super) fn end(&self) {
        self.on.store(false, Ordering::Release);
    }

    fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// True while there is no trouble; in trouble true once a second, for one caller.
    pub(super) fn may_ask(&self) -> bool {
        !self.on.load(Ordering::Acquire) || self.turn(&self.ask_again_ms, RETRY_AFTER)
    }

    /// Whether somebody ran into the trouble after `since`.
    pub(super) fn is_on_since(&self, since: Instant) -> bool {
        let began = self.ask_again_ms.load(Ordering::Acquire);
        let since = u64::try_from((since.duration_since(self.started) + RETRY_AFTER).as_millis());
        self.on.load(Ordering::Acquire) && since.is_ok_and(|since| began >= since)
    }

    fn turn(&self, next_ms: &AtomicU64, every: Duration) -> bool {
        let next = next_ms.load(Ordering::Acquire);
        self.in_ms(Duration::ZERO) >= next
            && next_ms.compare_exchange(next, self.in_ms(every), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn in_ms(&self, delay: Duration) -> u64 {
        u64::try_from((self.started.elapsed() + delay).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
