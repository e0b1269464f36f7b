//! A stand-in for a cell that records every request and answers as it is told: for what a real cell
//! would not show (its connections, its headers) or not do (be late, break off).

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// A request as the cell got it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Request line without the version.
    pub line: String,
    /// Names in lower case, in order.
    pub headers: Vec<(String, String)>,
    /// The whole body, decoded.
    pub body: Vec<u8>,
}

impl Recorded {
    /// All values of a header.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// How it answers.
#[derive(Clone, Debug)]
pub enum Reply {
    /// 200 with this body at once.
    Json(&'static str),
    /// The same after a while, unless the client leaves before.
    Late(Duration),
    /// 200 with this body once [`Recorder::let_go`] has been called, unless the client leaves before.
    Kept(String),
    /// Never.
    Never,
    /// Closes the connection after reading the request.
    Close,
    /// Bytes that are not HTTP.
    Garbage,
    /// Another protocol, unasked.
    Switch,
    /// It does not take the secret.
    Unauthorized,
    /// This status and this body.
    Text(u16, String),
    /// This, byte for byte.
    Raw(&'static [u8]),
    /// To a pop that waits, nothing until [`Recorder::release`]; to everything else `{}` at once.
    Held,
}

/// See the module.
pub struct Recorder {
    /// Its port.
    pub port: u16,
    state: Arc<State>,
    task: tokio::task::JoinHandle<()>,
}

/// What has come, whole requests or not.
#[derive(Default)]
pub struct Seen {
    heads: AtomicUsize,
    bytes: AtomicUsize,
}

struct State {
    requests: Mutex<Vec<Recorded>>,
    reply: Mutex<Reply>,
    listings: Mutex<HashMap<String, Reply>>,
    connections: AtomicUsize,
    seen: Seen,
    abandoned: AtomicUsize,
    /// What held pops are answered with.
    released: watch::Sender<Reply>,
    let_go: watch::Sender<bool>,
    idle: Mutex<Duration>,
}

impl State {
    fn reply_to(&self, request: &Recorded) -> Reply {
        let listings = self.listings.lock().unwrap();
        let listing = request.line.starts_with("GET /api/v1/resources/queues?");
        let tenants = request.all("x-queen-tenant");
        let tenant = tenants.first().filter(|_| listing);
        let reply = tenant.and_then(|tenant| listings.get(*tenant)).cloned();
        reply.unwrap_or_else(|| self.reply.lock().unwrap().clone())
    }
}

impl Recorder {
    /// Starts one.
    pub async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            requests: Mutex::default(),
            reply: Mutex::new(Reply::Json("{}")),
            listings: Mutex::default(),
            connections: AtomicUsize::new(0),
            seen: Seen::default(),
            abandoned: AtomicUsize::new(0),
            released: watch::Sender::new(Reply::Held),
            let_go: watch::Sender::new(false),
            idle: Mutex::new(Duration::from_secs(3600)),
        });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                shared.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { port, state, task }
    }

    /// Lets the answers go that are kept.
    pub fn let_go(&self) {
        self.state.let_go.send_replace(true);
    }

    /// Changes how it answers; what is kept from now on waits to be let go again.
    pub fn reply(&self, reply: Reply) {
        self.state.let_go.send_replace(false);
        *self.state.reply.lock().unwrap() = reply;
    }

    /// Changes how it answers who asks for the queues of a tenant, named as in `x-queen-tenant`.
    pub fn list(&self, tenant: uuid::Uuid, reply: Reply) {
        self.state.listings.lock().unwrap().insert(tenant.to_string(), reply);
    }

    /// What it has got, and forgets it.
    pub fn take(&self) -> Vec<Recorded> {
        std::mem::take(&mut self.state.requests.lock().unwrap())
    }

    /// Closes connections that are silent for this long.
    pub fn close_idle(&self, after: Duration) {
        *self.state.idle.lock().unwrap() = after;
    }

    /// Bytes that have come, and forgets them.
    pub fn take_bytes(&self) -> usize {
        self.state.seen.bytes.swap(0, Ordering::SeqCst)
    }

    /// Requests so far.
    pub fn count(&self) -> usize {
        self.state.requests.lock().unwrap().len()
    }

    /// Requests whose head has come, with or without their body.
    pub fn heads(&self) -> usize {
        self.state.seen.heads.load(Ordering::SeqCst)
    }

