//! What people with bad intentions do to signing in and out, and what comes of it.

use crate::{
    login::{GET, PASSWORD, SECRET, cookie, post_form, sign_in, user, with, world},
    support::{Answer, Passage, World, eventually},
};
use futures_util::future::join_all;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A session of this user that ends at `exp`, as the proxy would make it.
fn token(user: Uuid, jti: &str, exp: u64) -> String {
    let claims = json!({"sub": user, "iss": "queen-proxy", "exp": exp, "jti": jti, "role": "viewer"});
    let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
    encode(&Header::new(Algorithm::HS256), &claims, &key).unwrap()
}

fn set_cookies(answer: &Answer) -> Vec<&str> {
    let set = answer.headers.iter().filter(|(name, _)| name == "set-cookie");
    set.map(|(_, value)| value.split('=').next().unwrap()).collect()
}

async fn log_out(world: &World, cookies: &str) -> Answer {
    world.ask("POST /auth/logout", &with("x", cookies, ""), "").await
}

async fn email(world: &World, cookies: &str, extra: &str) -> String {
    let me = world.ask("GET /auth/me", &with("x", cookies, extra), "").await;
    assert_eq!(me.status, 200, "{me:?}");
    assert_eq!(me.header("x-content-type-options"), Some("nosniff"));
    me.json()["email"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_a_session_ends_with_it_and_not_later() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let mint = async |token: &str| {
        let cookie = format!("queen_session={token}");
        world.ask("GET /auth/session-token", &with("x", &cookie, ""), "").await
    };
    let mut token_of_token = token(ann, "short", now() + 100);
    let mut rest = 100;
    for _ in 0..3 {
        let answer = mint(&token_of_token).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let expires_in = answer.json()["expires_in"].as_u64().unwrap();
        assert!((60..=rest).contains(&expires_in), "{expires_in}");
        rest = expires_in;
        token_of_token = answer.json()["token"].as_str().unwrap().to_owned();
    }
    let ended = mint(&token(ann, "ended", now() - 3)).await;
    assert_eq!((ended.status, ended.code()), (401, "unauthorized".to_owned()), "within the leeway");

    // Tokens, and ends of sessions, are limited per user; others have their own.
    let long = token(ann, "long", now() + 5_000);
    let mut refused = None;
    for _ in 0..60 {
        let answer = mint(&long).await;
        if answer.status != 200 {
            refused = Some(answer);
            break;
        }
        assert_eq!(answer.json()["expires_in"], 900);
    }
    let refused = refused.expect("no end of tokens");
    assert_eq!((refused.status, refused.code()), (429, "rate_limited".to_owned()));
    assert!(refused.header("retry-after").is_some());
    for n in 0..60 {
        let session = format!("queen_session={}", token(ann, &format!("out-{n}"), now() + 600));
        assert_eq!(log_out(&world, &session).await.status, 200, "{n}");
    }
    let answer = log_out(&world, &format!("queen_session={long}")).await;
    assert_eq!((answer.status, set_cookies(&answer).len()), (429, 0));
    let bob = user(&world, &acme, "bob@acme.example", Some(PASSWORD), "viewer").await;
    let his = token(bob, "his", now() + 600);
    assert_eq!(mint(&his).await.status, 200);
    assert_eq!(log_out(&world, &format!("queen_session={his}")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_user_cannot_lose_the_logouts_of_others_in_an_outage() {
    let world = world().proxies(2).relay().env("PXDB_TIMEOUT_MS", 300).start().await;
    let acme = world.tenant("acme").await;
    let eve = user(&world, &acme, "eve@acme.example", Some(PASSWORD), "viewer").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let ann = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let asked = async |proxy: usize, cookie: &str| {
        world.ask_proxy(proxy, GET, &with(&acme.host(), cookie, ""), "").await.status
    };
    assert_eq!((asked(0, &ann).await, asked(1, &ann).await), (200, 200));
    world.relay().set(Passage::Silent);
    let sessions: Vec<String> =
        (0..40).map(|n| format!("queen_session={}", token(eve, &format!("eve-{n}"), now() + 600))).collect();
    let answers = join_all(sessions.iter().map(|session| log_out(&world, session))).await;
    let (queued, lost): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    assert_eq!(queued.len(), 8, "her share");
    for answer in lost {
        assert_eq!((answer.status, answer.code()), (503, "unavailable".to_owned()));
        assert!(set_cookies(answer).is_empty(), "{answer:?}");
    }
    assert_eq!(log_out(&world, &ann).await.status, 200);
    for session in sessions.iter().chain([&ann]) {
        assert_eq!(asked(0, session).await, 401, "pinned here, whatever was answered");
    }
    world.relay().set(Passage::Open);
    eventually("all that was promised is in the table", Duration::from_secs(20), async || {
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM queen_proxy.revoked_tokens")
            .fetch_one(&mut world.control().await)
            .await
            .unwrap();
        (rows == 9).then_some(())
    })
    .await;
    eventually("the other proxy hears of it", Duration::from_secs(20), async || {
        (asked(1, &ann).await == 401).then_some(())
    })
    .await;
    // What others pushed is not held for longer than the token: its end is asked for.
    eventually("the ends of pushed revocations", Duration::from_secs(20), async || {
        let log = world.proxies[1].1.log();
        let learned = log.lines().any(|line| {
            line.contains("ends of revocations") && line.contains("known=") && !line.contains("known=0")
        });
        learned.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_origins_act_for_nobody() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "admin").await;
    let fields = [("email", "ann@acme.example"), ("password", PASSWORD)];
    let page = world.ask("GET /auth/login", "Host: x\r\n", "").await;
    // With no-referrer its own form would say `Origin: null`.
    assert_eq!(page.header("referrer-policy"), Some("same-origin"));
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    let session = cookie(&post_form(&world, "Origin: http://x\r\n", &fields).await);
    let push = async |origin: &str| {
        let headers = with(&acme.host(), &session, &format!("{origin}Content-Type: application/json\r\n"));
        world.ask("POST /api/v1/push", &headers, r#"{"items":[]}"#).await.status
    };
    assert_eq!(push("").await, 200);
    assert_eq!(push(&format!("Origin: https://{}\r\n", acme.host())).await, 200);
    for line in [
        "Origin: null\r\n",
        "Origin: https://evil.example\r\n",
        "Origin: http://globex.q.example\r\n",
        "Origin: http://x\r\nSec-Fetch-Site: same-site\r\n",
    ] {
        let answer = post_form(&world, line, &fields).await;
        assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()), "{line}");
        assert_eq!(push(line).await, 401, "{line}");
        for cookies in [session.as_str(), "a=b"] {
            let answer = world.ask("POST /auth/logout", &with("x", cookies, line), "").await;
            assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()), "{line}");
            assert!(set_cookies(&answer).is_empty(), "{answer:?}");
        }
    }
    assert_eq!(push("").await, 200, "nobody has ended the session");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cookie_set_by_a_neighbour_does_not_take_the_place_of_ones_own() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let eve = user(&world, &acme, "eve@acme.example", Some(PASSWORD), "viewer").await;
    let ann = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let eve = token(eve, "eve", now() + 600);
    let by_https = "X-Forwarded-Proto: https\r\n";
    let tossed = format!("queen_session_cell={eve}; {ann}");
    assert_eq!(email(&world, &tossed, by_https).await, "ann@acme.example");
    assert_eq!(email(&world, &tossed, "").await, "eve@acme.example", "by http anybody can be anybody");
    for junk in ["junk", "a.b.c", "qk_live_x", &token(Uuid::new_v4(), "old", now() - 600)] {
        for name in ["queen_session_cell", "__Host-queen_session_cell", "queen_session"] {
            let tossed = format!("{name}={junk}; {ann}");
            assert_eq!(email(&world, &tossed, "").await, "ann@acme.example", "{tossed}");
            let data = world.ask(GET, &with(&acme.host(), &tossed, ""), "").await;
            assert_eq!(data.status, 200, "{tossed}");
        }
    }
    // Who signs in is not somebody else on this cell.
    for (extra, cell) in [("", "queen_session_cell"), (by_https, "__Host-queen_session_cell")] {
        let fields = [("email", "ann@acme.example"), ("password", PASSWORD)];
        let answer = post_form(&world, extra, &fields).await;
        assert_eq!(set_cookies(&answer), ["queen_session", cell]);
    }
    // A logout ends all that were sent.
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await));
    }
    let all = format!("queen_session_cell={eve}; {}", sessions.join("; "));
    assert_eq!(log_out(&world, &all).await.status, 200);
    for session in sessions.iter().chain([&format!("queen_session={eve}")]) {
        assert_eq!(world.ask(GET, &with(&acme.host(), session, ""), "").await.status, 401, "{session}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_neither_locks_an_account_nor_fills_the_queue() {
    let world = world()
        .env("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 10)
        .env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let attempt = async |from: &str, email: &str, password: &str| {
        let from = format!("X-Forwarded-For: {from}\r\n");
        post_form(&world, &from, &[("email", email), ("password", password)]).await.status
    };
    for _ in 0..5 {
        assert_eq!(attempt("192.0.2.1", "ann@acme.example", "wrong").await, 401);
    }
    for _ in 0..5 {
        assert_eq!(attempt("192.0.2.1:4711", "ann@acme.example", "wrong").await, 429);
    }
    assert_eq!(attempt("192.0.2.1", "bob@acme.example", "wrong").await, 429, "nine and one");
    assert_eq!(attempt("198.51.100.1", "ann@acme.example", PASSWORD).await, 303, "the owner");

    // Of one address two wait at a time; what is not looked at is not counted.
    let emails: Vec<String> = (0..9).map(|n| format!("n{n}@acme.example")).collect();
    let answers = join_all(emails.iter().map(|email| attempt("192.0.2.2", email, "wrong"))).await;
    assert!(answers.iter().all(|status| [401, 503].contains(status)), "{answers:?}");
    assert!(answers.contains(&503), "nine at once");
    let checked = answers.iter().filter(|status| **status == 401).count();
    for n in checked..10 {
        assert_eq!(attempt("192.0.2.2", &format!("later-{n}@acme.example"), "wrong").await, 401);
    }
    assert_eq!(attempt("192.0.2.2", "last@acme.example", "wrong").await, 429);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_one_cluster_does_not_cost_a_look_at_all() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    world
        .sql(&format!(
            "INSERT INTO queen_proxy.clusters (tenant_id, cell_id, plan_id, slug)
             SELECT '{}', '{}', (SELECT id FROM queen_proxy.plans WHERE code = 'pro'), 'bulk-' || n
               FROM generate_series(1, 20000) n;
             ANALYZE queen_proxy.clusters",
            acme.tenant, world.cell_id
        ))
        .await;
    let query = include_str!("../../src/control/sql/account.sql");
    let query = query.replace("$1", &format!("'{ann}'")).replace("$2", "true");
    let plan: Vec<(String,)> =
        sqlx::query_as(sqlx::AssertSqlSafe(format!("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {query}")))
            .fetch_all(&mut world.control().await)
            .await
            .unwrap();
    let scans: Vec<&String> =
        plan.iter().map(|(line,)| line).filter(|line| line.contains("Seq Scan on clusters")).collect();
    assert!(scans.iter().all(|line| line.contains("never executed")), "{plan:#?}");
    let session = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let me = world.ask("GET /auth/me", &with("x", &session, ""), "").await.json();
    assert_eq!(me["clusters"].as_array().unwrap().len(), 1);
}
