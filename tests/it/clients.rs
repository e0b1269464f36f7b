//! Connections of clients that leave, dawdle, or are too many (`notes/cases.md` 12, 14, 15).

use crate::support::{Reply, Socket, Tenant, World, eventually};
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

const LIMIT: Duration = Duration::from_secs(10);
const PUSHED: &str = r#"queen_proxy_usage_messages_total{op="push"}"#;
const GET: &str = "GET /api/v1/kv/ns/k";
const POLL: &str = "GET /api/v1/pop/queue/q?wait=true&timeout=30000";

fn push_body(items: usize) -> String {
    let items: Vec<_> = (0..items).map(|_| serde_json::json!({"queue": "q", "payload": 1})).collect();
    serde_json::json!({ "items": items }).to_string()
}

/// What a cell says to a push of so many messages, which all of them were stored.
fn stored(items: usize) -> String {
    let of = |index| serde_json::json!({"index": index, "status": "queued"});
    serde_json::Value::from((0..items).map(of).collect::<Vec<_>>()).to_string()
}

fn push(tenant: &Tenant, chunked: bool) -> String {
    let body = push_body(3);
    let head = format!("POST /api/v1/push HTTP/1.1\r\n{}", tenant.headers());
    if chunked {
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
    } else {
        format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())
    }
}

async fn open_with(world: &World, request: &str) -> Socket {
    let before = world.recorder().count();
    let mut socket = Socket::open(world.port()).await;
    assert!(socket.send(request).await);
    eventually("the request is at the cell", LIMIT, async || {
        (world.recorder().count() > before).then_some(())
    })
    .await;
    socket
}

