-- Control plane: delete a tenant with everything it owns.
--
-- The order of a wipe: set_tenant_status(…, 'deleting'); purge the data of every
-- broker_tenant_uuid on its cell; then this. p_force skips the check of the status
-- and nothing else. The result is the last place where the broker_tenant_uuids can
-- be read. A repeat finds nothing and says so.
--
-- Locks. A mutator holds a key, a cluster or a user (in this order) and then needs the
-- tenant for its audit row, so this takes them in the same order: keys, clusters by
-- id, users, the tenant last. It begins with FOR NO KEY UPDATE, which stops whoever
-- changes these rows but not a foreign key's check: what is under way can finish.
-- bootstrap_tenant goes from the tenant to the cluster; its own advisory lock keeps
-- the two apart. A circle stays possible with a shared lock that only the DELETE
-- conflicts with (issue_api_key on its cluster) and with a proxy's statement that
-- writes usage or queues of several clusters. Therefore no wait lasts long enough for
-- the deadlock detector to end somebody else's transaction: when its time is over,
-- this gives back every lock, lets the others finish, and begins anew.

CREATE OR REPLACE FUNCTION queen_proxy.delete_tenant(
    p_tenant_id  UUID,
    p_force      BOOLEAN DEFAULT false
)
RETURNS JSONB
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
SET lock_timeout = '100ms'  -- well below deadlock_timeout, 1 s by default
SET timezone = 'UTC'        -- for the text of the time in the outbox
AS $$
DECLARE
    v_force         BOOLEAN     := coalesce(p_force, false);
    v_give_up       TIMESTAMPTZ := clock_timestamp() + interval '10 seconds';
    v_slug          TEXT;
    v_status        TEXT;
    v_cluster_ids   UUID[];
    v_clusters      JSONB;
    v_counts        JSONB;
    v_keys_revoked  BIGINT;
    v_operations    BIGINT;
    v_redacted      BIGINT;
