//! What an API key may do, and what a user's role on a cluster may do (proxy contract §5).

/// The scopes of an API key. They are independent: `admin` does not imply the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(clippy::struct_excessive_bools)] // four independent yes or no, as stored
pub struct Scopes {
    /// May push.
    pub produce: bool,
    /// May pop, acknowledge and extend leases.
    pub consume: bool,
    /// May configure and delete queues, and read.
    pub admin: bool,
    /// May read listings and figures.
    pub read: bool,
}

impl Scopes {
    /// Reads `api_keys.scopes`; a word this version does not know grants nothing.
    pub fn from_words<'w>(words: impl IntoIterator<Item = &'w str>) -> Self {
        let mut scopes = Self::default();
        for word in words {
            match word {
                "produce" => scopes.produce = true,
                "consume" => scopes.consume = true,
                "admin" => scopes.admin = true,
                "read" => scopes.read = true,
                _ => {}
            }
        }
        scopes
    }

    /// All four, for a proxy that was told not to authenticate.
    pub fn all() -> Self {
        Self { produce: true, consume: true, admin: true, read: true }
    }
}

/// A user's role on one cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// May do everything on the cluster.
    Admin,
    /// May push.
    Producer,
    /// May pop and acknowledge.
    Consumer,
    /// May look.
    Viewer,
}

impl Role {
    /// Reads `cluster_roles.role`; the set is closed, so an unknown word is no role.
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "admin" => Some(Self::Admin),
            "producer" => Some(Self::Producer),
            "consumer" => Some(Self::Consumer),
            "viewer" => Some(Self::Viewer),
            _ => None,
        }
    }

    /// The word of `cluster_roles.role`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Producer => "producer",
            Self::Consumer => "consumer",
            Self::Viewer => "viewer",
        }
    }
}
