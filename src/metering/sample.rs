//! What one request counts as (proxy contract §13).

use super::scan::{Scanner, Sinks, Unreadable};
use crate::{
    domain::features::Feature,
    policy::route::{Effect, RouteClass},
};

/// The class that usage is kept under: `usage_minutes.op_class`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Op {
    /// Messages put in.
    Push,
    /// Messages taken out.
    Delivery,
    /// Transactions.
    Txn,
    /// Changes of queues.
    Configure,
    /// Everything else.
    Read,
}

impl Op {
    /// Every class, in the order of [`Op::index`].
    pub const ALL: [Self; 5] = [Self::Push, Self::Delivery, Self::Txn, Self::Configure, Self::Read];

    /// The word in the table.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Delivery => "delivery",
            Self::Txn => "txn",
            Self::Configure => "configure",
            Self::Read => "read",
        }
    }

    /// The class of a word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.as_str() == word)
    }

    /// Its place in [`Op::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The four counters of a row.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Requests that the cell was asked.
    pub reqs: u64,
    /// Messages, pushed or delivered.
    pub msgs: u64,
    /// Bytes of request bodies that were read before they were forwarded.
    pub bytes_in: u64,
    /// Bytes of answers' bodies.
    pub bytes_out: u64,
}

impl Counts {
    /// In the order of the fields.
    pub const fn to_array(self) -> [u64; 4] {
        [self.reqs, self.msgs, self.bytes_in, self.bytes_out]
    }

    /// The reverse.
    pub const fn from_array([reqs, msgs, bytes_in, bytes_out]: [u64; 4]) -> Self {
        Self { reqs, msgs, bytes_in, bytes_out }
    }

    /// Whether there is nothing.
    pub fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// Adds, up to the largest number there is.
    pub fn add(&mut self, other: Self) {
        let (mine, more) = (self.to_array(), other.to_array());
        *self = Self::from_array(std::array::from_fn(|at| mine[at].saturating_add(more[at])));
    }
}

/// What is added to one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// The class.
    pub op: Op,
    /// How much.
    pub counts: Counts,
}

/// A route, as metering tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MeteredRoute {
    /// `/api/v1/push`
    Push,
    /// `/api/v1/ephemeral/push`
    EphemeralPush,
    /// `/api/v1/transaction`
    Transaction,
    /// Pops, also ephemeral ones.
    Pop,
    /// `/streams/v1/cycle`
    Cycle,
    /// A dead letter put back.
    Replay,
    /// One whose answer is not read.
    Other(Op),
}

impl MeteredRoute {
    /// Whether its answer is read for messages.
    pub const fn is_read(self) -> bool {
        !matches!(self, Self::Other(_))
    }

    /// Whether a cell stores messages that it brings: they count also when nobody waits for the answer any more.
    pub const fn stores(self) -> bool {
        self.is_read() && !matches!(self, Self::Pop)
    }

    /// Of a request that was admitted; the path is canonical.
    pub fn of(class: RouteClass, path: &str) -> Self {
        match class {
            RouteClass::Produce if path == "/api/v1/push" => Self::Push,
            RouteClass::Produce => Self::Transaction,
            RouteClass::Consume if path.starts_with("/api/v1/pop/queue/") => Self::Pop,
            RouteClass::QueueAdmin { replays: true } => Self::Replay,
            RouteClass::QueueAdmin { replays: false } => Self::Other(Op::Configure),
            RouteClass::Gated(Feature::Ephemeral, _) if path == "/api/v1/ephemeral/push" => {
                Self::EphemeralPush
            }
            RouteClass::Gated(Feature::Ephemeral, _) if path == "/api/v1/ephemeral/pop" => Self::Pop,
            RouteClass::Gated(Feature::Streams, Effect::Mixed) => Self::Cycle,
            _ => Self::Other(Op::Read),
        }
    }

    /// The class of its (first) sample.
    pub const fn op(self) -> Op {
        match self {
            Self::Push | Self::EphemeralPush => Op::Push,
            Self::Transaction => Op::Txn,
            Self::Pop => Op::Delivery,
            Self::Replay => Op::Configure,
            Self::Cycle => Op::Read,
            Self::Other(op) => op,
        }
    }
}

