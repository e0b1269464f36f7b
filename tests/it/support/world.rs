//! A whole deployment for one test: databases, a cell, proxies, tenants.

use super::{Process, Recorder, Relay, Socket, eventually, free_port, secrets};
use nix::sys::signal::Signal;
use queen_proxy::{
    config::proxy::{ProxyConfig, PxdbConfig},
    control::migrate::migrate,
    dev::postgres::{Postgres, Settings, USER},
};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::Duration,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;

/// The program under test.
pub const PROXY: &str = env!("CARGO_BIN_EXE_queen-proxy");
const PROXY_ROLE: &str = "queen_it_proxy";
const PROXY_PASSWORD: &str = "the password of the proxy in tests";

/// A private PostgreSQL server.
pub struct Postgresql(Mutex<Postgres>);

impl Postgresql {
    fn start() -> Arc<Self> {
        let folder = std::env::temp_dir().join(format!("queen-it-{}", Uuid::new_v4().simple()));
        let settings = Settings { folder, port: free_port(), throw_away: true };
        Arc::new(Self(Mutex::new(Postgres::start(settings).unwrap())))
    }

    /// The server that the worlds of this process share while any of them lives.
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Postgresql>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let server = Self::start();
            *shared = Arc::downgrade(&server);
            server
        })
    }

    /// Stops it as an outage would.
    pub fn stop(&self) {
        self.0.lock().unwrap().stop();
    }

    /// Starts it again on the same port.
    pub fn start_again(&self) {
        self.0.lock().unwrap().launch().unwrap();
    }

    fn port(&self) -> u16 {
        self.0.lock().unwrap().port()
    }

    fn password(&self) -> String {
        self.0.lock().unwrap().password().expose().to_owned()
    }

    /// How the superuser reaches a database.
    pub fn connect_options(&self, database: &str) -> PgConnectOptions {
        self.0.lock().unwrap().connect_options(database)
    }

    /// What the server has written to its log.
    fn log(&self) -> String {
        let folder = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).folder().to_owned();
        std::fs::read_to_string(folder.join("postgres.log")).unwrap_or_default()
    }

    /// A superuser's connection.
    pub async fn connect(&self, database: &str) -> PgConnection {
        PgConnection::connect_with(&self.connect_options(database)).await.unwrap()
    }
}

impl Drop for Postgresql {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            secrets::assert_none("postgres", &self.log(), &[]);
        }
    }
}

/// A tenant with one cluster and a key with all scopes.
#[derive(Clone, Debug)]
#[allow(clippy::struct_field_names)] // the ids are called as their tables
pub struct Tenant {
    /// `tenants.id`
    pub tenant: Uuid,
    /// `clusters.id`
    pub cluster: Uuid,
    /// `clusters.slug`
    pub slug: String,
    /// Plaintext of its key.
    pub key: String,
}

impl Tenant {
    /// The `Host` of its cluster.
    pub fn host(&self) -> String {
        format!("{}.q.example", self.slug)
    }

    /// Host and credential as header lines.
    pub fn headers(&self) -> String {
        format!("Host: {}\r\nAuthorization: Bearer {}\r\n", self.host(), self.key)
    }
}

/// What a world is to be made of.
#[allow(clippy::struct_excessive_bools)] // each is one yes or no of its own
pub struct WorldBuilder {
    proxies: usize,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    cell_environment: Vec<(String, String)>,
    own_control_postgres: bool,
    own_cell_postgres: bool,
    recorder: bool,
    relay: bool,
    proxies_migrate: bool,
    cell_behind_relay: bool,
    admin: u16,
}

impl WorldBuilder {
    /// The proxies reach pxdb through a relay that can go silent.
    pub fn relay(mut self) -> Self {
        self.relay = true;
        self
    }

    /// The proxies make the schema themselves, under the role that may.
    pub fn proxies_migrate(mut self) -> Self {
        self.proxies_migrate = true;
        self
    }

