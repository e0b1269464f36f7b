//! Session tokens: which keys sign and verify them, and what one says (proxy contract §6, D7).

use crate::{
    control::now_s,
    domain::{
        ids::{ClusterId, UserId},
        scopes::Role,
        secret::Secret,
        session::LONGEST_SESSION_S,
    },
};
use ed25519_dalek::{
    SigningKey, VerifyingKey,
    pkcs8::{DecodePrivateKey, DecodePublicKey},
};
use jsonwebtoken::{
    Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, encode, errors::ErrorKind,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fmt;
use uuid::Uuid;

/// Longest token that is looked at, in bytes.
const MAX_TOKEN: usize = 8 * 1024;
/// Shortest HS256 secret, in bytes (RFC 7518 §3.2).
const MIN_SECRET: usize = 32;
/// Longest `jti`, in bytes: it is a key of the deny-list and the payload of its notification.
const MAX_JTI: usize = 512;
/// How far our clock and the minter's may be apart, in seconds (D7).
pub const LEEWAY_S: u64 = 10;

/// What the operator gave us to sign and verify with.
#[derive(Clone, Debug, Default)]
pub struct KeyMaterial {
    /// `iss` of tokens minted here, and the only one accepted.
    pub issuer: String,
    /// The `aud` we answer to; none: it is not checked.
    pub audience: Option<String>,
    /// Ed25519 private key, PKCS#8 PEM.
    pub ed25519_private: Option<Secret>,
    /// Ed25519 public key, PEM: verify only.
    pub ed25519_public: Option<String>,
    /// A public key from before a rotation, still accepted.
    pub ed25519_previous: Option<String>,
    /// HS256 secret.
    pub hmac_secret: Option<Secret>,
}

/// Why the material is not usable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// The private key.
    #[error("QUEEN_PROXY_JWT_ED25519_PEM: not an Ed25519 private key in PKCS#8 PEM")]
    PrivateKey,
    /// The public key.
    #[error("QUEEN_PROXY_JWT_ED25519_PUB_PEM: not an Ed25519 public key in PEM")]
    PublicKey,
    /// The public key of before.
    #[error("QUEEN_PROXY_JWT_ED25519_PUB_PEM_PREVIOUS: not an Ed25519 public key in PEM")]
    PreviousKey,
    /// The secret.
    #[error("QUEEN_PROXY_JWT_SECRET: an HS256 secret has at least 32 bytes; a shorter one can be guessed")]
    Secret,
    /// A public key of before where nothing of Ed25519 is configured.
    #[error(
        "QUEEN_PROXY_JWT_ED25519_PUB_PEM_PREVIOUS: goes with Ed25519 keys, not with an HS256 secret alone"
    )]
    PreviousWithoutEd25519,
}

/// Why a token is no session. For the log; the client hears one answer for all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenError {
    /// Longer than any of ours.
    TooLong,
    /// Not signed by a key of ours, with the algorithm of that key.
    Signature,
    /// Past its `exp`.
    Expired,
    /// A claim is missing or wrong; also an unreadable token.
    Claims,
}

/// A verified token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    /// Whose it is.
    pub user: UserId,
    /// Its id in the deny-list.
    pub jti: String,
    /// Its end, in seconds of the epoch.
    pub expires: u64,
    /// The only cluster it is good for, when it names one. Its role is not taken from the token:
    /// what a user may do is what `cluster_roles` says now.
    pub cluster: Option<ClusterId>,
}

/// Signs and verifies tokens.
pub struct SessionKeys {
    algorithm: Algorithm,
    issuer: String,
    audience: Option<String>,
    signer: Option<(Header, EncodingKey)>,
    verifiers: Vec<DecodingKey>,
    jwks: String,
}

impl fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionKeys({:?}, mint: {})", self.algorithm, self.signer.is_some())
    }
}

