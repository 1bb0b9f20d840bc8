-- Quantiles over the table that links.sql makes.
SELECT count(*)                                                              AS later_turns,
       (SELECT count(*) FROM active WHERE len(prefix_hashes) > 0)            AS requests,
       quantile_disc(new_tokens, $probabilities)                             AS new_tokens,
       quantile_disc(think_us, $probabilities)                               AS think_us
FROM links
