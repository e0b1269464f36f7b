//! Rows that go to the control plane together, and how they look in a file.
//!
//! A file has a line that names the batch and a line per row, `{cluster_id, minute, op, reqs, msgs, bytes_in,
//! bytes_out}` with the minute since the epoch (proxy contract §13). The rows go to the database in that form too.

use super::{
    accumulate::RowKey,
    sample::{Counts, Op},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Rows of one statement: about 600 KB of it.
pub(super) const CHUNK: usize = 4_096;

#[derive(Serialize, Deserialize)]
struct Head {
    batch: Uuid,
    rows: usize,
}

#[derive(Serialize, Deserialize)]
struct Line<'a> {
    cluster_id: Uuid,
    minute: u64,
    op: &'a str,
    reqs: u64,
    msgs: u64,
    bytes_in: u64,
    bytes_out: u64,
}

/// Rows under one id, by which the control plane knows whether they are counted already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Batch {
    pub(super) id: Uuid,
    pub(super) rows: BTreeMap<RowKey, Counts>,
}

/// A batch as it was read.
#[derive(Debug)]
pub(super) struct Decoded {
    pub(super) batch: Batch,
    /// Lines that are no rows, or are missing.
    pub(super) bad_lines: usize,
}

impl Batch {
    /// An empty one with an id of its own.
    pub(super) fn new() -> Self {
        Self { id: Uuid::now_v7(), rows: BTreeMap::new() }
    }

    /// All messages in it.
    pub(super) fn messages(&self) -> u64 {
        self.rows.values().fold(0, |sum, counts| sum.saturating_add(counts.msgs))
    }

    /// The text of the file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let head = Head { batch: self.id, rows: self.rows.len() };
        let mut text = serde_json::to_string(&head).unwrap_or_default();
        for (key, counts) in &self.rows {
            text.push('\n');
            text.push_str(&line(key, counts));
        }
        text.push('\n');
        text.into_bytes()
    }

    /// Reads a file; none: it is none of ours.
    pub(super) fn decode(bytes: &[u8]) -> Option<Decoded> {
        let mut lines = bytes.split(|&byte| byte == b'\n');
        let head: Head = serde_json::from_slice(lines.next()?).ok()?;
        let mut rows: BTreeMap<RowKey, Counts> = BTreeMap::new();
        let mut good = 0;
        for text in lines.filter(|line| !line.is_empty()) {
            let Ok(line) = serde_json::from_slice::<Line<'_>>(text) else { continue };
            let Some(op) = Op::parse(line.op) else { continue };
            let key = RowKey { cluster: line.cluster_id, minute: line.minute, op };
            let counts = Counts {
                reqs: line.reqs,
                msgs: line.msgs,
                bytes_in: line.bytes_in,
                bytes_out: line.bytes_out,
            };
            rows.entry(key).or_default().add(counts);
            good += 1;
        }
        let batch = Self { id: head.batch, rows };
        Some(Decoded { batch, bad_lines: head.rows.saturating_sub(good) })
    }

    /// What is sent, piece by piece: an id and a JSON array. The same batch has the same pieces, so a piece that
    /// arrived is known when the batch is sent again.
    pub(super) fn chunks(&self) -> Vec<(Uuid, String)> {
        let rows: Vec<String> = self.rows.iter().map(|(key, counts)| line(key, counts)).collect();
        rows.chunks(CHUNK)
            .zip(0_u128..)
            .map(|(rows, number)| {
                let id = Uuid::from_u128(self.id.as_u128().wrapping_add(number));
                (id, format!("[{}]", rows.join(",")))
            })
            .collect()
    }
}

fn line(key: &RowKey, counts: &Counts) -> String {
    let Counts { reqs, msgs, bytes_in, bytes_out } = *counts;
    let RowKey { cluster, minute, op } = *key;
    let line = Line { cluster_id: cluster, minute, op: op.as_str(), reqs, msgs, bytes_in, bytes_out };
    // Texts and numbers: it does not fail.
    serde_json::to_string(&line).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(rows: u64) -> Batch {
        let row = |number: u64| {
            let key = RowKey { cluster: Uuid::from_u128(number.into()), minute: 29_000_000, op: Op::Push };
            (key, Counts { reqs: 1, msgs: number, bytes_in: 2, bytes_out: 3 })
        };
        Batch { id: Uuid::from_u128(7), rows: (0..rows).map(row).collect() }
    }

    #[test]
    fn a_file_says_what_the_batch_says() {
        let batch = batch(2);
        let text = String::from_utf8(batch.encode()).unwrap();
        let expected = concat!(
            r#"{"batch":"00000000-0000-0000-0000-000000000007","rows":2}"#,
            "\n",
            r#"{"cluster_id":"00000000-0000-0000-0000-000000000000","minute":29000000,"op":"push","reqs":1,"msgs":0,"bytes_in":2,"bytes_out":3}"#,
            "\n",
            r#"{"cluster_id":"00000000-0000-0000-0000-000000000001","minute":29000000,"op":"push","reqs":1,"msgs":1,"bytes_in":2,"bytes_out":3}"#,
            "\n",
        );
        assert_eq!(text, expected);
        let decoded = Batch::decode(text.as_bytes()).unwrap();
        assert_eq!((decoded.batch, decoded.bad_lines), (batch, 0));
    }

    #[test]
    fn torn_and_foreign_files() {
        let whole = batch(3).encode();
        let text = String::from_utf8(whole.clone()).unwrap();
        let first = text.find('\n').unwrap();
        for end in 0..whole.len() {
            match Batch::decode(&whole[..end]) {
                None => assert!(end < first, "cut at {end}"),
                Some(decoded) => {
                    let rows = decoded.batch.rows.len();
                    assert_eq!(rows + decoded.bad_lines, 3, "cut at {end}");
                    assert!(end >= first);
                }
            }
        }
        for (what, bad) in [
            (text.replacen("push", "steal", 1), 1),
            (text.replacen("\"reqs\":1", "\"reqs\":-1", 1), 1),
            (text.replacen("\"msgs\":2", "\"msgs\":99999999999999999999", 1), 1),
            (text.replacen("29000000", "\"x\"", 1), 1),
        ] {
            assert_eq!(Batch::decode(what.as_bytes()).unwrap().bad_lines, bad, "{what}");
        }
        let line = text.lines().nth(1).unwrap();
        for foreign in ["", "\n", "hello\n", "{}\n", line, "\u{0}\u{0}\n"] {
            assert!(Batch::decode(foreign.as_bytes()).is_none(), "{foreign}");
        }
    }

    #[test]
    fn pieces_are_the_same_each_time() {
        let batch = batch(2 * CHUNK as u64 + 1);
        let chunks = batch.chunks();
        let ids: Vec<u128> = chunks.iter().map(|(id, _)| id.as_u128()).collect();
        assert_eq!(ids, [7, 8, 9]);
        let lengths: Vec<usize> = chunks
            .iter()
            .map(|(_, rows)| serde_json::from_str::<Vec<serde_json::Value>>(rows).unwrap().len())
            .collect();
        assert_eq!(lengths, [CHUNK, CHUNK, 1]);
        assert_eq!(Batch::decode(&batch.encode()).unwrap().batch.chunks(), chunks);
    }
}
