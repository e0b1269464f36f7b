//! The control plane of our proxy: clusters and keys by the thousand, with limits that are there and in nobody's way.

use crate::{SECRET, names};
use queen_proxy::{
    dev::postgres::{Postgres, Settings, USER},
    domain::limits::Limits,
    identity,
};
use sqlx::Connection;
use std::{collections::HashMap, path::Path, process::Command};

const DATABASE: &str = "control";

/// Starts it with so many clusters at a cell on this port, migrated by the proxy that will use it.
pub async fn start(folder: &Path, proxy: &Path, clusters: usize, cell_port: u16) -> Postgres {
    let settings = Settings { folder: folder.join("pxdb"), port: 0, throw_away: true };
    let server = Postgres::start(settings).unwrap();
    let mut postgres = super::common::connect(&server, "postgres").await;
    sqlx::query("CREATE DATABASE control").execute(&mut postgres).await.unwrap();
    let migrated =
        Command::new(proxy).arg("migrate").env_clear().envs(environment(&server)).output().unwrap();
    assert!(migrated.status.success(), "{}", String::from_utf8_lossy(&migrated.stderr));

    let mut control = super::common::connect(&server, DATABASE).await;
    sqlx::query("INSERT INTO queen_proxy.tenants (slug, name) VALUES ('bench', 'Bench')")
        .execute(&mut control)
        .await
        .unwrap();
    sqlx::query(
        "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)
              VALUES ('bench', 'bench', $1, 'shared', $2)",
    )
    .bind(format!("http://127.0.0.1:{cell_port}"))
    .bind(SECRET)
    .execute(&mut control)
    .await
    .unwrap();
    let slugs: Vec<String> = (0..clusters).map(names::slug).collect();
    let digests: Vec<String> = (0..clusters).map(|n| hex::encode(identity::digest(&names::key(n)))).collect();
    let generous: serde_json::Map<_, _> =
        Limits::NAMES.iter().map(|name| ((*name).to_owned(), 1_000_000_000_000_i64.into())).collect();
    sqlx::query(
        "WITH made AS (
             INSERT INTO queen_proxy.clusters (tenant_id, cell_id, plan_id, slug, limit_overrides)
             SELECT t.id, c.id, p.id, s, $3
               FROM queen_proxy.tenants t, queen_proxy.cells c, queen_proxy.plans p, unnest($1::text[]) s
              WHERE p.code = 'pro'
             RETURNING id, slug
         )
         INSERT INTO queen_proxy.api_keys (cluster_id, name, key_hash, scopes)
         SELECT made.id, 'bench', k.digest, '{produce,consume,read}'
           FROM unnest($1::text[], $2::text[]) AS k (slug, digest)
           JOIN made ON made.slug = k.slug",
    )
    .bind(&slugs)
    .bind(&digests)
    .bind(serde_json::Value::Object(generous))
    .execute(&mut control)
    .await
    .unwrap();
    control.close().await.unwrap();
    server
}

/// How a proxy reaches it.
pub fn environment(server: &Postgres) -> HashMap<&'static str, String> {
    HashMap::from([
        ("PXDB_HOST", "127.0.0.1".to_owned()),
        ("PXDB_PORT", server.port().to_string()),
        ("PXDB_USER", USER.to_owned()),
        ("PXDB_PASSWORD", server.password().expose().to_owned()),
        ("PXDB_DB", DATABASE.to_owned()),
    ])
}
