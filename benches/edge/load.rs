//! The clients: kept connections in one thread, each with one request at a time, spread over all clusters.

use crate::{
    names,
    ready::{self, Poll},
    upstream::{FOUND, PUSHED},
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// A step through the clusters that processors do not foresee.
const STRIDE: usize = 7_919;
/// So long nobody takes for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Load {
    /// A read with an answer of 200 bytes.
    Get,
    /// A push of 1 KiB.
    Post1k,
    /// A push of 64 KiB.
    Post64k,
    /// Long polls that wait at the same time.
    Polls,
}

impl Load {
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET, answer of 200 bytes",
            Self::Post1k => "POST of 1 KiB",
            Self::Post64k => "POST of 64 KiB",
            Self::Polls => "parked polls",
        }
    }
}

/// When it is enough.
#[derive(Clone, Copy)]
pub enum Until {
    Passed(Duration),
    Asked(usize),
}

/// What a run came to; times in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub requests: usize,
    pub seconds: f64,
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
}

/// All requests of a load.
struct Requests {
    /// By cluster.
    heads: Vec<Vec<u8>>,
    body: Vec<u8>,
    answer: &'static str,
}

impl Requests {
    fn new(load: Load, clusters: usize) -> Self {
        let (line, body, answer) = match load {
            Load::Get => ("GET /api/v1/kv/orders/2026/11/30/0001", Vec::new(), FOUND),
            Load::Post1k => ("POST /api/v1/push", push(1 << 10), PUSHED),
            Load::Post64k => ("POST /api/v1/push", push(64 << 10), PUSHED),
            Load::Polls => ("GET /api/v1/pop/queue/orders?wait=true&timeout=80000", Vec::new(), ""),
        };
        let content = if body.is_empty() {
            String::new()
        } else {
            format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())
        };
        let head = |number| {
            let (host, key) = (names::host(number), names::key(number));
            format!(
                "{line} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\
                 User-Agent: queen-mq/2.7.0\r\nAccept: */*\r\n{content}\r\n"
            )
            .into_bytes()
        };
        Self { heads: (0..clusters).map(head).collect(), body, answer }
    }
}

/// A push of one message, in all of just these bytes: an event with fields, as programs write them.
fn push(bytes: usize) -> Vec<u8> {
    let mut body = String::from(
        r#"{"items":[{"queue":"orders","partition":"Default","transactionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3d","payload":{"#,
    );
    let end = r#""}}]}"#;
    let mut field = 0;
    while body.len() + 100 < bytes {
        let more = format!(r#""field_{field}":{{"amount":{field}.25,"note":"caf\u00e9 {field}"}},"#);
        body.push_str(&more);
        field += 1;
    }
    body.push_str(r#""rest":""#);
    body.extend(std::iter::repeat_n('x', bytes - end.len() - body.len()));
    body.push_str(end);
    body.into_bytes()
}

struct Client {
    stream: TcpStream,
    head: usize,
    sent: usize,
    answer: Vec<u8>,
    began: Instant,
    done: bool,
}

/// What all clients share.
struct Run<'r> {
    requests: &'r Requests,
    until: Until,
    began: Instant,
    next: usize,
    asked: usize,
    latencies: Vec<u64>,
}

/// Sends them, and looks at each answer.
pub fn run(to: SocketAddr, load: Load, connections: usize, clusters: usize, until: Until) -> Outcome {
    let requests = Requests::new(load, clusters);
    let mut poll = Poll::new();
    let mut run =
        Run { requests: &requests, until, began: Instant::now(), next: 0, asked: 0, latencies: Vec::new() };
    let mut clients: Vec<Client> = (0..connections).map(|_| run.client(to)).collect();
    run.began = Instant::now();
    for (token, client) in (0..).zip(&mut clients) {
        poll.watch(&client.stream, token, ready::BOTH);
        run.begin(client);
    }
    let (mut events, mut heard) = (Vec::new(), Instant::now());
    while clients.iter().any(|client| !client.done) {
        poll.wait(&mut events);
        for &token in &events {
            run.go_on(&mut clients[usize::try_from(token).unwrap()]);
            heard = Instant::now();
        }
        assert!(heard.elapsed() < PATIENCE, "no answers any more");
    }
    let seconds = run.began.elapsed().as_secs_f64();
    let mut latencies = run.latencies;
    latencies.sort_unstable();
    let quantile = |of_1000: usize| latencies.get(latencies.len() * of_1000 / 1000).copied().unwrap_or(0);
    Outcome { requests: run.asked, seconds, p50: quantile(500), p99: quantile(990), p999: quantile(999) }
}

impl Run<'_> {
    fn client(&mut self, to: SocketAddr) -> Client {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        Client { stream, head: 0, sent: 0, answer: Vec::new(), began: self.began, done: false }
    }

    /// The next request, unless it is enough.
    fn begin(&mut self, client: &mut Client) {
        client.done = match self.until {
            Until::Passed(time) => self.began.elapsed() >= time,
            Until::Asked(count) => self.asked >= count,
        };
        if client.done {
            return;
        }
        self.asked += 1;
        self.next = (self.next + STRIDE) % self.requests.heads.len();
        client.head = self.next;
        client.sent = 0;
        client.began = Instant::now();
        self.send(client);
    }

    fn send(&self, client: &mut Client) {
        let (head, body) = (&self.requests.heads[client.head], &self.requests.body);
        while client.sent < head.len() + body.len() {
            let rest_of_head = &head[client.sent.min(head.len())..];
            let rest_of_body = &body[client.sent.saturating_sub(head.len())..];
            let parts = [IoSlice::new(rest_of_head), IoSlice::new(rest_of_body)];
            match client.stream.write_vectored(&parts) {
                Ok(count) => client.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn go_on(&mut self, client: &mut Client) {
        if client.done {
            return;
        }
        if client.sent < self.requests.heads[client.head].len() + self.requests.body.len() {
            self.send(client);
        }
        let mut piece = [0; 4 << 10];
        loop {
            let count = match client.stream.read(&mut piece) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("{error}"),
            };
            assert!(count > 0, "closed after {:?}", String::from_utf8_lossy(&client.answer));
            client.answer.extend_from_slice(&piece[..count]);
            if self.is_answered(&client.answer) {
                client.answer.clear();
                self.latencies.push(u64::try_from(client.began.elapsed().as_nanos()).unwrap());
                self.begin(client);
                return;
            }
            // Less than there was room for: the rest is an event of its own.
            if count < piece.len() {
                return;
            }
        }
    }

    /// Whether it is all there, and what it should be.
    fn is_answered(&self, answer: &[u8]) -> bool {
        let Some(head) = memchr::memmem::find(answer, b"\r\n\r\n") else { return false };
        let wrong = || String::from_utf8_lossy(answer);
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", wrong());
        let (body, want) = (&answer[head + 4..], self.requests.answer.as_bytes());
        assert!(want.starts_with(body), "{}", wrong());
        body.len() == want.len()
    }
}

/// Opens polls and holds them until it is killed.
pub fn park(to: SocketAddr, count: usize, clusters: usize) {
    let requests = Requests::new(Load::Polls, clusters);
    let polls: Vec<TcpStream> = (0..count)
        .map(|number| {
            let mut stream = TcpStream::connect(to).unwrap();
            stream.write_all(&requests.heads[number % clusters]).unwrap();
            stream
        })
        .collect();
    // None of them is answered in that time.
    std::thread::sleep(Duration::from_secs(600));
    drop(polls);
}
