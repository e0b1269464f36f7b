//! Removing what has expired and measuring tenants (KV contract, sections 9.1 to 9.3).

use super::{ACME, GLOBEX, SOON, cell_sql, get, number, put, sample, scrape};
use crate::support::{World, WorldBuilder, eventually};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::time::{Duration, Instant};

fn world() -> WorldBuilder {
    World::builder()
        .proxies(0)
        .cell_env("QUEEN_KV_EXPIRE_EVERY_MS", 100)
        .cell_env("QUEEN_KV_USAGE_EVERY_MS", 1000)
}

/// Rows of `ns`, `count` of them, that expire `offset` from now ('-1 s' are dead already).
fn rows(tenant: uuid::Uuid, prefix: &str, count: usize, offset: &str) -> String {
    format!(
        "INSERT INTO queen.kv (tenant_id, namespace, key, value, version, expires_at)
         SELECT '{tenant}', 'ns', '{prefix}' || n, '\"x\"', nextval('queen.kv_version_seq'), now() + interval '{offset}'
         FROM generate_series(1, {count}) AS n"
    )
}

async fn count(world: &World) -> i64 {
    number(world, "SELECT count(*) FROM queen.kv").await
}

async fn step(connection: &mut PgConnection, call: &str) -> Value {
    let text: String = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("SELECT queen.{call}::text")))
        .fetch_one(connection)
        .await
        .unwrap();
    serde_json::from_str(&text).unwrap()
}

const ALL: &str = "(SELECT array_agg(n::smallint) FROM generate_series(0, 63) AS n)";

