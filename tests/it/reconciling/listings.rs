//! Cells are asked for their queues, and the answers correct the table and the registry.

use super::{Proxy, broker_tenant, eager, insert, limits, rows, rows_become, world};
use crate::support::{Recorder, Reply, eventually};
use std::time::Duration;

fn listing(queues: &[(&str, u32)]) -> Reply {
    let queues: Vec<_> =
        queues.iter().map(|(name, count)| serde_json::json!({"name": name, "partitions": count})).collect();
    Reply::Text(200, serde_json::json!({ "queues": queues }).to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_corrects_table_and_registry() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    let tenant = broker_tenant(&world, &acme).await;
    for (name, count, age) in
        [("same", 3, "1 day"), ("less", 9, "1 day"), ("gone", 2, "1 day"), ("fresh", 1, "1 minute")]
    {
        insert(&world, &acme, name, count, age).await;
    }
    let proxy = Proxy::start(&world, eager());
    proxy.loaded(&acme, 4).await;
    world.recorder().list(tenant, listing(&[("same", 3), ("less", 8), ("new", 5)]));
    let corrected = [("fresh", 1), ("less", 8), ("new", 5), ("same", 3)];
    rows_become(&world, &acme, &corrected).await;
    proxy.loaded(&acme, 4).await;
    // The partitions that somebody else made are not refused, those beyond the cap are.
    let plan = limits(&[("max_queues", 4), ("max_partitions_per_queue", 5)]);
    assert!(proxy.push(
        &acme,
        &plan,
        &[("new", "a"), ("same", "a"), ("same", "b"), ("same", "c"), ("same", "d")]
    ));
    assert!(!proxy.push(&acme, &plan, &[("gone", "a")]));
    world.recorder().take();
    world.recorder().list(tenant, listing(&[("same", 4), ("less", 8), ("new", 5)]));
    let kept = [("fresh", 1), ("less", 8), ("new", 5), ("same", 4)];
    rows_become(&world, &acme, &kept).await;
    proxy.after_polls(2).await;

    // How it is asked.
    let request = world.recorder().take().pop().unwrap();
    assert_eq!(request.line, "GET /api/v1/resources/queues?stats=cached");
    assert_eq!(request.all("x-queen-tenant"), [tenant.to_string()]);
    assert_eq!(request.all("authorization"), [format!("Bearer {}", world.cell_secret)]);
    assert_eq!(request.all("host"), [format!("127.0.0.1:{}", world.cell_port)]);
    let id: uuid::Uuid = request.all("x-queen-request-id")[0].parse().unwrap();
    assert_eq!(id.get_version_num(), 7);
    assert!(world.recorder().connections() < 10, "connections are kept: {}", world.recorder().connections());

    // No usable answer changes nothing.
    let large = format!("{}{{\"queues\":[]}}", " ".repeat((16 << 20) + 1));
    let unusable = [
        Reply::Text(500, r#"{"queues":[]}"#.to_owned()),
        Reply::Text(404, r#"{"queues":[]}"#.to_owned()),
        Reply::Text(204, String::new()),
        Reply::Json("{}"),
        Reply::Json(r#"{"queues":null}"#),
        Reply::Json("not JSON"),
        Reply::Text(200, large),
        Reply::Close,
        Reply::Garbage,
        Reply::Unauthorized,
    ];
    for reply in unusable {
        let label: String = format!("{reply:?}").chars().take(60).collect();
        world.recorder().list(tenant, reply);
        let failed = proxy.reconcile.figures().polls_failed + 2;
        eventually(&label, super::LIMIT, async || {
            (proxy.reconcile.figures().polls_failed > failed).then_some(())
        })
        .await;
        rows_become(&world, &acme, &kept).await;
        assert_eq!(proxy.queues(&acme), Some(4), "{label}");
    }

    // An empty one sweeps, but not what may be younger than the listing.
    world.recorder().list(tenant, listing(&[]));
    world
        .sql("UPDATE queen_proxy.queues SET created_at = now() - interval '1 day' WHERE name IN ('new', 'same')")
        .await;
    rows_become(&world, &acme, &[("fresh", 1)]).await;
    world.sql("UPDATE queen_proxy.queues SET created_at = now() - interval '1 day'").await;
    rows_become(&world, &acme, &[]).await;
    // A name can be used again.
    world.recorder().list(tenant, listing(&[("same", 1)]));
    rows_become(&world, &acme, &[("same", 1)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_proxies_write_the_same_table() {
    let world = world().await;
    let acme = world.tenant("acme").await;
    let tenant = broker_tenant(&world, &acme).await;
    let names: Vec<String> = (100..400).map(|n| format!("q{n}")).collect();
    world
        .sql(&format!(
            "INSERT INTO queen_proxy.queues (cluster_id, name, partitions_count, created_at)
                  SELECT '{}', 'q' || n, 2, now() - interval '1 day' FROM generate_series(100, 399) AS n",
            acme.cluster
        ))
        .await;
    let proxies = [Proxy::start(&world, eager()), Proxy::start(&world, eager())];
    for proxy in &proxies {
        proxy.loaded(&acme, 300).await;
    }
    // Until now the cell told nothing.
    let mut failed = None;
    // Lowered, raised, gone and new ones, over and over, while both write.
    for round in 0..6 {
        let told: Vec<(&str, u32)> = names
            .iter()
            .enumerate()
            .filter(|(n, _)| (n + round) % 3 > 0)
            .map(|(n, name)| (name.as_str(), u32::try_from((n * 7 + round) % 5).unwrap()))
            .collect();
        world.sql("UPDATE queen_proxy.queues SET created_at = now() - interval '1 day'").await;
        world.recorder().list(tenant, listing(&told));
        rows_become(&world, &acme, &told).await;
        failed =
            failed.or_else(|| Some(proxies.each_ref().map(|proxy| proxy.reconcile.figures().polls_failed)));
    }
    // A queue that went through one of them a moment ago is in no listing yet.
    assert!(proxies[0].push(&acme, &limits(&[]), &[("just now", "a")]));
    eventually("written", super::LIMIT, async || {
        rows(&world, &acme).await.contains(&("just now".to_owned(), 1)).then_some(())
    })
    .await;
    for proxy in &proxies {
        proxy.after_polls(4).await;
    }
    assert_eq!(Some(proxies.each_ref().map(|proxy| proxy.reconcile.figures().polls_failed)), failed);
    assert!(rows(&world, &acme).await.contains(&("just now".to_owned(), 1)));
    proxies[1].loaded(&acme, 201).await;
    let deadlocks: i64 =
        sqlx::query_scalar("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
            .fetch_one(&mut world.control().await)
            .await
            .unwrap();
    assert_eq!(deadlocks, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_hangs_does_not_delay_the_others() {
    let world = world().await;
    let hanging = Recorder::start().await;
    hanging.reply(Reply::Never);
    let cells = [("hanging", hanging.port), ("away", crate::support::free_port())];
    for (name, port) in cells {
        let cell = world.add_cell(name, port).await;
        for n in 0..5 {
            let tenant = world.tenant(&format!("{name}{n}")).await;
            world
                .sql(&format!(
                    "UPDATE queen_proxy.clusters SET cell_id = '{cell}' WHERE id = '{}'",
                    tenant.cluster
                ))
                .await;
        }
    }
    let odd = world.add_cell("odd", 1).await;
    world.sql("UPDATE queen_proxy.cells SET base_url = 'https://127.0.0.1' WHERE slug = 'odd'").await;
    let strayed = world.tenant("strayed").await;
    world
        .sql(&format!("UPDATE queen_proxy.clusters SET cell_id = '{odd}' WHERE id = '{}'", strayed.cluster))
        .await;
    let acme = world.tenant("acme").await;
    let tenant = broker_tenant(&world, &acme).await;
    world.recorder().list(tenant, listing(&[("q", 1)]));

    let proxy = Proxy::start(&world, eager());
    // Less than the 10 s for which the hanging cell is waited for.
    eventually("the others go on", Duration::from_secs(8), async || {
        (world.recorder().count() >= 5 && hanging.count() >= 1).then_some(())
    })
    .await;
    assert!(hanging.count() <= 2, "at most two at once: {}", hanging.count());
    rows_become(&world, &acme, &[("q", 1)]).await;
    eventually("the others fail", super::LIMIT, async || {
        (proxy.reconcile.figures().polls_failed > 6).then_some(())
    })
    .await;
    for cell in proxy.reconcile.figures().cells {
        assert_eq!(cell.answered.is_some(), &*cell.slug == "cell", "{cell:?}");
    }
}
