SELECT written, dropped, repeated
  FROM queen_proxy.record_usage($1, $2::text::jsonb)
