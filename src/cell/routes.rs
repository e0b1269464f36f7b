//! What a request is about, and the answer to it (KV contract, section 6).

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use http::header::{CONTENT_TYPE, ETAG};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::answers::{REQUEST_ID, answer};
use super::config::CellConfig;
use super::control::Control;
use super::demand::Demand;
use super::errors::KvError;
use super::gate::{Admission, Gate};
use super::metrics::CallEnd;
use super::request::{self, Call, EdgeLimits};
use super::store::{Outcome, Question, Store};
use super::tally::Tally;
use super::{access, body, console, system, tenant, transaction};
use crate::domain::secret::Secret;
use crate::telemetry::log_gate::LogGate;

/// What all requests share.
#[derive(Debug)]
pub(super) struct Cell {
    gate: Arc<Gate>,
    control: Arc<Control>,
    store: Store,
    limits: EdgeLimits,
    tenancy_header: bool,
    secret: Option<Secret>,
    max_body_bytes: usize,
    log_gate: LogGate,
    tenancy_gate: LogGate,
}

impl Cell {
    pub(super) fn new(config: &CellConfig, gate: Arc<Gate>, control: Arc<Control>, store: Store) -> Self {
        Self {
            gate,
            control,
            store,
            limits: EdgeLimits::from(config),
            tenancy_header: config.tenancy_header,
            secret: config.cell_secret.clone(),
            max_body_bytes: config.max_body_bytes,
            log_gate: LogGate::default(),
            tenancy_gate: LogGate::default(),
        }
    }
}

/// The routes by path. The router of axum would decode and split the key tail, so paths are read here.
#[derive(Debug, PartialEq, Eq)]
enum Route<'a> {
    Health,
    Metrics,
    /// The kill switch.
    Switches,
    Batch,
    Transaction,
    Namespaces,
    List,
    /// The listing by which a proxy measures what a tenant keeps.
    Queues,
    /// Namespace and key tail, both still percent-encoded.
    Key {
        namespace: &'a str,
        tail: &'a str,
    },
}

impl<'a> Route<'a> {
    fn of(path: &'a str) -> Option<Self> {
        match path {
            "/health" => return Some(Self::Health),
            "/metrics/prometheus" => return Some(Self::Metrics),
            "/api/v1/system/kv-timers" => return Some(Self::Switches),
            "/api/v1/kv" | "/api/v1/kv/" => return Some(Self::Batch),
            "/api/v1/transaction" => return Some(Self::Transaction),
            "/api/v1/resources/kv/namespaces" => return Some(Self::Namespaces),
            "/api/v1/resources/kv/list" => return Some(Self::List),
            "/api/v1/resources/queues" => return Some(Self::Queues),
            _ => {}
        }
        // Everything after the namespace is the key, slashes included.
        let (namespace, tail) = path.strip_prefix("/api/v1/kv/")?.split_once('/')?;
        (!namespace.is_empty() && !tail.is_empty()).then_some(Self::Key { namespace, tail })
    }
}

/// Answers every request of the listener.
pub(super) async fn serve(State(state): State<Arc<Cell>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    match handle(&state, &parts, body).await {
        Ok(response) => response,
        Err(error) => {
            let id = request_id(&parts.headers);
            if error.is_database()
                && let Some(hidden) = state.log_gate.pass()
            {
                // The reason is an identifier; what the server says may quote the caller.
                tracing::warn!(request_id = %id, error = %error, hidden, "KV call failed");
            }
            if Route::of(parts.uri.path()) == Some(Route::Transaction) {
                transaction::refusal(error, &id)
            } else {
                error.into_response(&id)
            }
        }
    }
}

