//! Signing in and out, and who one is.

use crate::support::{Answer, Passage, Tenant, World, WorldBuilder, eventually};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use std::{
    collections::HashSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use uuid::Uuid;

pub const SECRET: &str = "the signing secret of the login tests";
pub const PASSWORD: &str = "correct horse battery staple";
pub const GET: &str = "GET /api/v1/kv/ns/k";

pub fn world() -> WorldBuilder {
    World::builder()
        .recorder()
        .env("QUEEN_PROXY_JWT_SECRET", SECRET)
        .env("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 1_000)
}

/// A user of a tenant with a password, and a role on the tenant's cluster.
pub async fn user(world: &World, tenant: &Tenant, email: &str, password: Option<&str>, role: &str) -> Uuid {
    let mut control = world.control().await;
    let user = sqlx::query_scalar(
        "SELECT queen_proxy.create_user($1, $2, public.crypt($3, public.gen_salt('bf', 4)), 'local')",
    )
    .bind(tenant.tenant)
    .bind(email)
    .bind(password)
    .fetch_one(&mut control)
    .await
    .unwrap();
    sqlx::query("SELECT queen_proxy.grant_cluster_role($1, $2, $3)")
        .bind(tenant.cluster)
        .bind(email)
        .bind(role)
        .execute(&mut control)
        .await
        .unwrap();
    user
}

pub fn form(fields: &[(&str, &str)]) -> String {
    let mut form = url::form_urlencoded::Serializer::new(String::new());
    for (name, value) in fields {
        form.append_pair(name, value);
    }
    form.finish()
}

pub async fn post_form(world: &World, headers: &str, fields: &[(&str, &str)]) -> Answer {
    let headers = format!("Host: x\r\nContent-Type: application/x-www-form-urlencoded\r\n{headers}");
    world.ask("POST /auth/login", &headers, &form(fields)).await
}

pub async fn sign_in(world: &World, email: &str, password: &str) -> Answer {
    post_form(world, "", &[("email", email), ("password", password)]).await
}

/// `name=value` of the session cookie that an answer sets.
pub fn cookie(answer: &Answer) -> String {
    let line = answer.header("set-cookie").unwrap_or_else(|| panic!("no cookie: {answer:?}"));
    line.split(';').next().unwrap().to_owned()
}

pub fn with(host: &str, cookie: &str, extra: &str) -> String {
    format!("Host: {host}\r\nCookie: {cookie}\r\n{extra}")
}

/// An answer without what differs from one to the next.
fn text(answer: &Answer) -> String {
    let mut headers = answer.headers.clone();
    headers.retain(|(name, _)| !["x-queen-request-id", "date"].contains(&name.as_str()));
    format!("{} {headers:?} {}", answer.status, String::from_utf8_lossy(&answer.body))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_begins_with_a_password_and_ends_everywhere_with_a_logout() {
    let world = world().proxies(2).start().await;
    let acme = world.tenant("acme").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;

    let page = world.ask("GET /auth/login?next=/console", "Host: x\r\n", "").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(text(&page).contains(r#"name="next" value="/console""#));

    let answer = post_form(
        &world,
        "",
        &[("email", "ANN@acme.example"), ("password", PASSWORD), ("next", "/console?a=b")],
    )
    .await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/console?a=b")), "{answer:?}");
    let set = answer.header("set-cookie").unwrap();
    assert!(set.starts_with("queen_session=eyJ"), "the cookie's name is part of the contract");
    assert!(set.ends_with("; Path=/; HttpOnly; SameSite=Lax; Max-Age=86400"), "{set}");
    let session = cookie(&answer);
    let logins: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM queen_proxy.operations WHERE action = 'login' AND actor = 'user' AND actor_id = $1",
    )
    .bind(ann)
    .fetch_one(&mut world.control().await)
    .await
    .unwrap();
    assert_eq!(logins, 1);

    let asked = async |proxy: usize, cookie: &str| {
        world.ask_proxy(proxy, GET, &with(&acme.host(), cookie, ""), "").await.status
    };
    assert_eq!((asked(0, &session).await, asked(1, &session).await), (200, 200));
    let short = world.ask("GET /auth/session-token", &with("x", &session, ""), "").await;
    assert_eq!((short.status, &short.json()["expires_in"]), (200, &json!(900)));
    assert_eq!(short.header("cache-control"), Some("no-store"));
    let bearer = format!(
        "Host: {}\r\nAuthorization: Bearer {}\r\n",
        acme.host(),
        short.json()["token"].as_str().unwrap()
    );
    assert_eq!(world.ask(GET, &bearer, "").await.status, 200);

    // Another session of the same user stays.
    let other = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    // A page of another tenant under the same domain cannot end it.
    let foreign = with("x", &other, "Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: navigate\r\n");
    let answer = world.ask("POST /auth/logout", &foreign, "").await;
    assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()));
    assert!(answer.header("set-cookie").is_none(), "{answer:?}");
    let own = with("x", &session, "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: navigate\r\n");
    let out = world.ask("POST /auth/logout", &own, "").await;
    assert_eq!((out.status, out.json()), (200, json!({"ok": true})));
    let cleared: Vec<&str> = out
        .headers
        .iter()
        .filter(|(name, _)| name == "set-cookie")
        .map(|(_, value)| value.as_str())
        .collect();
    assert_eq!(cleared.len(), 2, "{cleared:?}");
    assert!(cleared.iter().all(|line| line.contains("=; ") && line.contains("Max-Age=0")), "{cleared:?}");
    assert!(cleared[0].starts_with("queen_session=") && cleared[1].starts_with("queen_session_cell="));

    assert_eq!(asked(0, &session).await, 401, "at once where it was");
    eventually("401 on the other proxy", Duration::from_secs(1), async || {
        (asked(1, &session).await == 401).then_some(())
    })
    .await;
    assert_eq!(world.ask("GET /auth/me", &with("x", &session, ""), "").await.status, 401);
    assert_eq!((asked(0, &other).await, asked(1, &other).await), (200, 200));
    // Without a session it is as well.
    assert_eq!(world.ask("POST /auth/logout", "Host: x\r\n", "").await.status, 200);
    assert_eq!(world.ask("POST /auth/logout", &with("x", &session, ""), "").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sign_in_tells_nothing() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    user(&world, &acme, "bob@acme.example", None, "viewer").await;
    let odd = user(&world, &acme, "odd@acme.example", None, "viewer").await;
    world.sql(&format!("UPDATE queen_proxy.users SET password_hash = 'x' WHERE id = '{odd}'")).await;
    let mut answers = HashSet::new();
    for (email, password) in [
        ("ann@acme.example", "wrong"),
        ("ann@acme.example", ""),
        ("ann@acme.example", &"x".repeat(200)),
        ("ann@acme.example", "correct horse battery staple\0"),
        (" ann@acme.example", PASSWORD),
        ("bob@acme.example", PASSWORD),
        ("bob@acme.example", ""),
        ("odd@acme.example", "x"),
        ("nobody@acme.example", PASSWORD),
        ("", ""),
        ("\0", PASSWORD),
        (&"x".repeat(5_000), PASSWORD),
    ] {
        let answer = sign_in(&world, email, password).await;
        assert_eq!(answer.status, 401, "{email} {password}");
        answers.insert(text(&answer));
    }
    answers.insert(text(&post_form(&world, "", &[]).await));
    assert_eq!(answers.len(), 1, "{answers:#?}");
    assert!(answers.iter().next().unwrap().contains("Invalid email or password."));

    // What is no form, and forms that are too large or on somebody else's page.
    let plain = world.ask("POST /auth/login", "Host: x\r\nContent-Type: text/plain\r\n", "email=a").await;
    assert_eq!((plain.status, plain.code()), (400, "invalid_request".to_owned()));
    let large = post_form(&world, "", &[("email", &"x".repeat(20_000))]).await;
    assert_eq!((large.status, large.code()), (413, "payload_too_large".to_owned()));
    for site in ["same-site", "cross-site"] {
        let fields = [("email", "ann@acme.example"), ("password", PASSWORD)];
        let answer = post_form(&world, &format!("Sec-Fetch-Site: {site}\r\n"), &fields).await;
        assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()), "{site}");
    }
    for (line, allow) in [("DELETE /auth/login", "GET, HEAD, POST"), ("GET /auth/logout", "POST")] {
        let answer = world.ask(line, "Host: x\r\n", "").await;
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allow)));
    }
    for (line, status, code) in [
        ("GET /auth/google", 404, "not_configured"),
        ("GET /auth/nothing", 404, "route_blocked"),
        ("GET /auth/login/", 404, "route_blocked"),
        ("GET /auth/me", 401, "unauthorized"),
        ("GET /auth/session-token", 401, "unauthorized"),
    ] {
        let answer = world.ask(line, &format!("Host: {}\r\n", acme.host()), "").await;
        assert_eq!((answer.status, answer.code()), (status, code.to_owned()), "{line}");
    }
    assert_eq!(sign_in(&world, "ann@acme.example", PASSWORD).await.status, 303);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_hash_and_of_password_signs_in() {
    let world = world().start().await;
    let acme = world.tenant("acme").await;
    let long = "pa\u{df}".repeat(18);
    let mut control = world.control().await;
    for (name, password) in [("ann", PASSWORD), ("ben", &long), ("cid", "caf\u{e9} \u{1f511}+&=%")] {
        for prefix in ["$2a$", "$2b$", "$2y$"] {
            let email = format!("{name}-{}@acme.example", &prefix[1..3]);
            let id = user(&world, &acme, &email, Some(password), "viewer").await;
            sqlx::query(
                "UPDATE queen_proxy.users SET password_hash = $2 || substr(password_hash, 5) WHERE id = $1",
            )
            .bind(id)
            .bind(prefix)
            .execute(&mut control)
            .await
            .unwrap();
            assert_eq!(sign_in(&world, &email, password).await.status, 303, "{email}");
            let longer = format!("{password} and more");
            let want = if name == "ben" { 303 } else { 401 };
            assert_eq!(sign_in(&world, &email, &longer).await.status, want, "{email}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guessing_is_throttled_per_account_and_per_address() {
    let world = world()
        .env("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 6)
        .env("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT", 3)
        .env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1, 10.0.0.0/8")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    user(&world, &acme, "bob@acme.example", Some(PASSWORD), "viewer").await;
    let attempt = async |from: &str, email: &str, password: &str| {
        let headers = format!("X-Forwarded-For: {from}\r\n");
        let answer = post_form(&world, &headers, &[("email", email), ("password", password)]).await;
        if answer.status == 429 {
            assert_eq!(answer.code(), "rate_limited");
            let wait: u32 = answer.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=60).contains(&wait), "{wait}");
        }
        answer.status
    };
    // Of an account, failures count, from wherever, and whether or not it exists.
    for email in ["ann@acme.example", "nobody@acme.example"] {
        for address in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
            assert_eq!(attempt(address, email, "wrong").await, 401, "{email} {address}");
        }
        assert_eq!(attempt("192.0.2.4", email, PASSWORD).await, 429, "{email}");
    }
    // Of an address, every attempt counts; who is in front of the last proxy we trust is the client.
    for from in ["198.51.100.1", "203.0.113.9, 198.51.100.1", "198.51.100.1, 10.1.2.3", "x, 198.51.100.1"] {
        assert_eq!(attempt(from, "bob@acme.example", PASSWORD).await, 303, "{from}");
    }
    for _ in 0..2 {
        assert_eq!(attempt("198.51.100.1,10.9.9.9", "bob@acme.example", PASSWORD).await, 303);
    }
    assert_eq!(attempt("198.51.100.1", "bob@acme.example", PASSWORD).await, 429);
    assert_eq!(attempt("198.51.100.2", "bob@acme.example", PASSWORD).await, 303);
    // One network of IPv6 is one address.
    for host in 1..=6 {
        assert_eq!(attempt(&format!("2001:db8::{host}"), "bob@acme.example", PASSWORD).await, 303);
    }
    assert_eq!(attempt("2001:db8::ffff", "bob@acme.example", PASSWORD).await, 429);
    assert_eq!(attempt("2001:db8:0:1::1", "bob@acme.example", PASSWORD).await, 303);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_believed_about_the_address_who_is_no_trusted_proxy() {
    let world = world().env("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 3).start().await;
    for n in 0..3 {
        let from = format!("X-Forwarded-For: 192.0.2.{n}\r\nX-Real-IP: 192.0.2.{n}\r\n");
        assert_eq!(post_form(&world, &from, &[("email", "a"), ("password", "b")]).await.status, 401);
    }
    let from = "X-Forwarded-For: 192.0.2.99\r\n";
    assert_eq!(post_form(&world, from, &[("email", "a"), ("password", "b")]).await.status, 429);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_sign_ins_is_cut_off_and_tenants_go_on() {
    let world = world()
        .env("QUEEN_PROXY_LOGIN_QUEUE", 2)
        .env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    assert_eq!(world.ask(GET, &acme.headers(), "").await.status, 200);
    let attempts = (0..60).map(|n| {
        let world = &world;
        let email = format!("nobody-{n}@acme.example");
        async move {
            let from = format!("X-Forwarded-For: 192.0.2.{n}\r\n");
            post_form(world, &from, &[("email", &email), ("password", "wrong")]).await
        }
    });
    let traffic = async {
        for _ in 0..100 {
            assert_eq!(world.ask(GET, &acme.headers(), "").await.status, 200);
        }
    };
    let (answers, ()) = tokio::join!(futures_util::future::join_all(attempts), traffic);
    let busy: Vec<&Answer> = answers.iter().filter(|answer| answer.status == 503).collect();
    assert!(answers.iter().all(|answer| [401, 503].contains(&answer.status)));
    assert!(!busy.is_empty(), "60 at once do not fit into a queue of 2");
    assert!(
        busy.iter().all(|answer| answer.code() == "unavailable" && answer.header("retry-after") == Some("1"))
    );
    assert!(answers.iter().any(|answer| answer.status == 401));
}

#[tokio::test(flavor = "multi_thread")]
async fn me_says_who_one_is_and_where_one_may_act() {
    let world = world()
        .env("QUEEN_PROXY_OPERATOR_ENABLED", true)
        .env("QUEEN_PROXY_SHARED_HOSTS", "shared.local")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "producer").await;
    let session = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let me = async |host: &str, extra: &str| {
        let answer = world.ask("GET /auth/me", &with(host, &session, extra), "").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    let one = json!({"id": acme.cluster, "slug": acme.slug});
    assert_eq!(
        me(&acme.host(), "").await,
        json!({
            "user_id": ann,
            "email": "ann@acme.example",
            "tenant_slug": "acme",
            "is_operator": false,
            "operator_enabled": true,
            "operator_live": false,
            "acting_cluster": one,
            "clusters": [{
                "id": acme.cluster, "slug": acme.slug, "role": "producer", "tenant_slug": "acme",
                "tenant_id": acme.tenant, "status": "active", "cell_slug": "cell",
            }],
            "act_cluster_header": "x-queen-act-cluster",
            "role": "producer",
            "cluster": null,
        })
    );
    for host in ["shared.local", "nobody.example", &globex.host()] {
        let me = me(host, "").await;
        assert_eq!((&me["acting_cluster"], &me["role"]), (&Value::Null, &Value::Null), "{host}");
        assert_eq!(me["clusters"].as_array().unwrap().len(), 1);
    }
    let act = |target: &str| format!("x-queen-act-cluster: {target}\r\n");
    assert_eq!(me("shared.local", &act(&acme.slug)).await["acting_cluster"], one);
    assert_eq!(me("shared.local", &act(&globex.slug)).await["acting_cluster"], Value::Null);
    // The cluster's own status, and clusters by tenant and slug.
    world.sql(&format!("SELECT queen_proxy.set_cluster_status('{}', 'suspended')", acme.cluster)).await;
    world
        .sql(&format!(
            "SELECT queen_proxy.grant_cluster_role('{}', 'ann@acme.example', 'viewer') FROM
             (SELECT queen_proxy.create_cluster('{}', 'acme-dev', 'pro', '{}') AS id) made WHERE false",
            acme.cluster, acme.tenant, world.cell_id
        ))
        .await;
    assert_eq!(me("shared.local", "").await["clusters"][0]["status"], "suspended");
    world.sql(&format!("SELECT queen_proxy.set_cluster_status('{}', 'active')", acme.cluster)).await;

    // A bearer is no cookie, and a key says what it is.
    let token = session.split_once('=').unwrap().1;
    let as_bearer = format!("Host: x\r\nAuthorization: Bearer {token}\r\n");
    assert_eq!(world.ask("GET /auth/me", &as_bearer, "").await.status, 401);
    let (key_id, key) = world.key(acme.cluster, &["produce", "read"]).await;
    let of_key = |host: &str| format!("Host: {host}\r\nAuthorization: Bearer {key}\r\n");
    for host in [acme.host(), "shared.local".to_owned()] {
        let answer = world.ask("GET /auth/me", &of_key(&host), "").await;
        assert_eq!(
            answer.json(),
            json!({
                "user_id": null, "email": null, "tenant_slug": null,
                "is_operator": false, "operator_enabled": true, "operator_live": false,
                "acting_cluster": one,
                "clusters": [{
                    "id": acme.cluster, "slug": acme.slug, "role": null, "tenant_slug": null,
                    "tenant_id": acme.tenant, "status": "active", "cell_slug": null,
                }],
                "act_cluster_header": "x-queen-act-cluster",
                "role": null,
                "cluster": acme.cluster,
                "principal": "api_key",
                "key_id": key_id,
                "scopes": {"produce": true, "consume": false, "admin": false, "read": true},
            })
        );
    }
    let mismatch = world.ask("GET /auth/me", &of_key(&globex.host()), "").await;
    assert_eq!((mismatch.status, mismatch.code()), (403, "forbidden".to_owned()));
    let unknown = "Host: shared.local\r\nAuthorization: Bearer qk_live_unknown\r\n";
    assert_eq!(world.ask("GET /auth/me", unknown, "").await.status, 401);

    // A live operator is admin of all.
    world.sql("SELECT queen_proxy.set_operator('ann@acme.example', true)").await;
    let all = eventually("the operator's view", Duration::from_secs(7), async || {
        let me = me(&globex.host(), "").await;
        (me["acting_cluster"]["id"] == json!(globex.cluster)).then_some(me)
    })
    .await;
    assert_eq!(
        (&all["is_operator"], &all["operator_live"], &all["role"]),
        (&json!(true), &json!(true), &json!("admin"))
    );
    let clusters: Vec<(&str, &str)> = all["clusters"]
        .as_array()
        .unwrap()
        .iter()
        .map(|cluster| (cluster["slug"].as_str().unwrap(), cluster["role"].as_str().unwrap()))
        .collect();
    assert_eq!(clusters, [(acme.slug.as_str(), "admin"), (globex.slug.as_str(), "admin")]);

    // The user's end is the session's.
    world.sql(&format!("DELETE FROM queen_proxy.users WHERE id = '{ann}'")).await;
    let gone = world.ask("GET /auth/me", &with("x", &session, ""), "").await;
    assert_eq!((gone.status, gone.code()), (401, "unauthorized".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_only_verifies_takes_sessions_over() {
    use ed25519_dalek::{
        SigningKey,
        pkcs8::{EncodePrivateKey, EncodePublicKey, spki::der::pem::LineEnding},
    };
    let key = SigningKey::from_bytes(&[7; 32]);
    let public = key.verifying_key().to_public_key_pem(LineEnding::LF).unwrap();
    let world = World::builder()
        .recorder()
        .env("QUEEN_PROXY_JWT_ED25519_PUB_PEM", public)
        .env("QUEEN_PROXY_AUTH_PORTAL_URL", "https://portal.example/sign-in")
        .env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let until = |user: Uuid, jti: &str, issuer: &str, exp: u64| {
        let claims = json!({"sub": user, "iss": issuer, "exp": exp, "jti": jti, "role": "viewer"});
        let key = EncodingKey::from_ed_der(key.to_pkcs8_der().unwrap().as_bytes());
        encode(&Header::new(Algorithm::EdDSA), &claims, &key).unwrap()
    };
    let token = |user: Uuid, jti: &str, issuer: &str| until(user, jti, issuer, now + 600);

    let page = text(&world.ask("GET /auth/login", "Host: x\r\n", "").await);
    assert!(page.contains("https://portal.example/sign-in") && !page.contains("<form"), "{page}");
    let answer = sign_in(&world, "ann@acme.example", PASSWORD).await;
    assert_eq!((answer.status, answer.code()), (503, "not_configured".to_owned()));

    let adopt = async |token: &str, next: &str, extra: &str| {
        let line = format!("GET /auth/session-token?{}", form(&[("token", token), ("next", next)]));
        let browser =
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n";
        world.ask(&line, &format!("Host: x\r\n{browser}{extra}"), "").await
    };
    let good = token(ann, "one", "queen-proxy");
    let answer = adopt(&good, "/console", "").await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/console")), "{answer:?}");
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
    assert!(answer.header("set-cookie").unwrap().starts_with("queen_session_cell=eyJ"));
    let max_age = answer.header("set-cookie").unwrap().split("Max-Age=").nth(1).unwrap();
    assert!((500..=600).contains(&max_age.parse().unwrap()), "{max_age}");
    assert_eq!(world.ask(GET, &with(&acme.host(), &cookie(&answer), ""), "").await.status, 200);
    let by_https = adopt(&good, "//evil.example", "X-Forwarded-Proto: https\r\n").await;
    assert_eq!(by_https.header("location"), Some("/"));
    let set = by_https.header("set-cookie").unwrap();
    assert!(set.starts_with("__Host-queen_session_cell=") && set.ends_with("; Secure"), "{set}");

    // A refusal is never a redirect, and nothing is minted here.
    let plain = cookie(&answer);
    for refused in [
        token(ann, "two", "somebody"),
        token(Uuid::new_v4(), "three", "queen-proxy"),
        until(ann, "four", "queen-proxy", now + 31 * 24 * 3600),
        until(ann, "five", "queen-proxy", u64::MAX),
        "x".to_owned(),
    ] {
        let answer = adopt(&refused, "/console", "").await;
        assert_eq!((answer.status, answer.code()), (401, "unauthorized".to_owned()));
        assert!(answer.header("set-cookie").is_none());
    }
    // Nobody but who goes to a page takes a session over, and never in the place of another user.
    let line = format!("GET /auth/session-token?{}", form(&[("token", &good)]));
    for browser in [
        "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: image\r\n",
        "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n",
        "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n",
        "Sec-Fetch-Mode: navigate\r\n",
    ] {
        let answer = world.ask(&line, &format!("Host: x\r\n{browser}"), "").await;
        assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()), "{browser}");
        assert!(answer.header("set-cookie").is_none());
    }
    assert_eq!(world.ask(&line, "Host: x\r\n", "").await.status, 303, "who says nothing is no such browser");
    let eve = user(&world, &acme, "eve@acme.example", Some(PASSWORD), "viewer").await;
    let hers = token(eve, "hers", "queen-proxy");
    for name in ["queen_session", "queen_session_cell"] {
        let answer = adopt(&hers, "/", &format!("Cookie: {name}={good}\r\n")).await;
        assert_eq!((answer.status, answer.code()), (403, "forbidden".to_owned()), "{name}");
        assert!(answer.header("set-cookie").is_none());
        let again = token(ann, "again", "queen-proxy");
        assert_eq!(adopt(&again, "/", &format!("Cookie: {name}={good}\r\n")).await.status, 303);
    }
    let mint = world.ask("GET /auth/session-token", &with("x", &plain, ""), "").await;
    assert_eq!((mint.status, mint.code()), (503, "not_configured".to_owned()));
    world.ask("POST /auth/logout", &with("x", &plain, ""), "").await;
    assert_eq!(adopt(&good, "/console", "").await.status, 401, "a session that has ended is not taken over");
    let after = adopt(&hers, "/", &format!("Cookie: {plain}\r\n")).await;
    assert_eq!(after.status, 303, "and stands in nobody's way");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_logout_during_an_outage_is_made_up_for() {
    let world = world().proxies(2).relay().env("PXDB_TIMEOUT_MS", 300).start().await;
    let acme = world.tenant("acme").await;
    user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let session = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let asked =
        async |proxy: usize| world.ask_proxy(proxy, GET, &with(&acme.host(), &session, ""), "").await.status;
    assert_eq!((asked(0).await, asked(1).await), (200, 200));
    world.relay().set(Passage::Silent);
    assert_eq!(sign_in(&world, "ann@acme.example", PASSWORD).await.status, 503);
    assert_eq!(world.ask("POST /auth/logout", &with("x", &session, ""), "").await.status, 200);
    assert_eq!(asked(0).await, 401);
    world.relay().set(Passage::Open);
    eventually("the other proxy hears of it", Duration::from_secs(20), async || {
        (asked(1).await == 401).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_revoked_unheard_is_refused_within_a_minute() {
    let world = world().proxies(2).start().await;
    let acme = world.tenant("acme").await;
    let ann = user(&world, &acme, "ann@acme.example", Some(PASSWORD), "viewer").await;
    let session = cookie(&sign_in(&world, "ann@acme.example", PASSWORD).await);
    let asked =
        async |proxy: usize| world.ask_proxy(proxy, GET, &with(&acme.host(), &session, ""), "").await.status;
    assert_eq!((asked(0).await, asked(1).await), (200, 200));
    let jti = {
        use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
        let claims = URL_SAFE_NO_PAD.decode(session.split('.').nth(1).unwrap()).unwrap();
        serde_json::from_slice::<Value>(&claims).unwrap()["jti"].as_str().unwrap().to_owned()
    };
    // Nobody may listen: every listener is cut off as soon as it is there.
    let mut control = world.control().await;
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let killer = async {
        while stopped.try_recv().is_err() {
            sqlx::query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE application_name = 'queen-proxy-listen' AND datname = current_database()",
            )
            .execute(&mut control)
            .await
            .unwrap();
        }
    };
    let revoked = async {
        world
            .sql(&format!(
                "SELECT queen_proxy.revoke_session('{jti}', now() + interval '1 day', 'user', '{ann}')"
            ))
            .await;
        for proxy in 0..2 {
            eventually("401 without a listener", Duration::from_secs(60), async || {
                (asked(proxy).await == 401).then_some(())
            })
            .await;
        }
        stop.send(()).unwrap();
    };
    tokio::join!(killer, revoked);
}
