//! Bodies that must be inspected: complete before a byte of them goes upstream, and then exactly
//! the bytes that came (D22).
//!
//! Over HTTP/1.1 it is read before the cell is even chosen ([`read`]). Pingora then replays its last 64 KiB, in
//! whose place the whole goes; where it was longer and the last part could not be told from the others, in
//! chunks, the request is put anew with a last part of our own ([`reframe`]). Over HTTP/2 bodies are collected in
//! Pingora's own body filter ([`Collector`]): reading them earlier hangs beyond 64 KiB (ways B and C of
//! `notes/pingora.md`).

use super::refusal::Refusal;
use crate::{
    domain::status::PushBlock,
    limits::{
        Request,
        buffer::Reservation,
        decision::{Decision, Limit, Mode},
    },
    metering::{sample::RequestFacts, scan::Sinks},
    policy::{
        batch::{Batch, cycle_pushes},
        inspect::{self, Destination, Heaviest, Messages, Pairs, Retention, Unreadable},
    },
};
use bytes::{Bytes, BytesMut};
use http::header::{EXPECT, TRANSFER_ENCODING};
use pingora::{Error, ErrorType, prelude::Session, protocols::http::ServerSession as HttpSession};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// What Pingora replays of a body that was read before a peer was chosen.
const REPLAYED: usize = 64 << 10;

/// A body that is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inspection {
    pub subject: Subject,
    /// Its length, when the client told it.
    pub length: Option<usize>,
}

/// What kind of body it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject {
    /// `/api/v1/push`
    Push,
    /// `/api/v1/transaction`
    Transaction,
    /// `/api/v1/configure`
    Configure,
    /// `/api/v1/dlq/:id/replay`
    Replay,
    /// `/api/v1/ephemeral/push`
    EphemeralPush,
    /// One cycle of a stream.
    Cycle {
        /// Why it may not push.
        block: Option<PushBlock>,
    },
    /// Operations on KV or timers, on a cluster that is push-blocked or whose plan lacks the feature.
    Batch {
        /// The plan lacks the feature: only facade bookkeeping may pass.
        feature_gated: bool,
        /// The caller may consume, so that facade bookkeeping counts as that.
        facade_may_pass: bool,
        /// Why it may not grow.
        block: Option<PushBlock>,
    },
}

/// What a body asks of the caps.
#[derive(Default)]
pub(super) struct Facts<'b> {
    messages: u64,
    is_batch: bool,
    heaviest: Option<Heaviest>,
    payload_bytes: u64,
    pairs: Option<Pairs<'b>>,
    retention: Vec<Retention>,
    /// What its list of messages is called.
    list: &'static str,
    /// Of a cycle, how many messages go to each pair.
    per_pair: Vec<u64>,
}

impl<'b> Facts<'b> {
    fn of(messages: Messages<'b>, list: &'static str) -> Self {
        Self {
            messages: messages.count,
            heaviest: messages.heaviest,
            payload_bytes: messages.payload_bytes,
            pairs: Some(messages.pairs),
            per_pair: messages.per_pair,
            list,
            ..Self::default()
        }
    }

    /// The same as the limiter asks for it.
    pub fn request<'r>(&'r self, parks_at: Option<&'r str>) -> Request<'r> {
        Request {
            messages: self.messages,
            is_batch: self.is_batch,
            heaviest: self.heaviest,
            payload_bytes: self.payload_bytes,
            pairs: self.pairs.as_ref(),
            retention: &self.retention,
            parks_at,
            impatient: false,
        }
    }

    /// What metering has to know of the request.
    pub fn metered(&self, bytes: usize) -> RequestFacts {
        let mut sinks = Sinks::default();
        for (pair, messages) in self.pairs.iter().flat_map(Pairs::list).zip(&self.per_pair) {
            sinks.add(&pair.queue, &pair.partition, *messages);
        }
        RequestFacts { bytes_in: bytes as u64, ingress: self.messages, sinks }
    }

    /// What a denial's index counts in: the list of messages, or the option.
    pub fn denied_part(&self, decision: &Decision) -> &'static str {
        let option = decision.outcome(Limit::Retention).filter(|outcome| outcome.denied);
        match option.and_then(|outcome| self.retention.get(outcome.index?)) {
            Some(retention) => retention.option,
            None => self.list,
        }
    }
}

