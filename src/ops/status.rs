//! `/status`: one page for whoever is called at night, and `/status.json`, which it is drawn from.

use super::{
    Admin,
    history::{EVERY, Point},
};
use crate::{
    control::{cache::CacheView, now_s},
    gateway::traffic::{Outcome, View},
    metering::metrics::Snapshot,
};
use axum::{
    Json, Router,
    extract::State,
    http::{HeaderName, header},
    routing::get,
};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tokio::time::{MissedTickBehavior, interval};

/// Clusters in the table of the page.
const TOP: usize = 20;
/// Nothing from elsewhere is loaded, and nobody frames the page.
const POLICY: (HeaderName, &str) = (
    header::CONTENT_SECURITY_POLICY,
    "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
);

/// The page, what it needs, and its figures.
pub(super) fn routes() -> Router<Arc<Admin>> {
    let file = |kind: &'static str, text: &'static str| {
        get(async move || ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache"), POLICY], text))
    };
    Router::new()
        .route("/status", file("text/html; charset=utf-8", include_str!("status.html")))
        .route("/status.css", file("text/css; charset=utf-8", include_str!("status.css")))
        .route("/status.js", file("text/javascript; charset=utf-8", include_str!("status.js")))
        .route("/status.json", get(figures))
}

/// Adds a point to the history now and then, for as long as the process lives.
pub(super) async fn keep_history(admin: Arc<Admin>) {
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let point = point(&admin);
        admin.history.push(point);
        admin.ops.clusters.turn();
    }
}

/// How it stands at this moment.
fn point(admin: &Admin) -> Point {
    let ops = &admin.ops;
    let mut point = Point {
        at_s: now_s(),
        own: ops.metrics.own_durations(),
        parked: ops.limiter.parked(),
        in_flight: ops.load.in_flight() as u64,
        ..Point::default()
    };
    for (status, code, count) in ops.metrics.ended() {
        let refused = code != crate::gateway::OK;
        point.outcomes[Outcome::of(status, refused) as usize] += count;
        if refused {
            *point.refusals.entry((status, code)).or_default() += count;
        }
    }
    point
}

async fn figures(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let ops = &admin.ops;
    let point = point(&admin);
    let since = |then_s: u64| (then_s > 0).then(|| point.at_s.saturating_sub(then_s));
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "at_s": point.at_s,
        "up_s": since(admin.started_s),
        "draining": ops.load.is_draining(),
        "enforce": ops.enforce,
        "now": admin.history.now(&point),
        "in_flight": point.in_flight,
        "parked": point.parked,
        "buffered_bytes": ops.buffers.held(),
        "refusals": admin.history.refusals(&point),
        "clusters": top(ops.clusters.views()),
        "control": ops.control.as_ref().map(|control| {
            let pool = control.store().pool();
            let caches = control.caches();
            let rows: Vec<_> = caches.iter().zip(control.oldest_entries()).map(cache).collect();
            json!({
                "silent": caches.iter().any(|cache| cache.silent),
                "listening": control.is_listening(),
                "heard_s_ago": since(control.heard_s()),
                "pool": { "open": pool.open, "idle": pool.idle, "most": pool.most },
                "caches": rows,
            })
        }),
        "cells": ops.reconcile.as_ref().map(|reconcile| {
            let cells = reconcile.figures().cells;
            let cell = |cell: &crate::reconcile::CellFigure| {
                json!({ "cell": cell.slug, "answered_s_ago": cell.answered.map(|ago| ago.as_secs()) })
            };
            cells.iter().map(cell).collect::<Vec<_>>()
        }),
        "limits_store": ops.limiter.shared().map(|shared| {
            let figures = shared.figures();
            json!({ "present": figures.present, "proxies": figures.proxies, "losses": figures.losses })
        }),
        "usage": usage(&ops.meter.metrics(), since),
        "history": admin.history.series(),
    }))
}

/// Those with the most requests of late.
fn top(mut views: Vec<View>) -> Vec<Value> {
    views.sort_by_key(|view| std::cmp::Reverse((view.recent.requests(), view.total.requests())));
    views.truncate(TOP);
    let row = |view: &View| {
        let [answered, refused, failed, gone] = view.recent.outcomes;
        json!({
            "cluster": view.name,
            "requests": view.recent.requests(),
            "answered": answered,
            "refused": refused,
            "failed": failed,
            "gone": gone,
            "messages": view.recent.messages,
            "cell_us": view.recent.cell_us.checked_div(view.recent.cell_requests),
        })
    };
    views.iter().map(row).collect()
}

fn cache((view, oldest): (&CacheView, Option<Duration>)) -> Value {
    json!({
        "cache": view.name,
        "entries": view.entries,
        "absences": view.absences,
        "oldest_s": oldest.map(|age| age.as_secs()),
        "hits": view.hits,
        "loads": view.loads,
        "stale": view.stale,
    })
}

fn usage(numbers: &Snapshot, since: impl Fn(u64) -> Option<u64>) -> Value {
    json!({
        "written_s_ago": since(numbers.last_success_s),
        "rolled_up_s_ago": since(numbers.rollup_last_success_s),
        "flush_failures": numbers.flush_failures,
        "spool_files": numbers.spool_files,
        "spool_bytes": numbers.spool_bytes,
        "rows_dropped": numbers.dropped_rows,
        "month_blocked_clusters": numbers.clusters_blocked,
    })
}
