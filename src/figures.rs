//! The figures that the proxy's rooms keep, under their names in `/metrics`.

use crate::{
    control::ControlPlane,
    gateway::{Load, caps::Caps, live::Live},
    metering::{
        Meter,
        metrics::Snapshot,
        sample::{Counts, Op},
    },
    reconcile::{Figures, Reconcile},
    telemetry::metrics::Metrics,
};
use std::sync::Arc;

/// Registers what the rooms keep.
pub fn export(
    metrics: &Metrics,
    load: &Arc<Load>,
    live: &Arc<Live>,
    caps: &Caps,
    meter: &Meter,
    control: Option<&ControlPlane>,
    reconcile: Option<&Arc<Reconcile>>,
) -> Result<(), prometheus::Error> {
    metering(metrics, meter)?;
    let in_flight = Arc::clone(load);
    metrics.gauge("queen_proxy_requests_in_flight", "Requests whose answer has not ended", move || {
        number(in_flight.in_flight() as u64)
    })?;
    clients(metrics, load)?;
    settings(metrics, load, live)?;
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
        reconciling(metrics, reconcile)?;
    }
    if let Some(control) = control.cloned() {
        metrics.gauge("queen_proxy_listener_up", "Whether changes are heard of at once", move || {
            f64::from(u8::from(control.is_listening()))
        })?;
    }
    Ok(())
}

/// Exports how it stands with clients' connections.
fn clients(metrics: &Metrics, load: &Arc<Load>) -> Result<(), prometheus::Error> {
    let of = Arc::clone(load);
    metrics.gauge("queen_proxy_client_connections", "Connections of clients", move || {
        number(of.connections() as u64)
    })?;
    let of = Arc::clone(load);
    metrics.counters(
        "queen_proxy_client_connections_refused_total",
        "Connections beyond a cap: on all of them, or on those of one address",
        "cap",
        move || {
            let caps = ["total", "address"].map(str::to_owned);
            caps.into_iter().zip(of.refused_connections()).collect()
        },
    )?;
    let of = Arc::clone(load);
    metrics.counter(
        "queen_proxy_requests_finished_without_client_total",
        "Requests that store something and went to their end although nobody took the answer",
        move || of.finished_without_client(),
    )
}

/// Exports how it stands with the configuration and TLS.
fn settings(metrics: &Metrics, load: &Arc<Load>, live: &Arc<Live>) -> Result<(), prometheus::Error> {
    let of = Arc::clone(live);
    metrics.counters(
        "queen_proxy_config_reloads_total",
        "Attempts to reload the configuration (SIGHUP)",
        "outcome",
        move || ["ok", "refused"].map(str::to_owned).into_iter().zip(of.reloads()).collect(),
    )?;
    let Some(tls) = live.tls.clone() else { return Ok(()) };
    metrics.gauge(
        "queen_proxy_tls_certificate_expiry_timestamp_seconds",
        "When the first certificate of the chain in use ends",
        move || number(u64::try_from(tls.ends()).unwrap_or_default()),
    )?;
    let of = Arc::clone(load);
    metrics.counter(
        "queen_proxy_tls_handshake_failures_total",
        "TLS handshakes that failed or took too long",
        move || of.failed_handshakes(),
    )
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

/// Exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn number(value: u64) -> f64 {
    value as f64
}
