//! Settings of the two programs: environment variables over an optional TOML file.

pub mod cell;
pub mod proxy;
pub mod reserved;
pub mod source;

pub use source::{ConfigError, Shown};

use crate::telemetry::log::{LEVELS, LogSettings};

/// The settings of the log, which both programs share.
fn logging(s: &mut source::Source) -> LogSettings {
    let default = LogSettings::default();
    let word = s.text("LOG_LEVEL", default.level, true);
    let level = LEVELS.into_iter().find(|level| word.trim().eq_ignore_ascii_case(level));
    if level.is_none() {
        s.refuse(format!("LOG_LEVEL: must be one of {} (RUST_LOG takes a filter)", LEVELS.join(", ")));
    }
    LogSettings { level: level.unwrap_or(default.level), json: s.flag("QUEEN_LOG_JSON", default.json) }
}
