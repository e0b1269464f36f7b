//! Which queues and partitions a cluster has, as far as this process knows (proxy contract §9.3, D10).
//!
//! Names are kept as keyed hashes of 64 bits: what one name costs does not depend on its length, and
//! nobody can make two of them meet.

use super::{
    clock::Nanos,
    decision::{Limit, Outcome},
};
use crate::{domain::limits::Cap, policy::inspect::Pair};
use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, RandomState},
};

/// Hashes names the same way for as long as the process lives.
#[derive(Default, Debug)]
pub struct Names(RandomState);

/// A name, hashed.
pub type NameHash = u64;

/// A queue and a partition, hashed.
#[derive(Clone, Copy, Debug)]
pub struct HashedPair {
    queue: NameHash,
    partition: NameHash,
}

impl Names {
    /// The hash of a name.
    pub fn hash(&self, name: &str) -> NameHash {
        self.0.hash_one(name)
    }

    /// Both hashes of a pair.
    pub fn hash_pair(&self, pair: &Pair<'_>) -> HashedPair {
        HashedPair { queue: self.hash(&pair.queue), partition: self.hash(&pair.partition) }
    }
}

/// The two caps.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Queues of the cluster.
    pub queues: Cap,
    /// Partitions of one queue.
    pub partitions: Cap,
}

/// Which cap a request would break, by which of its pairs, and how many there are now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TooMany {
    /// `max_queues`.
    Queues {
        /// Index of the pair.
        pair: usize,
        /// Queues now.
        used: u64,
    },
    /// `max_partitions_per_queue`.
    Partitions {
        /// Index of the pair.
        pair: usize,
        /// Partitions of that queue now.
        used: u64,
    },
}

impl TooMany {
    pub(super) fn outcome(self, caps: Caps) -> Outcome {
        let (limit, cap, pair, used) = match self {
            Self::Queues { pair, used } => (Limit::Queues, caps.queues, pair, used),
            Self::Partitions { pair, used } => (Limit::Partitions, caps.partitions, pair, used),
        };
        let mut outcome = Outcome::plain(limit, super::number(cap).unwrap_or(0), used, true);
        outcome.index = Some(pair);
        outcome
    }
}

/// What recording an evaluated request will add; empty when every pair is known.
#[derive(Default, Debug)]
pub struct Plan(Vec<(usize, HashedPair)>);

/// A row of `queue_proxy.queues` to be written: the queue of the pair at `pair` has at least
/// `partitions` partitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Projected {
    /// Index of the pair in the request.
    pub pair: usize,
    /// Partitions, projected.
    pub partitions: u64,
}

/// The queues of one cluster.
#[derive(Default, Debug)]
pub struct Admission {
    loaded: bool,
    queues: HashMap<NameHash, Queue>,
    /// Partition names kept, over all queues.
    names: usize,
}

#[derive(Default, Debug)]
struct Queue {
    /// Partitions that went through this process.
    seen: HashSet<NameHash>,
    /// The last count that the table or the cell told.
    floor: u64,
    /// How many partitions existed whose names this process has not seen: so many unknown names are
    /// taken for old ones. Never raised by what went through here, or each listing would make room
    /// for as many new partitions again.
    unnamed: u64,
    first_seen: Nanos,
}

impl Queue {
    fn partitions(&self) -> u64 {
        (self.seen.len() as u64).max(self.floor)
    }
}

/// What one request adds to a queue, before any of it is recorded.
#[derive(Clone, Copy, Default)]
struct Added {
    new: u64,
    named: u64,
}

impl Admission {
    /// Whether the rows of the table have been taken in. Until then nothing is refused.
    pub fn is_loaded(&self) -> bool {
        self.loaded
    }

    /// Queues known.
    pub fn queues(&self) -> u64 {
        self.queues.len() as u64
    }

