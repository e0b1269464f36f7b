//! What a caller of the front door gets, from the host to the answer.

use crate::support::{Process, Socket, World, eventually, free_port};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_value_goes_in_and_comes_out_and_every_refusal_has_its_code() {
    let world = World::new().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let kv = "/api/v1/kv/ns/k";

    let put = world.ask(&format!("PUT {kv}"), &acme.headers(), r#"{"value":{"a":1},"forever":true}"#).await;
    assert_eq!((put.status, put.json()["applied"].clone()), (200, true.into()));
    let get = world.ask(&format!("GET {kv}"), &acme.headers(), "").await;
    assert_eq!(get.json()["value"]["a"], 1);

    let own_host = format!("Host: {}\r\n", acme.host());
    let foreign = format!("Host: {}\r\nAuthorization: Bearer {}\r\n", globex.host(), acme.key);
    let bogus = format!("{own_host}Authorization: Bearer qk_live_nobody\r\n");
    let session = format!("{own_host}Authorization: Bearer eyJhbGciOiJub25lIn0.e30.\r\n");
    let own = acme.headers();
    let cases: &[(&str, &str, u16, &str)] = &[
        ("GET /api/v1/kv/ns/k", &foreign, 403, "forbidden"),
        ("GET /api/v1/kv/ns/k", &own_host, 401, "unauthorized"),
        ("GET /api/v1/kv/ns/k", &bogus, 401, "unauthorized"),
        ("GET /api/v1/kv/ns/k", &session, 401, "unauthorized"),
        ("GET /api/v1/kv/ns/k", "Host: nobody.q.example\r\n", 421, "cluster_unknown"),
        ("GET /api/v1/system/maintenance", &own, 404, "route_blocked"),
        ("GET /metrics/prometheus", &own, 404, "route_blocked"),
        ("GET /", &own, 404, "route_blocked"),
        ("OPTIONS /api/v1/kv/ns/k", &own, 404, "route_blocked"),
        ("POST /api/v1/traces", &own, 404, "no such thing"), // pro has traces: the cell answers
    ];
    for (line, headers, status, code) in cases {
        let answer = world.ask(line, headers, "").await;
        assert_eq!(answer.status, *status, "{line} with {headers}");
        let id = answer.header("x-queen-request-id").expect("a request id");
        assert_eq!(uuid::Uuid::parse_str(id).unwrap().get_version_num(), 7);
        if *code != "no such thing" {
            assert_eq!(answer.code(), *code, "{line} with {headers}");
            assert!(answer.json()["error"].is_string());
            assert_eq!(answer.header("content-type"), Some("application/json"));
            assert!(!String::from_utf8(answer.body).unwrap().contains(": "), "compact");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_default_cluster_takes_the_hosts_that_name_none() {
    let world = World::builder().env("QUEEN_PROXY_DEFAULT_CLUSTER", "acme-prod").start().await;
    let acme = world.tenant("acme").await;
    let globex = world.tenant("globex").await;
    let get = "GET /api/v1/kv/ns/k";
    let ask = async |host: &str, key: &str| {
        let headers = format!("Host: {host}\r\nAuthorization: Bearer {key}\r\n");
        world.ask(get, &headers, "").await.status
    };
    for host in ["acme-prod", "nobody.q.example", "127.0.0.1", "[::1]:6711", "."] {
        assert_eq!(ask(host, &acme.key).await, 200, "{host}");
        assert_eq!(ask(host, &globex.key).await, 403, "{host}");
    }
    assert_eq!(ask("globex-prod.x", &globex.key).await, 200);
    assert_eq!(ask("globex-prod.x", &acme.key).await, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_control_plane_one_cell_is_served_and_only_to_those_told_to_be_insecure() {
    let world = World::builder().proxies(0).recorder().start().await;
    for (insecure, status) in [(true, 200), (false, 401)] {
        let port = free_port();
        let environment = [
            ("QUEEN_PROXY_BIND_ADDR", "127.0.0.1".to_owned()),
            ("QUEEN_PROXY_PORT", port.to_string()),
            ("QUEEN_PROXY_DEV_CELL_URL", format!("http://127.0.0.1:{}", world.cell_port)),
            ("QUEEN_PROXY_DEV_CELL_TOKEN", "token".to_owned()),
            ("QUEEN_PROXY_DEV_INSECURE", insecure.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value));
        let folder = tempfile::TempDir::new().unwrap();
        let binary = env!("CARGO_BIN_EXE_queen-proxy");
        let _proxy = Process::start("queen-proxy", binary, &["serve"], &environment, folder.path());
        eventually("the proxy listens", Duration::from_secs(20), async || {
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()
        })
        .await;
        for host in ["anything", "127.0.0.1:6711"] {
            let request = format!("GET /api/v1/kv/ns/k HTTP/1.1\r\nHost: {host}\r\n\r\n");
            assert_eq!(Socket::open(port).await.ask(request).await.status, status);
        }
    }
    let seen = world.recorder().take();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].all("authorization"), ["Bearer token"]);
    assert_eq!(seen[0].all("x-queen-tenant"), ["00000000-0000-0000-0000-000000000001"]);
}
