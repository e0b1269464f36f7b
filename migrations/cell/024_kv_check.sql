-- Key/value store: what an operation may look like. Every refusal is a named error with the position of the
-- operation in its detail; no message and no 22023 detail carries a key, because messages reach shared logs.

-- Validates one operation; the first failure wins. Returns how many keys it counts for.
CREATE OR REPLACE FUNCTION queen.kv_check_op_v1(
    p_op jsonb, p_pos integer, p_now timestamptz, p_in_wire boolean
)
RETURNS integer LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    v_at    text;
    v_name  text;
    v_ns    text;
    v_text  text;
    v_count integer;
BEGIN
    -- Vouches for ordinary operations of one key in few expressions, each of which costs most when it is
    -- evaluated for the first time in a transaction. Whatever this does not vouch for is judged below.
    v_name := p_op ->> 'op';
    IF jsonb_typeof(p_op -> 'ns') = 'string' AND (p_op ->> 'ns') COLLATE "C" ~ '^[a-z0-9][a-z0-9._-]{0,63}$'
       AND jsonb_typeof(p_op -> 'key') = 'string' AND octet_length(p_op ->> 'key') BETWEEN 1 AND 512
       AND NOT p_op ?| ARRAY['tenant', 'tenantId', '_tenant'] THEN
        IF v_name = 'get' THEN
            RETURN 1;
        ELSIF coalesce(jsonb_typeof(p_op -> 'required') <> 'boolean', false) THEN
            NULL;
        ELSIF v_name = 'delete' THEN
            IF NOT p_op ? 'expect' THEN
                RETURN 1;
            END IF;
        ELSIF p_op @> '{"forever": true}' = p_op ? 'ttlSeconds' THEN
            NULL;
        ELSIF p_op ? 'ttlSeconds'
              AND (p_now >= timestamptz '9999-01-01 00:00+00'
                   OR queen.kv_int_v1(p_op -> 'ttlSeconds', 1, 4294967296) IS NULL) THEN
            NULL;
        ELSIF v_name IN ('put', 'putIfAbsent') THEN
            IF octet_length((p_op -> 'value')::text) <= 65536 AND NOT p_op ? 'expect' THEN
                RETURN 1;
            END IF;
        ELSIF v_name = 'incr' THEN
            IF jsonb_typeof(p_op -> 'delta') = 'number' AND NOT p_op ?| ARRAY['expect', 'min', 'max'] THEN
                RETURN 1;
            END IF;
        END IF;
    END IF;

    v_at := format('operation %s: ', p_pos);
    IF jsonb_typeof(p_op) IS DISTINCT FROM 'object' THEN
        RAISE invalid_parameter_value USING MESSAGE = 'kv_bad_request', DETAIL = v_at || 'not an object';
    END IF;

    v_name := queen.kv_text_v1(p_op -> 'op');
    IF v_name IS NULL
       OR v_name NOT IN ('get', 'getMany', 'getPrefix', 'put', 'putIfAbsent', 'delete', 'incr') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_unknown_op',
            DETAIL = v_at || coalesce('"' || left(v_name, 40) || '"', 'no "op" text');
    ELSIF p_op ?| ARRAY['tenant', 'tenantId', '_tenant'] THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_tenant_not_an_input',
            DETAIL = v_at || 'the tenant comes from the connection, never from an operation';
    END IF;

    v_ns := queen.kv_text_v1(p_op -> 'ns');

    IF v_name = 'getPrefix' THEN
        v_text := queen.kv_text_v1(p_op -> 'prefix');
        IF p_in_wire THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_get_prefix_not_allowed_in_transaction',
                DETAIL = v_at || 'getPrefix is served by POST /api/v1/kv';
        ELSIF v_text IS NULL OR v_text = '' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_prefix_required', DETAIL = v_at || 'getPrefix needs a prefix that is not empty';
        END IF;
        PERFORM queen.kv_check_names_v1(v_ns, v_text);
        -- JSON null counts as not given for the three options.
        IF jsonb_typeof(p_op -> 'limit') <> 'null'
           AND queen.kv_int_v1(p_op -> 'limit', -2147483648, 2147483647) IS NULL THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'limit must be a whole 32-bit number';
        ELSIF jsonb_typeof(p_op -> 'keysOnly') NOT IN ('boolean', 'null') THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'keysOnly must be true or false';
        ELSIF jsonb_typeof(p_op -> 'after') NOT IN ('string', 'null') THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'after must be text';
        END IF;
        RETURN queen.kv_limit_v1(p_op -> 'limit');
    END IF;

    IF v_name = 'getMany' THEN
        IF jsonb_typeof(p_op -> 'keys') IS DISTINCT FROM 'array' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'getMany needs an array of keys';
        END IF;
        v_count := jsonb_array_length(p_op -> 'keys');
        IF v_count = 0 THEN
            PERFORM queen.kv_check_names_v1(v_ns, '-');
        ELSE
            PERFORM queen.kv_check_names_v1(v_ns, queen.kv_text_v1(e)) FROM jsonb_array_elements(p_op -> 'keys') e;
        END IF;
        RETURN v_count;
    END IF;

    PERFORM queen.kv_check_names_v1(v_ns, queen.kv_text_v1(p_op -> 'key'));
    IF v_name = 'get' THEN
        RETURN 1;
    END IF;

    IF v_name <> 'delete' THEN
        v_count := (p_op ? 'ttlSeconds')::integer + (p_op @> '{"forever": true}')::integer;
        IF v_count <> 1 THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_expiry_not_specified',
                DETAIL = v_at || format('exactly one of ttlSeconds and forever:true is needed, found %s', v_count);
        ELSIF p_op ? 'ttlSeconds'
              AND queen.kv_int_v1(
                      p_op -> 'ttlSeconds', 1,
                      -- Seconds to the last day a timestamp can name.
                      floor(extract(epoch FROM timestamptz '294276-12-31 00:00+00') - extract(epoch FROM p_now))
                  ) IS NULL THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_ttl',
                DETAIL = v_at || 'ttlSeconds must be a whole number above 0 that ends before the year 294277';
        END IF;
    END IF;

    IF v_name IN ('put', 'putIfAbsent') THEN
        IF NOT p_op ? 'value' THEN
            RAISE invalid_parameter_value USING MESSAGE = 'kv_bad_request', DETAIL = v_at || 'no value';
        END IF;
        v_count := octet_length((p_op -> 'value')::text);
        IF v_count > 65536 THEN
            RAISE string_data_right_truncation USING
                MESSAGE = 'kv_value_too_large',
                DETAIL = v_at || format('%s bytes as stored text, at most 65536', v_count);
        END IF;
    END IF;

    IF v_name = 'incr' THEN
        IF p_op ? 'expect' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'incr takes no expect';
        ELSIF jsonb_typeof(p_op -> 'delta') IS DISTINCT FROM 'number' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'delta must be a number';
        ELSIF jsonb_typeof(p_op -> 'min') <> 'number' OR jsonb_typeof(p_op -> 'max') <> 'number' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = 'kv_bad_request', DETAIL = v_at || 'min and max must be numbers';
        END IF;
    ELSIF p_op ? 'expect'
          AND queen.kv_int_v1(
                  p_op -> 'expect', 0,
                  CASE v_name WHEN 'putIfAbsent' THEN 0 ELSE 9223372036854775807 END
              ) IS NULL THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_bad_expect',
            DETAIL = v_at || CASE v_name WHEN 'putIfAbsent' THEN 'putIfAbsent only takes expect 0'
                                         ELSE 'expect must be a version: a whole number from 0 up' END;
    END IF;

    IF jsonb_typeof(p_op -> 'required') <> 'boolean' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_bad_request', DETAIL = v_at || 'required must be true or false';
    END IF;
    RETURN 1;
END
$$;

GRANT EXECUTE ON FUNCTION queen.kv_check_op_v1(jsonb, integer, timestamptz, boolean) TO PUBLIC;
