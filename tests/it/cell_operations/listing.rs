//! The listing by which proxies measure what a tenant keeps, and the storage quota over keys alone.

use crate::support::{World, eventually};
use serde_json::json;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn keys_count_against_the_storage_quota_and_deleting_them_releases_it() {
    let world = World::builder()
        .cell_env("QUEEN_KV_USAGE_EVERY_MS", 1_000)
        .cell_env("QUEEN_KV_QUOTA_REFRESH_MS", 1_000)
        .env("QUEEN_PROXY_RECONCILE_MS", 200)
        .env("QUEEN_PROXY_STORAGE_REFRESH_MS", 500)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    world
        .sql(&format!(
            "SELECT queen_proxy.set_limit_override('{}', '{{\"max_retained_bytes\": 64}}')",
            acme.cluster
        ))
        .await;
    let put = async |tenant, key: &str| {
        let body = json!({"value": "x".repeat(1_000), "forever": true}).to_string();
        world.ask(&format!("PUT /api/v1/kv/ns/{key}"), &crate::support::Tenant::headers(tenant), &body).await
    };
    assert_eq!(put(&acme, "a").await.status, 200);
    let listing = eventually("the measurement", LIMIT, async || {
        let answer = world.ask("GET /api/v1/resources/queues", &acme.headers(), "").await;
        assert_eq!(answer.status, 200);
        let listing = answer.json();
        (listing["kvBytes"].as_u64()? > 900).then_some(listing)
    })
    .await;
    assert_eq!(
        (&listing["queues"], &listing["kvRows"], &listing["timerBytes"]),
        (&json!([]), &json!(1), &json!(0))
    );
    let other = world.ask("GET /api/v1/resources/queues", &globex.headers(), "").await.json();
    assert_eq!(other, json!({"queues": [], "kvRows": 0, "kvBytes": 0, "timerBytes": 0}));

    eventually("the block", LIMIT, async || {
        let answer = put(&acme, "b").await;
        (answer.status == 403 && answer.code() == "storage_quota_exceeded").then_some(())
    })
    .await;
    assert_eq!(put(&globex, "b").await.status, 200);
    assert_eq!(world.ask("GET /api/v1/kv/ns/a", &acme.headers(), "").await.status, 200);
    for key in ["a", "b"] {
        let answer = world.ask(&format!("DELETE /api/v1/kv/ns/{key}"), &acme.headers(), "").await;
        assert_eq!(answer.status, 200);
    }
    eventually("the release", LIMIT, async || (put(&acme, "c").await.status == 200).then_some(())).await;
}
