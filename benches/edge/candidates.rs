//! Who is measured, and how each is started. The configurations of the peers are the files beside this one.

use crate::{Options, SECRET, control, load::Load, measure, names, probe};
use clap::ValueEnum;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use queen_proxy::{
    dev::postgres::{Postgres, free_port},
    identity,
};
use rustix::process::{Resource, getrlimit};
use std::{
    env,
    fmt::Write,
    fs::{self, File},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tokio::time::sleep;
use uuid::Uuid;

/// Where Debian's nginx has its modules.
const MODULES: &str = "/usr/lib/nginx/modules";
/// Descriptors that are no client's and no upstream's.
const SPARE: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Candidate {
    /// The load goes straight to the upstream
    Direct,
    /// Pingora by itself
    Bare,
    /// nginx as a plain proxy
    Nginx,
    /// HAProxy as a plain proxy
    Haproxy,
    /// HAProxy with maps, digests and a stick table
    HaproxyGateway,
    /// nginx with a gateway in Lua
    NginxLua,
    /// queen-proxy
    Ours,
}

impl Candidate {
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "nothing in between",
            Self::Bare => "bare Pingora",
            Self::Nginx => "nginx",
            Self::Haproxy => "HAProxy",
            Self::HaproxyGateway => "HAProxy gateway",
            Self::NginxLua => "nginx+Lua gateway",
            Self::Ours => "ours",
        }
    }

    /// Whether it has what this candidate needs, and if not, what to do about it.
    pub fn check(self) -> Result<(), String> {
        let needs = |there: bool, what: &str, package: &str| {
            let text = || {
                format!(
                    "{}: {what} is not there; install it with `apt-get install {package}`, or leave this \
                     candidate out with --only",
                    self.name()
                )
            };
            there.then_some(()).ok_or_else(text)
        };
        match self {
            Self::Direct | Self::Bare | Self::Ours => Ok(()),
            Self::Nginx => needs(on_path("nginx"), "the program nginx", "nginx"),
            Self::Haproxy | Self::HaproxyGateway => {
                needs(on_path("haproxy"), "the program haproxy", "haproxy")
            }
            Self::NginxLua => {
                needs(on_path("nginx"), "the program nginx", "nginx")?;
                let module = Path::new(MODULES).join("ngx_http_lua_module.so");
                needs(module.exists(), "nginx's Lua module", "libnginx-mod-http-lua")
            }
        }
    }
}

fn on_path(program: &str) -> bool {
    // An ordinary user's PATH lacks the folder that nginx and HAProxy are in.
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain(["/usr/sbin".into()]).any(|folder| folder.join(program).exists())
}

/// A program of the bench, its children included: dropping it ends them all.
pub struct Program {
    child: Child,
    complaints: PathBuf,
}

