"""Is the incumbent an honest plain forward? One-user decode beside transformers' eager decode and the linear floor.

`python -m tideforge.engine.baseline --model DIR --threads 1 --json`. All lanes run in one process at equal threads and
precision, step by step in turn; ratios are taken between neighbours in time, so a machine's drift cancels.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tideforge.engine.config import ModelConfig
from tideforge.engine.contract import Batch, Context, KVGroup, Limits
from tideforge.engine.evaluate import environment
from tideforge.engine.model_config import model_for
from tideforge.engine.weights import Checkpoint
from tideforge.engine.worker import load_forward
from tideforge.errors import MissingExtra, UserError

BLOCK_SIZE = 16


class Lane(Protocol):
    """One way to decode one sequence greedily."""

    name: str

    def prefill(self, prompt: Sequence[int]) -> None: ...

    def select(self) -> None:
        """Called before each step, untimed."""

    def step(self) -> int: ...


class RawLane:
    """The raw forward on a paged cache; a step builds its batch, as an engine would."""

    name = "raw"

    def __init__(
        self, folder: Path, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, length: int
    ) -> None:
        self.blocks = -(-length // BLOCK_SIZE)
        shape = (self.blocks + 1, BLOCK_SIZE, config.page_heads)
        keys, values = (
            tuple(torch.zeros(*shape, dim, dtype=dtype) for _ in range(config.num_hidden_layers))
            for dim in (config.key_dim, config.value_dim)
        )
        group = KVGroup(BLOCK_SIZE, keys, values)
        layers = range(config.num_hidden_layers)
        ctx = Context(config, weights, dtype, torch.device("cpu"), (group,), layers, Limits(1, length, length))
        self.forward = load_forward(folder, ctx)
        self.logits = torch.empty(1, config.vocab_size)
        self.table = torch.arange(1, self.blocks + 1, dtype=torch.int32)[None]

    def prefill(self, prompt: Sequence[int]) -> None:
        self.length, self.token = 0, 0
        self._run(prompt)

    def select(self) -> None:
        pass

    def step(self) -> int:
        return self._run([self.token])

    def _run(self, tokens: Sequence[int]) -> int:
        count, begin = len(tokens), self.length
        self.length += count
        positions = torch.arange(begin, self.length)
        self.forward(
            Batch(
                input_ids=torch.tensor(tokens),
                positions=positions,
                slot_mapping=(positions + BLOCK_SIZE,),  # the sequence owns blocks 1, 2, ... in order
                block_tables=(self.table,),
                seq_lens=torch.tensor([self.length], dtype=torch.int32),
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                logits_indices=torch.tensor([count - 1]),
                logits=self.logits,
                num_decodes=int(count == 1),
                num_prefills=int(count > 1),
                max_query_len=count,
                max_seq_len=self.blocks * BLOCK_SIZE,
            )
        )
        self.token = int(self.logits.argmax())
        return self.token


class TransformersLane:
    """transformers in eager mode (nothing compiled), with the cache and attention that `name` says."""

    def __init__(self, model: Any, cache: str, attention: str, length: int) -> None:
        self.name = f"transformers {cache} cache, {attention} attention"
        self.model, self.kind, self.attention, self.room = model, cache, attention, length
        # its older releases call it past_key_values
        self.keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def prefill(self, prompt: Sequence[int]) -> None:
        from transformers import DynamicCache, StaticCache

        self.select()
        config = self.model.config
        self.cache = (
            DynamicCache(config=config) if self.kind == "dynamic" else StaticCache(config, max_cache_len=self.room)
        )
        self._run(torch.tensor([list(prompt)]))

    def select(self) -> None:
        self.model.set_attn_implementation(self.attention)

    def step(self) -> int:
        return self._run(torch.tensor([[self.token]]))

    def _run(self, tokens: Tensor) -> int:
        out = self.model(tokens, **{self.keyword: self.cache}, use_cache=True, logits_to_keep=1)
        self.token = int(out.logits[0, -1].argmax())
        return self.token


class FloorLane:
    """The linear layers alone, that one token must go through: no norm, no attention, no cache."""

    name = "linear layers alone"

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        unused = tuple(f"experts.{i}." for i in range(config.num_experts_per_tok, config.num_local_experts))
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        inside = [n for n, w in weights.items() if n.startswith("model.layers.") and w.dim() == 2]
        names = [n for n in inside if not any(part in n for part in unused)]
        self.matrices = [weights[name] for name in (*names, head)]
        dtype = self.matrices[0].dtype
        self.inputs = {n: torch.randn(1, n).to(dtype) for n in {matrix.shape[1] for matrix in self.matrices}}

    @property
    def bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    def prefill(self, prompt: Sequence[int]) -> None:
        pass

    def select(self) -> None:
        pass

    def step(self) -> int:
        for matrix in self.matrices:
            F.linear(self.inputs[matrix.shape[1]], matrix)
        return 0


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Medians over all timed steps. A ratio is taken between neighbours in time; above 1 the raw forward is faster."""

    raw_tps: float
    transformers_tps: float
    transformers: str  # the fastest variant, by median
    floor_tps: float
    ratio: float
    ratios: tuple[float, ...]  # by round
    share_of_floor: float  # raw tokens/s over the floor's, paired
    floor_bytes: int
    lanes_tps: dict[str, float]
    agreeing_tokens: int  # of the last round's chains: do both decode the same text?
    decoded_tokens: int
    seconds: dict[str, list[list[float]]]  # of each step, by lane and round: what all of the above is made of


