//! The caps of a plan as a tenant meets them: through a proxy, in front of a recording cell.

mod bodies;
mod floods;
mod names;
mod odd_cells;
mod parked;
mod plans;
mod rates;
mod shadow;
mod storage;

use crate::support::{
    Answer, PLAN_LIMITS, Tenant, World, WorldBuilder, ask_admin, eventually, metrics, sample,
};
use serde_json::{Value, json};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
const KIB: usize = 1 << 10;
const PUSH: &str = "POST /api/v1/push";

/// A world with a recording cell, and a tenant whose caps are these and no others.
async fn world(builder: WorldBuilder, overrides: &str) -> (World, Tenant) {
    let world = builder.recorder().start().await;
    let tenant = tenant(&world, "acme", overrides).await;
    (world, tenant)
}

/// A tenant whose caps are these and no others.
async fn tenant(world: &World, name: &str, overrides: &str) -> Tenant {
    let tenant = world.tenant(name).await;
    set(world, &tenant, overrides).await;
    tenant
}

/// Sets the caps of a tenant's cluster; those that are not named are lifted.
async fn set(world: &World, tenant: &Tenant, caps: &str) {
    let mut overrides: Value = serde_json::from_str(caps).unwrap();
    for name in PLAN_LIMITS {
        overrides.as_object_mut().unwrap().entry(name).or_insert(Value::Null);
    }
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{overrides}')", tenant.cluster)).await;
}

/// Lifts the rates of a tenant on a plan as it stands.
async fn lift_rates(world: &World, tenant: &Tenant) {
    let lifted = r#"{"max_req_per_sec": null, "max_msgs_per_sec": null}"#;
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{lifted}')", tenant.cluster)).await;
}

/// A world whose proxy has an admin listener, which is returned.
fn with_admin(builder: WorldBuilder) -> (WorldBuilder, u16) {
    let builder = builder.admin();
    let port = builder.admin_port();
    (builder, port)
}

/// What stands against the caps of a tenant's cluster.
async fn live(port: u16, tenant: &Tenant) -> Value {
    ask_admin(port, &format!("/limits/{}", tenant.slug)).await.json()["live"].clone()
}

/// One number of `/metrics`; none when there is no such series.
async fn metric(port: u16, series: &str) -> Option<f64> {
    Some(sample(&metrics(port).await, series)?.parse().unwrap())
}

/// Waits until a series has this value.
async fn metric_becomes(port: u16, series: &str, want: f64) {
    eventually(&format!("{series} {want}"), LIMIT, async || {
        (metric(port, series).await == Some(want)).then_some(())
    })
    .await;
}

/// Status and code; no code when nothing is wrong.
fn outcome(answer: &Answer) -> (u16, String) {
    (answer.status, if answer.status < 300 { String::new() } else { answer.code() })
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

/// The text of a refusal.
fn error(answer: &Answer) -> String {
    answer.json()["error"].as_str().unwrap().to_owned()
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").expect("Retry-After").parse().unwrap()
}

/// A push of that many messages to one lane.
fn push(items: usize, payload: &str) -> String {
    push_to((0..items).map(|_| ("q", "p")), payload)
}

/// A push of one message to each of these queues and partitions.
fn push_to<'n>(lanes: impl IntoIterator<Item = (&'n str, &'n str)>, payload: &str) -> String {
    let items: Vec<_> = lanes
        .into_iter()
        .map(|(queue, partition)| json!({"queue": queue, "partition": partition, "payload": payload}))
        .collect();
    json!({ "items": items }).to_string()
}

/// A push through the first proxy on a connection of its own.
async fn pushes(world: &World, tenant: &Tenant, body: &str) -> Answer {
    world.ask(PUSH, &tenant.headers(), body).await
}

/// A body in one of the framings of HTTP/1.1; chunks of `chunk` bytes.
fn framed(line: &str, headers: &str, body: &[u8], framing: Framing) -> Vec<u8> {
    let mut request = format!("{line} HTTP/1.1\r\n{headers}").into_bytes();
    match framing {
        Framing::Length => request.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes()),
        Framing::Expect => {
            request.extend(format!("Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len()).bytes());
        }
        Framing::Chunks(_) => request.extend(b"Transfer-Encoding: chunked\r\n\r\n"),
        Framing::ExpectChunks(_) => {
            request.extend(b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n");
        }
    }
    match framing {
        Framing::Length | Framing::Expect => request.extend(body),
        Framing::Chunks(chunk) | Framing::ExpectChunks(chunk) => {
            for piece in body.chunks(chunk) {
                request.extend(format!("{:x}\r\n", piece.len()).bytes());
                request.extend(piece);
                request.extend(b"\r\n");
            }
            request.extend(b"0\r\n\r\n");
        }
    }
    request
}

#[derive(Clone, Copy, Debug)]
enum Framing {
    Length,
    Expect,
    Chunks(usize),
    ExpectChunks(usize),
}

const FRAMINGS: [Framing; 4] =
    [Framing::Length, Framing::Expect, Framing::Chunks(7_001), Framing::ExpectChunks(1 << 20)];
