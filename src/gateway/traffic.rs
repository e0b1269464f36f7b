//! What each cluster's traffic comes to, for dashboards: in bounded number, whoever comes first (D13).

use crate::domain::{ids::ClusterId, slug::Slug};
use dashmap::DashMap;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// The name under which the clusters that found no place are added up. No slug looks like it.
pub const OTHERS: &str = "_others";
/// Turns whose traffic counts as recent; [`Clusters::turn`] ends one.
pub const RECENT_TURNS: usize = 6;
/// Turns without traffic after which a cluster's place is free again: an hour of turns of ten seconds.
const IDLE_TURNS: u32 = 360;

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The cell answered it, whatever with, or we did.
    Answered,
    /// We refused it, with a status below 500.
    Refused,
    /// It failed: ours or the cell's fault.
    Failed,
    /// The client went away before there was an answer.
    Gone,
}

impl Outcome {
    /// Each, in the order of [`Counts::outcomes`].
    pub const ALL: [Self; 4] = [Self::Answered, Self::Refused, Self::Failed, Self::Gone];

    /// Of the status that was sent, 0 when none was, and whether the answer was our own refusal.
    pub fn of(status: u16, refused: bool) -> Self {
        match status {
            0 => Self::Gone,
            500.. => Self::Failed,
            _ if refused => Self::Refused,
            _ => Self::Answered,
        }
    }

    /// The word in metrics.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Gone => "gone",
        }
    }
}

/// What one request adds.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// How it ended.
    pub outcome: Outcome,
    /// How long the cell took to the head of its answer.
    pub cell: Option<Duration>,
    /// Billable messages.
    pub messages: u64,
    /// Bytes of the body that came in, where it was read.
    pub bytes_in: u64,
    /// Bytes of the answer's body.
    pub bytes_out: u64,
}

/// Sums since the cluster got its place.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Requests, by [`Outcome::ALL`].
    pub outcomes: [u64; 4],
    /// Requests that a cell answered.
    pub cell_requests: u64,
    /// What the cell took for them, in microseconds.
    pub cell_us: u64,
    /// Messages.
    pub messages: u64,
    /// Bytes in.
    pub bytes_in: u64,
    /// Bytes out.
    pub bytes_out: u64,
}

const NUMBERS: usize = 9;

impl Counts {
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.outcomes.iter().sum()
    }

    fn to_array(self) -> [u64; NUMBERS] {
        let [a, b, c, d] = self.outcomes;
        [a, b, c, d, self.cell_requests, self.cell_us, self.messages, self.bytes_in, self.bytes_out]
    }

    fn from_array(
        [a, b, c, d, cell_requests, cell_us, messages, bytes_in, bytes_out]: [u64; NUMBERS],
    ) -> Self {
        Self { outcomes: [a, b, c, d], cell_requests, cell_us, messages, bytes_in, bytes_out }
    }

    fn minus(self, older: Self) -> Self {
        let (new, old) = (self.to_array(), older.to_array());
        Self::from_array(std::array::from_fn(|at| new[at].saturating_sub(old[at])))
    }
}

/// One cluster's counters.
#[derive(Debug)]
pub struct Traffic {
    name: Box<str>,
    numbers: [AtomicU64; NUMBERS],
    turns: Mutex<Turns>,
}

/// What the counters stood at when the last turns ended, the newest last.
#[derive(Debug, Default)]
struct Turns {
    ended: [Counts; RECENT_TURNS],
    idle: u32,
}

impl Traffic {
    fn new(name: &str) -> Self {
        Self { name: name.into(), numbers: Default::default(), turns: Mutex::default() }
    }

    /// Adds a request.
    pub fn add(&self, request: &Request) {
        let mut add = Counts {
            messages: request.messages,
            bytes_in: request.bytes_in,
            bytes_out: request.bytes_out,
            ..Counts::default()
        };
        add.outcomes[request.outcome as usize] = 1;
        if let Some(cell) = request.cell {
            add.cell_requests = 1;
            add.cell_us = u64::try_from(cell.as_micros()).unwrap_or(u64::MAX);
        }
        for (number, more) in self.numbers.iter().zip(add.to_array()) {
            if more > 0 {
                number.fetch_add(more, Relaxed);
            }
        }
    }

    fn counts(&self) -> Counts {
        Counts::from_array(std::array::from_fn(|at| self.numbers[at].load(Relaxed)))
    }

    /// Ends a turn; returns for how many nothing has happened.
    fn turn(&self) -> u32 {
        let now = self.counts();
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.idle = if turns.ended[RECENT_TURNS - 1] == now { turns.idle + 1 } else { 0 };
        turns.ended.rotate_left(1);
        turns.ended[RECENT_TURNS - 1] = now;
        turns.idle
    }

    fn view(&self) -> View {
        let total = self.counts();
        let oldest = self.turns.lock().unwrap_or_else(PoisonError::into_inner).ended[0];
        View { name: self.name.clone(), total, recent: total.minus(oldest) }
    }
}

