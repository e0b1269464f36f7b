//! The stream of an HTTP/1 client, between Pingora and its socket. It limits the time and size of heads, finds out
//! whether a client that closed has left, lets requests that store something go to their end without their client,
//! and puts our own words in place of Pingora's.

use super::{
    Rules, canned,
    connection::{Connection, Phase},
    cut::{Chunks, Head},
    outgoing::Outgoing,
    timer::Timer,
};
use crate::{
    gateway::{NO_CLASS, head::MAX_HEAD, refusal::Refusal},
    telemetry::metrics::Finished,
};
use async_trait::async_trait;
use bytes::{Buf, Bytes, BytesMut};
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType, raw_connect::ProxyDigest, tls::SslDigest,
};
use std::{
    fmt,
    io::{ErrorKind, IoSlice, Result},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

/// What shows whether a client that closed has left: to who has not it says nothing (RFC 9110 §15.2), and to what
/// comes after it has left its system says so.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Pauses between these; after the last one the client is taken for waiting.
const INTERIM_PAUSES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_secs(2)];
/// After an answer that ends a connection in the middle of a request, what the client still sends is read and
/// thrown away within these: closing at once would take the answer from it.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1 << 20;
/// Bytes of requests behind one that waits; more than these are left to the system, and what comes behind them is
/// not heard of before the answer.
const MAX_KEPT: usize = 64 << 10;

/// See the module.
pub(super) struct ClientStream {
    io: Stream,
    connection: Arc<Connection>,
    rules: Arc<Rules>,
    /// For the head that is read.
    head_timer: Timer,
    /// Since the client closed.
    closed_timer: Timer,
    ending: Timer,
    outgoing: Outgoing,
    /// What has come and is not Pingora's turn to read.
    kept: BytesMut,
    head: Head,
    chunks: Chunks,
    /// Whether the client has closed its side.
    closed: bool,
    interims: usize,
    /// What goes out in place of what Pingora says.
    own_words: Option<Bytes>,
    end: End,
    /// Whether it can be told to end what waits.
    registered: bool,
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if self.registered {
            self.forget();
        }
    }
}

/// How far the end of a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    NotYet,
    Speaking,
    Lingering { left: usize },
}

