-- The control plane acts, on the session of this person: their tenant's audit shows it.
SELECT to_char(given.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
  FROM (SELECT coalesce(to_timestamp($2::double precision), $3::timestamptz) AS expires_at) AS given,
       LATERAL queen_proxy.revoke_session($1, given.expires_at, 'control_plane', $4)
