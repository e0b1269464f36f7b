//! Secrets: from where they come, and that they come out nowhere.

use super::{CELL, PROXY, Program};
use crate::support::{World, free_port};
use queen_proxy::config::{cell, proxy::ProxyConfig, source::Origin};
use std::path::Path;

/// Every secret of the two programs.
const SECRETS: &[(&Program, &str)] = &[
    (&PROXY, "PXDB_PASSWORD"),
    (&PROXY, "QUEEN_PROXY_DEV_CELL_TOKEN"),
    (&PROXY, "QUEEN_PROXY_JWT_SECRET"),
    (&PROXY, "QUEEN_PROXY_OAUTH_STATE_SECRET"),
    (&PROXY, "GOOGLE_CLIENT_SECRET"),
    (&PROXY, "GITHUB_CLIENT_SECRET"),
    (&CELL, "PG_PASSWORD"),
    (&CELL, "QUEEN_CELL_SECRET"),
];

const TEXT: &str = "s3cret-Text-of-more-than-thirty-two-bytes";

/// Environment and file.
type Given<'a> = (&'a [(&'a str, &'a str)], Option<&'a String>);

fn key(program: &Program, name: &str) -> String {
    name.strip_prefix(program.prefix).unwrap_or(name).to_ascii_lowercase()
}

/// Writes files and hands out their paths.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

