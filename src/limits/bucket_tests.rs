use super::{Bucket, MAX_RETRY_AFTER, Rate};
use crate::{
    domain::limits::Cap,
    limits::clock::{Nanos, SECOND},
};
use proptest::prelude::*;

const fn rate(per_second: u64, burst: u64) -> Rate {
    Rate { per_second, burst }
}

/// Takes when allowed, as a request does.
fn ask(bucket: &mut Bucket, rate: Rate, now: Nanos, n: u64) -> Result<(), u64> {
    let reading = bucket.check(rate, now, n);
    if reading.denied {
        return Err(reading.retry_after);
    }
    bucket.take(n);
    Ok(())
}

#[test]
fn rates_of_a_plan() {
    let cases = [
        (Cap::Unlimited, Cap::At(5), None),
        (Cap::At(5), Cap::Unlimited, Some(rate(5, 10))),
        (Cap::At(5), Cap::At(25), Some(rate(5, 25))),
        (Cap::At(0), Cap::Unlimited, Some(rate(0, 0))),
        (Cap::At(-7), Cap::At(-1), Some(rate(0, 0))),
        (Cap::At(i64::MAX), Cap::Unlimited, Some(rate(i64::MAX as u64, u64::MAX - 1))),
    ];
    for (per_second, burst, want) in cases {
        assert_eq!(Rate::of(per_second, burst), want);
    }
}

#[test]
fn it_starts_full_and_refills_to_the_nanosecond() {
    let mut bucket = Bucket::default();
    let rate = rate(3, 3);
    for _ in 0..3 {
        assert_eq!(ask(&mut bucket, rate, 7, 1), Ok(()));
    }
    assert_eq!(ask(&mut bucket, rate, 7, 1), Err(1));
    assert_eq!(ask(&mut bucket, rate, 7 + 333_333_333, 1), Err(1));
    assert_eq!(ask(&mut bucket, rate, 7 + 333_333_334, 1), Ok(()));
    assert_eq!(ask(&mut bucket, rate, 7 + 333_333_334, 0), Ok(()), "nothing is free");
}

#[test]
fn zero_denies_whatever_else_is_set() {
    for rate in [rate(0, 25), rate(5, 0), rate(0, 0)] {
        let mut bucket = Bucket::default();
        assert_eq!(ask(&mut bucket, rate, 0, 1), Err(MAX_RETRY_AFTER), "{rate:?}");
        assert_eq!(ask(&mut bucket, rate, 1_000 * SECOND, 1), Err(MAX_RETRY_AFTER), "{rate:?}");
        assert_eq!(ask(&mut bucket, rate, 1_000 * SECOND, 0), Ok(()), "{rate:?}");
    }
}

#[test]
fn a_batch_larger_than_the_burst_passes_when_the_bucket_is_full_and_leaves_a_debt() {
    let mut bucket = Bucket::default();
    let rate = rate(10, 100);
    assert_eq!(ask(&mut bucket, rate, 0, 300), Ok(()));
    assert_eq!(bucket.check(rate, 0, 1).left, -200);
    assert_eq!(ask(&mut bucket, rate, 0, 1), Err(21), "20 s of debt and one token");
    assert_eq!(ask(&mut bucket, rate, 21 * SECOND, 1), Ok(()));
    assert_eq!(ask(&mut bucket, rate, 21 * SECOND, 300), Err(10));
    assert_eq!(ask(&mut bucket, rate, 31 * SECOND, 300), Ok(()), "full again");
    assert_eq!(ask(&mut bucket, rate, 31 * SECOND, 300), Err(30));
}

#[test]
fn a_plan_that_changes_brings_no_tokens_and_takes_what_is_over() {
    let mut bucket = Bucket::default();
    for _ in 0..10 {
        ask(&mut bucket, rate(1, 10), 0, 1).unwrap();
    }
    assert_eq!(bucket.check(rate(1_000, 5_000), 0, 1).left, 0, "raised: no free burst");
    assert_eq!(ask(&mut bucket, rate(1_000, 5_000), SECOND / 1_000, 1), Ok(()), "but the new rate at once");
    assert_eq!(bucket.check(rate(1_000, 5_000), 10 * SECOND, 1).left, 5_000);
    assert_eq!(bucket.check(rate(1, 10), 10 * SECOND, 1).left, 10, "lowered: clamped");
    assert_eq!(bucket.check(rate(1_000, 5_000), 10 * SECOND, 1).left, 10, "and raised again");
}

#[test]
fn time_passed_under_the_old_rate_refills_at_the_old_rate() {
    let mut bucket = Bucket::default();
    ask(&mut bucket, rate(1, 100), 0, 100).unwrap();
    assert_eq!(bucket.check(rate(50, 100), 2 * SECOND, 1).left, 2);
}

#[test]
fn deliveries_go_into_debt_for_a_minute_at_most() {
    let mut bucket = Bucket::default();
    let rate = rate(20, 100);
    bucket.debit(rate, 0, 150);
    assert_eq!(bucket.check(rate, 0, 1).left, -50);
    bucket.debit(rate, 0, 1_000_000);
    assert_eq!(ask(&mut bucket, rate, 0, 1), Err(60));
    assert_eq!(ask(&mut bucket, rate, 60 * SECOND, 1), Ok(()), "the Retry-After is true");
    // The debt of a batch is not forgiven.
    let mut bucket = Bucket::default();
    ask(&mut bucket, rate, 0, 10_000).unwrap();
    bucket.debit(rate, 0, 5);
    assert_eq!(bucket.check(rate, 0, 1).left, -9_900);
    assert_eq!(ask(&mut bucket, rate, 0, 1), Err(60));
}

