//! Usage from minutes to days to a month, and the outbox (contract sections 2.3 and 13).

use super::{
    Plane,
    mutators::{fill, scene},
};
use serde_json::{Value, json};

/// A session far from UTC: days and months must not follow it.
async fn far_away() -> Plane {
    let mut plane = scene().await;
    plane.run("SET search_path = ''; SET timezone = 'Pacific/Kiritimati'").await;
    plane
}

async fn number(plane: &mut Plane, call: &str) -> i32 {
    plane.value(&fill(&format!("SELECT queen_proxy.{call}"), "")).await
}

async fn month(plane: &mut Plane, cluster: &str, date: &str) -> i64 {
    plane.value(&fill(&format!("SELECT queen_proxy.cluster_month_msgs({cluster}, {date})"), "")).await
}

/// Minutes of the cluster: time, class, messages; requests and bytes are multiples of them.
async fn minutes(plane: &mut Plane, cluster: &str, rows: &[(&str, &str, i64)]) {
    for (minute, class, msgs) in rows {
        let row = format!(
            "INSERT INTO queen_proxy.usage_minutes (cluster_id, minute, op_class, msgs, reqs, bytes_in, bytes_out)
                  VALUES ('{cluster}', {minute}, '{class}', {msgs}, {msgs} * 2, {msgs} * 3, {msgs} * 4)"
        );
        plane.run(&fill(&row, "")).await;
    }
}

/// Days as `slug day class msgs/reqs/in/out`.
async fn days(plane: &mut Plane) -> Vec<String> {
    plane
        .rows(
            "SELECT concat_ws(' ', c.slug, d.day, d.op_class, concat_ws('/', msgs, reqs, bytes_in, bytes_out))
               FROM queen_proxy.usage_days AS d JOIN queen_proxy.clusters AS c ON c.id = d.cluster_id
              ORDER BY 1",
        )
        .await
}