impl ClientStream {
    pub(super) fn new(io: Stream, connection: Arc<Connection>, rules: Arc<Rules>) -> Self {
        Self {
            io,
            connection,
            rules,
            head_timer: Timer::default(),
            closed_timer: Timer::default(),
            ending: Timer::default(),
            outgoing: Outgoing::default(),
            kept: BytesMut::new(),
            head: Head::default(),
            chunks: Chunks::default(),
            closed: false,
            interims: 0,
            own_words: None,
            end: End::NotYet,
            registered: false,
        }
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Under which it is known while it waits.
    fn key(&self) -> usize {
        Arc::as_ptr(&self.connection).addr()
    }

    fn forget(&mut self) {
        self.registered = false;
        self.rules.load.parked.remove(&self.key());
    }

    /// Says why instead of what Pingora would say, and that no more is read.
    fn refuse(&mut self, refusal: Refusal, took: Duration) {
        if self.own_words.is_none() {
            self.own_words = Some(canned::refusal(refusal));
            self.connection.ends();
            let wire = refusal.wire();
            self.rules.metrics.finished(Finished {
                class: NO_CLASS,
                status: wire.status,
                code: wire.code,
                took,
                cell: None,
            });
        }
    }

    /// Whether more of a head may be read.
    fn check_head(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let bytes = self.connection.head_bytes();
        if bytes == 0 {
            // Another request.
            self.head_timer.stop();
            self.closed_timer.stop();
            self.interims = 0;
            self.chunks = Chunks::default();
            return Ok(());
        }
        self.head_timer.arm(self.rules.head_limit);
        if bytes > MAX_HEAD {
            self.refuse(Refusal::HeadTooLarge, Duration::ZERO);
        } else if self.head_timer.poll(cx).is_ready() {
            self.refuse(Refusal::HeadLate, self.rules.head_limit);
        } else {
            return Ok(());
        }
        Err(ErrorKind::InvalidData.into())
    }

    /// What is read of a client that has closed, once its request is complete.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match self.connection.phase() {
            Phase::Finishing => {
                self.closed_timer.arm(self.rules.finish_limit);
                self.closed_timer.poll(cx).map(|()| Err(ErrorKind::TimedOut.into()))
            }
            Phase::Asked => self.poll_interims(cx),
            Phase::AskedOld => Poll::Pending,
            // That is the end.
            Phase::Head | Phase::Receiving | Phase::Parked => Poll::Ready(Ok(())),
        }
    }

    /// Fails when the client has left.
    fn poll_interims(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        loop {
            // The answer itself shows it just as well.
            if self.connection.is_answering() {
                return Poll::Pending;
            }
            if self.closed_timer.is_armed() {
                ready!(self.closed_timer.poll(cx));
                self.closed_timer.stop();
            }
            let Some(pause) = INTERIM_PAUSES.get(self.interims) else { return Poll::Pending };
            self.interims += 1;
            let written = match Pin::new(&mut self.io).poll_write(cx, INTERIM) {
                Poll::Ready(Ok(_)) => Pin::new(&mut self.io).poll_flush(cx),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            };
            if let Poll::Ready(Err(error)) = written {
                return Poll::Ready(Err(error));
            }
            self.closed_timer.arm(*pause);
        }
    }

    /// The first of these bytes, which belong to what Pingora reads.
    fn part(phase: Phase, head: &mut Head, chunks: Option<&mut Chunks>, bytes: &mut [u8]) -> usize {
        match chunks {
            _ if phase == Phase::Head => head.part(bytes),
            Some(chunks) => chunks.part(bytes),
            // Of a body with a length Pingora reads no more than that.
            None => bytes.len(),
        }
    }

    /// Reads what the request is made of, until it is complete.
    fn poll_request(
        &mut self,
        cx: &mut Context<'_>,
        phase: Phase,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let Self { io, kept, head, chunks, connection, .. } = self;
        let chunks = connection.is_chunked().then_some(chunks);
        let before = buffer.filled().len();
        let count = if !kept.is_empty() {
            let count = kept.len().min(buffer.remaining());
            let count = Self::part(phase, head, chunks, &mut kept[..count]);
            buffer.put_slice(&kept.split_to(count));
            if kept.is_empty() {
                *kept = BytesMut::new();
            }
            count
        } else if self.closed {
            0
        } else {
            ready!(Pin::new(io).poll_read(cx, buffer))?;
            let read = &mut buffer.filled_mut()[before..];
            let count = Self::part(phase, head, chunks, read);
            kept.extend_from_slice(&read[count..]);
            buffer.set_filled(before + count);
            self.closed = count == 0;
            count
        };
        if phase == Phase::Head {
            self.connection.head_grew(count);
        }
        Poll::Ready(Ok(()))
    }

    /// Keeps what comes behind a request that is complete, and hears of its client's end.
    fn poll_behind(&mut self, cx: &mut Context<'_>, phase: Phase) -> Poll<Result<()>> {
        let mut piece = [0; 1024];
        while !self.closed && self.kept.len() < MAX_KEPT {
            let mut buffer = ReadBuf::new(&mut piece);
            match ready!(Pin::new(&mut self.io).poll_read(cx, &mut buffer)) {
                Ok(()) => {
                    self.closed = buffer.filled().is_empty();
                    self.kept.extend_from_slice(buffer.filled());
                }
                Err(_) if phase == Phase::Finishing => {
                    self.leave();
                    self.closed = true;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        if self.closed { self.poll_closed(cx) } else { Poll::Pending }
    }

    /// Nothing reaches the client; what the cell says is read all the same.
    fn leave(&mut self) {
        self.outgoing.leave(&self.rules);
        self.connection.ends();
    }

    /// Judges how a write to the client ended; `None` when it goes nowhere.
    fn judge<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<Result<T>>) -> Option<Poll<Result<T>>> {
        let finishing = self.connection.phase() == Phase::Finishing;
        let judged = self.outgoing.judge(cx, &self.rules, outcome, |_| finishing);
        if judged.is_none() {
            self.connection.ends();
        }
        judged
    }

    fn write(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
        write: impl FnOnce(Pin<&mut Stream>, &mut Context<'_>) -> Poll<Result<usize>>,
    ) -> Poll<Result<usize>> {
        if self.connection.phase() == Phase::Head {
            // Only Pingora speaks before the gateway has seen a head.
            self.refuse(Refusal::Framing("malformed request"), Duration::ZERO);
            return Poll::Ready(Ok(bytes));
        }
        if self.outgoing.is_gone() {
            return self.outgoing.swallow(bytes);
        }
        let outcome = write(Pin::new(&mut self.io), cx);
        match self.judge(cx, outcome) {
            Some(outcome) => outcome,
            None => self.outgoing.swallow(bytes),
        }
    }

    /// Ends the connection: with our own words, if there are any, and once the client had time to hear what was said
    /// to a request that it was still sending.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.end == End::NotYet {
            self.connection.ends();
            if self.outgoing.is_gone() {
                return Poll::Ready(Ok(()));
            }
            let unread = self.connection.phase() == Phase::Receiving || !self.kept.is_empty();
            let broken_off = unread && !self.closed;
            if self.own_words.is_none() && !broken_off {
                let ended = Pin::new(&mut self.io).poll_shutdown(cx);
                if ended.is_ready() {
                    return ended;
                }
                // What is left to be flushed may find nobody who reads it.
                self.ending.arm(LINGER);
                return self.ending.poll(cx).map(Ok);
            }
            self.end = End::Speaking;
            self.ending.arm(LINGER);
        }
        // Who does not listen does not get more of our time.
        if self.ending.poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        while self.end == End::Speaking {
            match self.own_words.as_mut().filter(|words| !words.is_empty()) {
                Some(words) => {
                    let written = ready!(Pin::new(&mut self.io).poll_write(cx, words))?;
                    words.advance(written);
                }
                // This flushes as well.
                None => {
                    ready!(Pin::new(&mut self.io).poll_shutdown(cx))?;
                    self.end = End::Lingering { left: LINGER_BYTES };
                }
            }
        }
        let mut piece = [0; 4096];
        while let End::Lingering { left } = &mut self.end {
            let mut buffer = ReadBuf::new(&mut piece);
            let outcome = ready!(Pin::new(&mut self.io).poll_read(cx, &mut buffer));
            let read = buffer.filled().len();
            if outcome.is_err() || read == 0 || read > *left {
                break;
            }
            *left -= read;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        if this.connection.is_parked() {
            // First, so that no call to end is missed.
            this.rules.load.parked.insert(this.key(), cx.waker().clone());
            this.registered = true;
            if this.rules.load.is_closing() {
                return Poll::Ready(Err(ErrorKind::ConnectionAborted.into()));
            }
        } else if this.registered {
            this.forget();
        }
        let phase = this.connection.phase();
        match phase {
            Phase::Head => this.check_head(cx)?,
            Phase::Receiving => {}
            _ => return this.poll_behind(cx, phase),
        }
        this.poll_request(cx, phase, buffer)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.get_mut().write(cx, bytes.len(), |io, cx| io.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        self.get_mut().write(cx, bytes, |io, cx| io.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        if this.outgoing.is_gone() || this.own_words.is_some() {
            return Poll::Ready(Ok(()));
        }
        let outcome = Pin::new(&mut this.io).poll_flush(cx);
        this.judge(cx, outcome).unwrap_or(Poll::Ready(Ok(())))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.get_mut().poll_end(cx)
    }
}

#[async_trait]
impl Shutdown for ClientStream {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl UniqueID for ClientStream {
    fn id(&self) -> UniqueIDType {
        self.io.id()
    }
}

impl Ssl for ClientStream {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.io.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.io.selected_alpn_proto()
    }
}

impl GetTimingDigest for ClientStream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        // Asked for with each request, and used by nobody.
        Vec::new()
    }
}

impl GetProxyDigest for ClientStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for ClientStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.io.get_socket_digest()
    }
}

impl Peek for ClientStream {}

impl fmt::Debug for ClientStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientStream").field("connection", &self.connection).finish_non_exhaustive()
    }
}
