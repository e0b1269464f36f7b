//! W3C Trace Context, as far as the access log and spans look at it.

use http::{HeaderMap, HeaderName};
use serde::{Serialize, Serializer};

/// Which trace a request belongs to, and which span it comes from.
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The id of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceId(pub u128);

/// A `traceparent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traceparent {
    /// Which trace.
    pub trace_id: TraceId,
    /// The span that the request comes from.
    pub span_id: u64,
}

impl Traceparent {
    /// The client's; none when there are two.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        Self::parse(value.as_bytes())
    }

    /// From the header's value; none when it is not of the form that version 00 has.
    fn parse(value: &[u8]) -> Option<Self> {
        let hex = |part: &[u8]| part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let mut parts = value.split(|byte| *byte == b'-');
        let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let later = version != b"00";
        let whole = version.len() == 2
            && version != b"ff"
            && trace.len() == 32
            && parent.len() == 16
            && flags.len() == 2
            && (later || parts.next().is_none())
            && [version, trace, parent, flags].into_iter().all(hex);
        if !whole {
            return None;
        }
        let trace_id = u128::from_str_radix(std::str::from_utf8(trace).ok()?, 16).ok()?;
        let span_id = u64::from_str_radix(std::str::from_utf8(parent).ok()?, 16).ok()?;
        (trace_id != 0 && span_id != 0).then_some(Self { trace_id: TraceId(trace_id), span_id })
    }
}

impl Serialize for TraceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::{TRACEPARENT, Traceparent};
    use http::{HeaderMap, HeaderValue};

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn trace_ids() {
        let parent = Traceparent::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&parent.trace_id).unwrap(), "\"0af7651916cd43dd8448eb211c80319c\"");
        assert_eq!(parent.span_id, 0xb7ad_6b71_6920_3331);
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
        assert!(Traceparent::parse(later.as_bytes()).is_some());
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c8031\"c-b7ad6b7169203331-01",
        ] {
            assert_eq!(Traceparent::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn of_two_there_is_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(Traceparent::of(&headers), None);
        headers.append(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert!(Traceparent::of(&headers).is_some());
        headers.append(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert_eq!(Traceparent::of(&headers), None);
    }
}
