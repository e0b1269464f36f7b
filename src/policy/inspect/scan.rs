//! A walk over JSON text that copies nothing and recurses nowhere.
//!
//! It accepts more than JSON (missing commas, any bytes in strings, text after the end, any depth):
//! what a cell's parser can read must never be unreadable here, or it would be a way round the caps.
//! What only this walk can read is counted and then refused by the cell.

use super::blocks;
use memchr::memchr2;
use std::borrow::Cow;

/// A position in a body.
pub(super) struct Scanner<'b> {
    text: &'b [u8],
    at: usize,
}

/// The text of one value, as it stands in the body.
#[derive(Clone, Copy)]
pub(super) struct Raw<'b>(pub &'b [u8]);

impl<'b> Scanner<'b> {
    /// Stands at the first value; a byte order mark is skipped, as some parsers do.
    pub fn new(body: &'b [u8]) -> Self {
        Self { text: body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body), at: 0 }
    }

    /// The first byte of the next token; `None` at the end.
    pub fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.text.get(self.at)?;
            if byte > b' ' {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    /// Walks an object. `member` gets each name, repeated ones too, and must consume its value.
    /// `None` when here is no object, or it does not end.
    pub fn object(&mut self, mut member: impl FnMut(&mut Self, Raw<'b>) -> Option<()>) -> Option<()> {
        self.eat(b'{')?;
        loop {
            match self.peek()? {
                b'}' => return self.eat(b'}'),
                b',' => self.at += 1,
                b'"' => {
                    let name = self.value()?;
                    self.eat(b':')?;
                    member(self, name)?;
                }
                _ => return None,
            }
        }
    }

    /// Walks an array. `element` must consume each value.
    /// `None` when here is no array, or it does not end.
    pub fn array(&mut self, mut element: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.eat(b'[')?;
        loop {
            match self.peek()? {
                b']' => return self.eat(b']'),
                b',' => self.at += 1,
                _ => element(self)?,
            }
        }
    }

    /// Consumes one value of any kind.
    pub fn value(&mut self) -> Option<Raw<'b>> {
        let first = self.peek()?;
        let start = self.at;
        match first {
            b'"' => self.string()?,
            b'{' | b'[' => self.nested()?,
            b'}' | b']' | b',' | b':' => return None,
            _ => self.scalar(),
        }
        self.text.get(start..self.at).map(Raw)
    }

    fn eat(&mut self, wanted: u8) -> Option<()> {
        if self.peek()? != wanted {
            return None;
        }
        self.at += 1;
        Some(())
    }

    fn string(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            let rest = self.text.get(self.at..)?;
            let found = memchr2(b'"', b'\\', rest)?;
            if rest[found] == b'"' {
                self.at += found + 1;
                return Some(());
            }
            self.at += found + 2;
        }
    }

    fn nested(&mut self) -> Option<()> {
        self.at += blocks::State::default().walk(self.text.get(self.at..)?)?;
        Some(())
    }

    fn scalar(&mut self) {
        let ends = |b: &u8| *b <= b' ' || matches!(b, b',' | b':' | b'"' | b'[' | b']' | b'{' | b'}');
        let rest = self.text.get(self.at..).unwrap_or_default();
        self.at += rest.iter().position(ends).unwrap_or(rest.len());
    }
}

impl<'b> Raw<'b> {
    /// Whether this is the string `plain`, which holds no character that JSON must escape. Cells
    /// compare names after unescaping, so `"queu\u0065"` is `queue`.
    pub fn is(self, plain: &str) -> bool {
        match self.inner() {
            Some(inner) if !inner.contains(&b'\\') => inner == plain.as_bytes(),
            Some(_) => self.text() == plain,
            None => false,
        }
    }

    pub fn is_null(self) -> bool {
        self.0 == b"null"
    }

    pub fn is_string(self) -> bool {
        self.0.first() == Some(&b'"')
    }

    pub fn is_array(self) -> bool {
        self.0.first() == Some(&b'[')
    }

    /// A string's content; of anything else the text as it stands, which tells two values apart at
    /// least as finely as any cell that turns them into names.
    pub fn text(self) -> Cow<'b, str> {
        let Some(inner) = self.inner() else {
            return String::from_utf8_lossy(self.0);
        };
        if inner.contains(&b'\\')
            && let Ok(decoded) = serde_json::from_slice::<String>(self.0)
        {
            return Cow::Owned(decoded);
        }
        String::from_utf8_lossy(inner)
    }

    fn inner(self) -> Option<&'b [u8]> {
        self.0.strip_prefix(b"\"")?.strip_suffix(b"\"")
    }
}
