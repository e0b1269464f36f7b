//! Bodies that put messages in.

use super::{DEFAULT_PARTITION, Pairs, Raw, Scanner, Seen, Unreadable, open};
use std::borrow::Cow;

/// The largest payload of a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heaviest {
    /// Its place among the counted messages, from 0.
    pub index: u64,
    /// Its length as it stands in the body, in bytes.
    pub bytes: u64,
}

/// What a body puts in.
#[derive(Debug)]
pub struct Messages<'b> {
    /// Messages.
    pub count: u64,
    /// The largest payload; none without messages.
    pub heaviest: Option<Heaviest>,
    /// All payloads together, in bytes.
    pub payload_bytes: u64,
    /// Where they go.
    pub pairs: Pairs<'b>,
    /// Of a cycle, how many messages go to each pair, in the order of the pairs.
    pub per_pair: Vec<u64>,
}

/// `POST /api/v1/push`: `{"items": […]}`. Of the pairs at most `max_pairs` are kept.
pub fn push(body: &[u8], max_pairs: usize) -> Result<Messages<'_>, Unreadable> {
    let mut pairs = Pairs::new(max_pairs);
    let sum = list(body, "items", &mut pairs, |scanner, sum, pairs| {
        match Element::read(scanner)? {
            Element::Item(item) => item.count(sum, pairs),
            Element::Other => sum.add(0),
        }
        Some(())
    })?;
    Ok(sum.with(pairs))
}

/// `POST /streams/v1/cycle`: `{"push_items": […]}`. Items without a queue are skipped, as the cell
/// skips them, and an empty partition is the default one.
pub fn cycle(body: &[u8], max_pairs: usize) -> Result<Messages<'_>, Unreadable> {
    let mut pairs = Pairs::new(max_pairs);
    let mut per_pair = Vec::new();
    let sum = list(body, "push_items", &mut pairs, |scanner, sum, pairs| {
        let Element::Item(item) = Element::read(scanner)? else {
            return Some(());
        };
        if item.lanes().all(|(queue, _)| queue.is_empty()) {
            return Some(());
        }
        sum.add(item.bytes);
        let mut goes_to = None;
        for (queue, partition) in item.lanes().filter(|(queue, _)| !queue.is_empty()) {
            let partition = if partition.is_empty() { Cow::Borrowed(DEFAULT_PARTITION) } else { partition };
            goes_to = pairs.add(queue, partition);
        }
        // Of two readings the later one: that of the cells.
        if let Some(at) = goes_to {
            per_pair.resize(per_pair.len().max(at + 1), 0);
            per_pair[at] += 1;
        }
        Some(())
    })?;
    Ok(Messages { per_pair, ..sum.with(pairs) })
}

/// `POST /api/v1/transaction`: `{"operations": […]}`. Acks are skipped; a push carries `items` or
/// is an item itself.
pub fn transaction(body: &[u8], max_pairs: usize) -> Result<Messages<'_>, Unreadable> {
    let mut pairs = Pairs::new(max_pairs);
    let sum = list(body, "operations", &mut pairs, |scanner, sum, pairs| {
        if scanner.peek()? != b'{' {
            return scanner.value().map(|_| ());
        }
        let (mut kind, mut items, mut flat) = (Seen::default(), Seen::default(), Item::default());
        scanner.object(|scanner, name| {
            let value = scanner.value()?;
            if name.is("type") {
                kind.note(value);
            } else if name.is("items") {
                items.note(value);
            } else {
                flat.note(name, value);
            }
            Some(())
        })?;
        let is = |word: &str, reading: Option<Raw<'_>>| reading.is_some_and(|kind| kind.is(word));
        if kind.readings().into_iter().all(|reading| is("ack", reading)) {
            return Some(());
        }
        let pushes = kind.readings().into_iter().any(|reading| is("push", reading));
        let before = *sum;
        let mut greatest = before;
        for reading in items.readings() {
            let mut this = before;
            match reading {
                Some(list) if list.is_array() => {
                    Scanner::new(list.0).array(|scanner| {
                        match Element::read(scanner)? {
                            Element::Item(item) => item.count(&mut this, pairs),
                            Element::Other => this.add(0),
                        }
                        Some(())
                    })?;
                }
                _ if pushes || flat.queue.last.is_some() => flat.count(&mut this, pairs),
                _ => {}
            }
            greatest = greatest.max(this);
            if items.first.map(|raw| raw.0.as_ptr()) == items.last.map(|raw| raw.0.as_ptr()) {
                break;
            }
        }
        *sum = greatest;
        Some(())
    })?;
    Ok(sum.with(pairs))
}

