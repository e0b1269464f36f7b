//! Starts that must not succeed: one clear line and exit code 1, never a panic.

use super::{CELL, PROXY, Program};
use crate::support::{World, free_port};
use std::net::TcpListener;

const PASSWORD: &str = "s3cret-Text";

/// `serve` ends with exit code 1 and this one line of its own.
fn fails(program: &Program, environment: &[(&str, &str)], expected: &str) {
    let mut environment = environment.to_vec();
    if program.name == PROXY.name {
        environment.push(("QUEEN_PROXY_ADMIN_ADDR", "off"));
    }
    let (code, log) = program.run(&["serve"], &environment);
    assert_eq!(code, 1, "{log}");
    let start = format!("{}: ", program.name);
    let own: Vec<&str> = log.lines().filter(|line| line.starts_with(&start)).collect();
    assert_eq!(own.len(), 1, "{log}");
    assert!(own[0].contains(expected), "not {expected}:\n{log}");
    assert!(!log.contains("panicked") && !log.contains(PASSWORD), "{log}");
}

#[test]
fn exit_codes_and_usage() {
    for program in [&PROXY, &CELL] {
        assert_eq!(program.run(&["check"], &[]).0, 0);
        for (arguments, expected) in
            [(&["--help"][..], 0), (&["--version"], 0), (&[], 2), (&["fly"], 2), (&["check", "--x"], 2)]
        {
            assert_eq!(program.run(arguments, &[]).0, expected, "{} {arguments:?}", program.name);
        }
    }
}

#[test]
fn a_proxy_without_a_database_and_without_a_cell_is_refused() {
    let none = ("PXDB_HOST", "");
    for command in ["check", "serve", "migrate"] {
        let (code, log) = PROXY.run(&[command], &[none]);
        assert_eq!(code, 1, "{command}: {log}");
        assert!(log.contains("\n  PXDB_HOST: needed"), "{log}");
    }
    let cell = ("QUEEN_PROXY_DEV_CELL_URL", "http://127.0.0.1:1");
    assert_eq!(PROXY.run(&["check"], &[none, cell]).0, 0);
    let (code, log) = PROXY.run(&["migrate"], &[none, cell]);
    assert_eq!((code, log.trim()), (1, "queen-proxy: PXDB_HOST: needed to migrate"));
}

#[test]
fn a_tenancy_header_that_nobody_guards_is_refused() {
    for command in ["check", "serve"] {
        let (code, log) = CELL.run(&[command], &[("QUEEN_TENANCY_HEADER", "true")]);
        assert_eq!(code, 1, "{log}");
        assert!(log.contains("\n  QUEEN_TENANCY_HEADER: needs QUEEN_KV_TRUSTED_PROXY"), "{log}");
    }
    let both = [("QUEEN_TENANCY_HEADER", "true"), ("QUEEN_KV_TRUSTED_PROXY", "true")];
    assert_eq!(CELL.run(&["check"], &both).0, 0);
    assert_eq!(CELL.run(&["check"], &both[1..]).0, 0);
}

