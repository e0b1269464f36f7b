//! HTTP/1.1 by hand, for what no client library would send.

use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const LIMIT: Duration = Duration::from_secs(20);

/// A connection that shows every byte.
pub struct Socket<S = TcpStream> {
    stream: S,
    unread: Vec<u8>,
}

/// An answer as it came.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The whole body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON ({}): {}", self.status, String::from_utf8_lossy(&self.body)))
    }

    /// `code` of the envelope.
    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Socket {
    /// Connects.
    pub async fn open(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        // What is sent in pieces should arrive in pieces.
        stream.set_nodelay(true).unwrap();
        Self { stream, unread: Vec::new() }
    }

    /// Connects, when somebody listens there.
    pub async fn try_open(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        Some(Self { stream, unread: Vec::new() })
    }

    /// Closes with a reset, as the system of a killed client may.
    pub fn reset(self) {
        self.stream.set_zero_linger().unwrap();
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Socket<S> {
    /// Over a stream that is there.
    pub fn over(stream: S) -> Self {
        Self { stream, unread: Vec::new() }
    }

    /// Says that nothing more will be sent.
    pub async fn close_half(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Sends bytes; false when the other side has gone.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok() && self.stream.flush().await.is_ok()
    }

    /// The next answer, or `None` when the connection ends without one.
    pub async fn answer(&mut self) -> Option<Answer> {
        timeout(LIMIT, self.read_answer(false)).await.expect("an answer or an end in time")
    }

    /// The next answer to a HEAD request.
    pub async fn answer_to_head(&mut self) -> Option<Answer> {
        timeout(LIMIT, self.read_answer(true)).await.expect("an answer or an end in time")
    }

    /// One request and its answer.
    pub async fn ask(&mut self, request: impl AsRef<[u8]>) -> Answer {
        self.send(request).await;
        self.answer().await.expect("an answer")
    }

    /// One request in pieces, each in a packet of its own, and its answer.
    pub async fn ask_in_pieces(&mut self, pieces: &[&[u8]]) -> Answer {
        for piece in pieces {
            self.send(piece).await;
            // Nothing tells when the other side has read: this long is usually enough.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.answer().await.expect("an answer")
    }

    /// Sends the same again and again until an answer comes, and that.
    pub async fn drip(&mut self, drop: &str, pause: Duration) -> Option<Answer> {
        const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
        loop {
            self.send(drop).await;
            let ended = matches!(timeout(pause, self.fill()).await, Ok(false));
            if self.unread.starts_with(CONTINUE) {
                self.unread.drain(..CONTINUE.len());
            }
            if ended || !self.unread.is_empty() {
                return self.answer().await;
            }
        }
    }

    /// Whether the other side ends the connection within the limit without sending anything more.
    pub async fn ends_within(&mut self, limit: Duration) -> bool {
        let mut byte = [0; 1];
        self.unread.is_empty()
            && matches!(timeout(limit, self.stream.read(&mut byte)).await, Ok(Ok(0) | Err(_)))
    }

    async fn fill(&mut self) -> bool {
        let mut piece = [0; 16 * 1024];
        match self.stream.read(&mut piece).await {
            Ok(0) | Err(_) => false,
            Ok(n) => {
                self.unread.extend_from_slice(&piece[..n]);
                true
            }
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.unread.windows(2).position(|pair| pair == b"\r\n") {
                let line: Vec<u8> = self.unread.drain(..end + 2).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn exactly(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.unread.len() < n {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.unread.drain(..n).collect())
    }

    async fn read_answer(&mut self, to_head: bool) -> Option<Answer> {
        loop {
            let line = self.line().await?;
            let status = line.split(' ').nth(1)?.parse().ok()?;
            let mut answer = Answer { status, headers: Vec::new(), body: Vec::new() };
            loop {
                let line = self.line().await?;
                if line.is_empty() {
                    break;
                }
                let (name, value) = line.split_once(':')?;
                answer.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
            if status == 100 {
                continue;
            }
            if to_head || status == 204 || status == 304 {
                return Some(answer);
            }
            if answer.header("transfer-encoding").is_some() {
                loop {
                    let size = usize::from_str_radix(self.line().await?.trim(), 16).ok()?;
                    let piece = self.exactly(size).await?;
                    self.line().await?;
                    if size == 0 {
                        return Some(answer);
                    }
                    answer.body.extend(piece);
                }
            }
            if let Some(length) = answer.header("content-length") {
                answer.body = self.exactly(length.parse().ok()?).await?;
            } else {
                while self.fill().await {}
                answer.body = std::mem::take(&mut self.unread);
            }
            return Some(answer);
        }
    }
}
