//! The figures that the proxy's rooms keep, under their names in `/metrics`.

use crate::{
    control::{ControlPlane, cache::CacheView},
    gateway::{
        Load,
        access_log::AccessLog,
        caps::Caps,
        live::Live,
        traffic::{Clusters, Outcome, View},
    },
    limits::shared::{Shared, Trip},
    metering::{
        Meter,
        metrics::Snapshot,
        sample::{Counts, Op},
    },
    reconcile::{Figures, Reconcile},
    telemetry::metrics::Metrics,
};
use std::sync::Arc;

/// The rooms.
#[derive(Clone, Copy)]
pub struct Rooms<'r> {
    /// What is going on.
    pub load: &'r Arc<Load>,
    /// Settings that may change, and TLS.
    pub live: &'r Arc<Live>,
    /// The caps of plans.
    pub caps: &'r Caps,
    /// What each cluster's traffic comes to.
    pub clusters: &'r Arc<Clusters>,
    /// Usage.
    pub meter: &'r Meter,
    /// The control plane, if there is one.
    pub control: Option<&'r ControlPlane>,
    /// The cells' listings, likewise.
    pub reconcile: Option<&'r Arc<Reconcile>>,
    /// The access log, if there is one.
    pub access_log: Option<&'r AccessLog>,
}

/// Registers what the rooms keep.
pub fn export(metrics: &Metrics, rooms: Rooms<'_>) -> Result<(), prometheus::Error> {
    let Rooms { load, live, caps, clusters, meter, control, reconcile, access_log } = rooms;
    metering(metrics, meter)?;
    traffic(metrics, clusters)?;
    let (months, limiter) = (meter.clone(), Arc::clone(&caps.limiter));
    metrics.gauges(
        "queen_proxy_push_blocked_clusters",
        "Clusters that may not push for what they have used up",
        "reason",
        move || {
            let [months, storage] =
                [months.metrics().clusters_blocked, limiter.over_storage() as u64].map(number);
            vec![("monthly_quota".to_owned(), months), ("storage".to_owned(), storage)]
        },
    )?;
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
    let buffers = Arc::clone(&caps.buffers);
    metrics
        .gauge("queen_proxy_buffered_max_bytes", "Bytes that they may be", move || number(buffers.max()))?;
    if let Some(shared) = caps.limiter.shared() {
        sharing(metrics, shared)?;
    }
    if let Some(reconcile) = reconcile {
        reconciling(metrics, reconcile)?;
    }
    if let Some(control) = control {
        controlling(metrics, control)?;
    }
    if let Some(log) = access_log.cloned() {
        metrics.counter(
            "queen_proxy_access_log_lost_total",
            "Lines of the access log that found no room or could not be written",
            move || log.lost(),
        )?;
    }
    Ok(())
}

/// Exports the traffic of clusters.
fn traffic(metrics: &Metrics, clusters: &Arc<Clusters>) -> Result<(), prometheus::Error> {
    let counts = Arc::clone(clusters);
    metrics.counters(
        "queen_proxy_cluster_requests_total",
        "Requests of a cluster whose credential was good, by how they ended",
        ["cluster", "outcome"],
        move || {
            let each = |view: View| {
                Outcome::ALL.map(|outcome| {
                    let labels = [view.name.to_string(), outcome.word().to_owned()];
                    (labels, number(view.total.outcomes[outcome as usize]))
                })
            };
            counts.views().into_iter().flat_map(each).collect()
        },
    )?;
    for (name, help, count) in [
        (
            "queen_proxy_cluster_messages_total",
            "Billable messages of a cluster",
            (|view| number(view.total.messages)) as fn(&View) -> f64,
        ),
        ("queen_proxy_cluster_in_bytes_total", "Bytes of a cluster's bodies that came in", |view| {
            number(view.total.bytes_in)
        }),
        ("queen_proxy_cluster_out_bytes_total", "Bytes of answers to a cluster", |view| {
            number(view.total.bytes_out)
        }),
        ("queen_proxy_cluster_cell_answers_total", "Requests of a cluster that its cell answered", |view| {
            number(view.total.cell_requests)
        }),
        ("queen_proxy_cluster_cell_seconds_total", "What its cell took for them", |view| {
            number(view.total.cell_us) / 1e6
        }),
    ] {
        let clusters = Arc::clone(clusters);
        metrics.counters(name, help, ["cluster"], move || {
            let each = |view: &View| ([view.name.to_string()], count(view));
            clusters.views().iter().map(each).collect()
        })?;
    }
    Ok(())
}

