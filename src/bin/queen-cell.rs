//! The KV cell. See `queen-cell --help`.

use clap::{Args, Parser, Subcommand};
use queen_proxy::{
    cell,
    config::{cell as cell_config, source},
    telemetry,
};
use std::{path::PathBuf, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
#[command(name = "queen-cell", version, about = "Key/value cell for Queen, on PostgreSQL")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the cell
    Serve(ConfigFile),
    /// Print the effective configuration, secrets masked; fails when something is wrong
    Check(ConfigFile),
}

#[derive(Args)]
struct ConfigFile {
    /// TOML file; environment variables win over it
    #[arg(long)]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(file) => serve(&file),
        Command::Check(file) => check(&file),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("queen-cell: {message}");
            ExitCode::FAILURE
        }
    }
}

fn serve(file: &ConfigFile) -> Result<(), String> {
    let (config, _) = cell_config::load(source::environment(), file.config.as_deref())
        .map_err(|error| error.to_string())?;
    telemetry::log::start(config.log);
    let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
        let stop = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        cell::serve(config, stop).await.map_err(|error| telemetry::describe(&error))
    })
}

fn check(file: &ConfigFile) -> Result<(), String> {
    let (_, shown) = cell_config::load(source::environment(), file.config.as_deref())
        .map_err(|error| error.to_string())?;
    print!("{}", source::print(&shown));
    Ok(())
}
