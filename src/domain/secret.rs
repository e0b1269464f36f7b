//! Text that must never reach a log, an error or an answer.

use std::fmt;

use subtle::ConstantTimeEq;

/// A password, token or shared secret.
///
/// There is no `Display` and no equality operator on purpose: the first would end up in a log line, the
/// second would compare in a time that depends on the content.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`. Nothing is checked; an empty secret is the caller's mistake to refuse.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for handing it to whoever needs it and for nothing else.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether `other` is this secret. The time taken depends on the two lengths, never on the content.
    pub fn matches(&self, other: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(other).into()
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::Secret;

    #[test]
    fn debug_hides_the_text() {
        assert_eq!(format!("{:?}", Some(Secret::new("hunter2"))), "Some(Secret(***))");
    }

    #[test]
    fn only_the_same_bytes_match() {
        let secret = Secret::new("hunter2");
        for (other, expected) in [
            (&b"hunter2"[..], true),
            (b"hunter3", false),
            (b"hunter", false),
            (b"hunter22", false),
            (b"", false),
        ] {
            assert_eq!(secret.matches(other), expected, "{other:?}");
        }
        assert_eq!(secret.expose(), "hunter2");
    }
}
