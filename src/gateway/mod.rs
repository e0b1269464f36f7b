//! The only room that knows Pingora.
//!
//! A request: [`Gateway::request_filter`] runs the checks of [`pipeline`] and answers refusals;
//! [`forward`] decides peer, time and headers; [`body`] holds back what must be inspected;
//! [`refusal`] is the one table of our own answers.

pub mod access_log;
mod answer;
mod body;
pub mod caps;
pub mod client;
mod forward;
mod head;
pub mod live;
mod load;
mod own;
pub mod pipeline;
pub mod refusal;
pub mod server;
mod severing;
pub mod spans;
pub mod trace_context;
pub mod traffic;

use crate::{
    domain::ids::RequestId,
    limits::{buffer::Reservation, parked::Slot},
    metering::{
        Meter,
        sample::{Counts, MeteredRoute, Watch},
    },
    portal::{Portal, Route},
    telemetry::metrics::{Finished, Metrics},
};
use access_log::{AccessLog, Line, method_word};
use async_trait::async_trait;
use body::{Collector, Inspection, Subject};
use bytes::Bytes;
use caps::{Denied, RateHeaders};
use client::{Complete, Storing};
use forward::{ClientSide, Forward, ToCell, X_FORWARDED_PROTO};
use http::{
    HeaderValue, StatusCode, Version,
    header::{CONTENT_ENCODING, HOST, TRANSFER_ENCODING},
};
use ipnet::IpNet;
use live::{Live, Settings};
use load::InFlight;
pub use load::Load;
use pingora::{
    Error, ErrorSource, ErrorType, Result,
    http::{RequestHeader, ResponseHeader},
    prelude::{HttpPeer, ProxyHttp, Session},
    protocols::{Digest, http::ServerSession as HttpSession},
    proxy::FailToProxy,
};
use pipeline::{Admitted, Pipeline};
use refusal::Refusal;
use severing::Waiting;
use spans::{Begun, Spans};
use std::{
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use trace_context::Traceparent;
use traffic::{Clusters, Outcome};

/// How often a peer is tried: nothing was sent when a connect fails, so once more is safe.
const MAX_CONNECTS: usize = 2;

/// The class of a request that was refused before its route was looked at.
const NO_CLASS: &str = "none";
/// Bytes of a queue's or partition's name that are compared in the answer to a cycle.
const MAX_SINK_NAME: usize = 1 << 10;
/// The code of a request that was not refused and did not fail.
pub const OK: &str = "ok";
/// The code of a request whose client went away.
const CLIENT_GONE: &str = "client_gone";

/// The front door.
pub struct Gateway {
    pipeline: Pipeline,
    live: Arc<Live>,
    tenant_header: bool,
    portal: Portal,
    load: Arc<Load>,
    metrics: Arc<Metrics>,
    meter: Meter,
    clusters: Arc<Clusters>,
    access_log: Option<AccessLog>,
    spans: Option<Spans>,
}

/// What is known of a request so far.
pub struct Context {
    id: RequestId,
    /// What was in force when it began.
    settings: Arc<Settings>,
    began: Instant,
    class: &'static str,
    /// The refusal's, or "ok".
    code: &'static str,
    /// When the cell was asked, and how long the head of its answer took.
    cell: (Option<Instant>, Option<Duration>),
    forward: Option<Forward>,
    collector: Option<Collector>,
    /// A body that was read before the peer was chosen, until it goes upstream; its memory as long as it
    /// may be needed.
    whole: Option<(Bytes, Reservation)>,
    rate: Option<RateHeaders>,
    slot: Option<Slot>,
    /// Of a request that goes to the cell: what its answer comes to.
    watch: Option<Watch>,
    refusal: Option<Refusal>,
    span: Option<Box<Begun>>,
    connects: usize,
    /// Of a request that goes to its end whatever becomes of its client, where one connection carries several.
    storing: Option<Storing>,
    /// Of a poll over HTTP/2: it can be ended while it waits.
    waiting: Option<Waiting>,
    _in_flight: InFlight,
}

#[async_trait]
impl ProxyHttp for Gateway {
    type CTX = Context;

    fn new_ctx(&self) -> Context {
        Context {
            id: RequestId::new(),
            settings: self.live.settings(),
            began: Instant::now(),
            class: NO_CLASS,
            code: OK,
            cell: (None, None),
            forward: None,
            collector: None,
            whole: None,
            rate: None,
            slot: None,
            watch: None,
            refusal: None,
            span: None,
            connects: 0,
            storing: None,
            waiting: None,
            _in_flight: InFlight::new(&self.load),
        }
    }

    fn init_downstream_modules(&self, _: &mut pingora::modules::http::HttpModules) {
        // The default is a compressor that is switched off but still in everybody's way.
    }

    async fn early_request_filter(&self, session: &mut Session, ctx: &mut Context) -> Result<()> {
        // Pingora forgets these after each request, and would then wait for ever (D21). What it has
        // decided to close (HTTP/1.0, doubtful framing) stays so.
        let may_go_on = match session.as_downstream() {
            HttpSession::H1(h1) => h1.will_keepalive(),
            _ => true,
        };
        ctx.span = self.spans.as_ref().and_then(|spans| spans.begin(ctx.id, &session.req_header().headers));
        let keep = may_go_on && !self.load.is_draining();
        session.set_keepalive(keep.then(|| ctx.settings.timeouts.keepalive.as_secs().max(1)));
        session.as_downstream_mut().set_read_timeout(Some(ctx.settings.timeouts.client_read));
        session.as_downstream_mut().set_write_timeout(Some(ctx.settings.timeouts.upstream));
        // What is sent behind a request that waits is the next one.
        session.as_downstream_mut().set_pipelining_enabled(true);
        let Some(connection) = client::connection(session) else { return Ok(()) };
        connection.head_is_complete(session.req_header().headers.contains_key(TRANSFER_ENCODING));
        if connection.is_secure() {
            note_tls(session, &ctx.settings.trusted_proxies)?;
        }
        Ok(())
    }

    async fn request_filter(&self, session: &mut Session, ctx: &mut Context) -> Result<bool> {
        // Pingora moves this future for each request: what seldom happens is boxed, so that it stays small.
        let head = session.req_header();
        if let Err(refusal) = head::check_framing(head, || session.to_h1_raw()) {
            return Box::pin(turn_down(session, ctx, refusal.into())).await;
        }
        if let Some(name) = client::connection(session).and_then(|connection| connection.name())
            && !self.pipeline.is_meant(name, head::host(head)).await
        {
            return Box::pin(turn_down(session, ctx, Refusal::UnknownCluster.into())).await;
        }
        if let Some(route) = head::target(head).and_then(|target| Route::of(target.path)) {
            ctx.class = "own";
            ctx.code = Box::pin(self.serve_own(session, ctx.id, route)).await?;
            return Ok(true);
        }
        let judged = match self.pipeline.admit(head, &ctx.settings.timeouts).await {
            Ok(admitted) => {
                ctx.class = admitted.class.word();
                if admitted.forward.parks && self.load.is_closing() {
                    Err(Refusal::Leaving.into())
                } else {
                    self.apply_caps(session, ctx, admitted).await
                }
            }
            Err(refusal) => {
                ctx.class = pipeline::class_of(head);
                Err(refusal.into())
            }
        };
        match judged {
            Ok(()) => Ok(false),
            Err(denied) => Box::pin(turn_down(session, ctx, denied)).await,
        }
    }

    async fn upstream_peer(&self, session: &mut Session, ctx: &mut Context) -> Result<Box<HttpPeer>> {
        let Some(forward) = &ctx.forward else {
            return Err(refused(ctx, Refusal::Internal));
        };
        ctx.cell.0.get_or_insert_with(Instant::now);
        match forward.peer(ctx.connects, &ctx.settings.timeouts) {
            Some(mut peer) => {
                if parks_over_http2(forward, session) {
                    self.load.severing.prepare(&mut peer);
                }
                Ok(Box::new(peer))
            }
            None => Err(refused(ctx, Refusal::CellUnreachable)),
        }
    }

    async fn connected_to_upstream(
        &self,
        session: &mut Session,
        _reused: bool,
        _: &HttpPeer,
        socket: RawFd,
        _: Option<&Digest>,
        ctx: &mut Context,
    ) -> Result<()> {
        if ctx.forward.as_ref().is_some_and(|forward| parks_over_http2(forward, session)) {
            ctx.waiting = Some(self.load.severing.wait(socket));
            // After it can be ended, so that none is missed.
            if self.load.is_closing() {
                return Err(refused(ctx, Refusal::Leaving));
            }
        }
        Ok(())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        upstream: &mut RequestHeader,
        ctx: &mut Context,
    ) -> Result<()> {
        let peer = session.client_addr().and_then(|address| address.as_inet()).copied();
        let head = session.req_header();
        let (Some(forward), Some(target)) = (&ctx.forward, head::target(head)) else {
            return Err(refused(ctx, Refusal::Internal));
        };
        let to = ToCell {
            target,
            cluster: &forward.cluster,
            client: ClientSide {
                id: ctx.id,
                peer,
                https: client::connection(session).is_some_and(|connection| connection.is_secure()),
                host: head::host(head),
                trusted: &ctx.settings.trusted_proxies,
            },
            tenant_header: self.tenant_header,
            uncompressed: forward.metered.is_read(),
            whole: ctx.whole.as_ref().map(|(whole, _)| whole.len()),
            span: ctx.span.as_deref(),
        };
        let rewritten = forward::rewrite(upstream, &to);
        rewritten.ok_or_else(|| refused(ctx, Refusal::Internal))
    }

    async fn request_body_filter(
        &self,
        session: &mut Session,
        body: &mut Option<Bytes>,
        end_of_stream: bool,
        ctx: &mut Context,
    ) -> Result<()> {
        if let (true, Some(forward), Some(connection)) =
            (end_of_stream, &ctx.forward, client::connection(session))
        {
            let interim = session.req_header().version == Version::HTTP_11;
            let (stores, parks) = (forward.metered.stores(), forward.parks);
            ctx.storing = connection.request_is_complete(Complete { stores, parks, interim });
        }
        if let Some((whole, _)) = &mut ctx.whole {
            // Pingora replays the last part, once, as the end of the body.
            *body = Some(std::mem::take(whole));
            return Ok(());
        }
        let Some(collector) = &mut ctx.collector else {
            no_second_end(body, end_of_stream);
            return Ok(());
        };
        match collector.take(body, end_of_stream) {
            Ok(None) => Ok(()),
            Ok(Some(whole)) => {
                let subject = collector.subject;
                match self.judge(ctx, Some(subject), &whole).await {
                    Ok(()) => {
                        *body = Some(whole);
                        no_second_end(body, true);
                        Ok(())
                    }
                    Err(denied) => {
                        ctx.rate = denied.rate.map(|rate| *rate);
                        Err(refused(ctx, denied.refusal))
                    }
                }
            }
            Err(refusal) => Err(refused(ctx, refusal)),
        }
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        head: &mut ResponseHeader,
        ctx: &mut Context,
    ) -> Result<()> {
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            // Nobody asked for another protocol: upgrades do not get this far.
            return Err(refused(ctx, Refusal::CellGarbled));
        }
        if head.status == StatusCode::UNAUTHORIZED {
            // The client's credential never got there: it is ours that the cell does not take.
            return Err(refused(ctx, Refusal::CellRefusesUs));
        }
        if head.status == StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE {
            // Brokers say so in HTML, and take less than we do.
            return Err(refused(ctx, Refusal::HeadTooLargeForCell));
        }
        // The poll is over: what follows is an answer like any other.
        if !head.status.is_informational() {
            if let Some(connection) = client::connection(session) {
                connection.answers();
            }
            ctx.slot = None;
            ctx.waiting = None;
            ctx.cell.1 = ctx.cell.0.map(|asked| asked.elapsed());
            if let Some(watch) = &mut ctx.watch {
                let coding = head.headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes);
                watch.head(head.status.as_u16(), coding);
            }
        }
        answer::rewrite(head, ctx.id, ctx.rate.as_ref());
        Ok(())
    }

    fn response_body_filter(
        &self,
        _: &mut Session,
        body: &mut Option<Bytes>,
        _: bool,
        ctx: &mut Context,
    ) -> Result<Option<Duration>> {
        if let (Some(watch), Some(piece)) = (&mut ctx.watch, body) {
            watch.piece(piece);
        }
        Ok(None)
    }

    fn fail_to_connect(
        &self,
        _: &mut Session,
        _: &HttpPeer,
        ctx: &mut Context,
        mut e: Box<Error>,
    ) -> Box<Error> {
        self.metrics.upstream_error(cause(&e));
        ctx.connects += 1;
        e.set_retry(ctx.connects < MAX_CONNECTS);
        e
    }

    fn error_while_proxy(
        &self,
        _: &HttpPeer,
        _: &mut Session,
        mut e: Box<Error>,
        ctx: &mut Context,
        _client_reused: bool,
    ) -> Box<Error> {
        let ended_by_us = ctx.waiting.is_some() && self.load.is_closing();
        if *e.esource() == ErrorSource::Upstream && ctx.refusal.is_none() && !ended_by_us {
            self.metrics.upstream_error(cause(&e));
        }
        // The cell may have acted on it: even a GET can take messages out.
        e.set_retry(false);
        e
    }

    fn suppress_error_log(&self, _: &Session, _: &Context, _: &Error) -> bool {
        true
    }

    async fn fail_to_proxy(&self, session: &mut Session, e: &Error, ctx: &mut Context) -> FailToProxy {
        let gone = FailToProxy { error_code: 0, can_reuse_downstream: false };
        // A "100 Continue" is no answer yet.
        if session.response_written().is_some_and(|head| !head.status.is_informational()) {
            return gone;
        }
        let body_done = session.as_downstream_mut().is_body_done();
        let parks = ctx.forward.as_ref().is_some_and(|forward| forward.parks);
        let ended = *e.esource() == ErrorSource::Downstream || ctx.waiting.is_some();
        let told =
            if parks && self.load.is_closing() && ended { Some(Refusal::Leaving) } else { ctx.refusal };
        let Some(refusal) = told.or_else(|| outcome(e, body_done)) else {
            ctx.code = CLIENT_GONE;
            return gone;
        };
        let wire = refusal.wire();
        ctx.code = wire.code;
        if wire.status >= 500 {
            let cluster = ctx.forward.as_ref().map(|forward| forward.cluster.slug.to_string());
            let principal = ctx.forward.as_ref().map(|forward| forward.principal.to_string());
            let cause = if ctx.refusal.is_some() { &*wire.text } else { e.etype().as_str() };
            tracing::warn!(request = %ctx.id, cluster, principal, code = wire.code, cause, "request failed");
        }
        // Pingora ends the client's connection after a failure here, whatever we answer: say so.
        session.set_keepalive(None);
        let denied = Denied { refusal, rate: ctx.rate.take().map(Box::new) };
        if answer::deny(session, ctx.id, denied).await.is_err() {
            return gone;
        }
        FailToProxy { error_code: wire.status, can_reuse_downstream: false }
    }

    async fn logging(&self, session: &mut Session, e: Option<&Error>, ctx: &mut Context) {
        // A "100 Continue" is no answer yet.
        let written = session.response_written().filter(|head| !head.status.is_informational());
        let status = written.map_or(0, |head| head.status.as_u16());
        let finished = Finished {
            class: ctx.class,
            status,
            code: if status == 0 { CLIENT_GONE } else { ctx.code },
            took: ctx.began.elapsed(),
            cell: ctx.cell.1,
        };
        self.metrics.finished(finished);
        let mut counts = Counts::default();
        if let Some(forward) = &ctx.forward {
            if let Some(mut watch) = ctx.watch.take() {
                if e.is_some_and(|e| *e.esource() == ErrorSource::Downstream) {
                    watch.client_left();
                }
                counts = self.meter(forward, watch);
            }
            let outcome = Outcome::of(status, finished.code != OK);
            let Counts { msgs: messages, bytes_in, bytes_out, .. } = counts;
            let request = traffic::Request { outcome, cell: finished.cell, messages, bytes_in, bytes_out };
            self.clusters.add(forward.cluster.id, forward.cluster.slug, &request);
        }
        let span = ctx.span.take();
        let log = self.access_log.as_ref().filter(|log| log.wants(status, ctx.id.random()));
        if span.is_none() && log.is_none() {
            return;
        }
        let mut line = line(session, ctx, finished, counts);
        if let Some(span) = span {
            line.trace_id = Some(span.trace_id());
            span.end(&line);
        }
        if let Some(log) = log {
            log.log(line);
        }
    }
}

