//! A PostgreSQL server of our own, from the binaries on the machine (D20): for `queen-proxy dev`,
//! tests and benches.

use crate::domain::secret::Secret;
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, User, geteuid},
};
use sqlx::postgres::PgConnectOptions;
use std::{
    fs::{self, OpenOptions},
    io::Write,
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{OpenOptionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// Why there is no server; each is one line for a person.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    /// No binaries.
    #[error(
        "no PostgreSQL server found on PATH or under /usr/lib/postgresql/*/bin: install one, for \
         example with `apt-get install postgresql`"
    )]
    NotInstalled,
    /// We are root and there is no other user to be.
    #[error("PostgreSQL refuses to run as root, and neither user postgres nor nobody exists")]
    NoUser,
    /// The folder cannot be used.
    #[error("cannot use {path}: {reason}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The system's word.
        reason: std::io::Error,
    },
    /// A program of PostgreSQL failed; the line is its own.
    #[error("PostgreSQL does not start: {0}")]
    Failed(String),
}

/// How the server is to run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where its data is; made when it does not exist.
    pub folder: PathBuf,
    /// The port on 127.0.0.1; 0 takes a free one.
    pub port: u16,
    /// Trade safety of the data for speed: for data that is thrown away.
    pub throw_away: bool,
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Postgres {
    settings: Settings,
    binaries: PathBuf,
    password: String,
    child: Option<Child>,
}

/// The file with its password, in the server's folder.
pub const PASSWORD_FILE: &str = "postgres.password";
/// The superuser of a private server.
pub const USER: &str = "postgres";
const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(10);

impl Postgres {
    /// Starts a server on `folder`, with the data that is there from before.
    pub fn start(mut settings: Settings) -> Result<Self, PostgresError> {
        let binaries = find_binaries().ok_or(PostgresError::NotInstalled)?;
        let folder = |reason| PostgresError::Folder { path: settings.folder.clone(), reason };
        fs::create_dir_all(&settings.folder).map_err(folder)?;
        let owner = owner()?;
        if let Some(user) = &owner {
            chown(&settings.folder, Some(user.uid.as_raw()), Some(user.gid.as_raw())).map_err(folder)?;
        }
        if settings.port == 0 {
            settings.port = free_port();
        }
        let password = password(&settings.folder).map_err(folder)?;
        let mut server = Self { settings, binaries, password, child: None };
        if !server.data().join("PG_VERSION").exists() {
            server.init(owner.as_ref())?;
        }
        server.stop_leftover();
        server.launch()?;
        Ok(server)
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.settings.port
    }

    /// The folder with its data and its log.
    pub fn folder(&self) -> &Path {
        &self.settings.folder
    }

    /// The superuser's password.
    pub fn password(&self) -> Secret {
        Secret::new(self.password.clone())
    }

