//! `admin tenant`.

use super::{Admin, ID, audit, everything, query, text};
use crate::support::{World, eventually};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_made_without_sql_is_served_and_found_again() {
    let world = World::new().await;
    let admin = Admin::of(&world);
    let bootstrap = |cell: &str| {
        let out = admin.ok(&[
            "tenant",
            "bootstrap",
            "Acme",
            "--name",
            "Acme Inc",
            "--cluster",
            "acme-prod",
            "--plan",
            "pro",
            "--cell",
            cell,
            "--email",
            "Ops@Acme.example",
            "--key-name",
            "first",
        ]);
        let line = |name: &str| -> String {
            let line = out.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            line.trim().to_owned()
        };
        (["tenant", "cluster", "admin"].map(line), line("key"), out.clone())
    };
    let (ids, key, out) = bootstrap("cell");
    assert!(ids.iter().all(|id| id.len() == ID), "{ids:?}");
    assert!(key.starts_with("qk_live_") && key.len() == 51, "{key}");
    assert_eq!(out.matches(&key).count(), 1, "{out}");
    assert!(out.contains("cannot sign in yet"), "{out}");
    assert_eq!(query(&world, "SELECT name FROM queen_proxy.tenants WHERE slug = 'acme'").await, "Acme Inc");
    assert!(!everything(&world).await.contains(&key));

    let headers = format!("Host: acme-prod.q.example\r\nAuthorization: Bearer {key}\r\n");
    let put = || world.ask("PUT /api/v1/kv/n/k", &headers, r#"{"value":1,"forever":true}"#);
    let answer = put().await;
    assert!(answer.status < 300, "{answer:?}");

    // Again, with the cell by id: the same rows and no key.
    let (again, key, _) = bootstrap(&world.cell_id.to_string());
    assert_eq!((again, key.as_str()), (ids.clone(), "issued before, and not readable any more"));
    let document = admin.acme("cell");
    assert_eq!(text(&document, "tenant_id"), ids[0]);
    assert_eq!(document["can_login"], false);

    // By slug and by id, and on every proxy at once.
    for (reference, status, expected) in
        [("ACME", "grace", 403), (ids[0].as_str(), "active", 200), ("acme", "suspended", 403)]
    {
        assert_eq!(admin.ok(&["tenant", "status", reference, status]), format!("tenant acme is {status}\n"));
        eventually(status, Duration::from_secs(5), async || {
            let status = put().await.status;
            (if status < 300 { 200 } else { status } == expected).then_some(())
        })
        .await;
    }
    let document = admin.json(&["tenant", "status", "acme", "active"]);
    assert_eq!((text(&document, "tenant_id"), text(&document, "status")), (ids[0].as_str(), "active"));
    assert_eq!(admin.json(&["tenant", "status", "acme", "active"]), document, "a repeat is fine");
    assert_eq!(audit(&world).await.iter().filter(|action| *action == "tenant_status_changed").count(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_of_a_new_tenant_can_get_a_password() {
    let (world, admin) = Admin::alone().await;
    let arguments = [
        "tenant",
        "bootstrap",
        "acme",
        "--cluster",
        "acme-prod",
        "--plan",
        "free",
        "--cell",
        "shared-a",
        "--email",
        "ops@acme.example",
        "--password-stdin",
        "--json",
    ];
    let ran = admin.run_with(&arguments, "s3cret text\n");
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains(r#""can_login":true"#) && !ran.out.contains("s3cret"), "{}", ran.out);
    let right = "SELECT password_hash = public.crypt('s3cret text', password_hash) FROM queen_proxy.users";
    assert_eq!(query(&world, right).await, "true");
}

#[tokio::test(flavor = "multi_thread")]
async fn bootstrap_is_refused_with_the_control_planes_words() {
    let (world, admin) = Admin::alone().await;
    let bootstrap = |slug, cluster, plan, cell, email| {
        admin.fails(
            1,
            &[
                "tenant",
                "bootstrap",
                slug,
                "--cluster",
                cluster,
                "--plan",
                plan,
                "--cell",
                cell,
                "--email",
                email,
            ],
        )
    };
    let email = "ops@acme.example";
    for (refusal, expected) in [
        (bootstrap("acme", "acme-prod", "gold", "shared-a", email), "create_cluster: unknown plan gold"),
        (bootstrap("acme", "acme-prod", "free", "shared-b", email), "there is no such cell"),
        (
            bootstrap("acme", "acme-prod", "free", "shared-a", "ops"),
            "bootstrap_tenant: admin email must contain @",
        ),
        (
            bootstrap(" ", "acme-prod", "free", "shared-a", email),
            "bootstrap_tenant: tenant slug must not be blank",
        ),
        (
            bootstrap("a_b", "acme-prod", "free", "shared-a", email),
            "a value is not allowed there (tenants_slug_valid)",
        ),
    ] {
        assert_eq!(refusal, expected);
    }
    assert_eq!(query(&world, "SELECT count(*) FROM queen_proxy.tenants").await, "0");
    admin.acme("shared-a");
    assert_eq!(
        bootstrap("globex", "acme-prod", "free", "shared-a", "ops@globex.example"),
        "bootstrap_tenant: the cluster slug belongs to another tenant"
    );
    assert_eq!(admin.fails(1, &["tenant", "status", "globex", "grace"]), "there is no such tenant");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_deleted_once_it_is_marked_for_it() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    let id = text(&acme, "tenant_id");
    let refusal = admin.fails(1, &["tenant", "delete", "acme"]);
    assert_eq!(refusal, format!("delete_tenant: tenant {id} has status active, not deleting"));
    let broker = query(&world, "SELECT broker_tenant_uuid FROM queen_proxy.clusters").await;

    admin.ok(&["tenant", "status", "acme", "deleting"]);
    let out = admin.ok(&["tenant", "delete", "acme"]);
    assert!(out.starts_with("tenant acme is deleted\n"), "{out}");
    assert_eq!(out.matches(&broker).count(), 1, "the purge of the cell needs it: {out}");
    assert_eq!(query(&world, "SELECT count(*) FROM queen_proxy.tenants").await, "0");

    // Safe to repeat by id; a slug names nothing any more.
    assert_eq!(admin.ok(&["tenant", "delete", id]), "there is no such tenant any more\n");
    let document = admin.json(&["tenant", "delete", id]);
    assert_eq!((&document["deleted"], &document["existed"]), (&false.into(), &false.into()));
    assert_eq!(admin.fails(1, &["tenant", "delete", "acme"]), "there is no such tenant");

    admin.acme("shared-a");
    let document = admin.json(&["tenant", "delete", "acme", "--force"]);
    assert_eq!((&document["deleted"], text(&document, "status_was")), (&true.into(), "active"));
    assert_eq!(document["clusters"].as_array().unwrap().len(), 1);
}