impl Gateway {
    /// Reads the body, if it has to be, and lets the caps decide. A body over HTTP/2 is left to [`Collector`].
    async fn apply_caps(
        &self,
        session: &mut Session,
        ctx: &mut Context,
        admitted: Admitted,
    ) -> Result<(), Denied> {
        let caps = &self.pipeline.caps;
        let forward = ctx.forward.insert(admitted.forward);
        let Some(Inspection { subject, length }) = admitted.inspection else {
            return self.judge(ctx, None, &[]).await;
        };
        caps.peek(forward)?;
        let mut memory = caps.reservation(forward);
        // Without a body there is nothing to read.
        if length.is_none() && session.as_downstream_mut().is_body_empty() {
            return self.judge(ctx, Some(subject), &[]).await;
        }
        let (ceiling, limit) = (self.pipeline.max_body_bytes, ctx.settings.timeouts.body);
        if !matches!(session.as_downstream(), HttpSession::H1(_)) {
            ctx.collector = Some(Collector::new(subject, ceiling, limit, memory));
            return Ok(());
        }
        let whole = body::read(session, length, ceiling, limit, &mut memory).await?;
        self.judge(ctx, Some(subject), &whole).await?;
        if !whole.is_empty() {
            if session.as_downstream().retry_buffer_truncated() {
                body::reframe(session).await?;
            }
            ctx.whole = Some((whole, memory));
        }
        Ok(())
    }