@dataclasses.dataclass(frozen=True)
class Timing:
    """seconds[lane name][round][step], and the chain that each lane decoded in the last round."""

    seconds: dict[str, list[list[float]]]
    chains: dict[str, list[int]]

    def median_s(self, lane: str) -> float:
        return statistics.median(value for row in self.seconds[lane] for value in row)

    def ratios(self, lane: str, other: str) -> list[float]:
        """Speed of `lane` over `other` by round: the median over steps of the paired ratio."""
        rows = zip(self.seconds[lane], self.seconds[other], strict=True)
        return [statistics.median(b / a for a, b in zip(*row, strict=True)) for row in rows]


def measure(lanes: Sequence[Lane], prompt_tokens: int, steps: int, rounds: int, vocab: int) -> Timing:
    """All lanes decode the same fresh prompt, one step each in turn. A round before the first warms up, uncounted."""
    rng = np.random.default_rng()
    seconds: dict[str, list[list[float]]] = {lane.name: [] for lane in lanes}
    chains: dict[str, list[int]] = {}
    for index in range(rounds + 1):
        prompt = rng.integers(3, vocab, prompt_tokens).tolist()
        row: dict[str, list[float]] = {lane.name: [] for lane in lanes}
        chains = {lane.name: [] for lane in lanes}
        for lane in lanes:
            lane.prefill(prompt)
        for step in range(steps):
            for lane in lanes if step % 2 == 0 else lanes[::-1]:
                lane.select()
                begin = time.perf_counter()
                token = lane.step()
                row[lane.name].append(time.perf_counter() - begin)
                chains[lane.name].append(token)
        if index:
            for name, values in row.items():
                seconds[name].append(values)
    return Timing(seconds, chains)


def summarise(timing: Timing, floor_bytes: int) -> Baseline:
    medians = {name: 1 / timing.median_s(name) for name in timing.seconds}
    theirs = max((name for name in medians if name.startswith("transformers")), key=lambda name: medians[name])
    ratios = timing.ratios(RawLane.name, theirs)
    ours, other = timing.chains[RawLane.name], timing.chains[theirs]
    return Baseline(
        raw_tps=medians[RawLane.name],
        transformers_tps=medians[theirs],
        transformers=theirs,
        floor_tps=medians[FloorLane.name],
        ratio=statistics.median(ratios),
        ratios=tuple(ratios),
        share_of_floor=statistics.median(timing.ratios(RawLane.name, FloorLane.name)),
        floor_bytes=floor_bytes,
        lanes_tps=medians,
        agreeing_tokens=sum(a == b for a, b in zip(ours, other, strict=True)),
        decoded_tokens=len(ours),
        seconds=timing.seconds,
    )


def baseline(
    model: Path,
    forward: Path | None = None,
    dtype: str = "float32",
    prompt_tokens: int = 32,
    steps: int = 16,
    rounds: int = 5,
) -> Baseline:
    """Runs all lanes. Raises UserError for an unreadable model, MissingExtra without transformers."""
    if rounds < 1 or steps < 1:
        raise UserError("--rounds and --steps", "must be at least 1", "give positive numbers")
    config, precision = ModelConfig.load(model), getattr(torch, dtype)
    folder = forward or model_for(config.architecture)
    length = prompt_tokens + steps + 1
    weights = _load(model, precision)
    floor = FloorLane(config, weights)
    lanes: list[Lane] = [
        RawLane(folder, config, weights, precision, length),
        *_transformers_lanes(model, precision, length),
        floor,
    ]
    with torch.inference_mode():
        timing = measure(lanes, prompt_tokens, steps, rounds, config.vocab_size)
    return summarise(timing, floor.bytes)


def _load(model: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    checkpoint = Checkpoint(model)
    return {name: torch.from_numpy(checkpoint.float32(name).copy()).to(dtype) for name in checkpoint.names}


def _transformers_lanes(model: Path, dtype: torch.dtype, length: int) -> list[TransformersLane]:
    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError:
        raise MissingExtra("transformers", "dev") from None
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    variants = (("dynamic", "sdpa"), ("dynamic", "eager"), ("static", "sdpa"))
    return [TransformersLane(loaded, cache, attention, length) for cache, attention in variants]


def main() -> None:
    parser = argparse.ArgumentParser(description="one-user decode of the raw forward beside transformers and the floor")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--forward", type=Path, help="folder of a forward; the raw one of the architecture if absent")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16, help="decoded tokens a lane and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = baseline(args.model, args.forward, args.dtype, args.prompt_tokens, args.steps, args.rounds)
        except UserError as error:
            raise SystemExit(f"tideforge: {error}") from None
    setting = {"model": str(args.model), "dtype": args.dtype, "threads": args.threads}
    if args.json:
        print(json.dumps({**dataclasses.asdict(found), **setting, "environment": environment()}))
        return
    print(f"raw forward          {found.raw_tps:7.2f} tokens/s, {found.share_of_floor:.2f} of its linear layers alone")
    print(f"transformers         {found.transformers_tps:7.2f} tokens/s ({found.transformers})")
    print(f"linear layers alone  {found.floor_tps:7.2f} tokens/s, {found.floor_bytes / 1e6:.0f} MB read a token")
    print(f"raw / transformers   {found.ratio:7.2f}, by round {', '.join(f'{ratio:.2f}' for ratio in found.ratios)}")


if __name__ == "__main__":
    main()
