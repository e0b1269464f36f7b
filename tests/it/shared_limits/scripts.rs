//! What the store does, script by script, in a real Redis.

use super::model::{Ask, Model};
use crate::support::{Redis, rounds};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, RngSeed, TestRunner},
};
use redis::{Script, aio::MultiplexedConnection};

/// The clock of the store, which the test moves by hand.
fn with_clock(text: &str) -> Script {
    let clock = "redis.call('TIME')";
    assert_eq!(text.matches(clock).count(), 1);
    Script::new(&text.replace(clock, "{ tonumber(ARGV[#ARGV - 1]), tonumber(ARGV[#ARGV]) }"))
}

fn asks() -> impl Strategy<Value = (u64, Ask)> {
    let rates =
        prop_oneof![Just((10, 25)), Just((10, 5)), Just((0, 5)), Just((7, 0)), Just((100_000_000, 3))];
    let passed = prop_oneof![0_u64..50_000, 0_u64..3_000_000, Just(90_000_000)];
    let apart = prop_oneof![9 => Just(0_u64), 1 => 0_u64..30];
    let apart = (apart, prop_oneof![Just(0_u64), Just(10)]);
    let more = (0_u64..20, 1_u64..5);
    (passed, rates, (0_u64..4, 0_u64..8), apart, prop::collection::vec(1_u64..40, 0..3), 0_u64..6, more)
        .prop_map(
            |(passed, (rate, burst), (back, owed), (apart, apart_debt), waiting, held, (more, proxies))| {
                let (needs, smallest) = (waiting.iter().sum(), waiting.iter().copied().min().unwrap_or(0));
                (
                    passed,
                    Ask { rate, burst, back, owed, apart, apart_debt, needs, smallest, held, more, proxies },
                )
            },
        )
}

async fn ask(script: &Script, connection: &mut MultiplexedConnection, now: u64, ask: &Ask) -> (u64, i128) {
    let deepest = (i128::from(ask.burst.min(1)) - i128::from(ask.rate) * 60).min(0);
    let mut call = script.key("bucket");
    for number in [ask.rate, ask.burst, ask.back, ask.owed] {
        call.arg(number);
    }
    call.arg(deepest.to_string()).arg(ask.apart).arg(-ask.apart_debt.cast_signed());
    for number in [ask.needs, ask.smallest, ask.held, ask.more, ask.proxies, now / 1_000_000, now % 1_000_000]
    {
        call.arg(number);
    }
    let (granted, level): (u64, i64) = call.invoke_async(connection).await.unwrap();
    (granted, level.into())
}

#[tokio::test]
async fn the_bucket_does_what_the_model_does() {
    let redis = Redis::start().await;
    let mut connection = redis.connect().await;
    let script = with_clock(include_str!("../../../src/limits/shared/tokens.lua"));
    let config = Config { rng_seed: RngSeed::Fixed(u64::from(std::process::id())), ..Config::default() };
    let mut runner = TestRunner::new(config);
    for round in 0..rounds(60) {
        redis::cmd("FLUSHDB").exec_async(&mut connection).await.unwrap();
        let mut model = Model::default();
        let mut now = 1_700_000_000_000_000_u64;
        for step in 0..40 {
            let (passed, question) = asks().new_tree(&mut runner).unwrap().current();
            now += passed;
            let (want, before) = (model.clone().ask(now, &question), model.clone());
            assert_eq!(
                ask(&script, &mut connection, now, &question).await,
                want,
                "round {round}, step {step}, seed {}: {question:?} on {before:?}",
                std::process::id()
            );
            model.ask(now, &question);
        }
    }
    let left: i64 = redis::cmd("PTTL").arg("bucket").query_async(&mut connection).await.unwrap();
    assert!(left > 0, "a bucket that nobody uses goes");
}

#[tokio::test]
async fn places_are_those_of_proxies_that_are_there() {
    let redis = Redis::start().await;
    let mut connection = redis.connect().await;
    let places = with_clock(include_str!("../../../src/limits/shared/places.lua"));
    let presence = with_clock(include_str!("../../../src/limits/shared/presence.lua"));
    let mut there = async |proxy: &str, is: u8, now_ms: u64| -> i64 {
        let mut call = presence.key("proxies");
        call.arg(proxy).arg(is).arg(3_000).arg(now_ms / 1_000).arg(now_ms % 1_000 * 1_000);
        call.invoke_async::<(i64, i64)>(&mut connection).await.unwrap().0
    };
    assert_eq!(there("a", 1, 1_000_000).await, 1);
    assert_eq!(there("b", 1, 1_000_100).await, 2);
    assert_eq!(there("c", 1, 1_002_000).await, 3);
    // proxy, waiting, needed, liked, cap, now: held, others
    let steps: [(&str, [u64; 4], u64, (i64, i64)); 9] = [
        ("a", [0, 1, 4, 10], 1_002_000, (4, 0)),
        ("b", [0, 3, 3, 10], 1_002_000, (3, 4)),
        ("c", [0, 5, 9, 10], 1_002_000, (3, 7)),
        ("c", [3, 4, 9, 10], 1_002_000, (3, 7)),
        ("b", [0, 0, 0, 10], 1_002_000, (0, 7)),
        ("c", [3, 4, 4, 10], 1_002_000, (4, 4)),
        // The plan allows fewer now: those that wait stay.
        ("c", [4, 5, 5, 2], 1_002_000, (4, 4)),
        // 3 s after its last word `a` is gone, and its places with it.
        ("b", [0, 6, 6, 10], 1_002_999, (2, 8)),
        ("b", [2, 6, 6, 10], 1_003_001, (6, 4)),
    ];
    for (step, (proxy, [waiting, needed, liked, cap], now_ms, want)) in steps.into_iter().enumerate() {
        if proxy == "b" {
            there("b", 1, now_ms).await;
        }
        let mut connection = redis.connect().await;
        let mut call = places.key("places");
        call.key("proxies").arg(proxy).arg(waiting).arg(needed).arg(liked).arg(cap).arg(3).arg(3_000);
        call.arg(now_ms / 1_000).arg(now_ms % 1_000 * 1_000);
        let told: (i64, i64) = call.invoke_async(&mut connection).await.unwrap();
        assert_eq!(told, want, "step {step}");
    }
    assert_eq!(there("b", 0, 1_004_100).await, 1);
    assert_eq!(there("b", 1, 1_009_000).await, 1, "c is not heard of any more");
}
