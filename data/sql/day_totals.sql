SELECT count(*) AS requests, min(start_us) AS first_us, max(start_us) AS last_us,
       min(prompt) AS prompt_least, max(prompt) AS prompt_most, sum(prompt)::BIGINT AS prompt_total,
       min(output) AS output_least, max(output) AS output_most, sum(output)::BIGINT AS output_total,
       min(prompt + output) AS context_least, max(prompt + output) AS context_most,
       sum(prompt + output)::BIGINT AS context_total,
       min(cached) AS cached_least, max(cached) AS cached_most, sum(cached)::BIGINT AS cached_total,
       count(cached) AS cached_requests,
       sum(CASE WHEN cached IS NOT NULL THEN prompt END)::BIGINT AS cached_prompt_total,
       count(latency_us) AS with_latency
FROM day
