//! The monthly quota: who is blocked, which events are due, and that each is there once.

use super::Scene;
use queen_proxy::{
    domain::ids::ClusterId,
    metering::{
        metrics::Metrics,
        rollup::{MonthlyBlocks, RollUp},
    },
};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::task::JoinSet;

/// What one proxy knows.
struct Proxy {
    rollup: RollUp,
    blocks: Arc<MonthlyBlocks>,
    metrics: Arc<Metrics>,
}

impl Proxy {
    fn of(scene: &Scene) -> Self {
        let (blocks, metrics) = (Arc::<MonthlyBlocks>::default(), Arc::<Metrics>::default());
        let rollup = RollUp::new(scene.control.clone(), 90, 80, Arc::clone(&blocks), Arc::clone(&metrics));
        Self { rollup, blocks, metrics }
    }
}

/// Makes the messages of the cluster this month so many.
async fn used(scene: &Scene, messages: u64) {
    let row = format!(
        "INSERT INTO queen_proxy.usage_minutes (cluster_id, minute, op_class, msgs)
              VALUES ('{}', date_trunc('minute', now()), 'delivery', {messages})
         ON CONFLICT (cluster_id, minute, op_class) DO UPDATE SET msgs = EXCLUDED.msgs",
        scene.acme.cluster
    );
    scene.world.sql("DELETE FROM queen_proxy.usage_minutes").await;
    scene.world.sql(&row).await;
}

async fn overrides(scene: &Scene, document: &str) {
    let set = format!("SELECT queen_proxy.set_limit_override('{}', '{document}')", scene.acme.cluster);
    scene.world.sql(&set).await;
}

