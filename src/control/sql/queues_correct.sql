-- What a cell told of the queues of cluster $1: names, partitions (NULL: the queue is not in the listing)
-- and the count of the live row that was read before the cell was asked (NULL: there was none).
-- A count goes down, and a row goes away, only while the row still says what it said then: whoever wrote
-- it meanwhile knows more than this listing.
WITH told AS MATERIALIZED (
    SELECT t.name, t.partitions, t.seen
      FROM unnest($2::text[], $3::int[], $4::int[]) AS t (name, partitions, seen)
),
fallen AS MATERIALIZED (
    SELECT q.id, told.partitions
      FROM told
      JOIN queen_proxy.queues q
        ON q.cluster_id = $1
       AND q.name = told.name
       AND q.deleted_at IS NULL
       AND q.partitions_count = told.seen
     WHERE told.partitions IS NULL
        OR told.partitions < told.seen
     ORDER BY q.name
       FOR UPDATE OF q
),
lowered AS (
    UPDATE queen_proxy.queues q
       SET partitions_count = coalesce(fallen.partitions, q.partitions_count),
           deleted_at = CASE WHEN fallen.partitions IS NULL THEN now() END
      FROM fallen
     WHERE q.id = fallen.id
)
INSERT INTO queen_proxy.queues AS q (cluster_id, name, partitions_count)
SELECT $1, told.name, told.partitions
  FROM told
 WHERE told.partitions IS NOT NULL
   AND (told.seen IS NULL OR told.partitions > told.seen)
   AND EXISTS (SELECT FROM queen_proxy.clusters c WHERE c.id = $1)
 ORDER BY told.name
ON CONFLICT (cluster_id, name) WHERE deleted_at IS NULL
DO UPDATE SET partitions_count = EXCLUDED.partitions_count
        WHERE q.partitions_count < EXCLUDED.partitions_count
