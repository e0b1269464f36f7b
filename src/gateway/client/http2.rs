//! The stream of an HTTP/2 client, between Pingora and its socket. As long as a request that stores something is on its
//! way, a client that closes or resets it is heard of later, so that the request goes to its end. And a connection that
//! does not begin, or a head that does not end, is given up.

use super::{Rules, connection::Connection, outgoing::Outgoing, timer::Timer};
use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora::{
    http::ResponseHeader,
    protocols::{
        ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
        TimingDigest, UniqueID, UniqueIDType, raw_connect::ProxyDigest,
    },
};
use std::{
    collections::VecDeque,
    fmt,
    io::{ErrorKind, IoSlice, Result},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

const PREFACE: usize = 24;
const FRAME_HEAD: usize = 9;
const RESET: usize = FRAME_HEAD + 4;
/// Types of frames (RFC 9113 §6).
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// Bytes read at once.
const PIECE: usize = 16 << 10;
/// Resets that wait; a client has no more streams than 100.
const MAX_HELD: usize = 128;

/// See the module.
pub(super) struct Http2Stream {
    io: Stream,
    connection: Arc<Connection>,
    digest: Arc<ProxyDigest>,
    rules: Arc<Rules>,
    frames: Frames,
    deadline: Timer,
    outgoing: Outgoing,
    /// How the client ended its side.
    end: Option<Result<()>>,
}

impl Http2Stream {
    pub(super) fn new(io: Stream, connection: Arc<Connection>, rules: Arc<Rules>) -> Option<Self> {
        let head = ResponseHeader::build(200, Some(0)).ok()?;
        let shared: Box<dyn std::any::Any + Send + Sync> = Box::new(Arc::clone(&connection));
        Some(Self {
            io,
            connection,
            digest: Arc::new(ProxyDigest::new(Box::new(head), Some(shared))),
            rules,
            frames: Frames::default(),
            deadline: Timer::default(),
            outgoing: Outgoing::default(),
            end: None,
        })
    }

    /// What is told of a client that ended its side: nothing, while something is finished for it.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.connection.is_storing(cx) {
            self.deadline.arm(self.rules.finish_limit);
            if self.deadline.poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        Poll::Ready(match &mut self.end {
            Some(end) => std::mem::replace(end, Err(ErrorKind::BrokenPipe.into())),
            None => Ok(()),
        })
    }

    /// Judges how a write ended; `None` when it goes nowhere.
    fn judge<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<Result<T>>) -> Option<Poll<Result<T>>> {
        self.outgoing.judge(cx, &self.rules, outcome, |cx| self.connection.is_storing(cx))
    }

    fn swallow(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<Result<usize>> {
        if !self.connection.is_storing(cx) {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        self.outgoing.swallow(bytes)
    }

    fn write(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
        write: impl FnOnce(Pin<&mut Stream>, &mut Context<'_>) -> Poll<Result<usize>>,
    ) -> Poll<Result<usize>> {
        if self.outgoing.is_gone() {
            return self.swallow(cx, bytes);
        }
        let outcome = write(Pin::new(&mut self.io), cx);
        match self.judge(cx, outcome) {
            Some(outcome) => outcome,
            None => self.swallow(cx, bytes),
        }
    }
}

impl AsyncRead for Http2Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        loop {
            if this.frames.deliver(buffer) {
                return Poll::Ready(Ok(()));
            }
            // Before it is looked, so that no end is missed.
            if !this.frames.held.is_empty() {
                this.connection.is_storing(cx);
            }
            let oldest = this.connection.oldest_storing();
            if this.frames.advance(oldest, || this.connection.newest_storing()) {
                if this.frames.held.len() > MAX_HELD && this.end.is_none() {
                    this.end = Some(Err(ErrorKind::InvalidData.into()));
                }
                continue;
            }
            if this.end.is_some() {
                return this.poll_ended(cx);
            }
            if this.frames.is_within_head() {
                this.deadline.arm(this.rules.head_limit);
                if this.deadline.poll(cx).is_ready() {
                    // What is on its way for it goes to its end all the same.
                    this.deadline.stop();
                    this.end = Some(Err(ErrorKind::TimedOut.into()));
                    continue;
                }
            } else {
                this.deadline.stop();
            }
            let outcome = ready!(this.frames.poll_fill(cx, &mut this.io));
            if !matches!(outcome, Ok(1..)) {
                this.deadline.stop();
                this.end = Some(outcome.map(|_| ()));
            }
        }
    }
}

