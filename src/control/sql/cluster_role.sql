SELECT role
  FROM queen_proxy.cluster_roles
 WHERE user_id = $1
   AND cluster_id = $2
