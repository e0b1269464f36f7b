SELECT id, password_hash
  FROM queen_proxy.users
 WHERE email = $1
