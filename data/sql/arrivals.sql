-- Requests a minute, counted from the first arrival; minutes without any are rows with 0.
WITH start AS (SELECT min(epoch_us(arrival)) AS first_us, max(epoch_us(arrival)) AS last_us FROM active),
counted AS (
    SELECT (epoch_us(arrival) - first_us) // 60000000 AS minute, count(*) AS requests
    FROM active, start
    GROUP BY ALL
)
SELECT minute::BIGINT AS minute, coalesce(requests, 0) AS requests
FROM (SELECT unnest(range((last_us - first_us) // 60000000 + 1)) AS minute FROM start)
LEFT JOIN counted USING (minute)
ORDER BY minute
