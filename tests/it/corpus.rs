//! The corpus of requests in `corpus/`: the cell sees exactly the requests that were answered for it
//! (`notes/cases.md` 1–3, 13).

use crate::support::{Socket, World};
use std::time::Duration;

fn bytes(text: &str, own: &str, host: &str, key: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&kind, after) = rest.split_first().expect("something after a backslash");
        rest = after;
        out.push(match kind {
            b'r' => b'\r',
            b'n' => b'\n',
            b't' => b'\t',
            b'x' => {
                let (digits, after) = rest.split_at(2);
                rest = after;
                u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap()
            }
            other => other,
        });
    }
    let smuggled = format!("GET /api/v1/kv/ns/smuggled HTTP/1.1\r\n{own}\r\n");
    for (name, value) in [("{own}", own), ("{smuggled}", &smuggled), ("{host}", host), ("{key}", key)] {
        while let Some(at) = out.windows(name.len()).position(|window| window == name.as_bytes()) {
            out.splice(at..at + name.len(), value.bytes());
        }
    }
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cell_sees_exactly_what_was_answered_for_it() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let plain = format!("GET /api/v1/kv/ns/after HTTP/1.1\r\n{}\r\n", acme.headers());
    let corpus = include_str!("corpus/http1.txt");
    let mut wrong = Vec::new();
    let mut cases = 0;
    for line in corpus.lines().filter(|line| !line.starts_with('#')) {
        let [name, expected, request] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("three fields: {line}")
        };
        cases += 1;
        // Whole, and byte by byte: a parser must not depend on where the pieces were cut.
        for piece in [usize::MAX, 1] {
            let request = bytes(request, &acme.headers(), &acme.host(), &acme.key);
            let mut socket = Socket::open(world.port()).await;
            for piece in request.chunks(piece) {
                if !socket.send(piece).await {
                    break;
                }
                if piece.len() == 1 {
                    tokio::task::yield_now().await;
                }
            }
            let mut words = expected.split(' ');
            let (mut seen, mut answers) = (Vec::new(), 0);
            for status in words.by_ref().take_while(|word| word.parse::<u16>().is_ok()) {
                let answer = socket.answer().await;
                if let Some(answer) = &answer {
                    answers += usize::from(answer.status == 200 && answer.body == b"{}");
                }
                let answer = answer.map_or("end".to_owned(), |answer| answer.status.to_string());
                seen.push(format!("{answer}{}", if answer == status { "" } else { "!" }));
            }
            if expected.contains("open") {
                let kept = socket.send(&plain).await && {
                    let answer = socket.answer().await;
                    answers += usize::from(answer.is_some());
                    answer.is_some_and(|answer| answer.status == 200)
                };
                seen.push(if kept { "open" } else { "end!" }.to_owned());
            } else {
                let ends =
                    socket.answer().await.is_none() && socket.ends_within(Duration::from_secs(5)).await;
                seen.push(if ends { "end" } else { "open!" }.to_owned());
            }
            let at_cell = world.recorder().take();
            let untouched = expected.contains("partial") || answers > 0 || world.recorder().take_bytes() == 0;
            if at_cell.len() != answers || !untouched {
                seen.push(format!("but the cell saw {at_cell:?} for {answers} answers!"));
            }
            world.recorder().take_bytes();
            let seen = seen.join(" ");
            if seen.contains('!') {
                wrong.push(format!("{name}: wanted {expected}, got {seen} ({piece} bytes at a time)"));
            }
        }
    }
    assert!(cases >= 60, "{cases}");
    assert!(wrong.is_empty(), "{} of {cases}:\n{}", wrong.len(), wrong.join("\n"));
}
