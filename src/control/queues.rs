//! The table `queen_proxy.queues`, a cache of what the cells have, and whom to ask for what is in them
//! (proxy contract §9.3, §14).

use super::{
    snapshot,
    store::{Store, StoreError},
};
use crate::domain::{
    ids::{BrokerTenant, ClusterId},
    limits::{Cap, Limits},
    secret::Secret,
};
use http::{HeaderValue, uri::Authority};
use sqlx::Row;
use std::{collections::HashMap, sync::Arc, time::Duration};
use uuid::Uuid;

/// An index row of PostgreSQL holds 2,704 bytes.
const MAX_NAME_BYTES: usize = 1_024;

/// A cluster that a cell is asked about.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its id.
    pub id: ClusterId,
    /// Its slug, for the log.
    pub slug: Box<str>,
    /// What the cell knows it by.
    pub broker_tenant: BrokerTenant,
    /// `max_partitions_per_queue`, with the override.
    pub partitions: Cap,
    /// `max_retained_bytes`, with the override.
    pub retained: Cap,
    /// Where it lives.
    pub cell: Arc<TargetCell>,
}

/// A cell to be asked.
#[derive(Debug)]
pub struct TargetCell {
    /// `cells.id`
    pub id: Uuid,
    /// Its slug.
    pub slug: Box<str>,
    /// How to reach it; none when `base_url` is no plain `http://` URL, or the secret no header.
    pub way: Option<Way>,
}

/// How to reach a cell.
#[derive(Clone, Debug)]
pub struct Way {
    /// Host and port.
    pub authority: Authority,
    /// A path in `base_url`, without trailing slash.
    pub prefix: Box<str>,
    /// `Authorization`, marked sensitive; none when the cell has no secret.
    pub bearer: Option<HeaderValue>,
}

/// A live row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnownQueue {
    /// Queue.
    pub name: String,
    /// Its count.
    pub partitions: u32,
    /// Whether the row is older than the settle time.
    pub settled: bool,
}

/// One difference between a listing and the rows that were read before it was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Correction<'n> {
    /// Queue.
    pub name: &'n str,
    /// What the cell tells; none when the queue is not there.
    pub partitions: Option<u32>,
    /// What the row told; none when there was no live row.
    pub seen: Option<u32>,
}

/// A row to be written whose count never goes down by it.
#[derive(Clone, Copy, Debug)]
pub struct NewCount<'n> {
    /// Whose.
    pub cluster: ClusterId,
    /// Queue.
    pub name: &'n str,
    /// Partitions; what the column cannot hold is stored as its greatest.
    pub partitions: u64,
}

/// Whether the table takes a name.
pub fn is_storable(name: &str) -> bool {
    name.len() <= MAX_NAME_BYTES && !name.contains('\0') && !name.trim().is_empty()
}

impl Store {
    /// Clusters whose own status is not `deleting`, all or those of `only`, at most `most`.
    pub async fn targets(&self, only: Option<&[ClusterId]>, most: usize) -> Result<Vec<Target>, StoreError> {
        let only: Option<Vec<Uuid>> = only.map(|ids| ids.iter().map(|id| id.0).collect());
        let rows = self
            .ask(async |connection| {
                sqlx::query(include_str!("sql/reconcile_targets.sql"))
                    .bind(&only)
                    .bind(i64::try_from(most).unwrap_or(i64::MAX))
                    .fetch_all(&mut **connection)
                    .await
            })
            .await?;
        let mut cells: HashMap<Uuid, Arc<TargetCell>> = HashMap::new();
        let mut target = |row: &sqlx::postgres::PgRow| -> Result<Target, sqlx::Error> {
            let cell: Uuid = row.try_get("cell_id")?;
            let cell = match cells.get(&cell) {
                Some(known) => Arc::clone(known),
                None => {
                    let secret: Option<String> = row.try_get("cell_secret")?;
                    let way = way(row.try_get("base_url")?, secret.filter(|secret| !secret.is_empty()));
                    let slug = row.try_get::<String, _>("cell_slug")?.into();
                    let made = Arc::new(TargetCell { id: cell, slug, way });
                    cells.insert(cell, Arc::clone(&made));
                    made
                }
            };
            let overrides: String = row.try_get("limit_overrides")?;
            let limits = Limits::from_columns(|name| match name {
                "max_partitions_per_queue" | "max_retained_bytes" => {
                    row.try_get::<Option<i64>, _>(name).map(Cap::from)
                }
                _ => Ok(Cap::Unlimited),
            })?
            .with_overrides(&serde_json::from_str(&overrides).unwrap_or_default());
            Ok(Target {
                id: ClusterId(row.try_get("id")?),
                slug: row.try_get::<String, _>("slug")?.into(),
                broker_tenant: BrokerTenant(row.try_get("broker_tenant_uuid")?),
                partitions: limits.max_partitions_per_queue,
                retained: limits.max_retained_bytes,
                cell,
            })
        };
        Ok(rows.iter().map(&mut target).collect::<Result<_, sqlx::Error>>()?)
    }

