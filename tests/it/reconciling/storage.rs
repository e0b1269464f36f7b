//! What a cluster keeps blocks its pushes and lets them pass again.

use super::{LIMIT, Proxy, broker_tenant, eager, limits, world};
use crate::support::{Reply, Tenant, World, eventually};
use std::{
    io::Write,
    sync::{Arc, Mutex},
};
use tracing_subscriber::fmt::MakeWriter;

/// What is logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn count(&self, text: &str) -> usize {
        String::from_utf8_lossy(&self.0.lock().unwrap()).matches(text).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

async fn set_cap(world: &World, tenant: &Tenant, cap: &str) {
    world
        .sql(&format!(
            "SELECT queen_proxy.set_limit_override('{}', '{{\"max_retained_bytes\": {cap}}}')",
            tenant.cluster
        ))
        .await;
}

fn bytes(queue: u64, keys: u64, timers: u64) -> Reply {
    let body = format!(
        r#"{{"queues":[{{"name":"q","partitions":1,"retainedBytes":{queue}}}],"kvBytes":{keys},"timerBytes":{timers}}}"#
    );
    Reply::Text(200, body)
}

// One thread, so that the log of every task is this test's.
#[tokio::test]
async fn the_block_flips_once_at_the_cap_and_once_at_nine_tenths() {
    let world = world().await;
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    // A line that another test's thread reaches first, where nobody listens, may be switched off for all threads.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
    let _guard = tracing::subscriber::set_default(subscriber);
    let acme = world.tenant("acme").await;
    let tenant = broker_tenant(&world, &acme).await;
    set_cap(&world, &acme, "1000").await;
    let plan = limits(&[("max_retained_bytes", 1_000)]);
    let proxy = Proxy::start(&world, eager());
    proxy.loaded(&acme, 0).await;
    let view = || proxy.view(&acme, &plan).unwrap();
    let told = async |reply: Reply, total: u64| {
        world.recorder().list(tenant, reply);
        eventually(&format!("{total} bytes"), LIMIT, async || {
            (view().retained_bytes == Some(total)).then_some(())
        })
        .await;
    };
    // total, blocked, times it was blocked and released
    let steps = [
        (bytes(500, 300, 100), 900, false, (0, 0)),
        (bytes(500, 300, 201), 1_001, true, (1, 0)),
        (bytes(901, 0, 0), 901, true, (1, 0)),
        (bytes(0, 900, 0), 900, false, (1, 1)),
        (bytes(0, 0, 2_000), 2_000, true, (2, 1)),
    ];
    for (reply, total, blocked, lines) in steps {
        told(reply, total).await;
        // Told again and again it is said once.
        proxy.after_polls(3).await;
        assert_eq!(view().storage_blocked, blocked, "{total}");
        let counted = (log.count("pushes are blocked: storage"), log.count("pushes pass again: storage"));
        assert_eq!(counted, lines, "{total}");
    }
    // A raised cap releases it even while the cell does not answer, and so does a lifted one.
    world.recorder().list(tenant, Reply::Text(500, String::new()));
    for (cap, lines) in [("3000", (2, 2)), ("1000", (3, 2)), ("null", (3, 3))] {
        set_cap(&world, &acme, cap).await;
        if cap == "1000" {
            world.recorder().list(tenant, bytes(0, 0, 2_000));
        }
        eventually(&format!("the cap {cap}"), LIMIT, async || {
            let counted = (log.count("pushes are blocked: storage"), log.count("pushes pass again: storage"));
            (counted == lines).then_some(())
        })
        .await;
    }

    // An older cell: what it does not tell is none, which is said once. When its last queue is gone,
    // nothing is kept.
    told(Reply::Json(r#"{"queues":[{"name":"q","partitions":1,"retainedBytes":40}]}"#), 40).await;
    proxy.after_polls(3).await;
    assert_eq!(log.count("does not tell the bytes of keys or of timers"), 1);
    told(Reply::Json(r#"{"queues":[]}"#), 0).await;
    assert_eq!(log.count(&world.cell_secret), 0, "the secret in the log");
    assert!(log.count("the cell tells nothing of its queues") >= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_tells_no_bytes_blocks_nothing() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    let tenant = broker_tenant(&world, &acme).await;
    set_cap(&world, &acme, "10").await;
    world.recorder().list(tenant, Reply::Json(r#"{"queues":[]}"#));
    let proxy = Proxy::start(&world, eager());
    proxy.loaded(&acme, 0).await;
    proxy.after_polls(3).await;
    let view = || proxy.view(&acme, &limits(&[("max_retained_bytes", 10)])).unwrap();
    assert_eq!((view().retained_bytes, view().storage_blocked), (None, false));
    // Counters that nobody used yet are made when a cluster is near its cap.
    let globex = world.tenant("globex").await;
    set_cap(&world, &globex, "10").await;
    world.recorder().list(broker_tenant(&world, &globex).await, bytes(11, 0, 0));
    eventually("blocked before its first request", LIMIT, async || {
        let view = proxy.view(&globex, &limits(&[("max_retained_bytes", 10)]))?;
        view.storage_blocked.then_some(())
    })
    .await;
}
