"""A step's arrays as tensors on the device, in the shape it has or padded into a larger one that a graph holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

PADDED = ("input_ids", "positions", "slot_mapping", "seq_lens", "temperatures", "top_ps", "seeds", "sample_positions")
PREFILL = ("query_start_loc", "logits_indices")  # in a decode they are what they always are


@dataclasses.dataclass(frozen=True, order=True)
class GraphShape:
    """The largest step that a graph holds: tokens in all, rows, tokens of context of a row."""

    prefill: bool
    tokens: int
    rows: int
    context: int

    @property
    def scalars(self) -> dict[str, int]:
        """A decode beside prefills is a prefill of one token."""
        counts = {"num_decodes": 0 if self.prefill else self.rows, "num_prefills": self.rows if self.prefill else 0}
        return {
            **counts,
            "max_query_len": min(self.tokens, self.context) if self.prefill else 1,
            "max_seq_len": self.context,
        }

    def holds(self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> bool:
        return (
            self.prefill == (scalars["num_prefills"] > 0)
            and self.tokens >= len(arrays["input_ids"])
            and self.rows >= len(arrays["seq_lens"])
            and self.context >= scalars["max_seq_len"]
        )


@dataclasses.dataclass
class StepTensors:
    """A step's arrays on the device, named and shaped as in scheduler.Step."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_indices: Tensor
    temperatures: Tensor
    top_ps: Tensor
    seeds: Tensor
    sample_positions: Tensor

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], device: torch.device) -> StepTensors:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.from_numpy(arrays[name].copy()).to(device) for name in names})

    @classmethod
    def blank(cls, shape: GraphShape, block_size: int, device: torch.device) -> StepTensors:
        """A step of padding on the dummy page: a decode of one token a row, or a prefill of equal rows."""

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows, places = shape.rows, torch.arange(shape.tokens, device=device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        blank = cls(
            input_ids=zeros(shape.tokens),
            positions=zeros(shape.tokens),
            slot_mapping=zeros(shape.tokens),
            block_tables=zeros(rows, -(-shape.context // block_size), dtype=torch.int32),
            seq_lens=zeros(rows, dtype=torch.int32) + 1,
            query_start_loc=starts,
            logits_indices=torch.arange(rows, device=device),
            temperatures=zeros(rows, dtype=torch.float32),
            top_ps=zeros(rows, dtype=torch.float32) + 1,
            seeds=zeros(rows),
            sample_positions=zeros(rows),
        )
        if shape.prefill:
            each = -(-shape.tokens // rows)
            blank.positions, blank.slot_mapping = places % each, places % block_size
            blank.query_start_loc = (starts * each).clamp(max=shape.tokens)
            blank.seq_lens = blank.query_start_loc.diff().clamp(min=1)
            blank.logits_indices = zeros(rows)
        return blank

    def load(self, arrays: Mapping[str, np.ndarray], prefill: bool) -> None:
        """Puts a step in front. Padding behind it: of a decode rows of one token, of a prefill tokens of no row."""
        rows, blocks = arrays["block_tables"].shape
        ends = {"query_start_loc": arrays["query_start_loc"][-1], "seq_lens": 1, "top_ps": 1}
        for name in PADDED + (PREFILL if prefill else ()):
            target, array = getattr(self, name), arrays[name]
            padded = np.full(len(target), ends.get(name, 0), array.dtype)
            padded[: len(array)] = array
            target.copy_(torch.from_numpy(padded), non_blocking=True)
        tables = np.zeros(self.block_tables.shape, np.int32)
        tables[:rows, :blocks] = arrays["block_tables"]
        self.block_tables.copy_(torch.from_numpy(tables), non_blocking=True)

    def advance(self, tokens: Tensor, block_size: int) -> None:
        """In place: each row's sampled token [N] becomes its next input, one place on.

        A row whose table ends there is not run again: its slot means nothing, but must not be looked up outside.
        """
        self.feed(tokens)
        for counter in (self.positions, self.seq_lens):
            counter += 1
        columns = (self.positions // block_size).clamp(max=self.block_tables.shape[1] - 1)
        blocks = self.block_tables.gather(1, columns.unsqueeze(1)).squeeze(1)
        self.slot_mapping.copy_(blocks * block_size + self.positions % block_size)

    def feed(self, tokens: Tensor) -> None:
        """In place: each row's input is that token [N]. A row without one (-1) goes on with token 0."""
        self.input_ids.copy_(tokens.clamp(min=0))
