-- Level figures by region, model, tenant (by a hash: its name stays in the log) and hour of the day (UTC).
SELECT by_kind, by_value,
       count(*)                              AS requests,
       quantile_disc(prompt_tokens, 0.5)     AS prompt_p50,
       quantile_disc(prompt_tokens, 0.9)     AS prompt_p90,
       quantile_disc(output_tokens, 0.5)     AS output_p50,
       quantile_disc(output_tokens, 0.9)     AS output_p90
FROM (
    SELECT 'region' AS by_kind, region AS by_value, prompt_tokens, output_tokens FROM requests WHERE region IS NOT NULL
    UNION ALL SELECT 'model', model, prompt_tokens, output_tokens FROM requests WHERE model IS NOT NULL
    UNION ALL SELECT 'tenant', substr(sha256(tenant), 1, 12), prompt_tokens, output_tokens FROM requests
              WHERE tenant IS NOT NULL
    UNION ALL SELECT 'hour', lpad(hour(arrival)::VARCHAR, 2, '0'), prompt_tokens, output_tokens FROM requests
)
GROUP BY ALL
ORDER BY ALL
