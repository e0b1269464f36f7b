//! The wire side of every answer: status, headers and the error envelope (KV contract, section 5).

use std::borrow::Cow;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use super::errors::KvError;
use super::ladder::Refusal;

/// Header that carries the id of a request, from the proxy and back.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-queen-request-id");

/// A JSON answer. Nothing on the way may keep a copy: values have no other home than the database.
pub(super) fn answer(status: StatusCode, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Body of every refusal (section 5.3).
#[derive(Debug, Serialize)]
struct Envelope<'a> {
    error: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Cow<'a, str>>,
}

impl KvError {
    /// Status and body of the answer.
    fn envelope(&self) -> (StatusCode, Envelope<'_>) {
        let plain = |status, error| (status, Envelope { error, reason: None, detail: None });
        let reasoned =
            |status, error, reason| (status, Envelope { error, reason: Some(reason), detail: None });
        match self {
            Self::NoSuchRoute => plain(StatusCode::NOT_FOUND, "no_such_route"),
            Self::MethodNotAllowed { .. } => plain(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::Unauthorized => plain(StatusCode::UNAUTHORIZED, "unauthorized"),
            // Literal of the wire, section 7.1.
            Self::BadTenant => {
                plain(StatusCode::BAD_REQUEST, "invalid x-queen-tenant header (must be a UUID)")
            }
            Self::BodyTooLarge { limit } => (
                StatusCode::PAYLOAD_TOO_LARGE,
                Envelope {
                    error: "payload_too_large",
                    reason: Some("body_too_large"),
                    detail: Some(format!("at most {limit} bytes").into()),
                },
            ),
            Self::BodyLate => plain(StatusCode::REQUEST_TIMEOUT, "request_timeout"),
            Self::BodyBroken => reasoned(StatusCode::BAD_REQUEST, "kv_bad_request", "kv_bad_body"),
            Self::Bad { reason, detail } => (
                StatusCode::BAD_REQUEST,
                Envelope {
                    error: "kv_bad_request",
                    reason: Some(reason),
                    detail: detail.as_deref().map(Into::into),
                },
            ),
            Self::TooLarge { reason, detail } => (
                StatusCode::PAYLOAD_TOO_LARGE,
                Envelope {
                    error: "payload_too_large",
                    reason: Some(reason),
                    detail: detail.as_deref().map(Into::into),
                },
            ),
            Self::Unavailable { reason } => {
                reasoned(StatusCode::SERVICE_UNAVAILABLE, "kv_unavailable", reason)
            }
            Self::Paused { in_transaction: false } => {
                reasoned(StatusCode::SERVICE_UNAVAILABLE, "kv_disabled", "kv_disabled")
            }
            Self::Paused { in_transaction: true } => {
                reasoned(StatusCode::FORBIDDEN, "kv_disabled", "kv_disabled")
            }
            Self::Refused(Refusal::NotGranted) => {
                reasoned(StatusCode::FORBIDDEN, "feature_gated", "feature_gated")
            }
            Self::Refused(Refusal::NoRoom) => {
                reasoned(StatusCode::SERVICE_UNAVAILABLE, "kv_unavailable", "kv_unavailable")
            }
            Self::Refused(Refusal::Rate(_)) => {
                reasoned(StatusCode::TOO_MANY_REQUESTS, "rate_limited", "rate_limited")
            }
            Self::Refused(Refusal::Full) => {
                reasoned(StatusCode::FORBIDDEN, "kv_quota_exceeded", "kv_quota_exceeded")
            }
            Self::Shed => (
                StatusCode::SERVICE_UNAVAILABLE,
                Envelope {
                    error: "kv_unavailable",
                    reason: Some("kv_standalone_paused"),
                    detail: Some("writes wait until the database takes calls again; reads are tried".into()),
                },
            ),
            Self::OutcomeUnknown { once_only } => (
                if *once_only { StatusCode::CONFLICT } else { StatusCode::GATEWAY_TIMEOUT },
                Envelope {
                    error: "kv_outcome_unknown",
                    reason: Some("kv_outcome_unknown"),
                    detail: Some(
                        if *once_only {
                            "the write may have been applied; read before you repeat it"
                        } else {
                            "the write may have been applied; repeating it does no harm"
                        }
                        .into(),
                    ),
                },
            ),
            Self::BadSwitches(text) => plain(StatusCode::BAD_REQUEST, text.as_str()),
            Self::Misconfigured { reason } => {
                reasoned(StatusCode::INTERNAL_SERVER_ERROR, "kv_misconfigured", reason)
            }
            Self::Failed { reason } => reasoned(StatusCode::INTERNAL_SERVER_ERROR, "kv_error", reason),
        }
    }

    /// Status and first word of the answer.
    pub(super) fn status_and_word(&self) -> (StatusCode, &str) {
        let (status, envelope) = self.envelope();
        (status, envelope.error)
    }

    /// The answer. It carries the request id, so that a report by a user leads to the log line.
    pub(super) fn into_response(self, request_id: &str) -> Response {
        let (status, envelope) = self.envelope();
        // Plain text fields cannot fail to serialise.
        let body = serde_json::to_string(&envelope).unwrap_or_default();
        let mut response = answer(status, body);
        let headers = response.headers_mut();
        if let Ok(id) = HeaderValue::from_str(request_id) {
            headers.insert(REQUEST_ID, id);
        }
        match self {
            Self::Unavailable { .. }
            | Self::Paused { in_transaction: false }
            | Self::Refused(Refusal::NoRoom)
            | Self::Shed
            | Self::OutcomeUnknown { once_only: false } => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))
            }
            Self::Refused(Refusal::Rate(wait)) => headers.insert(RETRY_AFTER, whole_seconds(wait).into()),
            Self::MethodNotAllowed { allow } => headers.insert(ALLOW, HeaderValue::from_static(allow)),
            Self::Unauthorized => headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            _ => None,
        };
        response
    }
}

