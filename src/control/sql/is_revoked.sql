SELECT EXISTS (SELECT FROM queen_proxy.revoked_tokens WHERE jti = $1)
