//! Settings of the contract whose part of the product is not there yet. They are read and checked,
//! so that a configuration written today stays valid, and setting one says that it does nothing.

use super::source::{Origin, Shown, Source};

const FLAGS: [(&str, bool); 2] = [("QUEEN_PROXY_AUTH_HOST", false), ("QUEEN_PROXY_AUTOPROVISION", false)];

const TEXTS: [(&str, &str); 5] = [
    ("QUEEN_PROXY_AUTOPROVISION_TENANT", ""),
    ("QUEEN_PROXY_DEFAULT_ROLE", "viewer"),
    ("GOOGLE_CLIENT_ID", ""),
    ("GOOGLE_ALLOWED_DOMAINS", ""),
    ("GITHUB_CLIENT_ID", ""),
];

const SECRETS: [(&str, &str); 3] = [
    ("QUEEN_PROXY_OAUTH_STATE_SECRET", "QUEEN_PROXY_OAUTH_STATE_SECRET_FILE"),
    ("GOOGLE_CLIENT_SECRET", "GOOGLE_CLIENT_SECRET_FILE"),
    ("GITHUB_CLIENT_SECRET", "GITHUB_CLIENT_SECRET_FILE"),
];

pub(super) fn read(s: &mut Source) {
    for (name, default) in FLAGS {
        s.flag(name, default);
    }
    for (name, default) in TEXTS {
        s.text(name, default, true);
    }
    for (name, file_name) in SECRETS {
        s.secret(name, file_name);
    }
}

/// Whether a setting does nothing in this version.
fn is_reserved(name: &str) -> bool {
    FLAGS.iter().any(|(n, _)| *n == name)
        || TEXTS.iter().any(|(n, _)| *n == name)
        || SECRETS.iter().any(|(n, _)| *n == name)
}

/// The settings somebody made that do nothing.
pub fn set_in_vain(shown: &[Shown]) -> impl Iterator<Item = &'static str> {
    shown.iter().filter(|line| line.origin != Origin::Default && is_reserved(line.name)).map(|line| line.name)
}
