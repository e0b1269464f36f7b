//! Days, months, pruned days and what arrives late: the totals are what was sent.

use super::Scene;
use crate::metering::Proxy;
use queen_proxy::metering::sample::Op;
use std::{collections::BTreeMap, sync::atomic::Ordering::SeqCst};

const MINUTE: u64 = 60;
const HOUR: u64 = 3_600;

/// By slug, day and class: requests and messages.
type Totals = BTreeMap<(String, String, String), (i64, i64)>;

/// What the control plane says of closed days.
async fn totals(scene: &Scene) -> Totals {
    let rows: Vec<(String, String, String, i64, i64, i64, i64)> = sqlx::query_as(
        "SELECT c.slug, d.day::text, d.op_class, d.reqs, d.msgs, d.bytes_in, d.bytes_out
           FROM queen_proxy.usage_days AS d JOIN queen_proxy.clusters AS c ON c.id = d.cluster_id",
    )
    .fetch_all(&mut scene.world.control().await)
    .await
    .unwrap();
    rows.into_iter()
        .map(|(slug, day, op, reqs, msgs, bytes_in, bytes_out)| {
            assert_eq!((bytes_in, bytes_out), (msgs * 10, reqs * 7), "{slug} {day} {op}");
            ((slug, day, op), (reqs, msgs))
        })
        .collect()
}

struct Traffic<'s> {
    scene: &'s Scene,
    /// 12:00 UTC of the last day of a month.
    noon: u64,
    days: [String; 2],
    sent: Totals,
}

impl Traffic<'_> {
    fn send(&mut self, proxy: &Proxy, acme: bool, op: Op, msgs: u64, now: u64) {
        let tenant = if acme { &self.scene.acme } else { &self.scene.globex };
        proxy.count(tenant.cluster, op, msgs, now);
        let day = self.days[usize::from(now >= self.noon + 12 * HOUR)].clone();
        let total = self.sent.entry((tenant.slug.clone(), day, op.as_str().to_owned())).or_default();
        *total = (total.0 + 1, total.1 + i64::try_from(msgs).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_over_the_end_of_a_month_with_an_outage_and_late_rows() {
    let scene = Scene::new().await;
    // Long enough ago to be pruned with the default of 90 days.
    let last = "(date_trunc('month', (now() AT TIME ZONE 'UTC') - interval '95 days') - interval '1 day')";
    let noon: i64 =
        scene.value(&format!("SELECT extract(epoch FROM {last} + interval '12 hours')::bigint")).await;
    let days = [
        scene.value::<String>(&format!("SELECT {last}::date::text")).await,
        scene.value::<String>(&format!("SELECT ({last}::date + 1)::text")).await,
    ];
    let mut traffic =
        Traffic { scene: &scene, noon: u64::try_from(noon).unwrap(), days, sent: Totals::new() };
    let noon = traffic.noon;
    let (mut one, mut two) = (scene.proxy("one"), scene.proxy("two"));

    for tick in 0..=24 * 6 {
        let now = noon + tick * 10 * MINUTE;
        // The second proxy is cut off from an hour before the end of the month, and stays so.
        two.away.store(tick >= 66, SeqCst);
        for step in 0..5 {
            let at = now + step * 2 * MINUTE;
            if at < noon + 24 * HOUR {
                traffic.send(&one, true, Op::Push, tick % 7, at);
                traffic.send(&two, step % 2 == 0, Op::ALL[(step % 5) as usize], step, at + 59);
            }
        }
        one.tick(now + 9 * MINUTE).await;
        two.tick(now + 9 * MINUTE).await;
        if tick == 100 {
            assert!(scene.control.maintain_usage(90).await.unwrap().is_some(), "in the middle");
        }
    }
    one.flusher.finish(noon + 25 * HOUR, super::LIMIT).await;
    let waiting = two.metrics.snapshot();
    assert!(waiting.spool_files > 50, "{waiting:?}");
    drop(two);

    // Rolled up and pruned, and then the second proxy comes back and sends what it has.
    scene.control.maintain_usage(90).await.unwrap().unwrap();
    assert_eq!(scene.minutes().await, [""; 0], "all of it is pruned");
    let before = totals(&scene).await;
    assert_ne!(before, traffic.sent, "some is missing");
    let mut two = scene.proxy("two");
    two.tick(noon + 26 * HOUR).await;
    assert_eq!(two.metrics.snapshot().spool_files, 0);
    scene.control.maintain_usage(90).await.unwrap().unwrap();
    assert_eq!(totals(&scene).await, traffic.sent);
    assert_eq!(scene.minutes().await, [""; 0]);
    let months = [traffic.days[0].clone(), traffic.days[1].clone()];
    assert_ne!(months[0][..7], months[1][..7]);
    for day in months {
        for tenant in [&scene.acme, &scene.globex] {
            let sent = traffic.sent.iter().filter(|((slug, of, _), _)| (slug, of) == (&tenant.slug, &day));
            let sent: i64 = sent.map(|(_, (_, msgs))| msgs).sum();
            let month = format!("SELECT queen_proxy.cluster_month_msgs('{}', '{day}')", tenant.cluster);
            assert_eq!(scene.value::<i64>(&month).await, sent, "{} {day}", tenant.slug);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn late_rows_of_a_pruned_day_are_added_to_its_total_and_new_classes_begin_one() {
    let scene = Scene::new().await;
    let noon = 1_709_208_000; // 2024-02-29 12:00 UTC
    let mut proxy = scene.proxy("spool");
    let acme = scene.acme.cluster;
    proxy.count(acme, Op::Push, 100, noon);
    proxy.tick(noon + 60).await;
    let days = async || {
        scene.rows("SELECT concat_ws(' ', day, op_class, concat_ws('/', reqs, msgs)) FROM queen_proxy.usage_days ORDER BY 1").await
    };
    scene.control.maintain_usage(90).await.unwrap().unwrap();
    assert_eq!((days().await, scene.minutes().await.len()), (vec!["2024-02-29 push 1/100".to_owned()], 0));
    // Twice to the same minute, another minute, and a class that the day has no total of.
    for _ in 0..2 {
        proxy.count(acme, Op::Push, 5, noon);
        proxy.count(acme, Op::Push, 6, noon + 600);
        proxy.count(acme, Op::Delivery, 9, noon);
        proxy.tick(noon + 7_200).await;
    }
    assert_eq!(days().await, ["2024-02-29 push 5/122"]);
    scene.control.maintain_usage(90).await.unwrap().unwrap();
    assert_eq!(days().await, ["2024-02-29 delivery 2/18", "2024-02-29 push 5/122"]);
    assert_eq!(scene.minutes().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_maintains_at_a_time_and_batches_are_forgotten_after_the_spool_has() {
    let scene = Scene::new().await;
    let mut other = scene.world.control().await;
    let lock = "SELECT pg_advisory_lock(hashtextextended('queen_proxy/usage/maintain', 0))";
    sqlx::query(lock).execute(&mut other).await.unwrap();
    assert_eq!(scene.control.maintain_usage(90).await.unwrap(), None, "another one is at it");
    sqlx::query("SELECT pg_advisory_unlock_all()").execute(&mut other).await.unwrap();
    scene
        .world
        .sql(
            "INSERT INTO queen_proxy.usage_batches (id, created_at) SELECT gen_random_uuid(), now() - age
               FROM unnest(ARRAY[interval '31 days', '34 days 23 hours', '35 days 1 hour', '99 days']) AS age",
        )
        .await;
    let done = scene.control.maintain_usage(90).await.unwrap().unwrap();
    assert_eq!((done.rolled, done.pruned, done.swept), (0, 0, 2));
}
