//! The front door. See `queen-proxy --help`.

use clap::{Args, Parser, Subcommand};
use queen_proxy::{
    admin::{self, AdminArgs},
    config::{ConfigError, proxy::ProxyConfig, reserved, source},
    control::migrate::migrate,
    dev::{self, DevOptions},
    domain::secret::Secret,
    process::{self, ConfigFile},
    proxy::{self, Reload},
    telemetry::{self, describe, log::LogSettings},
};
use std::{path::PathBuf, process::ExitCode};

/// Requests allocate many small pieces and free them soon; `benches/edge/RESULTS.md` says what it gives.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(name = "queen-proxy", version, about = "Multi-tenant front door for Queen")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve tenants
    Serve(ConfigFile),
    /// Start PostgreSQL, a cell, the proxy and two demo tenants on this machine
    Dev(DevArgs),
    /// Bring the control plane's schema up to date and exit
    Migrate(ConfigFile),
    /// Print the effective configuration, secrets masked; fails when something is wrong
    Check(ConfigFile),
    /// Change the control plane: tenants, clusters, keys, people, cells
    Admin(AdminArgs),
}

#[derive(Args)]
struct DevArgs {
    /// Where the data lives between runs
    #[arg(long, default_value = ".queen-dev")]
    data: PathBuf,
    /// Throw the data away at the end
    #[arg(long)]
    ephemeral: bool,
    /// Use this server (postgres://user:password@host:port) in place of a private one; its
    /// databases `queen_proxy` and `queen_cell` stay there
    #[arg(long, conflicts_with = "ephemeral")]
    database_url: Option<String>,
    /// The proxy's port
    #[arg(long, default_value_t = 6711, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// The cell's port
    #[arg(long, default_value_t = 6632, value_parser = clap::value_parser!(u16).range(1..))]
    cell_port: u16,
    /// The admin listener's port
    #[arg(long, default_value_t = 9711, value_parser = clap::value_parser!(u16).range(1..))]
    admin_port: u16,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(file) => serve(&file),
        Command::Dev(args) => run_dev(args),
        Command::Migrate(file) => run_migrate(&file),
        Command::Check(file) => check(&file),
        // Scripts tell its failures apart by exit codes of its own.
        Command::Admin(args) => return admin::run(args),
    };
    process::exit("queen-proxy", outcome)
}

fn load(file: &ConfigFile) -> Result<(ProxyConfig, Vec<source::Shown>), ConfigError> {
    ProxyConfig::load(source::environment(), file.config.as_deref())
}

fn serve(file: &ConfigFile) -> Result<(), String> {
    let (config, shown) = load(file).map_err(|error| error.to_string())?;
    telemetry::log::start(config.log);
    for name in reserved::set_in_vain(&shown) {
        tracing::warn!(name, "this setting has no effect in this version");
    }
    for name in &config.unknown_variables {
        tracing::warn!(name, "there is no such setting");
    }
    let again = ConfigFile { config: file.config.clone() };
    let reload = Reload { shown, load: Box::new(move || load(&again)) };
    proxy::serve(&config, Some(reload)).map_err(|error| describe(&error))
}

fn run_dev(args: DevArgs) -> Result<(), String> {
    telemetry::log::start(LogSettings::default());
    let options = DevOptions {
        folder: args.data,
        ephemeral: args.ephemeral,
        database_url: args.database_url.map(Secret::new),
        port: args.port,
        cell_port: args.cell_port,
        admin_port: args.admin_port,
    };
    dev::run(&options).map_err(|error| describe(&error))
}

fn run_migrate(file: &ConfigFile) -> Result<(), String> {
    let (config, _) = load(file).map_err(|error| error.to_string())?;
    telemetry::log::start(config.log);
    let pxdb = config.pxdb.ok_or("PXDB_HOST: needed to migrate")?;
    let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
    let applied = runtime
        .block_on(migrate(&pxdb))
        .map_err(|error| format!("control plane at {}: {}", pxdb.place(), describe(&error)))?;
    match applied.as_slice() {
        [] => println!("the schema is up to date"),
        names => println!("applied: {}", names.join(", ")),
    }
    Ok(())
}

fn check(file: &ConfigFile) -> Result<(), String> {
    let (config, shown) = load(file).map_err(|error| error.to_string())?;
    print!("{}", source::print(&shown));
    for name in reserved::set_in_vain(&shown) {
        println!("# {name} has no effect in this version");
    }
    for name in &config.unknown_variables {
        println!("# {name}: there is no such setting");
    }
    println!("# ok: nothing is wrong with it; no connection was tried");
    Ok(())
}