#[derive(Serialize, Deserialize)]
struct Claims {
    sub: Uuid,
    iss: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iat: Option<u64>,
    exp: u64,
    jti: String,
    role: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cluster: Option<String>,
    #[serde(default, skip_serializing)]
    aud: Audiences,
}

#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
    #[default]
    None,
}

impl SessionKeys {
    /// Chooses the signer: an Ed25519 private key, else an HS256 secret, else a public key that only
    /// verifies, else none at all.
    pub fn new(material: &KeyMaterial) -> Result<Option<Self>, KeyError> {
        let public = |pem: &str, error| VerifyingKey::from_public_key_pem(pem.trim()).map_err(|_| error);
        let previous =
            material.ed25519_previous.as_deref().map(|pem| public(pem, KeyError::PreviousKey)).transpose()?;
        if let Some(pem) = &material.ed25519_private {
            let key = SigningKey::from_pkcs8_pem(pem.expose().trim()).map_err(|_| KeyError::PrivateKey)?;
            return Self::ed25519(material, Some(&key), key.verifying_key(), previous).map(Some);
        }
        if let Some(secret) = &material.hmac_secret {
            if previous.is_some() {
                return Err(KeyError::PreviousWithoutEd25519);
            }
            if material.ed25519_public.is_some() {
                tracing::warn!(
                    "both an HS256 secret and a public key are set: the secret signs and verifies"
                );
            }
            return Self::hmac(material, secret).map(Some);
        }
        match &material.ed25519_public {
            Some(pem) => Self::ed25519(material, None, public(pem, KeyError::PublicKey)?, previous).map(Some),
            None if previous.is_some() => Err(KeyError::PreviousWithoutEd25519),
            None => Ok(None),
        }
    }

    fn ed25519(
        material: &KeyMaterial,
        private: Option<&SigningKey>,
        public: VerifyingKey,
        previous: Option<VerifyingKey>,
    ) -> Result<Self, KeyError> {
        use ed25519_dalek::pkcs8::EncodePrivateKey;
        let mut jwks = Vec::new();
        let mut verifiers = Vec::new();
        for key in [Some(public), previous].into_iter().flatten() {
            let x = base64url(key.as_bytes());
            verifiers.push(DecodingKey::from_ed_components(&x).map_err(|_| KeyError::PublicKey)?);
            jwks.push(json!({
                "kty": "OKP", "crv": "Ed25519", "x": x, "kid": kid(&key), "alg": "EdDSA", "use": "sig",
            }));
        }
        let signer = match private {
            None => None,
            Some(key) => {
                let mut header = Header::new(Algorithm::EdDSA);
                header.kid = Some(kid(&public));
                let der = key.to_pkcs8_der().map_err(|_| KeyError::PrivateKey)?;
                Some((header, EncodingKey::from_ed_der(der.as_bytes())))
            }
        };
        Ok(Self {
            algorithm: Algorithm::EdDSA,
            issuer: material.issuer.clone(),
            audience: material.audience.clone(),
            signer,
            verifiers,
            jwks: json!({ "keys": jwks }).to_string(),
        })
    }

    fn hmac(material: &KeyMaterial, secret: &Secret) -> Result<Self, KeyError> {
        let bytes = secret.expose().as_bytes();
        if bytes.len() < MIN_SECRET || bytes.trim_ascii().is_empty() {
            return Err(KeyError::Secret);
        }
        let mut header = Header::new(Algorithm::HS256);
        header.kid = Some("hs".to_owned());
        Ok(Self {
            algorithm: Algorithm::HS256,
            issuer: material.issuer.clone(),
            audience: material.audience.clone(),
            signer: Some((header, EncodingKey::from_secret(bytes).map_err(|_| KeyError::Secret)?)),
            verifiers: vec![DecodingKey::from_secret(bytes).map_err(|_| KeyError::Secret)?],
            jwks: r#"{"keys":[]}"#.to_owned(),
        })
    }