BEGIN
    IF p_tenant_id IS NULL THEN
        RAISE EXCEPTION 'delete_tenant: tenant id is required';
    END IF;

    -- A call that will be refused locks nothing of a tenant that is in use.
    SELECT slug, status INTO v_slug, v_status
    FROM queen_proxy.tenants
    WHERE id = p_tenant_id;
    IF FOUND AND v_status <> 'deleting' AND NOT v_force THEN
        RAISE EXCEPTION 'delete_tenant: tenant % has status %, not deleting', p_tenant_id, v_status;
    END IF;

    LOOP
        BEGIN
            PERFORM pg_advisory_xact_lock(
                hashtextextended('queen_proxy/bootstrap/tenant/' || v_slug, 0));

            PERFORM 1
            FROM queen_proxy.api_keys AS k
            JOIN queen_proxy.clusters AS c ON c.id = k.cluster_id
            WHERE c.tenant_id = p_tenant_id
            ORDER BY k.id
            FOR NO KEY UPDATE OF k;

            PERFORM 1
            FROM queen_proxy.clusters
            WHERE tenant_id = p_tenant_id
            ORDER BY id
            FOR NO KEY UPDATE;

            PERFORM 1
            FROM queen_proxy.users
            WHERE tenant_id = p_tenant_id
            ORDER BY id
            FOR NO KEY UPDATE;

            SELECT slug, status INTO v_slug, v_status
            FROM queen_proxy.tenants
            WHERE id = p_tenant_id
            FOR UPDATE;
            IF NOT FOUND THEN
                RETURN jsonb_build_object(
                    'deleted', false, 'existed', false, 'tenant_id', p_tenant_id);
            END IF;
            IF v_status <> 'deleting' AND NOT v_force THEN
                RAISE EXCEPTION 'delete_tenant: tenant % has status %, not deleting',
                    p_tenant_id, v_status;
            END IF;

            -- From here on everybody else waits for us, or we for them in vain.
            PERFORM set_config('lock_timeout', '20ms', true);

            -- The DELETE's own locks, before there is work to lose. No cluster and no
            -- user can be added any more, so these are all, also those made meanwhile.
            PERFORM 1 FROM queen_proxy.clusters WHERE tenant_id = p_tenant_id FOR UPDATE;
            PERFORM 1 FROM queen_proxy.users WHERE tenant_id = p_tenant_id FOR UPDATE;

            SELECT coalesce(array_agg(id), '{}'),
                   coalesce(
                       jsonb_agg(
                           jsonb_build_object(
                               'cluster_id',         id,
                               'slug',               slug,
                               'cell_id',            cell_id,
                               'broker_tenant_uuid', broker_tenant_uuid)
                           ORDER BY slug),
                       '[]'::jsonb)
            INTO v_cluster_ids, v_clusters
            FROM queen_proxy.clusters
            WHERE tenant_id = p_tenant_id;

            v_counts := jsonb_build_object(
                'clusters', cardinality(v_cluster_ids),
                'users', (SELECT count(*) FROM queen_proxy.users
                          WHERE tenant_id = p_tenant_id),
                'cluster_roles', (SELECT count(*) FROM queen_proxy.cluster_roles
                                  WHERE cluster_id = ANY (v_cluster_ids)),
                'queues', (SELECT count(*) FROM queen_proxy.queues
                           WHERE cluster_id = ANY (v_cluster_ids)),
                'api_keys', (SELECT count(*) FROM queen_proxy.api_keys
                             WHERE cluster_id = ANY (v_cluster_ids)));

            UPDATE queen_proxy.api_keys
            SET revoked_at = now()
            WHERE cluster_id = ANY (v_cluster_ids)
              AND revoked_at IS NULL;
            GET DIAGNOSTICS v_keys_revoked = ROW_COUNT;

            -- Emitters write the ids themselves, so their case is not certain.
            UPDATE queen_proxy.outbox
            SET payload = payload - 'admin_email'
            WHERE jsonb_typeof(payload) = 'object'
              AND payload ? 'admin_email'
              AND (lower(payload ->> 'tenant_id') = p_tenant_id::text
                   OR lower(payload ->> 'cluster_id') = ANY (v_cluster_ids::text[]));
            GET DIAGNOSTICS v_redacted = ROW_COUNT;

            DELETE FROM queen_proxy.operations WHERE tenant_id = p_tenant_id;
            GET DIAGNOSTICS v_operations = ROW_COUNT;

            v_counts := v_counts || jsonb_build_object(
                'api_keys_revoked', v_keys_revoked,
                'operations',       v_operations,
                'outbox_redacted',  v_redacted);

            -- Without the uuids under which the cells knew the tenant.
            PERFORM queen_proxy.emit_outbox(
                'tenant_deleted',
                jsonb_build_object(
                    'tenant_id',   p_tenant_id,
                    'tenant_slug', v_slug,
                    'status_was',  v_status,
                    'forced',      v_force,
                    'clusters',    (SELECT coalesce(jsonb_agg(c - 'broker_tenant_uuid' ORDER BY at), '[]'::jsonb)
                                    FROM jsonb_array_elements(v_clusters) WITH ORDINALITY AS e (c, at)),
                    'counts',      v_counts,
                    'at',          now()));

            DELETE FROM queen_proxy.tenants WHERE id = p_tenant_id;

            PERFORM pg_notify('queen_proxy_inval', id::text)
            FROM unnest(v_cluster_ids) AS id;

            RETURN jsonb_build_object(
                'deleted',     true,
                'existed',     true,
                'tenant_id',   p_tenant_id,
                'tenant_slug', v_slug,
                'status_was',  v_status,
                'forced',      v_force,
                'clusters',    v_clusters,
                'counts',      v_counts);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            -- The block has given back its locks and undone what it wrote.
            IF clock_timestamp() >= v_give_up THEN
                RAISE EXCEPTION 'delete_tenant: tenant % is in use; nothing was deleted, try again',
                    p_tenant_id;
            END IF;
        END;
        PERFORM pg_sleep(0.01 + 0.04 * random());
    END LOOP;
END
$$;
