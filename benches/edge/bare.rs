//! What Pingora costs by itself: every request to one address, nothing looked at. Started as our proxy starts it
//! (`src/gateway/server.rs`): the same number of threads, the same scheduling of them, the same buffers and the
//! same allocator.

use async_trait::async_trait;
use pingora::{
    Result,
    listeners::{L4BufferSettings, ListenerConfig},
    prelude::{HttpPeer, ProxyHttp, Session},
    proxy::http_proxy_service,
    server::{RunArgs, Server, configuration::ServerConf},
};
use std::net::SocketAddr;

struct Bare {
    peer: HttpPeer,
}

#[async_trait]
impl ProxyHttp for Bare {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> Result<Box<HttpPeer>> {
        Ok(Box::new(self.peer.clone()))
    }
}

/// Serves until it is killed.
pub fn serve(port: u16, upstream: SocketAddr, threads: usize) {
    let conf = ServerConf { threads, ..ServerConf::default() };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let bare = Bare { peer: HttpPeer::new(upstream, false, String::new()) };
    let mut service = http_proxy_service(&server.configuration, bare);
    let listener = ListenerConfig::tcp(format!("127.0.0.1:{port}"));
    service.add_listener(listener.l4_buffer(L4BufferSettings::default().read(0)));
    server.add_service(service);
    server.run(RunArgs::default());
}
