//! Checking passwords: slow on purpose, so it has threads of its own with a bounded queue, and these stand
//! behind the traffic of tenants (proxy contract §6).

use std::{
    collections::HashMap,
    net::IpAddr,
    ops::Range,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};
use tokio::sync::oneshot;

/// What a password is checked against when there is no such user, behind the cost. Nobody knows its password.
const NOBODY: &str = "$dsh3CeZ5MVEyiRYGXzfDZuRD63/RIiRQizgKzIldn0H2NIlNyne6O";

/// What a failed check costs at least: that of a hash as the admin commands set them.
const COST: u32 = 10;

/// The highest cost that is worked on: each step doubles the time, and one hash at cost 20 holds a thread
/// for a minute.
const MAX_COST: u32 = 15;

/// The threads' class (`SCHED_IDLE`): whoever wakes up takes the core from them at once. With a high nice value
/// alone a request may wait some milliseconds for them, at each of its steps.
const BEHIND_TENANTS: ThreadSchedulePolicy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);

/// Checks that one origin may have in the queue, so that it leaves room for others.
const MAX_PER_ORIGIN: usize = 2;

/// A check that has waited for so long is not done: its asker tries again or has gone.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(5);

/// There is no room in the queue, or no time left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Busy;

/// The threads and the way to them.
pub(super) struct Passwords {
    jobs: mpsc::SyncSender<Job>,
    places: Arc<Places>,
}

struct Job {
    password: String,
    hash: Option<String>,
    queued: Instant,
    verdict: oneshot::Sender<Result<bool, Busy>>,
    _place: Place,
}

/// Counts the checks of each origin.
#[derive(Default)]
struct Places(Mutex<HashMap<IpAddr, usize>>);

/// One of them, until it is dropped.
struct Place(Arc<Places>, IpAddr);

impl Places {
    fn take(self: &Arc<Self>, origin: IpAddr) -> Result<Place, Busy> {
        let mut by_origin = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = by_origin.entry(origin).or_default();
        if *taken >= MAX_PER_ORIGIN {
            return Err(Busy);
        }
        *taken += 1;
        Ok(Place(Arc::clone(self), origin))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_origin = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(taken) = by_origin.get_mut(&self.1) {
            *taken -= 1;
            if *taken == 0 {
                by_origin.remove(&self.1);
            }
        }
    }
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
        Ok(Self { jobs: sender, places: Arc::default() })
    }

    /// Whether this is the password of that hash; `origin` asks. Without a hash, or with one that is none, it
    /// takes as long and is false. A check whose asker has gone is not done.
    pub async fn verify(&self, origin: IpAddr, password: String, hash: Option<String>) -> Result<bool, Busy> {
        let place = self.places.take(origin)?;
        let (verdict, answer) = oneshot::channel();
        let job = Job { password, hash, queued: Instant::now(), verdict, _place: place };
        self.jobs.try_send(job).map_err(|_| Busy)?;
        // No answer: the thread has died of this job.
        answer.await.unwrap_or(Ok(false))
    }
}

fn work(jobs: &Mutex<mpsc::Receiver<Job>>) {
    if let Err(error) =
        set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, BEHIND_TENANTS)
    {
        tracing::debug!(%error, "passwords are checked at ordinary priority");
    }
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        if !job.verdict.is_closed() {
            let late = job.queued.elapsed() > MAX_WAIT;
            let verdict = if late { Err(Busy) } else { Ok(check(&job.password, job.hash.as_deref())) };
            let _ = job.verdict.send(verdict);
        }
    }
}

fn check(password: &str, hash: Option<&str>) -> bool {
    let known = hash.and_then(|hash| Some((hash, workable_cost(hash)?)));
    // What lies beyond 72 bytes has never counted. A NUL cannot be in a password that was set here.
    let (right, done) = match known.map(|(hash, cost)| (bcrypt::verify(password, hash), cost)) {
        Some((Ok(right), cost)) => (right, Some(cost)),
        _ => (false, None),
    };
    if !right {
        for cost in rest(done) {
            let _ = std::hint::black_box(bcrypt::verify(password, &format!("$2b${cost:02}{NOBODY}")));
        }
    }
    right
}

/// The costs of the checks that make up for what a failed one at this cost lacks, so that how long it took
/// does not tell who has an account: each step of the cost doubles the work, so the check of a hash and one
/// more at its cost and at each above it are as much as one at [`COST`]. A higher cost still shows.
fn rest(done: Option<u32>) -> Range<u32> {
    match done {
        Some(cost) => cost..COST,
        None => COST..COST + 1,
    }
}

