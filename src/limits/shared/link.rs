//! The task that talks to the store: whatever clusters have to ask goes out together, one round trip at a time.

use super::{
    Shared, Trip, lease, places,
    store::{Batch, Settings, Store, StoreError},
};
use crate::{
    domain::ids::ClusterId,
    limits::{
        ClusterLimits,
        clock::{Clock, Monotonic, Nanos},
        cluster::State,
    },
};
use std::{
    collections::{HashMap, HashSet},
    future::ready,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{
        mpsc::{UnboundedReceiver, unbounded_channel},
        oneshot,
    },
    task::JoinHandle,
    time::{MissedTickBehavior, interval, sleep},
};
use uuid::Uuid;

/// How often this proxy says that it is there.
const BEAT: Duration = Duration::from_millis(500);
/// How often it is looked for what nobody needs any more.
const SWEEP: Duration = Duration::from_millis(250);
/// Every so many sweeps the store hears again of the places that are held.
const RENEW: u32 = 4;
/// Between attempts to reach a store that is away.
const RETRY: Duration = Duration::from_millis(200);
/// Clusters of one round trip: those that ask, and of those that are only looked at.
const MOST: usize = 512;
const MOST_SWEPT: usize = 128;
/// A proxy that is not heard of may be cut off and serve its part all the same: so long it still counts.
const FEWER_AFTER: Duration = Duration::from_secs(5);

/// The running task.
#[derive(Debug)]
pub struct Link {
    /// What requests need of it.
    pub shared: Arc<Shared>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Link {
    /// Starts it; `clock` is a copy of the limiter's.
    pub fn start(runtime: &Handle, settings: Settings, clock: Monotonic) -> Self {
        let (asks, asked) = unbounded_channel();
        let shared = Arc::new(Shared::new(asks));
        let (stop, stopped) = oneshot::channel();
        let work = Work {
            shared: Arc::clone(&shared),
            asked,
            clock,
            proxy: Uuid::new_v4(),
            holders: HashMap::new(),
            fewer_since: None,
            lost: false,
        };
        let task = runtime.spawn(work.run(settings, stopped));
        Self { shared, stop, task }
    }

    /// Hands everything back, and ends.
    pub async fn shutdown(self) {
        let _ = self.stop.send(());
        let _ = self.task.await;
    }
}

struct Work {
    shared: Arc<Shared>,
    asked: UnboundedReceiver<Arc<ClusterLimits>>,
    clock: Monotonic,
    proxy: Uuid,
    /// Clusters of which something is held, so that it is handed back.
    holders: HashMap<ClusterId, Arc<ClusterLimits>>,
    fewer_since: Option<Instant>,
    /// The store was there and is not any more.
    lost: bool,
}

/// Why a cluster is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Asked,
    Sweep { renew: bool },
    Leave,
}

/// What one cluster asked.
struct Asked {
    cluster: Arc<ClusterLimits>,
    requests: Option<lease::Ask>,
    messages: Option<lease::Ask>,
    places: Option<places::Ask>,
}

impl Work {
    async fn run(mut self, settings: Settings, mut stopped: oneshot::Receiver<()>) {
        let mut told = None;
        loop {
            let error = tokio::select! {
                _ = &mut stopped => return,
                connected = self.connect(&settings) => match connected {
                    Ok(store) => {
                        tracing::info!(store = settings.place(), "limits: shared with other proxies");
                        match self.serve(store, &mut stopped).await {
                            Some(error) => error,
                            None => return,
                        }
                    }
                    Err(error) => error,
                },
            };
            if self.lose() || told.as_ref() != Some(&error) {
                let store = settings.place();
                tracing::warn!(store, %error, "limits: the store is away, this proxy goes by its part of them");
                told = Some(error);
            }
            tokio::select! {
                _ = &mut stopped => return,
                () = sleep(RETRY) => {}
            }
        }
    }

