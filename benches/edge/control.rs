//! The control plane of our proxy: clusters and keys by the thousand, with limits that are there and in nobody's way.

use crate::{SECRET, common, names};
use queen_proxy::{
    dev::postgres::{Postgres, Settings},
    domain::limits::Limits,
};
use sqlx::Connection;
use std::{collections::HashMap, path::Path, process::Command};

const DATABASE: &str = "control";

/// Starts it with so many clusters at a cell on this port, migrated by the proxy that will use it.
pub async fn start(folder: &Path, proxy: &Path, clusters: usize, cell_port: u16) -> Postgres {
    let settings = Settings { folder: folder.join("pxdb"), port: 0, throw_away: true };
    let server = Postgres::start(settings).unwrap();
    let mut postgres = common::connect(&server, "postgres").await;
    sqlx::query("CREATE DATABASE control").execute(&mut postgres).await.unwrap();
    let migrated =
        Command::new(proxy).arg("migrate").env_clear().envs(environment(&server)).output().unwrap();
    assert!(migrated.status.success(), "{}", String::from_utf8_lossy(&migrated.stderr));

    let mut control = common::connect(&server, DATABASE).await;
    let generous: serde_json::Map<_, _> =
        Limits::NAMES.iter().map(|name| ((*name).to_owned(), 1_000_000_000_000_i64.into())).collect();
    let base_url = format!("http://127.0.0.1:{cell_port}");
    let named = (0..clusters).map(|n| (names::slug(n), names::key(n)));
    common::clusters(&mut control, (&base_url, SECRET), named, generous.into()).await;
    control.close().await.unwrap();
    server
}

/// How a proxy reaches it.
pub fn environment(server: &Postgres) -> HashMap<&'static str, String> {
    common::pxdb(server, DATABASE).into()
}
