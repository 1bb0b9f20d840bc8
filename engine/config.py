"""Settings of the engine, without torch: the authority works with these. ModelConfig is re-exported from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.memory import ArenaLayout
from tideforge.engine.model_config import ModelConfig
from tideforge.errors import UserError

GPU_LOOKAHEAD = 2


def bucket(count: int) -> int:
    """The next power of two, at least 1: what contexts and captured steps are rounded up to."""
    return 1 << (count - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest batch that a step may carry."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    decode_steps: int = 1  # how many decode steps a worker runs before the scheduler plans anew


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an engine of an endpoint runs with: all its knobs, without the source of the forward."""

    state: Path
    model: Path
    dtype: str = "float32"
    limits: Limits = Limits()
    block_size: int = 16
    num_blocks: int = 256
    threads: int = 1
    device: str = "cpu"  # of workers and reference
    worker_cpus: tuple[int, ...] = ()  # cores of the measuring worker; empty: any
    capture_rows: tuple[int, ...] = ()  # batch sizes of decodes that a worker captures; empty: no graphs, as on the CPU
    capture_tokens: tuple[int, ...] = ()  # sizes of steps with prefills that it captures, tokens in all
    capture_contexts: tuple[int, ...] = ()  # longest contexts of those graphs, tokens
    worker_memory_bytes: int = 0  # that a worker may hold on the host beside weights and arena; 0: half of what is free
    spares: int = 1  # workers that stand by for the next candidates
    dry_runs: bool = True  # on a GPU: compile under a throwaway capture, while another candidate may be timed
    sandbox: str = "prefer"  # of workers: "require" one, "prefer" one where it can be had, "off"
    lookahead: int | None = None  # trials prepared beside the one that is measured; None: 2 on a GPU, 0 on the CPU

    @property
    def dry_shapes(self) -> list[tuple[bool, int, int, int]]:
        """Of the graphs' shapes the smallest and the largest, of decodes and with prefills: a dry run's."""
        kinds = [[shape for shape in self.graph_shapes if shape[0] is prefill] for prefill in (False, True)]
        ends = {pick(kind) for kind in kinds if kind for pick in (min, max)}
        return sorted(ends) if self.dry_runs else []

    @property
    def ahead(self) -> int:
        """Trials prepared beside the one that is measured. On the CPU a staging beside a clock would take a core from it."""
        if self.lookahead is not None:
            return self.lookahead
        return 0 if self.device == "cpu" else GPU_LOOKAHEAD

    @property
    def graph_shapes(self) -> list[tuple[bool, int, int, int]]:
        """(prefill, tokens, rows, context) of every graph; prefills take as many rows as the largest decode."""
        decodes = [(False, rows, rows, context) for rows in self.capture_rows for context in self.capture_contexts]
        most = max(self.capture_rows, default=0)
        return decodes + [
            (True, tokens, min(most, tokens), context)
            for tokens in self.capture_tokens
            for context in self.capture_contexts
            if tokens <= context * most
        ]

    def arena_layout(self, config: ModelConfig) -> ArenaLayout:
        return ArenaLayout(
            num_layers=config.num_hidden_layers,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=config.page_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            dtype=self.dtype,
            max_logits=self.limits.max_num_seqs,
            vocab_size=config.vocab_size,
        )

    def with_knobs(self, knobs: Mapping[str, Any]) -> Settings:
        """These settings under a forward's knobs.json: threads, block_size, max_num_batched_tokens. Others are refused."""
        unknown = set(knobs) - {"threads", "block_size", "max_num_batched_tokens"}
        if unknown:
            raise UserError(
                "knobs.json", f"has unknown knobs {sorted(unknown)}", "use threads, block_size, max_num_batched_tokens"
            )
        limits = self.limits
        if "max_num_batched_tokens" in knobs:
            limits = dataclasses.replace(limits, max_num_batched_tokens=int(knobs["max_num_batched_tokens"]))
        block_size = int(knobs.get("block_size", self.block_size))
        num_blocks = self.num_blocks * self.block_size // block_size
        return dataclasses.replace(
            self,
            limits=limits,
            block_size=block_size,
            num_blocks=num_blocks,
            threads=int(knobs.get("threads", self.threads)),
        )

    def to_dict(self) -> dict[str, Any]:
        raw = dataclasses.asdict(self)
        return {**raw, "state": str(self.state), "model": str(self.model)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Settings:
        return cls(
            **{
                **raw,
                "state": Path(raw["state"]),
                "model": Path(raw["model"]),
                "limits": Limits(**raw["limits"]),
                "worker_cpus": tuple(raw["worker_cpus"]),
                "capture_rows": tuple(raw["capture_rows"]),
                "capture_tokens": tuple(raw["capture_tokens"]),
                "capture_contexts": tuple(raw["capture_contexts"]),
            }
        )
