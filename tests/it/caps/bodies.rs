//! Bodies that are read arrive as they were sent, and what is refused does not arrive.

use super::{
    FRAMINGS, Framing, KIB, LIMIT, PUSH, error, framed, live, metric, metric_becomes, outcome, push, refused,
    retry_after, tenant, with_admin, world,
};
use crate::support::{Reply, Socket, World, eventually};
use std::time::{Duration, Instant};

/// Routes whose bodies are always read.
const READ: [&str; 6] = [
    "/api/v1/push",
    "/api/v1/transaction",
    "/api/v1/configure",
    "/api/v1/dlq/7/replay",
    "/streams/v1/cycle",
    "/api/v1/ephemeral/push",
];

/// Of the corpus what names half of a replay's destination.
const HALF: &[u8] = br#"{"queue":"q","options""#;

/// Bodies that a proxy which parses and writes anew would change, and some that are no JSON at all.
fn corpus() -> Vec<Vec<u8>> {
    let texts = [
        // Members that are repeated, at every level.
        r#"{"items":[{"queue":"a","queue":"b","payload":1,"payload":{"x":1,"x":2}}],"items":[]}"#,
        // Escapes that could be written in another way, lone surrogates, and U+0000.
        r#"{"items":[{"queue":"\u0071\/\b\f","payload":"\ud83d\ude00 \ud800 \udc00x \u0000 \u007f"}]}"#,
        r#"{"\u0069tems":[{"\u0071ueue":"q","p\u0061yload":"\"\\"}]}"#,
        // Numbers beyond 64 bits and doubles, and other spellings of numbers.
        r#"{"items":[{"queue":"q","payload":[18446744073709551616,-9223372036854775809,1e400,-0,-0.0,1E+2,0.1e-7,
            123456789012345678901234567890.123456789012345678901234567890]}]}"#,
        // White space in all places, and the order of members.
        "\r\n\t { \"z\" : [ ] , \"items\" : [ { \"payload\" : { \"b\" : 1 , \"a\" : 2 } , \"queue\" : \"q\" } ] }\r\n\t ",
        // The edges of UTF-8: one to four bytes, the last code points, a byte order mark within.
        "{\"items\":[{\"queue\":\"\u{7f}\u{80}\u{7ff}\u{800}\u{ffff}\u{10000}\u{10ffff}\u{feff}\",\"payload\":\"\u{2028}\u{2029}\"}]}",
        // Odd members: partitions that are no texts, no payload, payloads of every kind.
        r#"{"items":[{"queue":"q","partition":7},{"queue":"q","partition":null,"payload":null},{"payload":true},{}]}"#,
        r#"{"items":[1,"two",null,[],{"queue":"q","payload":{}}]}"#,
        r#"{"operations":[{"type":"ack","transactionId":"t"},{"type":"push","items":[{"queue":"q","payload":1}]},{"type":"push","queue":"r","payload":2}]}"#,
        r#"{"queue":"q","options":{"retentionSeconds":"60","completedRetentionSeconds":5}}"#,
        r#"{"queue":"q","partition":"p"}"#,
        r#"{"push_items":[{"queue":"q","payload":1}],"messages":[{"x":1}],"state":{"a":1}}"#,
        // No JSON: the cell says what is wrong with it.
        "",
        " ",
        "{",
        "nonsense",
        "{\"items\":[",
        "[]",
        "null",
        "\"text\"",
        "{} trailing",
    ];
    let mut bodies: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    // Not UTF-8: overlong, cut off, a surrogate in bytes, a byte that never is.
    for odd in [b"\xc0\xaf".as_slice(), b"\xe2\x82", b"\xed\xa0\x80", b"\xff", b"\xf4\x90\x80\x80"] {
        let body = [br#"{"items":[{"queue":"q","payload":""#.as_slice(), odd, br#""}]}"#].concat();
        bodies.push(body);
    }
    bodies.push(b"\xef\xbb\xbf{\"items\":[]}".to_vec());
    // Deep, and long without a break.
    bodies.push(
        [b"{\"items\":[{\"queue\":\"q\",\"payload\":".as_slice(), &[b'['; 5_000], &[b']'; 5_000], b"}]}"]
            .concat(),
    );
    bodies
        .push(format!(r#"{{"items":[{{"queue":"q","payload":"{}"}}]}}"#, "\\\"".repeat(60_000)).into_bytes());
    bodies
}

#[tokio::test(flavor = "multi_thread")]
async fn every_body_arrives_byte_for_byte_on_every_route_that_reads_it() {
    let (world, acme) = world(World::builder(), "{}").await;
    world.sql("UPDATE queen_proxy.plans SET features = '{\"streams\": true, \"ephemeral\": true}'").await;
    let bodies = corpus();
    for route in READ {
        let mut socket = Socket::open(world.port()).await;
        for (index, body) in bodies.iter().enumerate() {
            for framing in FRAMINGS {
                if body.is_empty() && !matches!(framing, Framing::Length | Framing::Chunks(_)) {
                    continue;
                }
                let sent =
                    socket.send(framed(&format!("POST {route}"), &acme.headers(), body, framing)).await;
                let answer = if sent { socket.answer().await } else { None };
                let answer = answer.unwrap_or_else(|| panic!("no answer: {route} {index} {framing:?}"));
                let seen = world.recorder().take();
                if route.ends_with("/replay") && body.starts_with(HALF) {
                    assert_eq!(outcome(&answer), refused(400, "invalid_request"));
                    assert_eq!(seen.len(), 0);
                    continue;
                }
                assert_eq!(outcome(&answer), (200, String::new()), "{route} {index} {framing:?}");
                assert_eq!(seen.len(), 1, "{route} {index} {framing:?}");
                assert!(seen[0].body == *body, "{route} {index} {framing:?}: another body");
                assert_eq!(seen[0].all("expect").len(), 0, "we have said 100 ourselves");
                if answer.header("connection") == Some("close") {
                    assert!(socket.ends_within(LIMIT).await);
                    socket = Socket::open(world.port()).await;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_may_end_anywhere() {
    let (world, acme) = world(World::builder(), "{}").await;
    let body = "{\"items\":[{\"queue\":\"q\u{10ffff}\",\"payload\":\"\\\"\\ud83d\\ude00\"}]}".as_bytes();
    let head = format!("{PUSH} HTTP/1.1\r\n{}Transfer-Encoding: chunked\r\n\r\n", acme.headers());
    let mut socket = Socket::open(world.port()).await;
    for split in 1..body.len() {
        let (first, rest) = body.split_at(split);
        let mut wire = head.clone().into_bytes();
        for piece in [first, rest] {
            wire.extend(format!("{:X};name=\"value\"\r\n", piece.len()).bytes());
            wire.extend(piece);
            wire.extend(b"\r\n");
        }
        wire.extend(b"000\r\nTrailer: dropped\r\n\r\n");
        assert_eq!(socket.ask(wire).await.status, 200, "{split}");
        assert!(world.recorder().take()[0].body == body, "{split}");
    }
    // The same wire in two packets, cut at every byte of the framing too.
    let wire = framed(PUSH, &acme.headers(), body, Framing::Chunks(9));
    let start = wire.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    for cut in start..wire.len() {
        let answer = socket.ask_in_pieces(&[&wire[..cut], &wire[cut..]]).await;
        assert_eq!(answer.status, 200, "{cut}");
        assert!(world.recorder().take()[0].body == body, "{cut}");
    }
    assert_eq!(world.recorder().connections(), 1, "one connection all along");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inspected_body_arrives_in_every_framing_and_size() {
    let (world, acme) = world(World::builder(), "{}").await;
    let sizes = [
        1,
        2,
        64 * KIB - 1,
        64 * KIB,
        64 * KIB + 1,
        128 * KIB - 1,
        128 * KIB,
        128 * KIB + 1,
        1 << 20,
        16 << 20,
    ];
    for size in sizes {
        // No JSON at the smallest sizes: those go on as well.
        let mut body = br#"{"items":[]"#.to_vec();
        body.resize(size.max(1) - 1, b' ');
        body.push(b'}');
        body.truncate(size);
        for framing in FRAMINGS.into_iter().chain([Framing::Chunks(64 * KIB), Framing::Chunks(size)]) {
            let mut socket = Socket::open(world.port()).await;
            let answer = socket.ask(framed(PUSH, &acme.headers(), &body, framing)).await;
            assert_eq!(answer.status, 200, "{size} {framing:?}");
            let seen = world.recorder().take();
            assert_eq!(seen.len(), 1, "{size} {framing:?}");
            assert!(seen[0].body == body, "{size} {framing:?}: {} bytes", seen[0].body.len());
            assert_eq!(seen[0].all("content-length"), [size.to_string()]);
            assert!(seen[0].all("transfer-encoding").is_empty(), "{size} {framing:?}");
        }
    }
    let heads = world.recorder().heads();
    // One more is too much, whether or not it is announced, and the cell hears nothing of it.
    let body = vec![b' '; (16 << 20) + 1];
    for framing in FRAMINGS {
        let mut socket = Socket::open(world.port()).await;
        // A client that is too slow to send all of it in the time for that finds an end in its place.
        socket.send(framed(PUSH, &acme.headers(), &body, framing)).await;
        if let Some(answer) = socket.answer().await {
            assert_eq!(outcome(&answer), refused(413, "payload_too_large"), "{framing:?}");
            assert_eq!(error(&answer), "request body exceeds cap");
        }
    }
    assert_eq!(world.recorder().heads(), heads, "not even the head of a refused request");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_push_keeps_the_connection_and_never_reaches_the_cell() {
    let caps = r#"{"max_payload_bytes": 20, "max_batch_items": 3}"#;
    let (world, acme) = world(World::builder(), caps).await;
    let long = format!(r#"{{"items":[1,2,3,4]}}{}"#, " ".repeat(200 * KIB));
    for framing in FRAMINGS {
        let mut socket = Socket::open(world.port()).await;
        let mut ask =
            async |body: &str| socket.ask(framed(PUSH, &acme.headers(), body.as_bytes(), framing)).await;
        assert_eq!(ask(&push(3, "0123456789")).await.status, 200);
        let heavy =
            ask(r#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":"01234567890123456789"}]}"#)
                .await;
        assert_eq!(outcome(&heavy), refused(413, "payload_too_large"));
        let text = error(&heavy);
        assert!(text.contains("items[1]") && text.contains("22 bytes") && text.contains("(20)"), "{text}");
        for body in [&push(4, "x"), &long] {
            let many = ask(body).await;
            assert_eq!(outcome(&many), refused(413, "payload_too_large"), "{framing:?}");
            assert!(error(&many).contains("of 4 items exceeds max_batch_items (3)"), "{}", error(&many));
            assert_eq!(many.header("connection"), Some("keep-alive"), "{framing:?}");
        }
        assert_eq!(ask(&push(1, "x")).await.status, 200, "{framing:?}: the next one on the same connection");
    }
    assert_eq!(world.recorder().take().len(), 2 * FRAMINGS.len());
    assert_eq!(world.recorder().heads(), 2 * FRAMINGS.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_waits_for_100_hears_a_refusal_in_its_place() {
    let (world, acme) = world(World::builder(), r#"{"max_req_per_sec": 1, "req_burst": 1}"#).await;
    let body = push(1, "x");
    let mut sent = 0;
    for (framing, end) in [("Content-Length: 20000000\r\n", 413), ("Transfer-Encoding: chunked\r\n", 429)] {
        let mut socket = Socket::open(world.port()).await;
        if end == 429 {
            eventually("the one token is gone", LIMIT, async || {
                let answer = super::pushes(&world, &acme, &body).await;
                sent += usize::from(answer.status == 200);
                (answer.status == 429).then_some(())
            })
            .await;
        }
        let head = format!("{PUSH} HTTP/1.1\r\n{}Expect: 100-continue\r\n{framing}\r\n", acme.headers());
        let answer = socket.ask(head).await;
        assert_eq!(answer.status, end);
        // Whether it sends its body now, nobody can know.
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(socket.ends_within(LIMIT).await);
    }
    assert_eq!(world.recorder().heads(), sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_stands_behind_a_body_in_chunks_is_a_request_of_its_own_or_not_read() {
    let (world, acme) = world(World::builder(), r#"{"max_batch_items": 3}"#).await;
    let second = format!("GET /api/v1/pop/queue/second HTTP/1.1\r\n{}\r\n", acme.headers());
    for size in [100, 60 * KIB, 300 * KIB] {
        for (items, status) in [(1, 200), (4, 413)] {
            let body = push(items, "x") + &" ".repeat(size);
            let mut wire = framed(PUSH, &acme.headers(), body.as_bytes(), Framing::Chunks(5_000));
            wire.extend(second.bytes());
            let mut socket = Socket::open(world.port()).await;
            let answer = socket.ask(wire).await;
            assert_eq!(answer.status, status, "{size} {items}");
            // Either it is answered, or the client hears by an end that it has to ask again.
            let then = socket.answer().await.map(|answer| answer.status);
            assert!(matches!(then, None | Some(200)), "{size} {items}: {then:?}");
            let seen: Vec<_> =
                world.recorder().take().into_iter().map(|request| (request.line, request.body)).collect();
            let mut expected = Vec::new();
            if status == 200 {
                expected.push((PUSH.to_owned(), body.into_bytes()));
            }
            if then.is_some() {
                expected.push(("GET /api/v1/pop/queue/second".to_owned(), Vec::new()));
            }
            assert!(seen == expected, "{size} {items}: {} requests, {then:?}", seen.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_drips_is_ended_and_gives_its_memory_back() {
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder.env("QUEEN_PROXY_BODY_TIMEOUT_MS", 700), "{}").await;
    let head = format!("{PUSH} HTTP/1.1\r\n{}", acme.headers());
    let filler = " ".repeat(200 * KIB);
    let uploads = [
        ("Content-Length: 400000\r\n\r\n".to_owned(), " "),
        ("Transfer-Encoding: chunked\r\n\r\n".to_owned(), "1\r\n \r\n"),
        // Beyond what Pingora keeps for replay.
        (format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{filler}\r\n", filler.len()), "1\r\n \r\n"),
        (format!("Content-Length: 400000\r\n\r\n{filler}"), " "),
        ("Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(), "1\r\n \r\n"),
    ];
    for (start, drop) in uploads {
        let mut socket = Socket::open(world.port()).await;
        let begun = Instant::now();
        socket.send(format!("{head}{start}")).await;
        // One byte every now and then keeps every timeout between two of them from firing.
        let answer = socket.drip(drop, Duration::from_millis(20)).await.expect("an answer");
        assert_eq!(outcome(&answer), refused(408, "request_incomplete"));
        assert!(begun.elapsed() >= Duration::from_millis(700), "{:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(socket.ends_within(LIMIT).await);
    }
    metric_becomes(admin, "queen_proxy_buffered_bytes", 0.0).await;
    assert_eq!(world.recorder().heads(), 0, "the cell knows nothing of it");
    // In time is in time, however many pieces there are.
    let slow = framed(PUSH, &acme.headers(), push(1, "x").as_bytes(), Framing::Chunks(1));
    let pieces: Vec<&[u8]> = slow.chunks(100).collect();
    assert_eq!(Socket::open(world.port()).await.ask_in_pieces(&pieces).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_share_a_budget_of_memory() {
    let builder = World::builder().env("QUEEN_PROXY_BUFFER_BYTES", 1 << 20);
    let (builder, admin) = with_admin(builder.env("QUEEN_PROXY_MAX_BODY_BYTES", 400 * KIB));
    let (world, acme) = world(builder, "{}").await;
    let globex = tenant(&world, "globex", "{}").await;
    let held = 300 * KIB;
    let filler = " ".repeat(held);
    let upload = |tenant: &crate::support::Tenant, chunked: bool| {
        let framing = if chunked {
            format!("Transfer-Encoding: chunked\r\n\r\n{held:x}\r\n{filler}\r\n")
        } else {
            format!("Content-Length: {}\r\n\r\n{filler}", held + 11)
        };
        format!("{PUSH} HTTP/1.1\r\n{}{framing}", tenant.headers())
    };
    let holds = async |bytes: usize| {
        #[allow(clippy::cast_precision_loss)] // far from 2^52
        metric_becomes(admin, "queen_proxy_buffered_bytes", bytes as f64).await;
    };
    let mut first = Socket::open(world.port()).await;
    first.send(upload(&acme, false)).await;
    holds(held).await;
    // A cluster has no more than one body of the largest size: the next has to come again.
    for chunked in [false, true] {
        let mut socket = Socket::open(world.port()).await;
        let mut request = upload(&acme, chunked);
        request.push_str(if chunked { "0\r\n\r\n" } else { "           " });
        let refusal = socket.ask(request).await;
        assert_eq!((outcome(&refusal), retry_after(&refusal)), (refused(503, "unavailable"), 1));
        assert_eq!(refusal.header("connection"), Some("keep-alive"), "{chunked}");
        // What was sent has been read, so the connection goes on.
        assert_eq!(socket.ask(framed(PUSH, &acme.headers(), b"{}", Framing::Length)).await.status, 200);
    }
    // Others have room.
    let mut second = Socket::open(world.port()).await;
    second.send(upload(&globex, true)).await;
    holds(2 * held).await;
    // A client that goes away gives it back at once, one that ends its upload when it is answered.
    drop(second);
    holds(held).await;
    assert_eq!(first.ask(" ".repeat(11)).await.status, 200);
    holds(0).await;
    world.recorder().take();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_admitted_is_counted_once_and_what_is_refused_not_at_all() {
    let caps = r#"{"max_req_per_sec": 1, "req_burst": 1000, "max_msgs_per_sec": 1, "msgs_burst": 1000, "max_batch_items": 9}"#;
    let (builder, admin) = with_admin(World::builder());
    let (world, acme) = world(builder, caps).await;
    world.recorder().reply(Reply::Text(201, "[]".to_owned()));
    let begun = Instant::now();
    let (mut requests, mut messages) = (0, 0);
    for framing in FRAMINGS {
        for (items, padding) in [(1, 0), (9, 0), (10, 0), (3, 100 * KIB), (11, 300 * KIB)] {
            let body = push(items, "x") + &" ".repeat(padding);
            let mut socket = Socket::open(world.port()).await;
            let answer = socket.ask(framed(PUSH, &acme.headers(), body.as_bytes(), framing)).await;
            if items <= 9 {
                assert_eq!(answer.status, 201);
                (requests, messages) = (requests + 1, messages + items);
            } else {
                assert_eq!(outcome(&answer), refused(413, "payload_too_large"));
            }
        }
    }
    let left = live(admin, &acme).await;
    // One of each comes back every second.
    let back = begun.elapsed().as_secs() + 1;
    for (bucket, spent) in [("requests", requests), ("messages", messages as u64)] {
        let left = left[bucket]["left"].as_u64().unwrap();
        let range = 1_000 - spent..=1_000 - spent + back;
        assert!(range.contains(&left), "{bucket}: {left} of {range:?}");
    }
    assert_eq!(world.recorder().take().len() as u64, requests);
    assert_eq!(
        metric(admin, r#"queen_proxy_limit_denials_total{limit="batch",outcome="refused"}"#).await,
        Some(8.0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cap_on_payloads_holds_on_every_route_that_stores_them_and_says_which_one() {
    let (world, acme) = world(World::builder(), r#"{"max_payload_bytes": 8, "max_batch_items": 2}"#).await;
    world.sql("UPDATE queen_proxy.plans SET features = '{\"streams\": true, \"ephemeral\": true}'").await;
    let (light, heavy) = (r#"{"queue":"q","payload":"123456"}"#, r#"{"queue":"q","payload": "1234567" }"#);
    let routes = [
        ("/api/v1/push", format!(r#"{{"items":[{light},{heavy}]}}"#), "items[1]"),
        ("/api/v1/transaction", format!(r#"{{"operations":[{light},{heavy}]}}"#), "operations[1]"),
        ("/streams/v1/cycle", format!(r#"{{"push_items":[{light},{heavy}]}}"#), "push_items[1]"),
    ];
    for (route, body, which) in &routes {
        for framing in FRAMINGS {
            let mut socket = Socket::open(world.port()).await;
            let request = framed(&format!("POST {route}"), &acme.headers(), body.as_bytes(), framing);
            let answer = socket.ask(request).await;
            assert_eq!(outcome(&answer), refused(413, "payload_too_large"), "{route}");
            assert_eq!(
                error(&answer),
                format!("{which}: a payload of 9 bytes exceeds max_payload_bytes (8)"),
                "{route}"
            );
        }
        let fits = body.replace(heavy, light);
        assert_eq!(world.ask(&format!("POST {route}"), &acme.headers(), &fits).await.status, 200, "{route}");
    }
    // The cap on items is not one on what a stream puts out, nor on what is not kept.
    for (route, list) in [("/streams/v1/cycle", "push_items"), ("/api/v1/ephemeral/push", "messages")] {
        let body = format!(r#"{{"{list}":[{light},{light},{light}]}}"#);
        assert_eq!(world.ask(&format!("POST {route}"), &acme.headers(), &body).await.status, 200, "{route}");
    }
    assert_eq!(world.recorder().take().len(), routes.len() + 2);
}
