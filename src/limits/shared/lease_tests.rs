//! Leases of three proxies against the bucket they share, which is the model that the script is compared with.

use super::{Ask, Lease, PACE};
use crate::limits::{
    bucket::Rate,
    clock::{Nanos, SECOND},
    tokens::Footing,
};
use proptest::prelude::*;

#[path = "../../../tests/it/shared_limits/model.rs"]
mod model;

const MICRO: Nanos = 1_000;
const ALL: Footing = Footing::Shared(3);
const APART: Footing = Footing::Apart(3);

/// The store, three proxies and a clock.
struct Stand {
    store: model::Model,
    leases: [Lease; 3],
    rate: Rate,
    now: Nanos,
    passed: u64,
    asked: u64,
}

impl Stand {
    fn new(per_second: u64, burst: u64) -> Self {
        let rate = Rate { per_second, burst };
        let leases = [0; 3].map(|_| Lease::new(rate, 0));
        Self { store: model::Model::default(), leases, rate, now: 0, passed: 0, asked: 0 }
    }

    fn answer(&mut self, proxy: usize, ask: &Ask) {
        let question = model::Ask {
            rate: ask.rate.per_second,
            burst: ask.rate.burst,
            back: ask.back,
            owed: ask.owed,
            apart: ask.apart,
            apart_debt: ask.apart_debt,
            needs: ask.needs,
            smallest: ask.smallest,
            held: ask.held,
            more: ask.more,
            proxies: 3,
        };
        let (granted, level) = self.store.ask(self.now / MICRO, &question);
        self.asked += 1;
        self.leases[proxy].answer(ask, granted, i64::try_from(level).unwrap(), self.now);
    }

    /// What one proxy may have asked of itself.
    fn talk(&mut self, proxy: usize) {
        if let Some(ask) = self.leases[proxy].ask() {
            self.answer(proxy, &ask);
        }
    }

    /// One request as it goes through the limiter: it waits at most once.
    fn request(&mut self, proxy: usize, n: u64, footing: Footing) -> Result<(), u64> {
        let mut reading = self.leases[proxy].check(self.rate, self.now, n, footing);
        if reading.unsettled {
            assert_ne!(footing, APART, "nobody waits for a store that is away");
            self.leases[proxy].wait(n);
            self.talk(proxy);
            reading = self.leases[proxy].check(self.rate, self.now, n, footing);
            assert!(!reading.unsettled, "the answer to one that asks alone settles it");
        }
        if reading.denied {
            return Err(reading.retry_after);
        }
        self.leases[proxy].take(n);
        self.passed += n;
        if footing != APART && self.leases[proxy].asks() {
            self.talk(proxy);
        }
        Ok(())
    }

    /// All that may have passed by now, with what is held.
    fn allowed(&self) -> u64 {
        let refilled = u128::from(self.rate.per_second) * u128::from(self.now) / u128::from(SECOND);
        self.rate.burst + u64::try_from(refilled).unwrap()
    }
}

#[test]
fn what_is_held_is_spent_without_asking() {
    let mut stand = Stand::new(1_000, 2_000);
    for _ in 0..1_000 {
        stand.now += SECOND / 500;
        stand.request(0, 1, ALL).unwrap();
    }
    assert!(stand.asked < 60, "{} round trips for 1,000 requests", stand.asked);
}

#[test]
fn over_the_limit_most_refusals_know_without_asking() {
    let mut stand = Stand::new(1_000, 200);
    let mut refused = 0_u64;
    for n in 0..30_000 {
        stand.now += SECOND / 10_000;
        refused += u64::from(stand.request(n % 3, 1, ALL).is_err());
    }
    assert!((3_150..=3_200).contains(&stand.passed), "{}", stand.passed);
    assert_eq!(refused, 30_000 - stand.passed);
    // Two for each pause at most, whoever asks.
    let most = 2 * 3 * SECOND / PACE;
    assert!(stand.asked < most, "{} round trips", stand.asked);
}

#[test]
fn all_of_it_is_there_for_one_of_three() {
    let mut stand = Stand::new(1_000, 200);
    stand.request(1, 1, ALL).unwrap();
    for _ in 0..50_000 {
        stand.now += SECOND / 10_000;
        let _ = stand.request(0, 1, ALL);
    }
    assert!((5_100..=5_200).contains(&stand.passed), "{}", stand.passed);
}

#[test]
fn what_nobody_takes_goes_back() {
    let mut stand = Stand::new(100, 1_000);
    for _ in 0..50 {
        stand.now += SECOND / 500;
        stand.request(0, 1, ALL).unwrap();
    }
    assert!(stand.leases[0].held() > 5, "{}", stand.leases[0].held());
    stand.now += 2 * SECOND;
    let ask = stand.leases[0].sweep(stand.now).unwrap();
    stand.answer(0, &ask);
    assert_eq!(stand.leases[0].held(), 1, "one is kept for the next");
    stand.now += 60 * SECOND;
    let ask = stand.leases[0].sweep(stand.now).unwrap();
    stand.answer(0, &ask);
    assert_eq!(stand.leases[0].held(), 0);
    assert_eq!(stand.leases[0].sweep(stand.now), None, "there is nothing more to tell");
}

