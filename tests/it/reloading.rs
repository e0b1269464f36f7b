//! SIGHUP: settings of every kind take effect at once, together or not at all, and drop nobody.

use crate::support::{Recorder, Reply, Socket, Tenant, World, eventually};
use nix::sys::signal::Signal;
use std::{fs, path::PathBuf, time::Duration};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);
/// Longer than anything here takes, shorter than what is set at first.
const LATE: Duration = Duration::from_secs(15);

/// What every test begins with: nothing of it ends by itself while a test runs.
const FIRST: &str = "upstream_timeout_ms = 60000\nhead_timeout_ms = 60000\nbody_timeout_ms = 60000\n\
                     client_read_timeout_ms = 60000\nkeepalive_ms = 60000\nlongpoll_max_ms = 60000\n\
                     longpoll_margin_ms = 0\nshutdown_delay_ms = 60000\n";

/// A proxy with a file.
struct Reloading {
    world: World,
    tenant: Tenant,
    path: PathBuf,
    outcomes: [u64; 2],
    _folder: tempfile::TempDir,
}

impl Reloading {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queen-proxy.toml");
        fs::write(&path, FIRST).unwrap();
        let world = World::builder().recorder().admin().config_file(&path).start().await;
        let tenant = world.tenant("acme").await;
        Self { world, tenant, path, outcomes: [0, 0], _folder: folder }
    }

    /// Puts these lines into the file and waits for what becomes of them.
    async fn reload(&mut self, lines: &str, ok: bool) {
        let names: Vec<&str> = lines.lines().filter_map(|line| Some(line.split_once(" = ")?.0)).collect();
        let kept = FIRST.lines().filter(|line| !names.iter().any(|name| line.starts_with(name)));
        let text = kept.chain(lines.lines()).fold(String::new(), |text, line| text + line + "\n");
        fs::write(&self.path, text).unwrap();
        self.hang_up(ok).await;
    }

    async fn hang_up(&mut self, ok: bool) {
        self.outcomes[usize::from(!ok)] += 1;
        self.world.proxies[0].1.signal(Signal::SIGHUP);
        eventually("the reload", SOON, async || {
            let mut outcomes = [0, 0];
            for (count, outcome) in outcomes.iter_mut().zip(["ok", "refused"]) {
                let series = format!(r#"queen_proxy_config_reloads_total{{outcome="{outcome}"}}"#);
                *count = self.world.figure(&series).await;
            }
            (outcomes == self.outcomes).then_some(())
        })
        .await;
    }

    async fn open(&self) -> Socket {
        Socket::open(self.world.proxies[0].0).await
    }

    fn get(&self, path: &str) -> String {
        format!("GET {path} HTTP/1.1\r\n{}\r\n", self.tenant.headers())
    }

    /// The status of a request on a connection of its own, which has to come soon.
    async fn status(&self, request: String) -> u16 {
        let mut socket = self.open().await;
        timeout(LATE, socket.ask(request)).await.expect("an answer in time").status
    }

    fn recorder(&self) -> &Recorder {
        self.world.recorder()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_hold_for_what_begins_after_the_reload() {
    let mut proxy = Reloading::start().await;
    proxy.recorder().reply(Reply::Never);
    let mut old = proxy.open().await;
    old.send(proxy.get("/api/v1/kv/ns/k")).await;
    eventually("the cell is asked", SOON, async || (proxy.recorder().count() == 1).then_some(())).await;
    proxy.reload("upstream_timeout_ms = 300\nlongpoll_max_ms = 300\nbody_timeout_ms = 300", true).await;
    assert_eq!(proxy.status(proxy.get("/api/v1/kv/ns/k")).await, 504);
    assert_eq!(proxy.status(proxy.get("/api/v1/pop/queue/q?wait=true&timeout=50000")).await, 504);
    let half =
        format!("POST /api/v1/push HTTP/1.1\r\n{}Content-Length: 99\r\n\r\n{{", proxy.tenant.headers());
    assert_eq!(proxy.status(half).await, 408);
    // What began before has the time it was given.
    assert!(timeout(Duration::from_millis(10), old.answer()).await.is_err());
    proxy.reload("head_timeout_ms = 300", true).await;
    let mut slow = proxy.open().await;
    slow.send("GET / HTTP/1.1\r\nHo").await;
    let answer = timeout(LATE, slow.answer()).await.expect("half a head does not stay");
    assert_eq!(answer.unwrap().status, 408);
    proxy.reload("keepalive_ms = 1000", true).await;
    proxy.recorder().reply(Reply::Json("{}"));
    let mut idle = proxy.open().await;
    assert_eq!(idle.ask(proxy.get("/api/v1/kv/ns/k")).await.status, 200);
    assert!(idle.ends_within(LATE).await, "an idle connection does not stay");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_trusted_and_how_many_connections_there_may_be() {
    let mut proxy = Reloading::start().await;
    let told = |proxy: &Reloading| {
        proxy.get("/api/v1/kv/ns/k").replace("\r\n\r\n", "\r\nX-Forwarded-For: 203.0.113.9\r\n\r\n")
    };
    assert_eq!(proxy.status(told(&proxy)).await, 200);
    proxy.reload("trusted_proxies = \"127.0.0.1/32\"", true).await;
    assert_eq!(proxy.status(told(&proxy)).await, 200);
    proxy.reload("trusted_proxies = \"127.0.0.1/32\"\nproxy_protocol = true", true).await;
    let through = format!("PROXY TCP4 198.51.100.7 127.0.0.1 1 2\r\n{}", proxy.get("/api/v1/kv/ns/k"));
    assert_eq!(proxy.status(through).await, 200);
    let seen: Vec<String> =
        proxy.recorder().take().iter().map(|seen| seen.all("x-forwarded-for").join(", ")).collect();
    assert_eq!(seen, ["127.0.0.1", "203.0.113.9, 127.0.0.1", "198.51.100.7"]);

    proxy.reload("max_connections_per_address = 1", true).await;
    let mut first = proxy.open().await;
    assert_eq!(first.ask(proxy.get("/api/v1/kv/ns/k")).await.status, 200);
    assert_eq!(proxy.status(proxy.get("/api/v1/kv/ns/k")).await, 503);
    proxy.reload("max_connections_per_address = 2", true).await;
    assert_eq!(proxy.status(proxy.get("/api/v1/kv/ns/k")).await, 200);
    assert_eq!(first.ask(proxy.get("/api/v1/kv/ns/k")).await.status, 200, "nobody is dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_one_thing_wrong_changes_nothing() {
    let mut proxy = Reloading::start().await;
    proxy.recorder().reply(Reply::Never);
    for wrong in [
        "trusted_proxies = \"300.0.0.1/32\"",
        "keepalive_ms = \"soon\"",
        "no_such_setting = 1",
        "cache_ttl_ms = 12345",
        "max_body_bytes = 1234",
        "= nonsense",
    ] {
        proxy.reload(&format!("upstream_timeout_ms = 300\n{wrong}"), false).await;
        let mut socket = proxy.open().await;
        socket.send(proxy.get("/api/v1/kv/ns/k")).await;
        assert!(timeout(Duration::from_millis(600), socket.answer()).await.is_err(), "{wrong}");
    }
    let log = proxy.world.proxies[0].1.log();
    for name in [
        "QUEEN_PROXY_TRUSTED_PROXIES",
        "QUEEN_PROXY_KEEPALIVE_MS",
        "no_such_setting",
        "these need a restart: QUEEN_PROXY_CACHE_TTL_MS",
    ] {
        assert!(log.contains(name), "{name} is not in\n{log}");
    }
    fs::remove_file(&proxy.path).unwrap();
    proxy.hang_up(false).await;
    // And then one that is right.
    proxy.reload("upstream_timeout_ms = 300", true).await;
    assert_eq!(proxy.status(proxy.get("/api/v1/kv/ns/k")).await, 504);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_follows_the_last_settings() {
    let mut proxy = Reloading::start().await;
    proxy.reload("shutdown_delay_ms = 0\nshutdown_drain_ms = 100", true).await;
    let (_, process) = &mut proxy.world.proxies[0];
    process.signal(Signal::SIGTERM);
    assert!(process.wait(LATE).unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn reloads_under_load_drop_no_request() {
    let mut proxy = Reloading::start().await;
    let (port, request) = (proxy.world.proxies[0].0, proxy.get("/api/v1/kv/ns/k"));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (request, stopped) = (request.clone(), stopped.clone());
            tokio::spawn(async move {
                let mut socket = Socket::open(port).await;
                let mut count = 0_u32;
                while count <= 20 || !*stopped.borrow() {
                    assert_eq!(socket.ask(&request).await.status, 200);
                    count += 1;
                }
                count
            })
        })
        .collect();
    for round in 1..=20 {
        proxy
            .reload(
                &format!("upstream_timeout_ms = {}\nmax_connections = {}", 30_000 + round, 100 + round),
                true,
            )
            .await;
    }
    stop.send(true).unwrap();
    for client in clients {
        assert!(client.await.unwrap() > 20);
    }
}
