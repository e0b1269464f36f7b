//! The matrix of tokens: what is accepted, and that nothing else is (`notes/cases.md` 31).

use super::{KeyError, KeyMaterial, SessionKeys, TokenError, base64url};
use crate::domain::{ids::UserId, secret::Secret, session::LONGEST_SESSION_S};
use ed25519_dalek::{
    SigningKey,
    pkcs8::{EncodePrivateKey, EncodePublicKey, spki::der::pem::LineEnding},
};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

const SECRET: &str = "a secret of the tests, long enough for HS256";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

struct Pair {
    private: String,
    public: String,
    key: SigningKey,
}

fn pair(seed: u8) -> Pair {
    let key = SigningKey::from_bytes(&[seed; 32]);
    Pair {
        private: key.to_pkcs8_pem(LineEnding::LF).unwrap().to_string(),
        public: key.verifying_key().to_public_key_pem(LineEnding::LF).unwrap(),
        key,
    }
}

fn material() -> KeyMaterial {
    KeyMaterial { issuer: "queen-proxy".to_owned(), ..KeyMaterial::default() }
}

fn ed25519(pair: &Pair) -> KeyMaterial {
    KeyMaterial { ed25519_private: Some(Secret::new(pair.private.clone())), ..material() }
}

fn hmac() -> KeyMaterial {
    KeyMaterial { hmac_secret: Some(Secret::new(SECRET)), ..material() }
}

fn keys(material: &KeyMaterial) -> SessionKeys {
    SessionKeys::new(material).unwrap().unwrap()
}

fn claims() -> Value {
    json!({
        "sub": Uuid::from_u128(7), "iss": "queen-proxy", "iat": now(), "exp": now() + 60,
        "jti": "token-1", "role": "viewer",
    })
}

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

fn without(name: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().unwrap().remove(name);
    claims
}

fn signed(claims: &Value) -> String {
    encode(&Header::new(Algorithm::HS256), claims, &EncodingKey::from_secret(SECRET.as_bytes()).unwrap())
        .unwrap()
}

#[test]
fn claims_are_judged_one_by_one() {
    let audience = KeyMaterial { audience: Some("acme.example".to_owned()), ..hmac() };
    let keys = keys(&audience);
    let good = [
        claims(),
        with("exp", json!(now() - 5)), // within the leeway
        with("exp", json!(now() + LONGEST_SESSION_S)),
        with("cluster", json!("")),
        with("cluster", json!("  ")),
        with("cluster", Value::Null),
        with("cluster", json!(Uuid::from_u128(9))),
        with("aud", json!("acme.example")),
        with("aud", json!("ACME.example")),
        with("aud", json!("")),
        with("aud", json!([])),
        with("aud", json!(["other", "acme.example"])),
        with("nbf", json!(now() + 3600)),
        with("jti", json!("any-text.of+theirs/")),
        with("role", json!("admin")),
        with("extra", json!({"x": 1})),
        without("iat"),
    ];
    for claims in good {
        assert!(keys.verify(&signed(&claims)).is_ok(), "{claims}");
    }
    let bad = [
        (with("exp", json!(now() - 15)), TokenError::Expired),
        (with("exp", json!((now() + 60).to_string())), TokenError::Claims),
        (with("exp", json!(-1)), TokenError::Claims),
        (with("exp", json!(now() + LONGEST_SESSION_S + 60)), TokenError::Claims),
        (with("exp", json!(u64::MAX)), TokenError::Claims),
        (with("exp", Value::Null), TokenError::Claims),
        (without("exp"), TokenError::Claims),
        (with("iss", json!("someone")), TokenError::Claims),
        (with("iss", json!("Queen-Proxy")), TokenError::Claims),
        (with("iss", json!(["queen-proxy", "someone"])), TokenError::Claims),
        (without("iss"), TokenError::Claims),
        (with("sub", json!("root")), TokenError::Claims),
        (without("sub"), TokenError::Claims),
        (with("jti", json!("")), TokenError::Claims),
        (with("jti", json!("  ")), TokenError::Claims),
        (with("jti", json!("a b")), TokenError::Claims),
        (with("jti", json!("a\u{0}b")), TokenError::Claims),
        (with("jti", json!("é")), TokenError::Claims),
        (with("jti", json!("x".repeat(513))), TokenError::Claims),
        (with("jti", json!(7)), TokenError::Claims),
        (without("jti"), TokenError::Claims),
        (with("role", json!("owner")), TokenError::Claims),
        (with("role", json!("Admin")), TokenError::Claims),
        (without("role"), TokenError::Claims),
        (with("cluster", json!("acme-prod")), TokenError::Claims),
        (with("cluster", json!(7)), TokenError::Claims),
        (with("aud", json!("other")), TokenError::Claims),
        (with("aud", json!(["other"])), TokenError::Claims),
    ];
    for (claims, error) in bad {
        assert_eq!(keys.verify(&signed(&claims)), Err(error), "{claims}");
    }
}