/// One cluster as it stands.
#[derive(Clone, Debug)]
pub struct View {
    /// The slug, or [`OTHERS`].
    pub name: Box<str>,
    /// Since it got its place.
    pub total: Counts,
    /// In the last [`RECENT_TURNS`] turns and the open one.
    pub recent: Counts,
}

/// The clusters that are told apart.
#[derive(Debug)]
pub struct Clusters {
    most: usize,
    held: AtomicUsize,
    known: DashMap<ClusterId, Arc<Traffic>>,
    others: Arc<Traffic>,
}

impl Clusters {
    /// Room for `most` clusters; with 0 all are added up.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            held: AtomicUsize::new(0),
            known: DashMap::new(),
            others: Arc::new(Traffic::new(OTHERS)),
        }
    }

    /// Adds a request of a cluster.
    pub fn add(&self, id: ClusterId, slug: Slug, request: &Request) {
        if let Some(traffic) = self.known.get(&id) {
            traffic.add(request);
        } else if self.held.fetch_add(1, Relaxed) < self.most {
            let mut new = false;
            let traffic = self.known.entry(id).or_insert_with(|| {
                new = true;
                Arc::new(Traffic::new(slug.as_str()))
            });
            traffic.add(request);
            if !new {
                self.held.fetch_sub(1, Relaxed);
            }
        } else {
            self.held.fetch_sub(1, Relaxed);
            self.others.add(request);
        }
    }

    /// Ends a turn, and frees the places of clusters that had nothing to do for long.
    pub fn turn(&self) {
        self.others.turn();
        self.known.retain(|_, traffic| {
            let keep = traffic.turn() < IDLE_TURNS;
            if !keep {
                self.held.fetch_sub(1, Relaxed);
            }
            keep
        });
    }

    /// Each cluster, and the others when they had traffic.
    pub fn views(&self) -> Vec<View> {
        let mut views: Vec<View> = self.known.iter().map(|traffic| traffic.view()).collect();
        let others = self.others.view();
        if others.total.requests() > 0 {
            views.push(others);
        }
        views
    }
}

#[cfg(test)]
mod tests {
    use super::{Clusters, IDLE_TURNS, OTHERS, Outcome, RECENT_TURNS, Request};
    use crate::domain::{ids::ClusterId, slug::Slug};
    use std::time::Duration;
    use uuid::Uuid;

    const ONE: Request = Request {
        outcome: Outcome::Answered,
        cell: Some(Duration::from_micros(30)),
        messages: 2,
        bytes_in: 10,
        bytes_out: 100,
    };

    fn add(clusters: &Clusters, number: u128, request: &Request) {
        let slug = Slug::parse(&format!("c{number}")).unwrap();
        clusters.add(ClusterId(Uuid::from_u128(number)), slug, request);
    }

    fn names(clusters: &Clusters) -> Vec<String> {
        let mut names: Vec<_> = clusters.views().iter().map(|view| view.name.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn who_comes_late_is_added_up() {
        let clusters = Clusters::new(2);
        for number in [1, 2, 3, 4, 1, 2, 3] {
            add(&clusters, number, &ONE);
        }
        assert_eq!(names(&clusters), [OTHERS, "c1", "c2"]);
        let others = clusters.views().into_iter().find(|view| *view.name == *OTHERS).unwrap();
        assert_eq!((others.total.requests(), others.total.messages, others.total.cell_us), (3, 6, 90));
        let none = Clusters::new(0);
        add(&none, 1, &ONE);
        assert_eq!(names(&none), [OTHERS]);
    }

    #[test]
    fn a_place_is_free_again_after_an_idle_hour() {
        let clusters = Clusters::new(1);
        add(&clusters, 1, &ONE);
        for _ in 0..IDLE_TURNS {
            clusters.turn();
        }
        assert_eq!(names(&clusters), ["c1"]);
        clusters.turn();
        add(&clusters, 2, &ONE);
        assert_eq!(names(&clusters), ["c2"]);
    }

    #[test]
    fn recent_is_what_the_last_turns_saw() {
        let clusters = Clusters::new(1);
        let recent = |clusters: &Clusters| clusters.views()[0].recent.outcomes;
        add(&clusters, 1, &ONE);
        add(&clusters, 1, &Request { outcome: Outcome::Failed, ..ONE });
        assert_eq!(recent(&clusters), [1, 0, 1, 0]);
        for _ in 0..RECENT_TURNS {
            clusters.turn();
        }
        assert_eq!(recent(&clusters), [0; 4]);
        add(&clusters, 1, &Request { outcome: Outcome::Gone, ..ONE });
        assert_eq!(recent(&clusters), [0, 0, 0, 1]);
        assert_eq!(clusters.views()[0].total.outcomes, [1, 0, 1, 1]);
    }

    #[test]
    fn outcomes() {
        for (status, refused, outcome) in [
            (0, true, Outcome::Gone),
            (200, false, Outcome::Answered),
            (404, false, Outcome::Answered),
            (429, true, Outcome::Refused),
            (502, true, Outcome::Failed),
            (500, false, Outcome::Failed),
        ] {
            assert_eq!(Outcome::of(status, refused), outcome, "{status} {refused}");
        }
    }
}
