//! Checking passwords: slow on purpose, so it has threads of its own with a bounded queue, and these stand
//! behind the traffic of tenants (proxy contract §6).

use std::{
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};
use tokio::sync::oneshot;

/// What a password is checked against when there is no such user: the cost of those that the SQL functions
/// and the admin commands set. Nobody knows its password.
const NOBODY: &str = "$2b$10$dsh3CeZ5MVEyiRYGXzfDZuRD63/RIiRQizgKzIldn0H2NIlNyne6O";

/// The highest cost that is worked on: each step doubles the time, and one hash at cost 20 holds a thread
/// for a minute.
const MAX_COST: u32 = 15;

/// Nice value of the threads: with tenants' requests waiting, they get about a thirtieth of a core.
const NICE: i32 = 15;

/// The queue is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Busy;

/// The threads and the way to them.
pub(super) struct Passwords(mpsc::SyncSender<Job>);

struct Job {
    password: String,
    hash: Option<String>,
    verdict: oneshot::Sender<bool>,
}

impl Passwords {
    /// Starts `workers` threads; `queue` more checks may wait.
    pub fn start(workers: usize, queue: usize) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(queue);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..workers {
            let receiver = Arc::clone(&receiver);
            thread::Builder::new().name("passwords".to_owned()).spawn(move || work(&receiver))?;
        }
        Ok(Self(sender))
    }

    /// Whether this is the password of that hash. Without a hash, or with one that is none, it takes as
    /// long and is false. A check whose asker has gone is not done.
    pub async fn verify(&self, password: String, hash: Option<String>) -> Result<bool, Busy> {
        let (verdict, answer) = oneshot::channel();
        self.0.try_send(Job { password, hash, verdict }).map_err(|_| Busy)?;
        // No answer: the thread has died of this job.
        Ok(answer.await.unwrap_or(false))
    }
}

fn work(jobs: &Mutex<mpsc::Receiver<Job>>) {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "passwords are checked at ordinary priority");
    }
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        if !job.verdict.is_closed() {
            let _ = job.verdict.send(check(&job.password, job.hash.as_deref()));
        }
    }
}

fn check(password: &str, hash: Option<&str>) -> bool {
    let known = hash.filter(|hash| is_workable(hash));
    // What lies beyond 72 bytes has never counted. A NUL cannot be in a password that was set here.
    let right = bcrypt::verify(password, known.unwrap_or(NOBODY)).unwrap_or(false);
    right && known.is_some()
}

fn is_workable(hash: &str) -> bool {
    let cost = hash.parse::<bcrypt::HashParts>().ok().map(|parts| parts.get_cost());
    match cost {
        Some(cost) if cost <= MAX_COST => true,
        Some(cost) => {
            tracing::warn!(cost, max = MAX_COST, "a user's password hash costs more than is worked on here");
            false
        }
        None => {
            tracing::warn!("a user's password hash is not one of bcrypt");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Busy, NOBODY, Passwords, check, is_workable};
    use std::sync::mpsc;

    // Of "correct horse", with the prefix that pgcrypto writes.
    const BY_PGCRYPTO: &str = "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e";

    #[test]
    fn passwords_and_hashes() {
        assert!(is_workable(NOBODY));
        let long = "x".repeat(72);
        let hash = bcrypt::hash(&long, 4).unwrap();
        let tail = hash.strip_prefix("$2b$").unwrap();
        for prefix in ["$2a$", "$2b$", "$2y$"] {
            assert!(check(&long, Some(&format!("{prefix}{tail}"))), "{prefix}");
        }
        assert!(check(&format!("{long} and more"), Some(&hash)), "beyond 72 bytes nothing counts");
        assert!(check("correct horse", Some(BY_PGCRYPTO)));
        for (password, hash) in [
            ("correct horse ", Some(BY_PGCRYPTO)),
            ("correct horse\0", Some(BY_PGCRYPTO)),
            ("", Some(BY_PGCRYPTO)),
            ("correct horse", Some("correct horse")),
            ("correct horse", Some("")),
            ("correct horse", Some("$2b$31$dsh3CeZ5MVEyiRYGXzfDZuRD63/RIiRQizgKzIldn0H2NIlNyne6O")),
            ("correct horse", None),
        ] {
            assert!(!check(password, hash), "{password:?} {hash:?}");
        }
    }

    #[tokio::test]
    async fn more_than_the_queue_is_refused() {
        // No thread takes anything out.
        let (sender, _jobs) = mpsc::sync_channel(1);
        let passwords = Passwords(sender);
        let first = passwords.verify(String::new(), None);
        tokio::pin!(first);
        assert!(futures_now(first.as_mut()).await.is_none());
        assert_eq!(passwords.verify(String::new(), None).await, Err(Busy));
    }

    /// What a future comes to without waiting.
    async fn futures_now<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
        std::future::poll_fn(|context| {
            std::task::Poll::Ready(match std::pin::Pin::new(&mut future).poll(context) {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
