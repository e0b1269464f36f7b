//! Every answer of our own that is not a success: one enum, one table to the wire (proxy contract §8).

use crate::{
    domain::status::PushBlock,
    identity::AuthError,
    limits::decision::{Limit, Outcome},
    portal::auth::AuthRefusal,
};
use bytes::Bytes;
use std::borrow::Cow;

/// Why a request goes no further.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The request's framing could be read in two ways, or it wants another protocol (D12).
    Framing(&'static str),
    /// The request's head is too large.
    HeadTooLarge,
    /// The request's head, with what we add to it, is too large for the cell.
    HeadTooLargeForCell,
    /// The request's head did not arrive in time.
    HeadLate,
    /// There are as many clients as there may be, or as many of one address.
    NoPlace,
    /// The proxy goes, and what would wait has to do so elsewhere.
    Leaving,
    /// No cluster for the host.
    UnknownCluster,
    /// Not a route for tenants.
    RouteBlocked,
    /// A local route that takes other methods.
    MethodNotAllowed,
    /// A local route of a part that is not set up.
    NotConfigured,
    /// Not who it has to be.
    Auth(AuthError),
    /// Tenant or cluster suspended or being deleted.
    Suspended,
    /// The plan does not hold the feature.
    FeatureGated,
    /// The credential does not open this class of route.
    NotPermitted,
    /// What grows is blocked.
    PushBlocked(PushBlock),
    /// Over a limit of the plan.
    Limit(LimitRefusal),
    /// A replay that names only half of where it goes.
    HalfDestination(&'static str),
    /// No memory for another body that must be inspected.
    NoMemory,
    /// A body that must be inspected is larger than the ceiling.
    BodyTooLarge,
    /// A body that must be inspected is encoded.
    EncodedBody,
    /// A body that must be inspected is in a binary form.
    BinaryBody,
    /// A body that must be inspected cannot be read.
    UnreadableBody,
    /// The client stopped sending in the middle of its body.
    ClientStalled,
    /// The cell cannot be reached, or broke off.
    CellUnreachable,
    /// The cell does not accept the secret we present.
    CellRefusesUs,
    /// The cell's answer is not HTTP we understand.
    CellGarbled,
    /// The cell is late.
    CellLate,
    /// Signing in or out.
    Portal(AuthRefusal),
    /// A fault of our own.
    Internal,
}

/// A limit that a request is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LimitRefusal {
    /// What the limit says.
    pub outcome: Outcome,
    /// What the outcome's index counts in: the body's list of messages, or the option it names.
    pub what: &'static str,
}

/// A refusal as it goes out.
pub struct Wire {
    /// HTTP status.
    pub status: u16,
    /// The stable code that clients switch on.
    pub code: &'static str,
    /// For people. Published clients steer their retries by the words "timeout", "timed out" and
    /// "connection" in it, so none of these appears.
    pub text: Cow<'static, str>,
    /// `Retry-After`, in seconds.
    pub retry_after: Option<u32>,
}

