-- Key/value store: table, version tokens, quota side tables and the pure helpers.
-- 024_kv_check.sql validates operations, 024_kv_apply.sql runs them, 024_kv_console.sql lists them.
--
-- The files run at every boot, in one transaction under an advisory lock, so every statement can be
-- repeated and none takes a lock on queen.kv that an ordinary writer would have to wait for.
-- Nothing here names a partition.

CREATE SCHEMA IF NOT EXISTS queen;

-- Version tokens. Compared for equality only: every session owns a block of 1000, so they carry no order.
-- The block spares a WAL record per write.
CREATE SEQUENCE IF NOT EXISTS queen.kv_version_seq AS bigint START WITH 1 CACHE 1000;

-- COLLATE "C" gives all hosts one lock order and keeps prefix ranges and cursors stable in byte order.
CREATE TABLE IF NOT EXISTS queen.kv (
    tenant_id  uuid             NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    namespace  text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    value      jsonb            NOT NULL,
    version    bigint           NOT NULL,
    expires_at timestamptz,                        -- NULL: forever
    shard      smallint         NOT NULL
               GENERATED ALWAYS AS ((hashtextextended(key, 0) & 63)::smallint) STORED,
    created_at timestamptz      NOT NULL DEFAULT now(),
    updated_at timestamptz      NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, namespace, key)
);

