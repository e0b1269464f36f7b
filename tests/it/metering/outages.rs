//! The meter as a proxy runs it, on the real clock: start, end, a database that stops, a spool that is taken.

use super::{LIMIT, Scene};
use crate::support::{World, eventually};
use queen_proxy::{
    domain::ids::ClusterId,
    metering::{
        Meter,
        sample::{MeteredRoute, Op, RequestFacts, Watch},
    },
};
use std::time::Duration;
use tokio::runtime::Handle;
use uuid::Uuid;

/// A push of so many messages, as the gateway records it.
fn push(meter: &Meter, cluster: Uuid, messages: usize) {
    let mut watch =
        Watch::new(MeteredRoute::Push, RequestFacts { bytes_in: 10, ..RequestFacts::default() }, 256);
    watch.head(201, None);
    watch.piece(format!("[{}]", vec![r#"{"status":"queued"}"#; messages].join(",")).as_bytes());
    meter.record(&meter.cluster(ClusterId(cluster)), &watch.finish());
}

/// Requests and messages in the control plane.
async fn written(scene: &Scene) -> String {
    scene.value("SELECT concat_ws('/', sum(reqs), sum(msgs)) FROM queen_proxy.usage_minutes").await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_meters_on_one_control_plane_add_up_and_a_shutdown_writes_the_open_minute() {
    let scene = Scene::new().await;
    let start = |spool: &str| Meter::start(&Handle::current(), &scene.control, &scene.config(spool).metering);
    let meters = [start("one").unwrap(), start("two").unwrap()];
    let error = start("one").unwrap_err().to_string();
    assert!(error.contains("is in use by another proxy; each needs a folder of its own"), "{error}");
    for number in 0..200 {
        push(&meters[number % 2], scene.acme.cluster, 3);
    }
    for meter in &meters {
        meter.shutdown(LIMIT).await;
        meter.shutdown(LIMIT).await;
    }
    assert_eq!(written(&scene).await, "200/600");
    for meter in &meters {
        let numbers = meter.metrics();
        assert_eq!((numbers.usage[Op::Push.index()].msgs, numbers.spool_files), (300, 0));
        assert!(numbers.flushes >= 1 && numbers.last_success_s > 0 && numbers.flush_sum > Duration::ZERO);
        assert!(numbers.rollup_last_success_s > 0 || numbers.rollup_failures == 0);
    }
    start("one").unwrap().shutdown(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stopped_database_did_not_take_is_sent_by_the_next_start() {
    let world = World::builder().proxies(0).recorder().own_control_postgres().start().await;
    let scene = Scene::of(world).await;
    let start = || Meter::start(&Handle::current(), &scene.control, &scene.config("spool").metering).unwrap();
    let meter = start();
    eventually("the roll-up reached the database", LIMIT, async || {
        (meter.metrics().rollup_last_success_s > 0).then_some(())
    })
    .await;
    scene.world.control_server.stop();
    push(&meter, scene.acme.cluster, 2);
    push(&meter, scene.acme.cluster, 3);
    meter.shutdown(LIMIT).await;
    let numbers = meter.metrics();
    assert_eq!((numbers.spool_files, numbers.dropped_rows, numbers.flush_failures > 0), (1, 0, true));
    scene.world.control_server.start_again();
    let meter = start();
    eventually("the spool is delivered", LIMIT, async || (written(&scene).await == "2/5").then_some(()))
        .await;
    meter.shutdown(LIMIT).await;
    assert_eq!(written(&scene).await, "2/5");
    assert_eq!(meter.metrics().spool_files, 0);
}
