//! `admin cluster show`: a cluster as the proxies see it, merged by the very types that merge for them.

use super::{
    cells::without_credentials,
    failure::Failure,
    plane::{Plane, Reference},
    report::{Report, table, word},
};
use crate::domain::{
    features::{Feature, Features},
    limits::{Cap, Limits},
    status::Restriction,
};
use serde_json::{Map, Value, json};
use sqlx::{FromRow, Row, postgres::PgRow, query_as};
use std::convert::Infallible;
use uuid::Uuid;

/// A row of `show_cluster.sql`.
pub(super) struct ClusterRow {
    pub id: Uuid,
    pub slug: String,
    status: String,
    broker_tenant: Uuid,
    tenant_id: Uuid,
    tenant_slug: String,
    tenant_status: String,
    pub plan: String,
    pub limits: Limits,
    pub overrides: Value,
    features: Features,
    cell_id: Uuid,
    cell_slug: String,
    cell_region: String,
    cell_url: String,
    live_keys: i64,
}

impl FromRow<'_, PgRow> for ClusterRow {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        // As for a proxy: what our parser cannot read holds no override and no feature.
        let document = |column| -> Result<Value, sqlx::Error> {
            Ok(serde_json::from_str(&row.try_get::<String, _>(column)?).unwrap_or_default())
        };
        Ok(Self {
            id: row.try_get("id")?,
            slug: row.try_get("slug")?,
            status: row.try_get("cluster_status")?,
            broker_tenant: row.try_get("broker_tenant_uuid")?,
            tenant_id: row.try_get("tenant_id")?,
            tenant_slug: row.try_get("tenant_slug")?,
            tenant_status: row.try_get("tenant_status")?,
            plan: row.try_get("plan")?,
            limits: Limits::from_columns(|name| {
                Ok::<_, sqlx::Error>(Cap::from(row.try_get::<Option<i64>, _>(name)?))
            })?,
            overrides: document("limit_overrides")?,
            features: Features::from_document(&document("features")?),
            cell_id: row.try_get("cell_id")?,
            cell_slug: row.try_get("cell_slug")?,
            cell_region: row.try_get("cell_region")?,
            cell_url: row.try_get("cell_base_url")?,
            live_keys: row.try_get("live_keys")?,
        })
    }
}

/// One limit in effect.
pub(super) struct Effective {
    name: &'static str,
    cap: Cap,
    source: &'static str,
}

/// The row of a cluster.
pub(super) async fn row(cluster: &Reference, plane: &mut Plane) -> Result<ClusterRow, Failure> {
    let cluster = plane.cluster(cluster).await?;
    let query = query_as(include_str!("sql/show_cluster.sql")).bind(cluster.id);
    plane.find(query).await?.ok_or(Failure::Missing("cluster"))
}

/// Shows a cluster.
pub(super) async fn show(cluster: &Reference, plane: &mut Plane) -> Result<Report, Failure> {
    let row = row(cluster, plane).await?;
    let limits = effective(&row.limits, &row.overrides);
    let ignored = ignored(&row.overrides, &limits);
    Ok(Report::new(document(&row, &limits, &ignored), text(&row, &limits, &ignored)))
}

fn merged(row: &ClusterRow) -> &'static str {
    let restriction = Restriction::of_tenant(&row.tenant_status).worst(Restriction::of_cluster(&row.status));
    match restriction {
        Restriction::None => "active",
        Restriction::PushBlocked => "push_blocked",
        Restriction::Suspended => "suspended",
        Restriction::Deleting => "deleting",
    }
}

/// A plan's limits with a cluster's overrides, and where each comes from.
pub(super) fn effective(plan: &Limits, overrides: &Value) -> Vec<Effective> {
    // Which overrides count is known to `Limits` alone. One that counts has the same outcome over
    // whatever plan; one that is ignored leaves two plans different.
    let over = |number| {
        let Ok(limits) = Limits::from_columns(|_| Ok::<_, Infallible>(Cap::At(number)));
        limits.with_overrides(overrides).entries()
    };
    plan.clone()
        .with_overrides(overrides)
        .entries()
        .into_iter()
        .zip(over(1))
        .zip(over(2))
        .map(|(((name, cap), (_, one)), (_, other))| {
            let source = match (one == other, cap) {
                (true, _) => "override",
                (false, Cap::At(_)) => "plan",
                (false, Cap::Unlimited) => "unlimited",
            };
            Effective { name, cap, source }
        })
        .collect()
}

/// Overrides that have no effect: of no known limit, or of no usable value.
fn ignored(overrides: &Value, limits: &[Effective]) -> Vec<String> {
    let counts = |name: &str| limits.iter().any(|limit| limit.name == name && limit.source == "override");
    let names = overrides.as_object().into_iter().flat_map(Map::keys);
    names.filter(|name| !counts(name)).cloned().collect()
}