/// `POST /api/v1/ephemeral/push`: how many `messages` it carries.
pub fn ephemeral_push(body: &[u8]) -> Result<u64, Unreadable> {
    let sum = list(body, "messages", &mut Pairs::default(), |scanner, sum, _| {
        scanner.value()?;
        sum.add(0);
        Some(())
    })?;
    Ok(sum.count)
}

/// Walks the array under `name` in the root object, or the root itself when it is an array. Of a
/// repeated member the greatest sums are told and the pairs of all.
fn list<'b>(
    body: &'b [u8],
    name: &str,
    pairs: &mut Pairs<'b>,
    mut element: impl FnMut(&mut Scanner<'b>, &mut Sum, &mut Pairs<'b>) -> Option<()>,
) -> Result<Sum, Unreadable> {
    let mut scanner = open(body)?;
    let mut greatest = Sum::default();
    let mut walk = |scanner: &mut Scanner<'b>| {
        let mut sum = Sum::default();
        scanner.array(|scanner| element(scanner, &mut sum, pairs))?;
        greatest = greatest.max(sum);
        Some(())
    };
    let walked = match scanner.peek() {
        Some(b'[') => walk(&mut scanner),
        _ => scanner.object(|scanner, member| {
            if scanner.peek()? == b'[' && member.is(name) {
                walk(scanner)
            } else {
                scanner.value().map(|_| ())
            }
        }),
    };
    walked.ok_or(Unreadable::NotJson)?;
    Ok(greatest)
}

/// Running totals of one reading of a body.
#[derive(Clone, Copy, Default)]
struct Sum {
    count: u64,
    heaviest: Option<Heaviest>,
    payload_bytes: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        if self.heaviest.is_none_or(|heaviest| bytes > heaviest.bytes) {
            self.heaviest = Some(Heaviest { index: self.count, bytes });
        }
        self.count += 1;
        self.payload_bytes += bytes;
    }

    fn max(self, other: Self) -> Self {
        let bytes = |sum: &Self| sum.heaviest.map(|heaviest| heaviest.bytes);
        Self {
            count: self.count.max(other.count),
            heaviest: if bytes(&other) > bytes(&self) { other.heaviest } else { self.heaviest },
            payload_bytes: self.payload_bytes.max(other.payload_bytes),
        }
    }

    fn with(self, pairs: Pairs<'_>) -> Messages<'_> {
        let Self { count, heaviest, payload_bytes } = self;
        Messages { count, heaviest, payload_bytes, pairs, per_pair: Vec::new() }
    }
}

/// One message as it stands in the body.
#[derive(Default)]
struct Item<'b> {
    queue: Seen<'b>,
    partition: Seen<'b>,
    /// The longest of what a cell may take for the payload.
    bytes: u64,
}

/// An element of a list of messages.
enum Element<'b> {
    Item(Item<'b>),
    /// No object; a cell refuses it.
    Other,
}

impl<'b> Element<'b> {
    /// Consumes one; `None` when the body ends within it.
    fn read(scanner: &mut Scanner<'b>) -> Option<Self> {
        if scanner.peek()? != b'{' {
            scanner.value()?;
            return Some(Self::Other);
        }
        let mut item = Item::default();
        scanner.object(|scanner, name| {
            let value = scanner.value()?;
            item.note(name, value);
            Some(())
        })?;
        Some(Self::Item(item))
    }
}

impl<'b> Item<'b> {
    fn note(&mut self, name: Raw<'b>, value: Raw<'b>) {
        if name.is("payload") || name.is("data") {
            self.bytes = self.bytes.max(value.0.len() as u64);
        } else if name.is("queue") {
            self.queue.note(value);
        } else if name.is("partition") {
            self.partition.note(value);
        }
    }

    /// Where a cell that takes the first, or the last, of repeated members puts it. Without a queue
    /// the name is empty, without a partition the default.
    fn lanes(&self) -> impl Iterator<Item = (Cow<'b, str>, Cow<'b, str>)> {
        let repeated = [self.queue, self.partition]
            .iter()
            .any(|seen| seen.first.map(|raw| raw.0.as_ptr()) != seen.last.map(|raw| raw.0.as_ptr()));
        let first = (self.queue.first, self.partition.first);
        let last = (self.queue.last, self.partition.last);
        [Some(first), repeated.then_some(last)].into_iter().flatten().map(|(queue, partition)| {
            let name = |value: Option<Raw<'b>>, absent| match value {
                Some(value) if !value.is_null() => value.text(),
                _ => Cow::Borrowed(absent),
            };
            (name(queue, ""), name(partition, DEFAULT_PARTITION))
        })
    }

    fn count(&self, sum: &mut Sum, pairs: &mut Pairs<'b>) {
        sum.add(self.bytes);
        for (queue, partition) in self.lanes() {
            pairs.add(queue, partition);
        }
    }
}
