//! Behind a load balancer: whose connection it is, and how one proxy follows the other (`notes/cases.md` 16).

use crate::support::{Process, Reply, Socket, Tenant, World, eventually, free_port};
use nix::sys::signal::Signal;
use std::{
    os::fd::OwnedFd,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::net::{TcpSocket, TcpStream};

const LIMIT: Duration = Duration::from_secs(10);
const GET: &str = "GET /api/v1/kv/ns/k";

async fn from(address: &str, port: u16) -> Socket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
    Socket::over(socket.connect(format!("127.0.0.1:{port}").parse().unwrap()).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balancer_says_whose_connection_it_is_and_nobody_else_can() {
    let world = World::builder()
        .recorder()
        .env("QUEEN_PROXY_PROXY_PROTOCOL", "true")
        .env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.2")
        .env("QUEEN_PROXY_HEAD_TIMEOUT_MS", 500)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let request = format!("{GET} HTTP/1.1\r\n{}X-Forwarded-For: 6.6.6.6\r\n\r\n", acme.headers());
    let version_1 = b"PROXY TCP4 192.0.2.1 127.0.0.1 56324 443\r\n".to_vec();
    let mut version_2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c".to_vec();
    version_2.extend([192, 0, 2, 2, 127, 0, 0, 1, 1, 2, 3, 4]);
    let itself = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00".to_vec();
    // What it says of itself it says as a trusted proxy, in headers.
    for (header, address) in
        [(version_1.clone(), "192.0.2.1"), (version_2, "192.0.2.2"), (itself, "6.6.6.6, 127.0.0.2")]
    {
        let mut socket = from("127.0.0.2", world.port()).await;
        for _ in 0..2 {
            let wire = [header.as_slice(), request.as_bytes()].concat();
            let bytes = if world.recorder().count() == 0 { wire } else { request.clone().into_bytes() };
            assert_eq!(socket.ask(bytes).await.status, 200, "{address}");
        }
        for seen in world.recorder().take() {
            assert_eq!(seen.all("x-forwarded-for"), [address]);
        }
    }
    for silent in [false, true] {
        let mut socket = from("127.0.0.2", world.port()).await;
        if !silent {
            socket.send(&request).await;
        }
        assert!(socket.answer().await.is_none(), "a balancer without a header");
    }
    let mut socket = from("127.0.0.1", world.port()).await;
    assert_eq!(socket.ask(&request).await.status, 200, "others go without");
    assert_eq!(world.recorder().take()[0].all("x-forwarded-for"), ["127.0.0.1"]);
    let mut socket = from("127.0.0.1", world.port()).await;
    assert_eq!(socket.ask([version_1.as_slice(), request.as_bytes()].concat()).await.status, 400);
    assert_eq!(world.recorder().count(), 0);
}

async fn status_of(port: u16, path: &str) -> u16 {
    Socket::open(port).await.ask(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_seen_before_it_happens_and_leaves_nobody_waiting() {
    let mut world = World::builder()
        .recorder()
        .admin()
        .env("QUEEN_PROXY_SHUTDOWN_DELAY_MS", 1_000)
        .env("QUEEN_PROXY_SHUTDOWN_DRAIN_MS", 8_000)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let poll = format!("{GET_POLL} HTTP/1.1\r\n{}\r\n", acme.headers());
    let get = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    world.recorder().reply(Reply::Never);
    let mut parked = Vec::new();
    for behind in ["", "G", &get, &poll].repeat(5) {
        let mut socket = Socket::open(world.port()).await;
        socket.send(&poll).await;
        socket.send(behind).await;
        parked.push(socket);
    }
    let at_cell = async |count| {
        eventually("the requests are at the cell", LIMIT, async || {
            (world.recorder().count() == count).then_some(())
        })
        .await;
    };
    at_cell(20).await;
    world.recorder().reply(Reply::Late(Duration::from_millis(2_500)));
    let mut running = Socket::open(world.port()).await;
    running.send(&get).await;
    at_cell(21).await;
    let mut kept = Socket::open(world.port()).await;
    assert_eq!(status_of(world.admin, "/readyz").await, 200);
    world.proxies[0].1.signal(Signal::SIGTERM);
    let stopped = Instant::now();
    eventually("not ready", Duration::from_millis(800), async || {
        (status_of(world.admin, "/readyz").await == 503).then_some(())
    })
    .await;
    assert_eq!(status_of(world.admin, "/healthz").await, 200, "it lives");
    // Until balancers have noticed, everything goes on; kept connections end with their next answer.
    let served = kept.ask("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((served.status, served.header("connection")), (200, Some("close")));
    for mut socket in parked {
        let answer = socket.answer().await.expect("who waits is told to go elsewhere");
        assert_eq!((answer.status, answer.code().as_str()), (429, "rate_limited"));
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    assert!(stopped.elapsed() >= Duration::from_millis(950), "not before: {:?}", stopped.elapsed());
    assert!(stopped.elapsed() < Duration::from_millis(2_400), "nor later: {:?}", stopped.elapsed());
    assert_eq!(world.ask(GET_POLL, &acme.headers(), "").await.status, 429, "nor does a new one wait");
    assert_eq!(running.answer().await.expect("what runs ends").status, 200);
    let status = world.proxies[0].1.wait(LIMIT).expect("it ends");
    assert!(status.success(), "{status}");
}

const GET_POLL: &str = "GET /api/v1/pop/queue/q?wait=true&timeout=30000";

/// A proxy that is started as systemd does with a socket: it is descriptor 3.
fn start_on(socket: &std::net::TcpListener, world: &World, port: u16, folder: &std::path::Path) -> Process {
    let mut environment = world.proxy_environment(port);
    environment.push(("QUEEN_PROXY_SHUTDOWN_DELAY_MS".to_owned(), "300".to_owned()));
    let script = r#"LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" serve 3<&0 </dev/null"#;
    let arguments = ["-c", script, env!("CARGO_BIN_EXE_queen-proxy")];
    let socket = Stdio::from(OwnedFd::from(socket.try_clone().unwrap()));
    Process::start_with("queen-proxy", "/bin/sh", &arguments, &environment, folder, socket)
}

/// Asks again and again, each connection until it is told to close; returns how often.
async fn keep_asking(port: u16, tenant: Tenant, stop: Arc<AtomicBool>, asked: Arc<AtomicUsize>) -> Duration {
    let request = format!("{GET} HTTP/1.1\r\n{}\r\n", tenant.headers());
    let mut longest = Duration::ZERO;
    while !stop.load(SeqCst) {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("a connection");
        let mut socket = Socket::over(stream);
        loop {
            let began = Instant::now();
            assert!(socket.send(&request).await, "a connection ended without notice");
            let answer = socket.answer().await.expect("every request is answered");
            assert_eq!(answer.status, 200);
            longest = longest.max(began.elapsed());
            asked.fetch_add(1, SeqCst);
            if answer.header("connection") == Some("close") || stop.load(SeqCst) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn one_proxy_follows_the_other_on_one_socket_and_no_request_fails() {
    let mut world = World::builder().proxies(0).recorder().start().await;
    world.prepare_control_plane().await;
    world.cell_id = world.add_cell("cell", world.cell_port).await;
    let acme = world.tenant("acme").await;
    let folder = tempfile::TempDir::new().unwrap();
    let port = free_port();
    let socket = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut proxy = start_on(&socket, &world, port, folder.path());
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..16)
        .map(|_| tokio::spawn(keep_asking(port, acme.clone(), Arc::clone(&stop), Arc::clone(&asked))))
        .collect();
    for _ in 0..crate::support::rounds(2) {
        let before = asked.load(SeqCst);
        eventually("requests are served", Duration::from_secs(30), async || {
            (asked.load(SeqCst) > before + 200).then_some(())
        })
        .await;
        proxy.signal(Signal::SIGTERM);
        let status = proxy.wait(LIMIT).expect("it ends");
        assert!(status.success(), "{status}");
        proxy = start_on(&socket, &world, port, folder.path());
    }
    let before = asked.load(SeqCst);
    eventually("the last one serves", Duration::from_secs(30), async || {
        (asked.load(SeqCst) > before + 100).then_some(())
    })
    .await;
    stop.store(true, SeqCst);
    for client in clients {
        let longest = client.await.unwrap();
        assert!(longest < LIMIT, "{longest:?}");
    }
}