    /// Takes in the live rows of `queue_proxy.queues`, once; none when they could not be read.
    pub fn load(&mut self, rows: impl IntoIterator<Item = (NameHash, u64)>) {
        if std::mem::replace(&mut self.loaded, true) {
            return;
        }
        for (name, partitions) in rows {
            let queue = self.queues.entry(name).or_default();
            queue.floor = partitions;
            queue.unnamed = partitions.saturating_sub(queue.seen.len() as u64);
        }
    }

    /// Whether all the pairs of a request, distinct among themselves, may be there. Changes nothing.
    pub fn evaluate(&self, pairs: &[HashedPair], caps: Caps) -> Result<Plan, TooMany> {
        let mut plan = Plan::default();
        let mut added: HashMap<NameHash, Added> = HashMap::new();
        let mut new_queues = 0;
        for (index, pair) in pairs.iter().enumerate() {
            let known = self.queues.get(&pair.queue);
            if known.is_some_and(|queue| queue.seen.contains(&pair.partition)) {
                continue;
            }
            plan.0.push((index, *pair));
            if !self.loaded {
                continue;
            }
            if known.is_none() && !added.contains_key(&pair.queue) {
                let used = self.queues() + new_queues;
                if exceeds(used, caps.queues) {
                    return Err(TooMany::Queues { pair: index, used });
                }
                new_queues += 1;
            }
            let added = added.entry(pair.queue).or_default();
            if known.is_some_and(|queue| added.named < queue.unnamed) {
                added.named += 1;
                continue;
            }
            let used =
                known.map_or(0, |queue| (queue.seen.len() as u64 + added.named).max(queue.floor)) + added.new;
            if exceeds(used, caps.partitions) {
                return Err(TooMany::Partitions { pair: index, used });
            }
            added.new += 1;
        }
        Ok(plan)
    }

    /// Records what was evaluated just before, under the same lock. At most `max_names` partition
    /// names are kept; what is beyond stays unknown and is counted by the next listing.
    pub fn record(&mut self, plan: &Plan, now: Nanos, max_names: usize) -> Vec<Projected> {
        let mut projected: HashMap<NameHash, Projected> = HashMap::new();
        for (index, pair) in &plan.0 {
            if self.names >= max_names {
                break;
            }
            let fresh = || Queue { first_seen: now, ..Queue::default() };
            let queue = self.queues.entry(pair.queue).or_insert_with(fresh);
            if queue.seen.insert(pair.partition) {
                self.names += 1;
                queue.unnamed = queue.unnamed.saturating_sub(1);
            }
            projected.insert(pair.queue, Projected { pair: *index, partitions: queue.partitions() });
        }
        projected.into_values().collect()
    }

    /// Takes in a listing of the cell: every queue with its partitions. Queues that are not in it are
    /// forgotten, unless they were first seen after `settled`: a listing may be older than they are.
    /// Returns how many were forgotten.
    pub fn reconcile(&mut self, listing: &HashMap<NameHash, u64>, partitions: Cap, settled: Nanos) -> usize {
        let before = self.queues.len();
        self.queues.retain(|name, queue| listing.contains_key(name) || queue.first_seen > settled);
        for (name, told) in listing {
            let queue = self.queues.entry(*name).or_default();
            let known = queue.partitions();
            // Somebody else made partitions that we may hear of under their names later. Beyond the cap
            // there is no such credit: a tenant could not have made them through a proxy.
            if *told > known && !exceeds(told - 1, partitions) {
                queue.unnamed += told - known;
            }
            queue.floor = *told;
            queue.unnamed = queue.unnamed.min(*told);
            if *told == 0 && queue.first_seen <= settled {
                queue.seen.clear();
            }
        }
        self.names = self.queues.values().map(|queue| queue.seen.len()).sum();
        before.saturating_sub(self.queues.len())
    }
}

/// Whether one more than `used` is over the cap; no negative cap allows anything.
fn exceeds(used: u64, cap: Cap) -> bool {
    super::number(cap).is_some_and(|cap| used >= cap)
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
