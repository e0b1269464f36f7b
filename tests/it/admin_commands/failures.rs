//! Ends that scripts must be able to tell apart, whatever the command.

use super::Admin;
use crate::support::{World, free_port};
use std::net::TcpListener;

const PASSWORD: &str = "s3cret-Text";

/// Every command, each with arguments that are complete.
const COMMANDS: [&[&str]; 17] = [
    &["tenant", "bootstrap", "a", "--cluster", "a", "--plan", "free", "--cell", "c", "--email", "a@b"],
    &["tenant", "status", "a", "grace"],
    &["tenant", "delete", "a"],
    &["cluster", "create", "a", "a", "--plan", "free", "--cell", "c"],
    &["cluster", "status", "a", "active"],
    &["cluster", "plan", "a", "free"],
    &["cluster", "limits", "a", "--clear"],
    &["cluster", "show", "a"],
    &["key", "issue", "a", "--name", "n", "--scopes", "read"],
    &["key", "revoke", "00000000-0000-0000-0000-000000000001"],
    &["key", "list", "a"],
    &["user", "create", "a", "a@b"],
    &["user", "role", "a", "a@b", "admin"],
    &["user", "operator", "a@b", "on"],
    &["session", "revoke", "j", "--user", "a@b", "--expires-at", "4102444800"],
    &["cell", "add", "c", "--region", "r", "--base-url", "http://c", "--class", "shared"],
    &["cell", "list"],
];

fn admin(environment: &[(&str, &str)]) -> Admin {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Admin { environment: environment.iter().map(own).collect() }
}

#[test]
fn a_database_that_is_away_is_3() {
    let closed = free_port().to_string();
    let away = admin(&[("PXDB_HOST", "127.0.0.1"), ("PXDB_PORT", &closed), ("PXDB_PASSWORD", PASSWORD)]);
    for command in COMMANDS {
        let line = away.fails(3, command);
        assert!(line.contains("connection refused") && !line.contains(PASSWORD), "{command:?}: {line}");
    }
    // Takes connections and never says a word.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let silent = admin(&[("PXDB_HOST", "127.0.0.1"), ("PXDB_PORT", &port), ("PXDB_TIMEOUT_MS", "300")]);
    assert_eq!(
        silent.fails(3, &["cell", "list"]),
        "no answer from the control plane's database within 300ms"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_does_not_let_us_in_is_3_and_an_empty_one_is_1() {
    let world = World::builder().proxies(0).recorder().start().await;
    let with = |name: &str, value: &str| {
        let mut environment = world.proxy_environment(1);
        environment.push((name.to_owned(), value.to_owned()));
        Admin { environment }
    };
    for (name, value, state) in
        [("PXDB_PASSWORD", PASSWORD, "28P01"), ("PXDB_DB", "no_such_database", "3D000")]
    {
        let line = with(name, value).fails(3, &["cell", "list"]);
        assert!(line.contains(&format!("SQLSTATE {state}")) && !line.contains(PASSWORD), "{line}");
    }
    for command in COMMANDS {
        let line = Admin::of(&world).fails(1, command);
        assert_eq!(line, "the control plane's schema is not up to date: run `queen-proxy migrate`");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_with_too_few_rights_is_refused() {
    let (world, mut admin) = Admin::alone().await;
    let name = format!("reader_{}", uuid::Uuid::new_v4().simple());
    let role = format!(
        "CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'; GRANT USAGE ON SCHEMA queen_proxy TO {name}"
    );
    world.sql(&role).await;
    admin.environment.extend(
        [("PXDB_USER", name.as_str()), ("PXDB_PASSWORD", PASSWORD)].map(|(n, v)| (n.into(), v.into())),
    );
    assert_eq!(admin.fails(1, &["cell", "list"]), "the database's role may not do this");
    world.sql(&format!("DROP OWNED BY {name}; DROP ROLE {name}")).await;
}

#[test]
fn wrong_arguments_and_settings_are_2_also_where_the_database_is_away() {
    let closed = free_port().to_string();
    let away = [("PXDB_HOST", "127.0.0.1"), ("PXDB_PORT", closed.as_str())];
    for wrong in [
        &[][..],
        &["fly"],
        &["tenant"],
        &["tenant", "status", "a"],
        &["tenant", "status", "a", "push_blocked"],
        &["cluster", "status", "a", "grace"],
        &["cluster", "show", "a", "--fast"],
        &["key", "issue", "a", "--scopes", "read"],
        &["user", "create", "a", "a@b", "--password", "x"],
        &["session", "revoke", "j", "--user", "a@b"],
    ] {
        let ran = admin(&away).run(wrong);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{wrong:?}: {}", ran.err);
        assert!(!ran.err.is_empty());
    }
    let create = ["user", "create", "a", "a@b", "--password-stdin"];
    assert_eq!(admin(&away).fails_with(2, &create, "\n"), "standard input is empty");

    assert_eq!(admin(&[]).run(&["cell", "list"]).code, 2);
    let ran = admin(&[("PXDB_HOST", "h"), ("PXDB_PORT", PASSWORD)]).run(&["cell", "list"]);
    assert!(
        ran.code == 2 && ran.err.contains("PXDB_PORT: must be") && !ran.err.contains(PASSWORD),
        "{}",
        ran.err
    );
    let one_cell = admin(&[("QUEEN_PROXY_DEV_CELL_URL", "http://127.0.0.1:1")]);
    assert_eq!(one_cell.fails(2, &["cell", "list"]), "PXDB_HOST: needed to reach the control plane");
    // The file is read as for `serve`, wherever it stands on the line.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("pxdb_host = '127.0.0.1'\npxdb_port = {closed}\n")).unwrap();
    let path = file.path().to_str().unwrap();
    for command in [["--config", path, "cell", "list"], ["cell", "list", "--config", path]] {
        admin(&[]).fails(3, &command);
    }
}

#[test]
fn help_tells_the_exit_codes() {
    for command in [&[][..], &["tenant"], &["cluster"], &["key"], &["user"], &["session"], &["cell"]] {
        let help = admin(&[]).ok(&[command, &["--help"]].concat());
        for line in ["Exit codes:", "  0  done", "  1  refused", "  2  wrong", "  3  the database"] {
            assert!(help.contains(line), "{command:?}: {help}");
        }
    }
    for command in COMMANDS {
        let help = admin(&[]).ok(&[&command[..2], &["--help"]].concat());
        assert!(help.contains("--json"), "{command:?}: {help}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_nobody_reads_is_no_panic() {
    let (_world, admin) = Admin::alone().await;
    let line = format!("exec {} admin cell list > /dev/full", env!("CARGO_BIN_EXE_queen-proxy"));
    let output = std::process::Command::new("/bin/sh")
        .args(["-c", &line])
        .env_clear()
        .envs(admin.environment.iter().map(|(name, value)| (name, value)))
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.starts_with("queen-proxy: done, but the output could not be written: "), "{err}");
}
