//! Lifecycle states and how two of them combine (proxy contract §8).

/// How far a tenant or a cluster is restricted; the order is the severity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Restriction {
    /// Everything the credential allows.
    None,
    /// What makes data grow is refused, reading and cleaning up are not.
    PushBlocked,
    /// The whole data plane is refused. Also what an unknown state means, so that a state added
    /// by a later schema cannot fail open.
    #[default]
    Suspended,
    /// Being wiped; the same effect as suspended.
    Deleting,
}

impl Restriction {
    /// What a value of `tenants.status` means.
    pub fn of_tenant(status: &str) -> Self {
        match status {
            "active" => Self::None,
            "grace" => Self::PushBlocked,
            "deleting" => Self::Deleting,
            _ => Self::Suspended,
        }
    }

    /// What a value of `clusters.status` means.
    pub fn of_cluster(status: &str) -> Self {
        match status {
            "active" => Self::None,
            "push_blocked" => Self::PushBlocked,
            "deleting" => Self::Deleting,
            _ => Self::Suspended,
        }
    }

    /// The worse of the two: a tenant's state covers each of its clusters.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        self.max(other)
    }

    /// Whether the whole data plane is refused.
    pub fn is_suspended(self) -> bool {
        self >= Self::Suspended
    }
}

/// Why pushes are blocked, in the order in which a reason is named.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PushBlock {
    /// The cluster keeps as much as its plan allows.
    Storage,
    /// The month's messages are used up.
    Monthly,
    /// The lifecycle of tenant or cluster.
    Lifecycle,
}

#[cfg(test)]
mod tests {
    use super::Restriction::{self, Deleting, None, PushBlocked, Suspended};

    #[test]
    fn the_worse_status_wins() {
        let tenants = [
            ("active", None),
            ("grace", PushBlocked),
            ("suspended", Suspended),
            ("deleting", Deleting),
            ("", Suspended),
            ("Active", Suspended),
            ("push_blocked", Suspended), // a cluster's word, unknown for a tenant
            ("future", Suspended),
        ];
        let clusters = [
            ("active", None),
            ("push_blocked", PushBlocked),
            ("suspended", Suspended),
            ("deleting", Deleting),
            ("", Suspended),
            ("ACTIVE", Suspended),
            ("grace", Suspended), // a tenant's word, unknown for a cluster
            ("future", Suspended),
        ];
        for (tenant, of_tenant) in tenants {
            assert_eq!(Restriction::of_tenant(tenant), of_tenant, "tenant {tenant}");
            for (cluster, of_cluster) in clusters {
                assert_eq!(Restriction::of_cluster(cluster), of_cluster, "cluster {cluster}");
                let merged = Restriction::of_tenant(tenant).worst(Restriction::of_cluster(cluster));
                let severity = |r: Restriction| r as u8;
                assert_eq!(severity(merged), severity(of_tenant).max(severity(of_cluster)));
                assert_eq!(merged.is_suspended(), severity(merged) >= 2, "{tenant}/{cluster}");
            }
        }
    }
}
