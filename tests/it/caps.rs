//! The caps of a plan as a tenant meets them.

use crate::support::{Answer, Socket, Tenant, World, WorldBuilder};
use serde_json::json;

/// A world with a recording cell, and a tenant on plan `pro` whose caps are these.
async fn world(builder: WorldBuilder, overrides: &str) -> (World, Tenant) {
    let world = builder.recorder().start().await;
    let tenant = world.tenant("acme").await;
    set(&world, &tenant, overrides).await;
    (world, tenant)
}

/// Sets all overrides of a tenant's cluster.
async fn set(world: &World, tenant: &Tenant, overrides: &str) {
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{overrides}')", tenant.cluster)).await;
}

fn outcome(answer: &Answer) -> (u16, String) {
    (answer.status, if answer.status < 300 { String::new() } else { answer.code() })
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

const KIB: usize = 1 << 10;

fn push(items: usize, payload: &str) -> String {
    let items: Vec<_> = (0..items).map(|_| json!({"queue": "q", "payload": payload})).collect();
    json!({ "items": items }).to_string()
}

/// A body in one of the three framings.
fn framed(line: &str, headers: &str, body: &[u8], framing: &str) -> Vec<u8> {
    let mut request = format!("{line} HTTP/1.1\r\n{headers}").into_bytes();
    match framing {
        "length" => {
            request.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
            request.extend(body);
        }
        "expect" => {
            request.extend(format!("Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len()).bytes());
            request.extend(body);
        }
        _ => {
            request.extend(b"Transfer-Encoding: chunked\r\n\r\n");
            for piece in body.chunks(7_001) {
                request.extend(format!("{:x}\r\n", piece.len()).bytes());
                request.extend(piece);
                request.extend(b"\r\n");
            }
            request.extend(b"0\r\n\r\n");
        }
    }
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inspected_body_arrives_as_it_was_sent_in_every_framing_and_size() {
    let (world, tenant) = world(World::builder(), "{}").await;
    for size in [1, 2, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 128 * KIB, 1 << 20, 16 << 20] {
        // No JSON at the smallest sizes: those go on as well.
        let mut body = br#"{"items":[]"#.to_vec();
        body.resize(size.max(1) - 1, b' ');
        body.push(b'}');
        body.truncate(size);
        for framing in ["length", "expect", "chunked"] {
            let mut socket = Socket::open(world.port()).await;
            let answer = socket.ask(framed("POST /api/v1/push", &tenant.headers(), &body, framing)).await;
            assert_eq!(answer.status, 200, "{size} {framing}");
            let seen = world.recorder().take();
            assert_eq!(seen.len(), 1, "{size} {framing}");
            assert!(seen[0].body == body, "{size} {framing}: {} bytes", seen[0].body.len());
            assert!(seen[0].all("expect").is_empty() || framing != "expect", "we have said 100 ourselves");
        }
    }
    // One more is too much, whether or not it is announced, and the cell hears nothing of it.
    let body = vec![b' '; (16 << 20) + 1];
    for framing in ["length", "chunked"] {
        let mut socket = Socket::open(world.port()).await;
        socket.send(framed("POST /api/v1/push", &tenant.headers(), &body, framing)).await;
        if let Some(answer) = socket.answer().await {
            assert_eq!(outcome(&answer), refused(413, "payload_too_large"), "{framing}");
        }
    }
    assert!(world.recorder().take().iter().all(|request| request.body.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_push_keeps_the_connection_and_never_reaches_the_cell() {
    let caps = r#"{"max_payload_bytes": 20, "max_batch_items": 3}"#;
    let (world, tenant) = world(World::builder(), caps).await;
    let mut socket = Socket::open(world.port()).await;
    let mut ask = async |body: &str| {
        socket.ask(framed("POST /api/v1/push", &tenant.headers(), body.as_bytes(), "length")).await
    };
    assert_eq!(ask(&push(3, "0123456789")).await.status, 200);
    let heavy =
        ask(r#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":"01234567890123456789"}]}"#).await;
    assert_eq!(outcome(&heavy), refused(413, "payload_too_large"));
    let text = heavy.json()["error"].as_str().unwrap().to_owned();
    assert!(text.contains("items[1]") && text.contains("22 bytes") && text.contains("(20)"), "{text}");
    let long = ask(&push(4, "x")).await;
    assert_eq!(outcome(&long), refused(413, "payload_too_large"));
    assert!(long.json()["error"].as_str().unwrap().contains("max_batch_items (3)"));
    assert_eq!(ask(&push(1, "x")).await.status, 200);
    assert_eq!(world.recorder().take().len(), 2);
    assert_eq!(world.recorder().connections(), 1);
}
