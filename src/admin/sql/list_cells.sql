-- Not even whether a cell has a secret: an operator's role may not read that column (roles.sql).
SELECT coalesce(
           json_agg(
               json_build_object(
                   'cell_id',    cell.id,
                   'slug',       cell.slug,
                   'region',     cell.region,
                   'class',      cell.class,
                   'base_url',   cell.base_url,
                   'status',     cell.status,
                   'clusters',   (SELECT count(*) FROM queen_proxy.clusters WHERE cell_id = cell.id))
               ORDER BY cell.slug),
           '[]')
  FROM queen_proxy.cells AS cell
