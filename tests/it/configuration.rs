//! The settings of both programs: what they take, what they refuse and what they show, asked of the
//! real binaries with an environment of their own and, where many cases are due, of the library.

mod examples;
mod secrets;
mod starts;

use crate::support::Process;
use queen_proxy::config::{Shown, cell, proxy::ProxyConfig, source::Origin};
use std::{path::Path, time::Duration};

type Loaded = Result<(String, Vec<Shown>), Vec<String>>;

/// One of the two programs.
struct Program {
    name: &'static str,
    binary: &'static str,
    prefix: &'static str,
    example: &'static str,
    /// The least that makes a configuration valid.
    needed: &'static [(&'static str, &'static str)],
    library: fn(Vec<(String, String)>, Option<&Path>) -> Loaded,
}

const PROXY: Program = Program {
    name: "queen-proxy",
    binary: env!("CARGO_BIN_EXE_queen-proxy"),
    prefix: "QUEEN_PROXY_",
    example: concat!(env!("CARGO_MANIFEST_DIR"), "/conf/queen-proxy.toml"),
    needed: &[("PXDB_HOST", "db.example")],
    library: |environment, file| match ProxyConfig::load(environment, file) {
        Ok((config, shown)) => Ok((format!("{config:?}"), shown)),
        Err(errors) => Err(errors.0),
    },
};

const CELL: Program = Program {
    name: "queen-cell",
    binary: env!("CARGO_BIN_EXE_queen-cell"),
    prefix: "QUEEN_",
    example: concat!(env!("CARGO_MANIFEST_DIR"), "/conf/queen-cell.toml"),
    needed: &[],
    library: |environment, file| match cell::load(environment, file) {
        Ok((config, shown)) => Ok((format!("{config:?}"), shown)),
        Err(errors) => Err(errors.0),
    },
};

impl Program {
    /// What is needed and, winning over it, what the test sets.
    fn environment(&self, more: &[(&str, &str)]) -> Vec<(String, String)> {
        self.needed
            .iter()
            .chain(more)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    /// The configuration as debug text and the lines of `check`, or every mistake.
    fn load(&self, environment: &[(&str, &str)], file: Option<&Path>) -> Loaded {
        (self.library)(self.environment(environment), file)
    }

    /// Runs the binary to its end: exit code, and all it wrote.
    fn run(&self, arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
        let folder = tempfile::tempdir().unwrap();
        let mut process =
            Process::start(self.name, self.binary, arguments, &self.environment(environment), folder.path());
        let status = process.wait(Duration::from_secs(30)).expect("an end in time");
        (status.code().expect("an exit code"), process.log())
    }
}

fn loads(program: &Program, environment: &[(&str, &str)]) -> Vec<Shown> {
    program.load(environment, None).unwrap_or_else(|errors| panic!("{environment:?}: {errors:?}")).1
}

fn shown<'a>(lines: &'a [Shown], name: &str) -> (&'a str, Origin) {
    let line = lines.iter().find(|line| line.name == name).unwrap_or_else(|| panic!("{name} is not shown"));
    (&line.value, line.origin)
}

/// The settings whose default looks like this.
fn settings(program: &Program, default: impl Fn(&str) -> bool) -> Vec<&'static str> {
    loads(program, &[]).iter().filter(|line| default(&line.value)).map(|line| line.name).collect()
}

fn is_switch(default: &str) -> bool {
    default == "true" || default == "false"
}

fn is_number(default: &str) -> bool {
    default.parse::<u64>().is_ok()
}

#[test]
fn switches_take_eight_words_in_any_case_and_nothing_else() {
    let words = [
        ("true", ["true", "TRUE", "True", " true "]),
        ("true", ["1", " 1", "1 ", "1"]),
        ("true", ["yes", "YES", "Yes", "yEs"]),
        ("true", ["on", "ON", "On", "oN"]),
        ("false", ["false", "FALSE", "False", "fALSE"]),
        ("false", ["0", " 0", "0 ", "0"]),
        ("false", ["no", "NO", "No", "nO"]),
        ("false", ["off", "OFF", "Off", " off"]),
    ];
    // One switch of the cell is refused without this one.
    let guard = ("QUEEN_KV_TRUSTED_PROXY", "true");
    for program in [&PROXY, &CELL] {
        let switches = settings(program, is_switch);
        assert!(switches.len() >= 3, "{switches:?}");
        for name in switches {
            for (meaning, spellings) in words {
                for spelling in spellings {
                    let lines = loads(program, &[guard, (name, spelling)]);
                    assert_eq!(shown(&lines, name), (meaning, Origin::Environment), "{name}={spelling}");
                }
            }
            for other in
                ["t", "y", "n", "2", "-1", "01", "enabled", "truefalse", "true,", "\"true\"", "oui", "null"]
            {
                let errors = program.load(&[guard, (name, other)], None).unwrap_err();
                assert_eq!(
                    errors,
                    [format!("{name}: must be one of true, false, 1, 0, yes, no, on, off")],
                    "{other}"
                );
            }
        }
    }
    let (config, _) =
        PROXY.load(&[("QUEEN_PROXY_ENFORCE", "Off"), ("QUEEN_PROXY_DEV_INSECURE", "YES")], None).unwrap();
    assert!(config.contains("enforce: false") && config.contains("dev_insecure: true"), "{config}");
    let (config, _) = PROXY.load(&[], None).unwrap();
    assert!(config.contains("enforce: true") && config.contains("dev_insecure: false"), "{config}");
}