#[test]
fn each_secret_comes_from_four_places_and_is_masked() {
    let folder = Folder::new();
    let file = folder.write("secret", format!("{TEXT}\n"));
    for (program, name) in SECRETS {
        let (file_name, key) = (format!("{name}_FILE"), key(program, name));
        let direct = folder.write("direct.toml", format!("{key} = '{TEXT}'"));
        let by_file = folder.write("file.toml", format!("{key}_file = '{file}'"));
        let places: [(Given<'_>, Origin); 5] = [
            ((&[(name, TEXT)], None), Origin::Environment),
            ((&[(&file_name, &file)], None), Origin::Environment),
            ((&[], Some(&direct)), Origin::File),
            ((&[], Some(&by_file)), Origin::File),
            // The environment wins over the same key of the file.
            ((&[(name, TEXT)], Some(&direct)), Origin::Environment),
        ];
        for ((environment, toml), origin) in places {
            let (config, shown) = program.load(environment, toml.map(Path::new)).unwrap();
            let line = shown.iter().find(|line| line.name == *name).unwrap();
            assert_eq!(
                (line.value.as_str(), line.origin),
                ("***", origin),
                "{name} from {environment:?} {toml:?}"
            );
            assert!(!config.contains(TEXT) && !format!("{shown:?}").contains(TEXT), "{name}");
        }
        let (_, shown) = program.load(&[], None).unwrap();
        assert!(
            shown.iter().any(|line| line.name == *name && line.value.is_empty()),
            "{name}: unset is empty"
        );
    }
}

#[test]
fn a_secret_given_twice_is_refused() {
    let folder = Folder::new();
    let file = folder.write("secret", TEXT);
    for (program, name) in SECRETS {
        let (file_name, key) = (format!("{name}_FILE"), key(program, name));
        let both = folder.write("both.toml", format!("{key} = '{TEXT}'\n{key}_file = '{file}'"));
        let by_file = folder.write("file.toml", format!("{key}_file = '{file}'"));
        let cases: [Given<'_>; 3] = [
            (&[(name, TEXT), (&file_name, &file)], None),
            (&[], Some(&both)),
            (&[(name, TEXT)], Some(&by_file)),
        ];
        for (environment, toml) in cases {
            let errors = program.load(environment, toml.map(Path::new)).unwrap_err();
            assert_eq!(errors, [format!("{name} and {file_name}: give one of them, not both")]);
        }
    }
}

#[test]
fn a_secret_file_that_cannot_be_read_is_named() {
    let folder = Folder::new();
    let missing = folder.0.path().join("missing").to_str().unwrap().to_owned();
    let directory = folder.0.path().to_str().unwrap().to_owned();
    let not_text = folder.write("bytes", b"s3cret-Text-of-more-than-thirty-two-bytes\xff");
    for (program, name) in SECRETS {
        let file_name = format!("{name}_FILE");
        for path in [&missing, &directory, &not_text] {
            let errors = program.load(&[(&file_name, path)], None).unwrap_err();
            assert!(
                errors.len() == 1 && errors[0].starts_with(&format!("{file_name}: cannot read {path}: ")),
                "{errors:?}"
            );
            assert!(!errors[0].contains(TEXT), "{errors:?}");
        }
    }
    let empty = folder.write("empty", b"\n");
    for (program, name) in SECRETS {
        let file_name = format!("{name}_FILE");
        let errors = program.load(&[(&file_name, &empty)], None).unwrap_err();
        assert_eq!(errors, [format!("{file_name}: {empty} is empty")]);
    }
    let (code, log) = PROXY.run(&["check"], &[("PXDB_PASSWORD_FILE", &missing)]);
    assert!(code == 1 && log.contains(&format!("  PXDB_PASSWORD_FILE: cannot read {missing}")), "{log}");
}

#[test]
fn a_line_end_at_the_end_of_a_secret_file_is_not_part_of_it() {
    let folder = Folder::new();
    let cases = [
        ("s3cret", "s3cret"),
        ("s3cret\n", "s3cret"),
        ("s3cret\r\n", "s3cret"),
        (" s3 cret \n", " s3 cret "),
        ("\tfirst\nsecond\n", "\tfirst\nsecond"),
    ];
    for (content, expected) in cases {
        let file = folder.write("secret", content);
        let environment = |names: &[&str]| -> Vec<(String, String)> {
            let fixed = [("PXDB_HOST", "h"), ("QUEEN_PROXY_DEV_CELL_URL", "http://c")]
                .map(|(n, v)| (n.into(), v.into()));
            names.iter().map(|name| ((*name).to_owned(), file.clone())).chain(fixed).collect()
        };
        let names = ["PXDB_PASSWORD_FILE", "QUEEN_PROXY_DEV_CELL_TOKEN_FILE"];
        let (proxy, _) = ProxyConfig::load(environment(&names), None).unwrap();
        let (cell, _) =
            cell::load(environment(&["PG_PASSWORD_FILE", "QUEEN_CELL_SECRET_FILE"]), None).unwrap();
        let (password, token) = (proxy.pxdb.unwrap().password, proxy.dev_cell.unwrap().token);
        for secret in [password, token, cell.pg_password, cell.cell_secret] {
            assert_eq!(secret.unwrap().expose(), expected);
        }
    }
}

#[test]
fn no_secret_is_printed_by_check_or_with_an_error() {
    for program in [&PROXY, &CELL] {
        let names: Vec<&str> =
            SECRETS.iter().filter(|(of, _)| of.name == program.name).map(|(_, name)| *name).collect();
        let mut environment: Vec<(&str, &str)> = names.iter().map(|name| (*name, TEXT)).collect();
        environment.push(("RUST_LOG", "trace"));
        let (code, log) = program.run(&["check"], &environment);
        assert_eq!(code, 0, "{log}");
        assert_eq!(log.matches("= ***  (environment)").count(), names.len(), "{log}");
        assert_eq!(log.matches(TEXT).count(), 0, "{log}");

        // Something else is wrong; and a secret has strayed to where a number belongs.
        for number in ["PXDB_PORT", "PG_PORT", "QUEEN_PROXY_WORKER_THREADS", "PORT"] {
            environment.push((number, TEXT));
        }
        for command in ["check", "serve"] {
            let (code, log) = program.run(&[command], &environment);
            assert_eq!(code, 1, "{log}");
            assert_eq!(log.matches(TEXT).count(), 0, "{log}");
        }
    }
}

#[test]
fn a_broken_file_is_reported_by_line_without_its_content() {
    let folder = Folder::new();
    for broken in [
        "pxdb_password = s3cret-Text-of-more-than-thirty-two-bytes",
        "pxdb_password = 's3cret-Text-of-more-than-thirty-two-bytes",
        "pxdb_password = ['s3cret-Text-of-more-than-thirty-two-bytes']",
    ] {
        let path = folder.write("broken.toml", format!("# a comment\n\n{broken}\nport = 1\n"));
        let (code, log) = PROXY.run(&["check", "--config", &path], &[]);
        assert_eq!((code, log.matches(TEXT).count()), (1, 0), "{log}");
        let named = log.contains(&format!("{path}: not valid TOML near line 3"))
            || log.contains("pxdb_password: must be");
        assert!(named, "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_password_is_in_the_log_of_a_start_however_detailed() {
    let world = World::builder().proxies(0).recorder().start().await;
    let mut environment = world.proxy_environment(free_port());
    environment.push(("RUST_LOG".to_owned(), "trace".to_owned()));
    let password = environment.iter().find(|(name, _)| name == "PXDB_PASSWORD").unwrap().1.clone();
    assert!(password.len() > 20);
    for (name, value, code) in [
        ("PXDB_DB", world.control_db.as_str(), 0),
        ("PXDB_DB", "no_such_database", 1),
        ("PXDB_USER", "nobody", 1),
    ] {
        let mut environment: Vec<(&str, &str)> =
            environment.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        environment.push((name, value));
        let (found, log) = PROXY.run(&["migrate"], &environment);
        assert_eq!(found, code, "{log}");
        assert_eq!(log.matches(&password).count(), 0, "{log}");
        if code == 1 {
            assert_eq!(log.lines().filter(|line| line.starts_with("queen-proxy: ")).count(), 1, "{log}");
        }
    }
}

/// A private key is checked as one, so a text that is none is refused; neither is ever shown.
#[test]
fn a_private_key_is_masked_and_checked() {
    use ed25519_dalek::{SigningKey, pkcs8::EncodePrivateKey, pkcs8::spki::der::pem::LineEnding};
    let folder = Folder::new();
    let pem = SigningKey::from_bytes(&[7; 32]).to_pkcs8_pem(LineEnding::LF).unwrap().to_string();
    let body = pem.lines().nth(1).unwrap();
    let file = folder.write("key.pem", &pem);
    for set in [("QUEEN_PROXY_JWT_ED25519_PEM", &pem), ("QUEEN_PROXY_JWT_ED25519_PEM_FILE", &file)] {
        let (code, log) = PROXY.run(&["check"], &[(set.0, set.1)]);
        assert!(code == 0 && log.contains("QUEEN_PROXY_JWT_ED25519_PEM") && log.contains("= ***"), "{log}");
        assert!(!log.contains(body), "{log}");
    }
    let (code, log) = PROXY.run(&["check"], &[("QUEEN_PROXY_JWT_ED25519_PEM", TEXT)]);
    assert!(code == 1 && log.contains("QUEEN_PROXY_JWT_ED25519_PEM: not an Ed25519 private key"), "{log}");
    assert!(!log.contains(TEXT), "{log}");
}