    /// The live rows of a cluster; an error when there are more than `most`.
    pub async fn queues(
        &self,
        cluster: ClusterId,
        settle: Duration,
        most: usize,
    ) -> Result<Vec<KnownQueue>, StoreError> {
        let rows: Vec<(String, i32, bool)> = self
            .ask(async |connection| {
                sqlx::query_as(include_str!("sql/queues_live.sql"))
                    .bind(cluster.0)
                    .bind(settle.as_secs_f64())
                    .bind(i64::try_from(most).unwrap_or(i64::MAX).saturating_add(1))
                    .fetch_all(&mut **connection)
                    .await
            })
            .await?;
        if rows.len() > most {
            return Err(StoreError::Malformed("a cluster has more queues than this proxy keeps"));
        }
        let known = |(name, partitions, settled)| KnownQueue {
            name,
            partitions: u32::try_from(partitions).unwrap_or(0),
            settled,
        };
        Ok(rows.into_iter().map(known).collect())
    }

    /// Writes counts that this process projected. Returns a cluster id for each row that was not
    /// written because its cluster is no more.
    pub async fn persist_queues(&self, rows: &[NewCount<'_>]) -> Result<Vec<ClusterId>, StoreError> {
        let clusters: Vec<Uuid> = rows.iter().map(|row| row.cluster.0).collect();
        let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
        let counts: Vec<i32> = rows.iter().map(|row| column(row.partitions)).collect();
        let orphans: Vec<Uuid> = self
            .ask(async |connection| {
                sqlx::query_scalar(include_str!("sql/queues_persist.sql"))
                    .bind(&clusters)
                    .bind(&names)
                    .bind(&counts)
                    .fetch_all(&mut **connection)
                    .await
            })
            .await?;
        Ok(orphans.into_iter().map(ClusterId).collect())
    }

    /// Writes what a listing corrects. Rows that somebody wrote since they were read stay as they are.
    pub async fn correct_queues(
        &self,
        cluster: ClusterId,
        corrections: &[Correction<'_>],
    ) -> Result<(), StoreError> {
        let names: Vec<&str> = corrections.iter().map(|one| one.name).collect();
        let count = |count: Option<u32>| count.map(|count| column(count.into()));
        let told: Vec<Option<i32>> = corrections.iter().map(|one| count(one.partitions)).collect();
        let seen: Vec<Option<i32>> = corrections.iter().map(|one| count(one.seen)).collect();
        self.ask(async |connection| {
            sqlx::query(include_str!("sql/queues_correct.sql"))
                .bind(cluster.0)
                .bind(&names)
                .bind(&told)
                .bind(&seen)
                .execute(&mut **connection)
                .await
        })
        .await?;
        Ok(())
    }
}

fn way(base_url: &str, secret: Option<String>) -> Option<Way> {
    let (authority, prefix) = snapshot::split(base_url)?;
    let bearer = secret.map(Secret::new).as_ref().map(snapshot::bearer).transpose().ok()?;
    Some(Way { authority, prefix, bearer })
}

/// A count as `partitions_count` holds it.
fn column(count: u64) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::{column, is_storable, way};

    #[test]
    fn only_what_the_table_takes() {
        let long = "x".repeat(1_024);
        for (name, want) in
            [("q", true), ("a b", true), (&*long, true), ("", false), ("\t ", false), ("a\0", false)]
        {
            assert_eq!(is_storable(name), want, "{name:?}");
        }
        assert!(!is_storable(&format!("{long}x")));
        for (count, want) in [(0, 0), (7, 7), (2_147_483_648, i32::MAX), (u64::MAX, i32::MAX)] {
            assert_eq!(column(count), want);
        }
    }

    #[test]
    fn a_secret_does_not_show() {
        let found = way("http://10.0.0.1:1/p/", Some("hunter2".to_owned())).unwrap();
        assert_eq!((found.authority.as_str(), &*found.prefix), ("10.0.0.1:1", "/p"));
        assert!(!format!("{found:?}").contains("hunter2"));
        assert!(way("https://10.0.0.1", None).is_none());
        assert!(way("http://10.0.0.1", Some("line\nbreak".to_owned())).is_none());
    }
}
