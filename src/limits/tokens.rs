//! What stands for a rate of a cluster: a bucket of this process, or a lease on one that proxies share.

use super::{
    bucket::{Bucket, Rate, Reading, tokens},
    clock::Nanos,
    shared::lease::{Ask, LARGEST, Lease},
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
    /// What this is for one rate: numbers that the store cannot count exactly stay with each proxy.
    fn under(self, rate: Rate) -> Self {
        if rate.per_second.max(rate.burst) > LARGEST { Self::Alone } else { self }
    }

    /// Parts of the limits, of which this proxy has one.
    pub fn parts(self) -> u64 {
        match self {
            Self::Apart(proxies) => proxies.max(1),
            Self::Alone | Self::Shared(_) => 1,
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
            (Self::Own(bucket), rate, _) => bucket.check(rate, now, n),
            (Self::Leased(lease), rate, proxies) => lease.check(rate, now, n, proxies),
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
            (Self::Own(bucket), rate, _) => bucket.debit(rate, now, n),
            (Self::Leased(lease), rate, _) => lease.debit(rate, now, n),
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

    /// Takes in an answer of the store, also where its request has waited too long meanwhile.
    pub fn answer(&mut self, ask: &Ask, granted: u64, level: i64, asked: Nanos, proxies: u64) {
        if granted > 0 {
            self.stand(ask.rate, asked, Footing::Shared(proxies));
        }
        if let Self::Leased(lease) = self {
            lease.answer(ask, granted, level, asked);
        }
    }

    /// The store has not answered.
    pub fn unanswered(&mut self) {
        if let Self::Leased(lease) = self {
            lease.unanswered();
        }
    }

    /// Changes from one kind to the other when the footing has changed, so that nothing is there twice: away from
    /// the store this proxy begins with its part of what was known, and the store hears what may be left at most.
    fn stand(&mut self, rate: Rate, now: Nanos, footing: Footing) -> (&mut Self, Rate, u64) {
        let footing = footing.under(rate);
        let parts = footing.parts();
        let part = if parts > 1 { rate.part(parts) } else { rate };
        let (mut under, mut proxies) = (part, 1);
        match (footing, &mut *self) {
            (Footing::Shared(all), Self::Own(bucket)) => {
                let most = bucket.rate().map(|of| {
                    let parts = if of == rate { 1 } else { i128::from(all.max(1)) };
                    let left = bucket.level(of, now).saturating_mul(parts).div_euclid(tokens(1));
                    i64::try_from(left).unwrap_or(if left < 0 { i64::MIN } else { i64::MAX })
                });
                *self = Self::Leased(Box::new(Lease::new(rate, most, now)));
                (under, proxies) = (rate, all);
            }
            (Footing::Shared(all), Self::Leased(_)) => (under, proxies) = (rate, all),
            (_, Self::Leased(lease)) => {
                *self = Self::Own(Bucket::known(part, lease.part(now, parts), now));
            }
            (_, Self::Own(_)) => {}
        }
        (self, under, proxies)
    }
}