/// What the request's body told, where it was read.
#[derive(Clone, Debug, Default)]
pub struct RequestFacts {
    /// Bytes of a body that was read before it was forwarded; zero of one that streamed.
    pub bytes_in: u64,
    /// Messages in a transaction.
    pub ingress: u64,
    /// Messages in a cycle.
    pub sinks: Sinks,
}

/// What a request came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// The request itself.
    pub first: Sample,
    /// Messages that a cycle or a replay put in besides.
    pub second: Option<Sample>,
    /// Why the messages are not known: it is worth a line in the log, once a minute.
    pub unreadable: Option<Unreadable>,
    /// Most of a push's messages wait in the cell's buffer: worth a line as well.
    pub mostly_buffered: bool,
}

impl Usage {
    /// Both samples.
    pub fn samples(&self) -> impl Iterator<Item = Sample> + use<> {
        std::iter::once(self.first).chain(self.second)
    }
}

/// Follows one exchange with a cell. What the proxy refuses never has one.
#[derive(Debug)]
pub struct Watch {
    route: MeteredRoute,
    facts: RequestFacts,
    max_name: usize,
    answered: bool,
    bytes_out: u64,
    scanner: Option<Scanner>,
    unreadable: Option<Unreadable>,
    client_left: bool,
}

impl Watch {
    /// Begins when the request goes to the cell. Names of queues and partitions in the answer of a cycle are
    /// held up to `max_name` bytes.
    pub fn new(route: MeteredRoute, facts: RequestFacts, max_name: usize) -> Self {
        Self {
            route,
            facts,
            max_name,
            answered: false,
            bytes_out: 0,
            scanner: None,
            unreadable: None,
            client_left: false,
        }
    }

    /// The head of the cell's answer. Success codes vary between brokers, so the body decides, not the code.
    pub fn head(&mut self, status: u16, content_encoding: Option<&[u8]>) {
        self.answered = true;
        if !(200..300).contains(&status) || status == 204 {
            return;
        }
        let scanner = match self.route {
            MeteredRoute::Push => Scanner::push(),
            MeteredRoute::EphemeralPush => Scanner::ephemeral_push(),
            MeteredRoute::Transaction => Scanner::transaction(self.facts.ingress),
            MeteredRoute::Pop => Scanner::pop(),
            MeteredRoute::Cycle if !self.facts.sinks.is_empty() => {
                Scanner::cycle(std::mem::take(&mut self.facts.sinks), self.max_name)
            }
            MeteredRoute::Replay => Scanner::replay(),
            MeteredRoute::Cycle | MeteredRoute::Other(_) => return,
        };
        let plain = content_encoding.is_none_or(|encoding| {
            let encoding = encoding.trim_ascii();
            encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity")
        });
        if plain {
            self.scanner = Some(scanner);
        } else {
            self.unreadable = Some(Unreadable::Encoded);
        }
    }

    /// The next piece of the answer's body, wherever it was cut.
    pub fn piece(&mut self, piece: &[u8]) {
        self.bytes_out += piece.len() as u64;
        if let Some(scanner) = &mut self.scanner {
            scanner.feed(piece);
        }
    }

    /// The client went away, in a way that ended the exchange. Of an answer that breaks off for that, the messages
    /// that it has told of count: who leaves before the end has them all the same. Of a request that brings
    /// messages all of them count, so that nobody stores for nothing by breaking off just then.
    pub fn client_left(&mut self) {
        self.client_left = true;
    }

    /// Messages that may be stored by now, whatever the answer would have said.
    fn brought(&self) -> u64 {
        match self.route {
            MeteredRoute::Push
            | MeteredRoute::EphemeralPush
            | MeteredRoute::Transaction
            | MeteredRoute::Cycle => self.facts.ingress,
            MeteredRoute::Pop | MeteredRoute::Replay | MeteredRoute::Other(_) => 0,
        }
    }