-- Truncation by vacuum needs ACCESS EXCLUSIVE, which stops even readers: switched off, as part of the lock
-- order.
--
-- fillfactor, measured 2026-11-30 on PostgreSQL 15.18 (benches/kv_numbers.rs: 4 sessions, 2000 keys, 6 s each):
-- counters at 50, 70, 85, 100: 100, 99.9, 95.3, 93.1 % of the updates HOT, heap grown by 0, 0, 0.2, 0.3 MB.
-- Rewritten keys with a lifetime are never HOT, because expires_at is indexed; their heap grew by 0, 0.4, 1.2,
-- 1.9 MB. So 70 stays: below it nothing more is gained, above it counters lose.
--
-- autovacuum, the same day and program, for 20 s with a naptime of 1 s: 4 vacuums of the table in each load, none
-- of which was running at any look each 20 ms.
ALTER TABLE queen.kv SET (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- Read by the sweeper alone. CREATE INDEX locks the table against writers before it looks whether the index
-- is there, hence the test around it.
DO $$
BEGIN
    IF to_regclass('queen.idx_kv_shard_expires') IS NULL THEN
        CREATE INDEX idx_kv_shard_expires ON queen.kv (shard, expires_at) WHERE expires_at IS NOT NULL;
    END IF;
END
$$;

-- Configuration, written by an operator. A NULL resource cap is no cap; a NULL rate is the cell's default.
CREATE TABLE IF NOT EXISTS queen.kv_quota (
    tenant_id  uuid        PRIMARY KEY,
    updated_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE queen.kv_quota
    ADD COLUMN IF NOT EXISTS enabled             boolean NOT NULL DEFAULT true,
    ADD COLUMN IF NOT EXISTS max_rows            bigint,
    ADD COLUMN IF NOT EXISTS max_bytes           bigint,
    ADD COLUMN IF NOT EXISTS max_timers          bigint,
    ADD COLUMN IF NOT EXISTS max_timer_horizon_s bigint,
    ADD COLUMN IF NOT EXISTS max_reads_per_sec   integer,
    ADD COLUMN IF NOT EXISTS max_writes_per_sec  integer;

-- Measurement, written by the sweeper. No write path touches either side table: one shared row per tenant
-- would be held for a whole bundle and serialise that tenant.
CREATE TABLE IF NOT EXISTS queen.kv_usage (
    tenant_id   uuid        PRIMARY KEY,
    computed_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE queen.kv_usage
    ADD COLUMN IF NOT EXISTS kv_rows      bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS kv_bytes     bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS timer_rows   bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS timer_bytes  bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS timer_oldest timestamptz;

ALTER TABLE queen.kv_quota
    SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, vacuum_truncate = off);
ALTER TABLE queen.kv_usage
    SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, vacuum_truncate = off);

-- Helpers. None is STRICT: each has an answer for the NULL of a missing row or of a key that lives forever.

-- (expires, now): the only definition of existence. Exactly at the instant the key is gone.
CREATE OR REPLACE FUNCTION queen.kv_live_v1(timestamptz, timestamptz)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT $1 IS NULL OR $1 > $2
$$;

-- (version, expires, now): effective version; 0 for a missing or expired row, so `expect: 0` needs no flag.
CREATE OR REPLACE FUNCTION queen.kv_ver_v1(bigint, timestamptz, timestamptz)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN $1 IS NOT NULL AND queen.kv_live_v1($2, $3) THEN $1 ELSE 0 END
$$;

-- (value, expires, now): effective number, else 0. The type test sits inside the cast, because the planner
-- may evaluate the cast of a constant before it looks at an outer condition.
CREATE OR REPLACE FUNCTION queen.kv_num_v1(jsonb, timestamptz, timestamptz)
RETURNS numeric LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN queen.kv_live_v1($2, $3)
                THEN (CASE WHEN jsonb_typeof($1) = 'number' THEN $1 ELSE '0'::jsonb END)::numeric
                ELSE 0
           END
$$;

-- (prefix): smallest text above everything that starts with it; NULL means no such text.
CREATE OR REPLACE FUNCTION queen.kv_prefix_end_v1(text)
RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_head text := $1;
    v_last integer;
BEGIN
    WHILE length(v_head) > 0 LOOP
        v_last := ascii(right(v_head, 1));
        v_head := left(v_head, -1);
        IF v_last < 1114111 THEN
            -- The surrogates between U+D7FF and U+E000 cannot be stored.
            RETURN v_head || chr(CASE v_last WHEN 55295 THEN 57344 ELSE v_last + 1 END);
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;

-- (namespace, key): TRUE or an error. Nothing registers a namespace, so the character set is all that
-- keeps a typing mistake from becoming an empty one.
CREATE OR REPLACE FUNCTION queen.kv_check_names_v1(text, text)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF $1 IS NULL OR $1 COLLATE "C" !~ '^[a-z0-9][a-z0-9._-]{0,63}$' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_bad_namespace',
            DETAIL = format('namespace %s does not match ^[a-z0-9][a-z0-9._-]{0,63}$',
                            coalesce('"' || left($1, 100) || '"', '(no text)'));
    ELSIF $2 IS NULL OR $2 = '' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'kv_bad_key',
            DETAIL = CASE WHEN $2 IS NULL THEN 'the key must be given as text' ELSE 'the key is empty' END;
    ELSIF octet_length($2) > 512 THEN
        RAISE string_data_right_truncation USING
            MESSAGE = 'kv_key_too_large',
            DETAIL = format('%s bytes, at most 512', octet_length($2));
    END IF;
    RETURN true;
END
$$;

-- The text inside a JSON string; NULL for every other JSON type, so that 5 never becomes the name "5".
CREATE OR REPLACE FUNCTION queen.kv_text_v1(jsonb)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN jsonb_typeof($1) = 'string' THEN $1 #>> '{}' END
$$;

-- (value, lowest, highest): a whole JSON number in the range, however it is spelled (5, 5.0, 1e3); else NULL.
CREATE OR REPLACE FUNCTION queen.kv_int_v1(jsonb, numeric, numeric)
RETURNS numeric LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    v_number numeric;
BEGIN
    IF jsonb_typeof($1) = 'number' THEN
        v_number := $1::numeric;
        IF v_number = trunc(v_number) AND v_number BETWEEN $2 AND $3 THEN
            RETURN v_number;
        END IF;
    END IF;
    RETURN NULL;
END
$$;

-- (limit member): page size of a getPrefix, 1..1000, 100 when not given.
CREATE OR REPLACE FUNCTION queen.kv_limit_v1(jsonb)
RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT greatest(1, least(1000, coalesce(queen.kv_int_v1($1, -2147483648, 2147483647), 100)))::integer
$$;

-- Isolation is the tenant argument of the functions; all of them run as their caller.
GRANT USAGE ON SCHEMA queen TO PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON queen.kv, queen.kv_quota, queen.kv_usage TO PUBLIC;
GRANT USAGE ON SEQUENCE queen.kv_version_seq TO PUBLIC;
GRANT EXECUTE ON FUNCTION
    queen.kv_live_v1(timestamptz, timestamptz),
    queen.kv_ver_v1(bigint, timestamptz, timestamptz),
    queen.kv_num_v1(jsonb, timestamptz, timestamptz),
    queen.kv_prefix_end_v1(text),
    queen.kv_check_names_v1(text, text),
    queen.kv_text_v1(jsonb),
    queen.kv_int_v1(jsonb, numeric, numeric),
    queen.kv_limit_v1(jsonb)
TO PUBLIC;
