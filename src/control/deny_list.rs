//! Revoked sessions (D7). A revocation is pushed and bites at once; asking the table, with each answer
//! kept for a minute, is the fallback for one whose push was lost.

use super::{cache::Backoff, store::Store};
use dashmap::DashMap;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// How long an answer of the table is believed.
const BELIEVED: Duration = Duration::from_secs(60);
/// How long a pushed revocation is held. The table knows it from then on, and every answer after an
/// hour is younger than it.
const HELD: Duration = Duration::from_secs(3600);
/// Entries of each kind. Beyond it answers are not kept; a push takes the place of older ones.
const MAX_ENTRIES: usize = 100_000;

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
    pushed: DashMap<String, Instant>,
    answers: DashMap<String, (bool, Instant)>,
    silence: Backoff,
}

impl DenyList {
    pub(super) fn new(store: Store) -> Self {
        Self(Arc::new(Inner {
            store,
            pushed: DashMap::new(),
            answers: DashMap::new(),
            silence: Backoff::default(),
        }))
    }

    /// Takes note of a revocation, from the notification or from our own logout.
    pub fn push(&self, jti: &str) {
        if self.0.pushed.len() >= MAX_ENTRIES {
            self.sweep();
        }
        self.0.pushed.insert(jti.to_owned(), Instant::now() + HELD);
        self.0.answers.remove(jti);
    }

    /// Forgets the table's answers: notifications may have been lost.
    pub fn expire_all(&self) {
        self.0.answers.clear();
    }

    /// Lets go of what is too old to serve.
    pub fn sweep(&self) {
        let now = Instant::now();
        self.0.pushed.retain(|_, until| *until > now);
        self.0.answers.retain(|_, (_, until)| *until > now);
    }

    /// Whether a token is revoked. `fresh` believes no earlier "not revoked": for strict proxies that
    /// do not hear pushes at the moment.
    pub async fn look_up(&self, jti: &str, fresh: bool) -> Revocation {
        let now = Instant::now();
        if self.0.pushed.get(jti).is_some_and(|until| *until > now) {
            return Revocation::Revoked;
        }
        match self.0.answers.get(jti).map(|answer| *answer) {
            Some((true, until)) if until > now => return Revocation::Revoked,
            Some((false, until)) if until > now && !fresh => return Revocation::NotRevoked,
            _ => {}
        }
        if !self.0.silence.may_ask() {
            return Revocation::Unknown;
        }
        let Ok(revoked) = self.0.store.is_revoked(jti).await else {
            self.0.silence.begin();
            return Revocation::Unknown;
        };
        self.0.silence.end();
        if self.0.answers.len() < MAX_ENTRIES {
            self.0.answers.insert(jti.to_owned(), (revoked, now + BELIEVED));
        }
        // A push may have come while the table was asked; the answer just stored must not outlive it.
        if self.0.pushed.contains_key(jti) {
            self.0.answers.remove(jti);
            return Revocation::Revoked;
        }
        if revoked { Revocation::Revoked } else { Revocation::NotRevoked }
    }
}
