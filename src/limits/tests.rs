//! Whole decisions on a clock that is moved by hand; the scenarios are those of the project's list
//! of failures seen elsewhere.

use super::{
    Limiter, Request, Settings,
    clock::{Manual, SECOND},
    decision::{Limit, Mode},
    pending::QueueRow,
    storage::Transition,
};
use crate::{
    domain::{
        ids::ClusterId,
        limits::{Cap, Limits},
    },
    policy::inspect::{self, Heaviest, Retention},
};
use std::sync::Arc;
use uuid::Uuid;

const CELL: &str = "cell.internal";

fn limits(set: &[(&str, i64)]) -> Limits {
    Limits::from_columns(|name| {
        let found = set.iter().find(|(set, _)| *set == name);
        Ok::<_, ()>(found.map_or(Cap::Unlimited, |(_, cap)| Cap::At(*cap)))
    })
    .unwrap()
}

fn id(n: u128) -> ClusterId {
    ClusterId(Uuid::from_u128(n))
}

struct Stand {
    clock: Arc<Manual>,
    limiter: Limiter<Arc<Manual>>,
}

impl Stand {
    fn new(settings: Settings) -> Self {
        let clock = Arc::new(Manual::default());
        Self { limiter: Limiter::new(settings, Arc::clone(&clock)), clock }
    }

    /// The limit that refuses one request under enforcement, with the wait it tells.
    fn ask(&self, cluster: u128, request: &Request<'_>, limits: &Limits) -> Option<(Limit, Option<u64>)> {
        let cluster = self.limiter.cluster(id(cluster));
        if cluster.claim_load() {
            self.limiter.load(&cluster, []);
        }
        let verdict = self.limiter.evaluate(&cluster, request, limits, Mode::Enforce);
        let refusal = verdict.decision.refusal(Mode::Enforce);
        refusal.map(|outcome| (outcome.limit, outcome.retry_after))
    }

    fn left(&self, cluster: u128, limits: &Limits) -> (i64, i64) {
        let live = self.limiter.live(id(cluster), limits).unwrap();
        (live.requests.map_or(0, |rate| rate.left), live.messages.map_or(0, |rate| rate.left))
    }
}

fn messages(messages: u64) -> Request<'static> {
    Request { messages, is_batch: true, ..Request::default() }
}

#[test]
fn scenario_17_honouring_retry_after_exactly_always_passes() {
    let stand = Stand::new(Settings::default());
    let plan =
        limits(&[("max_req_per_sec", 3), ("req_burst", 5), ("max_msgs_per_sec", 7), ("msgs_burst", 20)]);
    let mut refused = 0;
    for n in 0..200 {
        let request = messages(n % 40);
        if let Some((_, wait)) = stand.ask(1, &request, &plan) {
            refused += 1;
            let wait = wait.unwrap();
            assert!((1..=60).contains(&wait));
            stand.clock.advance(wait * SECOND);
            assert_eq!(stand.ask(1, &request, &plan), None, "request {n} after {wait} s");
        }
        stand.clock.advance(77_777_777);
    }
    assert!(refused > 50, "{refused}");
}

#[test]
fn scenario_18_a_rate_in_many_tiny_intervals() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_req_per_sec", 1_000), ("req_burst", 10)]);
    let mut admitted = 0_u32;
    for _ in 0..100_000 {
        admitted += u32::from(stand.ask(1, &Request::default(), &plan).is_none());
        stand.clock.advance(SECOND / 10_000);
    }
    assert!((9_900..=10_100).contains(&admitted), "{admitted} in 10 s");
}