#[test]
fn a_thousand_a_second_in_tiny_intervals_is_a_thousand_a_second() {
    let mut bucket = Bucket::default();
    let rate = rate(1_000, 10);
    let mut admitted = 0;
    let mut now = 0;
    while now < 10 * SECOND {
        admitted += u64::from(ask(&mut bucket, rate, now, 1).is_ok());
        now += 97_003;
    }
    assert!((9_990..=10_010).contains(&admitted), "{admitted}");
}

#[test]
fn numbers_at_the_end_of_the_range() {
    let mut bucket = Bucket::default();
    let rate = rate(u64::MAX, u64::MAX);
    assert_eq!(ask(&mut bucket, rate, 0, u64::MAX), Ok(()));
    bucket.debit(rate, 0, u64::MAX);
    bucket.debit(rate, 0, u64::MAX);
    assert_eq!(ask(&mut bucket, rate, u64::MAX, u64::MAX), Ok(()));
    assert_eq!(ask(&mut bucket, rate, 0, 1), Err(1), "a clock that went back refills nothing");
}

/// The plainest bucket: a rational number of tokens, recomputed from the list of all that happened.
#[derive(Default)]
struct Model {
    /// In billionths of a token.
    level: Option<i128>,
    rate: Option<Rate>,
}

impl Model {
    fn pass(&mut self, nanos: Nanos) {
        if let (Some(level), Some(rate)) = (self.level.as_mut(), self.rate) {
            let full = i128::from(rate.burst) * 1_000_000_000;
            *level = full.min(*level + i128::from(rate.per_second) * i128::from(nanos));
        }
    }

    fn set(&mut self, rate: Rate) -> &mut i128 {
        let full = i128::from(rate.burst) * 1_000_000_000;
        self.rate = Some(rate);
        let level = self.level.get_or_insert(full);
        *level = full.min(*level);
        level
    }
}

#[derive(Clone, Debug)]
enum Step {
    Wait(Nanos),
    Ask(u64),
    Debit(u64),
    Change(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..3 * SECOND).prop_map(Step::Wait),
        1 => (0..200 * SECOND).prop_map(Step::Wait),
        6 => (0_u64..40).prop_map(Step::Ask),
        2 => (0_u64..3_000).prop_map(Step::Debit),
        2 => (0_u64..30, 0_u64..60).prop_map(|(rate, burst)| Step::Change(rate, burst)),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn it_does_what_the_model_does(steps in steps()) {
        let (mut bucket, mut model) = (Bucket::default(), Model::default());
        let (mut now, mut rate) = (0, rate(10, 20));
        for step in steps {
            match step {
                Step::Wait(nanos) => {
                    now += nanos;
                    model.pass(nanos);
                }
                Step::Change(per_second, burst) => {
                    rate = super::Rate { per_second, burst };
                    // The bucket learns of it with the next request; the model too.
                    bucket.check(rate, now, 0);
                    model.set(rate);
                }
                Step::Ask(n) => {
                    let level = model.set(rate);
                    let needed = i128::from(n.min(rate.burst)) * 1_000_000_000;
                    let zero = rate.per_second == 0 || rate.burst == 0;
                    let passes = n == 0 || (!zero && *level >= needed);
                    if passes {
                        *level -= i128::from(n) * 1_000_000_000;
                    }
                    let left = *level;
                    prop_assert_eq!(ask(&mut bucket, rate, now, n).is_ok(), passes);
                    let told = bucket.check(rate, now, 0).left;
                    prop_assert_eq!(i128::from(told), left.div_euclid(1_000_000_000));
                }
                Step::Debit(n) => {
                    let level = model.set(rate);
                    let before = *level;
                    let floor = i128::from(rate.burst.min(1)) - 60 * i128::from(rate.per_second);
                    let floor = (floor * 1_000_000_000).min(0);
                    *level = before.min(floor.max(before - i128::from(n) * 1_000_000_000));
                    bucket.debit(rate, now, n);
                }
            }
        }
    }

    /// Waiting exactly as long as told succeeds when nobody else takes anything, and a second less
    /// does not (except for the least wait of a second).
    #[test]
    fn the_wait_told_is_true(
        per_second in 1_u64..500, burst in 1_u64..1_000, spent in 0_u64..2_000, asked in 1_u64..1_500, at in 0_u64..SECOND,
    ) {
        let rate = rate(per_second, burst);
        let mut bucket = Bucket::default();
        let _ = ask(&mut bucket, rate, 0, spent);
        if let Err(seconds) = ask(&mut bucket, rate, at, asked) {
            prop_assert!((1..=MAX_RETRY_AFTER).contains(&seconds));
            if seconds > 1 {
                prop_assert!(bucket.check(rate, at + (seconds - 1) * SECOND, asked).denied);
            }
            if seconds < MAX_RETRY_AFTER {
                prop_assert_eq!(ask(&mut bucket, rate, at + seconds * SECOND, asked), Ok(()));
            }
        }
    }
}
