//! `delete_tenant`: everything goes, once, beside whoever still works (contract section 2.4).

use super::{
    LIMIT, Plane,
    mutators::{fill, scene},
};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// One row at least in every table that hangs from a tenant, for acme and for its rival.
const FURNISHED: &str = r#"
INSERT INTO queen_proxy.cluster_roles (user_id, cluster_id, role) VALUES
    ('{ops}', '{prod}', 'admin'), ('{ops}', '{stage}', 'viewer'), ('{eve}', '{rival}', 'admin');
INSERT INTO queen_proxy.identities (user_id, provider, provider_id, email) VALUES
    ('{ops}', 'google', 'g1', 'ops@acme.example'), ('{eve}', 'google', 'g2', 'eve@globex.example');
INSERT INTO queen_proxy.api_keys (cluster_id, name, key_hash, created_by) VALUES
    ('{stage}', 'by ops', repeat('e', 64), '{ops}'), ('{rival}', 'live', repeat('f', 64), NULL);
INSERT INTO queen_proxy.queues (cluster_id, name) VALUES
    ('{prod}', 'q1'), ('{prod}', 'q2'), ('{stage}', 'q1'), ('{rival}', 'q1');
INSERT INTO queen_proxy.usage_minutes (cluster_id, minute, op_class) VALUES
    ('{prod}', '2025-01-01', 'push'), ('{rival}', '2025-01-01', 'push');
INSERT INTO queen_proxy.usage_days (cluster_id, day, op_class) VALUES
    ('{prod}', '2025-01-01', 'push'), ('{rival}', '2025-01-01', 'push');
SELECT queen_proxy.set_cluster_status('{prod}', 'deleting'), queen_proxy.set_cluster_status('{rival}', 'suspended');
INSERT INTO queen_proxy.outbox (kind, payload, consumed_at) VALUES
    ('tenant',          '{"tenant_id": "{acme}", "admin_email": "ops@acme.example", "n": 1}', NULL),
    ('consumed',        '{"tenant_id": "{acme}", "admin_email": "ops@acme.example"}', now()),
    ('cluster',         '{"cluster_id": "{stage}", "admin_email": "ops@acme.example"}', NULL),
    ('capitals',        '{"cluster_id": "00000000-0000-4000-8000-0000000000A1", "admin_email": "x"}', NULL),
    ('without',         '{"tenant_id": "{acme}"}', NULL),
    ('rival',           '{"tenant_id": "{globex}", "cluster_id": "{rival}", "admin_email": "eve@globex.example"}', NULL),
    ('names nobody',    '{"admin_email": "x@y"}', NULL),
    ('not an object',   '["admin_email", "tenant_id"]', NULL),
    ('not even a list', '"admin_email"', NULL);
"#;

async fn furnished() -> Plane {
    let mut plane = scene().await;
    plane.run(&fill(FURNISHED, "")).await;
    plane
}

async fn delete(plane: &mut Plane, arguments: &str) -> Value {
    plane.value(&fill(&format!("SELECT queen_proxy.delete_tenant({arguments})"), "")).await
}

async fn payloads(plane: &mut Plane) -> BTreeMap<String, Value> {
    let rows = plane.rows("SELECT kind || '|' || payload FROM queen_proxy.outbox").await;
    let rows = rows.iter().map(|row| row.split_once('|').unwrap());
    rows.map(|(kind, payload)| (kind.to_owned(), serde_json::from_str(payload).unwrap())).collect()
}

