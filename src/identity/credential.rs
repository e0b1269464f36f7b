//! Reading a credential from a request (proxy contract §5, §6).

use crate::control::KeyDigest;
use http::{
    HeaderMap,
    header::{AUTHORIZATION, COOKIE, HOST, ORIGIN},
};
use sha2::{Digest, Sha256};

/// Cookies that are tried as sessions, at most: each may cost the check of a signature.
const MAX_COOKIES: usize = 8;

/// A credential as presented.
#[derive(PartialEq, Eq, Debug)]
pub enum Credential<'h> {
    /// None, or one that cannot be read.
    None,
    /// `qk_…`; nothing after the prefix is parsed.
    ApiKey(&'h str),
    /// Anything else counts as a session token. Of several, which only cookies can be, the first that is a
    /// token of ours counts.
    Session(Vec<&'h str>),
}

/// The names under which a session may come as a cookie, in the order they are looked for.
#[derive(Clone, Debug)]
pub struct CookieNames {
    host: String,
    cell: String,
    fleet: String,
    secure: bool,
}

impl CookieNames {
    /// `__Host-<name>_cell` and `<name>_cell` belong to this cell alone, `<name>` to the whole domain. Where
    /// cookies are `secure`, for https alone, `<name>_cell` does not count: sites of the same domain can set
    /// it, and it would come before the people's own.
    pub fn new(name: &str, secure: bool) -> Self {
        Self {
            host: format!("__Host-{name}_cell"),
            cell: format!("{name}_cell"),
            fleet: name.to_owned(),
            secure,
        }
    }
}

/// The credential of a request: `Authorization`, else the session cookie. On a navigation by a browser the
/// cookie does not count: a link on somebody's page must not act for who follows it.
pub fn credential<'h>(headers: &'h HeaderMap, cookies: &CookieNames) -> Credential<'h> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        let tokens = acting_cookies(headers, cookies);
        return if tokens.is_empty() { Credential::None } else { Credential::Session(tokens) };
    };
    // Of two we could not be sure which one is meant.
    if values.next().is_some() {
        return Credential::Session(Vec::new());
    }
    let Ok(text) = value.to_str() else {
        return Credential::None;
    };
    let text = match text.split_at_checked(7) {
        // The scheme is matched without case (D17).
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer ") => rest,
        _ => text,
    };
    match text.trim() {
        "" => Credential::None,
        key if key.starts_with("qk_") => Credential::ApiKey(key),
        token => Credential::Session(vec![token]),
    }
}

/// The session cookies that act for who sends them: none when a browser navigates, or when a page of another
/// origin asks.
fn acting_cookies<'h>(headers: &'h HeaderMap, names: &CookieNames) -> Vec<&'h str> {
    if says(headers, "sec-fetch-mode", b"navigate") || is_from_elsewhere(headers) {
        return Vec::new();
    }
    session_cookies(headers, names)
}

/// What is in the session cookies, all `Cookie` headers together, the cell's own first; each once, and no
/// more than eight. A key in a cookie is no session.
pub fn session_cookies<'h>(headers: &'h HeaderMap, names: &CookieNames) -> Vec<&'h str> {
    // By bytes: somebody else's cookie may hold anything.
    let pairs = || {
        let values =
            headers.get_all(COOKIE).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b';'));
        values.filter_map(|pair| {
            let pair = pair.trim_ascii();
            let end = pair.iter().position(|byte| *byte == b'=')?;
            Some((&pair[..end], &pair[end + 1..])).filter(|(_, value)| !value.is_empty())
        })
    };
    let plain = !names.secure && !is_by_https(headers);
    let names = [Some(&names.host), plain.then_some(&names.cell), Some(&names.fleet)];
    let mut tokens = Vec::new();
    for name in names.into_iter().flatten() {
        for (_, value) in pairs().filter(|(given, _)| *given == name.as_bytes()) {
            if let Ok(token) = std::str::from_utf8(value)
                && !token.starts_with("qk_")
                && !tokens.contains(&token)
                && tokens.len() < MAX_COOKIES
            {
                tokens.push(token);
            }
        }
    }
    tokens
}

