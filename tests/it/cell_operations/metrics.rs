//! What `/metrics/prometheus` says (KV contract, section 9.4).

use super::{ACME, GLOBEX, SOON, batch, cell_sql, get, put, sample, scrape};
use crate::support::{Socket, World, eventually, promtool};
use serde_json::json;

/// Everything with a closed set of labels, each at zero before the first call.
const FRESH: [&str; 24] = [
    r#"queen_kv_ops_total{op="get",result="applied"}"#,
    r#"queen_kv_ops_total{op="getPrefix",result="error"}"#,
    r#"queen_kv_ops_total{op="incr",result="rejected"}"#,
    r#"queen_kv_op_duration_milliseconds{op="getMany",quantile="0.5"}"#,
    r#"queen_kv_op_duration_milliseconds{op="delete",quantile="0.99"}"#,
    r#"queen_kv_bytes_total{dir="in"}"#,
    r#"queen_kv_bytes_total{dir="out"}"#,
    "queen_kv_expired_not_pruned",
    "queen_kv_expired_not_pruned_capped",
    "queen_kv_expiry_lag_seconds",
    r#"queen_kv_read_rejected_total{reason="rate_limited"}"#,
    r#"queen_kv_read_rejected_total{reason="quota"}"#,
    r#"queen_kv_read_rejected_total{reason="pool"}"#,
    r#"queen_kv_read_rejected_total{reason="disabled"}"#,
    r#"queen_kv_pool{state="waiting"}"#,
    "queen_kv_outcome_unknown_total",
    r#"queen_sweeper_rows_total{phase="kv_expire"}"#,
    r#"queen_sweeper_rows_total{phase="usage"}"#,
    r#"queen_sweeper_phase_skipped_total{phase="kv_expire"}"#,
    r#"queen_sweeper_phase_skipped_total{phase="usage"}"#,
    r#"queen_sweeper_failures_total{phase="kv_expire"}"#,
    r#"queen_sweeper_cycle_milliseconds{phase="usage",quantile="0.99"}"#,
    r#"queen_sweeper_last_success_timestamp_seconds{phase="kv_expire"}"#,
    "queen_sweeper_skip_locked_total",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_cell_shows_every_series_at_zero() {
    let world = World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "off").start().await;
    let metrics = scrape(&world, world.cell_port).await;
    for series in FRESH {
        assert!(sample(&metrics, series).abs() < f64::EPSILON, "{series}");
    }
    for (series, expected) in [
        ("queen_kv_enabled", 1.0),
        (r#"queen_kv_pool{state="size"}"#, 8.0),
        (r#"queen_kv_pool{state="available"}"#, 8.0),
    ] {
        assert!((sample(&metrics, series) - expected).abs() < f64::EPSILON, "{series}");
    }
    assert!(
        sample(&metrics, "queen_kv_quota_last_success_timestamp_seconds") > 1e9,
        "read before the port opens"
    );
    let stranger = "GET /metrics/prometheus HTTP/1.1\r\nHost: c\r\n\r\n";
    assert_eq!(Socket::open(world.cell_port).await.ask(stranger).await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_counted_by_operation_and_result_and_tenants_by_measurement() {
    let world = World::builder()
        .proxies(0)
        .cell_env("QUEEN_KV_QUOTA_REFRESH_MS", 1000)
        .cell_env("QUEEN_KV_USAGE_EVERY_MS", 1000)
        .start()
        .await;
    cell_sql(
        &world,
        &format!(
            "INSERT INTO queen.kv_quota (tenant_id, enabled, max_rows) VALUES ('{ACME}', true, 4), ('{GLOBEX}', false, 1)"
        ),
    )
    .await;
    let operations = json!([
        {"op": "put", "ns": "ns", "key": "a", "value": {"x": [1, 2]}, "forever": true},
        {"op": "putIfAbsent", "ns": "ns", "key": "b", "value": "four", "ttlSeconds": 600},
        {"op": "get", "ns": "ns", "key": "nope"},
        {"op": "incr", "ns": "ns", "key": "n", "delta": 9, "max": 5, "forever": true},
        {"op": "getMany", "ns": "ns", "keys": ["a", "b"]},
    ]);
    assert_eq!(batch(&world, ACME, &operations).await.status, 200);
    let lost = json!([{"op": "delete", "ns": "ns", "key": "nope", "required": true}, operations[2]]);
    assert_eq!(batch(&world, ACME, &lost).await.status, 200);
    let wrong = json!([{"op": "incr", "ns": "ns", "key": "n", "delta": "1", "forever": true}]);
    assert_eq!(batch(&world, ACME, &wrong).await.status, 400);
    eventually("the quota that is switched off", SOON, async || {
        (put(&world, GLOBEX, "k").await.status == 403).then_some(())
    })
    .await;
    assert_eq!(get(&world, GLOBEX, "k").await.status, 200);

    let metrics = eventually("two rows of four are measured", SOON, async || {
        let metrics = scrape(&world, world.cell_port).await;
        metrics.contains(&format!(r#"queen_kv_rows{{tenant="{ACME}"}} 2"#)).then_some(metrics)
    })
    .await;
    let ops = |op: &str, result: &str| {
        sample(&metrics, &format!(r#"queen_kv_ops_total{{op="{op}",result="{result}"}}"#))
    };
    for (op, result, expected) in [
        ("get", "applied", 2.0),
        ("get", "rejected", 1.0),
        ("getMany", "applied", 1.0),
        ("incr", "rejected", 1.0),
        ("incr", "error", 1.0),
        ("delete", "rejected", 1.0),
    ] {
        assert!((ops(op, result) - expected).abs() < f64::EPSILON, "{op} {result}: {}", ops(op, result));
    }
    assert!(ops("put", "applied") >= 2.0);
    assert!(sample(&metrics, r#"queen_kv_bytes_total{dir="in"}"#) >= 11.0 + 6.0);
    assert!(sample(&metrics, r#"queen_kv_bytes_total{dir="out"}"#) >= 2.0 * (11.0 + 6.0));
    assert!(sample(&metrics, r#"queen_kv_op_duration_milliseconds{op="put",quantile="0.5"}"#) > 0.0);
    assert!(sample(&metrics, r#"queen_kv_read_rejected_total{reason="quota"}"#) >= 1.0);
    let ratio = sample(&metrics, &format!(r#"queen_kv_quota_ratio{{kind="kv",tenant="{ACME}"}}"#));
    assert!((ratio - 0.5).abs() < f64::EPSILON, "{ratio}");
    assert!(sample(&metrics, &format!(r#"queen_kv_bytes{{tenant="{ACME}"}}"#)) > 10.0);
    check(&metrics);
}

/// promtool has no objection but to the units and labels that the contract's names have. Not having promtool
/// fails: Debian's package `prometheus` brings it.
fn check(metrics: &str) {
    let (code, objections) = promtool(&["check", "metrics"], metrics);
    let ours = [
        "queen_kv_op_duration_milliseconds",
        "queen_sweeper_cycle_milliseconds",
        "queen_sweeper_sleep_milliseconds",
    ];
    let unexpected: Vec<&str> = objections
        .lines()
        .filter(|line| {
            let known = ours.iter().any(|name| line.starts_with(name));
            let objection = line.contains("use base unit") || line.contains("\"quantile\" label");
            !(line.is_empty() || known && objection)
        })
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    // 3 is "parsed, with objections"; 1 would be text that Prometheus cannot read.
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {objections}");
}
