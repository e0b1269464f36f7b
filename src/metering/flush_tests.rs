//! The flusher against a store that misbehaves, on a clock of the test's.

use super::*;
use crate::{
    domain::ids::ClusterId,
    metering::{
        accumulate::RowKey,
        sample::{Counts, Op, Sample},
    },
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};
use tokio::time::timeout;

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mood {
    Healthy,
    /// Nothing arrives.
    Away,
    /// It is written, and nobody hears of it.
    LostAnswer,
    /// Nothing arrives, and nothing comes back.
    Hangs,
    /// It is written, and nothing comes back.
    HangsAfter,
    /// An error that is no silence.
    Refuses,
}

/// Stands in for `record_usage`.
#[derive(Clone)]
struct Plane(Arc<Mutex<State>>);

struct State {
    mood: Mood,
    batches: HashMap<Uuid, u64>,
    rows: BTreeMap<(Uuid, u64, String), Counts>,
    calls: usize,
}

impl Plane {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            mood: Mood::Healthy,
            batches: HashMap::new(),
            rows: BTreeMap::new(),
            calls: 0,
        })))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn feel(&self, mood: Mood) {
        self.state().mood = mood;
    }

    fn messages(&self) -> u64 {
        self.state().rows.values().map(|counts| counts.msgs).sum()
    }

    /// `minute class requests/messages` of all clusters.
    fn rows(&self) -> Vec<String> {
        let state = self.state();
        let rows = state.rows.iter();
        rows.map(|((_, minute, op), counts)| format!("{minute} {op} {}/{}", counts.reqs, counts.msgs))
            .collect()
    }

    fn write(&self, batch: Uuid, rows: &str) -> Recorded {
        let mut state = self.state();
        if let Some(&written) = state.batches.get(&batch) {
            return Recorded { written, dropped: 0, repeated: true };
        }
        let rows: Vec<Value> = serde_json::from_str(rows).unwrap();
        for row in &rows {
            let number = |name: &str| row[name].as_u64().unwrap();
            let text = |name: &str| row[name].as_str().unwrap().to_owned();
            let key = (text("cluster_id").parse().unwrap(), number("minute"), text("op"));
            let counts = Counts {
                reqs: number("reqs"),
                msgs: number("msgs"),
                bytes_in: number("bytes_in"),
                bytes_out: number("bytes_out"),
            };
            state.rows.entry(key).or_default().add(counts);
        }
        state.batches.insert(batch, rows.len() as u64);
        Recorded { written: rows.len() as u64, dropped: 0, repeated: false }
    }
}

impl UsageStore for Plane {
    async fn record(&self, batch: Uuid, rows: &str) -> Result<Recorded, StoreError> {
        let mood = {
            let mut state = self.state();
            state.calls += 1;
            state.mood
        };
        match mood {
            Mood::Healthy => Ok(self.write(batch, rows)),
            Mood::Away => Err(StoreError::Silent(Duration::ZERO)),
            Mood::LostAnswer => {
                self.write(batch, rows);
                Err(StoreError::Silent(Duration::ZERO))
            }
            Mood::Hangs => std::future::pending().await,
            Mood::HangsAfter => {
                self.write(batch, rows);
                std::future::pending().await
            }
            Mood::Refuses => Err(StoreError::Malformed("refused")),
        }
    }
}

const PLENTY: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(15);

/// A process: its counters and its flusher.
struct Proxy {
    flusher: Flusher<Plane>,
}

impl Proxy {
    fn boot(plane: &Plane, folder: Option<&Path>, limit: u64) -> Self {
        let spool = folder.map(|folder| Spool::open(folder).unwrap());
        let flusher = Flusher::new(plane.clone(), Arc::default(), Arc::default(), spool, limit);
        Self { flusher }
    }

    fn count(&self, cluster: u128, op: Op, msgs: u64, now_s: u64) {
        let sample = Sample { op, counts: Counts { reqs: 1, msgs, ..Counts::default() } };
        let meter = self.flusher.accumulators.cluster(ClusterId(Uuid::from_u128(cluster)));
        meter.record(sample, now_s);
    }

