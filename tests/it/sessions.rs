//! People with sessions: tokens, revocation, roles, operators, acting on a cluster, shared hosts.

use crate::support::{Answer, Tenant, World, WorldBuilder, eventually};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

const SECRET: &str = "a secret of the tests, long enough for HS256";
const GET: &str = "GET /api/v1/kv/ns/k";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A world whose proxies take HS256 sessions.
fn world() -> WorldBuilder {
    World::builder().env("QUEEN_PROXY_JWT_SECRET", SECRET)
}

/// A user of a tenant and a token for them.
struct Someone {
    user: Uuid,
    email: String,
    jti: String,
    token: String,
}

fn token(user: Uuid, jti: &str, extra: &Value) -> String {
    let mut claims =
        json!({"sub": user, "iss": "queen-proxy", "exp": now() + 600, "jti": jti, "role": "viewer"});
    for (name, value) in extra.as_object().unwrap() {
        claims[name] = value.clone();
    }
    let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
    encode(&Header::new(Algorithm::HS256), &claims, &key).unwrap()
}

async fn someone(world: &World, tenant: &Tenant, name: &str, role: Option<&str>) -> Someone {
    let email = format!("{name}@{}.example", tenant.slug);
    let mut control = world.control().await;
    let user: Uuid = sqlx::query_scalar("SELECT queen_proxy.create_user($1, $2, NULL, 'local')")
        .bind(tenant.tenant)
        .bind(&email)
        .fetch_one(&mut control)
        .await
        .unwrap();
    if let Some(role) = role {
        sqlx::query("SELECT queen_proxy.grant_cluster_role($1, $2, $3)")
            .bind(tenant.cluster)
            .bind(&email)
            .bind(role)
            .execute(&mut control)
            .await
            .unwrap();
    }
    let jti = Uuid::new_v4().to_string();
    let token = token(user, &jti, &json!({}));
    Someone { user, email, jti, token }
}

fn bearer(host: &str, token: &str, extra: &str) -> String {
    format!("Host: {host}\r\nAuthorization: Bearer {token}\r\n{extra}")
}

fn outcome(answer: &Answer) -> (u16, String) {
    (answer.status, if answer.status == 200 { String::new() } else { answer.code() })
}

