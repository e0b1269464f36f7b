//! One request against all limits: evaluated together, taken from together or not at all (D9).

use super::{
    ClusterLimits, Limiter,
    admission::{Caps, HashedPair},
    bucket::Rate,
    clock::{Clock, Nanos},
    decision::{Decision, Limit, Mode, Outcome},
    number,
    parked::{Full, Gauge, Slot},
    pending::QueueRow,
    shared::places::Places,
    tokens::Footing,
};
use crate::{
    domain::limits::Limits,
    policy::inspect::{Heaviest, Pairs, Retention},
};
use std::sync::Arc;
use tokio::sync::watch;

/// Seconds after which a client that found no place to wait may try again.
const PARKED_RETRY_AFTER: u64 = 5;

/// What one request asks for.
#[derive(Clone, Copy, Default, Debug)]
pub struct Request<'r> {
    /// Messages it puts in.
    pub messages: u64,
    /// Whether the cap on batch items applies to these messages.
    pub is_batch: bool,
    /// The largest payload where the cap on payloads applies.
    pub heaviest: Option<Heaviest>,
    /// Payload bytes it adds to what the cluster keeps.
    pub payload_bytes: u64,
    /// Queues and partitions it may create.
    pub pairs: Option<&'r Pairs<'r>>,
    /// Retentions it sets.
    pub retention: &'r [Retention],
    /// It is a waiting pop on this cell, named the same way each time.
    pub parks_at: Option<&'r str>,
    /// It has waited for the store as long as a request may: this proxy decides alone.
    pub impatient: bool,
}

/// The decision on a request, and what it holds.
#[derive(Debug)]
pub struct Verdict {
    /// What each limit says.
    pub decision: Decision,
    /// The place of a waiting pop that goes on: keep it until the answer's head is there.
    pub slot: Option<Slot>,
    /// Nothing is decided: the request has to be evaluated again once the store of [`super::shared`] has been
    /// asked, which this hears of. It has taken nothing.
    pub unsettled: Option<watch::Receiver<()>>,
}

impl<C: Clock> Limiter<C> {
    /// Whether a request has a token to come by, which it does not take: asked before a body is read,
    /// so that a flood is refused early. Only the rate of requests is in the decision.
    pub fn peek(&self, cluster: &ClusterLimits, limits: &Limits) -> Decision {
        let mut decision = Decision::default();
        if let Some(rate) = Rate::of(limits.max_req_per_sec, limits.req_burst) {
            let footing = self.footing(false);
            let reading = cluster.lock().requests.check(rate, self.clock.now(), 1, footing);
            decision.set(Outcome::of_rate(Limit::Requests, reading));
        }
        decision
    }

    /// Evaluates every limit of a request, and takes from all of them when none denies; a request
    /// that is refused, or in shadow mode would be, takes nothing. What goes on in spite of a denial
    /// still holds its slot and counts its bytes, which are facts.
    pub fn evaluate(
        &self,
        cluster: &Arc<ClusterLimits>,
        request: &Request<'_>,
        limits: &Limits,
        mode: Mode,
    ) -> Verdict {
        let mut decision = Decision::default();
        self.sizes(&mut decision, request, limits);
        let pairs = request.pairs.map(Pairs::list).unwrap_or_default();
        let hashed: Vec<HashedPair> = pairs.iter().map(|pair| self.names.hash_pair(pair)).collect();
        let caps = Caps { queues: limits.max_queues, partitions: limits.max_partitions_per_queue };
        let cell = request.parks_at.map(|cell| self.cell(cell));

        let now = self.clock.now();
        let footing = self.footing(request.impatient);
        let mut state = cluster.lock();
        if let (Some(max), true) = (number(limits.max_retained_bytes), request.payload_bytes > 0) {
            let (used, blocked) =
                (cluster.storage.estimate(), cluster.storage.is_blocked(limits.max_retained_bytes));
            decision.set(Outcome::plain(Limit::RetainedBytes, max, used, blocked));
        }
        let requests = Rate::of(limits.max_req_per_sec, limits.req_burst);
        let (mut no_request, mut no_messages) = (false, false);
        if let Some(rate) = requests {
            let reading = state.requests.check(rate, now, 1, footing);
            no_request = reading.unsettled;
            decision.set(Outcome::of_rate(Limit::Requests, reading));
        }
        let messages = Rate::of(limits.max_msgs_per_sec, limits.msgs_burst).filter(|_| request.messages > 0);
        if let Some(rate) = messages {
            let reading = state.messages.check(rate, now, request.messages, footing);
            no_messages = reading.unsettled;
            decision.set(Outcome::of_rate(Limit::Messages, reading));
        }
        let plan = state.admission.evaluate(&hashed, caps);
        if let Err(too_many) = plan {
            decision.set(too_many.outcome(caps));
        } else if request.pairs.is_some_and(Pairs::overflow) {
            overflow(&mut decision, pairs.len(), caps);
        }
        let park = cell.map(|cell| {
            let max = number(limits.max_parked_pops);
            (cell, Room::of(&mut state.places, max, cluster, now, footing))
        });
        let no_place = park.as_ref().is_some_and(|(_, room)| room.unsettled);
        if (no_request || no_messages || no_place) && decision.denials().next().is_none() {
            if no_request {
                state.requests.wait(1);
            }
            if no_messages {
                state.messages.wait(request.messages);
            }
            if no_place {
                state.places.wait();
            }
            if let Some(shared) = &self.shared {
                shared.count_wait();
            }
            let unsettled = Some(state.listen());
            self.ask(cluster, &mut state);
            return Verdict { decision, slot: None, unsettled };
        }
        let slot = park.and_then(|(cell, room)| {
            let denied = decision.denials().next().is_some();
            self.park(&mut decision, cluster, &cell, room, denied, mode)
        });
        let mut projected = Vec::new();
        if decision.denials().next().is_none() {
            if let Some(rate) = requests {
                state.requests.take(1);
                decision.set(Outcome::of_rate(Limit::Requests, state.requests.check(rate, now, 0, footing)));
            }
            if let Some(rate) = messages {
                state.messages.take(request.messages);
                decision.set(Outcome::of_rate(Limit::Messages, state.messages.check(rate, now, 0, footing)));
            }
            if let Ok(plan) = plan {
                projected = state.admission.record(&plan, now, self.settings.max_names);
            }
        }
        if decision.refusal(mode).is_none() {
            cluster.storage.accept(request.payload_bytes);
        }
        if slot.is_some() && matches!(footing, Footing::Apart(_)) {
            // The store hears of it once it is back.
            self.tell_store(cluster, &mut state);
        }
        self.ask(cluster, &mut state);
        drop(state);
        for row in projected {
            let name = Box::from(&*pairs[row.pair].queue);
            self.pending.add(QueueRow { cluster: cluster.id(), name, partitions: row.partitions });
        }
        Verdict { decision, slot, unsettled: None }
    }

