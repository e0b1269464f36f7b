//! How many connections clients may have, in all and from one address.

use crate::gateway::Load;
use dashmap::DashMap;
use ipnet::IpNet;
use std::{
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, atomic::Ordering},
};

/// The caps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionCaps {
    /// Connections of all clients.
    pub total: usize,
    /// Connections of one address (of IPv6, of one network of 64 bits), unless it is a trusted proxy.
    pub per_address: usize,
}

/// Who has how many.
pub(super) struct Places {
    load: Arc<Load>,
    /// Only addresses with a connection are in it.
    by_address: DashMap<IpAddr, usize>,
}

impl Places {
    pub(super) fn new(load: Arc<Load>) -> Arc<Self> {
        Arc::new(Self { load, by_address: DashMap::new() })
    }

    /// A place among all connections, if there is one.
    pub(super) fn take(self: &Arc<Self>, caps: ConnectionCaps) -> Option<Place> {
        if self.load.connections.fetch_add(1, Ordering::Relaxed) >= caps.total {
            self.load.connections.fetch_sub(1, Ordering::Relaxed);
            self.load.refused_in_all.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Place { places: Arc::clone(self), address: None })
    }
}

/// A connection that counts until it is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    address: Option<IpAddr>,
}

impl Place {
    /// Whether its address may have one more. Connections of `balancers` are those of many.
    pub(super) fn count_for(&mut self, address: IpAddr, caps: ConnectionCaps, balancers: &[IpNet]) -> bool {
        let address = address.to_canonical();
        if balancers.iter().any(|network| network.contains(&address)) {
            return true;
        }
        let address = one_customer(address);
        let mut count = self.places.by_address.entry(address).or_default();
        if *count >= caps.per_address {
            self.places.load.refused_by_address.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        *count += 1;
        self.address = Some(address);
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.load.connections.fetch_sub(1, Ordering::Relaxed);
        if let Some(address) = self.address {
            self.places.by_address.remove_if_mut(&address, |_, count| {
                *count = count.saturating_sub(1);
                *count == 0
            });
        }
    }
}

/// A host of IPv4; a network of 64 bits of IPv6.
fn one_customer(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{ConnectionCaps, Place, Places};
    use crate::gateway::Load;
    use std::sync::Arc;

    const CAPS: ConnectionCaps = ConnectionCaps { total: 20, per_address: 2 };

    fn places() -> (Arc<Places>, Arc<Load>) {
        let load = Arc::new(Load::default());
        (Places::new(Arc::clone(&load)), load)
    }

    fn from(places: &Arc<Places>, address: &str) -> Option<Place> {
        let mut place = places.take(CAPS)?;
        let balancers = ["10.0.0.0/8".parse().unwrap()];
        place.count_for(address.parse().unwrap(), CAPS, &balancers).then_some(place)
    }

    #[test]
    fn places_are_counted_in_all_and_given_back() {
        let (places, load) = places();
        let few = ConnectionCaps { total: 2, per_address: 2 };
        let first = from(&places, "1.1.1.1").unwrap();
        let second = from(&places, "1.1.1.2").unwrap();
        assert!(places.take(few).is_none());
        assert_eq!((load.connections(), load.refused_connections()), (2, [1, 0]));
        drop(first);
        let third = from(&places, "1.1.1.3").unwrap();
        drop((second, third));
        assert_eq!(load.connections(), 0);
        assert!(places.by_address.is_empty());
    }

    #[test]
    fn one_address_has_its_share() {
        let (places, load) = places();
        for (address, neighbour) in
            [("1.1.1.1", "1.1.1.2"), ("2001:db8::1", "2001:db8:0:1::1"), ("::ffff:2.2.2.2", "2.2.2.3")]
        {
            let held = [from(&places, address).unwrap(), from(&places, address).unwrap()];
            assert!(from(&places, address).is_none(), "{address}");
            assert!(from(&places, neighbour).is_some(), "{neighbour}");
            drop(held);
            assert!(from(&places, address).is_some(), "{address}");
        }
        let network = [from(&places, "2001:db8::1").unwrap(), from(&places, "2001:db8::2").unwrap()];
        assert!(from(&places, "2001:db8::3").is_none(), "a network of 64 bits is one customer");
        assert_eq!(load.refused_connections(), [0, 4]);
        let balancer: Vec<Place> = (0..10).map(|_| from(&places, "10.1.2.3").unwrap()).collect();
        assert_eq!(balancer.len(), 10);
        drop((balancer, network));
        assert!(places.by_address.is_empty());
    }
}
