//! How often somebody may do something: so many times per fixed window of a minute.

use crate::domain::ids::UserId;
use dashmap::{DashMap, Entry};
use std::{
    hash::{BuildHasher, Hash, RandomState},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

const WINDOW: Duration = Duration::from_secs(60);
/// A full table is looked through for ended windows at most this often.
const SWEEP: Duration = Duration::from_secs(1);
/// Windows that newcomers to a full table share.
const SHARED: usize = 256;

/// Seconds until the window ends, at least 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TooMany(pub u32);

/// What is counted.
pub(super) trait Counted: Eq + Hash + Copy {
    /// Those of one group share a window when the table is full. What one person can have many of is in
    /// one group.
    fn group(self) -> impl Hash;
}

/// Attempts by key. Beyond `max_keys` at a time, newcomers share windows, of which a secret picks one for
/// each group: whoever fills the table gets few more attempts by it, and takes few windows from others.
pub(super) struct Throttle<K> {
    limit: u32,
    max_keys: usize,
    windows: DashMap<K, Window>,
    shared: Vec<Mutex<Window>>,
    secret: RandomState,
    swept: Mutex<Option<Instant>>,
}

#[derive(Clone, Copy)]
struct Window {
    began: Instant,
    attempts: u32,
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

impl<K: Counted> Throttle<K> {
    /// At most `limit` attempts a minute for each key.
    pub fn new(limit: u32, max_keys: usize) -> Self {
        let now = Instant::now();
        Self {
            limit,
            max_keys,
            windows: DashMap::new(),
            shared: (0..SHARED).map(|_| Mutex::new(Window::at(now))).collect(),
            secret: RandomState::new(),
            swept: Mutex::new(None),
        }
    }

    /// Takes one attempt.
    pub fn take(&self, key: K, now: Instant) -> Result<(), TooMany> {
        if let Some(mut window) = self.windows.get_mut(&key) {
            return window.take(self.limit, now);
        }
        if self.windows.len() >= self.max_keys {
            self.sweep(now);
            if self.windows.len() >= self.max_keys {
                return self.shared(key, |window| window.take(self.limit, now)).unwrap_or(Ok(()));
            }
        }
        match self.windows.entry(key) {
            Entry::Occupied(mut window) => window.get_mut().take(self.limit, now),
            Entry::Vacant(vacant) => vacant.insert(Window::at(now)).take(self.limit, now),
        }
    }

    /// Gives an attempt back that turned out not to count. Where none is left, the window ends: when the
    /// next begins tells nothing of this one.
    pub fn give_back(&self, key: K) {
        if let Some(mut window) = self.windows.get_mut(&key) {
            window.attempts = window.attempts.saturating_sub(1);
        } else {
            self.shared(key, |window| window.attempts = window.attempts.saturating_sub(1));
            return;
        }
        self.windows.remove_if(&key, |_, window| window.attempts == 0);
    }

    fn sweep(&self, now: Instant) {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        if swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP) {
            *swept = Some(now);
            self.windows.retain(|_, window| now.saturating_duration_since(window.began) < WINDOW);
        }
    }

    /// Does something with the window that the key's group shares.
    fn shared<T>(&self, key: K, with: impl FnOnce(&mut Window) -> T) -> Option<T> {
        let hash = usize::try_from(self.secret.hash_one(key.group()) % SHARED as u64).ok()?;
        let mut window = self.shared.get(hash)?.lock().unwrap_or_else(PoisonError::into_inner);
        Some(with(&mut window))
    }
}

impl Counted for IpAddr {
    /// A network of 24 bits of IPv4, of 48 of IPv6.
    fn group(self) -> impl Hash {
        match self {
            IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & !0xff)),
            IpAddr::V6(address) => IpAddr::V6(first_bits(address, 48)),
        }
    }
}

impl Counted for UserId {
    fn group(self) -> impl Hash {
        self
    }
}

/// What counts as one address: a host of IPv4, a network of 64 bits of IPv6, which is what one customer has.
/// Clients whose address is not known count as one.
pub(super) fn origin(address: Option<IpAddr>) -> IpAddr {
    match address.map(|address| address.to_canonical()) {
        Some(IpAddr::V6(address)) => IpAddr::V6(first_bits(address, 64)),
        Some(address) => address,
        None => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The network of 48 bits that an origin of IPv6 is in, which is the most that a customer has.
pub(super) fn site(origin: IpAddr) -> Option<IpAddr> {
    match origin {
        IpAddr::V6(address) if !address.is_unspecified() => Some(IpAddr::V6(first_bits(address, 48))),
        _ => None,
    }
}

fn first_bits(address: Ipv6Addr, bits: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(address.to_bits() & !(u128::MAX >> bits))
}

#[cfg(test)]
mod tests {
    use super::{Counted, Throttle, TooMany, origin, site};
    use std::{
        hash::Hash,
        net::{IpAddr, Ipv4Addr},
        time::{Duration, Instant},
    };

    impl Counted for char {
        fn group(self) -> impl Hash {
            self
        }
    }

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
    fn a_full_table_gives_one_network_few_attempts_and_leaves_others_theirs() {
        let throttle = Throttle::new(2, 3);
        let start = Instant::now();
        let host = |n: u32| IpAddr::V4(Ipv4Addr::from_bits(n));
        let admitted = (0..200).filter(|n| throttle.take(host(*n), start).is_ok()).count();
        assert_eq!(admitted, 3 + 2, "all of one network of 24 bits share a window");
        assert_eq!(throttle.take(host(0), start), Ok(()), "who was there before is counted alone");
        let strangers = (0..100).filter(|n| throttle.take(host(0x0a00_0000 + (n << 8)), start).is_ok());
        assert!(strangers.count() > 60, "of 256 windows few are taken");
        let later = start + Duration::from_secs(60);
        assert_eq!(throttle.take(host(999), later), Ok(()));
        assert_eq!(throttle.windows.len(), 1, "ended windows make room");
    }

    #[test]
    fn what_is_given_back_in_a_full_table_goes_where_it_was_taken() {
        let throttle = Throttle::new(1, 0);
        let start = Instant::now();
        for _ in 0..5 {
            assert_eq!(throttle.take('a', start), Ok(()));
            throttle.give_back('a');
        }
        assert_eq!(throttle.take('a', start), Ok(()));
        assert_eq!(throttle.take('a', start), Err(TooMany(60)));
    }

    #[test]
    fn a_window_without_attempts_is_none() {
        let throttle = Throttle::new(1, 10);
        let start = Instant::now();
        throttle.take('a', start).unwrap();
        throttle.give_back('a');
        let later = start + Duration::from_secs(20);
        throttle.take('a', later).unwrap();
        assert_eq!(throttle.take('a', later), Err(TooMany(60)), "nobody hears that 'a' was here before");
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
        for (address, want) in
            [("192.0.2.7", None), ("::ffff:192.0.2.7", None), ("2001:db8:1:2:3:4:5:6", Some("2001:db8:1::"))]
        {
            let site = site(origin(Some(address.parse().unwrap()))).map(|site| site.to_string());
            assert_eq!(site.as_deref(), want, "{address}");
        }
        assert_eq!(site(origin(None)), None);
    }
}
