//! `record_usage`: once, whatever happens, and each row for itself.

use super::{LIMIT, Scene};
use crate::support::eventually;
use queen_proxy::{
    control::store::{Recorded, connect_options},
    metering::sample::Op,
};
use serde_json::{Value, json};
use sqlx::{
    Executor,
    postgres::{PgListener, PgPoolOptions},
};
use std::sync::atomic::Ordering::SeqCst;
use tokio::task::JoinSet;
use uuid::Uuid;

/// 2024-02-29 23:59 UTC.
const LEAP_DAY_END: u64 = 1_709_251_140 / 60;

fn row(cluster: Uuid, minute: u64, op: &str, msgs: u64) -> Value {
    json!({
        "cluster_id": cluster, "minute": minute, "op": op,
        "reqs": 1, "msgs": msgs, "bytes_in": msgs * 10, "bytes_out": 7,
    })
}

async fn record(scene: &Scene, batch: u128, rows: &[Value]) -> Recorded {
    let rows = serde_json::to_string(rows).unwrap();
    scene.control.record_usage(Uuid::from_u128(batch), &rows).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_counts_once_however_often_and_by_whomever_it_is_sent() {
    let scene = Scene::new().await;
    let rows = [
        row(scene.acme.cluster, LEAP_DAY_END, "push", 5),
        row(scene.acme.cluster, LEAP_DAY_END + 1, "push", 6),
        row(Uuid::nil(), LEAP_DAY_END, "push", 7),
    ];
    let first = record(&scene, 1, &rows).await;
    assert_eq!(first, Recorded { written: 2, dropped: 1, repeated: false });
    let expected = ["acme-prod 2024-02-29 23:59 push 1/5/50/7", "acme-prod 2024-03-01 00:00 push 1/6/60/7"];
    assert_eq!(scene.minutes().await, expected);
    // As after an answer that was lost; what it says the second time is not looked at.
    assert_eq!(record(&scene, 1, &rows).await, Recorded { repeated: true, ..first });
    assert_eq!(record(&scene, 1, &rows[..1]).await, Recorded { repeated: true, ..first });
    assert_eq!(scene.minutes().await, expected);
    let mut senders = JoinSet::new();
    for _ in 0..8 {
        let (control, rows) = (scene.control.clone(), serde_json::to_string(&rows).unwrap());
        senders.spawn(async move { control.record_usage(Uuid::from_u128(2), &rows).await.unwrap() });
    }
    let recorded = senders.join_all().await;
    assert_eq!(recorded.iter().filter(|recorded| !recorded.repeated).count(), 1);
    assert!(recorded.iter().all(|recorded| (recorded.written, recorded.dropped) == (2, 1)));
    assert_eq!(scene.minutes().await[0], "acme-prod 2024-02-29 23:59 push 2/10/100/14", "added");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_row_stops_nothing() {
    let scene = Scene::new().await;
    let acme = scene.acme.cluster;
    let with = |name: &str, value: Value| {
        let mut row = row(acme, LEAP_DAY_END, "push", 1);
        row[name] = value;
        row
    };
    let mut without = row(acme, LEAP_DAY_END, "push", 1);
    without.as_object_mut().unwrap().remove("reqs");
    let bad = [
        with("cluster_id", json!("acme")),
        with("cluster_id", json!(7)),
        with("cluster_id", Value::Null),
        with("op", json!("steal")),
        with("op", json!(["push"])),
        with("minute", json!(-1)),
        with("minute", json!(1.5)),
        with("minute", json!(99_999_999_999_u64)),
        with("minute", json!("x")),
        with("msgs", json!(-5)),
        with("msgs", json!(10_000_000_000_000_000_u64)),
        with("bytes_in", json!("many")),
        with("bytes_out", json!({"a": 1})),
        without,
        json!(7),
        json!("row"),
        json!([row(acme, LEAP_DAY_END, "push", 1)]),
        Value::Null,
    ];
    let good = [
        row(acme, LEAP_DAY_END, "push", 2),
        row(acme, LEAP_DAY_END, "push", 3),
        with("cluster_id", json!(acme.to_string().to_uppercase())),
        row(scene.globex.cluster, LEAP_DAY_END, "delivery", 4),
        // A clock that is a year ahead.
        row(scene.globex.cluster, LEAP_DAY_END + 525_600 * 40, "read", 0),
    ];
    let rows: Vec<Value> = good[..2].iter().chain(&bad).chain(&good[2..]).cloned().collect();
    let recorded = record(&scene, 1, &rows).await;
    assert_eq!(recorded, Recorded { written: 5, dropped: bad.len() as u64, repeated: false });
    let minutes = scene.minutes().await;
    assert_eq!(
        minutes[..2],
        ["acme-prod 2024-02-29 23:59 push 3/6/60/21", "globex-prod 2024-02-29 23:59 delivery 1/4/40/7"]
    );
    let ahead = "SELECT bool_and(minute <= now()) FROM queen_proxy.usage_minutes";
    assert!(scene.value::<bool>(ahead).await && minutes.len() == 3, "{minutes:?}");
    for (batch, rows, says) in [
        ("NULL", "'[]'", "record_usage: batch is required"),
        ("gen_random_uuid()", "'{}'", "record_usage: rows must be an array"),
        ("gen_random_uuid()", "NULL", "record_usage: rows must be an array"),
    ] {
        let call = format!("SELECT queen_proxy.record_usage({batch}, {rows})");
        let error = scene.world.control().await.execute(sqlx::AssertSqlSafe(call)).await.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_deleted_during_a_flush_costs_its_own_rows() {
    let scene = Scene::new().await;
    let mut deleting = scene.world.control().await;
    deleting.execute("BEGIN").await.unwrap();
    let delete = format!("SELECT queen_proxy.delete_tenant('{}', true)", scene.acme.tenant);
    deleting.execute(sqlx::AssertSqlSafe(delete)).await.unwrap();
    let rows =
        [scene.acme.cluster, scene.globex.cluster].map(|cluster| row(cluster, LEAP_DAY_END, "push", 5));
    let (control, rows) = (scene.control.clone(), serde_json::to_string(&rows).unwrap());
    let flush = tokio::spawn(async move { control.record_usage(Uuid::from_u128(1), &rows).await });
    eventually("the flush waits for the deletion", LIMIT, async || {
        let waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
                        AND wait_event_type = 'Lock' AND query LIKE '%record_usage%')";
        scene.value::<bool>(waiting).await.then_some(())
    })
    .await;
    deleting.execute("COMMIT").await.unwrap();
    let recorded = flush.await.unwrap().unwrap();
    assert_eq!(recorded, Recorded { written: 1, dropped: 1, repeated: false });
    assert_eq!(scene.minutes().await, ["globex-prod 2024-02-29 23:59 push 1/5/50/7"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_a_deleted_cluster_do_not_stay_in_the_spool() {
    let scene = Scene::new().await;
    let mut proxy = scene.proxy("spool");
    proxy.away.store(true, SeqCst);
    for cluster in [scene.acme.cluster, scene.globex.cluster] {
        proxy.count(cluster, Op::Push, 3, LEAP_DAY_END * 60);
    }
    proxy.tick(LEAP_DAY_END * 60 + 60).await;
    scene.world.sql(&format!("SELECT queen_proxy.delete_tenant('{}', true)", scene.acme.tenant)).await;
    proxy.away.store(false, SeqCst);
    proxy.tick(LEAP_DAY_END * 60 + 75).await;
    assert_eq!(scene.minutes().await, ["globex-prod 2024-02-29 23:59 push 1/3/30/7"]);
    let numbers = proxy.metrics.snapshot();
    assert_eq!((numbers.rows_written, numbers.rows_refused, numbers.spool_files), (1, 1, 0));
}

/// Case 35: what the data plane writes wakes nobody.
#[tokio::test(flavor = "multi_thread")]
async fn metering_notifies_nobody() {
    let scene = Scene::new().await;
    let config = scene.world.config(&[]);
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .connect_lazy_with(connect_options(config.pxdb.as_ref().unwrap(), "ear"));
    let mut ear = PgListener::connect_with(&pool).await.unwrap();
    ear.listen_all(["queen_proxy_inval", "queen_proxy_revoked"]).await.unwrap();
    scene.world.sql("UPDATE queen_proxy.plans SET monthly_msgs_quota = 1").await;
    let now = queen_proxy::control::now_s() / 60;
    for (batch, minute) in [(1, LEAP_DAY_END), (2, now)] {
        record(&scene, batch, &[row(scene.acme.cluster, minute, "push", 5)]).await;
    }
    assert!(scene.control.maintain_usage(90).await.unwrap().is_some());
    assert_eq!(scene.control.over_monthly_quota(80).await.unwrap().len(), 1);
    scene.world.sql("SELECT pg_notify('queen_proxy_inval', 'fence')").await;
    let heard = tokio::time::timeout(LIMIT, ear.recv()).await.unwrap().unwrap();
    assert_eq!(heard.payload(), "fence", "nothing before it");
}
