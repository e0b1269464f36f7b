//! `admin limits` tells of running proxies.

use super::{Admin, text};
use crate::support::{Socket, World, eventually, free_port};
use serde_json::{Value, json};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn the_limits_of_a_cluster_and_what_stands_against_them_in_running_proxies() {
    let world = World::builder().recorder().admin().start().await;
    let listener = format!("127.0.0.1:{}", world.admin);
    let admin = Admin::of(&world);
    let acme = world.tenant("acme").await;
    let overrides = r#"{"max_req_per_sec": 1, "req_burst": 10, "max_msgs_per_sec": null, "max_queues": 7}"#;
    world.sql(&format!("SELECT queen_proxy.set_limit_override('{}', '{overrides}')", acme.cluster)).await;

    // Nothing has been asked of this proxy yet; another one is not there at all.
    let away = format!("127.0.0.1:{}", free_port());
    let shown = admin.json(&["limits", "acme-prod", "--proxy", &listener, "--proxy", &away]);
    assert_eq!(shown["proxies"][0], json!({"proxy": listener, "live": null}));
    assert_eq!(text(&shown["proxies"][1], "proxy"), away);
    assert_eq!(text(&shown["proxies"][1], "error"), "connection refused");

    let body = r#"{"items":[{"queue":"a","payload":1},{"queue":"b","payload":22}]}"#;
    for _ in 0..3 {
        assert_eq!(world.ask("POST /api/v1/push", &acme.headers(), body).await.status, 200);
    }
    world.recorder().reply(crate::support::Reply::Held);
    let mut poll = Socket::open(world.port()).await;
    poll.send(format!("GET /api/v1/pop/queue/a?wait=true HTTP/1.1\r\n{}\r\n", acme.headers())).await;
    // Without `--proxy` the configured listener is asked. By slug or by id.
    let cluster = acme.cluster.to_string();
    let shown = eventually("the poll waits and the queues are known", LIMIT, async || {
        let shown = admin.json(&["limits", &cluster]);
        let live = &shown["proxies"][0]["live"];
        (live["parked"] == 1 && live["queues"] == 2).then_some(shown)
    })
    .await;
    for (name, value, source) in [
        ("max_req_per_sec", json!(1), "override"),
        ("max_queues", json!(7), "override"),
        ("max_msgs_per_sec", json!(null), "override"),
        ("max_parked_pops", json!(1_000), "plan"),
        ("monthly_msgs_quota", json!(null), "unlimited"),
    ] {
        assert_eq!(shown["limits"][name], json!({"value": value, "source": source}), "{name}");
    }
    assert_eq!((text(&shown, "cluster_slug"), text(&shown, "plan")), ("acme-prod", "pro"));
    let live = &shown["proxies"][0]["live"];
    let left = live["requests"]["left"].as_i64().unwrap();
    assert!((6..=10).contains(&left) && live["requests"]["burst"] == 10, "{live}");
    assert_eq!(live["messages"], Value::Null, "unlimited");
    assert_eq!(live["in_flight_bytes"], 3 * 3);
    assert_eq!((&live["retained_bytes"], &live["storage_blocked"]), (&Value::Null, &json!(false)));

    let out = admin.ok(&["limits", "acme-prod", "--proxy", &listener, "--proxy", &away]);
    for (start, end) in [
        ("cluster   acme-prod (", ")"),
        ("plan      pro", ""),
        ("max_queues", "override"),
        ("max_parked_pops", "plan"),
        ("max_msgs_per_sec", "override"),
        (&format!("proxy {listener}"), ""),
        ("requests", "of 10 left"),
        ("parked", "1"),
        ("queues", "2"),
        (&format!("proxy {away}"), ""),
        ("connection refused", ""),
    ] {
        let is_there = out.lines().any(|line| line.starts_with(start) && line.trim_end().ends_with(end));
        assert!(is_there, "no line from {start:?} to {end:?} in\n{out}");
    }
    assert_eq!(admin.fails(1, &["limits", "nobody"]), "there is no such cluster");
    world.recorder().release(crate::support::Reply::Json("{}"));
    assert_eq!(poll.answer().await.unwrap().status, 200);
}