/// Whether the request was made by a page of another origin, as far as a browser says so: in
/// `Sec-Fetch-Site`, or, where that is not sent, in `Origin`. Sites of the same domain are other tenants'.
pub fn is_from_elsewhere(headers: &HeaderMap) -> bool {
    if headers.contains_key("sec-fetch-site") {
        return !says(headers, "sec-fetch-site", b"same-origin") && !says(headers, "sec-fetch-site", b"none");
    }
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let origins = headers.get_all(ORIGIN).iter();
    origins.map(|origin| origin.to_str().unwrap_or_default()).any(|origin| !is_origin_of(origin, host))
}

/// Whether an origin is that of pages of this host.
fn is_origin_of(origin: &str, host: &str) -> bool {
    let (default_port, authority) = match origin.split_once("://") {
        Some(("http", authority)) => (":80", authority),
        Some(("https", authority)) => (":443", authority),
        _ => return false,
    };
    let plain = |authority: &str| {
        authority.trim().strip_suffix(default_port).unwrap_or(authority.trim()).to_ascii_lowercase()
    };
    plain(authority) == plain(host)
}

/// Whether the client came by https, as somebody in front of us says. Only cookies depend on it, which it
/// makes stricter: who lies has less of their own, so everybody is believed.
pub fn is_by_https(headers: &HeaderMap) -> bool {
    says(headers, "x-forwarded-proto", b"https")
}

fn says(headers: &HeaderMap, name: &str, word: &[u8]) -> bool {
    headers.get(name).is_some_and(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(word))
}

