//! What one proxy holds of a bucket that is in the store: tokens granted and not yet spent.
//!
//! A request takes from what is held and waits for nobody. More is asked for before it is spent. What the store has
//! is remembered as a bucket of its own, refilled by our clock: others only take from it, so when that bucket says
//! no, the store would too, and the refusal waits for nobody either.
//!
//! While the store is away, this proxy's part of the rate refills a bucket here. What it spends of that, the store hears
//! when it is back, so nothing is there twice.

use super::super::{
    bucket::{Bucket, Rate, Reading, tokens},
    clock::{Nanos, SECOND},
    tokens::Footing,
};

/// Tokens are asked for as many as were spent of late in twice this.
const WINDOW: Nanos = SECOND / 20;
/// A store that had too little is asked again when so much time's refill is in it, for each proxy.
const PACE: Nanos = SECOND / 200;
/// Tokens that nobody has taken for this long are handed back.
const IDLE: Nanos = SECOND;
/// The last one of a large bucket is kept this long, so that rare requests do not wait for the store.
const LAST_IDLE: Nanos = 60 * SECOND;
/// For this long a store that does not answer may still serve others.
const SHORT: Nanos = SECOND;
/// Above this, in tokens a second and of a burst, the arithmetic of the store is not exact any more.
pub const LARGEST: u64 = 100_000_000;

/// What the store is asked for one bucket; the arguments of `tokens.lua`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// As the plan says now.
    pub rate: Rate,
    /// Tokens handed back.
    pub back: u64,
    /// Tokens that deliveries took.
    pub owed: u64,
    /// Tokens spent without the store.
    pub apart: u64,
    /// The deepest debt that they may make, in tokens.
    pub apart_debt: u64,
    /// Tokens that all requests need together that wait for this.
    pub needs: u64,
    /// Those of the smallest of them; 0 when none waits.
    pub smallest: u64,
    /// Tokens held.
    pub held: u64,
    /// Tokens that are asked for beyond.
    pub more: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Lease {
    rate: Rate,
    /// What the store has, as far as this proxy knows: hardly ever less than it really has.
    store: Bucket,
    held: u64,
    owed: u64,
    /// This proxy's part, while it cannot ask.
    own: Option<Bucket>,
    own_since: Nanos,
    apart: u64,
    apart_debt: u64,
    needs: u64,
    smallest: u64,
    /// The last answer was less than was asked for.
    short: bool,
    asking: bool,
    proxies: u64,
    demand: Demand,
    now: Nanos,
    used_at: Nanos,
}

impl Lease {
    /// Nothing is held yet.
    pub fn new(rate: Rate, now: Nanos) -> Self {
        Self {
            rate,
            store: Bucket::default(),
            held: 0,
            owed: 0,
            own: None,
            own_since: 0,
            apart: 0,
            apart_debt: 0,
            needs: 0,
            smallest: 0,
            short: false,
            asking: false,
            proxies: 1,
            demand: Demand::default(),
            now,
            used_at: now,
        }
    }

    /// As [`Bucket::check`], and besides: what is neither held nor known to be refused is unsettled, unless the
    /// store is not to be asked.
    pub fn check(&mut self, rate: Rate, now: Nanos, n: u64, footing: Footing) -> Reading {
        let proxies = self.stand(rate, now, footing);
        if let Some(own) = &mut self.own {
            let part = rate.part(proxies);
            return part.reading(own.level(part, now) + tokens(self.held), n);
        }
        let store = self.store.level(rate, now);
        let mut reading = rate.reading(store + tokens(self.held) - tokens(self.owed), n);
        if n == 0 || reading.denied || self.held >= n {
            return reading;
        }
        let missing = rate.needed(n) - tokens(self.held);
        reading.unsettled = !self.short || store >= missing.max(self.pace());
        reading.denied = !reading.unsettled;
        reading
    }

    /// Takes what a check allowed.
    pub fn take(&mut self, n: u64) {
        let rest = self.take_held(n);
        if let Some(own) = &mut self.own {
            own.take(rest);
            self.store.take(rest);
            self.apart = self.apart.saturating_add(rest);
        }
        self.used_at = self.now;
        self.demand.add(n, self.now);
    }

    /// Books deliveries: from what is held, the rest at the store.
    pub fn debit(&mut self, rate: Rate, now: Nanos, n: u64, footing: Footing) {
        let proxies = self.stand(rate, now, footing);
        let rest = self.take_held(n);
        if let Some(own) = &mut self.own {
            own.debit(rate.part(proxies), now, rest);
            self.store.debit(rate, now, rest);
            self.apart = self.apart.saturating_add(rest);
        } else {
            self.owed = self.owed.saturating_add(rest);
        }
    }

    /// Takes from what is held; returns how many that leaves.
    fn take_held(&mut self, n: u64) -> u64 {
        let here = n.min(self.held);
        self.held -= here;
        n - here
    }

