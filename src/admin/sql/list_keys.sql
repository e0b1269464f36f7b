SELECT coalesce(
           json_agg(
               json_build_object(
                   'key_id',       id,
                   'name',         name,
                   'scopes',       scopes,
                   'created_at',   created_at,
                   'last_used_at', last_used_at,
                   'revoked_at',   revoked_at)
               ORDER BY created_at, id),
           '[]')
  FROM queen_proxy.api_keys
 WHERE cluster_id = $1
   AND ($2 OR revoked_at IS NULL)