#[test]
fn scenario_19_what_one_limit_denies_takes_nothing_from_the_others() {
    let plan = limits(&[
        ("max_req_per_sec", 10),
        ("req_burst", 10),
        ("max_msgs_per_sec", 10),
        ("msgs_burst", 10),
        ("max_queues", 1),
        ("max_partitions_per_queue", 1),
        ("max_payload_bytes", 100),
        ("max_batch_items", 5),
        ("max_retention_seconds", 60),
        ("max_parked_pops", 0),
    ]);
    let one = br#"{"items":[{"queue":"a"}]}"#;
    let two_queues = br#"{"items":[{"queue":"a"},{"queue":"b"}]}"#;
    let two_partitions = br#"{"items":[{"queue":"a"},{"queue":"a","partition":"p"}]}"#;
    let read = |body| inspect::push(body, 10).unwrap().pairs;
    let (one, two_queues, two_partitions) = (read(one), read(two_queues), read(two_partitions));
    let heavy = |bytes| Some(Heaviest { index: 3, bytes });
    let long = [
        Retention { option: "retentionSeconds", seconds: 60 },
        Retention { option: "completedRetentionSeconds", seconds: 61 },
    ];
    let base =
        Request { messages: 1, payload_bytes: 9, pairs: Some(&one), is_batch: true, ..Request::default() };
    let cases = [
        (Limit::PayloadBytes, Request { heaviest: heavy(101), ..base }, Some(3)),
        (Limit::BatchItems, Request { messages: 6, ..base }, None),
        (Limit::Retention, Request { retention: &long, ..base }, Some(1)),
        (Limit::Queues, Request { pairs: Some(&two_queues), ..base }, Some(1)),
        (Limit::Partitions, Request { pairs: Some(&two_partitions), ..base }, Some(1)),
        (Limit::Parked, Request { parks_at: Some(CELL), ..base }, None),
    ];
    let stand = Stand::new(Settings::default());
    let cluster = stand.limiter.cluster(id(1));
    stand.limiter.load(&cluster, []);
    for mode in [Mode::Enforce, Mode::Shadow] {
        for (limit, request, index) in &cases {
            let verdict = stand.limiter.evaluate(&cluster, request, &plan, mode);
            let denials: Vec<_> = verdict.decision.denials().map(|o| (o.limit, o.index)).collect();
            assert_eq!(denials, [(*limit, *index)], "{mode:?}");
            assert_eq!(stand.left(1, &plan), (10, 10), "{limit:?} {mode:?}");
            let refused = mode == Mode::Enforce || limit.is_hard();
            assert_eq!(verdict.decision.refusal(mode).is_some(), refused, "{limit:?} {mode:?}");
            // What goes on holds its slot and counts its bytes all the same: they are facts.
            assert_eq!(verdict.slot.is_some(), *limit == Limit::Parked && !refused);
        }
        assert!(stand.limiter.pending().is_empty(), "{mode:?}");
    }
    let live = stand.limiter.live(id(1), &plan).unwrap();
    assert_eq!((live.queues, live.parked, live.in_flight_bytes), (Some(0), 0, 9 * 4));

    // A rate that denies takes nothing either.
    let verdict = stand.limiter.evaluate(&cluster, &Request { messages: 5, ..base }, &plan, Mode::Enforce);
    assert_eq!(verdict.decision.refusal(Mode::Enforce), None);
    assert_eq!(stand.left(1, &plan), (9, 5));
    let rows = stand.limiter.pending().drain(9);
    assert_eq!(rows, [QueueRow { cluster: id(1), name: "a".into(), partitions: 1 }]);
    let messages = stand.ask(1, &messages(5), &plan).or(stand.ask(1, &messages(5), &plan));
    assert_eq!(messages, Some((Limit::Messages, Some(1))));
    assert_eq!(stand.left(1, &plan), (8, 0));
}

#[test]
fn scenario_20_zero_denies() {
    let stand = Stand::new(Settings::default());
    let body = br#"{"items":[{"queue":"a","payload":1}]}"#;
    let read = inspect::push(body, 10).unwrap();
    let request = Request {
        messages: 1,
        is_batch: true,
        heaviest: read.heaviest,
        pairs: Some(&read.pairs),
        retention: &[Retention { option: "retentionSeconds", seconds: 1 }],
        parks_at: Some(CELL),
        ..Request::default()
    };
    let cases = [
        ("max_req_per_sec", Limit::Requests),
        ("max_msgs_per_sec", Limit::Messages),
        ("max_queues", Limit::Queues),
        ("max_partitions_per_queue", Limit::Partitions),
        ("max_parked_pops", Limit::Parked),
        ("max_payload_bytes", Limit::PayloadBytes),
        ("max_batch_items", Limit::BatchItems),
        ("max_retention_seconds", Limit::Retention),
    ];
    for (name, limit) in cases {
        for cap in [0, -5] {
            let refused = stand.ask(1, &request, &limits(&[(name, cap)]));
            assert_eq!(refused.map(|refused| refused.0), Some(limit), "{name} = {cap}");
        }
    }
    for (rate, burst, limit) in [
        ("max_req_per_sec", "req_burst", Limit::Requests),
        ("max_msgs_per_sec", "msgs_burst", Limit::Messages),
    ] {
        let refused = stand.ask(1, &request, &limits(&[(rate, 5), (burst, 0)]));
        assert_eq!(refused, Some((limit, Some(60))), "{burst} = 0");
        let refused = stand.ask(1, &request, &limits(&[(rate, 0), (burst, 5)]));
        assert_eq!(refused, Some((limit, Some(60))), "{rate} = 0");
    }
    let cluster = stand.limiter.cluster(id(1));
    assert!(cluster.is_storage_blocked(Cap::At(0)));
    assert_eq!(stand.ask(1, &request, &limits(&[])), None, "and no cap denies nothing");
}

