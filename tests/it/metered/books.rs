//! A cell that answers as a test tells it, in the pieces that it tells.

use crate::support::{Recorded, Seen, read_request};
use std::{fmt::Write, sync::Arc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
    task::JoinHandle,
};

/// What the cell does with a request.
pub enum Told {
    /// It answers.
    Answer(Answer),
    /// It answers when it is told to, and says when it has.
    After(Arc<Notify>, Arc<Semaphore>, Box<Told>),
    /// It closes the connection.
    Close,
    /// It never answers.
    Never,
    /// It sends bytes that are not HTTP.
    Garbage,
}

/// An answer.
pub struct Answer {
    pub status: u16,
    /// Lines, each ended by `\r\n`.
    pub headers: String,
    pub body: Body,
}

/// A body, and how it is framed.
pub enum Body {
    /// Its length is told.
    Whole(Vec<u8>),
    /// Chunked, each piece a chunk: the proxy sees it cut there.
    Pieces(Vec<Vec<u8>>),
    /// It ends with the connection.
    UntilClose(Vec<u8>),
    /// More is promised than comes.
    Broken(Vec<u8>),
    /// A first piece, and the rest when it is asked for.
    Held(Vec<u8>, Arc<Notify>, Vec<u8>),
    /// A first piece, one that comes many times, and a last one.
    Long { first: Vec<u8>, again: Vec<u8>, times: usize, last: Vec<u8> },
}

impl Told {
    /// An answer whose length is told.
    pub fn answer(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self::Answer(Answer { status, headers: String::new(), body: Body::Whole(body.into()) })
    }

    /// An answer with this body.
    pub fn body(status: u16, body: Body) -> Self {
        Self::Answer(Answer { status, headers: String::new(), body })
    }

    /// The same with another header.
    pub fn header(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        if let Self::Answer(answer) = &mut self {
            let _ = write!(answer.headers, "{name}: {value}\r\n");
        }
        self
    }
}

/// See the module.
pub struct Books {
    pub port: u16,
    task: JoinHandle<()>,
}

impl Books {
    pub async fn start(tell: impl Fn(&Recorded) -> Told + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let tell = Arc::new(tell);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&tell)));
            }
        });
        Self { port, task }
    }
}

impl Drop for Books {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, tell: Arc<impl Fn(&Recorded) -> Told>) {
    let _ = stream.set_nodelay(true);
    let mut unread = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut unread, &Seen::default()).await {
        let mut told = tell(&request);
        let mut answered = None;
        if let Told::After(gate, then, later) = told {
            gate.notified().await;
            (told, answered) = (*later, Some(then));
        }
        let goes_on = match told {
            Told::Answer(answer) => respond(&mut stream, &request, answer).await,
            Told::Close | Told::After(..) => None,
            Told::Never => {
                // Until the other side has gone.
                let _ = stream.read(&mut [0; 1]).await;
                None
            }
            Told::Garbage => {
                let _ = stream.write_all(b"\x00\x01 this is not HTTP\r\n\r\n").await;
                None
            }
        };
        if let Some(answered) = answered {
            answered.add_permits(1);
        }
        if goes_on.is_none() {
            return;
        }
    }
}

/// `None`: the connection is at its end.
async fn respond(stream: &mut TcpStream, request: &Recorded, answer: Answer) -> Option<()> {
    let length = match &answer.body {
        Body::Whole(body) => format!("content-length: {}\r\n", body.len()),
        Body::Broken(body) => format!("content-length: {}\r\n", body.len() + 1),
        Body::UntilClose(_) => "connection: close\r\n".to_owned(),
        Body::Pieces(_) | Body::Held(..) | Body::Long { .. } => "transfer-encoding: chunked\r\n".to_owned(),
    };
    let head = format!(
        "HTTP/1.1 {} x\r\ncontent-type: application/json\r\n{length}{}\r\n",
        answer.status, answer.headers
    );
    let mut out = head.into_bytes();
    if request.line.starts_with("HEAD ") {
        return stream.write_all(&out).await.ok();
    }
    match answer.body {
        Body::Whole(body) => {
            out.extend(body);
            stream.write_all(&out).await.ok()
        }
        Body::UntilClose(body) | Body::Broken(body) => {
            out.extend(body);
            let _ = stream.write_all(&out).await;
            None
        }
        Body::Pieces(pieces) => {
            for piece in &pieces {
                chunk(&mut out, piece);
            }
            out.extend(b"0\r\n\r\n");
            stream.write_all(&out).await.ok()
        }
        Body::Held(first, gate, rest) => {
            chunk(&mut out, &first);
            stream.write_all(&out).await.ok()?;
            gate.notified().await;
            out.clear();
            chunk(&mut out, &rest);
            out.extend(b"0\r\n\r\n");
            stream.write_all(&out).await.ok()
        }
        Body::Long { first, again, times, last } => {
            chunk(&mut out, &first);
            stream.write_all(&out).await.ok()?;
            out.clear();
            chunk(&mut out, &again);
            for _ in 0..times {
                stream.write_all(&out).await.ok()?;
            }
            out.clear();
            chunk(&mut out, &last);
            out.extend(b"0\r\n\r\n");
            stream.write_all(&out).await.ok()
        }
    }
}

fn chunk(out: &mut Vec<u8>, piece: &[u8]) {
    // An empty one would end the body.
    if !piece.is_empty() {
        out.extend(format!("{:x}\r\n", piece.len()).bytes());
        out.extend(piece);
        out.extend(b"\r\n");
    }
}