    async fn tick(&mut self, now_s: u64) {
        self.flusher.tick(now_s, PATIENCE).await;
    }
}

/// A time in the first second of a minute.
const NOON: u64 = 29_000_000 * 60;

#[tokio::test]
async fn only_minutes_that_are_over_are_sent() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    proxy.count(1, Op::Push, 5, NOON);
    proxy.tick(NOON + 15).await;
    proxy.count(1, Op::Push, 6, NOON + 30);
    proxy.tick(NOON + 45).await;
    assert_eq!(plane.state().calls, 0);
    assert_eq!(proxy.flusher.metrics.snapshot().spool_files, 1, "the open minute is on disk");
    proxy.count(1, Op::Read, 0, NOON + 59);
    proxy.count(1, Op::Push, 7, NOON + 60);
    proxy.tick(NOON + 60).await;
    assert_eq!(plane.rows(), ["29000000 push 2/11", "29000000 read 1/0"]);
    let snapshot = proxy.flusher.metrics.snapshot();
    assert_eq!((snapshot.spool_files, snapshot.rows_written, snapshot.flushes), (1, 2, 1));
    assert_eq!(snapshot.last_success_s, NOON + 60);
    assert_eq!(snapshot.usage[Op::Push.index()].msgs, 18, "counted, also what is not sent");
    proxy.flusher.finish(NOON + 61, PATIENCE).await;
    assert_eq!(plane.rows(), ["29000000 push 2/11", "29000000 read 1/0", "29000001 push 1/7"]);
    assert_eq!(proxy.flusher.metrics.snapshot().spool_files, 0);
    proxy.tick(NOON + 600).await;
    assert_eq!(plane.state().calls, 2, "nothing to send");
}

#[tokio::test]
async fn an_hour_away_is_made_up_for_oldest_first() {
    for on_disk in [true, false] {
        let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
        let mut proxy = Proxy::boot(&plane, on_disk.then_some(folder.path()), PLENTY);
        plane.feel(Mood::Away);
        for minute in 0..60 {
            for second in [0, 15, 30, 45] {
                proxy.count(1, Op::Push, 1, NOON + minute * 60 + second);
                proxy.tick(NOON + minute * 60 + second + 14).await;
            }
        }
        assert!(plane.rows().is_empty());
        let snapshot = proxy.flusher.metrics.snapshot();
        assert_eq!(
            (snapshot.spool_files, snapshot.held_bytes == 0),
            if on_disk { (60, true) } else { (0, false) }
        );
        assert!(snapshot.flush_failures >= 59);
        plane.feel(Mood::Healthy);
        proxy.tick(NOON + 3_600).await;
        let expected: Vec<String> =
            (0..60).map(|minute| format!("{} push 4/4", 29_000_000 + minute)).collect();
        assert_eq!(plane.rows(), expected, "on disk: {on_disk}");
        let snapshot = proxy.flusher.metrics.snapshot();
        assert_eq!((snapshot.spool_files, snapshot.held_bytes, snapshot.dropped_rows), (0, 0, 0));
    }
}

#[tokio::test]
async fn a_full_spool_keeps_the_oldest_and_counts_what_it_drops() {
    for on_disk in [true, false] {
        let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
        let mut proxy = Proxy::boot(&plane, on_disk.then_some(folder.path()), 2_000);
        plane.feel(Mood::Away);
        for minute in 0..60 {
            proxy.count(1, Op::Push, 3, NOON + minute * 60);
            proxy.tick(NOON + minute * 60 + 59).await;
            let snapshot = proxy.flusher.metrics.snapshot();
            assert!(snapshot.spool_bytes + snapshot.held_bytes <= 2_000, "{snapshot:?}");
        }
        plane.feel(Mood::Healthy);
        proxy.flusher.finish(NOON + 3_600, PATIENCE).await;
        let dropped = proxy.flusher.metrics.snapshot();
        let rows = plane.rows();
        assert!((5..20).contains(&rows.len()), "{rows:?}");
        assert_eq!(rows[0], "29000000 push 1/3");
        assert_eq!(rows.last().unwrap(), "29000059 push 1/3", "the last minute was sent, not kept");
        assert_eq!(rows.len() as u64 + dropped.dropped_rows, 60, "on disk: {on_disk}");
        assert_eq!(plane.messages() + dropped.dropped_msgs, 180);
    }
}

