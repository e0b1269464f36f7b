//! Spans by OpenTelemetry's SDK, over OTLP (protobuf by HTTP).

use super::{SpanError, SpanSettings};
use crate::{
    domain::ids::RequestId,
    gateway::{
        access_log::Line,
        trace_context::{TRACEPARENT, TraceId, Traceparent},
    },
};
use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context, KeyValue, SpanId, TraceFlags, TraceId as Id,
    trace::{
        Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, TraceState, Tracer as _,
        TracerProvider as _,
    },
};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span},
};
use std::time::Duration;

/// What vendors add to a `traceparent`.
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// Spans that may wait for their batch; about a KiB each.
const QUEUE: usize = 4_096;
/// Most spans of a batch.
const BATCH: usize = 512;
/// How long spans wait for their batch.
const DELAY: Duration = Duration::from_secs(2);
/// How long the collector has for a batch.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the end waits for what is not sent.
const END: Duration = Duration::from_secs(2);

/// The way to the collector.
#[derive(Clone, Debug)]
pub struct Spans {
    tracer: SdkTracer,
    one_in: u32,
}

/// Of a request that is under way.
#[derive(Debug)]
pub struct Begun {
    span: Span,
    /// The trace is the client's.
    continues: bool,
}

/// Ends the export; see [`Flush::finish`].
#[derive(Debug)]
pub struct Flush(SdkTracerProvider);

impl Spans {
    /// Starts the thread that exports. Must not be called from inside a runtime. A collector that is not there yet is no
    /// error.
    pub fn start(settings: &SpanSettings) -> Result<(Self, Flush), SpanError> {
        // Straight to where the operator said, whatever the environment or an answer names.
        let client = reqwest::blocking::Client::builder()
            .timeout(TIMEOUT)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| SpanError(error.to_string()))?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(format!("{}/v1/traces", settings.endpoint.trim_end_matches('/')))
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(TIMEOUT)
            .build()
            .map_err(|error| SpanError(error.to_string()))?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE)
            .with_max_export_batch_size(BATCH)
            .with_scheduled_delay(DELAY)
            .build();
        let resource = Resource::builder()
            .with_service_name("queen-proxy")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        let provider = SdkTracerProvider::builder()
            .with_span_processor(BatchSpanProcessor::builder(exporter).with_batch_config(batches).build())
            // Which requests have a span is decided before one is made.
            .with_sampler(Sampler::AlwaysOn)
            .with_resource(resource.build())
            .build();
        let tracer = provider.tracer("queen-proxy");
        Ok((Self { tracer, one_in: settings.one_in.max(1) }, Flush(provider)))
    }

    /// The span of a request that begins, if it is to have one.
    pub fn begin(&self, id: RequestId, headers: &HeaderMap) -> Option<Box<Begun>> {
        if !id.random().is_multiple_of(self.one_in) {
            return None;
        }
        let parent = Traceparent::of(headers);
        let context = parent.map_or_else(Context::new, |parent| {
            let trace = Id::from_bytes(parent.trace_id.0.to_be_bytes());
            let span = SpanId::from_bytes(parent.span_id.to_be_bytes());
            let remote = SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::default());
            Context::new().with_remote_span_context(remote)
        });
        let builder = SpanBuilder::from_name("request").with_kind(SpanKind::Server);
        let span = self.tracer.build_with_context(builder, &context);
        Some(Box::new(Begun { span, continues: parent.is_some() }))
    }
}

impl Begun {
    /// Says in the head for the cell that this is the parent of its spans.
    pub fn tell(&self, headers: &mut HeaderMap) {
        let context = self.span.span_context();
        let value = format!("00-{}-{}-01", context.trace_id(), context.span_id());
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(TRACEPARENT, value);
        }
        if !self.continues {
            // Of a trace that is not this one.
            headers.remove(TRACESTATE);
        }
    }

    /// Which trace it belongs to.
    pub fn trace_id(&self) -> TraceId {
        TraceId(u128::from_be_bytes(self.span.span_context().trace_id().to_bytes()))
    }

    /// The request is over; the span says what its line in the access log would.
    pub fn end(mut self, line: &Line) {
        self.span.update_name(format!("{} {}", line.method, line.class));
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let mut attributes = vec![
            KeyValue::new("http.request.method", line.method),
            KeyValue::new("http.request.body.size", count(line.bytes_in)),
            KeyValue::new("http.response.body.size", count(line.bytes_out)),
            KeyValue::new("queen.route_class", line.class),
            KeyValue::new("queen.code", line.code),
            KeyValue::new("queen.request_id", line.request_id.to_string()),
            KeyValue::new("queen.messages", count(line.messages)),
        ];
        // 0: the client was gone.
        if line.status > 0 {
            attributes.push(KeyValue::new("http.response.status_code", i64::from(line.status)));
        }
        if let Some(cluster) = line.cluster {
            attributes.push(KeyValue::new("queen.cluster", cluster.to_string()));
        }
        if let Some(principal) = &line.principal {
            attributes.push(KeyValue::new("queen.principal", principal.to_string()));
        }
        if let Some(client) = line.client {
            attributes.push(KeyValue::new("client.address", client.to_string()));
        }
        if let Some(cell) = line.cell {
            attributes.push(KeyValue::new("queen.cell_ms", cell.as_secs_f64() * 1e3));
        }
        self.span.set_attributes(attributes);
        if line.status >= 500 {
            self.span.set_status(Status::error(line.code));
        }
        self.span.end_with_timestamp(line.time);
    }
}

impl Flush {
    /// Sends what is left, as far as the collector takes it within two seconds.
    pub fn finish(self) {
        if let Err(error) = self.0.shutdown_with_timeout(END) {
            tracing::warn!(%error, "not all spans were sent");
        }
    }
}