#[test]
fn nothing_but_our_key_with_its_algorithm_signs() {
    let (ours, theirs) = (pair(1), pair(2));
    let ed = keys(&ed25519(&ours));
    let hs = keys(&hmac());
    let by = |algorithm, key: &EncodingKey| encode(&Header::new(algorithm), &claims(), key).unwrap();
    let ed_key = |pair: &Pair| EncodingKey::from_ed_der(pair.key.to_pkcs8_der().unwrap().as_bytes());
    let secret = |bytes: &[u8]| EncodingKey::from_secret(bytes).unwrap();
    assert!(ed.verify(&by(Algorithm::EdDSA, &ed_key(&ours))).is_ok());
    assert!(hs.verify(&by(Algorithm::HS256, &secret(SECRET.as_bytes()))).is_ok());

    let unsigned = |header: Value| {
        let part = |value: &Value| base64url(value.to_string().as_bytes());
        format!("{}.{}.", part(&header), part(&claims()))
    };
    let good = by(Algorithm::EdDSA, &ed_key(&ours));
    let mut forged: Vec<String> = vec![
        unsigned(json!({"alg": "none", "typ": "JWT"})),
        unsigned(json!({"alg": "None"})),
        unsigned(json!({"alg": "EdDSA"})),
        unsigned(json!({"alg": "HS256"})),
        unsigned(json!({})),
        // The public key as an HMAC secret, in each form somebody may hold it.
        by(Algorithm::HS256, &secret(ours.public.as_bytes())),
        by(Algorithm::HS256, &secret(ours.public.trim().as_bytes())),
        by(Algorithm::HS256, &secret(ours.key.verifying_key().as_bytes())),
        by(Algorithm::HS512, &secret(SECRET.as_bytes())),
        by(Algorithm::HS384, &secret(SECRET.as_bytes())),
        by(Algorithm::EdDSA, &ed_key(&theirs)),
        String::new(),
        "x".to_owned(),
        "..".to_owned(),
        "a.b.c".to_owned(),
        good.rsplit_once('.').unwrap().0.to_owned(),
        format!("{good}.x"),
        format!("{good}A"),
        "x".repeat(100_000),
    ];
    // Another payload under a good signature.
    let parts: Vec<&str> = good.split('.').collect();
    let other = base64url(with("role", json!("admin")).to_string().as_bytes());
    forged.push(format!("{}.{other}.{}", parts[0], parts[2]));
    for token in &forged {
        assert!(ed.verify(token).is_err(), "{}", &token[..token.len().min(200)]);
        assert!(hs.verify(token).is_err(), "{}", &token[..token.len().min(200)]);
    }
    assert!(hs.verify(&good).is_err() && ed.verify(&signed(&claims())).is_err(), "the other's kind");
    assert_eq!(ed.verify(&"x".repeat(9000)), Err(TokenError::TooLong));
}

