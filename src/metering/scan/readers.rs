//! What the answers of the metered routes mean (proxy contract §13).

use super::{
    Unreadable,
    walker::{List, Reader, Value},
};
use crate::policy::inspect::DEFAULT_PARTITION;
use std::collections::HashMap;

/// More messages than one request can carry: a cell that claims so is not believed.
const MOST: u64 = u32::MAX as u64;

/// A number of messages, or why there is none.
pub(super) trait Messages: Reader {
    fn messages(&self) -> Result<u64, Unreadable>;

    /// Those that half an answer tells of for certain.
    fn so_far(&self) -> u64 {
        0
    }

    /// Whether most of them wait in the cell's buffer.
    fn mostly_buffered(&self) -> bool {
        false
    }
}

/// A push: an array of results.
#[derive(Debug, Default)]
pub(super) struct Push {
    stored: u64,
    buffered: u64,
    current: Option<bool>,
}

impl Reader for Push {
    const LIST: List = List::Root;
    const MEMBERS: bool = true;

    fn element(&mut self) {
        self.current = None;
    }

    fn member(&mut self, key: &[u8], value: Value<'_>) {
        if key == b"status" {
            let buffered = value.is_text("buffered");
            self.current = (buffered || value.is_text("queued")).then_some(buffered);
        }
    }

    fn element_end(&mut self) -> Result<(), Unreadable> {
        if let Some(buffered) = self.current.take() {
            self.stored += 1;
            self.buffered += u64::from(buffered);
        }
        Ok(())
    }
}

impl Messages for Push {
    fn messages(&self) -> Result<u64, Unreadable> {
        Ok(self.stored)
    }

    fn so_far(&self) -> u64 {
        self.stored
    }

    fn mostly_buffered(&self) -> bool {
        self.buffered * 2 > self.stored
    }
}

/// An ephemeral push: the cell says how many.
#[derive(Debug, Default)]
pub(super) struct EphemeralPush {
    pushed: Option<u64>,
}

impl Reader for EphemeralPush {
    const LIST: List = List::None;

    fn root(&mut self, key: &[u8], value: Value<'_>) {
        if key == b"pushed" {
            self.pushed = match value {
                Value::Literal(text) => std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
                _ => None,
            };
        }
    }
}

impl Messages for EphemeralPush {
    fn messages(&self) -> Result<u64, Unreadable> {
        self.pushed.filter(|&pushed| pushed <= MOST).ok_or(Unreadable::Shape)
    }
}

/// A transaction: what it put in, less what the cell had before.
#[derive(Debug)]
pub(super) struct Transaction {
    ingress: u64,
    success: Option<bool>,
    duplicates: u64,
    is_push: bool,
    is_duplicate: bool,
}

impl Transaction {
    pub(super) fn new(ingress: u64) -> Self {
        Self { ingress, success: None, duplicates: 0, is_push: false, is_duplicate: false }
    }
}

fn success(value: Value<'_>) -> Option<bool> {
    if value.is_literal("true") {
        Some(true)
    } else if value.is_literal("false") {
        Some(false)
    } else {
        None
    }
}

impl Reader for Transaction {
    const LIST: List = List::Member("results");
    const MEMBERS: bool = true;

    fn root(&mut self, key: &[u8], value: Value<'_>) {
        match key {
            b"success" => self.success = success(value),
            b"results" => self.duplicates = 0,
            _ => {}
        }
    }

    fn list(&mut self) {
        self.duplicates = 0;
    }

    fn element(&mut self) {
        (self.is_push, self.is_duplicate) = (false, false);
    }

    fn member(&mut self, key: &[u8], value: Value<'_>) {
        match key {
            b"type" => self.is_push = value.is_text("push"),
            b"duplicate" => self.is_duplicate = value.is_literal("true"),
            _ => {}
        }
    }

    fn element_end(&mut self) -> Result<(), Unreadable> {
        self.duplicates += u64::from(self.is_push && self.is_duplicate);
        Ok(())
    }
}

impl Messages for Transaction {
    fn messages(&self) -> Result<u64, Unreadable> {
        match self.success {
            Some(true) => Ok(self.ingress.saturating_sub(self.duplicates)),
            Some(false) => Ok(0),
            None => Err(Unreadable::Shape),
        }
    }
}

/// A pop: as many as there are elements.
#[derive(Debug, Default)]
pub(super) struct Pop {
    messages: Option<u64>,
}

impl Reader for Pop {
    const LIST: List = List::Member("messages");

    fn root(&mut self, key: &[u8], value: Value<'_>) {
        if key == b"messages" {
            self.messages = value.is_literal("null").then_some(0);
        }
    }

