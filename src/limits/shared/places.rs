//! Places of waiting pops that this proxy holds of a cluster's, which the store counts over all proxies.

use super::super::clock::{Nanos, SECOND};

/// After the store has said that there is none, nobody asks for so long.
const FULL: Nanos = SECOND / 50;

/// What the store is asked for; the arguments of `places.lua`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// Places that it may take while the answer is on its way, with those of pops that wait.
    pub usable: u64,
    /// Pops that wait, with the requests that would.
    pub needed: u64,
    /// Places that would be good to have.
    pub liked: u64,
    /// The cap of the plan.
    pub cap: u64,
}

/// See the module.
#[derive(Default, Debug)]
pub struct Places {
    held: u64,
    others: u64,
    /// None where the plan has no cap.
    cap: Option<u64>,
    wanted: u64,
    full_until: Nanos,
    /// Nobody has taken the places that are too many since the last sweep.
    spare: bool,
}

impl Places {
    /// Places held.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Places that other proxies held when the store last told.
    pub fn others(&self) -> u64 {
        self.others
    }

    /// Whether one more may wait, where `waiting` do; none when only the store knows.
    pub fn room(&mut self, cap: u64, waiting: u64, now: Nanos) -> Option<bool> {
        self.cap = Some(cap);
        if waiting < self.held.min(cap) {
            self.spare = false;
            return Some(true);
        }
        if waiting >= cap || now < self.full_until { Some(false) } else { None }
    }

    /// The plan has no cap any more.
    pub fn lift(&mut self) {
        self.cap = None;
    }

    /// The cap of the plan, while this proxy goes by its part of it.
    pub fn apart(&mut self, cap: u64) {
        self.cap = Some(cap);
    }

    /// Whether pops wait of which the store does not know, because it was away.
    pub fn has_untold(&self, waiting: u64) -> bool {
        self.cap.is_some() && waiting > self.held
    }

    /// A request waits for a place.
    pub fn wait(&mut self) {
        self.wanted += 1;
    }

    /// Whether the store should be asked.
    pub fn asks(&self) -> bool {
        self.wanted > 0
    }

    /// What to ask, when there is something; `renew` tells also what is known, in case the store has forgotten.
    pub fn ask(&mut self, waiting: u64, renew: bool) -> Option<Ask> {
        let cap = self.cap.unwrap_or(u64::MAX);
        if !self.asks() && !renew {
            return None;
        }
        let needed = waiting.saturating_add(std::mem::take(&mut self.wanted));
        let liked = if self.spare { needed } else { needed.saturating_add(1 + needed / 8).max(self.held) };
        // What is given up must not be taken while the answer is on its way, and what may be taken must not be given
        // away.
        self.held = self.held.min(liked).min(cap).max(waiting);
        Some(Ask { usable: self.held, needed, liked, cap })
    }

    /// Looks for places that nobody has taken since the last time, which go back.
    pub fn sweep(&mut self, waiting: u64, renew: bool) -> Option<Ask> {
        let is_spare = self.held > waiting;
        let give_back = is_spare && self.spare;
        let known = self.held > 0 || self.has_untold(waiting);
        let ask = self.ask(waiting, give_back || (renew && known));
        self.spare = is_spare;
        ask
    }

    /// All but those of pops that wait go back.
    pub fn leave(&mut self, waiting: u64) -> Option<Ask> {
        self.spare = true;
        self.ask(waiting, self.held > 0)
    }

    /// Takes in what the store said.
    pub fn answer(&mut self, ask: &Ask, held: u64, others: u64, now: Nanos) {
        (self.held, self.others) = (held, others);
        self.full_until = if held < ask.needed { now.saturating_add(FULL) } else { 0 };
    }

    /// The store is away: what it granted says nothing any more.
    pub fn unanswered(&mut self) {
        (self.held, self.wanted) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Places;
    use proptest::prelude::*;

    /// `places.lua` in plain numbers, for proxies that are all there.
    fn store(held: &mut [u64; 3], proxy: usize, ask: &super::Ask) -> (u64, u64) {
        let others = held.iter().sum::<u64>() - held[proxy];
        let room = ask.cap.saturating_sub(others);
        let spare = room.saturating_sub(ask.needed) / 3;
        let granted = room.min(ask.needed + ask.liked.saturating_sub(ask.needed).min(spare)).max(ask.usable);
        held[proxy] = granted;
        (granted, others)
    }

    proptest! {
        /// Pops come and go at three proxies; some answers come after more pops have come.
        #[test]
        fn no_more_wait_than_the_cap_allows(
            cap in 0_u64..7,
            steps in prop::collection::vec((0_usize..3, 0_u8..4), 0..200),
        ) {
            let mut proxies = <[Places; 3]>::default();
            let (mut waiting, mut held) = ([0_u64; 3], [0_u64; 3]);
            let mut now = 0;
            for (proxy, what) in steps {
                now += super::FULL;
                let places = &mut proxies[proxy];
                match what {
                    0 | 1 => {
                        let room = match places.room(cap, waiting[proxy], now) {
                            Some(room) => room,
                            None => {
                                places.wait();
                                let ask = places.ask(waiting[proxy], false).unwrap();
                                let (granted, others) = store(&mut held, proxy, &ask);
                                // Meanwhile all come for whom a place is held.
                                while places.room(cap, waiting[proxy], now) == Some(true) {
                                    waiting[proxy] += 1;
                                }
                                places.answer(&ask, granted, others, now);
                                places.room(cap, waiting[proxy], now) == Some(true)
                            }
                        };
                        let all = waiting.iter().sum::<u64>();
                        prop_assert!(!room || all < cap);
                        // Places that others hold and do not need are the only reason for less.
                        let spare: u64 = held.iter().zip(waiting).map(|(held, waiting)| held - waiting).sum();
                        prop_assert!(room || all + spare >= cap);
                        waiting[proxy] += u64::from(room);
                    }
                    2 => waiting[proxy] = waiting[proxy].saturating_sub(1),
                    _ => {
                        if let Some(ask) = places.sweep(waiting[proxy], true) {
                            let (granted, others) = store(&mut held, proxy, &ask);
                            places.answer(&ask, granted, others, now);
                        }
                    }
                }
                for (places, held) in proxies.iter().zip(held) {
                    prop_assert!(places.held() <= held);
                }
                prop_assert!(held.iter().sum::<u64>() <= cap);
                prop_assert!(held.iter().zip(waiting).all(|(held, waiting)| *held >= waiting));
            }
            for (proxy, places) in proxies.iter_mut().enumerate() {
                for _ in 0..3 {
                    if let Some(ask) = places.sweep(0, true) {
                        let (granted, others) = store(&mut held, proxy, &ask);
                        places.answer(&ask, granted, others, now);
                    }
                }
            }
            prop_assert_eq!(held, [0; 3], "all of them go back");
        }
    }
}
