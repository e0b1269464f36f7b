//! Is there an order of the operations on one key, each somewhere between its request and its answer, in
//! which a single-threaded store would have given the same answers? (Wing and Gong's search, with a memory of
//! what has been tried.)
//!
//! An operation whose answer was lost has no end: it may have happened at any later time, or never. The
//! version it gave its row is then known to nobody until somebody sees it.

use std::collections::HashSet;

/// A value, as far as the store looks into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    Number(i64),
    /// A document, by the number in it.
    Document(i64),
}

/// What was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Get,
    Put(Held),
    Claim(Held),
    Swap { expect: i64, value: Held },
    Delete,
    DeleteIf { expect: i64 },
    Incr { delta: i64, max: i64 },
}

/// What was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Found(Held, i64),
    Missing,
    /// With the value and version of the element.
    Applied(Option<Held>, i64),
    Lost(Reason, Option<Held>, i64),
}

/// Why an operation did not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Exists,
    Absent,
    Version,
    Limit,
    Type,
}

/// An operation with its place in time; all instants of a history differ.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub kind: Kind,
    pub start: u64,
    /// `None` when no answer came.
    pub end: Option<(u64, Answer)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Version {
    Known(i64),
    /// Given by an operation whose answer was lost.
    Unseen(usize),
}

type State = Option<(Held, Version)>;

/// Whether such an order exists. At most 64 events.
pub fn is_linearizable(events: &[Event]) -> bool {
    assert!(events.len() <= 64, "a history of {} operations on one key", events.len());
    let all: u64 = (0..events.len()).filter(|at| events[*at].end.is_some()).map(|at| 1 << at).sum();
    let search = Search { events, given: given(events) };
    let mut tried = HashSet::new();
    let mut open: Vec<(u64, State)> = vec![(0, None)];
    while let Some((done, state)) = open.pop() {
        if done & all == all {
            return true;
        }
        // Nothing may go before an operation that had ended when it began.
        let waiting = (0..events.len()).filter(|at| done & (1 << at) == 0);
        let first_end = waiting.clone().filter_map(|at| events[at].end).map(|(end, _)| end).min();
        for at in waiting.filter(|at| first_end.is_none_or(|end| events[*at].start < end)) {
            if let Some(next) = search.step(state, at) {
                let next = (done | 1 << at, next);
                if tried.insert(next) {
                    open.push(next);
                }
            }
        }
    }
    false
}

/// Versions that answers say were given to a row: nobody else's row can have one of them.
fn given(events: &[Event]) -> HashSet<i64> {
    let versions = events.iter().filter_map(|event| match (event.kind, event.end?.1) {
        (Kind::Delete | Kind::DeleteIf { .. }, _) => None,
        (_, Answer::Applied(_, version)) => Some(version),
        _ => None,
    });
    versions.collect()
}

struct Search<'e> {
    events: &'e [Event],
    given: HashSet<i64>,
}

impl Search<'_> {
    /// The state after an operation that comes next; `None` when its answer contradicts that, or when one
    /// without an answer would change nothing, which is as if it never happened.
    fn step(&self, state: State, at: usize) -> Option<State> {
        let Event { kind, end, .. } = self.events[at];
        match end {
            Some((_, answer)) => {
                let state = self.seen(state, kind, answer);
                let (expected, next) = run(state, kind, Version::Known(version(answer)));
                (expected == answer).then_some(next)
            }
            None => {
                let state = match kind {
                    Kind::Swap { expect, .. } | Kind::DeleteIf { expect } => self.bind(state, expect),
                    _ => state,
                };
                let (answer, next) = run(state, kind, Version::Unseen(at));
                matches!(answer, Answer::Applied(..)).then_some(next)
            }
        }
    }

    /// What an answer tells of a version nobody had seen so far.
    fn seen(&self, state: State, kind: Kind, answer: Answer) -> State {
        match (kind, answer) {
            (Kind::Swap { expect, .. } | Kind::DeleteIf { expect }, Answer::Applied(..)) => {
                self.bind(state, expect)
            }
            (_, Answer::Found(_, version) | Answer::Lost(_, _, version))
            | (Kind::Delete, Answer::Applied(_, version)) => self.bind(state, version),
            _ => state,
        }
    }

    fn bind(&self, state: State, version: i64) -> State {
        match state {
            Some((held, Version::Unseen(_))) if version != 0 && !self.given.contains(&version) => {
                Some((held, Version::Known(version)))
            }
            other => other,
        }
    }
}

fn version(answer: Answer) -> i64 {
    match answer {
        Answer::Found(_, version) | Answer::Applied(_, version) | Answer::Lost(_, _, version) => version,
        Answer::Missing => 0,
    }
}

