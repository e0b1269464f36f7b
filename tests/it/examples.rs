//! The load balancers of `conf/` as they are, but for addresses and files, with Debian's HAProxy and nginx.

use crate::{
    support::{Process, Socket, Tenant, World, eventually, free_port},
    tls::{connect_over, fixture, get_over_http2},
};
use nix::sys::signal::Signal;
use rustls::version;
use std::{fs, path::Path, time::Duration};
use tempfile::TempDir;
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;

const LIMIT: Duration = Duration::from_secs(20);
/// Where the balancer's connections come from, and its client's.
const BALANCER: &str = "127.0.0.2";
const CLIENT: &str = "127.0.0.9";

/// An example with each of these replaced, all of which must be there.
fn example(name: &str, replacements: &[(&str, String)]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf").join(name);
    let mut text = fs::read_to_string(path).unwrap();
    for (old, new) in replacements {
        assert!(text.contains(old), "{name} has no {old}");
        text = text.replace(old, new);
    }
    text
}

async fn connect(port: u16, tenant: &Tenant, protocol: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(format!("{CLIENT}:0").parse().unwrap())?;
    let stream = socket.connect(format!("127.0.0.1:{port}").parse().unwrap()).await?;
    connect_over(stream, &tenant.host(), protocol, &[&version::TLS13]).await
}

/// Requests by both protocols arrive, with the client's address and none that it makes up.
async fn serves(world: &World, tenant: &Tenant, port: u16) {
    let request = format!(
        "GET /api/v1/kv/ns/k HTTP/1.1\r\n{}X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Proto: gopher\r\n\r\n",
        tenant.headers()
    );
    let ask = async || {
        let mut socket = Socket::over(connect(port, tenant, "http/1.1").await.ok()?);
        Some(socket.ask(&request).await.status)
    };
    // A proxy that is not there is known as such only after some questions.
    let mut in_a_row = 0;
    eventually("the balancer serves", LIMIT, async || {
        in_a_row = if ask().await == Some(200) { in_a_row + 1 } else { 0 };
        (in_a_row == 6).then_some(())
    })
    .await;
    world.recorder().take();
    assert_eq!(ask().await, Some(200));
    let stream = connect(port, tenant, "h2").await.unwrap();
    assert_eq!(get_over_http2(stream, tenant, "/api/v1/kv/ns/k").await, 200);
    let seen = world.recorder().take();
    assert_eq!(seen.len(), 2, "each was sent once");
    for request in seen {
        assert_eq!(request.all("x-forwarded-for"), [format!("{CLIENT}, {BALANCER}")]);
        assert_eq!(request.all("x-forwarded-proto"), ["https"]);
        assert_eq!(request.all("x-forwarded-host"), [tenant.host()]);
    }
}

/// The chain and the key in one file, as HAProxy wants it.
fn certificate(folder: &Path) {
    let parts = ["pkcs8.pem", "pkcs8.key"].map(|name| fs::read_to_string(fixture(name)).unwrap());
    fs::write(folder.join("queen.pem"), parts.concat()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_haproxy_of_the_example_serves_and_asks_who_is_ready() {
    let world = World::builder()
        .recorder()
        .admin()
        .env("QUEEN_PROXY_TRUSTED_PROXIES", BALANCER)
        .env("QUEEN_PROXY_SHUTDOWN_DELAY_MS", 30_000)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("certs")).unwrap();
    certificate(&folder.path().join("certs"));
    let port = free_port();
    // The second proxy is not there, which the first question shows.
    let text = example(
        "haproxy.cfg",
        &[
            ("maxconn 40000", "maxconn 400".to_owned()),
            (
                ":443 ssl crt /etc/haproxy/certs/",
                format!("127.0.0.1:{port} ssl crt {}/certs/", folder.path().display()),
            ),
            ("balance leastconn", format!("balance leastconn\n    source {BALANCER}")),
            ("port 9711", format!("port {}", world.admin)),
            ("10.0.0.11:6711", format!("127.0.0.1:{}", world.port())),
            ("10.0.0.12:6711", format!("127.0.0.1:{} port {}", free_port(), free_port())),
        ],
    );
    let config = folder.path().join("haproxy.cfg");
    fs::write(&config, text).unwrap();
    let _haproxy =
        Process::start("haproxy", "haproxy", &["-f", config.to_str().unwrap()], &[], folder.path());
    serves(&world, &acme, port).await;
    // A proxy that is about to stop still serves, and is not asked any more.
    world.proxies[0].1.signal(Signal::SIGTERM);
    let request = format!("GET /api/v1/kv/ns/k HTTP/1.1\r\n{}\r\n", acme.headers());
    eventually("no proxy is ready", LIMIT, async || {
        let mut socket = Socket::over(connect(port, &acme, "http/1.1").await.ok()?);
        (socket.ask(&request).await.status == 503).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nginx_of_the_example_serves() {
    let world = World::builder().recorder().env("QUEEN_PROXY_TRUSTED_PROXIES", BALANCER).start().await;
    let acme = world.tenant("acme").await;
    let folder = TempDir::new().unwrap();
    certificate(folder.path());
    let (port, path) = (free_port(), folder.path().display().to_string());
    let proxy = format!("127.0.0.1:{}", world.port());
    let scratch: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("    {kind}_temp_path {path}/{kind};\n"))
        .concat();
    let text = example(
        "nginx.conf",
        &[
            ("65536", "1024".to_owned()),
            ("16384", "512".to_owned()),
            ("http {\n", format!("http {{\n    access_log off;\n{scratch}")),
            ("listen 443", format!("listen 127.0.0.1:{port}")),
            ("/etc/nginx/queen.pem", format!("{path}/queen.pem")),
            ("/etc/nginx/queen.key", fixture("pkcs8.key").display().to_string()),
            ("10.0.0.11:6711", proxy.clone()),
            ("10.0.0.12:6711", proxy),
            ("proxy_http_version", format!("proxy_bind {BALANCER};\n            proxy_http_version")),
        ],
    );
    let config = folder.path().join("nginx.conf");
    fs::write(&config, text).unwrap();
    let global = format!("daemon off; pid {path}/pid; error_log stderr;");
    let arguments = ["-p", &path, "-c", config.to_str().unwrap(), "-g", &global];
    let _nginx = Process::start("nginx", "nginx", &arguments, &[], folder.path());
    serves(&world, &acme, port).await;
}
