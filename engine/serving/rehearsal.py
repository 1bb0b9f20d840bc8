"""What a fresh worker runs before it may take a live step: on the dummy page, off the engine loop's thread.

Kernels that a forward compiles and libraries that it loads in its first steps would else hold up every open stream, because
one thread drives all forwards' steps.
"""

from __future__ import annotations

import numpy as np

from tideforge.engine.config import Settings, bucket
from tideforge.engine.executor import Executor
from tideforge.engine.scheduler import Step

SHORT = (16, 17)  # tokens of a prompt: Triton compiles a kernel anew for an argument that is no multiple of 16


def rehearse(worker: Executor, forward: str, settings: Settings) -> None:
    """Prompts short and as long as a step takes, alone and two at a time, and decodes. Raises CandidateError as a step does."""
    limits = settings.limits
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    shapes = [(1, 1), (1, longest)]
    shapes += [(rows, queries) for queries in SHORT for rows in (1, 2) if queries * rows <= longest]
    shapes.append((limits.max_num_seqs, 1))
    for rows, queries in shapes:
        for _ in worker.execute(dummy_step(forward, rows, queries, settings.block_size)):
            pass


def dummy_step(forward: str, rows: int, queries: int, block_size: int) -> Step:
    """`rows` sequences of `queries` tokens each, a prefill or (queries 1) a decode, all of whose pages are the dummy page."""
    positions = np.tile(np.arange(queries, dtype=np.int64), rows)
    ends = queries * np.arange(rows + 1)
    return Step(
        forward=forward,
        input_ids=np.zeros(rows * queries, np.int64),
        positions=positions,
        slot_mapping=positions % block_size,
        block_tables=np.zeros((rows, -(-queries // block_size)), np.int32),
        seq_lens=np.full(rows, queries, np.int32),
        query_start_loc=ends.astype(np.int32),
        logits_indices=ends[1:] - 1,
        temperatures=np.zeros(rows, np.float32),
        top_ps=np.ones(rows, np.float32),
        seeds=np.zeros(rows, np.int64),
        sample_positions=np.full(rows, queries, np.int64),
        num_decodes=rows if queries == 1 else 0,
        num_prefills=0 if queries == 1 else rows,
        max_query_len=queries,
        max_seq_len=bucket(queries),
        request_ids=("",) * rows,
    )
