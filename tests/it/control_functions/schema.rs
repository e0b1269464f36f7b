//! Tables, indexes and functions as the contract writes them down (sections 1 and 2), compared with
//! what the catalogue of a running database says.

use super::Plane;
use std::collections::BTreeSet;

const ID: &str = "id uuid not null default public.gen_random_uuid()";
const ID_GIVEN: &str = "id uuid not null";
const CREATED: &str = "created_at timestamp with time zone not null default now()";

/// Columns in no particular order.
const COLUMNS: &[(&str, &[&str])] = &[
    (
        "tenants",
        &[
            ID,
            CREATED,
            "slug text not null",
            "name text not null",
            "status text not null default 'active'::text",
        ],
    ),
    (
        "users",
        &[
            ID,
            CREATED,
            "tenant_id uuid not null",
            "email text not null",
            "password_hash text",
            "is_operator boolean not null default false",
            "name text",
            "last_login_at timestamp with time zone",
        ],
    ),
    (
        "identities",
        &[
            ID,
            CREATED,
            "user_id uuid not null",
            "provider text not null",
            "provider_id text not null",
            "email text not null",
            "verified boolean not null default false",
        ],
    ),
    (
        "plans",
        &[
            ID,
            CREATED,
            "code text not null",
            "cell_class text not null",
            "max_req_per_sec integer",
            "req_burst integer",
            "max_msgs_per_sec integer",
            "msgs_burst integer",
            "max_queues integer",
            "max_partitions_per_queue integer",
            "max_parked_pops integer",
            "max_payload_bytes integer",
            "max_batch_items integer",
            "max_retained_bytes bigint",
            "max_retention_seconds integer",
            "monthly_msgs_quota bigint",
            "features jsonb not null default '{}'::jsonb",
        ],
    ),
    (
        "cells",
        &[
            ID,
            CREATED,
            "slug text not null",
            "region text not null",
            "base_url text not null",
            "class text not null",
            "capacity_slots integer not null default 0",
            "used_slots integer not null default 0",
            "broker_version text",
            "status text not null default 'active'::text",
            "cell_secret text",
        ],
    ),
    (
        "clusters",
        &[
            ID,
            CREATED,
            "tenant_id uuid not null",
            "cell_id uuid not null",
            "plan_id uuid not null",
            "slug text not null",
            "broker_tenant_uuid uuid not null default public.gen_random_uuid()",
            "status text not null default 'active'::text",
            "limit_overrides jsonb not null default '{}'::jsonb",
        ],
    ),
    ("cluster_roles", &["user_id uuid not null", "cluster_id uuid not null", "role text not null", CREATED]),
    (
        "api_keys",
        &[
            ID,
            CREATED,
            "cluster_id uuid not null",
            "name text not null",
            "key_hash text not null",
            "scopes text[] not null default '{}'::text[]",
            "created_by uuid",
            "last_used_at timestamp with time zone",
            "revoked_at timestamp with time zone",
        ],
    ),
    (
        "queues",
        &[
            ID,
            CREATED,
            "cluster_id uuid not null",
            "name text not null",
            "partitions_count integer not null default 0",
            "deleted_at timestamp with time zone",
        ],
    ),
    (
        "usage_minutes",
        &[
            "cluster_id uuid not null",
            "minute timestamp with time zone not null",
            "op_class text not null",
            "msgs bigint not null default 0",
            "reqs bigint not null default 0",
            "bytes_in bigint not null default 0",
            "bytes_out bigint not null default 0",
        ],
    ),
    (
        "usage_days",
        &[
            "cluster_id uuid not null",
            "day date not null",
            "op_class text not null",
            "msgs bigint not null default 0",
            "reqs bigint not null default 0",
            "bytes_in bigint not null default 0",
            "bytes_out bigint not null default 0",
        ],
    ),
    (
        "operations",
        &[
            ID,
            "tenant_id uuid not null",
            "cluster_id uuid",
            "actor text not null",
            "actor_id uuid",
            "action text not null",
            "target text",
            "meta jsonb not null default '{}'::jsonb",
            "at timestamp with time zone not null default now()",
        ],
    ),
    ("revoked_tokens", &["jti text not null", "expires_at timestamp with time zone not null"]),
    (
        "outbox",
        &[
            ID,
            CREATED,
            "kind text not null",
            "payload jsonb not null",
            "consumed_at timestamp with time zone",
            // Ours: whose event it is at the moment.
            "claimed_until timestamp with time zone",
        ],
    ),
    (
        // Ours: the batches of usage that were counted.
        "usage_batches",
        &[ID_GIVEN, CREATED, "written integer not null default 0", "dropped integer not null default 0"],
    ),
    (
        "schema_migrations",
        &["name text not null", "applied_at timestamp with time zone not null default now()"],
    ),
];

