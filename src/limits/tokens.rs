//! What stands for a rate of a cluster: a bucket of this process, or a lease on one that proxies share. Numbers that
//! the store cannot count exactly stay with each proxy.

use super::{
    bucket::{Bucket, Rate, Reading},
    clock::Nanos,
    shared::lease::{LARGEST, Lease},
};

/// On what the limits stand at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Footing {
    /// Each proxy counts for itself.
    Alone,
    /// In the store, with so many proxies.
    Shared(u64),
    /// The store is away: this proxy has one of so many parts.
    Apart(u64),
}

impl Footing {
    /// Proxies among which the limits are.
    pub fn proxies(self) -> u64 {
        match self {
            Self::Alone => 1,
            Self::Shared(proxies) | Self::Apart(proxies) => proxies.max(1),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub enum Tokens {
    /// Of this process alone.
    Own(Bucket),
    /// Of the store's.
    Leased(Box<Lease>),
}

impl Default for Tokens {
    fn default() -> Self {
        Self::Own(Bucket::default())
    }
}

impl Tokens {
    /// As [`Bucket::check`].
    pub fn check(&mut self, rate: Rate, now: Nanos, n: u64, footing: Footing) -> Reading {
        match self.stand(rate, now, footing) {
            Self::Own(bucket) => bucket.check(rate, now, n),
            Self::Leased(lease) => lease.check(rate, now, n, footing),
        }
    }

    /// Takes what a check allowed.
    pub fn take(&mut self, n: u64) {
        match self {
            Self::Own(bucket) => bucket.take(n),
            Self::Leased(lease) => lease.take(n),
        }
    }

    /// As [`Bucket::debit`].
    pub fn debit(&mut self, rate: Rate, now: Nanos, n: u64, footing: Footing) {
        match self.stand(rate, now, footing) {
            Self::Own(bucket) => bucket.debit(rate, now, n),
            Self::Leased(lease) => lease.debit(rate, now, n, footing),
        }
    }

    /// A request waits whose check was unsettled.
    pub fn wait(&mut self, n: u64) {
        if let Self::Leased(lease) = self {
            lease.wait(n);
        }
    }

    /// Whether the store should be asked.
    pub fn asks(&mut self) -> bool {
        self.lease().is_some_and(Lease::asks)
    }

    /// The lease, if it is one.
    pub fn lease(&mut self) -> Option<&mut Lease> {
        match self {
            Self::Own(_) => None,
            Self::Leased(lease) => Some(lease),
        }
    }

    /// The kind that this footing is for. A plan that comes to be too large for the store, or was, starts anew.
    fn stand(&mut self, rate: Rate, now: Nanos, footing: Footing) -> &mut Self {
        let leased = footing != Footing::Alone && rate.per_second.max(rate.burst) <= LARGEST;
        match (leased, &*self) {
            (true, Self::Own(_)) => *self = Self::Leased(Box::new(Lease::new(rate, now))),
            (false, Self::Leased(_)) => *self = Self::default(),
            _ => {}
        }
        self
    }
}