    /// How the superuser reaches a database.
    pub fn connect_options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.port())
            .username(USER)
            .password(&self.password)
            .database(database)
    }

    /// Stops the server, as an outage would: clients are cut off.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        for signal in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGKILL] {
            let _ = kill(Pid::from_raw(child.id().cast_signed()), signal);
            let deadline = Instant::now() + STOP_LIMIT;
            while Instant::now() < deadline {
                if !matches!(child.try_wait(), Ok(None)) {
                    return;
                }
                sleep(Duration::from_millis(10));
            }
        }
    }

    /// Starts it again on the same port, after [`Self::stop`].
    pub fn launch(&mut self) -> Result<(), PostgresError> {
        let log = self.settings.folder.join("postgres.log");
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
        let file = file.map_err(|reason| PostgresError::Folder { path: log.clone(), reason })?;
        let errors =
            file.try_clone().map_err(|reason| PostgresError::Folder { path: log.clone(), reason })?;
        let mut command = self.command("postgres", owner()?.as_ref());
        command
            .arg("-D")
            .arg(self.data())
            .args(["-p", &self.settings.port.to_string()])
            .args(["-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories="])
            .args(["-c", "max_connections=200"])
            .stdout(file)
            .stderr(errors);
        if self.settings.throw_away {
            for setting in ["fsync=off", "synchronous_commit=off", "full_page_writes=off"] {
                command.args(["-c", setting]);
            }
        }
        let mut child = command.spawn().map_err(|reason| PostgresError::Failed(reason.to_string()))?;
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if !matches!(child.try_wait(), Ok(None)) {
                return Err(PostgresError::Failed(last_complaint(&log)));
            }
            // The postmaster listens before it is ready; the pid file says when it is.
            let pid_file = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
            let mut lines = pid_file.lines();
            let ours = lines.next().and_then(|pid| pid.trim().parse().ok()) == Some(child.id());
            let ready = lines.nth(6).is_some_and(|status| status.trim() == "ready");
            if ours && ready && TcpStream::connect(("127.0.0.1", self.settings.port)).is_ok() {
                self.child = Some(child);
                return Ok(());
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                return Err(PostgresError::Failed(last_complaint(&log)));
            }
            sleep(Duration::from_millis(10));
        }
    }

    fn data(&self) -> PathBuf {
        self.settings.folder.join("data")
    }

    /// A program of PostgreSQL's, as its own user and out of the terminal's process group, so that
    /// Ctrl-C reaches us alone and we stop it in order.
    fn command(&self, program: &str, owner: Option<&User>) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        command.current_dir("/").stdin(Stdio::null()).process_group(0).env("LC_ALL", "C.UTF-8");
        if let Some(user) = owner {
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        command
    }

    fn init(&self, owner: Option<&User>) -> Result<(), PostgresError> {
        let output = self
            .command("initdb", owner)
            .arg("-D")
            .arg(self.data())
            .args(["-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--no-sync", "--pwfile"])
            .arg(self.settings.folder.join(PASSWORD_FILE))
            .output()
            .map_err(|reason| PostgresError::Failed(reason.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        // A half-made folder would be taken for a whole one next time.
        let _ = fs::remove_dir_all(self.data());
        let text = String::from_utf8_lossy(&output.stderr);
        Err(PostgresError::Failed(complaint(text.lines()).unwrap_or("initdb failed").to_owned()))
    }

    /// Ends the server of an earlier run that was killed before it could.
    fn stop_leftover(&self) {
        let Ok(text) = fs::read_to_string(self.data().join("postmaster.pid")) else {
            return;
        };
        let Some(pid) = text.lines().next().and_then(|line| line.trim().parse::<i32>().ok()) else {
            return;
        };
        let is_postgres =
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "postgres");
        if pid <= 1 || !is_postgres {
            return;
        }
        let _ = kill(Pid::from_raw(pid), Signal::SIGINT);
        let deadline = Instant::now() + STOP_LIMIT;
        while Path::new(&format!("/proc/{pid}")).exists() && Instant::now() < deadline {
            sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
        if self.settings.throw_away {
            let _ = fs::remove_dir_all(&self.settings.folder);
        }
    }
}

/// The superuser's password, made at the first start and kept beside the data.
fn password(folder: &Path) -> std::io::Result<String> {
    let path = folder.join(PASSWORD_FILE);
    if let Ok(text) = fs::read_to_string(&path) {
        return Ok(text.trim().to_owned());
    }
    let password = uuid::Uuid::new_v4().simple().to_string();
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    writeln!(file, "{password}")?;
    if let Ok(Some(user)) = owner() {
        chown(&path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
    }
    Ok(password)
}

/// Whom PostgreSQL runs as when we are root; nobody else otherwise.
fn owner() -> Result<Option<User>, PostgresError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let found = ["postgres", "nobody"].iter().find_map(|name| User::from_name(name).ok().flatten());
    found.map(Some).ok_or(PostgresError::NoUser)
}

/// Whether the user PostgreSQL will run as can reach a folder.
pub fn can_reach(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let Ok(Some(user)) = owner() else { return true };
    folder.ancestors().filter_map(|part| fs::metadata(part).ok()).all(|part| {
        let bits = if part.uid() == user.uid.as_raw() { 0o100 } else { 0o001 };
        part.mode() & bits != 0
    })
}

fn find_binaries() -> Option<PathBuf> {
    let complete = |folder: &PathBuf| folder.join("initdb").exists() && folder.join("postgres").exists();
    let on_path = std::env::var_os("PATH")
        .and_then(|path| std::env::split_paths(&path).find(|folder| complete(folder)));
    on_path.or_else(|| {
        let mut versions: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
            .filter(complete)
            .collect();
        let version = |folder: &PathBuf| {
            folder.parent().and_then(|p| p.file_name()?.to_str()?.parse::<u32>().ok()).unwrap_or(0)
        };
        versions.sort_by_key(version);
        versions.pop()
    })
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|socket| socket.local_addr())
        .map_or(0, |address| address.port())
}

fn last_complaint(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    complaint(text.lines().rev()).unwrap_or("it ended without a word").to_owned()
}

/// The first line that says what is wrong, or the first at all.
fn complaint<'l>(mut lines: impl Iterator<Item = &'l str> + Clone) -> Option<&'l str> {
    let says = |line: &&str| ["PANIC", "FATAL", "error:", "could not"].iter().any(|word| line.contains(word));
    lines.clone().find(says).or_else(|| lines.next())
}
