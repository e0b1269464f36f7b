SELECT json_build_object(
           'user_id',     u.id,
           'email',       u.email,
           'tenant_slug', t.slug,
           'is_operator', u.is_operator,
           'clusters',    coalesce(mine.clusters, '[]'::json)
       )::text
  FROM queen_proxy.users   u
  JOIN queen_proxy.tenants t ON t.id = u.tenant_id
 CROSS JOIN LATERAL (
       SELECT json_agg(
                  json_build_object(
                      'id',          c.id,
                      'slug',        c.slug,
                      'role',        CASE WHEN u.is_operator AND $2 THEN 'admin' ELSE r.role END,
                      'tenant_slug', owner.slug,
                      'tenant_id',   c.tenant_id,
                      'status',      c.status,
                      'cell_slug',   cell.slug
                  )
                  ORDER BY owner.slug, c.slug
              ) AS clusters
         FROM queen_proxy.clusters c
         JOIN queen_proxy.tenants  owner ON owner.id = c.tenant_id
         JOIN queen_proxy.cells    cell  ON cell.id = c.cell_id
         LEFT JOIN queen_proxy.cluster_roles r ON r.cluster_id = c.id
                                              AND r.user_id = u.id
        WHERE r.role IS NOT NULL
           OR (u.is_operator AND $2)
       ) mine
 WHERE u.id = $1
