-- The oldest events that nobody has at the moment. Followers pass over what another one is just claiming.
WITH free AS (
    SELECT id
      FROM queen_proxy.outbox
     WHERE consumed_at IS NULL
       AND (claimed_until IS NULL OR claimed_until < now())
     ORDER BY created_at, id
     LIMIT $1
       FOR UPDATE SKIP LOCKED
),
claimed AS (
    UPDATE queen_proxy.outbox AS o
       SET claimed_until = now() + make_interval(secs => $2)
      FROM free
     WHERE o.id = free.id
    RETURNING o.id, o.kind, o.payload, o.created_at
)
SELECT id,
       jsonb_build_object(
           'id',         id,
           'kind',       kind,
           'payload',    payload,
           'created_at', to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
  FROM claimed
 ORDER BY created_at, id
