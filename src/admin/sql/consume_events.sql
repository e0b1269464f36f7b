-- What was printed is consumed; what was not is free again.
UPDATE queen_proxy.outbox
   SET consumed_at   = CASE WHEN id = ANY ($1) THEN now() ELSE consumed_at END,
       claimed_until = NULL
 WHERE id = ANY ($1 || $2)
   AND consumed_at IS NULL