/// What the client sends, as frames: which are passed on, which are held back.
#[derive(Default)]
struct Frames {
    input: BytesMut,
    /// Bytes at the front of the input that may be read.
    deliverable: usize,
    /// Bytes of a frame's payload that come after them.
    payload: usize,
    preface: usize,
    settled: bool,
    in_head: bool,
    /// Resets, each with the request that has to end before.
    held: VecDeque<([u8; RESET], u64)>,
}

impl Frames {
    /// Gives what may be read; false when there is nothing.
    fn deliver(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let count = self.deliverable.min(buffer.remaining());
        buffer.put_slice(&self.input[..count]);
        self.input.advance(count);
        self.deliverable -= count;
        count > 0
    }

    /// Whether the client owes the rest of something that takes no time.
    fn is_within_head(&self) -> bool {
        !self.settled || self.in_head
    }

    /// Looks at what comes next; false when more has to be read for it. `oldest` is the oldest request that goes to
    /// its end, if there is any, and `newest` tells the newest.
    fn advance(&mut self, oldest: Option<u64>, newest: impl FnOnce() -> u64) -> bool {
        if self.preface < PREFACE {
            self.deliverable = self.input.len().min(PREFACE - self.preface);
            self.preface += self.deliverable;
            return self.deliverable > 0;
        }
        if self.payload > 0 {
            self.deliverable = self.input.len().min(self.payload);
            self.payload -= self.deliverable;
            return self.deliverable > 0;
        }
        if !self.in_head
            && let Some((reset, _)) =
                self.held.pop_front_if(|(_, after)| oldest.is_none_or(|oldest| oldest > *after))
        {
            let mut joined = BytesMut::with_capacity(RESET + self.input.len() + PIECE);
            joined.extend_from_slice(&reset);
            joined.extend_from_slice(&self.input);
            self.input = joined;
            self.deliverable = RESET;
            return true;
        }
        let Some(&[a, b, c, kind, flags, ..]) = self.input.get(..FRAME_HEAD) else { return false };
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        self.settled = true;
        if kind == RST_STREAM && length == 4 && !self.in_head && oldest.is_some() {
            let Some(reset) = self.input.first_chunk::<RESET>() else { return false };
            // Once is enough, and who says it again does not fill the list.
            if !self.held.iter().any(|(held, _)| stream_of(held) == stream_of(reset)) {
                self.held.push_back((*reset, newest()));
            }
            self.input.advance(RESET);
            return true;
        }
        if matches!(kind, HEADERS | CONTINUATION) {
            self.in_head = flags & END_HEADERS == 0;
        }
        self.deliverable = self.input.len().min(FRAME_HEAD + length);
        self.payload = FRAME_HEAD + length - self.deliverable;
        true
    }

    /// Reads more.
    fn poll_fill(&mut self, cx: &mut Context<'_>, io: &mut Stream) -> Poll<Result<usize>> {
        let filled = self.input.len();
        self.input.resize(filled + PIECE, 0);
        let mut buffer = ReadBuf::new(&mut self.input[filled..]);
        let outcome = Pin::new(io).poll_read(cx, &mut buffer);
        let read = buffer.filled().len();
        self.input.truncate(filled + read);
        outcome.map(|outcome| outcome.map(|()| read))
    }
}

/// The number of the stream that a frame belongs to.
fn stream_of(frame: &[u8; RESET]) -> u32 {
    let [_, _, _, _, _, a, b, c, d, ..] = *frame;
    // The first bit says nothing (RFC 9113 §4.1).
    u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1)
}