#[test]
fn certificate_and_key_come_together_and_have_to_be_usable() {
    let (cert, key) = ("QUEEN_PROXY_TLS_CERT", "QUEEN_PROXY_TLS_KEY");
    let file = |name: &str| format!("{}/tests/it/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let (chain, right, wrong) = (file("sec1.pem"), file("sec1.key"), file("pkcs8.key"));
    let cases: [(&[_], &str); 6] = [
        (&[(cert, chain.as_str())], "QUEEN_PROXY_TLS_CERT: needs QUEEN_PROXY_TLS_KEY"),
        (&[(key, right.as_str())], "QUEEN_PROXY_TLS_KEY: needs QUEEN_PROXY_TLS_CERT"),
        (&[(cert, "/no/such/file"), (key, &right)], "/no/such/file: holds no certificates"),
        (&[(cert, &right), (key, &right)], "sec1.key: holds no certificates"),
        (&[(cert, &chain), (key, &chain)], "sec1.pem: holds no private key"),
        (&[(cert, &chain), (key, &wrong)], "the certificate and its key cannot be used"),
    ];
    for command in ["check", "serve"] {
        for (set, expected) in cases {
            let (code, log) = PROXY.run(&[command], set);
            assert_eq!(code, 1, "{log}");
            assert!(log.contains(expected), "{expected}: {log}");
        }
    }
    assert_eq!(PROXY.run(&["check"], &[(cert, &chain), (key, &right)]).0, 0);
    assert_eq!(PROXY.run(&["check"], &[(cert, ""), (key, "")]).0, 0, "empty is unset");
}

#[test]
fn a_setting_without_effect_is_warned_about() {
    let set = [
        ("GITHUB_CLIENT_SECRET", PASSWORD),
        ("QUEEN_PROXY_DEFAULT_ROLE", "viewer"),
        ("GITHUB_CLIENT_ID", "x"),
    ];
    let (code, log) = PROXY.run(&["check"], &set);
    assert_eq!(code, 0, "{log}");
    for (name, _) in set {
        assert!(log.contains(&format!("# {name} has no effect in this version\n")), "{log}");
    }
    assert_eq!(log.matches("has no effect").count(), 3, "{log}");

    // The database refuses, after the warnings.
    let port = free_port().to_string();
    let mut environment = set.to_vec();
    environment.extend([("PXDB_HOST", "127.0.0.1"), ("PXDB_PORT", &port)]);
    let (code, log) = PROXY.run(&["serve"], &environment);
    assert_eq!(code, 1, "{log}");
    for (name, _) in set {
        let warned = |line: &str| line.contains("WARN") && line.contains("no effect") && line.contains(name);
        assert!(log.lines().any(warned), "{name}: {log}");
    }
    assert!(!log.contains(PASSWORD), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_one_clear_line() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let line = format!("cannot listen on 127.0.0.1:{port}");
    let bind = [("QUEEN_PROXY_BIND_ADDR", "127.0.0.1"), ("QUEEN_PROXY_PORT", port.as_str())];
    fails(
        &PROXY,
        &[bind[0], bind[1], ("PXDB_HOST", ""), ("QUEEN_PROXY_DEV_CELL_URL", "http://127.0.0.1:1")],
        &line,
    );

    let world = World::builder().proxies(0).recorder().start().await;
    let database = world.proxy_environment(1);
    let of = |name: &str| database.iter().find(|(n, _)| n == name).unwrap().1.clone();
    let (server, password) = (of("PXDB_PORT"), of("PXDB_PASSWORD"));
    let environment = [
        ("HOST", "127.0.0.1"),
        ("PORT", &port),
        ("PG_HOST", "127.0.0.1"),
        ("PG_PORT", &server),
        ("PG_PASSWORD", &password),
        ("PG_DB", &world.control_db),
    ];
    fails(&CELL, &environment, &line);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_reached_is_one_clear_line() {
    let closed = free_port().to_string();
    // Takes connections and never says a word.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let silent_port = silent.local_addr().unwrap().port().to_string();
    let world = World::builder().proxies(0).recorder().start().await;
    let database = world.proxy_environment(1);
    let server = &database.iter().find(|(name, _)| name == "PXDB_PORT").unwrap().1;

    let cases = [
        (&closed, "20000", "connection refused"),
        (&silent_port, "300", "no answer from the control plane's database within 300ms"),
        (server, "20000", "SQLSTATE 28P01"),
    ];
    let proxy_port = free_port().to_string();
    for (port, timeout, expected) in cases {
        let environment = [
            ("QUEEN_PROXY_PORT", proxy_port.as_str()),
            ("PXDB_HOST", "127.0.0.1"),
            ("PXDB_PORT", port),
            ("PXDB_PASSWORD", PASSWORD),
            ("PXDB_TIMEOUT_MS", timeout),
        ];
        fails(&PROXY, &environment, expected);
    }
    for port in [&closed, server] {
        let environment = [("PG_HOST", "127.0.0.1"), ("PG_PORT", port), ("PG_PASSWORD", PASSWORD)];
        fails(&CELL, &environment, "cannot connect to PostgreSQL");
    }
}