#[tokio::test(flavor = "multi_thread")]
async fn several_idle_cells_remove_all_that_expired_once_and_nothing_else() {
    let world = world().start().await;
    let (second, third) = (world.another_cell().await, world.another_cell().await);
    let ports = [world.cell_port, second.0, third.0];
    cell_sql(&world, &rows(ACME, "live", 3, "1 hour")).await;
    assert_eq!(put(&world, GLOBEX, "forever").await.status, 200);
    // The cells have been idle; they are at it within a moment all the same, without a call.
    cell_sql(&world, &rows(ACME, "dead", 20_000, "-1 s")).await;
    eventually("only the living are left", SOON, async || (count(&world).await == 4).then_some(())).await;
    eventually("each row was counted by one cell", SOON, async || {
        let mut removed = 0.0;
        for port in ports {
            removed += sample(&scrape(&world, port).await, r#"queen_sweeper_rows_total{phase="kv_expire"}"#);
        }
        assert!(removed <= 20_000.0, "{removed}");
        (removed > 19_999.5).then_some(())
    })
    .await;
    let asked = Instant::now();
    cell_sql(&world, &rows(ACME, "later", 1, "1 s")).await;
    eventually("a key that dies while all is quiet", SOON, async || (count(&world).await == 4).then_some(()))
        .await;
    assert!(asked.elapsed() >= Duration::from_millis(900));
    let measured = eventually("the measurement", SOON, async || {
        let query = "SELECT kv_rows FROM queen.kv_usage WHERE tenant_id = $1";
        let rows: Option<i64> = sqlx::query_scalar(query)
            .bind(ACME)
            .fetch_optional(&mut world.cell_database().await)
            .await
            .unwrap();
        rows.filter(|rows| *rows == 3)
    })
    .await;
    assert_eq!(measured, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_somebody_holds_is_left_shown_and_removed_later() {
    let world = world().start().await;
    let mut keeper = world.cell_database().await;
    cell_sql(&world, &rows(ACME, "dead", 1, "1 s")).await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM queen.kv FOR UPDATE").execute(&mut keeper).await.unwrap();
    let gauges = async || {
        let metrics = scrape(&world, world.cell_port).await;
        (
            sample(&metrics, "queen_kv_expired_not_pruned"),
            sample(&metrics, "queen_kv_expiry_lag_seconds"),
            metrics,
        )
    };
    let metrics = eventually("it is in the backlog", SOON, async || {
        let (rows, lag, metrics) = gauges().await;
        (rows > 0.5 && lag > 0.3).then_some(metrics)
    })
    .await;
    assert!(sample(&metrics, "queen_sweeper_skip_locked_total") >= 1.0);
    assert_eq!(get(&world, ACME, "dead1").await.json()["found"], false, "dead all the same");
    sqlx::raw_sql("COMMIT").execute(&mut keeper).await.unwrap();
    eventually("no backlog any more", SOON, async || {
        let (rows, lag, _) = gauges().await;
        (rows + lag < 0.001 && count(&world).await == 0).then_some(())
    })
    .await;
}

/// Scenario 37 of the collected cases.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_was_away_is_swept_again() {
    let world = world().own_cell_postgres().start().await;
    let success = async || {
        let metrics = scrape(&world, world.cell_port).await;
        ["kv_expire", "usage"].map(|phase| {
            sample(&metrics, &format!(r#"queen_sweeper_last_success_timestamp_seconds{{phase="{phase}"}}"#))
        })
    };
    eventually("both phases have worked", SOON, async || {
        success().await.iter().all(|at| *at > 1e9).then_some(())
    })
    .await;
    world.server.stop();
    eventually("both phases fail", SOON, async || {
        let metrics = scrape(&world, world.cell_port).await;
        let failures =
            |phase: &str| sample(&metrics, &format!(r#"queen_sweeper_failures_total{{phase="{phase}"}}"#));
        (failures("kv_expire") > 0.5 && failures("usage") > 0.5).then_some(())
    })
    .await;
    let before = success().await;
    world.server.start_again();
    cell_sql(&world, &rows(ACME, "dead", 10, "-1 s")).await;
    eventually("they are gone", SOON, async || (count(&world).await == 0).then_some(())).await;
    eventually("both phases have worked since", SOON, async || {
        let now = success().await;
        (now[0] > before[0] && now[1] > before[1]).then_some(())
    })
    .await;
    assert!(!world.cell.as_ref().unwrap().log().contains("is off until"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_phase_whose_function_is_missing_goes_off_alone() {
    let mut world = world().start().await;
    cell_sql(&world, "DROP FUNCTION queen.kv_expire_step_v1(smallint[], timestamptz, integer)").await;
    eventually("the warning", SOON, async || {
        world.cell.as_ref().unwrap().log().contains("this phase of the sweeper is off").then_some(())
    })
    .await;
    let skipped = r#"queen_sweeper_phase_skipped_total{phase="kv_expire"}"#;
    eventually("cycles are left out", SOON, async || {
        (sample(&scrape(&world, world.cell_port).await, skipped) > 2.5).then_some(())
    })
    .await;
    assert_eq!(world.cell.as_ref().unwrap().log().matches("this phase of the sweeper is off").count(), 1);
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    eventually("measuring goes on", SOON, async || {
        let query = format!("SELECT count(*) FROM queen.kv_usage WHERE tenant_id = '{ACME}' AND kv_rows = 1");
        (number(&world, &query).await == 1).then_some(())
    })
    .await;
    world.restart_cell().await;
    cell_sql(&world, &rows(ACME, "dead", 1, "-1 s")).await;
    eventually("a start brings it back", SOON, async || (count(&world).await == 1).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_told_not_to_sweep_leaves_everything() {
    let mut world = World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "false").start().await;
    cell_sql(&world, &rows(ACME, "dead", 5, "-1 s")).await;
    assert_eq!(get(&world, ACME, "dead1").await.json()["found"], false);
    let metrics = scrape(&world, world.cell_port).await;
    assert!(sample(&metrics, r#"queen_sweeper_last_success_timestamp_seconds{phase="usage"}"#).abs() < 1.0);
    assert_eq!(count(&world).await, 5);
    world.cell = None;
}

/// The step functions by themselves, on a database whose cell does not sweep.
#[tokio::test(flavor = "multi_thread")]
async fn the_steps_keep_to_their_budget_and_say_what_is_left() {
    let world = World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "false").start().await;
    let mut db = world.cell_database().await;
    let nothing = json!({"deleted": 0, "done": true, "unpruned": 0, "unprunedCapped": false, "lagMs": 0});
    let facts = |mut answer: Value| {
        assert!(answer["now"].is_string());
        answer.as_object_mut().unwrap().remove("now");
        answer
    };
    for shards in ["'{}'", "NULL", ALL] {
        assert_eq!(facts(step(&mut db, &format!("kv_expire_step_v1({shards}, NULL, 10)")).await), nothing);
    }
    cell_sql(&world, &rows(ACME, "dead", 100, "-5 s")).await;
    cell_sql(&world, &rows(GLOBEX, "dead", 100, "-3 s")).await;
    cell_sql(&world, &rows(GLOBEX, "live", 7, "1 hour")).await;
    let first = facts(step(&mut db, &format!("kv_expire_step_v1({ALL}, NULL, 10)")).await);
    assert_eq!(
        (&first["deleted"], &first["done"], &first["unpruned"], &first["unprunedCapped"]),
        (&json!(10), &json!(false), &json!(80), &json!(true))
    );
    assert!(first["lagMs"].as_i64().unwrap() >= 5000, "{first}");
    // A budget that is no number of rows is a thousand; the instant counts, not the clock.
    let early = step(&mut db, &format!("kv_expire_step_v1({ALL}, now() - interval '1 day', 0)")).await;
    assert_eq!(facts(early), nothing);
    let rest = facts(step(&mut db, &format!("kv_expire_step_v1({ALL}, NULL, 0)")).await);
    assert_eq!((&rest["deleted"], &rest["done"], &rest["unpruned"]), (&json!(190), &json!(true), &json!(0)));
    assert_eq!(count(&world).await, 7);
    // Exactly at its instant a key is gone.
    cell_sql(&world, "UPDATE queen.kv SET expires_at = '2100-01-01'").await;
    for (instant, left) in [("2099-12-31 23:59:59.999999", 7), ("2100-01-01", 0)] {
        step(&mut db, &format!("kv_expire_step_v1({ALL}, '{instant}', 100)")).await;
        assert_eq!(count(&world).await, left, "{instant}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_measured_whole_or_by_sample_and_emptied_ones_come_to_zero() {
    let world = World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "false").start().await;
    let mut db = world.cell_database().await;
    let idle = uuid::Uuid::from_u128(3);
    cell_sql(&world, &rows(ACME, "live", 640, "1 hour")).await;
    cell_sql(&world, &rows(ACME, "dead", 50, "-1 s")).await;
    cell_sql(&world, &rows(GLOBEX, "live", 2, "1 hour")).await;
    cell_sql(
        &world,
        &format!("INSERT INTO queen.kv_quota (tenant_id, enabled, max_rows) VALUES ('{ACME}', true, 6400), ('{GLOBEX}', false, 4), ('{idle}', true, 9)"),
    )
    .await;
    let answer = step(&mut db, &format!("kv_usage_step_v1({ALL}, NULL, 2)")).await;
    assert_eq!((&answer["sampled"], answer["scale"].as_f64()), (&json!(false), Some(1.0)));
    let tenants = answer["tenants"].as_array().unwrap();
    assert_eq!(tenants.len(), 2, "as many as were asked for, the largest first");
    let facts = |at: usize| {
        (tenants[at]["tenant"].clone(), tenants[at]["kvRows"].clone(), tenants[at]["kvQuotaRatio"].as_f64())
    };
    assert_eq!(facts(0), (json!(ACME), json!(640), Some(0.1)));
    assert_eq!(facts(1), (json!(GLOBEX), json!(2), Some(0.0)), "a quota that is off gives no ratio");
    assert!(tenants[0]["kvBytes"].as_i64().unwrap() >= 640 * 2);
    // The tenant that has a quota and nothing else is measured too.
    assert_eq!(number(&world, "SELECT count(*) FROM queen.kv_usage").await, 3);

    // On what the planner takes for a large table, eight shards stand for all.
    let sampled = async |db: &mut PgConnection| {
        sqlx::raw_sql("BEGIN; UPDATE pg_class SET reltuples = 200001 WHERE oid = 'queen.kv'::regclass")
            .execute(&mut *db)
            .await
            .unwrap();
        let answer = step(db, &format!("kv_usage_step_v1({ALL}, NULL, 0)")).await;
        sqlx::raw_sql("ROLLBACK").execute(db).await.unwrap();
        answer
    };
    let answer = sampled(&mut db).await;
    assert_eq!((&answer["sampled"], answer["scale"].as_f64()), (&json!(true), Some(8.0)));
    let expected = 8 * number(
        &world,
        &format!(
            "SELECT count(*) FROM queen.kv WHERE shard < 8 AND tenant_id = '{ACME}' AND expires_at > now()"
        ),
    )
    .await;
    assert_eq!(answer["tenants"][0]["kvRows"], json!(expected));

    // An older measurement does not replace a newer one; emptied tenants come to zero.
    let rows_of =
        |tenant: uuid::Uuid| format!("SELECT kv_rows FROM queen.kv_usage WHERE tenant_id = '{tenant}'");
    cell_sql(&world, "DELETE FROM queen.kv WHERE tenant_id <> '00000000-0000-0000-0000-000000000001'").await;
    step(&mut db, &format!("kv_usage_step_v1({ALL}, now() - interval '1 hour', 0)")).await;
    assert_eq!(number(&world, &rows_of(ACME)).await, 640);
    step(&mut db, &format!("kv_usage_step_v1({ALL}, NULL, 0)")).await;
    assert_eq!((number(&world, &rows_of(ACME)).await, number(&world, &rows_of(GLOBEX)).await), (0, 0));
    for shards in ["'{}'", "NULL"] {
        assert_eq!(
            step(&mut db, &format!("kv_usage_step_v1({shards}, NULL, 0)")).await["tenants"],
            json!([])
        );
    }
}
