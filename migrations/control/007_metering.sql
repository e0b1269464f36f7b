-- Control plane: usage written by proxies, its upkeep, the monthly quota, and the
-- outbox's followers.
--
-- None of these writes an audit row or announces a cluster, and all run with the
-- rights of the proxy that calls them.

-- The batches that are in usage_minutes, and what came of them. A proxy that heard no
-- answer sends a batch again, from memory or from its spool; this tells it that the
-- batch is there. A proxy sends no batch that is older than 30 days, and an id is
-- kept for 35 days: see maintain_usage.
CREATE TABLE IF NOT EXISTS queen_proxy.usage_batches (
    id          UUID PRIMARY KEY,
    written     INTEGER NOT NULL DEFAULT 0,
    dropped     INTEGER NOT NULL DEFAULT 0,
    created_at  TIMESTAMPTZ NOT NULL DEFAULT now()
);

CREATE INDEX IF NOT EXISTS idx_usage_batches_created ON queen_proxy.usage_batches (created_at);


-- Adds rows {cluster_id, minute, op, reqs, msgs, bytes_in, bytes_out} to what is there,
-- minute being minutes since the epoch. A batch counts once, however often it comes,
-- and its answer is then the first one's. What cannot be written is dropped and
-- counted, and stops nothing else: rows of clusters that are gone, and rows that hold
-- something else than what is expected.
--
-- A day whose minutes are pruned has only its total: a late row is added there, since
-- a roll-up would not add the minute's fragment to it.
CREATE OR REPLACE FUNCTION queen_proxy.record_usage(
    p_batch        UUID,
    p_rows         JSONB,
    OUT written    INTEGER,
    OUT dropped    INTEGER,
    OUT repeated   BOOLEAN
)
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_given    INTEGER;
    v_today    TIMESTAMPTZ := date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
    v_attempt  INTEGER := 0;
