-- Control plane (pxdb): tables and indexes of schema queen_proxy.
-- The runner wraps each file in one transaction; every statement may run twice.

CREATE EXTENSION IF NOT EXISTS pgcrypto WITH SCHEMA public;

-- IF NOT EXISTS is satisfied by a pgcrypto in any schema, but every call below
-- names public. Say so here instead of failing later inside a function.
DO $$
BEGIN
    IF to_regprocedure('public.gen_random_bytes(integer)') IS NULL THEN
        RAISE EXCEPTION '001_init: extension pgcrypto must be installed in schema public'
            USING HINT = 'ALTER EXTENSION pgcrypto SET SCHEMA public;';
    END IF;
END
$$;

CREATE SCHEMA IF NOT EXISTS queen_proxy;

CREATE TABLE IF NOT EXISTS queen_proxy.schema_migrations (
    name        TEXT        PRIMARY KEY,
    applied_at  TIMESTAMPTZ NOT NULL DEFAULT now()
);


-- Tenants and people ---------------------------------------------------------

CREATE TABLE IF NOT EXISTS queen_proxy.tenants (
    id          UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    slug        TEXT        NOT NULL,
    name        TEXT        NOT NULL,
    status      TEXT        NOT NULL DEFAULT 'active',
    created_at  TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT tenants_slug_key    UNIQUE (slug),
    CONSTRAINT tenants_slug_valid  CHECK (slug ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT tenants_name_valid  CHECK (btrim(name) <> ''),
    CONSTRAINT tenants_status_valid
        CHECK (status IN ('active', 'grace', 'suspended', 'deleting'))
);

CREATE TABLE IF NOT EXISTS queen_proxy.users (
    id             UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    tenant_id      UUID        NOT NULL,
    email          TEXT        NOT NULL,   -- stored trimmed and lowercased by the functions
    password_hash  TEXT,                   -- bcrypt; NULL: signs in through a provider only
    is_operator    BOOLEAN     NOT NULL DEFAULT false,
    name           TEXT,
    last_login_at  TIMESTAMPTZ,
    created_at     TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT users_email_key   UNIQUE (email),
    CONSTRAINT users_name_valid
        CHECK (name IS NULL OR (btrim(name) <> '' AND char_length(name) <= 160)),
    CONSTRAINT users_tenant_fkey
        FOREIGN KEY (tenant_id) REFERENCES queen_proxy.tenants (id) ON DELETE CASCADE
);

CREATE INDEX IF NOT EXISTS idx_users_tenant
    ON queen_proxy.users (tenant_id);

CREATE INDEX IF NOT EXISTS idx_users_operator
    ON queen_proxy.users (email)
    WHERE is_operator;

CREATE TABLE IF NOT EXISTS queen_proxy.identities (
    id           UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    user_id      UUID        NOT NULL,
    provider     TEXT        NOT NULL,
    provider_id  TEXT        NOT NULL,
    email        TEXT        NOT NULL,
    verified     BOOLEAN     NOT NULL DEFAULT false,
    created_at   TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT identities_provider_key    UNIQUE (provider, provider_id),
    CONSTRAINT identities_provider_valid  CHECK (provider IN ('local', 'google', 'github')),
    CONSTRAINT identities_user_fkey
        FOREIGN KEY (user_id) REFERENCES queen_proxy.users (id) ON DELETE CASCADE
);

CREATE INDEX IF NOT EXISTS idx_identities_user
    ON queen_proxy.identities (user_id);


-- Plans, cells, clusters -----------------------------------------------------

-- A limit of NULL is unlimited.
CREATE TABLE IF NOT EXISTS queen_proxy.plans (
    id                        UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    code                      TEXT        NOT NULL,
    cell_class                TEXT        NOT NULL,
    max_req_per_sec           INTEGER,
    req_burst                 INTEGER,
    max_msgs_per_sec          INTEGER,
    msgs_burst                INTEGER,
    max_queues                INTEGER,
    max_partitions_per_queue  INTEGER,
    max_parked_pops           INTEGER,
    max_payload_bytes         INTEGER,
    max_batch_items           INTEGER,
    max_retained_bytes        BIGINT,
    max_retention_seconds     INTEGER,
    monthly_msgs_quota        BIGINT,
    features                  JSONB       NOT NULL DEFAULT '{}'::jsonb,
    created_at                TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT plans_code_key          UNIQUE (code),
    CONSTRAINT plans_code_valid        CHECK (code ~ '^[a-z][a-z0-9-]*$'),
    CONSTRAINT plans_cell_class_valid  CHECK (cell_class IN ('shared', 'dedicated')),

    -- A CHECK that evaluates to NULL passes, so NULL stays allowed in each of these.
    CONSTRAINT plans_max_req_per_sec_valid           CHECK (max_req_per_sec > 0),
    CONSTRAINT plans_req_burst_valid                 CHECK (req_burst > 0),
    CONSTRAINT plans_max_msgs_per_sec_valid          CHECK (max_msgs_per_sec > 0),
    CONSTRAINT plans_msgs_burst_valid                CHECK (msgs_burst > 0),
    CONSTRAINT plans_max_queues_valid                CHECK (max_queues > 0),
    CONSTRAINT plans_max_partitions_per_queue_valid  CHECK (max_partitions_per_queue > 0),
    CONSTRAINT plans_max_parked_pops_valid           CHECK (max_parked_pops > 0),
    CONSTRAINT plans_max_payload_bytes_valid         CHECK (max_payload_bytes > 0),
    CONSTRAINT plans_max_batch_items_valid           CHECK (max_batch_items > 0),
    CONSTRAINT plans_max_retained_bytes_valid        CHECK (max_retained_bytes > 0),
    CONSTRAINT plans_max_retention_seconds_valid     CHECK (max_retention_seconds > 0),
    CONSTRAINT plans_monthly_msgs_quota_valid        CHECK (monthly_msgs_quota > 0)
);

-- Rows are inserted by hand. Nothing reads status, the two slot counters or broker_version.
CREATE TABLE IF NOT EXISTS queen_proxy.cells (
    id              UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    slug            TEXT        NOT NULL,
    region          TEXT        NOT NULL,
    base_url        TEXT        NOT NULL,
    class           TEXT        NOT NULL,
    capacity_slots  INTEGER     NOT NULL DEFAULT 0,
    used_slots      INTEGER     NOT NULL DEFAULT 0,
    broker_version  TEXT,
    status          TEXT        NOT NULL DEFAULT 'active',
    cell_secret     TEXT,                   -- the bearer token presented to this cell
    created_at      TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT cells_slug_key              UNIQUE (slug),
    CONSTRAINT cells_slug_valid            CHECK (btrim(slug) <> ''),
    CONSTRAINT cells_region_valid          CHECK (btrim(region) <> ''),
    CONSTRAINT cells_base_url_valid        CHECK (btrim(base_url) <> ''),
    CONSTRAINT cells_class_valid           CHECK (class IN ('shared', 'dedicated')),
    CONSTRAINT cells_capacity_slots_valid  CHECK (capacity_slots >= 0),
    CONSTRAINT cells_used_slots_valid      CHECK (used_slots >= 0),
    CONSTRAINT cells_status_valid          CHECK (status IN ('active', 'draining', 'dead'))
);

CREATE TABLE IF NOT EXISTS queen_proxy.clusters (
    id                  UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    tenant_id           UUID        NOT NULL,
    cell_id             UUID        NOT NULL,
    plan_id             UUID        NOT NULL,
    slug                TEXT        NOT NULL,   -- the subdomain
    broker_tenant_uuid  UUID        NOT NULL DEFAULT public.gen_random_uuid(),
    status              TEXT        NOT NULL DEFAULT 'active',
    limit_overrides     JSONB       NOT NULL DEFAULT '{}'::jsonb,
    created_at          TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT clusters_slug_key    UNIQUE (slug),
    CONSTRAINT clusters_slug_valid  CHECK (slug ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT clusters_status_valid
        CHECK (status IN ('active', 'push_blocked', 'suspended', 'deleting')),
    CONSTRAINT clusters_tenant_fkey
        FOREIGN KEY (tenant_id) REFERENCES queen_proxy.tenants (id) ON DELETE CASCADE,
    CONSTRAINT clusters_cell_fkey
        FOREIGN KEY (cell_id) REFERENCES queen_proxy.cells (id) ON DELETE RESTRICT,
    CONSTRAINT clusters_plan_fkey
        FOREIGN KEY (plan_id) REFERENCES queen_proxy.plans (id) ON DELETE RESTRICT
);

CREATE INDEX IF NOT EXISTS idx_clusters_cell
    ON queen_proxy.clusters (cell_id);

CREATE INDEX IF NOT EXISTS idx_clusters_tenant
    ON queen_proxy.clusters (tenant_id);


-- Access to a cluster --------------------------------------------------------

CREATE TABLE IF NOT EXISTS queen_proxy.cluster_roles (
    user_id     UUID        NOT NULL,
    cluster_id  UUID        NOT NULL,
    role        TEXT        NOT NULL,
    created_at  TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT cluster_roles_pkey  PRIMARY KEY (user_id, cluster_id),
    CONSTRAINT cluster_roles_role_valid
        CHECK (role IN ('admin', 'producer', 'consumer', 'viewer')),
    CONSTRAINT cluster_roles_user_fkey
        FOREIGN KEY (user_id) REFERENCES queen_proxy.users (id) ON DELETE CASCADE,
    CONSTRAINT cluster_roles_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE
);

CREATE INDEX IF NOT EXISTS idx_cluster_roles_cluster
    ON queen_proxy.cluster_roles (cluster_id);

CREATE TABLE IF NOT EXISTS queen_proxy.api_keys (
    id            UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    cluster_id    UUID        NOT NULL,
    name          TEXT        NOT NULL,
    key_hash      TEXT        NOT NULL,     -- sha256 of the whole key; the key is never stored
    scopes        TEXT[]      NOT NULL DEFAULT '{}'::text[],
    created_by    UUID,
    last_used_at  TIMESTAMPTZ,
    revoked_at    TIMESTAMPTZ,
    created_at    TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT api_keys_key_hash_key    UNIQUE (key_hash),
    CONSTRAINT api_keys_name_valid      CHECK (btrim(name) <> ''),
    CONSTRAINT api_keys_key_hash_valid  CHECK (key_hash ~ '^[0-9a-f]{64}$'),
    CONSTRAINT api_keys_scopes_valid
        CHECK (scopes <@ ARRAY['produce', 'consume', 'admin', 'read']::text[]),
    CONSTRAINT api_keys_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    CONSTRAINT api_keys_created_by_fkey
        FOREIGN KEY (created_by) REFERENCES queen_proxy.users (id) ON DELETE SET NULL
);

CREATE INDEX IF NOT EXISTS idx_api_keys_cluster
    ON queen_proxy.api_keys (cluster_id);

CREATE TABLE IF NOT EXISTS queen_proxy.revoked_tokens (
    jti         TEXT        PRIMARY KEY,    -- TEXT: a token minted elsewhere may carry any id
    expires_at  TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS idx_revoked_tokens_expires
    ON queen_proxy.revoked_tokens (expires_at);


-- Queue cache and usage ------------------------------------------------------

-- A cache for cap admission. The broker owns which queues exist.
CREATE TABLE IF NOT EXISTS queen_proxy.queues (
    id                UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    cluster_id        UUID        NOT NULL,
    name              TEXT        NOT NULL,
    partitions_count  INTEGER     NOT NULL DEFAULT 0,
    deleted_at        TIMESTAMPTZ,
    created_at        TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT queues_name_valid              CHECK (btrim(name) <> ''),
    CONSTRAINT queues_partitions_count_valid  CHECK (partitions_count >= 0),
    CONSTRAINT queues_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE
);

-- Partial, so that the name of a soft-deleted queue can be used again.
CREATE UNIQUE INDEX IF NOT EXISTS uq_queues_cluster_name_live
    ON queen_proxy.queues (cluster_id, name)
    WHERE deleted_at IS NULL;

CREATE TABLE IF NOT EXISTS queen_proxy.usage_minutes (
    cluster_id  UUID        NOT NULL,
    minute      TIMESTAMPTZ NOT NULL,
    op_class    TEXT        NOT NULL,
    msgs        BIGINT      NOT NULL DEFAULT 0,
    reqs        BIGINT      NOT NULL DEFAULT 0,
    bytes_in    BIGINT      NOT NULL DEFAULT 0,
    bytes_out   BIGINT      NOT NULL DEFAULT 0,

    CONSTRAINT usage_minutes_pkey             PRIMARY KEY (cluster_id, minute, op_class),
    CONSTRAINT usage_minutes_op_class_valid
        CHECK (op_class IN ('push', 'delivery', 'txn', 'configure', 'read')),
    CONSTRAINT usage_minutes_msgs_valid       CHECK (msgs >= 0),
    CONSTRAINT usage_minutes_reqs_valid       CHECK (reqs >= 0),
    CONSTRAINT usage_minutes_bytes_in_valid   CHECK (bytes_in >= 0),
    CONSTRAINT usage_minutes_bytes_out_valid  CHECK (bytes_out >= 0),
    CONSTRAINT usage_minutes_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE
);

CREATE INDEX IF NOT EXISTS idx_usage_minutes_minute
    ON queen_proxy.usage_minutes (minute);

CREATE TABLE IF NOT EXISTS queen_proxy.usage_days (
    cluster_id  UUID    NOT NULL,
    day         DATE    NOT NULL,           -- UTC calendar day
    op_class    TEXT    NOT NULL,
    msgs        BIGINT  NOT NULL DEFAULT 0,
    reqs        BIGINT  NOT NULL DEFAULT 0,
    bytes_in    BIGINT  NOT NULL DEFAULT 0,
    bytes_out   BIGINT  NOT NULL DEFAULT 0,

    CONSTRAINT usage_days_pkey             PRIMARY KEY (cluster_id, day, op_class),
    CONSTRAINT usage_days_op_class_valid
        CHECK (op_class IN ('push', 'delivery', 'txn', 'configure', 'read')),
    CONSTRAINT usage_days_msgs_valid       CHECK (msgs >= 0),
    CONSTRAINT usage_days_reqs_valid       CHECK (reqs >= 0),
    CONSTRAINT usage_days_bytes_in_valid   CHECK (bytes_in >= 0),
    CONSTRAINT usage_days_bytes_out_valid  CHECK (bytes_out >= 0),
    CONSTRAINT usage_days_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE
);

CREATE INDEX IF NOT EXISTS idx_usage_days_day
    ON queen_proxy.usage_days (day);


-- Audit and outbox -----------------------------------------------------------

-- Append-only. The plain reference to tenants keeps a tenant with history from
-- being deleted by accident; the history of a deleted cluster outlives its row.
CREATE TABLE IF NOT EXISTS queen_proxy.operations (
    id          UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    tenant_id   UUID        NOT NULL,
    cluster_id  UUID,
    actor       TEXT        NOT NULL,
    actor_id    UUID,
    action      TEXT        NOT NULL,
    target      TEXT,
    meta        JSONB       NOT NULL DEFAULT '{}'::jsonb,
    at          TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT operations_actor_valid
        CHECK (actor IN ('user', 'api_key', 'control_plane', 'system')),
    CONSTRAINT operations_action_valid  CHECK (btrim(action) <> ''),
    CONSTRAINT operations_tenant_fkey
        FOREIGN KEY (tenant_id) REFERENCES queen_proxy.tenants (id),
    CONSTRAINT operations_cluster_fkey
        FOREIGN KEY (cluster_id) REFERENCES queen_proxy.clusters (id) ON DELETE SET NULL
);

CREATE INDEX IF NOT EXISTS idx_operations_tenant_at
    ON queen_proxy.operations (tenant_id, at DESC);

CREATE INDEX IF NOT EXISTS idx_operations_cluster_at
    ON queen_proxy.operations (cluster_id, at DESC)
    WHERE cluster_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS queen_proxy.outbox (
    id           UUID        PRIMARY KEY DEFAULT public.gen_random_uuid(),
    kind         TEXT        NOT NULL,
    payload      JSONB       NOT NULL,
    consumed_at  TIMESTAMPTZ,               -- set by whoever drains the outbox
    created_at   TIMESTAMPTZ NOT NULL DEFAULT now(),

    CONSTRAINT outbox_kind_valid  CHECK (btrim(kind) <> '')
);

CREATE INDEX IF NOT EXISTS idx_outbox_unconsumed
    ON queen_proxy.outbox (created_at)
    WHERE consumed_at IS NULL;
