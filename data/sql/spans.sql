-- When each request was in flight and from when on it decoded, in microseconds: as the log says, otherwise at the stated
-- rates. Where it says the latency alone, prefill takes the share of it that it has at the stated rates.
WITH given AS (
    SELECT epoch_us(arrival) AS start_us,
           prompt_tokens * $prefill_us_per_token AS prefill_us,
           output_tokens * $decode_us_per_token AS decode_us,
           round(latency_ms * 1000)::BIGINT AS latency_us,
           round(ttft_ms * 1000)::BIGINT AS ttft_us
    FROM active
)
SELECT start_us,
       start_us + coalesce(latency_us, prefill_us + decode_us) AS end_us,
       start_us + least(
           coalesce(latency_us, prefill_us + decode_us),
           coalesce(ttft_us, latency_us * prefill_us // (prefill_us + decode_us), prefill_us)
       ) AS decode_us
FROM given