fn workable_cost(hash: &str) -> Option<u32> {
    let cost = hash.parse::<bcrypt::HashParts>().ok().map(|parts| parts.get_cost());
    match cost {
        Some(cost) if cost <= MAX_COST => Some(cost),
        Some(cost) => {
            tracing::warn!(cost, max = MAX_COST, "a user's password hash costs more than is worked on here");
            None
        }
        None => {
            tracing::warn!("a user's password hash is not one of bcrypt");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Busy, COST, Job, MAX_WAIT, NOBODY, Passwords, Places, check, rest, work};
    use std::{
        net::IpAddr,
        sync::{Arc, Mutex, mpsc},
        time::{Duration, Instant},
    };
    use tokio::sync::oneshot;

    // Of "correct horse", with the prefix that pgcrypto writes.
    const BY_PGCRYPTO: &str = "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e";

    #[test]
    fn passwords_and_hashes() {
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

    #[test]
    fn a_failed_check_is_as_much_work_for_every_hash_up_to_the_usual_cost() {
        assert!(bcrypt::verify("x", &format!("$2b${COST}{NOBODY}")).is_ok());
        let work =
            |done: Option<u32>| done.into_iter().chain(rest(done)).map(|cost| 1_u64 << cost).sum::<u64>();
        for done in [None, Some(4), Some(5), Some(8), Some(9), Some(COST)] {
            assert_eq!(work(done), 1 << COST, "{done:?}");
        }
        assert_eq!(work(Some(12)), 1 << 12);
        let quickest = |hash: Option<&str>| {
            let time = || {
                let began = Instant::now();
                assert!(!check("wrong", hash));
                began.elapsed()
            };
            (0..3).map(|_| time()).min().unwrap()
        };
        // By a wide margin: at cost 4 alone it would be a 64th.
        assert!(quickest(Some(BY_PGCRYPTO)) > quickest(None) / 2);
    }

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[tokio::test]
    async fn more_than_the_queue_is_refused() {
        // No thread takes anything out.
        let (jobs, _jobs) = mpsc::sync_channel(1);
        let passwords = Passwords { jobs, places: Arc::default() };
        let first = passwords.verify(HERE, String::new(), None);
        tokio::pin!(first);
        assert!(futures_now(first.as_mut()).await.is_none());
        assert_eq!(passwords.verify(HERE, String::new(), None).await, Err(Busy));
    }

    #[tokio::test]
    async fn one_origin_has_two_places_in_the_queue() {
        let (jobs, waiting) = mpsc::sync_channel(9);
        let passwords = Passwords { jobs, places: Arc::default() };
        let verify = |origin| Box::pin(passwords.verify(origin, String::new(), None));
        let (mut first, mut second, mut third) = (verify(HERE), verify(HERE), verify(HERE));
        assert!(futures_now(&mut first).await.is_none());
        assert!(futures_now(&mut second).await.is_none());
        assert_eq!(futures_now(&mut third).await, Some(Err(Busy)));
        let other = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);
        assert!(futures_now(&mut verify(other)).await.is_none());
        // A place is free when the check is done, not when its asker goes.
        drop(first);
        assert_eq!(futures_now(&mut verify(HERE)).await, Some(Err(Busy)));
        drop(waiting.recv());
        assert!(futures_now(&mut verify(HERE)).await.is_none());
    }

    #[tokio::test]
    async fn what_has_waited_too_long_is_not_checked() {
        let (sender, jobs) = mpsc::sync_channel(2);
        let places: Arc<Places> = Arc::default();
        let mut answers = Vec::new();
        for waited in [MAX_WAIT + Duration::from_secs(1), Duration::ZERO] {
            let (verdict, answer) = oneshot::channel();
            let queued = Instant::now().checked_sub(waited).unwrap();
            let hash = Some(BY_PGCRYPTO.to_owned());
            let place = places.take(HERE).unwrap();
            let password = "correct horse".to_owned();
            sender.send(Job { password, hash, queued, verdict, _place: place }).unwrap();
            answers.push(answer);
        }
        drop(sender);
        // On a thread of its own, which gives its priority away.
        let jobs = Mutex::new(jobs);
        let policy = std::thread::spawn(move || {
            work(&jobs);
            thread_priority::thread_schedule_policy().unwrap()
        });
        assert_eq!(policy.join().unwrap(), super::BEHIND_TENANTS);
        let mut verdicts = Vec::new();
        for answer in answers {
            verdicts.push(answer.await.unwrap());
        }
        assert_eq!(verdicts, [Err(Busy), Ok(true)]);
        assert!(places.0.lock().unwrap().is_empty());
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
