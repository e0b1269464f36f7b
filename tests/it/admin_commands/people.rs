//! `admin user` and `admin session`.

use super::{Admin, audit, everything, query, text};
use serde_json::json;

/// Not 72 letters, but 72 bytes.
const LONGEST: &str = "äbcdefghijklmnopqrstuvwxyzäbcdefghijklmnopqrstuvwxyzäbcdefghijklmnopq";

#[tokio::test(flavor = "multi_thread")]
async fn passwords_come_from_files_and_from_standard_input() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| -> String {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    assert_eq!(LONGEST.len(), 72);
    let is = async |email: &str, password: &str| {
        let sql = "SELECT coalesce(password_hash = public.crypt($2, password_hash) AND password_hash LIKE '$2a$10$%', false)
                     FROM queen_proxy.users WHERE email = $1";
        let mut connection = world.control().await;
        let asked = sqlx::query_scalar(sql).bind(email).bind(password);
        asked.fetch_one(&mut connection).await.unwrap_or(false)
    };

    let by_file = file("password", b" s3cret text\r\n");
    let out = admin.ok(&["user", "create", "acme", " Ann@Acme.example ", "--password-file", &by_file]);
    assert!(out.starts_with("user ann@acme.example (") && out.ends_with(") of tenant acme\n"), "{out}");
    assert!(is("ann@acme.example", " s3cret text").await);
    let tenant = text(&acme, "tenant_id");
    let ran = admin.run_with(
        &["user", "create", tenant, "ben@acme.example", "--password-stdin", "--json"],
        &format!("{LONGEST}\n"),
    );
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(is("ben@acme.example", LONGEST).await);
    let document: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((text(&document, "email"), &document["password_set"]), ("ben@acme.example", &json!(true)));
    let document = admin.json(&["user", "create", "acme", "cat@acme.example", "--provider", "github"]);
    assert_eq!(document["password_set"], false);
    assert!(!is("cat@acme.example", "").await);
    assert!(!everything(&world).await.contains("s3cret"));

    // Refused before anything is asked, and never repeated.
    let too_long = format!("{LONGEST}x");
    for (content, expected) in [
        (too_long.as_bytes(), "the password must be at most 72 bytes long"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b" \t", "the password must not be blank"),
        (b"s3\0cret", "the password must not contain a NUL byte"),
        (b"s3cret\xff", "must be UTF-8 text"),
    ] {
        let path = file("wrong", content);
        let create = ["user", "create", "acme", "dan@acme.example", "--password-file", &path];
        let line = admin.fails(2, &create);
        assert!(line.ends_with(expected) && !line.contains("cret"), "{line}");
        if let Ok(content) = std::str::from_utf8(content) {
            let create = ["user", "create", "acme", "dan@acme.example", "--password-stdin"];
            assert!(admin.fails_with(2, &create, content).ends_with(expected));
        }
    }
    let missing = folder.path().join("missing");
    let create = ["user", "create", "acme", "dan@acme.example", "--password-file", missing.to_str().unwrap()];
    assert_eq!(
        admin.fails(2, &create),
        "the password file cannot be read: No such file or directory (os error 2)"
    );
    let both = ["--password-stdin", "--password-file", &by_file];
    assert_eq!(admin.run(&[&["user", "create", "acme", "dan@acme.example"][..], &both].concat()).code, 2);
    // There is no way to give it as an argument.
    assert_eq!(admin.run(&["user", "create", "acme", "dan@acme.example", "--password", "x"]).code, 2);

    assert_eq!(
        admin.fails(1, &["user", "create", "acme", "ANN@acme.example"]),
        "it exists already (users_email_key)"
    );
    assert_eq!(admin.fails(1, &["user", "create", "acme", "ann"]), "create_user: email must contain @");
    assert_eq!(admin.fails(1, &["user", "create", "globex", "a@b"]), "there is no such tenant");
    assert_eq!(query(&world, "SELECT count(*) FROM queen_proxy.users").await, "4");
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_are_given_and_taken() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    admin.ok(&["user", "create", "acme", "ann@acme.example"]);
    let role = |role| admin.ok(&["user", "role", "acme-prod", "Ann@acme.example", role]);
    let stored = async || {
        query(&world, "SELECT role FROM queen_proxy.cluster_roles NATURAL JOIN (SELECT id AS user_id, email FROM queen_proxy.users) AS u WHERE email LIKE 'ann%'").await
    };
    for given in ["viewer", "producer", "producer"] {
        assert_eq!(role(given), format!("ann@acme.example is {given} on cluster acme-prod\n"));
        assert_eq!(stored().await, given);
    }
    assert_eq!(role("none"), "ann@acme.example has no role on cluster acme-prod\n");
    assert_eq!(stored_count(&world).await, "1");
    let cluster = text(&acme, "cluster_id");
    assert_eq!(
        admin.fails(1, &["user", "role", cluster, "ann@acme.example", "none"]),
        format!("revoke_cluster_role: the user has no role on cluster {cluster}")
    );
    let document = admin.json(&["user", "role", cluster, "ann@acme.example", "admin"]);
    assert_eq!(
        document,
        json!({"cluster_id": cluster, "cluster_slug": "acme-prod", "email": "ann@acme.example", "role": "admin"})
    );
    assert_eq!(admin.json(&["user", "role", cluster, "ann@acme.example", "none"])["role"], json!(null));
    assert_eq!(
        admin.fails(1, &["user", "role", "acme-prod", "bob@acme.example", "viewer"]),
        "grant_cluster_role: no user has this email"
    );
    assert_eq!(admin.run(&["user", "role", "acme-prod", "ann@acme.example", "owner"]).code, 2);
}