#[test]
fn numbers_that_are_none_are_refused() {
    for program in [&PROXY, &CELL] {
        let numbers = settings(program, is_number);
        assert!(numbers.len() >= 8, "{numbers:?}");
        for name in numbers {
            for value in
                ["x", "1.5", "1e3", "-1", "0x10", "1 000", "1_000", "5s", "99999999999999999999999", "١"]
            {
                let errors = program.load(&[(name, value)], None).unwrap_err();
                assert!(errors.len() == 1, "{name}={value}: {errors:?}");
                assert!(
                    errors[0].starts_with(&format!("{name}: must be a whole number from ")),
                    "{errors:?}"
                );
            }
        }
    }
    assert_eq!(shown(&loads(&PROXY, &[("QUEEN_PROXY_PORT", " 7 ")]), "QUEEN_PROXY_PORT").0, "7");
}

#[test]
fn spans_go_nowhere_from_a_program_that_cannot_send_them() {
    let collector = [("QUEEN_PROXY_OTLP_ENDPOINT", "http://127.0.0.1:4318")];
    if cfg!(feature = "opentelemetry") {
        loads(&PROXY, &collector);
        return;
    }
    let errors = PROXY.load(&collector, None).unwrap_err();
    assert_eq!(
        errors,
        ["QUEEN_PROXY_OTLP_ENDPOINT: this program was built without the feature opentelemetry"]
    );
}

