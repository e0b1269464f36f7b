//! One tenant cannot see, touch or imitate another, in either direction.

use crate::support::{Tenant, World};
use serde_json::json;

const PATH: &str = "/api/v1/kv/shared/name";

async fn value(world: &World, tenant: &Tenant, extra: &str) -> serde_json::Value {
    let answer = world.ask(&format!("GET {PATH}"), &format!("{}{extra}", tenant.headers()), "").await;
    assert_eq!(answer.status, 200, "{extra}");
    answer.json()["value"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_share_names_and_nothing_else() {
    let world = World::new().await;
    let tenants = [world.tenant("acme").await, world.tenant("globex").await];
    for tenant in &tenants {
        let body = json!({"value": tenant.slug, "forever": true}).to_string();
        let put = world.ask(&format!("PUT {PATH}"), &tenant.headers(), &body).await;
        assert_eq!(put.json()["applied"], true);
    }
    let uuid_of = async |tenant: &Tenant| -> String {
        sqlx::query_scalar("SELECT broker_tenant_uuid::text FROM queen_proxy.clusters WHERE id = $1")
            .bind(tenant.cluster)
            .fetch_one(&mut world.control().await)
            .await
            .unwrap()
    };
    for (own, other) in [(&tenants[0], &tenants[1]), (&tenants[1], &tenants[0])] {
        let foreign = uuid_of(other).await;
        // Whatever the client says about the tenant, the cell hears ours.
        let forgeries = [
            String::new(),
            format!("x-queen-tenant: {foreign}\r\n"),
            format!("X_Queen_Tenant: {foreign}\r\n"),
            format!("x-queen-tenant: {foreign}\r\nx-queen-tenant: {foreign}\r\n"),
            format!("Connection: x-queen-tenant\r\nx-queen-tenant: {foreign}\r\n"),
            "Connection: close, x-queen-tenant, authorization\r\n".to_owned(),
            format!("Cookie: queen_session={}; x-queen-tenant={foreign}\r\n", other.key),
            format!("X-Forwarded-Host: {}\r\nForwarded: host={}\r\n", other.host(), other.host()),
        ];
        for forgery in &forgeries {
            assert_eq!(value(&world, own, forgery).await, own.slug.as_str(), "{forgery}");
        }
        // The other's key opens nothing here, and says so in the same words whatever it is for.
        for line in [format!("GET {PATH}"), format!("DELETE {PATH}"), "POST /api/v1/push".to_owned()] {
            let headers = format!("Host: {}\r\nAuthorization: Bearer {}\r\n", own.host(), other.key);
            let answer = world.ask(&line, &headers, "").await;
            assert_eq!((answer.status, answer.code().as_str()), (403, "forbidden"), "{line}");
        }
        // A key is never pointed at another cluster, not even at its own by that way.
        for target in [&other.slug, &own.slug, "nobody", &other.cluster.to_string()] {
            let acting = format!("{}x-queen-act-cluster: {target}\r\n", own.headers());
            let answer = world.ask(&format!("GET {PATH}"), &acting, "").await;
            assert_eq!((answer.status, answer.code().as_str()), (403, "forbidden"), "{target}");
        }
        // Deleting one's own leaves the other's.
        let deleted = world.ask(&format!("DELETE {PATH}"), &own.headers(), "").await;
        assert_eq!(deleted.json()["applied"], true);
        assert_eq!(value(&world, other, "").await, other.slug.as_str());
        let body = json!({"value": own.slug, "forever": true}).to_string();
        world.ask(&format!("PUT {PATH}"), &own.headers(), &body).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cell_lets_nobody_in_but_the_proxy() {
    let world = World::new().await;
    let acme = world.tenant("acme").await;
    let mut straight = crate::support::Socket::open(world.cell_port).await;
    for credential in
        ["", "Authorization: Bearer wrong\r\n", &format!("Authorization: Bearer {}\r\n", acme.key)]
    {
        let answer = straight.ask(format!("GET {PATH} HTTP/1.1\r\nHost: cell\r\n{credential}\r\n")).await;
        assert_eq!(answer.status, 401, "{credential}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_reaches_the_cell_is_the_proxys_own() {
    let world = World::builder().recorder().start().await;
    let acme = world.tenant("acme").await;
    let own_uuid: String =
        sqlx::query_scalar("SELECT broker_tenant_uuid::text FROM queen_proxy.clusters WHERE id = $1")
            .bind(acme.cluster)
            .fetch_one(&mut world.control().await)
            .await
            .unwrap();
    let hostile = "\
        Cookie: queen_session=abc\r\nCookie: other=1\r\n\
        x-queen-tenant: 11111111-1111-1111-1111-111111111111\r\nX_QUEEN_TENANT: evil\r\n\
        x-queen-request-id: forged\r\nx-queen-whatever: 1\r\n\
        Forwarded: for=1.2.3.4\r\nX-Forwarded-For: 1.2.3.4\r\nX_Forwarded_For: 1.2.3.4\r\n\
        X-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\nX-Forwarded-Prefix: /x\r\n\
        X-Real-IP: 1.2.3.4\r\n\
        Connection: close, x-queen-tenant, authorization, x-mine\r\nx-mine: dropped\r\n\
        Keep-Alive: timeout=5\r\nTE: trailers\r\nProxy-Authorization: Basic x\r\nProxy-Connection: keep-alive\r\n\
        x-kept: yes\r\ncontent-type: application/json\r\naccept-encoding: gzip\r\n";
    let answer =
        world.ask("PUT /api/v1/kv/ns/a%2Fb//c?", &format!("{}{hostile}", acme.headers()), "{}").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-queen-tenant"), None, "what the cell says to us stays with us");
    let id = answer.header("x-queen-request-id").unwrap().to_owned();
    let seen = world.recorder().take().pop().unwrap();
    assert_eq!(seen.line, "PUT /api/v1/kv/ns/a%2Fb//c?");
    assert_eq!(seen.all("host"), [format!("127.0.0.1:{}", world.cell_port)]);
    assert_eq!(seen.all("authorization"), [format!("Bearer {}", world.cell_secret)]);
    assert_eq!(seen.all("x-queen-tenant"), [own_uuid.as_str()]);
    assert_eq!(seen.all("x-queen-request-id"), [id.as_str()]);
    assert_ne!(id, "from-the-cell", "the client sees ours, not the cell's");
    assert_eq!(seen.all("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen.all("x-forwarded-proto"), ["http"]);
    assert_eq!(seen.all("x-forwarded-host"), [acme.host()]);
    assert_eq!(seen.all("x-kept"), ["yes"]);
    assert_eq!(seen.all("content-type"), ["application/json"]);
    assert_eq!(seen.body, b"{}");
    for gone in [
        "cookie",
        "forwarded",
        "x-real-ip",
        "x-queen-act-cluster",
        "x-queen-whatever",
        "x_queen_tenant",
        "x_forwarded_for",
        "x-forwarded-prefix",
        "x-mine",
        "te",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "transfer-encoding",
    ] {
        assert_eq!(seen.all(gone), [""; 0], "{gone}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_proxy_in_front_is_believed() {
    let world =
        World::builder().recorder().env("QUEEN_PROXY_TRUSTED_PROXIES", "10.0.0.0/8, 127.0.0.1").start().await;
    let acme = world.tenant("acme").await;
    let said = "X-Forwarded-For: 203.0.113.7, 10.1.1.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: public.example\r\n";
    world.ask("GET /api/v1/kv/ns/k", &format!("{}{said}", acme.headers()), "").await;
    let seen = world.recorder().take().pop().unwrap();
    assert_eq!(seen.all("x-forwarded-for"), ["203.0.113.7, 10.1.1.1, 127.0.0.1"]);
    assert_eq!(seen.all("x-forwarded-proto"), ["https"]);
    assert_eq!(seen.all("x-forwarded-host"), ["public.example"]);
}
