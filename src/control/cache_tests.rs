//! The cache against a loader whose answers and pace the test decides. Time is tokio's paused clock.

use super::{Cache, Cached, Loaded};
use crate::{
    config::proxy::CacheConfig,
    control::{KeyDigest, snapshot::ClusterRow},
    domain::{
        cluster::{ApiKey, Cluster},
        ids::{BrokerTenant, ClusterId, KeyId},
        lookup::Lookup,
        scopes::Scopes,
        secret::Secret,
        slug::Slug,
    },
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Semaphore, time::advance};
use uuid::Uuid;

struct Thing(u32);

const CLUSTER: ClusterId = ClusterId(Uuid::from_u128(7));

impl Cached for Thing {
    fn cluster(&self) -> ClusterId {
        CLUSTER
    }
}

#[derive(Clone, Copy)]
enum Database {
    Has(u32),
    HasNothing,
    HasNonsense,
    IsSilent,
    Hangs,
}

/// A database of one row that can change, fall silent, hang or be held.
#[derive(Clone)]
struct Stage {
    database: Arc<Mutex<Database>>,
    asked: Arc<AtomicUsize>,
    /// A load takes a permit after it has read its answer and before it gives it.
    gate: Arc<Semaphore>,
}

impl Stage {
    fn new(database: Database) -> Self {
        Self {
            database: Arc::new(Mutex::new(database)),
            asked: Arc::default(),
            gate: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
        }
    }

    fn now(&self, database: Database) {
        *self.database.lock().unwrap() = database;
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn cache(&self) -> Cache<u64, Thing> {
        let config = CacheConfig {
            ttl: Duration::from_secs(30),
            negative_ttl: Duration::from_secs(5),
            stale_grace: Duration::from_secs(600),
            refresh_wait: Duration::from_millis(250),
            max_entries: 100,
            max_negatives: 10,
        };
        let stage = self.clone();
        Cache::new("test", config, Duration::from_secs(5), 8, tokio::runtime::Handle::current(), move |_| {
            let stage = stage.clone();
            Box::pin(async move {
                stage.asked.fetch_add(1, Ordering::SeqCst);
                let answer = *stage.database.lock().unwrap();
                stage.gate.acquire().await.unwrap().forget();
                stage.gate.add_permits(1);
                match answer {
                    Database::Has(value) => Loaded::Found(Thing(value)),
                    Database::HasNothing => Loaded::Absent,
                    Database::HasNonsense => Loaded::Unusable,
                    Database::IsSilent => Loaded::Silent,
                    Database::Hangs => std::future::pending().await,
                }
            })
        })
    }
}

fn value(answer: &Lookup<Thing>) -> Option<u32> {
    match answer {
        Lookup::Found(thing) => Some(thing.0),
        _ => None,
    }
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_fresh_entry_asks_nobody_and_an_expired_one_waits_for_the_refresh() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    for _ in 0..10 {
        assert_eq!(value(&cache.get(1).await), Some(1));
    }
    assert_eq!(stage.asked(), 1);
    stage.now(Database::Has(2));
    advance(Duration::from_secs(29)).await;
    assert_eq!(value(&cache.get(1).await), Some(1), "still fresh");
    advance(Duration::from_secs(2)).await;
    assert_eq!(value(&cache.get(1).await), Some(2), "expired: the new answer, not the old one");
    assert_eq!(stage.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn silence_is_bridged_for_the_grace_and_never_remembered() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::IsSilent);
    advance(Duration::from_secs(31)).await;
    for second in 0..590 {
        assert_eq!(value(&cache.get(1).await), Some(1), "second {second} of the silence");
        assert_eq!(value(&cache.get(1).await), Some(1), "and again at once");
        advance(Duration::from_secs(1)).await;
    }
    assert!(stage.asked() <= 592, "asked at most once a second, not on each request: {}", stage.asked());
    advance(Duration::from_secs(20)).await;
    assert!(matches!(cache.get(1).await, Lookup::Unavailable), "the grace is over");
    assert!(matches!(cache.get(2).await, Lookup::Unavailable), "never seen");
    stage.now(Database::Has(3));
    advance(Duration::from_secs(1)).await;
    assert_eq!(value(&cache.get(2).await), Some(3), "silence was not remembered as absence");
    assert_eq!(value(&cache.get(1).await), Some(3));
}

#[tokio::test(start_paused = true)]
async fn a_row_that_makes_no_sense_is_bridged_and_is_nobody_elses_concern() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::HasNonsense);
    advance(Duration::from_secs(31)).await;
    assert_eq!(value(&cache.get(1).await), Some(1));
    assert!(matches!(cache.get(2).await, Lookup::Unavailable));
    stage.now(Database::Has(3));
    assert_eq!(value(&cache.get(3).await), Some(3), "the database speaks, so others are asked for at once");
}

