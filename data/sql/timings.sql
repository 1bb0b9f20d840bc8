-- Quantiles of the measured times, where the log has them.
SELECT kind, count(*) AS requests, quantile_disc(ms, $probabilities) AS quantiles
FROM (
    SELECT 'ttft_ms' AS kind, ttft_ms AS ms FROM requests WHERE ttft_ms IS NOT NULL
    UNION ALL SELECT 'latency_ms', latency_ms FROM requests WHERE latency_ms IS NOT NULL
)
GROUP BY kind
ORDER BY kind
