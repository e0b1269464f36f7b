//! Connections for calls: as many as run at once, a bounded wait for one, and no queue in front of a
//! database that is away (KV contract, section 7.6; Q9).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, Postgres};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::errors::KvError;
use super::gate::Gate;
use super::latch::Latch;
use super::metrics::{PoolState, Rejection};

const TERSE: &str = "SELECT set_config('log_error_verbosity', 'terse', false) \
                       FROM pg_roles WHERE rolname = current_user AND rolsuper";

/// Longest wait for a call that is running to give its connection back.
pub(super) const SLOT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the server to accept a connection, all attempts together. A busy machine needs seconds for
/// many at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time from asking for a connection to having one.
pub(super) const CHECKOUT_TIMEOUT: Duration = SLOT_TIMEOUT.saturating_add(CONNECT_TIMEOUT);

/// Calls that may wait, for each connection there is: they hold their bodies in memory.
const WAITING_PER_SLOT: usize = 64;

/// Attempts in a row without a connection after which the server counts as away.
const AWAY_AFTER: u32 = 3;

/// While it does, one call in this time tries, and the others hear so at once.
const CONNECT_PROBE: Duration = Duration::from_millis(250);

/// A connection that rested longer is tested before use; testing all would double the round trips.
const TEST_AFTER_IDLE: Duration = Duration::from_secs(5);

/// See the module. Clones share everything.
#[derive(Debug, Clone)]
pub(super) struct CallPool {
    pool: PgPool,
    slots: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    size: usize,
    connects: Arc<Latch>,
    /// When a connection was last lost, in nanoseconds of the gate's clock: those that rested then are
    /// tested before use.
    suspect: Arc<AtomicU64>,
    gate: Arc<Gate>,
}

/// A connection of a call. It goes back when dropped.
#[derive(Debug)]
pub(super) struct Checkout {
    connection: PoolConnection<Postgres>,
    pool: CallPool,
    _slot: OwnedSemaphorePermit,
}

impl Checkout {
    pub(super) fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// Closes the socket without another word to the server: it is dead, or its session is not what a new
    /// one would be.
    pub(super) fn discard(self) {
        self.pool.suspect.store(nanoseconds(self.pool.gate.clock.now()), Ordering::Relaxed);
        drop(self.connection.detach());
    }
}

impl CallPool {
    /// Prepares the pool. Connections are made when they are first needed.
    pub(super) fn new(options: PgConnectOptions, size: u32, gate: Arc<Gate>) -> Self {
        let suspect = Arc::new(AtomicU64::new(0));
        let (suspect_since, clock) = (Arc::clone(&suspect), gate.clock);
        let pool = PgPoolOptions::new()
            .max_connections(size)
            .acquire_timeout(CONNECT_TIMEOUT)
            .test_before_acquire(false)
            .after_connect(|connection, _| {
                Box::pin(async move {
                    // A lost `required` carries key and value in the DETAIL of its error, which the server
                    // would log. Only a superuser may say so here; for others their role has to.
                    sqlx::query(TERSE).execute(connection).await?;
                    Ok(())
                })
            })
            .before_acquire(move |connection, meta| {
                let idle_since = nanoseconds(clock.now().saturating_sub(meta.idle_for));
                let doubtful = idle_since <= suspect_since.load(Ordering::Relaxed);
                Box::pin(async move {
                    if doubtful || meta.idle_for > TEST_AFTER_IDLE {
                        sqlx::Connection::ping(connection).await?;
                    }
                    Ok(true)
                })
            })
            .connect_lazy_with(options);
        let size = size as usize;
        Self {
            pool,
            slots: Arc::new(Semaphore::new(size)),
            waiting: Arc::default(),
            size,
            connects: Arc::new(Latch::new(AWAY_AFTER, CONNECT_PROBE)),
            suspect,
            gate,
        }
    }

    /// A connection, or a 503 that says whether calls or the server are in the way. Failures in a row make
    /// standalone writes stop asking.
    pub(super) async fn checkout(&self) -> Result<Checkout, KvError> {
        let outcome = self.try_checkout().await;
        if outcome.is_ok() {
            if self.gate.shed.succeeded() {
                tracing::info!("writes are taken again");
            }
        } else {
            self.turned_away();
        }
        outcome
    }

    async fn try_checkout(&self) -> Result<Checkout, KvError> {
        let slot = self.slot().await?;
        if self.pool.num_idle() == 0 && !self.connects.admit(self.gate.clock.now()) {
            return Err(KvError::unavailable("connection"));
        }
        match self.pool.acquire().await {
            Ok(connection) => {
                self.connects.succeeded();
                Ok(Checkout { connection, pool: self.clone(), _slot: slot })
            }
            Err(error) => {
                self.connects.failed(self.gate.clock.now());
                Err(match &error {
                    sqlx::Error::Database(error) => {
                        KvError::from_sql(error.code().as_deref().unwrap_or_default(), error.message(), None)
                    }
                    _ => KvError::unavailable("connection"),
                })
            }
        }
    }

    /// The right to use one of the connections.
    async fn slot(&self) -> Result<OwnedSemaphorePermit, KvError> {
        const EXHAUSTED: KvError = KvError::unavailable("kv_pool_exhausted");
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Ok(slot);
        }
        let waiting = Waiting::begin(&self.waiting);
        if waiting.others >= self.most_waiting() {
            return Err(EXHAUSTED);
        }
        match timeout(SLOT_TIMEOUT, Arc::clone(&self.slots).acquire_owned()).await {
            Ok(Ok(slot)) => Ok(slot),
            Ok(Err(_)) | Err(_) => Err(EXHAUSTED),
        }
    }

    /// Connections there may be.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Calls that may wait, of a kind.
    pub(super) fn most_waiting(&self) -> usize {
        self.size * WAITING_PER_SLOT
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// A call was turned away because others are in the way. Such failures in a row make standalone writes stop
    /// asking.
    pub(super) fn turned_away(&self) {
        self.gate.metrics.rejected(Rejection::Pool);
        if self.gate.shed.failed(self.gate.clock.now()) {
            tracing::warn!("no connection for many calls in a row: writes are shed");
        }
    }

    /// For the gauges.
    pub(super) fn state(&self) -> PoolState {
        PoolState {
            size: self.size,
            available: self.slots.available_permits(),
            waiting: self.waiting.load(Ordering::Relaxed),
        }
    }

    /// Closes it, waiting for connections in use.
    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// A place in the count of those who wait, left also by a client that goes away.
struct Waiting<'a> {
    count: &'a AtomicUsize,
    others: usize,
}

impl<'a> Waiting<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        Self { count, others: count.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
