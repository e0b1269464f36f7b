//! Identifiers. Each kind is a type of its own, so a tenant id cannot stand where a cluster id belongs.

use std::fmt;
use uuid::Uuid;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A row of `queen_proxy.tenants`.
    TenantId
);
id!(
    /// A row of `queen_proxy.clusters`; also the payload of `queen_proxy_inval`.
    ClusterId
);
id!(
    /// A row of `queen_proxy.api_keys`.
    KeyId
);
id!(
    /// A row of `queen_proxy.users`.
    UserId
);
id!(
    /// `clusters.broker_tenant_uuid`: what the cell knows the cluster by (`x-queen-tenant`).
    BrokerTenant
);

/// A request's id: a version 7 UUID, unique and sortable by time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestId(Uuid);

impl RequestId {
    /// A fresh id.
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// A part of it that is random.
    pub fn random(&self) -> u32 {
        // The lowest bits of a version 7 UUID are.
        #[allow(clippy::cast_possible_truncation)]
        {
            self.0.as_u128() as u32
        }
    }

    /// Writes the hyphenated form into `buffer` and returns it, without allocating.
    pub fn text<'b>(&self, buffer: &'b mut [u8; uuid::fmt::Hyphenated::LENGTH]) -> &'b str {
        self.0.hyphenated().encode_lower(buffer)
    }
}

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
