-- Control plane: least-privilege roles. Not a migration; nobody applies it for you.
--
--   psql -v ON_ERROR_STOP=1 -f roles.sql 'postgres://superuser@host/pxdb'
--
-- Run it as a superuser in the control plane's database once the schema is there,
-- and again after each migration: it takes back everything it ever granted and
-- grants it anew, so it also covers what the migration added. Its four roles cannot
-- log in. Logins are made by you and become members:
--
--   CREATE ROLE px1 LOGIN PASSWORD '…';
--   GRANT queen_proxy_proxy TO px1;
--
--   queen_proxy_owner   owns the schema and migrates it. For a login that migrates,
--                       add: ALTER ROLE <login> SET role = 'queen_proxy_owner';
--                       otherwise what it creates is its own until the next run.
--   queen_proxy_writer  calls the functions that change tenants, clusters, keys,
--                       roles and users. Plans and cells are rows that an owner
--                       inserts by hand.
--   queen_proxy_proxy   a running proxy: reads what it decides by, meters, ends
--                       sessions. It cannot migrate, so migrate first. It cannot
--                       write clusters, keys, roles or the operator bit either.
--   queen_proxy_reader  reads all but password hashes, key hashes and cell secrets,
--                       and calls nothing.
--
-- The functions run with the rights of their caller (SECURITY INVOKER), so a role
-- gets the table rights that its functions need. Two things follow:
--   * who may call a function could also write those columns without it and leave
--     no audit row; the roles keep people apart, the functions keep the record;
--   * a row lock (FOR SHARE, FOR UPDATE …) needs the right to update some column.
--     Where a function only locks, that column is created_at: nothing reads it.
-- What a foreign key checks or cascades to runs as the owner and needs no right.
-- No table has a sequence. CONNECT and the use of schema public stay as they are.

BEGIN;

DO $$
DECLARE
    v_role  TEXT;
BEGIN
    IF to_regnamespace('queen_proxy') IS NULL THEN
        RAISE EXCEPTION 'roles: schema queen_proxy is missing; migrate first';
    END IF;
    -- Roles belong to the whole server: another database may have made them.
    FOREACH v_role IN ARRAY ARRAY[
        'queen_proxy_owner', 'queen_proxy_writer', 'queen_proxy_proxy', 'queen_proxy_reader'
    ]
    LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = v_role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;   -- made meanwhile
            END;
        END IF;
    END LOOP;
END
$$;


-- Owner ----------------------------------------------------------------------

DO $$
DECLARE
    v_object  TEXT;
BEGIN
    -- 001_init asks for the schema with IF NOT EXISTS; even that needs this right.
    EXECUTE format('GRANT CREATE ON DATABASE %I TO queen_proxy_owner', current_database());

    ALTER SCHEMA queen_proxy OWNER TO queen_proxy_owner;
    -- Indexes follow their table.
    FOR v_object IN
        SELECT c.oid::regclass::text
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'queen_proxy'::regnamespace
          AND c.relkind IN ('r', 'p')
    LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO queen_proxy_owner', v_object);
    END LOOP;
    FOR v_object IN
        SELECT p.oid::regprocedure::text
        FROM pg_catalog.pg_proc AS p
        WHERE p.pronamespace = 'queen_proxy'::regnamespace
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO queen_proxy_owner', v_object);
    END LOOP;
END
$$;


-- Back to nothing ------------------------------------------------------------

-- A table's REVOKE takes back the rights on its columns as well.
REVOKE ALL ON SCHEMA queen_proxy
    FROM PUBLIC, queen_proxy_writer, queen_proxy_proxy, queen_proxy_reader;
REVOKE ALL ON ALL TABLES IN SCHEMA queen_proxy
    FROM PUBLIC, queen_proxy_writer, queen_proxy_proxy, queen_proxy_reader;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA queen_proxy
    FROM PUBLIC, queen_proxy_writer, queen_proxy_proxy, queen_proxy_reader;

-- Functions are PUBLIC's by default. Those that the owner adds later are not.
ALTER DEFAULT PRIVILEGES FOR ROLE queen_proxy_owner REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;

GRANT USAGE ON SCHEMA queen_proxy
    TO queen_proxy_writer, queen_proxy_proxy, queen_proxy_reader;


-- Writer ---------------------------------------------------------------------

GRANT EXECUTE ON FUNCTION
    queen_proxy.record_operation,
    queen_proxy.create_tenant,
    queen_proxy.create_user,
    queen_proxy.create_cluster,
    queen_proxy.assign_plan,
    queen_proxy.set_limit_override,
    queen_proxy.set_tenant_status,
    queen_proxy.set_cluster_status,
    queen_proxy.issue_api_key,
    queen_proxy.revoke_api_key,
    queen_proxy.grant_cluster_role,
    queen_proxy.revoke_cluster_role,
    queen_proxy.bootstrap_tenant,
    queen_proxy.revoke_session,
    queen_proxy.set_operator,
    queen_proxy.set_user_name,
    queen_proxy.record_user_login,
    queen_proxy.emit_outbox,
    queen_proxy.delete_tenant
    TO queen_proxy_writer;

