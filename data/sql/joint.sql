-- Joint histogram of prompt and output length by group; bin k of a length n is floor(4 * log2(n)). The powers of two are
-- exact and no other bin edge is an integer, so rounding cannot move a request over an edge.
SELECT by_kind, by_value,
       floor(4 * log2(prompt_tokens))::INTEGER AS prompt_bin,
       floor(4 * log2(output_tokens))::INTEGER AS output_bin,
       count(*)                                AS requests
FROM (
    SELECT 'all' AS by_kind, '' AS by_value, prompt_tokens, output_tokens FROM requests
    UNION ALL SELECT 'region', region, prompt_tokens, output_tokens FROM requests WHERE region IS NOT NULL
    UNION ALL SELECT 'model', model, prompt_tokens, output_tokens FROM requests WHERE model IS NOT NULL
)
GROUP BY ALL
ORDER BY ALL
