//! What an operator sees from outside.

pub mod log;
pub mod log_gate;
pub mod metrics;

use std::error::Error;

/// An error with its causes, in one line.
pub fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors repeat their cause in their own text.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
