//! Slugs: DNS labels that name tenants and clusters.

use std::fmt;

/// A cluster's slug, which is its subdomain: 1–63 of `[a-z0-9-]`, first and last alphanumeric
/// (proxy contract §1). Kept inline, so that looking one up allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slug {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl Slug {
    const MAX: usize = 63;

    /// Lower-cases `label` and accepts it when it is a DNS label.
    pub fn parse(label: &str) -> Option<Self> {
        let raw = label.as_bytes();
        if raw.is_empty() || raw.len() > Self::MAX {
            return None;
        }
        let mut bytes = [0; Self::MAX];
        for (to, from) in bytes.iter_mut().zip(raw) {
            let lower = from.to_ascii_lowercase();
            if !(lower.is_ascii_lowercase() || lower.is_ascii_digit() || lower == b'-') {
                return None;
            }
            *to = lower;
        }
        if raw[0] == b'-' || raw[raw.len() - 1] == b'-' {
            return None;
        }
        // At most 63, checked above.
        #[allow(clippy::cast_possible_truncation)]
        Some(Self { bytes, len: raw.len() as u8 })
    }

    /// The slug as text.
    pub fn as_str(&self) -> &str {
        // Only ASCII is ever stored.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Display for Slug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Slug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slug({})", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::Slug;

    #[test]
    fn only_dns_labels_are_slugs() {
        let longest = "a".repeat(63);
        let too_long = "a".repeat(64);
        let cases: &[(&str, Option<&str>)] = &[
            ("acme", Some("acme")),
            ("Acme-Prod", Some("acme-prod")),
            ("0", Some("0")),
            ("127", Some("127")),
            (&longest, Some(&longest)),
            (&too_long, None),
            ("", None),
            ("-a", None),
            ("a-", None),
            ("a_b", None),
            ("a.b", None),
            ("аcme", None), // the first letter is Cyrillic
            ("[::1]", None),
            ("weird:notaport", None),
        ];
        for (input, want) in cases {
            assert_eq!(Slug::parse(input).as_ref().map(Slug::as_str), *want, "{input:?}");
        }
    }
}
