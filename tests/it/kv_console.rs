//! What a console shows of the key/value store: KV contract section 4, vectors 27 and 31.

use crate::kv_vectors::{Store, get, merge, of_rows, op, put, results, text, unlimited};
use crate::support::Answer;
use serde_json::{Value, json};

async fn list(store: &Store, body: &Value) -> Value {
    let answer = store.ask("POST /api/v1/resources/kv/list", &body.to_string()).await;
    assert_eq!(answer.status, 200, "{body}: {}", text(&answer));
    answer.json()
}

async fn namespaces(store: &Store) -> Value {
    let answer = store.ask("GET /api/v1/resources/kv/namespaces", "").await;
    assert_eq!(answer.status, 200, "{}", text(&answer));
    answer.json()
}

fn in_namespace(namespace: &str, mut operation: Value) -> Value {
    merge(&mut operation, json!({"ns": namespace}));
    operation
}

/// Vector 31.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_key_is_counted_and_listed_only_when_asked_for() {
    let store = Store::open().await;
    assert_eq!(namespaces(&store).await, json!({"namespaces": []}));
    assert_eq!(
        list(&store, &json!({"namespace": "nothing"})).await,
        json!({"rows": [], "truncated": false, "nextAfter": null, "bytes": 0})
    );
    let written = store
        .batch(json!([
            op("put", "dead", json!({"value": [1, "é"], "ttlSeconds": 60})),
            put("live", json!({"a": 1.50}), json!({})),
            in_namespace("a.first", put("k", json!(null), json!({}))),
        ]))
        .await;
    let _keeper = store.expire("dead").await;
    assert_eq!(
        namespaces(&store).await,
        json!({"namespaces": [{"namespace": "a.first", "keys": 1}, {"namespace": "ns", "keys": 2}]})
    );

    let live = list(&store, &json!({"namespace": "ns"})).await;
    let row = &live["rows"][0];
    assert_eq!(
        live,
        json!({
            "rows": [{"key": "live", "value": {"a": 1.5}, "version": written[1]["version"], "expiresAt": null,
                      "updatedAt": row["updatedAt"], "expired": false}],
            "truncated": false, "nextAfter": null, "bytes": 10,
        })
    );
    let whole = list(&store, &json!({"namespace": "ns", "includeExpired": true})).await;
    assert_eq!(of_rows(&whole, "key"), [json!("dead"), json!("live")]);
    assert_eq!(of_rows(&whole, "expired"), [json!(true), json!(false)]);
    assert_eq!(of_rows(&whole, "value"), [json!([1, "é"]), json!({"a": 1.5})]);
    assert_eq!(whole["bytes"], 10 + "[1, \"é\"]".len());
    // One shape of time, whatever the fraction: six digits and a literal Z.
    for time in [&whole["rows"][0]["expiresAt"], &whole["rows"][0]["updatedAt"], &row["updatedAt"]] {
        let time = time.as_str().unwrap();
        let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
        assert_eq!(shape, "9999-99-99T99:99:99.999999Z", "{time}");
    }
    assert!(of_rows(&whole, "expiresAt")[1].is_null());

    let bare = list(&store, &json!({"namespace": "ns", "includeExpired": true, "keysOnly": true})).await;
    assert_eq!((bare["rows"].as_array().unwrap().len(), &bare["bytes"]), (2, &json!(0)));
    assert!(of_rows(&bare, "value").iter().all(Value::is_null) && bare["rows"][0].get("value").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_is_listed_page_by_page_in_byte_order() {
    let store = Store::open().await;
    let mut keys: Vec<String> = (0..1195).map(|n| format!("k{n:04}")).collect();
    keys.extend(["Z", "a%b", "axb", "é", "\u{10ffff}"].map(str::to_owned));
    keys.sort();
    for some in keys.chunks(240) {
        store.batch(some.iter().map(|key| put(key, json!(1), json!({}))).collect()).await;
    }
    let of = |from: &str, count: usize| -> Vec<Value> {
        let start = keys.partition_point(|key| key.as_str() < from);
        keys[start..start + count].iter().map(|key| json!(key)).collect()
    };
    // body beside the namespace, keys, whether more follow
    let cases = [
        (json!({}), of("", 100), true),
        (json!({"prefix": "", "after": ""}), of("", 100), true),
        (json!({"limit": 5000}), of("", 1000), true),
        (json!({"limit": 9_999_999_999_i64}), of("", 1000), true),
        (json!({"limit": 0}), of("", 1), true),
        (json!({"limit": -7}), of("", 1), true),
        (json!({"prefix": "k", "limit": 7, "after": "k0006"}), of("k0007", 7), true),
        (json!({"prefix": "k", "limit": 5, "after": "k1189"}), of("k1190", 5), false),
        (json!({"limit": 1000, "after": "k0999"}), of("k1000", 197), false),
        (json!({"prefix": "a%"}), of("a%b", 1), false),
        (json!({"prefix": "\u{10ffff}"}), of("\u{10ffff}", 1), false),
        (json!({"prefix": "x".repeat(513)}), vec![], false),
        (json!({"prefix": "\u{10ffff}".repeat(100_000)}), vec![], false),
        (json!({"prefix": "k", "after": "z".repeat(10_000)}), vec![], false),
        (json!({"prefix": "k", "after": "before"}), of("k", 100), true),
    ];
    for (more, expected, truncated) in cases {
        let mut body = json!({"namespace": "ns"});
        merge(&mut body, more);
        let page = list(&store, &body).await;
        assert_eq!(of_rows(&page, "key"), expected, "{:.200}", body.to_string());
        let next = if truncated { expected.last().cloned().unwrap() } else { Value::Null };
        assert_eq!((&page["truncated"], &page["nextAfter"]), (&json!(truncated), &next));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listed_page_ends_with_the_row_that_reaches_four_mebibytes() {
    let store = Store::open().await;
    let value = "v".repeat(60 << 10);
    for some in (0..80).collect::<Vec<_>>().chunks(20) {
        store.batch(some.iter().map(|n| put(&format!("big{n:02}"), json!(value), json!({}))).collect()).await;
    }
    let mut body = json!({"namespace": "ns", "limit": 1000});
    let page = list(&store, &body).await;
    let count = page["rows"].as_array().unwrap().len();
    assert_eq!((count, &page["bytes"]), (69, &json!(69 * (value.len() + 2))), "68 rows are just below 4 MiB");
    assert_eq!((&page["truncated"], &page["nextAfter"]), (&json!(true), &json!("big68")));
    merge(&mut body, json!({"after": "big68"}));
    let rest = list(&store, &body).await;
    assert_eq!((of_rows(&rest, "key").len(), &rest["truncated"]), (11, &json!(false)));
    merge(&mut body, json!({"keysOnly": true, "after": null}));
    let bare = list(&store, &body).await;
    assert_eq!((of_rows(&bare, "key").len(), &bare["bytes"]), (80, &json!(0)), "keys cost nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_routes_refuse_what_they_cannot_read() {
    let store = Store::open().await;
    store.one(put("k", json!(1), json!({}))).await;
    let (list, namespaces) = ("/api/v1/resources/kv/list", "/api/v1/resources/kv/namespaces");
    let refused = |answer: &Answer| {
        let body = answer.json();
        (answer.status, body["error"].clone(), body["reason"].clone())
    };
    for (line, body, reason) in [
        (format!("POST {list}?namespace=ns"), r#"{"namespace":"ns"}"#, "kv_no_query_string"),
        // Before anything else, so also before the body and the method.
        (format!("POST {list}?x"), "[", "kv_no_query_string"),
        (format!("GET {list}?x"), "", "kv_no_query_string"),
        (format!("GET {namespaces}?x=1"), "", "kv_no_query_string"),
        (format!("POST {list}"), "", "kv_bad_body"),
        (format!("POST {list}"), "[]", "kv_bad_body"),
        (format!("POST {list}"), "{}", "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":7}"#, "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":"ns","limit":"7"}"#, "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":"ns","keysOnly":"yes"}"#, "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":"ns","prefix":"\u0000"}"#, "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":"ns","after":"\ud800"}"#, "kv_bad_body"),
        (format!("POST {list}"), r#"{"namespace":"Upper"}"#, "kv_bad_namespace"),
        (format!("POST {list}"), r#"{"namespace":""}"#, "kv_bad_namespace"),
    ] {
        let answer = store.ask(&line, body).await;
        assert_eq!(refused(&answer), (400, json!("kv_bad_request"), json!(reason)), "{line} {body}");
    }
    let wrong = store.ask(&format!("GET {list}"), "").await;
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST")));
    assert_eq!(store.ask(&format!("GET {namespaces}?"), "").await.status, 200, "a bare ? is no query");
}

/// Vector 27: what one tenant lists is its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_console_never_shows_another_tenants_rows() {
    let store = Store::open().await;
    let other = unlimited(&store.world, "globex").await;
    store.batch(json!([put("k", json!("acme"), json!({})), put("only-acme", json!(1), json!({}))])).await;
    let write = json!([
        put("k", json!("globex"), json!({})),
        in_namespace("globex-only", put("k", json!(2), json!({})))
    ]);
    results(&store.world.ask("POST /api/v1/kv", &other.headers(), &write.to_string()).await);
    let forged = format!("{}x-queen-tenant: {}\r\n", store.tenant.headers(), other.tenant);
    for (headers, value, keys, own) in [
        (store.tenant.headers(), "acme", vec!["k", "only-acme"], json!([{"namespace": "ns", "keys": 2}])),
        (forged, "acme", vec!["k", "only-acme"], json!([{"namespace": "ns", "keys": 2}])),
        (
            other.headers(),
            "globex",
            vec!["k"],
            json!([{"namespace": "globex-only", "keys": 1}, {"namespace": "ns", "keys": 1}]),
        ),
    ] {
        let body = json!({"namespace": "ns", "includeExpired": true}).to_string();
        let page = store.world.ask("POST /api/v1/resources/kv/list", &headers, &body).await.json();
        assert_eq!((json!(of_rows(&page, "key")), &page["rows"][0]["value"]), (json!(keys), &json!(value)));
        let listed = store.world.ask("GET /api/v1/resources/kv/namespaces", &headers, "").await.json();
        assert_eq!(listed, json!({"namespaces": own}));
    }
    assert_eq!(store.one(get("k")).await["value"], "acme");

    // A key that may only read may list: the verb of the list route is POST, what it does is not.
    let (_, reader) = store.world.key(store.tenant.cluster, &["read"]).await;
    let headers = format!("Host: {}\r\nAuthorization: Bearer {reader}\r\n", store.tenant.host());
    let page = store.world.ask("POST /api/v1/resources/kv/list", &headers, r#"{"namespace":"ns"}"#).await;
    assert_eq!((page.status, of_rows(&page.json(), "key").len()), (200, 2));
    let refused = store.world.ask("PUT /api/v1/kv/ns/k", &headers, r#"{"value":1,"forever":true}"#).await;
    assert_eq!(refused.status, 403);
}

/// The functions by themselves: limits that no request reaches, and a caller without a tenant.
#[tokio::test(flavor = "multi_thread")]
async fn the_console_functions_refuse_no_tenant_and_bound_the_namespaces() {
    let store = Store::open().await;
    let mut database = store.world.cell_database().await;
    for call in ["kv_namespaces_v1(NULL)", "kv_list_v1(NULL, 'ns', '', '', 1, false, false)"] {
        let call = sqlx::AssertSqlSafe(format!("SELECT queen.{call}"));
        let error =
            sqlx::query(call).execute(&mut database).await.unwrap_err().into_database_error().unwrap();
        assert_eq!((error.code().as_deref(), error.message()), (Some("22023"), "kv_bad_request"));
    }
    sqlx::query(
        "INSERT INTO queen.kv (tenant_id, namespace, key, value, version)
         SELECT (SELECT tenant_id FROM queen.kv LIMIT 1), 'n' || n, 'k', '1', n FROM generate_series(1, $1) n",
    )
    .bind(10_001)
    .execute(&mut { store.one(put("k", json!(1), json!({}))).await; database })
    .await
    .unwrap();
    let listed = namespaces(&store).await;
    let names = listed["namespaces"].as_array().unwrap();
    assert_eq!((names.len(), &listed["truncated"]), (10_000, &json!(true)));
    assert_eq!((&names[0]["namespace"], &names[1]["namespace"]), (&json!("n1"), &json!("n10")), "byte order");
}