impl Subject {
    /// Reads a whole body. Where a block or a gate stands in the way, what cannot be read is refused: the
    /// cell might read it in another way. What is no JSON at all otherwise goes on for the cell's own answer.
    pub fn read(self, body: &[u8], max_pairs: usize, mode: Mode) -> Result<Facts<'_>, Refusal> {
        let facts = match self {
            Self::Push => inspect::push(body, max_pairs)
                .map(|messages| Facts { is_batch: true, ..Facts::of(messages, "items") }),
            Self::Transaction => inspect::transaction(body, max_pairs)
                .map(|messages| Facts { is_batch: true, ..Facts::of(messages, "operations") }),
            Self::Configure => inspect::configure(body).map(|configure| Facts {
                pairs: Some(configure.pairs),
                retention: configure.retention,
                ..Facts::default()
            }),
            Self::Replay => match inspect::replay(body) {
                Ok(Destination::Half { missing }) if mode == Mode::Enforce => {
                    return Err(Refusal::HalfDestination(missing));
                }
                Ok(Destination::Named(pairs)) => Ok(Facts { pairs: Some(pairs), ..Facts::default() }),
                Ok(_) => Ok(Facts::default()),
                Err(unreadable) => Err(unreadable),
            },
            Self::EphemeralPush => {
                inspect::ephemeral_push(body).map(|messages| Facts { messages, ..Facts::default() })
            }
            Self::Cycle { block } => {
                if let Some(block) = block
                    && cycle_pushes(body).ok_or(Refusal::UnreadableBody)?
                {
                    return Err(Refusal::PushBlocked(block));
                }
                inspect::cycle(body, max_pairs).map(|messages| Facts::of(messages, "push_items"))
            }
            Self::Batch { feature_gated, facade_may_pass, block } => {
                let batch = Batch::read(body).ok_or(Refusal::UnreadableBody)?;
                let is_bookkeeping = batch.facade_bookkeeping && facade_may_pass;
                match block {
                    _ if is_bookkeeping => {}
                    _ if feature_gated => return Err(Refusal::FeatureGated),
                    Some(block) if batch.growing => return Err(Refusal::PushBlocked(block)),
                    _ => {}
                }
                Ok(Facts::default())
            }
        };
        match facts {
            Ok(facts) => Ok(facts),
            Err(Unreadable::NotJson) => Ok(Facts::default()),
            Err(Unreadable::Binary) => Err(Refusal::BinaryBody),
        }
    }
}

/// Reads a body over HTTP/1.1, while its memory is reserved. Afterwards Pingora holds its last part for replay,
/// unless its buffer was truncated: then the request has to be [reframed](reframe).
pub(super) async fn read(
    session: &mut Session,
    length: Option<usize>,
    ceiling: usize,
    limit: Duration,
    memory: &mut Reservation,
) -> Result<Bytes, Refusal> {
    let reading = async {
        let downstream = session.as_downstream_mut();
        if downstream.req_header().headers.contains_key("expect") {
            // The body is read to its end now, so that an answer before it need not end the connection.
            downstream.set_close_on_response_before_downstream_finish(false);
            downstream.write_continue_response().await.map_err(|_| Refusal::ClientStalled)?;
            downstream.set_close_on_response_before_downstream_finish(true);
        }
        let most = length.unwrap_or(ceiling);
        let mut body = Vec::new();
        loop {
            if length.is_none_or(|length| length - body.len() <= REPLAYED) {
                downstream.enable_retry_buffering();
            }
            match downstream.read_request_body().await {
                Ok(Some(piece)) if body.len() + piece.len() <= most => {
                    if !memory.grow(piece.len() as u64) {
                        return Err(Refusal::NoMemory);
                    }
                    if body.capacity() - body.len() < piece.len() {
                        // Twice as much, but never more than the whole may be.
                        body.reserve_exact(body.len().max(piece.len()).min(most - body.len()));
                    }
                    body.extend_from_slice(&piece);
                }
                Ok(Some(_)) if length.is_none() => return Err(Refusal::BodyTooLarge),
                Ok(Some(_)) => return Err(Refusal::Internal),
                Ok(None) => return Ok(Bytes::from(body)),
                Err(error) => return Err(unread(&error)),
            }
        }
    };
    timeout(limit, reading).await.unwrap_or(Err(Refusal::ClientStalled))
}

