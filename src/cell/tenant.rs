//! Which tenant a request acts for (KV contract, section 7.1).

use http::HeaderMap;
use uuid::Uuid;

use super::errors::KvError;

/// Header that names the tenant, set by the proxy and by nobody else.
const HEADER: &str = "x-queen-tenant";

/// Tenant of a request that names none: the one every row had before tenancy existed.
pub(super) const DEFAULT_TENANT: Uuid = Uuid::from_u128(1);

/// Resolves the tenant. With `tenancy_header` off the header is not even read. A repeated header is refused
/// like a malformed one: two readers could each pick another.
pub(super) fn of(headers: &HeaderMap, tenancy_header: bool) -> Result<Uuid, KvError> {
    if !tenancy_header {
        return Ok(DEFAULT_TENANT);
    }
    let mut values = headers.get_all(HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(DEFAULT_TENANT);
    };
    if values.next().is_some() {
        return Err(KvError::BadTenant);
    }
    let text = value.to_str().map_err(|_| KvError::BadTenant)?.trim();
    if text.is_empty() {
        return Ok(DEFAULT_TENANT);
    }
    // `Uuid` also reads forms without hyphens, in braces and as a URN; all have another length.
    if text.len() != 36 {
        return Err(KvError::BadTenant);
    }
    Uuid::try_parse(text).map_err(|_| KvError::BadTenant)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(HEADER, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn resolution() {
        let other = Uuid::from_u128(0xabcd_ef01_2345_6789_abcd_ef01_2345_6789);
        let cases: [(&[&[u8]], Option<Uuid>); 12] = [
            (&[], Some(DEFAULT_TENANT)),
            (&[b""], Some(DEFAULT_TENANT)),
            (&[b"  "], Some(DEFAULT_TENANT)),
            (&[b"abcdef01-2345-6789-abcd-ef0123456789"], Some(other)),
            (&[b"  ABCDEF01-2345-6789-ABCD-EF0123456789 "], Some(other)),
            (&[b"nope"], None),
            (&[b"abcdef0123456789abcdef0123456789"], None),
            (&[b"{abcdef01-2345-6789-abcd-ef0123456789}"], None),
            (&[b"abcdef01-2345-6789-abcd-ef012345678g"], None),
            (&[b"abcdef0123456789abcdef0123456789----"], None),
            (&[b"\xc3\xa9bcdef01-2345-6789-abcd-ef012345678"], None),
            (&[b"abcdef01-2345-6789-abcd-ef0123456789", b""], None),
        ];
        for (values, expected) in cases {
            assert_eq!(of(&headers(values), true).ok(), expected, "{values:?}");
        }
    }

    #[test]
    fn header_is_not_read_without_tenancy() {
        assert_eq!(of(&headers(&[b"nope"]), false).ok(), Some(DEFAULT_TENANT));
    }
}