    /// Whether tokens can be minted, and not only verified.
    pub fn can_mint(&self) -> bool {
        self.signer.is_some()
    }

    /// The public keys as a JSON Web Key Set; empty for HS256.
    pub fn jwks(&self) -> &str {
        &self.jwks
    }

    /// A fresh token; `None` where this proxy only verifies.
    pub fn mint(
        &self,
        user: UserId,
        cluster: Option<ClusterId>,
        now: u64,
        ttl_s: u64,
    ) -> Option<(String, Session)> {
        let (header, key) = self.signer.as_ref()?;
        let session = Session { user, jti: Uuid::new_v4().to_string(), expires: now + ttl_s, cluster };
        let claims = Claims {
            sub: user.0,
            iss: self.issuer.clone(),
            iat: Some(now),
            exp: session.expires,
            jti: session.jti.clone(),
            // A placeholder: the role is looked up with each request.
            role: "viewer".to_owned(),
            cluster: cluster.map(|id| id.to_string()),
            aud: Audiences::None,
        };
        Some((encode(header, &claims, key).ok()?, session))
    }

    /// Verifies signature and claims. The algorithm is the one of our key, whatever the token says.
    pub fn verify(&self, token: &str) -> Result<Session, TokenError> {
        if token.len() > MAX_TOKEN {
            return Err(TokenError::TooLong);
        }
        let mut validation = Validation::new(self.algorithm);
        validation.leeway = LEEWAY_S;
        validation.validate_aud = false;
        validation.validate_nbf = false;
        validation.set_issuer(&[&self.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "sub"]);
        let mut failure = TokenError::Signature;
        for key in &self.verifiers {
            match decode::<Claims>(token, key, &validation) {
                Ok(token) => return self.session(&token.claims),
                Err(error) => match error.kind() {
                    ErrorKind::InvalidSignature => {}
                    ErrorKind::InvalidAlgorithm => return Err(TokenError::Signature),
                    ErrorKind::ExpiredSignature => return Err(TokenError::Expired),
                    _ => failure = TokenError::Claims,
                },
            }
        }
        Err(failure)
    }

    fn session(&self, claims: &Claims) -> Result<Session, TokenError> {
        let jti = &claims.jti;
        // Plain text only: the deny-list has to know it by the very same bytes.
        let plain = jti.bytes().all(|byte| byte.is_ascii_graphic());
        if jti.is_empty() || jti.len() > MAX_JTI || !plain || Role::parse(&claims.role).is_none() {
            return Err(TokenError::Claims);
        }
        // No revocation would be held for so long.
        if claims.exp > now_s().saturating_add(LONGEST_SESSION_S + LEEWAY_S) {
            return Err(TokenError::Claims);
        }
        if !self.is_for_us(&claims.aud) {
            return Err(TokenError::Claims);
        }
        let cluster = match claims.cluster.as_deref().map(str::trim) {
            None | Some("") => None,
            Some(id) => Some(ClusterId(Uuid::parse_str(id).map_err(|_| TokenError::Claims)?)),
        };
        Ok(Session { user: UserId(claims.sub), jti: jti.to_owned(), expires: claims.exp, cluster })
    }

    /// A token without an audience is for everybody; otherwise one entry has to be ours.
    fn is_for_us(&self, audiences: &Audiences) -> bool {
        let Some(ours) = &self.audience else { return true };
        match audiences {
            Audiences::None => true,
            Audiences::One(one) => one.is_empty() || one.eq_ignore_ascii_case(ours),
            Audiences::Many(many) => many.is_empty() || many.iter().any(|one| one.eq_ignore_ascii_case(ours)),
        }
    }
}

/// The first 16 bytes of the sha256 of the raw public key, in hexadecimal.
fn kid(key: &VerifyingKey) -> String {
    hex::encode(&Sha256::digest(key.as_bytes())[..16])
}

fn base64url(bytes: &[u8]) -> String {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    URL_SAFE_NO_PAD.encode(bytes)
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
