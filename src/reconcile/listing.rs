//! A cell's listing of queues, read leniently (proxy contract §14), and what it corrects.

use crate::control::queues::{Correction, KnownQueue, is_storable};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

/// What a cell told of one cluster.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Listing {
    /// Queues with their partitions, none where that is not told.
    pub queues: BTreeMap<String, Option<u64>>,
    /// Whether every entry had a name: what is missing in another listing may be there all the same.
    pub complete: bool,
    /// All that is kept, in bytes; none when the cell told no bytes at all.
    pub bytes: Option<u64>,
    /// Whether bytes were told, but not those of keys or of timers.
    pub partial: bool,
}

#[derive(Deserialize)]
struct Body<'b> {
    #[serde(borrow)]
    queues: Vec<&'b RawValue>,
    #[serde(borrow, rename = "kvBytes")]
    keys: Option<&'b RawValue>,
    #[serde(borrow, rename = "timerBytes")]
    timers: Option<&'b RawValue>,
}

#[derive(Deserialize)]
struct Entry<'b> {
    #[serde(borrow)]
    name: Cow<'b, str>,
    #[serde(borrow)]
    partitions: Option<&'b RawValue>,
    #[serde(borrow, rename = "retainedBytes")]
    retained: Option<&'b RawValue>,
}

impl Listing {
    /// Reads an answer; none when it is no object with an array `queues`. Nothing of the answer but names
    /// and figures is built.
    pub fn parse(body: &[u8]) -> Option<Self> {
        let body: Body<'_> = serde_json::from_slice(body).ok()?;
        let (keys, timers) = (figure(body.keys), figure(body.timers));
        let mut listing = Self { complete: true, ..Self::default() };
        let mut retained = None;
        for entry in body.queues {
            let Ok(entry) = serde_json::from_str::<Entry<'_>>(entry.get()) else {
                listing.complete = false;
                continue;
            };
            if let Some(bytes) = figure(entry.retained) {
                retained = Some(bytes.saturating_add(retained.unwrap_or(0)));
            }
            let partitions = figure(entry.partitions);
            let known = listing.queues.entry(entry.name.into_owned()).or_default();
            *known = partitions.max(*known);
        }
        let told = [retained, keys, timers];
        if told.iter().any(Option::is_some) {
            listing.bytes = Some(told.into_iter().flatten().fold(0, u64::saturating_add));
            listing.partial = keys.is_none() || timers.is_none();
        }
        Some(listing)
    }

    /// Where it differs from the live rows that were read before the cell was asked. A row is old enough to
    /// be taken for deleted only when it has settled: a queue is written when it is admitted, and is there
    /// when the cell has stored its first message.
    pub fn corrections<'l>(&'l self, rows: &'l [KnownQueue]) -> Vec<Correction<'l>> {
        let mut unseen: HashMap<&str, &KnownQueue> =
            rows.iter().map(|row| (row.name.as_str(), row)).collect();
        let mut corrections = Vec::new();
        for (name, partitions) in self.queues.iter().filter(|(name, _)| is_storable(name)) {
            let seen = unseen.remove(name.as_str()).map(|row| row.partitions);
            let told = partitions.map(|count| u32::try_from(count).unwrap_or(u32::MAX).min(MOST));
            let told = told.or(seen).unwrap_or(0);
            if seen != Some(told) {
                corrections.push(Correction { name, partitions: Some(told), seen });
            }
        }
        if self.complete {
            let gone = unseen.into_values().filter(|row| row.settled);
            corrections.extend(gone.map(|row| Correction {
                name: &row.name,
                partitions: None,
                seen: Some(row.partitions),
            }));
        }
        corrections
    }
}

/// The greatest count that the column holds.
const MOST: u32 = i32::MAX.cast_unsigned();

