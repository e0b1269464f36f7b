//! The life of a cell: check, prepare the database, listen, stop.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::config::CellConfig;
use super::errors::CellError;
use super::routes::{self, Cell};
use super::schema;
use super::store::{ACQUIRE_TIMEOUT, ANSWER_GRACE, Store};

/// Longest wait for connections to close once no call runs any more.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A cell whose database is prepared and whose socket is open, but which accepts nothing yet.
#[derive(Debug)]
pub struct BoundCell {
    listener: TcpListener,
    address: SocketAddr,
    store: Store,
    cell: Arc<Cell>,
    drain: Duration,
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
        let store = Store::open(&config);
        let bound = |source| CellError::Bind { address: format!("{}:{}", config.host, config.port), source };
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await.map_err(bound)?;
        let address = listener.local_addr().map_err(bound)?;
        Ok(Self {
            listener,
            address,
            cell: Arc::new(Cell::new(&config, store.clone())),
            store,
            // The longest a call can take from here: a connection, its statement, the answer.
            drain: ACQUIRE_TIMEOUT + config.statement_timeout() + ANSWER_GRACE,
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
