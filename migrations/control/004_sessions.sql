-- Control plane: sessions, and what is written about a single user.
--
-- The rules of 002_functions hold here too. A session has no cluster, so none of
-- these announces one; revoke_session speaks on a channel of its own.

-- The deny-list row outlives the token by the leeway (see sweep_revoked_tokens).
-- The notification lets a proxy refuse the token at once instead of when its own
-- record of it expires. A repeat is announced and audited again.
CREATE OR REPLACE FUNCTION queen_proxy.revoke_session(
    p_jti         TEXT,
    p_expires_at  TIMESTAMPTZ,
    p_actor       TEXT DEFAULT 'user',
    p_actor_id    UUID DEFAULT NULL
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
SET timezone = 'UTC'        -- for the text of the expiry in the audit row
AS $$
DECLARE
    v_jti        TEXT := btrim(p_jti);
    v_tenant_id  UUID;
BEGIN
    IF v_jti IS NULL OR v_jti = '' THEN
        RAISE EXCEPTION 'revoke_session: jti must not be blank';
    END IF;
    IF char_length(v_jti) > 512 THEN
        -- In bytes at most 2048: it must fit into an index entry (a third of a page)
        -- and into a notification (8000).
        RAISE EXCEPTION 'revoke_session: jti must be at most 512 characters long';
    END IF;
    IF p_expires_at IS NULL THEN
        RAISE EXCEPTION 'revoke_session: expiry is required';
    END IF;
    IF p_actor IS NULL OR p_actor NOT IN ('user', 'api_key', 'control_plane', 'system') THEN
        RAISE EXCEPTION 'revoke_session: actor must be user, api_key, control_plane or system';
    END IF;

    -- The audit row needs a tenant, and a session has one only through its user. No
    -- lock: the row refers to the tenant, which goes together with the user.
    SELECT tenant_id INTO v_tenant_id
    FROM queen_proxy.users
    WHERE id = p_actor_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'revoke_session: unknown user %', p_actor_id;
    END IF;

    INSERT INTO queen_proxy.revoked_tokens (jti, expires_at)
    VALUES (v_jti, p_expires_at)
    ON CONFLICT (jti) DO NOTHING;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, NULL, p_actor, p_actor_id, 'session_revoked', v_jti,
        jsonb_build_object('expires_at', p_expires_at));

    PERFORM pg_notify('queen_proxy_revoked', v_jti);
END
$$;


-- A token is accepted for 10 s after its expiry, rounded up to a whole second, by the clock of each proxy.
-- Its row stays well longer than that, and than clocks differ.
CREATE OR REPLACE FUNCTION queen_proxy.sweep_revoked_tokens()
RETURNS INTEGER
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_swept  INTEGER;
BEGIN
    -- The leeway is taken from now(): added to an expiry at the end of time, it
    -- would overflow, and no sweep would succeed again.
    DELETE FROM queen_proxy.revoked_tokens
    WHERE expires_at <= now() - interval '2 minutes';
    GET DIAGNOSTICS v_swept = ROW_COUNT;

    RETURN v_swept;
END
$$;


-- The only way to the operator bit. Audited also when nothing changes.
CREATE OR REPLACE FUNCTION queen_proxy.set_operator(
    p_email    TEXT,
    p_enabled  BOOLEAN
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_email      TEXT := lower(btrim(p_email));
    v_user_id    UUID;
    v_tenant_id  UUID;
    v_was        BOOLEAN;
BEGIN
    IF p_enabled IS NULL THEN
        RAISE EXCEPTION 'set_operator: enabled must be true or false';
    END IF;
    IF v_email IS NULL OR strpos(v_email, '@') = 0 THEN
        RAISE EXCEPTION 'set_operator: email must contain @';
    END IF;

    -- The lock makes the second of two callers audit what the first one left.
    SELECT id, tenant_id, is_operator
    INTO v_user_id, v_tenant_id, v_was
    FROM queen_proxy.users
    WHERE email = v_email
    FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'set_operator: no user has this email';
    END IF;

    UPDATE queen_proxy.users SET is_operator = p_enabled WHERE id = v_user_id;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, NULL, 'control_plane', v_user_id,
        CASE WHEN p_enabled THEN 'operator_granted' ELSE 'operator_revoked' END,
        v_email, jsonb_build_object('is_operator', p_enabled, 'was', v_was));
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.set_user_name(
    p_user  UUID,
    p_name  TEXT
)
RETURNS VOID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_name       TEXT := btrim(p_name);
    v_old_name   TEXT;
    v_tenant_id  UUID;
BEGIN
    IF v_name IS NULL OR v_name = '' THEN
        RAISE EXCEPTION 'set_user_name: name must not be blank';
    END IF;
    IF char_length(v_name) > 160 THEN
        RAISE EXCEPTION 'set_user_name: name must be at most 160 characters long';
    END IF;

    SELECT name, tenant_id INTO v_old_name, v_tenant_id
    FROM queen_proxy.users
    WHERE id = p_user
    FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'set_user_name: unknown user %', p_user;
    END IF;

    UPDATE queen_proxy.users SET name = v_name WHERE id = p_user;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, NULL, 'control_plane', p_user, 'user_name_changed', p_user::text,
        jsonb_build_object('old_name', v_old_name, 'name', v_name));
END
$$;


CREATE OR REPLACE FUNCTION queen_proxy.record_user_login(
    p_user  UUID
)
RETURNS TIMESTAMPTZ
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_tenant_id  UUID;
    v_at         TIMESTAMPTZ;
BEGIN
    UPDATE queen_proxy.users
    SET last_login_at = now()
    WHERE id = p_user
    RETURNING tenant_id, last_login_at INTO v_tenant_id, v_at;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'record_user_login: unknown user %', p_user;
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant_id, NULL, 'user', p_user, 'login', p_user::text, '{}'::jsonb);

    RETURN v_at;
END
$$;
