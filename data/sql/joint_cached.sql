-- Joint histogram of prompt, output and cached prefix in the bins of joint.sql; cached bin -1 is no token, -2 a log that does
-- not say.
SELECT floor(4 * log2(prompt_tokens))::INTEGER AS prompt_bin,
       floor(4 * log2(output_tokens))::INTEGER AS output_bin,
       CASE WHEN cached_tokens IS NULL THEN -2 WHEN cached_tokens = 0 THEN -1
            ELSE floor(4 * log2(cached_tokens)) END::INTEGER AS cached_bin,
       count(*) AS requests
FROM requests
GROUP BY ALL
ORDER BY ALL
