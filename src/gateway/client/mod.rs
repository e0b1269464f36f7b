//! Connections of clients, in front of Pingora: who may have one, how long a head may take, and what becomes of a
//! request whose client has left.

mod canned;
mod connection;
mod cut;
mod http2;
mod outgoing;
mod places;
mod proxy_protocol;
mod stream;
mod timer;
pub mod tls;

pub(super) use connection::{Complete, Storing};
pub use places::ConnectionCaps;

use super::{
    Gateway, Load,
    forward::trusts,
    live::{Live, Settings},
    refusal::Refusal,
};
use crate::{policy::host::canonical_host, telemetry::metrics::Metrics};
use arc_swap::ArcSwap;
use async_trait::async_trait;
use connection::{Connection, Secure};
use http2::Http2Stream;
use pingora::{
    apps::{HttpServerApp, HttpServerOptions, ServerApp},
    prelude::Session,
    protocols::{
        GetSocketDigest, IO, SocketDigest, Stream, UniqueID,
        http::ServerSession as HttpSession,
        l4::{socket::SocketAddr, stream::Stream as L4Stream},
    },
    proxy::HttpProxy,
    server::ShutdownWatch,
};
use places::Places;
use proxy_protocol::Told;
use std::{
    net::IpAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use stream::ClientStream;
use tokio::{io::AsyncWriteExt, time::timeout};

/// Requests one client connection may carry, so that balancers spread again now and then and
/// per-connection memory is freed.
const REQUESTS_PER_CONNECTION: u32 = 10_000;
/// What a client may take before it is given up while its request is finished.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// For the few bytes of a refusal; they fit into the socket's buffer.
const REFUSAL_TIME: Duration = Duration::from_millis(100);

/// What holds for a connection.
pub(super) struct Rules {
    /// For a whole head, from its first byte.
    pub head_limit: Duration,
    /// For a request that stores something, from the moment its client left.
    pub finish_limit: Duration,
    /// For a client that does not read the answer to such a request.
    pub stall_limit: Duration,
    /// For one that does not read any other answer.
    pub write_limit: Duration,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What goes on.
    pub load: Arc<Load>,
    of: Arc<Settings>,
}

/// Pingora's proxy behind the rules.
pub(super) struct Edge {
    proxy: Arc<HttpProxy<Gateway>>,
    places: Arc<Places>,
    live: Arc<Live>,
    rules: ArcSwap<Rules>,
}

impl Edge {
    pub fn new(
        mut proxy: HttpProxy<Gateway>,
        live: Arc<Live>,
        metrics: Arc<Metrics>,
        load: Arc<Load>,
    ) -> Self {
        let settings = live.settings();
        proxy.handle_init_modules();
        let mut options = HttpServerOptions::default();
        options.keepalive_request_limit = Some(REQUESTS_PER_CONNECTION);
        options.h2_idle_timeout = Some(settings.timeouts.keepalive);
        proxy.server_options = Some(options);
        let places = Places::new(Arc::clone(&load));
        let rules = ArcSwap::from_pointee(rules(settings, metrics, load));
        Self { proxy: Arc::new(proxy), places, live, rules }
    }

    /// What is in force now, which seldom changes.
    fn rules(&self) -> Arc<Rules> {
        let known = self.rules.load_full();
        let now = self.live.settings();
        if Arc::ptr_eq(&known.of, &now) {
            return known;
        }
        let fresh = Arc::new(rules(now, Arc::clone(&known.metrics), Arc::clone(&known.load)));
        self.rules.store(Arc::clone(&fresh));
        fresh
    }

    /// Says that there is no place, as cheaply as that can be said: with TLS not at all.
    async fn turn_away(&self, stream: &mut Stream) {
        if self.live.tls.is_none() {
            let words = canned::refusal(Refusal::NoPlace);
            let _ = timeout(REFUSAL_TIME, async {
                stream.write_all(&words).await?;
                stream.flush().await?;
                AsyncWriteExt::shutdown(stream).await
            })
            .await;
        }
    }

    /// One request after the other, until the connection ends.
    async fn serve_http1(
        &self,
        stream: Stream,
        connection: &Connection,
        keepalive: Duration,
        shutdown: &ShutdownWatch,
    ) {
        let mut session = HttpSession::new_http1(stream);
        // Zero would be for ever.
        session.set_keepalive((!*shutdown.borrow()).then(|| keepalive.as_secs().max(1)));
        session.set_keepalive_reuses_remaining(Some(REQUESTS_PER_CONNECTION));
        while let Some(reused) = self.proxy.process_new_http(session, shutdown).await {
            let (stream, settings) = reused.consume();
            if connection.is_over() {
                return;
            }
            connection.await_head();
            session = HttpSession::new_http1(stream);
            if let Some(settings) = settings {
                settings.apply_to_session(&mut session);
            }
        }
    }
}

#[async_trait]
impl ServerApp for Edge {
    async fn process_new(self: &Arc<Self>, mut stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let rules = self.rules();
        let Settings { connections: caps, trusted_proxies, timeouts, proxy_protocol } = &*rules.of;
        let keepalive = timeouts.keepalive;
        let Some(mut place) = self.places.take(*caps) else {
            self.turn_away(&mut stream).await;
            return None;
        };
        let peer = stream.get_socket_digest().and_then(|digest| Some(*digest.peer_addr()?.as_inet()?));
        if *proxy_protocol && trusts(trusted_proxies, peer) {
            let Some(told) = timeout(timeouts.head, told_by_balancer(stream)).await.ok().flatten() else {
                rules.load.failed_handshakes.fetch_add(1, Ordering::Relaxed);
                return None;
            };
            stream = told;
        }
        if !address(&stream).is_none_or(|address| place.count_for(address, *caps, trusted_proxies)) {
            self.turn_away(&mut stream).await;
            return None;
        }
        let Some(tls) = &self.live.tls else {
            let connection = Arc::new(Connection::default());
            let stream = Box::new(ClientStream::new(stream, Arc::clone(&connection), Arc::clone(&rules)));
            self.serve_http1(stream, &connection, keepalive, shutdown).await;
            return None;
        };
        let Ok(Ok(secured)) = timeout(rules.head_limit, tls.accept(stream)).await else {
            rules.load.failed_handshakes.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let http2 = secured.speaks_http2();
        let connection = Arc::new(Connection::secure(Secure { name: secured.name(), http2 }));
        if http2 {
            let stream = Http2Stream::new(Box::new(secured), connection, Arc::clone(&rules))?;
            // Its own loop of many requests at a time.
            ServerApp::process_new(&self.proxy, Box::new(stream), shutdown).await
        } else {
            let stream =
                Box::new(ClientStream::new(Box::new(secured), Arc::clone(&connection), Arc::clone(&rules)));
            self.serve_http1(stream, &connection, keepalive, shutdown).await;
            None
        }
    }

    async fn cleanup(&self) {
        self.proxy.http_cleanup().await;
    }
}

fn rules(settings: Arc<Settings>, metrics: Arc<Metrics>, load: Arc<Load>) -> Rules {
    let timeouts = settings.timeouts;
    Rules {
        head_limit: timeouts.head,
        finish_limit: timeouts.upstream,
        // A client has to be given up before Pingora gives up writing.
        write_limit: timeouts.upstream,
        stall_limit: STALL_LIMIT.min(timeouts.upstream / 2),
        metrics,
        load,
        of: settings,
    }
}

/// The connection of a session.
pub(super) fn connection(session: &Session) -> Option<&Arc<Connection>> {
    match session.as_downstream() {
        HttpSession::H1(http1) => {
            let stream: &dyn IO = &**http1.stream();
            stream.as_any().downcast_ref().map(ClientStream::connection)
        }
        HttpSession::H2(http2) => http2.digest()?.proxy_digest.as_ref()?.user_data.as_ref()?.downcast_ref(),
        _ => None,
    }
}

/// A host name as names are compared.
pub(super) fn canonical_name(name: &str) -> Box<str> {
    canonical_host(name).to_ascii_lowercase().into()
}

/// The stream of a balancer's client, as that balancer says first.
async fn told_by_balancer(stream: Stream) -> Option<Stream> {
    let mut stream = stream.into_any().downcast::<L4Stream>().ok()?;
    if let Told::Client(client) = proxy_protocol::read(&mut stream).await.ok()? {
        let digest = SocketDigest::from_raw_fd(stream.id());
        digest.peer_addr.set(Some(SocketAddr::Inet(client))).ok()?;
        stream.set_socket_digest(digest);
    }
    Some(stream)
}

fn address(stream: &Stream) -> Option<IpAddr> {
    Some(stream.get_socket_digest()?.peer_addr()?.as_inet()?.ip())
}
