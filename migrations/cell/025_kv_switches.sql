-- Switches of the store and of timers, kept where every cell on this database can read them.
-- A row that is not there, or says nothing a switch could mean, is ON: nobody has switched anything off.

CREATE TABLE IF NOT EXISTS queen.system_state (
    key        text        PRIMARY KEY,
    value      jsonb       NOT NULL,
    updated_at timestamptz DEFAULT now()
);

-- All three, by the name of their row.
CREATE OR REPLACE FUNCTION queen.kv_switches_v1()
RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_object_agg(known.key, coalesce(state.value -> 'enabled', 'true') <> 'false'::jsonb)
    FROM unnest(ARRAY['kv_enabled', 'timers_schedule_enabled', 'timers_fire_enabled']) AS known (key)
    LEFT JOIN queen.system_state AS state ON state.key = known.key
$$;

-- (switches, age): writes those that are in the object, {"kv_enabled": false}. The decision is p_age_ms old:
-- a cell that could not write at once must not undo what somebody decided elsewhere since. An age needs no
-- agreement between the clocks of two hosts. Returns the number of rows written.
CREATE OR REPLACE FUNCTION queen.kv_switches_set_v1(p_switches jsonb, p_age_ms bigint)
RETURNS integer LANGUAGE sql VOLATILE AS $$
    WITH written AS (
        INSERT INTO queen.system_state AS state (key, value, updated_at)
        SELECT wanted.key,
               jsonb_build_object('enabled', wanted.value),
               clock_timestamp() - p_age_ms * interval '1 millisecond'
        FROM jsonb_each(p_switches) AS wanted
        WHERE wanted.key IN ('kv_enabled', 'timers_schedule_enabled', 'timers_fire_enabled')
        ORDER BY wanted.key
        ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at
        WHERE coalesce(state.updated_at <= excluded.updated_at, true)
        RETURNING 1
    )
    SELECT count(*)::integer FROM written
$$;

GRANT SELECT, INSERT, UPDATE ON queen.system_state TO PUBLIC;
GRANT EXECUTE ON FUNCTION queen.kv_switches_v1(), queen.kv_switches_set_v1(jsonb, bigint) TO PUBLIC;
