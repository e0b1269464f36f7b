SELECT c.id,
       c.slug,
       c.status                AS cluster_status,
       c.broker_tenant_uuid,
       c.limit_overrides::text AS limit_overrides,
       t.id                    AS tenant_id,
       t.slug                  AS tenant_slug,
       t.status                AS tenant_status,
       p.code                  AS plan,
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
       cell.id                 AS cell_id,
       cell.slug               AS cell_slug,
       cell.region             AS cell_region,
       cell.base_url           AS cell_base_url,
       (SELECT count(*)
          FROM queen_proxy.api_keys AS k
         WHERE k.cluster_id = c.id
           AND k.revoked_at IS NULL) AS live_keys
  FROM queen_proxy.clusters AS c
  JOIN queen_proxy.tenants  AS t    ON t.id = c.tenant_id
  JOIN queen_proxy.plans    AS p    ON p.id = c.plan_id
  JOIN queen_proxy.cells    AS cell ON cell.id = c.cell_id
 WHERE c.id = $1
