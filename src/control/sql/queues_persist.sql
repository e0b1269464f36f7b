-- Rows of clusters that are no more are given back, and do not stop the others.
-- Everybody writes in the same order, so that no two proxies wait for each other.
WITH waiting AS MATERIALIZED (
    SELECT w.cluster_id,
           w.name,
           w.partitions,
           EXISTS (SELECT FROM queen_proxy.clusters c WHERE c.id = w.cluster_id) AS is_owned
      FROM unnest($1::uuid[], $2::text[], $3::int[]) AS w (cluster_id, name, partitions)
),
written AS (
    INSERT INTO queen_proxy.queues AS q (cluster_id, name, partitions_count)
    SELECT cluster_id, name, partitions
      FROM waiting
     WHERE is_owned
     ORDER BY cluster_id, name
    ON CONFLICT (cluster_id, name) WHERE deleted_at IS NULL
    DO UPDATE SET partitions_count = EXCLUDED.partitions_count
            WHERE q.partitions_count < EXCLUDED.partitions_count
)
SELECT cluster_id
  FROM waiting
 WHERE NOT is_owned