/// The store itself: one operation, giving `fresh` as version if it writes.
fn run(state: State, kind: Kind, fresh: Version) -> (Answer, State) {
    let number = |version| match version {
        Version::Known(version) => version,
        // No answer holds it, and no precondition names it.
        Version::Unseen(_) => -1,
    };
    let (held, current) = state.map_or((None, 0), |(held, version)| (Some(held), number(version)));
    let lost = |reason| (Answer::Lost(reason, held, current), state);
    let wrote = |value| (Answer::Applied(Some(value), number(fresh)), Some((value, fresh)));
    match kind {
        Kind::Get => (held.map_or(Answer::Missing, |held| Answer::Found(held, current)), state),
        Kind::Claim(_) if held.is_some() => lost(Reason::Exists),
        Kind::Swap { .. } | Kind::DeleteIf { .. } | Kind::Delete if held.is_none() => lost(Reason::Absent),
        Kind::Swap { expect, .. } | Kind::DeleteIf { expect } if current != expect => lost(Reason::Version),
        Kind::Put(value) | Kind::Claim(value) | Kind::Swap { value, .. } => wrote(value),
        Kind::Delete | Kind::DeleteIf { .. } => (Answer::Applied(held, current), None),
        Kind::Incr { delta, max } => match held {
            Some(Held::Document(_)) => (Answer::Lost(Reason::Type, Some(Held::Number(0)), current), state),
            Some(Held::Number(number)) if number + delta > max => lost(Reason::Limit),
            None if delta > max => (Answer::Lost(Reason::Limit, Some(Held::Number(0)), 0), state),
            Some(Held::Number(number)) => wrote(Held::Number(number + delta)),
            None => wrote(Held::Number(delta)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Answer::{Applied, Found, Lost, Missing},
        Event,
        Held::{Document, Number},
        Kind::{self, Claim, Delete, DeleteIf, Get, Incr, Put, Swap},
        Reason::{Absent, Exists, Limit, Type, Version},
        is_linearizable,
    };

    fn event(start: u64, end: u64, kind: Kind, answer: super::Answer) -> Event {
        Event { kind, start, end: Some((end, answer)) }
    }

    fn unanswered(start: u64, kind: Kind) -> Event {
        Event { kind, start, end: None }
    }

    const ONE: super::Held = Number(1);
    const TWO: super::Held = Number(2);

    fn one(start: u64, end: u64) -> Event {
        event(start, end, Put(ONE), Applied(Some(ONE), 11))
    }

    fn two(start: u64, end: u64) -> Event {
        event(start, end, Put(TWO), Applied(Some(TWO), 12))
    }

    #[test]
    fn histories_a_store_could_have_had() {
        let incr = |delta| Incr { delta, max: 9 };
        let cases: &[&[Event]] = &[
            &[],
            &[event(1, 2, Get, Missing)],
            // One after the other.
            &[
                one(1, 2),
                event(3, 4, Get, Found(ONE, 11)),
                event(5, 6, Delete, Applied(Some(ONE), 11)),
                event(7, 8, Get, Missing),
            ],
            // A read beside a write sees it or not, and two of them may see it in turn.
            &[one(1, 6), event(2, 3, Get, Missing), event(4, 5, Get, Found(ONE, 11))],
            &[one(1, 5), two(2, 6), event(7, 8, Get, Found(ONE, 11))],
            &[
                event(1, 4, Claim(ONE), Applied(Some(ONE), 11)),
                event(2, 3, Claim(TWO), Lost(Exists, Some(ONE), 11)),
            ],
            &[
                one(1, 2),
                event(3, 4, Swap { expect: 11, value: TWO }, Applied(Some(TWO), 12)),
                event(5, 6, DeleteIf { expect: 11 }, Lost(Version, Some(TWO), 12)),
            ],
            &[event(1, 2, Swap { expect: 11, value: TWO }, Lost(Absent, None, 0))],
            &[
                event(1, 4, incr(1), Applied(Some(ONE), 11)),
                event(2, 3, incr(1), Applied(Some(TWO), 12)),
                event(5, 6, incr(8), Lost(Limit, Some(TWO), 12)),
            ],
            &[
                event(1, 2, Put(Document(1)), Applied(Some(Document(1)), 11)),
                event(3, 4, incr(1), Lost(Type, Some(Number(0)), 11)),
            ],
            &[event(1, 2, incr(10), Lost(Limit, Some(Number(0)), 0))],
            // An answer that was lost: never, at once, and long after.
            &[unanswered(1, Put(ONE)), event(2, 3, Get, Missing)],
            &[unanswered(1, Put(ONE)), event(2, 3, Get, Found(ONE, 77)), event(4, 5, Get, Found(ONE, 77))],
            &[
                unanswered(1, Put(ONE)),
                event(2, 3, Get, Missing),
                two(4, 5),
                event(6, 7, Get, Found(ONE, 77)),
            ],
            &[one(1, 2), unanswered(3, Delete), event(4, 5, Get, Found(ONE, 11)), event(6, 7, Get, Missing)],
            &[
                unanswered(1, incr(1)),
                unanswered(2, incr(1)),
                event(3, 4, incr(1), Applied(Some(TWO), 12)),
                event(5, 6, incr(1), Applied(Some(Number(4)), 13)),
            ],
            &[unanswered(1, Put(ONE)), event(2, 3, Swap { expect: 77, value: TWO }, Applied(Some(TWO), 12))],
            &[
                unanswered(1, Put(ONE)),
                unanswered(2, Swap { expect: 77, value: TWO }),
                event(3, 4, Get, Found(ONE, 77)),
                event(5, 6, Get, Found(TWO, 78)),
            ],
        ];
        for history in cases {
            assert!(is_linearizable(history), "{history:#?}");
        }
    }

    #[test]
    fn planted_violations_are_found() {
        let incr = |delta| Incr { delta, max: 9 };
        let cases: &[(&str, &[Event])] = &[
            ("a read before any write", &[event(1, 2, Get, Found(ONE, 11)), one(3, 4)]),
            ("a stale read", &[one(1, 2), two(3, 4), event(5, 6, Get, Found(ONE, 11))]),
            ("a lost write", &[one(1, 2), event(3, 4, Get, Missing)]),
            (
                "two readers that disagree on the order",
                &[
                    one(1, 9),
                    two(2, 10),
                    event(3, 4, Get, Found(ONE, 11)),
                    event(5, 6, Get, Found(TWO, 12)),
                    event(7, 8, Get, Found(ONE, 11)),
                ],
            ),
            ("the wrong version", &[one(1, 2), event(3, 4, Get, Found(ONE, 12))]),
            (
                "two winners",
                &[
                    event(1, 4, Claim(ONE), Applied(Some(ONE), 11)),
                    event(2, 3, Claim(TWO), Applied(Some(TWO), 12)),
                ],
            ),
            (
                "a loser that does not hear of the winner",
                &[
                    event(1, 4, Claim(ONE), Applied(Some(ONE), 11)),
                    event(2, 3, Claim(TWO), Lost(Exists, None, 0)),
                ],
            ),
            (
                "a loser that hears of an older row",
                &[
                    one(1, 2),
                    two(3, 4),
                    event(5, 6, Swap { expect: 5, value: ONE }, Lost(Version, Some(ONE), 11)),
                ],
            ),
            (
                "a swap that lost against the version it expected",
                &[one(1, 2), event(3, 4, Swap { expect: 11, value: TWO }, Lost(Version, Some(ONE), 11))],
            ),
            (
                "a swap of a version long gone",
                &[one(1, 2), two(3, 4), event(5, 6, Swap { expect: 11, value: ONE }, Applied(Some(ONE), 13))],
            ),
            (
                "a lost increment",
                &[event(1, 4, incr(1), Applied(Some(ONE), 11)), event(2, 3, incr(1), Applied(Some(ONE), 12))],
            ),
            (
                "a ceiling passed",
                &[
                    event(1, 2, incr(9), Applied(Some(Number(9)), 11)),
                    event(3, 4, incr(1), Applied(Some(Number(10)), 12)),
                ],
            ),
            (
                "two removals of one row",
                &[
                    one(1, 2),
                    event(3, 6, Delete, Applied(Some(ONE), 11)),
                    event(4, 5, Delete, Applied(Some(ONE), 11)),
                ],
            ),
            (
                "a row that came back",
                &[one(1, 2), event(3, 4, Delete, Applied(Some(ONE), 11)), event(5, 6, Get, Found(ONE, 11))],
            ),
            (
                "an unanswered write that happens twice",
                &[unanswered(1, incr(1)), event(2, 3, Get, Found(TWO, 77))],
            ),
            (
                "an unanswered write that comes back",
                &[
                    unanswered(1, Put(ONE)),
                    event(2, 3, Get, Found(ONE, 77)),
                    two(4, 5),
                    event(6, 7, Get, Found(ONE, 77)),
                ],
            ),
            (
                "an unanswered write before it was sent",
                &[event(1, 2, Get, Found(ONE, 77)), unanswered(3, Put(ONE))],
            ),
            (
                "an unanswered write seen under two versions",
                &[
                    unanswered(1, Put(ONE)),
                    event(2, 3, Get, Found(ONE, 77)),
                    event(4, 5, Get, Found(ONE, 78)),
                ],
            ),
            (
                "an unanswered write with another's version",
                &[unanswered(1, Put(TWO)), one(2, 3), event(4, 5, Get, Found(TWO, 11))],
            ),
            (
                "an unanswered swap that had lost its row",
                &[
                    one(1, 2),
                    two(3, 4),
                    unanswered(5, Swap { expect: 11, value: Number(3) }),
                    event(6, 7, Get, Found(Number(3), 77)),
                ],
            ),
        ];
        for (what, history) in cases {
            assert!(!is_linearizable(history), "{what}");
        }
    }
}
