"""What a part is asked to do: on which device, for how long, and at what size."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from tideforge.engine import random_weights
from tideforge.engine.config import Limits, Settings

MODELS = Path(__file__).parents[1] / "models"
HARM = Path(__file__).resolve().parents[2] / "tests" / "redteam"  # only a checkout has it


@dataclasses.dataclass(frozen=True)
class Load:
    """A model's shape and the requests that a trial replays; `passes`: lockstep passes a trial takes at most."""

    shape: str
    users: int
    prompt: int  # tokens
    output: int  # tokens
    passes: int
    num_blocks: int = 4096
    forward: str = "llama"
    on_disk: bool = True  # else weights are drawn in place on the device: of large shapes


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of one part. `trials` is how many the part makes in all, over however many calls."""

    device: str
    state: Path
    trials: int | None = None
    seconds: float = 420.0
    vllm: Path | None = None  # a Python that has it
    begin: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def results(self) -> Path:
        return self.state / "results"

    @property
    def left_s(self) -> float:
        return self.begin + self.seconds - time.monotonic()

    def count(self, gpu: int, cpu: int) -> int:
        return self.trials or (gpu if self.on_gpu else cpu)

    def load(self, gpu: Load, cpu: Load) -> Load:
        return gpu if self.on_gpu else cpu

    def model(self, shape: str, on_disk: bool = True) -> Path:
        """The shape's folder of random weights; made once a state folder."""
        if not on_disk:
            return random_weights.describe(self.state / "models" / shape, shape)
        return random_weights.write(self.state / "models" / shape, shape, device=self.device)

    def settings(self, load: Load, state: Path) -> Settings:
        """Of a server or a trial of `load`; trials choose fewer graphs by themselves."""
        longest = load.prompt + load.output
        chosen = Settings(
            state=state, model=self.model(load.shape, load.on_disk), dtype=self.dtype, device=self.device,
            num_blocks=load.num_blocks, limits=Limits(max(load.users, 2), 4096, max(2048, longest), decode_steps=64),
        )  # fmt: skip
        if not self.on_gpu:
            return dataclasses.replace(chosen, limits=Limits(max(load.users, 2), 512, 512))
        contexts = tuple(size for size in (256, 1024, 4096) if size < longest)
        return dataclasses.replace(
            chosen, spares=6, capture_rows=tuple(sorted({1, load.users})), capture_tokens=(32, 128, 512, 2048),
            capture_contexts=(*contexts, next(size for size in (256, 1024, 4096, 16384) if size >= longest)),
        )  # fmt: skip


TINY = Load("llama-tiny", users=2, prompt=8, output=12, passes=1, num_blocks=64)
SMALL = Load("llama-tiny", users=4, prompt=32, output=24, passes=2, num_blocks=128)  # a layer of it takes some time