#[tokio::test]
async fn a_disk_that_goes_away_costs_nothing_while_the_process_lives() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let path = folder.path().join("spool");
    let mut proxy = Proxy::boot(&plane, Some(&path), PLENTY);
    plane.feel(Mood::Away);
    proxy.count(1, Op::Push, 1, NOON);
    proxy.tick(NOON + 10).await;
    std::fs::rename(&path, folder.path().join("gone")).unwrap();
    proxy.count(1, Op::Push, 2, NOON + 20);
    proxy.tick(NOON + 60).await;
    let snapshot = proxy.flusher.metrics.snapshot();
    assert!(snapshot.held_bytes > 0, "{snapshot:?}");
    // The disk is back, with the younger state of the batch.
    std::fs::rename(folder.path().join("gone"), &path).unwrap();
    proxy.count(1, Op::Push, 4, NOON + 70);
    proxy.tick(NOON + 75).await;
    assert_eq!(proxy.flusher.metrics.snapshot().held_bytes, 0);
    plane.feel(Mood::Healthy);
    proxy.tick(NOON + 130).await;
    assert_eq!(plane.rows(), ["29000000 push 2/3", "29000001 push 1/4"]);
    assert_eq!(proxy.flusher.metrics.snapshot().spool_files, 0);
}

/// The younger state of a batch is on disk, and must not be taken for the batch.
#[tokio::test]
async fn a_batch_that_is_held_is_not_sent_by_halves() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), 400);
    proxy.count(1, Op::Push, 1, NOON);
    proxy.tick(NOON + 10).await;
    assert_eq!(proxy.flusher.metrics.snapshot().spool_files, 1);
    // Now it does not fit any more, and is sent from memory.
    for op in Op::ALL {
        proxy.count(1, op, 2, NOON + 20);
    }
    proxy.tick(NOON + 60).await;
    assert_eq!(plane.messages(), 11);
    let snapshot = proxy.flusher.metrics.snapshot();
    assert_eq!((snapshot.spool_files, snapshot.held_bytes, snapshot.dropped_rows), (0, 0, 0));
}

#[tokio::test]
async fn a_store_that_refuses_one_batch_after_the_other_is_not_asked_for_all() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    plane.feel(Mood::Away);
    for minute in 0..10 {
        proxy.count(1, Op::Push, 1, NOON + minute * 60);
        proxy.tick(NOON + minute * 60 + 59).await;
    }
    plane.feel(Mood::Refuses);
    let before = plane.state().calls;
    proxy.tick(NOON + 600).await;
    assert_eq!(plane.state().calls - before, 3);
    plane.feel(Mood::Healthy);
    proxy.tick(NOON + 615).await;
    assert_eq!(plane.messages(), 10);
}

#[tokio::test(start_paused = true)]
async fn the_rest_waits_when_the_time_is_up() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    plane.feel(Mood::Away);
    for minute in 0..5 {
        proxy.count(1, Op::Push, 1, NOON + minute * 60);
        proxy.tick(NOON + minute * 60 + 59).await;
    }
    plane.feel(Mood::Healthy);
    for sent in 1..=5 {
        proxy.flusher.tick(NOON + 600, Duration::ZERO).await;
        assert_eq!(plane.messages(), sent);
    }
}

