-- Blocks of the prompts of a day, and how many of them an earlier prompt of that day or the day before (or the same) had already.
WITH blocks AS (
    SELECT epoch_us(arrival) >= $midnight_us AS today, unnest(prefix_hashes) AS hash FROM active
),
known AS (SELECT hash, bool_and(today) AS new FROM blocks GROUP BY hash)
SELECT (SELECT count(*) FROM blocks WHERE today)                                             AS blocks,
       (SELECT count(*) FROM blocks WHERE today) - (SELECT count(*) FROM known WHERE new)    AS repeated_blocks,
       (SELECT count(*) FROM active WHERE len(prefix_hashes) > 0 AND epoch_us(arrival) >= $midnight_us) AS with_blocks
