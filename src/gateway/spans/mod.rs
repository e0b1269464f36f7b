//! Spans for OpenTelemetry: one per request that is drawn, sent in batches to a collector by a thread of its own. A
//! request never waits for it: what finds no room is lost, and the log says so.
//!
//! A client's `traceparent` (W3C Trace Context) decides which trace a span belongs to, but not whether there is
//! one: tenants would fill the operator's collector. Of a request with a span the cell gets ours as parent, of any
//! other what the client sent.
//!
//! Built with the cargo feature `opentelemetry` only; without it the configuration refuses to export.

#[cfg(feature = "opentelemetry")]
mod export;
#[cfg(feature = "opentelemetry")]
pub use export::{Begun, Flush, Spans};

#[cfg(not(feature = "opentelemetry"))]
mod absent;
#[cfg(not(feature = "opentelemetry"))]
pub use absent::{Begun, Flush, Spans};

/// Whether this program can export spans.
pub const BUILT_IN: bool = cfg!(feature = "opentelemetry");

/// Where spans go, and of which requests there are some.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpanSettings {
    /// The collector's address, without the path: `http://host:4318`.
    pub endpoint: String,
    /// Of all requests, one in so many.
    pub one_in: u32,
}

/// The export cannot begin.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SpanError(String);