const PK: &str = "PRIMARY KEY (id)";
const SLUG: &str = "UNIQUE (slug)";
const LABEL: &str = "CHECK ((slug ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'::text))";
const OF_CLUSTER: &str = "FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters(id) ON DELETE CASCADE";
const OF_TENANT: &str = "FOREIGN KEY (tenant_id) REFERENCES queen_proxy.tenants(id) ON DELETE CASCADE";
const OF_USER: &str = "FOREIGN KEY (user_id) REFERENCES queen_proxy.users(id) ON DELETE CASCADE";

/// Keys, references and special checks; the regular checks are in [`WORDS`], [`FILLED`] and [`BOUNDS`].
const CONSTRAINTS: &[(&str, &[&str])] = &[
    ("tenants", &[PK, SLUG, LABEL]),
    (
        "users",
        &[
            PK,
            "UNIQUE (email)",
            OF_TENANT,
            "CHECK (((name IS NULL) OR ((btrim(name) <> ''::text) AND (char_length(name) <= 160))))",
        ],
    ),
    ("identities", &[PK, "UNIQUE (provider, provider_id)", OF_USER]),
    ("plans", &[PK, "UNIQUE (code)", "CHECK ((code ~ '^[a-z][a-z0-9-]*$'::text))"]),
    ("cells", &[PK, SLUG]),
    (
        "clusters",
        &[
            PK,
            SLUG,
            LABEL,
            OF_TENANT,
            "FOREIGN KEY (cell_id) REFERENCES queen_proxy.cells(id) ON DELETE RESTRICT",
            "FOREIGN KEY (plan_id) REFERENCES queen_proxy.plans(id) ON DELETE RESTRICT",
        ],
    ),
    ("cluster_roles", &["PRIMARY KEY (user_id, cluster_id)", OF_USER, OF_CLUSTER]),
    (
        "api_keys",
        &[
            PK,
            "UNIQUE (key_hash)",
            "CHECK ((key_hash ~ '^[0-9a-f]{64}$'::text))",
            "CHECK ((scopes <@ ARRAY['produce'::text, 'consume'::text, 'admin'::text, 'read'::text]))",
            OF_CLUSTER,
            "FOREIGN KEY (created_by) REFERENCES queen_proxy.users(id) ON DELETE SET NULL",
        ],
    ),
    ("queues", &[PK, OF_CLUSTER]),
    ("usage_minutes", &["PRIMARY KEY (cluster_id, minute, op_class)", OF_CLUSTER]),
    ("usage_days", &["PRIMARY KEY (cluster_id, day, op_class)", OF_CLUSTER]),
    (
        "operations",
        &[
            PK,
            "FOREIGN KEY (tenant_id) REFERENCES queen_proxy.tenants(id)",
            "FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters(id) ON DELETE SET NULL",
        ],
    ),
    ("revoked_tokens", &["PRIMARY KEY (jti)"]),
    ("outbox", &[PK]),
    ("usage_batches", &[PK]),
    ("schema_migrations", &["PRIMARY KEY (name)"]),
];

