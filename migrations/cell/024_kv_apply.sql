-- Key/value store: the one path that reads and writes rows. plpgsql throughout, because it resolves names at
-- run time: the transaction wire sits in an earlier file and calls kv_apply_v1.

-- Applies one validated put, putIfAbsent, delete or incr and returns its result element, also of a `required`
-- one that lost: that has changed nothing, and what follows from it is the caller's business.
--
-- The row is locked first, then judged, then written: what a loser reports is therefore current, also
-- against a transaction that committed while this one waited.
CREATE OR REPLACE FUNCTION queen.kv_write_op_v1(p_op jsonb, p_pos integer, p_tenant uuid, p_now timestamptz)
RETURNS jsonb LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_name    text := p_op ->> 'op';
    v_kind    text;
    v_ns      text := p_op ->> 'ns';
    v_key     text := p_op ->> 'key';
    v_expect  bigint;
    v_expires timestamptz;
    v_row     queen.kv%ROWTYPE;
    v_found   boolean;
    v_live    boolean;
    v_reason  text;
    v_value   jsonb;
    v_version bigint;
    v_number  numeric;
    v_delta   numeric;
BEGIN
    -- A plain put cannot lose, so one statement does.
    IF v_name = 'put' AND NOT p_op ? 'expect' THEN
        INSERT INTO queen.kv AS t
            (tenant_id, namespace, key, value, version, expires_at, created_at, updated_at)
        VALUES
            (p_tenant, v_ns, v_key, p_op -> 'value', nextval('queen.kv_version_seq'),
             p_now + interval '1 second' * (p_op -> 'ttlSeconds')::double precision, p_now, p_now)
        ON CONFLICT (tenant_id, namespace, key) DO UPDATE SET
            value      = excluded.value,
            version    = excluded.version,
            expires_at = excluded.expires_at,
            created_at = CASE WHEN queen.kv_live_v1(t.expires_at, p_now) THEN t.created_at ELSE p_now END,
            updated_at = p_now
        RETURNING t.version INTO v_version;
        RETURN jsonb_build_object('index', p_pos, 'op', v_name, 'applied', true,
                                  'key', v_key, 'value', p_op -> 'value', 'version', v_version);
    END IF;

    v_kind := CASE v_name WHEN 'putIfAbsent' THEN 'put' ELSE v_name END;
    v_expect := CASE v_name
        WHEN 'putIfAbsent' THEN 0
        WHEN 'incr' THEN NULL
        ELSE (p_op -> 'expect')::numeric
    END;
    IF v_kind <> 'delete' THEN
        v_expires := p_now + interval '1 second' * (p_op -> 'ttlSeconds')::double precision;
    END IF;

    LOOP
        SELECT * INTO v_row
        FROM queen.kv
        WHERE tenant_id = p_tenant AND namespace = v_ns AND key = v_key
        FOR UPDATE;
        v_found   := FOUND;
        v_live    := v_found AND queen.kv_live_v1(v_row.expires_at, p_now);
        v_value   := CASE WHEN v_live THEN v_row.value ELSE 'null'::jsonb END;
        v_version := queen.kv_ver_v1(v_row.version, v_row.expires_at, p_now);

        IF v_kind = 'incr' THEN
            v_number := queen.kv_num_v1(v_row.value, v_row.expires_at, p_now);
            v_delta  := (p_op -> 'delta')::numeric;
            -- Below this both, the sum stays inside numeric.
            IF greatest(abs(v_number), abs(v_delta)) >= 1e131071 THEN
                RAISE invalid_parameter_value USING
                    MESSAGE = 'kv_bad_request',
                    DETAIL = format('operation %s: the counter or its delta has more than 131071 digits', p_pos);
            END IF;
            v_reason := CASE
                WHEN v_live AND jsonb_typeof(v_row.value) <> 'number' THEN 'type'
                WHEN v_number + v_delta < (p_op -> 'min')::numeric
                  OR v_number + v_delta > (p_op -> 'max')::numeric THEN 'limit'
            END;
            v_value := to_jsonb(trim_scale(CASE WHEN v_reason IS NULL THEN v_number + v_delta ELSE v_number END));
        ELSE
            v_reason := CASE
                WHEN v_expect = v_version THEN NULL
                WHEN v_expect = 0 THEN 'exists'
                WHEN NOT v_live THEN 'absent'
                WHEN v_expect IS NOT NULL THEN 'version'
            END;
        END IF;

        IF v_kind = 'delete' THEN
            -- Without a precondition an expired row goes as well, although the caller hears `absent`; not for
            -- one that loses by it.
            IF v_found AND (v_live OR NOT p_op @> '{"required": true}')
               AND (v_expect IS NULL OR (v_live AND v_reason IS NULL)) THEN
                DELETE FROM queen.kv WHERE tenant_id = p_tenant AND namespace = v_ns AND key = v_key;
            END IF;
        ELSIF v_reason IS NULL THEN
            IF v_kind = 'put' THEN
                v_value := p_op -> 'value';
            END IF;
            v_version := nextval('queen.kv_version_seq');
            IF v_found THEN
                UPDATE queen.kv SET
                    value      = v_value,
                    version    = v_version,
                    -- The lifetime of a counter is fixed when it is born.
                    expires_at = CASE WHEN v_kind = 'incr' AND v_live THEN expires_at ELSE v_expires END,
                    created_at = CASE WHEN v_live THEN created_at ELSE p_now END,
                    updated_at = p_now
                WHERE tenant_id = p_tenant AND namespace = v_ns AND key = v_key;
            ELSE
                INSERT INTO queen.kv
                    (tenant_id, namespace, key, value, version, expires_at, created_at, updated_at)
                VALUES
                    (p_tenant, v_ns, v_key, v_value, v_version, v_expires, p_now, p_now)
                ON CONFLICT (tenant_id, namespace, key) DO NOTHING;
                -- Somebody created it first: judge again, with that row locked.
                CONTINUE WHEN NOT FOUND;
            END IF;
            EXIT;
        END IF;

        EXIT WHEN v_found;
        -- The lock also comes back empty when a transaction removed the row and put a new one in its place.
        PERFORM 1 FROM queen.kv WHERE tenant_id = p_tenant AND namespace = v_ns AND key = v_key;
        EXIT WHEN NOT FOUND;
    END LOOP;

    IF v_reason IS NULL THEN
        RETURN jsonb_build_object('index', p_pos, 'op', v_name, 'applied', true,
                                  'key', v_key, 'value', v_value, 'version', v_version);
    END IF;
    RETURN jsonb_build_object('index', p_pos, 'op', v_name, 'applied', false, 'reason', v_reason,
                              'key', v_key, 'value', v_value, 'version', v_version);