async fn left(plane: &mut Plane) -> Vec<String> {
    plane
        .rows(
            "SELECT to_char(minute AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI ') || op_class
               FROM queen_proxy.usage_minutes ORDER BY 1",
        )
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_days_are_summed_by_the_utc_day_and_the_open_one_is_not() {
    let mut plane = far_away().await;
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 0, "of nothing");
    minutes(
        &mut plane,
        "{prod}",
        &[
            ("'2025-03-31 00:00+00'", "push", 1),
            ("'2025-03-31 23:59+00'", "push", 10),
            ("'2025-03-31 23:59+00'", "read", 5),
            ("'2025-04-01 00:00+00'", "push", 100),
            ("now()", "push", 7),
        ],
    )
    .await;
    minutes(&mut plane, "{rival}", &[("'2025-03-31 12:00+00'", "delivery", 3)]).await;
    let march = [
        "acme-prod 2025-03-31 push 11/22/33/44",
        "acme-prod 2025-03-31 read 5/10/15/20",
        "globex-prod 2025-03-31 delivery 3/6/9/12",
    ];
    assert_eq!(number(&mut plane, "rollup_usage_days('2025-03-30')").await, 0);
    assert_eq!(number(&mut plane, "rollup_usage_days(p_through => '2025-03-31')").await, 3);
    assert_eq!(days(&mut plane).await, march);

    let all = [march[0], march[1], "acme-prod 2025-04-01 push 100/200/300/400", march[2]];
    for call in ["()", "()", "(NULL)", "('2999-01-01')", "('infinity')", "((now() AT TIME ZONE 'UTC')::date)"]
    {
        assert_eq!(number(&mut plane, &format!("rollup_usage_days{call}")).await, 4, "{call}");
        assert_eq!(days(&mut plane).await, all, "{call}");
    }
    assert_eq!(number(&mut plane, "rollup_usage_days('-infinity')").await, 0);
    assert_eq!(left(&mut plane).await.len(), 6, "minutes are not touched");
    assert_eq!(plane.value::<i64>("SELECT count(*) FROM queen_proxy.operations").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn yesterday_is_closed_and_today_is_not() {
    let mut plane = far_away().await;
    // All from one now(), in case the test runs at midnight.
    plane.run("BEGIN").await;
    let midnight = "date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'";
    let before = format!("{midnight} - interval '1 minute'");
    minutes(&mut plane, "{prod}", &[(&before, "push", 1), (midnight, "push", 2)]).await;
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 1);
    let yesterday: String = plane.value("SELECT ((now() AT TIME ZONE 'UTC')::date - 1)::text").await;
    assert_eq!(days(&mut plane).await, [format!("acme-prod {yesterday} push 1/2/3/4")]);
    plane.run("COMMIT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_minute_raises_a_days_total_and_its_fragment_never_replaces_it() {
    let mut plane = far_away().await;
    minutes(&mut plane, "{prod}", &[("'2025-01-10 10:00+00'", "push", 10)]).await;
    number(&mut plane, "rollup_usage_days()").await;
    minutes(&mut plane, "{prod}", &[("'2025-01-10 11:00+00'", "push", 90)]).await;
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 1);
    assert_eq!(days(&mut plane).await, ["acme-prod 2025-01-10 push 100/200/300/400"]);

    assert_eq!(number(&mut plane, "prune_usage_minutes()").await, 2);
    // The greater figure of each counter by itself.
    plane
        .run(&fill(
            "INSERT INTO queen_proxy.usage_minutes (cluster_id, minute, op_class, msgs, reqs, bytes_in, bytes_out)
                  VALUES ('{prod}', '2025-01-10 12:00+00', 'push', 7, 201, 0, 1000)",
            "",
        ))
        .await;
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 1);
    assert_eq!(days(&mut plane).await, ["acme-prod 2025-01-10 push 100/201/300/1000"]);
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 1, "again");
    assert_eq!(days(&mut plane).await, ["acme-prod 2025-01-10 push 100/201/300/1000"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pruning_takes_old_minutes_of_rolled_days_only() {
    let mut plane = far_away().await;
    plane.run("BEGIN").await;
    // Two days to keep: today and the two before it.
    let edge = "(date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - interval '2 days')";
    let (just_older, rolled) = (format!("{edge} - interval '1 minute'"), "'2025-01-10 10:00+00'");
    minutes(
        &mut plane,
        "{prod}",
        &[(edge, "push", 1), (&just_older, "push", 1), (rolled, "push", 1), (rolled, "read", 1)],
    )
    .await;
    assert_eq!(number(&mut plane, "prune_usage_minutes(1)").await, 0, "nothing is rolled up yet");
    number(&mut plane, "rollup_usage_days()").await;
    // Neither day nor class alone is enough, nor another cluster's day.
    minutes(&mut plane, "{prod}", &[("'2025-01-11 10:00+00'", "push", 1), (rolled, "txn", 1)]).await;
    minutes(&mut plane, "{rival}", &[(rolled, "push", 1)]).await;
    for keep in ["(p_keep_days => 100000)", "(2147483647)"] {
        assert_eq!(number(&mut plane, &format!("prune_usage_minutes{keep}")).await, 0, "{keep}");
    }
    assert_eq!(number(&mut plane, "prune_usage_minutes(2)").await, 3);
    let edge: String = plane
        .value("SELECT to_char((now() AT TIME ZONE 'UTC')::date - 2, 'YYYY-MM-DD 00:00 ') || 'push'")
        .await;
    let rest = ["2025-01-10 10:00 push", "2025-01-10 10:00 txn", "2025-01-11 10:00 push", edge.as_str()];
    assert_eq!(left(&mut plane).await, rest);
    assert_eq!(number(&mut plane, "prune_usage_minutes(2)").await, 0, "again");
    // What was kept is not lost: the next roll-up makes it days, the next prune takes it.
    assert_eq!(number(&mut plane, "rollup_usage_days()").await, 4);
    assert_eq!(number(&mut plane, "prune_usage_minutes()").await, 3);
    plane.run("COMMIT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_months_messages_are_each_days_greater_total_of_all_classes() {
    let mut plane = far_away().await;
    minutes(
        &mut plane,
        "{prod}",
        &[
            ("'2024-01-31 23:59+00'", "push", 1_000_000),
            ("'2024-02-01 00:00+00'", "push", 1),
            ("'2024-02-10 10:00+00'", "push", 10),
            ("'2024-02-10 10:00+00'", "delivery", 10),
            ("'2024-02-10 11:00+00'", "txn", 10),
            ("'2024-02-10 11:00+00'", "configure", 10),
            ("'2024-02-10 11:00+00'", "read", 10),
            ("'2024-02-29 23:59+00'", "push", 100),
            ("'2024-03-01 00:00+00'", "push", 2_000_000),
        ],
    )
    .await;
    minutes(&mut plane, "{rival}", &[("'2024-02-10 10:00+00'", "push", 5_000)]).await;
    let february = 1 + 50 + 100;
    for date in ["'2024-02-01'", "'2024-02-29'", "'2024-02-15'::date"] {
        assert_eq!(month(&mut plane, "'{prod}'", date).await, february, "live minutes, {date}");
    }
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-01-01'").await, 1_000_000);
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-03-31'").await, 2_000_000);

    number(&mut plane, "rollup_usage_days()").await;
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-02-15'").await, february, "both");
    // A late minute counts at once; of a pruned day, a fragment counts for nothing.
    minutes(&mut plane, "{prod}", &[("'2024-02-10 12:00+00'", "push", 5)]).await;
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-02-15'").await, february + 5);
    number(&mut plane, "prune_usage_minutes()").await;
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-02-15'").await, february, "rolled days");
    minutes(&mut plane, "{prod}", &[("'2024-02-10 12:00+00'", "push", 49)]).await;
    minutes(&mut plane, "{prod}", &[("'2024-02-11 12:00+00'", "push", 3)]).await;
    assert_eq!(month(&mut plane, "'{prod}'", "'2024-02-15'").await, february + 3);

    for (cluster, date) in
        [("'{nobody}'", "'2024-02-15'"), ("NULL", "'2024-02-15'"), ("'{prod}'", "'2023-02-15'")]
    {
        assert_eq!(month(&mut plane, cluster, date).await, 0, "{cluster} {date}");
    }
    plane.run("BEGIN").await;
    minutes(&mut plane, "{stage}", &[("now()", "push", 9)]).await;
    let today = "(now() AT TIME ZONE 'UTC')::date";
    assert_eq!(month(&mut plane, "'{stage}'", today).await, 9, "the open day");
    plane.run("COMMIT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_roll_up_and_prune_at_once_take_turns() {
    let mut plane = scene().await;
    minutes(&mut plane, "{prod}", &[("'2025-01-10 10:00+00'", "push", 1)]).await;
    minutes(&mut plane, "{rival}", &[("'2025-01-10 10:00+00'", "push", 1)]).await;
    let roll = "queen_proxy.rollup_usage_days()";
    let results = plane.race(roll, &vec![roll.to_owned(); 4]).await;
    assert!(results.iter().all(|result| result.as_ref().is_ok_and(|rows| rows == "2")), "{results:?}");
    let results = plane.race(roll, &["queen_proxy.prune_usage_minutes()".to_owned()]).await;
    assert_eq!(results[1].as_ref().unwrap(), "2");
    assert_eq!(
        days(&mut plane).await,
        ["acme-prod 2025-01-10 push 1/2/3/4", "globex-prod 2025-01-10 push 1/2/3/4"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_goes_meanwhile_does_not_stop_the_roll_up() {
    let mut plane = scene().await;
    for cluster in ["{prod}", "{stage}", "{rival}"] {
        minutes(&mut plane, cluster, &[("'2025-01-10 10:00+00'", "push", 1)]).await;
    }
    let delete = fill("queen_proxy.delete_tenant('{acme}', true)", "");
    let results = plane.race(&delete, &["queen_proxy.rollup_usage_days()".to_owned()]).await;
    assert_eq!(results[1].as_ref().unwrap(), "1", "the one cluster that is left");
    assert_eq!(days(&mut plane).await, ["globex-prod 2025-01-10 push 1/2/3/4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outbox_takes_every_event_as_it_is() {
    let mut plane = far_away().await;
    let mut ear = plane.ear().await;
    let cases = [
        ("' my_kind '", r#"'{"cluster_id": "x"}'"#, "my_kind", json!({"cluster_id": "x"})),
        ("'my_kind'", r#"'{"cluster_id": "x"}'"#, "my_kind", json!({"cluster_id": "x"})),
        ("'k'", "NULL", "k", json!({})),
        ("'k'", "'[1]'", "k", json!([1])),
    ];
    for (kind, payload, stored_kind, stored) in cases {
        let id: String =
            plane.value(&format!("SELECT queen_proxy.emit_outbox({kind}, {payload})::text")).await;
        let row = format!(
            "SELECT to_jsonb(o) - 'created_at' - 'claimed_until' FROM queen_proxy.outbox AS o WHERE id = '{id}' AND created_at <= now()"
        );
        assert_eq!(
            plane.value::<Value>(&row).await,
            json!({"id": id, "kind": stored_kind, "payload": stored, "consumed_at": null})
        );
    }
    assert_eq!(plane.value::<i64>("SELECT count(*) FROM queen_proxy.outbox").await, 4);
    assert_eq!(plane.value::<i64>("SELECT count(*) FROM queen_proxy.operations").await, 0);
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
}
