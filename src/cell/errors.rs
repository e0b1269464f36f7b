//! Everything that can go wrong. What a client sees of it is decided in `answers`.

use std::borrow::Cow;
use std::io;

use super::ladder::Refusal;

/// Why a cell did not start or stopped serving. Every text is one line and names no secret.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The tenancy header is believed although nothing is said to guard it (section 7.2).
    #[error(
        "QUEEN_TENANCY_HEADER needs QUEEN_KV_TRUSTED_PROXY: without a proxy that sets the header, any client picks its tenant"
    )]
    UntrustedTenancy,
    /// A setting no cell can run with.
    #[error("{0}")]
    Setting(&'static str),
    /// The server did not take the first connection.
    #[error("cannot connect to PostgreSQL")]
    Connect(#[source] sqlx::Error),
    /// The server did not answer the first connection in time.
    #[error("cannot connect to PostgreSQL: no answer within 10 s")]
    ConnectTimeout,
    /// The server lacks what the schema needs.
    #[error("PostgreSQL {major} is too old, 14 is the oldest that works")]
    ServerTooOld {
        /// Major version of the server found.
        major: i32,
    },
    /// The database cannot store Unicode in code point order.
    #[error("the database is encoded in {found}, the store needs UTF8")]
    ServerEncoding {
        /// Encoding of the database found.
        found: String,
    },
    /// The schema could not be applied; nothing of it was.
    #[error("cannot apply the schema of the cell")]
    Schema(#[source] sqlx::Error),
    /// The listening address is not to be had.
    #[error("cannot listen on {address}")]
    Bind {
        /// Address as configured.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Switches and quotas could not be read.
    #[error("cannot read the switches and quotas: {0}")]
    Control(String),
    /// The metrics could not be set up.
    #[error("the metrics cannot be set up")]
    Metrics(#[source] prometheus::Error),
    /// The listener broke while serving.
    #[error("the listener failed")]
    Serve(#[source] io::Error),
}

/// Why a request is not answered with results.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum KvError {
    #[error("no such route")]
    NoSuchRoute,
    #[error("method not allowed")]
    MethodNotAllowed { allow: &'static str },
    #[error("no or wrong cell secret")]
    Unauthorized,
    #[error("malformed tenant header")]
    BadTenant,
    #[error("body larger than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("body did not arrive in time")]
    BodyLate,
    #[error("body ended before its end")]
    BodyBroken,
    /// 400 `kv_bad_request`; the reason is an identifier, the detail prose for the caller alone.
    #[error("bad request: {reason}")]
    Bad { reason: Cow<'static, str>, detail: Option<Cow<'static, str>> },
    /// 413 `payload_too_large`.
    #[error("too large: {reason}")]
    TooLarge { reason: Cow<'static, str>, detail: Option<String> },
    /// 503 `kv_unavailable`: a condition of the broker or its database that passes.
    #[error("unavailable: {reason}")]
    Unavailable { reason: Cow<'static, str> },
    /// The kill switch is off: 503 `kv_disabled` on the KV routes, 403 in a transaction, where a repetition
    /// would keep a bundle in a loop.
    #[error("paused")]
    Paused { in_transaction: bool },
    /// The ladder said no (section 7.3).
    #[error("refused: {0:?}")]
    Refused(Refusal),
    /// 503: the pool has turned away so many calls that writes do not even try (section 7.6).
    #[error("writes are shed")]
    Shed,
    /// The statement went to the database, and no answer came back: it may have been applied. 409 for what
    /// must not be done twice, which no client repeats by itself; 504 for the rest.
    #[error("outcome unknown")]
    OutcomeUnknown { once_only: bool },
    /// 400 of the switch route, whose body is `error` alone.
    #[error("bad switch request")]
    BadSwitches(String),
    /// 500 `kv_misconfigured`: objects or privileges are missing.
    #[error("misconfigured: {reason}")]
    Misconfigured { reason: Cow<'static, str> },
    /// 500 `kv_error`.
    #[error("failed: {reason}")]
    Failed { reason: Cow<'static, str> },
}

impl KvError {
    /// A 400 with a fixed reason and detail.
    pub(super) const fn bad(reason: &'static str, detail: &'static str) -> Self {
        Self::Bad { reason: Cow::Borrowed(reason), detail: Some(Cow::Borrowed(detail)) }
    }

    /// A 503 with a fixed reason.
    pub(super) const fn unavailable(reason: &'static str) -> Self {
        Self::Unavailable { reason: Cow::Borrowed(reason) }
    }

    /// A 500 with a fixed reason.
    pub(super) const fn failed(reason: &'static str) -> Self {
        Self::Failed { reason: Cow::Borrowed(reason) }
    }

    /// Translates an error raised by the server (section 5.2).
    ///
    /// A message is passed on only when it is one of our identifiers: the server's own messages may quote
    /// what the caller sent, and the reason also reaches logs. Otherwise the SQLSTATE stands for it.
    pub(super) fn from_sql(sqlstate: &str, message: &str, detail: Option<&str>) -> Self {
        let known = identifier(message);
        let reason = || known.map_or_else(|| format!("sqlstate_{sqlstate}"), ToOwned::to_owned).into();
        match (sqlstate, sqlstate.get(..2).unwrap_or_default()) {
            ("22023", _) => Self::Bad {
                reason: known.map_or(Cow::Borrowed("kv_bad_request"), |name| name.to_owned().into()),
                detail: known.and(detail).map(|text| text.to_owned().into()),
            },
            ("22001", _) => Self::TooLarge {
                reason: known.map_or(Cow::Borrowed("kv_value_too_large"), |name| name.to_owned().into()),
                detail: known.and(detail).map(ToOwned::to_owned),
            },
            // Valid for the JSON grammar, but not for jsonb: the cast of the parameter refused it.
            ("22P02" | "22P05", _) => Self::bad(
                "kv_bad_body",
                "a text holds \\u0000 or half of a surrogate pair, which cannot be stored",
            ),
            ("22003", _) => Self::bad("kv_bad_body", "a number is too large to be stored"),
            ("54000" | "54001", _) => Self::bad(
                "kv_bad_body",
                "the JSON is nested too deeply or has too many elements to be stored",
            ),
            // A server that follows another one, or was told to take no writes.
            ("25006", _) => Self::unavailable("kv_read_only"),
            // The statement ran into its time limit and was rolled back.
            ("57014", _) => Self::unavailable("kv_timeout"),
            ("40001" | "40P01", _) | (_, "08" | "53" | "57" | "58") => Self::Unavailable { reason: reason() },
            (_, "42") => Self::Misconfigured { reason: reason() },
            _ => Self::Failed { reason: reason() },
        }
    }

    /// Whether this counts as an error of the database rather than of the caller.
    pub(super) const fn is_database(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. }
                | Self::OutcomeUnknown { .. }
                | Self::Misconfigured { .. }
                | Self::Failed { .. }
        )
    }
}

/// `message` when it has the shape of one of our SQL identifiers.
fn identifier(message: &str) -> Option<&str> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (message.starts_with("kv_") && message.len() <= 64 && message.bytes().all(plain)).then_some(message)
}
