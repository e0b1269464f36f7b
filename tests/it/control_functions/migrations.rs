//! How the schema gets into a database: by many at once, again, and by a role that may only read.

use crate::support::{Process, World, eventually};
use sqlx::{AssertSqlSafe, Connection};
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);
const FILES: [&str; 7] = [
    "001_init",
    "002_functions",
    "003_bootstrap",
    "004_sessions",
    "005_usage",
    "006_delete_tenant",
    "007_metering",
];
const UP_TO_DATE: &str = "the schema is up to date";

/// A world whose control-plane database is empty.
async fn empty() -> World {
    World::builder().proxies(0).recorder().start().await
}

fn start(environment: &[(String, String)], folder: &TempDir) -> Process {
    Process::start("migrate", env!("CARGO_BIN_EXE_queen-proxy"), &["migrate"], environment, folder.path())
}

/// Exit code and what it printed.
fn end(mut process: Process) -> (i32, String) {
    let status = process.wait(LIMIT).expect("an end in time");
    (status.code().expect("an exit code"), process.log().trim().to_owned())
}

fn migrate(environment: &[(String, String)]) -> (i32, String) {
    end(start(environment, &TempDir::new().unwrap()))
}

fn applied() -> String {
    format!("applied: {}", FILES.join(", "))
}

async fn recorded(world: &World) -> Vec<String> {
    let names = sqlx::query_scalar("SELECT name FROM queen_proxy.schema_migrations ORDER BY name");
    names.fetch_all(&mut world.control().await).await.unwrap()
}

async fn schema_exists(world: &World) -> bool {
    let exists = sqlx::query_scalar("SELECT to_regnamespace('queen_proxy') IS NOT NULL");
    exists.fetch_one(&mut world.control().await).await.unwrap()
}

/// The world's environment with another role.
fn environment_of(world: &World, role: &str) -> Vec<(String, String)> {
    let mut environment = world.proxy_environment(1);
    environment.push(("PXDB_USER".to_owned(), role.to_owned()));
    environment.push(("PXDB_PASSWORD".to_owned(), "reader's password".to_owned()));
    environment
}

/// A role with these rights; roles belong to the server, which other tests use too.
async fn role(world: &World, rights: &str) -> String {
    let role = format!("reader_{}", uuid::Uuid::new_v4().simple());
    let statements = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'reader''s password'; {}",
        rights.replace("{role}", &role)
    );
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut world.control().await).await.unwrap();
    role
}