#[test]
fn other_values_are_checked_too() {
    let good = [
        ("QUEEN_PROXY_BIND_ADDR", "::1"),
        ("QUEEN_PROXY_DEFAULT_CLUSTER", "Acme-1"),
        ("QUEEN_PROXY_TRUSTED_PROXIES", "10.0.0.0/8, ::1, 192.0.2.1,"),
        ("QUEEN_PROXY_DEV_TENANT", "00000000-0000-0000-0000-0000000000ff"),
        ("QUEEN_PROXY_DEV_CELL_URL", "http://cell:6632"),
        ("PXDB_SSL_ROOT_CERT", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        ("QUEEN_PROXY_LIMITS", "local"),
        ("QUEEN_PROXY_LIMITS", ""),
        ("QUEEN_PROXY_LIMITS", "redis://store"),
        ("QUEEN_PROXY_LIMITS", "redis://user:pa55@[::1]:6380/2"),
        ("QUEEN_PROXY_LIMITS", "rediss://:pa55@store.example"),
        ("LOG_LEVEL", "Debug"),
        ("LOG_LEVEL", "off"),
    ];
    let bad = [
        ("QUEEN_PROXY_BIND_ADDR", "0.0.0.0:80"),
        ("QUEEN_PROXY_BIND_ADDR", "localhost"),
        ("QUEEN_PROXY_DEFAULT_CLUSTER", "acme.q.example"),
        ("QUEEN_PROXY_TRUSTED_PROXIES", "10.0.0.0/8, everyone"),
        ("QUEEN_PROXY_TRUSTED_PROXIES", "10.0.0.0/33"),
        ("QUEEN_PROXY_DEV_TENANT", "acme"),
        ("QUEEN_PROXY_DEV_CELL_URL", "https://cell"),
        ("QUEEN_PROXY_DEV_CELL_URL", "cell:6632"),
        ("QUEEN_PROXY_DEV_CELL_URL", "http://"),
        ("QUEEN_PROXY_DEV_CELL_URL", "http://:80"),
        ("QUEEN_PROXY_DEV_CELL_URL", "http://user:pa55@cell"),
        ("QUEEN_PROXY_LIMITS", "shared"),
        ("QUEEN_PROXY_LIMITS", "redis"),
        ("QUEEN_PROXY_LIMITS", "redis://"),
        ("QUEEN_PROXY_LIMITS", "redis:///var/run/pa55"),
        ("QUEEN_PROXY_LIMITS", "redis://user:pa55@store/database"),
        ("QUEEN_PROXY_LIMITS", "redis://user:pa55@store:99999"),
        ("QUEEN_PROXY_LIMITS", "http://user:pa55@store"),
        ("QUEEN_PROXY_LIMITS_PREFIX", ""),
        ("QUEEN_PROXY_OTLP_ENDPOINT", "collector:4318"),
        ("QUEEN_PROXY_OTLP_ENDPOINT", "https://collector:4318"),
        ("QUEEN_PROXY_OTLP_ENDPOINT", "http://user:pa55@collector:4318"),
        ("QUEEN_PROXY_OTLP_ENDPOINT", "http://collector:4318?x"),
        ("QUEEN_PROXY_OTLP_ENDPOINT", "http://collector:4318/#x"),
        ("PXDB_SSL_ROOT_CERT", "/etc/ssl/root.pem"),
        ("PXDB_SSL_ROOT_CERT", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"),
        ("PXDB_SSL_ROOT_CERT", "-----BEGIN CERTIFICATE-----\nAAAA\n"),
        ("PXDB_USER", ""),
        ("PXDB_DB", ""),
        ("LOG_LEVEL", ""),
        ("LOG_LEVEL", "warning"),
        ("LOG_LEVEL", "verbose"),
        ("LOG_LEVEL", "info,sqlx=warn"),
    ];
    for case in good {
        let (config, lines) = PROXY.load(&[case], None).unwrap();
        assert!(!config.contains("pa55") && !format!("{lines:?}").contains("pa55"), "{config}");
    }
    let lines = loads(&PROXY, &[("QUEEN_PROXY_LIMITS", "redis://user:pa55@store:6380/2?protocol=resp3")]);
    assert_eq!(shown(&lines, "QUEEN_PROXY_LIMITS"), ("redis://store:6380/2", Origin::Environment));
    for (name, value) in bad {
        let errors = PROXY.load(&[(name, value)], None).unwrap_err();
        assert!(errors.len() == 1 && errors[0].starts_with(&format!("{name}: must ")), "{value}: {errors:?}");
        assert!(!errors[0].contains("pa55"), "{errors:?}");
    }
}

#[test]
fn a_misspelt_variable_is_pointed_out() {
    let set = [("QUEEN_PROXY_PROT", "7"), ("QUEEN_PROXY_PORT", "7")];
    let (code, log) = PROXY.run(&["check"], &set);
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("# QUEEN_PROXY_PROT: there is no such setting"), "{log}");
    assert_eq!(log.matches("no such setting").count(), 1, "{log}");
}

#[test]
fn a_value_that_is_not_text_is_named() {
    use std::os::unix::ffi::OsStrExt;
    for name in ["QUEEN_PROXY_ENFORCE", "PXDB_PASSWORD", "PXDB_USER"] {
        let output = std::process::Command::new(PROXY.binary)
            .arg("check")
            .env_clear()
            .env("PXDB_HOST", "127.0.0.1")
            .env(name, std::ffi::OsStr::from_bytes(b"s3cret\xff"))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(&format!("{name}: must be UTF-8 text")), "{errors}");
        assert!(!errors.contains("s3cret"), "{errors}");
    }
}

