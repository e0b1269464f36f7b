//! A disk that takes nothing.

use super::{push, spooled, stored, usage, world};
use crate::support::{PROXY, Tenant, World, eventually};
use nix::sys::signal::Signal;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
/// A shell that becomes the proxy: writing beyond the limit is an error and no signal, and its log is a pipe, to
/// which the limit does not apply.
const SHELL: &str = r#"trap "" XFSZ; exec "$0" serve > >(exec cat) 2>&1"#;

/// Lets the first proxy write no file, or any again.
fn disk_is_full(world: &World, full: bool) {
    let limit = Rlimit { current: full.then_some(0), maximum: None };
    prlimit(Pid::from_raw(world.proxies[0].1.id()), Resource::Fsize, limit).unwrap();
}

async fn pushes(world: &World, tenant: &Tenant, count: usize) {
    for _ in 0..count {
        assert_eq!(push(world, 0, tenant, 3).await, 201);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_costs_nothing_while_the_process_lives_and_nothing_more_once_there_is_room() {
    let builder = World::builder().proxies(0).own_control_postgres().env("QUEEN_PROXY_METER_FLUSH_MS", 100);
    let (mut world, _cell) = world(builder, stored).await;
    let proxy = world.add_proxy_by("bash", &["-c", SHELL, PROXY]);
    world.wait_for_proxy(proxy).await;
    let acme = world.tenant("acme").await;
    pushes(&world, &acme, 1).await;
    disk_is_full(&world, true);
    pushes(&world, &acme, 2).await;
    eventually("the disk is missed", LIMIT, async || {
        world.proxies[0].1.log().contains("usage cannot be written to disk").then_some(())
    })
    .await;
    disk_is_full(&world, false);
    // What was counted in a minute that is over may be delivered already.
    eventually("all is on disk", LIMIT, async || {
        let delivered: u64 = usage(&world).await.values().map(|row| row[1]).sum();
        (delivered + spooled(&world, 0) == 9).then_some(())
    })
    .await;
    world.proxies[0].1.signal(Signal::SIGKILL);
    world.restart_proxy(0);
    world.wait_for_proxy(0).await;

    // The same with the control plane away, until the end of the process.
    world.stop_proxy(0);
    assert_eq!(usage(&world).await.values().map(|row| [row[0], row[1]]).collect::<Vec<_>>(), [[3, 9]]);
    let proxy = world.add_proxy_by("bash", &["-c", SHELL, PROXY]);
    world.proxies.swap(0, proxy);
    world.wait_for_proxy(0).await;
    pushes(&world, &acme, 1).await;
    disk_is_full(&world, true);
    world.control_server.stop();
    pushes(&world, &acme, 4).await;
    eventually("the disk is missed", LIMIT, async || {
        world.proxies[0].1.log().contains("usage cannot be written to disk").then_some(())
    })
    .await;
    world.control_server.start_again();
    world.stop_proxy(0);
    assert_eq!(usage(&world).await.values().map(|row| [row[0], row[1]]).collect::<Vec<_>>(), [[8, 24]]);
}
