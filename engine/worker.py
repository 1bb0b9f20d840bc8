"""A worker: one disposable process that runs one forward. It executes steps that the authority sends; it decides nothing.

It imports nothing but torch, numpy and this package's engine. What it says about time or success is a hint at best.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import mmap
import os
import resource
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tideforge.engine import contract, memory, protocol, sampler
from tideforge.engine import device as device_memory
from tideforge.engine.guard import die_with_parent
from tideforge.errors import CandidateError, PeerGone

MAX_OUTPUT_BYTES = 16 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def map_tensors(fd: int, size: int, entries: list[list[Any]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights by checkpoint name, on read-only pages: a store is a SIGSEGV."""
    pages = memory.map_read_only(fd, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return {
            name: torch.frombuffer(pages, dtype=dtype, count=count // dtype.itemsize, offset=offset).reshape(shape)
            for name, shape, offset, count in entries
        }


def map_arena(fd: int, layout: memory.ArenaLayout, device: torch.device) -> tuple[contract.KVGroup, Tensor]:
    """The KV group and the logits buffer [max_logits, V] of an arena."""
    pages = device_memory.mapped(torch.frombuffer(mmap.mmap(fd, layout.bytes), dtype=torch.uint8), device)
    planes = [
        pages[at : at + layout.plane_bytes].view(_DTYPES[layout.dtype]).reshape(layout.page_shape)
        for at in range(0, 2 * layout.num_layers * layout.plane_bytes, layout.plane_bytes)
    ]
    logits = pages[layout.logits_offset : layout.bytes].view(torch.float32)
    group = contract.KVGroup(layout.block_size, tuple(planes[0::2]), tuple(planes[1::2]))
    return group, logits.reshape(layout.max_logits, layout.vocab_size)


def load_forward(folder: Path, ctx: contract.Context) -> contract.ForwardFn:
    """Imports `folder/forward.py` and builds it. Raises CandidateError with the outcome that was observed."""
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("forward", folder / "forward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forward"] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise CandidateError("syntax_error", f"{error.msg} ({error.filename}, line {error.lineno})") from error
    except Exception as error:
        raise CandidateError("import_error", _last_line(error)) from error
    try:
        with torch.inference_mode():
            return module.build(ctx)  # type: ignore[no-any-return]
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CandidateError("out_of_memory", _last_line(error)) from error
    except Exception as error:
        raise CandidateError("build_error", _last_line(error)) from error


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"[:500]


class Worker:
    """Attached to memory first (as a spare), then given one forward, then stepped until its socket closes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.forward: contract.ForwardFn | None = None

    def run(self) -> None:
        handlers = {"attach": self.attach, "stage": self.stage, "step": self.step}
        while True:
            try:
                message = protocol.recv(self.sock)
            except PeerGone:
                return
            try:
                handlers[message.type](message)
            except CandidateError as error:
                protocol.send(self.sock, {"type": "failed", "outcome": error.outcome, "message": error.message})

    def attach(self, message: protocol.Message) -> None:
        """Maps weights and arena; after this a stage costs an import and a build only."""
        head = message.header
        if head.get("cpus"):
            os.sched_setaffinity(0, head["cpus"])
        torch.set_num_threads(int(head["threads"]))
        self.layout = memory.ArenaLayout(**head["layout"])
        self.dtype = _DTYPES[head["dtype"]]
        self.config = contract.ModelConfig.load(Path(head["model"]))
        self.limits = contract.Limits(**head["limits"])
        self.device = torch.device(head["device"])
        weights = map_tensors(message.fds[0], head["bytes"], head["entries"], self.dtype)
        self.weights = {name: weight.to(self.device) for name, weight in weights.items()}  # on the CPU: no copy
        self.group, self.logits = map_arena(message.fds[1], self.layout, self.device)
        for fd in message.fds:
            os.close(fd)
        protocol.send(self.sock, {"type": "ready", "pid": os.getpid()})

    def stage(self, message: protocol.Message) -> None:
        begin = time.perf_counter()
        ctx = contract.Context(
            config=dataclasses.replace(self.config),
            weights=self.weights,
            dtype=self.dtype,
            device=self.device,
            kv_groups=(self.group,),
            layer_range=range(*message.header["layers"]),
            limits=self.limits,
        )
        self.forward = load_forward(Path(message.header["folder"]), ctx)
        protocol.send(self.sock, {"type": "staged", "seconds": time.perf_counter() - begin})

    def step(self, message: protocol.Message) -> None:
        arrays = {name: torch.from_numpy(value.copy()).to(self.device) for name, value in message.arrays.items()}
        tokens = execute(self.forward, self.logits, message.header, arrays)
        protocol.send(self.sock, {"type": "tokens"}, {"tokens": tokens})


def execute(forward: Any, buffer: Tensor, head: dict[str, Any], arrays: dict[str, Tensor]) -> np.ndarray:
    """Runs one step: logits rows start as NaN, so that rows left untouched are seen; then the engine samples. -> [N]."""
    rows = arrays["logits_indices"].shape[0]
    logits = buffer[:rows]
    logits.fill_(float("nan"))
    batch = contract.Batch(
        input_ids=arrays["input_ids"],
        positions=arrays["positions"],
        slot_mapping=(arrays["slot_mapping"],),
        block_tables=(arrays["block_tables"],),
        seq_lens=arrays["seq_lens"],
        query_start_loc=arrays["query_start_loc"],
        logits_indices=arrays["logits_indices"],
        logits=logits,
        num_decodes=head["num_decodes"],
        num_prefills=head["num_prefills"],
        max_query_len=head["max_query_len"],
        max_seq_len=head["max_seq_len"],
    )
    try:
        with torch.inference_mode():
            forward(batch)
            sampled = sampler.sample(
                buffer[:rows], arrays["temperatures"], arrays["top_ps"], arrays["seeds"], arrays["sample_positions"]
            )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CandidateError("out_of_memory", _last_line(error)) from error
    except Exception as error:
        raise CandidateError("forward_error", _last_line(error)) from error
    return sampled.cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description="run one forward for the engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the authority")
    args = parser.parse_args()
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=args.fd) as sock:
        Worker(sock).run()


if __name__ == "__main__":
    main()
