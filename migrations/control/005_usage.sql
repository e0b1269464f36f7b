-- Control plane: the outbox, and usage from minutes to days to a month's total.
--
-- None of these writes an audit row or announces a cluster. Days and months are
-- those of UTC, whatever the session's time zone.

-- A kind is coined by its emitter. Whoever drains the outbox handles repeats.
CREATE OR REPLACE FUNCTION queen_proxy.emit_outbox(
    p_kind     TEXT,
    p_payload  JSONB
)
RETURNS UUID
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_kind  TEXT := btrim(p_kind);
    v_id    UUID;
BEGIN
    IF v_kind IS NULL OR v_kind = '' THEN
        RAISE EXCEPTION 'emit_outbox: kind must not be blank';
    END IF;

    INSERT INTO queen_proxy.outbox (kind, payload)
    VALUES (v_kind, coalesce(p_payload, '{}'::jsonb))
    RETURNING id INTO v_id;

    RETURN v_id;
END
$$;


-- Folds every closed day that still has minutes, not only the newest, so minutes
-- that arrive late are counted. Returns the number of (cluster, day, class) rows
-- that hold what their minutes say. A counter only grows: when the minutes of a
-- day are gone and a late one arrives, its fragment must not replace the total.
CREATE OR REPLACE FUNCTION queen_proxy.rollup_usage_days(
    p_through  DATE DEFAULT NULL
)
RETURNS INTEGER
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_yesterday  DATE := (now() AT TIME ZONE 'UTC')::date - 1;
    v_through    DATE := least(coalesce(p_through, v_yesterday), v_yesterday);
    v_end        TIMESTAMPTZ := (v_through + 1)::timestamp AT TIME ZONE 'UTC';
    v_attempt    INTEGER := 0;
    v_rows       INTEGER;
BEGIN
    -- Proxies that roll up or prune at once take turns.
    PERFORM pg_advisory_xact_lock(hashtextextended('queen_proxy/usage', 0));

    LOOP
        v_attempt := v_attempt + 1;
        BEGIN
            WITH sums AS (
                SELECT m.cluster_id,
                       (m.minute AT TIME ZONE 'UTC')::date AS day,
                       m.op_class,
                       sum(m.msgs)::bigint       AS msgs,
                       sum(m.reqs)::bigint       AS reqs,
                       sum(m.bytes_in)::bigint   AS bytes_in,
                       sum(m.bytes_out)::bigint  AS bytes_out
                FROM queen_proxy.usage_minutes AS m
                WHERE m.minute < v_end
                GROUP BY 1, 2, 3
            ),
            written AS (
                INSERT INTO queen_proxy.usage_days AS d
                    (cluster_id, day, op_class, msgs, reqs, bytes_in, bytes_out)
                SELECT cluster_id, day, op_class, msgs, reqs, bytes_in, bytes_out
                FROM sums
                -- Clusters in the order of their ids, as delete_tenant locks them.
                ORDER BY cluster_id, day, op_class
                ON CONFLICT (cluster_id, day, op_class) DO UPDATE
                SET msgs      = greatest(d.msgs,      EXCLUDED.msgs),
                    reqs      = greatest(d.reqs,      EXCLUDED.reqs),
                    bytes_in  = greatest(d.bytes_in,  EXCLUDED.bytes_in),
                    bytes_out = greatest(d.bytes_out, EXCLUDED.bytes_out)
                -- An hourly run meets months of days that are already right.
                WHERE EXCLUDED.msgs      > d.msgs
                   OR EXCLUDED.reqs      > d.reqs
                   OR EXCLUDED.bytes_in  > d.bytes_in
                   OR EXCLUDED.bytes_out > d.bytes_out
            )
            SELECT count(*) INTO v_rows FROM sums;

            RETURN v_rows;
        EXCEPTION WHEN foreign_key_violation THEN
            -- A cluster was deleted meanwhile, and its minutes with it. Locking the
            -- clusters instead would need the right to update them.
            IF v_attempt >= 10 THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$$;


-- Days that are not rolled up keep their minutes, however old they are.
CREATE OR REPLACE FUNCTION queen_proxy.prune_usage_minutes(
    p_keep_days  INTEGER DEFAULT 90
)
RETURNS INTEGER
LANGUAGE plpgsql
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_end   TIMESTAMPTZ;
    v_rows  INTEGER;
BEGIN
    IF p_keep_days IS NULL OR p_keep_days < 1 THEN
        RAISE EXCEPTION 'prune_usage_minutes: days to keep must be at least 1';
    END IF;
    -- More than a million days back there is no date to compare with.
    v_end := ((now() AT TIME ZONE 'UTC')::date - least(p_keep_days, 1000000))::timestamp
             AT TIME ZONE 'UTC';

    PERFORM pg_advisory_xact_lock(hashtextextended('queen_proxy/usage', 0));

    DELETE FROM queen_proxy.usage_minutes AS m
    USING queen_proxy.usage_days AS d
    WHERE m.minute < v_end
      AND d.cluster_id = m.cluster_id
      AND d.day = (m.minute AT TIME ZONE 'UTC')::date
      AND d.op_class = m.op_class;
    GET DIAGNOSTICS v_rows = ROW_COUNT;

    RETURN v_rows;
END
$$;


-- Messages of the month that contains the date, pushed and delivered. A day counts
-- with its rolled total or that of its minutes, whichever is greater: the first is
-- behind for the open day, the second is short once minutes were pruned.
CREATE OR REPLACE FUNCTION queen_proxy.cluster_month_msgs(
    p_cluster  UUID,
    p_month    DATE
)
RETURNS BIGINT
LANGUAGE plpgsql
STABLE
SET search_path = queen_proxy, pg_temp
AS $$
DECLARE
    v_first  DATE;
    v_next   DATE;
    v_msgs   BIGINT;
BEGIN
    IF p_month IS NULL THEN
        RAISE EXCEPTION 'cluster_month_msgs: month is required';
    END IF;
    v_first := date_trunc('month', p_month::timestamp)::date;
    v_next  := (v_first + interval '1 month')::date;

    SELECT coalesce(sum(greatest(rolled.msgs, live.msgs)), 0)::bigint INTO v_msgs
    FROM (
        SELECT d.day, sum(d.msgs) AS msgs
        FROM queen_proxy.usage_days AS d
        WHERE d.cluster_id = p_cluster
          AND d.day >= v_first
          AND d.day < v_next
        GROUP BY d.day
    ) AS rolled
    FULL JOIN (
        SELECT (m.minute AT TIME ZONE 'UTC')::date AS day, sum(m.msgs) AS msgs
        FROM queen_proxy.usage_minutes AS m
        WHERE m.cluster_id = p_cluster
          AND m.minute >= v_first::timestamp AT TIME ZONE 'UTC'
          AND m.minute < v_next::timestamp AT TIME ZONE 'UTC'
        GROUP BY 1
    ) AS live ON live.day = rolled.day;

    RETURN v_msgs;
END
$$;