impl Refusal {
    /// Status, code and text.
    pub fn wire(self) -> Wire {
        let (status, code, text) = match self {
            Self::Framing(text) => (400, "invalid_request", text),
            Self::HeadTooLarge => (431, "invalid_request", "the request head is too large"),
            Self::HeadTooLargeForCell => {
                (431, "invalid_request", "the request head is too large for the cell")
            }
            Self::HeadLate => (408, "request_incomplete", "the request head did not arrive in time"),
            Self::NoPlace => (503, "unavailable", "too many clients; try again"),
            Self::Leaving => (429, "rate_limited", "this proxy is being replaced; ask again"),
            Self::UnknownCluster => (421, "cluster_unknown", "no cluster for this host"),
            Self::RouteBlocked => (404, "route_blocked", "not available"),
            Self::MethodNotAllowed => (405, "method_not_allowed", "method not allowed"),
            Self::NotConfigured => (404, "not_configured", "not set up on this proxy"),
            Self::Auth(AuthError::Missing) => (401, "unauthorized", "missing bearer credential"),
            Self::Auth(AuthError::UnknownKey) => (401, "unauthorized", "unknown or revoked api key"),
            Self::Auth(AuthError::Unverifiable) => {
                (401, "unauthorized", "the credential cannot be verified at the moment")
            }
            Self::Auth(AuthError::Invalid) => (401, "unauthorized", "invalid credential"),
            Self::Auth(AuthError::Mismatch) => (403, "forbidden", "key/cluster mismatch"),
            Self::Auth(AuthError::UserGone) => (401, "unauthorized", "session no longer valid"),
            Self::Auth(AuthError::OtherCluster) => (403, "forbidden", "token not valid for this cluster"),
            Self::Auth(AuthError::NoRole) => (403, "forbidden", "no role on this cluster"),
            Self::Auth(AuthError::NotRetargeted) => {
                (403, "forbidden", "this credential cannot act on another cluster")
            }
            Self::Auth(AuthError::CannotAct) => (403, "forbidden", "cannot act on this cluster"),
            Self::Auth(AuthError::NoneNamed) => {
                (403, "forbidden", "this host serves several clusters; name one with x-queen-act-cluster")
            }
            Self::Suspended => (403, "cluster_suspended", "cluster suspended"),
            Self::FeatureGated => (403, "feature_gated", "not in your plan"),
            Self::NotPermitted => (403, "forbidden", "operation not permitted for this credential"),
            Self::PushBlocked(PushBlock::Lifecycle) => (403, "push_blocked", "pushes blocked (billing hold)"),
            Self::PushBlocked(PushBlock::Storage) => {
                (403, "storage_quota_exceeded", "pushes blocked: the cluster keeps max_retained_bytes")
            }
            Self::PushBlocked(PushBlock::Monthly) => {
                (403, "quota_exceeded", "pushes blocked: monthly_msgs_quota is used up")
            }
            Self::Limit(limit) => return limit.wire(),
            Self::HalfDestination("queue") => {
                (400, "invalid_request", "a replay to a partition names its queue")
            }
            Self::HalfDestination(_) => (400, "invalid_request", "a replay to a queue names its partition"),
            Self::NoMemory => (503, "unavailable", "too many bodies are on their way in; try again"),
            Self::BinaryBody => (415, "unsupported_media_type", "send this body as JSON"),
            Self::BodyTooLarge => (413, "payload_too_large", "request body exceeds cap"),
            Self::EncodedBody => (415, "unsupported_media_type", "send this body without Content-Encoding"),
            Self::UnreadableBody => (400, "invalid_request", "the batch cannot be read"),
            Self::ClientStalled => (408, "request_incomplete", "the request body did not arrive in time"),
            Self::CellUnreachable => (502, "bad_gateway", "the cell cannot be reached"),
            Self::CellRefusesUs => (502, "bad_gateway", "the cell does not accept this proxy"),
            Self::CellGarbled => (502, "bad_gateway", "the cell's answer cannot be read"),
            Self::CellLate => (504, "upstream_timeout", "the cell did not answer in time"),
            Self::Portal(AuthRefusal::Auth(error)) => return Self::Auth(error).wire(),
            Self::Portal(AuthRefusal::NoSession) => (401, "unauthorized", "no session"),
            Self::Portal(AuthRefusal::InvalidSession) => (401, "unauthorized", "invalid session"),
            Self::Portal(AuthRefusal::FromElsewhere) => (403, "forbidden", "only from a page of this host"),
            Self::Portal(AuthRefusal::OtherUser) => {
                (403, "forbidden", "somebody else is signed in here; sign out first")
            }
            Self::Portal(AuthRefusal::NoForm) => {
                (400, "invalid_request", "send email and password as application/x-www-form-urlencoded")
            }
            Self::Portal(AuthRefusal::TooMany(_)) => (429, "rate_limited", "too many attempts"),
            Self::Portal(AuthRefusal::Busy) => (503, "unavailable", "too many people sign in at the moment"),
            Self::Portal(AuthRefusal::Unavailable) => {
                (503, "unavailable", "the control plane does not answer")
            }
            Self::Portal(AuthRefusal::NotConfigured) => {
                (503, "not_configured", "this proxy makes no sessions")
            }
            Self::Portal(AuthRefusal::Internal) | Self::Internal => (500, "internal", "internal error"),
        };
        let retry_after = match self {
            Self::Portal(AuthRefusal::TooMany(seconds)) => Some(seconds),
            Self::Portal(AuthRefusal::Busy | AuthRefusal::Unavailable)
            | Self::NoMemory
            | Self::NoPlace
            | Self::Leaving => Some(1),
            _ => None,
        };
        Wire { status, code, text: Cow::Borrowed(text), retry_after }
    }

    /// Whether the client's connection must end: its next bytes cannot be trusted to be a request.
    pub fn ends_connection(self) -> bool {
        matches!(
            self,
            Self::Framing(_)
                | Self::HeadTooLarge
                | Self::HeadLate
                | Self::NoPlace
                | Self::ClientStalled
                | Self::Internal
        )
    }
}

