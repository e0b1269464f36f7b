//! Where a head and where chunks end, so that Pingora is given no byte of the request behind them. What it has of that
//! it would keep for itself: nobody could tell how long that head takes, or that it is too large. A cut at a wrong place
//! does no harm: Pingora reads on.

/// How far a head is.
#[derive(Clone, Copy, Default)]
pub(super) enum Head {
    #[default]
    WithinLine,
    LineBegins,
    /// A line that has begun with a carriage return.
    Return,
}

impl Head {
    /// The bytes up to an empty line and with it, or all.
    pub fn part(&mut self, bytes: &[u8]) -> usize {
        for (at, byte) in bytes.iter().enumerate() {
            *self = match (*self, byte) {
                (Self::LineBegins | Self::Return, b'\n') => {
                    *self = Self::WithinLine;
                    return at + 1;
                }
                (_, b'\n') => Self::LineBegins,
                (Self::LineBegins, b'\r') => Self::Return,
                _ => Self::WithinLine,
            };
        }
        bytes.len()
    }
}

/// How far a body in chunks is (RFC 9112 §7.1).
#[derive(Clone, Copy, Default)]
pub(super) enum Chunks {
    #[default]
    SizeBegins,
    Size(u64),
    /// Behind the digits, up to the line's end.
    Extension(u64),
    SizeEnds(u64),
    /// Bytes of data, with the line end behind them.
    Data(u64),
    TrailerBegins,
    Trailer,
    /// A trailer that has begun with a carriage return.
    Return,
    /// It has ended, or Pingora is about to refuse it.
    Over,
}

impl Chunks {
    /// The bytes up to the end of the body, or all. A size without a digit becomes one that Pingora refuses: it would
    /// take it for zero, which others do not.
    pub fn part(&mut self, bytes: &mut [u8]) -> usize {
        let mut at = 0;
        while let Some(byte) = bytes.get_mut(at) {
            if let Self::Data(left) = self {
                let skipped = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len() - at);
                *left -= skipped as u64;
                at += skipped;
                if *left == 0 {
                    *self = Self::SizeBegins;
                }
                continue;
            }
            at += 1;
            let digit = char::from(*byte).to_digit(16).map(u64::from);
            *self = match (*self, *byte, digit) {
                (Self::SizeBegins, _, Some(digit)) => Self::Size(digit),
                (Self::SizeBegins, ..) => {
                    *byte = b'!';
                    Self::Over
                }
                (Self::Size(size), _, Some(digit)) if size >> 60 == 0 => Self::Size(size << 4 | digit),
                (Self::Size(size) | Self::Extension(size), b'\r', _) => Self::SizeEnds(size),
                (Self::Size(size), b';' | b' ' | b'\t', _) | (Self::Extension(size), ..) => {
                    Self::Extension(size)
                }
                (Self::SizeEnds(0) | Self::TrailerBegins | Self::Trailer, b'\n', _) => Self::TrailerBegins,
                (Self::SizeEnds(size), b'\n', _) => Self::Data(size.saturating_add(2)),
                (Self::TrailerBegins, b'\r', _) => Self::Return,
                (Self::Return, b'\n', _) => {
                    *self = Self::Over;
                    return at;
                }
                (Self::TrailerBegins | Self::Trailer, ..) => Self::Trailer,
                _ => Self::Over,
            };
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::{Chunks, Head};

    const BEHIND: &[u8] = b"GET / HTTP/1.1\r\n";

    /// What is taken of bytes that come in pieces of this size, until some are left over.
    fn cut(whole: &[u8], mut part: impl FnMut(&mut [u8]) -> usize, piece: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in whole.chunks(piece) {
            let mut piece = piece.to_vec();
            let count = part(&mut piece);
            out.extend(&piece[..count]);
            if count < piece.len() {
                break;
            }
        }
        out
    }

    #[test]
    fn a_head_ends_with_an_empty_line() {
        for head in
            ["GET / HTTP/1.1\r\na: b\r\n\r\n", "GET / HTTP/1.1\na: b\n\n", "GET / HTTP/1.1\r\n\n", "\r\n\r\n"]
        {
            let whole = [head.as_bytes(), BEHIND].concat();
            for piece in (1..=whole.len()).filter(|piece| head.len() % piece != 0) {
                let mut state = Head::default();
                assert_eq!(cut(&whole, |bytes| state.part(bytes), piece), head.as_bytes(), "{piece}");
            }
        }
        let mut state = Head::default();
        let unfinished = b"GET / HTTP/1.1\r\na: \r b\r\n\r";
        assert_eq!(state.part(unfinished), unfinished.len());
        assert_eq!(state.part(b"\nGET"), 1);
    }

    #[test]
    fn chunks_end_with_the_trailers() {
        for body in [
            "0\r\n\r\n",
            "2\r\n[]\r\n0\r\n\r\n",
            "A;a=\"\n\"\r\n0\r\n\r\n4567\r\n00 \r\nX: 0\r\nY:\r\n\r\n",
            "1f\r\n0\r\n\r\n0\r\n\r\n0\r\n\r\n0\r\n\r\n0\r\n\r\n0\r\n\r\n0\r\n0\r\n\r\n",
        ] {
            let whole = [body.as_bytes(), BEHIND].concat();
            for piece in (1..=whole.len()).filter(|piece| body.len() % piece != 0) {
                let mut state = Chunks::default();
                let out = cut(&whole, |bytes| state.part(bytes), piece);
                assert_eq!(out, body.as_bytes(), "{piece}");
            }
        }
    }

    #[test]
    fn a_size_without_a_digit_is_spoilt() {
        for (body, spoilt) in [
            ("\r\n\r\n", "!\n\r\n"),
            (" \r\n\r\n", "!\r\n\r\n"),
            (";a\r\n\r\n", "!a\r\n\r\n"),
            ("2\r\n[]\r\n\r\n\r\n", "2\r\n[]\r\n!\n\r\n"),
        ] {
            let mut state = Chunks::default();
            assert_eq!(cut(body.as_bytes(), |bytes| state.part(bytes), 1), spoilt.as_bytes());
        }
        // What Pingora refuses anyway is left to it.
        for body in ["2x\r\n[]", "11111111111111111\r\n", "2\r[]"] {
            let mut state = Chunks::default();
            assert_eq!(cut(body.as_bytes(), |bytes| state.part(bytes), 3), body.as_bytes());
        }
    }
}
