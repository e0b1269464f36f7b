//! Usage as tenants cause it: requests through running proxies to a cell that keeps books, against what is in the
//! control plane in the end.

mod answers;
mod books;
mod disk;
mod kills;
mod leaving;
mod load;
mod month;
mod outage;
mod streams;

use crate::support::Recorded;
use crate::support::{Tenant, World, WorldBuilder};
use books::{Books, Told};
use std::collections::BTreeMap;

/// Requests, messages, bytes in and bytes out, by cluster and class.
type Totals = BTreeMap<(String, String), [u64; 4]>;

/// A world whose cell answers as it is told.
async fn world(
    builder: WorldBuilder,
    tell: impl Fn(&Recorded) -> Told + Send + Sync + 'static,
) -> (World, Books) {
    let mut world = builder.recorder().start().await;
    if world.proxies.is_empty() {
        world.prepare_control_plane().await;
    }
    let books = Books::start(tell).await;
    world.cell_id = world.add_cell("books", books.port).await;
    world.sql(r#"UPDATE queen_proxy.plans SET features = '{"streams": true, "ephemeral": true}'"#).await;
    (world, books)
}

/// What the control plane holds of open days.
async fn usage(world: &World) -> Totals {
    totals(world, "usage_minutes").await
}

async fn totals(world: &World, table: &str) -> Totals {
    let query = format!(
        "SELECT c.slug, u.op_class, sum(u.reqs)::bigint, sum(u.msgs)::bigint, sum(u.bytes_in)::bigint,
                sum(u.bytes_out)::bigint
           FROM queen_proxy.{table} AS u JOIN queen_proxy.clusters AS c ON c.id = u.cluster_id
          GROUP BY 1, 2"
    );
    let rows: Vec<(String, String, i64, i64, i64, i64)> =
        sqlx::query_as(sqlx::AssertSqlSafe(query)).fetch_all(&mut world.control().await).await.unwrap();
    let number = |value| u64::try_from(value).unwrap();
    rows.into_iter()
        .map(|(slug, op, reqs, msgs, bytes_in, bytes_out)| {
            ((slug, op), [reqs, msgs, bytes_in, bytes_out].map(number))
        })
        .collect()
}

/// A push of so many messages.
fn push_of(messages: usize) -> String {
    format!(r#"{{"items":[{}]}}"#, vec![r#"{"queue":"q","payload":1}"#; messages].join(","))
}

/// A push through a proxy; its status.
async fn push(world: &World, proxy: usize, tenant: &Tenant, messages: usize) -> u16 {
    world.ask_proxy(proxy, "POST /api/v1/push", &tenant.headers(), &push_of(messages)).await.status
}

/// A cell's answer to a push: everything is stored.
fn stored(request: &Recorded) -> Told {
    let items = request.body.windows(7).filter(|word| word == b"\"queue\"").count();
    Told::answer(201, format!("[{}]", vec![r#"{"status":"queued"}"#; items].join(",")))
}

/// Messages in the files of a proxy's spool.
fn spooled(world: &World, proxy: usize) -> u64 {
    let files = std::fs::read_dir(world.spool(proxy)).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "buf"));
    // One that goes while we look is delivered.
    let texts: Vec<String> = files.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    let rows = texts.iter().flat_map(|text| text.lines());
    rows.filter_map(|row| serde_json::from_str::<serde_json::Value>(row).ok()?["msgs"].as_u64()).sum()
}