async fn ask(world: &World, line: &str, headers: &str) -> (u16, String) {
    outcome(&world.ask(line, headers, "").await)
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_opens_what_the_matrix_says_and_ends_with_its_grant() {
    let world = world().recorder().start().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let routes = [
        ("POST /api/v1/push", "admin producer"),
        ("GET /api/v1/pop/queue/q", "admin consumer"),
        ("POST /api/v1/configure", "admin"),
        ("GET /api/v1/resources/queues", "admin producer consumer viewer"),
        (GET, "admin producer consumer viewer"),
        ("PUT /api/v1/kv/ns/k", "admin producer consumer"),
        ("GET /api/v1/status", ""),
    ];
    for role in ["admin", "producer", "consumer", "viewer"] {
        let person = someone(&world, &acme, role, Some(role)).await;
        for (line, roles) in routes {
            let want = match (line, roles.split(' ').any(|r| r == role)) {
                ("GET /api/v1/status", _) => refused(404, "route_blocked"),
                (_, true) => (200, String::new()),
                (_, false) => refused(403, "forbidden"),
            };
            assert_eq!(
                ask(&world, line, &bearer(&acme.host(), &person.token, "")).await,
                want,
                "{role} {line}"
            );
        }
        // Elsewhere they are nobody.
        let foreign = ask(&world, GET, &bearer(&globex.host(), &person.token, "")).await;
        assert_eq!(foreign, refused(403, "forbidden"));
        // The cookie is as good as the header, except on a navigation; a key in it is nothing.
        let cookie = |name: &str, value: &str, extra: &str| {
            format!("Host: {}\r\nCookie: a=b\r\nCookie: {name}={value}\r\n{extra}", acme.host())
        };
        assert_eq!(ask(&world, GET, &cookie("queen_session", &person.token, "")).await.0, 200);
        let navigated = cookie("queen_session", &person.token, "Sec-Fetch-Mode: navigate\r\n");
        assert_eq!(ask(&world, GET, &navigated).await, refused(401, "unauthorized"));
        assert_eq!(ask(&world, GET, &cookie("queen_session", &acme.key, "")).await.0, 401);

        world
            .sql(&format!("SELECT queen_proxy.revoke_cluster_role('{}', '{}')", acme.cluster, person.email))
            .await;
        eventually("the role's end", Duration::from_secs(1), async || {
            let got = ask(&world, GET, &bearer(&acme.host(), &person.token, "")).await;
            (got == refused(403, "forbidden")).then_some(())
        })
        .await;
    }
    // A page of another tenant under the same domain does not act for them.
    let person = someone(&world, &acme, "ann", Some("viewer")).await;
    let from = |site: &str| {
        format!(
            "Host: {}\r\nCookie: queen_session={}\r\nSec-Fetch-Site: {site}\r\n",
            acme.host(),
            person.token
        )
    };
    assert_eq!(ask(&world, GET, &from("same-origin")).await.0, 200);
    assert_eq!(ask(&world, GET, &from("same-site")).await.0, 401);
    let gone = token(Uuid::new_v4(), "gone", &json!({}));
    let answer = world.ask(GET, &bearer(&acme.host(), &gone, ""), "").await;
    assert_eq!((answer.status, answer.json()["error"].clone()), (401, "session no longer valid".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_are_not_ours_are_one_cheap_401() {
    let world = world().env("QUEEN_PROXY_JWT_AUD", "acme.example").start().await;
    let acme = world.tenant("acme").await;
    let person = someone(&world, &acme, "ann", Some("admin")).await;
    let of = |extra: Value| token(person.user, &person.jti, &extra);
    assert_eq!(
        ask(&world, GET, &bearer(&acme.host(), &of(json!({"aud": ["x", "Acme.Example"]})), "")).await.0,
        200
    );
    let claims: Vec<&str> = person.token.split('.').collect();
    let bad = [
        of(json!({"iss": "someone"})),
        of(json!({"exp": now() - 60})),
        of(json!({"exp": (now() + 60).to_string()})),
        of(json!({"exp": null})),
        of(json!({"aud": "other"})),
        of(json!({"role": "owner"})),
        of(json!({"cluster": "not a uuid"})),
        // {"alg":"none"}
        format!("eyJhbGciOiJub25lIn0.{}.", claims[1]),
        format!("{}.{}.", claims[0], claims[1]),
        format!("{}x", person.token),
        "x".repeat(20_000),
    ];
    let mut bodies = std::collections::HashSet::new();
    for token in &bad {
        let answer = world.ask(GET, &bearer(&acme.host(), token, ""), "").await;
        assert_eq!(outcome(&answer), refused(401, "unauthorized"), "{}", &token[..60.min(token.len())]);
        bodies.insert(answer.body);
    }
    assert_eq!(bodies.len(), 1, "one answer for every cause");
    assert_eq!(ask(&world, GET, &bearer(&acme.host(), &person.token, "")).await.0, 200);
    let jwks = world.ask("GET /.well-known/jwks.json", "Host: any\r\n", "").await;
    assert_eq!(jwks.json(), json!({"keys": []}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_session_is_refused_by_every_proxy_at_once_and_until_its_end() {
    let mut world = world().proxies(2).start().await;
    let acme = world.tenant("acme").await;
    let mut slowest = Duration::ZERO;
    for round in 0..10 {
        let person = someone(&world, &acme, &format!("user{round}"), Some("admin")).await;
        let headers = bearer(&acme.host(), &person.token, "");
        for proxy in 0..2 {
            assert_eq!(world.ask_proxy(proxy, GET, &headers, "").await.status, 200);
        }
        let revoke = format!(
            "SELECT queen_proxy.revoke_session('{}', now() + interval '10 minutes', 'user', '{}')",
            person.jti, person.user
        );
        world.sql(&revoke).await;
        let revoked = Instant::now();
        for proxy in 0..2 {
            eventually("the revocation", Duration::from_secs(1), async || {
                let answer = world.ask_proxy(proxy, GET, &headers, "").await;
                (outcome(&answer) == refused(401, "unauthorized")).then_some(())
            })
            .await;
        }
        slowest = slowest.max(revoked.elapsed());
        if round == 0 {
            // A proxy that was not there to hear it asks the table, and remembers it through an outage.
            let late = world.add_proxy();
            world.wait_for_proxy(late).await;
            assert_eq!(world.ask_proxy(late, GET, &headers, "").await.status, 401);
        }
    }
    println!("a revoked session on two proxies: {slowest:?} at most in 10 rounds");
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_deny_list_is_silent_strict_proxies_refuse_and_others_go_on() {
    for (strict, status) in [(true, 401), (false, 200)] {
        let world = world()
            .own_control_postgres()
            .env("QUEEN_PROXY_REVOCATION_STRICT", strict)
            .env("PXDB_TIMEOUT_MS", 1000)
            .start()
            .await;
        let acme = world.tenant("acme").await;
        let person = someone(&world, &acme, "ann", Some("admin")).await;
        let headers = bearer(&acme.host(), &person.token, "");
        assert_eq!(ask(&world, GET, &headers).await.0, 200);
        assert_eq!(ask(&world, GET, &acme.headers()).await.0, 200);
        world.control_server.stop();
        if strict {
            // At once, that is as soon as the proxy sees that it hears no revocations any more.
            eventually("strict", Duration::from_secs(1), async || {
                (ask(&world, GET, &headers).await.0 == status).then_some(())
            })
            .await;
        }
        for _ in 0..3 {
            assert_eq!(ask(&world, GET, &headers).await.0, status, "strict: {strict}");
        }
        // Keys do not depend on it.
        assert_eq!(ask(&world, GET, &acme.headers()).await.0, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acting_on_a_cluster_tells_nobody_what_exists() {
    let world = world().recorder().env("QUEEN_PROXY_OPERATOR_ENABLED", true).start().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let person = someone(&world, &acme, "ann", Some("producer")).await;
    let act = |token: &str, host: &str, target: &str| {
        bearer(host, token, &format!("x-queen-act-cluster: {target}\r\n"))
    };
    // One's own, by slug and by id, whatever the host says.
    for target in
        [acme.slug.clone(), acme.cluster.to_string(), acme.slug.to_uppercase(), format!(" {} ", acme.slug)]
    {
        for host in [acme.host(), globex.host(), "nobody.example".to_owned()] {
            assert_eq!(
                ask(&world, "POST /api/v1/push", &act(&person.token, &host, &target)).await.0,
                200,
                "{target} {host}"
            );
        }
    }
    assert_eq!(
        ask(&world, "POST /api/v1/configure", &act(&person.token, "x", &acme.slug)).await,
        refused(403, "forbidden")
    );
    // What is not there and what is not theirs: the same bytes, but for the request id.
    let mut bodies = std::collections::HashSet::new();
    for target in [
        globex.slug.clone(),
        globex.cluster.to_string(),
        "nobody".to_owned(),
        Uuid::new_v4().to_string(),
        "!".to_owned(),
        String::new(),
    ] {
        let answer = world.ask(GET, &act(&person.token, &acme.host(), &target), "").await;
        assert_eq!(outcome(&answer), refused(403, "forbidden"), "{target}");
        let mut headers = answer.headers;
        headers.retain(|(name, _)| !["x-queen-request-id", "date"].contains(&name.as_str()));
        bodies.insert((format!("{headers:?}"), answer.body));
    }
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    // Two names are none.
    let twice = act(&person.token, "x", &format!("{}\r\nx-queen-act-cluster: {}", acme.slug, acme.slug));
    assert_eq!(ask(&world, GET, &twice).await, refused(403, "forbidden"));
    // Who is nobody hears 401 before anything is looked up.
    for target in [&acme.slug, "nobody"] {
        let anonymous = format!("Host: {}\r\nx-queen-act-cluster: {target}\r\n", acme.host());
        assert_eq!(ask(&world, GET, &anonymous).await, refused(401, "unauthorized"));
        assert_eq!(
            ask(&world, GET, &act("qk_live_unknown", &acme.host(), target)).await,
            refused(401, "unauthorized")
        );
        assert_eq!(ask(&world, GET, &act(&acme.key, &acme.host(), target)).await, refused(403, "forbidden"));
    }
    // A token for one cluster acts on no other.
    let claimed = token(person.user, "claimed", &json!({"cluster": acme.cluster, "role": "admin"}));
    assert_eq!(ask(&world, GET, &act(&claimed, "x", &acme.slug)).await.0, 200);
    assert_eq!(
        ask(&world, "POST /api/v1/configure", &bearer(&acme.host(), &claimed, "")).await.0,
        403,
        "its role is not believed"
    );
    let elsewhere = token(person.user, "elsewhere", &json!({"cluster": globex.cluster}));
    assert_eq!(ask(&world, GET, &bearer(&acme.host(), &elsewhere, "")).await, refused(403, "forbidden"));
    assert_eq!(ask(&world, GET, &act(&elsewhere, "x", &acme.slug)).await, refused(403, "forbidden"));

    // An operator is admin everywhere and the only one on the operator's routes.
    let operator = someone(&world, &acme, "op", None).await;
    world.sql(&format!("SELECT queen_proxy.set_operator('{}', true)", operator.email)).await;
    for line in ["GET /api/v1/status", "POST /api/v1/configure", "POST /api/v1/system/maintenance"] {
        for tenant in [&acme, &globex] {
            assert_eq!(
                ask(&world, line, &bearer(&tenant.host(), &operator.token, "")).await.0,
                200,
                "{line}"
            );
            assert_eq!(ask(&world, line, &act(&operator.token, "x", &tenant.slug)).await.0, 200, "{line}");
        }
    }
    assert_eq!(ask(&world, GET, &act(&operator.token, "x", "nobody")).await, refused(403, "forbidden"));
    let admin = someone(&world, &acme, "admin", Some("admin")).await;
    for headers in [
        bearer(&acme.host(), &admin.token, ""),
        bearer(&acme.host(), "not.a.token", ""),
        acme.headers(),
        format!("Host: {}\r\n", acme.host()),
        act(&admin.token, "x", &acme.slug),
    ] {
        assert_eq!(
            ask(&world, "GET /api/v1/status", &headers).await,
            refused(404, "route_blocked"),
            "{headers}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_is_nobody_where_operators_are_off() {
    let world = world().recorder().start().await;
    let acme = world.tenant("acme").await;
    let operator = someone(&world, &acme, "op", None).await;
    world.sql(&format!("SELECT queen_proxy.set_operator('{}', true)", operator.email)).await;
    let own = bearer(&acme.host(), &operator.token, "");
    assert_eq!(ask(&world, "GET /api/v1/status", &own).await, refused(404, "route_blocked"));
    assert_eq!(ask(&world, GET, &own).await, refused(403, "forbidden"));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_shared_host_the_credential_names_the_cluster() {
    let world = world()
        .recorder()
        .env("QUEEN_PROXY_OPERATOR_ENABLED", true)
        .env("QUEEN_PROXY_SHARED_HOSTS", "Shared.local:6711, other.local.")
        .start()
        .await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let uuid_of = async |tenant: &Tenant| -> String {
        sqlx::query_scalar("SELECT broker_tenant_uuid::text FROM queen_proxy.clusters WHERE id = $1")
            .bind(tenant.cluster)
            .fetch_one(&mut world.control().await)
            .await
            .unwrap()
    };
    for host in ["shared.local", "SHARED.local:80", "shared.local.", "other.local"] {
        for tenant in [&acme, &globex] {
            assert_eq!(ask(&world, GET, &bearer(host, &tenant.key, "")).await.0, 200, "{host}");
            let seen = world.recorder().take().pop().unwrap();
            assert_eq!(seen.all("x-queen-tenant"), [uuid_of(tenant).await]);
        }
        // Nobody: 401, never 421 or 403.
        for credential in ["", "Authorization: Bearer qk_live_x\r\n", "Authorization: Bearer junk\r\n"] {
            let got = ask(&world, GET, &format!("Host: {host}\r\n{credential}")).await;
            assert_eq!(got, refused(401, "unauthorized"), "{host} {credential}");
        }
        assert_eq!(ask(&world, "GET /api/v1/system/x", &format!("Host: {host}\r\n")).await.0, 404);
    }
    let act = |token: &str, target: &str| {
        bearer("shared.local", token, &format!("x-queen-act-cluster: {target}\r\n"))
    };
    assert_eq!(ask(&world, GET, &act(&acme.key, &acme.slug)).await, refused(403, "forbidden"));
    let person = someone(&world, &acme, "ann", Some("viewer")).await;
    assert_eq!(ask(&world, GET, &act(&person.token, &acme.slug)).await.0, 200);
    let foreign = world.ask(GET, &act(&person.token, &globex.slug), "").await;
    let nobody = world.ask(GET, &act(&person.token, "nobody"), "").await;
    assert_eq!((foreign.status, &foreign.body), (403, &nobody.body));
    let none = world.ask(GET, &bearer("shared.local", &person.token, ""), "").await;
    assert!(none.status == 403 && none.json()["error"].as_str().unwrap().contains("x-queen-act-cluster"));
    let claimed = token(person.user, "claimed", &json!({"cluster": acme.cluster}));
    assert_eq!(ask(&world, GET, &bearer("shared.local", &claimed, "")).await.0, 200);
    // The listener is shielded: other hosts tell a stranger nothing, and the owner as before.
    assert_eq!(ask(&world, GET, "Host: nobody.local\r\n").await, refused(401, "unauthorized"));
    assert_eq!(
        ask(&world, GET, &bearer("nobody.local", "qk_live_x", "")).await,
        refused(401, "unauthorized")
    );
    assert_eq!(
        ask(&world, GET, &bearer("nobody.local", &acme.key, "")).await,
        refused(421, "cluster_unknown")
    );
    assert_eq!(ask(&world, GET, &acme.headers()).await.0, 200);
    assert_eq!(ask(&world, GET, &bearer(&acme.host(), &globex.key, "")).await, refused(403, "forbidden"));
    // Not by the operator's routes either, and there nobody but a live operator gets anything but 404.
    let nobody =
        ["", "Authorization: Bearer qk_live_x\r\n", &format!("Authorization: Bearer {}\r\n", acme.key)];
    for credential in nobody {
        for host in [acme.host(), "nobody.local".to_owned(), "shared.local".to_owned()] {
            let got = ask(&world, "GET /api/v1/status", &format!("Host: {host}\r\n{credential}")).await;
            assert_eq!(got, refused(404, "route_blocked"), "{host} {credential}");
        }
    }
    let health = world.ask("GET /healthz", "Host: x\r\n", "").await;
    assert_eq!(health.json()["shared_hosts"], 2);
}
