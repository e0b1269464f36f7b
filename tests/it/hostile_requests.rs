//! Requests that try to be read in two ways, or to get where they may not (`notes/cases.md` 4–10, 13).

use crate::support::{Socket, World};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn odd_paths_are_no_routes_and_never_reach_the_cell() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let paths = [
        "/api/v1/resources/../system/maintenance",
        "/api/v1/resources/%2e%2e/system/maintenance",
        "/api/v1/resources/%2E%2e/system/maintenance",
        "/api/v1/resources/..%2fsystem/maintenance",
        "/api/v1/resources/..%5csystem/maintenance",
        "/api/v1/resources/..\\system",
        "//api/v1/push",
        "/api//v1/push",
        "/api/v1/push;x",
        "/api/v1/push/",
        "/api/v1/kv/ns/../../push",
        "/api/v1/kv/ns/%2e%2e/x",
        "/api/v1/pop/queue/q%00",
        "/api/v1/pop/queue/caf\u{e9}",
        "/api/v1/system/kv-timers",
        "/internal/anything",
    ];
    for method in ["GET", "POST", "DELETE"] {
        for path in paths {
            let answer = world.ask(&format!("{method} {path}"), &acme.headers(), "").await;
            assert_eq!((answer.status, answer.code().as_str()), (404, "route_blocked"), "{method} {path}");
        }
    }
    let fragment = world.ask("PUT /api/v1/kv/ns/k#x", &acme.headers(), "{}").await;
    assert_eq!((fragment.status, fragment.code().as_str()), (400, "invalid_request"));
    // The absolute form is read for its path; the authority has to be the Host.
    let absolute = format!("GET http://{}/api/v1/system/maintenance", acme.host());
    assert_eq!(world.ask(&absolute, &acme.headers(), "").await.status, 404);
    assert_eq!(world.recorder().count(), 0);
    let absolute = format!("GET http://{}/api/v1/kv/ns/k?x=1", acme.host());
    assert_eq!(world.ask(&absolute, &acme.headers(), "").await.status, 200);
    assert_eq!(world.recorder().take()[0].line, "GET /api/v1/kv/ns/k?x=1", "in origin form");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_cluster_has_many_spellings_and_no_spelling_has_many_clusters() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let auth = format!("Authorization: Bearer {}\r\n", acme.key);
    for host in [
        "acme-prod.q.example",
        "ACME-PROD.q.example",
        "acme-prod.q.example:443",
        "acme-prod.q.example.",
        "acme-prod",
    ] {
        let answer = world.ask("GET /api/v1/kv/ns/k", &format!("Host: {host}\r\n{auth}"), "").await;
        assert_eq!(answer.status, 200, "{host}");
    }
    world.recorder().take();
    // With the clusters locked away, an answer proves that the database was not asked.
    let mut lock = world.control().await;
    sqlx::query("BEGIN").execute(&mut lock).await.unwrap();
    sqlx::query("LOCK TABLE queen_proxy.clusters IN ACCESS EXCLUSIVE MODE").execute(&mut lock).await.unwrap();
    let long = format!("{}.q.example", "a".repeat(64));
    let mut bodies = std::collections::HashSet::new();
    for host in [
        "",
        "acme-prod.q.example, globex-prod.q.example",
        "acme-prod.q.example/x",
        ".q.example",
        ".",
        "аcme-prod.q.example",
        &long,
        "acme_prod.q.example",
        "-.q.example",
        "acme-prod-.q.example",
    ] {
        let asked = tokio::time::Instant::now();
        let answer = world.ask("GET /api/v1/kv/ns/k", &format!("Host: {host}\r\n{auth}"), "").await;
        // Pingora refuses what is no authority at all before we see it.
        if answer.status != 400 {
            assert_eq!((answer.status, answer.code().as_str()), (421, "cluster_unknown"), "{host:?}");
            bodies.insert(answer.body);
        }
        assert!(asked.elapsed() < Duration::from_secs(2), "{host:?} waited for the database");
    }
    assert_eq!(bodies.len(), 1, "one uniform refusal");
    let two = format!("Host: acme-prod.q.example\r\nHost: globex-prod.q.example\r\n{auth}");
    let mut socket = Socket::open(world.port()).await;
    socket.send(format!("GET /api/v1/kv/ns/k HTTP/1.1\r\n{two}\r\n")).await;
    assert_eq!(socket.answer().await.unwrap().status, 400);
    assert!(socket.ends_within(Duration::from_secs(5)).await);
    assert_eq!(world.recorder().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ambiguous_framing_is_refused_and_the_connection_ends() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let hidden = "0\r\n\r\nGET /api/v1/kv/ns/hidden HTTP/1.1\r\nHost: x\r\n\r\n";
    let framings = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Transfer-Encoding: identity, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\n",
        "Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    ];
    for framing in framings {
        let mut socket = Socket::open(world.port()).await;
        socket.send(format!("POST /api/v1/kv HTTP/1.1\r\n{}{framing}\r\n{hidden}", acme.headers())).await;
        let answer = socket.answer().await.unwrap();
        assert_eq!(answer.status, 400, "{framing}");
        // An end, not a second answer.
        assert!(socket.answer().await.is_none(), "{framing}");
    }
    assert_eq!(world.recorder().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_header_changes_no_decision() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let host = format!("Host: {}\r\n", acme.host());
    let plain = world.ask("GET /api/v1/kv/ns/k", &host, "").await;
    let upgrade = world.ask("GET /api/v1/kv/ns/k", &format!("{host}Connection: upgrade\r\n"), "").await;
    assert_eq!((plain.status, &plain.body), (401, &upgrade.body));
    assert_eq!(plain.status, upgrade.status);
    // Naming Authorization takes it from nobody: neither us nor the cell.
    let named = format!("{}Connection: authorization, x-queen-tenant\r\n", acme.headers());
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &named, "").await.status, 200);
    let seen = world.recorder().take().pop().unwrap();
    assert_eq!(seen.all("authorization"), [format!("Bearer {}", world.cell_secret)]);
    assert_eq!(seen.all("x-queen-tenant").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_close_do_not_cost_connections_to_the_cell() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let headers = format!("{}Connection: close\r\n", acme.headers());
    for _ in 0..1000 {
        assert_eq!(world.ask("GET /api/v1/kv/ns/k", &headers, "").await.status, 200);
    }
    assert_eq!(world.recorder().count(), 1000);
    // One after the other: at most one connection for each of the two worker threads, and a few
    // that met their successor.
    assert!(world.recorder().connections() <= 8, "{} connections", world.recorder().connections());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_body_of_a_refused_request_is_never_read_as_a_request() {
    let world = World::builder().recorder().env("QUEEN_PROXY_MAX_BODY_BYTES", 1000).start().await;
    let acme = world.tenant("acme").await;
    world.sql(&format!("SELECT queen_proxy.set_cluster_status('{}', 'push_blocked')", acme.cluster)).await;
    let globex = world.tenant("globex").await;
    let smuggled = format!("GET /api/v1/kv/ns/smuggled HTTP/1.1\r\n{}\r\n", globex.headers());
    let filler = |size: usize| format!("{smuggled}{}", "x".repeat(size - smuggled.len()));
    let anonymous = format!("Host: {}\r\n", globex.host());
    let mut kept_alive = 0;
    for size in [smuggled.len(), 10_000, 200_000, 3_000_000] {
        let body = filler(size);
        let chunked = format!("{size:x}\r\n{body}\r\n0\r\n\r\n");
        let cases = [
            (401, "PUT /api/v1/kv/ns/k", anonymous.clone()),
            (404, "POST /api/v1/system/x", globex.headers()),
            (403, "PUT /api/v1/kv/ns/k", acme.headers()),
            (413, "POST /api/v1/kv", acme.headers()),
            (421, "POST /api/v1/kv", "Host: nobody\r\n".to_owned()),
        ];
        for (status, line, headers) in cases {
            for (framing, body) in [
                (format!("Content-Length: {size}\r\n"), &body),
                ("Transfer-Encoding: chunked\r\n".to_owned(), &chunked),
            ] {
                if status == 413 && size < 1000 {
                    continue;
                }
                let mut socket = Socket::open(world.port()).await;
                let request = format!("{line} HTTP/1.1\r\n{headers}{framing}\r\n{body}");
                // A write fails when the proxy has already ended the connection; the answer is there.
                socket.send(&request).await;
                let Some(answer) = socket.answer().await else {
                    assert!(size > 1 << 20, "no answer to {line} with {size} bytes");
                    continue;
                };
                assert_eq!(answer.status, status, "{line} with {size} bytes, {framing}");
                socket.send(format!("GET /api/v1/kv/ns/second HTTP/1.1\r\n{}\r\n", globex.headers())).await;
                if let Some(second) = socket.answer().await {
                    assert_eq!(second.status, 200);
                    kept_alive += 1;
                }
            }
        }
    }
    assert!(kept_alive > 10, "small refused bodies do not cost the connection: {kept_alive}");
    for seen in world.recorder().take() {
        assert_eq!(seen.line, "GET /api/v1/kv/ns/second");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_our_own_keep_the_connection() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let mut socket = Socket::open(world.port()).await;
    for _ in 0..3 {
        let refused =
            socket.ask(format!("GET /api/v1/kv/ns/k HTTP/1.1\r\nHost: {}\r\n\r\n", acme.host())).await;
        assert_eq!(refused.status, 401);
        let health = socket.ask("GET /healthz HTTP/1.1\r\nHost: anything\r\n\r\n").await;
        assert_eq!(
            health.json(),
            serde_json::json!({"enforce": true, "shared_hosts": 0, "status": "ok", "tenant_header": true})
        );
        socket.send("HEAD /healthz HTTP/1.1\r\nHost: anything\r\n\r\n").await;
        assert_eq!(socket.answer_to_head().await.unwrap().status, 200);
        let wrong = socket.ask("DELETE /healthz HTTP/1.1\r\nHost: anything\r\n\r\n").await;
        assert_eq!((wrong.status, wrong.code().as_str()), (405, "method_not_allowed"));
        assert_eq!(wrong.header("allow"), Some("GET, HEAD"));
        let served = socket.ask(format!("GET /api/v1/kv/ns/k HTTP/1.1\r\n{}\r\n", acme.headers())).await;
        assert_eq!(served.status, 200);
    }
}
