//! `admin key`.

use super::{Admin, audit, everything, query, text};
use crate::support::{World, eventually};
use std::time::Duration;

const GET: &str = "GET /api/v1/kv/n/k";

fn headers(key: &str) -> String {
    format!("Host: acme-prod.q.example\r\nAuthorization: Bearer {key}\r\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issued_key_works_until_it_is_revoked_and_is_nowhere_but_in_the_output() {
    let world = World::new().await;
    let admin = Admin::of(&world);
    let acme = world.tenant("acme").await;
    let out =
        admin.ok(&["key", "issue", "acme-prod", "--name", " ci ", "--scopes", "produce,consume,produce"]);
    let key = out.lines().next().unwrap();
    assert!(key.starts_with("qk_live_") && key.len() == 51, "{out}");
    assert_eq!(out.matches(&key["qk_live_".len()..]).count(), 1, "{out}");
    assert!(out.contains("of cluster acme-prod and may produce, consume."), "{out}");
    assert_eq!(world.ask(GET, &headers(key), "").await.status, 200);
    // It may not do what it has no scope for.
    let listing = world.ask("GET /api/v1/resources/queues", &headers(key), "").await;
    assert_eq!((listing.status, listing.code().as_str()), (403, "forbidden"));
    let stored =
        "SELECT (name, array_to_string(scopes, '+')) FROM queen_proxy.api_keys WHERE name LIKE '%ci%'";
    assert_eq!(query(&world, stored).await, "(ci,produce+consume)");

    let made = admin.json(&[
        "key",
        "issue",
        &acme.cluster.to_string(),
        "--name",
        "x",
        "--scopes",
        "read",
        "--env",
        "test",
    ]);
    let other = text(&made, "api_key");
    assert!(other.starts_with("qk_test_") && other.len() == 51, "{made}");
    assert_eq!(made.to_string().matches(other).count(), 1);

    // Neither key is in the control plane, in the proxy's log, or in any later output.
    let id = query(&world, "SELECT id FROM queen_proxy.api_keys WHERE name = 'ci'").await;
    let (rows, log) = (everything(&world).await, world.proxies[0].1.log());
    let list = admin.ok(&["key", "list", "acme-prod"]);
    assert!(rows.contains(&hex::encode(queen_proxy::identity::digest(key))), "its digest is");
    for body in [&key["qk_live_".len()..], &other["qk_test_".len()..]] {
        for place in [&rows, &log, &list] {
            assert!(!place.contains(body), "{place}");
        }
    }

    assert_eq!(admin.ok(&["key", "revoke", &id]), format!("key {id} is revoked\n"));
    eventually("the revocation", Duration::from_secs(5), async || {
        (world.ask(GET, &headers(key), "").await.status == 401).then_some(())
    })
    .await;
    assert_eq!(
        admin.fails(1, &["key", "revoke", &id]),
        format!("revoke_api_key: key {id} is already revoked")
    );
    let revoked = admin.json(&["key", "revoke", text(&made, "key_id")]);
    assert_eq!((text(&revoked, "key_id"), &revoked["revoked"]), (text(&made, "key_id"), &true.into()));
    assert_eq!(audit(&world).await.iter().filter(|action| *action == "api_key_revoked").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_listed_without_what_they_are() {
    let (world, admin) = Admin::alone().await;
    admin.acme("shared-a");
    let made = admin.json(&["key", "issue", "acme-prod", "--name", "ci", "--scopes", "read,admin"]);
    let id = text(&made, "key_id");
    let names = |arguments: &[&str]| -> Vec<String> {
        let document = admin.json(arguments);
        assert!(!document.to_string().contains("hash"), "{document}");
        document["keys"].as_array().unwrap().iter().map(|key| text(key, "name").to_owned()).collect()
    };
    assert_eq!(names(&["key", "list", "acme-prod"]), ["default", "ci"]);
    let out = admin.ok(&["key", "list", "acme-prod"]);
    let line = out.lines().find(|line| line.starts_with(id)).unwrap();
    assert!(line.contains("  ci       read,admin  "), "{out}");
    assert!(!out.contains("revoked_at"), "{out}");

    admin.ok(&["key", "revoke", id]);
    assert_eq!(names(&["key", "list", "acme-prod"]), ["default"]);
    assert_eq!(names(&["key", "list", "acme-prod", "--all"]), ["default", "ci"]);
    assert!(admin.ok(&["key", "list", "acme-prod", "--all"]).contains("revoked_at"));
    // A name that would clear the screen.
    world.sql(r"UPDATE queen_proxy.api_keys SET name = E'\x1b[2J' WHERE revoked_at IS NULL").await;
    assert!(!admin.ok(&["key", "list", "acme-prod"]).contains('\x1b'));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_cannot_be() {
    let (world, admin) = Admin::alone().await;
    admin.acme("shared-a");
    let issue = |code, more: &[&str]| admin.fails(code, &[&["key", "issue"], more].concat());
    assert_eq!(issue(1, &["nobody", "--name", "x", "--scopes", "read"]), "there is no such cluster");
    assert_eq!(
        issue(1, &["acme-prod", "--name", " ", "--scopes", "read"]),
        "issue_api_key: name must not be blank"
    );
    let env = "--env: must be 1 to 16 small letters and digits";
    for wrong in ["", "a_b", "Live", "ä", "12345678901234567"] {
        assert_eq!(issue(2, &["acme-prod", "--name", "x", "--scopes", "read", "--env", wrong]), env);
    }
    for wrong in [&["--scopes", "write"][..], &["--scopes", ""], &["--scopes", "read,"], &[]] {
        let ran = admin.run(&[&["key", "issue", "acme-prod", "--name", "x"], wrong].concat());
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{wrong:?}");
    }
    let unknown = uuid::Uuid::new_v4();
    assert_eq!(
        admin.fails(1, &["key", "revoke", &unknown.to_string()]),
        format!("revoke_api_key: unknown key {unknown}")
    );
    // Who gives the key itself does not find it in the output again.
    assert_eq!(
        admin.fails(2, &["key", "revoke", "qk_live_S3cret"]),
        "a key is named by its id, as `key list` shows it"
    );
    assert_eq!(query(&world, "SELECT count(*) FROM queen_proxy.api_keys").await, "1");
}
