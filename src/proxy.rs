//! `queen-proxy serve`: puts the rooms together.

use crate::{
    config::proxy::{DevCell, ProxyConfig},
    control::{
        ControlPlane, listener,
        migrate::{MigrateError, migrate},
        snapshot::ClusterRow,
        store::StoreError,
    },
    domain::ids::BrokerTenant,
    gateway::{Load, caps::Caps, pipeline::Directory, server},
    identity::{
        CookieNames, Identity,
        session::{KeyError, SessionKeys},
    },
    limits::{Limiter, Settings, buffer::Budget, clock::Monotonic, decision::Mode},
    ops::{self, Ops},
    telemetry::metrics::Metrics,
};
use std::{net::SocketAddr, sync::Arc};
use tokio::runtime::{Builder, Runtime};

/// Why the proxy does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The control plane's schema is not there and could not be made.
    #[error("control plane at {place}: {error}")]
    Migrate {
        /// Server, database and role.
        place: String,
        /// What went wrong there.
        error: MigrateError,
    },
    /// The one cell of a proxy without a control plane is not usable.
    #[error("QUEEN_PROXY_DEV_CELL_URL: {0}")]
    DevCell(#[from] StoreError),
    /// The keys of sessions; the configuration refuses these before.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The admin listener.
    #[error("QUEEN_PROXY_ADMIN_ADDR: cannot listen on {address}: {reason}")]
    Admin {
        /// The address.
        address: SocketAddr,
        /// The system's word for it.
        reason: std::io::Error,
    },
    /// The metrics.
    #[error("the metrics cannot be set up: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The listener.
    #[error(transparent)]
    Serve(#[from] server::ServeError),
    /// No threads.
    #[error("cannot start the control runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// Serves until it is told to stop. Blocks; must not be called from inside a runtime.
pub fn serve(config: &ProxyConfig) -> Result<(), ProxyError> {
    // Database work has threads of its own: it must outlive Pingora's runtimes and not take theirs.
    let runtime =
        Builder::new_multi_thread().worker_threads(2).thread_name("control").enable_all().build()?;
    let admin = config.admin.map(|address| (address, ops::bind(address)));
    let admin = match admin {
        Some((address, listener)) => Some(listener.map_err(|reason| ProxyError::Admin { address, reason })?),
        None => None,
    };
    let directory = directory(config, &runtime)?;
    if config.pxdb.is_some() && !config.tenant_header {
        tracing::warn!(
            "ALL TENANTS SHARE ONE TENANT OF THE CELL: QUEEN_PROXY_TENANT_HEADER is off with a control plane"
        );
    }
    let metrics = Arc::new(Metrics::new()?);
    let load = Arc::new(Load::default());
    let caps = caps(config, Arc::clone(&metrics));
    let control = match &directory {
        Directory::Control(identity) => Some(identity.control.clone()),
        Directory::Static(_) => None,
    };
    figures(&metrics, &load, &caps, control.as_ref())?;
    if let Some(listener) = admin {
        let limiter = Arc::clone(&caps.limiter);
        let ops = Ops { metrics: Arc::clone(&metrics), load: Arc::clone(&load), limiter, control };
        runtime.spawn(ops::serve(listener, ops));
    }
    server::run(config, directory, caps, load, metrics)?;
    runtime.shutdown_background();
    Ok(())
}

/// Exports what other rooms count.
fn figures(
    metrics: &Metrics,
    load: &Arc<Load>,
    caps: &Caps,
    control: Option<&ControlPlane>,
) -> Result<(), prometheus::Error> {
    // Exact up to 2^53.
    #[allow(clippy::cast_precision_loss)]
    fn number(value: u64) -> f64 {
        value as f64
    }
    let in_flight = Arc::clone(load);
    metrics.gauge("queen_proxy_requests_in_flight", "Requests whose answer has not ended", move || {
        number(in_flight.in_flight() as u64)
    })?;
    let limiter = Arc::clone(&caps.limiter);
    metrics.gauge("queen_proxy_parked_pops", "Pops that wait at a cell", move || number(limiter.parked()))?;
    let limiter = Arc::clone(&caps.limiter);
    metrics.gauge("queen_proxy_limited_clusters", "Clusters with counters in this process", move || {
        number(limiter.clusters() as u64)
    })?;
    let buffers = Arc::clone(&caps.buffers);
    metrics.gauge(
        "queen_proxy_buffered_bytes",
        "Bytes of bodies that are held to be inspected",
        move || number(buffers.held()),
    )?;
    if let Some(control) = control.cloned() {
        metrics.gauge("queen_proxy_listener_up", "Whether changes are heard of at once", move || {
            f64::from(u8::from(control.is_listening()))
        })?;
    }
    Ok(())
}

fn directory(config: &ProxyConfig, runtime: &Runtime) -> Result<Directory, ProxyError> {
    if let Some(cell) = &config.dev_cell {
        return runtime.block_on(static_cluster(cell));
    }
    let Some(pxdb) = &config.pxdb else {
        // The configuration refuses this before.
        return Err(StoreError::Malformed("no control plane is configured").into());
    };
    let applied = runtime
        .block_on(migrate(pxdb))
        .map_err(|error| ProxyError::Migrate { place: pxdb.place(), error })?;
    if !applied.is_empty() {
        tracing::info!(?applied, "control-plane schema brought up to date");
    }
    let control = {
        let _inside = runtime.enter();
        ControlPlane::new(pxdb, config.cache)
    };
    runtime.spawn(listener::run(pxdb.clone(), control.clone()));
    runtime.spawn(control.clone().touch_keys(config.key_touch));
    runtime.spawn(control.clone().sweep());
    runtime.spawn(control.deny_list().clone().learn_ends());
    runtime.spawn(control.clone().sweep_revoked(config.sessions.revocation_sweep));
    let sessions = SessionKeys::new(&config.sessions.keys)?;
    if sessions.is_none() {
        tracing::warn!("no key for sessions is configured: only API keys are accepted");
    }
    Ok(Directory::Control(Arc::new(Identity {
        control,
        sessions,
        cookies: {
            let cookies = &config.sessions.auth.cookies;
            CookieNames::new(&cookies.name, cookies.is_secure(false))
        },
        operators: config.sessions.operators,
        strict: config.sessions.revocation_strict,
    })))
}

fn caps(config: &ProxyConfig, metrics: Arc<Metrics>) -> Caps {
    Caps {
        metrics,
        limiter: Arc::new(Limiter::new(Settings::default(), Monotonic::default())),
        mode: if config.enforce { Mode::Enforce } else { Mode::Shadow },
        buffers: Arc::new(Budget::new(config.buffer_bytes, config.max_body_bytes as u64)),
        max_pairs: 10_000,
        want_queues: Box::new(|_| {}),
    }
}

async fn static_cluster(cell: &DevCell) -> Result<Directory, ProxyError> {
    let row = ClusterRow::synthetic(cell.url.clone(), cell.token.clone(), BrokerTenant(cell.tenant))
        .ok_or(StoreError::Malformed("no synthetic cluster"))?;
    Ok(Directory::Static(Arc::new(row.into_cluster().await?)))
}
