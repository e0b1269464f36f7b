//! Routes the proxy serves itself. The documents need no cluster and no credential, and ask no database, so
//! that an outage of the control plane takes no proxy out of rotation.

pub mod auth;

use auth::Auth;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use serde::Serialize;

/// The body of `GET /healthz` (proxy contract §6): the switches in force.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Health {
    /// Whether plan caps refuse, or only count.
    pub enforce: bool,
    /// Number of shared hosts.
    pub shared_hosts: usize,
    /// Always "ok".
    pub status: &'static str,
    /// Whether cells get `x-queen-tenant`.
    pub tenant_header: bool,
}

/// A route of our own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// `/healthz`
    Health,
    /// `/.well-known/jwks.json`
    Jwks,
    /// `/auth/login`
    Login,
    /// `/auth/logout`
    Logout,
    /// `/auth/me`
    Me,
    /// `/auth/session-token`
    SessionToken,
    /// `/auth/google` and `/auth/github`, which are not there yet.
    Provider,
}

impl Route {
    /// The route with this path.
    pub fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/healthz" => Self::Health,
            "/.well-known/jwks.json" => Self::Jwks,
            "/auth/login" => Self::Login,
            "/auth/logout" => Self::Logout,
            "/auth/me" => Self::Me,
            "/auth/session-token" => Self::SessionToken,
            "/auth/google" | "/auth/github" | "/auth/google/callback" | "/auth/github/callback" => {
                Self::Provider
            }
            _ => return None,
        })
    }

    /// The methods it takes, as `Allow` lists them.
    pub fn methods(self) -> &'static str {
        match self {
            Self::Login => "GET, HEAD, POST",
            Self::Logout => "POST",
            _ => "GET, HEAD",
        }
    }

    /// Whether it takes this method.
    pub fn takes(self, method: &Method) -> bool {
        self.methods().split(", ").any(|known| known == method.as_str())
    }
}

/// An answer of our own.
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// `Content-Type`.
    pub content_type: &'static str,
    /// Other headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The whole body.
    pub body: Bytes,
}

impl Reply {
    /// 200 with a document that is about one visitor.
    pub fn json(document: &impl Serialize) -> Self {
        Self {
            headers: auth::unseen(),
            ..Self::document(serde_json::to_vec(document).map(Bytes::from).unwrap_or_default())
        }
    }

    /// 200 with a JSON document for everybody.
    pub fn document(body: Bytes) -> Self {
        Self { status: 200, content_type: "application/json", headers: Vec::new(), body }
    }
}

/// Our own routes.
pub struct Portal {
    health: Bytes,
    jwks: Bytes,
    /// Signing in; none without a control plane.
    pub auth: Option<Auth>,
}

impl Portal {
    /// Renders the documents once.
    pub fn new(health: Health, jwks: Option<&str>, auth: Option<Auth>) -> Self {
        let jwks = jwks.unwrap_or(r#"{"keys":[]}"#);
        Self {
            health: serde_json::to_vec(&health).map(Bytes::from).unwrap_or_default(),
            jwks: Bytes::copy_from_slice(jwks.as_bytes()),
            auth,
        }
    }

    /// The switches in force.
    pub fn health(&self) -> Reply {
        Reply::document(self.health.clone())
    }

    /// The public keys of sessions.
    pub fn jwks(&self) -> Reply {
        Reply::document(self.jwks.clone())
    }
}