    /// Number of proxies on the one control plane.
    pub fn proxies(mut self, proxies: usize) -> Self {
        self.proxies = proxies;
        self
    }

    /// The proxies' configuration file.
    pub fn config_file(mut self, path: &Path) -> Self {
        self.arguments.extend(["--config".to_owned(), path.to_str().unwrap().to_owned()]);
        self
    }

    /// A variable of the proxies' environment.
    #[allow(clippy::needless_pass_by_value)] // numbers and texts read best at the place of use
    pub fn env(mut self, name: &str, value: impl ToString) -> Self {
        self.environment.push((name.to_owned(), value.to_string()));
        self
    }

    /// Where the admin listener will be, once [`Self::admin`] was asked for.
    pub fn admin_port(&self) -> u16 {
        self.admin
    }

    /// The (one) proxy has an admin listener.
    pub fn admin(mut self) -> Self {
        self.admin = free_port();
        self
    }

    /// A variable of the cells' environment.
    #[allow(clippy::needless_pass_by_value)] // as above
    pub fn cell_env(mut self, name: &str, value: impl ToString) -> Self {
        self.cell_environment.push((name.to_owned(), value.to_string()));
        self
    }

    /// A relay between the cell and its database, which the test may silence or cut.
    pub fn cell_behind_relay(mut self) -> Self {
        self.cell_behind_relay = true;
        self
    }

    /// The control plane on a server of its own, which the test may stop.
    pub fn own_control_postgres(mut self) -> Self {
        self.own_control_postgres = true;
        self
    }

    /// The cell's database on a server of its own, which the test may stop.
    pub fn own_cell_postgres(mut self) -> Self {
        self.own_cell_postgres = true;
        self
    }

    /// A recording stand-in in place of the cell.
    pub fn recorder(mut self) -> Self {
        self.recorder = true;
        self
    }

    /// Starts everything and waits until it answers.
    pub async fn start(self) -> World {
        let of = |own: bool| if own { Postgresql::start() } else { Postgresql::shared() };
        let (server, control_server) = (of(self.own_cell_postgres), of(self.own_control_postgres));
        let name = Uuid::new_v4().simple().to_string();
        let (control_db, cell_db) = (format!("control_{name}"), format!("cell_{name}"));
        create(&control_server, &control_db).await;
        let folder = TempDir::new().unwrap();
        let secret = format!("cell-secret-{}", Uuid::new_v4().simple());
        let (mut cell, mut recorder, mut cell_relay) = (None, None, None);
        let mut cell_environment = self.cell_environment;
        if self.cell_behind_relay {
            let started = Relay::start(server.port()).await;
            cell_environment.push(("PG_PORT".to_owned(), started.port.to_string()));
            cell_relay = Some(started);
        }
        let cell_port = if self.recorder {
            let started = Recorder::start().await;
            let port = started.port;
            recorder = Some(started);
            port
        } else {
            create(&server, &cell_db).await;
            let port = free_port();
            cell = Some(start_cell(&server, &cell_db, port, &secret, &cell_environment, &folder));
            port
        };
        let relay = if self.relay { Some(Relay::start(control_server.port()).await) } else { None };
        let mut world = World {
            relay,
            server,
            control_server,
            control_db,
            cell_db,
            cell_secret: secret,
            cell_port,
            cell_id: Uuid::nil(),
            cell,
            recorder,
            cell_relay,
            cell_environment,
            proxies: Vec::new(),
            arguments: self.arguments,
            environment: self.environment,
            admin: self.admin,
            proxies_migrate: self.proxies_migrate,
            folder,
        };
        if self.proxies > 0 && !self.proxies_migrate {
            world.prepare_control_plane().await;
        }
        for _ in 0..self.proxies {
            world.add_proxy();
        }
        for index in 0..self.proxies {
            world.wait_for_proxy(index).await;
        }
        if world.cell.is_some() {
            wait_for_health(cell_port).await;
        }
        if self.proxies > 0 {
            world.cell_id = world.add_cell("cell", cell_port).await;
        }
        world
    }
}

