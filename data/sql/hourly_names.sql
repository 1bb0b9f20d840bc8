-- Requests an hour of each region, tenant and model that the log names.
SELECT (epoch_us(arrival) // 3600000000)::BIGINT AS hour, kind, name, count(*) AS requests
FROM (
    SELECT arrival, 'region' AS kind, region AS name FROM requests
    UNION ALL SELECT arrival, 'tenant', tenant FROM requests
    UNION ALL SELECT arrival, 'model', model FROM requests
)
WHERE name IS NOT NULL AND epoch_us(arrival) >= $begin_us AND epoch_us(arrival) < $end_us
GROUP BY ALL
ORDER BY ALL