END
$$;

-- (operation, its result element): what the error of a lost `required` tells (section 3.8); NULL when it is none.
CREATE OR REPLACE FUNCTION queen.kv_lost_v1(jsonb, jsonb)
RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_detail jsonb;
BEGIN
    IF $2 @> '{"applied": true}' OR NOT $1 @> '{"required": true}' THEN
        RETURN NULL;
    END IF;
    v_detail := $2 - 'applied' || jsonb_build_object('ns', $1 -> 'ns');
    -- Cut JSON is no JSON: a value that does not fit is left out, the verdict stays readable.
    RETURN CASE WHEN length(v_detail::text) <= 4096 THEN v_detail ELSE v_detail - 'value' END::text;
END
$$;

-- Answers one validated get.
CREATE OR REPLACE FUNCTION queen.kv_get_op_v1(p_op jsonb, p_pos integer, p_tenant uuid, p_now timestamptz)
RETURNS jsonb LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_element jsonb;
BEGIN
    SELECT jsonb_build_object(
               'index', p_pos, 'op', 'get', 'found', true, 'key', key, 'value', value,
               'version', version, 'expiresAt', expires_at, 'updatedAt', updated_at)
    INTO v_element
    FROM queen.kv
    WHERE tenant_id = p_tenant AND namespace = p_op ->> 'ns' AND key = p_op ->> 'key'
      AND queen.kv_live_v1(expires_at, p_now);
    RETURN coalesce(v_element,
                    jsonb_build_object('index', p_pos, 'op', 'get', 'found', false, 'key', p_op -> 'key'));
END
$$;

-- The one way in. Answers an array as long as `p_ops`, in its order; all operations apply or none does.
-- One instant serves the whole call, and no subtransaction is opened anywhere below.
CREATE OR REPLACE FUNCTION queen.kv_apply_v1(
    p_ops jsonb, p_tenant uuid, p_now timestamptz, p_in_wire boolean
)
RETURNS jsonb LANGUAGE plpgsql VOLATILE
-- For this function and all it calls: nobody's overload of a built-in may stand in the way.
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now      timestamptz := coalesce(p_now, now());
    v_in_wire  boolean     := coalesce(p_in_wire, false);
    v_max_ops  integer     := CASE WHEN v_in_wire THEN 64 ELSE 256 END;
    v_max_keys integer     := CASE WHEN v_in_wire THEN 256 ELSE 4096 END;
    v_budget   bigint      := 4194304;       -- bytes of values that reads of this call may still return
    v_count    integer;
    v_keys     integer     := 0;
    v_results  jsonb[];
    v_op       jsonb;
    v_pos      integer;
    v_name     text;
    v_ns       text;
    v_row      record;
    v_rows     jsonb[];
    v_result   jsonb;
    v_lost     text;                         -- what the error of a lost `required` tells
    v_gaps     text[];                       -- getMany: keys without a live row, and where they were asked
    v_gaps_at  integer[];
    v_limit    integer;
    v_kept     integer;
    v_bare     boolean;
    v_prefix   text;
    v_next     text;
    v_cut      boolean;