async fn handle(state: &Cell, parts: &Parts, body: axum::body::Body) -> Result<Response, KvError> {
    let route = Route::of(parts.uri.path());
    if route == Some(Route::Health) {
        return health(state, &parts.method).await;
    }
    // A stranger does not even learn which routes exist.
    access::check(&parts.headers, state.secret.as_ref())?;
    if !state.tenancy_header
        && parts.headers.contains_key("x-queen-tenant")
        && let Some(hidden) = state.tenancy_gate.pass()
    {
        tracing::warn!(
            hidden,
            "ALL TENANTS SHARE ONE STORE: requests name a tenant, but QUEEN_TENANCY_HEADER is off"
        );
    }
    let tenant = tenant::of(&parts.headers, state.tenancy_header)?;
    // Read before anything else is refused: whoever is still sending, as the proxy may be, would find the
    // connection closed in place of an answer.
    let body = match route {
        Some(Route::Switches) => body::read(body, system::MAX_BODY).await?,
        Some(_) => body::read(body, state.max_body_bytes).await?,
        None => Vec::new(),
    };
    match route {
        Some(Route::Metrics) => {
            if !matches!(parts.method, Method::GET | Method::HEAD) {
                return Err(KvError::MethodNotAllowed { allow: "GET, HEAD" });
            }
            metrics(state)
        }
        Some(Route::Switches) => match parts.method {
            Method::GET | Method::HEAD => Ok(system::show(&state.gate, &state.control).await),
            Method::POST => system::switch(&state.gate, &state.control, &body).await,
            _ => Err(KvError::MethodNotAllowed { allow: "GET, HEAD, POST" }),
        },
        Some(Route::Batch) => {
            if parts.method != Method::POST {
                return Err(KvError::MethodNotAllowed { allow: "POST" });
            }
            batch(state, tenant, &body).await
        }
        Some(Route::Transaction) => {
            if parts.method != Method::POST {
                return Err(KvError::MethodNotAllowed { allow: "POST" });
            }
            let call = transaction::bundle(&body, state.limits)?;
            transaction::outcome(run(state, tenant, Question::Bundle(call)).await?)
        }
        Some(Route::Namespaces) => {
            no_query(parts)?;
            if !matches!(parts.method, Method::GET | Method::HEAD) {
                return Err(KvError::MethodNotAllowed { allow: "GET, HEAD" });
            }
            let array = text(run(state, tenant, Question::Namespaces).await?)?;
            Ok(answer(StatusCode::OK, console::namespaces(&array)))
        }
        Some(Route::List) => {
            no_query(parts)?;
            if parts.method != Method::POST {
                return Err(KvError::MethodNotAllowed { allow: "POST" });
            }
            // A pause is told before what is wrong with the body (section 6.4).
            let reading = Demand::default();
            let admission = state.gate.standalone(tenant, &reading)?;
            let question = Question::List(console::Page::of(&body)?);
            let page = finish(state, tenant, question, &reading, admission).await?;
            Ok(answer(StatusCode::OK, text(page)?))
        }
        Some(Route::Queues) => {
            if !matches!(parts.method, Method::GET | Method::HEAD) {
                return Err(KvError::MethodNotAllowed { allow: "GET, HEAD" });
            }
            Ok(answer(StatusCode::OK, console::queues(state.control.usage_of(tenant))))
        }
        Some(Route::Key { namespace, tail }) => {
            no_query(parts)?;
            let namespace = decode(namespace, "kv_bad_namespace")?;
            let key = decode(tail, "kv_bad_key")?;
            let call = match parts.method {
                Method::GET | Method::HEAD => request::get(&namespace, &key)?,
                Method::PUT => request::put(&namespace, &key, &body, state.limits)?,
                Method::DELETE => request::delete(&namespace, &key, &body, state.limits)?,
                _ => {
                    return Err(KvError::MethodNotAllowed { allow: "GET, HEAD, PUT, DELETE" });
                }
            };
            single(state, tenant, call).await
        }
        Some(Route::Health) | None => Err(KvError::NoSuchRoute),
    }
}

/// The check that comes before all others of a route: names in a query string end up in access logs.
fn no_query(parts: &Parts) -> Result<(), KvError> {
    match parts.uri.query() {
        None | Some("") => Ok(()),
        Some(_) => Err(KvError::bad("kv_no_query_string", "options of this route go into the body")),
    }
}

