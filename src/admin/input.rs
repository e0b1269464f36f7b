//! Secrets that come in, and the one that goes out.

use super::failure::Failure;
use crate::domain::secret::Secret;
use clap::Args;
use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// More than any secret of ours has; a wrong file is not read to its end.
const LONGEST: u64 = 16 * 1024;
/// bcrypt ignores what comes after.
const LONGEST_PASSWORD: usize = 72;
const KEY_BYTES: usize = 32;

/// Where a password comes from. Never from an argument: those are in everybody's process list.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(super) struct PasswordSource {
    /// Read the password from this file (a line end at its end is not part of it)
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// Read the password from standard input
    #[arg(long)]
    password_stdin: bool,
}

impl PasswordSource {
    /// The password, if one was promised.
    pub(super) fn read(&self) -> Result<Option<Secret>, Failure> {
        let secret = match (&self.password_file, self.password_stdin) {
            (Some(path), _) => secret_file("the password file", path)?,
            (None, true) => secret("standard input", io::stdin().lock())?,
            (None, false) => return Ok(None),
        };
        let text = secret.expose();
        if text.trim().is_empty() {
            return Err(Failure::usage("the password must not be blank"));
        }
        if text.len() > LONGEST_PASSWORD {
            return Err(Failure::usage(format!(
                "the password must be at most {LONGEST_PASSWORD} bytes long"
            )));
        }
        if text.contains('\0') {
            return Err(Failure::usage("the password must not contain a NUL byte"));
        }
        Ok(Some(secret))
    }
}

/// The secret in a file; `what` begins the message when there is none.
pub(super) fn secret_file(what: &str, path: &Path) -> Result<Secret, Failure> {
    let file = File::open(path).map_err(|error| Failure::Usage(format!("{what} cannot be read: {error}")))?;
    secret(what, file)
}

fn secret(what: &str, from: impl Read) -> Result<Secret, Failure> {
    let mut bytes = Vec::new();
    from.take(LONGEST + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::Usage(format!("{what} cannot be read: {error}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(Failure::Usage(format!("{what} holds too much for a secret")));
    }
    let text = String::from_utf8(bytes).map_err(|_| Failure::Usage(format!("{what} must be UTF-8 text")))?;
    // As the configuration reads its secret files.
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(Failure::Usage(format!("{what} is empty")));
    }
    Ok(Secret::new(text))
}

/// A new API key in the form of the control plane's own: `qk_<env>_` and 32 random bytes.
pub(super) fn new_key(environment: &str) -> Result<Secret, Failure> {
    let mut bytes = [0; KEY_BYTES];
    // The kernel's generator, without anything of ours between it and the key.
    let read = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut bytes));
    read.map_err(|error| Failure::Usage(format!("the system gives no random bytes: {error}")))?;
    Ok(Secret::new(format!("qk_{environment}_{}", base64url(&bytes))))
}

/// Base64 with the alphabet for URLs, without padding (RFC 4648 §5).
fn base64url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let mut group = [0; 4];
        group[1..=chunk.len()].copy_from_slice(chunk);
        let group = u32::from_be_bytes(group);
        // n bytes need n + 1 letters.
        for letter in 0..=chunk.len() {
            let index = group >> (18 - 6 * letter) & 63;
            text.push(char::from(ALPHABET[index as usize]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{base64url, new_key, secret};

    #[test]
    fn base64url_of_the_rfc_and_of_the_two_letters_that_differ() {
        let cases: [(&[u8], &str); 8] = [
            (b"", ""),
            (b"f", "Zg"),
            (b"fo", "Zm8"),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg"),
            (b"fooba", "Zm9vYmE"),
            (b"foobar", "Zm9vYmFy"),
            (&[0xfb, 0xff, 0xfe], "-__-"),
        ];
        for (bytes, text) in cases {
            assert_eq!(base64url(bytes), text);
        }
    }

    #[test]
    fn keys_have_the_form_and_are_never_the_same() {
        let (one, other) = (new_key("live").unwrap(), new_key("live").unwrap());
        assert_ne!(one.expose(), other.expose());
        let body = one.expose().strip_prefix("qk_live_").unwrap();
        assert_eq!(body.len(), 43);
        assert!(body.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
    }

    #[test]
    fn secrets_from_files() {
        let long = "x".repeat(20_000);
        let cases: [(&[u8], Option<&str>); 7] = [
            (b"s3cret", Some("s3cret")),
            (b"s3cret\r\n", Some("s3cret")),
            (b" s3 cret \n", Some(" s3 cret ")),
            (b"", None),
            (b"\n", None),
            (b"s3cret\xff", None),
            (long.as_bytes(), None),
        ];
        for (content, expected) in cases {
            let got = secret("it", content);
            assert_eq!(got.as_ref().ok().map(crate::domain::secret::Secret::expose), expected);
            if let Err(failure) = got {
                assert!(!failure.to_string().contains("s3cret"), "{failure}");
            }
        }
    }
}
