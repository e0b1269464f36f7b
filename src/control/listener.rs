//! The connection that hears of changes: `queen_proxy_inval` with a cluster's id (D6), and
//! `queen_proxy_revoked` with a session's (D7).

use super::{
    ControlPlane,
    store::{StoreError, connect_options, within},
};
use crate::{config::proxy::PxdbConfig, domain::ids::ClusterId};
use sqlx::{
    Executor,
    postgres::{PgListener, PgPoolOptions},
};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const CHANGED: &str = "queen_proxy_inval";
const REVOKED: &str = "queen_proxy_revoked";
const BACKOFF: Duration = Duration::from_millis(250);
/// Short, because until it listens again this proxy finds changes only as entries expire.
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// A session this long was healthy, so the next loss starts again with a short wait.
const HEALTHY: Duration = Duration::from_secs(10);
/// Silence after which the server is asked whether it is still there: a connection cut without a
/// word would otherwise stay deaf until TCP gives up.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Listens for as long as the process lives.
pub async fn run(config: PxdbConfig, control: ControlPlane) {
    let mut backoff = BACKOFF;
    loop {
        let started = Instant::now();
        let Err(error) = session(&config, &control).await;
        control.listening.store(false, Ordering::Release);
        if started.elapsed() >= HEALTHY {
            backoff = BACKOFF;
        }
        tracing::warn!(%error, retry_in = ?backoff, "listener: no connection to the control plane's database");
        sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn session(
    config: &PxdbConfig,
    control: &ControlPlane,
) -> Result<std::convert::Infallible, StoreError> {
    // A pool of its own with one connection: PgListener takes it from there and keeps it.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(config.timeout)
        .connect_lazy_with(connect_options(config, "queen-proxy-listen"));
    let mut listener = within(config.timeout, PgListener::connect_with(&pool)).await?;
    listener.eager_reconnect(false);
    within(config.timeout, listener.listen_all([CHANGED, REVOKED])).await?;
    // What happened before LISTEN was acknowledged was not heard.
    control.expire_all();
    control.listening.store(true, Ordering::Release);
    control.heard();
    tracing::info!("listener: connected");
    loop {
        match timeout(HEARTBEAT, listener.try_recv()).await {
            Ok(Ok(Some(notification))) => {
                control.heard();
                hear(control, notification.channel(), notification.payload());
            }
            Ok(Ok(None)) => {
                return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()).into());
            }
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {
                within(config.timeout, (&mut listener).execute("SELECT 1")).await?;
                control.heard();
            }
        }
    }
}

fn hear(control: &ControlPlane, channel: &str, payload: &str) {
    match (channel, Uuid::parse_str(payload)) {
        (REVOKED, _) => control.deny_list().push(payload),
        (_, Ok(id)) => control.invalidate(ClusterId(id)),
        _ => tracing::warn!("listener: a notification is not a cluster id"),
    }
}