impl LimitRefusal {
    fn wire(&self) -> Wire {
        let (status, code) = match self.outcome.limit {
            Limit::Requests | Limit::Messages | Limit::Parked | Limit::CellParked => (429, "rate_limited"),
            Limit::PayloadBytes | Limit::BatchItems => (413, "payload_too_large"),
            Limit::Retention | Limit::Queues | Limit::Partitions => (403, "quota_exceeded"),
            Limit::RetainedBytes => (403, "storage_quota_exceeded"),
        };
        let retry_after = self.outcome.retry_after.map(|seconds| u32::try_from(seconds).unwrap_or(u32::MAX));
        Wire { status, code, text: Cow::Owned(super::caps::text(self)), retry_after }
    }
}

impl Wire {
    /// The envelope.
    pub fn body(&self) -> Bytes {
        // All are our own words and numbers; none holds a character that JSON escapes.
        Bytes::from(format!(r#"{{"error":"{}","code":"{}"}}"#, self.text, self.code))
    }
}

#[cfg(test)]
mod tests {
    use super::{LimitRefusal, Refusal};
    use crate::{
        domain::status::PushBlock,
        identity::AuthError,
        limits::decision::{Limit, Outcome},
        portal::auth::AuthRefusal,
    };

    fn limit(limit: Limit) -> Refusal {
        let (max, used, denied, retry_after, index) = (5, 6, true, None, Some(2));
        let outcome = Outcome { limit, max, used, denied, retry_after, index, reset: 0, window: 0 };
        Refusal::Limit(LimitRefusal { outcome, what: "items" })
    }

    #[test]
    fn texts_are_plain_and_hold_no_word_that_steers_a_client() {
        let all = [
            Refusal::Framing("two lengths"),
            Refusal::HeadTooLarge,
            Refusal::HeadTooLargeForCell,
            Refusal::HeadLate,
            Refusal::NoPlace,
            Refusal::Leaving,
            Refusal::UnknownCluster,
            Refusal::RouteBlocked,
            Refusal::MethodNotAllowed,
            Refusal::Auth(AuthError::Missing),
            Refusal::Auth(AuthError::UnknownKey),
            Refusal::Auth(AuthError::Unverifiable),
            Refusal::Auth(AuthError::Invalid),
            Refusal::Auth(AuthError::Mismatch),
            Refusal::Auth(AuthError::UserGone),
            Refusal::Auth(AuthError::OtherCluster),
            Refusal::Auth(AuthError::NoRole),
            Refusal::Auth(AuthError::NotRetargeted),
            Refusal::Auth(AuthError::CannotAct),
            Refusal::Auth(AuthError::NoneNamed),
            Refusal::Suspended,
            Refusal::FeatureGated,
            Refusal::NotPermitted,
            Refusal::PushBlocked(PushBlock::Storage),
            Refusal::PushBlocked(PushBlock::Monthly),
            Refusal::PushBlocked(PushBlock::Lifecycle),
            limit(Limit::Requests),
            limit(Limit::PayloadBytes),
            limit(Limit::BatchItems),
            limit(Limit::Retention),
            limit(Limit::Queues),
            limit(Limit::Partitions),
            limit(Limit::Messages),
            limit(Limit::Parked),
            limit(Limit::CellParked),
            limit(Limit::RetainedBytes),
            Refusal::HalfDestination("queue"),
            Refusal::HalfDestination("partition"),
            Refusal::NoMemory,
            Refusal::BinaryBody,
            Refusal::BodyTooLarge,
            Refusal::EncodedBody,
            Refusal::UnreadableBody,
            Refusal::ClientStalled,
            Refusal::CellUnreachable,
            Refusal::CellRefusesUs,
            Refusal::CellGarbled,
            Refusal::CellLate,
            Refusal::Portal(AuthRefusal::NoSession),
            Refusal::Portal(AuthRefusal::InvalidSession),
            Refusal::Portal(AuthRefusal::Auth(AuthError::UserGone)),
            Refusal::Portal(AuthRefusal::FromElsewhere),
            Refusal::Portal(AuthRefusal::OtherUser),
            Refusal::Portal(AuthRefusal::NoForm),
            Refusal::Portal(AuthRefusal::TooMany(1)),
            Refusal::Portal(AuthRefusal::Busy),
            Refusal::Portal(AuthRefusal::Unavailable),
            Refusal::Portal(AuthRefusal::NotConfigured),
            Refusal::Portal(AuthRefusal::Internal),
            Refusal::NotConfigured,
            Refusal::Internal,
        ];
        for refusal in all {
            let wire = refusal.wire();
            for word in ["timeout", "timed out", "connection"] {
                assert!(!wire.text.contains(word), "{refusal:?}");
            }
            let parsed: serde_json::Value = serde_json::from_slice(&wire.body()).unwrap();
            assert_eq!(parsed["error"], *wire.text);
            assert_eq!(parsed["code"], wire.code);
        }
    }
}
