//! The access log: one JSON line per request that is logged, written by a thread of its own, so that a slow
//! disk or a full pipe never holds a request up. Lines that find no room are counted and lost.
//!
//! Fields of a line; those without a value are left out:
//!
//! | field | what it is |
//! |---|---|
//! | `time` | when the request ended, RFC 3339 in UTC with milliseconds |
//! | `request_id` | `x-queen-request-id`, which the client and the cell have too |
//! | `trace_id` | from the client's `traceparent` (W3C Trace Context), or the one that its span has ([`super::spans`]) |
//! | `cluster` | the slug |
//! | `principal` | `key <id>` or `user <id>`; ids are no secrets |
//! | `client` | the client's address; behind proxies that are trusted, what they say |
//! | `method`, `class` | the method (`_OTHER`: none that HTTP defines), and the kind of route; never the path, which may hold a tenant's names |
//! | `status`, `code` | what was answered (0: the client was gone), and the refusal's code or `ok` |
//! | `duration_ms`, `cell_ms` | from the parsed head to the end of the answer, and the cell's share |
//! | `bytes_in`, `bytes_out`, `messages` | what metering counted |

use super::trace_context::TraceId;
use crate::domain::{cluster::Principal, ids::RequestId, slug::Slug};
use http::Method;
use serde::Serialize;
use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

/// Lines that may wait for the writer: about 2 MiB.
const QUEUE: usize = 8_192;
/// How long a line waits at most before it is written, and how often a file that was moved away is noticed.
const FLUSH: Duration = Duration::from_secs(1);
/// How long the end waits for what is not written, where nobody reads the pipe.
const END: Duration = Duration::from_secs(1);
/// How often the end tries to find room among the lines.
const END_PAUSE: Duration = Duration::from_millis(5);

/// Where the log goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Standard output.
    Stdout,
    /// A file, appended to. When it is moved away or removed, a new one is begun.
    File(PathBuf),
}

/// Which requests are logged, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessLogSettings {
    /// Where.
    pub place: Place,
    /// Of requests answered below 400, one in so many; all others always.
    pub one_in: u32,
}

/// See the module.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// RFC 3339.
    #[serde(serialize_with = "rfc3339")]
    pub time: SystemTime,
    /// `x-queen-request-id`
    #[serde(serialize_with = "text")]
    pub request_id: RequestId,
    /// 32 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<TraceId>,
    /// The slug.
    #[serde(serialize_with = "text_if", skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Slug>,
    /// Whose credential.
    #[serde(serialize_with = "text_if", skip_serializing_if = "Option::is_none")]
    pub principal: Option<Principal>,
    /// The client's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<IpAddr>,
    /// The method, see [`method_word`].
    pub method: &'static str,
    /// The kind of route.
    pub class: &'static str,
    /// 0 when there was none.
    pub status: u16,
    /// The refusal's, or "ok".
    pub code: &'static str,
    /// Milliseconds.
    #[serde(rename = "duration_ms", serialize_with = "millis")]
    pub took: Duration,
    /// Milliseconds.
    #[serde(rename = "cell_ms", serialize_with = "millis_if", skip_serializing_if = "Option::is_none")]
    pub cell: Option<Duration>,
    /// Bytes.
    pub bytes_in: u64,
    /// Bytes.
    pub bytes_out: u64,
    /// Billable messages.
    pub messages: u64,
}

/// A method's name. A client may call one whatever it likes, at any length: of those that HTTP does not define there is one word.
pub fn method_word(method: &Method) -> &'static str {
    match *method {
        Method::CONNECT => "CONNECT",
        Method::DELETE => "DELETE",
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::TRACE => "TRACE",
        _ => "_OTHER",
    }
}

/// What the writer is told.
enum Message {
    Line(Box<Line>),
    End,
}

/// The way to the log. Clones write to the same one.
#[derive(Clone)]
pub struct AccessLog {
    messages: SyncSender<Message>,
    lost: Arc<AtomicU64>,
    one_in: u32,
}