/// See the module.
pub struct World {
    /// The server of the cell's database.
    pub server: Arc<Postgresql>,
    /// The server of the control plane's database.
    pub control_server: Arc<Postgresql>,
    /// The control plane's database.
    pub control_db: String,
    /// The cell's database.
    pub cell_db: String,
    /// What the proxy presents to the cell.
    pub cell_secret: String,
    /// Where the cell listens.
    pub cell_port: u16,
    /// `cells.id`
    pub cell_id: Uuid,
    /// The cell, unless it is a recorder.
    pub cell: Option<Process>,
    /// The recorder, when one was asked for.
    pub recorder: Option<Recorder>,
    /// The way of the proxies to pxdb, when one was asked for.
    pub relay: Option<Relay>,
    /// What is between the cell and its database, when it was asked for.
    pub cell_relay: Option<Relay>,
    /// Each with its port.
    pub proxies: Vec<(u16, Process)>,
    /// The admin listener's port, or 0.
    pub admin: u16,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    cell_environment: Vec<(String, String)>,
    proxies_migrate: bool,
    folder: TempDir,
}

impl World {
    /// A world with one proxy and a real cell.
    pub async fn new() -> Self {
        Self::builder().start().await
    }

    /// A world to be described.
    pub fn builder() -> WorldBuilder {
        WorldBuilder {
            proxies: 1,
            arguments: vec!["serve".to_owned()],
            environment: Vec::new(),
            cell_environment: Vec::new(),
            own_control_postgres: false,
            own_cell_postgres: false,
            recorder: false,
            relay: false,
            proxies_migrate: false,
            cell_behind_relay: false,
            admin: 0,
        }
    }

    /// The first proxy's port.
    pub fn port(&self) -> u16 {
        self.proxies[0].0
    }

    /// The stand-in cell.
    pub fn recorder(&self) -> &Recorder {
        self.recorder.as_ref().expect("a world with a recorder")
    }

    /// The way of the proxies to pxdb.
    pub fn relay(&self) -> &Relay {
        self.relay.as_ref().expect("a world with a relay")
    }

