-- Which rows of a day (number 1) are duplicates: the same id came earlier that day or at any time on the day before (number 0),
-- whatever became of it there. `ids` is a view of day, part, row, arrival, lengths and id over both days.
WITH hashes AS (SELECT hash(request_id) AS hashed FROM ids),
twice AS (SELECT hashed FROM hashes GROUP BY hashed HAVING count(*) > 1),
near AS (SELECT * FROM ids WHERE hash(request_id) IN (FROM twice)),
placed AS (
    SELECT day, part, row,
           row_number() OVER (
               PARTITION BY request_id ORDER BY day, arrival, prompt_tokens, output_tokens, part, row
           ) AS place
    FROM near
)
SELECT part, row FROM placed WHERE day = 1 AND place > 1 ORDER BY ALL