/// What a key is looked up by: the sha256 of all of it.
pub fn digest(key: &str) -> KeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::{CookieNames, Credential, credential, digest, is_from_elsewhere, session_cookies};
    use http::{HeaderMap, HeaderName, HeaderValue};

    fn headers(lines: &[(&str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn authorization_headers() {
        let cases: &[(&[u8], Credential<'_>)] = &[
            (b"Bearer qk_live_x", Credential::ApiKey("qk_live_x")),
            (b"bearer qk_live_x", Credential::ApiKey("qk_live_x")),
            (b"BEARER  qk_live_x ", Credential::ApiKey("qk_live_x")),
            (b"qk_live_x", Credential::ApiKey("qk_live_x")),
            (b"Bearer qk_", Credential::ApiKey("qk_")),
            (b"Bearer QK_live_x", Credential::Session(vec!["QK_live_x"])),
            (b"Basic cWs6eA==", Credential::Session(vec!["Basic cWs6eA=="])),
            (b"Bearerqk_live_x", Credential::Session(vec!["Bearerqk_live_x"])),
            (b"Bearer", Credential::Session(vec!["Bearer"])),
            (b"Bearer ", Credential::None),
            (b"", Credential::None),
            (b"Bearer qk_\xff", Credential::None),
        ];
        let names = CookieNames::new("queen_session", false);
        for (header, want) in cases {
            let headers = headers(&[("authorization", header)]);
            assert_eq!(credential(&headers, &names), *want, "{}", String::from_utf8_lossy(header));
        }
        assert_eq!(credential(&HeaderMap::new(), &names), Credential::None);
        let twice = headers(&[("authorization", b"qk_a"), ("authorization", b"qk_b")]);
        assert_eq!(credential(&twice, &names), Credential::Session(vec![]));
    }

    #[test]
    fn cookies() {
        let names = CookieNames::new("queen_session", false);
        let session = |text| Credential::Session(vec![text]);
        let both = |first, second| Credential::Session(vec![first, second]);
        let cases: &[(&[(&str, &[u8])], Credential<'_>)] = &[
            (&[("cookie", b"queen_session=a.b.c")], session("a.b.c")),
            (&[("cookie", b"x=1; queen_session=t; y=2")], session("t")),
            (&[("cookie", b"x=1"), ("cookie", b"queen_session=t")], session("t")),
            (&[("cookie", b"queen_session=fleet; queen_session_cell=cell")], both("cell", "fleet")),
            (&[("cookie", b"queen_session_cell=cell; __Host-queen_session_cell=host")], both("host", "cell")),
            (&[("cookie", b"queen_session=first; queen_session=second")], both("first", "second")),
            (&[("cookie", b"queen_session=t; queen_session=t; queen_session_cell=t")], session("t")),
            (&[("cookie", b"queen_session_cell=qk_live_x; queen_session=t")], session("t")),
            (
                &[("cookie", b"queen_session_cell=tossed; queen_session=t"), ("x-forwarded-proto", b"https")],
                session("t"),
            ),
            (&[("cookie", b"queen_session=a=b")], session("a=b")),
            (&[("cookie", b"Queen_Session=t")], Credential::None),
            (&[("cookie", b"xqueen_session=t")], Credential::None),
            (&[("cookie", b"queen_session=")], Credential::None),
            (&[("cookie", b"queen_session_cell=; queen_session=t")], session("t")),
            (&[("cookie", b"a=\xc3\xa9; queen_session=t")], session("t")),
            (&[("cookie", b"queen_session=\xff")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-site", b"same-origin")], session("t")),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-site", b"none")], session("t")),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-site", b"same-site")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-site", b"cross-site")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("origin", b"null")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("origin", b"http://x"), ("host", b"x")], session("t")),
            (&[("cookie", b"queen_session=t"), ("origin", b"http://y"), ("host", b"x")], Credential::None),
            (&[("cookie", b"queen_session=qk_live_x")], Credential::None),
            (&[("cookie", b"queen_session")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-mode", b"navigate")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-mode", b"Navigate")], Credential::None),
            (&[("cookie", b"queen_session=t"), ("sec-fetch-mode", b"cors")], session("t")),
            (&[("cookie", b"queen_session=t"), ("authorization", b"qk_a")], Credential::ApiKey("qk_a")),
            (&[("cookie", b"queen_session=t"), ("authorization", b"Basic x")], session("Basic x")),
            (&[("cookie", b"queen_session=t"), ("authorization", b"")], Credential::None),
        ];
        for (lines, want) in cases {
            assert_eq!(credential(&headers(lines), &names), *want, "{lines:?}");
        }
    }

    #[test]
    fn the_plain_cookie_of_a_cell_does_not_count_by_https() {
        let names = CookieNames::new("q", true);
        let lines = headers(&[("cookie", b"q_cell=tossed; q=fleet; __Host-q_cell=host")]);
        assert_eq!(session_cookies(&lines, &names), ["host", "fleet"]);
    }

    #[test]
    fn no_more_cookies_than_eight_are_looked_at() {
        let many: Vec<String> = (0..100).map(|n| format!("q=t{n}")).collect();
        let lines = headers(&[("cookie", many.join("; ").as_bytes())]);
        assert_eq!(session_cookies(&lines, &CookieNames::new("q", false)).len(), 8);
    }

    #[test]
    fn who_is_from_elsewhere() {
        for (lines, want) in [
            (&[("host", "a.example")] as &[(&str, &str)], false),
            (&[("host", "a.example"), ("origin", "http://a.example")], false),
            (&[("host", "A.example"), ("origin", "https://a.example")], false),
            (&[("host", "a.example:443"), ("origin", "https://a.example")], false),
            (&[("host", "a.example:80"), ("origin", "http://a.example")], false),
            (&[("host", "a.example:8080"), ("origin", "http://a.example:8080")], false),
            (&[("host", "[::1]:80"), ("origin", "http://[::1]")], false),
            (&[("host", "a.example:8080"), ("origin", "http://a.example")], true),
            (&[("host", "a.example"), ("origin", "http://a.example:8080")], true),
            (&[("host", "a.example"), ("origin", "http://b.example")], true),
            (&[("host", "a.example"), ("origin", "http://a.example.evil")], true),
            (&[("host", "a.example"), ("origin", "null")], true),
            (&[("host", "a.example"), ("origin", "")], true),
            (&[("host", "a.example"), ("origin", "ftp://a.example")], true),
            (&[("origin", "http://a.example")], true),
            (&[("host", "a"), ("origin", "http://a"), ("origin", "http://b")], true),
            // A form on a page that tells nobody where it is.
            (&[("host", "a"), ("origin", "null"), ("sec-fetch-site", "same-origin")], false),
            (&[("host", "a"), ("origin", "http://a"), ("sec-fetch-site", "same-site")], true),
        ] {
            let bytes: Vec<_> = lines.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
            assert_eq!(is_from_elsewhere(&headers(&bytes)), want, "{lines:?}");
        }
    }

    #[test]
    fn the_digest_is_of_the_whole_key() {
        // The contract's fixture (§18).
        let key = format!("qk_dev_{}", "dev".repeat(13));
        assert_eq!(
            hex::encode(digest(&key)),
            "a492a78dbb0a44288f1ff363823b58f4e6fad1367018104e07f7dc118eee781b"
        );
    }
}
