//! Rows are read when a cluster is first used, and what was admitted is written.

use super::{LIMIT, NEVER, Proxy, eager, insert, limits, rows, rows_become, without_cells, world};
use crate::support::eventually;
use queen_proxy::{
    config::proxy::CapsConfig,
    control::{
        queues::{Correction, NewCount},
        store::Store,
    },
    domain::ids::ClusterId,
    limits::pending::QueueRow,
};
use std::time::{Duration, Instant};
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn what_one_proxy_admitted_the_next_one_knows() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    let plan = limits(&[("max_queues", 2), ("max_partitions_per_queue", 3)]);
    let first = Proxy::start(&world, without_cells());
    first.loaded(&acme, 0).await;
    assert!(first.push(&acme, &plan, &[("q", "a"), ("q", "b"), ("r", "a")]));
    assert!(!first.push(&acme, &plan, &[("s", "a")]), "a third queue");
    rows_become(&world, &acme, &[("q", 2), ("r", 1)]).await;
    first.reconcile.shutdown(LIMIT).await;

    // This one writes nothing before its end.
    let second = Proxy::start(&world, CapsConfig { persist_every: NEVER, ..without_cells() });
    second.loaded(&acme, 2).await;
    assert!(!second.push(&acme, &plan, &[("s", "a")]), "still a third queue");
    // Two old partitions whose names it has not seen, and a new one.
    assert!(second.push(&acme, &plan, &[("q", "a"), ("q", "b"), ("q", "c")]));
    assert!(!second.push(&acme, &plan, &[("q", "d")]), "a fourth partition");
    assert_eq!(second.reconcile.figures().rows_pending, 1);
    assert_eq!(rows(&world, &acme).await, [("q".to_owned(), 2), ("r".to_owned(), 1)]);
    second.reconcile.shutdown(LIMIT).await;
    assert_eq!(second.reconcile.figures().rows_pending, 0);
    assert_eq!(rows(&world, &acme).await, [("q".to_owned(), 3), ("r".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_table_is_out_of_reach_nothing_is_refused_and_nothing_lost() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    insert(&world, &acme, "old", 1, "1 hour").await;
    world.sql("ALTER TABLE queen_proxy.queues RENAME TO away").await;
    let proxy = Proxy::start(&world, without_cells());
    let plan = limits(&[("max_queues", 1)]);
    assert!(proxy.push(&acme, &plan, &[("q", "a"), ("r", "a")]));
    eventually("tried in vain", LIMIT, async || {
        let log = proxy.reconcile.figures();
        (log.rows_pending == 2 && log.loads_pending == 1).then_some(())
    })
    .await;
    // An end that cannot write ends in time all the same.
    let other = Proxy::start(&world, without_cells());
    assert!(other.push(&acme, &plan, &[("t", "a")]));
    let begun = Instant::now();
    other.reconcile.shutdown(Duration::from_millis(300)).await;
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(other.reconcile.figures().rows_pending > 0);

    assert_eq!(proxy.queues(&acme), None);
    world.sql("ALTER TABLE queen_proxy.away RENAME TO queues").await;
    rows_become(&world, &acme, &[("old", 1), ("q", 1), ("r", 1)]).await;
    eventually("loaded", LIMIT, async || proxy.queues(&acme)).await;
    assert!(!proxy.push(&acme, &plan, &[("s", "a")]), "now the cap counts");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_cannot_be_written_do_not_stop_the_others() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    world
        .sql("ALTER TABLE queen_proxy.queues ADD CONSTRAINT odd CHECK (name <> 'q7' AND name <> 'q13')")
        .await;
    let proxy = Proxy::start(&world, CapsConfig { persist_every: NEVER, ..without_cells() });
    let gone = ClusterId(Uuid::new_v4());
    proxy.limiter.cluster(gone);
    let add = |cluster, name: String, partitions| {
        proxy.limiter.pending().add(QueueRow { cluster, name: name.into(), partitions });
    };
    for queue in 10..30 {
        add(ClusterId(acme.cluster), format!("q{queue}"), 1);
        add(gone, format!("q{queue}"), 1);
    }
    add(ClusterId(acme.cluster), "q7".to_owned(), 1);
    add(ClusterId(acme.cluster), "many".to_owned(), u64::MAX);
    proxy.reconcile.shutdown(LIMIT).await;
    let rows = rows(&world, &acme).await;
    assert_eq!(rows.len(), 20, "{rows:?}");
    assert!(rows.contains(&("many".to_owned(), 2_147_483_647)));
    assert!(!rows.iter().any(|(name, _)| name == "q7" || name == "q13"));
    let figures = proxy.reconcile.figures();
    assert_eq!((figures.rows_dropped, figures.rows_pending), (22, 0));
    assert_eq!(proxy.limiter.clusters(), 0, "what is gone is not counted any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_cluster_is_neither_asked_for_nor_counted() {
    let world = world().await;
    let (acme, globex) = (world.tenant("acme").await, world.tenant("globex").await);
    let proxy = Proxy::start(&world, eager());
    proxy.loaded(&acme, 0).await;
    proxy.loaded(&globex, 0).await;
    proxy.after_polls(4).await;
    world.sql(&format!("SELECT queen_proxy.set_cluster_status('{}', 'deleting')", acme.cluster)).await;
    eventually("forgotten", LIMIT, async || (proxy.limiter.clusters() == 1).then_some(())).await;
    proxy.after_polls(2).await;
    world.recorder().take();
    proxy.after_polls(4).await;
    let own = super::broker_tenant(&world, &globex).await.to_string();
    let asked = world.recorder().take();
    assert!(!asked.is_empty() && asked.iter().all(|request| request.all("x-queen-tenant") == [&own]));
    // A blocked tenant is asked for all the same.
    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'suspended')", globex.tenant)).await;
    proxy.after_polls(4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_written_since_it_was_read_is_left_alone() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    let store = Store::new(&world.pxdb_of_a_proxy());
    let cluster = ClusterId(acme.cluster);
    for name in ["lowered", "gone", "raised"] {
        insert(&world, &acme, name, 5, "1 day").await;
    }
    // An older listing comes in after somebody has written more.
    let counts = ["lowered", "gone", "raised", "new"].map(|name| NewCount { cluster, name, partitions: 7 });
    assert_eq!(store.persist_queues(&counts).await.unwrap(), []);
    let stale = [
        Correction { name: "lowered", partitions: Some(3), seen: Some(5) },
        Correction { name: "gone", partitions: None, seen: Some(5) },
        Correction { name: "raised", partitions: Some(6), seen: Some(5) },
        Correction { name: "new", partitions: Some(1), seen: None },
    ];
    store.correct_queues(cluster, &stale).await.unwrap();
    rows_become(&world, &acme, &[("gone", 7), ("lowered", 7), ("new", 7), ("raised", 7)]).await;
    // One that knows them corrects them, and doing it twice does nothing more.
    let fresh = [
        Correction { name: "lowered", partitions: Some(3), seen: Some(7) },
        Correction { name: "gone", partitions: None, seen: Some(7) },
        Correction { name: "raised", partitions: Some(9), seen: Some(7) },
        Correction { name: "other", partitions: Some(0), seen: None },
    ];
    for _ in 0..2 {
        store.correct_queues(cluster, &fresh).await.unwrap();
        rows_become(&world, &acme, &[("lowered", 3), ("new", 7), ("other", 0), ("raised", 9)]).await;
    }
    let all: i64 = sqlx::query_scalar("SELECT count(*) FROM queen_proxy.queues")
        .fetch_one(&mut world.control().await)
        .await
        .unwrap();
    assert_eq!(all, 5, "four live, one soft-deleted");
    // Nothing is written for a cluster that is no more, and that is no error.
    store.correct_queues(ClusterId(Uuid::new_v4()), &fresh).await.unwrap();
}
