//! The same counts by the plainest means: parse with `serde_json`, then look. It reads what a cell
//! built on that parser reads (the last of repeated members, strings only), and the walk must never
//! count less. Also used by the fuzz targets.

use serde_json::value::RawValue;
use std::collections::{HashMap, HashSet};

type Object<'b> = HashMap<String, &'b RawValue>;

/// What a body puts in.
#[derive(Debug, Default)]
pub struct Naive {
    /// Messages.
    pub count: u64,
    /// Bytes of the largest payload.
    pub heaviest: u64,
    /// Bytes of all.
    pub payload_bytes: u64,
    /// Where they go; lanes named by something else than strings are left out.
    pub pairs: HashSet<(String, String)>,
}

/// Which route's body it is.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Push.
    Push,
    /// Transaction.
    Transaction,
    /// Cycle of a stream.
    Cycle,
}

/// `None` when the parser does not take the body, or it has another shape.
pub fn read(body: &[u8], kind: Kind) -> Option<Naive> {
    let text = std::str::from_utf8(body).ok()?;
    let root: Object<'_> = serde_json::from_str(text).ok()?;
    // An odd body somewhere deep (a lone surrogate) passes as raw text; a cell would refuse it.
    let _: serde_json::Value = serde_json::from_str(text).ok()?;
    let name = match kind {
        Kind::Push => "items",
        Kind::Transaction => "operations",
        Kind::Cycle => "push_items",
    };
    let mut naive = Naive::default();
    for element in elements(root.get(name)?)? {
        let object: Option<Object<'_>> = serde_json::from_str(element.get()).ok();
        match (kind, object) {
            (Kind::Push, None) => naive.count += 1,
            (_, None) => {}
            (Kind::Push, Some(item)) => naive.add(&item, false),
            (Kind::Cycle, Some(item)) => naive.add(&item, true),
            (Kind::Transaction, Some(op)) => {
                if op.get("type").and_then(|kind| string(kind)).as_deref() != Some("push") {
                    continue;
                }
                match op.get("items").and_then(|items| elements(items)) {
                    Some(items) => {
                        for item in items {
                            match serde_json::from_str::<Object<'_>>(item.get()) {
                                Ok(item) => naive.add(&item, false),
                                Err(_) => naive.count += 1,
                            }
                        }
                    }
                    None => naive.add(&op, false),
                }
            }
        }
    }
    Some(naive)
}

impl Naive {
    fn add(&mut self, item: &Object<'_>, cycle: bool) {
        let name = |member: &str| item.get(member).and_then(|value| string(value));
        let queue = name("queue").unwrap_or_default();
        if cycle && queue.is_empty() {
            return;
        }
        let partition = name("partition").filter(|partition| !(cycle && partition.is_empty()));
        let payload = item.get("payload").or_else(|| item.get("data"));
        let bytes = payload.map_or(0, |payload| payload.get().len() as u64);
        self.count += 1;
        self.heaviest = self.heaviest.max(bytes);
        self.payload_bytes += bytes;
        // Of names that are no strings the walk keeps the text, where this parser's cells see none.
        let odd = |member| item.get(member).is_some_and(|v| v.get() != "null" && string(v).is_none());
        if !odd("queue") && !odd("partition") {
            self.pairs.insert((queue, partition.unwrap_or_else(|| "Default".to_owned())));
        }
    }
}

fn elements(value: &RawValue) -> Option<Vec<&RawValue>> {
    serde_json::from_str(value.get()).ok()
}

fn string(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

impl Naive {
    /// Panics when the walk tells less than this.
    pub fn assert_covered_by(&self, told: &super::Messages<'_>) {
        assert!(told.count >= self.count, "{} messages, not {}", self.count, told.count);
        assert!(told.payload_bytes >= self.payload_bytes);
        assert!(told.heaviest.map_or(0, |heaviest| heaviest.bytes) >= self.heaviest);
        let pairs: HashSet<_> =
            told.pairs.list().iter().map(|pair| (&*pair.queue, &*pair.partition)).collect();
        for (queue, partition) in &self.pairs {
            assert!(told.pairs.overflow() || pairs.contains(&(queue, partition)), "{queue}/{partition}");
        }
    }
}
