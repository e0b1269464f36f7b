//! `bootstrap_tenant`: one call from nothing to a working key (contract section 2.5).

use super::Plane;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const ACME: &str =
    "' Acme', ' Acme Inc ', 'ACME-prod ', 'free', '{cell}', ' Ops@Acme.Example ', 'correct horse'";

async fn plane() -> Plane {
    let mut plane = Plane::new().await;
    plane.world.cell_id = plane.world.add_cell("cell", 1).await;
    plane
}

fn function(plane: &Plane, arguments: &str) -> String {
    format!("queen_proxy.bootstrap_tenant({})", arguments.replace("{cell}", &plane.world.cell_id.to_string()))
}

fn call(plane: &Plane, arguments: &str) -> String {
    format!("SELECT {}", function(plane, arguments))
}

async fn bootstrap(plane: &mut Plane, arguments: &str) -> Value {
    let call = call(plane, arguments);
    plane.value(&call).await
}

fn text(made: &Value, field: &str) -> String {
    made[field].as_str().unwrap_or_else(|| panic!("{field} in {made}")).to_owned()
}

async fn count(plane: &mut Plane, from: &str) -> i64 {
    plane.value(&format!("SELECT count(*) FROM queen_proxy.{from}")).await
}

async fn actions(plane: &mut Plane) -> Vec<String> {
    plane.rows("SELECT action FROM queen_proxy.operations ORDER BY action").await
}

