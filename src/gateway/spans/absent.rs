//! A program without spans: there is no value of these types.

use super::{SpanError, SpanSettings};
use crate::{
    domain::ids::RequestId,
    gateway::{access_log::Line, trace_context::TraceId},
};
use http::HeaderMap;

/// See [`super`].
#[derive(Clone, Debug)]
pub enum Spans {}

/// See [`super`].
#[derive(Debug)]
pub enum Begun {}

/// See [`super`].
#[derive(Debug)]
pub enum Flush {}

impl Spans {
    /// Refuses.
    pub fn start(_: &SpanSettings) -> Result<(Self, Flush), SpanError> {
        Err(SpanError("this program was built without the feature opentelemetry".to_owned()))
    }

    /// Never called.
    pub fn begin(&self, _: RequestId, _: &HeaderMap) -> Option<Box<Begun>> {
        match *self {}
    }
}

impl Begun {
    /// Never called.
    pub fn tell(&self, _: &mut HeaderMap) {
        match *self {}
    }

    /// Never called.
    pub fn trace_id(&self) -> TraceId {
        match *self {}
    }

    /// Never called.
    pub fn end(self, _: &Line) {
        match self {}
    }
}

impl Flush {
    /// Never called.
    pub fn finish(self) {
        match self {}
    }
}