    fn sizes(&self, decision: &mut Decision, request: &Request<'_>, limits: &Limits) {
        if let (Some(max), Some(heaviest)) = (number(limits.max_payload_bytes), request.heaviest) {
            let mut outcome = Outcome::plain(Limit::PayloadBytes, max, heaviest.bytes, heaviest.bytes > max);
            outcome.index = usize::try_from(heaviest.index).ok();
            decision.set(outcome);
        }
        if request.is_batch {
            let max = number(limits.max_batch_items).unwrap_or(self.settings.max_batch_items);
            decision.set(Outcome::plain(Limit::BatchItems, max, request.messages, request.messages > max));
        }
        if let (Some(max), false) = (number(limits.max_retention_seconds), request.retention.is_empty()) {
            let seconds = |retention: &Retention| u64::try_from(retention.seconds).unwrap_or(0);
            let index = request.retention.iter().position(|retention| seconds(retention) > max);
            let used = seconds(&request.retention[index.unwrap_or(0)]);
            let mut outcome = Outcome::plain(Limit::Retention, max, used, index.is_some());
            outcome.index = index;
            decision.set(outcome);
        }
    }

    fn park(
        &self,
        decision: &mut Decision,
        cluster: &ClusterLimits,
        cell: &Arc<Gauge>,
        room: Room,
        denied: bool,
        mode: Mode,
    ) -> Option<Slot> {
        let cell_max = self.settings.max_cell_parked;
        let (mut mine, mut cells) = (cluster.parked.waiting(), cell.waiting());
        let mut full = (mine >= room.here, cells >= cell_max);
        let mut slot = None;
        if !denied && full == (false, false) {
            match Slot::enter(&cluster.parked, room.here, cell, cell_max) {
                Ok(entered) => {
                    slot = Some(entered);
                    (mine, cells) = (mine + 1, cells + 1);
                }
                // Other clusters took the cell's last place since we looked.
                Err(Full::Cell(now)) => (cells, full.1) = (now, true),
                Err(Full::Cluster(now)) => (mine, full.0) = (now, true),
            }
        }
        let mine = mine.saturating_add(room.elsewhere);
        let limits =
            [(Limit::Parked, room.max, mine, full.0), (Limit::CellParked, Some(cell_max), cells, full.1)];
        for (limit, max, used, denied) in limits {
            if let Some(max) = max {
                let mut outcome = Outcome::plain(limit, max, used, denied);
                outcome.retry_after = denied.then_some(PARKED_RETRY_AFTER);
                decision.set(outcome);
            }
        }
        if slot.is_none() && decision.refusal(mode).is_none() {
            slot = Slot::enter(&cluster.parked, u64::MAX, cell, u64::MAX).ok();
        }
        slot
    }
}

/// How many pops of a cluster may wait.
#[derive(Clone, Copy)]
struct Room {
    /// The cap; none when there is none.
    max: Option<u64>,
    /// As many of them may wait at this proxy.
    here: u64,
    /// So many do at others, as far as it is known.
    elsewhere: u64,
    /// It is not known whether one more may: the store has to be asked.
    unsettled: bool,
}

impl Room {
    fn of(
        places: &mut Places,
        max: Option<u64>,
        cluster: &ClusterLimits,
        now: Nanos,
        footing: Footing,
    ) -> Self {
        let Some(cap) = max else {
            places.lift();
            return Self { max, here: u64::MAX, elsewhere: 0, unsettled: false };
        };
        if let Footing::Shared(_) = footing {
            let unsettled = places.room(cap, cluster.parked.waiting(), now).is_none();
            return Self { max, here: places.held().min(cap), elsewhere: places.others(), unsettled };
        }
        places.apart(cap);
        let here = (cap / footing.proxies()).max(cap.min(1));
        Self { max, here, elsewhere: 0, unsettled: false }
    }
}

/// A body with more pairs than are looked at: it cannot be told whether they may be there.
fn overflow(decision: &mut Decision, pairs: usize, caps: Caps) {
    let capped = [(Limit::Queues, caps.queues), (Limit::Partitions, caps.partitions)];
    if let Some((limit, max)) = capped.into_iter().find_map(|(limit, cap)| Some((limit, number(cap)?))) {
        decision.set(Outcome::plain(limit, max, pairs as u64, true));
    }
}