#[tokio::test(start_paused = true)]
async fn in_silence_unknown_keys_do_not_wait_each_for_the_database() {
    let stage = Stage::new(Database::Hangs);
    let cache = stage.cache();
    let start = tokio::time::Instant::now();
    for key in 0..1000 {
        assert!(matches!(cache.get(key).await, Lookup::Unavailable));
    }
    // One load runs into its limit; after that the silence is known.
    assert!(start.elapsed() <= Duration::from_secs(6), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_hanging_database_costs_a_known_tenant_one_short_wait_a_second() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::Hangs);
    advance(Duration::from_secs(31)).await;
    let start = tokio::time::Instant::now();
    for _ in 0..1000 {
        assert_eq!(value(&cache.get(1).await), Some(1));
    }
    assert!(start.elapsed() <= Duration::from_millis(260), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn absence_denies_at_once_is_remembered_briefly_and_beats_the_grace() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::HasNothing);
    advance(Duration::from_secs(31)).await;
    assert!(matches!(cache.get(1).await, Lookup::Absent));
    stage.now(Database::IsSilent);
    assert!(matches!(cache.get(1).await, Lookup::Absent), "remembered");
    advance(Duration::from_secs(6)).await;
    assert!(matches!(cache.get(1).await, Lookup::Unavailable), "nothing came back to life");
    stage.now(Database::Has(2));
    advance(Duration::from_secs(1)).await;
    assert_eq!(value(&cache.get(1).await), Some(2));
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_drops_the_entry_and_clears_absences() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::HasNothing);
    assert!(matches!(cache.get(2).await, Lookup::Absent));
    stage.now(Database::Has(2));
    cache.invalidate(CLUSTER);
    assert_eq!(value(&cache.get(1).await), Some(2));
    assert_eq!(value(&cache.get(2).await), Some(2));
    // What was known to have changed does not bridge silence.
    cache.invalidate(CLUSTER);
    stage.now(Database::IsSilent);
    assert!(matches!(cache.get(1).await, Lookup::Unavailable));
    // Another cluster's change leaves this one alone.
    stage.now(Database::Has(3));
    advance(Duration::from_secs(1)).await;
    cache.get(1).await;
    let asked = stage.asked();
    cache.invalidate(ClusterId(Uuid::from_u128(8)));
    cache.get(1).await;
    assert_eq!(stage.asked(), asked);
}

#[tokio::test(start_paused = true)]
async fn what_an_invalidation_drops_is_asked_for_again_before_anybody_needs_it() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    stage.now(Database::Has(2));
    cache.invalidate(CLUSTER);
    settle().await;
    assert_eq!(stage.asked(), 2);
    stage.now(Database::IsSilent);
    assert_eq!(value(&cache.get(1).await), Some(2), "known when the silence began");
}

#[tokio::test(start_paused = true)]
async fn after_a_reconnect_everything_is_asked_again_but_still_bridges_silence() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(1).await;
    cache.expire_all();
    stage.now(Database::IsSilent);
    assert_eq!(value(&cache.get(1).await), Some(1));
    stage.now(Database::Has(2));
    advance(Duration::from_secs(2)).await;
    assert_eq!(value(&cache.get(1).await), Some(2));
}