/// Columns that hold one of a few words.
const WORDS: &[(&str, &str, &[&str])] = &[
    ("tenants", "status", &["active", "grace", "suspended", "deleting"]),
    ("identities", "provider", &["local", "google", "github"]),
    ("plans", "cell_class", &["shared", "dedicated"]),
    ("cells", "class", &["shared", "dedicated"]),
    ("cells", "status", &["active", "draining", "dead"]),
    ("clusters", "status", &["active", "push_blocked", "suspended", "deleting"]),
    ("cluster_roles", "role", &["admin", "producer", "consumer", "viewer"]),
    ("usage_minutes", "op_class", &["push", "delivery", "txn", "configure", "read"]),
    ("usage_days", "op_class", &["push", "delivery", "txn", "configure", "read"]),
    ("operations", "actor", &["user", "api_key", "control_plane", "system"]),
];

/// Texts that may not be blank.
const FILLED: &[(&str, &str)] = &[
    ("tenants", "name"),
    ("cells", "slug"),
    ("cells", "region"),
    ("cells", "base_url"),
    ("api_keys", "name"),
    ("queues", "name"),
    ("operations", "action"),
    ("outbox", "kind"),
];

/// Numbers with a lower bound.
const BOUNDS: &[(&str, &str, &[&str])] = &[
    (
        "plans",
        "> 0",
        &[
            "max_req_per_sec",
            "req_burst",
            "max_msgs_per_sec",
            "msgs_burst",
            "max_queues",
            "max_partitions_per_queue",
            "max_parked_pops",
            "max_payload_bytes",
            "max_batch_items",
            "max_retained_bytes",
            "max_retention_seconds",
            "monthly_msgs_quota",
        ],
    ),
    ("cells", ">= 0", &["capacity_slots", "used_slots"]),
    ("queues", ">= 0", &["partitions_count"]),
    ("usage_minutes", ">= 0", &["msgs", "reqs", "bytes_in", "bytes_out"]),
    ("usage_days", ">= 0", &["msgs", "reqs", "bytes_in", "bytes_out"]),
];

const INDEXES: &[&str] = &[
    "INDEX idx_users_tenant ON queen_proxy.users USING btree (tenant_id)",
    "INDEX idx_users_operator ON queen_proxy.users USING btree (email) WHERE is_operator",
    "INDEX idx_identities_user ON queen_proxy.identities USING btree (user_id)",
    "INDEX idx_clusters_cell ON queen_proxy.clusters USING btree (cell_id)",
    "INDEX idx_clusters_tenant ON queen_proxy.clusters USING btree (tenant_id)",
    "INDEX idx_cluster_roles_cluster ON queen_proxy.cluster_roles USING btree (cluster_id)",
    "INDEX idx_api_keys_cluster ON queen_proxy.api_keys USING btree (cluster_id)",
    "UNIQUE INDEX uq_queues_cluster_name_live ON queen_proxy.queues USING btree (cluster_id, name) WHERE (deleted_at IS NULL)",
    "INDEX idx_usage_minutes_minute ON queen_proxy.usage_minutes USING btree (minute)",
    "INDEX idx_usage_batches_created ON queen_proxy.usage_batches USING btree (created_at)",
    "INDEX idx_usage_days_day ON queen_proxy.usage_days USING btree (day)",
    "INDEX idx_operations_tenant_at ON queen_proxy.operations USING btree (tenant_id, at DESC)",
    "INDEX idx_operations_cluster_at ON queen_proxy.operations USING btree (cluster_id, at DESC) WHERE (cluster_id IS NOT NULL)",
    "INDEX idx_revoked_tokens_expires ON queen_proxy.revoked_tokens USING btree (expires_at)",
    "UNIQUE INDEX uq_outbox_monthly_quota ON queen_proxy.outbox USING btree \
     (kind, ((payload ->> 'cluster_id'::text)), ((payload ->> 'month'::text))) \
     WHERE (kind = ANY (ARRAY['cluster_monthly_quota_warning'::text, 'cluster_monthly_quota_blocked'::text]))",
    "INDEX idx_outbox_unconsumed ON queen_proxy.outbox USING btree (created_at) WHERE (consumed_at IS NULL)",
];

