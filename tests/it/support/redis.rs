//! A private Redis, from Debian's package `redis-server`; not having it fails.

use super::{Process, eventually, free_port, secrets};
use nix::sys::signal::Signal;
use std::time::Duration;
use tempfile::TempDir;

/// See the module.
pub struct Redis {
    /// Its port on 127.0.0.1.
    pub port: u16,
    /// Its port for TLS, under the name localhost.
    pub tls_port: u16,
    password: String,
    process: Process,
    folder: TempDir,
}

impl Redis {
    /// Starts one that wants a password, and keeps nothing on disk.
    pub async fn start() -> Self {
        let (port, tls_port, folder) = (free_port(), free_port(), TempDir::new().unwrap());
        let password = format!("redis-password-{}", uuid::Uuid::new_v4().simple());
        // No program of the suite may log it.
        secrets::remember(&[("REDIS_PASSWORD".to_owned(), password.clone())]);
        let process = launch([port, tls_port], &password, &folder);
        let redis = Self { port, tls_port, password, process, folder };
        redis.answers().await;
        redis
    }

    /// Where proxies find it, with the password.
    pub fn url(&self) -> String {
        format!("redis://:{}@127.0.0.1:{}/3", self.password, self.port)
    }

    /// The same with TLS; the certificate is one that the tests' authority has signed.
    pub fn secure_url(&self) -> String {
        format!("rediss://:{}@localhost:{}/3", self.password, self.tls_port)
    }

    /// A connection of the test's own.
    pub async fn connect(&self) -> redis::aio::MultiplexedConnection {
        redis::Client::open(self.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
    }

    /// Sends a signal, as SIGSTOP, which makes it hang.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait(Duration::from_secs(20)).expect("a killed process ends");
    }

    /// Starts it again after a kill; it remembers nothing.
    pub async fn start_again(&mut self) {
        self.process = launch([self.port, self.tls_port], &self.password, &self.folder);
        self.answers().await;
    }

    async fn answers(&self) {
        let client = redis::Client::open(self.url()).unwrap();
        eventually("redis answers", Duration::from_secs(20), async || {
            let mut connection = client.get_multiplexed_async_connection().await.ok()?;
            redis::cmd("PING").exec_async(&mut connection).await.ok()
        })
        .await;
    }
}

fn launch(ports: [u16; 2], password: &str, folder: &TempDir) -> Process {
    let [port, tls_port] = ports.map(|port| port.to_string());
    let fixture = |name| format!("{}/tests/it/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let (chain, key) = (fixture("pkcs8.pem"), fixture("pkcs8.key"));
    let path = folder.path().to_str().unwrap();
    let arguments = [
        ["--bind", "127.0.0.1"],
        ["--port", &port],
        ["--tls-port", &tls_port],
        ["--tls-cert-file", &chain],
        ["--tls-key-file", &key],
        ["--tls-auth-clients", "no"],
        ["--requirepass", password],
        ["--save", ""],
        ["--appendonly", "no"],
        ["--dir", path],
    ];
    Process::start("redis-server", "redis-server", arguments.as_flattened(), &[], folder.path())
}
