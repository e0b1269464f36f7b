-- Control plane: the functions that write it, and the plan catalog.
--
-- Rules of this file:
--   * a mutator checks its arguments, writes, then calls record_operation once;
--   * an error text starts with the function's name and repeats no text argument
--     except a plan code, so a misplaced secret cannot end up in a log;
--   * a slug is lowercased under COLLATE "C": other collations turn some
--     non-ASCII letters into ASCII ones, or 'I' into a dotless i.

CREATE OR REPLACE FUNCTION queen_proxy.record_operation(
    p_tenant_id   UUID,
    p_cluster_id  UUID,
    p_actor       TEXT,
    p_actor_id    UUID,
    p_action      TEXT,
    p_target      TEXT,
    p_meta        JSONB
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_id  UUID;
BEGIN
    IF p_tenant_id IS NULL THEN
        RAISE EXCEPTION 'record_operation: tenant id is required';
    END IF;
    IF p_actor IS NULL OR p_actor NOT IN ('user', 'api_key', 'control_plane', 'system') THEN
        RAISE EXCEPTION 'record_operation: actor must be user, api_key, control_plane or system';
    END IF;
    IF p_action IS NULL OR btrim(p_action) = '' THEN
        RAISE EXCEPTION 'record_operation: action must not be blank';
    END IF;

    INSERT INTO queen_proxy.operations
        (tenant_id, cluster_id, actor, actor_id, action, target, meta)
    VALUES
        (p_tenant_id, p_cluster_id, p_actor, p_actor_id, p_action, p_target,
         coalesce(p_meta, '{}'::jsonb))
    RETURNING id INTO v_id;

    IF p_cluster_id IS NOT NULL THEN
        PERFORM pg_notify('queen_proxy_inval', p_cluster_id::text);
    END IF;

    RETURN v_id;
END
$$;


-- Tenants, users, clusters ---------------------------------------------------

CREATE OR REPLACE FUNCTION queen_proxy.create_tenant(
    p_slug  TEXT,
    p_name  TEXT
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_slug  TEXT := lower(btrim(p_slug) COLLATE "C");
    v_name  TEXT := btrim(p_name);
    v_id    UUID;
BEGIN
    IF v_slug IS NULL OR v_slug = '' THEN
        RAISE EXCEPTION 'create_tenant: slug must not be blank';
    END IF;
    IF v_name IS NULL OR v_name = '' THEN
        RAISE EXCEPTION 'create_tenant: name must not be blank';
    END IF;

    INSERT INTO queen_proxy.tenants (slug, name)
    VALUES (v_slug, v_name)
    RETURNING id INTO v_id;

    PERFORM queen_proxy.record_operation(
        v_id, NULL, 'control_plane', NULL, 'tenant_created', v_id::text,
        jsonb_build_object('slug', v_slug, 'name', v_name));

    RETURN v_id;
END
$$;


-- Writes users only. identities belongs to the OAuth login path.
CREATE OR REPLACE FUNCTION queen_proxy.create_user(
    p_tenant_id      UUID,
    p_email          TEXT,
    p_password_hash  TEXT,
    p_provider       TEXT
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_email  TEXT := lower(btrim(p_email));
    v_id     UUID;
BEGIN
    IF v_email IS NULL OR strpos(v_email, '@') = 0 THEN
        RAISE EXCEPTION 'create_user: email must contain @';
    END IF;
    IF p_provider IS NULL OR p_provider NOT IN ('local', 'google', 'github') THEN
        RAISE EXCEPTION 'create_user: provider must be local, google or github';
    END IF;

    PERFORM 1 FROM queen_proxy.tenants WHERE id = p_tenant_id FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'create_user: unknown tenant %', p_tenant_id;
    END IF;

    INSERT INTO queen_proxy.users (tenant_id, email, password_hash)
    VALUES (p_tenant_id, v_email, p_password_hash)
    RETURNING id INTO v_id;

    PERFORM queen_proxy.record_operation(
        p_tenant_id, NULL, 'control_plane', v_id, 'user_created', v_id::text,
        jsonb_build_object('email', v_email, 'provider', p_provider));

    RETURN v_id;
END
$$;


-- The caller chooses the cell; its class, status and slots are not consulted.
CREATE OR REPLACE FUNCTION queen_proxy.create_cluster(
    p_tenant_id  UUID,
    p_slug       TEXT,
    p_plan_code  TEXT,
    p_cell_id    UUID
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_slug     TEXT := lower(btrim(p_slug) COLLATE "C");
    v_plan_id  UUID;
    v_id       UUID;
BEGIN
    IF v_slug IS NULL OR v_slug = '' THEN
        RAISE EXCEPTION 'create_cluster: slug must not be blank';
    END IF;

    -- FOR SHARE waits for a set_tenant_status in flight, and makes it wait for us:
    -- otherwise it could miss this cluster and leave it cached with the old status.
    PERFORM 1 FROM queen_proxy.tenants WHERE id = p_tenant_id FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'create_cluster: unknown tenant %', p_tenant_id;
    END IF;

    SELECT id INTO v_plan_id
    FROM queen_proxy.plans
    WHERE code = p_plan_code
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'create_cluster: unknown plan %', p_plan_code;
    END IF;

    PERFORM 1 FROM queen_proxy.cells WHERE id = p_cell_id FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'create_cluster: unknown cell %', p_cell_id;
    END IF;

    INSERT INTO queen_proxy.clusters (tenant_id, cell_id, plan_id, slug)
    VALUES (p_tenant_id, p_cell_id, v_plan_id, v_slug)
    RETURNING id INTO v_id;

    PERFORM queen_proxy.record_operation(
        p_tenant_id, v_id, 'control_plane', NULL, 'cluster_created', v_id::text,
        jsonb_build_object('slug', v_slug, 'plan_code', p_plan_code, 'cell_id', p_cell_id));

    RETURN v_id;
END
$$;


-- Plan, overrides, status ----------------------------------------------------

CREATE OR REPLACE FUNCTION queen_proxy.assign_plan(
    p_cluster_id  UUID,
    p_plan_code   TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_plan_id    UUID;
    v_tenant_id  UUID;
BEGIN
    SELECT id INTO v_plan_id
    FROM queen_proxy.plans
    WHERE code = p_plan_code
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'assign_plan: unknown plan %', p_plan_code;
    END IF;

    UPDATE queen_proxy.clusters
    SET plan_id = v_plan_id
    WHERE id = p_cluster_id
    RETURNING tenant_id INTO v_tenant_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'assign_plan: unknown cluster %', p_cluster_id;
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, p_cluster_id, 'control_plane', NULL, 'plan_assigned', p_cluster_id::text,
        jsonb_build_object('plan_code', p_plan_code));
END
$$;


-- The document is stored as it is; readers ignore what they cannot use.
CREATE OR REPLACE FUNCTION queen_proxy.set_limit_override(
    p_cluster_id  UUID,
    p_overrides   JSONB
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_overrides  JSONB := coalesce(p_overrides, '{}'::jsonb);
    v_tenant_id  UUID;
BEGIN
    UPDATE queen_proxy.clusters
    SET limit_overrides = v_overrides
    WHERE id = p_cluster_id
    RETURNING tenant_id INTO v_tenant_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'set_limit_override: unknown cluster %', p_cluster_id;
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, p_cluster_id, 'control_plane', NULL, 'limit_override_set',
        p_cluster_id::text, v_overrides);
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.set_tenant_status(
    p_tenant_id  UUID,
    p_status     TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
BEGIN
    IF p_status IS NULL OR p_status NOT IN ('active', 'grace', 'suspended', 'deleting') THEN
        RAISE EXCEPTION 'set_tenant_status: status must be active, grace, suspended or deleting';
    END IF;

    UPDATE queen_proxy.tenants SET status = p_status WHERE id = p_tenant_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'set_tenant_status: unknown tenant %', p_tenant_id;
    END IF;

    PERFORM queen_proxy.record_operation(
        p_tenant_id, NULL, 'control_plane', NULL, 'tenant_status_changed', p_tenant_id::text,
        jsonb_build_object('status', p_status));

    -- The tenant's status is merged into that of each of its clusters.
    PERFORM pg_notify('queen_proxy_inval', id::text)
    FROM queen_proxy.clusters
    WHERE tenant_id = p_tenant_id;
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.set_cluster_status(
    p_cluster_id  UUID,
    p_status      TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_tenant_id  UUID;
BEGIN
    IF p_status IS NULL OR p_status NOT IN ('active', 'push_blocked', 'suspended', 'deleting') THEN
        RAISE EXCEPTION 'set_cluster_status: status must be active, push_blocked, suspended or deleting';
    END IF;

    UPDATE queen_proxy.clusters
    SET status = p_status
    WHERE id = p_cluster_id
    RETURNING tenant_id INTO v_tenant_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'set_cluster_status: unknown cluster %', p_cluster_id;
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, p_cluster_id, 'control_plane', NULL, 'cluster_status_changed',
        p_cluster_id::text, jsonb_build_object('status', p_status));
END
$$;


-- API keys -------------------------------------------------------------------

CREATE OR REPLACE FUNCTION queen_proxy.issue_api_key(
    p_cluster_id  UUID,
    p_name        TEXT,
    p_key_hash    TEXT,
    p_scopes      TEXT[]
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_name       TEXT := btrim(p_name);
    v_tenant_id  UUID;
    v_id         UUID;
BEGIN
    SELECT tenant_id INTO v_tenant_id
    FROM queen_proxy.clusters
    WHERE id = p_cluster_id
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'issue_api_key: unknown cluster %', p_cluster_id;
    END IF;
    IF v_name IS NULL OR v_name = '' THEN
        RAISE EXCEPTION 'issue_api_key: name must not be blank';
    END IF;
    IF p_key_hash IS NULL OR p_key_hash !~ '^[0-9a-f]{64}$' THEN
        RAISE EXCEPTION 'issue_api_key: key hash must be 64 lowercase hex characters';
    END IF;

    -- array_ndims is NULL for an empty array as well.
    IF array_ndims(p_scopes) IS DISTINCT FROM 1 THEN
        RAISE EXCEPTION 'issue_api_key: scopes must be a flat list with at least one scope';
    END IF;
    IF NOT p_scopes <@ ARRAY['produce', 'consume', 'admin', 'read'] THEN
        RAISE EXCEPTION 'issue_api_key: a scope must be produce, consume, admin or read';
    END IF;

    INSERT INTO queen_proxy.api_keys (cluster_id, name, key_hash, scopes)
    -- Numbered from 1, however the caller numbered them.
    VALUES (p_cluster_id, v_name, p_key_hash, ARRAY (SELECT unnest(p_scopes)))
    RETURNING id INTO v_id;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, p_cluster_id, 'control_plane', NULL, 'api_key_issued', v_id::text,
        jsonb_build_object('name', v_name, 'scopes', to_jsonb(p_scopes)));

    RETURN v_id;
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.revoke_api_key(
    p_key_id  UUID
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_cluster_id  UUID;
    v_tenant_id   UUID;
    v_revoked_at  TIMESTAMPTZ;
BEGIN
    -- The lock makes the second of two callers see the first one's revocation.
    SELECT k.cluster_id, c.tenant_id, k.revoked_at
    INTO v_cluster_id, v_tenant_id, v_revoked_at
    FROM queen_proxy.api_keys AS k
    JOIN queen_proxy.clusters AS c ON c.id = k.cluster_id
    WHERE k.id = p_key_id
    FOR UPDATE OF k;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'revoke_api_key: unknown key %', p_key_id;
    END IF;
    IF v_revoked_at IS NOT NULL THEN
        RAISE EXCEPTION 'revoke_api_key: key % is already revoked', p_key_id;
    END IF;

    UPDATE queen_proxy.api_keys SET revoked_at = now() WHERE id = p_key_id;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, v_cluster_id, 'control_plane', NULL, 'api_key_revoked', p_key_id::text,
        '{}'::jsonb);
END
$$;


-- Cluster roles --------------------------------------------------------------

CREATE OR REPLACE FUNCTION queen_proxy.grant_cluster_role(
    p_cluster  UUID,
    p_email    TEXT,
    p_role     TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_email           TEXT := lower(btrim(p_email));
    v_cluster_tenant  UUID;
    v_user_id         UUID;
    v_user_tenant     UUID;
BEGIN
    IF p_role IS NULL OR p_role NOT IN ('admin', 'producer', 'consumer', 'viewer') THEN
        RAISE EXCEPTION 'grant_cluster_role: role must be admin, producer, consumer or viewer';
    END IF;
    IF v_email IS NULL OR strpos(v_email, '@') = 0 THEN
        RAISE EXCEPTION 'grant_cluster_role: email must contain @';
    END IF;

    -- FOR SHARE holds both tenant_id values still until commit; FOR KEY SHARE
    -- would let either row move to another tenant after the check.
    SELECT tenant_id INTO v_cluster_tenant
    FROM queen_proxy.clusters
    WHERE id = p_cluster
    FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'grant_cluster_role: unknown cluster %', p_cluster;
    END IF;

    SELECT id, tenant_id INTO v_user_id, v_user_tenant
    FROM queen_proxy.users
    WHERE email = v_email
    FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'grant_cluster_role: no user has this email';
    END IF;
    IF v_user_tenant <> v_cluster_tenant THEN
        RAISE EXCEPTION 'grant_cluster_role: user and cluster belong to different tenants';
    END IF;

    INSERT INTO queen_proxy.cluster_roles (user_id, cluster_id, role)
    VALUES (v_user_id, p_cluster, p_role)
    ON CONFLICT (user_id, cluster_id) DO UPDATE SET role = EXCLUDED.role;

    PERFORM queen_proxy.record_operation(
        v_cluster_tenant, p_cluster, 'control_plane', v_user_id, 'cluster_role_granted',
        p_cluster::text, jsonb_build_object('email', v_email, 'role', p_role));
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.revoke_cluster_role(
    p_cluster  UUID,
    p_email    TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_email      TEXT := lower(btrim(p_email));
    v_tenant_id  UUID;
    v_user_id    UUID;
    v_role       TEXT;
BEGIN
    IF v_email IS NULL OR strpos(v_email, '@') = 0 THEN
        RAISE EXCEPTION 'revoke_cluster_role: email must contain @';
    END IF;

    SELECT tenant_id INTO v_tenant_id
    FROM queen_proxy.clusters
    WHERE id = p_cluster
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'revoke_cluster_role: unknown cluster %', p_cluster;
    END IF;

    SELECT id INTO v_user_id FROM queen_proxy.users WHERE email = v_email;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'revoke_cluster_role: no user has this email';
    END IF;

    DELETE FROM queen_proxy.cluster_roles
    WHERE user_id = v_user_id
      AND cluster_id = p_cluster
    RETURNING role INTO v_role;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'revoke_cluster_role: the user has no role on cluster %', p_cluster;
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, p_cluster, 'control_plane', v_user_id, 'cluster_role_revoked',
        p_cluster::text, jsonb_build_object('email', v_email, 'role', v_role));
END
$$;


-- Seeded plans: defaults to start from. An operator's row of the same code wins.
INSERT INTO queen_proxy.plans (
    code, cell_class,
    max_req_per_sec, req_burst, max_msgs_per_sec, msgs_burst,
    max_queues, max_partitions_per_queue, max_parked_pops,
    max_payload_bytes, max_batch_items,
    max_retained_bytes, max_retention_seconds,
    monthly_msgs_quota, features
)
VALUES
    (
        'free', 'shared',
        5, 25, 20, 100,
        20, 8, 50,
        262144, 1000,               -- 256 KiB
        1073741824, 604800,         -- 1 GiB, 7 days
        NULL, '{}'
    ),
    (
        'dev', 'shared',
        10, 50, 40, 200,
        50, 16, 150,
        524288, 2000,               -- 512 KiB
        3221225472, 1209600,        -- 3 GiB, 14 days
        NULL, '{}'
    ),
    (
        'pro', 'shared',
        50, 200, 200, 800,
        200, 32, 1000,
        1048576, 5000,              -- 1 MiB
        21474836480, 2592000,       -- 20 GiB, 30 days
        NULL, '{"streams": true, "traces": true}'
    ),
    (
        'dedicated-s', 'dedicated',
        200, 800, 600, 2000,
        1000, 64, 5000,
        4194304, 10000,             -- 4 MiB
        214748364800, 7776000,      -- 200 GiB, 90 days
        NULL, '{"streams": true, "traces": true}'
    )
ON CONFLICT (code) DO NOTHING;
