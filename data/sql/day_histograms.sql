-- All histograms of a day in one long table: histogram, by_kind, by_value, x, y, z, weight. 20 fine bins are one of joint.sql.
SELECT 'prompt' AS histogram, 'all' AS by_kind, '' AS by_value, prompt_fine AS x, 0 AS y, 0 AS z, count(*) AS weight
FROM day GROUP BY ALL
UNION ALL SELECT 'output', 'all', '', output_fine, 0, 0, count(*) FROM day GROUP BY ALL
UNION ALL SELECT 'context', 'all', '', context_fine, 0, 0, count(*) FROM day GROUP BY ALL
UNION ALL SELECT 'cached', 'all', '', cached_fine, 0, 0, count(*) FROM day WHERE cached IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'ttft_us', 'all', '', CASE WHEN ttft_us = 0 THEN -1 ELSE floor(80 * log2(ttft_us)) END::SMALLINT, 0, 0, count(*)
FROM day WHERE ttft_us IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'latency_us', 'all', '', CASE WHEN latency_us = 0 THEN -1 ELSE floor(80 * log2(latency_us)) END::SMALLINT, 0, 0,
count(*) FROM day WHERE latency_us IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'joint', 'all', '', prompt_fine // 20, output_fine // 20,
CASE WHEN cached_fine < 0 THEN cached_fine ELSE cached_fine // 20 END, count(*) FROM day GROUP BY ALL
UNION ALL SELECT 'joint', 'region', region, prompt_fine // 20, output_fine // 20, 0, count(*)
FROM day WHERE region IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'joint', 'model', model, prompt_fine // 20, output_fine // 20, 0, count(*)
FROM day WHERE model IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'prompt', 'region', region, prompt_fine, 0, 0, count(*) FROM day WHERE region IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'output', 'region', region, output_fine, 0, 0, count(*) FROM day WHERE region IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'prompt', 'model', model, prompt_fine, 0, 0, count(*) FROM day WHERE model IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'output', 'model', model, output_fine, 0, 0, count(*) FROM day WHERE model IS NOT NULL GROUP BY ALL
UNION ALL SELECT 'prompt', 'hour', lpad(hour::VARCHAR, 2, '0'), prompt_fine, 0, 0, number
FROM (SELECT hour, prompt_fine, count(*) AS number FROM day GROUP BY ALL)
UNION ALL SELECT 'output', 'hour', lpad(hour::VARCHAR, 2, '0'), output_fine, 0, 0, number
FROM (SELECT hour, output_fine, count(*) AS number FROM day GROUP BY ALL)
UNION ALL SELECT 'prompt', 'tenant', substr(sha256(tenant), 1, 12), prompt_fine, 0, 0, number
FROM (SELECT tenant, prompt_fine, count(*) AS number FROM day WHERE tenant IS NOT NULL GROUP BY ALL)
UNION ALL SELECT 'output', 'tenant', substr(sha256(tenant), 1, 12), output_fine, 0, 0, number
FROM (SELECT tenant, output_fine, count(*) AS number FROM day WHERE tenant IS NOT NULL GROUP BY ALL)
