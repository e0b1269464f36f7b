//! The life of a cell: check, prepare the database, listen, stop.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::clock::Clock;
use super::config::CellConfig;
use super::control::{CONTROL_LIMIT, Control};
use super::errors::CellError;
use super::gate::Gate;
use super::ladder::Ladder;
use super::latch::Latch;
use super::line::Line;
use super::metrics::Metrics;
use super::pool::{CHECKOUT_TIMEOUT, SLOT_TIMEOUT};
use super::routes::{self, Cell};
use super::schema;
use super::store::{ANSWER_GRACE, Store};
use super::sweeper::{self, SweeperSettings, USAGE_LIMIT};
use super::switches::Switches;

/// Longest wait for connections to close once no call runs any more.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// While writes are shed, one in this time is let through to see (Q11).
const SHED_PROBE: Duration = Duration::from_secs(1);

/// A cell whose database is prepared and whose socket is open, but which accepts nothing yet.
#[derive(Debug)]
pub struct BoundCell {
    listener: TcpListener,
    address: SocketAddr,
    store: Store,
    cell: Arc<Cell>,
    background: Background,
    drain: Duration,
}

/// What runs beside the requests.
#[derive(Debug)]
struct Background {
    gate: Arc<Gate>,
    control: Arc<Control>,
    settings: SweeperSettings,
    refresh_every: Duration,
    expire_line: Line,
    usage_line: Line,
}

impl Background {
    /// Starts it; dropping the set ends it. Each step is one statement, which the database finishes or undoes
    /// by itself.
    fn start(self) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let control = self.control;
        tasks.spawn(async move { control.run().await });
        if self.settings.enabled {
            tasks.spawn(sweeper::prune(Arc::clone(&self.gate), self.settings.clone(), self.expire_line));
            tasks.spawn(sweeper::measure(self.gate, self.settings, self.refresh_every, self.usage_line));
        }
        tasks
    }
}

impl BoundCell {
    /// Checks the settings and the server, applies the schema and opens the listening socket.
    pub async fn open(config: CellConfig) -> Result<Self, CellError> {
        config.check()?;
        if !config.tenancy_header && config.cell_secret.is_none() {
            tracing::warn!("QUEEN_CELL_SECRET is not set: everybody who reaches the port may read and write");
        }
        if config.tenancy_header && config.cell_secret.is_none() {
            tracing::warn!(
                "ANYONE WHO REACHES THIS CELL CAN ACT AS ANY TENANT: \
                 QUEEN_TENANCY_HEADER is on and QUEEN_CELL_SECRET is not set"
            );
        }
        schema::prepare(&config).await?;
        let gate = Arc::new(Gate {
            clock: Clock::start(),
            ladder: Ladder::new(config.ladder.clone()),
            switches: Switches::default(),
            shed: Latch::new(config.shed_after, SHED_PROBE),
            metrics: Arc::new(Metrics::new().map_err(CellError::Metrics)?),
        });
        let store = Store::open(&config, Arc::clone(&gate));
        let line = |limit| Line::new(schema::connect_options(&config), limit);
        let control = Arc::new(Control::new(Arc::clone(&gate), &config.ladder, || line(CONTROL_LIMIT)));
        control.start().await.map_err(|error| CellError::Control(error.to_string()))?;
        let bound = |source| CellError::Bind { address: format!("{}:{}", config.host, config.port), source };
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await.map_err(bound)?;
        let address = listener.local_addr().map_err(bound)?;
        Ok(Self {
            listener,
            address,
            cell: Arc::new(Cell::new(&config, Arc::clone(&gate), Arc::clone(&control), store.clone())),
            store,
            background: Background {
                gate,
                control,
                refresh_every: config.ladder.refresh_every,
                expire_line: line(config.statement_timeout()),
                usage_line: line(USAGE_LIMIT),
                settings: config.sweeper,
            },
            // The longest a call can take from here: a lane, a connection for its group and one for itself, its
            // statement, the answer.
            drain: SLOT_TIMEOUT
                + CHECKOUT_TIMEOUT * 2
                + Duration::from_millis(config.stmt_timeout_ms)
                + ANSWER_GRACE,
        })
    }

    /// Where the cell listens; tells the port when 0 was configured.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` completes, then lets running calls finish, for as long as a call can take.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), CellError> {
        let (stopping, stopped) = oneshot::channel();
        let signal = async move {
            shutdown.await;
            tracing::info!("queen-cell is stopping");
            let _ = stopping.send(());
        };
        // Without this, an answer in two segments waits for a delayed acknowledgement.
        let listener = self.listener.tap_io(|stream| {
            let _ = stream.set_nodelay(true);
        });
        let router = Router::new().fallback(routes::serve).with_state(self.cell);
        let background = self.background.start();
        tracing::info!(address = %self.address, "queen-cell is up");

        let served = tokio::select! {
            served = axum::serve(listener, router).with_graceful_shutdown(signal).into_future() => {
                served.map_err(CellError::Serve)
            }
            () = async {
                let _ = stopped.await;
                sleep(self.drain).await;
            } => {
                tracing::warn!("queen-cell stops with calls unfinished");
                Ok(())
            }
        };
        drop(background);
        let _ = timeout(CLOSE_TIMEOUT, self.store.close()).await;
        served
    }
}

/// Runs a cell from its settings to the end of `shutdown`.
pub async fn serve(
    config: CellConfig,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), CellError> {
    BoundCell::open(config).await?.run(shutdown).await
}