#[test]
fn scenario_21_a_raised_plan_applies_to_the_next_request_without_a_free_burst() {
    let stand = Stand::new(Settings::default());
    let (small, large) = (
        limits(&[("max_req_per_sec", 1), ("req_burst", 2)]),
        limits(&[("max_req_per_sec", 1_000), ("req_burst", 5_000)]),
    );
    let ask = |plan| stand.ask(1, &Request::default(), plan).is_none();
    assert_eq!([ask(&small), ask(&small), ask(&small)], [true, true, false]);
    assert!(!ask(&large), "no free burst");
    stand.clock.advance(SECOND / 1_000);
    assert_eq!([ask(&large), ask(&large)], [true, false]);
    assert!(ask(&limits(&[])), "the cap lifted");
}

#[test]
fn scenario_22_a_cluster_created_anew_under_the_same_name_starts_fresh() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_req_per_sec", 1), ("req_burst", 1), ("max_retained_bytes", 100)]);
    assert_eq!(stand.ask(1, &Request::default(), &plan), None);
    assert!(stand.ask(1, &Request::default(), &plan).is_some());
    stand.limiter.publish(id(1), Some(500), Cap::At(100));
    // The new one has another id; nothing of the old one is in its way, and its caps apply at once.
    assert_eq!(stand.ask(2, &Request::default(), &plan), None);
    assert!(stand.ask(2, &Request::default(), &plan).is_some());
    assert!(!stand.limiter.cluster(id(2)).is_storage_blocked(Cap::At(100)));
    stand.limiter.forget(id(1));
    assert_eq!(stand.limiter.live(id(1), &plan), None);
}

#[test]
fn scenario_23_a_million_ids_in_bounded_memory() {
    let stand = Stand::new(Settings { max_clusters: 1_000, ..Settings::default() });
    let plan = limits(&[("max_req_per_sec", 1), ("req_burst", 3), ("max_parked_pops", 5)]);
    // Real tenants: one waits in a long poll, one is over its storage, one is in the middle of a request.
    let waiting = stand.limiter.cluster(id(1));
    let parks = Request { parks_at: Some(CELL), ..Request::default() };
    let slot = stand.limiter.evaluate(&waiting, &parks, &plan, Mode::Enforce).slot.unwrap();
    drop(waiting);
    stand.limiter.publish(id(2), Some(500), Cap::At(100));
    let held = stand.limiter.cluster(id(3));
    for n in 10..1_000_010_u128 {
        stand.limiter.cluster(id(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        stand.clock.advance(1_000);
        if n % 1_000 == 0 {
            assert!(stand.limiter.clusters() <= 1_000);
        }
    }
    assert_eq!(stand.limiter.live(id(1), &plan).unwrap().parked, 1);
    assert!(stand.limiter.cluster(id(2)).is_storage_blocked(Cap::At(100)));
    assert!(Arc::ptr_eq(&held, &stand.limiter.cluster(id(3))));
    drop(slot);
    assert_eq!(stand.limiter.live(id(1), &plan).unwrap().parked, 0);
}

#[test]
fn of_the_shed_the_idle_ones_go_first() {
    let stand = Stand::new(Settings { max_clusters: 80, ..Settings::default() });
    let plan = limits(&[("max_req_per_sec", 1), ("req_burst", 1)]);
    for n in 0..80 {
        stand.ask(n, &Request::default(), &plan);
        stand.clock.advance(1);
    }
    stand.ask(0, &Request::default(), &plan); // used again
    stand.limiter.cluster(id(1_000));
    assert_eq!(stand.limiter.clusters(), 71, "an eighth went, one came");
    assert!(stand.limiter.live(id(0), &plan).is_some());
    assert!(stand.limiter.live(id(1), &plan).is_none());
    assert!(stand.limiter.live(id(79), &plan).is_some());
}

#[test]
fn idle_counters_go_and_those_that_say_something_stay() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[]);
    let cap = Cap::At(100);
    stand.limiter.cluster(id(1));
    let parked = stand.limiter.evaluate(
        &stand.limiter.cluster(id(2)),
        &Request { parks_at: Some(CELL), ..Request::default() },
        &plan,
        Mode::Enforce,
    );
    stand.limiter.publish(id(4), Some(101), cap);
    stand.limiter.publish(id(5), Some(91), cap);
    assert_eq!(stand.limiter.publish(id(6), Some(90), cap), None);
    assert_eq!(stand.limiter.over_storage(), 1);
    assert!(stand.limiter.live(id(6), &plan).is_none(), "far from the cap: not worth an entry");
    stand.clock.advance(600 * SECOND);
    assert_eq!(stand.limiter.prune(), 0);
    stand.clock.advance(1);
    assert_eq!(stand.limiter.prune(), 1);
    assert!(stand.limiter.live(id(1), &plan).is_none());
    assert_eq!(stand.limiter.parked_at(CELL), 1);
    // Once they have nothing to say any more they go too.
    drop(parked);
    let transition = stand.limiter.publish(id(4), Some(1), cap);
    assert_eq!(transition, Some(Transition::Released { total: 1 }));
    assert_eq!(stand.limiter.over_storage(), 0);
    stand.limiter.publish(id(5), Some(91), Cap::Unlimited);
    assert_eq!(stand.limiter.prune(), 3);
    assert_eq!((stand.limiter.clusters(), stand.limiter.parked_at(CELL)), (0, 0));
}

