//! `roles.sql`: each role can do its work and nothing else.

use super::{
    LIMIT, Plane,
    mutators::{fill, scene},
};
use crate::support::{Process, free_port};
use sqlx::AssertSqlSafe;
use std::collections::BTreeSet;
use tempfile::TempDir;

const FILE: &str = include_str!("../../../migrations/control/roles.sql");
const OWNER: &str = "queen_proxy_owner";
const WRITER: &str = "queen_proxy_writer";
const PROXY: &str = "queen_proxy_proxy";
const READER: &str = "queen_proxy_reader";

/// The scene with the roles.
async fn staffed() -> Plane {
    let mut plane = scene().await;
    plane.run(FILE).await;
    plane
}

/// One statement as one of the roles, undone afterwards; the SQLSTATE when it is refused.
async fn attempt(plane: &mut Plane, role: &str, statement: &str) -> Option<String> {
    plane.run(&format!("BEGIN; SET LOCAL ROLE {role}")).await;
    let statement = AssertSqlSafe(fill(statement, ""));
    let result = sqlx::raw_sql(statement).execute(&mut plane.connection).await;
    plane.run("ROLLBACK").await;
    result.err().map(|error| error.into_database_error().unwrap().code().unwrap().into_owned())
}

async fn set(plane: &mut Plane, query: &str) -> BTreeSet<String> {
    plane.rows(query).await.into_iter().collect()
}

