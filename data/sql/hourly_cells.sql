-- Requests an hour and region, by octave of prompt and output length (ends clipped) and by fifth of cached share (-1: not told).
SELECT (epoch_us(arrival) // 3600000000)::BIGINT AS hour,
       coalesce(region, '')                      AS region,
       least(greatest(floor(log2(prompt_tokens))::INTEGER, $prompt_low), $prompt_high) - $prompt_low AS prompt_bin,
       least(greatest(floor(log2(output_tokens))::INTEGER, $output_low), $output_high) - $output_low AS output_bin,
       CASE WHEN cached_tokens IS NULL THEN -1 ELSE least(5 * cached_tokens // prompt_tokens, 4) END::INTEGER AS cached_bin,
       count(*)                                  AS requests
FROM requests
WHERE epoch_us(arrival) >= $begin_us AND epoch_us(arrival) < $end_us
GROUP BY ALL
ORDER BY ALL
