SELECT name,
       partitions_count,
       created_at < now() - make_interval(secs => $2) AS settled
  FROM queen_proxy.queues
 WHERE cluster_id = $1
   AND deleted_at IS NULL
 LIMIT $3