/// The limits by name, for scripts.
pub(super) fn limits_document(limits: &[Effective]) -> Map<String, Value> {
    limits
        .iter()
        .map(|limit| {
            let value = match limit.cap {
                Cap::Unlimited => None,
                Cap::At(number) => Some(number),
            };
            (limit.name.to_owned(), json!({"value": value, "source": limit.source}))
        })
        .collect()
}

fn document(row: &ClusterRow, limits: &[Effective], ignored: &[String]) -> Value {
    let features: Map<String, Value> = Feature::ALL
        .into_iter()
        .map(|feature| (feature.key().to_owned(), row.features.contains(feature).into()))
        .collect();
    json!({
        "cluster_id": row.id,
        "cluster_slug": row.slug,
        "broker_tenant_uuid": row.broker_tenant,
        "tenant_id": row.tenant_id,
        "tenant_slug": row.tenant_slug,
        "status": {"cluster": row.status, "tenant": row.tenant_status, "effective": merged(row)},
        "plan": row.plan,
        "limits": limits_document(limits),
        "ignored_overrides": ignored,
        "features": features,
        "cell": {
            "cell_id": row.cell_id,
            "slug": row.cell_slug,
            "region": row.cell_region,
            "base_url": without_credentials(&row.cell_url),
        },
        "live_keys": row.live_keys,
    })
}

/// The limits for people.
pub(super) fn limits_table(limits: &[Effective]) -> String {
    let rows: Vec<Vec<String>> = limits
        .iter()
        .map(|limit| {
            let value = match limit.cap {
                Cap::Unlimited => "unlimited".to_owned(),
                Cap::At(number) => number.to_string(),
            };
            // Where no plan and no override sets a limit, "unlimited" has said it already.
            let source = if limit.source == "unlimited" { "" } else { limit.source };
            vec![limit.name.to_owned(), value, source.to_owned()]
        })
        .collect();
    table(&["limit", "value", "from"], &rows)
}

fn text(row: &ClusterRow, limits: &[Effective], ignored: &[String]) -> String {
    let features: Vec<&str> = Feature::ALL
        .into_iter()
        .filter(|feature| row.features.contains(*feature))
        .map(Feature::key)
        .collect();
    let mut text = format!(
        "cluster   {} ({})\ntenant    {} ({})\nstatus    {} (cluster: {}, tenant: {})\nplan      {}\n\
         features  {}\ncell      {} in {} at {}\nkeys      {} live\n\n{}",
        row.slug,
        row.id,
        row.tenant_slug,
        row.tenant_id,
        merged(row),
        row.status,
        row.tenant_status,
        row.plan,
        if features.is_empty() { "-".to_owned() } else { features.join(", ") },
        row.cell_slug,
        row.cell_region,
        without_credentials(&row.cell_url),
        row.live_keys,
        limits_table(limits),
    );
    if !ignored.is_empty() {
        let names: Vec<String> = ignored.iter().map(|name| word(&name.as_str().into())).collect();
        text.push_str("\nOverrides without effect: ");
        text.push_str(&names.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{effective, ignored};
    use crate::domain::limits::{Cap, Limits};
    use serde_json::json;

    #[test]
    fn each_limit_says_where_it_comes_from() {
        let plan = |cap| Limits::from_columns(|_| Ok::<_, ()>(cap)).unwrap();
        let cases = [
            (json!({}), Cap::At(2), Cap::At(2), "plan"),
            (json!({}), Cap::Unlimited, Cap::Unlimited, "unlimited"),
            (json!({"max_queues": 500}), Cap::At(2), Cap::At(500), "override"),
            (json!({"max_queues": 2}), Cap::At(2), Cap::At(2), "override"),
            (json!({"max_queues": 500}), Cap::Unlimited, Cap::At(500), "override"),
            (json!({"max_queues": null}), Cap::At(2), Cap::Unlimited, "override"),
            (json!({"max_queues": null}), Cap::Unlimited, Cap::Unlimited, "override"),
            (json!({"max_queues": "500"}), Cap::At(2), Cap::At(2), "plan"),
            (json!({"max_queues": 1.5}), Cap::Unlimited, Cap::Unlimited, "unlimited"),
            (json!([1]), Cap::At(2), Cap::At(2), "plan"),
        ];
        for (overrides, of_plan, cap, source) in cases {
            let limits = effective(&plan(of_plan), &overrides);
            let queues = limits.iter().find(|limit| limit.name == "max_queues").unwrap();
            assert_eq!((queues.cap, queues.source), (cap, source), "{overrides} over {of_plan:?}");
            let others = limits.iter().filter(|limit| limit.name != "max_queues");
            assert!(others.into_iter().all(|limit| limit.cap == of_plan && limit.source != "override"));
        }
    }

    #[test]
    fn overrides_without_effect_are_named() {
        let overrides = json!({"max_queues": 500, "req_burst": "9", "max_queue": 1});
        let plan = Limits::from_columns(|_| Ok::<_, ()>(Cap::At(7))).unwrap();
        assert_eq!(ignored(&overrides, &effective(&plan, &overrides)), ["max_queue", "req_burst"]);
    }
}
