//! The error catalogue of KV contract section 5, as far as the database is its source: what each SQLSTATE
//! becomes on every route, and that nothing of what the server said reaches the caller or the log.

use crate::kv_vectors::{Store, put, text};
use crate::support::{World, eventually};
use serde_json::json;
use std::time::Duration;

/// Lets every write fail like this.
async fn fail_with(store: &Store, sqlstate: &str, message: &str) {
    let body = format!(
        "CREATE OR REPLACE FUNCTION queen.kv_write_op_v1(p_op jsonb, p_pos integer, p_tenant uuid, p_now timestamptz)
         RETURNS jsonb LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = '{message}', DETAIL = 'detail of secret-key'; END $$;
         -- Puts that share a transaction do not come by there.
         CREATE OR REPLACE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = '{message}', DETAIL = 'detail of secret-key'; END $$;
         CREATE OR REPLACE TRIGGER fail BEFORE INSERT ON queen.kv FOR EACH ROW EXECUTE FUNCTION public.fail()"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(body)).execute(&mut store.world.cell_database().await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_of_the_database_has_its_answer() {
    let store = Store::open().await;
    let (bad, large, unavailable) = ("kv_bad_request", "payload_too_large", "kv_unavailable");
    let (wrong, failed) = ("kv_misconfigured", "kv_error");
    // SQLSTATE and message of the server; status, error and reason on the key/value routes, whether the detail
    // is passed on; status, reason and error of a bundle.
    let cases = [
        (
            "22023",
            "kv_bad_ttl",
            400,
            bad,
            "kv_bad_ttl",
            true,
            (400, "bad_request", "kv_bad_ttl: detail of secret-key"),
        ),
        ("22023", "secret-key is bad", 400, bad, bad, false, (400, "bad_request", bad)),
        (
            "22001",
            "kv_key_too_large",
            413,
            large,
            "kv_key_too_large",
            true,
            (200, large, "kv_key_too_large: detail of secret-key"),
        ),
        (
            "22001",
            "kv_value_too_large",
            413,
            large,
            "kv_value_too_large",
            true,
            (200, large, "kv_value_too_large: detail of secret-key"),
        ),
        ("22P05", "secret-key", 400, bad, "kv_bad_body", false, (400, "bad_request", "kv_bad_body")),
        ("40001", "secret-key", 503, unavailable, "sqlstate_40001", false, (503, unavailable, unavailable)),
        ("40P01", "secret-key", 503, unavailable, "sqlstate_40P01", false, (503, unavailable, unavailable)),
        ("08006", "secret-key", 503, unavailable, "sqlstate_08006", false, (503, unavailable, unavailable)),
        ("53200", "secret-key", 503, unavailable, "sqlstate_53200", false, (503, unavailable, unavailable)),
        ("57014", "secret-key", 503, unavailable, "kv_timeout", false, (503, unavailable, unavailable)),
        ("58030", "secret-key", 503, unavailable, "sqlstate_58030", false, (503, unavailable, unavailable)),
        ("42883", "secret-key", 500, wrong, "sqlstate_42883", false, (200, "db_error", "sqlstate_42883")),
        ("42501", "secret-key", 500, wrong, "sqlstate_42501", false, (200, "db_error", "sqlstate_42501")),
        ("25006", "secret-key", 503, unavailable, "kv_read_only", false, (503, unavailable, unavailable)),
        ("P0001", "secret-key", 500, failed, "sqlstate_P0001", false, (200, "db_error", "sqlstate_P0001")),
        (
            "XX000",
            "kv_result_misaligned",
            500,
            failed,
            "kv_result_misaligned",
            false,
            (200, "misaligned", "kv_result_misaligned"),
        ),
    ];
    let batch = json!([put("k", json!(1), json!({}))]).to_string();
    let bundle = json!({"operations": [], "kv": [put("k", json!(1), json!({}))]}).to_string();
    for (sqlstate, message, status, error, reason, detailed, in_bundle) in cases {
        fail_with(&store, sqlstate, message).await;
        let what = format!("{sqlstate} {message}");
        for (line, body) in [
            ("POST /api/v1/kv", batch.as_str()),
            ("PUT /api/v1/kv/ns/k", r#"{"value":1,"forever":true}"#),
            ("DELETE /api/v1/kv/ns/k", ""),
        ] {
            let answer = store.ask(line, body).await;
            let mut expected = json!({"error": error, "reason": reason});
            if detailed {
                expected["detail"] = json!("detail of secret-key");
            }
            let mut shown = answer.json();
            if sqlstate == "22P05" {
                assert!(shown.as_object_mut().unwrap().remove("detail").is_some(), "{what}");
            }
            assert_eq!((answer.status, shown), (status, expected), "{what}, {line}");
            assert_eq!(answer.header("retry-after"), (status == 503).then_some("1"), "{what}, {line}");
            assert!(answer.header("x-queen-request-id").is_some());
        }
        let answer = store.ask("POST /api/v1/transaction", &bundle).await;
        let body = answer.json();
        let error = body["error"].as_str().unwrap();
        let error = if sqlstate == "22P05" { error.split(':').next().unwrap() } else { error };
        assert_eq!((answer.status, body["reason"].as_str().unwrap(), error), in_bundle, "{what}");
        assert_eq!(answer.header("retry-after"), (in_bundle.0 == 503).then_some("1"), "{what}");
        assert_eq!((&body["success"], &body["results"]), (&json!(false), &json!([])), "{what}");
    }
    assert_eq!(store.rows().await, 0);
    assert!(!store.world.cell.as_ref().unwrap().log().contains("secret-key"), "names reach the caller alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_the_database_that_cannot_be_read_is_a_500() {
    let store = Store::open().await;
    for (answer, grouped, reason) in [
        ("NULL::jsonb", "ARRAY[NULL::text]", "kv_result_missing"),
        ("'7'::jsonb", "ARRAY['7'::text]", "kv_result_unreadable"),
        ("'7'::jsonb", "NULL::text[]", "kv_result_unreadable"),
    ] {
        let function = format!(
            "CREATE OR REPLACE FUNCTION queen.kv_apply_v1(p_ops jsonb, p_tenant uuid, p_now timestamptz, p_in_wire boolean)
             RETURNS jsonb LANGUAGE sql AS $$ SELECT {answer} $$;
             CREATE OR REPLACE FUNCTION queen.kv_group_v1(
                 p_calls text[], p_tenants uuid[], p_now timestamptz,
                 OUT results text[], OUT states text[], OUT messages text[], OUT details text[])
             LANGUAGE sql AS $$ SELECT {grouped}, NULL::text[], NULL::text[], NULL::text[] $$"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(function))
            .execute(&mut store.world.cell_database().await)
            .await
            .unwrap();
        let path = store.ask("GET /api/v1/kv/ns/k", "").await;
        assert_eq!(
            (path.status, path.json()),
            (500, json!({"error": "kv_error", "reason": reason})),
            "{answer}"
        );
        let bundle = json!({"operations": [], "kv": [put("k", json!(1), json!({}))]}).to_string();
        let bundle = store.ask("POST /api/v1/transaction", &bundle).await;
        assert_eq!(
            (bundle.status, &bundle.json()["reason"]),
            (500, &json!("db_error")),
            "{answer}: {}",
            text(&bundle)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_waits_too_long_for_a_row_is_a_503_and_leaves_nothing() {
    let world = World::builder().cell_env("QUEEN_STMT_TIMEOUT_MS", 300).start().await;
    let tenant = crate::kv_vectors::unlimited(&world, "acme").await;
    let store = Store { world, tenant };
    store.one(put("k", json!(1), json!({}))).await;
    let mut holder = store.world.cell_database().await;
    sqlx::query("BEGIN").execute(&mut holder).await.unwrap();
    sqlx::query("UPDATE queen.kv SET updated_at = now() WHERE key = 'k'").execute(&mut holder).await.unwrap();
    let late = json!([put("a", json!(2), json!({})), put("k", json!(2), json!({}))]).to_string();
    let answer = store.post(&late).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(answer.json(), json!({"error": "kv_unavailable", "reason": "kv_timeout"}));
    assert_eq!(store.row("a").await, None, "the first half is undone");
    sqlx::query("ROLLBACK").execute(&mut holder).await.unwrap();
    eventually("the row is free", Duration::from_secs(5), async || {
        (store.post(&late).await.status == 200).then_some(())
    })
    .await;
}
