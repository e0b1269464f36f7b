//! A set that mostly has one element, and takes no memory of its own for it.

use std::{collections::HashSet, hash::Hash};

/// See the module.
#[derive(Debug, Default)]
pub(super) enum Few<K> {
    /// Nothing.
    #[default]
    None,
    /// The usual case.
    One(K),
    /// Two or more, or what is left of them.
    More(HashSet<K>),
}

impl<K: Copy + Eq + Hash> Few<K> {
    /// Adds an element.
    pub fn insert(&mut self, key: K) {
        match self {
            Self::None => *self = Self::One(key),
            Self::One(one) if *one == key => {}
            Self::One(one) => *self = Self::More(HashSet::from([*one, key])),
            Self::More(keys) => {
                keys.insert(key);
            }
        }
    }

    /// Takes an element out.
    pub fn remove(&mut self, key: &K) {
        match self {
            Self::One(one) if one == key => *self = Self::None,
            Self::None | Self::One(_) => {}
            Self::More(keys) => {
                keys.remove(key);
            }
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::None => true,
            Self::One(_) => false,
            Self::More(keys) => keys.is_empty(),
        }
    }

    /// All of them.
    pub fn into_vec(self) -> Vec<K> {
        match self {
            Self::None => Vec::new(),
            Self::One(one) => vec![one],
            Self::More(keys) => keys.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Few;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0_u8..4), 0..20)) {
            let (mut few, mut model) = (Few::default(), BTreeSet::new());
            for (insert, key) in steps {
                if insert {
                    few.insert(key);
                    model.insert(key);
                } else {
                    few.remove(&key);
                    model.remove(&key);
                }
                prop_assert_eq!(few.is_empty(), model.is_empty());
            }
            let all: BTreeSet<u8> = few.into_vec().into_iter().collect();
            prop_assert_eq!(all, model);
        }
    }
}