    fn list(&mut self) {
        self.messages = Some(0);
    }

    fn element(&mut self) {
        self.messages = self.messages.map(|messages| messages + 1);
    }
}

impl Messages for Pop {
    fn messages(&self) -> Result<u64, Unreadable> {
        self.messages.ok_or(Unreadable::Shape)
    }

    fn so_far(&self) -> u64 {
        self.messages.unwrap_or(0)
    }
}

/// What a request put into which queues: the groups of `push_items` of `/streams/v1/cycle`, as the body's
/// inspection found them. As large as the names in that body.
#[derive(Clone, Debug, Default)]
pub struct Sinks(HashMap<Box<[u8]>, HashMap<Box<[u8]>, Group>>);

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    messages: u64,
    stored: bool,
}

impl Sinks {
    /// Counts messages for a queue; an empty partition is the default one.
    pub fn add(&mut self, queue: &str, partition: &str, messages: u64) {
        let partition = if partition.is_empty() { DEFAULT_PARTITION } else { partition }.as_bytes();
        let group = self.0.entry(queue.as_bytes().into()).or_default().entry(partition.into()).or_default();
        group.messages = group.messages.saturating_add(messages);
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn stored(&self) -> u64 {
        let groups = self.0.values().flat_map(HashMap::values).filter(|group| group.stored);
        groups.fold(0, |sum, group| sum.saturating_add(group.messages))
    }
}

#[derive(Debug, Default)]
struct Name {
    text: Vec<u8>,
    cut: bool,
}

impl Name {
    fn set(&mut self, value: Value<'_>) {
        self.text.clear();
        self.cut = false;
        if let Value::Text { text, cut } = value {
            self.text.extend_from_slice(text);
            self.cut = cut;
        }
    }
}

/// A cycle: the groups that the cell says it queued.
#[derive(Debug)]
pub(super) struct Cycle {
    sinks: Sinks,
    failed: bool,
    results: bool,
    queue: Name,
    partition: Name,
    queued: bool,
}

impl Cycle {
    pub(super) fn new(sinks: Sinks) -> Self {
        Self {
            sinks,
            failed: false,
            results: false,
            queue: Name::default(),
            partition: Name::default(),
            queued: false,
        }
    }

    fn begin(&mut self, results: bool) {
        self.results = results;
        self.sinks.0.values_mut().flat_map(HashMap::values_mut).for_each(|group| group.stored = false);
    }
}

impl Reader for Cycle {
    const LIST: List = List::Member("push_results");
    const MEMBERS: bool = true;

    fn root(&mut self, key: &[u8], value: Value<'_>) {
        match key {
            b"success" => self.failed = !value.is_literal("true"),
            b"push_results" => self.begin(false),
            _ => {}
        }
    }

    fn list(&mut self) {
        self.begin(true);
    }

    fn element(&mut self) {
        self.queue.set(Value::Container);
        self.partition.set(Value::Container);
        self.queued = false;
    }

    fn member(&mut self, key: &[u8], value: Value<'_>) {
        match key {
            b"queue" | b"queueName" => self.queue.set(value),
            b"partition" | b"partitionName" => self.partition.set(value),
            b"status" => self.queued = value.is_text("queued"),
            _ => {}
        }
    }

    fn element_end(&mut self) -> Result<(), Unreadable> {
        if !self.queued {
            return Ok(());
        }
        if self.queue.cut || self.partition.cut {
            return Err(Unreadable::Name);
        }
        let partition = &self.partition.text;
        let partition = if partition.is_empty() { DEFAULT_PARTITION.as_bytes() } else { partition };
        let groups = self.sinks.0.get_mut(self.queue.text.as_slice());
        if let Some(group) = groups.and_then(|groups| groups.get_mut(partition)) {
            group.stored = true;
        }
        Ok(())
    }
}

impl Messages for Cycle {
    fn messages(&self) -> Result<u64, Unreadable> {
        match (self.failed, self.results) {
            (true, _) => Ok(0),
            (false, true) => Ok(self.sinks.stored()),
            (false, false) => Err(Unreadable::Shape),
        }
    }
}

/// A replay: one message, when it was moved.
#[derive(Debug, Default)]
pub(super) struct Replay {
    failed: bool,
    moved: bool,
}

impl Reader for Replay {
    const LIST: List = List::None;

    fn root(&mut self, key: &[u8], value: Value<'_>) {
        match key {
            b"success" => self.failed = !value.is_literal("true"),
            b"result" => self.moved = value.is_text("moved"),
            _ => {}
        }
    }
}

impl Messages for Replay {
    fn messages(&self) -> Result<u64, Unreadable> {
        Ok(u64::from(self.moved && !self.failed))
    }
}
