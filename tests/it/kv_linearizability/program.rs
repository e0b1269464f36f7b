//! What the clients of one history do, and what happens to them meanwhile: all from one number.

/// Splitmix64: the same numbers for the same seed, on every machine and in every version.
pub struct Random(u64);

impl Random {
    pub fn of(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

/// One request. Which version a swap expects is decided when it is sent: the last one its client saw.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub key: usize,
    pub action: Action,
    pub route: Route,
    /// The client closes its socket without waiting for the answer.
    pub hangs_up: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum Action {
    Get,
    Put,
    Claim,
    Swap,
    Delete,
    DeleteIf,
    Incr,
}

#[derive(Clone, Copy, Debug)]
pub enum Route {
    /// By the path, where the operation has one; else in a batch.
    Path,
    Batch,
    Bundle,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The cell's sessions are ended by the server.
    CutSessions,
    /// The server stops in order and comes back.
    Restart,
    /// The server is ended as by a crash and recovers.
    Crash,
    /// The cell is killed and comes back.
    KillCell,
}

pub const CLIENTS: usize = 4;
pub const KEYS: usize = 2;

#[derive(Clone, Debug)]
pub struct Program {
    pub clients: Vec<Vec<Step>>,
    /// When the request with this number, counted over all clients, is sent.
    pub faults: Vec<(usize, Fault)>,
    /// Of all values that are not counters, those with this bit are documents of some kilobytes.
    pub documents: u64,
}

impl Program {
    /// One in forty seeds has a fault that takes a second: each kind once in any forty in a row.
    pub fn of(seed: u64) -> Self {
        let mut random = Random::of(seed);
        let length = 4 + usize::try_from(random.below(7)).unwrap_or_default();
        let clients = (0..CLIENTS).map(|_| (0..length).map(|_| step(&mut random)).collect()).collect();
        let requests = u64::try_from(CLIENTS * length).unwrap_or(1);
        let mut when = || usize::try_from(random.below(requests)).unwrap_or_default();
        // A cut costs every session anew, so that half of the histories have none and get further.
        let faults: Vec<(usize, Fault)> = match (seed % 40, seed % 4) {
            (7, _) => vec![(when(), Fault::Restart)],
            (20, _) => vec![(when(), Fault::Crash)],
            (33, _) => vec![(when(), Fault::KillCell)],
            (_, cuts @ (2 | 3)) => (1..cuts).map(|_| (when(), Fault::CutSessions)).collect(),
            _ => Vec::new(),
        };
        Self { clients, faults, documents: random.next() }
    }
}

fn step(random: &mut Random) -> Step {
    let action = match random.below(16) {
        0..3 => Action::Get,
        3..5 => Action::Put,
        5..7 => Action::Claim,
        7..10 => Action::Swap,
        10..12 => Action::Delete,
        12 => Action::DeleteIf,
        _ => Action::Incr,
    };
    let route =
        [Route::Path, Route::Batch, Route::Bundle][usize::try_from(random.below(3)).unwrap_or_default()];
    let key = usize::try_from(random.below(KEYS as u64)).unwrap_or_default();
    Step { key, action, route, hangs_up: random.one_in(12) }
}

#[test]
fn a_seed_is_a_program() {
    for seed in [0, 1, 7, u64::MAX] {
        assert_eq!(format!("{:?}", Program::of(seed)), format!("{:?}", Program::of(seed)));
    }
    assert_ne!(format!("{:?}", Program::of(1)), format!("{:?}", Program::of(2)));
    let faults = (1000..1040).flat_map(|seed| Program::of(seed).faults).map(|(_, fault)| fault);
    let faults: Vec<Fault> = faults.collect();
    for fault in [Fault::Restart, Fault::Crash, Fault::KillCell] {
        assert_eq!(faults.iter().filter(|found| **found == fault).count(), 1, "{fault:?}");
    }
    assert!(faults.contains(&Fault::CutSessions));
}