    /// What the proxies of this world are started with.
    pub fn proxy_environment(&self, port: u16) -> Vec<(String, String)> {
        let mut environment: Vec<(String, String)> = [
            ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
            ("QUEEN_PROXY_PORT", port.to_string()),
            ("QUEEN_PROXY_WORKER_THREADS", "2".to_owned()),
            ("QUEEN_PROXY_ADMIN_ADDR", "off".to_owned()),
            // Recorders would count the proxy's own requests.
            ("QUEEN_PROXY_RECONCILE_MS", "1000000000".to_owned()),
            ("QUEEN_PROXY_STORAGE_REFRESH_MS", "1000000000".to_owned()),
            ("PXDB_HOST", "127.0.0.1".to_owned()),
            ("PXDB_PORT", self.control_server.port().to_string()),
            ("PXDB_USER", USER.to_owned()),
            ("PXDB_PASSWORD", self.control_server.password()),
            ("PXDB_DB", self.control_db.clone()),
            // A folder for each proxy.
            ("QUEEN_PROXY_SPOOL_DIR", self.spool_of(port).to_string_lossy().into_owned()),
            // Many worlds share one server.
            ("PXDB_POOL_SIZE", "4".to_owned()),
            ("RUST_LOG", "info,queen_proxy=debug,sqlx=warn".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if self.admin != 0 {
            environment.push(("QUEEN_PROXY_ADMIN_ADDR".to_owned(), format!("127.0.0.1:{}", self.admin)));
        }
        environment.extend(self.environment.iter().cloned());
        environment
    }

    /// A whole figure of the proxy as its admin listener shows it; zero when it is not there yet.
    pub async fn figure(&self, name: &str) -> u64 {
        let text = super::metrics(self.admin).await;
        super::sample(&text, name).map_or(0, |value| value.parse().unwrap())
    }

    /// The configuration of a proxy that is part of the test's own process, under the proxies' role.
    pub fn config(&self, more: &[(&str, &str)]) -> ProxyConfig {
        let own = [("PXDB_USER", PROXY_ROLE), ("PXDB_PASSWORD", PROXY_PASSWORD)];
        let own = own.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        ProxyConfig::load(self.proxy_environment(1).into_iter().chain(own), None).unwrap().0
    }

    /// How a proxy of this world reaches the control plane, under the proxies' role.
    pub fn pxdb_of_a_proxy(&self) -> PxdbConfig {
        self.config(&[]).pxdb.unwrap()
    }

    /// Migrates, and makes the role under which the proxies of the tests run: the one that
    /// `migrations/control/roles.sql` gives the least rights, so that a missing grant fails a test.
    pub async fn prepare_control_plane(&self) {
        let (config, _) = ProxyConfig::load(self.proxy_environment(1), None).unwrap();
        migrate(&config.pxdb.unwrap()).await.unwrap();
        // Roles belong to the whole server, which other worlds use at the same time.
        let mut server = self.control_server.connect("postgres").await;
        sqlx::query("SELECT pg_advisory_lock(1)").execute(&mut server).await.unwrap();
        self.sql(include_str!("../../../migrations/control/roles.sql")).await;
        self.sql(&format!(
            "DO $$ BEGIN
                 IF to_regrole('{PROXY_ROLE}') IS NULL THEN
                     CREATE ROLE {PROXY_ROLE} LOGIN PASSWORD '{PROXY_PASSWORD}';
                 END IF;
             END $$;
             GRANT queen_proxy_proxy TO {PROXY_ROLE}"
        ))
        .await;
    }

    /// Starts another proxy, under the proxy's role, without waiting for it; returns its index.
    pub fn add_proxy(&mut self) -> usize {
        let port = free_port();
        let process = self.start_proxy(port);
        self.proxies.push((port, process));
        self.proxies.len() - 1
    }

    /// The same by a program that becomes the proxy.
    pub fn add_proxy_by(&mut self, program: &str, arguments: &[&str]) -> usize {
        let port = free_port();
        let process = self.start_proxy_by(port, program, arguments);
        self.proxies.push((port, process));
        self.proxies.len() - 1
    }

    fn start_proxy(&self, port: u16) -> Process {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.start_proxy_by(port, PROXY, &arguments)
    }

    fn start_proxy_by(&self, port: u16, program: &str, arguments: &[&str]) -> Process {
        let mut environment = self.proxy_environment(port);
        if !self.proxies_migrate {
            environment.push(("PXDB_USER".to_owned(), PROXY_ROLE.to_owned()));
            environment.push(("PXDB_PASSWORD".to_owned(), PROXY_PASSWORD.to_owned()));
        }
        if let Some(relay) = &self.relay {
            environment.push(("PXDB_PORT".to_owned(), relay.port.to_string()));
        }
        Process::start("queen-proxy", program, arguments, &environment, self.folder.path())
    }

    /// Starts a proxy again, with the port and the spool that it had, without waiting for it.
    pub fn restart_proxy(&mut self, index: usize) {
        let port = self.proxies[index].0;
        // The old one must be gone before the new one looks for its port and its spool.
        let old = &mut self.proxies[index].1;
        if !old.has_ended() {
            old.signal(Signal::SIGKILL);
            old.wait(Duration::from_secs(20)).expect("a killed process ends");
        }
        self.proxies[index].1 = self.start_proxy(port);
    }

    /// Tells a proxy to end, and waits until it has.
    pub fn stop_proxy(&mut self, index: usize) {
        let process = &mut self.proxies[index].1;
        process.signal(Signal::SIGTERM);
        let status = process.wait(Duration::from_secs(60)).expect("a proxy ends when it is told to");
        assert!(status.success(), "{status}");
    }

    /// The folder where a proxy spools.
    pub fn spool(&self, index: usize) -> PathBuf {
        self.spool_of(self.proxies[index].0)
    }

    fn spool_of(&self, port: u16) -> PathBuf {
        self.folder.path().join(format!("spool-{port}"))
    }

    /// Waits until a proxy answers and hears of changes.
    pub async fn wait_for_proxy(&mut self, index: usize) {
        let secure = self.environment.iter().any(|(name, _)| name == "QUEEN_PROXY_TLS_CERT");
        let (port, process) = &mut self.proxies[index];
        if secure {
            wait_for_listener(*port).await;
        } else {
            wait_for_health(*port).await;
        }
        eventually("the listener is connected", Duration::from_secs(20), async || {
            process.log().contains("listener: connected").then_some(())
        })
        .await;
    }

    /// Kills the cell and starts it again on the same port and database.
    pub async fn restart_cell(&mut self) {
        self.cell = None;
        self.cell = Some(self.start_cell(self.cell_port));
        wait_for_health(self.cell_port).await;
    }

    /// Starts another cell on the same database; no proxy knows of it.
    pub async fn another_cell(&self) -> (u16, Process) {
        let port = free_port();
        let process = self.start_cell(port);
        wait_for_health(port).await;
        (port, process)
    }

    fn start_cell(&self, port: u16) -> Process {
        let environment = &self.cell_environment;
        start_cell(&self.server, &self.cell_db, port, &self.cell_secret, environment, &self.folder)
    }

    /// The first line and the headers of a request as the proxy would send it to a cell for `tenant`.
    pub fn cell_head(&self, line: &str, tenant: Uuid) -> String {
        format!(
            "{line} HTTP/1.1\r\nHost: cell\r\nAuthorization: Bearer {}\r\nx-queen-tenant: {tenant}\r\n",
            self.cell_secret
        )
    }

    /// One request straight to a cell.
    pub async fn ask_cell(&self, port: u16, line: &str, tenant: Uuid, body: &str) -> super::Answer {
        let request = format!("{}Content-Length: {}\r\n\r\n{body}", self.cell_head(line, tenant), body.len());
        Socket::open(port).await.ask(request).await
    }

    /// A superuser's connection to the control plane.
    pub async fn control(&self) -> PgConnection {
        self.control_server.connect(&self.control_db).await
    }

    /// A superuser's connection to the cell's database.
    pub async fn cell_database(&self) -> PgConnection {
        self.server.connect(&self.cell_db).await
    }

    /// Runs statements on the control plane.
    pub async fn sql(&self, statements: &str) {
        let statements = sqlx::AssertSqlSafe(statements.to_owned());
        sqlx::raw_sql(statements).execute(&mut self.control().await).await.unwrap();
    }

    /// A row in `cells` for a port on this machine.
    pub async fn add_cell(&self, slug: &str, port: u16) -> Uuid {
        sqlx::query_scalar(
            "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)
                  VALUES ($1, 'test', $2, 'shared', $3) RETURNING id",
        )
        .bind(slug)
        .bind(format!("http://127.0.0.1:{port}"))
        .bind(&self.cell_secret)
        .fetch_one(&mut self.control().await)
        .await
        .unwrap()
    }

    /// A tenant with cluster `<name>-prod` and a key. Its rates are unlimited: tests ask faster than the
    /// plan allows.
    pub async fn tenant(&self, name: &str) -> Tenant {
        let slug = format!("{name}-prod");
        let (tenant, cluster, key): (Uuid, Uuid, String) = sqlx::query_as(
            "SELECT (made ->> 'tenant_id')::uuid, (made ->> 'cluster_id')::uuid, made ->> 'api_key'
               FROM queen_proxy.bootstrap_tenant($1, $1, $2, 'pro', $3, $4) AS made",
        )
        .bind(name)
        .bind(&slug)
        .bind(self.cell_id)
        .bind(format!("admin@{name}.example"))
        .fetch_one(&mut self.control().await)
        .await
        .unwrap();
        self.sql(&format!(
            r#"UPDATE queen_proxy.clusters
                  SET limit_overrides = '{{"max_req_per_sec": null, "max_msgs_per_sec": null}}'
                WHERE id = '{cluster}'"#
        ))
        .await;
        Tenant { tenant, cluster, slug, key }
    }

    /// Another key of a cluster, with these scopes.
    pub async fn key(&self, cluster: Uuid, scopes: &[&str]) -> (Uuid, String) {
        let key = format!("qk_test_{}", Uuid::new_v4().simple());
        let id = sqlx::query_scalar("SELECT queen_proxy.issue_api_key($1, 'test', $2, $3)")
            .bind(cluster)
            .bind(hex::encode(queen_proxy::identity::digest(&key)))
            .bind(scopes)
            .fetch_one(&mut self.control().await)
            .await
            .unwrap();
        (id, key)
    }

    /// One request on a connection of its own through the first proxy: `head` is the request line
    /// without version and the headers, each ended by `\r\n`.
    pub async fn ask(&self, line: &str, headers: &str, body: &str) -> super::Answer {
        self.ask_proxy(0, line, headers, body).await
    }

    /// The same through one of several proxies.
    pub async fn ask_proxy(&self, proxy: usize, line: &str, headers: &str, body: &str) -> super::Answer {
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let request = format!("{line} HTTP/1.1\r\n{headers}{length}\r\n{body}");
        Socket::open(self.proxies[proxy].0).await.ask(request).await
    }
}

fn start_cell(
    server: &Postgresql,
    database: &str,
    port: u16,
    secret: &str,
    more: &[(String, String)],
    folder: &TempDir,
) -> Process {
    let environment = [
        ("HOST", "127.0.0.1".to_owned()),
        ("PORT", port.to_string()),
        ("PG_HOST", "127.0.0.1".to_owned()),
        ("PG_PORT", server.port().to_string()),
        ("PG_USER", USER.to_owned()),
        ("PG_PASSWORD", server.password()),
        ("PG_DB", database.to_owned()),
        ("QUEEN_KV_POOL_SIZE", "8".to_owned()),
        ("QUEEN_TENANCY_HEADER", "true".to_owned()),
        ("QUEEN_KV_TRUSTED_PROXY", "true".to_owned()),
        ("QUEEN_CELL_SECRET", secret.to_owned()),
        // Tests that are not about rates should not meet any.
        ("QUEEN_KV_READ_RATE", "1000000".to_owned()),
        ("QUEEN_KV_READ_BURST", "1000000".to_owned()),
        ("QUEEN_KV_WRITE_RATE", "1000000".to_owned()),
        ("QUEEN_KV_WRITE_BURST", "1000000".to_owned()),
        ("QUEEN_KV_CELL_RATE", "0".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let environment = [&environment[..], more].concat();
    Process::start("queen-cell", env!("CARGO_BIN_EXE_queen-cell"), &["serve"], &environment, folder.path())
}

async fn create(server: &Postgresql, database: &str) {
    let statement = sqlx::AssertSqlSafe(format!("CREATE DATABASE {database}"));
    sqlx::query(statement).execute(&mut server.connect("postgres").await).await.unwrap();
}

async fn wait_for_listener(port: u16) {
    eventually("the program listens", Duration::from_secs(30), async || {
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()
    })
    .await;
}

/// Both programs answer on a path of their own without a credential.
async fn wait_for_health(port: u16) {
    eventually("the program answers", Duration::from_secs(30), async || {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        answer.starts_with("HTTP/1.1").then_some(())
    })
    .await;
}
