-- Key/value store: what a console shows. Plain reads of the caller's statement snapshot; no row is locked.

-- One page of one namespace, in byte order of the keys. `p_prefix` is free text: empty lists everything, one
-- longer than any key matches nothing. `p_after` is exclusive and may lie anywhere. The page ends after
-- `p_limit` rows (1..1000, 100 when NULL) or with the row that reaches 4 MiB of values.
CREATE OR REPLACE FUNCTION queen.kv_list_v1(
    p_tenant uuid, p_namespace text, p_prefix text, p_after text, p_limit integer,
    p_keys_only boolean, p_include_expired boolean
)
RETURNS jsonb LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_budget  constant bigint  := 4194304;
    v_limit   constant integer := greatest(1, least(1000, coalesce(p_limit, 100)));
    v_prefix  constant text    := coalesce(p_prefix, '');
    v_bare    constant boolean := coalesce(p_keys_only, false);
    v_expired constant boolean := coalesce(p_include_expired, false);
    v_format  constant text    := 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"';
    v_upper   text;
    v_rows    jsonb[]          := '{}';
    v_bytes   bigint           := 0;
    v_next    text;
    v_cut     boolean          := false;
    v_row     record;
    v_shown   jsonb;
BEGIN
    IF p_tenant IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'kv_bad_request', DETAIL = 'no tenant';
    END IF;
    PERFORM queen.kv_check_names_v1(p_namespace, '-');

    -- No key is that long. Stepping to the end of such a prefix could take its length squared.
    IF octet_length(v_prefix) <= 512 THEN
        -- 129 times the last code point is longer, and therefore greater, than any key can be.
        v_upper := coalesce(queen.kv_prefix_end_v1(v_prefix), repeat(chr(1114111), 129));
        -- Ranges and starts_with joined by AND alone: an OR for the empty prefix would cost the index.
        FOR v_row IN
            SELECT key, CASE WHEN NOT v_bare THEN value END AS value, version, expires_at, updated_at,
                   NOT queen.kv_live_v1(expires_at, now()) AS expired
            FROM queen.kv
            WHERE tenant_id = p_tenant AND namespace = p_namespace
              AND key >= v_prefix AND key < v_upper AND starts_with(key, v_prefix)
              AND key > coalesce(p_after, '')
              AND (v_expired OR queen.kv_live_v1(expires_at, now()))
            ORDER BY key
            LIMIT v_limit + 1
        LOOP
            v_cut := cardinality(v_rows) = v_limit OR v_bytes >= v_budget;
            EXIT WHEN v_cut;
            v_next  := v_row.key;
            v_bytes := v_bytes + coalesce(octet_length(v_row.value::text), 0);
            v_shown := jsonb_build_object(
                'key', v_row.key,
                'version', v_row.version,
                'expiresAt', to_char(v_row.expires_at AT TIME ZONE 'UTC', v_format),
                'updatedAt', to_char(v_row.updated_at AT TIME ZONE 'UTC', v_format),
                'expired', v_row.expired);
            IF NOT v_bare THEN
                v_shown := v_shown || jsonb_build_object('value', v_row.value);
            END IF;
            v_rows := array_append(v_rows, v_shown);
        END LOOP;
    END IF;

    RETURN jsonb_build_object(
        'rows', to_jsonb(v_rows),
        'truncated', v_cut,
        'nextAfter', CASE WHEN v_cut THEN v_next END,
        'bytes', v_bytes);
END
$$;

-- The first 10000 namespaces of a tenant in byte order, each with its number of rows. Rows that have expired
-- and are not swept yet count: they are there, and a console may list them.
CREATE OR REPLACE FUNCTION queen.kv_namespaces_v1(p_tenant uuid)
RETURNS jsonb LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_tenant IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'kv_bad_request', DETAIL = 'no tenant';
    END IF;
    RETURN (
        SELECT coalesce(
            jsonb_agg(jsonb_build_object('namespace', n.namespace, 'keys', n.keys) ORDER BY n.namespace),
            '[]'::jsonb)
        FROM (
            SELECT namespace, count(*) AS keys
            FROM queen.kv
            WHERE tenant_id = p_tenant
            GROUP BY namespace
            ORDER BY namespace
            LIMIT 10000
        ) AS n
    );
END
$$;

GRANT EXECUTE ON FUNCTION
    queen.kv_list_v1(uuid, text, text, text, integer, boolean, boolean),
    queen.kv_namespaces_v1(uuid)
TO PUBLIC;
