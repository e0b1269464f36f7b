//! `queen-proxy admin`: the control plane's functions for an operator who does not want to write SQL.
//!
//! Each command finds what its arguments name, runs one statement, and says what came of it. Nothing is
//! decided here that the SQL functions decide; what is refused before is what they could not see (a
//! password that bcrypt would cut off) or do not look at (a cell that no proxy could talk to).

mod cells;
mod clusters;
mod failure;
mod input;
mod keys;
mod limits;
mod outbox;
mod people;
mod plane;
mod report;
mod show;
mod tenants;

use crate::config::{proxy::ProxyConfig, source};
use clap::{Args, Subcommand};
use failure::Failure;
use plane::Plane;
use report::Report;
use std::{path::PathBuf, process::ExitCode};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  refused by the control plane, or not found (or done, but the output could not be written)
  2  wrong arguments, input or configuration; nothing was done
  3  the database cannot be reached or did not answer";

/// Arguments of `queen-proxy admin`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct AdminArgs {
    /// TOML file; environment variables win over it
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Tenants: onboard, suspend, delete
    #[command(subcommand, after_help = EXIT_CODES)]
    Tenant(tenants::TenantCommand),
    /// Clusters: create, block, change plan and limits
    #[command(subcommand, after_help = EXIT_CODES)]
    Cluster(clusters::ClusterCommand),
    /// API keys of a cluster
    #[command(subcommand, after_help = EXIT_CODES)]
    Key(keys::KeyCommand),
    /// People and their roles
    #[command(subcommand, after_help = EXIT_CODES)]
    User(people::UserCommand),
    /// Sessions of people
    #[command(subcommand, after_help = EXIT_CODES)]
    Session(people::SessionCommand),
    /// Cells that clusters can live in
    #[command(subcommand, after_help = EXIT_CODES)]
    Cell(cells::CellCommand),
    /// Limits of a cluster, where each comes from, and what stands against them in running proxies
    #[command(after_help = EXIT_CODES)]
    Limits(limits::LimitsCommand),
    /// Events for whoever acts on them: quotas, tenants that come and go
    #[command(subcommand, after_help = EXIT_CODES)]
    Outbox(outbox::OutboxCommand),
}

/// Runs one command and says how it went: the report on standard output, a failure as one line on
/// standard error.
pub fn run(args: AdminArgs) -> ExitCode {
    match work(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("queen-proxy: {failure}");
            failure.exit_code()
        }
    }
}

fn work(args: AdminArgs) -> Result<(), Failure> {
    let json = args.json;
    let (config, _) = ProxyConfig::load(source::environment(), args.config.as_deref())
        .map_err(|error| Failure::Usage(error.to_string()))?;
    let pxdb = config.pxdb.ok_or_else(|| Failure::usage("PXDB_HOST: needed to reach the control plane"))?;
    // One connection and one answer after the other: no second thread would have anything to do.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Usage(format!("cannot start: {error}")))?;
    let outcome = runtime.block_on(async {
        let mut plane = Plane::new(&pxdb);
        let report = match args.command {
            Command::Tenant(command) => command.run(&mut plane).await,
            Command::Cluster(command) => command.run(&mut plane).await,
            Command::Key(command) => command.run(&mut plane).await,
            Command::User(command) => command.run(&mut plane).await,
            Command::Session(command) => command.run(&mut plane).await,
            Command::Cell(command) => command.run(&mut plane).await,
            Command::Limits(command) => command.run(&mut plane, config.admin).await,
            Command::Outbox(command) => {
                let followed = command.run(&mut plane, json).await;
                plane.close().await;
                return followed.map(|()| None);
            }
        };
        plane.close().await;
        report.map(Some)
    });
    // A reader that does not read may still hold a thread that prints.
    runtime.shutdown_background();
    outcome?.map_or(Ok(()), |report: Report| report.print(json))
}
