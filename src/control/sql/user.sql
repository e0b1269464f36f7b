SELECT is_operator
  FROM queen_proxy.users
 WHERE id = $1