    /// Brings everything up to now. Away from the store this proxy begins with its part of what was known to be in
    /// it. Returns how many proxies there are.
    fn stand(&mut self, rate: Rate, now: Nanos, footing: Footing) -> u64 {
        (self.rate, self.now, self.proxies) = (rate, now, footing.proxies());
        if let Footing::Apart(proxies) = footing {
            let known = self.store.level(rate, now) - tokens(self.owed);
            let part = rate.part(proxies);
            // Below 10^17 each, by `LARGEST`.
            let level = (known * part.capacity()).div_euclid(rate.capacity().max(1));
            if self.own.is_none() {
                (self.own, self.own_since) = (Some(Bucket::known(part, level, now)), now);
            }
        } else if self.own.take().is_some() {
            // After longer it is not known what the store would have refilled, so there is no debt to be made.
            let is_short = now.saturating_sub(self.own_since) <= SHORT;
            self.apart_debt = if is_short { rate.per_second } else { 0 };
        }
        self.proxies
    }

    /// A request waits whose check was unsettled.
    pub fn wait(&mut self, n: u64) {
        self.smallest = if self.needs == 0 { n } else { self.smallest.min(n) };
        self.needs = self.needs.saturating_add(n);
    }

    /// Whether the store should be asked now.
    pub fn asks(&mut self) -> bool {
        self.needs > 0 || self.owed > 0 || self.apart > 0 || self.more() > 0
    }

    /// What to ask; all of it counts as told.
    pub fn ask(&mut self) -> Option<Ask> {
        self.ask_back(0)
    }

    /// The same for one that may be idle: what nobody takes is handed back.
    pub fn sweep(&mut self, now: Nanos) -> Option<Ask> {
        self.now = now;
        let unused = now.saturating_sub(self.used_at);
        let is_small = self.rate.burst < self.proxies.saturating_mul(10);
        let keep = if unused < IDLE { self.held } else { u64::from(unused < LAST_IDLE && !is_small) };
        self.ask_back(self.held.saturating_sub(keep))
    }

    /// All that is held goes back.
    pub fn leave(&mut self) -> Option<Ask> {
        self.ask_back(self.held)
    }

    fn ask_back(&mut self, back: u64) -> Option<Ask> {
        let more = if back > 0 { 0 } else { self.more() };
        if back == 0 && !self.asks() {
            return None;
        }
        self.held -= back;
        let ask = Ask {
            rate: self.rate,
            back,
            owed: std::mem::take(&mut self.owed),
            apart: std::mem::take(&mut self.apart),
            apart_debt: std::mem::take(&mut self.apart_debt),
            needs: std::mem::take(&mut self.needs),
            smallest: std::mem::take(&mut self.smallest),
            held: self.held,
            more,
        };
        self.asking = true;
        Some(ask)
    }

    /// Takes in what the store said: whole tokens granted, and its level in millionths of a token when it was
    /// `asked`.
    pub fn answer(&mut self, ask: &Ask, granted: u64, level: i64, asked: Nanos) {
        self.asking = false;
        self.held = self.held.saturating_add(granted);
        self.short = granted < ask.needs.saturating_sub(ask.held).max(ask.more);
        self.store = Bucket::known(ask.rate, i128::from(level) * 1_000, asked);
        if granted > 0 {
            self.used_at = self.used_at.max(asked);
        }
    }

    /// There was no answer.
    pub fn unanswered(&mut self) {
        self.asking = false;
    }

    /// Tokens held.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Tokens to ask for although nobody waits for them.
    fn more(&mut self) -> u64 {
        let target = self.demand.expected(self.now).min(self.rate.burst);
        if self.asking || self.held.saturating_mul(2) >= target {
            return 0;
        }
        let store = self.store.level(self.rate, self.now);
        let least = if self.short { self.pace() } else { 0 };
        if store < tokens(1).max(least) { 0 } else { target - self.held }
    }

    /// A level below which a store that had too little is left alone: the proxies would ask for each single token.
    fn pace(&self) -> i128 {
        let refill = i128::from(self.rate.per_second) * i128::from(PACE.saturating_mul(self.proxies));
        refill.min(self.rate.capacity() / 2)
    }
}

/// What is spent in the current window and was in the one before.
#[derive(Default, Debug)]
struct Demand {
    since: Nanos,
    this: u64,
    last: u64,
}

impl Demand {
    fn add(&mut self, n: u64, now: Nanos) {
        self.turn(now);
        self.this = self.this.saturating_add(n);
    }

    /// Tokens that two windows are likely to need; 0 when nobody takes any.
    fn expected(&mut self, now: Nanos) -> u64 {
        self.turn(now);
        self.this.max(self.last).saturating_mul(2)
    }

    fn turn(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.since);
        if passed >= WINDOW {
            // One rare request still counts for a while, or each of its kind would wait for the store.
            let rare = u64::from(self.this + self.last > 0 && passed < IDLE);
            self.last = if passed < 2 * WINDOW { self.this.max(rare) } else { rare };
            (self.this, self.since) = (0, now);
        }
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
