//! A cell as its operator knows it: who is let in, the kill switch, sweeping, metrics, and a database that
//! fails. Requests go straight to cells, as the proxy sends them.

mod admission;
mod failures;
mod groups;
mod listing;
mod metrics;
mod sweeping;
mod switch;

use crate::support::{Answer, World};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const ACME: Uuid = Uuid::from_u128(0xac3e);
const GLOBEX: Uuid = Uuid::from_u128(0x9105e);

/// Longest wait for what happens within a refresh of one second.
const SOON: Duration = Duration::from_secs(20);

async fn put_at(world: &World, port: u16, tenant: Uuid, key: &str, body: &Value) -> Answer {
    world.ask_cell(port, &format!("PUT /api/v1/kv/ns/{key}"), tenant, &body.to_string()).await
}

async fn put(world: &World, tenant: Uuid, key: &str) -> Answer {
    put_at(world, world.cell_port, tenant, key, &json!({"value": 1, "forever": true})).await
}

async fn get(world: &World, tenant: Uuid, key: &str) -> Answer {
    world.ask_cell(world.cell_port, &format!("GET /api/v1/kv/ns/{key}"), tenant, "").await
}

async fn delete(world: &World, tenant: Uuid, key: &str) -> Answer {
    world.ask_cell(world.cell_port, &format!("DELETE /api/v1/kv/ns/{key}"), tenant, "").await
}

async fn batch(world: &World, tenant: Uuid, operations: &Value) -> Answer {
    world.ask_cell(world.cell_port, "POST /api/v1/kv", tenant, &operations.to_string()).await
}

/// Status, `error` and `reason` of an answer.
fn refusal(answer: &Answer) -> (u16, String, String) {
    let text = |name: &str| answer.json()[name].as_str().unwrap_or_default().to_owned();
    (answer.status, text("error"), text("reason"))
}

/// A refusal as it is expected.
fn refused(status: u16, error: &str, reason: &str) -> (u16, String, String) {
    (status, error.to_owned(), reason.to_owned())
}

/// Runs statements in the cell's database.
async fn cell_sql(world: &World, statements: &str) {
    let statements = sqlx::AssertSqlSafe(statements.to_owned());
    sqlx::raw_sql(statements).execute(&mut world.cell_database().await).await.unwrap();
}

/// One number from the cell's database.
async fn number(world: &World, query: &str) -> i64 {
    let query = sqlx::AssertSqlSafe(query.to_owned());
    sqlx::query_scalar(query).fetch_one(&mut world.cell_database().await).await.unwrap()
}

/// The metrics of a cell, as text.
async fn scrape(world: &World, port: u16) -> String {
    let answer = world.ask_cell(port, "GET /metrics/prometheus", ACME, "").await;
    assert_eq!(answer.status, 200);
    String::from_utf8(answer.body).unwrap()
}

/// The value of one series.
fn sample(metrics: &str, series: &str) -> f64 {
    let value = crate::support::sample(metrics, series);
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no series {series} in\n{metrics}"))
}
