//! Bodies that set up a queue, or name where a dead letter goes.

use super::{DEFAULT_PARTITION, Pairs, Raw, Seen, Unreadable, open};
use std::borrow::Cow;

/// A retention that a configure asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// The option's name.
    pub option: &'static str,
    /// Seconds, more than 0; saturated at 64 bits, a fraction rounded up.
    pub seconds: i64,
}

/// What `POST /api/v1/configure` asks for.
#[derive(Debug)]
pub struct Configure<'b> {
    /// The queue with its default partition; none when it is not named by a string, more than one
    /// when it is named more than once.
    pub pairs: Pairs<'b>,
    /// Retentions above 0, in the order of the contract. What is 0 or less, or no number in any
    /// spelling a cell takes, keeps nothing longer.
    pub retention: Vec<Retention>,
}

/// Where `POST /api/v1/dlq/:id/replay` puts the message.
#[derive(Debug)]
pub enum Destination<'b> {
    /// Back where it came from.
    Origin,
    /// To a named queue and partition; more than one when members are repeated.
    Named(Pairs<'b>),
    /// Only half of it is named: the cell might create what was never admitted.
    Half {
        /// The missing member.
        missing: &'static str,
    },
}

const OPTIONS: [&str; 2] = ["retentionSeconds", "completedRetentionSeconds"];

/// Reads a configure. The options stand in the object `options`, or in the root when that is none.
pub fn configure(body: &[u8]) -> Result<Configure<'_>, Unreadable> {
    let mut queue = Seen::default();
    let mut top = [Seen::default(); OPTIONS.len()];
    let mut nested = Vec::new();
    let mut not_nested = true;
    let read = open(body)?.object(|scanner, name| {
        if name.is("options") && scanner.peek()? == b'{' {
            let mut these = [Seen::default(); OPTIONS.len()];
            scanner.object(|scanner, name| {
                let value = scanner.value()?;
                note(&mut these, name, value);
                Some(())
            })?;
            nested.push(these);
            not_nested = false;
            return Some(());
        }
        let value = scanner.value()?;
        if name.is("queue") {
            queue.note(value);
        } else if name.is("options") {
            not_nested = true;
        }
        note(&mut top, name, value);
        Some(())
    });
    read.ok_or(Unreadable::NotJson)?;
    // Where `options` is repeated, a cell may read any of them.
    if not_nested || nested.len() > 1 {
        nested.push(top);
    }
    let mut retention = Vec::new();
    for (at, option) in OPTIONS.into_iter().enumerate() {
        let values = nested.iter().flat_map(|options| options[at].readings()).flatten();
        let greatest = values.filter_map(|value| integer(&value.text())).max();
        if let Some(seconds) = greatest.filter(|seconds| *seconds > 0) {
            retention.push(Retention { option, seconds });
        }
    }
    let mut pairs = Pairs::new(2);
    for name in queue.readings().into_iter().flatten().filter(|name| name.is_string()) {
        pairs.add(name.text(), Cow::Borrowed(DEFAULT_PARTITION));
    }
    Ok(Configure { pairs, retention })
}

/// Reads a replay. No body at all names nothing.
pub fn replay(body: &[u8]) -> Result<Destination<'_>, Unreadable> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Destination::Origin);
    }
    let (mut queue, mut partition) = (Seen::default(), Seen::default());
    let read = open(body)?.object(|scanner, name| {
        let value = scanner.value()?;
        if name.is("queue") {
            queue.note(value);
        } else if name.is("partition") {
            partition.note(value);
        }
        Some(())
    });
    read.ok_or(Unreadable::NotJson)?;
    let mut pairs = Pairs::new(2);
    for (queue, partition) in queue.readings().into_iter().zip(partition.readings()) {
        match (named(queue), named(partition)) {
            (Some(queue), Some(partition)) => {
                pairs.add(queue, partition);
            }
            (Some(_), None) => return Ok(Destination::Half { missing: "partition" }),
            (None, Some(_)) => return Ok(Destination::Half { missing: "queue" }),
            (None, None) => {}
        }
    }
    Ok(if pairs.list().is_empty() { Destination::Origin } else { Destination::Named(pairs) })
}

/// A name without the blanks around it; blank is as good as absent.
fn named(value: Option<Raw<'_>>) -> Option<Cow<'_, str>> {
    let text = value.filter(|value| !value.is_null())?.text();
    let trimmed = match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.trim()),
        Cow::Owned(text) => Cow::Owned(text.trim().to_owned()),
    };
    Some(trimmed).filter(|name| !name.is_empty())
}

fn note<'b>(options: &mut [Seen<'b>; OPTIONS.len()], name: Raw<'b>, value: Raw<'b>) {
    for (seen, option) in options.iter_mut().zip(OPTIONS) {
        if name.is(option) {
            seen.note(value);
        }
    }
}

/// A number in any spelling that some cell takes for an integer: PostgreSQL 16 casts `0x1F`, `0o17`,
/// `0b11` and `1_000`, a C++ parser turns `1e9` into one. Saturated; a fraction is rounded up.
fn integer(text: &str) -> Option<i64> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let digits: Cow<'_, str> =
        if digits.contains('_') { digits.replace('_', "").into() } else { digits.into() };
    let radix = match digits.get(..2) {
        Some("0x" | "0X") => 16,
        Some("0o" | "0O") => 8,
        Some("0b" | "0B") => 2,
        _ => 10,
    };
    let whole = if radix == 10 { &*digits } else { digits.get(2..)? };
    if whole.is_empty() {
        return None;
    }
    let magnitude = if whole.chars().all(|digit| digit.is_digit(radix)) {
        i64::from_str_radix(whole, radix).unwrap_or(i64::MAX)
    } else if radix == 10 && whole.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        let number: f64 = whole.parse().ok()?;
        // `as` saturates, which is what is wanted.
        #[allow(clippy::cast_possible_truncation)]
        let rounded = number.ceil() as i64;
        rounded
    } else {
        return None;
    };
    Some(if negative { -magnitude } else { magnitude })
}