    /// Books what a request came to; returns it in all.
    fn meter(&self, forward: &Forward, watch: Watch) -> Counts {
        let usage = watch.finish();
        self.meter.record(&self.meter.cluster(forward.cluster.id), &usage);
        if forward.metered == MeteredRoute::Pop {
            let limiter = &self.pipeline.caps.limiter;
            limiter.deliver(&forward.counters, &forward.cluster.limits, usage.first.counts.msgs);
        }
        usage.samples().fold(Counts::default(), |mut sum, sample| {
            sum.add(sample.counts);
            sum
        })
    }

    async fn judge(&self, ctx: &mut Context, subject: Option<Subject>, body: &[u8]) -> Result<(), Denied> {
        let forward = ctx.forward.as_ref().ok_or(Refusal::Internal)?;
        let passed = self.pipeline.caps.judge(forward, subject, body).await?;
        ctx.slot = passed.slot;
        ctx.rate = passed.rate;
        if self.meter.is_on() {
            ctx.watch = Some(Watch::new(forward.metered, passed.metered, MAX_SINK_NAME));
        }
        Ok(())
    }
}

/// Whether it waits at a cell, and [`severing`] has to end it at a stop.
fn parks_over_http2(forward: &Forward, session: &Session) -> bool {
    forward.parks && session.as_downstream().is_http2()
}