/// Name, arguments with their defaults, result.
const FUNCTIONS: &[(&str, &str, &str)] = &[
    (
        "record_operation",
        "p_tenant_id uuid, p_cluster_id uuid, p_actor text, p_actor_id uuid, p_action text, p_target text, p_meta jsonb",
        "uuid",
    ),
    ("create_tenant", "p_slug text, p_name text", "uuid"),
    ("create_user", "p_tenant_id uuid, p_email text, p_password_hash text, p_provider text", "uuid"),
    ("create_cluster", "p_tenant_id uuid, p_slug text, p_plan_code text, p_cell_id uuid", "uuid"),
    ("assign_plan", "p_cluster_id uuid, p_plan_code text", "void"),
    ("set_limit_override", "p_cluster_id uuid, p_overrides jsonb", "void"),
    ("set_tenant_status", "p_tenant_id uuid, p_status text", "void"),
    ("set_cluster_status", "p_cluster_id uuid, p_status text", "void"),
    ("issue_api_key", "p_cluster_id uuid, p_name text, p_key_hash text, p_scopes text[]", "uuid"),
    ("revoke_api_key", "p_key_id uuid", "void"),
    ("grant_cluster_role", "p_cluster uuid, p_email text, p_role text", "void"),
    ("revoke_cluster_role", "p_cluster uuid, p_email text", "void"),
    (
        "bootstrap_tenant",
        "p_tenant_slug text, p_tenant_name text, p_cluster_slug text, p_plan_code text, p_cell uuid, p_admin_email text, \
         p_password text DEFAULT NULL::text, p_key_name text DEFAULT 'default'::text",
        "jsonb",
    ),
    (
        "revoke_session",
        "p_jti text, p_expires_at timestamp with time zone, p_actor text DEFAULT 'user'::text, \
         p_actor_id uuid DEFAULT NULL::uuid",
        "void",
    ),
    ("sweep_revoked_tokens", "", "integer"),
    ("set_operator", "p_email text, p_enabled boolean", "void"),
    ("set_user_name", "p_user uuid, p_name text", "void"),
    ("record_user_login", "p_user uuid", "timestamp with time zone"),
    ("emit_outbox", "p_kind text, p_payload jsonb", "uuid"),
    ("rollup_usage_days", "p_through date DEFAULT NULL::date", "integer"),
    ("prune_usage_minutes", "p_keep_days integer DEFAULT 90", "integer"),
    ("cluster_month_msgs", "p_cluster uuid, p_month date", "bigint"),
    ("delete_tenant", "p_tenant_id uuid, p_force boolean DEFAULT false", "jsonb"),
    // Ours: what proxies call to meter.
    (
        "record_usage",
        "p_batch uuid, p_rows jsonb, OUT written integer, OUT dropped integer, OUT repeated boolean",
        "record",
    ),
    (
        "maintain_usage",
        "p_keep_days integer, OUT ran boolean, OUT rolled integer, OUT pruned integer, OUT swept integer",
        "record",
    ),
    (
        "check_monthly_quotas",
        "p_warn_percent integer, p_month date DEFAULT NULL::date",
        "TABLE(cluster_id uuid)",
    ),
];