impl Program {
    fn start(command: &mut Command, complaints: PathBuf) -> Self {
        let file = File::create(&complaints).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).spawn().unwrap();
        Self { child, complaints }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it listens there.
    async fn listening(&mut self, port: u16) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "it does not serve: {}",
                fs::read_to_string(&self.complaints).unwrap_or_default()
            );
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // nginx, asked like that, ends its children and waits for them.
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT);
        let deadline = Instant::now() + Duration::from_secs(1);
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        // The parent first, so that it starts no child anew.
        for id in measure::tree(self.child.id()) {
            let _ = kill(Pid::from_raw(id.cast_signed()), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// A folder that goes away with its bench.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What stands around the candidates.
pub struct Stand {
    options: Options,
    upstream: (Program, u16),
    pxdb: Option<Postgres>,
    // The last: what is in it is used by those above.
    folder: Folder,
}

/// A candidate that serves.
pub struct Running {
    pub candidate: Candidate,
    pub program: Option<Program>,
    pub address: SocketAddr,
}

impl Stand {
    pub async fn start(options: &Options) -> Self {
        let folder = Folder(env::temp_dir().join(format!("queen-bench-{}", Uuid::new_v4().simple())));
        fs::create_dir_all(&folder.0).unwrap();
        let port = free_port();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["upstream", &port.to_string()]);
        let mut upstream = Program::start(&mut command, folder.0.join("upstream.err"));
        upstream.listening(port).await;
        let pxdb = if options.only.contains(&Candidate::Ours) {
            Some(control::start(&folder.0, &options.proxy(), options.clusters, port).await)
        } else {
            None
        };
        Self { options: options.clone(), upstream: (upstream, port), pxdb, folder }
    }

    pub fn upstream(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.upstream.1))
    }

    /// So many polls fit: each needs two descriptors of a proxy.
    pub fn polls(&self) -> usize {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let room = usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(SPARE) / 2;
        self.options.polls.min(room)
    }

    /// Starts a candidate and asks it once for each cluster and kind of request.
    pub async fn run(&self, candidate: Candidate) -> Running {
        let port = free_port();
        let mut running =
            Running { candidate, program: None, address: SocketAddr::from(([127, 0, 0, 1], port)) };
        let folder = self.folder.0.join(port.to_string());
        fs::create_dir_all(&folder).unwrap();
        let threads = self.options.threads.to_string();
        let mut command = match candidate {
            Candidate::Direct => {
                running.address = self.upstream();
                return running;
            }
            Candidate::Bare => {
                let mut command = Command::new(env::current_exe().unwrap());
                command.args(["bare", &port.to_string(), &self.upstream().to_string(), &threads]);
                command
            }
            Candidate::Nginx => self.nginx(&folder, port, include_str!("nginx.conf")),
            Candidate::NginxLua => {
                fs::write(folder.join("gateway.lua"), include_str!("gateway.lua")).unwrap();
                self.nginx(&folder, port, include_str!("nginx-lua.conf"))
            }
            Candidate::Haproxy => self.haproxy(&folder, port, include_str!("haproxy.cfg")),
            Candidate::HaproxyGateway => self.haproxy(&folder, port, include_str!("haproxy-gateway.cfg")),
            Candidate::Ours => self.ours(&folder, port),
        };
        let mut program = Program::start(&mut command, folder.join("stderr"));
        program.listening(port).await;
        running.program = Some(program);
        probe::check(&running);
        for load in [Load::Get, Load::Post1k] {
            crate::drive(&running, load, &self.options, &format!("--asked={}", self.options.clusters)).await;
        }
        running
    }

    fn nginx(&self, folder: &Path, port: u16, template: &str) -> Command {
        let conf = self.fill(folder, port, template, "nginx.conf");
        let mut command = Command::new("nginx");
        command.arg("-p").arg(folder).arg("-c").arg(conf).arg("-e").arg(folder.join("error.log"));
        command.env("PATH", with_sbin());
        command
    }

    fn haproxy(&self, folder: &Path, port: u16, template: &str) -> Command {
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(self.fill(folder, port, template, "haproxy.cfg"));
        command.env("PATH", with_sbin());
        command
    }

    fn ours(&self, folder: &Path, port: u16) -> Command {
        let mut command = Command::new(self.options.proxy());
        command.arg("serve").env_clear().current_dir(folder);
        command.envs(control::environment(self.pxdb.as_ref().unwrap()));
        let everything = "1000000000";
        command.envs([
            ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1"),
            ("QUEEN_PROXY_PORT", &port.to_string()),
            ("QUEEN_PROXY_ADMIN_ADDR", "off"),
            ("QUEEN_PROXY_WORKER_THREADS", &self.options.threads.to_string()),
            // All answers are from the caches: no cluster is asked for again while it is measured, in pxdb or in
            // its cell.
            ("QUEEN_PROXY_CACHE_TTL_MS", everything),
            ("QUEEN_PROXY_RECONCILE_MS", everything),
            ("QUEEN_PROXY_STORAGE_REFRESH_MS", everything),
            ("QUEEN_PROXY_MAX_CONNECTIONS", "1000000"),
            ("QUEEN_PROXY_MAX_CONNECTIONS_PER_ADDRESS", "1000000"),
            ("QUEEN_PROXY_CELL_MAX_PARKED", "1000000"),
        ]);
        command
    }

    /// Writes a peer's configuration and its maps.
    fn fill(&self, folder: &Path, port: u16, template: &str, name: &str) -> PathBuf {
        let connections = self.polls() + SPARE / 4;
        let text = template
            .replace("@THREADS@", &self.options.threads.to_string())
            .replace("@CONNECTIONS@", &connections.to_string())
            // nginx drops clients that have not asked yet when fewer than a sixteenth of these are left.
            .replace("@SOCKETS@", &(3 * connections).to_string())
            .replace("@PORT@", &port.to_string())
            .replace("@UPSTREAM@", &self.upstream.1.to_string())
            .replace("@FOLDER@", folder.to_str().unwrap())
            .replace("@MODULES@", MODULES)
            .replace("@SECRET@", SECRET);
        let (mut hosts, mut keys) = (String::new(), String::new());
        for number in 0..self.options.clusters {
            let tenant = Uuid::from_u128(number as u128 + 1);
            writeln!(hosts, "{} {tenant}", names::host(number)).unwrap();
            writeln!(keys, "{} {tenant}", hex::encode(identity::digest(&names::key(number)))).unwrap();
        }
        fs::write(folder.join("hosts.map"), hosts).unwrap();
        fs::write(folder.join("keys.map"), keys).unwrap();
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

fn with_sbin() -> String {
    format!("{}:/usr/sbin", env::var("PATH").unwrap_or_default())
}
