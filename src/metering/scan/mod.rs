//! Reads an answer as it streams by, and says how many messages it stands for.

mod lexer;
mod readers;
mod walker;

#[cfg(test)]
mod tests;

pub use readers::Sinks;
use readers::{Cycle, EphemeralPush, Messages, Pop, Push, Replay, Transaction};
use walker::Walker;

/// Why the messages of a successful answer are not known. It bills none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unreadable {
    /// It has a `Content-Encoding`.
    #[error("the answer is compressed")]
    Encoded,
    /// It ended before the document did.
    #[error("the answer ended too early")]
    Truncated,
    /// It is not JSON.
    #[error("the answer is not JSON")]
    NotJson,
    /// It is JSON of another shape than the route's answers have.
    #[error("the answer has an unknown shape")]
    Shape,
    /// It holds a name longer than the bound.
    #[error("the answer holds a name that is too long")]
    Name,
}

/// Texts of the routes that hold no names: long enough for every word we know.
const WORD: usize = 32;

/// Of which answer; a reader of its own for each.
#[derive(Debug)]
enum Answer {
    Push(Walker<Push>),
    EphemeralPush(Walker<EphemeralPush>),
    Transaction(Walker<Transaction>),
    Pop(Walker<Pop>),
    Cycle(Walker<Cycle>),
    Replay(Walker<Replay>),
}

/// See the module. Holds a few hundred bytes, never the body.
#[derive(Debug)]
pub(super) struct Scanner {
    answer: Answer,
    fault: Option<Unreadable>,
}

macro_rules! each {
    ($answer:expr, $walker:ident => $do:expr) => {
        match $answer {
            Answer::Push($walker) => $do,
            Answer::EphemeralPush($walker) => $do,
            Answer::Transaction($walker) => $do,
            Answer::Pop($walker) => $do,
            Answer::Cycle($walker) => $do,
            Answer::Replay($walker) => $do,
        }
    };
}

impl Scanner {
    fn of(answer: Answer) -> Self {
        Self { answer, fault: None }
    }

    pub(super) fn push() -> Self {
        Self::of(Answer::Push(Walker::new(Push::default(), WORD)))
    }

    pub(super) fn ephemeral_push() -> Self {
        Self::of(Answer::EphemeralPush(Walker::new(EphemeralPush::default(), WORD)))
    }

    /// `ingress` is what the request put in.
    pub(super) fn transaction(ingress: u64) -> Self {
        Self::of(Answer::Transaction(Walker::new(Transaction::new(ingress), WORD)))
    }

    pub(super) fn pop() -> Self {
        Self::of(Answer::Pop(Walker::new(Pop::default(), WORD)))
    }

    /// `max_name` bounds the names of queues and partitions that are held, in bytes.
    pub(super) fn cycle(sinks: Sinks, max_name: usize) -> Self {
        Self::of(Answer::Cycle(Walker::new(Cycle::new(sinks), max_name)))
    }

    pub(super) fn replay() -> Self {
        Self::of(Answer::Replay(Walker::new(Replay::default(), WORD)))
    }

    /// The next piece of the body.
    pub(super) fn feed(&mut self, piece: &[u8]) {
        if self.fault.is_none() {
            self.fault = each!(&mut self.answer, walker => walker.feed(piece)).err();
        }
    }

    /// The messages, after the last piece.
    pub(super) fn messages(&self) -> Result<u64, Unreadable> {
        match self.fault {
            Some(fault) => Err(fault),
            None => each!(&self.answer, walker => walker.finish()?.messages()),
        }
    }

    /// The messages that the answer has told of so far: those that were handed out, or stored, when nobody reads
    /// the rest.
    pub(super) fn so_far(&self) -> u64 {
        if self.fault.is_some() { 0 } else { each!(&self.answer, walker => walker.reader().so_far()) }
    }

    /// Whether most messages of a push wait in the cell's buffer.
    pub(super) fn mostly_buffered(&self) -> bool {
        each!(&self.answer, walker => walker.finish().is_ok_and(Messages::mostly_buffered))
    }
}
