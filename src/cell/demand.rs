//! What a call asks for, as far as admission and metrics want to know.

use super::ladder::Usage;

/// Kinds of operations as metrics name them; `putIfAbsent` is a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Get,
    GetMany,
    GetPrefix,
    Put,
    Delete,
    Incr,
}

impl Op {
    /// All, in the order of their numbers.
    pub(super) const ALL: [Self; 6] =
        [Self::Get, Self::GetMany, Self::GetPrefix, Self::Put, Self::Delete, Self::Incr];

    /// Label of the metrics.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::GetMany => "getMany",
            Self::GetPrefix => "getPrefix",
            Self::Put => "put",
            Self::Delete => "delete",
            Self::Incr => "incr",
        }
    }

    const fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Delete | Self::Incr)
    }
}

/// See the module. Starts as a read of nothing, which is what the console routes ask for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// Operations in the order of the call. One that SQL does not know is none: it will be refused there.
    pub ops: Vec<Op>,
    /// Whether anything is written (section 6.4).
    pub writes: bool,
    /// Whether anything may be there afterwards that was not before: everything but reading and deleting.
    pub grows: bool,
    /// Upper bound of what it adds: a row for each put and incr, also where one is there already.
    pub adds: Usage,
    /// Bytes of all values sent, of any operation.
    pub bytes_in: u64,
    /// Whether something in it must not be done twice: everything that writes, except a put without
    /// condition. An incr would count twice; a conditional write would lose against itself; a delete would
    /// not hand out again what it removed.
    pub once_only: bool,
}

impl Demand {
    /// Adds an operation: its name as sent, the compact size of its value (0 without one), and whether it
    /// carries `expect`.
    pub(super) fn add(&mut self, name: &str, value_bytes: usize, conditional: bool) {
        let value_bytes = u64::try_from(value_bytes).unwrap_or(u64::MAX);
        self.bytes_in = self.bytes_in.saturating_add(value_bytes);
        let op = match name {
            "get" => Op::Get,
            "getMany" => Op::GetMany,
            "getPrefix" => Op::GetPrefix,
            "put" | "putIfAbsent" => Op::Put,
            "delete" => Op::Delete,
            "incr" => Op::Incr,
            _ => return,
        };
        self.ops.push(op);
        if op.writes() {
            self.writes = true;
            self.once_only |= conditional || name != "put";
        }
        if matches!(op, Op::Put | Op::Incr) {
            self.grows = true;
            self.adds.rows += 1;
        }
        if op == Op::Put {
            self.adds.bytes = self.adds.bytes.saturating_add(value_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_single_operations() {
        // Name, conditional; writes, grows, rows, bytes, once only.
        for (name, conditional, writes, grows, rows, bytes, once_only) in [
            ("get", false, false, false, 0, 0, false),
            ("get", true, false, false, 0, 0, false),
            ("getMany", false, false, false, 0, 0, false),
            ("getPrefix", false, false, false, 0, 0, false),
            ("put", false, true, true, 1, 7, false),
            ("put", true, true, true, 1, 7, true),
            ("putIfAbsent", false, true, true, 1, 7, true),
            ("delete", false, true, false, 0, 0, true),
            ("incr", false, true, true, 1, 0, true),
            ("explode", true, false, false, 0, 0, false),
        ] {
            let mut demand = Demand::default();
            demand.add(name, 7, conditional);
            assert_eq!(
                (demand.writes, demand.grows, demand.adds, demand.once_only, demand.bytes_in),
                (writes, grows, Usage { rows, bytes }, once_only, 7),
                "{name} {conditional}"
            );
        }
    }

    #[test]
    fn of_a_batch() {
        let mut demand = Demand::default();
        for (name, bytes) in [("get", 0), ("put", 5), ("putIfAbsent", 6), ("what", 1), ("delete", 0)] {
            demand.add(name, bytes, false);
        }
        assert_eq!(demand.ops, [Op::Get, Op::Put, Op::Put, Op::Delete]);
        assert_eq!((demand.adds, demand.bytes_in), (Usage { rows: 2, bytes: 11 }, 12));
        assert!(demand.writes && demand.grows && demand.once_only);
    }
}
