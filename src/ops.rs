//! The admin listener (D13): what operators and their tools ask a running proxy, apart from tenants' traffic.

mod history;
mod status;

use crate::{
    control::{ControlPlane, now_s},
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
        lookup::Lookup,
        slug::Slug,
    },
    gateway::{Load, traffic::Clusters},
    limits::{Limiter, RateView, buffer::Budget, clock::Monotonic},
    metering::Meter,
    reconcile::Reconcile,
    telemetry::metrics::{CONTENT_TYPE, Metrics},
};
use axum::{
    Json, Router,
    extract::{Path, State},
    http::{StatusCode, header::CONTENT_TYPE as TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use history::History;
use serde_json::{Map, Value, json};
use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};
use uuid::Uuid;

/// What the listener tells of.
pub struct Ops {
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Whether the proxy is on its way out.
    pub load: Arc<Load>,
    /// What stands against the caps.
    pub limiter: Arc<Limiter<Monotonic>>,
    /// Bodies that are held to be inspected.
    pub buffers: Arc<Budget>,
    /// What each cluster's traffic comes to.
    pub clusters: Arc<Clusters>,
    /// Usage, and clusters that have used up their month.
    pub meter: Meter,
    /// Where clusters are looked up; none without a control plane.
    pub control: Option<ControlPlane>,
    /// What the cells tell; likewise.
    pub reconcile: Option<Arc<Reconcile>>,
    /// Whether caps refuse, or only count.
    pub enforce: bool,
}

/// That, and what the listener remembers of it.
struct Admin {
    ops: Ops,
    history: History,
    started_s: u64,
}

/// Opens the socket, so that a port in use stops the start.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves for as long as the process lives.
pub async fn serve(listener: TcpListener, ops: Ops) {
    let admin = Arc::new(Admin { ops, history: History::default(), started_s: now_s() });
    tokio::spawn(status::keep_history(Arc::clone(&admin)));
    let router = Router::new()
        .merge(status::routes())
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/limits/{cluster}", get(limits))
        .with_state(admin);
    let served = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => axum::serve(listener, router).await,
        Err(error) => Err(error),
    };
    if let Err(error) = served {
        tracing::error!(%error, "the admin listener has ended");
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    ([(TYPE, CONTENT_TYPE)], admin.ops.metrics.render()).into_response()
}

/// 503 as soon as the proxy drains, so that balancers send nothing more.
async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    if admin.ops.load.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response()
    } else {
        "ready\n".into_response()
    }
}

/// The caps in force on a cluster, by slug or id, and what stands against them in this process.
async fn limits(State(admin): State<Arc<Admin>>, Path(name): Path<String>) -> Response {
    let ops = &admin.ops;
    let problem = |status: StatusCode, error: &str, code: &str| {
        (status, Json(json!({ "error": error, "code": code }))).into_response()
    };
    let Some(control) = &ops.control else {
        return problem(StatusCode::NOT_FOUND, "this proxy has no control plane", "not_configured");
    };
    let found = match (Uuid::parse_str(&name), Slug::parse(&name)) {
        (Ok(id), _) => control.cluster_by_id(ClusterId(id)).await,
        (_, Some(slug)) => control.cluster(slug).await,
        _ => Lookup::Absent,
    };
    match found {
        Lookup::Found(cluster) => {
            let mut answer = json!({
                "cluster": { "id": cluster.id.0, "slug": cluster.slug.as_str() },
                "limits": numbers(&cluster.limits),
            });
            answer["live"] = live(ops, cluster.id, &cluster.limits);
            Json(answer).into_response()
        }
        Lookup::Absent => problem(StatusCode::NOT_FOUND, "no such cluster", "not_found"),
        Lookup::Unavailable => {
            problem(StatusCode::SERVICE_UNAVAILABLE, "the control plane does not answer", "unavailable")
        }
    }
}

fn numbers(limits: &Limits) -> Map<String, Value> {
    let number = |cap| match cap {
        Cap::Unlimited => Value::Null,
        Cap::At(cap) => json!(cap),
    };
    limits.entries().into_iter().map(|(name, cap)| (name.to_owned(), number(cap))).collect()
}

/// Null when this proxy has served nothing of the cluster lately.
fn live(ops: &Ops, cluster: ClusterId, limits: &Limits) -> Value {
    let Some(live) = ops.limiter.live(cluster, limits) else {
        return Value::Null;
    };
    let rate = |view: Option<RateView>| view.map(|view| json!({ "left": view.left, "burst": view.burst }));
    json!({
        "requests": rate(live.requests),
        "messages": rate(live.messages),
        "parked": live.parked,
        "queues": live.queues,
        "retained_bytes": live.retained_bytes,
        "in_flight_bytes": live.in_flight_bytes,
        "storage_blocked": live.storage_blocked,
        "month_blocked": ops.meter.blocks().is_blocked(cluster),
    })
}
