"""A dry run: a forward is called under a CUDA stream capture that is thrown away. What it launches is compiled and loaded, and
does not run, so it needs no clock: another candidate may be timed on the device meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tideforge.engine.runner import GraphShape, Runner


def dry_run(runner: Runner, shapes: Sequence[GraphShape]) -> bool:
    """Whether all of `shapes` could be captured. If not, this process keeps what the failed capture held until it ends.

    Why one could not is of no interest: what is wrong shows again when the forward is run.
    """
    try:
        for shape in shapes:
            with unrun(runner.device):
                runner.rehearse(shape)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def unrun(device: torch.device) -> Iterator[None]:
    """What is launched inside is not run. On the CPU there is nothing to keep free, and it is.

    The mode is relaxed because loading a kernel and allocating memory are refused otherwise while a capture is under way.
    """
    if device.type == "cpu":
        yield
        return
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # never instantiated
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
        yield
    graph.reset()
