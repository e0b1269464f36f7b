INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)
     VALUES ($1, $2, $3, $4, $5)
  RETURNING id