#[test]
fn the_log_follows_the_file_as_everything_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.toml");
    std::fs::write(&path, "queen_log_json = true\npxdb_port = 1\ngoogle_allowed_domains = \"a.example\"\n")
        .unwrap();
    let path = path.to_str().unwrap();
    // Nothing listens on port 1, so the start fails, after the warning about a setting without effect.
    let (code, log) = PROXY.run(&["serve", "--config", path], &[]);
    assert_eq!(code, 1);
    assert!(log.contains(r#""name":"GOOGLE_ALLOWED_DOMAINS""#), "{log}");
    let (_, quiet) = PROXY.run(&["serve", "--config", path], &[("LOG_LEVEL", "error")]);
    assert!(!quiet.contains("GOOGLE_ALLOWED_DOMAINS"), "{quiet}");
}

#[test]
fn one_start_names_every_bad_variable() {
    for program in [&PROXY, &CELL] {
        let mut bad: Vec<(&str, &str)> =
            settings(program, is_switch).iter().map(|&name| (name, "maybe")).collect();
        bad.extend(settings(program, is_number).iter().map(|&name| (name, "many")));
        if program.name == PROXY.name {
            bad.extend([
                ("QUEEN_PROXY_BIND_ADDR", "1.2.3.4:5"),
                ("QUEEN_PROXY_DEFAULT_CLUSTER", "_"),
                ("QUEEN_PROXY_TRUSTED_PROXIES", "everyone"),
                ("QUEEN_PROXY_DEV_CELL_URL", "https://cell"),
                ("QUEEN_PROXY_DEV_TENANT", "acme"),
                ("PXDB_SSL_ROOT_CERT", "/root.pem"),
                ("PXDB_USER", ""),
                ("QUEEN_PROXY_TLS_KEY", "x"),
                ("GOOGLE_CLIENT_SECRET_FILE", "/no/such/file"),
            ]);
        } else {
            bad.extend([("PG_USER", ""), ("HOST", ""), ("QUEEN_CELL_SECRET_FILE", "/no/such/file")]);
        }
        for command in ["check", "serve"] {
            let (code, log) = program.run(&[command], &bad);
            assert_eq!(code, 1, "{log}");
            let mut named: Vec<&str> = log
                .lines()
                .filter_map(|line| line.strip_prefix("  ")?.split_once(':'))
                .map(|(name, _)| name)
                .collect();
            let mut expected: Vec<&str> = bad.iter().map(|(name, _)| *name).collect();
            named.sort_unstable();
            expected.sort_unstable();
            assert_eq!(named, expected, "{log}");
            assert!(!log.contains(" = "), "no configuration is printed beside the mistakes: {log}");
        }
    }
}

#[test]
fn the_file_is_laid_under_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queen.toml");
    let file =
        "port = 1111\npxdb_port = \"2222\"\nenforce = false\npxdb_host = \"from-file\"\ncache_ttl_ms = 5\n";
    std::fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    let (code, log) = PROXY
        .run(&["check", "--config", path], &[("QUEEN_PROXY_PORT", "3333"), ("QUEEN_PROXY_CACHE_TTL_MS", "")]);
    assert_eq!(code, 0, "{log}");
    let line = |name: &str| {
        let line = log.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap_or_default();
        line.split_once(" = ").unwrap_or_default().1.to_owned()
    };
    assert_eq!(line("QUEEN_PROXY_PORT"), "3333  (environment)");
    assert_eq!(line("PXDB_PORT"), "2222  (file)");
    assert_eq!(line("QUEEN_PROXY_ENFORCE"), "false  (file)");
    assert_eq!(line("PXDB_HOST"), "db.example  (environment)");
    assert_eq!(line("PXDB_USER"), "postgres");

    let lines = log.lines().filter(|line| line.contains(" =")).count();
    assert_eq!(lines, loads(&PROXY, &[]).len(), "check prints every setting once:\n{log}");
}

#[test]
fn what_a_file_must_not_hold_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queen.toml");
    let cases = [
        ("prot = 1", "prot: there is no such setting"),
        ("queen_proxy_port = 1", "queen_proxy_port: there is no such setting"),
        ("PORT = 1", "PORT: there is no such setting"),
        ("port_file = 'x'", "port_file: there is no such setting"),
        ("port = 1.5", "port: must be a string, a whole number or a boolean"),
        ("port = [1]", "port: must be a string, a whole number or a boolean"),
        ("[proxy]\nport = 1", "proxy: must be a string, a whole number or a boolean"),
        ("port = 1\nport = 2", "not valid TOML near line 2"),
        ("port = true", "QUEEN_PROXY_PORT: must be a whole number"),
        ("port = 65536", "QUEEN_PROXY_PORT: must be a whole number from 1 to 65535"),
        ("enforce = 2", "QUEEN_PROXY_ENFORCE: must be one of"),
    ];
    for (text, expected) in cases {
        std::fs::write(&path, text).unwrap();
        let errors = PROXY.load(&[], Some(&path)).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(expected), "{text}: {errors:?}");
    }
    std::fs::write(&path, "prot = 1\nenforce = 2\nport = []\nwrokers = 3").unwrap();
    let text = path.to_str().unwrap();
    let (code, log) = PROXY.run(&["check", "--config", text], &[]);
    assert_eq!(code, 1, "{log}");
    for name in ["prot", "QUEEN_PROXY_ENFORCE", "port", "wrokers"] {
        assert!(log.contains(&format!("\n  {name}: ")), "{log}");
    }
    let (code, log) = CELL.run(&["check", "--config", "/no/such/file.toml"], &[]);
    assert!(code == 1 && log.contains("/no/such/file.toml: "), "{log}");
}
