//! Calls that wait together share one commit. A call of one operation starts at once while a lane is free; those
//! that come while all lanes are busy form the next group, which `queen.kv_group_v1` runs in one transaction
//! with a verdict for each.
//!
//! A lane is the right to run a group, not a connection: each group checks one out as any other call does.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgConnection;
use tokio::sync::oneshot;
use tokio::time::timeout;
use uuid::Uuid;

use super::demand::{Demand, Op};
use super::errors::KvError;
use super::json::compact;
use super::metrics::Rejection;
use super::pool::{CallPool, SLOT_TIMEOUT};
use super::request::Call;
use super::store::{self, Effect, Outcome, Question};

const GROUP: &str =
    "SELECT results, states, messages, details FROM queen.kv_group_v1($1::text[], $2::uuid[], NULL)";

/// Calls of one sort, which SQL can run as one statement; the rest is run one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    /// They never wait for a commit or a row.
    Gets,
    /// A put without condition.
    Puts,
    Others,
}

impl Sort {
    /// Of a call that may share a transaction; of one with several operations, or one that reads many keys,
    /// there is none.
    fn of(call: &Call, demand: &Demand) -> Option<Self> {
        match demand.ops.as_slice() {
            _ if call.operations() != 1 => None,
            [Op::Get] => Some(Self::Gets),
            [Op::Put] if !demand.once_only => Some(Self::Puts),
            [Op::Put | Op::Delete | Op::Incr] => Some(Self::Others),
            _ => None,
        }
    }
}

/// Lanes of all sorts. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Lanes {
    sorts: [Arc<Shared>; 3],
}

impl Lanes {
    /// Groups of at most `most` calls, over `pool`; `limit` is the longest wait for the answer to a group.
    pub(super) fn new(pool: &CallPool, most: usize, limit: Duration) -> Self {
        // Few, so that groups become large under load; two, so that one runs while the other commits.
        let free = (pool.size() / 8).clamp(1, 4);
        let shared = || {
            Arc::new(Shared {
                pool: pool.clone(),
                most,
                limit,
                line: Mutex::new(Line { waiting: VecDeque::new(), free, next: 0 }),
            })
        };
        Self { sorts: [shared(), shared(), shared()] }
    }

    /// Runs `call` with others of its sort, or gives it back when it has to run by itself.
    pub(super) async fn ask(
        &self,
        tenant: Uuid,
        call: Call,
        demand: &Demand,
    ) -> Result<Result<Outcome, KvError>, Call> {
        match Sort::of(&call, demand) {
            Some(sort) => Ok(self.of(sort).ask(tenant, call.into_text(), Effect::of(demand)).await),
            None => Err(call),
        }
    }

    fn of(&self, sort: Sort) -> &Arc<Shared> {
        let [gets, puts, others] = &self.sorts;
        match sort {
            Sort::Gets => gets,
            Sort::Puts => puts,
            Sort::Others => others,
        }
    }

    /// Calls that wait for a lane.
    pub(super) fn waiting(&self) -> usize {
        self.sorts.iter().map(|shared| shared.line().waiting.len()).sum()
    }
}

/// What the lanes of one sort share.
#[derive(Debug)]
struct Shared {
    pool: CallPool,
    most: usize,
    limit: Duration,
    line: Mutex<Line>,
}

/// Held for a push or a take, never across a wait.
#[derive(Debug)]
struct Line {
    waiting: VecDeque<Job>,
    /// Lanes at rest. While there is one, nobody waits.
    free: usize,
    next: u64,
}

/// What becomes of a call that comes.
#[derive(Debug)]
enum Entry {
    Starts(Job),
    /// Under this number.
    Waits(u64),
    Full,
}

/// A call on its way.
#[derive(Debug)]
struct Job {
    number: u64,
    tenant: Uuid,
    text: String,
    effect: Effect,
    answer: oneshot::Sender<Result<Outcome, KvError>>,
}

impl Job {
    /// The client may have gone, which is no matter.
    fn answer(self, outcome: Result<Outcome, KvError>) {
        let _ = self.answer.send(outcome);
    }
}

impl Shared {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(self: &Arc<Self>, tenant: Uuid, text: String, effect: Effect) -> Result<Outcome, KvError> {
        let (answer, mut answered) = oneshot::channel();
        // A lane that is lost with the call leaves open how far it came.
        let lost = || store::silence("connection", effect);
        let number = match self.enter(tenant, text, effect, answer) {
            Entry::Starts(job) => {
                tokio::spawn(Lane { shared: Arc::clone(self), done: false }.run(vec![job]));
                return answered.await.unwrap_or_else(|_| Err(lost()));
            }
            Entry::Waits(number) => number,
            Entry::Full => return Err(self.exhausted()),
        };
        if let Ok(answer) = timeout(SLOT_TIMEOUT, &mut answered).await {
            return answer.unwrap_or_else(|_| Err(lost()));
        }
        // Who is still in the line has not begun, and does not any more.
        match self.leave(number) {
            Some(_) => Err(self.exhausted()),
            None => answered.await.unwrap_or_else(|_| Err(lost())),
        }
    }