#[test]
fn a_flood_is_refused_before_its_bodies_are_read_and_a_look_takes_nothing() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_req_per_sec", 1), ("req_burst", 1)]);
    let cluster = stand.limiter.cluster(id(1));
    for _ in 0..3 {
        assert_eq!(stand.limiter.peek(&cluster, &plan).refusal(Mode::Enforce), None);
    }
    assert_eq!(stand.ask(1, &Request::default(), &plan), None);
    let refusal = stand.limiter.peek(&cluster, &plan).refusal(Mode::Enforce).unwrap();
    assert_eq!((refusal.limit, refusal.retry_after), (Limit::Requests, Some(1)));
}

#[test]
fn deliveries_deny_the_next_push_and_nothing_else() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_msgs_per_sec", 10), ("msgs_burst", 20)]);
    let cluster = stand.limiter.cluster(id(1));
    stand.limiter.deliver(&cluster, &plan, 69);
    assert_eq!(stand.ask(1, &messages(1), &plan), Some((Limit::Messages, Some(5))));
    assert_eq!(stand.ask(1, &messages(0), &plan), None);
    stand.clock.advance(5 * SECOND);
    assert_eq!(stand.ask(1, &messages(1), &plan), None);
    stand.limiter.deliver(&cluster, &limits(&[]), 1_000_000);
    stand.clock.advance(SECOND);
    assert_eq!(stand.ask(1, &messages(10), &plan), None, "without a cap nothing is booked");
}

#[test]
fn waiting_pops_of_a_cluster_and_of_a_cell() {
    let stand = Stand::new(Settings { max_cell_parked: 3, ..Settings::default() });
    let plan = limits(&[("max_parked_pops", 2)]);
    let parks = Request { parks_at: Some(CELL), ..Request::default() };
    let park = |cluster, mode| {
        let verdict = stand.limiter.evaluate(&stand.limiter.cluster(id(cluster)), &parks, &plan, mode);
        let denied: Vec<_> = verdict.decision.denials().map(|o| (o.limit, o.used, o.retry_after)).collect();
        (verdict.slot, denied)
    };
    let (first, none) = park(1, Mode::Enforce);
    assert!(first.is_some() && none.is_empty());
    let (_second, _) = park(1, Mode::Enforce);
    let (slot, denied) = park(1, Mode::Enforce);
    assert!(slot.is_none());
    assert_eq!(denied, [(Limit::Parked, 2, Some(5))]);
    let (_third, _) = park(2, Mode::Enforce);
    let (slot, denied) = park(2, Mode::Enforce);
    assert!(slot.is_none());
    assert_eq!(denied, [(Limit::CellParked, 3, Some(5))]);
    let (shadow, denied) = park(1, Mode::Shadow);
    assert!(shadow.is_some());
    assert_eq!(denied, [(Limit::Parked, 2, Some(5)), (Limit::CellParked, 3, Some(5))]);
    assert_eq!(stand.limiter.parked_at(CELL), 4, "the gauge stays true");
    drop((first, shadow));
    assert_eq!(stand.limiter.parked_at(CELL), 2);
}