async fn nothing_in_flight(world: &World) {
    eventually("nothing is in flight", LIMIT, async || {
        (world.figure("queen_proxy_requests_in_flight").await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_left_counts_what_the_cell_did() {
    let world = World::builder().recorder().admin().env("QUEEN_PROXY_METER_FLUSH_MS", 100).start().await;
    let acme = world.tenant("acme").await;
    let mut expected = 0;
    for chunked in [false, true] {
        for way in ["reset", "close", "half"] {
            world.recorder().reply(Reply::Kept(stored(3)));
            let finished = world.figure("queen_proxy_requests_finished_without_client_total").await;
            let mut socket = open_with(&world, &push(&acme, chunked)).await;
            match way {
                "reset" => {
                    socket.reset();
                    eventually("the proxy has noticed", LIMIT, async || {
                        let now = world.figure("queen_proxy_requests_finished_without_client_total").await;
                        (now > finished).then_some(())
                    })
                    .await;
                }
                "close" => drop(socket),
                _ => {
                    socket.close_half().await;
                    world.recorder().let_go();
                    let answer = socket.answer().await.expect("a client that waits gets its answer");
                    assert_eq!(answer.json().as_array().unwrap().len(), 3);
                }
            }
            world.recorder().let_go();
            expected += 3;
            eventually("the messages are counted", LIMIT, async || {
                (world.figure(PUSHED).await >= expected).then_some(())
            })
            .await;
            assert!(world.figure(PUSHED).await <= expected, "{way}, chunked: {chunked}");
            assert_eq!(world.recorder().abandoned(), 0, "{way}, chunked: {chunked}");
            nothing_in_flight(&world).await;
        }
    }
    assert_eq!(world.figure("queen_proxy_usage_requests_total{op=\"push\"}").await, 6);
    eventually("no connection is left behind", LIMIT, async || {
        (world.figure("queen_proxy_client_connections").await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_client_stops_reading_counts_what_the_cell_did() {
    const ITEMS: usize = 400_000;
    let world = World::builder()
        .recorder()
        .admin()
        .env("QUEEN_PROXY_METER_FLUSH_MS", 100)
        .env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 2_000)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    // More than the sockets on the way hold.
    world.recorder().reply(Reply::Text(200, stored(ITEMS)));
    let _silent = open_with(&world, &push(&acme, false)).await;
    eventually("the messages are counted", LIMIT, async || (world.figure(PUSHED).await > 0).then_some(()))
        .await;
    assert_eq!(world.figure(PUSHED).await, 400_000);
    assert_eq!(world.figure("queen_proxy_requests_finished_without_client_total").await, 1);
    nothing_in_flight(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_was_broken_off_never_reaches_the_cell() {
    let world = World::builder().recorder().admin().start().await;
    let acme = world.tenant("acme").await;
    for chunked in [false, true] {
        let request = push(&acme, chunked);
        for reset in [false, true] {
            let mut socket = Socket::open(world.port()).await;
            socket.send(&request.as_bytes()[..request.len() - 4]).await;
            if reset {
                socket.reset();
            }
        }
    }
    nothing_in_flight(&world).await;
    assert!(world.recorder().take().iter().all(|seen| seen.body.is_empty()), "no part of a body went on");
    assert_eq!(world.figure(PUSHED).await, 0);
}

/// Closes or resets a connection: soon so many requests have been given up at the cell.
async fn leaving_is_noticed(world: &World, socket: Socket, reset: bool, left: usize, what: &str) {
    let asked = Instant::now();
    if reset {
        socket.reset();
    } else {
        drop(socket);
    }
    eventually("the cell's request is cancelled", LIMIT, async || {
        (world.recorder().abandoned() == left).then_some(())
    })
    .await;
    assert!(asked.elapsed() < Duration::from_secs(1), "{what}: {:?}", asked.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_that_left_was_waiting_for_is_cancelled() {
    let world = World::builder().recorder().admin().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Never);
    let mut left = 0;
    for request in [
        format!("{POLL} HTTP/1.1\r\n{}\r\n", acme.headers()),
        format!("{POLL} HTTP/1.0\r\n{}\r\n", acme.headers()),
        format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers()),
        format!("POST /api/v1/fetch HTTP/1.1\r\n{}Content-Length: 2\r\n\r\n{{}}", acme.headers()),
    ] {
        for reset in [false, true] {
            let socket = open_with(&world, &request).await;
            left += 1;
            leaving_is_noticed(&world, socket, reset, left, &request).await;
        }
    }
    nothing_in_flight(&world).await;
    assert_eq!(world.figure("queen_proxy_parked_pops").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_only_says_that_it_will_send_no_more_gets_its_answer() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    for line in [
        format!("{GET} HTTP/1.1\r\n"),
        format!("{GET} HTTP/1.0\r\n"),
        format!("{POLL} HTTP/1.1\r\n"),
        "POST /api/v1/ack HTTP/1.1\r\nContent-Length: 0\r\n".to_owned(),
    ] {
        world.recorder().reply(Reply::Late(Duration::from_millis(500)));
        let mut socket = Socket::open(world.port()).await;
        socket.send(format!("{line}{}\r\n", acme.headers())).await;
        socket.close_half().await;
        let answer = socket.answer().await.unwrap_or_else(|| panic!("no answer to {line}"));
        assert_eq!((answer.status, answer.body.as_slice()), (200, b"{}".as_slice()), "{line}");
        assert!(socket.ends_within(Duration::from_secs(2)).await);
    }
    assert_eq!(world.recorder().abandoned(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_behind_one_that_waits_get_their_answers_in_order() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Kept(r#"{"messages":[]}"#.to_owned()));
    let mut socket = open_with(&world, &format!("{POLL} HTTP/1.1\r\n{}\r\n", acme.headers())).await;
    let behind = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    let stranger = format!("{GET} HTTP/1.1\r\nHost: {}\r\n\r\n", acme.host());
    socket.send(format!("{behind}{stranger}{behind}")).await;
    world.recorder().let_go();
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(socket.answer().await.expect("every request is answered").status);
    }
    assert_eq!(statuses, [200, 200, 401, 200], "each is judged on its own");
    assert_eq!(world.recorder().count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_left_bytes_behind_its_poll_is_noticed_all_the_same() {
    let world = World::builder().recorder().admin().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Never);
    let whole = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    let mut left = 0;
    // With more than is kept, or at once with the poll, it is no other.
    for (at_once, behind) in [(false, "G"), (true, "G"), (false, &whole), (true, &whole)] {
        for reset in [false, true] {
            let poll = format!("{POLL} HTTP/1.1\r\n{}\r\n", acme.headers());
            let (first, then) = if at_once { (poll + behind, "") } else { (poll, behind) };
            let mut socket = open_with(&world, &first).await;
            socket.send(then).await;
            left += 1;
            leaving_is_noticed(&world, socket, reset, left, behind).await;
        }
    }
    nothing_in_flight(&world).await;
    assert_eq!(world.figure("queen_proxy_parked_pops").await, 0);
    assert_eq!(world.recorder().count(), left, "nobody asks for what stood behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_that_came_before_the_end_is_answered() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let get = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    for first in [format!("{POLL} HTTP/1.1\r\n{}\r\n", acme.headers()), push(&acme, false), push(&acme, true)]
    {
        for at_once in [false, true] {
            world.recorder().reply(Reply::Kept(stored(3)));
            let behind = get.repeat(2) + &push(&acme, true) + &get;
            let (begin, rest) =
                if at_once { (first.clone() + &behind, "") } else { (first.clone(), &*behind) };
            let mut socket = open_with(&world, &begin).await;
            socket.send(rest).await;
            socket.close_half().await;
            world.recorder().let_go();
            for number in 0..5 {
                let answer = socket.answer().await.unwrap_or_else(|| panic!("no answer {number}, {at_once}"));
                assert_eq!(answer.status, 200);
            }
            assert!(socket.ends_within(Duration::from_secs(2)).await);
            assert_eq!(world.recorder().take().len(), 5);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_after_a_100_is_noticed() {
    let world = World::builder().recorder().admin().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Never);
    let head = format!("POST /api/v1/fetch HTTP/1.1\r\n{}Expect: 100-continue\r\n", acme.headers());
    let mut stream = TcpStream::connect(("127.0.0.1", world.port())).await.unwrap();
    stream.write_all(format!("{head}Content-Length: 2\r\n\r\n{{}}").as_bytes()).await.unwrap();
    // Read, so that the client's system says no more than that it closes.
    let mut go_on = Vec::new();
    while !go_on.ends_with(b"\r\n\r\n") {
        go_on.push(stream.read_u8().await.unwrap());
    }
    assert!(go_on.starts_with(b"HTTP/1.1 100 "));
    eventually("the request is at the cell", LIMIT, async || (world.recorder().count() == 1).then_some(()))
        .await;
    drop(stream);
    let left = Instant::now();
    eventually("the cell's request is cancelled", LIMIT, async || {
        (world.recorder().abandoned() == 1).then_some(())
    })
    .await;
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    nothing_in_flight(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_begins_with_the_request_before_it_has_its_own_deadline() {
    let world = World::builder().recorder().env("QUEEN_PROXY_HEAD_TIMEOUT_MS", 600).start().await;
    let acme = world.tenant("acme").await;
    let body = "[]".repeat(20_000);
    let ack = format!("POST /api/v1/ack HTTP/1.1\r\n{}", acme.headers());
    for request in [
        format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers()),
        format!("{ack}Content-Length: {}\r\n\r\n{body}", body.len()),
        format!("{ack}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()),
        push(&acme, true),
        format!("{GET} HTTP/1.1\r\nHost: {}\r\n\r\n", acme.host()),
    ] {
        let mut socket = Socket::open(world.port()).await;
        let began = Instant::now();
        let first = socket.ask(request.clone() + "GET / HTTP/1.1\r\nx-a: ").await;
        assert!(matches!(first.status, 200 | 401), "{}", first.status);
        let answer = socket.answer().await.expect("it is told why");
        assert_eq!((answer.status, answer.code().as_str()), (408, "request_incomplete"), "{request}");
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
    let mut socket = Socket::open(world.port()).await;
    let get = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    assert_eq!(socket.ask(get + "GET / HTTP/1.1\r\nx-a: ").await.status, 200);
    socket.send("x".repeat(33 << 10)).await;
    assert_eq!(socket.answer().await.expect("it is told why").status, 431);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_drips_in_ends_at_its_deadline_and_nobody_else_notices() {
    let world = World::builder().recorder().admin().env("QUEEN_PROXY_HEAD_TIMEOUT_MS", 600).start().await;
    let acme = world.tenant("acme").await;
    let request = format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers());
    let mut dripping = Vec::new();
    for kept_alive in [false, true, true] {
        let mut socket = Socket::open(world.port()).await;
        if kept_alive {
            assert_eq!(socket.ask(&request).await.status, 200);
            // Idle for longer than a head may take: that is another limit.
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
        dripping.push(tokio::spawn(async move {
            let began = Instant::now();
            for _ in 0..100 {
                if !socket.send("G").await {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                if began.elapsed() > Duration::from_millis(550) {
                    break;
                }
            }
            let answer = socket.answer().await.expect("it is told why");
            assert_eq!((answer.status, answer.code().as_str()), (408, "request_incomplete"));
            assert!(answer.header("x-queen-request-id").is_some());
            assert!(socket.ends_within(Duration::from_secs(2)).await);
            began.elapsed()
        }));
    }
    assert_eq!(world.ask(GET, &acme.headers(), "").await.status, 200);
    for task in dripping {
        let took = task.await.unwrap();
        assert!(took >= Duration::from_millis(590) && took < Duration::from_secs(4), "{took:?}");
    }
    let late = r#"queen_proxy_requests_total{class="none",code="request_incomplete",status="408"}"#;
    assert_eq!(world.figure(late).await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_without_end_is_refused_at_its_largest_size() {
    let world = World::builder().recorder().start().await;
    let mut socket = Socket::open(world.port()).await;
    socket.send("GET / HTTP/1.1\r\n").await;
    let line = format!("x-filler: {}\r\n", "x".repeat(1000));
    for _ in 0..200 {
        if !socket.send(&line).await {
            break;
        }
    }
    let answer = socket.answer().await.expect("it is told why");
    assert_eq!((answer.status, answer.code().as_str()), (431, "invalid_request"));
    assert!(socket.ends_within(Duration::from_secs(2)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_pingora_refuses_carries_our_words() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let own = acme.headers();
    for request in [
        "\0\0\0\0\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_owned(),
        "GET / HTTP/3.7\r\nHost: a\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nbad header\r\n\r\n".to_owned(),
        format!("CONNECT {}:443 HTTP/1.1\r\n{own}\r\n", acme.host()),
    ] {
        let mut socket = Socket::open(world.port()).await;
        let answer = socket.ask(format!("{request}GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_request"), "{request}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(answer.header("date").is_some() && answer.header("x-queen-request-id").is_some());
        assert!(socket.answer().await.is_none(), "{request}: what follows is nobody's request");
    }
    assert_eq!(world.recorder().count(), 0);
}

/// Heads alone are what Pingora writes without a limit of time.
#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_answers_loses_the_connection() {
    let world =
        World::builder().recorder().admin().env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 1_500).start().await;
    eventually("the connections of the start are gone", LIMIT, async || {
        (world.figure("queen_proxy_client_connections").await == 0).then_some(())
    })
    .await;
    let tenant = world.tenant("acme").await;
    let head = format!("HTTP/1.1 204 No Content\r\nx-padding: {}\r\n\r\n", "x".repeat(8_000));
    world.recorder().reply(Reply::Raw(Box::leak(head.into_bytes().into_boxed_slice())));
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], world.port()).into()).await.unwrap();
    // Their answers are more than the system holds.
    let pops = format!("GET /api/v1/pop/queue/q HTTP/1.1\r\n{}\r\n", tenant.headers()).repeat(5_000);
    let sending = tokio::spawn(async move {
        let _ = stream.write_all(pops.as_bytes()).await;
        stream
    });
    eventually("the pops begin", LIMIT, async || (world.recorder().count() > 0).then_some(())).await;
    eventually("its place is free", LIMIT, async || {
        (world.figure("queen_proxy_client_connections").await == 0).then_some(())
    })
    .await;
    assert_eq!(world.figure("queen_proxy_requests_in_flight").await, 0);
    assert!(world.recorder().count() < 5_000, "all of it found room: {}", world.recorder().count());
    drop(sending.await);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_beyond_the_caps_are_turned_away() {
    for (cap, label) in
        [("QUEEN_PROXY_MAX_CONNECTIONS", "total"), ("QUEEN_PROXY_MAX_CONNECTIONS_PER_ADDRESS", "address")]
    {
        let world = World::builder().recorder().admin().env(cap, 3).start().await;
        let healthy = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        eventually("the connections of the start are gone", LIMIT, async || {
            (world.figure("queen_proxy_client_connections").await == 0).then_some(())
        })
        .await;
        let mut held = Vec::new();
        for _ in 0..3 {
            let mut socket = Socket::open(world.port()).await;
            assert_eq!(socket.ask(healthy).await.status, 200);
            held.push(socket);
        }
        let mut fourth = Socket::open(world.port()).await;
        let answer = fourth.answer().await.expect("it is told why");
        assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"), "{cap}");
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(fourth.ends_within(Duration::from_secs(2)).await);
        let refused = format!("queen_proxy_client_connections_refused_total{{cap=\"{label}\"}}");
        assert_eq!(world.figure(&refused).await, 1);
        assert_eq!(world.figure("queen_proxy_client_connections").await, 3);
        for socket in &mut held {
            assert_eq!(socket.ask(healthy).await.status, 200, "those who are there stay");
        }
        drop(held);
        eventually("a place becomes free", LIMIT, async || {
            let mut socket = Socket::open(world.port()).await;
            socket.send(healthy).await;
            (socket.answer().await?.status == 200).then_some(())
        })
        .await;
    }
}