/// Takes an empty last part away: Pingora would write it as the chunk that ends a body, and then that chunk again, which
/// the cell would take for the beginning of another request.
fn no_second_end(body: &mut Option<Bytes>, end_of_stream: bool) {
    if end_of_stream && body.as_ref().is_some_and(Bytes::is_empty) {
        *body = None;
    }
}

/// Says in the head what TLS has told, for all who look there.
fn note_tls(session: &mut Session, trusted: &[IpNet]) -> Result<()> {
    let peer = session.client_addr().and_then(|address| address.as_inet()).copied();
    let head = session.req_header_mut();
    // A balancer that encrypts towards us knows better.
    let told = forward::trusts(trusted, peer) && head.headers.contains_key(X_FORWARDED_PROTO);
    if !told {
        head.insert_header(X_FORWARDED_PROTO, "https")?;
    }
    if let (Version::HTTP_2, Some(authority)) = (head.version, head.uri.authority())
        && !head.headers.contains_key(HOST)
    {
        let host = authority.as_str().to_owned();
        head.insert_header(HOST, host)?;
    }
    Ok(())
}

/// Answers a request that goes no further.
async fn turn_down(session: &mut Session, ctx: &mut Context, denied: Denied) -> Result<bool> {
    ctx.code = denied.refusal.wire().code;
    answer::deny(session, ctx.id, denied).await?;
    Ok(true)
}

