"""Runs the steps of one forward in a worker: plainly, or on a GPU by replaying CUDA graphs of its decode batches.

A step of decodes may run several times in one go. `StepTensors.advance` makes the next step's inputs from the sampled
tokens on the device, so the next step never waits for the host. A graph holds one such step: forward, sampling, advance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tideforge.engine import contract, sampler
from tideforge.engine.faults import fault, poison, require_own_logits
from tideforge.errors import CandidateError

T = TypeVar("T")
AHEAD = 2  # decode steps that are launched before the first one's tokens are here
Tokens = tuple[np.ndarray, bool]  # [N], and whether more come of this step
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
        """In place: each row's sampled token [N] becomes its next input. A row without one (-1) goes on with token 0."""
        self.input_ids.copy_(tokens.clamp(min=0))
        for counter in (self.positions, self.seq_lens, self.sample_positions):
            counter += 1
        blocks = self.block_tables.gather(1, (self.positions // block_size).unsqueeze(1)).squeeze(1)
        self.slot_mapping.copy_(blocks * block_size + self.positions % block_size)


class Runner:
    """`run` answers steps. `capture` prepares graphs for the shapes that steps will have."""

    def __init__(self, forward: contract.ForwardFn, logits: Tensor, block_size: int) -> None:
        self.forward, self.logits, self.block_size, self.device = forward, logits, block_size, logits.device
        self.graphs: dict[GraphShape, Graph] = {}
        self._pool: Any = None  # of torch.cuda.graph_pool_handle

    def capture(self, shapes: Sequence[GraphShape]) -> None:
        """Raises CandidateError("capture_error"). Largest first, so that the smaller ones reuse the pool's memory."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, reverse=True):
            self.graphs[shape] = Graph(self, shape, self._pool)

    def run(
        self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray], halted: Callable[[], bool]
    ) -> Iterator[Tokens]:
        """Runs the step num_steps times, or until `halted` says so."""
        graph = self._graph_for(scalars, arrays)
        if graph is not None:
            return graph.replay(arrays, scalars["num_steps"], halted)
        return self._plainly(scalars, arrays, halted)

    def rehearse(self, queries: int) -> None:
        """One row of `queries` tokens on the dummy page; its tokens mean nothing."""
        shape = GraphShape(queries > 1, queries, 1, queries)
        self.compute(StepTensors.blank(shape, self.block_size, self.device), shape.scalars, greedy=True)

    def _graph_for(self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> Graph | None:
        """The smallest graph that holds the step; None for sampling with a temperature and for larger steps."""
        if arrays["temperatures"].any():
            return None
        return self.graphs.get(min((shape for shape in self.graphs if shape.holds(scalars, arrays)), default=None))  # type: ignore[arg-type]

    def _plainly(
        self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray], halted: Callable[[], bool]
    ) -> Iterator[Tokens]:
        tensors, left = StepTensors.of(arrays, self.device), scalars["num_steps"]
        while left > 0:
            tokens = self.compute(tensors, scalars, greedy=not arrays["temperatures"].any())
            left = 0 if halted() else left - 1
            yield _observe(tokens.cpu, "forward_error").numpy(), left > 0
            if left > 0:
                tensors.advance(tokens, self.block_size)

    def compute(self, tensors: StepTensors, scalars: Mapping[str, int], greedy: bool) -> Tensor:
        """Logits, then tokens [N]. Logits rows start poisoned, so that rows left untouched are seen."""
        logits = self.logits[: tensors.logits_indices.shape[0]]
        poison(logits)
        batch = contract.Batch(
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            slot_mapping=(tensors.slot_mapping,),
            block_tables=(tensors.block_tables,),
            seq_lens=tensors.seq_lens,
            query_start_loc=tensors.query_start_loc,
            logits_indices=tensors.logits_indices,
            logits=logits,
            num_decodes=scalars["num_decodes"],
            num_prefills=scalars["num_prefills"],
            max_query_len=scalars["max_query_len"],
            max_seq_len=scalars["max_seq_len"],
        )

        def forward() -> Tensor:
            with torch.inference_mode():
                self.forward(batch)
                written = self.logits[: tensors.logits_indices.shape[0]]  # whatever the forward did to batch.logits
                require_own_logits(batch, written)
                if greedy:
                    return sampler.greedy(written)
                return sampler.sample(
                    written, tensors.temperatures, tensors.top_ps, tensors.seeds, tensors.sample_positions
                )

        return _observe(forward, "forward_error")


class Graph:
    """A step of some shape, captured. A decode advances by itself when it is replayed."""

    def __init__(self, runner: Runner, shape: GraphShape, pool: Any) -> None:
        self.shape, self.tensors = shape, StepTensors.blank(shape, runner.block_size, runner.device)
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64, device=runner.device)
        self.host = torch.zeros((AHEAD, shape.rows), dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(AHEAD)]
        self.graph = torch.cuda.CUDAGraph()

        def step() -> None:
            self.tokens.copy_(runner.compute(self.tensors, shape.scalars, greedy=True))
            if not shape.prefill:
                self.tensors.advance(self.tokens, runner.block_size)

        def capture() -> None:
            step()  # outside the capture: kernels compile, cuBLAS gets its workspace
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, pool=pool, stream=torch.cuda.current_stream()):
                step()

        _observe(capture, "capture_error")

    def replay(self, arrays: Mapping[str, np.ndarray], num_steps: int, halted: Callable[[], bool]) -> Iterator[Tokens]:
        """AHEAD steps are under way while the host looks at one's tokens: the device never waits for it."""
        rows, launched = len(arrays["logits_indices"]), 0
        self.tensors.load(arrays, self.shape.prefill)
        for index in range(num_steps):
            while launched < min(num_steps, index + AHEAD):
                if launched > 0 and halted():
                    num_steps = launched
                    break
                _observe(partial(self._launch, launched % AHEAD), "forward_error")
                launched += 1
            _observe(self.events[index % AHEAD].synchronize, "forward_error")
            yield self.host[index % AHEAD, :rows].numpy().copy(), index + 1 < num_steps
            if index + 1 >= num_steps:
                return

    def _launch(self, slot: int) -> None:
        self.graph.replay()
        self.host[slot].copy_(self.tokens, non_blocking=True)
        self.events[slot].record()


def _observe(action: Callable[[], T], outcome: str) -> T:
    """What candidate code raises, as CandidateError with the outcome that was observed."""
    try:
        return action()
    except CandidateError:
        raise
    except Exception as error:
        raise fault(outcome, error) from error
