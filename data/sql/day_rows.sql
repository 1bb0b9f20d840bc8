-- What the histograms of a day need of its requests; fine bins as in data/fine.py, -1 for 0 and -2 for what the log does not say.
CREATE OR REPLACE TEMP TABLE day AS
SELECT epoch_us(arrival)                                              AS start_us,
       prompt_tokens::INTEGER                                         AS prompt,
       output_tokens::INTEGER                                         AS output,
       cached_tokens::INTEGER                                         AS cached,
       round(latency_ms * 1000)::BIGINT                               AS latency_us,
       round(ttft_ms * 1000)::BIGINT                                  AS ttft_us,
       floor(80 * log2(prompt_tokens))::SMALLINT                      AS prompt_fine,
       floor(80 * log2(output_tokens))::SMALLINT                      AS output_fine,
       floor(80 * log2(prompt_tokens + output_tokens))::SMALLINT      AS context_fine,
       CASE WHEN cached_tokens IS NULL THEN -2 WHEN cached_tokens = 0 THEN -1
            ELSE floor(80 * log2(cached_tokens)) END::SMALLINT        AS cached_fine,
       hour(arrival)::TINYINT                                         AS hour,
       region, model, tenant
FROM kept