/// Ends the log; see [`Writer::finish`].
pub struct Writer {
    messages: SyncSender<Message>,
    /// Breaks when the thread ends.
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl AccessLog {
    /// Opens the file and starts the thread.
    pub fn start(settings: &AccessLogSettings) -> io::Result<(Self, Writer)> {
        let sink = Sink::open(&settings.place)?;
        let (messages, waiting) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let broken = Arc::clone(&lost);
        let (ends, ended) = channel();
        let thread = thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || write(sink, &waiting, &broken, ends))?;
        let writer = Writer { messages: messages.clone(), ended, thread };
        Ok((Self { messages, lost, one_in: settings.one_in }, writer))
    }

    /// Whether a request that was answered so is to be logged. `sample` is any number that is different for
    /// each request.
    pub fn wants(&self, status: u16, sample: u32) -> bool {
        status == 0 || status >= 400 || sample.is_multiple_of(self.one_in)
    }

    /// Logs a request, or counts it as lost.
    pub fn log(&self, line: Line) {
        if self.messages.try_send(Message::Line(Box::new(line))).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }

    /// Lines lost since the start, because the writer was behind or could not write.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

impl Writer {
    /// Waits until everything that was logged before is written, for a second at most. What comes later is lost.
    pub fn finish(self) {
        let deadline = Instant::now() + END;
        while let Err(TrySendError::Full(_)) = self.messages.try_send(Message::End)
            && Instant::now() < deadline
        {
            thread::sleep(END_PAUSE);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if self.ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("the access log takes no more: what was not written is lost");
        } else if self.thread.join().is_err() {
            tracing::error!("the access log's writer has panicked");
        }
    }
}

/// What lines are written to.
enum Sink {
    Stdout(BufWriter<io::Stdout>),
    File { path: PathBuf, file: BufWriter<File>, looked: Instant },
}

impl Sink {
    fn open(place: &Place) -> io::Result<Self> {
        Ok(match place {
            Place::Stdout => Self::Stdout(BufWriter::new(io::stdout())),
            Place::File(path) => {
                Self::File { file: append(path)?, path: path.clone(), looked: Instant::now() }
            }
        })
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Stdout(stdout) => stdout,
            Self::File { file, .. } => file,
        }
    }

    /// Begins a new file where the old one was moved away.
    fn follow(&mut self) -> io::Result<()> {
        let Self::File { path, file, looked } = self else { return Ok(()) };
        if looked.elapsed() < FLUSH {
            return Ok(());
        }
        *looked = Instant::now();
        let ours = file.get_ref().metadata()?;
        let same = path.metadata().is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()));
        if !same {
            file.flush()?;
            *file = append(path)?;
        }
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<BufWriter<File>> {
    Ok(BufWriter::new(OpenOptions::new().create(true).append(true).open(path)?))
}

/// Writes until it is told to end.
#[allow(clippy::needless_pass_by_value)] // that `_ends` is dropped tells of the end, or of a panic
fn write(mut sink: Sink, waiting: &Receiver<Message>, lost: &AtomicU64, _ends: Sender<()>) {
    let mut failing = false;
    let mut line_bytes = Vec::with_capacity(512);
    let mut flushed = Instant::now();
    loop {
        let (line, done) = match waiting.recv_timeout(FLUSH) {
            Ok(Message::Line(line)) => (Some(line), false),
            Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => (None, true),
            Err(RecvTimeoutError::Timeout) => (None, false),
        };
        let written = sink.follow().and_then(|()| {
            if let Some(line) = &line {
                line_bytes.clear();
                serde_json::to_writer(&mut line_bytes, line)?;
                line_bytes.push(b'\n');
                sink.writer().write_all(&line_bytes)?;
            }
            if line.is_none() || flushed.elapsed() >= FLUSH {
                flushed = Instant::now();
                sink.writer().flush()?;
            }
            Ok(())
        });
        if written.is_err() && line.is_some() {
            lost.fetch_add(1, Relaxed);
        }
        // Said when it begins; how long it goes on is in the metric.
        if let (Err(error), false) = (&written, failing) {
            tracing::error!(%error, "the access log cannot be written");
        }
        failing = written.is_err();
        if done {
            return;
        }
    }
}

fn text<T: ToString, S: serde::Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

#[allow(clippy::ref_option)] // serde gives it so
fn text_if<T: ToString, S: serde::Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_some(&value.as_ref().map(ToString::to_string))
}

