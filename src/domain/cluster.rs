//! What one request needs to know of its cluster.

use super::{
    features::Features,
    ids::{BrokerTenant, ClusterId, TenantId},
    limits::Limits,
    slug::Slug,
    status::Restriction,
};
use http::HeaderValue;
use std::{fmt, net::SocketAddr, sync::Arc};

/// An immutable snapshot of a cluster with the worse of the two statuses, the plan with overrides
/// and the upstream header values already built. Loading another one never changes this one.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The row's id.
    pub id: ClusterId,
    /// The organisation it belongs to.
    pub tenant: TenantId,
    /// Its subdomain.
    pub slug: Slug,
    /// The worse of tenant and cluster status.
    pub restriction: Restriction,
    /// The plan's limits with the cluster's overrides.
    pub limits: Limits,
    /// The plan's features.
    pub features: Features,
    /// Its name at the cell.
    pub broker_tenant: BrokerTenant,
    /// `x-queen-tenant`.
    pub tenant_header: HeaderValue,
    /// The cell that serves it.
    pub cell: Cell,
}

/// Where a cluster's cell is and how we present ourselves there.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Resolved addresses of `base_url`; empty when its name could not be resolved.
    pub addresses: Arc<[SocketAddr]>,
    /// The `Host` the cell sees.
    pub host: HeaderValue,
    /// A path in `base_url`, without trailing slash; mostly empty.
    pub path_prefix: Box<str>,
    /// `Authorization` with the cell's secret, marked sensitive; none when the cell has no secret.
    pub bearer: Option<HeaderValue>,
}

/// An API key that was not revoked when it was loaded.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// The row's id.
    pub id: super::ids::KeyId,
    /// The one cluster it is good for.
    pub cluster: ClusterId,
    /// What it may do there.
    pub scopes: super::scopes::Scopes,
}

/// A signed-in user on one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Person {
    /// Who.
    pub user: super::ids::UserId,
    /// What they may do here.
    pub role: super::scopes::Role,
    /// Whether they are a live operator of the cell, which opens the operator's routes too.
    pub operator: bool,
}

/// Who is asking.
#[derive(Clone, Debug)]
pub enum Principal {
    /// The holder of an API key of this cluster.
    ApiKey(Arc<ApiKey>),
    /// A signed-in user with a role on this cluster.
    Person(Person),
    /// Everybody: the proxy was started with `QUEEN_PROXY_DEV_INSECURE`.
    Anyone,
}

impl fmt::Display for Principal {
    /// For logs: a key's id, which is no secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiKey(key) => write!(f, "key {}", key.id),
            Self::Person(person) => write!(f, "user {}", person.user),
            Self::Anyone => f.write_str("anyone"),
        }
    }
}
