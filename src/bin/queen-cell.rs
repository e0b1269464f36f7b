//! The KV cell. See `queen-cell --help`.

use clap::{Parser, Subcommand};
use queen_proxy::{
    cell,
    config::{cell as cell_config, source},
    process::{self, ConfigFile},
    telemetry,
};
use std::process::ExitCode;

/// Requests allocate many small pieces and free them soon; `benches/edge/RESULTS.md` says what it gives.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(file) => serve(&file),
        Command::Check(file) => check(&file),
    };
    process::exit("queen-cell", outcome)
}

fn serve(file: &ConfigFile) -> Result<(), String> {
    let (config, _) = cell_config::load(source::environment(), file.config.as_deref())
        .map_err(|error| error.to_string())?;
    telemetry::log::start(config.log);
    let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
    let stop = async {
        if let Err(error) = process::stop_signal(true).await {
            tracing::error!(%error, "signals cannot be watched");
        }
    };
    runtime.block_on(cell::serve(config, stop)).map_err(|error| telemetry::describe(&error))
}

fn check(file: &ConfigFile) -> Result<(), String> {
    let (_, shown) = cell_config::load(source::environment(), file.config.as_deref())
        .map_err(|error| error.to_string())?;
    print!("{}", source::print(&shown));
    Ok(())
}
