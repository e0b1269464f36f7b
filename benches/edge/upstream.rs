//! What stands behind every candidate: one thread that answers at once, and holds polls until their client leaves.

use crate::ready::{self, Poll};
use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    mem,
    net::{TcpListener, TcpStream},
};
use tokio::{net::TcpSocket, runtime::Builder};

/// What a read is answered with: 200 bytes.
pub const FOUND: &str = r#"{"found":true,"value":{"customer":"acme","order":17,"lines":[{"sku":"a-1","count":2},{"sku":"b-7","count":1}],"note":"left at the door, as was agreed with the neighbours of house No. 17"},"version":3}"#;
/// What a push of one message is answered with.
pub const PUSHED: &str = r#"[{"index":0,"transactionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3d","messageId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3e","partitionId":"0193806e-6b5c-7c2e-9d4b-0e6f8a1b2c3f","status":"queued"}]"#;

/// Where it tells how many polls it holds.
pub const PARKED: &str = "/parked";

/// The end of paths whose answer is the head that came.
pub const ECHO: &str = "/echo";

const LISTENER: u64 = u64::MAX;

/// What comes next on a connection.
enum Awaited {
    /// The rest of a head.
    Head(Vec<u8>),
    /// So many bytes of a body, and what is answered then.
    Body(usize, Answer),
    /// Nothing: a poll that is held.
    Nothing,
}

enum Answer {
    Found,
    Pushed,
    Parked,
    Echo(String),
    Hold,
}

struct Connection {
    stream: TcpStream,
    awaited: Awaited,
}

/// Serves for ever.
pub fn serve(port: u16) {
    let listener = listen(port);
    let mut poll = Poll::new();
    poll.watch(&listener, LISTENER, ready::LISTENING);
    let mut connections = HashMap::new();
    let mut next = 0;
    let mut held = 0;
    let mut events = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        poll.wait(&mut events);
        for &ready in &events {
            if ready == LISTENER {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true).unwrap();
                    stream.set_nodelay(true).unwrap();
                    poll.watch(&stream, next, ready::READING);
                    connections.insert(next, Connection { stream, awaited: Awaited::Head(Vec::new()) });
                    next += 1;
                }
                continue;
            }
            let Some(connection) = connections.get_mut(&ready) else { continue };
            if !connection.read(&mut piece, &mut held) {
                held -= usize::from(matches!(connection.awaited, Awaited::Nothing));
                connections.remove(&ready);
            }
        }
    }
}

/// With a queue that takes thousands at once; the standard library's is short.
fn listen(port: u16) -> TcpListener {
    let runtime = Builder::new_current_thread().enable_io().build().unwrap();
    let _inside = runtime.enter();
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], port).into()).unwrap();
    socket.listen(4_096).unwrap().into_std().unwrap()
}

impl Connection {
    /// Takes what has come; whether the connection goes on.
    fn read(&mut self, piece: &mut [u8], held: &mut usize) -> bool {
        loop {
            match self.stream.read(piece) {
                Ok(0) => return false,
                Ok(count) => {
                    if !self.take(&piece[..count], held) {
                        return false;
                    }
                    // Less than there was room for: there is no more, and the next byte is an event of its own.
                    if count < piece.len() {
                        return true;
                    }
                }
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }

    fn take(&mut self, mut bytes: &[u8], held: &mut usize) -> bool {
        while !bytes.is_empty() {
            match &mut self.awaited {
                Awaited::Nothing => return true,
                Awaited::Head(head) => {
                    let before = head.len();
                    head.extend_from_slice(bytes);
                    let Some(end) = memchr::memmem::find(head, b"\r\n\r\n") else { return true };
                    bytes = &bytes[end + 4 - before..];
                    let (length, answer) = understand(&head[..end + 2]);
                    self.awaited = Awaited::Body(length, answer);
                }
                Awaited::Body(left, _) => {
                    let part = bytes.len().min(*left);
                    *left -= part;
                    bytes = &bytes[part..];
                }
            }
            if matches!(self.awaited, Awaited::Body(0, _))
                && let Awaited::Body(_, answer) = mem::replace(&mut self.awaited, Awaited::Head(Vec::new()))
                && !self.answer(answer, held)
            {
                return false;
            }
        }
        true
    }

    fn answer(&mut self, answer: Answer, held: &mut usize) -> bool {
        let text;
        let body = match answer {
            Answer::Found => FOUND,
            Answer::Pushed => PUSHED,
            Answer::Parked => {
                text = held.to_string();
                &text
            }
            Answer::Echo(head) => {
                text = head;
                &text
            }
            Answer::Hold => {
                *held += 1;
                self.awaited = Awaited::Nothing;
                return true;
            }
        };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        // A few hundred bytes into an empty buffer: they go at once or the connection is gone.
        matches!(self.stream.write(answer.as_bytes()), Ok(count) if count == answer.len())
    }
}

/// The length of the body, and what the request is answered with.
fn understand(head: &[u8]) -> (usize, Answer) {
    let head = std::str::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let line = lines.next().unwrap();
    let mut length = 0;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap();
        }
        assert!(!name.eq_ignore_ascii_case("transfer-encoding"), "nobody here has a reason for chunks");
    }
    let answer = match line {
        _ if line.starts_with("POST ") => Answer::Pushed,
        _ if line.contains("wait=true") => Answer::Hold,
        _ if line.contains(PARKED) => Answer::Parked,
        _ if line.contains(ECHO) => Answer::Echo(head.to_owned()),
        _ => Answer::Found,
    };
    (length, answer)
}