/// Kinds of the events of quotas, in order of their time.
async fn events(scene: &Scene) -> Vec<String> {
    scene
        .rows(
            "SELECT regexp_replace(kind, '.*_', '') || ' ' || (payload ->> 'percent') FROM queen_proxy.outbox
              WHERE kind LIKE 'cluster_monthly%' ORDER BY created_at, kind",
        )
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warning_then_a_block_then_the_release_and_each_event_once_on_two_proxies() {
    let scene = Scene::new().await;
    let cluster = ClusterId(scene.acme.cluster);
    let proxies = [Proxy::of(&scene), Proxy::of(&scene)];
    scene.world.sql("UPDATE queen_proxy.plans SET monthly_msgs_quota = 1000 WHERE code = 'pro'").await;
    for (messages, blocked, expected) in [
        (0, false, &[][..]),
        (799, false, &[]),
        (800, false, &["warning 80"]),
        (999, false, &["warning 80"]),
        (1000, true, &["warning 80", "blocked 100"]),
        (5000, true, &["warning 80", "blocked 100"]),
        // Not in reality; but a quota that was raised looks like this.
        (900, false, &["warning 80", "blocked 100"]),
        (1200, true, &["warning 80", "blocked 100"]),
    ] {
        used(&scene, messages).await;
        for proxy in &proxies {
            proxy.rollup.pass().await.unwrap();
            assert_eq!(proxy.blocks.is_blocked(cluster), blocked, "{messages}");
            assert!(!proxy.blocks.is_blocked(ClusterId(scene.globex.cluster)));
            assert_eq!(proxy.metrics.snapshot().clusters_blocked, u64::from(blocked));
        }
        assert_eq!(events(&scene).await, expected, "{messages}");
    }
    let payload: Value = scene
        .value("SELECT payload FROM queen_proxy.outbox WHERE kind = 'cluster_monthly_quota_blocked'")
        .await;
    let month: String = scene.value("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM')").await;
    let expected = json!({
        "cluster_id": scene.acme.cluster, "cluster_slug": "acme-prod", "tenant_id": scene.acme.tenant,
        "month": month, "msgs": 1000, "quota": 1000, "percent": 100,
    });
    assert_eq!(payload, expected);
    // A proxy that starts anew knows it at once, and a part that fails changes nothing.
    let fresh = Proxy::of(&scene);
    fresh.rollup.pass().await.unwrap();
    assert!(fresh.blocks.is_blocked(cluster));
    scene.world.sql("ALTER FUNCTION queen_proxy.check_monthly_quotas RENAME TO away").await;
    fresh.rollup.pass().await.unwrap_err();
    assert!(fresh.blocks.is_blocked(cluster));
    assert_eq!(fresh.metrics.snapshot().rollup_failures, 1);
    assert!(fresh.metrics.snapshot().rollup_last_success_s > 0, "the roll-up worked");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_proxies_that_see_it_at_once_emit_one_event() {
    let scene = Scene::new().await;
    scene.world.sql("UPDATE queen_proxy.plans SET monthly_msgs_quota = 10").await;
    used(&scene, 25).await;
    let mut passes = JoinSet::new();
    for _ in 0..8 {
        let config = scene.world.config(&[]);
        let control = queen_proxy::control::ControlPlane::new(config.pxdb.as_ref().unwrap(), config.cache);
        passes.spawn(async move { control.over_monthly_quota(80).await.unwrap() });
    }
    for over in passes.join_all().await {
        assert_eq!(over, [ClusterId(scene.acme.cluster)], "all agree");
    }
    assert_eq!(events(&scene).await, ["blocked 250"], "and not the lower one as well");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quota_is_the_plans_with_the_override_over_it() {
    let scene = Scene::new().await;
    used(&scene, 100).await;
    for (plan, document, blocked) in [
        ("NULL", "{}", false),
        ("100", "{}", true),
        ("101", "{}", false),
        ("NULL", r#"{"monthly_msgs_quota": 100}"#, true),
        ("100", r#"{"monthly_msgs_quota": null}"#, false),
        ("100", r#"{"monthly_msgs_quota": 101}"#, false),
        ("1000", r#"{"monthly_msgs_quota": 0}"#, true),
        ("1000", r#"{"monthly_msgs_quota": -1}"#, true),
        ("NULL", r#"{"monthly_msgs_quota": -9223372036854775808}"#, true),
        ("NULL", r#"{"monthly_msgs_quota": 9223372036854775807}"#, false),
        // What is no number of 64 bits is as if it were not there.
        ("100", r#"{"monthly_msgs_quota": "1000"}"#, true),
        ("100", r#"{"monthly_msgs_quota": 1000.5}"#, true),
        ("100", r#"{"monthly_msgs_quota": 9223372036854775808}"#, true),
        ("100", r#"{"monthly_msgs_quota": {"a": 1}}"#, true),
        ("100", r#"{"monthly_msgs_quota": true}"#, true),
        ("NULL", r#"{"monthly_msgs_quota": "1"}"#, false),
        ("100", "[1]", true),
        ("NULL", r#""monthly_msgs_quota""#, false),
        ("100", "7", true),
    ] {
        scene.world.sql(&format!("UPDATE queen_proxy.plans SET monthly_msgs_quota = {plan}")).await;
        overrides(&scene, document).await;
        let over = scene.control.over_monthly_quota(80).await.unwrap();
        assert_eq!(
            over.contains(&ClusterId(scene.acme.cluster)),
            blocked,
            "plan {plan}, override {document}"
        );
    }
    scene.world.sql("UPDATE queen_proxy.plans SET monthly_msgs_quota = 1").await;
    overrides(&scene, "{}").await;
    let check = async || scene.control.over_monthly_quota(80).await.unwrap().len();
    assert_eq!(check().await, 1);
    let status = format!("SELECT queen_proxy.set_cluster_status('{}', 'deleting')", scene.acme.cluster);
    scene.world.sql(&status).await;
    assert_eq!(check().await, 0, "one that goes away is not looked at");
    // Another month has counts and events of its own.
    scene.world.sql(&status.replace("deleting", "active")).await;
    let before = events(&scene).await.len();
    let other = "SELECT count(*) FROM queen_proxy.check_monthly_quotas(80, '2024-02-29')";
    assert_eq!(scene.value::<i64>(other).await, 0);
    let row = format!(
        "INSERT INTO queen_proxy.usage_days (cluster_id, day, op_class, msgs) VALUES ('{}', '2024-02-01', 'push', 1)",
        scene.acme.cluster
    );
    scene.world.sql(&row).await;
    assert_eq!(scene.value::<i64>(other).await, 1);
    assert_eq!(scene.value::<i64>(&other.replace("02-29", "03-01")).await, 0);
    assert_eq!(events(&scene).await.len(), before + 1);
}
