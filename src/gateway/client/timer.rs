//! A point in time that a stream waits for.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep};

/// Made once for each connection that needs one, and used again.
#[derive(Default)]
pub(super) struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
    armed: bool,
}

impl Timer {
    /// Begins, unless it runs.
    pub fn arm(&mut self, limit: Duration) {
        if !std::mem::replace(&mut self.armed, true) {
            match &mut self.sleep {
                Some(sleep) => sleep.as_mut().reset(Instant::now() + limit),
                None => self.sleep = Some(Box::pin(sleep(limit))),
            }
        }
    }

    /// Is not waited for any more.
    pub fn stop(&mut self) {
        self.armed = false;
    }

    /// Whether it runs, or has run out.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// Ready when it has run out.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.sleep {
            Some(sleep) if self.armed => sleep.as_mut().poll(cx),
            _ => Poll::Pending,
        }
    }
}
