//! Where in a document the interesting things are: members of the root, and members of the objects in
//! one list, which is the root itself or a member of it.

use super::{
    Unreadable,
    lexer::{Container, Lexer, Listener, Step, Token},
};

/// A value, as far as readers look at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Value<'a> {
    Text {
        text: &'a [u8],
        cut: bool,
    },
    Literal(&'a [u8]),
    /// An array or an object.
    Container,
}

impl Value<'_> {
    pub(super) fn is_text(&self, expected: &str) -> bool {
        matches!(self, Value::Text { text, cut: false } if *text == expected.as_bytes())
    }

    pub(super) fn is_literal(&self, expected: &str) -> bool {
        matches!(self, Value::Literal(text) if *text == expected.as_bytes())
    }
}

/// Makes a number of what passes by. Where a name repeats, the last one counts, as for JSON's readers.
pub(super) trait Reader {
    /// Where the list is.
    const LIST: List;
    /// Whether the members of the list's objects are of interest.
    const MEMBERS: bool = false;

    /// A member of the root object; also the list's name when its value is no array.
    fn root(&mut self, _key: &[u8], _value: Value<'_>) {}
    /// The list begins; one before it of the same name does not count.
    fn list(&mut self) {}
    /// An element of the list begins.
    fn element(&mut self) {}
    /// A member of an object in the list.
    fn member(&mut self, _key: &[u8], _value: Value<'_>) {}
    /// The element ends.
    fn element_end(&mut self) -> Result<(), Unreadable> {
        Ok(())
    }
}

/// Where the list is that a reader looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum List {
    /// The root is an array.
    Root,
    /// It is this member of the root object.
    Member(&'static str),
    /// There is none.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Document,
    Root,
    List,
    Element,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expect {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
}

/// Longer names are none that a reader knows.
const KEY: usize = 24;

#[derive(Debug)]
struct Walk<R> {
    place: Place,
    expect: Expect,
    key: Vec<u8>,
    reader: R,
}

/// A lexer, a place and a reader.
#[derive(Debug)]
pub(super) struct Walker<R> {
    lexer: Lexer,
    walk: Walk<R>,
}

impl<R: Reader> Walker<R> {
    /// Texts are kept up to `limit` bytes.
    pub(super) fn new(reader: R, limit: usize) -> Self {
        let walk =
            Walk { place: Place::Document, expect: Expect::Value, key: Vec::with_capacity(KEY), reader };
        Self { lexer: Lexer::new(limit.max(KEY + 1)), walk }
    }

    pub(super) fn feed(&mut self, piece: &[u8]) -> Result<(), Unreadable> {
        self.lexer.feed(piece, &mut self.walk)
    }

    /// The reader as it stands.
    pub(super) fn reader(&self) -> &R {
        &self.walk.reader
    }

    /// The reader, when there was exactly one whole document.
    pub(super) fn finish(&self) -> Result<&R, Unreadable> {
        match self.walk.place {
            Place::Done if self.lexer.is_idle() => Ok(&self.walk.reader),
            Place::Done => Err(Unreadable::NotJson),
            _ => Err(Unreadable::Truncated),
        }
    }
}

impl<R: Reader> Listener for Walk<R> {
    fn token(&mut self, token: Token<'_>) -> Result<Step, Unreadable> {
        match token {
            Token::Open(container) => return self.open(container),
            Token::Close(container) => self.close(container)?,
            Token::Comma => self.comma()?,
            Token::Colon if self.expect == Expect::Colon => self.expect = Expect::Value,
            Token::Colon => return Err(Unreadable::NotJson),
            Token::Text { text, cut } => self.text(text, cut)?,
            Token::Literal(text) => {
                let number = matches!(text, [b'-' | b'0'..=b'9', ..]);
                if !number && ![&b"true"[..], b"false", b"null"].contains(&text) {
                    return Err(Unreadable::NotJson);
                }
                self.scalar(Value::Literal(text))?;
            }
        }
        Ok(Step::On)
    }
}

impl<R: Reader> Walk<R> {
    fn open(&mut self, container: Container) -> Result<Step, Unreadable> {
        self.value_is_due()?;
        let array = container == Container::Array;
        match self.place {
            Place::Document if R::LIST == List::Root => {
                if !array {
                    return Err(Unreadable::Shape);
                }
                self.enter_list();
            }
            Place::Document => {
                if array {
                    return Err(Unreadable::Shape);
                }
                self.enter(Place::Root, Expect::KeyOrEnd);
            }
            Place::Root => {
                let is_list = matches!(R::LIST, List::Member(name) if name.as_bytes() == self.key);
                if array && is_list {
                    self.enter_list();
                } else {
                    self.reader.root(&self.key, Value::Container);
                    return Ok(self.pass_by());
                }
            }
            Place::List => {
                self.reader.element();
                if R::MEMBERS && !array {
                    self.enter(Place::Element, Expect::KeyOrEnd);
                } else {
                    self.reader.element_end()?;
                    return Ok(self.pass_by());
                }
            }
            Place::Element => {
                self.reader.member(&self.key, Value::Container);
                return Ok(self.pass_by());
            }
            Place::Done => return Err(Unreadable::NotJson),
        }
        Ok(Step::On)
    }

    fn enter(&mut self, place: Place, expect: Expect) {
        self.place = place;
        self.expect = expect;
    }

    fn enter_list(&mut self) {
        self.reader.list();
        self.enter(Place::List, Expect::ValueOrEnd);
    }

    fn pass_by(&mut self) -> Step {
        self.expect = Expect::CommaOrEnd;
        Step::Skip
    }

    fn close(&mut self, container: Container) -> Result<(), Unreadable> {
        let (outer, kind) = match self.place {
            Place::Root => (Place::Done, Container::Object),
            Place::List if R::LIST == List::Root => (Place::Done, Container::Array),
            Place::List => (Place::Root, Container::Array),
            Place::Element => (Place::List, Container::Object),
            Place::Document | Place::Done => return Err(Unreadable::NotJson),
        };
        let due = matches!(self.expect, Expect::CommaOrEnd | Expect::KeyOrEnd | Expect::ValueOrEnd);
        if kind != container || !due {
            return Err(Unreadable::NotJson);
        }
        if self.place == Place::Element {
            self.reader.element_end()?;
        }
        self.enter(outer, Expect::CommaOrEnd);
        Ok(())
    }

    fn comma(&mut self) -> Result<(), Unreadable> {
        if self.expect != Expect::CommaOrEnd || self.place == Place::Done {
            return Err(Unreadable::NotJson);
        }
        self.expect = if self.place == Place::List { Expect::Value } else { Expect::Key };
        Ok(())
    }

    fn text(&mut self, text: &[u8], cut: bool) -> Result<(), Unreadable> {
        if matches!(self.expect, Expect::Key | Expect::KeyOrEnd) {
            self.key.clear();
            if text.len() <= KEY {
                self.key.extend_from_slice(text);
            }
            self.expect = Expect::Colon;
            return Ok(());
        }
        self.scalar(Value::Text { text, cut })
    }

    fn scalar(&mut self, value: Value<'_>) -> Result<(), Unreadable> {
        self.value_is_due()?;
        match self.place {
            Place::Document => return Err(Unreadable::Shape),
            Place::Root => self.reader.root(&self.key, value),
            Place::List => {
                self.reader.element();
                self.reader.element_end()?;
            }
            Place::Element => self.reader.member(&self.key, value),
            Place::Done => return Err(Unreadable::NotJson),
        }
        self.expect = Expect::CommaOrEnd;
        Ok(())
    }

    fn value_is_due(&self) -> Result<(), Unreadable> {
        if matches!(self.expect, Expect::Value | Expect::ValueOrEnd) {
            Ok(())
        } else {
            Err(Unreadable::NotJson)
        }
    }
}