fn millis<S: serde::Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    // To the microsecond: more digits say nothing.
    serializer.serialize_f64((value.as_secs_f64() * 1e6).round() / 1e3)
}

#[allow(clippy::ref_option)] // serde gives it so
fn millis_if<S: serde::Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    millis(&value.unwrap_or_default(), serializer)
}

fn rfc3339<S: serde::Serializer>(value: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    const FORMAT: &[BorrowedFormatItem<'_>] =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    let time = OffsetDateTime::from(*value).format(FORMAT).map_err(serde::ser::Error::custom)?;
    serializer.serialize_str(&time)
}

#[cfg(test)]
mod tests {
    use super::{AccessLog, AccessLogSettings, Line, Place, method_word};
    use crate::domain::{ids::RequestId, slug::Slug};
    use std::time::{Duration, Instant, SystemTime};

    fn line(status: u16) -> Line {
        Line {
            time: SystemTime::UNIX_EPOCH,
            request_id: RequestId::new(),
            trace_id: None,
            cluster: Slug::parse("acme"),
            principal: None,
            client: Some([192, 0, 2, 7].into()),
            method: "POST",
            class: "produce",
            status,
            code: "ok",
            took: Duration::from_micros(1_234),
            cell: None,
            bytes_in: 3,
            bytes_out: 4,
            messages: 1,
        }
    }

    #[test]
    fn methods_that_http_does_not_define_have_one_word() {
        for name in ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"] {
            assert_eq!(method_word(&name.parse().unwrap()), name);
        }
        for name in ["get", "PROPFIND", &"A-METHOD-OF-THEIRS".repeat(1_000)] {
            assert_eq!(method_word(&name.parse().unwrap()), "_OTHER", "{name}");
        }
    }

    #[test]
    fn lines_are_written_and_a_moved_file_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let settings = AccessLogSettings { place: Place::File(path.clone()), one_in: 10 };
        let (log, writer) = AccessLog::start(&settings).unwrap();
        assert!(log.wants(404, 3) && log.wants(0, 3) && log.wants(200, 20) && !log.wants(200, 21));
        log.log(line(200));
        let moved = folder.path().join("access.log.1");
        // Moved while the file is open: what comes later than a second after it goes to a new one.
        while std::fs::read(&path).unwrap().is_empty() {
            std::thread::yield_now();
        }
        std::fs::rename(&path, &moved).unwrap();
        while !path.exists() {
            log.log(line(201));
            std::thread::sleep(Duration::from_millis(20));
        }
        log.log(line(503));
        writer.finish();
        let first: serde_json::Value =
            serde_json::from_str(std::fs::read_to_string(&moved).unwrap().lines().next().unwrap()).unwrap();
        assert_eq!(first["time"], "1970-01-01T00:00:00.000Z");
        assert_eq!(first["cluster"], "acme");
        assert_eq!(first["duration_ms"], 1.234);
        assert_eq!(first["client"], "192.0.2.7");
        assert_eq!(first.get("cell_ms"), None);
        assert!(std::fs::read_to_string(&path).unwrap().lines().last().unwrap().contains("503"));
    }

    #[test]
    fn a_pipe_that_nobody_reads_does_not_hold_up_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _reader = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        for full in [false, true] {
            let settings = AccessLogSettings { place: Place::File(path.clone()), one_in: 1 };
            let (log, writer) = AccessLog::start(&settings).unwrap();
            // More than a pipe holds; then as many as may wait.
            for _ in 0..super::QUEUE / 2 {
                log.log(line(200));
            }
            while full && log.lost() == 0 {
                log.log(line(200));
            }
            let began = Instant::now();
            writer.finish();
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        }
    }

    #[test]
    fn a_place_that_cannot_be_opened_is_an_error() {
        let settings = AccessLogSettings { place: Place::File("/nowhere/at/all".into()), one_in: 1 };
        assert!(AccessLog::start(&settings).is_err());
    }

    #[test]
    fn lines_that_find_no_room_are_counted() {
        let (messages, waiting) = std::sync::mpsc::sync_channel(1);
        let log = AccessLog { messages, lost: std::sync::Arc::default(), one_in: 1 };
        for _ in 0..3 {
            log.log(line(200));
        }
        assert_eq!(log.lost(), 2);
        drop(waiting);
    }
}
