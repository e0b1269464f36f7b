//! What the results of a call say, for the counters.

use serde::Deserialize;
use serde_json::value::RawValue;

/// See the module.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Whether each operation was turned down, in the order of the call.
    turned_down: Vec<bool>,
    /// Bytes of all values returned.
    pub bytes_out: u64,
}

#[derive(Deserialize)]
struct Element<'a> {
    applied: Option<bool>,
    #[serde(borrow)]
    value: Option<&'a RawValue>,
    #[serde(borrow, default)]
    rows: Vec<Row<'a>>,
}

#[derive(Deserialize)]
struct Row<'a> {
    #[serde(borrow)]
    value: Option<&'a RawValue>,
}

impl Tally {
    /// Reads a result array. What cannot be read counts as nothing: the call has been made.
    pub(super) fn of(results: &str) -> Self {
        let elements: Vec<Element<'_>> = serde_json::from_str(results).unwrap_or_default();
        let mut tally = Self::default();
        for element in elements {
            tally.turned_down.push(element.applied == Some(false));
            for value in element.value.into_iter().chain(element.rows.iter().filter_map(|row| row.value)) {
                tally.bytes_out += value.get().len() as u64;
            }
        }
        tally
    }

    /// Whether the operation at `position` was turned down.
    pub(super) fn rejected(&self, position: usize) -> bool {
        self.turned_down.get(position).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_results() {
        let tally = Tally::of(
            r#"[{"index":0,"op":"put","applied":true,"value":{"a":1},"version":3},
                {"index":1,"op":"incr","applied":false,"reason":"limit","value":12.50,"version":3},
                {"index":2,"op":"get","found":false,"key":"k"},
                {"index":3,"op":"getMany","rows":[{"key":"a","value":"xy"},{"key":"b"}],"missing":["c"]}]"#,
        );
        assert_eq!(tally.bytes_out, 7 + 5 + 4);
        let rejected: Vec<bool> = (0..5).map(|position| tally.rejected(position)).collect();
        assert_eq!(rejected, [false, true, false, false, false]);
        assert_eq!(Tally::of("["), Tally::default());
    }
}
