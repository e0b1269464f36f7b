//! The kill switch: in force from memory, mirrored in the database for the other cells (KV contract,
//! section 8).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Rows of `queen.system_state`, in the order of all arrays here.
pub(super) const NAMES: [&str; 3] = ["kv_enabled", "timers_schedule_enabled", "timers_fire_enabled"];

/// See the module. Timers are not served by this program; their switches are kept for those who serve them.
#[derive(Debug)]
pub(super) struct Switches {
    on: [AtomicBool; 3],
    /// Decisions made here and not yet written, each with its time.
    unwritten: Mutex<[Option<(bool, Duration)>; 3]>,
}

impl Default for Switches {
    fn default() -> Self {
        Self { on: [const { AtomicBool::new(true) }; 3], unwritten: Mutex::new([None; 3]) }
    }
}

impl Switches {
    /// Whether the store serves.
    pub(super) fn kv(&self) -> bool {
        self.on[0].load(Ordering::Relaxed)
    }

    /// All three.
    pub(super) fn all(&self) -> [bool; 3] {
        [0, 1, 2].map(|at| self.on[at].load(Ordering::Relaxed))
    }

    /// An operator's word, in force at once. Those that are `None` stay.
    pub(super) fn decide(&self, wanted: [Option<bool>; 3], now: Duration) {
        let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, on) in wanted.into_iter().enumerate() {
            if let Some(on) = on {
                unwritten[at] = Some((on, now));
                self.turn(at, on, "here");
            }
        }
    }

    /// Decisions still to be written.
    pub(super) fn unwritten(&self) -> [Option<(bool, Duration)>; 3] {
        *self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These have been written, or were found to be older than what somebody else wrote.
    pub(super) fn written(&self, decisions: [Option<(bool, Duration)>; 3]) {
        let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        for (left, done) in unwritten.iter_mut().zip(decisions) {
            // Another decision may have come in between.
            if *left == done {
                *left = None;
            }
        }
    }

    /// Takes over what the database says, except where a decision made here has yet to reach it.
    pub(super) fn adopt(&self, rows: [bool; 3]) {
        let unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, on) in rows.into_iter().enumerate() {
            if unwritten[at].is_none() {
                self.turn(at, on, "in the database");
            }
        }
    }

    fn turn(&self, at: usize, on: bool, place: &str) {
        if self.on[at].swap(on, Ordering::Relaxed) != on {
            let name = NAMES[at];
            if on {
                tracing::info!(switch = name, "switched on {place}");
            } else {
                tracing::warn!(switch = name, "switched OFF {place}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    #[test]
    fn a_decision_holds_until_it_is_written_and_then_the_database_rules() {
        let switches = Switches::default();
        assert_eq!(switches.all(), [true, true, true]);
        switches.decide([Some(false), None, Some(false)], NOW);
        assert_eq!(switches.all(), [false, true, false]);
        // The database has not heard of it.
        switches.adopt([true, false, true]);
        assert_eq!(switches.all(), [false, false, false]);
        switches.written(switches.unwritten());
        assert_eq!(switches.unwritten(), [None; 3]);
        switches.adopt([true, true, false]);
        assert_eq!(switches.all(), [true, true, false]);
        assert!(switches.kv());
    }

    #[test]
    fn a_newer_decision_survives_the_writing_of_an_older_one() {
        let switches = Switches::default();
        switches.decide([Some(false), None, None], NOW);
        let writing = switches.unwritten();
        switches.decide([Some(true), None, None], NOW * 2);
        switches.written(writing);
        assert_eq!(switches.unwritten()[0], Some((true, NOW * 2)));
        switches.adopt([false; 3]);
        assert!(switches.kv());
    }
}
