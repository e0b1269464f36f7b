//! Settings that may change while the gateway serves.

use super::client::{ConnectionCaps, tls::Tls};
use crate::config::proxy::{ProxyConfig, Timeouts};
use arc_swap::ArcSwap;
use ipnet::IpNet;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// One state of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Timeouts towards clients and cells.
    pub timeouts: Timeouts,
    /// Peers whose `X-Forwarded-*` count, and whose connections are not capped by address.
    pub trusted_proxies: Vec<IpNet>,
    /// Connections that clients may have.
    pub connections: ConnectionCaps,
    /// Whether trusted proxies begin each connection with a header of the PROXY protocol.
    pub proxy_protocol: bool,
}

impl Settings {
    /// The part of a configuration.
    pub fn of(config: &ProxyConfig) -> Self {
        Self {
            timeouts: config.timeouts,
            trusted_proxies: config.trusted_proxies.clone(),
            connections: config.connections,
            proxy_protocol: config.proxy_protocol,
        }
    }
}

/// What is in force, for everybody who serves.
pub struct Live {
    settings: ArcSwap<Settings>,
    /// TLS towards clients, if there is any.
    pub tls: Option<Arc<Tls>>,
    /// Whether SIGHUP is the end, as for a program on a terminal that closes.
    pub hangup_stops: bool,
    reloads: [AtomicU64; 2],
}

impl Live {
    /// Begins with these.
    pub fn new(settings: Settings, tls: Option<Arc<Tls>>, hangup_stops: bool) -> Self {
        Self { settings: ArcSwap::from_pointee(settings), tls, hangup_stops, reloads: Default::default() }
    }

    /// What is in force now.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }

    /// Others are in force from now on.
    pub fn replace(&self, settings: Settings) {
        self.settings.store(Arc::new(settings));
    }

    /// Counts an attempt to replace them.
    pub fn count(&self, succeeded: bool) {
        self.reloads[usize::from(!succeeded)].fetch_add(1, Ordering::Relaxed);
    }

    /// Attempts since the start: that succeeded, and that failed.
    pub fn reloads(&self) -> [u64; 2] {
        [0, 1].map(|outcome: usize| self.reloads[outcome].load(Ordering::Relaxed))
    }
}