GRANT SELECT, INSERT, UPDATE (status), DELETE ON queen_proxy.tenants TO queen_proxy_writer;
-- bootstrap_tenant asks whether there is a password hash.
GRANT SELECT, INSERT, UPDATE (is_operator, name, last_login_at) ON queen_proxy.users
    TO queen_proxy_writer;
GRANT SELECT ON queen_proxy.identities TO queen_proxy_writer;
GRANT SELECT, UPDATE (created_at) ON queen_proxy.plans TO queen_proxy_writer;
GRANT SELECT (
        id, slug, region, base_url, class, capacity_slots, used_slots, broker_version, status,
        created_at),
      UPDATE (created_at) ON queen_proxy.cells TO queen_proxy_writer;
GRANT SELECT, INSERT, UPDATE (plan_id, limit_overrides, status) ON queen_proxy.clusters
    TO queen_proxy_writer;
GRANT SELECT, INSERT, UPDATE (role), DELETE ON queen_proxy.cluster_roles TO queen_proxy_writer;
GRANT SELECT (
        id, cluster_id, name, scopes, created_by, last_used_at, revoked_at, created_at),
      INSERT, UPDATE (revoked_at) ON queen_proxy.api_keys TO queen_proxy_writer;
GRANT SELECT, INSERT, DELETE ON queen_proxy.operations TO queen_proxy_writer;
GRANT SELECT, INSERT ON queen_proxy.revoked_tokens TO queen_proxy_writer;
-- `admin outbox follow` claims events and marks them as consumed.
GRANT SELECT, INSERT, UPDATE (payload, claimed_until, consumed_at) ON queen_proxy.outbox
    TO queen_proxy_writer;
-- delete_tenant counts them.
GRANT SELECT ON queen_proxy.queues TO queen_proxy_writer;
GRANT SELECT ON queen_proxy.schema_migrations TO queen_proxy_writer;


-- Proxy ----------------------------------------------------------------------

GRANT EXECUTE ON FUNCTION
    queen_proxy.record_operation,
    queen_proxy.record_user_login,
    queen_proxy.revoke_session,
    queen_proxy.sweep_revoked_tokens,
    queen_proxy.emit_outbox,
    queen_proxy.rollup_usage_days,
    queen_proxy.prune_usage_minutes,
    queen_proxy.cluster_month_msgs,
    queen_proxy.record_usage,
    queen_proxy.maintain_usage,
    queen_proxy.check_monthly_quotas
    TO queen_proxy_proxy;

GRANT SELECT ON
    queen_proxy.tenants,
    queen_proxy.plans,
    queen_proxy.cells,
    queen_proxy.clusters,
    queen_proxy.cluster_roles,
    queen_proxy.identities,
    queen_proxy.schema_migrations
    TO queen_proxy_proxy;
GRANT SELECT, UPDATE (last_login_at) ON queen_proxy.users TO queen_proxy_proxy;
GRANT SELECT, UPDATE (last_used_at) ON queen_proxy.api_keys TO queen_proxy_proxy;
GRANT SELECT, INSERT, DELETE ON queen_proxy.revoked_tokens TO queen_proxy_proxy;
-- record_operation gives back the id of its row; the others' rows are not read.
GRANT SELECT (id), INSERT ON queen_proxy.operations TO queen_proxy_proxy;
GRANT SELECT, INSERT, UPDATE, DELETE ON
    queen_proxy.queues,
    queen_proxy.usage_minutes,
    queen_proxy.usage_days,
    queen_proxy.usage_batches,
    queen_proxy.outbox
    TO queen_proxy_proxy;


-- Reader ---------------------------------------------------------------------

GRANT SELECT ON
    queen_proxy.tenants,
    queen_proxy.identities,
    queen_proxy.plans,
    queen_proxy.clusters,
    queen_proxy.cluster_roles,
    queen_proxy.queues,
    queen_proxy.usage_minutes,
    queen_proxy.usage_days,
    queen_proxy.usage_batches,
    queen_proxy.operations,
    queen_proxy.revoked_tokens,
    queen_proxy.outbox,
    queen_proxy.schema_migrations
    TO queen_proxy_reader;
-- All columns but one; a column that a migration adds is closed until it is named.
GRANT SELECT (id, tenant_id, email, is_operator, name, last_login_at, created_at)
    ON queen_proxy.users TO queen_proxy_reader;
GRANT SELECT (id, cluster_id, name, scopes, created_by, last_used_at, revoked_at, created_at)
    ON queen_proxy.api_keys TO queen_proxy_reader;
GRANT SELECT (
        id, slug, region, base_url, class, capacity_slots, used_slots, broker_version, status,
        created_at)
    ON queen_proxy.cells TO queen_proxy_reader;

COMMIT;
