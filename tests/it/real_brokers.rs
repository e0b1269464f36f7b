//! What real brokers do that the recording cell of other tests does not (`notes/broker-facts.md`).

use crate::support::{Reply, Socket, World};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_with_a_body_that_it_must_not_have_spoils_no_other() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let mut socket = Socket::open(world.port()).await;
    for _ in 0..20 {
        // 29 bytes that would be read as the beginning of the next answer.
        world.recorder().reply(Reply::Text(204, "HTTP/1.1 200 OK\r\nx-not: us\r\n\r\n".to_owned()));
        let pop = format!("GET /api/v1/pop/queue/q HTTP/1.1\r\n{}\r\n", acme.headers());
        let answer = socket.ask(&pop).await;
        assert_eq!((answer.status, answer.header("x-not")), (204, None));
        world.recorder().reply(Reply::Json(r#"{"queues":[]}"#));
        let get = format!("GET /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers());
        let answer = socket.ask(&get).await;
        assert_eq!((answer.status, answer.body.as_slice()), (200, br#"{"queues":[]}"#.as_slice()));
        socket.send(format!("HEAD /api/v1/resources/queues HTTP/1.1\r\n{}\r\n", acme.headers())).await;
        assert_eq!(socket.answer_to_head().await.unwrap().status, 200);
        assert_eq!(socket.ask(&get).await.body, br#"{"queues":[]}"#);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_closes_idle_connections_costs_no_request() {
    let world = World::builder().recorder().env("QUEEN_PROXY_UPSTREAM_IDLE_MS", 150).start().await;
    let acme = world.tenant("acme").await;
    world.recorder().close_idle(Duration::from_millis(300));
    let push = "POST /api/v1/ack HTTP/1.1\r\n";
    let mut socket = Socket::open(world.port()).await;
    let mut sent = 0;
    for pause in (0..24).map(|step| Duration::from_millis(step * 20)) {
        let request = format!("{push}{}Content-Length: 2\r\n\r\n{{}}", acme.headers());
        assert_eq!(socket.ask(request).await.status, 200, "after a pause up to {pause:?}");
        sent += 1;
        tokio::time::sleep(pause).await;
    }
    assert_eq!(world.recorder().count(), sent, "each was executed once");
    assert!(world.recorder().connections() > 1, "idle connections were let go");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_too_large_for_the_broker_is_said_to_be_so() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Text(431, "<html>431</html>".to_owned()));
    let headers = format!("{}X-Large: {}\r\n", acme.headers(), "x".repeat(4096));
    let answer = world.ask("GET /api/v1/kv/ns/k", &headers, "").await;
    assert_eq!((answer.status, answer.code().as_str()), (431, "invalid_request"));
    assert_eq!(world.recorder().count(), 1);
}