#[tokio::test(start_paused = true)]
async fn an_answer_overtaken_by_an_invalidation_is_thrown_away() {
    for before in [Database::Has(1), Database::HasNothing] {
        for expire in [false, true] {
            let stage = Stage::new(before);
            let cache = stage.cache();
            let held = stage.gate.forget_permits(Semaphore::MAX_PERMITS);
            let waiting = tokio::spawn({
                let cache = cache.clone();
                async move { value(&cache.get(1).await) }
            });
            settle().await;
            assert_eq!(stage.asked(), 1, "the load has read the old state and is held");
            stage.now(Database::Has(2));
            if expire {
                cache.expire_all();
            } else {
                cache.invalidate(CLUSTER);
            }
            stage.gate.add_permits(held);
            assert_eq!(waiting.await.unwrap(), Some(2));
            assert_eq!(value(&cache.get(1).await), Some(2));
            assert_eq!(stage.asked(), 2);
            assert_eq!(cache.stats().overtaken.load(Ordering::SeqCst), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn five_hundred_first_requests_ask_once_also_when_the_first_goes_away() {
    for cancel_leader in [false, true] {
        let stage = Stage::new(Database::Has(1));
        let cache = stage.cache();
        let held = stage.gate.forget_permits(Semaphore::MAX_PERMITS);
        let mut waiting: Vec<_> = (0..500)
            .map(|_| {
                let cache = cache.clone();
                tokio::spawn(async move { value(&cache.get(1).await) })
            })
            .collect();
        settle().await;
        if cancel_leader {
            waiting.remove(0).abort();
        }
        stage.gate.add_permits(held);
        for waiter in waiting {
            assert_eq!(waiter.await.unwrap(), Some(1));
        }
        assert_eq!(stage.asked(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_panicking_load_frees_its_waiters_and_the_key() {
    let panics = Arc::new(AtomicUsize::new(0));
    let config = CacheConfig {
        ttl: Duration::from_secs(30),
        negative_ttl: Duration::from_secs(5),
        stale_grace: Duration::ZERO,
        refresh_wait: Duration::from_millis(250),
        max_entries: 100,
        max_negatives: 10,
    };
    let seen = Arc::clone(&panics);
    let cache: Cache<u64, Thing> =
        Cache::new("test", config, Duration::from_secs(5), 8, tokio::runtime::Handle::current(), move |_| {
            let first = seen.fetch_add(1, Ordering::SeqCst) == 0;
            Box::pin(async move {
                assert!(!first, "the first load panics on purpose");
                Loaded::Found(Thing(1))
            })
        });
    assert!(matches!(cache.get(1).await, Lookup::Unavailable));
    assert_eq!(value(&cache.get(1).await), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_unknown_keys_stays_bounded_and_leaves_known_ones_alone() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(0).await;
    stage.now(Database::HasNothing);
    for key in 1..5_000 {
        assert!(matches!(cache.get(key).await, Lookup::Absent));
    }
    let (present, absent) = cache.len();
    assert!(absent <= 10, "{absent} absences remembered");
    assert_eq!(present, 1);
    assert_eq!(value(&cache.get(0).await), Some(1), "the known entry is untouched");
    advance(Duration::from_secs(700)).await;
    cache.sweep();
    assert_eq!(cache.len(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_queue_of_strangers_is_bounded_and_nobody_known_waits_in_it() {
    let stage = Stage::new(Database::Has(1));
    let cache = stage.cache();
    cache.get(0).await;
    let held = stage.gate.forget_permits(Semaphore::MAX_PERMITS);
    let mut strangers = Vec::new();
    for key in 1..2_000 {
        let cache = cache.clone();
        strangers.push(tokio::spawn(async move { matches!(cache.get(key).await, Lookup::Unavailable) }));
    }
    for _ in 0..200 {
        settle().await;
    }
    let asked = stage.asked();
    assert_eq!(asked, 1 + 8, "as many as may at once");
    // A change of the known one is asked for beside the queue, not behind it.
    stage.now(Database::Has(2));
    cache.invalidate(CLUSTER);
    settle().await;
    assert_eq!(stage.asked(), asked + 1);
    stage.gate.add_permits(held);
    assert_eq!(value(&cache.get(0).await), Some(2));
    let mut turned_away = 0;
    for stranger in strangers {
        turned_away += usize::from(stranger.await.unwrap());
    }
    assert!(turned_away >= 1_000, "{turned_away} were told at once");
}

/// What one cluster and its key take, of what they were asked for from the allocator.
#[test]
fn a_cached_cluster_and_its_key_take_little() {
    const CLUSTERS: u128 = 10_000;
    let config = CacheConfig {
        ttl: Duration::from_secs(600),
        negative_ttl: Duration::from_secs(5),
        stale_grace: Duration::from_secs(600),
        refresh_wait: Duration::from_millis(250),
        max_entries: 100_000,
        max_negatives: 10,
    };
    // All on this thread, whose allocations are counted.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut caches = None;
    let grown = allocation_counter::measure(|| {
        let limit = Duration::from_secs(5);
        let clusters: Cache<Slug, Cluster> =
            Cache::new("clusters", config, limit, 8, runtime.handle().clone(), |slug: Slug| {
                Box::pin(async move {
                    let secret = Some(Secret::new("a-secret-of-the-usual-length-0123456789abcdef"));
                    let url = "http://10.20.30.40:6632".to_owned();
                    let number = slug.as_str().trim_start_matches("tenant-").parse().unwrap();
                    let id = Uuid::from_u128(number);
                    let row = ClusterRow::synthetic(url, secret, BrokerTenant(id)).unwrap();
                    let cluster = row.into_cluster().await.unwrap();
                    Loaded::Found(Cluster { slug, id: ClusterId(id), ..cluster })
                })
            });
        let keys: Cache<KeyDigest, ApiKey> =
            Cache::new("keys", config, limit, 8, runtime.handle().clone(), |digest: KeyDigest| {
                Box::pin(async move {
                    let id = Uuid::from_slice(&digest[..16]).unwrap();
                    Loaded::Found(ApiKey { id: KeyId(id), cluster: ClusterId(id), scopes: Scopes::default() })
                })
            });
        runtime.block_on(async {
            for number in 0..CLUSTERS {
                let slug = Slug::parse(&format!("tenant-{number}")).unwrap();
                assert!(matches!(clusters.get(slug).await, Lookup::Found(_)));
                let mut digest = [0; 32];
                digest[..16].copy_from_slice(&number.to_be_bytes());
                assert!(matches!(keys.get(digest).await, Lookup::Found(_)));
            }
        });
        caches = Some((clusters, keys));
    });
    let each = u128::try_from(grown.bytes_current).unwrap() / CLUSTERS;
    println!("{each} bytes");
    assert!(each < 1_536, "{each} bytes");
    drop(caches);
}