/// Remembers why, for `fail_to_proxy`, and ends Pingora's part.
#[allow(clippy::unnecessary_box_returns)] // the box is what Pingora's filters return
fn refused(ctx: &mut Context, refusal: Refusal) -> Box<Error> {
    ctx.refusal = Some(refusal);
    Error::explain(ErrorType::HTTPStatus(refusal.wire().status), refusal.wire().code)
}

/// A request for the access log.
fn line(session: &Session, ctx: &Context, finished: Finished, counts: Counts) -> Line {
    let head = session.req_header();
    let peer = session.client_addr().and_then(|address| address.as_inet()).copied();
    let client =
        ClientSide { id: ctx.id, peer, host: None, https: false, trusted: &ctx.settings.trusted_proxies };
    Line {
        time: SystemTime::now(),
        request_id: ctx.id,
        trace_id: Traceparent::of(&head.headers).map(|parent| parent.trace_id),
        cluster: ctx.forward.as_ref().map(|forward| forward.cluster.slug),
        principal: ctx.forward.as_ref().map(|forward| forward.principal.clone()),
        client: client.address(&head.headers),
        method: method_word(&head.method),
        class: finished.class,
        status: finished.status,
        code: finished.code,
        took: finished.took,
        cell: finished.cell,
        bytes_in: counts.bytes_in,
        bytes_out: counts.bytes_out,
        messages: counts.msgs,
    }
}