/// The `meta` of the one `tenant_bootstrapped` row.
async fn meta(plane: &mut Plane) -> Value {
    plane.value("SELECT meta FROM queen_proxy.operations WHERE action = 'tenant_bootstrapped'").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_run_makes_everything_and_says_the_key_once() {
    let mut plane = plane().await;
    let mut ear = plane.ear().await;
    plane.run("SET search_path = ''").await;
    let made = bootstrap(&mut plane, ACME).await;

    let fields: BTreeSet<&str> = made.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        BTreeSet::from(["tenant_id", "cluster_id", "user_id", "api_key", "password_set", "can_login"])
    );
    assert_eq!((&made["password_set"], &made["can_login"]), (&json!(true), &json!(true)));
    let [tenant, cluster, user, key] =
        ["tenant_id", "cluster_id", "user_id", "api_key"].map(|name| text(&made, name));

    let body = key.strip_prefix("qk_live_").expect("the key's beginning");
    assert_eq!(body.len(), 43);
    assert!(body.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'), "{body}");
    let stored = "SELECT to_jsonb(k) - 'id' - 'created_at' FROM queen_proxy.api_keys AS k";
    assert_eq!(
        plane.value::<Value>(stored).await,
        json!({
            "cluster_id": cluster, "name": "default", "key_hash": hex::encode(queen_proxy::identity::digest(&key)),
            "scopes": ["produce", "consume", "admin", "read"],
            "created_by": null, "last_used_at": null, "revoked_at": null,
        })
    );

    let holds = [
        format!(
            "tenants WHERE id = '{tenant}' AND slug = 'acme' AND name = 'Acme Inc' AND status = 'active'"
        ),
        format!(
            "clusters WHERE id = '{cluster}' AND tenant_id = '{tenant}' AND slug = 'acme-prod' AND status = 'active'"
        ),
        format!(
            "users WHERE id = '{user}' AND tenant_id = '{tenant}' AND email = 'ops@acme.example' AND NOT is_operator"
        ),
        "users WHERE left(password_hash, 7) = '$2a$10$' AND length(password_hash) = 60".to_owned(),
        "users WHERE public.crypt('correct horse', password_hash) = password_hash".to_owned(),
        format!("cluster_roles WHERE user_id = '{user}' AND cluster_id = '{cluster}' AND role = 'admin'"),
        "clusters AS c JOIN queen_proxy.plans AS p ON p.id = c.plan_id WHERE p.code = 'free'".to_owned(),
    ];
    for from in holds {
        assert_eq!(count(&mut plane, &from).await, 1, "{from}");
    }
    assert_eq!(count(&mut plane, "identities").await, 0);

    assert_eq!(
        actions(&mut plane).await,
        [
            "api_key_issued",
            "cluster_created",
            "cluster_role_granted",
            "tenant_bootstrapped",
            "tenant_created",
            "user_created"
        ]
    );
    let audit = "SELECT to_jsonb(o) - 'id' - 'at' FROM queen_proxy.operations AS o WHERE action = 'tenant_bootstrapped'";
    assert_eq!(
        plane.value::<Value>(audit).await,
        json!({
            "tenant_id": tenant, "cluster_id": cluster, "actor": "control_plane", "actor_id": user,
            "action": "tenant_bootstrapped", "target": tenant,
            "meta": {
                "tenant_slug": "acme", "cluster_slug": "acme-prod", "plan_code": "free",
                "admin_email": "ops@acme.example", "key_issued": true, "password_set": true, "can_login": true,
            },
        })
    );
    let outbox =
        "SELECT jsonb_agg(to_jsonb(o) - 'id' - 'created_at' - 'claimed_until') FROM queen_proxy.outbox AS o";
    assert_eq!(
        plane.value::<Value>(outbox).await,
        json!([{
            "kind": "tenant_bootstrapped", "consumed_at": null,
            "payload": {
                "tenant_id": tenant, "tenant_slug": "acme", "cluster_id": cluster, "cluster_slug": "acme-prod",
                "plan_code": "free", "admin_email": "ops@acme.example",
            },
        }])
    );
    assert_eq!(plane.heard(&mut ear).await, [cluster]);

    let everything = plane.everything().await.to_string();
    assert!(everything.contains("ops@acme.example"), "the search below sees the tables");
    assert!(!everything.contains(body) && !everything.contains("correct horse"), "a secret is stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_changes_nothing_but_the_admins_role() {
    let mut plane = plane().await;
    let first = bootstrap(&mut plane, ACME).await;
    plane
        .run("UPDATE queen_proxy.cluster_roles SET role = 'viewer'; DELETE FROM queen_proxy.operations")
        .await;
    let hash: String = plane.value("SELECT password_hash FROM queen_proxy.users").await;
    let mut ear = plane.ear().await;

    // Plan and cell are not even looked up.
    let nowhere = "'00000000-0000-4000-8000-0000000000ff'";
    let again =
        format!("'acme', '', 'acme-prod', 'no such plan', {nowhere}, 'ops@acme.example', 'other password'");
    let second = bootstrap(&mut plane, &again).await;
    for id in ["tenant_id", "cluster_id", "user_id"] {
        assert_eq!(second[id], first[id], "{id}");
    }
    assert_eq!(second["api_key"], Value::Null);
    assert_eq!((&second["password_set"], &second["can_login"]), (&json!(true), &json!(true)));

    assert_eq!(plane.value::<String>("SELECT password_hash FROM queen_proxy.users").await, hash);
    assert_eq!(plane.value::<String>("SELECT name FROM queen_proxy.tenants").await, "Acme Inc");
    assert_eq!(plane.value::<String>("SELECT role FROM queen_proxy.cluster_roles").await, "admin");
    for table in ["tenants", "clusters", "users", "api_keys", "outbox"] {
        assert_eq!(count(&mut plane, table).await, 1, "{table}");
    }
    assert_eq!(actions(&mut plane).await, ["cluster_role_granted", "tenant_bootstrapped"]);
    assert_eq!(
        meta(&mut plane).await,
        json!({
            "tenant_slug": "acme", "cluster_slug": "acme-prod", "plan_code": "free",
            "admin_email": "ops@acme.example", "key_issued": false, "password_set": true, "can_login": true,
        })
    );
    assert_eq!(plane.heard(&mut ear).await, [text(&first, "cluster_id")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_issued_for_a_new_name_and_for_one_whose_key_was_revoked() {
    let mut plane = plane().await;
    let first = text(&bootstrap(&mut plane, ACME).await, "api_key");
    let other = text(&bootstrap(&mut plane, &format!("{ACME}, ' other '")).await, "api_key");
    assert_eq!(bootstrap(&mut plane, &format!("{ACME}, 'other'")).await["api_key"], Value::Null);
    plane.run("SELECT queen_proxy.revoke_api_key(id) FROM queen_proxy.api_keys WHERE name = 'default'").await;
    let new = text(&bootstrap(&mut plane, ACME).await, "api_key");
    assert_eq!(bootstrap(&mut plane, ACME).await["api_key"], Value::Null);
    assert_eq!(BTreeSet::from([&first, &other, &new]).len(), 3);

    let live = plane
        .rows(
            "SELECT name || ' ' || key_hash FROM queen_proxy.api_keys WHERE revoked_at IS NULL ORDER BY name",
        )
        .await;
    let digest = |key: &str| hex::encode(queen_proxy::identity::digest(key));
    assert_eq!(live, [format!("default {}", digest(&new)), format!("other {}", digest(&other))]);
    assert_eq!(count(&mut plane, "api_keys").await, 3, "the revoked row stays");
    assert_eq!(count(&mut plane, "outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_may_get_a_second_cluster_and_a_second_admin() {
    let mut plane = plane().await;
    let first = bootstrap(&mut plane, ACME).await;
    plane.run("DELETE FROM queen_proxy.operations").await;
    let second =
        bootstrap(&mut plane, "'acme', NULL, 'acme-stage', 'dev', '{cell}', 'two@acme.example'").await;
    assert_eq!(second["tenant_id"], first["tenant_id"]);
    assert!(second["cluster_id"] != first["cluster_id"] && second["user_id"] != first["user_id"]);
    assert!(second["api_key"].is_string());
    assert_eq!(
        actions(&mut plane).await,
        ["api_key_issued", "cluster_created", "cluster_role_granted", "tenant_bootstrapped", "user_created"]
    );
    assert_eq!(meta(&mut plane).await["plan_code"], "dev");
    assert_eq!(count(&mut plane, "outbox").await, 1, "only the run that made the tenant is an event");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admin_without_password_cannot_log_in_until_an_identity_is_linked() {
    let mut plane = plane().await;
    let arguments = "'acme', NULL, 'acme-prod', 'free', '{cell}', 'ops@acme.example', NULL";
    let made = bootstrap(&mut plane, arguments).await;
    assert_eq!((&made["password_set"], &made["can_login"]), (&json!(false), &json!(false)));
    let name: String = plane.value("SELECT name FROM queen_proxy.tenants").await;
    assert_eq!(name, "acme", "a tenant without a name is named after its slug");
    assert_eq!(count(&mut plane, "users WHERE password_hash IS NULL").await, 1);
    let meta = meta(&mut plane).await;
    assert_eq!((&meta["password_set"], &meta["can_login"]), (&json!(false), &json!(false)));

    plane
        .run(
            "INSERT INTO queen_proxy.identities (user_id, provider, provider_id, email)
             SELECT id, 'github', '1', email FROM queen_proxy.users",
        )
        .await;
    let again = bootstrap(&mut plane, arguments).await;
    assert_eq!((&again["password_set"], &again["can_login"]), (&json!(false), &json!(true)));

    // A password given later is not taken over, and the answer still says that one was given.
    let again = bootstrap(&mut plane, &format!("{}, 'late'", arguments.trim_end_matches(", NULL"))).await;
    assert_eq!((&again["password_set"], &again["can_login"]), (&json!(true), &json!(true)));
    assert_eq!(count(&mut plane, "users WHERE password_hash IS NULL").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_refused_and_unwinds_the_whole_call() {
    let mut plane = plane().await;
    bootstrap(&mut plane, ACME).await;
    let before = plane.everything().await;
    let long = format!("'{}'", "p".repeat(73));
    // Tenant slug, tenant name, cluster slug, plan, cell, email, password, key name; the beginning of the text.
    let cases = [
        (
            ["NULL", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "bootstrap_tenant: tenant slug",
        ),
        (
            ["'  '", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "bootstrap_tenant: tenant slug",
        ),
        (
            ["'n'", "'N'", "NULL", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "bootstrap_tenant: cluster slug",
        ),
        (
            ["'n'", "'N'", "' '", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "bootstrap_tenant: cluster slug",
        ),
        (["'n'", "'N'", "'n-c'", "'free'", "NULL", "'a@n'", "NULL", "'k'"], "bootstrap_tenant: cell"),
        (
            ["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "NULL", "NULL", "'k'"],
            "bootstrap_tenant: admin email",
        ),
        (
            ["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'s3cret'", "NULL", "'k'"],
            "bootstrap_tenant: admin email",
        ),
        (
            ["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "NULL", "NULL"],
            "bootstrap_tenant: key name",
        ),
        (["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "NULL", "' '"], "bootstrap_tenant: key name"),
        (["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "''", "'k'"], "bootstrap_tenant: password"),
        (
            ["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", "E' \\t\\n'", "'k'"],
            "bootstrap_tenant: password",
        ),
        (["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "'a@n'", &long, "'k'"], "bootstrap_tenant: password"),
        (["'n'", "' '", "'n-c'", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"], "create_tenant: name"),
        (
            ["'n'", "'N'", "'n-c'", "'platinum'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "create_cluster: unknown plan",
        ),
        (["'n'", "'N'", "'n-c'", "NULL", "'{cell}'", "'a@n'", "NULL", "'k'"], "create_cluster: unknown plan"),
        (
            [
                "'n'",
                "'N'",
                "'n-c'",
                "'free'",
                "'00000000-0000-4000-8000-0000000000ff'",
                "'a@n'",
                "NULL",
                "'k'",
            ],
            "create_cluster: unknown cell",
        ),
        (
            ["'n'", "'N'", "'acme-prod'", "'free'", "'{cell}'", "'a@n'", "NULL", "'k'"],
            "bootstrap_tenant: the cluster slug belongs to another tenant",
        ),
        (
            ["'n'", "'N'", "'n-c'", "'free'", "'{cell}'", "' OPS@acme.example '", "'s3cret'", "'k'"],
            "bootstrap_tenant: the admin email belongs to another tenant",
        ),
    ];
    for (arguments, beginning) in cases {
        let call = call(&plane, &arguments.join(", "));
        let (state, message) = plane.refusal(&call).await;
        assert_eq!(state, "P0001", "{call}: {message}");
        assert!(message.starts_with(beginning), "{call}: {message}");
        assert!(!message.contains("s3cret") && !message.contains("ppp"), "{message}");
    }
    for slugs in ["'not_a_label', 'N', 'n-c'", "'n', 'N', 'not_a_label'"] {
        let call = call(&plane, &format!("{slugs}, 'free', '{{cell}}', 'a@n'"));
        assert_eq!(plane.refusal(&call).await.0, "23514", "{call}");
    }
    assert_eq!(plane.everything().await, before);

    let longest = format!("'n', 'N', 'n-c', 'free', '{{cell}}', 'a@n', '{}'", "p".repeat(72));
    assert_eq!(bootstrap(&mut plane, &longest).await["can_login"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_who_bootstrap_the_same_tenant_at_once_all_succeed_with_one_key() {
    let mut plane = plane().await;
    let acme = function(&plane, ACME);
    let results = plane.race(&acme, &vec![acme.clone(); 19]).await;
    let made: Vec<Value> =
        results.into_iter().map(|made| serde_json::from_str(&made.unwrap()).unwrap()).collect();
    for id in ["tenant_id", "cluster_id", "user_id"] {
        let ids: BTreeSet<String> = made.iter().map(|made| text(made, id)).collect();
        assert_eq!(ids.len(), 1, "{id}");
    }
    assert_eq!(made.iter().filter(|made| made["api_key"].is_string()).count(), 1, "callers with a key");
    for table in ["tenants", "clusters", "users", "cluster_roles", "api_keys", "outbox"] {
        assert_eq!(count(&mut plane, table).await, 1, "{table}");
    }
    assert_eq!(count(&mut plane, "operations").await, 6 + 19 * 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_twenty_tenants_who_want_the_same_cluster_slug_one_gets_it() {
    let mut plane = plane().await;
    let calls: Vec<String> = (0..20)
        .map(|n| function(&plane, &format!("'t{n}', NULL, 'wanted', 'free', '{{cell}}', 'a@t{n}'")))
        .collect();
    let results = plane.race(&calls[0], &calls[1..]).await;
    let (made, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!((made.len(), refused.len()), (1, 19));
    for refusal in refused {
        let refusal = refusal.unwrap_err().into_database_error().unwrap();
        assert_eq!(refusal.code().as_deref(), Some("P0001"), "{refusal}");
        assert!(refusal.message().starts_with("bootstrap_tenant: the cluster slug"), "{refusal}");
    }
    for table in ["tenants", "clusters", "users", "cluster_roles", "api_keys", "outbox"] {
        assert_eq!(count(&mut plane, table).await, 1, "{table}");
    }
}
