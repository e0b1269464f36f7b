//! What the benches that start real programs have in common.

#![allow(dead_code)] // each uses its part

use queen_proxy::dev::postgres::Postgres;
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