#[tokio::test]
async fn what_is_too_old_or_no_batch_is_set_aside() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    plane.feel(Mood::Away);
    proxy.count(1, Op::Push, 5, NOON);
    proxy.tick(NOON + 60).await;
    drop(proxy);
    let name = |ms: u64| folder.path().join(format!("meter-{ms:013}-00000009.buf"));
    std::fs::write(name(NOON * 1000), "no batch\n").unwrap();
    let damaged = "{\"batch\":\"00000000-0000-0000-0000-000000000009\",\"rows\":3}\n\
        {\"cluster_id\":\"00000000-0000-0000-0000-000000000001\",\"minute\":1,\"op\":\"push\",\
         \"reqs\":1,\"msgs\":7,\"bytes_in\":0,\"bytes_out\":0}\nxxx\n";
    std::fs::write(name(NOON * 1000 + 30 * 86_400_000), damaged).unwrap();
    plane.feel(Mood::Healthy);
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    proxy.tick(NOON + 31 * 86_400).await;
    assert_eq!(plane.rows(), ["1 push 1/7"], "the readable row of the damaged one");
    let snapshot = proxy.flusher.metrics.snapshot();
    assert_eq!((snapshot.spool_files, snapshot.dropped_rows, snapshot.dropped_msgs), (0, 3, 5));
    let files = std::fs::read_dir(folder.path()).unwrap();
    let bad = files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|end| end == "bad"));
    assert_eq!(bad.count(), 3);
}

#[tokio::test]
async fn pieces_of_a_large_batch_that_arrived_are_not_counted_again() {
    let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    let clusters = 2 * CHUNK as u128 + 1;
    for cluster in 0..clusters {
        proxy.count(cluster, Op::Push, 1, NOON);
    }
    plane.feel(Mood::LostAnswer);
    proxy.tick(NOON + 60).await;
    assert_eq!(plane.messages(), CHUNK as u64);
    drop(proxy);
    plane.feel(Mood::Healthy);
    let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
    proxy.tick(NOON + 61).await;
    assert_eq!(plane.messages(), u64::try_from(clusters).unwrap());
    assert_eq!(proxy.flusher.metrics.snapshot().batches_repeated, 1);
}

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }
}

/// Case 39: killed at any moment, with a control plane that does what it likes. What was counted before the last
/// flush is there once; the rest may be gone.
#[tokio::test(start_paused = true)]
async fn kills_and_outages_lose_at_most_a_flush_interval_and_count_nothing_twice() {
    for seed in 1..=20 {
        let (plane, folder) = (Plane::new(), tempfile::tempdir().unwrap());
        let mut dice = Dice(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let mut proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
        let (mut now, mut safe, mut fresh, mut lost, mut kills) = (NOON, 0, 0, 0, 0);
        for _ in 0..300 {
            for _ in 0..dice.below(5) {
                let msgs = dice.below(9);
                proxy.count(dice.below(3).into(), dice.pick(&Op::ALL), msgs, now);
                fresh += msgs;
            }
            now += dice.below(25);
            let moods = [
                Mood::Healthy,
                Mood::Healthy,
                Mood::Away,
                Mood::LostAnswer,
                Mood::Hangs,
                Mood::HangsAfter,
                Mood::Refuses,
            ];
            plane.feel(dice.pick(&moods));
            if dice.below(10) == 0 {
                // Killed within the interval.
                kills += 1;
                lost += fresh;
                fresh = 0;
                drop(proxy);
                proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
            } else {
                // Hanging ends only by being cancelled, as at a shutdown.
                let ended = timeout(Duration::from_secs(60), proxy.tick(now)).await;
                safe += fresh;
                fresh = 0;
                if ended.is_err() && dice.below(2) == 0 {
                    kills += 1;
                    drop(proxy);
                    proxy = Proxy::boot(&plane, Some(folder.path()), PLENTY);
                }
            }
        }
        plane.feel(Mood::Healthy);
        safe += fresh;
        proxy.flusher.finish(now, PATIENCE).await;
        assert_eq!(plane.messages(), safe, "seed {seed}, {kills} kills");
        assert!(kills > 20 && lost > 0);
        let keys: Vec<RowKey> = proxy.flusher.open.rows.keys().copied().collect();
        assert_eq!((keys, proxy.flusher.held.len()), (Vec::new(), 0));
    }
}
