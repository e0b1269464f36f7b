SELECT id, cluster_id, ARRAY (SELECT unnest(scopes)) AS scopes
  FROM queen_proxy.api_keys
 WHERE key_hash = $1
   AND revoked_at IS NULL
