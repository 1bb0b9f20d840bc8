"""LocalExecutor: a forward in this process, on plain tensors. The slow, obvious oracle of a worker; for tests."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Iterator

import torch

from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.contract import Context, KVGroup
from tideforge.engine.executor import Executor, Sampled, step_arrays, step_scalars
from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.runner import Runner
from tideforge.engine.scheduler import Step
from tideforge.engine.stored import open_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COUNT = itertools.count()


class LocalMemory:
    """Weights, one KV group and a logits buffer: what a keeper holds, here as tensors that executors may share."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.config = settings, ModelConfig.load(settings.model)
        self.dtype = _DTYPES[settings.dtype]
        stored, cpu = open_folder(settings.model), torch.device("cpu")
        self.weights = {name: stored.tensor(name, cpu).to(self.dtype, copy=True) for name in stored.names}
        layout = settings.arena_layout(self.config)
        keys, values = (
            tuple(torch.zeros(layout.page_shape(side), dtype=self.dtype) for _ in range(layout.num_layers))
            for side in (False, True)
        )
        self.group = KVGroup(layout.block_size, keys, values)
        self.logits = torch.zeros(layout.max_logits, layout.vocab_size)


class LocalExecutor:
    """Runs steps of `forward` on `memory`; what the forward raises comes as CandidateError, as from a worker."""

    def __init__(self, forward: Forward, memory: LocalMemory) -> None:
        folder = forward.save(memory.settings.state / "forwards")
        spec = importlib.util.spec_from_file_location(f"_tideforge_local_{next(_COUNT)}", folder / ENTRY)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.memory = memory
        with torch.inference_mode():
            built = module.build(self._context())
        self.runner = Runner(built, memory.logits, memory.group.block_size)

    def _context(self) -> Context:
        memory = self.memory
        return Context(
            config=memory.config,
            weights=memory.weights,
            dtype=memory.dtype,
            device=torch.device("cpu"),
            kv_groups=(memory.group,),
            layer_range=range(memory.config.num_hidden_layers),
            limits=memory.settings.limits,
        )

    def execute(self, step: Step) -> Iterator[Sampled]:
        self._halted = False
        for tokens, more in self.runner.run(step_scalars(step), step_arrays(step), lambda: self._halted):
            yield Sampled(tokens.tolist(), not more)

    def halt(self) -> None:
        self._halted = True


class LocalWorkers:
    """What serving/workers.LabWorkers is, without processes: every forward runs in this one, on shared memory."""

    def __init__(self, settings: Settings) -> None:
        self.memory = LocalMemory(settings)
        digest = hashlib.sha256()
        for file in sorted(settings.model.glob("*.safetensors")):
            digest.update(file.read_bytes())
        self.weights_sha256 = digest.hexdigest()
        self.ended: list[Executor] = []

    def start(self, forward: Forward) -> Executor:
        return LocalExecutor(forward, self.memory)

    def end(self, executor: Executor) -> None:
        self.ended.append(executor)

    def close(self) -> None:
        pass
