//! Reading a request's head: framing (D12), target and host, once, for everybody behind it.

use super::refusal::Refusal;
use bytes::Bytes;
use http::Version;
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use pingora::http::RequestHeader;

/// Largest head, in bytes of request line and headers.
pub(super) const MAX_HEAD: usize = 32 * 1024;

/// Most headers of a request. Pingora reads 256, also when a request is put to it anew with headers of ours.
const MAX_HEADERS: usize = 250;

/// Refuses what two parsers could read in two ways, and what wants another protocol. `raw` gives
/// the head as it came: Pingora takes a Content-Length away that stood beside Transfer-Encoding.
pub(super) fn check_framing(head: &RequestHeader, raw: impl FnOnce() -> Bytes) -> Result<(), Refusal> {
    // HTTP/2 has no request line, and no framing headers that could disagree.
    let raw = if head.version == Version::HTTP_2 { Bytes::new() } else { raw() };
    // Pingora drops a fragment without a word: what was asked for is not what would be served.
    if raw.iter().take_while(|byte| **byte != b'\n').any(|byte| *byte == b'#') {
        return Err(Refusal::Framing("a fragment in the request target"));
    }
    let single = |name| {
        let mut values = head.headers.get_all(name).iter();
        (values.next().map(http::HeaderValue::as_bytes), values.next().is_some())
    };
    let (length, more_lengths) = single(CONTENT_LENGTH);
    let (coding, more_codings) = single(TRANSFER_ENCODING);
    if more_lengths {
        return Err(Refusal::Framing("more than one Content-Length"));
    }
    if length.is_some_and(|text| text.is_empty() || !text.iter().all(u8::is_ascii_digit)) {
        return Err(Refusal::Framing("malformed Content-Length"));
    }
    if coding.is_some() && (length.is_some() || names_length(&raw)) {
        return Err(Refusal::Framing("Content-Length together with Transfer-Encoding"));
    }
    if more_codings || coding.is_some_and(|text| !text.eq_ignore_ascii_case(b"chunked")) {
        return Err(Refusal::Framing("unsupported Transfer-Encoding"));
    }
    if head.headers.contains_key(UPGRADE) {
        return Err(Refusal::Framing("no other protocol is spoken here"));
    }
    let head_size =
        head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum::<usize>()
            + head.raw_path().len();
    if head_size > MAX_HEAD || head.headers.len() > MAX_HEADERS {
        return Err(Refusal::HeadTooLarge);
    }
    Ok(())
}

/// Whether a line of a raw head is a Content-Length.
fn names_length(raw: &[u8]) -> bool {
    const NAME: &[u8] = b"content-length";
    raw.split(|byte| *byte == b'\n').any(|line| {
        line.split_at_checked(NAME.len()).is_some_and(|(name, rest)| {
            name.eq_ignore_ascii_case(NAME) && rest.trim_ascii_start().starts_with(b":")
        })
    })
}

/// Path and query exactly as they will be forwarded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'r> {
    pub path: &'r str,
    pub query: Option<&'r str>,
}

/// The target, when what came over the wire is what the parser understood. An absolute form is
/// read for its path; a fragment or an illegal byte makes the two differ.
pub(super) fn target(head: &RequestHeader) -> Option<Target<'_>> {
    let parsed = head.uri.path_and_query()?;
    let raw = head.raw_path();
    let same = match raw.first() {
        Some(b'/') => raw == parsed.as_str().as_bytes(),
        _ => {
            let scheme = raw.split(|byte| *byte == b':').next().unwrap_or_default();
            [b"http".as_slice(), b"https"].iter().any(|known| scheme.eq_ignore_ascii_case(known))
                && raw.ends_with(parsed.as_str().as_bytes())
        }
    };
    same.then(|| Target { path: parsed.path(), query: parsed.query() })
}

/// The host the client asked for: `:authority` of HTTP/2, else `Host`.
pub(super) fn host(head: &RequestHeader) -> Option<&str> {
    match head.uri.authority() {
        Some(authority) => Some(authority.as_str()),
        None => head.headers.get(HOST)?.to_str().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::check_framing;
    use bytes::Bytes;
    use pingora::http::RequestHeader;

    #[test]
    fn ambiguous_framing_is_refused() {
        let cases: &[(&[(&'static str, &'static str)], bool)] = &[
            (&[], true),
            (&[("content-length", "5")], true),
            (&[("transfer-encoding", "chunked")], true),
            (&[("transfer-encoding", "Chunked")], true),
            (&[("connection", "upgrade")], true),
            (&[("content-length", "5"), ("transfer-encoding", "chunked")], false),
            (&[("content-length", "5"), ("content-length", "5")], false),
            (&[("content-length", "5, 5")], false),
            (&[("content-length", "+5")], false),
            (&[("content-length", "-5")], false),
            (&[("content-length", "")], false),
            (&[("content-length", "0x5")], false),
            (&[("transfer-encoding", "identity")], false),
            (&[("transfer-encoding", "identity, chunked")], false),
            (&[("transfer-encoding", "gzip, chunked")], false),
            (&[("transfer-encoding", "xchunked")], false),
            (&[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")], false),
            (&[("upgrade", "websocket"), ("connection", "upgrade")], false),
            (&[("upgrade", "h2c")], false),
        ];
        for (headers, pass) in cases {
            let mut head = RequestHeader::build("POST", b"/api/v1/kv", None).unwrap();
            for (name, value) in *headers {
                head.append_header(*name, *value).unwrap();
            }
            assert_eq!(check_framing(&head, Bytes::new).is_ok(), *pass, "{headers:?}");
        }
        let mut head = RequestHeader::build("GET", b"/", None).unwrap();
        head.append_header("x-large", "a".repeat(33 * 1024)).unwrap();
        assert!(check_framing(&head, Bytes::new).is_err());
        let mut head = RequestHeader::build("GET", b"/", None).unwrap();
        for count in 1..=251 {
            head.append_header("x-a", "b").unwrap();
            assert_eq!(check_framing(&head, Bytes::new).is_ok(), count <= 250);
        }
    }

    #[test]
    fn a_fragment_is_seen() {
        let head = RequestHeader::build("PUT", b"/api/v1/kv/ns/a", None).unwrap();
        let of = |raw: &'static str| check_framing(&head, || Bytes::from_static(raw.as_bytes())).is_ok();
        assert!(!of("PUT /api/v1/kv/ns/a#b HTTP/1.1\r\nHost: x\r\n\r\n"));
        assert!(of("PUT /api/v1/kv/ns/a HTTP/1.1\r\nHost: x#y\r\n\r\n"));
    }

    #[test]
    fn a_length_that_pingora_took_away_is_seen() {
        let mut head = RequestHeader::build("POST", b"/api/v1/kv", None).unwrap();
        head.append_header("transfer-encoding", "chunked").unwrap();
        let of = |raw: &'static str| check_framing(&head, || Bytes::from_static(raw.as_bytes())).is_ok();
        assert!(of("POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nx: content-length: 5\r\n\r\n"));
        assert!(of("POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Lengthy: 5\r\n\r\n"));
        assert!(!of("POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nCONTENT-length: 5\r\n\r\n"));
        assert!(!of("POST /x HTTP/1.1\nContent-Length : 5\nTransfer-Encoding: chunked\n\n"));
    }
}
