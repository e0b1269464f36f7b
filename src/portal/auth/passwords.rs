//! Checking passwords: slow on purpose, so it has threads of its own with a bounded queue, and these stand
//! behind the traffic of tenants (proxy contract §6).

use super::slow_hash::{Hash, compute};
use std::{
    collections::HashMap,
    hint::black_box,
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
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};

/// The salt of what a password is checked against when there is no such user.
const NOBODY: [u8; 16] = [0x5a; 16];

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
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Those whose turn it is beyond the one that each thread works on, so that no thread waits while an account is looked up.
const AHEAD: usize = 1;

/// There is no room in the queue, or no time left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Busy;

/// The threads and the way to them.
pub(super) struct Passwords {
    jobs: mpsc::Sender<Job>,
    /// Who waits or has a turn.
    queue: Arc<Semaphore>,
    turns: Arc<Semaphore>,
    places: Arc<Places>,
}

/// A thread that is about to be free: only now the account is looked up. In a flood tenants' requests would
/// wait behind all the look-ups, here and at pxdb, and most of the askers are sent away in the end.
pub(super) struct Turn {
    jobs: mpsc::Sender<Job>,
    held: Held,
}

/// What is another's again once the check is done, or its asker goes before.
struct Held {
    since: Instant,
    _counted: [OwnedSemaphorePermit; 2],
    _place: Place,
}

struct Job {
    password: String,
    hash: Option<String>,
    /// With what was held, so that the asker gives it back: a thread of the idle class may be held up with a lock that
    /// those who serve tenants wait for.
    verdict: oneshot::Sender<(Result<bool, Busy>, Held)>,
    held: Held,
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
        let (passwords, jobs) = Self::new(workers, queue);
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..workers {
            let jobs = Arc::clone(&jobs);
            thread::Builder::new().name("passwords".to_owned()).spawn(move || work(&jobs))?;
        }
        Ok(passwords)
    }

    fn new(workers: usize, queue: usize) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, receiver) = mpsc::channel();
        let passwords = Self {
            jobs,
            queue: Arc::new(Semaphore::new(workers.saturating_add(queue).min(Semaphore::MAX_PERMITS))),
            turns: Arc::new(Semaphore::new(workers + AHEAD)),
            places: Arc::default(),
        };
        (passwords, receiver)
    }

    /// Waits until a thread is about to be free for `origin`, at most [`MAX_WAIT`].
    pub async fn turn(&self, origin: IpAddr) -> Result<Turn, Busy> {
        let since = Instant::now();
        let place = self.places.take(origin)?;
        let in_queue = Arc::clone(&self.queue).try_acquire_owned().map_err(|_| Busy)?;
        let turn = timeout(MAX_WAIT, Arc::clone(&self.turns).acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(Busy)?;
        let held = Held { since, _counted: [in_queue, turn], _place: place };
        Ok(Turn { jobs: self.jobs.clone(), held })
    }
}

impl Turn {
    /// Whether this is the password of that hash. Without a hash, or with one that is none, it takes as long and is
    /// false. A check whose asker has gone is not done.
    pub async fn verify(self, password: String, hash: Option<String>) -> Result<bool, Busy> {
        let (verdict, answer) = oneshot::channel();
        let Self { jobs, held } = self;
        jobs.send(Job { password, hash, verdict, held }).map_err(|_| Busy)?;
        drop(jobs);
        // No answer: the thread has died of this job.
        answer.await.map_or(Ok(false), |(verdict, _held)| verdict)
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
            let late = job.held.since.elapsed() > MAX_WAIT;
            let verdict = if late { Err(Busy) } else { Ok(check(&job.password, job.hash.as_deref())) };
            let _ = job.verdict.send((verdict, job.held));
        }
    }
}

