//! Waiting for many sockets in one thread: what stands around the candidates must cost less than they do.

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    fd::{AsFd, OwnedFd},
};

pub use epoll::EventFlags as Flags;

/// Told as long as somebody waits.
pub const LISTENING: Flags = Flags::IN;
/// Told once for what came.
pub const READING: Flags = Flags::IN.union(Flags::RDHUP).union(Flags::ET);
/// Told once for what came, and once when there is room again.
pub const BOTH: Flags = READING.union(Flags::OUT);

/// A second: nothing here is silent for longer unless something is wrong or over.
const WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub struct Poll {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poll {
    pub fn new() -> Self {
        Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(), events: Vec::with_capacity(256) }
    }

    pub fn watch(&self, socket: impl AsFd, token: u64, flags: Flags) {
        epoll::add(&self.epoll, socket, epoll::EventData::new_u64(token), flags).unwrap();
    }

    /// The tokens of those that are ready, in place of what was in `ready`; none after a second of silence.
    pub fn wait(&mut self, ready: &mut Vec<u64>) {
        self.events.clear();
        // A signal that interrupts it is a wake-up for nothing.
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(&WAIT));
        ready.clear();
        ready.extend(self.events.iter().map(|event| event.data.u64()));
    }
}
