-- What a cell needs to know of every tenant: configuration beside measurement. Counts and writes nothing.

-- (most tenants): 10000 when NULL, at least 1. Tenants with a quota first, then those nearest to a cap.
CREATE OR REPLACE FUNCTION queen.kv_quota_refresh_v1(p_max_tenants integer)
RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        jsonb_agg(jsonb_build_object(
            'tenant', tenant_id,
            'granted', granted,
            'enabled', enabled,
            'maxRows', max_rows,
            'maxBytes', max_bytes,
            'maxTimers', max_timers,
            'maxHorizonS', max_timer_horizon_s,
            'maxReadsPerSec', max_reads_per_sec,
            'maxWritesPerSec', max_writes_per_sec,
            'kvRows', kv_rows,
            'kvBytes', kv_bytes,
            'timerRows', timer_rows,
            'computedAtMs', computed_at_ms
        ) ORDER BY granted DESC, ratio DESC, kv_rows DESC, tenant_id),
        '[]')
    FROM (
        SELECT tenant_id,
               q.updated_at IS NOT NULL  AS granted,
               coalesce(q.enabled, true) AS enabled,
               q.max_rows, q.max_bytes, q.max_timers, q.max_timer_horizon_s,
               q.max_reads_per_sec, q.max_writes_per_sec,
               coalesce(u.kv_rows, 0)    AS kv_rows,
               coalesce(u.kv_bytes, 0)   AS kv_bytes,
               coalesce(u.timer_rows, 0) AS timer_rows,
               coalesce(floor(extract(epoch FROM u.computed_at) * 1000)::bigint, 0) AS computed_at_ms,
               -- A cap of 0 counts as 1, and one that is NULL gives no ratio.
               coalesce(greatest(
                   u.kv_rows::numeric / CASE WHEN q.max_rows < 1 THEN 1 ELSE q.max_rows END,
                   u.kv_bytes::numeric / CASE WHEN q.max_bytes < 1 THEN 1 ELSE q.max_bytes END,
                   u.timer_rows::numeric / CASE WHEN q.max_timers < 1 THEN 1 ELSE q.max_timers END
               ), 0) AS ratio
        FROM queen.kv_quota AS q
        FULL JOIN queen.kv_usage AS u USING (tenant_id)
        ORDER BY granted DESC, ratio DESC, kv_rows DESC, tenant_id
        LIMIT greatest(coalesce(p_max_tenants, 10000), 1)
    ) AS tenants
$$;

GRANT EXECUTE ON FUNCTION queen.kv_quota_refresh_v1(integer) TO PUBLIC;