    /// A connection over which this proxy is known. All that it holds is told anew.
    async fn connect(&mut self, settings: &Settings) -> Result<Store, StoreError> {
        let mut store = Store::connect(settings, self.proxy).await?;
        self.trip(&mut store, Vec::new(), true).await?;
        self.shared.present.store(true, Ordering::Release);
        Ok(store)
    }

    /// Until the store fails, or nothing more is wanted.
    async fn serve(&mut self, mut store: Store, stopped: &mut oneshot::Receiver<()>) -> Option<StoreError> {
        let (mut beat, mut sweep) = (interval(BEAT), interval(SWEEP));
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut sweeps, mut batch, mut to_sweep) = (0_u32, Vec::new(), Vec::new());
        loop {
            let mut present = false;
            tokio::select! {
                biased;
                _ = &mut *stopped => {
                    self.leave(&mut store).await;
                    return None;
                }
                _ = beat.tick() => present = true,
                _ = self.asked.recv_many(&mut batch, MOST) => {}
                _ = sweep.tick(), if to_sweep.is_empty() => {
                    sweeps = sweeps.wrapping_add(1);
                    to_sweep = self.holders.values().map(Arc::clone).collect();
                }
                () = ready(()), if !to_sweep.is_empty() => {}
            }
            let mut asked: Vec<_> =
                batch.drain(..).filter_map(|cluster| self.look(&cluster, Look::Asked)).collect();
            // Whoever waits does not stand behind all the others.
            let sweep = Look::Sweep { renew: sweeps % RENEW == 1 };
            let some = to_sweep.split_off(to_sweep.len().saturating_sub(MOST_SWEPT));
            // Two answers to one cluster would not be about the same.
            let asking: HashSet<_> = asked.iter().map(|asked| asked.cluster.id()).collect();
            let idle = some.iter().filter(|cluster| !asking.contains(&cluster.id()));
            asked.extend(idle.filter_map(|cluster| self.look(cluster, sweep)));
            if (present || !asked.is_empty())
                && let Err(error) = self.trip(&mut store, asked, present).await
            {
                return Some(error);
            }
        }
    }

    /// Asks, and takes the answers in.
    async fn trip(&mut self, store: &mut Store, asked: Vec<Asked>, present: bool) -> Result<(), StoreError> {
        let proxies = self.shared.proxies();
        let mut batch = Batch::default();
        if present {
            store.presence(&mut batch, true);
        }
        for Asked { cluster, requests, messages, places } in &asked {
            for (kind, ask) in [("requests", requests), ("messages", messages)] {
                if let Some(ask) = ask {
                    store.tokens(&mut batch, cluster.id(), kind, ask, proxies);
                }
            }
            if let Some(ask) = places {
                store.places(&mut batch, cluster.id(), ask, proxies);
            }
        }
        let (began, sent) = (Instant::now(), self.clock.now());
        let answers = store.send(&batch).await;
        let trip = match &answers {
            Ok(_) => Trip::Answered,
            Err(StoreError::Late) => Trip::Late,
            Err(_) => Trip::Failed,
        };
        self.shared.count(trip, began.elapsed());
        match answers {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                if present && let Some((count, _)) = answers.next() {
                    self.heard_of(count);
                }
                for one in asked {
                    self.answer(one, &mut answers, sent);
                }
                Ok(())
            }
            Err(error) => {
                // First, or those who are told would ask again.
                self.lost |= self.shared.present.swap(false, Ordering::AcqRel);
                for Asked { cluster, .. } in asked {
                    self.unanswered(&cluster);
                }
                Err(error)
            }
        }
    }

    /// What a cluster has to ask now.
    fn look(&mut self, cluster: &Arc<ClusterLimits>, look: Look) -> Option<Asked> {
        let now = self.clock.now();
        let waiting = cluster.parked.waiting();
        let mut state = cluster.lock();
        let state = &mut *state;
        let tokens = |lease: Option<&mut lease::Lease>| {
            let lease = lease?;
            match look {
                Look::Asked => lease.ask(),
                Look::Sweep { .. } => lease.sweep(now),
                Look::Leave => lease.leave(),
            }
        };
        let (requests, messages) = (tokens(state.requests.lease()), tokens(state.messages.lease()));
        let places = match look {
            Look::Asked => {
                state.queued = false;
                let untold = state.places.has_untold(waiting);
                state.places.ask(waiting, untold)
            }
            Look::Sweep { renew } => state.places.sweep(waiting, renew),
            Look::Leave => state.places.leave(waiting),
        };
        if requests.is_none() && messages.is_none() && places.is_none() {
            if !holds(state) {
                self.holders.remove(&cluster.id());
            }
            return None;
        }
        Some(Asked { cluster: Arc::clone(cluster), requests, messages, places })
    }

    fn answer(&mut self, asked: Asked, answers: &mut impl Iterator<Item = (i64, i64)>, sent: Nanos) {
        let Asked { cluster, requests, messages, places } = asked;
        let mut state = cluster.lock();
        let state = &mut *state;
        for (ask, tokens) in [(requests, &mut state.requests), (messages, &mut state.messages)] {
            if let Some(ask) = ask
                && let Some((granted, level)) = answers.next()
                && let Some(lease) = tokens.lease()
            {
                lease.answer(&ask, number(granted), level, sent);
            }
        }
        if let Some(ask) = places
            && let Some((held, others)) = answers.next()
        {
            state.places.answer(&ask, number(held), number(others), self.clock.now());
        }
        state.tell();
        if holds(state) {
            self.holders.insert(cluster.id(), Arc::clone(&cluster));
        }
    }

    /// The store is away: whoever waits for it goes on without. True when it was there.
    fn lose(&mut self) -> bool {
        let was = std::mem::take(&mut self.lost);
        if was {
            self.shared.losses.fetch_add(1, Ordering::Relaxed);
        }
        while let Ok(cluster) = self.asked.try_recv() {
            self.unanswered(&cluster);
        }
        was
    }

    fn unanswered(&mut self, cluster: &Arc<ClusterLimits>) {
        let mut state = cluster.lock();
        let state = &mut *state;
        state.queued = false;
        for tokens in [&mut state.requests, &mut state.messages] {
            if let Some(lease) = tokens.lease() {
                lease.unanswered();
            }
        }
        state.places.unanswered();
        state.tell();
        // Its pops are told once the store is back.
        self.holders.insert(cluster.id(), Arc::clone(cluster));
    }

    /// Hands back what is held, and says good-bye. What does not get there ends with the heartbeat.
    async fn leave(&mut self, store: &mut Store) {
        self.shared.present.store(false, Ordering::Release);
        let holders: Vec<_> = self.holders.values().map(Arc::clone).collect();
        for some in holders.chunks(MOST) {
            let asked: Vec<_> = some.iter().filter_map(|cluster| self.look(cluster, Look::Leave)).collect();
            if !asked.is_empty() && self.trip(store, asked, false).await.is_err() {
                return;
            }
        }
        let mut batch = Batch::default();
        store.presence(&mut batch, false);
        let _ = store.send(&batch).await;
    }

    /// Fewer proxies than before are believed only after a while, or a store that has lost its memory would make
    /// each proxy take itself for the only one.
    fn heard_of(&mut self, count: i64) {
        let count = number(count).max(1);
        if count >= self.shared.proxies() {
            self.fewer_since = None;
        } else if self.fewer_since.get_or_insert_with(Instant::now).elapsed() < FEWER_AFTER {
            return;
        }
        if self.shared.proxies.swap(count, Ordering::Relaxed) != count {
            tracing::info!("limits: {count} proxies share them");
        }
    }
}

fn holds(state: &mut State) -> bool {
    let of = |lease: Option<&mut lease::Lease>| lease.is_some_and(|lease| lease.held() > 0);
    of(state.requests.lease()) || of(state.messages.lease()) || state.places.held() > 0
}

/// What the scripts count is never negative, other than a level.
fn number(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}
