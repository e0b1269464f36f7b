//! What the benches that start real programs have in common.

#![allow(dead_code)] // each uses its part

use queen_proxy::{
    dev::postgres::{Postgres, Settings, USER},
    identity,
};
use sqlx::{Connection, PgConnection};
use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};
use tokio::{net::TcpStream, time::sleep};

/// A program that ends with its bench.
pub struct Program(pub Child);

impl Program {
    /// Starts it without its output.
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until somebody listens there.
pub async fn listening(port: u16) {
    while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        sleep(Duration::from_millis(20)).await;
    }
}

/// A private PostgreSQL with these databases, of which nothing stays.
pub async fn postgres(databases: &[&str]) -> Postgres {
    let folder = std::env::temp_dir().join(format!("queen-bench-{}", uuid::Uuid::new_v4().simple()));
    let server = Postgres::start(Settings { folder, port: 0, throw_away: true }).unwrap();
    let mut postgres = connect(&server, "postgres").await;
    for database in databases {
        let create = format!("CREATE DATABASE {database}");
        sqlx::query(sqlx::AssertSqlSafe(create)).execute(&mut postgres).await.unwrap();
    }
    server
}

/// How a proxy reaches its control plane there.
pub fn pxdb(server: &Postgres, database: &str) -> [(&'static str, String); 5] {
    [
        ("PXDB_HOST", "127.0.0.1".to_owned()),
        ("PXDB_PORT", server.port().to_string()),
        ("PXDB_USER", USER.to_owned()),
        ("PXDB_PASSWORD", server.password().expose().to_owned()),
        ("PXDB_DB", database.to_owned()),
    ]
}

/// Fills a control plane with clusters at one cell, each with a slug, a key and these overrides.
pub async fn clusters(
    control: &mut PgConnection,
    (base_url, secret): (&str, &str),
    named: impl Iterator<Item = (String, String)>,
    overrides: serde_json::Value,
) {
    let tenant = "INSERT INTO queen_proxy.tenants (slug, name) VALUES ('bench', 'Bench')";
    sqlx::query(tenant).execute(&mut *control).await.unwrap();
    sqlx::query(
        "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)
              VALUES ('bench', 'bench', $1, 'shared', $2)",
    )
    .bind(base_url)
    .bind(secret)
    .execute(&mut *control)
    .await
    .unwrap();
    let (slugs, digests): (Vec<String>, Vec<String>) =
        named.map(|(slug, key)| (slug, hex::encode(identity::digest(&key)))).unzip();
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
    .bind(overrides)
    .execute(control)
    .await
    .unwrap();
}

/// A superuser's connection.
pub async fn connect(server: &Postgres, database: &str) -> PgConnection {
    PgConnection::connect_with(&server.connect_options(database)).await.unwrap()
}

/// The key of a new tenant `acme` whose cluster `acme` is served by the cell on this port, with these overrides.
pub async fn tenant(control: &mut PgConnection, cell_port: u16, overrides: &str) -> String {
    let key: String = sqlx::query_scalar(
        "WITH cell AS (
             INSERT INTO queen_proxy.cells (slug, region, base_url, class) VALUES ('c', 'r', $1, 'shared')
             RETURNING id
         )
         SELECT queen_proxy.bootstrap_tenant('acme', 'acme', 'acme', 'pro', id, 'a@acme.example')
                    ->> 'api_key'
           FROM cell",
    )
    .bind(format!("http://127.0.0.1:{cell_port}"))
    .fetch_one(&mut *control)
    .await
    .unwrap();
    sqlx::query("UPDATE queen_proxy.clusters SET limit_overrides = $1::jsonb")
        .bind(overrides)
        .execute(control)
        .await
        .unwrap();
    key
}
