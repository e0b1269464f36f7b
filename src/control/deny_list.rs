//! Revoked sessions (D7). A revocation is pushed and bites at once; asking the table, with each "no" kept
//! for a minute, is the fallback for one whose push was lost. A revocation is never taken back, so what is
//! once known to be revoked stays so until the token has ended.

use super::{cache::Backoff, pins::Pins, store::Store};
use dashmap::DashMap;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, sleep},
};

/// How long the table's "not revoked" is believed.
const BELIEVED: Duration = Duration::from_secs(60);
/// Entries of each kind. Beyond it "not revoked" is not kept, and the revocation that ends soonest is left
/// to the table.
const MAX_ENTRIES: usize = 100_000;
/// Pushed revocations whose ends are asked for at a time.
const LEARNED_AT_ONCE: usize = 1_000;
/// How long pushes are collected before their ends are asked for, and the wait after a failure.
const LEARN_AFTER: Duration = Duration::from_millis(500);
const LEARN_AGAIN: Duration = Duration::from_secs(5);
/// Look-ups at once, so that sessions cannot take the connections of everybody else.
const MAX_LOOK_UPS: usize = 2;

/// What is known of a token's id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Revocation {
    /// It is on the list.
    Revoked,
    /// The table said that it is not, at most a minute ago.
    NotRevoked,
    /// Nothing is known and the table does not answer.
    Unknown,
}

/// The deny-list as this proxy knows it.
#[derive(Clone)]
pub struct DenyList(Arc<Inner>);

struct Inner {
    store: Store,
    revoked: Pins,
    pushed: Notify,
    /// When the table was asked for each that it did not hold.
    not_revoked: DashMap<String, Instant>,
    /// Raised when notifications may have been lost: an answer asked for before that is not kept.
    generation: AtomicU64,
    asking: Semaphore,
    silence: Backoff,
}

impl DenyList {
    pub(super) fn new(store: Store) -> Self {
        Self(Arc::new(Inner {
            store,
            revoked: Pins::new(MAX_ENTRIES),
            pushed: Notify::new(),
            not_revoked: DashMap::new(),
            generation: AtomicU64::new(0),
            asking: Semaphore::new(MAX_LOOK_UPS),
            silence: Backoff::default(),
        }))
    }

    /// Takes note of a revocation that was announced. When its token ends is not in the notification, and is
    /// asked for later.
    pub fn push(&self, jti: &str) {
        self.0.revoked.add_unknown(jti, now_s());
        self.0.not_revoked.remove(jti);
        self.0.pushed.notify_one();
    }

    /// Takes note of the revocation of a token that ends at `expires`, in seconds of the epoch.
    pub fn pin(&self, jti: &str, expires: u64) {
        self.0.revoke(jti, expires);
    }

    /// Asks when pushed revocations end, so that they are not held for longer; for as long as the process
    /// lives.
    pub async fn learn_ends(self) {
        loop {
            self.0.pushed.notified().await;
            sleep(LEARN_AFTER).await;
            loop {
                let unknown = self.0.revoked.unknown(LEARNED_AT_ONCE);
                if unknown.is_empty() {
                    break;
                }
                match self.0.store.ends_of_revoked(&unknown).await {
                    Ok(ends) => {
                        tracing::debug!(asked = unknown.len(), known = ends.len(), "ends of revocations");
                        for (jti, expires) in &ends {
                            self.0.revoked.add(jti, *expires);
                        }
                        // Those that the table does not hold stay as they are.
                        for jti in &unknown {
                            self.0.revoked.leave(jti);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the ends of revocations are not known");
                        sleep(LEARN_AGAIN).await;
                    }
                }
            }
        }
    }

    /// Forgets the table's "not revoked": notifications may have been lost.
    pub fn expire_all(&self) {
        self.0.generation.fetch_add(1, SeqCst);
        self.0.not_revoked.clear();
    }

    /// Lets go of what is too old to serve.
    pub fn sweep(&self) {
        self.0.revoked.sweep(now_s());
        self.0.not_revoked.retain(|_, asked| asked.elapsed() < BELIEVED);
    }

    /// Whether a token that ends at `expires` (seconds of the epoch) is revoked. `fresh` believes no "not
    /// revoked" from before this call: for strict proxies that do not hear pushes at the moment.
    pub async fn look_up(&self, jti: &str, expires: u64, fresh: bool) -> Revocation {
        let asked_for = Instant::now();
        if let Some(known) = self.0.known(jti, fresh.then_some(asked_for)) {
            return known;
        }
        if !self.0.silence.may_ask() {
            return Revocation::Unknown;
        }
        let Ok(_permit) = self.0.asking.acquire().await else {
            return Revocation::Unknown;
        };
        // Whoever was before us in the queue may have asked for the same, or in vain.
        if let Some(known) = self.0.known(jti, fresh.then_some(asked_for)) {
            return known;
        }
        if self.0.silence.is_on_since(asked_for) {
            return Revocation::Unknown;
        }
        let generation = self.0.generation.load(SeqCst);
        let asked = Instant::now();
        match self.0.store.is_revoked(jti).await {
            Ok(true) => {
                self.0.silence.end();
                self.0.revoke(jti, expires);
                Revocation::Revoked
            }
            Ok(false) => {
                self.0.silence.end();
                self.0.keep_not_revoked(jti, asked, generation)
            }
            Err(error) => {
                // A refused question is a matter of this token, silence is one of all.
                if error.is_silence() {
                    self.0.silence.begin();
                }
                Revocation::Unknown
            }
        }
    }
}

impl Inner {
    fn revoke(&self, jti: &str, expires: u64) {
        self.revoked.add(jti, expires);
        self.not_revoked.remove(jti);
    }

    /// What needs no asking; "not revoked" only when the table was asked after `since`.
    fn known(&self, jti: &str, since: Option<Instant>) -> Option<Revocation> {
        if self.revoked.contains(jti) {
            return Some(Revocation::Revoked);
        }
        let asked = *self.not_revoked.get(jti)?;
        let good = asked.elapsed() < BELIEVED && since.is_none_or(|since| asked >= since);
        good.then_some(Revocation::NotRevoked)
    }

    /// Keeps a "not revoked", unless it was overtaken. The checks come after the insert: a push or an
    /// expiry that they miss has not removed entries yet, and will find ours.
    fn keep_not_revoked(&self, jti: &str, asked: Instant, generation: u64) -> Revocation {
        if self.not_revoked.len() < MAX_ENTRIES {
            self.not_revoked.insert(jti.to_owned(), asked);
        }
        if self.revoked.contains(jti) {
            self.not_revoked.remove(jti);
            return Revocation::Revoked;
        }
        if self.generation.load(SeqCst) != generation {
            self.not_revoked.remove(jti);
        }
        Revocation::NotRevoked
    }
}

/// Seconds of the epoch.
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
