-- A password that is NULL has a hash that is NULL.
SELECT queen_proxy.create_user(
           p_tenant_id     => $1,
           p_email         => $2,
           p_password_hash => public.crypt($3, public.gen_salt('bf', 10)),
           p_provider      => $4)