/// What each role must be able to do, in an order in which it works.
const MUST: &[(&str, &str)] = &[
    (WRITER, "SELECT queen_proxy.record_operation('{acme}', '{prod}', 'user', NULL, 'a', NULL, NULL)"),
    (WRITER, "SELECT queen_proxy.create_tenant('new', 'New')"),
    (WRITER, "SELECT queen_proxy.create_user('{acme}', 'a@b', NULL, 'local')"),
    (WRITER, "SELECT queen_proxy.create_cluster('{acme}', 'new', 'free', '{cell}')"),
    (WRITER, "SELECT queen_proxy.assign_plan('{prod}', 'free')"),
    (WRITER, "SELECT queen_proxy.set_limit_override('{prod}', '{}')"),
    (WRITER, "SELECT queen_proxy.set_tenant_status('{acme}', 'grace')"),
    (WRITER, "SELECT queen_proxy.set_cluster_status('{prod}', 'suspended')"),
    (WRITER, "SELECT queen_proxy.issue_api_key('{prod}', 'n', '{new hash}', ARRAY['read'])"),
    (WRITER, "SELECT queen_proxy.revoke_api_key('{key}')"),
    (
        WRITER,
        "SELECT queen_proxy.grant_cluster_role('{prod}', 'ops@acme.example', 'viewer');
         SELECT queen_proxy.grant_cluster_role('{prod}', 'ops@acme.example', 'admin');
         SELECT queen_proxy.revoke_cluster_role('{prod}', 'ops@acme.example')",
    ),
    (
        WRITER,
        "SELECT queen_proxy.bootstrap_tenant('new', 'New', 'new-prod', 'free', '{cell}', 'a@b', 'password');
         SELECT queen_proxy.bootstrap_tenant('new', 'New', 'new-prod', 'free', '{cell}', 'a@b');
         SELECT queen_proxy.delete_tenant(id, true) FROM queen_proxy.tenants WHERE slug = 'new'",
    ),
    (WRITER, "SELECT queen_proxy.revoke_session('j', now(), 'control_plane', '{ops}')"),
    (WRITER, "SELECT queen_proxy.set_operator('ops@acme.example', true)"),
    (WRITER, "SELECT queen_proxy.set_user_name('{ops}', 'Ops')"),
    (WRITER, "SELECT queen_proxy.record_user_login('{ops}')"),
    (WRITER, "SELECT queen_proxy.emit_outbox('k', NULL)"),
    // As `admin outbox follow` does.
    (WRITER, "SELECT FROM queen_proxy.outbox FOR UPDATE SKIP LOCKED;
              UPDATE queen_proxy.outbox SET consumed_at = now(), claimed_until = NULL"),
    // Deletes what others wrote as well.
    (WRITER, "SELECT queen_proxy.delete_tenant('{acme}', true)"),
    (WRITER, "SELECT c.slug, p.code, l.slug FROM queen_proxy.clusters AS c
                JOIN queen_proxy.plans AS p ON p.id = plan_id JOIN queen_proxy.cells AS l ON l.id = cell_id"),
    (PROXY, "SELECT * FROM queen_proxy.clusters JOIN queen_proxy.tenants AS t ON t.id = tenant_id
               JOIN queen_proxy.plans AS p ON p.id = plan_id JOIN queen_proxy.cells AS l ON l.id = cell_id"),
    (PROXY, "SELECT * FROM queen_proxy.api_keys, queen_proxy.revoked_tokens, queen_proxy.users,
                queen_proxy.cluster_roles, queen_proxy.identities, queen_proxy.queues, queen_proxy.usage_minutes,
                queen_proxy.usage_days, queen_proxy.outbox, queen_proxy.schema_migrations"),
    (PROXY, "UPDATE queen_proxy.api_keys SET last_used_at = now() WHERE key_hash = '{hash}'"),
    (
        PROXY,
        "INSERT INTO queen_proxy.queues (cluster_id, name) VALUES ('{prod}', 'q')
             ON CONFLICT (cluster_id, name) WHERE deleted_at IS NULL DO UPDATE SET partitions_count = 1;
         UPDATE queen_proxy.queues SET deleted_at = now(); DELETE FROM queen_proxy.queues",
    ),
    (
        PROXY,
        "INSERT INTO queen_proxy.usage_minutes AS u (cluster_id, minute, op_class, msgs)
              SELECT id, '2025-01-01', 'push', 1 FROM queen_proxy.clusters
         ON CONFLICT (cluster_id, minute, op_class) DO UPDATE SET msgs = u.msgs + 1;
         SELECT queen_proxy.rollup_usage_days(), queen_proxy.rollup_usage_days();
         SELECT queen_proxy.prune_usage_minutes(), queen_proxy.cluster_month_msgs('{prod}', '2025-01-01');
         DELETE FROM queen_proxy.usage_days",
    ),
    (PROXY, "SELECT queen_proxy.emit_outbox('k', NULL); UPDATE queen_proxy.outbox SET consumed_at = now()"),
    (
        PROXY,
        "SELECT queen_proxy.record_usage('{nobody}', '[]'); SELECT queen_proxy.maintain_usage(1);
         SELECT queen_proxy.check_monthly_quotas(80)",
    ),
    (PROXY, "SELECT queen_proxy.record_operation('{acme}', '{prod}', 'user', '{ops}', 'a', NULL, NULL)"),
    (PROXY, "SELECT queen_proxy.record_user_login('{ops}')"),
    (
        PROXY,
        "SELECT queen_proxy.revoke_session('j', '2025-01-01', 'user', '{ops}');
         SELECT queen_proxy.revoke_session('j', '2025-01-01', 'user', '{ops}');
         SELECT queen_proxy.sweep_revoked_tokens()",
    ),
    (READER, "SELECT count(*) FROM queen_proxy.users, queen_proxy.api_keys, queen_proxy.cells"),
    (READER, "SELECT email, is_operator, name, last_login_at FROM queen_proxy.users"),
    (READER, "SELECT k.name, scopes, revoked_at FROM queen_proxy.api_keys AS k"),
    (READER, "SELECT * FROM queen_proxy.operations, queen_proxy.usage_days, queen_proxy.clusters"),
    (OWNER, "ALTER TABLE queen_proxy.tenants ADD COLUMN note TEXT"),
    (OWNER, "INSERT INTO queen_proxy.plans (code, cell_class) VALUES ('own', 'shared')"),
    (OWNER, "SELECT queen_proxy.create_tenant('new', 'New')"),
];

/// What nobody but the owner, or nobody but another role, may do.
const MUST_NOT: &[(&str, &str)] = &[
    (READER, "SELECT key_hash FROM queen_proxy.api_keys"),
    (READER, "SELECT * FROM queen_proxy.api_keys"),
    (READER, "SELECT 1 FROM queen_proxy.api_keys WHERE key_hash = '{hash}'"),
    (READER, "SELECT password_hash FROM queen_proxy.users"),
    (READER, "SELECT u FROM queen_proxy.users AS u"),
    (READER, "SELECT cell_secret FROM queen_proxy.cells"),
    (READER, "TABLE queen_proxy.cells"),
    (READER, "UPDATE queen_proxy.clusters SET status = 'active'"),
    (READER, "SELECT FROM queen_proxy.clusters FOR KEY SHARE"),
    (READER, "INSERT INTO queen_proxy.outbox (kind, payload) VALUES ('k', '{}')"),
    (READER, "DELETE FROM queen_proxy.operations"),
    (READER, "TRUNCATE queen_proxy.usage_minutes"),
    (READER, "CREATE TABLE queen_proxy.mine ()"),
    (READER, "SELECT queen_proxy.cluster_month_msgs('{prod}', '2025-01-01')"),
    (READER, "SELECT queen_proxy.sweep_revoked_tokens()"),
    (READER, "SELECT queen_proxy.set_operator('ops@acme.example', true)"),
    (PROXY, "INSERT INTO queen_proxy.tenants (slug, name) VALUES ('new', 'New')"),
    (PROXY, "UPDATE queen_proxy.tenants SET status = 'active'"),
    (PROXY, "UPDATE queen_proxy.clusters SET plan_id = plan_id"),
    (PROXY, "SELECT FROM queen_proxy.clusters FOR KEY SHARE"),
    (PROXY, "DELETE FROM queen_proxy.clusters"),
    (PROXY, "UPDATE queen_proxy.plans SET max_queues = NULL"),
    (PROXY, "UPDATE queen_proxy.cells SET cell_secret = ''"),
    (
        PROXY,
        "INSERT INTO queen_proxy.api_keys (cluster_id, name, key_hash) VALUES ('{prod}', 'n', '{new hash}')",
    ),
    (PROXY, "UPDATE queen_proxy.api_keys SET revoked_at = NULL"),
    (PROXY, "UPDATE queen_proxy.api_keys SET scopes = '{admin}'"),
    (PROXY, "UPDATE queen_proxy.users SET is_operator = true"),
    (PROXY, "UPDATE queen_proxy.users SET password_hash = ''"),
    (
        PROXY,
        "INSERT INTO queen_proxy.cluster_roles (user_id, cluster_id, role) VALUES ('{ops}', '{rival}', 'admin')",
    ),
    (PROXY, "UPDATE queen_proxy.revoked_tokens SET expires_at = now()"),
    (PROXY, "SELECT meta FROM queen_proxy.operations"),
    (PROXY, "UPDATE queen_proxy.operations SET actor = 'user'"),
    (PROXY, "DELETE FROM queen_proxy.operations"),
    (PROXY, "INSERT INTO queen_proxy.schema_migrations (name) VALUES ('x')"),
    (PROXY, "SELECT queen_proxy.set_operator('ops@acme.example', true)"),
    (PROXY, "SELECT queen_proxy.issue_api_key('{prod}', 'n', '{new hash}', ARRAY['read'])"),
    (PROXY, "SELECT queen_proxy.set_tenant_status('{acme}', 'active')"),
    (PROXY, "SELECT queen_proxy.delete_tenant('{acme}', true)"),
    (PROXY, "SELECT queen_proxy.bootstrap_tenant('a', 'a', 'a', 'free', '{cell}', 'a@b')"),
    (PROXY, "CREATE OR REPLACE FUNCTION queen_proxy.mine() RETURNS VOID LANGUAGE sql AS ''"),
    (WRITER, "SELECT key_hash FROM queen_proxy.api_keys"),
    (WRITER, "SELECT cell_secret FROM queen_proxy.cells"),
    (WRITER, "UPDATE queen_proxy.cells SET base_url = ''"),
    (
        WRITER,
        "INSERT INTO queen_proxy.cells (slug, region, base_url, class) VALUES ('a', 'a', 'a', 'shared')",
    ),
    (WRITER, "UPDATE queen_proxy.plans SET max_queues = NULL"),
    (WRITER, "UPDATE queen_proxy.clusters SET tenant_id = '{globex}'"),
    (WRITER, "UPDATE queen_proxy.clusters SET broker_tenant_uuid = id"),
    (WRITER, "UPDATE queen_proxy.users SET password_hash = ''"),
    (WRITER, "UPDATE queen_proxy.users SET tenant_id = '{globex}'"),
    (WRITER, "DELETE FROM queen_proxy.clusters"),
    (WRITER, "UPDATE queen_proxy.operations SET actor = 'user'"),
    (WRITER, "UPDATE queen_proxy.api_keys SET scopes = '{admin}'"),
    (WRITER, "DELETE FROM queen_proxy.revoked_tokens"),
    (WRITER, "SELECT FROM queen_proxy.usage_minutes"),
    (WRITER, "SELECT queen_proxy.record_usage('{nobody}', '[]')"),
    (WRITER, "SELECT queen_proxy.maintain_usage(1)"),
    (WRITER, "UPDATE queen_proxy.outbox SET kind = 'k'"),
    (READER, "SELECT queen_proxy.check_monthly_quotas(80)"),
    (WRITER, "UPDATE queen_proxy.usage_days SET msgs = 0"),
    (WRITER, "SELECT queen_proxy.rollup_usage_days()"),
    (WRITER, "SELECT queen_proxy.prune_usage_minutes()"),
    (WRITER, "SELECT queen_proxy.sweep_revoked_tokens()"),
    (WRITER, "DROP FUNCTION queen_proxy.create_tenant"),
];

#[tokio::test(flavor = "multi_thread")]
async fn each_role_can_do_its_work_and_not_another_ones() {
    let mut plane = staffed().await;
    for (role, statement) in MUST {
        assert_eq!(attempt(&mut plane, role, statement).await, None, "{role}: {statement}");
    }
    for (role, statement) in MUST_NOT {
        let refused = attempt(&mut plane, role, statement).await;
        assert_eq!(refused.as_deref(), Some("42501"), "{role}: {statement}");
    }
}

/// A function per line that a role may call.
fn callable(role: &str) -> String {
    format!(
        "SELECT proname::text FROM pg_proc WHERE pronamespace = 'queen_proxy'::regnamespace
            AND has_function_privilege('{role}', oid, 'EXECUTE')"
    )
}

/// A line per table or column and right that a role has.
fn rights(role: &str) -> String {
    format!(
        "SELECT c.relname || '.' || a.attname || ' ' || r.name
           FROM pg_class AS c
           JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS r (name)
          WHERE c.relnamespace = 'queen_proxy'::regnamespace AND c.relkind = 'r'
            AND has_column_privilege('{role}', c.oid, a.attnum, r.name)
          UNION ALL
         SELECT c.relname || ' ' || r.name
           FROM pg_class AS c CROSS JOIN unnest(ARRAY['DELETE', 'TRUNCATE', 'TRIGGER']) AS r (name)
          WHERE c.relnamespace = 'queen_proxy'::regnamespace AND c.relkind = 'r'
            AND has_table_privilege('{role}', c.oid, r.name)"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_and_function_has_its_place_and_a_second_run_changes_nothing() {
    let mut plane = staffed().await;
    let all =
        set(&mut plane, "SELECT proname::text FROM pg_proc WHERE pronamespace = 'queen_proxy'::regnamespace")
            .await;
    let [nobody, reader, proxy, writer, owner] = ["public", READER, PROXY, WRITER, OWNER].map(callable);
    assert_eq!(set(&mut plane, &nobody).await, BTreeSet::new(), "PUBLIC");
    assert_eq!(set(&mut plane, &reader).await, BTreeSet::new());
    let proxy = set(&mut plane, &proxy).await;
    let expected = [
        "check_monthly_quotas",
        "cluster_month_msgs",
        "emit_outbox",
        "maintain_usage",
        "prune_usage_minutes",
        "record_operation",
        "record_usage",
        "record_user_login",
        "revoke_session",
        "rollup_usage_days",
        "sweep_revoked_tokens",
    ];
    assert_eq!(proxy.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    let writer = set(&mut plane, &writer).await;
    let maintenance: Vec<&String> = all.difference(&writer).collect();
    let expected = [
        "check_monthly_quotas",
        "cluster_month_msgs",
        "maintain_usage",
        "prune_usage_minutes",
        "record_usage",
        "rollup_usage_days",
        "sweep_revoked_tokens",
    ];
    assert_eq!(maintenance, expected, "not the writer's");
    assert_eq!(set(&mut plane, &owner).await, all);

    let columns = "SELECT c.relname || '.' || a.attname || ' SELECT' FROM pg_class AS c
                     JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    WHERE c.relnamespace = 'queen_proxy'::regnamespace AND c.relkind = 'r'";
    let columns = set(&mut plane, columns).await;
    let may_read = set(&mut plane, &rights(READER)).await;
    let secrets: Vec<&String> = columns.difference(&may_read).collect();
    let expected = ["api_keys.key_hash SELECT", "cells.cell_secret SELECT", "users.password_hash SELECT"];
    assert_eq!(secrets, expected, "hidden from the reader");
    assert!(may_read.is_subset(&columns), "the reader may write");
    let updates: Vec<String> =
        set(&mut plane, &rights(PROXY)).await.into_iter().filter(|right| right.ends_with("UPDATE")).collect();
    let updates: Vec<&str> = updates
        .iter()
        .map(String::as_str)
        .filter(|right| {
            !["queues", "usage_minutes", "usage_days", "usage_batches", "outbox"]
                .iter()
                .any(|own| right.starts_with(own))
        })
        .collect();
    assert_eq!(updates, ["api_keys.last_used_at UPDATE", "users.last_login_at UPDATE"]);
    assert_eq!(set(&mut plane, &rights("public")).await, BTreeSet::new(), "PUBLIC");

    let owners = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'queen_proxy'::regnamespace
                   UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'queen_proxy'::regnamespace
                   UNION SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'queen_proxy'";
    assert_eq!(plane.rows(owners).await, [OWNER]);
    let logins = format!("SELECT rolname::text FROM pg_roles WHERE rolname = ANY ('{{{OWNER},{WRITER},{PROXY},{READER}}}')
                             AND NOT (rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls OR rolreplication)");
    assert_eq!(plane.rows(&logins).await.len(), 4);

    // A right that somebody added by hand goes; the rest is as before.
    let mut before = Vec::new();
    for role in [OWNER, WRITER, PROXY, READER] {
        before.push((set(&mut plane, &rights(role)).await, set(&mut plane, &callable(role)).await));
    }
    plane
        .run(&format!(
            "GRANT UPDATE (slug) ON queen_proxy.clusters TO {READER}; GRANT DELETE ON queen_proxy.users TO {PROXY};
             GRANT ALL ON queen_proxy.plans TO PUBLIC; GRANT EXECUTE ON FUNCTION queen_proxy.delete_tenant TO PUBLIC"
        ))
        .await;
    plane.run(FILE).await;
    for (role, before) in [OWNER, WRITER, PROXY, READER].iter().zip(before) {
        let after = (set(&mut plane, &rights(role)).await, set(&mut plane, &callable(role)).await);
        assert_eq!(after, before, "{role}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_schema_the_file_says_so_and_does_nothing() {
    let mut plane = Plane::new().await;
    plane.run("DROP SCHEMA queen_proxy CASCADE").await;
    let (_, message) = plane.refusal(FILE).await;
    assert_eq!(message, "roles: schema queen_proxy is missing; migrate first");
}

/// A login that is a member of a role, and the environment of a program that uses it.
async fn login(plane: &mut Plane, role: &str, port: u16) -> (String, Vec<(String, String)>) {
    let name = format!("login_{}", uuid::Uuid::new_v4().simple());
    plane.run(&format!("CREATE ROLE {name} LOGIN PASSWORD 'of a member'; GRANT {role} TO {name}")).await;
    let mut environment = plane.world.proxy_environment(port);
    environment.push(("PXDB_USER".to_owned(), name.clone()));
    environment.push(("PXDB_PASSWORD".to_owned(), "of a member".to_owned()));
    (name, environment)
}

fn start(arguments: &[&str], environment: &[(String, String)], folder: &TempDir) -> Process {
    Process::start("member", env!("CARGO_BIN_EXE_queen-proxy"), arguments, environment, folder.path())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_the_owner_migrates_and_what_it_makes_is_the_owners() {
    let mut plane = staffed().await;
    let folder = TempDir::new().unwrap();
    let (name, environment) = login(&mut plane, OWNER, 1).await;
    plane.run(&format!("ALTER ROLE {name} SET role = '{OWNER}'")).await;
    plane.run("DELETE FROM queen_proxy.schema_migrations; DROP FUNCTION queen_proxy.delete_tenant").await;
    let mut process = start(&["migrate"], &environment, &folder);
    let code = process.wait(LIMIT).expect("an end in time").code();
    assert_eq!(code, Some(0), "{}", process.log());
    assert!(process.log().contains("applied: 001_init, 002_functions"), "{}", process.log());
    let made = "SELECT proowner::regrole::text FROM pg_proc WHERE proname = 'delete_tenant'
                   AND NOT has_function_privilege('public', oid, 'EXECUTE')";
    assert_eq!(plane.rows(made).await, [OWNER], "and is not PUBLIC's");
    assert!(!set(&mut plane, &callable(WRITER)).await.contains("delete_tenant"));
    plane.run(FILE).await;
    assert!(set(&mut plane, &callable(WRITER)).await.contains("delete_tenant"), "after another run");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_the_proxy_role_serves_and_cannot_migrate() {
    let mut plane = Plane::new().await;
    plane.run(FILE).await;
    plane.world.cell_id = plane.world.add_cell("cell", plane.world.cell_port).await;
    let acme = plane.world.tenant("acme").await;
    let folder = TempDir::new().unwrap();
    let port = free_port();
    let (_, environment) = login(&mut plane, PROXY, port).await;
    let process = start(&["serve"], &environment, &folder);
    plane.world.proxies.push((port, process));
    plane.world.wait_for_proxy(0).await;
    let answer = plane.world.ask("GET /api/v1/kv/ns/k", &acme.headers(), "").await;
    assert_eq!(answer.status, 200, "{}", plane.world.proxies[0].1.log());

    plane.run("DELETE FROM queen_proxy.schema_migrations WHERE name = '004_sessions'").await;
    let mut process = start(&["migrate"], &environment, &folder);
    assert_eq!(process.wait(LIMIT).expect("an end in time").code(), Some(1), "{}", process.log());
    assert!(process.log().contains("004_sessions failed: "), "{}", process.log());
}