#[test]
fn of_the_bodies_on_their_way_only_the_one_that_crosses_the_storage_cap_passes() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_retained_bytes", 1_000), ("max_msgs_per_sec", 100)]);
    let cluster = stand.limiter.cluster(id(1));
    assert_eq!(stand.limiter.publish(id(1), Some(900), Cap::At(1_000)), None);
    let request = Request { payload_bytes: 60, ..messages(1) };
    for mode in [Mode::Enforce, Mode::Shadow] {
        let first: Vec<_> = (0..4)
            .map(|_| stand.limiter.evaluate(&cluster, &request, &plan, mode).decision.refusal(mode))
            .map(|refusal| refusal.map(|outcome| (outcome.limit, outcome.used)))
            .collect();
        let over = Some((Limit::RetainedBytes, 1_020));
        match mode {
            Mode::Enforce => assert_eq!(first, [None, None, over, over]),
            Mode::Shadow => assert_eq!(first, [over; 4], "it is a hard one"),
        }
    }
    assert_eq!(stand.left(1, &plan).1, 198, "and the refused take no tokens");
    assert_eq!(stand.ask(1, &messages(1), &plan), None, "what adds no bytes is no matter of storage");
}

#[test]
fn more_pairs_than_are_looked_at_pass_only_without_caps() {
    let stand = Stand::new(Settings::default());
    let read = inspect::push(br#"{"items":[{"queue":"a"},{"queue":"b"},{"queue":"c"}]}"#, 2).unwrap();
    let request = Request { pairs: Some(&read.pairs), ..Request::default() };
    let refused = |plan: &[(&str, i64)]| stand.ask(1, &request, &limits(plan)).map(|refused| refused.0);
    assert_eq!(refused(&[("max_queues", 100)]), Some(Limit::Queues));
    assert_eq!(refused(&[("max_partitions_per_queue", 100)]), Some(Limit::Partitions));
    assert_eq!(refused(&[]), None);
}

#[test]
fn the_registry_is_loaded_by_one_and_reconciled_with_listings() {
    let stand = Stand::new(Settings::default());
    let plan = limits(&[("max_queues", 2)]);
    let cluster = stand.limiter.cluster(id(1));
    assert_eq!([cluster.claim_load(), cluster.claim_load()], [true, false]);
    assert_eq!(stand.limiter.live(id(1), &plan).unwrap().queues, None);
    stand.limiter.load(&cluster, [("a", 1), ("b", 1)]);
    let ask = |name: &str| {
        let body = format!(r#"{{"items":[{{"queue":"{name}"}}]}}"#);
        let read = inspect::push(body.as_bytes(), 10).unwrap();
        stand.ask(1, &Request { pairs: Some(&read.pairs), ..Request::default() }, &plan).is_none()
    };
    assert_eq!([ask("a"), ask("c")], [true, false]);
    stand.clock.advance(Settings::default().settle);
    assert_eq!(stand.limiter.reconcile(id(1), [("a", 1)], Cap::Unlimited), 1);
    assert_eq!([ask("c"), ask("d")], [true, false]);
    assert_eq!(
        stand.limiter.reconcile(id(1), [("a", 1)], Cap::Unlimited),
        0,
        "c is younger than the listing"
    );
    assert_eq!(stand.limiter.reconcile(id(99), [], Cap::Unlimited), 0);
    assert_eq!(stand.limiter.live(id(1), &plan).unwrap().queues, Some(2));
}

#[test]
fn parallel_requests_of_one_cluster_take_no_token_twice() {
    let stand = Stand::new(Settings::default());
    let plan =
        limits(&[("max_req_per_sec", 1), ("req_burst", 500), ("max_msgs_per_sec", 1), ("msgs_burst", 700)]);
    let admitted: u64 = std::thread::scope(|scope| {
        let ask = || (0..500).map(|_| u64::from(stand.ask(1, &messages(2), &plan).is_none())).sum::<u64>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 350, "the messages' bucket ends it");
    assert_eq!(stand.left(1, &plan), (150, 0), "and nothing was taken for those that were refused");
}
