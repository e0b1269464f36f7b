//! `Host` → slug (proxy contract §4).

use crate::domain::slug::Slug;

/// The canonical form of a `Host`: trimmed, without a numeric port, without trailing dots. One
/// function for everybody who compares hosts, so that no spelling slips past one of them.
pub fn canonical_host(host: &str) -> &str {
    let host = host.trim();
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    host.trim_end_matches('.')
}

/// The cluster a `Host` names: its first label, when that is a DNS label and the rest could be part
/// of a host name at all.
pub fn slug_of_host(host: &str) -> Option<Slug> {
    let canonical = canonical_host(host);
    let is_of_a_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    if !canonical.bytes().all(is_of_a_name) {
        return None;
    }
    let label = canonical.split_once('.').map_or(canonical, |(first, _)| first);
    Slug::parse(label)
}

#[cfg(test)]
mod tests {
    use super::slug_of_host;

    #[test]
    fn hosts_and_their_slugs() {
        let long = format!("{}.q.example", "a".repeat(64));
        let cases: &[(&str, Option<&str>)] = &[
            ("Acme.eu1.x:6711", Some("acme")),
            ("acme.", Some("acme")),
            ("acme", Some("acme")),
            ("ACME-PROD.q.example", Some("acme-prod")),
            ("acme-prod.q.example:443", Some("acme-prod")),
            ("acme-prod.q.example.", Some("acme-prod")),
            ("acme-prod.q.example.:443", Some("acme-prod")),
            ("acme-prod.q.example..", Some("acme-prod")),
            ("  acme.x ", Some("acme")),
            ("localhost:6711", Some("localhost")),
            ("127.0.0.1", Some("127")),
            ("[::1]:6711", None),
            ("weird:notaport.x", None),
            ("", None),
            (".", None),
            (":6711", None),
            (".q.example", None),
            ("аcme.q.example", None),
            (&long, None),
            ("acme_prod.x", None),
            ("acme/evil", None),
            ("user@acme.x", None),
            ("acme.x, globex.x", None),
            ("acme.x/evil", None),
            ("acme.x?q", None),
            ("acme.é", None),
            ("acme.x y", None),
            ("acme.a_b.x", Some("acme")),
            ("acme:", Some("acme")),
        ];
        for (host, want) in cases {
            assert_eq!(slug_of_host(host).as_ref().map(crate::domain::slug::Slug::as_str), *want, "{host:?}");
        }
    }
}
