//! What both programs do as processes.

use std::{path::PathBuf, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};

/// The option to name a configuration file.
#[derive(clap::Args, Debug)]
pub struct ConfigFile {
    /// TOML file; environment variables win over it
    #[arg(long)]
    pub config: Option<PathBuf>,
}

/// Says what went wrong, if anything did, in a line that begins with the program's name.
pub fn exit(program: &str, outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{program}: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Completes at SIGTERM, SIGINT or, where it means that, SIGHUP (a terminal that closes); fails at once where signals cannot be
/// watched.
pub async fn stop_signal(hangup_stops: bool) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = hangup.recv(), if hangup_stops => {}
    }
    Ok(())
}
