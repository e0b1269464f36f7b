//! The control plane's database away under traffic, on the real clock.

use super::{push, spooled, stored, usage, world};
use crate::support::{World, eventually};
use nix::sys::signal::Signal;
use std::time::Duration;

/// Case 16 of the contract's §18.
const PROMISE: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn usage_of_two_clusters_is_there_within_two_minutes_also_over_an_outage() {
    let builder = World::builder().own_control_postgres().env("QUEEN_PROXY_METER_FLUSH_MS", 200).admin();
    let (world, _cell) = world(builder, stored).await;
    let tenants = [world.tenant("acme").await, world.tenant("globex").await];
    for tenant in &tenants {
        assert_eq!(push(&world, 0, tenant, 2).await, 201);
    }
    world.control_server.stop();
    for tenant in &tenants {
        assert_eq!(push(&world, 0, tenant, 3).await, 201, "known tenants go on");
    }
    // At the end of the minute.
    eventually("a flush that fails", Duration::from_secs(90), async || {
        (world.figure("queen_proxy_usage_flush_failures_total").await > 0).then_some(())
    })
    .await;
    world.control_server.start_again();
    // By itself, without another start.
    let found = eventually("usage of both", PROMISE, async || {
        let usage = usage(&world).await;
        (usage.values().map(|row| row[1]).sum::<u64>() == 10).then_some(usage)
    })
    .await;
    for tenant in &tenants {
        let row = found[&(tenant.slug.clone(), "push".to_owned())];
        assert_eq!((row[0], row[1]), (2, 5), "{}", tenant.slug);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_counted_during_an_outage_outlives_the_end_of_the_process_and_a_kill() {
    let builder = World::builder().own_control_postgres().env("QUEEN_PROXY_METER_FLUSH_MS", 100);
    let (mut world, _cell) = world(builder, stored).await;
    let acme = world.tenant("acme").await;
    let mut sent = 0;
    for killed in [false, true] {
        assert_eq!(push(&world, 0, &acme, 1).await, 201);
        world.control_server.stop();
        assert_eq!(push(&world, 0, &acme, 4).await, 201);
        sent += 5;
        if killed {
            // The first push may be delivered already, when a minute ended in between.
            eventually("it is on disk", Duration::from_secs(20), async || {
                (spooled(&world, 0) >= 4).then_some(())
            })
            .await;
            world.proxies[0].1.signal(Signal::SIGKILL);
            assert!(world.proxies[0].1.wait(Duration::from_secs(20)).is_some());
        } else {
            world.stop_proxy(0);
            assert!(spooled(&world, 0) >= 4);
        }
        world.control_server.start_again();
        world.restart_proxy(0);
        world.wait_for_proxy(0).await;
        if killed {
            // Its minute may be open.
            world.stop_proxy(0);
        }
        let total = async || usage(&world).await.values().map(|row| row[1]).sum::<u64>();
        eventually("usage", Duration::from_secs(90), async || (total().await == sent).then_some(())).await;
        assert_eq!(spooled(&world, 0), 0);
    }
}
