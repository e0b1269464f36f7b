//! Where log lines go and how they look.

use tracing_subscriber::EnvFilter;

/// How much is logged, and in which form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogSettings {
    /// One of [`LEVELS`]. The variable `RUST_LOG`, which may hold a whole filter, wins over it.
    pub level: &'static str,
    /// JSON lines in place of text.
    pub json: bool,
}

/// What `LOG_LEVEL` may be.
pub const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Whatever is asked for, these stay quiet: Pingora and the HTTP libraries write whole heads with their
/// credentials at lower levels, and PostgreSQL's notices are for whoever calls its functions.
const CAPPED: [&str; 7] = [
    "pingora_core=warn",
    "pingora_proxy=off",
    "pingora_http=warn",
    "h2=warn",
    "hyper=warn",
    "sqlx::postgres::notice=error",
    "sqlx::pool::acquire=error",
];

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info", json: false }
    }
}

/// Starts logging to standard error, also of what Pingora writes through the `log` facade.
pub fn start(settings: LogSettings) {
    let mut filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(settings.level));
    for directive in CAPPED.into_iter().filter_map(|capped| capped.parse().ok()) {
        filter = filter.add_directive(directive);
    }
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start in one process keeps the first one's settings.
    let _ = if settings.json {
        builder.json().try_init()
    } else {
        builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init()
    };
}
