//! Routes the proxy serves itself.

use bytes::Bytes;
use serde::Serialize;

/// The body of `GET /healthz` (proxy contract §6): the switches in force. It asks no database, so
/// that an outage of the control plane takes no proxy out of rotation.
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

impl Health {
    /// The JSON document.
    pub fn body(&self) -> Bytes {
        serde_json::to_vec(self).map(Bytes::from).unwrap_or_default()
    }
}
