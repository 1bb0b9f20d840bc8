-- Exact sums over the gaps between arrivals in microseconds, for their mean and variation.
SELECT count(*) AS gaps, sum(gap_us)::HUGEINT AS total, sum(gap_us::HUGEINT * gap_us)::HUGEINT AS squares
FROM (SELECT epoch_us(arrival) - lag(epoch_us(arrival)) OVER (ORDER BY arrival) AS gap_us FROM active)
WHERE gap_us IS NOT NULL