    /// Takes a free lane, or a place in the line.
    fn enter(
        &self,
        tenant: Uuid,
        text: String,
        effect: Effect,
        answer: oneshot::Sender<Result<Outcome, KvError>>,
    ) -> Entry {
        let mut line = self.line();
        if line.free == 0 && line.waiting.len() >= self.pool.most_waiting() {
            return Entry::Full;
        }
        let number = line.next;
        line.next += 1;
        let job = Job { number, tenant, text, effect, answer };
        if line.free > 0 {
            line.free -= 1;
            return Entry::Starts(job);
        }
        line.waiting.push_back(job);
        Entry::Waits(number)
    }

    /// Gives up a place in the line, should it still be there.
    fn leave(&self, number: u64) -> Option<Job> {
        let mut line = self.line();
        let place = line.waiting.iter().position(|job| job.number == number)?;
        line.waiting.remove(place)
    }

    fn exhausted(&self) -> KvError {
        self.pool.turned_away();
        KvError::unavailable("kv_pool_exhausted")
    }

    /// The next group, without those whose client has gone. An empty one frees the lane.
    fn next(&self) -> Vec<Job> {
        let mut line = self.line();
        let mut group = Vec::new();
        while group.len() < self.most
            && let Some(job) = line.waiting.pop_front()
        {
            if !job.answer.is_closed() {
                group.push(job);
            }
        }
        if group.is_empty() {
            line.free += 1;
        }
        group
    }
}

/// The right to run one group at a time.
struct Lane {
    shared: Arc<Shared>,
    done: bool,
}

impl Lane {
    async fn run(mut self, mut group: Vec<Job>) {
        while !group.is_empty() {
            run(&self.shared, group).await;
            group = self.shared.next();
        }
        self.done = true;
    }
}

impl Drop for Lane {
    /// A lane that did not come to its end is free all the same.
    fn drop(&mut self) {
        if !self.done {
            self.shared.line().free += 1;
        }
    }
}

/// Runs a group and answers each of its calls.
async fn run(shared: &Arc<Shared>, mut group: Vec<Job>) {
    let mut checkout = match shared.pool.checkout().await {
        Ok(checkout) => checkout,
        Err(error) => {
            // The checkout has counted one of them.
            (1..group.len()).for_each(|_| shared.pool.gate().metrics.rejected(Rejection::Pool));
            for job in group {
                job.answer(Err(error.clone()));
            }
            return;
        }
    };
    let answer = timeout(shared.limit, execute(checkout.connection(), &group)).await;
    match answer {
        Ok(Ok(verdicts)) => {
            drop(checkout);
            for (place, job) in group.into_iter().enumerate() {
                let verdict = verdicts.of(place);
                job.answer(verdict);
            }
        }
        Ok(Err(error)) => {
            if store::ends_the_session(&error) {
                checkout.discard();
            } else {
                drop(checkout);
            }
            if is_of_a_call(&error) {
                for job in group.drain(..) {
                    tokio::spawn(alone(Arc::clone(shared), job));
                }
            }
            for job in group {
                let error = store::from_sqlx(&error, job.effect);
                job.answer(Err(error));
            }
        }
        Err(_) => {
            // The server did not even report its own time limit: nothing more will come on this socket.
            checkout.discard();
            for job in group {
                let error = store::silence("kv_timeout", job.effect);
                job.answer(Err(error));
            }
        }
    }
}

/// Whether the server reports an error that one of the calls has brought upon the group; nothing of it was applied
/// then. Others would befall each call alone as well: the server goes, is full, lacks a function, was told to
/// cancel.
fn is_of_a_call(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(DatabaseError::code).is_some_and(|code| {
        code != "25006" && !["08", "42", "53", "57", "58"].iter().any(|class| code.starts_with(class))
    })
}

/// Runs a call of a group that came to nothing, outside the lanes: it may be the one that waits for a row.
async fn alone(shared: Arc<Shared>, mut job: Job) {
    let outcome = match shared.pool.checkout().await {
        Ok(checkout) => {
            let question = Question::Apply(Call::one(std::mem::take(&mut job.text)));
            store::run(checkout, job.tenant, question, job.effect, shared.limit).await
        }
        Err(error) => Err(error),
    };
    job.answer(outcome);
}

/// What a group came to, call by call.
#[derive(Debug)]
struct Verdicts {
    results: Column,
    states: Option<Column>,
    messages: Option<Column>,
    details: Option<Column>,
}

/// A text, or none, for each call.
type Column = Vec<Option<String>>;

impl Verdicts {
    fn of(&self, place: usize) -> Result<Outcome, KvError> {
        let text =
            |column: &Option<Column>| column.as_ref().and_then(|column| column.get(place).cloned().flatten());
        if let Some(element) = self.results.get(place).cloned().flatten() {
            return Ok(Outcome::Results(compact(format!("[{element}]"))));
        }
        let detail = text(&self.details);
        match text(&self.states).as_deref() {
            None => Err(KvError::failed("kv_result_missing")),
            Some("23514") => Ok(Outcome::Lost(store::verdict(detail.as_deref()))),
            Some(state) => {
                Err(KvError::from_sql(state, &text(&self.messages).unwrap_or_default(), detail.as_deref()))
            }
        }
    }
}

async fn execute(connection: &mut PgConnection, group: &[Job]) -> Result<Verdicts, sqlx::Error> {
    let calls: Vec<&str> = group.iter().map(|job| job.text.as_str()).collect();
    let tenants: Vec<Uuid> = group.iter().map(|job| job.tenant).collect();
    let (results, states, messages, details) =
        sqlx::query_as(GROUP).bind(calls).bind(tenants).fetch_one(connection).await?;
    Ok(Verdicts { results, states, messages, details })
}
