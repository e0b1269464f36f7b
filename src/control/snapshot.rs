//! From a row to the [`Cluster`] that requests use: statuses merged, overrides laid over the plan,
//! header values built, the cell's name resolved.

use super::store::StoreError;
use crate::domain::{
    cluster::{Cell, Cluster},
    features::Features,
    ids::{BrokerTenant, ClusterId, TenantId},
    limits::{Cap, Limits},
    secret::Secret,
    slug::Slug,
    status::Restriction,
};
use http::{HeaderValue, Uri, uri::Authority};
use serde_json::Value;
use sqlx::{Row, postgres::PgRow};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::time::timeout;

/// Longest wait for a cell's name to resolve.
pub(super) const RESOLVE: Duration = Duration::from_secs(2);

/// A cluster as it stands in the tables, its statuses and overrides already read.
#[derive(Debug)]
pub struct ClusterRow {
    id: ClusterId,
    tenant: TenantId,
    slug: Slug,
    restriction: Restriction,
    limits: Limits,
    features: Features,
    broker_tenant: BrokerTenant,
    base_url: String,
    cell_secret: Option<Secret>,
}

/// Reads a row of `cluster.sql`.
pub(super) fn decode(row: &PgRow) -> Result<ClusterRow, StoreError> {
    // PostgreSQL nests deeper than our parser; what it cannot read holds no override and no feature.
    let document = |column| -> Result<Value, StoreError> {
        let text: String = row.try_get(column)?;
        Ok(serde_json::from_str(&text).unwrap_or_default())
    };
    let plan =
        Limits::from_columns(|name| Ok::<_, sqlx::Error>(Cap::from(row.try_get::<Option<i64>, _>(name)?)))?;
    let slug: String = row.try_get("slug")?;
    let slug = Slug::parse(&slug).ok_or(StoreError::Malformed("a cluster's slug is no DNS label"))?;
    let tenant_status: String = row.try_get("tenant_status")?;
    let cluster_status: String = row.try_get("cluster_status")?;
    Ok(ClusterRow {
        id: ClusterId(row.try_get("id")?),
        tenant: TenantId(row.try_get("tenant_id")?),
        slug,
        restriction: Restriction::of_tenant(&tenant_status).worst(Restriction::of_cluster(&cluster_status)),
        limits: plan.with_overrides(&document("limit_overrides")?),
        features: Features::from_document(&document("features")?),
        broker_tenant: BrokerTenant(row.try_get("broker_tenant_uuid")?),
        base_url: row.try_get("base_url")?,
        cell_secret: row
            .try_get::<Option<String>, _>("cell_secret")?
            .filter(|s| !s.is_empty())
            .map(Secret::new),
    })
}

impl ClusterRow {
    /// A cluster that is in no database: every feature, no limits, active.
    pub fn synthetic(base_url: String, secret: Option<Secret>, broker_tenant: BrokerTenant) -> Option<Self> {
        Some(Self {
            id: ClusterId(uuid::Uuid::nil()),
            tenant: TenantId(uuid::Uuid::nil()),
            slug: Slug::parse("dev")?,
            restriction: Restriction::None,
            limits: Limits::from_columns(|_| Ok::<_, std::convert::Infallible>(Cap::Unlimited)).ok()?,
            features: Features::all(),
            broker_tenant,
            base_url,
            cell_secret: secret,
        })
    }

    /// Builds the snapshot. A cell whose name does not resolve keeps its cluster known, with no
    /// address to forward to; so does one whose URL is not plain `http://`.
    pub async fn into_cluster(self) -> Result<Cluster, StoreError> {
        let bearer = self.cell_secret.as_ref().map(bearer).transpose()?;
        let tenant_header = HeaderValue::try_from(self.broker_tenant.to_string())
            .map_err(|_| StoreError::Malformed("a broker tenant is not fit for a header"))?;
        let (host, path_prefix, addresses) = locate(&self.base_url).await.unwrap_or_else(|| {
            tracing::error!(cluster = %self.slug, "the cell's base_url is not a usable http:// URL");
            (HeaderValue::from_static("cell"), "".into(), Vec::new())
        });
        Ok(Cluster {
            id: self.id,
            tenant: self.tenant,
            slug: self.slug,
            restriction: self.restriction,
            limits: self.limits,
            features: self.features,
            broker_tenant: self.broker_tenant,
            tenant_header,
            cell: Cell { addresses: Arc::from(addresses), host, path_prefix, bearer },
        })
    }
}

/// `Authorization` with a cell's secret, marked sensitive.
pub(super) fn bearer(secret: &Secret) -> Result<HeaderValue, StoreError> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", secret.expose()))
        .map_err(|_| StoreError::Malformed("a cell's secret is not fit for a header"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Authority and path prefix of a base URL; `None` for what is not plain `http://host`.
pub(super) fn split(base_url: &str) -> Option<(Authority, Box<str>)> {
    let uri: Uri = base_url.trim().parse().ok()?;
    let authority = uri.authority().filter(|a| !a.as_str().contains('@'))?;
    if uri.scheme_str() != Some("http") || uri.query().is_some() {
        return None;
    }
    Some((authority.clone(), uri.path().trim_end_matches('/').into()))
}

/// `Host`, path prefix and addresses of a base URL that [`split`] takes.
async fn locate(base_url: &str) -> Option<(HeaderValue, Box<str>, Vec<SocketAddr>)> {
    let (authority, prefix) = split(base_url)?;
    let host = HeaderValue::try_from(authority.as_str()).ok()?;
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let port = authority.port_u16().unwrap_or(80);
    let addresses = match name.parse::<IpAddr>() {
        Ok(address) => vec![SocketAddr::new(address, port)],
        Err(_) => match timeout(RESOLVE, tokio::net::lookup_host((name, port))).await {
            Ok(Ok(addresses)) => addresses.collect(),
            _ => {
                tracing::warn!(name, "the cell's name does not resolve");
                Vec::new()
            }
        },
    };
    Some((host, prefix, addresses))
}

#[cfg(test)]
mod tests {
    use super::locate;

    #[tokio::test]
    async fn base_urls() {
        let cases: &[(&str, Option<(&str, &str, &str)>)] = &[
            ("http://10.0.3.11:6632", Some(("10.0.3.11:6632", "", "10.0.3.11:6632"))),
            ("http://10.0.3.11:6632/", Some(("10.0.3.11:6632", "", "10.0.3.11:6632"))),
            ("http://10.0.3.11", Some(("10.0.3.11", "", "10.0.3.11:80"))),
            ("http://10.0.3.11/cell/a/", Some(("10.0.3.11", "/cell/a", "10.0.3.11:80"))),
            ("http://[::1]:6632", Some(("[::1]:6632", "", "[::1]:6632"))),
            ("https://10.0.3.11", None),
            ("10.0.3.11:6632", None),
            ("http://user:pass@10.0.3.11", None),
            ("http://10.0.3.11/?x=1", None),
            ("", None),
        ];
        for (url, want) in cases {
            let got = locate(url).await;
            let got =
                got.as_ref().map(|(host, prefix, at)| (host.to_str().unwrap(), &**prefix, at[0].to_string()));
            assert_eq!(got, want.map(|(host, prefix, at)| (host, prefix, at.to_owned())), "{url}");
        }
        let (_, _, addresses) = locate("http://localhost:6632").await.unwrap();
        assert!(!addresses.is_empty());
    }
}
