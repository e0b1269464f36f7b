//! The route table (proxy contract §R with D3–D5): method and raw path → class. First match wins.
//!
//! Prefixes that open something end at a segment border; prefixes that block do not, so an odd
//! spelling falls on the blocked side.

use crate::domain::features::Feature;
use http::Method;

/// What a route asks of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouteClass {
    /// Puts messages in.
    Produce,
    /// Takes messages out.
    Consume,
    /// Changes or empties queues. `replays` marks those that put messages back in.
    QueueAdmin {
        /// Moves dead letters back into a queue, which a push block covers.
        replays: bool,
    },
    /// Looks.
    Read,
    /// Needs a feature of the plan.
    Gated(Feature, Effect),
    /// Cell-wide, for a live operator alone.
    Operator,
    /// Not for tenants.
    Blocked,
}

impl RouteClass {
    /// A word for it in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Consume => "consume",
            Self::QueueAdmin { .. } => "queue_admin",
            Self::Read => "read",
            Self::Gated(feature, _) => feature.key(),
            Self::Operator => "operator",
            Self::Blocked => "blocked",
        }
    }
}

/// What a gated route does to the data the tenant keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Reads.
    Read,
    /// Adds; a push block covers it.
    Grow,
    /// Neither adds nor only reads.
    Open,
    /// The body decides.
    Mixed,
}

use Effect::{Grow, Mixed, Open};
use RouteClass::{Blocked, Consume, Gated, Operator, Produce, Read};

const QUEUE_ADMIN: RouteClass = RouteClass::QueueAdmin { replays: false };
const REPLAY: RouteClass = RouteClass::QueueAdmin { replays: true };

/// The cell-wide endpoints; the list is closed.
const OPERATOR: [&str; 8] = [
    "/api/v1/status",
    "/api/v1/status/buffers",
    "/api/v1/analytics/system-metrics",
    "/api/v1/analytics/worker-metrics",
    "/api/v1/analytics/postgres-stats",
    "/api/v1/system/maintenance",
    "/api/v1/system/maintenance/pop",
    "/metrics/prometheus",
];

const BLOCKED_PREFIXES: [&str; 3] = ["/api/v1/migration", "/api/v1/system", "/internal"];
const BLOCKED_EXACT: [&str; 5] =
    ["/api/v1/stats/refresh", "/metrics", "/status", "/api/v1/pop", "/api/v1/pop/"];

/// Prefixes whose GET and HEAD only look.
const READ_PREFIXES: [&str; 7] = [
    "/api/v1/messages",
    "/api/v1/resources",
    "/api/v1/status",
    "/api/v1/analytics",
    "/api/v1/consumer-groups",
    "/api/v1/traces",
    "/api/v1/dlq",
];

/// Whether the path belongs to the data plane at all; the rest is the proxy's own or nobody's.
pub fn is_data_plane(path: &str) -> bool {
    ["/api/", "/streams/", "/internal/"].iter().any(|prefix| path.starts_with(prefix))
        || matches!(path, "/health" | "/status" | "/metrics" | "/metrics/prometheus")
}

