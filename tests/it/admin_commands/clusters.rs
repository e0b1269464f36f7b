//! `admin cluster`.

use super::{Admin, ID, audit, query, text};
use crate::support::{World, eventually};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_created_for_a_tenant() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    let create = ["cluster", "create", "acme", "acme-test", "--plan", "free", "--cell", "shared-a"];
    let out = admin.ok(&create);
    assert!(
        out.starts_with("cluster acme-test (") && out.ends_with(") on plan free in cell shared-a\n"),
        "{out}"
    );
    assert_eq!(admin.fails(1, &create), "it exists already (clusters_slug_key)");

    // Everything by id, and the slug as it is stored.
    let cell = query(&world, "SELECT id FROM queen_proxy.cells").await;
    let tenant = text(&acme, "tenant_id");
    let made = admin.json(&["cluster", "create", tenant, "ACME-Stage", "--plan", "dev", "--cell", &cell]);
    assert_eq!(
        ["tenant_id", "tenant_slug", "cluster_slug", "plan", "cell_id", "cell_slug"]
            .map(|name| text(&made, name)),
        [tenant, "acme", "acme-stage", "dev", &cell, "shared-a"]
    );
    assert_eq!(text(&made, "cluster_id").len(), ID);

    for (arguments, expected) in [
        (["nobody", "x", "free", "shared-a"], "there is no such tenant"),
        (["acme", "x", "free", "nowhere"], "there is no such cell"),
        (["acme", "x", "gold", "shared-a"], "create_cluster: unknown plan gold"),
        (["acme", "x_y", "free", "shared-a"], "a value is not allowed there (clusters_slug_valid)"),
    ] {
        let [tenant, slug, plan, cell] = arguments;
        let refusal = admin.fails(1, &["cluster", "create", tenant, slug, "--plan", plan, "--cell", cell]);
        assert_eq!(refusal, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clusters_status_takes_effect() {
    let world = World::new().await;
    let admin = Admin::of(&world);
    let acme = world.tenant("acme").await;
    let get = async || world.ask("GET /api/v1/kv/n/k", &acme.headers(), "").await.status;
    assert_eq!(get().await, 200);
    assert_eq!(
        admin.ok(&["cluster", "status", "acme-prod", "suspended"]),
        "cluster acme-prod is suspended\n"
    );
    eventually("suspended", Duration::from_secs(5), async || (get().await == 403).then_some(())).await;
    let id = acme.cluster.to_string();
    let document = admin.json(&["cluster", "status", &id, "active"]);
    assert_eq!(document, json!({"cluster_id": id, "cluster_slug": "acme-prod", "status": "active"}));
    assert_eq!(admin.json(&["cluster", "status", &id, "active"]), document, "a repeat is fine");
    eventually("active", Duration::from_secs(5), async || (get().await == 200).then_some(())).await;
    let unknown = uuid::Uuid::new_v4().to_string();
    for reference in ["nobody-prod", &unknown] {
        assert_eq!(admin.fails(1, &["cluster", "status", reference, "active"]), "there is no such cluster");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_and_limits_are_changed_and_shown() {
    let (world, admin) = Admin::alone().await;
    admin.acme("shared-a");
    assert_eq!(admin.ok(&["cluster", "plan", "acme-prod", "free"]), "cluster acme-prod is on plan free\n");
    assert_eq!(text(&admin.json(&["cluster", "plan", "acme-prod", "free"]), "plan"), "free");
    assert_eq!(admin.fails(1, &["cluster", "plan", "acme-prod", "gold"]), "assign_plan: unknown plan gold");

    let limits = |changes: &[&str]| -> Value {
        let document = admin.json(&[&["cluster", "limits", "acme-prod"], changes].concat());
        document["limit_overrides"].clone()
    };
    // What is not named stays.
    assert_eq!(limits(&["max_queues=500"]), json!({"max_queues": 500}));
    assert_eq!(limits(&["max_queues=500"]), json!({"max_queues": 500}), "a repeat is fine");
    let both = json!({"max_queues": 500, "req_burst": null});
    assert_eq!(limits(&["req_burst=unlimited"]), both);
    assert_eq!(
        query(&world, "SELECT limit_overrides FROM queen_proxy.clusters").await.parse::<Value>().unwrap(),
        both
    );
    assert_eq!(
        limits(&["max_queues=plan", "monthly_msgs_quota=0"]),
        json!({"req_burst": null, "monthly_msgs_quota": 0})
    );
    assert_eq!(limits(&["--clear", "max_queues=7"]), json!({"max_queues": 7}));
    let out = admin.ok(&["cluster", "limits", "acme-prod", "req_burst=unlimited"]);
    assert_eq!(out, "cluster acme-prod overrides its plan by\n  max_queues=7\n  req_burst=unlimited\n");
    assert_eq!(
        admin.ok(&["cluster", "limits", "acme-prod", "--clear"]),
        "cluster acme-prod has its plan's limits\n"
    );
    // A document of somebody else's that overrides nothing is no obstacle.
    world.sql("UPDATE queen_proxy.clusters SET limit_overrides = '[1]'").await;
    assert_eq!(limits(&["max_queues=7"]), json!({"max_queues": 7}));
    assert_eq!(audit(&world).await.iter().filter(|action| *action == "limit_override_set").count(), 8);
    for wrong in ["max_queue=1", "max_queues=-1", "max_queues=many", "max_queues"] {
        assert_eq!(admin.run(&["cluster", "limits", "acme-prod", wrong]).code, 2, "{wrong}");
    }
    assert_eq!(admin.run(&["cluster", "limits", "acme-prod"]).code, 2);
    assert_eq!(
        admin.fails(2, &["cluster", "limits", "acme-prod", "max_queues=1", "max_queues=plan"]),
        "max_queues: given twice"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_operators_at_once_do_not_undo_each_other() {
    let (world, admin) = Admin::alone().await;
    admin.acme("shared-a");
    let names = ["max_queues", "req_burst", "msgs_burst", "max_batch_items"];
    std::thread::scope(|scope| {
        for name in names {
            let admin = &admin;
            scope.spawn(move || admin.ok(&["cluster", "limits", "acme-prod", &format!("{name}=1")]));
        }
    });
    let overrides = query(&world, "SELECT limit_overrides FROM queen_proxy.clusters").await;
    assert_eq!(overrides.parse::<Value>().unwrap().as_object().unwrap().len(), names.len(), "{overrides}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_shown_with_where_everything_comes_from() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    admin.ok(&["tenant", "status", "acme", "grace"]);
    let overrides = r#"{"max_queues": 500, "req_burst": null, "max_batch_items": "9", "max_queue": 1}"#;
    world
        .sql(&format!(
            "UPDATE queen_proxy.clusters SET limit_overrides = '{overrides}';
             UPDATE queen_proxy.cells SET base_url = 'http://user:s3cret@10.0.3.11:6632', cell_secret = 's3cret';"
        ))
        .await;
    let shown = admin.json(&["cluster", "show", "acme-prod"]);
    assert_eq!(shown["status"], json!({"cluster": "active", "tenant": "grace", "effective": "push_blocked"}));
    assert_eq!(text(&shown, "plan"), "pro");
    for (name, value, source) in [
        ("max_queues", json!(500), "override"),
        ("req_burst", json!(null), "override"),
        ("max_batch_items", json!(5000), "plan"),
        ("max_retained_bytes", json!(21_474_836_480_i64), "plan"),
        ("monthly_msgs_quota", json!(null), "unlimited"),
    ] {
        assert_eq!(shown["limits"][name], json!({"value": value, "source": source}), "{name}");
    }
    assert_eq!(shown["limits"].as_object().unwrap().len(), 12);
    assert_eq!(shown["ignored_overrides"], json!(["max_batch_items", "max_queue"]));
    let features = json!({"streams": true, "traces": true, "kv": true, "timers": false, "ephemeral": false});
    assert_eq!(shown["features"], features);
    assert_eq!(text(&shown["cell"], "slug"), "shared-a");
    assert_eq!(text(&shown["cell"], "base_url"), "http://***@10.0.3.11:6632");
    assert_eq!(shown["live_keys"], 1);

    let out = admin.ok(&["cluster", "show", text(&acme, "cluster_id")]);
    assert!(!out.contains("s3cret") && !shown.to_string().contains("s3cret"), "{out}");
    for line in [
        "status    push_blocked (cluster: active, tenant: grace)",
        "plan      pro",
        "features  streams, traces, kv",
        "cell      shared-a in eu1 at http://***@10.0.3.11:6632",
        "keys      1 live",
        "max_queues                500          override",
        "req_burst                 unlimited    override",
        "max_batch_items           5000         plan",
        "monthly_msgs_quota        unlimited",
        "Overrides without effect: max_batch_items, max_queue",
    ] {
        assert!(out.lines().any(|shown| shown == line), "{line:?} is not in\n{out}");
    }
    assert_eq!(admin.fails(1, &["cluster", "show", "nobody"]), "there is no such cluster");
}