/// The table of functions in the page "Tenants, clusters and cells", as it stands there: short names of
/// the arguments, no result where it names none.
const PAGE: &[(&str, &str)] = &[
    ("create_tenant(slug, name)", "uuid"),
    ("create_user(tenant, email, password_hash, provider)", "uuid"),
    ("create_cluster(tenant, slug, plan_code, cell_id)", "uuid"),
    ("assign_plan(cluster, plan_code)", ""),
    ("set_limit_override(cluster, overrides)", ""),
    ("set_tenant_status(tenant, status)", ""),
    ("set_cluster_status(cluster, status)", ""),
    ("issue_api_key(cluster, name, key_hash, scopes)", "uuid"),
    ("revoke_api_key(key_id)", ""),
    ("grant_cluster_role(cluster, email, role)", ""),
    ("revoke_cluster_role(cluster, email)", ""),
    ("revoke_session(jti, expires_at, actor, actor_id)", ""),
    ("sweep_revoked_tokens()", "int"),
    ("set_operator(email, enabled)", ""),
    ("emit_outbox(kind, payload)", "uuid"),
    ("rollup_usage_days(through)", "int"),
    ("prune_usage_minutes(keep_days)", "int"),
    ("cluster_month_msgs(cluster, month)", "bigint"),
    ("record_operation(tenant, cluster, actor, actor_id, action, target, meta)", "uuid"),
];

/// Both as sets, so that a failure shows what is missing and what is too much.
fn same(what: &str, found: Vec<String>, expected: impl IntoIterator<Item = String>) {
    let count = found.len();
    let found: BTreeSet<String> = found.into_iter().collect();
    assert_eq!(found.len(), count, "{what}: something is there twice");
    let expected: BTreeSet<String> = expected.into_iter().collect();
    let missing: Vec<_> = expected.difference(&found).collect();
    let extra: Vec<_> = found.difference(&expected).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "{what}\nmissing: {missing:#?}\nnot in the contract: {extra:#?}"
    );
}

