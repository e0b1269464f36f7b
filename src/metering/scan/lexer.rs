//! JSON in pieces: the tokens of a body that streams by, in constant memory.
//!
//! The lexer holds one text or literal, cut at a limit, and a depth. It is lenient where the meaning is
//! clear (it does not judge number forms or UTF-8): what a lenient client reads must not go unbilled.

use super::Unreadable;
use crate::policy::inspect::blocks;
use memchr::memchr2;

/// The longest literal that is kept: a number of 64 bits has 20 digits.
const LITERAL: usize = 32;

/// Which kind of container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Container {
    Array,
    Object,
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Token<'a> {
    Open(Container),
    Close(Container),
    Comma,
    Colon,
    /// A text without its escapes; `cut` when it was longer than the limit.
    Text {
        text: &'a [u8],
        cut: bool,
    },
    /// A number, `true`, `false` or `null`, as it stands there.
    Literal(&'a [u8]),
}

/// What is to be done after a token.
pub(super) enum Step {
    /// The next token, please.
    On,
    /// Nothing of the container that was just opened is of interest.
    Skip,
}

/// Who hears of the tokens.
pub(super) trait Listener {
    fn token(&mut self, token: Token<'_>) -> Result<Step, Unreadable>;
}

#[derive(Clone, Copy, Debug)]
enum State {
    Between,
    Text,
    Escape,
    Unicode { digits: u8, value: u16 },
    Literal,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lexer {
    state: State,
    /// Within a container of no interest. A payload may nest as deep as it likes.
    skipped: Option<blocks::State>,
    text: Vec<u8>,
    cut: bool,
    /// The first half of a character that JSON writes as two escapes.
    half: Option<u16>,
    limit: usize,
}

impl Lexer {
    /// Texts are kept up to `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            state: State::Between,
            skipped: None,
            text: Vec::with_capacity(LITERAL),
            cut: false,
            half: None,
            limit,
        }
    }

    /// Whether no token is unfinished.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.state, State::Between) && self.skipped.is_none()
    }

    /// Reads on.
    pub(super) fn feed(&mut self, mut piece: &[u8], listener: &mut impl Listener) -> Result<(), Unreadable> {
        while let Some(&byte) = piece.first() {
            if let Some(skipped) = &mut self.skipped {
                let Some(end) = skipped.walk(piece) else { break };
                self.skipped = None;
                piece = &piece[end..];
                continue;
            }
            let read = match self.state {
                State::Between => self.between(byte, piece, listener)?,
                State::Text => self.in_text(piece, listener)?,
                State::Escape => self.escape(byte)?,
                State::Unicode { digits, value } => self.unicode(byte, digits, value)?,
                State::Literal => self.literal(piece, listener)?,
            };
            piece = &piece[read..];
        }
        Ok(())
    }

    fn between(&mut self, byte: u8, piece: &[u8], listener: &mut impl Listener) -> Result<usize, Unreadable> {
        let token = match byte {
            b' ' | b'\t' | b'\r' | b'\n' => return Ok(1),
            b'"' => return self.text(piece, listener),
            b'-' | b'0'..=b'9' | b'a'..=b'z' => {
                self.begin(State::Literal);
                return Ok(0);
            }
            b'{' => Token::Open(Container::Object),
            b'[' => Token::Open(Container::Array),
            b'}' => Token::Close(Container::Object),
            b']' => Token::Close(Container::Array),
            b',' => Token::Comma,
            b':' => Token::Colon,
            _ => return Err(Unreadable::NotJson),
        };
        if let Step::Skip = listener.token(token)? {
            self.skipped = Some(blocks::State::within(1));
        }
        Ok(1)
    }

    /// A text begins. Nearly all of them end in the same piece and have no escapes, and need not be copied.
    fn text(&mut self, piece: &[u8], listener: &mut impl Listener) -> Result<usize, Unreadable> {
        let rest = &piece[1..];
        let Some(length) = memchr2(b'"', b'\\', rest).filter(|&at| rest[at] == b'"') else {
            self.begin(State::Text);
            return Ok(1);
        };
        let kept = length.min(self.limit);
        listener.token(Token::Text { text: &rest[..kept], cut: kept < length })?;
        Ok(length + 2)
    }

    fn begin(&mut self, state: State) {
        self.text.clear();
        self.cut = false;
        self.half = None;
        self.state = state;
    }

    fn in_text(&mut self, piece: &[u8], listener: &mut impl Listener) -> Result<usize, Unreadable> {
        let Some(at) = memchr2(b'"', b'\\', piece) else {
            self.keep(piece);
            return Ok(piece.len());
        };
        self.keep(&piece[..at]);
        if piece[at] == b'\\' {
            self.state = State::Escape;
            return Ok(at + 1);
        }
        self.state = State::Between;
        self.keep_half();
        listener.token(Token::Text { text: &self.text, cut: self.cut })?;
        Ok(at + 1)
    }

    fn escape(&mut self, byte: u8) -> Result<usize, Unreadable> {
        let character = match byte {
            b'u' => {
                self.state = State::Unicode { digits: 0, value: 0 };
                return Ok(1);
            }
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            _ => return Err(Unreadable::NotJson),
        };
        self.keep(&[character]);
        self.state = State::Text;
        Ok(1)
    }

    fn unicode(&mut self, byte: u8, digits: u8, value: u16) -> Result<usize, Unreadable> {
        let digit = char::from(byte).to_digit(16).ok_or(Unreadable::NotJson)?;
        // A hexadecimal digit has four bits.
        #[allow(clippy::cast_possible_truncation)]
        let value = (value << 4) | digit as u16;
        self.state = State::Unicode { digits: digits + 1, value };
        if digits == 3 {
            self.state = State::Text;
            let first = self.half.take();
            match (first, value) {
                (Some(first), 0xdc00..=0xdfff) => {
                    let code = 0x1_0000 + (u32::from(first - 0xd800) << 10) + u32::from(value - 0xdc00);
                    self.keep_character(code);
                }
                (first, 0xd800..=0xdbff) => {
                    self.half = first;
                    self.keep_half();
                    self.half = Some(value);
                }
                (first, _) => {
                    self.half = first;
                    self.keep_half();
                    self.keep_character(value.into());
                }
            }
        }
        Ok(1)
    }

    fn literal(&mut self, piece: &[u8], listener: &mut impl Listener) -> Result<usize, Unreadable> {
        let part_of_it = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = piece.iter().take_while(|byte| part_of_it(byte)).count();
        let room = LITERAL.saturating_sub(self.text.len());
        self.text.extend_from_slice(&piece[..length.min(room)]);
        // A digit more than there is room for leaves a literal that nobody takes for a number of 64 bits.
        if length < piece.len() {
            self.state = State::Between;
            listener.token(Token::Literal(&self.text))?;
        }
        Ok(length)
    }

    fn keep(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.keep_half();
        self.append(bytes);
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = self.limit.saturating_sub(self.text.len());
        self.cut |= bytes.len() > room;
        self.text.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Half a character that stays alone is none.
    fn keep_half(&mut self) {
        if self.half.take().is_some() {
            self.keep_character(0xfffd);
        }
    }

    fn keep_character(&mut self, code: u32) {
        let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        self.append(character.encode_utf8(&mut [0; 4]).as_bytes());
    }
}
