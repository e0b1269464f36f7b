SELECT id, cluster_id, scopes
  FROM queen_proxy.api_keys
 WHERE key_hash = $1
   AND revoked_at IS NULL
