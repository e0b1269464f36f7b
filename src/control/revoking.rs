//! Revocations on their way into the table. Those that the database does not take wait in one bounded queue,
//! of which nobody may have more than a share.

use super::{deny_list::now_s, store::Store};
use crate::domain::ids::UserId;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};

/// Revocations that are being written or wait for it.
const MAX_WAITING: usize = 1_000;
/// Of these, per user.
const MAX_PER_USER: usize = 8;
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// The revocation will not get into the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotRevoked;

/// Where they wait.
#[derive(Clone)]
pub(super) struct Revoking {
    places: Arc<Places>,
    late: mpsc::Sender<Revoked>,
}

/// Counts who has how many.
#[derive(Default)]
struct Places(Mutex<HashMap<UserId, usize>>);

/// A place, until it is dropped.
struct Place {
    places: Arc<Places>,
    user: UserId,
}

struct Revoked {
    jti: String,
    expires: u64,
    place: Place,
}

enum Written {
    Yes,
    /// The database did not speak.
    NotYet,
    Never,
}

impl Places {
    fn take(self: &Arc<Self>, user: UserId) -> Option<Place> {
        let mut by_user = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = by_user.get(&user).copied().unwrap_or(0);
        if mine >= MAX_PER_USER || by_user.values().sum::<usize>() >= MAX_WAITING {
            return None;
        }
        by_user.insert(user, mine + 1);
        Some(Place { places: Arc::clone(self), user })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_user = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mine) = by_user.get_mut(&self.user) {
            *mine -= 1;
            if *mine == 0 {
                by_user.remove(&self.user);
            }
        }
    }
}

impl Revoking {
    /// Starts the task that writes what was late, on the current runtime.
    pub fn start(store: Store) -> Self {
        let (late, waiting) = mpsc::channel(MAX_WAITING);
        tokio::spawn(write_late(store, waiting, late.downgrade()));
        Self { places: Arc::default(), late }
    }

    /// Writes a revocation, or has it written as soon as the database takes it. Returns after the first try,
    /// which goes on when the caller goes away.
    pub async fn write(
        &self,
        store: Store,
        runtime: &tokio::runtime::Handle,
        jti: String,
        expires: u64,
        user: UserId,
    ) -> Result<(), NotRevoked> {
        let Some(place) = self.places.take(user) else {
            tracing::error!("a session was revoked on this proxy only: too many revocations wait");
            return Err(NotRevoked);
        };
        let late = self.late.clone();
        let (tried, outcome) = oneshot::channel();
        runtime.spawn(async move {
            let revoked = Revoked { jti, expires, place };
            let done = match revoked.write(&store).await {
                Written::Yes => Ok(()),
                // There are as many places in the channel as there are to take.
                Written::NotYet => late.try_send(revoked).map_err(|_| NotRevoked),
                Written::Never => Err(NotRevoked),
            };
            let _ = tried.send(done);
        });
        outcome.await.unwrap_or(Err(NotRevoked))
    }
}

impl Revoked {
    async fn write(&self, store: &Store) -> Written {
        match store.revoke_session(&self.jti, self.expires, self.place.user).await {
            Ok(()) => Written::Yes,
            Err(error) if error.is_silence() => {
                tracing::warn!(%error, "a revocation is not in the table yet");
                Written::NotYet
            }
            Err(error) => {
                tracing::error!(%error, "a session was revoked on this proxy only");
                Written::Never
            }
        }
    }
}

/// Writes the oldest first. One that fails goes to the end, so that a row that somebody holds does not hold
/// up the others.
async fn write_late(store: Store, mut waiting: mpsc::Receiver<Revoked>, late: mpsc::WeakSender<Revoked>) {
    let mut pause = AGAIN;
    while let Some(revoked) = waiting.recv().await {
        if now_s() > revoked.expires {
            continue;
        }
        match revoked.write(&store).await {
            Written::Yes | Written::Never => pause = AGAIN,
            Written::NotYet => {
                // It has taken itself out, and nobody comes in without a place.
                let back = late.upgrade().is_some_and(|late| late.try_send(revoked).is_ok());
                if !back {
                    tracing::error!("a session was revoked on this proxy only");
                }
                sleep(pause).await;
                pause = (pause * 2).min(AGAIN_MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PER_USER, MAX_WAITING, Places};
    use crate::domain::ids::UserId;
    use std::sync::Arc;
    use uuid::Uuid;

    #[test]
    fn nobody_has_more_than_a_share_and_all_together_no_more_than_there_are() {
        let places: Arc<Places> = Arc::default();
        let user = |n: usize| UserId(Uuid::from_u128(n as u128));
        let mut taken: Vec<_> = (0..100).filter_map(|_| places.take(user(0))).collect();
        assert_eq!(taken.len(), MAX_PER_USER);
        taken.extend((1..2_000).filter_map(|n| places.take(user(n))));
        assert_eq!(taken.len(), MAX_WAITING);
        assert!(places.take(user(5_000)).is_none());
        taken.remove(0);
        taken.push(places.take(user(0)).unwrap());
        assert!(places.take(user(0)).is_none());
        drop(taken);
        assert!(places.0.lock().unwrap().is_empty());
    }
}
