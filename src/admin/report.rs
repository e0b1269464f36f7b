//! What a command has to say, for people and for scripts.

use super::failure::Failure;
use serde_json::Value;
use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

/// The outcome of a command.
pub(super) struct Report {
    document: Value,
    text: String,
}

impl Report {
    /// The document for `--json`, and what stands for it otherwise.
    pub(super) fn new(document: Value, text: impl Into<String>) -> Self {
        Self { document, text: text.into() }
    }

    /// Writes it to standard output. `println!` would panic where the reader has gone away.
    pub(super) fn print(&self, json: bool) -> Result<(), Failure> {
        let mut text = if json { self.document.to_string() } else { printable(self.text.trim_end()) };
        text.push('\n');
        let mut output = io::stdout().lock();
        let written = output.write_all(text.as_bytes()).and_then(|()| output.flush());
        written.map_err(|error| Failure::Output(error.kind()))
    }
}

/// Names come from tenants: nothing in them may steer a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// A cell of a table or line: one line, and never nothing.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.replace(['\n', '\r'], " "),
        Value::Array(items) => items.iter().map(word).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Columns as wide as their widest cell.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = head.iter().map(|&title| title.to_owned()).collect();
    let lines = || std::iter::once(&head).chain(rows);
    let width = |column: usize| lines().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for line in lines() {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            // Writing to a string does not fail.
            let _ = write!(row, "{cell:width$}  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// A table of the members of each object in `rows`; a column's title is its member's name.
pub(super) fn members(columns: &[&str], rows: &Value) -> String {
    let rows: Vec<Vec<String>> = rows
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| columns.iter().map(|column| word(&row[*column])).collect())
        .collect();
    table(columns, &rows)
}

#[cfg(test)]
mod tests {
    use super::{members, printable, table};
    use serde_json::json;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_owned(), "long value".to_owned()], vec!["wider".to_owned(), String::new()]];
        assert_eq!(table(&["x", "y"], &rows), "x      y\na      long value\nwider\n");
    }

    #[test]
    fn a_table_of_objects() {
        let rows = json!([{"name": "a\nb", "scopes": ["read", "admin"], "last": null, "live": true}]);
        let text = members(&["name", "scopes", "last", "live"], &rows);
        assert_eq!(text, "name  scopes      last  live\na b   read,admin  -     true\n");
    }

    #[test]
    fn nothing_steers_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\u{9b}c\nd"), "a\u{fffd}[2Jb\u{fffd}c\nd");
    }
}
