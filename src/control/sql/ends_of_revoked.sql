SELECT jti, extract(epoch FROM expires_at)::float8 AS expires
  FROM queen_proxy.revoked_tokens
 WHERE jti = ANY ($1)
