//! Ending what waits at a cell for a client of HTTP/2. A request of HTTP/1 is ended by its client's stream; of HTTP/2
//! that would end all requests of the connection, and Pingora has no call to end one. So polls over HTTP/2 have
//! connections to cells of their own; of each a second handle is kept, and that is shut down.

use dashmap::DashMap;
use pingora::{
    Error, ErrorType,
    prelude::HttpPeer,
    upstreams::peer::{Tracer, Tracing},
};
use std::{
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
};

/// Keeps these connections apart from all others in Pingora's pool.
const GROUP: u64 = 1;
/// No socket's number.
const NONE: RawFd = -1;

/// All connections for polls over HTTP/2, by the number that Pingora knows their sockets by.
#[derive(Debug, Default)]
pub(super) struct Severing {
    links: DashMap<RawFd, Link>,
    /// Numbers of sockets are used again; these are not.
    last: AtomicU64,
}

#[derive(Debug)]
struct Link {
    second: TcpStream,
    owner: u64,
    /// The poll that waits on it, if nothing of its answer has come.
    poll: Option<u64>,
}

/// A poll that waits, until it is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    all: Arc<Severing>,
    socket: RawFd,
    poll: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(mut link) = self.all.links.get_mut(&self.socket)
            && link.poll == Some(self.poll)
        {
            link.poll = None;
        }
    }
}

impl Severing {
    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed)
    }

    /// Sees to it that a connection that is made for this peer can be severed.
    pub fn prepare(self: &Arc<Self>, peer: &mut HttpPeer) {
        let owner =
            Arc::new(Owner { all: Arc::clone(self), number: self.next(), socket: AtomicI32::new(NONE) });
        peer.group_key = GROUP;
        peer.options.tracer = Some(Tracer(Box::new(Shared(Arc::clone(&owner)))));
        peer.options.upstream_tcp_sock_tweak_hook = Some(Arc::new(move |socket| {
            let second = socket.as_fd().try_clone_to_owned();
            let second = second.map_err(|error| {
                Error::because(ErrorType::SocketError, "no second handle of a socket", error)
            })?;
            owner.keep(socket.as_raw_fd(), second.into());
            Ok(())
        }));
    }

    /// A poll begins to wait on a connection.
    pub fn wait(self: &Arc<Self>, socket: RawFd) -> Waiting {
        let poll = self.next();
        if let Some(mut link) = self.links.get_mut(&socket) {
            link.poll = Some(poll);
        }
        Waiting { all: Arc::clone(self), socket, poll }
    }

    /// Severs all on which polls wait.
    pub fn sever(&self) {
        for link in self.links.iter().filter(|link| link.poll.is_some()) {
            // An error says that it has ended already.
            let _ = link.second.shutdown(Shutdown::Both);
        }
    }
}

/// Gives the second handle up with the first, without which the cell would not hear of the end.
#[derive(Debug)]
struct Owner {
    all: Arc<Severing>,
    number: u64,
    socket: AtomicI32,
}

impl Owner {
    fn keep(&self, socket: RawFd, second: TcpStream) {
        self.give_up();
        self.all.links.insert(socket, Link { second, owner: self.number, poll: None });
        self.socket.store(socket, Ordering::Relaxed);
    }

    fn give_up(&self) {
        let socket = self.socket.swap(NONE, Ordering::Relaxed);
        self.all.links.remove_if(&socket, |_, link| link.owner == self.number);
    }
}

impl Drop for Owner {
    /// Where it never came to a connection.
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Pingora copies it.
#[derive(Debug)]
struct Shared(Arc<Owner>);

impl Tracing for Shared {
    fn on_connected(&self) {}

    fn on_disconnected(&self) {
        self.0.give_up();
    }

    fn boxed_clone(&self) -> Box<dyn Tracing> {
        Box::new(Self(Arc::clone(&self.0)))
    }
}
