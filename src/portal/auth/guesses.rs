//! How often somebody may try to sign in: per address, per account, and per both.

use super::{
    AuthSettings,
    throttle::{Counted, Throttle, TooMany, site},
};
use sha2::{Digest, Sha256};
use std::{hash::Hash, net::IpAddr, time::Instant};

/// Attempts per site of IPv6, as multiples of those per address.
const ADDRESSES_PER_SITE: u32 = 10;

/// What an account is counted by, whether or not there is one: the sha256 of its email.
pub(super) type Account = [u8; 32];

/// See [`Account`].
pub(super) fn account(email: &str) -> Account {
    Sha256::digest(email).into()
}

/// Who tries to sign in how often.
pub(super) struct Guesses {
    addresses: Throttle<IpAddr>,
    sites: Throttle<IpAddr>,
    accounts_by_address: Throttle<(Account, IpAddr)>,
    accounts: Throttle<Account>,
}

impl Guesses {
    pub fn new(settings: &AuthSettings) -> Self {
        let per_address = settings.attempts_per_address;
        let per_both = settings.failures_per_account_and_address;
        Self {
            addresses: Throttle::new(per_address, settings.max_tracked),
            sites: Throttle::new(per_address.saturating_mul(ADDRESSES_PER_SITE), settings.max_tracked),
            accounts_by_address: Throttle::new(per_both, settings.max_tracked),
            accounts: Throttle::new(settings.failures_per_account, settings.max_tracked),
        }
    }

    /// One attempt from an address.
    pub fn by_address(&self, origin: IpAddr, now: Instant) -> Result<(), TooMany> {
        self.addresses.take(origin, now)?;
        site(origin).map_or(Ok(()), |site| self.sites.take(site, now))
    }

    /// One attempt at an account. From one address few are free, so that nobody keeps others out of theirs.
    pub fn of_account(&self, account: Account, origin: IpAddr, now: Instant) -> Result<(), TooMany> {
        self.accounts_by_address.take((account, origin), now)?;
        self.accounts
            .take(account, now)
            .inspect_err(|_| self.accounts_by_address.give_back((account, origin)))
    }

    /// The attempt at the account was no failure.
    pub fn nothing_wrong(&self, account: Account, origin: IpAddr) {
        self.accounts_by_address.give_back((account, origin));
        self.accounts.give_back(account);
    }

    /// The attempt was not looked at.
    pub fn nothing_tried(&self, origin: IpAddr) {
        self.addresses.give_back(origin);
        if let Some(site) = site(origin) {
            self.sites.give_back(site);
        }
    }
}

impl Counted for Account {
    fn group(self) -> impl Hash {
        self
    }
}

impl Counted for (Account, IpAddr) {
    fn group(self) -> impl Hash {
        self.1.group()
    }
}

#[cfg(test)]
mod tests {
    use super::{Guesses, account};
    use crate::{
        config::proxy::ProxyConfig,
        portal::auth::throttle::{TooMany, origin},
    };
    use std::{net::IpAddr, time::Instant};

    fn guesses() -> Guesses {
        let environment = [
            ("PXDB_HOST", "x"),
            ("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", "6"),
            ("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT", "12"),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Guesses::new(&ProxyConfig::load(environment, None).unwrap().0.sessions.auth)
    }

    fn from(address: &str) -> IpAddr {
        origin(Some(address.parse().unwrap()))
    }

    #[test]
    fn a_site_of_ipv6_has_ten_times_what_an_address_has() {
        let (guesses, now) = (guesses(), Instant::now());
        let network = |n: u32| from(&format!("2001:db8:0:{n:x}::1"));
        for n in 0..60 {
            assert_eq!(guesses.by_address(network(n), now), Ok(()), "{n}");
        }
        assert_eq!(guesses.by_address(network(60), now), Err(TooMany(60)));
        assert_eq!(guesses.by_address(from("2001:db8:1::1"), now), Ok(()));
        guesses.nothing_tried(network(0));
        assert_eq!(guesses.by_address(network(61), now), Ok(()), "what was not looked at is free");
        for _ in 0..6 {
            assert_eq!(guesses.by_address(from("192.0.2.1"), now), Ok(()));
        }
        assert_eq!(guesses.by_address(from("192.0.2.1"), now), Err(TooMany(60)));
    }

    #[test]
    fn one_address_does_not_keep_others_out_of_an_account() {
        let (guesses, now) = (guesses(), Instant::now());
        let (ann, bob) = (account("ann"), account("bob"));
        for address in ["192.0.2.1", "192.0.2.2"] {
            for _ in 0..5 {
                assert_eq!(guesses.of_account(ann, from(address), now), Ok(()));
            }
            assert_eq!(guesses.of_account(ann, from(address), now), Err(TooMany(60)));
        }
        assert_eq!(guesses.of_account(ann, from("192.0.2.3"), now), Ok(()));
        assert_eq!(guesses.of_account(ann, from("192.0.2.3"), now), Ok(()));
        // Twelve in all; what the account refuses does not count for the address.
        for _ in 0..9 {
            assert_eq!(guesses.of_account(ann, from("192.0.2.4"), now), Err(TooMany(60)));
        }
        guesses.nothing_wrong(ann, from("192.0.2.3"));
        assert_eq!(guesses.of_account(ann, from("192.0.2.4"), now), Ok(()));
        assert_eq!(guesses.of_account(bob, from("192.0.2.1"), now), Ok(()));
    }
}
