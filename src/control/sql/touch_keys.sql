UPDATE queen_proxy.api_keys
   SET last_used_at = now()
 WHERE id = ANY ($1)
