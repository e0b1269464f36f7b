//! TLS towards clients, and HTTP/2 over it. The certificates in `tls/` are made for these tests.

use crate::support::{Reply, Socket, Tenant, World, eventually};
use bytes::Bytes;
use h2::client::SendRequest;
use nix::sys::signal::Signal;
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, crypto::ring, version};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use std::{fmt::Display, path::Path, sync::Arc, time::Duration};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufStream},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const LIMIT: Duration = Duration::from_secs(10);
const GET: &str = "GET /api/v1/kv/ns/k HTTP/1.1\r\n";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const PUSHED: &str = r#"queen_proxy_usage_messages_total{op="push"}"#;

pub(crate) fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/tls").join(name)
}

/// A folder with chain and key as the proxy is told to find them.
struct Files(TempDir);

impl Files {
    fn of(kind: &str) -> Self {
        let files = Self(TempDir::new().unwrap());
        files.put(kind, kind);
        files
    }

    fn put(&self, chain: &str, key: &str) {
        std::fs::copy(fixture(&format!("{chain}.pem")), self.path("chain")).unwrap();
        std::fs::copy(fixture(&format!("{key}.key")), self.path("key")).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    async fn world(&self) -> World {
        self.world_with(&[]).await
    }

    async fn world_with(&self, more: &[(&str, &dyn Display)]) -> World {
        let builder = World::builder();
        more.iter()
            .fold(builder, |builder, (name, value)| builder.env(name, value))
            .recorder()
            .admin()
            .env("QUEEN_PROXY_TLS_CERT", self.path("chain"))
            .env("QUEEN_PROXY_TLS_KEY", self.path("key"))
            .env("QUEEN_PROXY_HEAD_TIMEOUT_MS", 1_000)
            .env("QUEEN_PROXY_METER_FLUSH_MS", 100)
            .start()
            .await
    }
}

async fn connect(
    world: &World,
    name: &str,
    protocol: &str,
    versions: &[&'static SupportedProtocolVersion],
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(("127.0.0.1", world.port())).await?;
    stream.set_nodelay(true)?;
    connect_over(stream, name, protocol, versions).await
}

pub(crate) async fn connect_over<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    name: &str,
    protocol: &str,
    versions: &[&'static SupportedProtocolVersion],
) -> std::io::Result<TlsStream<S>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

async fn http1(world: &World, name: &str) -> Socket<TlsStream<TcpStream>> {
    Socket::over(connect(world, name, "http/1.1", &[&version::TLS13]).await.unwrap())
}

/// A client of HTTP/2, and the task of its connection.
async fn http2(world: &World, tenant: &Tenant) -> (SendRequest<Bytes>, tokio::task::JoinHandle<()>) {
    let stream = connect(world, &tenant.host(), "h2", &[&version::TLS13]).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    (sender.ready().await.unwrap(), tokio::spawn(async { drop(connection.await) }))
}

/// The status of an answer over a connection of its own.
pub(crate) async fn get_over_http2(stream: TlsStream<TcpStream>, tenant: &Tenant, path: &str) -> u16 {
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    let _task = tokio::spawn(async { drop(connection.await) });
    let mut sender = sender.ready().await.unwrap();
    let (answer, _) = sender.send_request(head(tenant, "GET", path), true).unwrap();
    answer.await.unwrap().status().as_u16()
}

fn head(tenant: &Tenant, method: &str, path: &str) -> http::Request<()> {
    http::Request::builder()
        .method(method)
        .uri(format!("https://{}{path}", tenant.host()))
        .header("authorization", format!("Bearer {}", tenant.key))
        .body(())
        .unwrap()
}

async fn body_of(answer: http::Response<h2::RecvStream>) -> Vec<u8> {
    let mut body = answer.into_body();
    let mut all = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece.unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        all.extend(piece);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_key_serves_and_a_reload_drops_nobody() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let request = format!("{GET}{}\r\n", acme.headers());
    let mut old = http1(&world, &acme.host()).await;
    let (mut old_http2, _task) = http2(&world, &acme).await;
    let mut ends = Vec::new();
    let mut reloads = 0;
    for kind in ["sec1", "pkcs8", "pkcs1"] {
        if kind != "sec1" {
            files.put(kind, kind);
            world.proxies[0].1.signal(Signal::SIGHUP);
            reloads += 1;
            eventually("the reload", LIMIT, async || {
                let done = world.figure(r#"queen_proxy_config_reloads_total{outcome="ok"}"#).await;
                (done == reloads).then_some(())
            })
            .await;
        }
        ends.push(world.figure("queen_proxy_tls_certificate_expiry_timestamp_seconds").await);
        for version in [&version::TLS12, &version::TLS13] {
            let stream = connect(&world, &acme.host(), "http/1.1", &[version]).await.unwrap();
            let shown = stream.get_ref().1.peer_certificates().unwrap();
            let chain: Vec<_> = CertificateDer::pem_file_iter(fixture(&format!("{kind}.pem")))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(shown, chain, "the whole chain of {kind}");
            assert_eq!(Socket::over(stream).ask(&request).await.status, 200, "{kind}");
        }
        let (mut sender, _task) = http2(&world, &acme).await;
        for sender in [&mut sender, &mut old_http2] {
            let (answer, _) = sender.send_request(head(&acme, "GET", "/api/v1/kv/ns/k"), true).unwrap();
            let answer = answer.await.unwrap();
            assert_eq!(answer.status(), 200, "{kind}");
            assert_eq!(body_of(answer).await, b"{}");
        }
        assert_eq!(old.ask(&request).await.status, 200, "the connection from before goes on");
    }
    assert!(ends[0] > ends[1] && ends[1] > ends[2], "each chain has an end of its own: {ends:?}");
    for seen in world.recorder().take() {
        assert_eq!(seen.all("x-forwarded-proto"), ["https"]);
        assert_eq!(seen.all("x-forwarded-host"), [acme.host()]);
    }
    // What cannot be used changes nothing, and is said.
    let before = world.figure("queen_proxy_tls_certificate_expiry_timestamp_seconds").await;
    for (refused, (chain, key)) in [(1, ("sec1", "pkcs8")), (2, ("pkcs1", "sec1"))] {
        files.put(chain, key);
        world.proxies[0].1.signal(Signal::SIGHUP);
        eventually("the refusal", LIMIT, async || {
            let done = world.figure(r#"queen_proxy_config_reloads_total{outcome="refused"}"#).await;
            (done == refused).then_some(())
        })
        .await;
        assert_eq!(http1(&world, &acme.host()).await.ask(&request).await.status, 200);
    }
    assert_eq!(world.figure("queen_proxy_tls_certificate_expiry_timestamp_seconds").await, before);
    assert!(world.proxies[0].1.log().contains("configuration NOT reloaded"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_the_handshake_did_not_name_is_misdirected() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let ask = async |name: &str, host: &str, key: &str| {
        let request = format!("{GET}Host: {host}\r\nAuthorization: Bearer {key}\r\n\r\n");
        http1(&world, name).await.ask(request).await
    };
    let (own, other) = (acme.host(), globex.host());
    assert_eq!(ask(&own, &own, &acme.key).await.status, 200);
    let upper = own.to_ascii_uppercase();
    assert_eq!(ask(&own, &format!("{upper}.:443"), &acme.key).await.status, 200, "another spelling");
    assert_eq!(ask(&own, "acme-prod.elsewhere.example", &acme.key).await.status, 200, "the same cluster");
    for (name, host) in [(&other, &own), (&"localhost".to_owned(), &own)] {
        let answer = ask(name, host, &acme.key).await;
        assert_eq!((answer.status, answer.code().as_str()), (421, "cluster_unknown"), "{name} {host}");
    }
    // By address there is no name in the handshake; the certificate names none either.
    assert!(connect(&world, "127.0.0.1", "http/1.1", &[&version::TLS13]).await.is_err());
    assert!(world.figure("queen_proxy_tls_handshake_failures_total").await >= 1);
    let (mut sender, _task) = http2(&world, &acme).await;
    let (answer, _) = sender.send_request(head(&globex, "GET", "/api/v1/kv/ns/k"), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 421);
    let (answer, _) = sender.send_request(head(&acme, "GET", "/api/v1/kv/ns/k"), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200, "the connection goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http2_too_a_push_whose_client_left_counts_and_a_poll_is_cancelled() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let body = Bytes::from_static(br#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":2}]}"#);
    let answer = r#"[{"index":0,"status":"queued"},{"index":1,"status":"queued"}]"#;
    let mut expected = 0;
    for way in ["stays", "resets the stream", "drops the connection"] {
        world.recorder().reply(Reply::Kept(answer.to_owned()));
        let seen = world.recorder().count();
        let (mut sender, task) = http2(&world, &acme).await;
        let (answer, mut upload) = sender.send_request(head(&acme, "POST", "/api/v1/push"), false).unwrap();
        upload.send_data(body.clone(), true).unwrap();
        eventually("the push is at the cell", LIMIT, async || {
            (world.recorder().count() > seen).then_some(())
        })
        .await;
        if way == "drops the connection" {
            task.abort();
            let _ = task.await;
        } else if way == "resets the stream" {
            upload.send_reset(h2::Reason::CANCEL);
            drop(answer);
            // What is asked behind the reset shows that it has arrived.
            let (answer, _) = sender.send_request(head(&acme, "GET", "/healthz"), true).unwrap();
            assert_eq!(answer.await.unwrap().status(), 200);
            world.recorder().let_go();
        } else {
            world.recorder().let_go();
            assert_eq!(answer.await.unwrap().status(), 200);
        }
        world.recorder().let_go();
        expected += 2;
        eventually("the messages are counted", LIMIT, async || {
            (world.figure(PUSHED).await >= expected).then_some(())
        })
        .await;
        assert_eq!((world.figure(PUSHED).await, world.recorder().abandoned()), (expected, 0), "{way}");
        // The one task is gone with its connection, the others end theirs now.
        drop(sender);
    }
    world.recorder().reply(Reply::Never);
    for (cancelled, drops) in [(1, false), (2, true)] {
        let seen = world.recorder().count();
        let (mut sender, task) = http2(&world, &acme).await;
        let poll = head(&acme, "GET", "/api/v1/pop/queue/q?wait=true&timeout=30000");
        let (answer, mut stream) = sender.send_request(poll, true).unwrap();
        eventually("the poll is at the cell", LIMIT, async || {
            (world.recorder().count() > seen).then_some(())
        })
        .await;
        if drops {
            task.abort();
        } else {
            stream.send_reset(h2::Reason::CANCEL);
        }
        eventually("the cell's request is cancelled", Duration::from_secs(1), async || {
            (world.recorder().abandoned() == cancelled).then_some(())
        })
        .await;
        drop(answer);
    }
    eventually("nothing is left behind", LIMIT, async || {
        let flying = world.figure("queen_proxy_requests_in_flight").await;
        let connections = world.figure("queen_proxy_client_connections").await;
        (flying == 0 && connections == 0).then_some(())
    })
    .await;
}

/// A request as frames behind a preface.
fn push_in_frames(tenant: &Tenant) -> Vec<u8> {
    let head = payload(
        "{:method=POST;:scheme=https;:authority=HOST;:path=/api/v1/push;authorization=Bearer KEY}",
        tenant,
    );
    let body = br#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":2}]}"#;
    [PREFACE, &frame(4, 0, 0, &[]), &frame(1, 4, 1, &head), &frame(0, 1, 1, body)].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_does_not_end_takes_no_count_from_a_push_before_it() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let answer = r#"[{"index":0,"status":"queued"},{"index":1,"status":"queued"}]"#;
    let began = frame(1, 0, 3, &payload("{:method=GET}", &acme));
    let resets = frame(3, 0, 1, &[0, 0, 0, 8]).repeat(500);
    for (expected, behind) in [(2, began), (4, resets)] {
        world.recorder().reply(Reply::Kept(answer.to_owned()));
        let before = world.recorder().count();
        let mut stream = connect(&world, &acme.host(), "h2", &[&version::TLS13]).await.unwrap();
        stream.write_all(&push_in_frames(&acme)).await.unwrap();
        stream.flush().await.unwrap();
        eventually("the push is at the cell", LIMIT, async || {
            (world.recorder().count() > before).then_some(())
        })
        .await;
        stream.write_all(&behind).await.unwrap();
        stream.flush().await.unwrap();
        // Longer than a head may take.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert_eq!(world.recorder().abandoned(), 0);
        world.recorder().let_go();
        eventually("the messages are counted", LIMIT, async || {
            (world.figure(PUSHED).await == expected).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_has_room_for_what_is_added_to_it() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let answer = r#"[{"index":0,"status":"queued"}]"#;
    world.recorder().reply(Reply::Json(answer));
    let payload = "x".repeat(100_000);
    let body = format!(r#"{{"items":[{{"queue":"q","payload":"{payload}"}}]}}"#);
    // Host, authorization, transfer-encoding; over TLS the scheme is added.
    for (more, status) in [(246, 200), (247, 431), (253, 431)] {
        let request = format!(
            "POST /api/v1/push HTTP/1.1\r\n{}{}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            acme.headers(),
            "x-a: b\r\n".repeat(more),
            body.len()
        );
        let answer = http1(&world, &acme.host()).await.ask(request).await;
        assert_eq!(answer.status, status, "{more}: {}", String::from_utf8_lossy(&answer.body));
        if status == 431 {
            assert_eq!(answer.code(), "invalid_request");
        }
    }
    let seen = world.recorder().take();
    assert_eq!((seen.len(), seen[0].body.len()), (1, body.len()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_polls_over_http2_and_nothing_beside_them() {
    let files = Files::of("sec1");
    let mut world = files
        .world_with(&[("QUEEN_PROXY_SHUTDOWN_DELAY_MS", &300), ("QUEEN_PROXY_SHUTDOWN_DRAIN_MS", &8_000)])
        .await;
    let acme = world.tenant("acme").await;
    let poll = || head(&acme, "GET", "/api/v1/pop/queue/q?wait=true&timeout=30000");
    let (mut sender, _task) = http2(&world, &acme).await;
    // Connections to the cell are used again, and known by then.
    for _ in 0..2 {
        let polls: Vec<_> = (0..3).map(|_| sender.send_request(poll(), true).unwrap().0).collect();
        for poll in polls {
            assert_eq!(poll.await.unwrap().status(), 200);
        }
    }
    let connections = world.recorder().connections();
    let before = world.recorder().count();
    let at_cell = async |count| {
        eventually("the requests are at the cell", LIMIT, async || {
            (world.recorder().count() == before + count).then_some(())
        })
        .await;
    };
    world.recorder().reply(Reply::Never);
    let mut parked: Vec<_> = (0..6).map(|_| sender.send_request(poll(), true).unwrap().0).collect();
    let (mut other, _other_task) = http2(&world, &acme).await;
    parked.push(other.send_request(poll(), true).unwrap().0);
    at_cell(7).await;
    assert!(world.recorder().connections() < connections + 7, "some were used again");
    world.recorder().reply(Reply::Late(Duration::from_millis(1_500)));
    let (running, _) = sender.send_request(head(&acme, "GET", "/api/v1/kv/ns/k"), true).unwrap();
    at_cell(8).await;
    world.proxies[0].1.signal(Signal::SIGTERM);
    for poll in parked {
        let answer = timeout(LIMIT, poll).await.expect("it is told at once").unwrap();
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["retry-after"]),
            (429, &"1".parse().unwrap())
        );
        assert!(String::from_utf8(body_of(answer).await).unwrap().contains("rate_limited"));
    }
    assert_eq!(timeout(LIMIT, running).await.unwrap().unwrap().status(), 200, "it goes to its end");
    assert_eq!(world.recorder().abandoned(), 7);
    let status = world.proxies[0].1.wait(LIMIT).expect("it ends");
    assert!(status.success(), "{status}");
}

/// A cell's answer may wait for the client; a client that takes none of it may not keep anything for ever.
#[tokio::test(flavor = "multi_thread")]
async fn who_opens_no_window_loses_the_request() {
    let files = Files::of("sec1");
    let world = files
        .world_with(&[("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", &1_500), ("QUEEN_PROXY_KEEPALIVE_MS", &1_000)])
        .await;
    let acme = world.tenant("acme").await;
    let stored = |count: usize| {
        let of = |index| serde_json::json!({"index": index, "status": "queued"});
        serde_json::Value::from((0..count).map(of).collect::<Vec<_>>()).to_string()
    };
    let get = "{:method=GET;:scheme=https;:authority=HOST;:path=PATH;authorization=Bearer KEY}";
    let requests = |path: &str| -> Vec<u8> {
        let head = payload(&get.replace("PATH", path), &acme);
        (0..20_u32).flat_map(|number| frame(1, 5, 2 * number + 1, &head)).collect()
    };
    let polls = requests("/api/v1/pop/queue/q?wait=true&timeout=30000");
    let no_window = frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00");
    let push = push_in_frames(&acme)[PREFACE.len() + 9..].to_vec();
    let large = stored(20_000);
    let mut counted = 0;
    for (settings, requests, answer, pushed) in [
        (&no_window, requests("/api/v1/kv/ns/k"), "{}".to_owned(), 0),
        (&no_window, polls.clone(), r#"{"messages":[]}"#.to_owned(), 0),
        (&frame(4, 0, 0, &[]), polls, large, 0),
        (&no_window, requests("/healthz"), String::new(), 0),
        (&no_window, push.clone(), stored(2), 2),
    ] {
        world.recorder().reply(Reply::Text(200, answer));
        let mut stream = connect(&world, &acme.host(), "h2", &[&version::TLS13]).await.unwrap();
        stream.write_all(&[PREFACE, settings, &requests].concat()).await.unwrap();
        stream.flush().await.unwrap();
        eventually("the requests have come", LIMIT, async || {
            (world.figure("queen_proxy_requests_in_flight").await > 0).then_some(())
        })
        .await;
        eventually("nothing is held", LIMIT, async || {
            let flying = world.figure("queen_proxy_requests_in_flight").await;
            let parked = world.figure("queen_proxy_parked_pops").await;
            let connections = world.figure("queen_proxy_client_connections").await;
            (flying == 0 && parked == 0 && connections == 0).then_some(())
        })
        .await;
        counted += pushed;
        eventually("the messages are counted", LIMIT, async || {
            (world.figure(PUSHED).await == counted).then_some(())
        })
        .await;
        drop(stream);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_requests_at_a_time_than_were_allowed_are_refused_and_no_others() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Kept("{}".to_owned()));
    let head = payload("{GET}", &acme);
    let mut stream = connect(&world, &acme.host(), "h2", &[&version::TLS13]).await.unwrap();
    let requests: Vec<u8> = (0..103).flat_map(|number| frame(1, 5, 2 * number + 1, &head)).collect();
    stream.write_all(&[PREFACE, &frame(4, 0, 0, &[]), &requests].concat()).await.unwrap();
    stream.flush().await.unwrap();
    for _ in 0..3 {
        assert_eq!(timeout(LIMIT, outcome_of(&mut stream)).await.unwrap(), "reset 7");
    }
    eventually("a hundred are at the cell", LIMIT, async || (world.recorder().count() == 100).then_some(()))
        .await;
    world.recorder().let_go();
    for _ in 0..100 {
        assert_eq!(timeout(LIMIT, outcome_of(&mut stream)).await.unwrap(), "200");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balancer_says_in_front_of_tls_whose_connection_it_is() {
    let files = Files::of("sec1");
    let world = files
        .world_with(&[
            ("QUEEN_PROXY_PROXY_PROTOCOL", &"true"),
            ("QUEEN_PROXY_TRUSTED_PROXIES", &"127.0.0.2"),
            ("QUEEN_PROXY_KEEPALIVE_MS", &1_000),
        ])
        .await;
    let acme = world.tenant("acme").await;
    let from = async |address: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
        socket.connect(([127, 0, 0, 1], world.port()).into()).await.unwrap()
    };
    let version_2 =
        [&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c"[..], &[192, 0, 2, 2, 127, 0, 0, 1, 1, 2, 3, 4]].concat();
    // With more of it than is read.
    let long =
        [&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x10"[..], &[192, 0, 2, 3, 127, 0, 0, 1, 1, 2, 3, 4, 4, 0, 1, 0]]
            .concat();
    for (header, address) in [
        (&b"PROXY TCP4 192.0.2.1 127.0.0.1 56324 443\r\n"[..], "192.0.2.1"),
        (&version_2, "192.0.2.2"),
        (&long, "192.0.2.3"),
    ] {
        for protocol in ["http/1.1", "h2"] {
            // On its own, and in one packet with the beginning of TLS.
            for flush in [true, false] {
                let mut stream = BufStream::new(from("127.0.0.2").await);
                stream.write_all(header).await.unwrap();
                if flush {
                    stream.flush().await.unwrap();
                }
                let stream = connect_over(stream, &acme.host(), protocol, &[&version::TLS13]).await.unwrap();
                if protocol == "h2" {
                    let (mut sender, connection) = h2::client::handshake(stream).await.unwrap();
                    let task = tokio::spawn(async { drop(connection.await) });
                    let (answer, _) =
                        sender.send_request(head(&acme, "GET", "/api/v1/kv/ns/k"), true).unwrap();
                    assert_eq!(answer.await.unwrap().status(), 200, "{address}");
                    task.abort();
                } else {
                    let mut socket = Socket::over(stream);
                    let request = format!("{GET}{}X-Forwarded-For: 6.6.6.6\r\n\r\n", acme.headers());
                    assert_eq!(socket.ask(request).await.status, 200, "{address}");
                }
                let seen = world.recorder().take();
                assert_eq!(seen[0].all("x-forwarded-for"), [address], "{protocol}");
                assert_eq!(seen[0].all("x-forwarded-proto"), ["https"]);
            }
        }
    }
    // Without a header a balancer gets no handshake, and with one nobody else.
    for (address, header) in [("127.0.0.2", &b""[..]), ("127.0.0.1", &version_2)] {
        let mut stream = from(address).await;
        stream.write_all(header).await.unwrap();
        assert!(connect_over(stream, &acme.host(), "h2", &[&version::TLS13]).await.is_err(), "{address}");
    }
    assert_eq!(
        http1(&world, &acme.host()).await.ask(format!("{GET}{}\r\n", acme.headers())).await.status,
        200
    );
    eventually("no connection is left behind", LIMIT, async || {
        (world.figure("queen_proxy_client_connections").await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_says_nothing_is_given_up() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let mut silent = TcpStream::connect(("127.0.0.1", world.port())).await.unwrap();
    let mut byte = [0; 1];
    let end = timeout(LIMIT, silent.read(&mut byte)).await.expect("no handshake");
    assert!(matches!(end, Ok(0) | Err(_)));
    let mut silent = connect(&world, &acme.host(), "h2", &[&version::TLS13]).await.unwrap();
    let mut all = Vec::new();
    timeout(LIMIT, silent.read_to_end(&mut all)).await.expect("no preface").unwrap_or_default();
}

/// The payload of a frame of the corpus.
fn payload(text: &str, tenant: &Tenant) -> Vec<u8> {
    if let Some(length) = text.strip_prefix("ZEROS ") {
        return vec![0; length.parse().unwrap()];
    }
    let Some((before, (block, behind))) =
        text.split_once('{').map(|(before, rest)| (before, rest.split_once('}').unwrap()))
    else {
        return unescaped(text);
    };
    let block = match block {
        "GET" => ":method=GET;:scheme=https;:authority=HOST;:path=/api/v1/kv/ns/k;authorization=Bearer KEY",
        "POST" => ":method=POST;:scheme=https;:authority=HOST;:path=/api/v1/ack;authorization=Bearer KEY",
        own => own,
    };
    let mut out = unescaped(before);
    for header in block.split(';') {
        // A name ends at the first sign behind the colon of a pseudo-header.
        let (name, value) = header.split_once('=').unwrap();
        let value = value.replace("HOST", &tenant.host()).replace("KEY", &tenant.key);
        // Never indexed, nothing compressed.
        out.push(0x10);
        for text in [name.as_bytes(), &unescaped(&value)] {
            assert!(text.len() < 127);
            out.push(u8::try_from(text.len()).unwrap());
            out.extend(text);
        }
    }
    out.extend(unescaped(behind));
    out
}

fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        match part.as_bytes() {
            [b'r', rest @ ..] => out.extend([b"\r", rest].concat()),
            [b'n', rest @ ..] => out.extend([b"\n", rest].concat()),
            [b'x', _, _, rest @ ..] => {
                out.push(u8::from_str_radix(&part[1..3], 16).unwrap());
                out.extend(rest);
            }
            _ => panic!("{text}"),
        }
    }
    out
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The next frame: type, flags, payload.
async fn next_frame(stream: &mut TlsStream<TcpStream>) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload).await.ok()?;
    Some((head[3], head[4], payload))
}

/// What the proxy says to it at last.
async fn outcome_of(stream: &mut TlsStream<TcpStream>) -> String {
    let code = |payload: &[u8]| u32::from_be_bytes(*payload.first_chunk().unwrap());
    while let Some((kind, flags, payload)) = next_frame(stream).await {
        match (kind, flags & 1) {
            // The first header is the status, as one of HPACK's static table or in digits.
            (1, _) => return if payload[0] == 0x88 { "200" } else { "other status" }.to_owned(),
            (3, _) => return format!("reset {}", code(&payload)),
            (6, 1) => return "pong".to_owned(),
            (7, _) => return format!("goaway {}", code(&payload[4..])),
            _ => {}
        }
    }
    "end".to_owned()
}

/// Waits until an answer has ended.
async fn one_answer(stream: &mut TlsStream<TcpStream>) {
    while let Some((kind, flags, _)) = next_frame(stream).await {
        if matches!(kind, 0 | 1) && flags & 1 == 1 {
            return;
        }
    }
}

/// The steps of a case, each the bytes that are sent before an answer is awaited, or the end.
fn steps(frames: &str, tenant: &Tenant) -> Vec<Vec<u8>> {
    let mut steps = vec![Vec::new()];
    if let Some(bytes) = frames.strip_prefix("PREFACE ") {
        return vec![unescaped(bytes)];
    }
    steps[0].extend([PREFACE, &frame(4, 0, 0, &[])].concat());
    // A space belongs to a payload unless a frame begins behind it.
    let mut texts: Vec<String> = Vec::new();
    for word in frames.split(' ') {
        let begins = word == "THEN"
            || word.split_once(':').is_some_and(|(head, _)| {
                head.split('.').count() == 3 && head.bytes().all(|b| b.is_ascii_digit() || b == b'.')
            });
        match texts.last_mut().filter(|_| !begins) {
            Some(last) => *last = format!("{last} {word}"),
            None => texts.push(word.to_owned()),
        }
    }
    for text in texts {
        let Some((head, body)) = text.split_once(':') else {
            steps.push(Vec::new());
            continue;
        };
        let numbers: Vec<u32> = head.split('.').map(|number| number.parse().unwrap()).collect();
        let (kind, flags) = (u8::try_from(numbers[0]).unwrap(), u8::try_from(numbers[1]).unwrap());
        steps.last_mut().unwrap().extend(frame(kind, flags, numbers[2], &payload(body, tenant)));
    }
    steps
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_are_wrong_are_refused_and_reach_no_cell() {
    let files = Files::of("sec1");
    let world = files.world().await;
    let acme = world.tenant("acme").await;
    let (mut wrong, mut cases) = (Vec::new(), 0);
    for line in include_str!("corpus/http2.txt").lines().filter(|line| !line.starts_with('#')) {
        let [name, expected, frames] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("three fields: {line}")
        };
        cases += 1;
        let mut stream = connect(&world, &acme.host(), "h2", &[&version::TLS13]).await.unwrap();
        let steps = steps(frames, &acme);
        for (number, step) in steps.iter().enumerate() {
            if number > 0 {
                timeout(LIMIT, one_answer(&mut stream)).await.expect(name);
            }
            let _ = stream.write_all(step).await;
            let _ = stream.flush().await;
        }
        let outcome = timeout(LIMIT, outcome_of(&mut stream)).await.unwrap_or_else(|_| "silence".to_owned());
        let (expected, late) = match expected.strip_suffix(" late") {
            Some(expected) => (expected, true),
            None => (expected, false),
        };
        let kind = outcome.trim_end_matches(|end: char| end.is_ascii_digit() || end == ' ');
        let right = match expected {
            "refused" => ["other status", "reset", "goaway", "end"].contains(&kind),
            expected => outcome == expected || kind == expected,
        };
        let at_cell = world.recorder().take().len();
        let answered = steps.len() - 1 + usize::from(outcome == "200") + usize::from(late);
        if !right || at_cell > answered {
            wrong.push(format!("{name}: wanted {expected}, got {outcome}; {at_cell} requests at the cell"));
        }
    }
    assert!(cases >= 130, "{cases}");
    assert!(wrong.is_empty(), "{} of {cases}:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(
        http1(&world, &acme.host()).await.ask(format!("{GET}{}\r\n", acme.headers())).await.status,
        200
    );
}
