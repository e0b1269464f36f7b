SELECT c.id,
       c.slug,
       c.broker_tenant_uuid,
       c.limit_overrides::text AS limit_overrides,
       p.max_partitions_per_queue::bigint,
       p.max_retained_bytes,
       c.cell_id,
       cell.slug AS cell_slug,
       cell.base_url,
       cell.cell_secret
  FROM queen_proxy.clusters c
  JOIN queen_proxy.plans    p    ON p.id = c.plan_id
  JOIN queen_proxy.cells    cell ON cell.id = c.cell_id
 WHERE c.status <> 'deleting'
   AND ($1::uuid[] IS NULL OR c.id = ANY ($1))
 ORDER BY c.id
 LIMIT $2
