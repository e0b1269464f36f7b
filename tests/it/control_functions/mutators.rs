//! What each mutator writes, audits, announces and refuses (contract sections 2.1 and 2.2).

use super::Plane;
use serde_json::{Value, json};

/// Names that stand in the cases for the ids of [`scene`].
const IDS: &[(&str, &str)] = &[
    ("{acme}", "00000000-0000-4000-8000-00000000000a"),
    ("{globex}", "00000000-0000-4000-8000-00000000000b"),
    ("{empty}", "00000000-0000-4000-8000-00000000000c"),
    ("{prod}", "00000000-0000-4000-8000-0000000000a1"),
    ("{stage}", "00000000-0000-4000-8000-0000000000a2"),
    ("{rival}", "00000000-0000-4000-8000-0000000000b1"),
    ("{ops}", "00000000-0000-4000-8000-0000000000aa"),
    ("{eve}", "00000000-0000-4000-8000-0000000000bb"),
    ("{cell}", "00000000-0000-4000-8000-0000000000cc"),
    ("{key}", "00000000-0000-4000-8000-0000000000d1"),
    ("{dead key}", "00000000-0000-4000-8000-0000000000d2"),
    ("{nobody}", "00000000-0000-4000-8000-0000000000ff"),
    ("{hash}", "abcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdef0123"),
    ("{new hash}", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"),
    ("{new hash 2}", "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"),
];

/// Two tenants with clusters, one without; a cell that is neither alive nor of the plans' class.
const SCENE: &str = "
INSERT INTO queen_proxy.tenants (id, slug, name) VALUES
    ('{acme}', 'acme', 'Acme'), ('{globex}', 'globex', 'Globex'), ('{empty}', 'empty', 'Empty');
INSERT INTO queen_proxy.cells (id, slug, region, base_url, class, status)
     VALUES ('{cell}', 'c', 'r', 'http://127.0.0.1:1', 'dedicated', 'dead');
INSERT INTO queen_proxy.clusters (id, tenant_id, cell_id, plan_id, slug)
     SELECT new.id::uuid, new.tenant::uuid, '{cell}', p.id, new.slug
       FROM queen_proxy.plans AS p, (VALUES
            ('{prod}', '{acme}', 'acme-prod'), ('{stage}', '{acme}', 'acme-stage'),
            ('{rival}', '{globex}', 'globex-prod')) AS new (id, tenant, slug)
      WHERE p.code = 'pro';
INSERT INTO queen_proxy.users (id, tenant_id, email) VALUES
    ('{ops}', '{acme}', 'ops@acme.example'), ('{eve}', '{globex}', 'eve@globex.example');
INSERT INTO queen_proxy.api_keys (id, cluster_id, name, key_hash, scopes, revoked_at) VALUES
    ('{key}', '{prod}', 'old', '{hash}', '{read}', NULL),
    ('{dead key}', '{prod}', 'dead', repeat('d', 64), '{read}', now());
";

pub(super) fn fill(text: &str, made: &str) -> String {
    IDS.iter().fold(text.replace("{made}", made), |text, (name, id)| text.replace(name, id))
}

pub(super) async fn scene() -> Plane {
    let mut plane = Plane::new().await;
    plane.run(&fill(SCENE, "")).await;
    plane
}

/// One successful call. Names in braces are those of [`IDS`]; `{made}` is what the call returned.
struct Case {
    call: &'static str,
    /// A condition that holds after the call and, unless it begins with `still`, did not before.
    effect: &'static str,
    /// Tenant, cluster, action, target and actor id of the audit row; empty is NULL.
    audit: [&'static str; 5],
    meta: &'static str,
    heard: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        call: "create_tenant('  InitTech ', '  Init Tech ')",
        effect: "FROM tenants WHERE id = '{made}' AND slug = 'inittech' AND name = 'Init Tech' AND status = 'active'",
        audit: ["{made}", "", "tenant_created", "{made}", ""],
        meta: r#"{"slug": "inittech", "name": "Init Tech"}"#,
        heard: &[],
    },
    Case {
        call: "create_user('{acme}', '  Dev@Acme.Example ', '$2a$10$hash', 'google')",
        effect: "FROM users WHERE id = '{made}' AND tenant_id = '{acme}' AND email = 'dev@acme.example'
                  AND password_hash = '$2a$10$hash' AND NOT is_operator AND name IS NULL
                  AND NOT EXISTS (SELECT FROM identities)",
        audit: ["{acme}", "", "user_created", "{made}", "{made}"],
        meta: r#"{"email": "dev@acme.example", "provider": "google"}"#,
        heard: &[],
    },
    Case {
        call: "create_user(p_provider => 'local', p_password_hash => NULL, p_email => 'b@c', p_tenant_id => '{acme}')",
        effect: "FROM users WHERE id = '{made}' AND password_hash IS NULL AND NOT EXISTS (SELECT FROM identities)",
        audit: ["{acme}", "", "user_created", "{made}", "{made}"],
        meta: r#"{"email": "b@c", "provider": "local"}"#,
        heard: &[],
    },
    Case {
        call: "set_tenant_status('{acme}', 'grace')",
        effect: "FROM tenants WHERE id = '{acme}' AND status = 'grace'",
        audit: ["{acme}", "", "tenant_status_changed", "{acme}", ""],
        meta: r#"{"status": "grace"}"#,
        heard: &["{prod}", "{stage}"],
    },
    Case {
        call: "set_tenant_status('{acme}', 'grace')",
        effect: "still FROM tenants WHERE id = '{acme}' AND status = 'grace'",
        audit: ["{acme}", "", "tenant_status_changed", "{acme}", ""],
        meta: r#"{"status": "grace"}"#,
        heard: &["{prod}", "{stage}"],
    },
    Case {
        call: "set_tenant_status(p_status => 'active', p_tenant_id => '{acme}')",
        effect: "FROM tenants WHERE id = '{acme}' AND status = 'active'",
        audit: ["{acme}", "", "tenant_status_changed", "{acme}", ""],
        meta: r#"{"status": "active"}"#,
        heard: &["{prod}", "{stage}"],
    },
    Case {
        call: "set_tenant_status('{empty}', 'deleting')",
        effect: "FROM tenants WHERE id = '{empty}' AND status = 'deleting'",
        audit: ["{empty}", "", "tenant_status_changed", "{empty}", ""],
        meta: r#"{"status": "deleting"}"#,
        heard: &[],
    },
    Case {
        call: "set_tenant_status('{globex}', 'suspended')",
        effect: "FROM tenants WHERE id = '{globex}' AND status = 'suspended'",
        audit: ["{globex}", "", "tenant_status_changed", "{globex}", ""],
        meta: r#"{"status": "suspended"}"#,
        heard: &["{rival}"],
    },
    Case {
        call: "create_cluster('{acme}', ' Acme-Dev ', 'free', '{cell}')",
        effect: "FROM clusters AS c JOIN plans AS p ON p.id = c.plan_id
                WHERE c.id = '{made}' AND tenant_id = '{acme}' AND cell_id = '{cell}' AND slug = 'acme-dev'
                  AND p.code = 'free' AND status = 'active' AND limit_overrides = '{}'
                  AND broker_tenant_uuid NOT IN (c.id, tenant_id)",
        audit: ["{acme}", "{made}", "cluster_created", "{made}", ""],
        meta: r#"{"slug": "acme-dev", "plan_code": "free", "cell_id": "{cell}"}"#,
        heard: &["{made}"],
    },
    Case {
        call: "assign_plan('{prod}', 'dedicated-s')",
        effect: "FROM clusters AS c JOIN plans AS p ON p.id = c.plan_id WHERE c.id = '{prod}' AND p.code = 'dedicated-s'",
        audit: ["{acme}", "{prod}", "plan_assigned", "{prod}", ""],
        meta: r#"{"plan_code": "dedicated-s"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "assign_plan('{prod}', 'dedicated-s')",
        effect: "still FROM clusters AS c JOIN plans AS p ON p.id = c.plan_id WHERE c.id = '{prod}' AND p.code = 'dedicated-s'",
        audit: ["{acme}", "{prod}", "plan_assigned", "{prod}", ""],
        meta: r#"{"plan_code": "dedicated-s"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: r#"set_limit_override('{prod}', '{"max_queues": 500, "max_retained_bytes": null}')"#,
        effect: r#"FROM clusters WHERE id = '{prod}' AND limit_overrides = '{"max_queues": 500, "max_retained_bytes": null}'"#,
        audit: ["{acme}", "{prod}", "limit_override_set", "{prod}", ""],
        meta: r#"{"max_queues": 500, "max_retained_bytes": null}"#,
        heard: &["{prod}"],
    },
    Case {
        call: r#"set_limit_override('{prod}', '[1, "nonsense"]')"#,
        effect: r#"FROM clusters WHERE id = '{prod}' AND limit_overrides = '[1, "nonsense"]'"#,
        audit: ["{acme}", "{prod}", "limit_override_set", "{prod}", ""],
        meta: r#"[1, "nonsense"]"#,
        heard: &["{prod}"],
    },
    Case {
        call: "set_limit_override('{prod}', NULL)",
        effect: "FROM clusters WHERE id = '{prod}' AND limit_overrides = '{}'",
        audit: ["{acme}", "{prod}", "limit_override_set", "{prod}", ""],
        meta: "{}",
        heard: &["{prod}"],
    },
    Case {
        call: "set_cluster_status('{prod}', 'push_blocked')",
        effect: "FROM clusters WHERE id = '{prod}' AND status = 'push_blocked'",
        audit: ["{acme}", "{prod}", "cluster_status_changed", "{prod}", ""],
        meta: r#"{"status": "push_blocked"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "set_cluster_status('{prod}', 'suspended')",
        effect: "FROM clusters WHERE id = '{prod}' AND status = 'suspended'",
        audit: ["{acme}", "{prod}", "cluster_status_changed", "{prod}", ""],
        meta: r#"{"status": "suspended"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "set_cluster_status('{prod}', 'deleting')",
        effect: "FROM clusters WHERE id = '{prod}' AND status = 'deleting'",
        audit: ["{acme}", "{prod}", "cluster_status_changed", "{prod}", ""],
        meta: r#"{"status": "deleting"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "set_cluster_status('{prod}', 'active')",
        effect: "FROM clusters WHERE id = '{prod}' AND status = 'active'",
        audit: ["{acme}", "{prod}", "cluster_status_changed", "{prod}", ""],
        meta: r#"{"status": "active"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "issue_api_key('{prod}', ' ci ', '{new hash}', ARRAY['produce', 'read'])",
        effect: "FROM api_keys WHERE id = '{made}' AND cluster_id = '{prod}' AND name = 'ci' AND key_hash = '{new hash}'
                  AND scopes = ARRAY['produce', 'read'] AND num_nulls(created_by, last_used_at, revoked_at) = 3",
        audit: ["{acme}", "{prod}", "api_key_issued", "{made}", ""],
        meta: r#"{"name": "ci", "scopes": ["produce", "read"]}"#,
        heard: &["{prod}"],
    },
    Case {
        // Names of keys are not unique.
        call: "issue_api_key('{prod}', 'ci', '{new hash 2}', ARRAY['produce', 'consume', 'admin', 'read'])",
        effect: "FROM api_keys WHERE id = '{made}' AND cardinality(scopes) = 4
                  AND (SELECT count(*) FROM api_keys WHERE name = 'ci') = 2",
        audit: ["{acme}", "{prod}", "api_key_issued", "{made}", ""],
        meta: r#"{"name": "ci", "scopes": ["produce", "consume", "admin", "read"]}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "revoke_api_key('{key}')",
        effect: "FROM api_keys WHERE id = '{key}' AND revoked_at BETWEEN now() - interval '1 minute' AND now()",
        audit: ["{acme}", "{prod}", "api_key_revoked", "{key}", ""],
        meta: "{}",
        heard: &["{prod}"],
    },
    Case {
        call: "grant_cluster_role('{prod}', ' OPS@acme.example ', 'viewer')",
        effect: "FROM cluster_roles WHERE user_id = '{ops}' AND cluster_id = '{prod}' AND role = 'viewer'",
        audit: ["{acme}", "{prod}", "cluster_role_granted", "{prod}", "{ops}"],
        meta: r#"{"email": "ops@acme.example", "role": "viewer"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "grant_cluster_role('{prod}', 'ops@acme.example', 'admin')",
        effect: "FROM cluster_roles WHERE role = 'admin' AND (SELECT count(*) FROM cluster_roles) = 1",
        audit: ["{acme}", "{prod}", "cluster_role_granted", "{prod}", "{ops}"],
        meta: r#"{"email": "ops@acme.example", "role": "admin"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "grant_cluster_role('{prod}', 'ops@acme.example', 'admin')",
        effect: "still FROM cluster_roles WHERE role = 'admin' AND (SELECT count(*) FROM cluster_roles) = 1",
        audit: ["{acme}", "{prod}", "cluster_role_granted", "{prod}", "{ops}"],
        meta: r#"{"email": "ops@acme.example", "role": "admin"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "revoke_cluster_role('{prod}', ' Ops@Acme.Example')",
        effect: "WHERE NOT EXISTS (SELECT FROM cluster_roles)",
        audit: ["{acme}", "{prod}", "cluster_role_revoked", "{prod}", "{ops}"],
        meta: r#"{"email": "ops@acme.example", "role": "admin"}"#,
        heard: &["{prod}"],
    },
    Case {
        call: "set_operator(' OPS@acme.example ', true)",
        effect: "FROM users WHERE id = '{ops}' AND is_operator",
        audit: ["{acme}", "", "operator_granted", "ops@acme.example", "{ops}"],
        meta: r#"{"is_operator": true, "was": false}"#,
        heard: &[],
    },
    Case {
        call: "set_operator('ops@acme.example', true)",
        effect: "still FROM users WHERE id = '{ops}' AND is_operator",
        audit: ["{acme}", "", "operator_granted", "ops@acme.example", "{ops}"],
        meta: r#"{"is_operator": true, "was": true}"#,
        heard: &[],
    },
    Case {
        call: "set_operator(p_enabled => false, p_email => 'ops@acme.example')",
        effect: "WHERE NOT EXISTS (SELECT FROM users WHERE is_operator)",
        audit: ["{acme}", "", "operator_revoked", "ops@acme.example", "{ops}"],
        meta: r#"{"is_operator": false, "was": true}"#,
        heard: &[],
    },
    Case {
        call: "set_operator('eve@globex.example', false)",
        effect: "still WHERE NOT EXISTS (SELECT FROM users WHERE is_operator)",
        audit: ["{globex}", "", "operator_revoked", "eve@globex.example", "{eve}"],
        meta: r#"{"is_operator": false, "was": false}"#,
        heard: &[],
    },
    Case {
        call: "set_user_name('{ops}', '  Ops  Person ')",
        effect: "FROM users WHERE id = '{ops}' AND name = 'Ops  Person'",
        audit: ["{acme}", "", "user_name_changed", "{ops}", "{ops}"],
        meta: r#"{"old_name": null, "name": "Ops  Person"}"#,
        heard: &[],
    },
    Case {
        // The limit counts characters, after the blanks around them are gone.
        call: "set_user_name(p_name => ' ' || repeat('ä', 160) || ' ', p_user => '{ops}')",
        effect: "FROM users WHERE id = '{ops}' AND name = repeat('ä', 160)",
        audit: ["{acme}", "", "user_name_changed", "{ops}", "{ops}"],
        meta: r#"{"old_name": "Ops  Person", "name": "ääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääää"}"#,
        heard: &[],
    },
    Case {
        call: "record_operation('{acme}', NULL, 'control_plane', NULL, 'note', NULL, NULL)",
        effect: "FROM operations WHERE id = '{made}' AND at BETWEEN now() - interval '1 minute' AND now()",
        audit: ["{acme}", "", "note", "", ""],
        meta: "{}",
        heard: &[],
    },
    Case {
        call: r#"record_operation('{acme}', '{stage}', 'control_plane', '{nobody}', ' x ', 't', '{"a": [1, "{stage}"]}')"#,
        effect: "FROM operations WHERE id = '{made}'",
        audit: ["{acme}", "{stage}", " x ", "t", "{nobody}"],
        meta: r#"{"a": [1, "{stage}"]}"#,
        heard: &["{stage}"],
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn each_mutator_writes_its_rows_one_audit_row_and_its_announcement() {
    let mut plane = scene().await;
    let mut ear = plane.ear().await;
    for Case { call, effect, audit, meta, heard } in CASES {
        let (still, effect) = effect.strip_prefix("still ").map_or((false, *effect), |effect| (true, effect));
        let holds = |made| format!("SELECT EXISTS (SELECT {effect})").replace("{made}", made);
        // The caller's search_path is not that of the functions; the effects use it.
        plane.run("DELETE FROM queen_proxy.operations; SET search_path = queen_proxy").await;
        let before: bool = plane.value(&fill(&holds("{nobody}"), "")).await;
        assert_eq!(before, still, "before {call}");

        plane.run("SET search_path = ''").await;
        let made: String = plane.value(&fill(&format!("SELECT (queen_proxy.{call})::text"), "")).await;

        plane.run("SET search_path = queen_proxy").await;
        assert!(plane.value::<bool>(&fill(&holds("{made}"), &made)).await, "after {call}");
        let id = |text: &str| {
            if text.is_empty() { Value::Null } else { fill(text, &made).into() }
        };
        let [tenant, cluster, action, target, actor] = audit.map(id);
        let meta: Value = serde_json::from_str(&fill(meta, &made)).unwrap();
        let rows = "SELECT coalesce(jsonb_agg(to_jsonb(o) - 'id' - 'at'), '[]') FROM operations AS o";
        assert_eq!(
            plane.value::<Value>(rows).await,
            json!([{
                "tenant_id": tenant, "cluster_id": cluster, "actor": "control_plane", "actor_id": actor,
                "action": action, "target": target, "meta": meta,
            }]),
            "audit of {call}"
        );
        let expected: Vec<String> = heard.iter().map(|cluster| fill(cluster, &made)).collect();
        assert_eq!(plane.heard(&mut ear).await, expected, "announced by {call}");
    }
}

/// Calls and the SQLSTATE they fail with. P0001 texts must begin with the function's name; whatever
/// was given as text must not come back in them, for it may be a misplaced `s3cret`.
const REFUSALS: &[(&str, &str)] = &[
    ("record_operation(NULL, '{prod}', 'system', NULL, 'a', NULL, NULL)", "P0001"),
    ("record_operation('{acme}', '{prod}', NULL, NULL, 'a', NULL, NULL)", "P0001"),
    ("record_operation('{acme}', '{prod}', 's3cret', NULL, 'a', NULL, NULL)", "P0001"),
    ("record_operation('{acme}', '{prod}', 'system', NULL, NULL, NULL, NULL)", "P0001"),
    ("record_operation('{acme}', '{prod}', 'system', NULL, '  ', NULL, NULL)", "P0001"),
    ("record_operation('{nobody}', NULL, 'system', NULL, 'a', NULL, NULL)", "23503"),
    ("record_operation('{acme}', '{nobody}', 'system', NULL, 'a', NULL, NULL)", "23503"),
    ("create_tenant(NULL, 's3cret')", "P0001"),
    ("create_tenant('  ', 's3cret')", "P0001"),
    ("create_tenant('s3cret', NULL)", "P0001"),
    ("create_tenant('s3cret', '  ')", "P0001"),
    ("create_tenant('under_score', 'n')", "23514"),
    ("create_tenant('-a', 'n')", "23514"),
    ("create_tenant('a-', 'n')", "23514"),
    ("create_tenant('a.b', 'n')", "23514"),
    ("create_tenant('münchen', 'n')", "23514"),
    // The Kelvin sign, which other collations turn into k.
    ("create_tenant('\u{212a}elvin', 'n')", "23514"),
    ("create_tenant(repeat('a', 64), 'n')", "23514"),
    ("create_tenant(' ACME', 'n')", "23505"),
    ("create_user('{acme}', NULL, NULL, 'local')", "P0001"),
    ("create_user('{acme}', 's3cret', NULL, 'local')", "P0001"),
    ("create_user('{acme}', 'a@b', 's3cret', NULL)", "P0001"),
    ("create_user('{acme}', 'a@b', NULL, 's3cret')", "P0001"),
    ("create_user('{nobody}', 's3cret@b', 's3cret', 'local')", "P0001"),
    ("create_user(NULL, 'a@b', NULL, 'local')", "P0001"),
    ("create_user('{acme}', ' OPS@acme.example', NULL, 'local')", "23505"),
    ("create_user('{globex}', 'ops@acme.example', NULL, 'local')", "23505"),
    ("create_cluster('{acme}', NULL, 'free', '{cell}')", "P0001"),
    ("create_cluster('{acme}', ' ', 'free', '{cell}')", "P0001"),
    ("create_cluster('{nobody}', 's3cret', 'free', '{cell}')", "P0001"),
    ("create_cluster(NULL, 'new', 'free', '{cell}')", "P0001"),
    ("create_cluster('{acme}', 's3cret', 'platinum', '{cell}')", "P0001"),
    ("create_cluster('{acme}', 'new', NULL, '{cell}')", "P0001"),
    ("create_cluster('{acme}', 's3cret', 'free', '{nobody}')", "P0001"),
    ("create_cluster('{acme}', 'new', 'free', NULL)", "P0001"),
    ("create_cluster('{acme}', 'not a label', 'free', '{cell}')", "23514"),
    ("create_cluster('{acme}', 'Acme-Prod', 'free', '{cell}')", "23505"),
    ("create_cluster('{acme}', 'globex-prod', 'free', '{cell}')", "23505"),
    ("assign_plan('{prod}', 'platinum')", "P0001"),
    ("assign_plan('{prod}', NULL)", "P0001"),
    ("assign_plan('{nobody}', 'free')", "P0001"),
    ("assign_plan(NULL, 'free')", "P0001"),
    ("set_limit_override('{nobody}', '{}')", "P0001"),
    ("set_limit_override(NULL, '{}')", "P0001"),
    ("set_tenant_status('{acme}', NULL)", "P0001"),
    ("set_tenant_status('{acme}', 'push_blocked')", "P0001"),
    ("set_tenant_status('{acme}', 'Active')", "P0001"),
    ("set_tenant_status('{acme}', 's3cret')", "P0001"),
    ("set_tenant_status('{nobody}', 'active')", "P0001"),
    ("set_tenant_status(NULL, 'active')", "P0001"),
    ("set_cluster_status('{prod}', NULL)", "P0001"),
    ("set_cluster_status('{prod}', 'grace')", "P0001"),
    ("set_cluster_status('{prod}', 's3cret')", "P0001"),
    ("set_cluster_status('{nobody}', 'active')", "P0001"),
    ("set_cluster_status(NULL, 'active')", "P0001"),
    ("issue_api_key('{nobody}', 's3cret', '{new hash}', ARRAY['read'])", "P0001"),
    ("issue_api_key(NULL, 'n', '{new hash}', ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', NULL, '{new hash}', ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', ' ', '{new hash}', ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', NULL, ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', 'qk_live_s3cret', ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', repeat('a', 63), ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', repeat('a', 65), ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', repeat('A', 64), ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', repeat('g', 64), ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', E'{new hash}\\n', ARRAY['read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', NULL)", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', '{}')", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', ARRAY['read', 's3cret'])", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', ARRAY['Read'])", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', ARRAY['read', NULL])", "P0001"),
    ("issue_api_key('{prod}', 'n', '{new hash}', ARRAY[['read'], ['admin']])", "P0001"),
    ("issue_api_key('{prod}', 'n', '{hash}', ARRAY['read'])", "23505"),
    ("issue_api_key('{rival}', 'n', '{hash}', ARRAY['read'])", "23505"),
    ("revoke_api_key('{nobody}')", "P0001"),
    ("revoke_api_key(NULL)", "P0001"),
    ("revoke_api_key('{dead key}')", "P0001"),
    ("grant_cluster_role('{prod}', 'ops@acme.example', NULL)", "P0001"),
    ("grant_cluster_role('{prod}', 'ops@acme.example', 's3cret')", "P0001"),
    ("grant_cluster_role('{prod}', 'ops@acme.example', 'Admin')", "P0001"),
    ("grant_cluster_role('{prod}', NULL, 'admin')", "P0001"),
    ("grant_cluster_role('{prod}', 's3cret', 'admin')", "P0001"),
    ("grant_cluster_role('{nobody}', 'ops@acme.example', 'admin')", "P0001"),
    ("grant_cluster_role(NULL, 'ops@acme.example', 'admin')", "P0001"),
    ("grant_cluster_role('{prod}', 's3cret@acme.example', 'admin')", "P0001"),
    ("grant_cluster_role('{prod}', 'eve@globex.example', 'viewer')", "P0001"),
    ("grant_cluster_role('{rival}', 'ops@acme.example', 'viewer')", "P0001"),
    ("revoke_cluster_role('{prod}', NULL)", "P0001"),
    ("revoke_cluster_role('{prod}', 's3cret')", "P0001"),
    ("revoke_cluster_role('{nobody}', 'ops@acme.example')", "P0001"),
    ("revoke_cluster_role(NULL, 'ops@acme.example')", "P0001"),
    ("revoke_cluster_role('{prod}', 's3cret@acme.example')", "P0001"),
    ("revoke_cluster_role('{prod}', 'ops@acme.example')", "P0001"),
    ("revoke_session(NULL, now(), 'user', '{ops}')", "P0001"),
    ("revoke_session('  ', now(), 'user', '{ops}')", "P0001"),
    ("revoke_session('s3cret' || repeat('x', 507), now(), 'user', '{ops}')", "P0001"),
    ("revoke_session('s3cret', NULL, 'user', '{ops}')", "P0001"),
    ("revoke_session('s3cret', now(), NULL, '{ops}')", "P0001"),
    ("revoke_session('s3cret', now(), 's3cret', '{ops}')", "P0001"),
    ("revoke_session('s3cret', now(), 'user', '{nobody}')", "P0001"),
    ("revoke_session('s3cret', now(), 'system', NULL)", "P0001"),
    ("revoke_session('s3cret', now(), 'user')", "P0001"),
    ("revoke_session('s3cret', now())", "P0001"),
    ("set_operator('ops@acme.example', NULL)", "P0001"),
    ("set_operator(NULL, true)", "P0001"),
    ("set_operator('s3cret', true)", "P0001"),
    ("set_operator('s3cret@acme.example', true)", "P0001"),
    ("set_user_name('{ops}', NULL)", "P0001"),
    ("set_user_name('{ops}', '   ')", "P0001"),
    ("set_user_name('{ops}', 's3cret' || repeat('x', 155))", "P0001"),
    ("set_user_name('{nobody}', 's3cret')", "P0001"),
    ("set_user_name(NULL, 's3cret')", "P0001"),
    ("record_user_login('{nobody}')", "P0001"),
    ("record_user_login(NULL)", "P0001"),
    ("emit_outbox(NULL, '{}')", "P0001"),
    ("emit_outbox('  ', '{\"a\": \"s3cret\"}')", "P0001"),
    ("prune_usage_minutes(NULL)", "P0001"),
    ("prune_usage_minutes(0)", "P0001"),
    ("prune_usage_minutes(-1)", "P0001"),
    ("cluster_month_msgs('{prod}', NULL)", "P0001"),
    ("delete_tenant(NULL)", "P0001"),
    ("delete_tenant(NULL, true)", "P0001"),
    ("delete_tenant('{acme}')", "P0001"),
    ("delete_tenant('{acme}', false)", "P0001"),
    ("delete_tenant(p_force => NULL, p_tenant_id => '{acme}')", "P0001"),
];

/// Two things wrong at once: the text says which is looked at first.
const FIRST: &[(&str, &str)] = &[
    ("assign_plan('{nobody}', 'platinum')", "assign_plan: unknown plan"),
    ("issue_api_key('{nobody}', NULL, NULL, NULL)", "issue_api_key: unknown cluster"),
    ("revoke_session(repeat('x', 513), now(), 'user', '{ops}')", "revoke_session: jti must be at most 512 "),
    (
        "delete_tenant('{acme}')",
        "delete_tenant: tenant 00000000-0000-4000-8000-00000000000a has status active",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn each_refusal_has_its_sqlstate_and_leaves_no_trace() {
    let mut plane = scene().await;
    let mut ear = plane.ear().await;
    let before = plane.everything().await;
    for (call, state) in REFUSALS {
        let (found, message) = plane.refusal(&fill(&format!("SELECT queen_proxy.{call}"), "")).await;
        assert_eq!(found, *state, "{call}: {message}");
        if *state == "P0001" {
            let function = call.split('(').next().unwrap();
            assert!(message.starts_with(&format!("{function}: ")), "{call}: {message}");
            assert!(!message.contains("s3cret"), "{call}: {message}");
        }
    }
    for (call, text) in FIRST {
        let (_, message) = plane.refusal(&fill(&format!("SELECT queen_proxy.{call}"), "")).await;
        assert!(message.starts_with(text), "{call}: {message}");
    }
    assert_eq!(plane.everything().await, before);
    assert_eq!(plane.heard(&mut ear).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_actor_may_be_recorded() {
    let mut plane = scene().await;
    let actors = ["user", "api_key", "control_plane", "system"];
    for actor in actors {
        plane
            .run(&fill(
                &format!("SELECT queen_proxy.record_operation('{{acme}}', NULL, '{actor}', NULL, '{actor}', NULL, NULL)"),
                "",
            ))
            .await;
    }
    let recorded =
        plane.rows("SELECT actor FROM queen_proxy.operations WHERE actor = action ORDER BY at").await;
    assert_eq!(recorded, actors);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_announces_at_its_commit_and_each_cluster_once() {
    let mut plane = scene().await;
    let mut ear = plane.ear().await;
    let calls = fill(
        "SELECT queen_proxy.assign_plan('{prod}', 'free'), queen_proxy.set_cluster_status('{prod}', 'suspended'),
                queen_proxy.set_tenant_status('{acme}', 'grace')",
        "",
    );
    let before = plane.everything().await;
    plane.run(&format!("BEGIN; {calls}; ROLLBACK")).await;
    assert_eq!(plane.heard(&mut ear).await, [""; 0], "what was rolled back");
    assert_eq!(plane.everything().await, before);
    plane.run(&format!("BEGIN; {calls}; COMMIT")).await;
    assert_eq!(plane.heard(&mut ear).await, [fill("{prod}", ""), fill("{stage}", "")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_ten_who_revoke_a_key_at_once_one_does() {
    let mut plane = scene().await;
    let revoke = fill("queen_proxy.revoke_api_key('{key}')", "");
    let results = plane.race(&revoke, &vec![revoke.clone(); 9]).await;
    let (revoked, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!((revoked.len(), refused.len()), (1, 9));
    for refusal in refused {
        let text = refusal.unwrap_err().into_database_error().unwrap().message().to_owned();
        assert!(text.starts_with("revoke_api_key: ") && text.ends_with("already revoked"), "{text}");
    }
    let rows = "SELECT count(*) FROM queen_proxy.operations WHERE action = 'api_key_revoked'";
    assert_eq!(plane.value::<i64>(rows).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_cluster_and_a_tenants_new_status_wait_for_each_other() {
    // Otherwise the status could miss the cluster, which would stay cached with the old one.
    let mut plane = scene().await;
    let mut other = scene_connection(&plane).await;
    let create = fill("SELECT queen_proxy.create_cluster('{acme}', 'acme-new', 'free', '{cell}')", "");
    let status = fill("SELECT queen_proxy.set_tenant_status('{acme}', 'suspended')", "");
    for (first, second) in [(&create, &status), (&status, &create)] {
        plane.run(&format!("BEGIN; {first}")).await;
        let refused =
            sqlx::raw_sql(sqlx::AssertSqlSafe(second.clone())).execute(&mut other).await.unwrap_err();
        let refused = refused.into_database_error().unwrap();
        assert_eq!(refused.code().as_deref(), Some("55P03"), "{second} does not wait: {refused}");
        plane.run("ROLLBACK").await;
    }
}

/// Another connection, which gives up soon when it has to wait for a lock.
async fn scene_connection(plane: &Plane) -> sqlx::PgConnection {
    let mut connection = plane.world.control().await;
    sqlx::raw_sql("SET lock_timeout = '100ms'").execute(&mut connection).await.unwrap();
    connection
}
