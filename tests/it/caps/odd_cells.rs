//! Cells answer in odd ways (notes/broker-facts.md): what tenants see then, and what is counted.

use super::{LIMIT, PUSH, error, live, metric, outcome, push, pushes, refused, with_admin, world};
use crate::support::{Reply, Socket, World};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_every_kind_reach_the_client_and_spoil_no_connection() {
    let (world, acme) = world(World::builder(), "{}").await;
    let pop = format!("GET /api/v1/pop/queue/q HTTP/1.1\r\n{}\r\n", acme.headers());
    let queued = r#"[{"index":0,"messageId":"m","queueName":"q","status":"queued","transactionId":"t"}]"#;
    let answers = [
        (200, queued),
        (201, queued),
        (202, ""),
        (200, r#"{"messages":[],"success":false}"#),
        (404, "<html>no such thing</html>"),
        (409, r#"{"error":"conflict"}"#),
        (422, "not JSON"),
        (500, r#"{"error":"internal"}"#),
        (503, r#"{"error":"PostgreSQL is down"}"#),
        (599, ""),
    ];
    let mut socket = Socket::open(world.port()).await;
    for (status, body) in answers {
        world.recorder().reply(Reply::Text(status, body.to_owned()));
        let posted = push(1, "x");
        for request in [
            format!("{PUSH} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{posted}", acme.headers(), posted.len()),
            pop.clone(),
        ] {
            let answer = socket.ask(request).await;
            assert_eq!((answer.status, answer.body.as_slice()), (status, body.as_bytes()));
        }
        assert_eq!(world.recorder().take().len(), 2, "{status}: each was asked once");
    }
    // A 204 with a body: the client gets a clean one, and nobody the body in place of the next answer.
    for _ in 0..5 {
        world.recorder().reply(Reply::Text(204, r#"{"error":"pops are paused :)"}"#.to_owned()));
        let paused = socket.ask(&pop).await;
        assert_eq!((paused.status, paused.header("content-length")), (204, None));
        world.recorder().reply(Reply::Json("{\"messages\":[]}"));
        let next = socket.ask(&pop).await;
        assert_eq!((next.status, next.body.as_slice()), (200, b"{\"messages\":[]}".as_slice()));
    }
    // One without a length, which ends with its connection; chunks.
    for (raw, body) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 2\r\n\r\n[]"[..], "[]"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n", "[]"),
    ] {
        world.recorder().reply(Reply::Raw(raw));
        assert_eq!(socket.ask(&pop).await.body, body.as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_answer_does_not_come_is_asked_for_once_and_has_spent_its_tokens() {
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 100, "max_msgs_per_sec": 1, "msgs_burst": 100}"#;
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder.env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 300), caps).await;
    for (reply, status, code) in [
        (Reply::Never, 504, "upstream_timeout"),
        (Reply::Close, 502, "bad_gateway"),
        (Reply::Garbage, 502, "bad_gateway"),
        (Reply::Unauthorized, 502, "bad_gateway"),
    ] {
        world.recorder().reply(reply);
        let answer = pushes(&world, &acme, &push(10, "x")).await;
        assert_eq!(outcome(&answer), refused(status, code));
        assert!(!error(&answer).contains("timeout") && !error(&answer).contains("connection"));
        // It may have been stored: nobody but the client can know whether to send it again.
        assert_eq!(world.recorder().take().len(), 1, "{code}");
    }
    let left = live(admin, &acme).await["messages"]["left"].as_u64().unwrap();
    assert!((60..70).contains(&left), "four pushes of ten: {left}");
    // One that is late is an answer like any other.
    world.recorder().reply(Reply::Late(Duration::from_millis(100)));
    assert_eq!(pushes(&world, &acme, &push(1, "x")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_is_stored_and_counted_though_its_client_has_gone() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, "{}").await;
    world.recorder().reply(Reply::Late(Duration::from_millis(200)));
    let body = push(1, "x");
    let mut socket = Socket::open(world.port()).await;
    socket
        .send(format!("{PUSH} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{body}", acme.headers(), body.len()))
        .await;
    crate::support::eventually("the cell has it", LIMIT, async || {
        (world.recorder().count() == 1).then_some(())
    })
    .await;
    drop(socket);
    super::metric_becomes(admin, r#"queen_proxy_usage_requests_total{op="push"}"#, 1.0).await;
    assert_eq!(world.recorder().abandoned(), 0);
    assert_eq!(metric(admin, "queen_proxy_requests_in_flight").await, Some(0.0));
}