/// The answer to a question that cannot lose.
fn text(outcome: Outcome) -> Result<String, KvError> {
    match outcome {
        Outcome::Results(text) => Ok(text),
        Outcome::Lost(_) => Err(KvError::failed("kv_result_unreadable")),
    }
}

async fn health(state: &Cell, method: &Method) -> Result<Response, KvError> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return Err(KvError::MethodNotAllowed { allow: "GET, HEAD" });
    }
    if state.store.is_healthy().await {
        Ok(answer(StatusCode::OK, r#"{"status":"ok"}"#.to_owned()))
    } else {
        Err(KvError::unavailable("connection"))
    }
}

fn metrics(state: &Cell) -> Result<Response, KvError> {
    let text = state
        .gate
        .metrics
        .render(state.store.state(), &state.control.snapshot().quotas)
        .map_err(|_| KvError::failed("metrics"))?;
    let mut response = answer(StatusCode::OK, text);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(prometheus::TEXT_FORMAT));
    Ok(response)
}

/// Lets a call in, runs it, and accounts for how it ended.
async fn run(state: &Cell, tenant: Uuid, mut question: Question) -> Result<Outcome, KvError> {
    let demand = question.take_demand();
    let admission = match question {
        Question::Bundle(_) => state.gate.rider(tenant, &demand)?,
        _ => state.gate.standalone(tenant, &demand)?,
    };
    finish(state, tenant, question, &demand, admission).await
}

/// Runs a call that was let in.
async fn finish(
    state: &Cell,
    tenant: Uuid,
    question: Question,
    demand: &Demand,
    admission: Admission,
) -> Result<Outcome, KvError> {
    let started = Instant::now();
    let outcome = state.store.ask(tenant, question, demand).await;
    let took = started.elapsed();
    match &outcome {
        Ok(Outcome::Results(results)) => {
            state.gate.metrics.call(demand, CallEnd::Done(&Tally::of(results)), took);
        }
        Ok(Outcome::Lost(_)) => {
            admission.refund();
            state.gate.metrics.call(demand, CallEnd::Lost, took);
        }
        Err(error) => {
            admission.failed(error);
            state.gate.metrics.call(demand, CallEnd::Failed, took);
            if matches!(error, KvError::OutcomeUnknown { .. }) {
                state.gate.metrics.outcome_unknown();
            }
        }
    }
    outcome
}

async fn batch(state: &Cell, tenant: Uuid, body: &[u8]) -> Result<Response, KvError> {
    let text = match request::batch(body, state.limits)? {
        None => r#"{"results":[]}"#.to_owned(),
        Some(call) => match run(state, tenant, Question::Apply(call)).await? {
            Outcome::Results(results) => format!(r#"{{"results":{results}}}"#),
            Outcome::Lost(verdict) => verdict,
        },
    };
    Ok(answer(StatusCode::OK, text))
}

/// Runs a call of one operation and answers its element alone.
async fn single(state: &Cell, tenant: Uuid, call: Call) -> Result<Response, KvError> {
    let results = match run(state, tenant, Question::Apply(call)).await? {
        Outcome::Results(results) => results,
        Outcome::Lost(verdict) => return Ok(answer(StatusCode::OK, verdict)),
    };
    let element = results
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .ok_or(KvError::failed("kv_result_unreadable"))?;
    let tag = entity_tag(element)?;
    let mut response = answer(StatusCode::OK, element.to_owned());
    if let Some(tag) = tag {
        response.headers_mut().insert(ETAG, tag);
    }
    Ok(response)
}

/// `"<version>"` for a `get` that found its key, nothing for all other elements.
fn entity_tag(element: &str) -> Result<Option<HeaderValue>, KvError> {
    #[derive(Deserialize)]
    struct Facts<'a> {
        #[serde(default)]
        found: bool,
        #[serde(borrow)]
        version: Option<&'a RawValue>,
    }
    const UNREADABLE: KvError = KvError::failed("kv_result_unreadable");
    let facts: Facts<'_> = serde_json::from_str(element).map_err(|_| UNREADABLE)?;
    if !facts.found {
        return Ok(None);
    }
    let version = facts.version.ok_or(UNREADABLE)?;
    HeaderValue::from_str(&format!("\"{}\"", version.get())).map(Some).map_err(|_| UNREADABLE)
}

