SELECT count(*)                   AS requests,
       min(epoch_us(arrival))     AS first_us,
       max(epoch_us(arrival))     AS last_us,
       count(latency_ms)          AS with_latency
FROM active
