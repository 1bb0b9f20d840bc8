-- One row a kind of length. quantile_disc picks a value that occurred, so the answer does not depend on thread order.
SELECT kind,
       min(tokens)                            AS least,
       max(tokens)                            AS most,
       count(*)                               AS requests,
       sum(tokens)::BIGINT                    AS total,
       quantile_disc(tokens, $probabilities)  AS quantiles
FROM (
    SELECT 'prompt' AS kind, prompt_tokens AS tokens FROM requests
    UNION ALL SELECT 'output', output_tokens FROM requests
    UNION ALL SELECT 'context', prompt_tokens + output_tokens FROM requests
    UNION ALL SELECT 'cached', cached_tokens FROM requests WHERE cached_tokens IS NOT NULL
)
GROUP BY kind
ORDER BY kind
