-- Histogram of prompt + output, in the bins of joint.sql.
SELECT floor(4 * log2(prompt_tokens + output_tokens))::INTEGER AS context_bin, count(*) AS requests
FROM requests
GROUP BY ALL
ORDER BY ALL
