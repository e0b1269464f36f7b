-- Takes the row's lock before it reads the overrides that are to stay, so that two operators at once do
-- not undo each other. A document that is no object overrides nothing and is replaced.
SELECT after.overrides
  FROM (SELECT id,
               CASE WHEN $2 OR jsonb_typeof(limit_overrides) <> 'object' THEN '{}'::jsonb
                    ELSE limit_overrides
               END AS overrides
          FROM queen_proxy.clusters
         WHERE id = $1
           FOR UPDATE) AS before,
       LATERAL (SELECT (before.overrides || $3) - $4::text[] AS overrides) AS after,
       LATERAL queen_proxy.set_limit_override(before.id, after.overrides)
