//! Reading a credential from a request (proxy contract §5, §6).

use crate::control::KeyDigest;
use http::{
    HeaderMap,
    header::{AUTHORIZATION, COOKIE},
};
use sha2::{Digest, Sha256};

/// A credential as presented.
#[derive(PartialEq, Eq, Debug)]
pub enum Credential<'h> {
    /// None, or one that cannot be read.
    None,
    /// `qk_…`; nothing after the prefix is parsed.
    ApiKey(&'h str),
    /// Anything else counts as a session token.
    Session(&'h str),
}

/// The names under which a session may come as a cookie, in the order they are looked for.
#[derive(Clone, Debug)]
pub struct CookieNames([String; 3]);

impl CookieNames {
    /// `__Host-<name>_cell` and `<name>_cell` belong to this cell alone, `<name>` to the whole domain.
    pub fn new(name: &str) -> Self {
        Self([format!("__Host-{name}_cell"), format!("{name}_cell"), name.to_owned()])
    }
}

/// The credential of a request: `Authorization`, else the session cookie. On a navigation by a browser the
/// cookie does not count: a link on somebody's page must not act for who follows it.
pub fn credential<'h>(headers: &'h HeaderMap, cookies: &CookieNames) -> Credential<'h> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return cookie(headers, cookies).map_or(Credential::None, Credential::Session);
    };
    // Of two we could not be sure which one is meant.
    if values.next().is_some() {
        return Credential::Session("");
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
        token => Credential::Session(token),
    }
}

/// The session in the cookies, unless a browser navigates.
fn cookie<'h>(headers: &'h HeaderMap, names: &CookieNames) -> Option<&'h str> {
    if says(headers, "sec-fetch-mode", b"navigate") {
        return None;
    }
    session_cookies(headers, names).next().flatten()
}

/// The session cookies, all `Cookie` headers together, the cell's own first; `None` for one that holds no
/// token: a key in a cookie is not one. None at all on a request from another site.
pub fn session_cookies<'h>(
    headers: &'h HeaderMap,
    names: &CookieNames,
) -> impl Iterator<Item = Option<&'h str>> {
    // By bytes: somebody else's cookie may hold anything.
    let pairs = move || {
        let values =
            headers.get_all(COOKIE).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b';'));
        values.filter_map(|pair| {
            let pair = pair.trim_ascii();
            let end = pair.iter().position(|byte| *byte == b'=')?;
            Some((&pair[..end], &pair[end + 1..])).filter(|(_, value)| !value.is_empty())
        })
    };
    let names = if is_from_elsewhere(headers) { &[] } else { names.0.as_slice() };
    names.iter().filter_map(move |name| {
        let (_, value) = pairs().find(|(given, _)| *given == name.as_bytes())?;
        Some(std::str::from_utf8(value).ok().filter(|token| !token.starts_with("qk_")))
    })
}

/// Whether a browser says that the request was made by a page of another origin. Sites of the same domain
/// are other tenants'.
pub fn is_from_elsewhere(headers: &HeaderMap) -> bool {
    headers.contains_key("sec-fetch-site")
        && !says(headers, "sec-fetch-site", b"same-origin")
        && !says(headers, "sec-fetch-site", b"none")
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
    use super::{CookieNames, Credential, credential, digest};
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
            (b"Bearer QK_live_x", Credential::Session("QK_live_x")),
            (b"Basic cWs6eA==", Credential::Session("Basic cWs6eA==")),
            (b"Bearerqk_live_x", Credential::Session("Bearerqk_live_x")),
            (b"Bearer", Credential::Session("Bearer")),
            (b"Bearer ", Credential::None),
            (b"", Credential::None),
            (b"Bearer qk_\xff", Credential::None),
        ];
        let names = CookieNames::new("queen_session");
        for (header, want) in cases {
            let headers = headers(&[("authorization", header)]);
            assert_eq!(credential(&headers, &names), *want, "{}", String::from_utf8_lossy(header));
        }
        assert_eq!(credential(&HeaderMap::new(), &names), Credential::None);
        let twice = headers(&[("authorization", b"qk_a"), ("authorization", b"qk_b")]);
        assert_eq!(credential(&twice, &names), Credential::Session(""));
    }

    #[test]
    fn cookies() {
        let names = CookieNames::new("queen_session");
        let session = |text| Credential::Session(text);
        let cases: &[(&[(&str, &[u8])], Credential<'_>)] = &[
            (&[("cookie", b"queen_session=a.b.c")], session("a.b.c")),
            (&[("cookie", b"x=1; queen_session=t; y=2")], session("t")),
            (&[("cookie", b"x=1"), ("cookie", b"queen_session=t")], session("t")),
            (&[("cookie", b"queen_session=fleet; queen_session_cell=cell")], session("cell")),
            (&[("cookie", b"queen_session_cell=cell; __Host-queen_session_cell=host")], session("host")),
            (&[("cookie", b"queen_session=first; queen_session=second")], session("first")),
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
    fn the_digest_is_of_the_whole_key() {
        // The contract's fixture (§18).
        let key = format!("qk_dev_{}", "dev".repeat(13));
        assert_eq!(
            hex::encode(digest(&key)),
            "a492a78dbb0a44288f1ff363823b58f4e6fad1367018104e07f7dc118eee781b"
        );
    }
}
