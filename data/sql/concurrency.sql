-- How long each number of requests was in flight together, between first arrival and last end, in microseconds. A request
-- is in flight for its latency where the log has it, otherwise for prefill and decode at the stated rates.
WITH spans AS (
    SELECT epoch_us(arrival) AS start_us,
           epoch_us(arrival) + CASE
               WHEN latency_ms IS NOT NULL THEN round(latency_ms * 1000)::BIGINT
               ELSE prompt_tokens * $prefill_us_per_token + output_tokens * $decode_us_per_token
           END AS end_us
    FROM active
),
changes AS (
    SELECT at_us, sum(change) AS change
    FROM (SELECT start_us AS at_us, 1 AS change FROM spans UNION ALL SELECT end_us, -1 FROM spans)
    GROUP BY at_us
),
levels AS (
    SELECT sum(change) OVER (ORDER BY at_us) AS level, lead(at_us) OVER (ORDER BY at_us) - at_us AS held_us, at_us
    FROM changes
),
start AS (SELECT min(at_us) AS first_us FROM changes)
SELECT ((at_us - first_us) // 60000000)::BIGINT AS minute, level::BIGINT AS level, sum(held_us)::BIGINT AS held_us
FROM levels, start
WHERE held_us IS NOT NULL
GROUP BY ALL
ORDER BY ALL
