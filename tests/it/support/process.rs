//! A program of ours as a child process whose log is shown when its test fails.

use super::secrets;
use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};

/// A port nobody listens on, below the range that outgoing connections take. Each test process has a
/// range of its own, so that two runs on one machine do not meet.
pub fn free_port() -> u16 {
    const SIZE: u16 = 1_000;
    static RANGE: LazyLock<(u16, Option<Flock<File>>)> = LazyLock::new(|| {
        (0..17)
            .find_map(|slot: u16| {
                let path = std::env::temp_dir().join(format!("queen-it-ports-{slot}.lock"));
                let lock = Flock::lock(File::create(path).ok()?, FlockArg::LockExclusiveNonblock).ok()?;
                Some((15_000 + slot * SIZE, Some(lock)))
            })
            .unwrap_or((15_000, None))
    });
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let port = RANGE.0 + NEXT.fetch_add(1, Ordering::Relaxed) % SIZE;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A running program.
pub struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts it with nothing but these variables in its environment.
    pub fn start(
        name: &'static str,
        binary: &str,
        arguments: &[&str],
        environment: &[(String, String)],
        folder: &Path,
    ) -> Self {
        Self::start_with(name, binary, arguments, environment, folder, Stdio::null())
    }

    /// The same with something to read.
    pub fn start_with(
        name: &'static str,
        binary: &str,
        arguments: &[&str],
        environment: &[(String, String)],
        folder: &Path,
        input: Stdio,
    ) -> Self {
        let log = folder.join(format!("{name}-{}.log", uuid::Uuid::new_v4().simple()));
        let file = File::create(&log).unwrap();
        secrets::remember(environment);
        let child = Command::new(binary)
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap_or_default())
            .env("RUST_BACKTRACE", "1")
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(input)
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap_or_else(|error| panic!("{binary}: {error}"));
        Self { name, child, log }
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its number in the system.
    pub fn id(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Memory that is its own and in use, in bytes.
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1_024
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.id()), signal).unwrap();
    }

    /// Its end, within the limit.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = self.log();
        if std::thread::panicking() {
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            eprintln!("--- log of {} ---", self.name);
            for line in tail.iter().rev() {
                eprintln!("{line}");
            }
        }
        // A panic in a request kills that request alone, so nothing else would show it.
        if !std::thread::panicking() {
            assert!(!log.contains("panicked at"), "{} panicked:\n{log}", self.name);
            // `dev` shows the demo key: that is what it is for.
            let shown = if self.name == "dev" { &["qk_"][..] } else { &[] };
            secrets::assert_none(self.name, &log, shown);
        }
    }
}