/// What is wrong with a body that cannot be read.
fn unread(error: &Error) -> Refusal {
    match error.etype() {
        ErrorType::ReadTimedout | ErrorType::ConnectionClosed | ErrorType::ReadError => {
            Refusal::ClientStalled
        }
        _ => Refusal::Framing("malformed request"),
    }
}

/// Puts the request anew, whose chunks have been read to the end: the same head, with a length and a body of
/// one byte that Pingora keeps for replay, and in whose place the whole goes. Without one Pingora would take the
/// body for sent, and cell and client would wait for each other. Pingora has begun anew with this, so the client's
/// connection ends after the answer.
pub(super) async fn reframe(session: &mut Session) -> Result<(), Refusal> {
    let HttpSession::H1(h1) = session.as_downstream_mut() else { return Err(Refusal::Internal) };
    let head = h1.req_header();
    let mut again = BytesMut::with_capacity(1 << 10);
    for part in [head.method.as_str().as_bytes(), b" ", head.raw_path(), b" HTTP/1.1\r\n"] {
        again.extend_from_slice(part);
    }
    // The chunks are gone, and we have said "go on" ourselves.
    for (name, value) in head.headers.iter().filter(|(name, _)| *name != TRANSFER_ENCODING && *name != EXPECT)
    {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            again.extend_from_slice(part);
        }
    }
    again.extend_from_slice(b"content-length: 1\r\n\r\n ");
    h1.set_pipelined_prefix(again);
    let put = h1.read_request().await;
    let last = h1.read_body_bytes().await;
    let is_whole = matches!((put, last), (Ok(Some(_)), Ok(Some(_)))) && h1.is_body_done();
    session.set_keepalive(None);
    if is_whole { Ok(()) } else { Err(Refusal::Internal) }
}

/// A body over HTTP/2 on its way in.
pub(super) struct Collector {
    pub subject: Subject,
    ceiling: usize,
    memory: Reservation,
    collected: BytesMut,
    /// When it has to be there. How long each part of it may take is not ours to see to.
    deadline: Instant,
}

impl Collector {
    pub fn new(subject: Subject, ceiling: usize, limit: Duration, memory: Reservation) -> Self {
        Self { subject, ceiling, memory, collected: BytesMut::new(), deadline: Instant::now() + limit }
    }