#[test]
fn minted_tokens_verify_here_with_the_public_key_alone_and_through_a_rotation() {
    let (old, new) = (pair(1), pair(2));
    let user = UserId(Uuid::from_u128(3));
    let (token, session) = keys(&ed25519(&old)).mint(user, None, now(), 60).unwrap();
    assert_eq!(keys(&ed25519(&old)).verify(&token).unwrap(), session);
    let verify_only = keys(&KeyMaterial { ed25519_public: Some(old.public.clone()), ..material() });
    assert_eq!(verify_only.verify(&token).unwrap(), session);
    assert!(!verify_only.can_mint() && verify_only.mint(user, None, now(), 60).is_none());
    let rotated = keys(&KeyMaterial { ed25519_previous: Some(old.public.clone()), ..ed25519(&new) });
    assert_eq!(rotated.verify(&token).unwrap(), session);
    let (newer, _) = rotated.mint(user, None, now(), 60).unwrap();
    assert!(rotated.verify(&newer).is_ok());
    assert_eq!(verify_only.verify(&newer), Err(TokenError::Signature));
    assert_eq!(keys(&ed25519(&new)).verify(&token), Err(TokenError::Signature));

    let published: Value = serde_json::from_str(rotated.jwks()).unwrap();
    let published = published["keys"].as_array().unwrap();
    assert_eq!(published.len(), 2);
    assert_eq!(published[1]["x"], base64url(old.key.verifying_key().as_bytes()));
    assert_eq!(published[0]["kid"].as_str().unwrap().len(), 32);
    assert_eq!(keys(&hmac()).jwks(), r#"{"keys":[]}"#);
    let (token, session) =
        keys(&hmac()).mint(user, Some(crate::domain::ids::ClusterId(Uuid::nil())), now(), 60).unwrap();
    assert_eq!(keys(&hmac()).verify(&token).unwrap(), session);
}

#[test]
fn the_choice_of_the_signer() {
    let (a, b) = (pair(1), pair(2));
    let both = KeyMaterial { hmac_secret: Some(Secret::new(SECRET)), ..ed25519(&a) };
    assert_eq!(keys(&both).algorithm, Algorithm::EdDSA);
    let secret_and_public = KeyMaterial { ed25519_public: Some(b.public.clone()), ..hmac() };
    assert_eq!(keys(&secret_and_public).algorithm, Algorithm::HS256);
    assert!(SessionKeys::new(&material()).unwrap().is_none());
    let bad = |change: fn(&mut KeyMaterial)| {
        let mut material = material();
        change(&mut material);
        SessionKeys::new(&material).unwrap_err()
    };
    assert_eq!(bad(|m| m.ed25519_private = Some(Secret::new("x"))), KeyError::PrivateKey);
    assert_eq!(bad(|m| m.ed25519_private = Some(Secret::new(pair(1).public))), KeyError::PrivateKey);
    assert_eq!(bad(|m| m.ed25519_public = Some("x".to_owned())), KeyError::PublicKey);
    assert_eq!(bad(|m| m.ed25519_public = Some(pair(1).private)), KeyError::PublicKey);
    assert_eq!(bad(|m| m.hmac_secret = Some(Secret::new("x".repeat(31)))), KeyError::Secret);
    assert_eq!(bad(|m| m.hmac_secret = Some(Secret::new(" ".repeat(40)))), KeyError::Secret);
    assert_eq!(bad(|m| m.ed25519_previous = Some("x".to_owned())), KeyError::PreviousKey);
    assert_eq!(bad(|m| m.ed25519_previous = Some(pair(1).public)), KeyError::PreviousWithoutEd25519);
    for error in [KeyError::PrivateKey, KeyError::PublicKey, KeyError::Secret] {
        assert!(!error.to_string().contains(SECRET));
    }
}
