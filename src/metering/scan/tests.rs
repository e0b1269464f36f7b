//! Every row of §13's tables, with the body cut at every byte.

use super::{Sinks, Unreadable};
use crate::metering::sample::{Counts, MeteredRoute, Op, RequestFacts, Usage, Watch};
use MeteredRoute::{Cycle, EphemeralPush, Other, Pop, Push, Replay, Transaction};

const NAME: usize = 16;

fn sinks() -> Sinks {
    let mut sinks = Sinks::default();
    sinks.add("orders", "", 2);
    sinks.add("orders", "eu", 30);
    sinks.add("\u{1f40e} \"x\"", "Default", 400);
    sinks.add("orders", "eu", 1);
    sinks
}

fn usage(route: MeteredRoute, status: u16, pieces: &[&[u8]]) -> Usage {
    let facts = RequestFacts { bytes_in: 7, ingress: 5, sinks: sinks() };
    let mut watch = Watch::new(route, facts, NAME);
    watch.head(status, None);
    for piece in pieces {
        watch.piece(piece);
    }
    watch.finish()
}

/// The messages, or why they are not known; the same however the body is cut.
fn messages(route: MeteredRoute, status: u16, body: &str) -> Result<u64, Unreadable> {
    let body = body.as_bytes();
    let whole = usage(route, status, &[body]);
    for at in 0..=body.len() {
        assert_eq!(usage(route, status, &[&body[..at], &body[at..]]), whole, "cut at {at}");
        for end in at..body.len().min(at + 8) {
            let pieces = [&body[..at], &body[at..end], &body[end..]];
            assert_eq!(usage(route, status, &pieces), whole, "cut at {at} and {end}");
        }
    }
    let bytes: Vec<&[u8]> = body.chunks(1).collect();
    assert_eq!(usage(route, status, &bytes), whole, "byte by byte");
    assert_eq!(whole.first.counts.bytes_out, body.len() as u64);
    let messages = whole.samples().map(|sample| sample.counts.msgs).sum();
    match whole.unreadable {
        Some(error) => {
            assert_eq!(messages, 0, "what cannot be read bills nothing");
            Err(error)
        }
        None => Ok(messages),
    }
}

