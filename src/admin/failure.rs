//! Why a command did not do what was asked, and what of it may be shown.

use crate::control::store::StoreError;
use std::{io, process::ExitCode, time::Duration};

/// A failure, in the words of the one line that tells of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The control plane said no.
    #[error("{0}")]
    Refused(String),
    /// Nothing goes by the name or id that was given. It is not repeated: it may be a secret that
    /// was put in the wrong place.
    #[error("there is no such {0}")]
    Missing(&'static str),
    /// Arguments, input or configuration are wrong.
    #[error("{0}")]
    Usage(String),
    /// No connection, or no answer.
    #[error("{0}")]
    Unreachable(String),
    /// It was done, but nobody could be told.
    #[error("done, but the output could not be written: {0}")]
    Output(io::ErrorKind),
}

impl Failure {
    /// A mistake of the caller's.
    pub(super) fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// See `EXIT_CODES`.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Refused(_) | Self::Missing(_) | Self::Output(_) => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
        })
    }

    /// A connection that did not come about, whatever the reason: also a server that is there but
    /// does not let us in cannot be reached.
    pub(super) fn connecting(error: sqlx::Error) -> Self {
        Self::Unreachable(StoreError::from(error).to_string())
    }

    /// A connection that did not come about in time.
    pub(super) fn not_connected(limit: Duration) -> Self {
        Self::Unreachable(StoreError::Silent(limit).to_string())
    }

    /// A statement that got no answer in time. A change that was sent may have been made.
    pub(super) fn silent(limit: Duration) -> Self {
        Self::in_doubt(&StoreError::Silent(limit))
    }

    /// A statement that failed. Only the functions' own messages are shown: they repeat no argument
    /// that could be a secret. PostgreSQL's quote values.
    pub(super) fn of(error: sqlx::Error) -> Self {
        let sqlx::Error::Database(database) = &error else {
            let error = StoreError::from(error);
            return if error.is_silence() { Self::in_doubt(&error) } else { Self::from(error) };
        };
        let state = database.code().unwrap_or_default();
        let constraint = database.constraint().map(|name| format!(" ({name})")).unwrap_or_default();
        Self::Refused(match state.as_ref() {
            "P0001" => one_line(database.message()),
            "23505" => format!("it exists already{constraint}"),
            "23514" | "23502" => format!("a value is not allowed there{constraint}"),
            "23503" => format!("something else still needs it, or what it needs is gone{constraint}"),
            "42501" => "the database's role may not do this".to_owned(),
            "3F000" | "42P01" | "42703" | "42883" => {
                "the control plane's schema is not up to date: run `queen-proxy migrate`".to_owned()
            }
            state if state.starts_with("22") => format!("a value cannot be read (SQLSTATE {state})"),
            _ => return Self::from(StoreError::from(error)),
        })
    }

    fn in_doubt(error: &StoreError) -> Self {
        Self::Unreachable(format!("{error}; whether it was done is not known"))
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let text = error.to_string();
        if error.is_silence() { Self::Unreachable(text) } else { Self::Refused(text) }
    }
}

fn one_line(message: &str) -> String {
    message.split(['\r', '\n']).map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("create_tenant: no\r\nmore"), "create_tenant: no  more");
        assert_eq!(one_line("plain"), "plain");
    }
}