BEGIN
    IF p_batch IS NULL THEN
        RAISE EXCEPTION 'record_usage: batch is required';
    END IF;
    IF p_rows IS NULL OR jsonb_typeof(p_rows) <> 'array' THEN
        RAISE EXCEPTION 'record_usage: rows must be an array';
    END IF;
    v_given := jsonb_array_length(p_rows);

    -- Also waits for the same batch on another connection.
    INSERT INTO queen_proxy.usage_batches (id) VALUES (p_batch) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT b.written, b.dropped, true
        INTO record_usage.written, record_usage.dropped, record_usage.repeated
        FROM queen_proxy.usage_batches AS b
        WHERE b.id = p_batch;
        RETURN;
    END IF;

    -- Rows of a closed day must not come between its roll-up and its pruning.
    IF EXISTS (
        SELECT FROM jsonb_array_elements(p_rows) AS r
        WHERE CASE WHEN r ->> 'minute' ~ '^[0-9]{1,9}$'
                   THEN to_timestamp((r ->> 'minute')::bigint * 60) < v_today
              END
    ) THEN
        PERFORM pg_advisory_xact_lock_shared(hashtextextended('queen_proxy/usage', 0));
    END IF;

    LOOP
        v_attempt := v_attempt + 1;
        BEGIN
            WITH readable AS MATERIALIZED (
                SELECT (r ->> 'cluster_id')::uuid AS cluster_id,
                       -- A proxy whose clock is ahead: no minute lies in the future.
                       CASE WHEN to_timestamp((r ->> 'minute')::bigint * 60) < now() + interval '1 hour'
                            THEN to_timestamp((r ->> 'minute')::bigint * 60)
                            ELSE date_trunc('minute', now())
                       END                         AS minute,
                       r ->> 'op'                  AS op_class,
                       (r ->> 'msgs')::bigint      AS msgs,
                       (r ->> 'reqs')::bigint      AS reqs,
                       (r ->> 'bytes_in')::bigint  AS bytes_in,
                       (r ->> 'bytes_out')::bigint AS bytes_out
                FROM jsonb_array_elements(p_rows) AS r
                WHERE r ->> 'cluster_id' ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                  AND r ->> 'op' IN ('push', 'delivery', 'txn', 'configure', 'read')
                  AND r ->> 'minute' ~ '^[0-9]{1,9}$'
                  -- Sums of a day, a month and more stay far from the end of a bigint.
                  AND r ->> 'msgs' ~ '^[0-9]{1,15}$'
                  AND r ->> 'reqs' ~ '^[0-9]{1,15}$'
                  AND r ->> 'bytes_in' ~ '^[0-9]{1,15}$'
                  AND r ->> 'bytes_out' ~ '^[0-9]{1,15}$'
            ),
            summed AS MATERIALIZED (
                SELECT cluster_id, minute, op_class,
                       (minute AT TIME ZONE 'UTC')::date AS day,
                       count(*)               AS given,
                       sum(msgs)::bigint      AS msgs,
                       sum(reqs)::bigint      AS reqs,
                       sum(bytes_in)::bigint  AS bytes_in,
                       sum(bytes_out)::bigint AS bytes_out
                FROM readable
                WHERE EXISTS (SELECT FROM queen_proxy.clusters AS c WHERE c.id = cluster_id)
                GROUP BY cluster_id, minute, op_class
            ),
            pruned AS MATERIALIZED (
                SELECT s.cluster_id, s.day, s.op_class,
                       sum(s.msgs)::bigint      AS msgs,
                       sum(s.reqs)::bigint      AS reqs,
                       sum(s.bytes_in)::bigint  AS bytes_in,
                       sum(s.bytes_out)::bigint AS bytes_out
                FROM summed AS s
                JOIN queen_proxy.usage_days AS d USING (cluster_id, day, op_class)
                WHERE s.minute < v_today
                  AND NOT EXISTS (
                      SELECT FROM queen_proxy.usage_minutes AS m
                      WHERE m.cluster_id = s.cluster_id
                        AND m.op_class = s.op_class
                        AND m.minute >= s.day::timestamp AT TIME ZONE 'UTC'
                        AND m.minute < (s.day + 1)::timestamp AT TIME ZONE 'UTC')
                GROUP BY s.cluster_id, s.day, s.op_class
            ),
            days AS (
                -- An upsert, and sorted: the order of the clusters is everybody's.
                INSERT INTO queen_proxy.usage_days AS d
                    (cluster_id, day, op_class, msgs, reqs, bytes_in, bytes_out)
                SELECT cluster_id, day, op_class, msgs, reqs, bytes_in, bytes_out
                FROM pruned
                ORDER BY cluster_id, day, op_class
                ON CONFLICT (cluster_id, day, op_class) DO UPDATE
                SET msgs      = d.msgs      + EXCLUDED.msgs,
                    reqs      = d.reqs      + EXCLUDED.reqs,
                    bytes_in  = d.bytes_in  + EXCLUDED.bytes_in,
                    bytes_out = d.bytes_out + EXCLUDED.bytes_out
            ),
            minutes AS (
                INSERT INTO queen_proxy.usage_minutes AS m
                    (cluster_id, minute, op_class, msgs, reqs, bytes_in, bytes_out)
                SELECT cluster_id, minute, op_class, msgs, reqs, bytes_in, bytes_out
                FROM summed AS s
                WHERE NOT EXISTS (
                    SELECT FROM pruned AS p
                    WHERE (p.cluster_id, p.day, p.op_class) = (s.cluster_id, s.day, s.op_class))
                ORDER BY cluster_id, minute, op_class
                ON CONFLICT (cluster_id, minute, op_class) DO UPDATE
                SET msgs      = m.msgs      + EXCLUDED.msgs,
                    reqs      = m.reqs      + EXCLUDED.reqs,
                    bytes_in  = m.bytes_in  + EXCLUDED.bytes_in,
                    bytes_out = m.bytes_out + EXCLUDED.bytes_out
            )
            SELECT coalesce(sum(given), 0) INTO record_usage.written FROM summed;
            EXIT;
        EXCEPTION WHEN foreign_key_violation THEN
            -- A cluster was deleted meanwhile: the next look does not see it.
            IF v_attempt >= 10 THEN
                RAISE;
            END IF;
        END;
    END LOOP;

    dropped := v_given - written;
    repeated := false;
    UPDATE queen_proxy.usage_batches AS b
    SET written = record_usage.written, dropped = record_usage.dropped
    WHERE b.id = p_batch;
END
$$;


-- Rolls up, prunes, and forgets old batches, in one transaction: nothing comes between
-- the first two. One proxy at a time; the others hear that somebody is at it.
CREATE OR REPLACE FUNCTION queen_proxy.maintain_usage(
    p_keep_days  INTEGER,
    OUT ran      BOOLEAN,
    OUT rolled   INTEGER,
    OUT pruned   INTEGER,
    OUT swept    INTEGER
)
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
BEGIN
    ran := pg_try_advisory_xact_lock(hashtextextended('queen_proxy/usage/maintain', 0));
    IF NOT ran THEN
        RETURN;
    END IF;
    -- Held to the end of the transaction, also between the two.
    PERFORM pg_advisory_xact_lock(hashtextextended('queen_proxy/usage', 0));
    rolled := queen_proxy.rollup_usage_days();
    pruned := queen_proxy.prune_usage_minutes(p_keep_days);

    DELETE FROM queen_proxy.usage_batches WHERE created_at < now() - interval '35 days';
    GET DIAGNOSTICS swept = ROW_COUNT;
