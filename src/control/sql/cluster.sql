SELECT c.id,
       c.slug,
       c.tenant_id,
       c.status               AS cluster_status,
       t.status               AS tenant_status,
       c.broker_tenant_uuid,
       c.limit_overrides::text AS limit_overrides,
       p.features::text        AS features,
       p.max_req_per_sec::bigint,
       p.req_burst::bigint,
       p.max_msgs_per_sec::bigint,
       p.msgs_burst::bigint,
       p.max_queues::bigint,
       p.max_partitions_per_queue::bigint,
       p.max_parked_pops::bigint,
       p.max_payload_bytes::bigint,
       p.max_batch_items::bigint,
       p.max_retained_bytes,
       p.max_retention_seconds::bigint,
       p.monthly_msgs_quota,
       cell.base_url,
       cell.cell_secret
  FROM queen_proxy.clusters c
  JOIN queen_proxy.tenants  t    ON t.id = c.tenant_id
  JOIN queen_proxy.plans    p    ON p.id = c.plan_id
  JOIN queen_proxy.cells    cell ON cell.id = c.cell_id
 WHERE c.slug = $1
    OR c.id = $2