impl AsyncWrite for Http2Stream {
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
        if this.outgoing.is_gone() {
            return Poll::Ready(Ok(()));
        }
        let outcome = Pin::new(&mut this.io).poll_flush(cx);
        this.judge(cx, outcome).unwrap_or(Poll::Ready(Ok(())))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Http2Stream {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(&mut self.io).await;
    }
}

impl UniqueID for Http2Stream {
    fn id(&self) -> UniqueIDType {
        self.io.id()
    }
}

impl Ssl for Http2Stream {
    fn selected_alpn_proto(&self) -> Option<ALPN> {
        Some(ALPN::H2)
    }
}

impl GetTimingDigest for Http2Stream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for Http2Stream {
    /// How the requests of the connection find it.
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        Some(Arc::clone(&self.digest))
    }
}

impl GetSocketDigest for Http2Stream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.io.get_socket_digest()
    }
}

impl Peek for Http2Stream {}

impl fmt::Debug for Http2Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http2Stream").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Frames, PREFACE, RESET};
    use tokio::io::ReadBuf;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, u8::try_from(payload.len()).unwrap(), kind, flags, 0, 0, 0, stream];
        frame.extend(payload);
        frame
    }

    fn reset(stream: u8) -> Vec<u8> {
        frame(3, 0, stream, &[0, 0, 0, 8])
    }

    /// What is read of bytes that come in pieces of this size, with requests that go to their end.
    fn read(frames: &mut Frames, bytes: &[u8], piece: usize, storing: Option<(u64, u64)>) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in bytes.chunks(piece).chain([&[][..]]) {
            frames.input.extend_from_slice(piece);
            loop {
                let mut space = [0; 7];
                let mut buffer = ReadBuf::new(&mut space);
                if frames.deliver(&mut buffer) {
                    out.extend(buffer.filled());
                } else if !frames.advance(storing.map(|(oldest, _)| oldest), || storing.unwrap().1) {
                    break;
                }
            }
        }
        out
    }

    #[test]
    fn resets_wait_for_the_requests_that_go_to_their_end() {
        let preface = [b'P'; PREFACE];
        let open = [frame(4, 0, 0, &[0; 6]), frame(1, 5, 1, &[1; 40]), frame(0, 1, 1, &[2; 100])].concat();
        for piece in 1..60 {
            let mut frames = Frames::default();
            let all = [&preface[..], &open].concat();
            assert_eq!(read(&mut frames, &all, piece, None), all, "{piece}");
            assert!(!frames.is_within_head());
            // Nothing is stored: a reset passes.
            assert_eq!(read(&mut frames, &reset(1), piece, None), reset(1));
            // Requests 4 to 6 are on their way.
            let mixed = [reset(3), frame(6, 0, 0, &[7; 8]), reset(5)].concat();
            assert_eq!(read(&mut frames, &mixed, piece, Some((4, 6))), frame(6, 0, 0, &[7; 8]));
            assert_eq!(frames.held.len(), 2);
            assert_eq!(read(&mut frames, &[], piece, Some((6, 9))), [0; 0]);
            // 6 has ended.
            let then = [reset(3), reset(5), frame(0, 0, 7, &[3; 9])].concat();
            assert_eq!(read(&mut frames, &frame(0, 0, 7, &[3; 9]), piece, Some((7, 9))), then);
            assert!(frames.held.is_empty());
            assert_eq!(RESET, reset(1).len());
            // Said again and again it is held once.
            assert_eq!(read(&mut frames, &reset(7).repeat(200), piece, Some((7, 9))), [0; 0]);
            assert_eq!(read(&mut frames, &[], piece, None), reset(7));
        }
    }

    #[test]
    fn a_head_that_goes_on_is_seen() {
        let mut frames = Frames::default();
        assert!(frames.is_within_head(), "nothing has come");
        let begin = [&[b'P'; PREFACE][..], &frame(4, 0, 0, &[]), &frame(1, 0, 1, &[1])].concat();
        read(&mut frames, &begin, 9, None);
        assert!(frames.is_within_head());
        read(&mut frames, &frame(9, 4, 1, &[1]), 9, None);
        assert!(!frames.is_within_head());
    }
}
