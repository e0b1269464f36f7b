-- Control plane: onboard a tenant, its cluster, its admin and a first key in one call.
--
-- Runs in the caller's transaction: an error anywhere leaves nothing behind.
-- Repeating it returns the same ids. The key is readable only in the result of
-- the call that issued it.

CREATE OR REPLACE FUNCTION queen_proxy.bootstrap_tenant(
    p_tenant_slug   TEXT,
    p_tenant_name   TEXT,
    p_cluster_slug  TEXT,
    p_plan_code     TEXT,
    p_cell          UUID,
    p_admin_email   TEXT,
    p_password      TEXT DEFAULT NULL,
    p_key_name      TEXT DEFAULT 'default'
)
RETURNS JSONB
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_tenant_slug     TEXT    := lower(btrim(p_tenant_slug) COLLATE "C");
    v_cluster_slug    TEXT    := lower(btrim(p_cluster_slug) COLLATE "C");
    v_email           TEXT    := lower(btrim(p_admin_email));
    v_key_name        TEXT    := btrim(p_key_name);
    v_password_set    BOOLEAN := p_password IS NOT NULL;
    v_tenant_created  BOOLEAN := false;
    v_owner           UUID;
    v_tenant_id       UUID;
    v_cluster_id      UUID;
    v_user_id         UUID;
    v_plan_code       TEXT;
    v_password_hash   TEXT;
    v_can_login       BOOLEAN;
    v_api_key         TEXT;
    v_lock            BIGINT;
BEGIN
    IF v_tenant_slug IS NULL OR v_tenant_slug = '' THEN
        RAISE EXCEPTION 'bootstrap_tenant: tenant slug must not be blank';
    END IF;
    IF v_cluster_slug IS NULL OR v_cluster_slug = '' THEN
        RAISE EXCEPTION 'bootstrap_tenant: cluster slug must not be blank';
    END IF;
    IF p_cell IS NULL THEN
        RAISE EXCEPTION 'bootstrap_tenant: cell is required';
    END IF;
    IF v_email IS NULL OR strpos(v_email, '@') = 0 THEN
        RAISE EXCEPTION 'bootstrap_tenant: admin email must contain @';
    END IF;
    IF v_key_name IS NULL OR v_key_name = '' THEN
        RAISE EXCEPTION 'bootstrap_tenant: key name must not be blank';
    END IF;
    IF v_password_set AND p_password !~ '[^[:space:]]' THEN
        RAISE EXCEPTION 'bootstrap_tenant: password must not be empty; pass NULL for an admin without one';
    END IF;
    IF octet_length(p_password) > 72 THEN
        -- bcrypt would silently ignore the rest.
        RAISE EXCEPTION 'bootstrap_tenant: password must be at most 72 bytes long';
    END IF;

    -- Racing callers queue here, then each sees what the one before it committed.
    -- Everyone takes its locks in ascending order of the lock's number, so callers
    -- that share some names cannot wait for each other in a circle.
    FOR v_lock IN
        SELECT hashtextextended(lock_name, 0)
        FROM unnest(ARRAY[
            'queen_proxy/bootstrap/tenant/'  || v_tenant_slug,
            'queen_proxy/bootstrap/cluster/' || v_cluster_slug,
            'queen_proxy/bootstrap/email/'   || v_email
        ]) AS lock_name
        ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(v_lock);
    END LOOP;

    -- Tenant
    SELECT id INTO v_tenant_id
    FROM queen_proxy.tenants
    WHERE slug = v_tenant_slug
    FOR KEY SHARE;
    IF NOT FOUND THEN
        v_tenant_id := queen_proxy.create_tenant(
            v_tenant_slug, coalesce(p_tenant_name, v_tenant_slug));
        v_tenant_created := true;
    END IF;

    -- Cluster
    SELECT id, tenant_id INTO v_cluster_id, v_owner
    FROM queen_proxy.clusters
    WHERE slug = v_cluster_slug
    FOR KEY SHARE;
    IF NOT FOUND THEN
        v_cluster_id := queen_proxy.create_cluster(
            v_tenant_id, v_cluster_slug, p_plan_code, p_cell);
    ELSIF v_owner <> v_tenant_id THEN
        RAISE EXCEPTION 'bootstrap_tenant: the cluster slug belongs to another tenant';
    END IF;

    -- Admin user and role
    SELECT id, tenant_id INTO v_user_id, v_owner
    FROM queen_proxy.users
    WHERE email = v_email
    FOR KEY SHARE;
    IF NOT FOUND THEN
        IF v_password_set THEN
            v_password_hash := public.crypt(p_password, public.gen_salt('bf', 10));
        END IF;
        v_user_id := queen_proxy.create_user(v_tenant_id, v_email, v_password_hash, 'local');
    ELSIF v_owner <> v_tenant_id THEN
        RAISE EXCEPTION 'bootstrap_tenant: the admin email belongs to another tenant';
    END IF;

    PERFORM queen_proxy.grant_cluster_role(v_cluster_id, v_email, 'admin');

    SELECT u.password_hash IS NOT NULL
        OR EXISTS (SELECT 1 FROM queen_proxy.identities AS i WHERE i.user_id = u.id)
    INTO v_can_login
    FROM queen_proxy.users AS u
    WHERE u.id = v_user_id;
    IF NOT v_can_login THEN
        RAISE WARNING 'bootstrap_tenant: user % has neither a password nor a linked identity and cannot log in yet',
            v_user_id;
    END IF;

    -- API key. The row lock waits for a revocation of this key that is in flight.
    PERFORM 1
    FROM queen_proxy.api_keys
    WHERE cluster_id = v_cluster_id
      AND name = v_key_name
      AND revoked_at IS NULL
    FOR KEY SHARE;
    IF NOT FOUND THEN
        -- base64url: translate swaps the two differing characters and drops the padding.
        v_api_key := 'qk_live_'
            || translate(encode(public.gen_random_bytes(32), 'base64'), '+/=', '-_');
        PERFORM queen_proxy.issue_api_key(
            v_cluster_id, v_key_name,
            encode(public.digest(v_api_key, 'sha256'), 'hex'),
            ARRAY['produce', 'consume', 'admin', 'read']);
    END IF;

    -- The plan the cluster has, which on a repeat need not be the argument.
    SELECT p.code INTO v_plan_code
    FROM queen_proxy.clusters AS c
    JOIN queen_proxy.plans AS p ON p.id = c.plan_id
    WHERE c.id = v_cluster_id;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, v_cluster_id, 'control_plane', v_user_id, 'tenant_bootstrapped',
        v_tenant_id::text,
        jsonb_build_object(
            'tenant_slug',  v_tenant_slug,
            'cluster_slug', v_cluster_slug,
            'plan_code',    v_plan_code,
            'admin_email',  v_email,
            'key_issued',   v_api_key IS NOT NULL,
            'password_set', v_password_set,
            'can_login',    v_can_login));

    IF v_tenant_created THEN
        INSERT INTO queen_proxy.outbox (kind, payload)
        VALUES (
            'tenant_bootstrapped',
            jsonb_build_object(
                'tenant_id',    v_tenant_id,
                'tenant_slug',  v_tenant_slug,
                'cluster_id',   v_cluster_id,
                'cluster_slug', v_cluster_slug,
                'plan_code',    v_plan_code,
                'admin_email',  v_email));
    END IF;

    RETURN jsonb_build_object(
        'tenant_id',    v_tenant_id,
        'cluster_id',   v_cluster_id,
        'user_id',      v_user_id,
        'api_key',      v_api_key,
        'password_set', v_password_set,
        'can_login',    v_can_login);
END
$$;