async fn stored_count(world: &crate::support::World) -> String {
    query(world, "SELECT count(*) FROM queen_proxy.cluster_roles").await
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_are_made_and_unmade() {
    let (world, admin) = Admin::alone().await;
    admin.acme("shared-a");
    let operator = async || query(&world, "SELECT is_operator FROM queen_proxy.users").await;
    for _ in 0..2 {
        assert_eq!(
            admin.ok(&["user", "operator", "ops@acme.example", "on"]),
            "ops@acme.example is an operator\n"
        );
        assert_eq!(operator().await, "true");
    }
    let document = admin.json(&["user", "operator", "OPS@acme.example", "off"]);
    assert_eq!(document, json!({"email": "ops@acme.example", "is_operator": false}));
    assert_eq!(operator().await, "false");
    assert_eq!(
        admin.ok(&["user", "operator", "ops@acme.example", "off"]),
        "ops@acme.example is no operator\n"
    );
    assert_eq!(
        admin.fails(1, &["user", "operator", "bob@acme.example", "on"]),
        "set_operator: no user has this email"
    );
    assert_eq!(admin.run(&["user", "operator", "ops@acme.example", "yes"]).code, 2);
    let of = |action: &'static str| move |done: &&String| *done == action;
    let audit = audit(&world).await;
    assert_eq!(audit.iter().filter(of("operator_granted")).count(), 2);
    assert_eq!(audit.iter().filter(of("operator_revoked")).count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_revoked() {
    let (world, admin) = Admin::alone().await;
    let acme = admin.acme("shared-a");
    let revoke = [
        "session",
        "revoke",
        " abc ",
        "--user",
        "Ops@acme.example",
        "--expires-at",
        "2100-01-31T14:00:00+02:00",
    ];
    let line = "session abc of ops@acme.example is revoked; it would have expired at 2100-01-31T12:00:00Z\n";
    assert_eq!(admin.ok(&revoke), line);
    assert_eq!(admin.ok(&revoke), line, "a repeat is fine");
    let user = text(&acme, "user_id");
    let document = admin.json(&["session", "revoke", "def", "--user", user, "--expires-at", "4102444800"]);
    assert_eq!(
        document,
        json!({"jti": "def", "user_id": user, "email": "ops@acme.example", "expires_at": "2100-01-01T00:00:00Z"})
    );
    let rows = "SELECT string_agg(jti || ' ' || extract(epoch FROM expires_at)::bigint, ', ' ORDER BY jti) FROM queen_proxy.revoked_tokens";
    assert_eq!(query(&world, rows).await, "abc 4105080000, def 4102444800");
    let by = "SELECT string_agg(DISTINCT actor || ' ' || actor_id, ', ') FROM queen_proxy.operations WHERE action = 'session_revoked'";
    assert_eq!(query(&world, by).await, format!("control_plane {user}"));

    let fails = |code, jti, user, at| {
        admin.fails(code, &["session", "revoke", jti, "--user", user, "--expires-at", at])
    };
    assert_eq!(fails(1, "x", "bob@acme.example", "4102444800"), "there is no such user");
    assert_eq!(fails(1, " ", user, "4102444800"), "revoke_session: jti must not be blank");
    let wrong = "--expires-at: must be seconds since 1970 or like 2026-01-31T12:00:00Z";
    for at in ["tomorrow", "infinity", "2100-01-31", "2100-01-31T12:00:00", "99999999999999", ""] {
        assert_eq!(fails(2, "x", user, at), wrong);
    }
    assert_eq!(fails(1, "x", user, "2100-02-31T12:00:00Z"), "a value cannot be read (SQLSTATE 22008)");
    let token = fails(2, "eyJhbGciOiJIUzI1NiJ9.eyJqdGkiOiJ4In0.s3cret", user, "4102444800");
    assert_eq!(token, "a session is named by its id, the `jti` claim, not by its token");
}