/// A word for what went wrong with a cell, of a closed list.
fn cause(e: &Error) -> &'static str {
    match e.etype() {
        ErrorType::ConnectTimedout => "connect_timeout",
        ErrorType::ConnectRefused => "connect_refused",
        ErrorType::ConnectNoRoute => "no_route",
        ErrorType::ConnectError | ErrorType::SocketError | ErrorType::BindError => "connect",
        ErrorType::ReadTimedout => "read_timeout",
        ErrorType::WriteTimedout => "write_timeout",
        ErrorType::ConnectionClosed => "closed",
        ErrorType::ReadError => "read",
        ErrorType::WriteError => "write",
        ErrorType::InvalidHTTPHeader => "malformed",
        _ => "other",
    }
}

/// What the client is told of a failure; `None` when it is gone.
fn outcome(e: &Error, body_done: bool) -> Option<Refusal> {
    use ErrorType::{
        ConnectError, ConnectNoRoute, ConnectRefused, ConnectTimedout, ConnectionClosed, InvalidHTTPHeader,
        ReadError, ReadTimedout, SocketError, WriteError, WriteTimedout,
    };
    match (e.esource(), e.etype()) {
        (_, ConnectTimedout | ConnectRefused | ConnectNoRoute | ConnectError | SocketError)
            if *e.esource() != ErrorSource::Downstream =>
        {
            Some(Refusal::CellUnreachable)
        }
        // The cell cannot be late with an answer to a request it has not got.
        (ErrorSource::Upstream, ReadTimedout) if !body_done => Some(Refusal::ClientStalled),
        (ErrorSource::Upstream, ReadTimedout | WriteTimedout) => Some(Refusal::CellLate),
        (ErrorSource::Upstream, InvalidHTTPHeader) => Some(Refusal::CellGarbled),
        (ErrorSource::Upstream, _) => Some(Refusal::CellUnreachable),
        (ErrorSource::Downstream, ConnectionClosed | ReadError | WriteError | WriteTimedout) => None,
        (ErrorSource::Downstream | ErrorSource::Unset, ReadTimedout) => Some(Refusal::ClientStalled),
        (ErrorSource::Downstream, _) => Some(Refusal::Framing("malformed request")),
        _ => Some(Refusal::Internal),
    }
}
