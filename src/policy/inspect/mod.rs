//! What the caps must know of a body (proxy contract §10), told without building a tree or copying
//! a payload.
//!
//! Cells differ in what they make of an odd body: which of two repeated members counts, whether a
//! number may name a partition. Where they may differ the greater count is told, so that no reading
//! of a cell stores more than was counted.

pub(crate) mod blocks;
mod messages;
mod scan;
mod settings;

pub use messages::{Heaviest, Messages, cycle, ephemeral_push, push, transaction};
pub use settings::{Configure, Destination, Retention, configure, replay};

use scan::{Raw, Scanner};
use std::{borrow::Cow, collections::HashMap};

/// The partition of a message that names none.
pub const DEFAULT_PARTITION: &str = "Default";

/// Why a body tells nothing. No cell could read the first as JSON; the second some cells read, so
/// that it must not be forwarded where a cap is to hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unreadable {
    /// Neither an object nor an array, or it does not end.
    NotJson,
    /// A binary push or transaction of newer clients (`QPB1`, `QTB1`), whose messages may be
    /// compressed and so cannot be counted here.
    Binary,
}

/// A queue and one of its partitions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pair<'b> {
    /// The queue's name; a cell may accept an empty one.
    pub queue: Cow<'b, str>,
    /// The partition's name.
    pub partition: Cow<'b, str>,
}

/// The distinct pairs of a body in the order they were first seen.
#[derive(Default, Debug)]
pub struct Pairs<'b> {
    list: Vec<Pair<'b>>,
    /// Where in the list each is; empty until there are two.
    seen: HashMap<Pair<'b>, usize>,
    max: usize,
    overflow: bool,
}

impl<'b> Pairs<'b> {
    fn new(max: usize) -> Self {
        Self { max, ..Self::default() }
    }

    /// The pairs, at most as many as were asked for.
    pub fn list(&self) -> &[Pair<'b>] {
        &self.list
    }

    /// Whether the body names more pairs than were asked for; the list then lacks the rest.
    pub fn overflow(&self) -> bool {
        self.overflow
    }

    /// Its place in the list; none beyond the most that are kept.
    fn add(&mut self, queue: Cow<'b, str>, partition: Cow<'b, str>) -> Option<usize> {
        let pair = Pair { queue, partition };
        // Items mostly come in runs for one lane; those cost no hashing.
        if self.list.last() == Some(&pair) {
            return Some(self.list.len() - 1);
        }
        if let [first] = self.list.as_slice() {
            self.seen.insert(first.clone(), 0);
        }
        if let Some(at) = self.seen.get(&pair) {
            return Some(*at);
        }
        if self.list.len() == self.max {
            self.overflow = true;
            return None;
        }
        let at = self.list.len();
        if at > 0 {
            self.seen.insert(pair.clone(), at);
        }
        self.list.push(pair);
        Some(at)
    }
}

/// The occurrences of a member that may be repeated: a cell uses either the first or the last.
#[derive(Clone, Copy, Default)]
struct Seen<'b> {
    first: Option<Raw<'b>>,
    last: Option<Raw<'b>>,
}

impl<'b> Seen<'b> {
    fn note(&mut self, value: Raw<'b>) {
        self.first.get_or_insert(value);
        self.last = Some(value);
    }

    /// The two readings; when nothing is repeated they are the same.
    fn readings(self) -> [Option<Raw<'b>>; 2] {
        [self.first, self.last]
    }
}

/// A body that is JSON at first sight: an object or an array.
fn open(body: &[u8]) -> Result<Scanner<'_>, Unreadable> {
    if body.starts_with(b"QPB1") || body.starts_with(b"QTB1") {
        return Err(Unreadable::Binary);
    }
    let mut scanner = Scanner::new(body);
    match scanner.peek() {
        Some(b'{' | b'[') => Ok(scanner),
        _ => Err(Unreadable::NotJson),
    }
}

#[cfg(test)]
mod naive;
#[cfg(test)]
mod tests;
