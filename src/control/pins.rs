//! The revocations that this proxy remembers, in a bounded number. When it is full the one that ends soonest
//! makes room: who revokes tokens of their own, which end soon, does not push out those that matter longest.

use crate::domain::session::LONGEST_SESSION_S;
use dashmap::DashMap;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

/// How long a revocation is held past its token's `exp`: longer than any leeway and difference of clocks.
const PAST_END_S: u64 = 120;

/// How long one is remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pin {
    /// Until when, in seconds of the epoch.
    until: u64,
    /// Whether that is the token's end, or only the latest it can be.
    known: bool,
}

/// See the module. Reading takes no lock but the map's; writes go one by one.
pub(super) struct Pins {
    max: usize,
    by_jti: DashMap<Arc<str>, Pin>,
    by_end: Mutex<BTreeSet<(u64, Arc<str>)>>,
}

impl Pins {
    pub fn new(max: usize) -> Self {
        Self { max, by_jti: DashMap::new(), by_end: Mutex::default() }
    }

    pub fn contains(&self, jti: &str) -> bool {
        self.by_jti.contains_key(jti)
    }

    /// Remembers a revoked token that ends at `expires`, in seconds of the epoch.
    pub fn add(&self, jti: &str, expires: u64) {
        self.put(jti, Pin { until: expires.saturating_add(PAST_END_S), known: true });
    }

    /// Remembers a revoked token whose end is not known; `now` in seconds of the epoch.
    pub fn add_unknown(&self, jti: &str, now: u64) {
        self.put(jti, Pin { until: now.saturating_add(LONGEST_SESSION_S), known: false });
    }

    /// Up to `most` of those whose end is not known.
    pub fn unknown(&self, most: usize) -> Vec<String> {
        let unknown = self.by_jti.iter().filter(|pin| !pin.known);
        unknown.take(most).map(|pin| pin.key().to_string()).collect()
    }

    /// Nobody knows the end of this one: it is not asked for again.
    pub fn leave(&self, jti: &str) {
        if let Some(mut pin) = self.by_jti.get_mut(jti) {
            pin.known = true;
        }
    }

    /// Forgets those that have ended.
    pub fn sweep(&self, now: u64) {
        let mut by_end = self.by_end.lock().unwrap_or_else(PoisonError::into_inner);
        while by_end.first().is_some_and(|(until, _)| *until <= now)
            && let Some((_, jti)) = by_end.pop_first()
        {
            self.by_jti.remove(&jti);
        }
    }

    fn put(&self, jti: &str, pin: Pin) {
        let mut by_end = self.by_end.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.by_jti.get(jti).map(|entry| (Arc::clone(entry.key()), *entry));
        let (jti, pin) = match old {
            Some(_) if !pin.known => return,
            Some((jti, old)) => {
                by_end.remove(&(old.until, Arc::clone(&jti)));
                // Of two ends that were told the later one counts.
                let until = if old.known { pin.until.max(old.until) } else { pin.until };
                (jti, Pin { until, ..pin })
            }
            None => (Arc::from(jti), pin),
        };
        if by_end.len() >= self.max
            && let Some((_, ended)) = by_end.pop_first()
        {
            self.by_jti.remove(&ended);
        }
        by_end.insert((pin.until, Arc::clone(&jti)));
        self.by_jti.insert(jti, pin);
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_SESSION_S, PAST_END_S, Pins};

    #[test]
    fn what_ends_soonest_makes_room_and_a_newcomer_always_has_it() {
        let pins = Pins::new(3);
        pins.add("long", 9_000);
        pins.add_unknown("pushed", 0);
        for n in 0..10_000 {
            let jti = format!("short-{n}");
            pins.add(&jti, 100 + n % 7);
            assert!(pins.contains(&jti));
        }
        assert!(pins.contains("long") && pins.contains("pushed"));
        assert_eq!((pins.by_jti.len(), pins.by_end.lock().unwrap().len()), (3, 3));
    }

    #[test]
    fn an_end_that_is_learned_shortens_what_was_pushed_and_nothing_else_does() {
        let pins = Pins::new(10);
        let until = |jti: &str| pins.by_jti.get(jti).unwrap().until;
        pins.add_unknown("a", 5);
        assert_eq!((until("a"), pins.unknown(9)), (5 + LONGEST_SESSION_S, vec!["a".to_owned()]));
        pins.add("a", 700);
        assert_eq!((until("a"), pins.unknown(9)), (700 + PAST_END_S, Vec::new()));
        // The notification of our own logout comes after it.
        pins.add_unknown("a", 6);
        assert_eq!((until("a"), pins.unknown(9)), (700 + PAST_END_S, Vec::new()));
        pins.add("a", 300);
        assert_eq!(until("a"), 700 + PAST_END_S);
        pins.add_unknown("b", 5);
        pins.add_unknown("c", 5);
        assert_eq!(pins.unknown(1).len(), 1);
        pins.leave("b");
        pins.leave("c");
        assert_eq!((until("b"), pins.unknown(9)), (5 + LONGEST_SESSION_S, Vec::new()));
        pins.sweep(700 + PAST_END_S - 1);
        assert!(pins.contains("a"));
        pins.sweep(700 + PAST_END_S);
        assert!(!pins.contains("a") && pins.contains("b"));
        assert_eq!((pins.by_jti.len(), pins.by_end.lock().unwrap().len()), (2, 2));
    }
}
