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
    limits::{Limiter, buffer::Budget, clock::Monotonic, decision::Mode},
    metering::{
        Meter,
        metrics::Snapshot,
        sample::{Counts, Op},
        spool::SpoolError,
    },
    ops::{self, Ops},
    reconcile::{Figures, Reconcile},
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
    let limiter = Arc::new(Limiter::new(config.caps.counters(), Monotonic::default()));
    let control = match &directory {
        Directory::Control(identity) => Some(identity.control.clone()),
        Directory::Static(_) => None,
    };
    let reconcile = control.as_ref().map(|control| {
        let store = control.store().clone();
        Arc::new(Reconcile::start(runtime.handle(), store, Arc::clone(&limiter), config.caps))
    });
    let meter = match &control {
        Some(control) => Meter::start(runtime.handle(), control, &config.metering)?,
        None => Meter::discarding(),
    };
    let caps = Caps {
        blocks: Arc::clone(meter.blocks()),
        ..caps(config, Arc::clone(&metrics), Arc::clone(&limiter), reconcile.clone())
    };
    metering(&metrics, &meter)?;
    figures(&metrics, &load, &caps, control.as_ref(), reconcile.clone())?;
    if let Some(listener) = admin {
        let ops = Ops { metrics: Arc::clone(&metrics), load: Arc::clone(&load), limiter, control };
        runtime.spawn(ops::serve(listener, ops));
    }
    server::run(config, directory, caps, load, metrics, meter.clone())?;
    runtime.block_on(meter.shutdown(config.timeouts.drain));
    if let Some(reconcile) = reconcile {
        runtime.block_on(reconcile.shutdown(config.timeouts.drain));
    }
    runtime.shutdown_background();
    Ok(())
}

/// Exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn number(value: u64) -> f64 {
    value as f64
}

/// Exports what other rooms count.
fn figures(
    metrics: &Metrics,
    load: &Arc<Load>,
    caps: &Caps,
    control: Option<&ControlPlane>,
    reconcile: Option<Arc<Reconcile>>,
) -> Result<(), prometheus::Error> {
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
    if let Some(reconcile) = reconcile {
        reconciling(metrics, &reconcile)?;
    }
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

/// Exports how it stands with usage.
fn metering(metrics: &Metrics, meter: &Meter) -> Result<(), prometheus::Error> {
    let by_op = |count: fn(&Counts) -> u64| {
        let meter = meter.clone();
        move || {
            let usage = meter.metrics().usage;
            Op::ALL.iter().zip(&usage).map(|(op, counts)| (op.as_str().to_owned(), count(counts))).collect()
        }
    };
    for (name, help, count) in [
        (
            "queen_proxy_usage_requests_total",
            "Metered requests",
            (|counts| counts.reqs) as fn(&Counts) -> u64,
        ),
        ("queen_proxy_usage_messages_total", "Billable messages", |counts| counts.msgs),
        ("queen_proxy_usage_in_bytes_total", "Bytes of metered bodies that came in", |counts| {
            counts.bytes_in
        }),
        ("queen_proxy_usage_out_bytes_total", "Bytes of metered answers", |counts| counts.bytes_out),
    ] {
        metrics.counters(name, help, "op", by_op(count))?;
    }
    let of = |read: fn(&Snapshot) -> u64| {
        let meter = meter.clone();
        move || read(&meter.metrics())
    };
    for (name, help, read) in [
        (
            "queen_proxy_usage_unreadable_total",
            "Successful answers whose messages could not be read and so billed none",
            (|numbers| numbers.unreadable) as fn(&Snapshot) -> u64,
        ),
        ("queen_proxy_usage_flushes_total", "Flushes of usage that were tried", |numbers| numbers.flushes),
        ("queen_proxy_usage_flush_failures_total", "Flushes of usage that failed", |numbers| {
            numbers.flush_failures
        }),
        ("queen_proxy_usage_rows_refused_total", "Rows of usage whose cluster is gone", |numbers| {
            numbers.rows_refused
        }),
        ("queen_proxy_usage_rows_dropped_total", "Rows of usage that were given up", |numbers| {
            numbers.dropped_rows
        }),
        (
            "queen_proxy_rollup_failures_total",
            "Passes of the roll-up or the monthly check that failed",
            |numbers| numbers.rollup_failures,
        ),
    ] {
        metrics.counter(name, help, of(read))?;
    }
    for (name, help, read) in [
        (
            "queen_proxy_usage_last_success_timestamp_seconds",
            "When usage was last written; 0 is never",
            (|numbers| numbers.last_success_s) as fn(&Snapshot) -> u64,
        ),
        ("queen_proxy_usage_spool_files", "Files in the spool", |numbers| numbers.spool_files),
        ("queen_proxy_usage_spool_bytes", "Bytes in the spool", |numbers| numbers.spool_bytes),
        (
            "queen_proxy_rollup_last_success_timestamp_seconds",
            "When this proxy last rolled days up; 0 is never",
            |numbers| numbers.rollup_last_success_s,
        ),
        ("queen_proxy_month_blocked_clusters", "Clusters blocked for their monthly quota", |numbers| {
            numbers.clusters_blocked
        }),
    ] {
        let read = of(read);
        metrics.gauge(name, help, move || number(read()))?;
    }
    for (name, help, read) in [
        (
            "queen_proxy_usage_flush_last_seconds",
            "How long the last flush took",
            (|numbers| numbers.flush_last.as_secs_f64()) as fn(&Snapshot) -> f64,
        ),
        ("queen_proxy_usage_flush_seconds_sum", "How long all flushes took", |numbers| {
            numbers.flush_sum.as_secs_f64()
        }),
    ] {
        let meter = meter.clone();
        metrics.gauge(name, help, move || read(&meter.metrics()))?;
    }
    Ok(())
}

/// Exports how it stands with the cells' listings.
fn reconciling(metrics: &Metrics, reconcile: &Arc<Reconcile>) -> Result<(), prometheus::Error> {
    let of = |read: fn(Figures) -> u64| {
        let reconcile = Arc::clone(reconcile);
        move || read(reconcile.figures())
    };
    metrics.counter(
        "queen_proxy_cell_polls_total",
        "Listings that cells were asked for",
        of(|figures| figures.polls),
    )?;
    metrics.counter(
        "queen_proxy_cell_polls_failed_total",
        "Listings without a usable answer",
        of(|figures| figures.polls_failed),
    )?;
    metrics.counter(
        "queen_proxy_queue_rows_lost_total",
        "Queue rows that found no room or could not be written",
        of(|figures| figures.rows_dropped + figures.rows_left_out),
    )?;
    let waiting = of(|figures| figures.rows_pending as u64);
    metrics.gauge("queen_proxy_queue_rows_pending", "Queue rows that wait to be written", move || {
        number(waiting())
    })?;
    let reconcile = Arc::clone(reconcile);
    metrics.gauges(
        "queen_proxy_cell_answered_seconds",
        "How long ago a cell gave a usable listing",
        "cell",
        move || {
            let cells = reconcile.figures().cells.into_iter();
            cells.filter_map(|cell| Some((cell.slug.into(), cell.answered?.as_secs_f64()))).collect()
        },
    )
}

fn caps(
    config: &ProxyConfig,
    metrics: Arc<Metrics>,
    limiter: Arc<Limiter<Monotonic>>,
    reconcile: Option<Arc<Reconcile>>,
) -> Caps {
    let unknown = Arc::clone(&limiter);
    Caps {
        blocks: Arc::default(),
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
