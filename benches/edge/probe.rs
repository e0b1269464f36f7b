//! Whether a gateway does the work that it is measured for: who is refused, and what the cell is told.

use crate::{
    SECRET,
    candidates::{Candidate, Running},
    names, upstream,
};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// One request on a connection of its own; the whole answer, in small letters.
pub fn ask(to: SocketAddr, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let (mut answer, mut piece) = (Vec::new(), [0; 4 << 10]);
    loop {
        let text = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if length.is_some_and(|length| body.len() >= length.trim().parse().unwrap()) {
                return text;
            }
        }
        let count = stream.read(&mut piece).unwrap_or_else(|error| panic!("{error} after {text}"));
        answer.extend_from_slice(&piece[..count]);
        // A refusal of unknown length ends with its connection.
        if count == 0 {
            return text;
        }
    }
}

/// Panics when it does less than the others.
pub fn check(gateway: &Running) {
    if !matches!(gateway.candidate, Candidate::HaproxyGateway | Candidate::NginxLua | Candidate::Ours) {
        return;
    }
    let name = gateway.candidate.name();
    let (host, key) = (names::host(1), names::key(1));
    for (host, key, wanted) in [
        ("nobody.eu1.queen.example", &*key, &["421"][..]),
        (&*host, "qk_live_of_nobody", &["401"]),
        (&*host, &*names::key(2), &["401", "403"]),
    ] {
        let headers = format!("Host: {host}\r\nAuthorization: Bearer {key}\r\n");
        let answer = ask(gateway.address, "/api/v1/kv/orders/1", &headers);
        let status = answer.split_ascii_whitespace().nth(1).unwrap_or_default();
        assert!(wanted.contains(&status), "{name}: {host} with {key}: {answer}");
    }

    let headers = format!(
        "Host: {host}\r\nAuthorization: Bearer {key}\r\nCookie: a=b\r\nX-Queen-Tenant: another\r\n\
         X-Queen-Anything: x\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Prefix: /\r\n"
    );
    let answer = ask(gateway.address, &format!("/api/v1/kv/orders{}", upstream::ECHO), &headers);
    let (answered, seen) = answer.split_once("\r\n\r\n").unwrap();
    let has = |head: &str, start: &str| head.lines().any(|line| line.starts_with(start));
    for start in [
        &*format!("authorization: bearer {SECRET}"),
        "host: 127.0.0.1:",
        "x-queen-request-id: ",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
        &*format!("x-forwarded-host: {host}"),
    ] {
        assert!(has(seen, start), "{name}: no {start} in {seen}");
    }
    // A uuid.
    assert!(seen.lines().any(|line| line.strip_prefix("x-queen-tenant: ").is_some_and(|id| id.len() == 36)));
    for start in ["cookie", "x-queen-anything", "x-forwarded-prefix"] {
        assert!(!has(seen, start), "{name}: {start} in {seen}");
    }
    for start in ["x-queen-request-id: ", "ratelimit-policy: ", "ratelimit: "] {
        assert!(has(answered, start), "{name}: no {start} in {answered}");
    }
}