fn lines<'a>(tables: &'a [(&'a str, &'a [&'a str])]) -> impl Iterator<Item = String> + 'a {
    tables.iter().flat_map(|(table, lines)| lines.iter().map(move |line| format!("{table}: {line}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_columns_constraints_and_indexes_are_those_of_the_contract() {
    let mut plane = Plane::new().await;
    // Then the catalogue's texts name every schema.
    plane.run("SET search_path = ''").await;

    let columns = plane
        .rows(
            "SELECT c.relname || ': ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
                    || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
                    || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '')
               FROM pg_attribute AS a
               JOIN pg_class AS c ON c.oid = a.attrelid AND c.relkind = 'r'
          LEFT JOIN pg_attrdef AS d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
              WHERE c.relnamespace = 'queen_proxy'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped",
        )
        .await;
    same("columns", columns, lines(COLUMNS));

    let constraints = plane
        .rows(
            "SELECT r.relname || ': ' || pg_get_constraintdef(c.oid)
               FROM pg_constraint AS c JOIN pg_class AS r ON r.oid = c.conrelid
              WHERE c.connamespace = 'queen_proxy'::regnamespace AND c.contype <> 'n' AND c.convalidated",
        )
        .await;
    let words = WORDS.iter().map(|(table, column, words)| {
        let list: Vec<String> = words.iter().map(|word| format!("'{word}'::text")).collect();
        format!("{table}: CHECK (({column} = ANY (ARRAY[{}])))", list.join(", "))
    });
    let filled =
        FILLED.iter().map(|(table, column)| format!("{table}: CHECK ((btrim({column}) <> ''::text))"));
    let bounds = BOUNDS.iter().flat_map(|(table, bound, columns)| {
        columns.iter().map(move |column| format!("{table}: CHECK (({column} {bound}))"))
    });
    same("constraints", constraints, lines(CONSTRAINTS).chain(words).chain(filled).chain(bounds));
    let named = "SELECT count(*) FROM pg_constraint WHERE conname = 'users_name_valid'
                    AND connamespace = 'queen_proxy'::regnamespace AND contype = 'c'";
    assert_eq!(plane.value::<i64>(named).await, 1, "the one constraint whose name the contract gives");

    let indexes = plane
        .rows(
            "SELECT substr(pg_get_indexdef(i.indexrelid), 8)
               FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
              WHERE c.relnamespace = 'queen_proxy'::regnamespace AND i.indisvalid
                AND NOT EXISTS (SELECT FROM pg_constraint AS k WHERE k.conindid = i.indexrelid AND k.contype IN ('p', 'u'))",
        )
        .await;
    same("indexes", indexes, INDEXES.iter().map(|&index| index.to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_have_the_contracts_signatures_and_a_fixed_search_path() {
    let mut plane = Plane::new().await;
    let (ours, loose) = (
        "FROM pg_proc WHERE pronamespace = 'queen_proxy'::regnamespace",
        "AND ('search_path=queen_proxy, pg_temp' = ANY (proconfig)) IS NOT TRUE",
    );
    for (name, arguments, result) in FUNCTIONS {
        let found = plane
            .rows(&format!(
                "SELECT pg_get_function_arguments(oid) || ' -> ' || pg_get_function_result(oid) {ours} AND proname = '{name}'"
            ))
            .await;
        assert_eq!(
            found,
            [format!("{arguments} -> {result}")],
            "{name}: one of that name, with these arguments"
        );
        let identity: String = plane
            .value(&format!("SELECT pg_get_function_identity_arguments(oid) {ours} AND proname = '{name}'"))
            .await;
        let without_defaults: Vec<&str> =
            arguments.split(", ").map(|argument| argument.split(" DEFAULT ").next().unwrap()).collect();
        assert_eq!(identity, without_defaults.join(", "), "{name}");
    }
    let names = plane.rows(&format!("SELECT proname::text {ours}")).await;
    same("functions", names, FUNCTIONS.iter().map(|(name, ..)| (*name).to_owned()));
    let stable = plane.rows(&format!("SELECT proname::text {ours} AND provolatile <> 'v'")).await;
    assert_eq!(stable, ["cluster_month_msgs"], "may be called in the middle of a query");
    let all: i64 = plane.value(&format!("SELECT count(*) {ours}")).await;
    assert!(all >= i64::try_from(FUNCTIONS.len()).unwrap());
    assert_eq!(
        plane.rows(&format!("SELECT proname::text {ours} {loose}")).await,
        [""; 0],
        "without a fixed search_path"
    );
    let odd = "AND (prosecdef OR prolang <> (SELECT oid FROM pg_language WHERE lanname = 'plpgsql'))";
    assert_eq!(
        plane.rows(&format!("SELECT proname::text {ours} {odd}")).await,
        [""; 0],
        "all plpgsql, with the rights of the caller"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_functions_of_the_page_exist_as_it_writes_them_down() {
    let mut plane = Plane::new().await;
    for (call, result) in PAGE {
        let (name, arguments) = call.strip_suffix(')').unwrap().split_once('(').unwrap();
        let found: String = plane
            .value(&format!(
                "SELECT coalesce(array_to_string(proargnames, ', '), '') || ' -> ' || prorettype::regtype
                   FROM pg_proc WHERE pronamespace = 'queen_proxy'::regnamespace AND proname = '{name}'"
            ))
            .await;
        let (parameters, found_result) = found.split_once(" -> ").unwrap();
        let expected_result = match *result {
            "" => "void",
            "int" => "integer",
            other => other,
        };
        assert_eq!(found_result, expected_result, "{call}");
        let parameters: Vec<&str> = parameters.split(", ").collect();
        let arguments: Vec<&str> = arguments.split(", ").collect();
        assert_eq!(parameters.len(), arguments.len(), "{call}: {found}");
        for (parameter, argument) in parameters.iter().zip(arguments) {
            let short = parameter.strip_prefix("p_").unwrap_or(parameter);
            assert!(short == argument || short.strip_suffix("_id") == Some(argument), "{call}: {found}");
        }
    }
}