    /// What it came to. Without a head the cell did not answer: the request counts, and nothing else, unless it
    /// is the client's doing.
    pub fn finish(mut self) -> Usage {
        let brought = self.brought();
        let cut_short = self.client_left && !self.answered;
        let mut messages = if cut_short { brought } else { 0 };
        let mut mostly_buffered = false;
        // An empty pop may have an empty body.
        let empty = self.bytes_out == 0 && self.route == MeteredRoute::Pop;
        if let Some(scanner) = self.scanner.filter(|_| !empty) {
            match scanner.messages() {
                Ok(read) => messages = read,
                Err(Unreadable::Truncated) if self.client_left => messages = scanner.so_far().max(brought),
                Err(error) => self.unreadable = Some(error),
            }
            mostly_buffered = scanner.mostly_buffered();
        }
        let apart = matches!(self.route, MeteredRoute::Cycle | MeteredRoute::Replay);
        let reached = self.answered || cut_short;
        let bytes_in = if reached && self.route != MeteredRoute::Pop { self.facts.bytes_in } else { 0 };
        let msgs = if apart { 0 } else { messages };
        let first = Sample {
            op: self.route.op(),
            counts: Counts { reqs: 1, msgs, bytes_in, bytes_out: self.bytes_out },
        };
        let pushed = Sample { op: Op::Push, counts: Counts { msgs: messages, ..Counts::default() } };
        Usage {
            first,
            second: (apart && messages > 0).then_some(pushed),
            unreadable: self.unreadable,
            mostly_buffered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MeteredRoute, Op};
    use crate::policy::route::classify;
    use http::Method;

    #[test]
    fn routes_are_told_apart_as_the_contract_does() {
        use MeteredRoute::{Cycle, EphemeralPush, Other, Pop, Push, Replay, Transaction};
        for (method, path, route, op) in [
            ("POST", "/api/v1/push", Push, "push"),
            ("POST", "/api/v1/ephemeral/push", EphemeralPush, "push"),
            ("POST", "/api/v1/transaction", Transaction, "txn"),
            ("GET", "/api/v1/pop/queue/orders", Pop, "delivery"),
            ("GET", "/api/v1/pop/queue/orders/partition/eu", Pop, "delivery"),
            ("GET", "/api/v1/ephemeral/pop", Pop, "delivery"),
            ("POST", "/api/v1/configure", Other(Op::Configure), "configure"),
            ("DELETE", "/api/v1/resources/queues/orders", Other(Op::Configure), "configure"),
            ("DELETE", "/api/v1/dlq", Other(Op::Configure), "configure"),
            ("POST", "/api/v1/messages/p/t/retry", Replay, "configure"),
            ("POST", "/api/v1/dlq/7/replay", Replay, "configure"),
            ("POST", "/streams/v1/cycle", Cycle, "read"),
            ("GET", "/streams/v1/cycle", Other(Op::Read), "read"),
            ("POST", "/streams/v1/state", Other(Op::Read), "read"),
            ("POST", "/api/v1/ack", Other(Op::Read), "read"),
            ("POST", "/api/v1/lease/x/extend", Other(Op::Read), "read"),
            ("POST", "/api/v1/fetch", Other(Op::Read), "read"),
            ("POST", "/api/v1/kv", Other(Op::Read), "read"),
            ("PUT", "/api/v1/kv/ns/k", Other(Op::Read), "read"),
            ("POST", "/api/v1/timers", Other(Op::Read), "read"),
            ("POST", "/api/v1/ephemeral/ack", Other(Op::Read), "read"),
            ("GET", "/api/v1/resources/queues", Other(Op::Read), "read"),
            ("GET", "/metrics/prometheus", Other(Op::Read), "read"),
        ] {
            let found = MeteredRoute::of(classify(&method.parse::<Method>().unwrap(), path), path);
            assert_eq!((found, found.op().as_str()), (route, op), "{method} {path}");
        }
    }

    #[test]
    fn words_and_classes() {
        for (index, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!((op.index(), Op::parse(op.as_str())), (index, Some(op)));
        }
        assert_eq!(Op::parse("steal"), None);
    }
}