#[tokio::test(flavor = "multi_thread")]
async fn two_proxies_that_start_at_once_on_an_empty_database_both_come_up() {
    // `start` waits until both answer.
    let mut world = World::builder().proxies(2).proxies_migrate().recorder().start().await;
    assert_eq!(recorded(&world).await, FILES);
    assert!(world.proxies.iter_mut().all(|(_, process)| !process.has_ended()));
    let migrated =
        world.proxies.iter().filter(|(_, process)| process.log().contains("schema brought up to date"));
    assert_eq!(migrated.count(), 1, "proxies that migrated");
    let acme = world.tenant("acme").await;
    for proxy in 0..2 {
        let answer = world.ask_proxy(proxy, "GET /api/v1/kv/ns/k", &acme.headers(), "").await;
        assert_eq!(answer.status, 200, "proxy {proxy}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_five_migrations_at_once_one_applies_and_all_succeed() {
    let world = empty().await;
    let folder = TempDir::new().unwrap();
    let environment = world.proxy_environment(1);
    let started: Vec<Process> = (0..5).map(|_| start(&environment, &folder)).collect();
    let mut ends: Vec<(i32, String)> = started.into_iter().map(end).collect();
    ends.sort();
    let nothing = (0, UP_TO_DATE.to_owned());
    assert_eq!(ends, [(0, applied()), nothing.clone(), nothing.clone(), nothing.clone(), nothing]);
    assert_eq!(recorded(&world).await, FILES);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_migration_applies_nothing_and_every_file_may_run_twice() {
    let world = empty().await;
    let environment = world.proxy_environment(1);
    assert_eq!(migrate(&environment), (0, applied()));
    let when = "SELECT string_agg(name || applied_at, ',' ORDER BY name) FROM queen_proxy.schema_migrations";
    let mut connection = world.control().await;
    let first: String = sqlx::query_scalar(when).fetch_one(&mut connection).await.unwrap();
    assert_eq!(migrate(&environment), (0, UP_TO_DATE.to_owned()));
    let second: String = sqlx::query_scalar(when).fetch_one(&mut connection).await.unwrap();
    assert_eq!(first, second);

    // Somebody lost the records: the files meet what they made, and data stays.
    world.sql("INSERT INTO queen_proxy.tenants (slug, name) VALUES ('acme', 'Acme'); DELETE FROM queen_proxy.schema_migrations").await;
    assert_eq!(migrate(&environment), (0, applied()));
    let tenants: i64 = sqlx::query_scalar("SELECT count(*) FROM queen_proxy.tenants")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(tenants, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_only_read_can_migrate_what_is_up_to_date_and_nothing_else() {
    let world = empty().await;
    let nobody = role(&world, "").await;
    let (code, log) = migrate(&environment_of(&world, &nobody));
    assert_eq!(code, 1, "{log}");
    assert!(log.starts_with("queen-proxy: control plane at 127.0.0.1:"), "{log}");
    assert!(log.contains(": migration 001_init failed: permission denied"), "{log}");
    assert!(!log.contains("reader's password"), "{log}");
    assert!(!schema_exists(&world).await);

    assert_eq!(migrate(&world.proxy_environment(1)).0, 0);
    let reader = role(
        &world,
        "GRANT USAGE ON SCHEMA queen_proxy TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA queen_proxy TO {role}",
    )
    .await;
    assert_eq!(migrate(&environment_of(&world, &reader)), (0, UP_TO_DATE.to_owned()));

    let (last, others) = FILES.split_last().unwrap();
    world.sql(&format!("DELETE FROM queen_proxy.schema_migrations WHERE name = '{last}'")).await;
    let (code, log) = migrate(&environment_of(&world, &reader));
    assert_eq!(code, 1, "{log}");
    assert!(log.contains(&format!(": migration {last} failed: ")), "{log}");
    assert_eq!(recorded(&world).await, others);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_fails_says_why_and_keeps_nothing() {
    let world = empty().await;
    world.sql("CREATE SCHEMA elsewhere; CREATE EXTENSION pgcrypto SCHEMA elsewhere").await;
    let (code, log) = migrate(&world.proxy_environment(1));
    assert_eq!(code, 1, "{log}");
    let reason = "001_init: extension pgcrypto must be installed in schema public";
    assert!(log.starts_with("queen-proxy: control plane at 127.0.0.1:"), "{log}");
    assert!(
        log.ends_with(&format!(": migration 001_init failed: {reason}")) && log.lines().count() == 1,
        "{log}"
    );
    assert!(!schema_exists(&world).await);

    world.sql("ALTER EXTENSION pgcrypto SET SCHEMA public").await;
    assert_eq!(migrate(&world.proxy_environment(1)), (0, applied()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_waits_for_one_that_is_running() {
    let world = empty().await;
    let mut other = world.control().await;
    // The lock of the runner ("queen_px").
    sqlx::query("SELECT pg_advisory_lock(8175552184878854264)").execute(&mut other).await.unwrap();
    let folder = TempDir::new().unwrap();
    let process = start(&world.proxy_environment(1), &folder);
    eventually("it waits for the lock", LIMIT, async || {
        let waiting = "SELECT EXISTS (SELECT FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
                        WHERE locktype = 'advisory' AND NOT granted AND datname = current_database())";
        let waiting: bool = sqlx::query_scalar(waiting).fetch_one(&mut world.control().await).await.unwrap();
        waiting.then_some(())
    })
    .await;
    assert!(!schema_exists(&world).await);
    other.close().await.unwrap();
    assert_eq!(end(process), (0, applied()));
}
