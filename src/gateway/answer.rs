//! Writing our own answers, so that the client's connection can go on where that is safe.

use super::{
    caps::{Denied, RateHeaders},
    forward::{self, X_QUEEN_REQUEST_ID},
    refusal::Refusal,
};
use crate::{domain::ids::RequestId, portal::Reply};
use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{ALLOW, CONTENT_LENGTH, RETRY_AFTER, TRANSFER_ENCODING},
    response::Parts,
};
use pingora::{Result, http::ResponseHeader, prelude::Session};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Headers of draft-ietf-httpapi-ratelimit-headers.
pub(super) const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
pub(super) const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// A refused body is read to its end only within these, so that the next request on the
/// connection starts where it should; beyond them the connection ends.
const DRAIN_BYTES: usize = 32 << 20;
/// So long the answer waits for the end of the body, and so long a client that still sends may take to hear it.
const DRAIN_TIME: Duration = Duration::from_secs(1);

/// Reads what is left of the request, then writes an answer with type, length and request id. Not the other way
/// round: a client that has the answer sends its next request, which would be read with the rest of the body.
pub(super) async fn write(session: &mut Session, id: RequestId, reply: Reply) -> Result<()> {
    // A client that waits for "100 Continue" does not send its body now, and the next request
    // would be taken for it. Once that is said, the body comes.
    let waits = session.req_header().headers.contains_key("expect") && session.response_written().is_none();
    let unread = !session.as_downstream_mut().is_body_done();
    let ends = unread && (waits || !drain(session).await);
    if ends {
        session.set_keepalive(None);
    }
    let mut head = ResponseHeader::build(reply.status, Some(4 + reply.headers.len()))?;
    head.insert_header("content-type", reply.content_type)?;
    head.insert_header("content-length", reply.body.len())?;
    head.insert_header(X_QUEEN_REQUEST_ID, forward::id_value(id))?;
    for (name, value) in reply.headers {
        head.append_header(name, value)?;
    }
    session.write_response_header(Box::new(head), false).await?;
    session.write_response_body(Some(reply.body), true).await?;
    if ends && !waits {
        // Closing over unread bytes would take the answer from a client that is still sending.
        drain(session).await;
    }
    Ok(())
}

/// Rewrites the head of a cell's answer. Its names are in lower case then, but for the usual ones: see
/// [`forward::rewrite`].
pub(super) fn rewrite(head: &mut ResponseHeader, id: RequestId, rate: Option<&RateHeaders>) {
    let nothing = ResponseHeader::from(http::Response::new(()).into_parts().0);
    let mut parts = Parts::from(std::mem::replace(head, nothing));
    let headers = &mut parts.headers;
    forward::strip(headers, is_not_for_clients);
    if parts.status == StatusCode::NO_CONTENT {
        // Some cells announce a body, and send one: it is not for the client, nor is its length.
        headers.remove(CONTENT_LENGTH);
        headers.remove(TRANSFER_ENCODING);
    }
    if let Some(rate) = rate {
        headers.insert(RATE_LIMIT_POLICY, rate.policy.clone());
        headers.insert(RATE_LIMIT, rate.limit.clone());
    }
    headers.insert(X_QUEEN_REQUEST_ID, forward::id_value(id));
    *head = ResponseHeader::from(parts);
}

/// What a cell may not say to a client: hop-by-hop headers, and those of our talk with it.
fn is_not_for_clients(name: &str) -> bool {
    matches!(
        name,
        "keep-alive" | "proxy-connection" | "te" | "trailer" | "upgrade" | "authorization" | "x-queen-tenant"
    )
}

/// Writes a refusal.
pub(super) async fn refuse(session: &mut Session, id: RequestId, refusal: Refusal) -> Result<()> {
    deny(session, id, refusal.into()).await
}

/// Writes the refusal of a request on which rates may apply.
pub(super) async fn deny(session: &mut Session, id: RequestId, denied: Denied) -> Result<()> {
    let Denied { refusal, rate } = denied;
    let wire = refusal.wire();
    if refusal.ends_connection() {
        session.set_keepalive(None);
    }
    let mut reply = Reply { status: wire.status, ..Reply::document(wire.body()) };
    reply.headers.extend(wire.retry_after.map(|seconds| (RETRY_AFTER, HeaderValue::from(seconds))));
    if let Some(rate) = rate {
        reply.headers.extend([(RATE_LIMIT_POLICY, rate.policy), (RATE_LIMIT, rate.limit)]);
    }
    write(session, id, reply).await
}

/// Writes that a route takes other methods.
pub(super) async fn refuse_method(session: &mut Session, id: RequestId, allow: &'static str) -> Result<()> {
    let wire = Refusal::MethodNotAllowed.wire();
    let mut reply = Reply { status: wire.status, ..Reply::document(wire.body()) };
    reply.headers.push((ALLOW, HeaderValue::from_static(allow)));
    write(session, id, reply).await
}

/// Reads the rest of the body; false when it is too long, too slow or broken.
async fn drain(session: &mut Session) -> bool {
    let deadline = Instant::now() + DRAIN_TIME;
    let mut left = DRAIN_BYTES;
    loop {
        match timeout_at(deadline, session.as_downstream_mut().read_request_body()).await {
            Ok(Ok(None)) => return true,
            Ok(Ok(Some(piece))) if piece.len() <= left => left -= piece.len(),
            _ => return false,
        }
    }
}
