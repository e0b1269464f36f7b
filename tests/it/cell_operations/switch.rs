//! The kill switch of KV contract section 8, on one cell, on several, and with the database away.

use super::{ACME, SOON, cell_sql, delete, get, number, put, put_at, refusal, refused};
use crate::support::{World, eventually};
use serde_json::{Value, json};

const ROUTE: &str = "/api/v1/system/kv-timers";

async fn switch(world: &World, port: u16, body: &str) -> (u16, Value) {
    let answer = world.ask_cell(port, &format!("POST {ROUTE}"), ACME, body).await;
    (answer.status, answer.json())
}

async fn state(world: &World, port: u16) -> Value {
    let answer = world.ask_cell(port, &format!("GET {ROUTE}"), ACME, "").await;
    assert_eq!(answer.status, 200);
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_stops_every_cell_of_the_database_and_outlives_a_restart() {
    let mut world = World::builder().proxies(0).start().await;
    let (other, _other) = world.another_cell().await;
    assert_eq!(put(&world, ACME, "k").await.status, 200);
    let fresh = state(&world, other).await;
    assert_eq!(
        (&fresh["kvEnabled"], &fresh["timersScheduleEnabled"], &fresh["timersFireEnabled"]),
        (&json!(true), &json!(true), &json!(true))
    );
    assert_eq!((&fresh["quotaTenants"], &fresh["quotaHot"]), (&json!(0), &json!(false)));
    assert!(fresh["quotaAgeMs"].is_u64());

    let (status, answer) = switch(&world, world.cell_port, r#"{"kv":false}"#).await;
    assert_eq!((status, &answer["kvEnabled"], &answer["mirrored"]), (200, &json!(false), &json!(true)));
    assert_eq!(answer["timersFireEnabled"], true);
    assert!(answer["message"].is_string());
    let paused = refused(503, "kv_disabled", "kv_disabled");
    for answer in
        [put(&world, ACME, "k").await, get(&world, ACME, "k").await, delete(&world, ACME, "k").await]
    {
        assert_eq!(refusal(&answer), paused);
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    for (line, body) in
        [("GET /api/v1/resources/kv/namespaces", ""), ("POST /api/v1/resources/kv/list", "not even JSON")]
    {
        assert_eq!(refusal(&world.ask_cell(world.cell_port, line, ACME, body).await), paused, "{line}");
    }
    // A bundle is refused for good, so that it does not come back for ever (vector 23).
    let bundle = r#"{"operations":[],"kv":[{"op":"get","ns":"ns","key":"k"}]}"#;
    let answer = world.ask_cell(world.cell_port, "POST /api/v1/transaction", ACME, bundle).await;
    assert_eq!(refusal(&answer), refused(403, "kv_disabled", "kv_disabled"));
    assert!(answer.header("retry-after").is_none());
    let empty = world.ask_cell(world.cell_port, "POST /api/v1/kv", ACME, "[]").await;
    assert_eq!(empty.status, 200, "nothing to do asks nobody");
    assert_eq!(world.ask_cell(world.cell_port, "GET /health", ACME, "").await.status, 200);
    let value = json!({"value": 1, "forever": true});
    eventually("the other cell hears of it", SOON, async || {
        (refusal(&put_at(&world, other, ACME, "k", &value).await) == paused).then_some(())
    })
    .await;
    world.restart_cell().await;
    assert_eq!(refusal(&put(&world, ACME, "k").await), paused, "adopted at boot");

    assert_eq!(switch(&world, other, r#"{"kv":true,"timersFire":false}"#).await.0, 200);
    assert_eq!(put_at(&world, other, ACME, "k", &value).await.status, 200);
    eventually("on again everywhere", SOON, async || {
        (put(&world, ACME, "k").await.status == 200).then_some(())
    })
    .await;
    assert_eq!(state(&world, world.cell_port).await["timersFireEnabled"], false, "read afresh");
    cell_sql(&world, "DELETE FROM queen.system_state").await;
    assert_eq!(state(&world, world.cell_port).await["timersFireEnabled"], true, "no row is ON");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_body_that_means_something_is_taken() {
    let world = World::builder().proxies(0).start().await;
    for (body, start) in [
        ("{}", "name at least one"),
        (r#"{"kv":null}"#, "name"),
        (r#"{"kv":0}"#, "bad body: "),
        ("", "bad body: "),
    ] {
        let (status, answer) = switch(&world, world.cell_port, body).await;
        assert_eq!(status, 400, "{body}");
        assert!(answer["error"].as_str().unwrap().starts_with(start), "{answer}");
    }
    let answer = world.ask_cell(world.cell_port, &format!("PUT {ROUTE}"), ACME, "{}").await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET, HEAD, POST")));
    assert_eq!(number(&world, "SELECT count(*) FROM queen.system_state").await, 0);
    let stranger = format!("GET {ROUTE} HTTP/1.1\r\nHost: c\r\n\r\n");
    let answer = crate::support::Socket::open(world.cell_port).await.ask(stranger).await;
    assert_eq!(answer.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn through_the_proxy_no_tenant_reaches_it() {
    let world = World::new().await;
    let acme = world.tenant("acme").await;
    for method in ["GET", "POST"] {
        let answer = world.ask(&format!("{method} {ROUTE}"), &acme.headers(), r#"{"kv":false}"#).await;
        assert_eq!((answer.status, answer.code().as_str()), (404, "route_blocked"));
    }
    assert_eq!(world.ask("GET /api/v1/kv/ns/k", &acme.headers(), "").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_without_the_database_holds_here_and_reaches_the_others_later() {
    let world = World::builder().proxies(0).own_cell_postgres().start().await;
    let (other, _other) = world.another_cell().await;
    world.server.stop();
    let (status, answer) = switch(&world, world.cell_port, r#"{"kv":false}"#).await;
    assert_eq!((status, &answer["kvEnabled"], &answer["mirrored"]), (200, &json!(false), &json!(false)));
    let paused = refused(503, "kv_disabled", "kv_disabled");
    assert_eq!(refusal(&put(&world, ACME, "k").await), paused);
    assert_eq!(state(&world, world.cell_port).await["kvEnabled"], false, "from memory");

    world.server.start_again();
    let value = json!({"value": 1, "forever": true});
    eventually("the other cell", SOON, async || {
        (refusal(&put_at(&world, other, ACME, "k", &value).await) == paused).then_some(())
    })
    .await;
    assert_eq!(refusal(&put(&world, ACME, "k").await), paused);
    // A decision that is older than what the database says does not undo it.
    let late =
        number(&world, r#"SELECT queen.kv_switches_set_v1('{"kv_enabled": true}', 3600000)::bigint"#).await;
    assert_eq!(late, 0);
    assert_eq!(refusal(&put(&world, ACME, "k").await), paused);
}
