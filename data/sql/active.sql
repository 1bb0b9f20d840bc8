-- The requests with silences of a day or more closed up by whole days: nobody logged then, and rates or concurrency over such
-- a silence would describe nothing. Hours of the day stay what they were.
CREATE OR REPLACE TEMP TABLE active AS
WITH steps AS (
    SELECT *, coalesce(epoch_us(arrival) - lag(epoch_us(arrival)) OVER (ORDER BY arrival), 0) AS silence_us FROM requests
),
shifts AS (
    SELECT * EXCLUDE silence_us, sum(silence_us // 86400000000) OVER (ORDER BY arrival ROWS UNBOUNDED PRECEDING) AS closed_days
    FROM steps
)
SELECT * EXCLUDE closed_days REPLACE (arrival - to_days(closed_days::INTEGER) AS arrival) FROM shifts
