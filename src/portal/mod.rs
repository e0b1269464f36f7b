//! Routes the proxy serves itself. They need no cluster and no credential, and ask no database, so that an
//! outage of the control plane takes no proxy out of rotation.

use bytes::Bytes;
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

/// Documents that are the same for everybody.
#[derive(Clone, Debug)]
pub struct Portal {
    health: Bytes,
    jwks: Bytes,
}

impl Portal {
    /// Renders the documents once.
    pub fn new(health: Health, jwks: Option<&str>) -> Self {
        let jwks = jwks.unwrap_or(r#"{"keys":[]}"#);
        Self {
            health: serde_json::to_vec(&health).map(Bytes::from).unwrap_or_default(),
            jwks: Bytes::copy_from_slice(jwks.as_bytes()),
        }
    }

    /// The document at a path.
    pub fn document(&self, path: &str) -> Option<Bytes> {
        match path {
            "/healthz" => Some(self.health.clone()),
            "/.well-known/jwks.json" => Some(self.jwks.clone()),
            _ => None,
        }
    }
}
