//! `queen-proxy dev`: everything on one machine with one command.

pub mod postgres;
mod tenants;

use crate::{
    cell::{self, CellConfig},
    config::proxy::ProxyConfig,
    domain::secret::Secret,
    telemetry::{self, log::LogSettings},
};
use nix::fcntl::{Flock, FlockArg};
use postgres::{Postgres, PostgresError, Settings};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use std::{
    fs::File,
    io::Write,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};
use tenants::Demo;
use tokio::{runtime::Runtime, sync::oneshot};

/// What `dev` was asked for.
#[derive(Clone, Debug)]
pub struct DevOptions {
    /// Where its data lives.
    pub folder: PathBuf,
    /// Throw the data away at the end.
    pub ephemeral: bool,
    /// Use this server (`postgres://user:password@host:port/database`) in place of a private one.
    pub database_url: Option<Secret>,
    /// The proxy's port.
    pub port: u16,
    /// The cell's port.
    pub cell_port: u16,
    /// The admin listener's port.
    pub admin_port: u16,
}

/// Why `dev` does not run; each is one line for a person.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// A port is taken.
    #[error("port {port} is in use ({what}); stop what holds it, or choose another with {flag}")]
    PortInUse {
        /// The port.
        port: u16,
        /// Who wants it.
        what: &'static str,
        /// How to choose another.
        flag: &'static str,
    },
    /// Two ports are the same.
    #[error("of --port, --cell-port and --admin-port two are the same")]
    SamePort,
    /// Somebody else runs on the folder.
    #[error("another dev uses {path}; stop it, or choose another folder with --data")]
    FolderInUse {
        /// The folder.
        path: PathBuf,
    },
    /// The private server.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// The server given by URL.
    #[error("--database-url: {0}")]
    DatabaseUrl(&'static str),
    /// A statement of the set-up failed.
    #[error("setting up the databases failed: {0}")]
    Database(String),
    /// A file of ours.
    #[error("{path}: {reason}")]
    File {
        /// Which.
        path: PathBuf,
        /// The system's word.
        reason: std::io::Error,
    },
    /// The cell ended before it answered.
    #[error("the cell does not start: {0}")]
    Cell(String),
    /// The proxy.
    #[error("{0}")]
    Proxy(String),
}

impl From<sqlx::Error> for DevError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(match error {
            sqlx::Error::Database(database) => database.message().to_owned(),
            other => other.to_string(),
        })
    }
}

/// A server with both databases.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    host: String,
    port: u16,
    user: String,
    password: Option<Secret>,
}

/// A line on standard output. Whoever closed it need not hear us, and must not stop us either.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

const CONTROL_DB: &str = "queen_proxy";
const CELL_DB: &str = "queen_cell";

/// Runs everything until Ctrl-C. Blocks.
pub fn run(options: &DevOptions) -> Result<(), DevError> {
    say("queen-proxy dev: starting");
    let DevOptions { port, cell_port, admin_port, .. } = *options;
    if port == cell_port || port == admin_port || cell_port == admin_port {
        return Err(DevError::SamePort);
    }
    for (port, what, flag) in [
        (port, "the proxy", "--port"),
        (cell_port, "the cell", "--cell-port"),
        (admin_port, "the admin listener", "--admin-port"),
    ] {
        TcpListener::bind(("127.0.0.1", port)).map_err(|_| DevError::PortInUse { port, what, flag })?;
    }
    let folder = data_folder(options)?;
    // Held to the end: two of us on one folder would stop each other's server.
    let _lock = lock(&folder)?;
    // Held to the end: dropping it stops the server.
    let (_postgres, server) = database(options, &folder)?;
    let runtime = Runtime::new().map_err(|reason| DevError::File { path: "threads".into(), reason })?;
    runtime.block_on(create_databases(&server))?;

    let secret = Secret::new(uuid::Uuid::new_v4().simple().to_string());
    let (stop_cell, cell) = start_cell(&runtime, options, &server, &secret);
    let config = proxy_config(options, &folder, &server)?;
    let demo = runtime.block_on(async {
        wait_for_cell(options.cell_port, &cell).await?;
        tenants::prepare(&config, &server, options.cell_port, &secret, &folder, options.ephemeral).await
    })?;

    let port = options.port;
    thread::spawn(move || announce(port, &demo));
    let served =
        crate::proxy::serve(&config, None).map_err(|error| DevError::Proxy(telemetry::describe(&error)));
    say("queen-proxy dev: stopping");
    let _ = stop_cell.send(());
    let _ = cell.recv_timeout(Duration::from_secs(10));
    served
}