/// The class of a canonical path.
pub fn classify(method: &Method, path: &str) -> RouteClass {
    if OPERATOR.contains(&path) {
        return Operator;
    }
    if BLOCKED_PREFIXES.iter().any(|prefix| path.starts_with(prefix)) || BLOCKED_EXACT.contains(&path) {
        return Blocked;
    }
    let get = method == Method::GET;
    let post = method == Method::POST;
    let delete = method == Method::DELETE;
    match path {
        "/api/v1/push" | "/api/v1/transaction" => return Produce,
        "/api/v1/ack" | "/api/v1/ack/batch" => return Consume,
        "/api/v1/fetch" | "/api/v1/partitions/changed" => {
            return if post { Consume } else { Blocked };
        }
        "/api/v1/configure" => return QUEUE_ADMIN,
        "/api/v1/dlq" if delete => return QUEUE_ADMIN,
        "/streams/v1/cycle" if post => return Gated(Feature::Streams, Mixed),
        "/api/v1/traces" if post => return Gated(Feature::Traces, Open),
        "/api/v1/kv" | "/api/v1/kv/" => {
            return if post { Gated(Feature::Kv, Mixed) } else { Blocked };
        }
        "/api/v1/timers" | "/api/v1/timers/" => {
            return if post { Gated(Feature::Timers, Mixed) } else { Blocked };
        }
        // The one read that needs a body (D5).
        "/api/v1/resources/kv/list" if post => return Read,
        _ => {}
    }
    if path.starts_with("/api/v1/pop/queue/") || path.starts_with("/api/v1/lease/") {
        return Consume;
    }
    if delete && path.starts_with("/api/v1/resources/queues/") {
        return QUEUE_ADMIN;
    }
    if is_retry(path) {
        return if post { REPLAY } else { Blocked };
    }
    if is_replay(path) {
        return if post { REPLAY } else { Blocked };
    }
    if delete && path.starts_with("/api/v1/messages/") {
        return QUEUE_ADMIN;
    }
    if (delete || post) && under(path, "/api/v1/consumer-groups") {
        return QUEUE_ADMIN;
    }
    if path.starts_with("/streams/") {
        return Gated(Feature::Streams, Open);
    }
    if path.starts_with("/api/v1/kv/") {
        return match *method {
            Method::GET => Gated(Feature::Kv, Effect::Read),
            Method::PUT => Gated(Feature::Kv, Grow),
            Method::DELETE => Gated(Feature::Kv, Open),
            _ => Blocked,
        };
    }
    if path.starts_with("/api/v1/timers/") {
        return match *method {
            Method::GET => Gated(Feature::Timers, Effect::Read),
            Method::DELETE => Gated(Feature::Timers, Open),
            _ => Blocked,
        };
    }
    if let Some(rest) = path.strip_prefix("/api/v1/ephemeral/") {
        return ephemeral(method, rest);
    }
    if (get || method == Method::HEAD) && READ_PREFIXES.iter().any(|prefix| under(path, prefix)) {
        return Read;
    }
    if path == "/health" && (get || method == Method::HEAD) {
        return Read;
    }
    Blocked
}

fn ephemeral(method: &Method, rest: &str) -> RouteClass {
    let effect = match (method.as_str(), rest) {
        ("POST", "push") => Grow,
        ("POST", "ack" | "configure" | "reset") | ("GET", "pop") => Open,
        ("GET", "queues") => Effect::Read,
        ("GET", _) if rest.starts_with("queues/") && rest.ends_with("/depth") => Effect::Read,
        ("DELETE", _) if rest.starts_with("queue/") => Open,
        _ => return Blocked,
    };
    Gated(Feature::Ephemeral, effect)
}

/// The path itself or something below it.
fn under(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// `/api/v1/messages/<partition>/<transaction>/retry`, exactly. A message may be called "retry":
/// then there are two segments, and this is not it.
fn is_retry(path: &str) -> bool {
    let Some(rest) = path.strip_prefix("/api/v1/messages/") else {
        return false;
    };
    let mut segments = rest.split('/');
    let named = |segment: Option<&str>| segment.is_some_and(|s| !s.is_empty());
    named(segments.next())
        && named(segments.next())
        && segments.next() == Some("retry")
        && segments.next().is_none()
}

/// `/api/v1/dlq/<id>/replay`, exactly.
fn is_replay(path: &str) -> bool {
    path.strip_prefix("/api/v1/dlq/")
        .and_then(|rest| rest.strip_suffix("/replay"))
        .is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

/// How long the client asked a pop to wait: `Some` with its `timeout` in milliseconds (30 000 when
/// it gave none that parses) when the query holds exactly `wait=true` on a pop path.
pub fn long_poll_wait_ms(path: &str, query: Option<&str>) -> Option<u64> {
    if !path.starts_with("/api/v1/pop/queue/") && path != "/api/v1/ephemeral/pop" {
        return None;
    }
    let pairs = || query.unwrap_or_default().split('&');
    if !pairs().any(|pair| pair == "wait=true") {
        return None;
    }
    let asked = pairs().find_map(|pair| pair.strip_prefix("timeout="));
    Some(asked.and_then(|value| value.parse().ok()).unwrap_or(30_000))
}

#[cfg(test)]
#[path = "route_table.rs"]
mod tests;
