//! Settings of the two programs: environment variables over an optional TOML file.

pub mod cell;
pub mod proxy;
pub mod reserved;
pub mod source;

pub use source::{ConfigError, Shown};

/// The settings of the log, which both programs share; they are in force before the rest is read
/// ([`crate::telemetry::log`]).
fn logging(s: &mut source::Source) {
    s.text("LOG_LEVEL", "info", false);
    s.flag("QUEEN_LOG_JSON", false);
}
