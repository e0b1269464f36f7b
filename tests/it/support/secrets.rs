//! Every log of the suite is searched for secrets when the program that wrote it ends.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Values of settings that are secrets, of every program that was started.
static REMEMBERED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// What secrets of the suite begin with, and how many more characters make one.
const SHAPES: [(&str, usize); 8] = [
    ("qk_live_", 12),
    ("qk_test_", 12),
    ("qk_dev_", 12),
    // A JSON Web Token.
    ("eyJ", 16),
    // A bcrypt hash.
    ("$2a$", 2),
    ("$2b$", 2),
    ("$2y$", 2),
    ("cell-secret-", 12),
];

/// Passwords that tests type.
const TYPED: [&str; 2] = ["correct horse", "PRIVATE KEY"];

/// Notes the secrets among the variables of a program.
pub fn remember(environment: &[(String, String)]) {
    let mut remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, value) in environment {
        let is_secret =
            ["PASSWORD", "SECRET", "TOKEN", "ED25519_PEM"].iter().any(|word| name.ends_with(word));
        if is_secret && value.len() >= 8 {
            remembered.insert(value.clone());
        }
    }
}

/// Panics when a log holds a secret, other than those of the shapes that begin with one of `shown`.
pub fn assert_none(name: &str, log: &str, shown: &[&str]) {
    for line in log.lines() {
        for (start, length) in SHAPES {
            let is_shown = shown.iter().any(|prefix| start.starts_with(prefix));
            assert!(is_shown || !holds(line, start, length), "{name} logs a secret: {line}");
        }
        for typed in TYPED {
            assert!(!line.contains(typed), "{name} logs a secret: {line}");
        }
        let remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for secret in remembered {
            assert!(!line.contains(&secret), "{name} logs a secret: {line}");
        }
    }
}

/// Whether `start` is followed by that many characters of a key or token.
fn holds(line: &str, start: &str, length: usize) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let rest = line[at + start.len()..].bytes();
        rest.take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')).count() >= length
    })
}

#[test]
fn secrets_are_found() {
    remember(&[("PXDB_PASSWORD".to_owned(), "a remembered one".to_owned())]);
    for line in [
        "key=qk_live_0123456789abcdef",
        "Bearer eyJhbGciOiJIUzI1NiJ9.e30.x",
        "hash $2b$10$x",
        "password: a remembered one!",
    ] {
        assert!(std::panic::catch_unwind(|| assert_none("it", line, &[])).is_err(), "{line}");
    }
    assert_none("it", "a qk_live_ key, a qk_test_x and eyJ", &[]);
}
