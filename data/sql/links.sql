-- Requests that go on with an earlier one: they share all of its prompt's blocks (but at most the last, which may be a part of
-- one) and hold more tokens than its prompt and answer. Only the first to go on with a request counts; any other begins anew.
-- A block's hash stands for all of the prompt up to its end, so whoever had it first had all of it.
CREATE OR REPLACE TEMP TABLE links AS
WITH numbered AS (
    SELECT *, row_number() OVER (ORDER BY arrival, request_id) AS place FROM active WHERE len(prefix_hashes) > 0
),
blocks AS (
    SELECT place, unnest(prefix_hashes) AS hash, generate_subscripts(prefix_hashes, 1) AS depth FROM numbered
),
owners AS (SELECT hash, min(place) AS owner FROM blocks GROUP BY hash),
known AS (
    SELECT place, max_by(owner, depth) AS parent, max(depth) AS depth
    FROM blocks JOIN owners USING (hash)
    WHERE owner < place
    GROUP BY place
)
SELECT epoch_us(new.arrival) AS at_us,
       new.prompt_tokens - old.prompt_tokens - old.output_tokens AS new_tokens,
       greatest(0, epoch_us(new.arrival) - epoch_us(old.arrival) - coalesce(
           round(old.latency_ms * 1000)::BIGINT,
           old.prompt_tokens * $prefill_us_per_token + old.output_tokens * $decode_us_per_token
       )) AS think_us
FROM known
JOIN numbered AS new ON new.place = known.place
JOIN numbered AS old ON old.place = known.parent
WHERE depth >= len(old.prefix_hashes) - 1 AND new.prompt_tokens > old.prompt_tokens + old.output_tokens
QUALIFY row_number() OVER (PARTITION BY known.parent ORDER BY known.place) = 1