#[test]
fn deliveries_of_one_proxy_deny_at_all() {
    let mut stand = Stand::new(10, 20);
    for proxy in 0..3 {
        stand.request(proxy, 1, ALL).unwrap();
    }
    stand.leases[0].debit(stand.rate, stand.now, 60, ALL);
    assert!(stand.leases[0].asks());
    stand.talk(0);
    assert!(stand.request(0, 1, ALL).is_err());
    // Others may have one or two in hand.
    let passed = (0..9).filter(|n| stand.request(1 + n % 2, 1, ALL).is_ok()).count();
    assert!(passed <= 4, "{passed}");
    stand.now += 5 * SECOND;
    assert_eq!(stand.request(2, 1, ALL), Ok(()));
}

#[test]
fn a_batch_larger_than_the_burst_needs_a_full_bucket() {
    let mut stand = Stand::new(10, 20);
    assert_eq!(stand.request(0, 50, ALL), Ok(()));
    assert_eq!(stand.request(1, 1, ALL), Err(4), "30 of debt and one");
    stand.now += 4 * SECOND;
    assert_eq!(stand.request(1, 1, ALL), Ok(()));
    assert!(stand.request(0, 50, ALL).is_err());
    stand.now += 3 * SECOND;
    assert_eq!(stand.request(0, 50, ALL), Ok(()), "full, with what this proxy holds");
}

#[test]
fn without_the_store_each_has_a_third_and_the_store_hears_of_it() {
    let mut stand = Stand::new(300, 60);
    let flood = |stand: &mut Stand, footing| {
        for n in 0..30_000 {
            stand.now += SECOND / 10_000;
            let _ = stand.request(n % 3, 1, footing);
        }
        std::mem::take(&mut stand.passed)
    };
    assert!((940..=960).contains(&flood(&mut stand, ALL)));
    let apart = flood(&mut stand, APART);
    assert!((890..=910).contains(&apart), "{apart}: nothing of a burst is there again");
    let back = flood(&mut stand, ALL);
    assert!((890..=910).contains(&back), "{back}: nor afterwards");
    // A store that has lost its memory.
    stand.store = model::Model::default();
    stand.passed = 0;
    assert!((290..=310).contains(&(flood(&mut stand, APART) / 3)));
    assert!((290..=310).contains(&(flood(&mut stand, ALL) / 3)));
}

#[test]
fn zero_denies_and_small_limits_leave_something_to_each() {
    for (per_second, burst) in [(0, 5), (5, 0), (0, 0)] {
        let mut stand = Stand::new(per_second, burst);
        for footing in [ALL, APART] {
            assert_eq!(stand.request(0, 1, footing), Err(60), "{per_second} {burst} {footing:?}");
        }
        assert_eq!(stand.asked, 0);
    }
    let mut stand = Stand::new(1, 1);
    assert_eq!(stand.request(0, 1, ALL), Ok(()));
    assert_eq!(stand.request(1, 1, ALL), Err(1));
    stand.now += SECOND;
    assert_eq!(stand.request(1, 1, ALL), Ok(()));
    stand.now += SECOND;
    assert_eq!(stand.request(2, 1, APART), Ok(()));
}

#[derive(Clone, Debug)]
enum Step {
    Pass(Nanos),
    Request(usize, u64),
    Sweep(usize),
    Leave(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..SECOND / 20).prop_map(Step::Pass),
        1 => (0..2 * SECOND).prop_map(Step::Pass),
        20 => (0_usize..3, 1_u64..4).prop_map(|(proxy, n)| Step::Request(proxy, n)),
        2 => (0_usize..3).prop_map(Step::Sweep),
        1 => (0_usize..3).prop_map(Step::Leave),
    ];
    prop::collection::vec(step, 0..300)
}

proptest! {
    /// Whatever happens, no more passes than one bucket allows; a refusal is one that the store would give too, but
    /// for what others have handed back since; and whoever waits as long as told passes when nobody else asks.
    #[test]
    fn three_leases_are_one_bucket(per_second in 1_u64..2_000, burst in 3_u64..300, steps in steps()) {
        let mut stand = Stand::new(per_second, burst);
        let mut handed_back = false;
        for step in steps {
            match step {
                Step::Pass(nanos) => stand.now += nanos / MICRO * MICRO,
                Step::Request(proxy, n) => {
                    let (asked, held) = (stand.asked, stand.leases[proxy].held());
                    let refused = stand.request(proxy, n, ALL).is_err();
                    if refused && asked == stand.asked && !handed_back {
                        let level = stand.store.level(stand.now / MICRO, burst) / 1_000_000;
                        let all = level + i128::from(held);
                        let paced = i128::from(per_second) * 3 / 200 + 1;
                        prop_assert!(all < i128::from(n.min(burst)) || all <= paced + i128::from(held), "{all} for {n}");
                    }
                }
                Step::Sweep(proxy) | Step::Leave(proxy) => {
                    let now = stand.now;
                    let lease = &mut stand.leases[proxy];
                    let ask = if let Step::Leave(_) = step { lease.leave() } else { lease.sweep(now) };
                    if let Some(ask) = ask {
                        handed_back |= ask.back > 0;
                        stand.answer(proxy, &ask);
                    }
                }
            }
            let held: u64 = stand.leases.iter().map(Lease::held).sum();
            prop_assert!(stand.passed + held <= stand.allowed(), "{} and {held} of {}", stand.passed, stand.allowed());
        }
        if let Err(wait) = stand.request(0, 1, ALL) {
            stand.now += wait * SECOND;
            prop_assert_eq!(stand.request(0, 1, ALL), Ok(()));
        }
    }
}
