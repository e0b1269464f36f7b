//! What is written to a client, and what becomes of it when the client does not take it.

use super::{Rules, timer::Timer};
use std::{
    io::{ErrorKind, Result},
    sync::atomic::Ordering,
    task::{Context, Poll},
};

/// Bytes of answers that go nowhere.
const MAX_SWALLOWED: usize = 64 << 20;

/// The way to one client.
#[derive(Default)]
pub(super) struct Outgoing {
    stalled: Timer,
    gone: bool,
    swallowed: usize,
}

impl Outgoing {
    /// Whether nothing reaches the client any more, while what the cell says is read all the same.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Nothing reaches the client from now on.
    pub fn leave(&mut self, rules: &Rules) {
        self.gone = true;
        rules.load.left.fetch_add(1, Ordering::Relaxed);
    }

    /// Judges how a write ended; `None` when what is written goes nowhere, because a request is `finishing`: it
    /// goes to its end whatever becomes of its client.
    pub fn judge<T>(
        &mut self,
        cx: &mut Context<'_>,
        rules: &Rules,
        outcome: Poll<Result<T>>,
        finishing: impl FnOnce(&Context<'_>) -> bool,
    ) -> Option<Poll<Result<T>>> {
        if let Poll::Ready(Ok(_)) = outcome {
            self.stalled.stop();
            return Some(outcome);
        }
        let finishing = finishing(cx);
        if outcome.is_pending() {
            // Pingora waits for ever where an answer is a head alone.
            self.stalled.arm(if finishing { rules.stall_limit } else { rules.write_limit });
            if self.stalled.poll(cx).is_pending() {
                return Some(Poll::Pending);
            }
            if !finishing {
                return Some(Poll::Ready(Err(ErrorKind::TimedOut.into())));
            }
        } else if !finishing {
            return Some(outcome);
        }
        self.leave(rules);
        None
    }

    /// Takes bytes that go nowhere, up to a limit.
    pub fn swallow(&mut self, bytes: usize) -> Poll<Result<usize>> {
        self.swallowed += bytes;
        if self.swallowed > MAX_SWALLOWED {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        Poll::Ready(Ok(bytes))
    }
}