/// A name from the path, decoded once; `+` stays a plus. The code point zero is refused here because the
/// cast to jsonb would refuse it under a less telling name.
fn decode(encoded: &str, reason: &'static str) -> Result<String, KvError> {
    match percent_decode_str(encoded).decode_utf8() {
        Ok(name) if !name.contains('\0') => Ok(name.into_owned()),
        _ => Err(KvError::bad(reason, "the path holds %00 or is not UTF-8 after decoding")),
    }
}

/// The id the proxy gave the request, or a new one. Only plain ids are taken over: the text goes to the log.
fn request_id(headers: &HeaderMap) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= 64 && id.bytes().all(plain))
        .map_or_else(|| Uuid::now_v7().to_string(), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_by_path() {
        let key = |namespace, tail| Some(Route::Key { namespace, tail });
        for (path, expected) in [
            ("/health", Some(Route::Health)),
            ("/metrics/prometheus", Some(Route::Metrics)),
            ("/metrics", None),
            ("/api/v1/system/kv-timers", Some(Route::Switches)),
            ("/api/v1/system/kv-timers/", None),
            ("/api/v1/kv", Some(Route::Batch)),
            ("/api/v1/kv/", Some(Route::Batch)),
            ("/api/v1/kv/ns/k", key("ns", "k")),
            ("/api/v1/kv/ns/a/b", key("ns", "a/b")),
            ("/api/v1/kv/ns//a//b/", key("ns", "/a//b/")),
            ("/api/v1/kv/ns/a%2Fb", key("ns", "a%2Fb")),
            ("/api/v1/kv/ns", None),
            ("/api/v1/kv/ns/", None),
            ("/api/v1/kv//k", None),
            ("/api/v1/transaction", Some(Route::Transaction)),
            ("/api/v1/transaction/", None),
            ("/api/v1/resources/kv/namespaces", Some(Route::Namespaces)),
            ("/api/v1/resources/kv/list", Some(Route::List)),
            ("/api/v1/resources/kv", None),
            ("/api/v1/kvx", None),
            ("/api/v2/kv/ns/k", None),
            ("/health/", None),
            ("/", None),
            ("*", None),
        ] {
            assert_eq!(Route::of(path), expected, "{path}");
        }
    }

    #[test]
    fn names_are_decoded_once() {
        for (encoded, expected) in [
            ("a%2Fb", Some("a/b")),
            ("a%252Fb", Some("a%2Fb")),
            ("a+b", Some("a+b")),
            ("100%", Some("100%")),
            ("%C3%A9", Some("é")),
            ("%FF", None),
            ("a%00", None),
        ] {
            assert_eq!(decode(encoded, "kv_bad_key").ok().as_deref(), expected, "{encoded}");
        }
    }

    #[test]
    fn entity_tags() {
        for (element, expected) in [
            (
                r#"{"op":"get","found":true,"version":90071992547409931,"value":1}"#,
                Ok(Some("\"90071992547409931\"")),
            ),
            (r#"{"op":"get","found":false,"key":"k"}"#, Ok(None)),
            (r#"{"op":"put","applied":true,"version":4}"#, Ok(None)),
            (r#"{"found":true}"#, Err(())),
        ] {
            let found = entity_tag(element).map(|tag| tag.map(|tag| tag.to_str().unwrap().to_owned()));
            assert_eq!(found.map_err(|_| ()), expected.map(|tag| tag.map(ToOwned::to_owned)), "{element}");
        }
    }

    #[test]
    fn request_ids() {
        for (given, kept) in [("01890a5d-ac96", true), ("a b", false), ("", false), (&"x".repeat(65), false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_str(given).unwrap());
            assert_eq!(request_id(&headers) == given, kept, "{given}");
        }
    }
}
