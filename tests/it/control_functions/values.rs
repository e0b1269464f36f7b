//! What the tables hold from the start, the plans, and what they take at the edges of their checks.

use super::Plane;
use crate::support::PLAN_LIMITS;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn the_four_plans_are_seeded_and_an_operators_row_of_the_same_code_wins() {
    let mut plane = Plane::new().await;
    let values = [
        (
            "free",
            "shared",
            [5, 25, 20, 100, 20, 8, 50, 262_144, 1_000, 1_073_741_824, 604_800_i64],
            json!({}),
        ),
        (
            "dev",
            "shared",
            [10, 50, 40, 200, 50, 16, 150, 524_288, 2_000, 3_221_225_472, 1_209_600],
            json!({}),
        ),
        (
            "pro",
            "shared",
            [50, 200, 200, 800, 200, 32, 1_000, 1_048_576, 5_000, 21_474_836_480, 2_592_000],
            json!({"streams": true, "traces": true}),
        ),
        (
            "dedicated-s",
            "dedicated",
            [200, 800, 600, 2_000, 1_000, 64, 5_000, 4_194_304, 10_000, 214_748_364_800, 7_776_000],
            json!({"streams": true, "traces": true}),
        ),
    ];
    let seeded: Vec<Value> = values
        .into_iter()
        .map(|(code, class, limits, features)| {
            let mut plan =
                json!({"code": code, "cell_class": class, "monthly_msgs_quota": null, "features": features});
            for (name, limit) in PLAN_LIMITS.iter().zip(limits) {
                plan[*name] = json!(limit);
            }
            plan
        })
        .collect();
    let plans = "SELECT jsonb_agg(to_jsonb(p) - 'id' - 'created_at' ORDER BY max_req_per_sec) FROM queen_proxy.plans AS p";
    assert_eq!(plane.value::<Value>(plans).await, Value::from(seeded));

    // The file again, over an operator's changes.
    plane
        .run(
            "UPDATE queen_proxy.plans SET max_queues = 7, features = '{\"kv\": false}' WHERE code = 'free';
             DELETE FROM queen_proxy.plans WHERE code = 'pro';
             DELETE FROM queen_proxy.schema_migrations WHERE name = '002_functions'",
        )
        .await;
    assert_eq!(plane.migrate().await, ["002_functions"]);
    let free = "SELECT to_jsonb(max_queues) || features FROM queen_proxy.plans WHERE code = 'free'";
    assert_eq!(plane.value::<Value>(free).await, json!([7, {"kv": false}]));
    assert_eq!(
        plane.value::<i64>("SELECT count(*) FROM queen_proxy.plans").await,
        4,
        "the missing one is back"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_take_what_is_just_inside_and_refuse_what_is_just_outside() {
    let mut plane = Plane::new().await;
    let (longest, too_long) = ("a".repeat(63), "a".repeat(64));
    let (name, too_long_name) = ("ä".repeat(160), "ä".repeat(161));
    let tenant = |slug: &str| format!("INSERT INTO queen_proxy.tenants (slug, name) VALUES ('{slug}', 'n')");
    let plan = |code: &str, column: &str, value: &str| {
        format!(
            "INSERT INTO queen_proxy.plans (code, cell_class, {column}) VALUES ('{code}', 'shared', {value})"
        )
    };
    let user = |name: &str| {
        format!(
            "INSERT INTO queen_proxy.users (tenant_id, email, name)
             SELECT id, 'x@y', {name} FROM queen_proxy.tenants WHERE slug = 'a'"
        )
    };
    plane.run(&tenant("a")).await;
    let cases = [
        (tenant("0"), true),
        (tenant("a-b"), true),
        (tenant(&longest), true),
        (tenant(&too_long), false),
        (tenant(""), false),
        (tenant("-a"), false),
        (tenant("a-"), false),
        (tenant("a_b"), false),
        (tenant("a.b"), false),
        (tenant("A"), false),
        (tenant("ä"), false),
        (tenant("a\n"), false),
        (plan("x-1", "max_queues", "1"), true),
        (plan("x2", "max_queues", "NULL"), true),
        (plan("x3", "max_queues", "0"), false),
        (plan("x3", "monthly_msgs_quota", "0"), false),
        (plan("x3", "max_retained_bytes", "-1"), false),
        (plan("X3", "max_queues", "1"), false),
        (plan("3x", "max_queues", "1"), false),
        (plan("", "max_queues", "1"), false),
        (user("NULL"), true),
        (user(&format!("'{name}'")), true),
        (user(&format!("'{too_long_name}'")), false),
        (user("' '"), false),
    ];
    for (statement, accepted) in cases {
        let statement = format!("BEGIN; {statement}; ROLLBACK");
        if accepted {
            plane.run(&statement).await;
        } else {
            let refusal = plane.refusal(&statement).await;
            plane.run("ROLLBACK").await;
            assert_eq!(refusal.0, "23514", "{statement}: {}", refusal.1);
        }
    }

    // A name may be used again once its queue is gone, and only then.
    plane.world.cell_id = plane.world.add_cell("cell", 1).await;
    let cluster = plane.world.tenant("acme").await.cluster;
    let queue = format!("INSERT INTO queen_proxy.queues (cluster_id, name) VALUES ('{cluster}', 'q')");
    plane.run(&queue).await;
    assert_eq!(plane.refusal(&queue).await.0, "23505");
    plane.run("UPDATE queen_proxy.queues SET deleted_at = now()").await;
    plane.run(&queue).await;
}
