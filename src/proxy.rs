//! `queen-proxy serve`: puts the rooms together.

use crate::{
    config::{
        proxy::{DevCell, ProxyConfig},
        source::Shown,
    },
    control::{
        ControlPlane, listener,
        migrate::{MigrateError, migrate},
        snapshot::ClusterRow,
        store::StoreError,
    },
    domain::ids::BrokerTenant,
    figures::{self, Rooms},
    gateway::{
        Load,
        access_log::AccessLog,
        caps::Caps,
        client::tls::{Pair, Tls, TlsError},
        live::{Live, Settings},
        pipeline::Directory,
        server::{self, Watched},
        spans::{SpanError, Spans},
        traffic::Clusters,
    },
    identity::{
        CookieNames, Identity,
        session::{KeyError, SessionKeys},
    },
    limits::{Limiter, buffer::Budget, clock::Monotonic, decision::Mode, shared::Link},
    metering::{Meter, spool::SpoolError},
    ops::{self, Ops},
    reconcile::Reconcile,
    reload,
    telemetry::metrics::Metrics,
};
use std::{net::SocketAddr, sync::Arc};
use tokio::runtime::{Builder, Handle, Runtime};

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
    /// The log of requests.
    #[error("QUEEN_PROXY_ACCESS_LOG: cannot be opened: {0}")]
    AccessLog(std::io::Error),
    /// The export of spans.
    #[error("QUEEN_PROXY_OTLP_ENDPOINT: {0}")]
    Spans(#[from] SpanError),
    /// The certificate; the configuration refuses these before.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The spool of usage belongs to another proxy.
    #[error(transparent)]
    Spool(#[from] SpoolError),
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

/// How the configuration is read again, and what it was.
pub struct Reload {
    /// As it was read first.
    pub shown: Vec<Shown>,
    /// Reads it again.
    pub load: reload::Load,
}

/// Serves until it is told to stop. Without `reload` SIGHUP is a reason to stop. Blocks; must not be called from
/// inside a runtime.
pub fn serve(config: &ProxyConfig, reload: Option<Reload>) -> Result<(), ProxyError> {
    serve_metered_by(config, reload, |runtime, control| Meter::start(runtime, control, &config.metering))
}

/// [`serve`] with a meter of the caller's choosing on the control plane, as a bench compares them.
pub fn serve_metered_by(
    config: &ProxyConfig,
    reload: Option<Reload>,
    meter: impl FnOnce(&Handle, &ControlPlane) -> Result<Meter, SpoolError>,
) -> Result<(), ProxyError> {
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
    let tls = config.tls.as_ref().map(Pair::load).transpose()?;
    let tls = tls.map(|pair| Arc::new(Tls::new(pair)));
    let live = Arc::new(Live::new(Settings::of(config), tls, reload.is_none()));
    let load = Arc::new(Load::default());
    let clock = Monotonic::default();
    let link = config.shared_limits.clone().map(|store| Link::start(runtime.handle(), store, clock));
    let shared = link.as_ref().map(|link| Arc::clone(&link.shared));
    let limiter = Arc::new(Limiter::new(config.caps.counters(), clock).sharing(shared));
    let control = match &directory {
        Directory::Control(identity) => Some(identity.control.clone()),
        Directory::Static(_) => None,
    };
    let reconcile = control.as_ref().map(|control| {
        let store = control.store().clone();
        Arc::new(Reconcile::start(runtime.handle(), store, Arc::clone(&limiter), config.caps))
    });
    let meter = match &control {
        Some(control) => meter(runtime.handle(), control)?,
        None => Meter::discarding(),
    };
    let caps = caps(config, Arc::clone(&metrics), Arc::clone(&limiter), reconcile.clone(), &meter);
    let clusters = Arc::new(Clusters::new(config.metrics_clusters));
    let log = config.access_log.as_ref().map(AccessLog::start).transpose().map_err(ProxyError::AccessLog)?;
    let (access_log, log_writer) = log.unzip();
    let (spans, unsent) = config.spans.as_ref().map(Spans::start).transpose()?.unzip();
    let rooms = Rooms {
        load: &load,
        live: &live,
        caps: &caps,
        clusters: &clusters,
        meter: &meter,
        control: control.as_ref(),
        reconcile: reconcile.as_ref(),
        access_log: access_log.as_ref(),
    };
    figures::export(&metrics, rooms)?;
    if let Some(listener) = admin {
        let ops = Ops {
            metrics: Arc::clone(&metrics),
            load: Arc::clone(&load),
            limiter,
            buffers: Arc::clone(&caps.buffers),
            clusters: Arc::clone(&clusters),
            meter: meter.clone(),
            control,
            reconcile: reconcile.clone(),
            enforce: config.enforce,
        };
        runtime.spawn(ops::serve(listener, ops));
    }
    if let Some(Reload { shown, load }) = reload {
        runtime.spawn(reload::follow(load, shown, Arc::clone(&live)));
    }
    server::run(
        config,
        directory,
        caps,
        Watched { load, metrics, meter: meter.clone(), clusters, access_log, spans, live },
    )?;
    if let Some(link) = link {
        runtime.block_on(link.shutdown());
    }
    runtime.block_on(meter.shutdown(config.timeouts.drain));
    if let Some(reconcile) = reconcile {
        runtime.block_on(reconcile.shutdown(config.timeouts.drain));
    }
    runtime.shutdown_background();
    if let Some(unsent) = unsent {
        unsent.finish();
    }
    if let Some(writer) = log_writer {
        writer.finish();
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

fn caps(
    config: &ProxyConfig,
    metrics: Arc<Metrics>,
    limiter: Arc<Limiter<Monotonic>>,
    reconcile: Option<Arc<Reconcile>>,
    meter: &Meter,
) -> Caps {
    let unknown = Arc::clone(&limiter);
    Caps {
        blocks: Arc::clone(meter.blocks()),
        metrics,
        limiter,
        mode: if config.enforce { Mode::Enforce } else { Mode::Shadow },
        buffers: Arc::new(Budget::new(config.buffer_bytes, config.max_body_bytes as u64)),
        // Each item may name a pair in two readings.
        max_pairs: usize::try_from(config.caps.max_batch_items.saturating_mul(2)).unwrap_or(usize::MAX),
        want_queues: match reconcile {
            Some(reconcile) => Box::new(move |counters| reconcile.want_rows(counters)),
            // Without a table nothing was there before.
            None => Box::new(move |counters| unknown.load(counters, [])),
        },
    }
}

async fn static_cluster(cell: &DevCell) -> Result<Directory, ProxyError> {
    let row = ClusterRow::synthetic(cell.url.clone(), cell.token.clone(), BrokerTenant(cell.tenant))
        .ok_or(StoreError::Malformed("no synthetic cluster"))?;
    Ok(Directory::Static(Arc::new(row.into_cluster().await?)))
}
