-- What a prefix cache found, and what it could find: blocks of prompts that an earlier prompt (or the same) had already.
SELECT sum(cached_tokens)::BIGINT                                                AS cached_tokens,
       sum(CASE WHEN cached_tokens IS NOT NULL THEN prompt_tokens END)::BIGINT   AS prompt_tokens,
       (SELECT count(*) FROM (SELECT unnest(prefix_hashes) FROM requests))       AS blocks,
       (SELECT count(DISTINCT hash) FROM (SELECT unnest(prefix_hashes) AS hash FROM requests)) AS distinct_blocks,
       count(DISTINCT tenant)                                                    AS tenants
FROM requests