/// Exports how it stands with the control plane's database and the caches in front of it.
fn controlling(metrics: &Metrics, control: &ControlPlane) -> Result<(), prometheus::Error> {
    let of = |read: fn(&ControlPlane) -> f64| {
        let control = control.clone();
        move || read(&control)
    };
    for (name, help, read) in [
        (
            "queen_proxy_listener_up",
            "Whether changes are heard of at once",
            (|control| f64::from(u8::from(control.is_listening()))) as fn(&ControlPlane) -> f64,
        ),
        (
            "queen_proxy_listener_last_event_timestamp_seconds",
            "When the listener last had a word from its server; 0 is never",
            |control| number(control.heard_s()),
        ),
        (
            "queen_proxy_control_plane_silent",
            "Whether the database did not answer the last look-up of some cache",
            |control| f64::from(u8::from(control.caches().iter().any(|cache| cache.silent))),
        ),
        ("queen_proxy_pool_open_connections", "Open connections of the pool", |control| {
            f64::from(control.store().pool().open)
        }),
        ("queen_proxy_pool_idle_connections", "Of these, those that nobody uses", |control| {
            f64::from(control.store().pool().idle)
        }),
        ("queen_proxy_pool_max_connections", "Connections that the pool may have", |control| {
            f64::from(control.store().pool().most)
        }),
    ] {
        metrics.gauge(name, help, of(read))?;
    }
    for (name, help, read) in [
        (
            "queen_proxy_cache_hits_total",
            "Answers that were remembered and fresh",
            (|cache| cache.hits) as fn(&CacheView) -> u64,
        ),
        ("queen_proxy_cache_loads_total", "Look-ups asked of the database", |cache| cache.loads),
        ("queen_proxy_cache_stale_total", "Answers served past their freshness in its silence", |cache| {
            cache.stale
        }),
    ] {
        let control = control.clone();
        metrics.counters(name, help, ["cache"], move || {
            control.caches().iter().map(|cache| ([cache.name.to_owned()], number(read(cache)))).collect()
        })?;
    }
    for (name, help, read) in [
        (
            "queen_proxy_cache_entries",
            "Answers that are held",
            (|cache| number(cache.entries as u64)) as fn(&CacheView) -> f64,
        ),
        ("queen_proxy_cache_absences", "Remembered absences", |cache| number(cache.absences as u64)),
    ] {
        let control = control.clone();
        metrics.gauges(name, help, "cache", move || {
            control.caches().iter().map(|cache| (cache.name.to_owned(), read(cache))).collect()
        })?;
    }
    let control = control.clone();
    metrics.gauges(
        "queen_proxy_cache_oldest_seconds",
        "Age of the oldest answer that is held",
        "cache",
        move || {
            let ages = control.oldest_entries().map(|age| age.unwrap_or_default().as_secs_f64());
            control.caches().iter().map(|cache| cache.name.to_owned()).zip(ages).collect()
        },
    )
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
        ["cap"],
        move || {
            let counts = of.refused_connections().map(number);
            ["total", "address"].map(|cap| [cap.to_owned()]).into_iter().zip(counts).collect()
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
        ["outcome"],
        move || {
            let counts = of.reloads().map(number);
            ["ok", "refused"].map(|outcome| [outcome.to_owned()]).into_iter().zip(counts).collect()
        },
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
            Op::ALL
                .iter()
                .zip(&usage)
                .map(|(op, counts)| ([op.as_str().to_owned()], number(count(counts))))
                .collect()
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
        metrics.counters(name, help, ["op"], by_op(count))?;
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
    ] {
        let read = of(read);
        metrics.gauge(name, help, move || number(read()))?;
    }
    let last = meter.clone();
    metrics.gauge("queen_proxy_usage_flush_last_seconds", "How long the last flush took", move || {
        last.metrics().flush_last.as_secs_f64()
    })?;
    let all = meter.clone();
    metrics.counters("queen_proxy_usage_flush_seconds_total", "How long all flushes took", [], move || {
        vec![([], all.metrics().flush_sum.as_secs_f64())]
    })
}

/// Exports how it stands with the store that proxies count limits in.
fn sharing(metrics: &Metrics, shared: &Arc<Shared>) -> Result<(), prometheus::Error> {
    let of = Arc::clone(shared);
    metrics.gauges(
        "queen_proxy_limits_store_mode",
        "Whether limits are shared through the store, or this proxy goes by its own part of them",
        "mode",
        move || {
            let present = of.figures().present;
            [("shared", present), ("local", !present)]
                .map(|(mode, is)| (mode.to_owned(), number(u64::from(is))))
                .into()
        },
    )?;
    let of = Arc::clone(shared);
    metrics.gauge(
        "queen_proxy_limits_store_replicas",
        "Proxies that share the limits, this one among them",
        move || number(of.figures().proxies),
    )?;
    let of = Arc::clone(shared);
    metrics.counters(
        "queen_proxy_limits_store_round_trips_total",
        "Questions to the store, many limits in each",
        ["outcome"],
        move || {
            let counts = of.figures().trips.map(number);
            Trip::ALL.map(|trip| [trip.word().to_owned()]).into_iter().zip(counts).collect()
        },
    )?;
    let of = Arc::clone(shared);
    metrics.counters(
        "queen_proxy_limits_store_round_trip_seconds_total",
        "How long those with an answer took",
        [],
        move || vec![([], of.figures().took.as_secs_f64())],
    )?;
    let of = Arc::clone(shared);
    metrics.counter(
        "queen_proxy_limits_store_waits_total",
        "Times that a request waited for the store",
        move || of.figures().waits,
    )?;
    let of = Arc::clone(shared);
    metrics.counter("queen_proxy_limits_store_losses_total", "Times that the store went away", move || {
        of.figures().losses
    })
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
