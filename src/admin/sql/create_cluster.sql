SELECT queen_proxy.create_cluster(
           p_tenant_id => $1,
           p_slug      => $2,
           p_plan_code => $3,
           p_cell_id   => $4)