END
$$;


-- An event of the monthly quota is there once for each cluster and month, whichever
-- proxy saw it first.
CREATE UNIQUE INDEX IF NOT EXISTS uq_outbox_monthly_quota
    ON queen_proxy.outbox (kind, (payload ->> 'cluster_id'), (payload ->> 'month'))
    WHERE kind IN ('cluster_monthly_quota_warning', 'cluster_monthly_quota_blocked');


-- The clusters at or over their monthly quota, which is the plan's with the override
-- laid over it; emits the events that are due, the higher level alone when both are.
-- Every proxy asks, so all of them block the same clusters.
CREATE OR REPLACE FUNCTION queen_proxy.check_monthly_quotas(
    p_warn_percent  INTEGER,
    p_month         DATE DEFAULT NULL
)
RETURNS TABLE (cluster_id UUID)
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_month  DATE := date_trunc('month', coalesce(p_month::timestamp, now() AT TIME ZONE 'UTC'))::date;
BEGIN
    IF p_warn_percent IS NULL OR p_warn_percent < 1 THEN
        RAISE EXCEPTION 'check_monthly_quotas: percent must be at least 1';
    END IF;

    RETURN QUERY
    WITH quotas AS MATERIALIZED (
        SELECT c.id, c.slug, c.tenant_id,
               CASE
                   WHEN jsonb_typeof(c.limit_overrides) <> 'object'
                     OR NOT c.limit_overrides ? 'monthly_msgs_quota' THEN p.monthly_msgs_quota
                   WHEN jsonb_typeof(o.quota) = 'null' THEN NULL
                   WHEN jsonb_typeof(o.quota) = 'number'
                     AND (o.quota #>> '{}') ~ '^-?[0-9]+$'
                     AND (o.quota #>> '{}')::numeric BETWEEN -9223372036854775808 AND 9223372036854775807
                       THEN (o.quota #>> '{}')::bigint
                   -- Not a number of ours: as if it were not there.
                   ELSE p.monthly_msgs_quota
               END AS quota
        FROM queen_proxy.clusters AS c
        JOIN queen_proxy.plans AS p ON p.id = c.plan_id
        CROSS JOIN LATERAL (SELECT c.limit_overrides -> 'monthly_msgs_quota' AS quota) AS o
        WHERE c.status <> 'deleting'
    ),
    counted AS MATERIALIZED (
        SELECT q.*, queen_proxy.cluster_month_msgs(q.id, v_month) AS msgs
        FROM quotas AS q
        WHERE q.quota IS NOT NULL
    ),
    levels AS MATERIALIZED (
        SELECT c.*,
               c.msgs >= c.quota AS over,
               c.msgs::numeric * 100 >= c.quota::numeric * p_warn_percent AS warn,
               -- A quota of nothing is used up.
               CASE WHEN c.quota > 0 THEN floor(c.msgs::numeric * 100 / c.quota) ELSE 100 END AS percent
        FROM counted AS c
    ),
    emitted AS (
        INSERT INTO queen_proxy.outbox (kind, payload)
        SELECT CASE WHEN l.over THEN 'cluster_monthly_quota_blocked'
                    ELSE 'cluster_monthly_quota_warning' END,
               jsonb_build_object(
                   'cluster_id',   l.id,
                   'cluster_slug', l.slug,
                   'tenant_id',    l.tenant_id,
                   'month',        to_char(v_month, 'YYYY-MM'),
                   'msgs',         l.msgs,
                   'quota',        l.quota,
                   'percent',      l.percent)
        FROM levels AS l
        WHERE l.over
           -- Not after the higher one: a quota that was raised a little is no news.
           OR (l.warn AND NOT EXISTS (
               SELECT FROM queen_proxy.outbox AS b
               WHERE b.kind = 'cluster_monthly_quota_blocked'
                 AND b.payload ->> 'cluster_id' = l.id::text
                 AND b.payload ->> 'month' = to_char(v_month, 'YYYY-MM')))
        ORDER BY l.id
        ON CONFLICT DO NOTHING
    )
    SELECT l.id FROM levels AS l WHERE l.over ORDER BY l.id;
END
$$;


-- Until when a follower of the outbox has the event to itself. One that dies before it
-- marks the event as consumed leaves it to the next, so events come at least once.
ALTER TABLE queen_proxy.outbox ADD COLUMN IF NOT EXISTS claimed_until TIMESTAMPTZ;