fn data_folder(options: &DevOptions) -> Result<PathBuf, DevError> {
    if options.ephemeral {
        return Ok(std::env::temp_dir().join(format!("queen-dev-{}", uuid::Uuid::new_v4().simple())));
    }
    let file = |reason| DevError::File { path: options.folder.clone(), reason };
    std::fs::create_dir_all(&options.folder).map_err(file)?;
    let folder = options.folder.canonicalize().map_err(file)?;
    if options.database_url.is_some() || postgres::can_reach(&folder) {
        return Ok(folder);
    }
    // Root's private folders are closed to the user PostgreSQL runs as.
    let name = folder.to_string_lossy().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let elsewhere = Path::new("/var/tmp").join(format!("queen-dev{name}"));
    say(&format!(
        "  {} is closed to PostgreSQL's user; the data is in {}",
        folder.display(),
        elsewhere.display()
    ));
    Ok(elsewhere)
}

fn lock(folder: &Path) -> Result<Flock<File>, DevError> {
    let path = folder.join("lock");
    let file = |reason| DevError::File { path: path.clone(), reason };
    std::fs::create_dir_all(folder).map_err(file)?;
    let open = File::create(&path).map_err(file)?;
    Flock::lock(open, FlockArg::LockExclusiveNonblock)
        .map_err(|_| DevError::FolderInUse { path: folder.to_owned() })
}

fn database(options: &DevOptions, folder: &Path) -> Result<(Option<Postgres>, Server), DevError> {
    if let Some(url) = &options.database_url {
        say("  using the PostgreSQL server of --database-url");
        return Ok((None, parse_url(url.expose())?));
    }
    say(&format!("  PostgreSQL: private server in {}", folder.display()));
    let postgres =
        Postgres::start(Settings { folder: folder.to_owned(), port: 0, throw_away: options.ephemeral })?;
    let server = Server {
        host: "127.0.0.1".to_owned(),
        port: postgres.port(),
        user: postgres::USER.to_owned(),
        password: Some(postgres.password()),
    };
    Ok((Some(postgres), server))
}

fn parse_url(url: &str) -> Result<Server, DevError> {
    let url = url::Url::parse(url).map_err(|_| DevError::DatabaseUrl("not a URL"))?;
    if !matches!(url.scheme(), "postgres" | "postgresql") {
        return Err(DevError::DatabaseUrl("must begin with postgres://"));
    }
    let decoded = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    Ok(Server {
        host: decoded(url.host_str().unwrap_or("127.0.0.1")),
        port: url.port().unwrap_or(5432),
        user: if url.username().is_empty() { postgres::USER.to_owned() } else { decoded(url.username()) },
        password: url.password().map(|password| Secret::new(decoded(password))),
    })
}

impl Server {
    /// A line that opens the control plane's database; the password stays in its file.
    fn psql(&self, folder: &Path) -> String {
        let password = folder.join(postgres::PASSWORD_FILE);
        let prefix = if password.exists() {
            format!("PGPASSWORD=$(cat {}) ", password.display())
        } else {
            String::new()
        };
        format!("{prefix}psql -h {} -p {} -U {} {CONTROL_DB}", self.host, self.port, self.user)
    }