    /// Answers all pops that are held now.
    pub fn release(&self, reply: Reply) {
        self.state.released.send_replace(reply);
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Requests whose sender closed before the answer.
    pub fn abandoned(&self) -> usize {
        self.state.abandoned.load(Ordering::SeqCst)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, state: Arc<State>) {
    let mut unread = Vec::new();
    loop {
        let idle = *state.idle.lock().unwrap();
        let request = tokio::time::timeout(idle, read_request(&mut stream, &mut unread, &state.seen));
        let Ok(Some(request)) = request.await else { return };
        let mut reply = state.reply_to(&request);
        let waits = request.line.contains("wait=true");
        let mut released = state.released.subscribe();
        state.requests.lock().unwrap().push(request);
        if matches!(reply, Reply::Held) {
            reply = Reply::Json("{}");
            if waits {
                tokio::select! {
                    _ = gone(&mut stream, None) => {
                        state.abandoned.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                    _ = released.changed() => reply = released.borrow().clone(),
                }
            }
        }
        let mut status = 200;
        let text;
        let body = match reply {
            Reply::Json(body) => body,
            Reply::Raw(bytes) => {
                if stream.write_all(bytes).await.is_err() {
                    return;
                }
                continue;
            }
            Reply::Held => unreachable!("released with an answer"),
            Reply::Text(other, body) => {
                (status, text) = (other, body);
                &text
            }
            Reply::Late(delay) => {
                if gone(&mut stream, Some(delay)).await {
                    state.abandoned.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                "{}"
            }
            Reply::Kept(body) => {
                if kept(&mut stream, &state).await {
                    state.abandoned.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                text = body;
                &text
            }
            Reply::Never => {
                gone(&mut stream, None).await;
                state.abandoned.fetch_add(1, Ordering::SeqCst);
                return;
            }
            Reply::Close => return,
            Reply::Unauthorized => {
                let _ = stream.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}").await;
                return;
            }
            Reply::Switch => {
                let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\nx").await;
                return;
            }
            Reply::Garbage => {
                let _ = stream.write_all(b"\x00\x01 this is not HTTP\r\n\r\n").await;
                return;
            }
        };
        let answer = format!(
            "HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\nx-queen-request-id: from-the-cell\r\nx-queen-tenant: secret\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Whether the other side closes before the delay is over.
async fn gone(stream: &mut TcpStream, delay: Option<Duration>) -> bool {
    let mut byte = [0; 1];
    let closed = stream.read(&mut byte);
    match delay {
        Some(delay) => tokio::time::timeout(delay, closed).await.is_ok(),
        None => {
            let _ = closed.await;
            true
        }
    }
}

/// Whether the other side closes before the answer may go.
async fn kept(stream: &mut TcpStream, state: &State) -> bool {
    let mut released = state.let_go.subscribe();
    let mut byte = [0; 1];
    tokio::select! {
        _ = released.wait_for(|released| *released) => false,
        _ = stream.read(&mut byte) => true,
    }
}

/// The next request on a connection; `None` when it ends.
pub async fn read_request(stream: &mut TcpStream, unread: &mut Vec<u8>, seen: &Seen) -> Option<Recorded> {
    let end = loop {
        if let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        fill(stream, unread, seen).await?;
    };
    seen.heads.fetch_add(1, Ordering::SeqCst);
    let head = String::from_utf8_lossy(&unread.drain(..end + 4).collect::<Vec<_>>()[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next()?.trim_end_matches(" HTTP/1.1").to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let value = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
    if value("expect").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
    }
    let mut body = Vec::new();
    if value("transfer-encoding").is_some() {
        loop {
            let end = loop {
                if let Some(end) = unread.windows(2).position(|two| two == b"\r\n") {
                    break end;
                }
                fill(stream, unread, seen).await?;
            };
            let size = usize::from_str_radix(std::str::from_utf8(&unread[..end]).ok()?.trim(), 16).ok()?;
            while unread.len() < end + 2 + size + 2 {
                fill(stream, unread, seen).await?;
            }
            body.extend_from_slice(&unread[end + 2..end + 2 + size]);
            unread.drain(..end + 2 + size + 2);
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = value("content-length") {
        let length: usize = length.parse().ok()?;
        while unread.len() < length {
            fill(stream, unread, seen).await?;
        }
        body = unread.drain(..length).collect();
    }
    Some(Recorded { line, headers, body })
}

async fn fill(stream: &mut TcpStream, unread: &mut Vec<u8>, seen: &Seen) -> Option<()> {
    let mut piece = [0; 16 * 1024];
    match stream.read(&mut piece).await {
        Ok(0) | Err(_) => None,
        Ok(n) => {
            seen.bytes.fetch_add(n, Ordering::SeqCst);
            unread.extend_from_slice(&piece[..n]);
            Some(())
        }
    }
}
