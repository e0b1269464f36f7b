//! The wire side of every answer: status, headers and the error envelope (KV contract, section 5).

use std::borrow::Cow;

use axum::body::Body;
use axum::response::Response;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use super::errors::KvError;

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
    error: &'static str,
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
            Self::Misconfigured { reason } => {
                reasoned(StatusCode::INTERNAL_SERVER_ERROR, "kv_misconfigured", reason)
            }
            Self::Failed { reason } => reasoned(StatusCode::INTERNAL_SERVER_ERROR, "kv_error", reason),
        }
    }

    /// Status and first word of the answer.
    pub(super) fn status_and_word(&self) -> (StatusCode, &'static str) {
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
            Self::Unavailable { .. } => headers.insert(RETRY_AFTER, HeaderValue::from_static("1")),
            Self::MethodNotAllowed { allow } => headers.insert(ALLOW, HeaderValue::from_static(allow)),
            Self::Unauthorized => headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            _ => None,
        };
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("25006", "read only", None, 500, r#"{"error":"kv_error","reason":"sqlstate_25006"}"#),
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