#[test]
fn what_each_answer_means() {
    use Unreadable::{Name, NotJson, Shape, Truncated};
    #[rustfmt::skip]
    let cases: &[(MeteredRoute, u16, &str, Result<u64, Unreadable>)] = &[
        // Pushes: stored, not sent.
        (Push, 201, r#"[{"index":0,"status":"queued"},{"status":"buffered"},{"status":"duplicate"},{"status":"failed"}]"#, Ok(2)),
        (Push, 200, r#" [ { "status" : "queued" , "index" : 1 } ] "#, Ok(1)),
        (Push, 201, "[]", Ok(0)),
        (Push, 202, r#"["queued", 3, null, ["queued"], {"status":["queued"]}, {"x":{"status":"queued"}}]"#, Ok(0)),
        (Push, 201, r#"[{"st\u0061tus":"\u0071ueued"}]"#, Ok(1)),
        (Push, 201, r#"[{"status":"queued","status":"failed"},{"status":"failed","status":"queued"}]"#, Ok(1)),
        (Push, 201, r#"[{"status":"queued","status":{"a":1}},{"status":"queued ","Status":"queued"}]"#, Ok(0)),
        (Push, 201, r#"[{"error":"{\"status\":\"queued\"},{\\","status":"queued"}]"#, Ok(1)),
        (Push, 201, r#"[{"messageId":"0123456789012345678901234567890123456789","status":"queued"}]"#, Ok(1)),
        (Push, 201, r#"{"status":"queued"}"#, Err(Shape)),
        (Push, 201, r#""queued""#, Err(Shape)),
        (Push, 201, "12 ", Err(Shape)),
        (Push, 201, r#"[{"status":"queued"}"#, Err(Truncated)),
        (Push, 201, r#"[{"status":"queued"},"#, Err(Truncated)),
        (Push, 201, r#"[{"status":"que"#, Err(Truncated)),
        (Push, 201, "", Err(Truncated)),
        (Push, 201, r#"[{"status":"queued"},]"#, Err(NotJson)),
        (Push, 201, r#"[{"status":"queued"}}"#, Err(NotJson)),
        (Push, 201, r#"[{"status":"queued"}][]"#, Err(NotJson)),
        (Push, 201, r#"[{"status":"queued"}] 5"#, Err(NotJson)),
        (Push, 201, r#"[{"status" "queued"}]"#, Err(NotJson)),
        (Push, 201, r#"[{"status":queued}]"#, Err(NotJson)),
        (Push, 201, r#"[{"status":"\q"}]"#, Err(NotJson)),
        (Push, 201, r#"[{"status":"\u12g4"}]"#, Err(NotJson)),
        (Push, 201, "<html>queued</html>", Err(NotJson)),
        (Push, 400, r#"[{"status":"queued"}]"#, Ok(0)),
        (Push, 500, "not read", Ok(0)),
        // Ephemeral pushes: what the cell says.
        (EphemeralPush, 200, r#"{"pushed":12}"#, Ok(12)),
        (EphemeralPush, 200, r#"{"x":{"pushed":12},"pushed":3,"y":[{"pushed":4}]}"#, Ok(3)),
        (EphemeralPush, 200, r#"{"pushed":1,"pushed":2}"#, Ok(2)),
        (EphemeralPush, 200, r#"{"pushed":123456789012345678901234567890123456789}"#, Err(Shape)),
        (EphemeralPush, 200, r#"{"pushed":18446744073709551615}"#, Err(Shape)),
        (EphemeralPush, 200, r#"{"pushed":-1}"#, Err(Shape)),
        (EphemeralPush, 200, r#"{"pushed":"3"}"#, Err(Shape)),
        (EphemeralPush, 200, "{}", Err(Shape)),
        (EphemeralPush, 200, r#"[{"pushed":1}]"#, Err(Shape)),
        // Transactions: 5 were put in.
        (Transaction, 200, r#"{"success":true,"results":[{"type":"push"},{"type":"ack"}]}"#, Ok(5)),
        (Transaction, 201, r#"{"results":[{"type":"push","duplicate":true},{"type":"ack","duplicate":true},{"duplicate":true,"type":"push"}],"success":true}"#, Ok(3)),
        (Transaction, 200, r#"{"success":true,"results":[{"type":"push","duplicate":"true"},{"type":"push","duplicate":false}]}"#, Ok(5)),
        (Transaction, 200, r#"{"success":true,"results":[{"type":"push","duplicate":true}],"results":[]}"#, Ok(5)),
        (Transaction, 200, r#"{"success":true,"results":[{"r":{"type":"push","duplicate":true}},[{"type":"push","duplicate":true}]]}"#, Ok(5)),
        (Transaction, 200, r#"{"success":true,"results":[{"type":"push","duplicate":true},{"type":"push","duplicate":true},{"type":"push","duplicate":true},{"type":"push","duplicate":true},{"type":"push","duplicate":true},{"type":"push","duplicate":true}]}"#, Ok(0)),
        (Transaction, 200, r#"{"success":false,"results":[{"type":"push"}]}"#, Ok(0)),
        (Transaction, 200, r#"{"success":true,"success":false}"#, Ok(0)),
        (Transaction, 200, r#"{"transactionId":"x"}"#, Err(Shape)),
        (Transaction, 200, r#"{"success":"true"}"#, Err(Shape)),
        (Transaction, 409, r#"{"success":true}"#, Ok(0)),
        // Pops: what is in the list.
        (Pop, 200, r#"{"messages":[{"id":"a","data":{"messages":[1,2]}},{"id":"b","data":"]}"}],"success":true}"#, Ok(2)),
        (Pop, 200, r#"{"success":false,"messages":[]}"#, Ok(0)),
        (Pop, 200, r#"{"messages":[1,"a",null,[],{}]}"#, Ok(5)),
        (Pop, 200, r#"{"messages":[1,2],"messages":[3]}"#, Ok(1)),
        (Pop, 200, r#"{"data":{"messages":[1,2]},"messages":[3]}"#, Ok(1)),
        (Pop, 200, r#"{"messages":null}"#, Ok(0)),
        (Pop, 200, r#"{"messages":[1],"messages":{}}"#, Err(Shape)),
        (Pop, 200, r#"{"messages":[{"data":[[[[{"a":"\"]\\"}]]]]}]}"#, Ok(1)),
        (Pop, 200, "{\"messages\":[{\"data\":\"\u{1f40e}\u{e9}\"}]}", Ok(1)),
        (Pop, 200, r#"{"messages":[1,2"#, Err(Truncated)),
        (Pop, 200, "", Ok(0)),
        (Pop, 204, "{\"error\":\"paused\"}", Ok(0)),
        (Pop, 404, r#"{"messages":[1]}"#, Ok(0)),
        // Cycles: what was put into the groups that were queued.
        (Cycle, 200, r#"{"success":true,"push_results":[{"queue":"orders","partition":"Default","status":"queued"}]}"#, Ok(2)),
        (Cycle, 200, r#"{"push_results":[{"queue":"orders","status":"queued"},{"queue":"orders","partition":null,"status":"queued"}]}"#, Ok(2)),
        (Cycle, 200, r#"{"push_results":[{"status":"queued","partition":"\u0065u","queueName":"order\u0073"},{"queue":"orders","partition":"us","status":"queued"}]}"#, Ok(31)),
        (Cycle, 200, r#"{"push_results":[{"queue":"\ud83d\udc0e \"x\"","partition":"","status":"queued"}]}"#, Ok(400)),
        (Cycle, 200, r#"{"push_results":[{"queue":"\ud83d \"x\"","status":"queued"},{"queue":"\udc0e\ud83d\ud83d\u0041","status":"queued"}]}"#, Ok(0)),
        (Cycle, 200, r#"{"push_results":[{"queue":"orders","status":"failed"},{"queue":"orders","partition":"eu","status":"duplicate"}]}"#, Ok(0)),
        (Cycle, 200, r#"{"push_results":[{"queue":"orders","status":"queued"}],"success":false}"#, Ok(0)),
        (Cycle, 200, r#"{"push_results":[{"queue":"orders","status":"queued"}],"push_results":[]}"#, Ok(0)),
        (Cycle, 200, r#"{"push_results":[{"queue":"a name longer than the bound","status":"failed"}]}"#, Ok(0)),
        (Cycle, 200, r#"{"push_results":[{"queue":"a name that is longer than the bound","status":"queued"}]}"#, Err(Name)),
        (Cycle, 200, r#"{"success":true}"#, Err(Shape)),
        (Cycle, 500, r#"{"push_results":[{"queue":"orders","status":"queued"}]}"#, Ok(0)),
        // Replays: one message, when it moved.
        (Replay, 200, r#"{"success":true,"result":"moved"}"#, Ok(1)),
        (Replay, 200, r#"{"result":"moved"}"#, Ok(1)),
        (Replay, 200, r#"{"success":false,"result":"moved"}"#, Ok(0)),
        (Replay, 200, r#"{"success":true,"result":"not_found"}"#, Ok(0)),
        (Replay, 200, r#"{"success":true,"a":{"result":"moved"}}"#, Ok(0)),
        (Replay, 404, r#"{"success":true,"result":"moved"}"#, Ok(0)),
        // The others are not read.
        (Other(Op::Read), 200, "anything", Ok(0)),
        (Other(Op::Configure), 200, r#"{"messages":[1]}"#, Ok(0)),
    ];
    for (route, status, body, expected) in cases {
        assert_eq!(messages(*route, *status, body), *expected, "{route:?} {status} {body}");
    }
}

#[test]
fn the_two_samples() {
    let of = |route, body: &str| usage(route, 200, &[body.as_bytes()]);
    let body = r#"{"push_results":[{"queue":"orders","status":"queued"}]}"#;
    let cycle = of(Cycle, body);
    let bytes_out = body.len() as u64;
    assert_eq!(cycle.first.op, Op::Read);
    assert_eq!(cycle.first.counts, Counts { reqs: 1, msgs: 0, bytes_in: 7, bytes_out });
    let second = cycle.second.unwrap();
    assert_eq!((second.op, second.counts), (Op::Push, Counts { msgs: 2, ..Counts::default() }));
    let replay = of(Replay, r#"{"result":"moved"}"#);
    assert_eq!((replay.first.op, replay.first.counts.reqs, replay.first.counts.msgs), (Op::Configure, 1, 0));
    assert_eq!(replay.second.map(|second| (second.op, second.counts.msgs)), Some((Op::Push, 1)));
    assert_eq!(of(Replay, r#"{"result":"gone"}"#).second, None);
    let pop = of(Pop, r#"{"messages":[1]}"#);
    assert_eq!((pop.first.op, pop.first.counts.bytes_in, pop.first.counts.msgs), (Op::Delivery, 0, 1));
    assert!(of(Push, r#"[{"status":"buffered"},{"status":"buffered"},{"status":"queued"}]"#).mostly_buffered);
    assert!(!of(Push, r#"[{"status":"buffered"},{"status":"queued"}]"#).mostly_buffered);
    assert!(!of(Push, "[]").mostly_buffered);
}

#[test]
fn a_cell_that_does_not_answer_counts_as_a_request() {
    for route in [Push, EphemeralPush, Transaction, Pop, Cycle, Replay, Other(Op::Read)] {
        let watch = Watch::new(route, RequestFacts { bytes_in: 7, ingress: 5, sinks: sinks() }, NAME);
        let usage = watch.finish();
        assert_eq!(usage.first.counts, Counts { reqs: 1, ..Counts::default() }, "{route:?}");
        assert_eq!((usage.first.op, usage.second, usage.unreadable), (route.op(), None, None), "{route:?}");
    }
}

/// Whoever ends the exchange while the cell works does not store for nothing.
#[test]
fn a_client_that_ends_the_exchange_pays_for_what_it_brought() {
    for (route, msgs) in [(Push, 5), (EphemeralPush, 5), (Transaction, 5), (Cycle, 5), (Replay, 0), (Pop, 0)]
    {
        let mut watch = Watch::new(route, RequestFacts { bytes_in: 7, ingress: 5, sinks: sinks() }, NAME);
        watch.client_left();
        let usage = watch.finish();
        assert_eq!(usage.samples().map(|sample| sample.counts.msgs).sum::<u64>(), msgs, "{route:?}");
        assert_eq!(usage.first.counts.bytes_in, if route == Pop { 0 } else { 7 }, "{route:?}");
    }
    let mut refused = Watch::new(Push, RequestFacts { ingress: 5, ..RequestFacts::default() }, NAME);
    refused.head(503, None);
    refused.client_left();
    assert_eq!(refused.finish().first.counts.msgs, 0, "the cell said that it stored nothing");
}

/// Who leaves before the last byte has the messages before it. An answer that the cell breaks off is none.
#[test]
fn an_answer_that_its_client_does_not_read_to_the_end_bills_what_it_told_of() {
    let push = r#"[{"status":"queued"},{"status":"failed"},{"status":"buffered"},{"status":"queued""#;
    let transaction = r#"{"success":true,"results":[{"type":"push"}"#;
    for (route, body, expected) in [
        (Pop, r#"{"messages":[{"data":1},{"data":{"messages":[1,2]}},{"data":"#, 3),
        (Pop, r#"{"messages":[{"data":1},{"data":2}],"success":tr"#, 2),
        (Pop, r#"{"messages":[{"data":1},{"data":2}],"success":true}"#, 2),
        (Pop, r#"{"success":true,"mess"#, 0),
        (Pop, "", 0),
        (Push, push, 5),
        (Transaction, transaction, 5),
        (Replay, r#"{"result":"moved""#, 0),
    ] {
        let of = |left: bool| {
            let mut watch = Watch::new(route, RequestFacts { ingress: 5, ..RequestFacts::default() }, NAME);
            watch.head(200, None);
            watch.piece(body.as_bytes());
            if left {
                watch.client_left();
            }
            let usage = watch.finish();
            (usage.samples().map(|sample| sample.counts.msgs).sum::<u64>(), usage.unreadable)
        };
        assert_eq!(of(true), (expected, None), "{body}");
        let whole = body.is_empty() || body.ends_with("true}");
        assert_eq!(of(false).1, (!whole).then_some(Unreadable::Truncated), "{body}");
        assert!(whole || of(false).0 == 0, "{body}");
    }
    let mut watch = Watch::new(Pop, RequestFacts::default(), NAME);
    watch.head(200, None);
    watch.piece(br#"{"messages":[1,2,}"#);
    watch.client_left();
    assert_eq!(watch.finish().unreadable, Some(Unreadable::NotJson), "whoever left");
}

#[test]
fn a_compressed_answer_cannot_be_read_and_says_so() {
    let body = br#"[{"status":"queued"}]"#;
    for (encoding, expected) in [
        (&b"gzip"[..], (0, Some(Unreadable::Encoded))),
        (b"identity, br", (0, Some(Unreadable::Encoded))),
        (b" Identity ", (1, None)),
        (b"", (1, None)),
    ] {
        let mut watch = Watch::new(Push, RequestFacts::default(), NAME);
        watch.head(200, Some(encoding));
        watch.piece(body);
        let usage = watch.finish();
        assert_eq!((usage.first.counts.msgs, usage.unreadable), expected, "{encoding:?}");
        assert_eq!(usage.first.counts.bytes_out, 21);
    }
    let mut watch = Watch::new(Other(Op::Read), RequestFacts::default(), NAME);
    watch.head(200, Some(b"gzip"));
    assert_eq!(watch.finish().unreadable, None, "nobody wanted to read it");
}

/// A payload may be as large, and nest as deep, as a tenant likes: it must not go unbilled.
#[test]
fn large_bodies_take_no_memory() {
    let deep = [b"[".repeat(1 << 20), b"]".repeat(1 << 20)].concat();
    let long = [b"\"", b"x{[,\\\\".repeat(1 << 18).as_slice(), b"\""].concat();
    let mut watch = Watch::new(Pop, RequestFacts::default(), NAME);
    watch.head(200, None);
    let grown = allocation_counter::measure(|| {
        watch.piece(br#"{"messages":["#);
        for _ in 0..16 {
            for payload in [&deep, &long] {
                watch.piece(br#"{"data":"#);
                watch.piece(payload);
                watch.piece(b"},");
            }
        }
        watch.piece(b"null]}");
    });
    assert!(grown.bytes_max < 1_000, "{} bytes", grown.bytes_max);
    let usage = watch.finish();
    assert!(usage.first.counts.bytes_out > 48 << 20);
    assert_eq!((usage.first.counts.msgs, usage.unreadable), (33, None));
}
