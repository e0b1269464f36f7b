-- Key/value store: calls that came at the same time and share one transaction, and with it one commit.

-- The operations of such calls, all validated. Each call is an array of one operation on one key.
CREATE OR REPLACE FUNCTION queen.kv_group_ops_v1(p_calls text[], p_now timestamptz)
RETURNS jsonb[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_call jsonb;
    v_ops  jsonb[];
BEGIN
    FOREACH v_call IN ARRAY p_calls LOOP
        IF jsonb_array_length(v_call) <> 1 OR v_call -> 0 ->> 'op' IN ('getMany', 'getPrefix') THEN
            RAISE feature_not_supported USING MESSAGE = 'kv_not_in_group';
        END IF;
        PERFORM queen.kv_check_op_v1(v_call -> 0, 0, p_now, false);
        v_ops := v_ops || (v_call -> 0);
    END LOOP;
    RETURN v_ops;
END
$$;

-- Runs such calls as kv_apply_v1 would run every one of them alone. What is wrong with one is told in its
-- place and does not touch its neighbours:
--
-- results   the result element as text, or NULL when the call failed
-- states, messages, details
--           of the error that it alone would have raised; all three NULL when no call failed
--
-- Everything is validated before anything is written, and a lost `required` has written nothing. So nothing of a
-- single call is ever taken back, and there is no subtransaction that writes. An error of any other kind ends
-- the whole group with nothing applied, and the caller runs the calls one by one.
--
-- Rows are locked in order of (tenant, namespace, key) over the whole group, which within a tenant is the
-- order of kv_apply_v1. Calls for one key take their turns in the order of the array.
CREATE OR REPLACE FUNCTION queen.kv_group_v1(
    p_calls text[], p_tenants uuid[], p_now timestamptz,
    OUT results text[], OUT states text[], OUT messages text[], OUT details text[]
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
-- Who holds a row for longer shall not stop those in the group that want others.
SET lock_timeout = '100ms' AS $$
DECLARE
    v_now     timestamptz := coalesce(p_now, now());
    v_count   integer     := cardinality(p_calls);
    v_ops     jsonb[];
    v_reads   boolean;
    v_plain   boolean;
    v_pos     integer;
    v_tenant  uuid;
    v_op      jsonb;
    v_element jsonb;
    v_lost    text;
BEGIN
    IF v_count IS DISTINCT FROM cardinality(p_tenants) OR array_position(p_tenants, NULL) IS NOT NULL THEN
        RAISE internal_error USING
            MESSAGE = 'kv_result_misaligned', DETAIL = 'each call of a group needs its tenant';
    END IF;

    -- In one block, because each costs; one by one only to find out whose error it was.
    BEGIN
        v_ops := queen.kv_group_ops_v1(p_calls, v_now);
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        v_ops    := array_fill(NULL::jsonb, ARRAY[v_count]);
        states   := array_fill(NULL::text, ARRAY[v_count]);
        messages := states;
        details  := states;
        FOR v_pos IN 1 .. v_count LOOP
            BEGIN
                v_ops[v_pos] := (queen.kv_group_ops_v1(p_calls[v_pos : v_pos], v_now))[1];
            EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
                states[v_pos]   := SQLSTATE;
                messages[v_pos] := SQLERRM;
                GET STACKED DIAGNOSTICS v_lost = PG_EXCEPTION_DETAIL;
                details[v_pos]  := nullif(v_lost, '');
            END;
        END LOOP;
    END;

    SELECT bool_and(op ->> 'op' = 'get'), bool_and(op ->> 'op' = 'put' AND NOT op ? 'expect')
    INTO v_reads, v_plain
    FROM unnest(v_ops) AS op;

    IF v_reads THEN
        -- One key at a time by the primary key, whatever the planner believes about the size of the table.
        SELECT array_agg(
                   CASE WHEN c.op IS NOT NULL THEN coalesce(
                       found.element,
                       jsonb_build_object('index', 0, 'op', 'get', 'found', false, 'key', c.op -> 'key')::text)
                   END
                   ORDER BY c.pos)
        INTO results
        FROM unnest(p_tenants, v_ops) WITH ORDINALITY AS c (tenant, op, pos)
        LEFT JOIN LATERAL (
            SELECT jsonb_build_object(
                       'index', 0, 'op', 'get', 'found', true, 'key', key, 'value', value,
                       'version', version, 'expiresAt', expires_at, 'updatedAt', updated_at)::text AS element
            FROM queen.kv
            WHERE tenant_id = c.tenant AND namespace = c.op ->> 'ns' AND key = c.op ->> 'key'
              AND queen.kv_live_v1(expires_at, v_now)
            LIMIT 1
        ) AS found ON true;
        RETURN;
    END IF;

    IF v_plain THEN
        -- A plain put cannot lose, so each has its answer before it is written. Of several for one key only the
        -- last leaves something behind: nobody could have seen the others.
        WITH c AS MATERIALIZED (
            SELECT o.*, nextval('queen.kv_version_seq') AS version
            FROM (
                SELECT tenant, op, pos,
                       (op ->> 'ns') COLLATE "C" AS ns,
                       (op ->> 'key') COLLATE "C" AS key
                FROM unnest(p_tenants, v_ops) WITH ORDINALITY AS c (tenant, op, pos)
            ) AS o
        ), written AS (
            INSERT INTO queen.kv AS t
                (tenant_id, namespace, key, value, version, expires_at, created_at, updated_at)
            SELECT DISTINCT ON (tenant, ns, key)
                   tenant, ns, key, op -> 'value', version,
                   v_now + interval '1 second' * (op -> 'ttlSeconds')::double precision, v_now, v_now
            FROM c
            WHERE op IS NOT NULL
            ORDER BY tenant, ns, key, pos DESC
            ON CONFLICT (tenant_id, namespace, key) DO UPDATE SET
                value      = excluded.value,
                version    = excluded.version,
                expires_at = excluded.expires_at,
                created_at = CASE WHEN queen.kv_live_v1(t.expires_at, v_now) THEN t.created_at ELSE v_now END,
                updated_at = v_now
        )
        SELECT array_agg(
                   CASE WHEN op IS NOT NULL THEN
                       jsonb_build_object('index', 0, 'op', 'put', 'applied', true,
                                          'key', key, 'value', op -> 'value', 'version', version)::text
                   END
                   ORDER BY pos)
        INTO results
        FROM c;
        RETURN;
    END IF;

    results := array_fill(NULL::text, ARRAY[v_count]);
    FOR v_pos, v_tenant, v_op IN
        SELECT c.pos, c.tenant, c.op
        FROM unnest(p_tenants, v_ops) WITH ORDINALITY AS c (tenant, op, pos)
        WHERE c.op IS NOT NULL
        ORDER BY c.tenant, (c.op ->> 'ns') COLLATE "C", (c.op ->> 'key') COLLATE "C", c.pos
    LOOP
        IF v_op ->> 'op' = 'get' THEN
            results[v_pos] := queen.kv_get_op_v1(v_op, 0, v_tenant, v_now)::text;
            CONTINUE;
        END IF;
        v_element := queen.kv_write_op_v1(v_op, 0, v_tenant, v_now);
        v_lost    := queen.kv_lost_v1(v_op, v_element);
        IF v_lost IS NULL THEN
            results[v_pos] := v_element::text;
            CONTINUE;
        END IF;
        IF states IS NULL THEN
            states   := array_fill(NULL::text, ARRAY[v_count]);
            messages := states;
            details  := states;
        END IF;
        states[v_pos]   := '23514';
        messages[v_pos] := 'kv_precondition_failed';
        details[v_pos]  := v_lost;
    END LOOP;
END
$$;

GRANT EXECUTE ON FUNCTION
    queen.kv_group_ops_v1(text[], timestamptz),
    queen.kv_group_v1(text[], uuid[], timestamptz)
TO PUBLIC;