/// `everything` without what does not belong to the rival or to nobody.
fn rest(mut everything: Value) -> Value {
    let gone = ["{acme}", "{prod}", "{stage}", "{ops}"].map(|name| fill(name, ""));
    for rows in everything.as_object_mut().unwrap().values_mut().filter_map(Value::as_array_mut) {
        rows.retain(|row| {
            let text = row.to_string().to_lowercase();
            !gone.iter().any(|id| text.contains(id))
        });
    }
    everything
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_goes_with_all_it_owns_and_leaves_its_ids_in_the_result() {
    let mut plane = furnished().await;
    plane.run(&fill("SELECT queen_proxy.set_tenant_status('{acme}', 'deleting')", "")).await;
    let mut ear = plane.ear().await;
    let brokers =
        "SELECT broker_tenant_uuid::text FROM queen_proxy.clusters AS c JOIN queen_proxy.tenants AS t
                       ON t.id = tenant_id WHERE t.slug = 'acme' ORDER BY c.slug";
    let brokers = plane.rows(brokers).await;
    plane.run("SET search_path = ''; SET timezone = 'Pacific/Kiritimati'; SET lock_timeout = '7s'").await;
    let before = plane.everything().await;
    assert!(before.to_string().contains(&brokers[0]), "the search below sees the tables");

    let result = delete(&mut plane, "'{acme}'").await;
    let id = |name: &str| fill(name, "");
    let cluster =
        |name: &str, slug: &str| json!({"cluster_id": id(name), "slug": slug, "cell_id": id("{cell}")});
    let mut clusters = [cluster("{prod}", "acme-prod"), cluster("{stage}", "acme-stage")];
    // 'old' and 'by ops' were alive, 'dead' was not.
    let counts = json!({
        "clusters": 2, "users": 1, "cluster_roles": 2, "queues": 3, "api_keys": 3, "api_keys_revoked": 2,
        "operations": 2, "outbox_redacted": 4,
    });
    let mut event = payloads(&mut plane).await.remove("tenant_deleted").expect("the event");
    let at = event.as_object_mut().unwrap().remove("at").expect("the time");
    assert!(at.as_str().unwrap().ends_with("+00:00"), "{at}");
    let mut expected = json!({
        "tenant_id": id("{acme}"), "tenant_slug": "acme", "status_was": "deleting", "forced": false,
        "clusters": clusters, "counts": counts,
    });
    assert_eq!(event, expected);
    for (cluster, broker) in clusters.iter_mut().zip(&brokers) {
        cluster["broker_tenant_uuid"] = json!(broker);
    }
    expected["clusters"] = json!(clusters);
    expected["deleted"] = json!(true);
    expected["existed"] = json!(true);
    assert_eq!(result, expected);
    assert_eq!(plane.heard(&mut ear).await, [id("{prod}"), id("{stage}")]);
    assert_eq!(plane.value::<String>("SHOW lock_timeout").await, "7s", "the caller's own is back");

    let after = plane.everything().await;
    assert_eq!(rest(after.clone()), rest(before), "somebody else's rows");
    let text = after.to_string();
    assert!(brokers.iter().all(|broker| !text.contains(broker)), "a cell's name of the tenant is left");
    assert!(!text.contains("ops@acme.example"), "an address is left");
    let mut tables: Vec<&str> = after
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, rows)| {
            rows.to_string().contains(&id("{acme}")) || rows.to_string().contains(&id("{prod}"))
        })
        .map(|(table, _)| table.as_str())
        .collect();
    tables.sort_unstable();
    assert_eq!(tables, ["outbox"], "where it is still named");
    let payloads = payloads(&mut plane).await;
    assert_eq!(payloads["tenant"], json!({"tenant_id": id("{acme}"), "n": 1}));
    assert_eq!(payloads["consumed"], json!({"tenant_id": id("{acme}")}));
    assert_eq!(payloads["cluster"], json!({"cluster_id": id("{stage}")}));
    assert_eq!(payloads["capitals"], json!({"cluster_id": "00000000-0000-4000-8000-0000000000A1"}));

    // Again: it says so and touches nothing.
    for arguments in ["'{acme}'", "p_force => true, p_tenant_id => '{acme}'"] {
        let again = delete(&mut plane, arguments).await;
        assert_eq!(again, json!({"deleted": false, "existed": false, "tenant_id": id("{acme}")}));
    }
    assert_eq!(plane.everything().await, after);
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
    // The names are free again.
    plane.run(&fill("SELECT queen_proxy.bootstrap_tenant('acme', 'A', 'acme-prod', 'free', '{cell}', 'ops@acme.example')", "")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_force_deletes_a_tenant_that_is_not_deleting() {
    let mut plane = furnished().await;
    let mut ear = plane.ear().await;
    for status in ["active", "grace", "suspended"] {
        plane.run(&fill(&format!("UPDATE queen_proxy.tenants SET status = '{status}'"), "")).await;
        let before = plane.everything().await;
        for arguments in ["'{acme}'", "'{acme}', false", "'{acme}', NULL"] {
            let call = fill(&format!("SELECT queen_proxy.delete_tenant({arguments})"), "");
            let (state, message) = plane.refusal(&call).await;
            assert_eq!(state, "P0001");
            let expected = format!("delete_tenant: tenant {{acme}} has status {status}, not deleting");
            assert_eq!(message, fill(&expected, ""));
        }
        assert_eq!(plane.everything().await, before, "{status}");
    }
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
    let result = delete(&mut plane, "'{globex}', true").await;
    assert_eq!((&result["forced"], &result["status_was"]), (&json!(true), &json!("suspended")));
    // Force says nothing about a tenant that may go anyway; one with nothing is no exception.
    plane.run("UPDATE queen_proxy.tenants SET status = 'deleting'").await;
    let result = delete(&mut plane, "'{empty}', true").await;
    assert_eq!((&result["deleted"], &result["forced"]), (&json!(true), &json!(true)));
    assert_eq!((&result["clusters"], &result["counts"]["clusters"]), (&json!([]), &json!(0)));
    let tenants = plane.rows("SELECT slug FROM queen_proxy.tenants").await;
    assert_eq!(tenants, ["acme"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_while_a_deletion_waits_goes_too() {
    let mut plane = furnished().await;
    let delete = fill("queen_proxy.delete_tenant('{acme}', true)", "");
    for create in [
        "queen_proxy.create_cluster('{acme}', 'acme-late', 'free', '{cell}')",
        "queen_proxy.create_user('{acme}', 'late@acme.example', NULL, 'local')",
        "queen_proxy.issue_api_key('{prod}', 'late', repeat('0', 64), '{read}')",
    ] {
        plane.run("BEGIN").await;
        plane.run(&fill(&format!("SELECT {create}"), "")).await;
        let mut other = plane.world.control().await;
        let call = AssertSqlSafe(format!("BEGIN; SELECT {delete}"));
        let deleting = tokio::spawn(async move {
            sqlx::raw_sql(call).execute(&mut other).await.unwrap();
            let counts = "SELECT (SELECT count(*) FROM queen_proxy.clusters) || ' ' ||
                                 (SELECT count(*) FROM queen_proxy.users) || ' ' ||
                                 (SELECT count(*) FROM queen_proxy.api_keys)";
            // Closing the connection undoes it all.
            sqlx::query_scalar::<_, String>(counts).fetch_one(&mut other).await.unwrap()
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!deleting.is_finished(), "{create}");
        plane.run("COMMIT").await;
        let left = tokio::time::timeout(LIMIT, deleting).await.expect("the deletion in time").unwrap();
        assert_eq!(left, "1 1 1", "the rival's, after {create}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_delete_at_once_one_does_and_the_other_finds_nothing() {
    let mut plane = furnished().await;
    let delete = fill("queen_proxy.delete_tenant('{acme}', true) -> 'deleted'", "");
    let results = plane.race(&delete, std::slice::from_ref(&delete)).await;
    let results: Vec<&str> = results.iter().map(|result| result.as_ref().unwrap().as_str()).collect();
    assert_eq!(results, ["true", "false"]);
    let events = "SELECT count(*) FROM queen_proxy.outbox WHERE kind = 'tenant_deleted'";
    assert_eq!(plane.value::<i64>(events).await, 1);
}

/// What everybody does to a tenant, over and over: the pause between two turns in milliseconds, and the
/// work, where `{n}` is the number of the turn.
const WORK: &[(u64, &str)] = &[
    (2, "SELECT queen_proxy.set_cluster_status('{prod}', 'active')"),
    (2, "SELECT queen_proxy.assign_plan('{stage}', 'dev')"),
    (2, "SELECT queen_proxy.set_limit_override('{stage}', '{}')"),
    (2, "SELECT queen_proxy.set_tenant_status('{acme}', 'grace')"),
    (
        2,
        "SELECT queen_proxy.revoke_api_key(queen_proxy.issue_api_key('{prod}', 'k', md5(random()::text) || md5(random()::text), '{read}'))",
    ),
    (2, "SELECT queen_proxy.grant_cluster_role('{prod}', 'ops@acme.example', 'viewer')"),
    (2, "SELECT queen_proxy.set_operator('ops@acme.example', true)"),
    (2, "SELECT queen_proxy.record_user_login('{ops}')"),
    (2, "SELECT queen_proxy.revoke_session('jti {n}', now(), 'user', '{ops}')"),
    (2, "SELECT queen_proxy.record_operation('{acme}', '{prod}', 'user', NULL, 'a', NULL, NULL)"),
    (40, "SELECT queen_proxy.create_cluster('{acme}', 'acme-{n}', 'free', '{cell}')"),
    (40, "SELECT queen_proxy.create_user('{acme}', '{n}@acme.example', NULL, 'local')"),
    (40, "SELECT queen_proxy.rollup_usage_days()"),
    // As a proxy flushes: several clusters, in any order.
    (
        40,
        "INSERT INTO queen_proxy.usage_minutes AS u (cluster_id, minute, op_class, msgs)
          SELECT id, timestamptz '2025-01-01' + {n} % 5 * interval '1 minute', 'push', 1
            FROM queen_proxy.clusters ORDER BY random()
     ON CONFLICT (cluster_id, minute, op_class) DO UPDATE SET msgs = u.msgs + 1",
    ),
    (2, "UPDATE queen_proxy.api_keys SET last_used_at = now() WHERE id = '{key}'"),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_beside_everybody_elses_work_ends_nobodys_transaction() {
    let mut plane = furnished().await;
    let over = Arc::new(AtomicBool::new(false));
    let mut workers = tokio::task::JoinSet::new();
    for (pause, work) in WORK {
        let (mut connection, over) = (plane.world.control().await, Arc::clone(&over));
        workers.spawn(async move {
            let (mut done, mut refusals) = (0, Vec::new());
            for turn in 0.. {
                if over.load(Ordering::Acquire) {
                    break;
                }
                let call = fill(&work.replace("{n}", &turn.to_string()), "");
                match sqlx::raw_sql(AssertSqlSafe(call)).execute(&mut connection).await {
                    Ok(_) => done += 1,
                    Err(sqlx::Error::Database(error)) => {
                        refusals.push((error.code().unwrap().into_owned(), error.message().to_owned()));
                    }
                    Err(error) => panic!("{work}: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(*pause)).await;
            }
            (*work, done, refusals)
        });
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let result = delete(&mut plane, "'{acme}', true").await;
    assert_eq!(result["deleted"], true);
    let clusters = result["clusters"].as_array().unwrap().len();
    tokio::time::sleep(Duration::from_millis(200)).await;
    over.store(true, Ordering::Release);
    for (work, done, refusals) in workers.join_all().await {
        assert!(done > 0, "{work} never worked: {:?}", refusals.first());
        for (state, message) in refusals {
            // Unknown by now, or a reference to what has just gone.
            assert!(state == "P0001" || state == "23503", "{work}: {state} {message}");
        }
    }
    assert!(clusters > 2, "clusters were made meanwhile");
    assert_eq!(plane.rows("SELECT slug FROM queen_proxy.clusters").await, ["globex-prod"]);
    assert_eq!(plane.rows("SELECT email FROM queen_proxy.users").await, ["eve@globex.example"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_gives_up_on_a_tenant_that_stays_in_use_and_holds_up_nobody_meanwhile() {
    let mut plane = furnished().await;
    let before = plane.everything().await;
    let mut user = plane.world.control().await;
    let hold = fill("BEGIN; SELECT FROM queen_proxy.clusters WHERE id = '{stage}' FOR UPDATE", "");
    sqlx::raw_sql(AssertSqlSafe(hold)).execute(&mut user).await.unwrap();

    let mut other = plane.world.control().await;
    let call = fill("SELECT queen_proxy.delete_tenant('{acme}', true)", "");
    let deleting = tokio::spawn(async move { sqlx::raw_sql(AssertSqlSafe(call)).execute(&mut other).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let login = fill(
        "BEGIN; SELECT queen_proxy.set_user_name('{ops}', 'n'), queen_proxy.set_cluster_status('{prod}', 'active'); ROLLBACK",
        "",
    );
    for _ in 0..10 {
        let started = Instant::now();
        plane.run(&login).await;
        assert!(started.elapsed() < Duration::from_secs(1), "it waits for the deletion");
    }
    let error = tokio::time::timeout(LIMIT, deleting).await.expect("an end in time").unwrap().unwrap_err();
    let error = error.into_database_error().unwrap();
    let expected = fill("delete_tenant: tenant {acme} is in use; nothing was deleted, try again", "");
    assert_eq!((error.code().as_deref(), error.message()), (Some("P0001"), expected.as_str()));
    assert_eq!(plane.everything().await, before);
    sqlx::raw_sql("ROLLBACK").execute(&mut user).await.unwrap();
    assert_eq!(delete(&mut plane, "'{acme}', true").await["deleted"], true);
}
