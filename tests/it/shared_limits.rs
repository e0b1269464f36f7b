//! One limit for three proxies, counted in a real Redis (`QUEEN_PROXY_LIMITS`).

mod load;
mod model;
mod outages;
mod parked;
mod rates;
mod scripts;

use crate::support::{PLAN_LIMITS, Redis, Tenant, World, WorldBuilder, eventually};
use serde_json::Value;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
const PROXIES: usize = 3;

/// Three proxies that know of each other, in front of a recording cell.
async fn world(redis: &Redis) -> World {
    build(World::builder(), redis).await
}

async fn build(builder: WorldBuilder, redis: &Redis) -> World {
    let world = builder.proxies(PROXIES).recorder().env("QUEEN_PROXY_LIMITS", redis.url()).start().await;
    know_each_other(&world, 1).await;
    world
}

/// Waits until each proxy has said so many times that all of them are there.
async fn know_each_other(world: &World, times: usize) {
    for (_, process) in &world.proxies {
        eventually("the proxies know of each other", LIMIT, async || {
            let words = format!("limits: {PROXIES} proxies share them");
            (process.log().matches(&words).count() >= times).then_some(())
        })
        .await;
    }
}

/// Waits until each proxy's log has these words so many times.
async fn all_say(world: &World, words: &str, times: usize) {
    for (_, process) in &world.proxies {
        eventually(words, LIMIT, async || (process.log().matches(words).count() >= times).then_some(()))
            .await;
    }
}

/// A tenant whose caps are these and no others, before any proxy knows it.
async fn tenant(world: &World, name: &str, caps: &str) -> Tenant {
    let tenant = world.tenant(name).await;
    let mut overrides: Value = serde_json::from_str(caps).unwrap();
    for name in PLAN_LIMITS {
        overrides.as_object_mut().unwrap().entry(name).or_insert(Value::Null);
    }
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{overrides}')", tenant.cluster)).await;
    tenant
}

/// How often proxies have lost the store. A machine that is busy elsewhere makes them.
fn losses(world: &World) -> usize {
    world.proxies.iter().map(|(_, process)| process.log().matches("limits: the store is away").count()).sum()
}
