//! `admin outbox`: the control plane's events for whoever acts on them.
//!
//! A batch is claimed for a while, printed, and marked as consumed, each in one statement: a reader that is slow
//! holds no lock, and one that dies leaves its events to the next. So events come at least once.

use super::{failure::Failure, plane::Plane, report};
use clap::{Args, Subcommand};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::Value;
use sqlx::{query_as, types::Json};
use std::{
    io::{self, ErrorKind, Write},
    time::Duration,
};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};
use uuid::Uuid;

/// Events of one claim.
const BATCH: i64 = 100;
/// How long a claim holds: printing takes less, or the events are printed again by somebody.
const CLAIM_S: f64 = 60.0;
/// Between looks at an outbox that is empty.
const IDLE: Duration = Duration::from_millis(500);
/// After the database did not answer.
const AGAIN: Duration = Duration::from_secs(5);
/// At the end, to give back what was not printed.
const GIVE_BACK: Duration = Duration::from_secs(2);

#[derive(Subcommand, Debug)]
pub(super) enum OutboxCommand {
    /// Print events as they come, oldest first, and mark each as consumed once it is printed. It may come
    /// again when this ends in between; several of these share the events
    Follow(Follow),
}

#[derive(Args, Debug)]
pub(super) struct Follow {
    /// End when there is no event left
    #[arg(long)]
    once: bool,
}

struct Event {
    id: Uuid,
    document: Value,
}

impl OutboxCommand {
    pub(super) async fn run(self, plane: &mut Plane, json: bool) -> Result<(), Failure> {
        let Self::Follow(Follow { once }) = self;
        let mut stop = Box::pin(crate::process::stop_signal(true));
        let mut claimed = Vec::new();
        let ended = tokio::select! {
            signal = &mut stop => signal.map_err(|error| Failure::Usage(format!("cannot watch signals: {error}"))),
            ended = follow(plane, json, once, &mut claimed) => ended,
        };
        if !claimed.is_empty() {
            // Whether the last ones came out is not known.
            let ids = claimed.iter().map(|event: &Event| event.id).collect();
            let _ = timeout(GIVE_BACK, settle(plane, Vec::new(), ids)).await;
        }
        ended
    }
}

/// Ends when the reader has gone away, or, for `once`, when nothing is left. `claimed` holds what is being
/// printed, so that it can be given back.
async fn follow(plane: &mut Plane, json: bool, once: bool, claimed: &mut Vec<Event>) -> Result<(), Failure> {
    let mut silent = false;
    loop {
        if reader_is_gone() {
            return Ok(());
        }
        match step(plane, json, claimed).await {
            Ok(Step::Printed) => {}
            Ok(Step::ReaderGone) => return Ok(()),
            Ok(Step::Empty) if once => return Ok(()),
            Ok(Step::Empty) => sleep(IDLE).await,
            Err(Failure::Unreachable(text)) if !once => {
                if !silent {
                    eprintln!("queen-proxy: {text}; trying again");
                }
                silent = true;
                plane.reconnect();
                sleep(AGAIN).await;
                continue;
            }
            Err(failure) => return Err(failure),
        }
        silent = false;
    }
}

enum Step {
    Printed,
    Empty,
    ReaderGone,
}

async fn step(plane: &mut Plane, json: bool, claimed: &mut Vec<Event>) -> Result<Step, Failure> {
    *claimed = claim(plane).await?;
    if claimed.is_empty() {
        return Ok(Step::Empty);
    }
    let lines: Vec<String> = claimed.iter().map(|event| line(&event.document, json)).collect();
    // A reader that does not read stops us here; signals are heard nevertheless.
    let (printed, outcome) =
        spawn_blocking(move || print(&lines)).await.map_err(|_| Failure::Output(ErrorKind::Other))?;
    let ids = |events: &[Event]| events.iter().map(|event| event.id).collect();
    let (done, rest) = claimed.split_at(printed);
    settle(plane, ids(done), ids(rest)).await?;
    claimed.clear();
    match outcome {
        Ok(()) => Ok(Step::Printed),
        Err(ErrorKind::BrokenPipe) => Ok(Step::ReaderGone),
        Err(kind) => Err(Failure::Output(kind)),
    }
}

async fn claim(plane: &mut Plane) -> Result<Vec<Event>, Failure> {
    let query = query_as(include_str!("sql/claim_events.sql")).bind(BATCH).bind(CLAIM_S);
    let rows: Vec<(Uuid, Json<Value>)> = plane.all(query).await?;
    Ok(rows.into_iter().map(|(id, Json(document))| Event { id, document }).collect())
}

async fn settle(plane: &mut Plane, printed: Vec<Uuid>, rest: Vec<Uuid>) -> Result<(), Failure> {
    plane.run(sqlx::query(include_str!("sql/consume_events.sql")).bind(printed).bind(rest)).await
}

fn line(event: &Value, json: bool) -> String {
    if json {
        return event.to_string();
    }
    let [at, kind] = ["created_at", "kind"].map(|name| report::word(&event[name]));
    report::printable(&format!("{at}  {kind}  {}", event["payload"]))
}

/// How many lines came out whole, and what stopped the next one.
fn print(lines: &[String]) -> (usize, Result<(), ErrorKind>) {
    let mut output = io::stdout().lock();
    for (number, line) in lines.iter().enumerate() {
        let written = output.write_all(format!("{line}\n").as_bytes()).and_then(|()| output.flush());
        if let Err(error) = written {
            return (number, Err(error.kind()));
        }
    }
    (lines.len(), Ok(()))
}

/// Without a write nothing else tells.
fn reader_is_gone() -> bool {
    let output = io::stdout();
    let mut watched = [PollFd::new(&output, PollFlags::empty())];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut watched, Some(&now)).is_ok() && watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}