/// Rounded up, at least 1 (D17).
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_ladder_on_the_wire() {
        let rate = |millis| KvError::Refused(Refusal::Rate(Duration::from_millis(millis)));
        for (error, status, body, retry_after) in [
            (KvError::Paused { in_transaction: false }, 503, "kv_disabled", Some("1")),
            (KvError::Paused { in_transaction: true }, 403, "kv_disabled", None),
            (KvError::Refused(Refusal::NotGranted), 403, "feature_gated", None),
            (KvError::Refused(Refusal::NoRoom), 503, "kv_unavailable", Some("1")),
            (KvError::Refused(Refusal::Full), 403, "kv_quota_exceeded", None),
            (rate(1), 429, "rate_limited", Some("1")),
            (rate(1000), 429, "rate_limited", Some("1")),
            (rate(1001), 429, "rate_limited", Some("2")),
        ] {
            let (_, envelope) = error.envelope();
            let expected = format!(r#"{{"error":"{body}","reason":"{body}"}}"#);
            assert_eq!(serde_json::to_string(&envelope).unwrap(), expected);
            let response = error.into_response("abc");
            assert_eq!(response.status().as_u16(), status);
            let found = response.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap());
            assert_eq!(found, retry_after, "{body}");
        }
    }

    #[test]
    fn an_unknown_outcome_is_retried_only_where_that_does_no_harm() {
        for (once_only, status, retry_after) in [(true, 409, None), (false, 504, Some("1"))] {
            let response = KvError::OutcomeUnknown { once_only }.into_response("abc");
            assert_eq!(response.status().as_u16(), status);
            let found = response.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap());
            assert_eq!(found, retry_after);
        }
    }

    #[test]
    fn sql_errors_on_the_wire() {
        let cases = [
            (
                "22023",
                "kv_bad_ttl",
                Some("op 0"),
                400,
                r#"{"error":"kv_bad_request","reason":"kv_bad_ttl","detail":"op 0"}"#,
            ),
            (
                "22023",
                "cannot cast jsonb \"x\"",
                Some("x"),
                400,
                r#"{"error":"kv_bad_request","reason":"kv_bad_request"}"#,
            ),
            (
                "22001",
                "kv_key_too_large",
                Some("600"),
                413,
                r#"{"error":"payload_too_large","reason":"kv_key_too_large","detail":"600"}"#,
            ),
            (
                "57014",
                "canceling statement",
                None,
                503,
                r#"{"error":"kv_unavailable","reason":"kv_timeout"}"#,
            ),
            (
                "40P01",
                "deadlock detected",
                Some("pid"),
                503,
                r#"{"error":"kv_unavailable","reason":"sqlstate_40P01"}"#,
            ),
            (
                "40001",
                "could not serialize",
                None,
                503,
                r#"{"error":"kv_unavailable","reason":"sqlstate_40001"}"#,
            ),
            ("57P01", "terminating", None, 503, r#"{"error":"kv_unavailable","reason":"sqlstate_57P01"}"#),
            ("53300", "too many", None, 503, r#"{"error":"kv_unavailable","reason":"sqlstate_53300"}"#),
            ("42883", "function x", None, 500, r#"{"error":"kv_misconfigured","reason":"sqlstate_42883"}"#),
            (
                "XX000",
                "kv_result_misaligned",
                Some("1"),
                500,
                r#"{"error":"kv_error","reason":"kv_result_misaligned"}"#,
            ),
            ("53100", "disk full", None, 503, r#"{"error":"kv_unavailable","reason":"sqlstate_53100"}"#),
            ("25006", "read only", None, 503, r#"{"error":"kv_unavailable","reason":"kv_read_only"}"#),
        ];
        for (sqlstate, message, detail, status, body) in cases {
            let error = KvError::from_sql(sqlstate, message, detail);
            let (found, envelope) = error.envelope();
            assert_eq!((found.as_u16(), serde_json::to_string(&envelope).unwrap().as_str()), (status, body));
        }
        for sqlstate in ["22P02", "22P05", "22003", "54000", "54001"] {
            let error = KvError::from_sql(sqlstate, "secret value in message", Some("secret"));
            let (status, envelope) = error.envelope();
            assert_eq!((status.as_u16(), envelope.reason), (400, Some("kv_bad_body")));
            assert!(!serde_json::to_string(&envelope).unwrap().contains("secret"));
        }
    }

    #[test]
    fn headers_of_refusals() {
        for (error, status, header, value) in [
            (KvError::unavailable("kv_pool_exhausted"), 503, RETRY_AFTER, "1"),
            (KvError::MethodNotAllowed { allow: "POST" }, 405, ALLOW, "POST"),
            (KvError::Unauthorized, 401, WWW_AUTHENTICATE, "Bearer"),
            (KvError::NoSuchRoute, 404, REQUEST_ID, "abc"),
            (KvError::BodyTooLarge { limit: 1 }, 413, CONTENT_TYPE, "application/json"),
        ] {
            let response = error.into_response("abc");
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers()[header], value);
        }
    }

    #[test]
    fn the_tenant_refusal_is_literal() {
        let (_, envelope) = KvError::BadTenant.envelope();
        assert_eq!(
            serde_json::to_string(&envelope).unwrap(),
            r#"{"error":"invalid x-queen-tenant header (must be a UUID)"}"#
        );
    }
}
