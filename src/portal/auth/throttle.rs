//! How often somebody may try to sign in: so many attempts per fixed window of a minute.

use dashmap::{DashMap, Entry};
use std::{
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

const WINDOW: Duration = Duration::from_secs(60);
/// A full table is looked through for ended windows at most this often.
const SWEEP: Duration = Duration::from_secs(1);

/// Seconds until the window ends, at least 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TooMany(pub u32);

/// Attempts by key. Beyond `max_keys` at a time, newcomers share one window: whoever fills the table does
/// not get more attempts by it.
pub(super) struct Throttle<K> {
    limit: u32,
    max_keys: usize,
    windows: DashMap<K, Window>,
    newcomers: Mutex<Newcomers>,
}

#[derive(Clone, Copy)]
struct Window {
    began: Instant,
    attempts: u32,
}

struct Newcomers {
    window: Window,
    swept: Option<Instant>,
}

impl Window {
    fn at(now: Instant) -> Self {
        Self { began: now, attempts: 0 }
    }

    fn take(&mut self, limit: u32, now: Instant) -> Result<(), TooMany> {
        if now.saturating_duration_since(self.began) >= WINDOW {
            *self = Self::at(now);
        }
        if self.attempts >= limit {
            let rest = WINDOW.saturating_sub(now.saturating_duration_since(self.began));
            let seconds = rest.as_secs() + u64::from(rest.subsec_nanos() > 0);
            return Err(TooMany(u32::try_from(seconds).unwrap_or(u32::MAX).max(1)));
        }
        self.attempts += 1;
        Ok(())
    }
}

impl<K: Eq + Hash + Copy> Throttle<K> {
    /// At most `limit` attempts a minute for each key.
    pub fn new(limit: u32, max_keys: usize) -> Self {
        let newcomers = Newcomers { window: Window::at(Instant::now()), swept: None };
        Self { limit, max_keys, windows: DashMap::new(), newcomers: Mutex::new(newcomers) }
    }

    /// Takes one attempt.
    pub fn take(&self, key: K, now: Instant) -> Result<(), TooMany> {
        if let Some(mut window) = self.windows.get_mut(&key) {
            return window.take(self.limit, now);
        }
        if self.windows.len() >= self.max_keys {
            let mut newcomers = self.newcomers.lock().unwrap_or_else(PoisonError::into_inner);
            if newcomers.swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP) {
                newcomers.swept = Some(now);
                self.windows.retain(|_, window| now.saturating_duration_since(window.began) < WINDOW);
            }
            if self.windows.len() >= self.max_keys {
                return newcomers.window.take(self.limit, now);
            }
        }
        match self.windows.entry(key) {
            Entry::Occupied(mut window) => window.get_mut().take(self.limit, now),
            Entry::Vacant(vacant) => vacant.insert(Window::at(now)).take(self.limit, now),
        }
    }

    /// Gives an attempt back that turned out not to count.
    pub fn give_back(&self, key: K) {
        if let Some(mut window) = self.windows.get_mut(&key) {
            window.attempts = window.attempts.saturating_sub(1);
        }
    }
}

/// What counts as one address: a host of IPv4, a network of 64 bits of IPv6, which is what one customer has.
/// Clients whose address is not known count as one.
pub(super) fn origin(address: Option<IpAddr>) -> IpAddr {
    match address.map(|address| address.to_canonical()) {
        Some(IpAddr::V6(address)) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
        }
        Some(address) => address,
        None => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

#[cfg(test)]
mod tests {
    use super::{Throttle, TooMany, origin};
    use std::time::{Duration, Instant};

    #[test]
    fn a_window_holds_its_limit_and_says_when_it_ends() {
        let throttle = Throttle::new(2, 10);
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for (millis, key, want) in [
            (0, 'a', Ok(())),
            (30_000, 'a', Ok(())),
            (30_000, 'a', Err(TooMany(30))),
            (30_001, 'a', Err(TooMany(30))),
            (59_999, 'a', Err(TooMany(1))),
            (59_999, 'b', Ok(())),
            (60_000, 'a', Ok(())),
            (60_000, 'a', Ok(())),
            (60_000, 'a', Err(TooMany(60))),
        ] {
            assert_eq!(throttle.take(key, at(millis)), want, "{key} at {millis}");
        }
        throttle.give_back('a');
        assert_eq!(throttle.take('a', at(60_000)), Ok(()));
        assert_eq!(Throttle::new(0, 10).take('a', start), Err(TooMany(60)), "zero is none");
    }

    #[test]
    fn a_full_table_gives_nobody_more_attempts() {
        let throttle = Throttle::new(2, 3);
        let start = Instant::now();
        let admitted = (0..1_000).filter(|key| throttle.take(*key, start).is_ok()).count();
        assert_eq!(admitted, 3 + 2);
        assert_eq!(throttle.take(0, start), Ok(()), "who was there before is counted alone");
        let later = start + Duration::from_secs(60);
        assert_eq!(throttle.take(999, later), Ok(()));
        assert_eq!(throttle.windows.len(), 1, "ended windows make room");
    }

    #[test]
    fn origins() {
        let of = |text: &str| origin(Some(text.parse().unwrap())).to_string();
        for (address, want) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:2::", "2001:db8:1:2::"),
        ] {
            assert_eq!(of(address), want, "{address}");
        }
        assert_eq!(origin(None).to_string(), "::");
    }
}
