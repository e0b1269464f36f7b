//! Who is asking: credential parsing and API-key authentication (proxy contract §5).

pub mod session;

use crate::{
    control::{ControlPlane, KeyDigest},
    domain::{
        cluster::{Cluster, Principal},
        lookup::Lookup,
    },
};
use http::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

/// A credential as presented.
#[derive(PartialEq, Eq, Debug)]
pub enum Credential<'h> {
    /// None, or one that cannot be read.
    None,
    /// `qk_…`; nothing after the prefix is parsed.
    ApiKey(&'h str),
    /// Anything else counts as a session token, which this version does not mint or verify.
    Session(&'h str),
}

/// Why a caller is not who it has to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AuthError {
    /// No credential.
    Missing,
    /// No such key, or a revoked one.
    UnknownKey,
    /// The database did not answer and nothing is known of the key.
    Unverifiable,
    /// Not a key.
    Invalid,
    /// A key of another cluster.
    Mismatch,
}

/// Reads `Authorization`. A `Bearer` scheme in any case is taken off (D17); a bare key works too.
/// Repeated headers are no credential we could be sure of.
pub fn credential(headers: &HeaderMap) -> Credential<'_> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Credential::None;
    };
    if values.next().is_some() {
        return Credential::Session("");
    }
    let Ok(text) = value.to_str() else {
        return Credential::None;
    };
    let text = match text.split_at_checked(7) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer ") => rest,
        _ => text,
    };
    match text.trim() {
        "" => Credential::None,
        key if key.starts_with("qk_") => Credential::ApiKey(key),
        token => Credential::Session(token),
    }
}

/// What a key is looked up by: the sha256 of all of it.
pub fn digest(key: &str) -> KeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

/// Finds out who is asking on a host that names `cluster`.
pub async fn authenticate(
    headers: &HeaderMap,
    cluster: &Cluster,
    control: &ControlPlane,
) -> Result<Principal, AuthError> {
    let key = match credential(headers) {
        Credential::None => return Err(AuthError::Missing),
        Credential::Session(_) => return Err(AuthError::Invalid),
        Credential::ApiKey(key) => key,
    };
    match control.key(digest(key)).await {
        Lookup::Found(key) if key.cluster == cluster.id => Ok(Principal::ApiKey(key)),
        Lookup::Found(_) => Err(AuthError::Mismatch),
        Lookup::Absent => Err(AuthError::UnknownKey),
        Lookup::Unavailable => Err(AuthError::Unverifiable),
    }
}

#[cfg(test)]
mod tests {
    use super::{Credential, credential, digest};
    use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};

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
        for (header, want) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_bytes(header).unwrap());
            assert_eq!(credential(&headers), *want, "{}", String::from_utf8_lossy(header));
        }
        assert_eq!(credential(&HeaderMap::new()), Credential::None);
        let mut twice = HeaderMap::new();
        for key in ["qk_a", "qk_b"] {
            twice.append(AUTHORIZATION, HeaderValue::from_static(key));
        }
        assert_eq!(credential(&twice), Credential::Session(""));
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
