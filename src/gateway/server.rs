//! Starting the gateway and ending it without losing a request.

use super::{
    Gateway, Load,
    access_log::AccessLog,
    caps::Caps,
    client::Edge,
    live::Live,
    pipeline::{Directory, Pipeline},
    spans::Spans,
    traffic::Clusters,
};
use crate::{
    config::proxy::ProxyConfig,
    identity::session::SessionKeys,
    metering::Meter,
    portal::{Health, Portal, auth::Auth},
    process::stop_signal,
    telemetry::metrics::Metrics,
};
use async_trait::async_trait;
use listenfd::ListenFd;
use parking_lot::Mutex;
use pingora::{
    listeners::{L4BufferSettings, ListenerConfig},
    proxy::HttpProxy,
    server::{
        Fds, ListenFds, RunArgs, Server, ShutdownSignal, ShutdownSignalWatch, ShutdownWatch,
        configuration::ServerConf,
    },
    services::{Service as PingoraService, listening::Service},
};
use std::{
    net::{SocketAddr, TcpListener},
    os::fd::{IntoRawFd, RawFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// Bytes read at once for TLS.
const TLS_BUFFER: usize = 16 << 10;
/// After the listener has closed, how long Pingora waits before it stops its runtimes, in seconds.
const GRACE_S: u64 = 1;

/// Why the gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another program has the address, or it is not ours.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's word for it.
        reason: std::io::Error,
    },
    /// The socket that we were started with is none that listens.
    #[error("the socket that was handed over (LISTEN_FDS) cannot be used: {0}")]
    Handed(std::io::Error),
    /// The threads that check passwords.
    #[error("cannot start the threads that check passwords: {0}")]
    Threads(std::io::Error),
}

/// Where the gateway leaves word of what it does.
pub struct Watched {
    /// What is going on.
    pub load: Arc<Load>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What is billed.
    pub meter: Meter,
    /// What each cluster does.
    pub clusters: Arc<Clusters>,
    /// The log of requests, if there is to be one.
    pub access_log: Option<AccessLog>,
    /// Where spans go, if there are to be some.
    pub spans: Option<Spans>,
    /// Settings that may change, and TLS.
    pub live: Arc<Live>,
}

/// Serves until SIGTERM or SIGINT, then finishes what is running. Blocks; must not be called from
/// inside a runtime.
pub fn run(
    config: &ProxyConfig,
    directory: Directory,
    caps: Caps,
    watched: Watched,
) -> Result<(), ServeError> {
    let Watched { load, metrics, meter, clusters, access_log, spans, live } = watched;
    let address = SocketAddr::from(config.bind);
    let handed = ListenFd::from_env().take_tcp_listener(0).map_err(ServeError::Handed)?;
    if handed.is_none() {
        // Pingora would panic later; this says it in a line.
        drop(TcpListener::bind(address).map_err(|reason| ServeError::Listen { address, reason })?);
    }

    let conf = ServerConf {
        threads: config.worker_threads,
        // Connect failures only, and the gateway counts those itself.
        max_retries: super::MAX_CONNECTS,
        grace_period_seconds: Some(GRACE_S),
        graceful_shutdown_timeout_seconds: Some(1),
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();

    let health = Health {
        enforce: config.enforce,
        shared_hosts: config.shared_hosts.len(),
        status: "ok",
        tenant_header: config.tenant_header,
    };
    let portal = match &directory {
        Directory::Control(identity) => {
            let jwks = identity.sessions.as_ref().map(SessionKeys::jwks);
            let auth = Auth::new(Arc::clone(identity), config.sessions.auth.clone());
            Portal::new(health, jwks, Some(auth.map_err(ServeError::Threads)?))
        }
        Directory::Static(_) => Portal::new(health, None, None),
    };
    let gateway = Gateway {
        pipeline: Pipeline {
            directory,
            default_cluster: config.default_cluster,
            shared_hosts: config.shared_hosts.clone(),
            dev_insecure: config.dev_insecure,
            max_body_bytes: config.max_body_bytes,
            caps,
        },
        live: Arc::clone(&live),
        tenant_header: config.tenant_header,
        portal,
        load: Arc::clone(&load),
        metrics: Arc::clone(&metrics),
        meter,
        clusters,
        access_log,
        spans,
    };
    let proxy = HttpProxy::new(gateway, Arc::clone(&server.configuration));
    let edge = Edge::new(proxy, Arc::clone(&live), metrics, Arc::clone(&load));
    let mut service = Service::new("gateway".to_owned(), edge);
    // Heads are read into a buffer of their own; this one would only cost memory per connection. TLS reads in
    // small pieces.
    let buffer = if live.tls.is_some() { TLS_BUFFER } else { 0 };
    let listener =
        ListenerConfig::tcp(address.to_string()).l4_buffer(L4BufferSettings::default().read(buffer));
    service.add_listener(listener);
    match handed {
        Some(handed) => {
            server.add_service(OnSocket { service, name: address.to_string(), socket: handed.into_raw_fd() })
        }
        None => server.add_service(service),
    };

    tracing::info!(%address, tls = live.tls.is_some(), dev_static = config.dev_cell.is_some(), "queen-proxy up");
    if config.dev_insecure {
        tracing::warn!("QUEEN_PROXY_DEV_INSECURE is on: nobody is authenticated");
    }
    let watch = DrainFirst { load, live };
    server.run(RunArgs { shutdown_signal: Box::new(watch) });
    tracing::info!("queen-proxy down");
    Ok(())
}

/// The gateway on a socket that was there before it: systemd's, which stays open while one gateway follows the other.
struct OnSocket {
    service: Service<Edge>,
    /// What Pingora takes the socket for.
    name: String,
    socket: RawFd,
}

#[async_trait]
impl PingoraService for OnSocket {
    async fn start_service(
        &mut self,
        _: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_socket: usize,
    ) {
        let mut sockets = Fds::new();
        sockets.add(self.name.clone(), self.socket);
        let sockets = Some(Arc::new(Mutex::new(sockets)));
        PingoraService::start_service(&mut self.service, sockets, shutdown, listeners_per_socket).await;
    }

    fn name(&self) -> &str {
        PingoraService::name(&self.service)
    }
}

/// Waits for the signal, then for running requests, and only then lets Pingora end.
struct DrainFirst {
    load: Arc<Load>,
    live: Arc<Live>,
}

#[async_trait]
impl ShutdownSignalWatch for DrainFirst {
    async fn recv(&self) -> ShutdownSignal {
        if let Err(error) = stop_signal(self.live.hangup_stops).await {
            tracing::error!(%error, "signals cannot be watched: shutting down");
            return ShutdownSignal::FastShutdown;
        }
        tracing::info!("draining");
        self.load.draining.store(true, Ordering::Release);
        // Balancers need a moment to see that this proxy is not ready, and send requests until then.
        sleep(self.live.settings().timeouts.delay).await;
        self.load.close();
        let deadline = Instant::now() + self.live.settings().timeouts.drain;
        while self.load.in_flight.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            sleep(Duration::from_millis(10)).await;
        }
        ShutdownSignal::GracefulTerminate
    }
}
