"""Runs the steps of one forward in a worker: plainly, or by replaying graphs of the shapes that steps have.

A step of decodes may run several times in one go. `StepTensors.advance` makes the next step's inputs from the sampled
tokens on the device, so the next step never waits for the host, in a graph or out of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tideforge.engine import contract, sampler
from tideforge.engine.faults import observe, poison, require_own_logits
from tideforge.engine.graph import Graph, Outbox, Tokens, run_ahead
from tideforge.engine.step_tensors import GraphShape, StepTensors

__all__ = ["GraphShape", "Runner", "StepTensors"]


class Runner:
    """`run` answers steps. `capture` prepares graphs for the shapes that steps will have."""

    def __init__(self, forward: contract.ForwardFn, logits: Tensor, block_size: int) -> None:
        self.forward, self.logits, self.block_size, self.device = forward, logits, block_size, logits.device
        self.graphs: dict[GraphShape, Graph] = {}
        self._pool: Any = None  # of torch.cuda.graph_pool_handle

    def capture(self, shapes: Sequence[GraphShape], sampling: bool = False) -> None:
        """Raises CandidateError("capture_error"). Largest first, so that the smaller ones reuse the pool's memory.

        `sampling`: also what steps with a temperature need, which else comes with the first of them.
        """
        if self._pool is None and self.device.type != "cpu":
            self._pool = torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, reverse=True):
            self.graphs[shape] = Graph(self, shape, self._pool)
            if sampling:
                self.graphs[shape].capture_sampling()

    def run(
        self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray], halted: Callable[[], bool]
    ) -> Iterator[Tokens]:
        """Runs the step num_steps times, or until `halted` says so."""
        graph = self._graph_for(scalars, arrays)
        if graph is not None:
            return graph.replay(arrays, scalars["num_steps"], halted)
        return self._plainly(scalars, arrays, halted)

    def rehearse(self, shape: GraphShape) -> None:
        """A step of that shape on the dummy page; its tokens mean nothing."""
        self.compute(StepTensors.blank(shape, self.block_size, self.device), shape.scalars)

    def _graph_for(self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> Graph | None:
        """The smallest graph that holds the step; None for a larger step."""
        fitting = [shape for shape in self.graphs if shape.holds(scalars, arrays)]
        return self.graphs[min(fitting)] if fitting else None

    def _plainly(
        self, scalars: Mapping[str, int], arrays: Mapping[str, np.ndarray], halted: Callable[[], bool]
    ) -> Iterator[Tokens]:
        tensors, sampled = StepTensors.of(arrays, self.device), bool(arrays["temperatures"].any())
        rows, again = len(arrays["logits_indices"]), scalars["num_steps"] > 1

        def launch() -> Tensor:
            tokens = self.compute(tensors, scalars)
            if sampled:
                tokens = observe(lambda: self.sample(tensors), "forward_error")
            if again:
                tensors.advance(tokens, self.block_size)
            return tokens

        return run_ahead(launch, Outbox(rows, self.device), rows, scalars["num_steps"], halted)

    def compute(self, tensors: StepTensors, scalars: Mapping[str, int]) -> Tensor:
        """Logits, then of each row the token of the largest [N]. Logits start poisoned, so that rows left untouched are seen."""
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
                return sampler.greedy(written)

        return observe(forward, "forward_error")

    def sample(self, tensors: StepTensors) -> Tensor:
        """A token for each row [N], drawn from the logits that `compute` left; the next call draws for the next place."""
        with torch.inference_mode():
            tokens = sampler.sample(
                self.logits[: tensors.logits_indices.shape[0]],
                tensors.temperatures, tensors.top_ps, tensors.seeds, tensors.sample_positions,
            )  # fmt: skip
            tensors.sample_positions += 1
        return tokens
