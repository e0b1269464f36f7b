SELECT json_build_object(
           'user_id',     u.id,
           'email',       u.email,
           'tenant_slug', t.slug,
           'is_operator', u.is_operator,
           'clusters',    coalesce(seen.clusters, '[]'::json)
       )::text
  FROM queen_proxy.users   u
  JOIN queen_proxy.tenants t ON t.id = u.tenant_id
 CROSS JOIN LATERAL (
       SELECT json_agg(
                  json_build_object(
                      'id',          one.id,
                      'slug',        one.slug,
                      'role',        one.role,
                      'tenant_slug', one.tenant_slug,
                      'tenant_id',   one.tenant_id,
                      'status',      one.status,
                      'cell_slug',   one.cell_slug
                  )
                  ORDER BY one.tenant_slug, one.slug
              ) AS clusters
         FROM (
              -- In two parts, so that those who are no operators do not cost a scan of all clusters.
              SELECT c.id, c.slug, c.tenant_id, c.status, r.role,
                     owner.slug AS tenant_slug,
                     cell.slug  AS cell_slug
                FROM queen_proxy.cluster_roles r
                JOIN queen_proxy.clusters c     ON c.id = r.cluster_id
                JOIN queen_proxy.tenants  owner ON owner.id = c.tenant_id
                JOIN queen_proxy.cells    cell  ON cell.id = c.cell_id
               WHERE r.user_id = u.id
                 AND NOT (u.is_operator AND $2)
               UNION ALL
              SELECT c.id, c.slug, c.tenant_id, c.status, 'admin',
                     owner.slug,
                     cell.slug
                FROM queen_proxy.clusters c
                JOIN queen_proxy.tenants  owner ON owner.id = c.tenant_id
                JOIN queen_proxy.cells    cell  ON cell.id = c.cell_id
               WHERE u.is_operator AND $2
              ) one
       ) seen
 WHERE u.id = $1
