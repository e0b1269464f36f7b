//! What a caller of the front door gets, from the host to the answer.

use crate::support::World;

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
