//! Answers written below Pingora: to who sent no request that Pingora understands, or may send none.

use crate::{domain::ids::RequestId, gateway::refusal::Refusal};
use bytes::Bytes;
use http::StatusCode;
use pingora::protocols::http::date::get_cached_date;

/// A refusal as it goes over an HTTP/1 connection that ends with it.
pub(super) fn refusal(refusal: Refusal) -> Bytes {
    let wire = refusal.wire();
    let reason = StatusCode::from_u16(wire.status).ok().and_then(|status| status.canonical_reason());
    let body = wire.body();
    let retry = wire.retry_after.map(|seconds| format!("retry-after: {seconds}\r\n")).unwrap_or_default();
    let date = get_cached_date();
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         x-queen-request-id: {}\r\n{retry}date: {}\r\nconnection: close\r\n\r\n",
        wire.status,
        reason.unwrap_or_default(),
        body.len(),
        RequestId::new(),
        date.to_str().unwrap_or_default(),
    );
    [head.as_bytes(), &body].concat().into()
}
