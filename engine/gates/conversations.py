"""A gate of steps of any kind: turns behind cached prefixes, alone and beside others, of text and of ids that no text has."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.engine.gates.rows import Chain, require_rows

USERS, TURNS, KINDS = 4, 3, 3  # kinds: of new_tokens
ROOM = 256  # tokens of a conversation that a CPU affords
ANSWER = 8  # tokens, at most
SPECIAL = 3  # ids at either end of a vocabulary: where it has its markers


def conversations(probe: Probe) -> dict[str, Any]:
    """Users of several turns: each is asked behind what the prefix cache holds of the ones before, with as many new tokens as chance
    says, when chance says. Nothing is forced: of every answer as it was given, each row of logits must be the reference's."""
    rng = np.random.default_rng(probe.secret())
    users = min(USERS, probe.limits.max_num_seqs)
    recorder = Recorder(probe.worker, probe.arena)
    core = probe.core(recorder, prefix_cache=True)
    chains: dict[str, Chain] = {}
    said: dict[int, tuple[int, ...]] = dict.fromkeys(range(users), ())
    room = min(ROOM, probe.limits.max_model_len, (core.pool.capacity // users) * probe.arena.layout.block_size)
    for turn in range(TURNS):
        most = max(1, room // TURNS - ANSWER)
        new = {
            user: new_tokens(probe, rng, (user + turn) % KINDS, int(rng.integers(1, most + 1))) for user in range(users)
        }
        prompts = {user: said[user] + new[user] for user in range(users)}
        order = rng.permutation(users).tolist()
        requests = [probe.request(f"{u}-{turn}", prompts[u], int(rng.integers(2, ANSWER + 1))) for u in order]
        answers = drain(core, requests, 1 if turn == 1 else int(rng.integers(1, users + 1)))  # once surely alone
        for user in order:
            said[user] = prompts[user] + tuple(answers[f"{user}-{turn}"])
            chains[f"{user}-{turn}"] = Chain(said[user], len(prompts[user]))
    return require_rows(probe, recorder, chains)


def new_tokens(probe: Probe, rng: np.random.Generator, kind: int, count: int) -> tuple[int, ...]:
    """Text; text between markers; or any ids."""
    size, [text] = probe.arena.layout.vocab_size, probe.spans([count])
    if kind == 0:
        return text
    if kind == 1:
        first, last = int(rng.integers(SPECIAL)), size - 1 - int(rng.integers(SPECIAL))
        return (first, *text[1:-1], last)[:count]
    return tuple(rng.integers(0, size, count).tolist())
