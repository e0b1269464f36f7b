//! Connections of clients, in front of Pingora: who may have one, how long a head may take, and what becomes of a
//! request whose client has left.

mod canned;
mod connection;
mod places;
mod stream;

pub(super) use connection::Complete;
pub use places::ConnectionCaps;

use super::{Gateway, Load, refusal::Refusal};
use crate::telemetry::metrics::Metrics;
use async_trait::async_trait;
use connection::Connection;
use ipnet::IpNet;
use pingora::{
    apps::{HttpServerApp, HttpServerOptions, ServerApp},
    prelude::Session,
    protocols::{IO, Stream, http::ServerSession as HttpSession},
    proxy::HttpProxy,
    server::ShutdownWatch,
};
use places::Places;
use std::{net::IpAddr, sync::Arc, time::Duration};
use stream::ClientStream;
use tokio::{io::AsyncWriteExt, time::timeout};

/// What a client may take before it is given up while its request is finished.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// For the few bytes of a refusal; they fit into the socket's buffer.
const REFUSAL_TIME: Duration = Duration::from_millis(100);

/// What holds for every connection.
pub(super) struct Rules {
    /// For a whole head, from its first byte.
    pub head_limit: Duration,
    /// For a request that stores something, from the moment its client left.
    pub finish_limit: Duration,
    /// For a client that does not read the answer to such a request.
    pub stall_limit: Duration,
    /// An idle connection ends after this.
    pub keepalive: Duration,
    /// Requests on one connection.
    pub requests: u32,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What goes on.
    pub load: Arc<Load>,
}

impl Rules {
    /// A client has to be given up before Pingora gives up writing, which is after `write`.
    pub fn stall_limit(write: Duration) -> Duration {
        STALL_LIMIT.min(write / 2)
    }

    /// Zero would be for ever.
    fn keepalive_seconds(&self) -> u64 {
        self.keepalive.as_secs().max(1)
    }
}

/// Pingora's proxy behind the rules.
pub(super) struct Edge {
    proxy: Arc<HttpProxy<Gateway>>,
    places: Arc<Places>,
    rules: Arc<Rules>,
}

impl Edge {
    /// Connections from `balancers` are those of many, and not capped by address.
    pub fn new(
        mut proxy: HttpProxy<Gateway>,
        caps: ConnectionCaps,
        balancers: Vec<IpNet>,
        rules: Rules,
    ) -> Self {
        proxy.handle_init_modules();
        let mut options = HttpServerOptions::default();
        options.keepalive_request_limit = Some(rules.requests);
        options.h2_idle_timeout = Some(rules.keepalive);
        proxy.server_options = Some(options);
        let places = Places::new(caps, balancers, Arc::clone(&rules.load));
        Self { proxy: Arc::new(proxy), places, rules: Arc::new(rules) }
    }

    /// One request after the other, until the connection ends.
    async fn serve_http1(&self, stream: Stream, connection: &Connection, shutdown: &ShutdownWatch) {
        let mut session = HttpSession::new_http1(stream);
        session.set_keepalive(if *shutdown.borrow() { None } else { Some(self.rules.keepalive_seconds()) });
        session.set_keepalive_reuses_remaining(Some(self.rules.requests));
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
        let Some(mut place) = self.places.take() else {
            turn_away(&mut stream).await;
            return None;
        };
        if !address(&stream).is_none_or(|address| place.count_for(address)) {
            turn_away(&mut stream).await;
            return None;
        }
        let connection = Arc::new(Connection::default());
        let stream = ClientStream::new(stream, Arc::clone(&connection), Arc::clone(&self.rules));
        self.serve_http1(Box::new(stream), &connection, shutdown).await;
        None
    }

    async fn cleanup(&self) {
        self.proxy.http_cleanup().await;
    }
}

/// The connection of a session, where there is something to tell it.
pub(super) fn connection(session: &Session) -> Option<&Connection> {
    match session.as_downstream() {
        HttpSession::H1(http1) => {
            let stream: &dyn IO = &**http1.stream();
            stream.as_any().downcast_ref().map(ClientStream::connection)
        }
        _ => None,
    }
}

fn address(stream: &Stream) -> Option<IpAddr> {
    Some(stream.get_socket_digest()?.peer_addr()?.as_inet()?.ip())
}

/// Says that there is no place, as cheaply as that can be said.
async fn turn_away(stream: &mut Stream) {
    let words = canned::refusal(Refusal::NoPlace);
    let _ = timeout(REFUSAL_TIME, async {
        stream.write_all(&words).await?;
        stream.flush().await?;
        AsyncWriteExt::shutdown(stream).await
    })
    .await;
}