fn check(password: &str, hash: Option<&str>) -> bool {
    // What lies beyond 72 bytes has never counted. A NUL cannot be in a password that was set here.
    let known = hash.and_then(workable).filter(|_| !password.contains('\0'));
    let right = known.as_ref().is_some_and(|known| known.is_of(password));
    if !right {
        for cost in rest(known.map(|known| known.cost)) {
            black_box(compute(cost, NOBODY, password));
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

fn workable(hash: &str) -> Option<Hash> {
    match Hash::parse(hash) {
        Some(hash) if hash.cost <= MAX_COST => Some(hash),
        Some(Hash { cost, .. }) => {
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
    use super::{Busy, COST, MAX_WAIT, Passwords, check, rest, work};
    use std::{
        net::IpAddr,
        sync::Mutex,
        time::{Duration, Instant},
    };

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
        let work =
            |done: Option<u32>| done.into_iter().chain(rest(done)).map(|cost| 1_u64 << cost).sum::<u64>();
        for done in [None, Some(4), Some(5), Some(8), Some(9), Some(COST)] {
            assert_eq!(work(done), 1 << COST, "{done:?}");
        }
        assert_eq!(work(Some(12)), 1 << 12);
        let time = |hash: Option<&str>| {
            let began = Instant::now();
            assert!(!check("wrong", hash));
            began.elapsed()
        };
        // In turn, so that what else the machine does is the same for both.
        let pairs: Vec<_> = (0..5).map(|_| (time(Some(BY_PGCRYPTO)), time(None))).collect();
        let (cheap, nobody) = (pairs.iter().map(|pair| pair.0).min(), pairs.iter().map(|pair| pair.1).min());
        // By a wide margin: at cost 4 alone it would be a 64th.
        assert!(cheap.unwrap() > nobody.unwrap() / 2);
    }

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const THERE: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);
    const ELSEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::BROADCAST);

    #[tokio::test]
    async fn more_than_the_queue_is_refused() {
        let (passwords, _jobs) = Passwords::new(1, 1);
        let first = futures_now(&mut Box::pin(passwords.turn(HERE))).await.unwrap().unwrap();
        let second = futures_now(&mut Box::pin(passwords.turn(THERE))).await.unwrap();
        assert!(second.is_ok(), "one ahead of the thread");
        assert_eq!(passwords.turn(ELSEWHERE).await.err(), Some(Busy));
        drop(first);
        assert!(passwords.turn(ELSEWHERE).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn accounts_are_looked_up_as_threads_come_free_and_in_turn() {
        let (passwords, jobs) = Passwords::new(1, 9);
        let mut turns: Vec<_> =
            (1..=4).map(|n| Box::pin(passwords.turn(IpAddr::from([203, 0, 113, n])))).collect();
        let mut has_turn = Vec::new();
        for turn in &mut turns {
            has_turn.push(futures_now(turn).await);
        }
        assert_eq!(has_turn.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false]);
        // It lasts until the thread is done with it, even when the asker goes.
        let first = has_turn.remove(0).unwrap().unwrap();
        let mut verdict = Box::pin(first.verify(String::new(), None));
        assert!(futures_now(&mut verdict).await.is_none());
        drop(verdict);
        assert!(futures_now(&mut turns[2]).await.is_none());
        drop(jobs.recv());
        let _third = futures_now(&mut turns[2]).await.unwrap().unwrap();
        assert!(futures_now(&mut turns[3]).await.is_none());
        // The last one has waited long enough.
        tokio::time::advance(MAX_WAIT).await;
        assert_eq!(futures_now(&mut turns[3]).await.unwrap().err(), Some(Busy));
    }

    #[tokio::test]
    async fn one_origin_has_two_places_in_the_queue() {
        let (passwords, jobs) = Passwords::new(1, 9);
        let turn = |origin| Box::pin(passwords.turn(origin));
        let first = futures_now(&mut turn(HERE)).await.unwrap().unwrap();
        let mut second = turn(HERE);
        let _second = futures_now(&mut second).await.unwrap().unwrap();
        assert_eq!(futures_now(&mut turn(HERE)).await.unwrap().err(), Some(Busy));
        assert!(futures_now(&mut turn(THERE)).await.is_none(), "it waits");
        // A place is free when the check is done, not when its asker goes.
        let mut verdict = Box::pin(first.verify(String::new(), None));
        assert!(futures_now(&mut verdict).await.is_none());
        drop(verdict);
        assert_eq!(futures_now(&mut turn(HERE)).await.unwrap().err(), Some(Busy));
        drop(jobs.recv());
        assert!(futures_now(&mut turn(HERE)).await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn what_has_waited_too_long_is_not_checked() {
        let (passwords, jobs) = Passwords::new(1, 9);
        let mut answers = Vec::new();
        for waited in [MAX_WAIT + Duration::from_secs(1), Duration::ZERO] {
            let mut turn = passwords.turn(HERE).await.unwrap();
            turn.held.since = Instant::now().checked_sub(waited).unwrap();
            let mut answer = Box::pin(turn.verify("correct horse".to_owned(), Some(BY_PGCRYPTO.to_owned())));
            assert!(futures_now(&mut answer).await.is_none());
            answers.push(answer);
        }
        let Passwords { jobs: sender, places, .. } = passwords;
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
            verdicts.push(answer.await);
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
