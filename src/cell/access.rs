//! Who may talk to the cell at all (D16).

use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::errors::KvError;
use crate::domain::secret::Secret;

/// Checks `Authorization: Bearer <secret>`; everybody passes when no secret is set. The scheme is read
/// without case (D17). A repeated header is refused: another reader might have judged the other one.
pub(super) fn check(headers: &HeaderMap, secret: Option<&Secret>) -> Result<(), KvError> {
    let Some(secret) = secret else {
        return Ok(());
    };
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(KvError::Unauthorized);
    };
    let value = value.as_bytes();
    let space = value.iter().position(|&byte| byte == b' ').unwrap_or(value.len());
    let (scheme, token) = value.split_at(space);
    if scheme.eq_ignore_ascii_case(b"bearer") && secret.matches(token.trim_ascii()) {
        Ok(())
    } else {
        Err(KvError::Unauthorized)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn bearer_cases() {
        let secret = Secret::new("s3cret");
        let cases: [(&[&str], bool); 9] = [
            (&["Bearer s3cret"], true),
            (&["bEARER   s3cret"], true),
            (&[], false),
            (&["Bearer"], false),
            (&["Bearer "], false),
            (&["Bearer s3cre"], false),
            (&["Bearer s3cret extra"], false),
            (&["Basic s3cret"], false),
            (&["Bearer s3cret", "Bearer s3cret"], false),
        ];
        for (values, allowed) in cases {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_static(value));
            }
            assert_eq!(check(&headers, Some(&secret)).is_ok(), allowed, "{values:?}");
            assert!(check(&headers, None).is_ok());
        }
    }
}
