//! Where log lines go and how they look.

use tracing_subscriber::EnvFilter;

/// Starts logging to standard error: `RUST_LOG`, else `LOG_LEVEL`, else `info`; JSON lines when
/// `QUEEN_LOG_JSON` is on. Also takes what Pingora writes through the `log` facade.
pub fn start() {
    let on = |name| {
        std::env::var(name)
            .is_ok_and(|v| matches!(v.trim().to_ascii_lowercase().as_str(), "true" | "1" | "yes" | "on"))
    };
    let level = std::env::var("LOG_LEVEL").unwrap_or_else(|_| "info".to_owned());
    // Pingora's own lines repeat what the gateway reports with the request's id, and PostgreSQL's
    // notices are for whoever calls the functions.
    let default = format!("{level},pingora_core=warn,pingora_proxy=off,sqlx::postgres::notice=error");
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(default))
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first one's settings.
    let _ = if on("QUEEN_LOG_JSON") {
        builder.json().try_init()
    } else {
        builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init()
    };
}
