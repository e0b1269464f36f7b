//! Ended sessions and logins (contract sections 2.2 and 2.3; decision D7).

use super::{
    CHANNEL, Plane, REVOKED,
    mutators::{fill, scene},
};
use serde_json::{Value, json};

async fn run(plane: &mut Plane, statements: &str) {
    plane.run(&fill(statements, "")).await;
}

async fn denied(plane: &mut Plane) -> Vec<String> {
    plane.rows("SELECT jti FROM queen_proxy.revoked_tokens ORDER BY jti").await
}

async fn audited(plane: &mut Plane) -> Value {
    let rows = "SELECT coalesce(jsonb_agg(to_jsonb(o) - 'id' - 'at' ORDER BY at), '[]') FROM queen_proxy.operations AS o";
    plane.value(rows).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_session_is_denied_audited_and_announced_and_so_is_a_repeat() {
    let mut plane = scene().await;
    let (mut sessions, mut clusters) = (plane.ear_on(REVOKED).await, plane.ear_on(CHANNEL).await);
    run(&mut plane, "SET search_path = ''; SET timezone = 'Pacific/Kiritimati'").await;
    let row = |expiry: &str| {
        json!({
            "tenant_id": fill("{acme}", ""), "cluster_id": null, "actor": "user", "actor_id": fill("{ops}", ""),
            "action": "session_revoked", "target": "jti-1", "meta": {"expires_at": expiry},
        })
    };

    run(
        &mut plane,
        "SELECT queen_proxy.revoke_session(' jti-1 ', '2040-01-02 03:04:05+06', p_actor_id => '{ops}')",
    )
    .await;
    assert_eq!(plane.heard(&mut sessions).await, ["jti-1"]);
    assert_eq!(audited(&mut plane).await, json!([row("2040-01-01T21:04:05+00:00")]));

    // The first expiry stays.
    run(&mut plane, "SELECT queen_proxy.revoke_session('jti-1', '2041-01-01+00', 'user', '{ops}')").await;
    assert_eq!(plane.heard(&mut sessions).await, ["jti-1"], "a repeat");
    assert_eq!(
        audited(&mut plane).await,
        json!([row("2040-01-01T21:04:05+00:00"), row("2041-01-01T00:00:00+00:00")])
    );
    let kept = "SELECT jti || ' ' || extract(epoch FROM expires_at)::bigint FROM queen_proxy.revoked_tokens";
    assert_eq!(plane.rows(kept).await, ["jti-1 2209064645"]);

    run(&mut plane, "BEGIN; SELECT queen_proxy.revoke_session('jti-2', now(), 'user', '{ops}'); ROLLBACK")
        .await;
    assert_eq!(plane.heard(&mut sessions).await, [""; 0], "what was rolled back");
    assert_eq!(denied(&mut plane).await, ["jti-1"]);
    assert_eq!(plane.heard(&mut clusters).await, [""; 0], "no cluster is concerned");
}

#[tokio::test(flavor = "multi_thread")]
async fn any_actor_may_end_a_session_and_the_longest_token_id_still_fits() {
    let mut plane = scene().await;
    let mut ear = plane.ear_on(REVOKED).await;
    for actor in ["user", "api_key", "control_plane", "system"] {
        run(
            &mut plane,
            &format!("SELECT queen_proxy.revoke_session('by {actor}', now(), '{actor}', '{{eve}}')"),
        )
        .await;
        let row = format!(
            "SELECT actor || tenant_id FROM queen_proxy.operations WHERE target = 'by {actor}' AND actor_id = '{{eve}}'"
        );
        assert_eq!(plane.rows(&fill(&row, "")).await, [format!("{actor}{}", fill("{globex}", ""))]);
    }
    plane.heard(&mut ear).await;
    // Four bytes each, and nothing that could be compressed away.
    let longest: String =
        (0..512_u32).map(|n| char::from_u32(0x2_0000 + n * 7919 % 40_000).unwrap()).collect();
    assert_eq!(longest.len(), 2048);
    run(&mut plane, &format!("SELECT queen_proxy.revoke_session('{longest}', now(), 'user', '{{ops}}')"))
        .await;
    assert_eq!(plane.heard(&mut ear).await, [longest.as_str()]);
    assert!(denied(&mut plane).await.contains(&longest));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_leaves_what_a_proxy_would_still_accept() {
    let mut plane = scene().await;
    let mut ear = plane.ear_on(REVOKED).await;
    // In one transaction, now() stands still.
    plane
        .run(
            "BEGIN;
             INSERT INTO queen_proxy.revoked_tokens (jti, expires_at) VALUES
                ('long gone', '-infinity'), ('gone', now() - interval '121 s'), ('just gone', now() - interval '120 s'),
                ('leeway', now() - interval '9.999999 s'), ('expired', now()), ('valid', now() + interval '1 h'),
                ('end of time', '294276-12-31 23:59:59.999999+00'), ('never', 'infinity')",
        )
        .await;
    assert_eq!(plane.value::<i32>("SELECT queen_proxy.sweep_revoked_tokens()").await, 3);
    let left = ["end of time", "expired", "leeway", "never", "valid"];
    assert_eq!(denied(&mut plane).await, left);
    assert_eq!(plane.value::<i32>("SELECT queen_proxy.sweep_revoked_tokens()").await, 0, "again");
    assert_eq!(denied(&mut plane).await, left);
    plane.run("COMMIT").await;
    assert_eq!(audited(&mut plane).await, json!([]));
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_is_dated_and_audited_each_time() {
    let mut plane = scene().await;
    let mut ear = plane.ear().await;
    run(&mut plane, "SET search_path = ''").await;
    let login = fill("SELECT queen_proxy.record_user_login('{ops}')::text", "");
    let stored = fill("SELECT last_login_at::text FROM queen_proxy.users WHERE id = '{ops}'", "");
    let first: String = plane.value(&login).await;
    assert_eq!(plane.value::<String>(&stored).await, first);
    let second: String = plane.value(&login).await;
    assert_eq!(plane.value::<String>(&stored).await, second);
    assert_ne!(first, second);
    let row = json!({
        "tenant_id": fill("{acme}", ""), "cluster_id": null, "actor": "user", "actor_id": fill("{ops}", ""),
        "action": "login", "target": fill("{ops}", ""), "meta": {},
    });
    assert_eq!(audited(&mut plane).await, json!([row, row]));
    let others = "SELECT count(*) FROM queen_proxy.users WHERE last_login_at IS NOT NULL";
    assert_eq!(plane.value::<i64>(others).await, 1);
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sets_the_operator_bit_second_sees_what_the_first_one_did() {
    let mut plane = scene().await;
    let set = |on: bool| format!("queen_proxy.set_operator('ops@acme.example', {on})");
    let results = plane.race(&set(true), &[set(false)]).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let metas = "SELECT meta::text FROM queen_proxy.operations WHERE action LIKE 'operator%' ORDER BY at";
    assert_eq!(
        plane.rows(metas).await,
        [r#"{"was": false, "is_operator": true}"#, r#"{"was": true, "is_operator": false}"#]
    );
}