    pub(crate) async fn connect(&self, database: &str) -> Result<PgConnection, sqlx::Error> {
        let mut options = PgConnectOptions::new_without_pgpass()
            .host(&self.host)
            .port(self.port)
            .username(&self.user)
            .database(database);
        if let Some(password) = &self.password {
            options = options.password(password.expose());
        }
        PgConnection::connect_with(&options).await
    }
}

async fn create_databases(server: &Server) -> Result<(), DevError> {
    let mut connection = server.connect("postgres").await?;
    for (name, statement) in
        [(CONTROL_DB, "CREATE DATABASE queen_proxy"), (CELL_DB, "CREATE DATABASE queen_cell")]
    {
        let there: bool = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
            .bind(name)
            .fetch_one(&mut connection)
            .await?;
        if !there {
            sqlx::query(statement).execute(&mut connection).await?;
        }
    }
    Ok(())
}

/// Starts the cell in this process; the receiver hears how it ended.
fn start_cell(
    runtime: &Runtime,
    options: &DevOptions,
    server: &Server,
    secret: &Secret,
) -> (oneshot::Sender<()>, mpsc::Receiver<String>) {
    let config = CellConfig {
        pg_host: server.host.clone(),
        pg_port: server.port,
        pg_user: server.user.clone(),
        pg_password: server.password.clone(),
        pg_db: CELL_DB.to_owned(),
        host: "127.0.0.1".to_owned(),
        port: options.cell_port,
        tenancy_header: true,
        kv_trusted_proxy: true,
        cell_secret: Some(secret.clone()),
        pool_size: 16,
        group_calls: 32,
        stmt_timeout_ms: 30_000,
        max_body_bytes: 64 << 20,
        kv_max_value_bytes: 65_536,
        kv_max_ops_per_call: 256,
        kv_max_keys_per_call: 1_024,
        shed_after: 5,
        ladder: cell::LadderSettings::default(),
        sweeper: cell::SweeperSettings::default(),
        log: LogSettings::default(),
    };
    let (stop, stopped) = oneshot::channel();
    let (end, ended) = mpsc::channel();
    say(&format!("  cell: 127.0.0.1:{}", options.cell_port));
    runtime.spawn(async move {
        let outcome = cell::serve(config, async move { drop(stopped.await) }).await;
        let _ = end
            .send(outcome.err().map_or_else(|| "it ended".to_owned(), |error| telemetry::describe(&error)));
    });
    (stop, ended)
}

async fn wait_for_cell(port: u16, ended: &mpsc::Receiver<String>) -> Result<(), DevError> {
    loop {
        if let Ok(why) = ended.try_recv() {
            return Err(DevError::Cell(why));
        }
        if tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn proxy_config(options: &DevOptions, folder: &Path, server: &Server) -> Result<ProxyConfig, DevError> {
    let mut environment = vec![
        ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
        ("QUEEN_PROXY_PORT", options.port.to_string()),
        ("QUEEN_PROXY_ADMIN_ADDR", format!("127.0.0.1:{}", options.admin_port)),
        ("PXDB_HOST", server.host.clone()),
        ("PXDB_PORT", server.port.to_string()),
        ("PXDB_USER", server.user.clone()),
        ("PXDB_DB", CONTROL_DB.to_owned()),
        ("QUEEN_PROXY_SPOOL_DIR", folder.join("spool").to_string_lossy().into_owned()),
        // Sessions end with this run.
        ("QUEEN_PROXY_JWT_SECRET", format!("{}{}", uuid::Uuid::new_v4(), uuid::Uuid::new_v4())),
    ];
    if let Some(password) = &server.password {
        environment.push(("PXDB_PASSWORD", password.expose().to_owned()));
    }
    let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value));
    let (config, _) =
        ProxyConfig::load(environment, None).map_err(|error| DevError::Proxy(error.to_string()))?;
    Ok(config)
}

/// Waits until a tenant's call goes all the way, then says how to make one.
fn announce(port: u16, demo: &Demo) {
    if demo.wait_until_served(port) {
        say(&demo.instructions(port));
    } else {
        say("queen-proxy dev: the proxy does not answer; see the lines above");
    }
}