/// A number, also one in quotes or with a fraction; what is less than zero is zero, what is no number is
/// none.
fn figure(text: Option<&RawValue>) -> Option<u64> {
    let text = text?.get().trim_matches('"').trim();
    let whole: i128 = match text.parse() {
        Ok(whole) => whole,
        Err(_) => format!("{:.0}", text.parse::<f64>().ok()?).parse().ok()?,
    };
    Some(u64::try_from(whole.max(0)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::{Correction, KnownQueue, Listing};

    #[test]
    fn shapes_of_answers() {
        type Queues = &'static [(&'static str, Option<u64>)];
        // answer, queues, complete, bytes, partial
        let usable: &[(&str, Queues, bool, Option<u64>, bool)] = &[
            (r#"{"queues":[]}"#, &[], true, None, false),
            (
                r#"{"queues":[{"name":"q","partitions":3,"messages":{"total":1}}]}"#,
                &[("q", Some(3))],
                true,
                None,
                false,
            ),
            (
                r#"{"x":[],"queues":[{"name":"q","partitions":3,"retainedBytes":10},{"partitions":1,"name":"r","retainedBytes":5}],"kvBytes":7,"timerBytes":1}"#,
                &[("q", Some(3)), ("r", Some(1))],
                true,
                Some(23),
                false,
            ),
            (
                r#"{"queues":[{"name":"q","partitions":3,"retainedBytes":10}]}"#,
                &[("q", Some(3))],
                true,
                Some(10),
                true,
            ),
            (r#"{"queues":[],"kvBytes":-7,"timerBytes":1}"#, &[], true, Some(1), false),
            (r#"{"queues":[],"kvBytes":null,"timerBytes":"12"}"#, &[], true, Some(12), true),
            (
                r#"{"queues":[{"name":"q","partitions":"4","retainedBytes":"1e3"}]}"#,
                &[("q", Some(4))],
                true,
                Some(1000),
                true,
            ),
            (
                r#"{"queues":[{"name":"q","partitions":2.0,"retainedBytes":-5}]}"#,
                &[("q", Some(2))],
                true,
                Some(0),
                true,
            ),
            (
                r#"{"queues":[{"name":"q"},{"name":"r","partitions":{}}]}"#,
                &[("q", None), ("r", None)],
                true,
                None,
                false,
            ),
            (
                r#"{"queues":[{"name":"q","partitions":2},{"name":"q","partitions":5}]}"#,
                &[("q", Some(5))],
                true,
                None,
                false,
            ),
            (r#"{"queues":[{"name":"\u00e9\n","partitions":1}]}"#, &[("é\n", Some(1))], true, None, false),
            (
                r#"{"queues":[{"partitions":2},null,{"name":7},{"name":"q"}]}"#,
                &[("q", None)],
                false,
                None,
                false,
            ),
            (
                r#"{"queues":[{"name":"q","retainedBytes":18446744073709551615}],"kvBytes":99999999999999999999,"timerBytes":0}"#,
                &[("q", None)],
                true,
                Some(u64::MAX),
                false,
            ),
        ];
        for (answer, queues, complete, bytes, partial) in usable {
            let want = Listing {
                queues: queues.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
                complete: *complete,
                bytes: *bytes,
                partial: *partial,
            };
            assert_eq!(Listing::parse(answer.as_bytes()), Some(want), "{answer}");
        }
        for answer in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"queues":{}}"#,
            r#"{"queues":null}"#,
            r#"{"queues":[}"#,
            r#"{"queues":[]} trailing"#,
            "<html>",
            r#"{"error":"no"}"#,
        ] {
            assert_eq!(Listing::parse(answer.as_bytes()), None, "{answer}");
        }
        assert_eq!(Listing::parse(b"{\"queues\":[{\"name\":\"\xff\"}]}"), None, "not UTF-8");
    }

    fn row(name: &str, partitions: u32, settled: bool) -> KnownQueue {
        KnownQueue { name: name.to_owned(), partitions, settled }
    }

    #[test]
    fn what_a_listing_corrects() {
        let rows = [
            row("same", 3, true),
            row("more", 1, false),
            row("less", 9, false),
            row("untold", 4, true),
            row("gone", 2, true),
            row("fresh", 2, false),
        ];
        let listing = Listing::parse(
            br#"{"queues":[{"name":"same","partitions":3},{"name":"more","partitions":2},
                {"name":"less","partitions":8},{"name":"untold"},{"name":"new","partitions":1},
                {"name":"new, untold"},{"name":" "},{"name":"huge","partitions":9999999999}]}"#,
        )
        .unwrap();
        let want = [
            ("gone", None, Some(2)),
            ("huge", Some(2_147_483_647), None),
            ("less", Some(8), Some(9)),
            ("more", Some(2), Some(1)),
            ("new", Some(1), None),
            ("new, untold", Some(0), None),
        ]
        .map(|(name, partitions, seen)| Correction { name, partitions, seen });
        let mut got = listing.corrections(&rows);
        got.sort_by_key(|one| one.name);
        assert_eq!(got, want);
        // Told once, it corrects nothing any more.
        let after = [row("same", 3, true), row("q", 1, true)];
        let listing =
            Listing::parse(br#"{"queues":[{"name":"same","partitions":3},{"name":"q","partitions":1}]}"#);
        assert_eq!(listing.unwrap().corrections(&after), []);
    }

    #[test]
    fn an_empty_listing_deletes_and_an_incomplete_one_does_not() {
        let rows = [row("q", 2, true), row("fresh", 2, false)];
        let empty = Listing::parse(br#"{"queues":[]}"#).unwrap();
        assert_eq!(empty.corrections(&rows), [Correction { name: "q", partitions: None, seen: Some(2) }]);
        let incomplete = Listing::parse(br#"{"queues":[{"partitions":2}]}"#).unwrap();
        assert_eq!(incomplete.corrections(&rows), []);
    }
}