    /// Takes the next piece and leaves in its place what may go upstream now: nothing. The whole, once
    /// it is there.
    pub fn take(&mut self, piece: &mut Option<Bytes>, end: bool) -> Result<Option<Bytes>, Refusal> {
        if Instant::now() > self.deadline {
            return Err(Refusal::ClientStalled);
        }
        if let Some(bytes) = piece.take() {
            if self.collected.len() + bytes.len() > self.ceiling {
                return Err(Refusal::BodyTooLarge);
            }
            if !self.memory.grow(bytes.len() as u64) {
                return Err(Refusal::NoMemory);
            }
            self.collected.extend_from_slice(&bytes);
        }
        // Not `None`: that would end the upstream body.
        *piece = Some(Bytes::new());
        Ok(end.then(|| self.collected.split().freeze()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Collector, Subject};
    use crate::{
        domain::{ids::ClusterId, status::PushBlock},
        gateway::refusal::Refusal,
        limits::{
            ClusterLimits,
            buffer::{Budget, Reservation},
            decision::Mode,
        },
    };
    use bytes::Bytes;
    use std::{sync::Arc, time::Duration};
    use uuid::Uuid;

    fn collector(budget: u64) -> Collector {
        let counters = Arc::new(ClusterLimits::new(ClusterId(Uuid::nil())));
        let memory = Reservation::new(&Arc::new(Budget::new(budget, 1)), &counters);
        Collector::new(Subject::Push, 100, Duration::from_secs(60), memory)
    }

    fn run(mut collector: Collector, pieces: &[&[u8]]) -> Result<Vec<u8>, Refusal> {
        for (at, bytes) in pieces.iter().enumerate() {
            let mut piece = Some(Bytes::copy_from_slice(bytes));
            let whole = collector.take(&mut piece, at + 1 == pieces.len())?;
            assert!(piece.unwrap().is_empty(), "nothing goes before it is judged");
            if let Some(whole) = whole {
                return Ok(whole.to_vec());
            }
        }
        panic!("no end")
    }

    #[test]
    fn a_body_comes_out_as_it_went_in_or_is_too_large() {
        let read = br#"[{"op":"get","ns":"a","key":"b"}]"#;
        for split in 0..=read.len() {
            let (first, rest) = read.split_at(split);
            assert_eq!(run(collector(1_000), &[first, rest]).unwrap(), read);
        }
        let fits = [b' '; 98];
        assert!(run(collector(1_000), &[b"[]", &fits]).is_ok());
        assert_eq!(run(collector(1_000), &[b"[]", &[b' '; 99]]), Err(Refusal::BodyTooLarge));
        assert_eq!(run(collector(50), &[&fits]), Err(Refusal::NoMemory));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_drips_has_an_end() {
        let mut dripping = collector(1_000);
        for _ in 0..60 {
            assert_eq!(dripping.take(&mut Some(Bytes::from_static(b" ")), false), Ok(None));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        let late = dripping.take(&mut Some(Bytes::from_static(b" ")), false);
        assert_eq!(late, Err(Refusal::ClientStalled));
    }

    const BLOCK: Option<PushBlock> = Some(PushBlock::Lifecycle);

    fn outcome(subject: Subject, body: &[u8]) -> Result<(), Refusal> {
        subject.read(body, 10, Mode::Enforce).map(|_| ())
    }

    #[test]
    fn blocks_and_gates() {
        let batch =
            |feature_gated, facade_may_pass, block| Subject::Batch { feature_gated, facade_may_pass, block };
        let (blocked, gated) = (batch(false, true, BLOCK), batch(true, true, None));
        let put: &[u8] = br#"[{"op":"put","ns":"a","key":"b"}]"#;
        let facade: &[u8] = br#"[{"op":"put","ns":"queen-kafka","key":"qk:g"}]"#;
        let refused = Err(Refusal::PushBlocked(PushBlock::Lifecycle));
        assert_eq!(outcome(blocked, put), refused);
        assert!(outcome(blocked, br#"[{"op":"get"}]"#).is_ok());
        assert_eq!(outcome(gated, br#"[{"op":"get"}]"#), Err(Refusal::FeatureGated));
        assert_eq!(outcome(blocked, b"{"), Err(Refusal::UnreadableBody));
        assert!(outcome(blocked, facade).is_ok());
        assert!(outcome(gated, facade).is_ok());
        assert_eq!(outcome(batch(false, false, BLOCK), facade), refused);
        let cycle = Subject::Cycle { block: BLOCK };
        assert_eq!(outcome(cycle, br#"{"push_items":[1]}"#), refused);
        assert!(outcome(cycle, br#"{"push_items":[]}"#).is_ok());
        assert_eq!(outcome(cycle, b"["), Err(Refusal::UnreadableBody));
        assert!(outcome(Subject::Cycle { block: None }, b"[").is_ok(), "the cell says what is wrong");
    }

    #[test]
    fn what_is_no_json_goes_on_and_what_only_some_cells_read_does_not() {
        for subject in [Subject::Push, Subject::Transaction, Subject::Configure, Subject::EphemeralPush] {
            assert!(outcome(subject, b"{\"items\":").is_ok(), "{subject:?}");
            assert!(outcome(subject, b"").is_ok(), "{subject:?}");
            assert_eq!(outcome(subject, b"QPB1\0"), Err(Refusal::BinaryBody), "{subject:?}");
        }
        assert_eq!(outcome(Subject::Replay, br#"{"queue":"q"}"#), Err(Refusal::HalfDestination("partition")));
        assert!(Subject::Replay.read(br#"{"queue":"q"}"#, 10, Mode::Shadow).is_ok());
        assert!(outcome(Subject::Replay, b" ").is_ok());
    }
}
