//! `admin cell`.

use super::{Admin, query, text};
use crate::support::World;
use serde_json::json;

const REST: [&str; 4] = ["--region", "eu1", "--class", "shared"];

fn add<'a>(slug: &'a str, url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["cell", "add", slug, "--base-url", url], &REST[..], more].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_was_added_serves_a_tenant() {
    let world = World::new().await;
    let admin = Admin::of(&world);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    std::fs::write(&path, format!("{}\n", world.cell_secret)).unwrap();
    let url = format!("http://127.0.0.1:{}", world.cell_port);
    let made = admin.json(&add("eu1-shared-b", &url, &["--secret-file", path.to_str().unwrap()]));
    assert_eq!((text(&made, "slug"), &made["has_secret"]), ("eu1-shared-b", &json!(true)));
    assert!(!made.to_string().contains(&world.cell_secret));
    let acme = admin.acme("eu1-shared-b");
    let headers =
        format!("Host: acme-prod.q.example\r\nAuthorization: Bearer {}\r\n", text(&acme, "api_key"));
    assert_eq!(world.ask("GET /api/v1/kv/n/k", &headers, "").await.status, 200);

    let cells = admin.json(&["cell", "list"]);
    let cells = cells["cells"].as_array().unwrap();
    assert_eq!(cells.iter().map(|cell| text(cell, "slug")).collect::<Vec<_>>(), ["cell", "eu1-shared-b"]);
    assert_eq!(cells[1]["cell_id"], made["cell_id"]);
    assert_eq!(cells[1]["clusters"], 1);
    world.sql("UPDATE queen_proxy.cells SET base_url = 'http://u:s3cret@h' WHERE slug = 'cell'").await;
    let out = admin.ok(&["cell", "list"]);
    let line = format!("{}  eu1     shared  active  {url}", text(&made, "cell_id"));
    assert!(out.contains(&line) && out.contains("http://***@h"), "{out}");
    assert!(!out.contains("s3cret") && !out.contains(&world.cell_secret), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cells_that_no_proxy_could_use_are_refused() {
    let (world, admin) = Admin::alone().await;
    for url in ["https://cell", "cell:6632", "", "http://u:s3cret@cell", "http://cell?x", "ftp://cell"] {
        let line = admin.fails(2, &add("b", url, &[]));
        assert!(
            line.starts_with("--base-url: must be http://host:port") && !line.contains("s3cret"),
            "{line}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    for (content, expected) in [("\n", "is empty"), ("s3\ncret", "fit for a header")] {
        std::fs::write(&path, content).unwrap();
        let line = admin.fails(2, &add("b", "http://b", &["--secret-file", path.to_str().unwrap()]));
        assert!(line.contains(expected) && !line.contains("cret\n"), "{line}");
    }
    assert_eq!(admin.fails(1, &add("shared-a", "http://b", &[])), "it exists already (cells_slug_key)");
    assert_eq!(admin.fails(1, &add(" ", "http://b", &[])), "a value is not allowed there (cells_slug_valid)");
    assert_eq!(admin.run(&["cell", "add", "b", "--base-url", "http://b", "--region", "r"]).code, 2);
    let out = admin.ok(&add("b", "http://b", &[]));
    assert!(out.starts_with("cell b (") && out.ends_with(") at http://b\n"), "{out}");
    assert_eq!(query(&world, "SELECT count(*) FROM queen_proxy.cells").await, "2");
}
