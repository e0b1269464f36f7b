//! TLS towards clients: a chain and its key from PEM files, replaced while connections go on.

use super::canonical_name;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType, raw_connect::ProxyDigest,
};
use rustls::{ServerConfig, crypto::ring, version};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{
    fmt,
    io::{IoSlice, Result as IoResult},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Where chain and key are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Certificates in PEM form, the server's own first.
    pub chain: PathBuf,
    /// Its key in PEM form: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
}

/// Why chain and key cannot be used. Nothing of the key is in it.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No file of certificates.
    #[error("{0}: holds no certificates in PEM form, or cannot be read")]
    Chain(PathBuf),
    /// No file of a key.
    #[error("{0}: holds no private key in PEM form, or cannot be read")]
    Key(PathBuf),
    /// They do not belong together, or are of a kind that is not supported.
    #[error("the certificate and its key cannot be used: {0}")]
    Pair(#[from] rustls::Error),
    /// A certificate that only a part of is understood.
    #[error("a certificate of the chain cannot be read")]
    Certificate,
}

/// Chain and key in use.
pub struct Tls(ArcSwap<Pair>);

/// A chain and its key, ready for handshakes.
pub struct Pair {
    config: Arc<ServerConfig>,
    ends: i64,
}

impl Pair {
    /// Reads and checks both.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let chain = read_chain(&files.chain)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|_| TlsError::Key(files.key.clone()))?;
        let mut ends = i64::MAX;
        for certificate in &chain {
            let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| TlsError::Certificate)?;
            ends = ends.min(parsed.validity().not_after.timestamp());
        }
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&version::TLS13, &version::TLS12])?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![HTTP2.to_vec(), HTTP1.to_vec()];
        Ok(Self { config: Arc::new(config), ends })
    }
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let error = || TlsError::Chain(path.to_owned());
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(|_| error())?.collect();
    chain.ok().filter(|chain| !chain.is_empty()).ok_or_else(error)
}

impl Tls {
    /// Begins with a pair.
    pub fn new(pair: Pair) -> Self {
        Self(ArcSwap::from_pointee(pair))
    }

    /// Handshakes from now on show another pair; connections go on.
    pub fn replace(&self, pair: Pair) {
        self.0.store(Arc::new(pair));
    }

    /// When the first certificate of the chain ends, in seconds since 1970.
    pub fn ends(&self) -> i64 {
        self.0.load().ends
    }

    /// A handshake with a client.
    pub(super) async fn accept(&self, stream: Stream) -> IoResult<Secured> {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.0.load().config));
        acceptor.accept(stream).await.map(Secured)
    }
}

/// A client's stream, decrypted.
pub(super) struct Secured(TlsStream<Stream>);

impl Secured {
    /// The host that the client asked for in the handshake, canonical.
    pub(super) fn name(&self) -> Option<Box<str>> {
        self.0.get_ref().1.server_name().map(canonical_name)
    }

    pub(super) fn speaks_http2(&self) -> bool {
        self.0.get_ref().1.alpn_protocol() == Some(HTTP2)
    }

    fn socket(&self) -> &Stream {
        self.0.get_ref().0
    }
}

impl AsyncRead for Secured {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<IoResult<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Secured {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(&mut self.0).await;
    }
}

impl UniqueID for Secured {
    fn id(&self) -> UniqueIDType {
        self.socket().id()
    }
}

impl Ssl for Secured {}

impl GetTimingDigest for Secured {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for Secured {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for Secured {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.socket().get_socket_digest()
    }
}

impl Peek for Secured {}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").finish_non_exhaustive()
    }
}
