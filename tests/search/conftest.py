"""Small real models, steps over a paged cache, and an engine double that runs what it is given."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tideforge.engine import doubles
from tideforge.engine.contract import Batch, Context, KVGroup, Limits, ModelConfig
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Figures, Outcome, Trial

BLOCK = 8
MODELS = Path(doubles.__file__).parent / "models"


class Play:
    """Replays fixed tokens through a forward: prompts in chunks, decodes, and both in one step. Pages start as NaN."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.load(folder)
        self.weights = load_file(folder / "model.safetensors")
        self.played: dict[str, torch.Tensor] = {}

    def build(self, forward: Forward) -> Any:
        shape, layers = (64, BLOCK, self.config.page_heads), range(self.config.num_hidden_layers)
        keys, values = (
            tuple(torch.full((*shape, dim), float("nan")) for _ in layers)
            for dim in (self.config.key_dim, self.config.value_dim)
        )
        ctx = Context(
            config=self.config,
            weights=self.weights,
            dtype=torch.float32,
            device=torch.device("cpu"),
            kv_groups=(KVGroup(BLOCK, keys, values),),
            layer_range=layers,
            limits=Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=128),
        )
        scope: dict[str, Any] = {"__name__": "forward"}
        exec(compile(forward.files["forward.py"], "forward.py", "exec", dont_inherit=True), scope)
        with torch.inference_mode():
            return scope["build"](ctx)

    def logits(self, forward: Forward) -> torch.Tensor:
        """Every step's logits, stacked: [rows of all steps, V]. A forward is played once a test session."""
        if forward.id not in self.played:
            self.played[forward.id] = self.play(forward)
        return self.played[forward.id]

    def play(self, forward: Forward) -> torch.Tensor:
        run, done = self.build(forward), [0] * 5
        tokens = torch.randint(0, self.config.vocab_size, (5, 60), generator=torch.Generator().manual_seed(3))
        plan = [{0: 9, 1: 17}, {0: 1, 1: 1, 2: 21, 3: 5}, {0: 1, 2: 1, 3: 7}, *[{i: 1 for i in range(4)}] * 4, {4: 1}]
        return torch.cat([self.step(run, tokens, done, counts) for counts in plan])

    def step(self, run: Any, tokens: torch.Tensor, done: list[int], counts: dict[int, int]) -> torch.Tensor:
        order = sorted(counts, key=lambda i: counts[i])  # decodes first
        spans = [(i, done[i], done[i] + counts[i]) for i in order]
        slots = [1 + (i + 5 * (p // BLOCK)) for i, a, b in spans for p in range(a, b)]  # blocks of sequences alternate
        slots = [
            s * BLOCK + p % BLOCK for s, p in zip(slots, (p for _, a, b in spans for p in range(a, b)), strict=True)
        ]
        tables = [[1 + i + 5 * j for j in range(-(-b // BLOCK))] for i, _, b in spans]
        width = max(map(len, tables))
        starts = list(itertools.accumulate((counts[i] for i in order), initial=0))
        logits = torch.full((len(order), self.config.vocab_size), float("nan"))
        batch = Batch(
            input_ids=torch.cat([tokens[i, a:b] for i, a, b in spans]),
            positions=torch.tensor([p for _, a, b in spans for p in range(a, b)]),
            slot_mapping=(torch.tensor(slots),),
            block_tables=(torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),),
            seq_lens=torch.tensor([b for _, _, b in spans], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            logits_indices=torch.tensor(starts[1:]) - 1,
            logits=logits,
            num_decodes=sum(n == 1 for n in counts.values()),
            num_prefills=sum(n > 1 for n in counts.values()),
            max_query_len=max(counts.values()),
            max_seq_len=128,
        )
        with torch.inference_mode():
            run(batch)
        for i, _, b in spans:
            done[i] = b
        return logits


class FakeEngine:
    """Runs every candidate on the tiny model when it is submitted. `speed` invents the figures."""

    def __init__(self, play: Play, incumbent: Forward, speed: Callable[[str], float]) -> None:
        self.play, self.base, self.speed = play, incumbent, speed
        self.truth = play.logits(incumbent)
        self.known: dict[str, Trial] = {}
        self.forwards: dict[str, Forward] = {}
        self.calls: list[str] = []

    def submit(self, forward: Forward, tier: str = "slow", submitter: str = "") -> str:
        name = f"{'t' if tier == 'slow' else tier}-{forward.id[:12]}"
        self.calls.append(name)
        if name not in self.known:
            self.forwards[name] = forward
            self.known[name] = self.judge(Trial(name, forward.id, tier, submitter, time.time()), forward)
        return name

    def judge(self, trial: Trial, forward: Forward) -> Trial:
        try:
            logits = self.play.logits(forward)
        except SyntaxError as error:
            return dataclasses.replace(trial, outcome=Outcome.SYNTAX_ERROR, message=str(error))
        except Exception as error:
            return dataclasses.replace(trial, outcome=Outcome.FORWARD_ERROR, message=repr(error))
        if not torch.allclose(logits, self.truth, atol=1e-3):
            return dataclasses.replace(trial, outcome=Outcome.WRONG, message="other logits than the incumbent's")
        ratio = self.speed(forward.files["forward.py"])
        figures = Figures(ratio, ratio - 0.02, ratio + 0.02, 8, 100 * ratio, 100, 5.0, 10.0, 9.0)
        return dataclasses.replace(trial, outcome=Outcome.PASSED, figures=figures)

    def trial(self, trial_id: str) -> Trial:
        return self.known[trial_id]

    def trials(self) -> list[Trial]:
        return list(self.known.values())

    def incumbent(self) -> Forward:
        return self.base

    def source(self) -> dict[str, str]:
        return {"engine/measure.py": "# the measuring protocol\n", "engine/contract.py": "# the seam\n"}

    def wait(self, trial_id: str, timeout_s: float) -> Trial:
        return self.known[trial_id]


@dataclasses.dataclass(frozen=True)
class Bench:
    name: str
    play: Play
    incumbent: Forward

    def engine(self, speed: Callable[[str], float]) -> FakeEngine:
        return FakeEngine(self.play, self.incumbent, speed)


def make_bench(name: str, folder: Path) -> Bench:
    torch.set_num_threads(1)
    {"llama": doubles.tiny_llama, "moe": doubles.tiny_moe, "mla": doubles.tiny_deepseek}[name](folder)
    return Bench(name, Play(folder), Forward.load(MODELS / name))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session", params=["llama", "moe"])
def bench(request: pytest.FixtureRequest, llama: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return llama if request.param == "llama" else make_bench(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session", params=["llama", "moe", "mla"])
def kind(request: pytest.FixtureRequest, llama: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One of every raw forward there is."""
    return llama if request.param == "llama" else make_bench(request.param, tmp_path_factory.mktemp(request.param))
