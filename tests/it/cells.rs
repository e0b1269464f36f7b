//! Cells that are slow, dead, late or garbled, and clients that leave them.

use crate::support::{Reply, Socket, World, eventually};
use std::time::{Duration, Instant};

const GET: &str = "GET /api/v1/kv/ns/k";

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_of_a_cell_has_its_answer() {
    let world = World::builder().recorder().env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 300).start().await;
    let acme = world.tenant("acme").await;
    let own = acme.headers();
    for (reply, status, code) in [
        (Reply::Never, 504, "upstream_timeout"),
        (Reply::Close, 502, "bad_gateway"),
        (Reply::Garbage, 502, "bad_gateway"),
        (Reply::Switch, 502, "bad_gateway"),
        (Reply::Unauthorized, 502, "bad_gateway"),
    ] {
        world.recorder().reply(reply.clone());
        for line in [GET, "DELETE /api/v1/kv/ns/k", "PUT /api/v1/kv/ns/k", "POST /api/v1/kv"] {
            world.recorder().take();
            let answer = world.ask(line, &own, r#"{"value":1}"#).await;
            assert_eq!((answer.status, answer.code().as_str()), (status, code), "{reply:?} {line}");
            assert!(answer.header("x-queen-request-id").is_some());
            assert_eq!(world.recorder().count(), 1, "{reply:?} {line}: sent once, whatever became of it");
            let text = answer.json()["error"].as_str().unwrap().to_lowercase();
            for word in ["timeout", "timed out", "connection"] {
                assert!(!text.contains(word), "{text}");
            }
        }
    }
    // Back to normal on the same proxy.
    world.recorder().reply(Reply::Json("{}"));
    assert_eq!(world.ask(GET, &own, "").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_the_cell_has_closed_is_not_used_again() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let mut socket = Socket::open(world.port()).await;
    let request = format!("POST /api/v1/kv HTTP/1.1\r\n{}Content-Length: 2\r\n\r\n[]", acme.headers());
    for _ in 0..20 {
        assert_eq!(socket.ask(&request).await.status, 200);
        world.recorder().reply(Reply::Close);
        assert_eq!(Socket::open(world.port()).await.ask(&request).await.status, 502);
        world.recorder().reply(Reply::Json("{}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_is_not_there_is_a_502_and_only_its_own_tenants_notice() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let dead = world.add_cell("dead", crate::support::free_port()).await;
    let nameless = "INSERT INTO queen_proxy.cells (slug, region, base_url, class)
                    VALUES ('nameless', 'test', 'http://no-such-host.invalid:1', 'shared'),
                           ('tls', 'test', 'https://127.0.0.1:1', 'shared')";
    world.sql(nameless).await;
    let move_to = |cell: &str| {
        format!(
            "UPDATE queen_proxy.clusters SET cell_id = ({cell}) WHERE id = '{0}';
             SELECT pg_notify('queen_proxy_inval', '{0}')",
            acme.cluster
        )
    };
    let by_slug = |slug: &str| format!("SELECT id FROM queen_proxy.cells WHERE slug = '{slug}'");
    assert_eq!(world.ask(GET, &acme.headers(), "").await.status, 200);
    for cell in [format!("'{dead}'"), by_slug("nameless"), by_slug("tls")] {
        world.sql(&move_to(&cell)).await;
        eventually("the move", Duration::from_secs(5), async || {
            let answer = world.ask(GET, &acme.headers(), "").await;
            (answer.status == 502 && answer.code() == "bad_gateway").then_some(())
        })
        .await;
        assert_eq!(world.ask(GET, &globex.headers(), "").await.status, 200);
    }
    world.sql(&move_to(&by_slug("cell"))).await;
    eventually("the way back", Duration::from_secs(5), async || {
        (world.ask(GET, &acme.headers(), "").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_was_killed_has_kept_what_it_accepted() {
    let mut world = World::new().await;
    let acme = world.tenant("acme").await;
    let (port, headers) = (world.port(), acme.headers());
    let writing = tokio::spawn(async move {
        let mut accepted = Vec::new();
        for number in 0.. {
            let body = r#"{"value":1,"forever":true}"#;
            let put = format!(
                "PUT /api/v1/kv/ns/{number} HTTP/1.1\r\n{headers}Content-Length: {}\r\n\r\n{body}",
                body.len()
            );
            match Socket::open(port).await.ask(put).await.status {
                200 => accepted.push(number),
                502 => return accepted,
                status => panic!("{status}"),
            }
        }
        accepted
    });
    let mut rows = world.cell_database().await;
    eventually("a hundred writes", Duration::from_secs(20), async || {
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM queen.kv");
        (count.fetch_one(&mut rows).await.unwrap() >= 100).then_some(())
    })
    .await;
    world.cell = None; // kills it
    let accepted = writing.await.unwrap();
    assert!(accepted.len() >= 99, "{} writes before the kill", accepted.len());
    world.restart_cell().await;
    for number in accepted {
        let answer = world.ask(&format!("GET /api/v1/kv/ns/{number}"), &acme.headers(), "").await;
        assert_eq!(answer.json()["found"], true, "{number}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_cell_holds_no_worker() {
    let world = World::builder().recorder().env("QUEEN_PROXY_WORKER_THREADS", 1).start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Never);
    let mut waiting = Vec::new();
    for _ in 0..200 {
        let mut socket = Socket::open(world.port()).await;
        socket.send(format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers())).await;
        waiting.push(socket);
    }
    eventually("all of them wait at the cell", Duration::from_secs(10), async || {
        (world.recorder().count() == 200).then_some(())
    })
    .await;
    world.recorder().reply(Reply::Json("{}"));
    let asked = Instant::now();
    assert_eq!(world.ask(GET, &acme.headers(), "").await.status, 200);
    assert!(asked.elapsed() < Duration::from_secs(2));
    // A client that leaves takes its request at the cell with it.
    drop(waiting);
    eventually("the cell's requests are cancelled", Duration::from_secs(5), async || {
        (world.recorder().abandoned() == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_poll_may_wait_longer_than_other_requests() {
    let world = World::builder()
        .recorder()
        .env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 300)
        .env("QUEEN_PROXY_LONGPOLL_MAX_MS", 1000)
        .env("QUEEN_PROXY_LONGPOLL_MARGIN_MS", 500)
        .start()
        .await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Late(Duration::from_millis(600)));
    let pop = "GET /api/v1/pop/queue/q";
    for (line, status) in [
        (pop.to_owned(), 504),
        (format!("{pop}?wait=false&timeout=5000"), 504),
        (format!("{pop}?wait=true&timeout=700"), 200),
        (format!("{pop}?wait=true"), 200),
    ] {
        assert_eq!(world.ask(&line, &acme.headers(), "").await.status, status, "{line}");
    }
    world.recorder().reply(Reply::Never);
    let asked = Instant::now();
    let answer = world.ask(&format!("{pop}?wait=true&timeout=60000"), &acme.headers(), "").await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "upstream_timeout"));
    let waited = asked.elapsed();
    assert!(waited >= Duration::from_millis(1400) && waited < Duration::from_secs(10), "{waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_after_a_100_continue_is_still_answered() {
    let world = World::builder().recorder().env("QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 300).start().await;
    let acme = world.tenant("acme").await;
    for (reply, status) in [(Reply::Never, 504), (Reply::Close, 502)] {
        world.recorder().reply(reply);
        let mut socket = Socket::open(world.port()).await;
        let head = "Expect: 100-continue\r\nContent-Length: 2\r\n";
        let answer =
            socket.ask(format!("POST /api/v1/push HTTP/1.1\r\n{}{head}\r\n{{}}", acme.headers())).await;
        assert_eq!(answer.status, status);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_in_the_middle_of_its_body_gets_a_408() {
    let world = World::builder().recorder().env("QUEEN_PROXY_CLIENT_READ_TIMEOUT_MS", 300).start().await;
    let acme = world.tenant("acme").await;
    let mut socket = Socket::open(world.port()).await;
    let answer = socket
        .ask(format!("POST /api/v1/kv HTTP/1.1\r\n{}Content-Length: 100\r\n\r\n[", acme.headers()))
        .await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "request_incomplete"));
    assert!(socket.ends_within(Duration::from_secs(5)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn inspected_bodies_pass_unchanged_in_every_framing_and_size() {
    const CEILING: usize = 4 << 20;
    let world = World::builder().recorder().env("QUEEN_PROXY_MAX_BODY_BYTES", CEILING).start().await;
    let acme = world.tenant("acme").await;
    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'grace')", acme.tenant)).await;
    let operation = r#"[{"op":"get","ns":"a","key":"b"}"#;
    let batch = |size: usize| match size {
        2 => "[]".to_owned(),
        _ => format!("{operation}{}]", " ".repeat(size - operation.len() - 1)),
    };
    for size in [2, 100, 65_535, 65_536, 65_537, 1 << 20, CEILING] {
        let body = batch(size);
        let chunks = |piece: usize| -> String {
            let pieces = body
                .as_bytes()
                .chunks(piece)
                .map(|p| format!("{:x}\r\n{}\r\n", p.len(), String::from_utf8_lossy(p)));
            pieces.collect::<String>() + "0\r\n\r\n"
        };
        let framings = [
            (format!("Content-Length: {size}\r\n"), body.clone()),
            (format!("Content-Length: {size}\r\nExpect: 100-continue\r\n"), body.clone()),
            ("Transfer-Encoding: chunked\r\n".to_owned(), chunks(size)),
            ("Transfer-Encoding: chunked\r\n".to_owned(), chunks(7_000)),
        ];
        for (framing, wire) in framings {
            let mut socket = Socket::open(world.port()).await;
            let answer = socket
                .ask(format!("POST /api/v1/kv HTTP/1.1\r\n{}{framing}\r\n{wire}", acme.headers()))
                .await;
            assert_eq!(answer.status, 200, "{size} bytes, {framing}");
            let seen = world.recorder().take();
            assert_eq!(seen.len(), 1);
            assert!(seen[0].body == body.as_bytes(), "{size} bytes, {framing}: the same bytes");
        }
    }
    let growing =
        r#"[{"op":"get","ns":"a","key":"b"},{"op":"put","ns":"a","key":"b","value":1,"forever":true}]"#;
    let refusals = [
        (growing.to_owned(), 403, "push_blocked"),
        (format!("{growing}{}", " ".repeat(200_000)), 403, "push_blocked"),
        (batch(CEILING + 1), 413, "payload_too_large"),
        ("[".to_owned(), 400, "invalid_request"),
    ];
    for (body, status, code) in &refusals {
        for chunked in [false, true] {
            let (framing, wire) = if chunked {
                (
                    "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n".to_owned(),
                    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len()),
                )
            } else {
                (format!("Content-Length: {}\r\n", body.len()), body.clone())
            };
            let mut socket = Socket::open(world.port()).await;
            let answer = socket
                .ask(format!("POST /api/v1/kv HTTP/1.1\r\n{}{framing}\r\n{wire}", acme.headers()))
                .await;
            assert_eq!((answer.status, answer.code().as_str()), (*status, *code), "{} bytes", body.len());
            assert!(answer.header("x-queen-request-id").is_some());
        }
    }
    let cycle = |items: &str| format!(r#"{{"push_items":{items},"acks":[]}}"#);
    let refused = world.ask("POST /streams/v1/cycle", &acme.headers(), &cycle("[{}]")).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "push_blocked"));
    assert_eq!(world.ask("POST /streams/v1/cycle", &acme.headers(), &cycle("[]")).await.status, 200);
    assert_eq!(world.recorder().take().len(), 1, "the cycle that only takes");
    for coding in ["Content-Encoding: gzip\r\n", "Content-Encoding: identity\r\nContent-Encoding: gzip\r\n"] {
        let answer = world.ask("POST /api/v1/kv", &format!("{}{coding}", acme.headers()), "[]").await;
        assert_eq!((answer.status, answer.code().as_str()), (415, "unsupported_media_type"));
    }
    assert_eq!(world.recorder().count(), 0, "nothing that was refused reached the cell");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_not_inspected_stream_through() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    for size in [1, 65_536, 65_537, 20 << 20] {
        let body = "x".repeat(size);
        for framing in [format!("Content-Length: {size}\r\n"), "Transfer-Encoding: chunked\r\n".to_owned()] {
            let wire = if framing.starts_with('T') {
                format!("{size:x}\r\n{body}\r\n0\r\n\r\n")
            } else {
                body.clone()
            };
            let mut socket = Socket::open(world.port()).await;
            let answer = socket
                .ask(format!("POST /api/v1/ack HTTP/1.1\r\n{}{framing}\r\n{wire}", acme.headers()))
                .await;
            assert_eq!(answer.status, 200);
            assert!(world.recorder().take()[0].body == body.as_bytes());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_under_load_loses_no_request() {
    let mut world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    world.recorder().reply(Reply::Late(Duration::from_millis(400)));
    let mut waiting = Vec::new();
    for _ in 0..20 {
        let mut socket = Socket::open(world.port()).await;
        socket.send(format!("{GET} HTTP/1.1\r\n{}\r\n", acme.headers())).await;
        waiting.push(socket);
    }
    eventually("all at the cell", Duration::from_secs(5), async || {
        (world.recorder().count() == 20).then_some(())
    })
    .await;
    world.proxies[0].1.signal(nix::sys::signal::Signal::SIGTERM);
    for mut socket in waiting {
        assert_eq!(socket.answer().await.expect("answered in spite of the stop").status, 200);
    }
    let status = world.proxies[0].1.wait(Duration::from_secs(10)).expect("it ends");
    assert!(status.success(), "{status}");
}