BEGIN
    IF p_tenant IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'kv_bad_request', DETAIL = 'no tenant';
    ELSIF jsonb_typeof(p_ops) IS DISTINCT FROM 'array' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_bad_request', DETAIL = 'the operations must be an array';
    END IF;

    v_count := jsonb_array_length(p_ops);
    IF v_count = 0 THEN
        RETURN '[]'::jsonb;
    ELSIF v_count > v_max_ops THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_too_many_ops', DETAIL = format('%s operations, at most %s', v_count, v_max_ops);
    END IF;

    -- One operation of one key, the usual call, needs nothing of what orders many.
    IF v_count = 1 THEN
        v_op   := p_ops -> 0;
        v_keys := queen.kv_check_op_v1(v_op, 0, v_now, v_in_wire);
        v_name := v_op ->> 'op';
        IF v_name = 'get' THEN
            RETURN jsonb_build_array(queen.kv_get_op_v1(v_op, 0, p_tenant, v_now));
        ELSIF v_name NOT IN ('getMany', 'getPrefix') THEN
            v_result := queen.kv_write_op_v1(v_op, 0, p_tenant, v_now);
            v_lost   := queen.kv_lost_v1(v_op, v_result);
            IF v_lost IS NOT NULL THEN
                RAISE check_violation USING MESSAGE = 'kv_precondition_failed', DETAIL = v_lost;
            END IF;
            RETURN jsonb_build_array(v_result);
        END IF;
        v_keys := 0;
    END IF;

    -- Everything is validated before anything is applied.
    FOR v_op, v_pos IN
        SELECT e.value, (e.ordinality - 1)::integer
        FROM jsonb_array_elements(p_ops) WITH ORDINALITY AS e
        ORDER BY e.ordinality
    LOOP
        v_keys := v_keys + queen.kv_check_op_v1(v_op, v_pos, v_now, v_in_wire);
    END LOOP;

    -- One write per key is what makes the lock order total.
    PERFORM 1
    FROM jsonb_array_elements(p_ops) AS e
    WHERE e ->> 'op' IN ('put', 'putIfAbsent', 'delete', 'incr')
    GROUP BY e ->> 'ns', e ->> 'key'
    HAVING count(*) > 1;
    IF FOUND THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_duplicate_key_in_call', DETAIL = 'two operations of the call write the same key';
    ELSIF v_keys > v_max_keys THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_too_many_keys', DETAIL = format('%s keys, at most %s', v_keys, v_max_keys);
    END IF;

    -- Single keys first, in byte order of their names (text out of JSON has no collation of its own), so
    -- that overlapping calls queue up instead of deadlocking. Reads of many keys see all writes of the call.
    v_results := array_fill(NULL::jsonb, ARRAY[v_count], ARRAY[0]);
    FOR v_op, v_pos, v_name IN
        SELECT e.value, (e.ordinality - 1)::integer, e.value ->> 'op'
        FROM jsonb_array_elements(p_ops) WITH ORDINALITY AS e
        ORDER BY
            e.value ->> 'op' IN ('getMany', 'getPrefix'),
            (e.value ->> 'ns') COLLATE "C",
            coalesce(e.value ->> 'key', e.value ->> 'prefix', '') COLLATE "C",
            e.ordinality
    LOOP
        v_ns := v_op ->> 'ns';

        IF v_name = 'get' THEN
            v_result := queen.kv_get_op_v1(v_op, v_pos, p_tenant, v_now);
            v_budget := v_budget - coalesce(octet_length((v_result -> 'value')::text), 0);
            v_results[v_pos] := v_result;

        ELSIF v_name = 'getMany' THEN
            v_rows := '{}'; v_gaps := '{}'; v_gaps_at := '{}'; v_cut := false;
            -- Rows and gaps come from one statement: with two, a key could end up in both lists or in none.
            FOR v_row IN
                SELECT w.name, w.ordinality::integer AS at, kv.key IS NOT NULL AS hit,
                       kv.value, kv.version, kv.expires_at, kv.updated_at
                FROM jsonb_array_elements_text(v_op -> 'keys') WITH ORDINALITY AS w (name, ordinality)
                LEFT JOIN queen.kv
                    ON kv.tenant_id = p_tenant AND kv.namespace = v_ns AND kv.key = w.name
                   AND queen.kv_live_v1(kv.expires_at, v_now)
                ORDER BY w.name COLLATE "C", w.ordinality
            LOOP
                IF NOT v_row.hit THEN
                    v_gaps    := v_gaps || v_row.name;
                    v_gaps_at := v_gaps_at || v_row.at;
                ELSIF v_budget <= 0 THEN
                    v_cut := true;
                ELSE
                    v_budget := v_budget - octet_length(v_row.value::text);
                    v_rows   := v_rows || jsonb_build_object(
                        'key', v_row.name, 'value', v_row.value, 'version', v_row.version,
                        'expiresAt', v_row.expires_at, 'updatedAt', v_row.updated_at);
                END IF;
            END LOOP;
            v_results[v_pos] := jsonb_build_object(
                'index', v_pos, 'op', v_name, 'rows', to_jsonb(v_rows), 'truncated', v_cut,
                'missing', to_jsonb(ARRAY(SELECT m.name FROM unnest(v_gaps, v_gaps_at) AS m (name, at) ORDER BY m.at)));

        ELSIF v_name = 'getPrefix' THEN
            v_prefix := v_op ->> 'prefix';
            v_limit  := queen.kv_limit_v1(v_op -> 'limit');
            v_bare   := coalesce((v_op -> 'keysOnly') = 'true'::jsonb, false);
            v_rows   := '{}'; v_next := NULL; v_cut := false;
            FOR v_row IN
                SELECT key, CASE WHEN NOT v_bare THEN value END AS value, version, expires_at, updated_at
                FROM queen.kv
                WHERE tenant_id = p_tenant AND namespace = v_ns
                  AND key >= v_prefix
                  -- 129 times the last code point is longer, and therefore greater, than any key can be.
                  AND key < coalesce(queen.kv_prefix_end_v1(v_prefix), repeat(chr(1114111), 129))
                  AND starts_with(key, v_prefix)
                  AND key > coalesce(v_op ->> 'after', '')
                  AND queen.kv_live_v1(expires_at, v_now)
                ORDER BY key
                LIMIT v_limit + 1
            LOOP
                -- The first row is kept whatever the budget says, so that whoever walks the pages gets on.
                v_kept := cardinality(v_rows);
                v_cut  := v_kept = v_limit OR (v_kept > 0 AND v_budget <= 0);
                EXIT WHEN v_cut;
                v_next := v_row.key;
                v_rows := v_rows || CASE
                    WHEN v_bare THEN jsonb_build_object(
                        'key', v_row.key, 'version', v_row.version,
                        'expiresAt', v_row.expires_at, 'updatedAt', v_row.updated_at)
                    ELSE jsonb_build_object(
                        'key', v_row.key, 'value', v_row.value, 'version', v_row.version,
                        'expiresAt', v_row.expires_at, 'updatedAt', v_row.updated_at)
                END;
                v_budget := v_budget - coalesce(octet_length(v_row.value::text), 0);
            END LOOP;
            v_results[v_pos] := jsonb_build_object(
                'index', v_pos, 'op', v_name, 'rows', to_jsonb(v_rows), 'truncated', v_cut,
                'nextAfter', CASE WHEN v_cut THEN v_next END);

        ELSE
            v_result := queen.kv_write_op_v1(v_op, v_pos, p_tenant, v_now);
            v_lost   := queen.kv_lost_v1(v_op, v_result);
            IF v_lost IS NOT NULL THEN
                RAISE check_violation USING MESSAGE = 'kv_precondition_failed', DETAIL = v_lost;
            END IF;
            v_results[v_pos] := v_result;
        END IF;
    END LOOP;

    IF cardinality(v_results) <> v_count OR array_position(v_results, NULL) IS NOT NULL THEN
        RAISE internal_error USING
            MESSAGE = 'kv_result_misaligned',
            DETAIL = format('%s results for %s operations', cardinality(array_remove(v_results, NULL)), v_count);
    END IF;
    RETURN to_jsonb(v_results);
END
$$;

GRANT EXECUTE ON FUNCTION
    queen.kv_write_op_v1(jsonb, integer, uuid, timestamptz),
    queen.kv_lost_v1(jsonb, jsonb),
    queen.kv_get_op_v1(jsonb, integer, uuid, timestamptz),
    queen.kv_apply_v1(jsonb, uuid, timestamptz, boolean)
TO PUBLIC;
