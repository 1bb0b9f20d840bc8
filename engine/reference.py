"""The reference in a process of its own, and the client that asks it. The client imports no torch.

Quality is always measured against the checkpoint's plain fp32 forward, never against the incumbent: small losses would
add up night by night. `python -m tideforge.engine.reference --fd N --model DIR` serves one socket until it closes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tideforge.engine import compare, limits, protocol
from tideforge.engine.model_config import ModelConfig
from tideforge.errors import PeerGone, ProtocolError, UserError

if TYPE_CHECKING:
    from tideforge.engine.arithmetic import Arithmetic
    from tideforge.engine.reference_model import ReferenceModel

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 900.0
ORDERS = 3  # reduction orders that a noise measurement tries
NOISE_TOKENS = 64  # rows that it looks at, one sequence
TOGETHER = 2048  # tokens of sequences that are scored in one forward
Score = tuple[np.ndarray, np.ndarray, np.ndarray]


class Reference:
    """A running reference process. Thread-safe: one question at a time. Close it to end the process."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, model: Path) -> None:
        self.model = model
        self.process, self._sock, self._lock = process, sock, threading.Lock()
        self._seed: int | None = None

    @classmethod
    def start(cls, model: Path, state: Path | None = None, threads: int = 1, device: str = "cpu") -> Reference:
        """Starts the process and waits until the model is open. Its log is `<state>/logs/reference.log`.

        Raises UserError when the model cannot be read.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [
            sys.executable,
            "-m",
            "tideforge.engine.reference",
            "--fd",
            str(theirs.fileno()),
            "--model",
            str(model),
            "--device",
            device,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        log_path = Path(os.devnull) if state is None else state / "logs" / "reference.log"
        if state is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log_path.open("ab") as log:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip
        reference = cls(process, ours, model)
        try:
            reference._receive(START_TIMEOUT_S)
        except BaseException:
            reference.close()
            raise
        return reference

    @functools.cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.load(self.model)

    def score(self, tokens: Sequence[int], start: int, layers: range | None = None) -> Score:
        """Teacher-forced on the chain itself: for tokens[start:], each [T'], the reference's maximum logit, its logit of
        the emitted token, and the token that it prefers. `start` >= 1."""
        return self.scores([(tokens, start)], layers)[0]

    def scores(self, chains: Sequence[tuple[Sequence[int], int]], layers: range | None = None) -> list[Score]:
        """`score` of several (tokens, start), computed together: weights are upcast once for all of them."""
        if not all(1 <= start < len(tokens) for tokens, start in chains):
            raise ValueError("score needs a token before the first scored one, and one to score")
        answers: list[Score] = []
        while chains:
            ends = np.cumsum([len(tokens) for tokens, _ in chains])
            count = max(1, int(np.searchsorted(ends, TOGETHER, side="right")))
            answers += self._score_together(chains[:count], layers)
            chains = chains[count:]
        return answers

    def _score_together(self, chains: Sequence[tuple[Sequence[int], int]], layers: range | None) -> list[Score]:
        lengths, starts = [len(tokens) for tokens, _ in chains], [start for _, start in chains]
        header = {"type": "score", "lengths": lengths, "starts": starts}
        arrays = self._ask(header, [token for tokens, _ in chains for token in tokens], layers)
        cuts = np.cumsum(lengths)[:-1] - np.cumsum(starts)[:-1]
        parts = [np.split(arrays[name], cuts) for name in ("maximum", "emitted", "argmax")]
        return list(zip(*parts, strict=True))

    def logits(
        self, tokens: Sequence[int], rows: Sequence[int] | None = None, layers: range | None = None
    ) -> np.ndarray:
        """fp32 [len(rows), V]; row i follows tokens[: i + 1]. All rows if None."""
        wanted = None if rows is None else [int(row) for row in rows]
        return self._ask({"type": "logits", "rows": wanted}, tokens, layers)["logits"]

    def after(
        self,
        sequences: Sequence[Sequence[int]],
        start: int | Sequence[int],
        layers: range | None = None,
        cheaper: str | None = None,
        dtype: str = "float32",
    ) -> np.ndarray:
        """The logits that tokens from `start` (of all, or one each) on follow, of sequences computed together: fp32 [rows, V].

        `cheaper`: what is rounded first, at an endpoint of `dtype`, or another order of its sums (engine/cheaper.py).
        """
        lengths = [len(sequence) for sequence in sequences]
        starts = [start] * len(lengths) if isinstance(start, int) else list(start)
        header = {"type": "after", "lengths": lengths, "starts": starts, "arithmetic": [cheaper, dtype]}
        return self._ask(header, [token for sequence in sequences for token in sequence], layers)["logits"]

    def kv(self, tokens: Sequence[int], layers: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Keys (rotated) and values of every token, fp32 [L, T, H_kv, D]."""
        arrays = self._ask({"type": "kv"}, tokens, layers)
        return arrays["keys"], arrays["values"]

    def on_pages(
        self, tokens: Sequence[int], start: int, keys: np.ndarray, values: np.ndarray, layers: range | None = None
    ) -> np.ndarray:
        """fp32 [len(tokens) - start, V]: the logits that follow tokens[start:], on K and V of the positions before `start` as they
        are given, fp32 [L, start, heads, dim], as a cache holds them (contract.KVGroup); those of later positions are computed."""
        return self._on_pages({"type": "on_pages"}, tokens, start, keys, values, layers).arrays["logits"]

    def orders_on_pages(
        self,
        dtype: str,
        tokens: Sequence[int],
        start: int,
        keys: np.ndarray,
        values: np.ndarray,
        layers: range | None = None,
    ) -> np.ndarray:
        """`on_pages` in ORDERS other reduction orders, rounded to `dtype`: [ORDERS, len(tokens) - start, V]."""
        header = {"type": "orders_on_pages", "dtype": dtype}
        return self._on_pages(header, tokens, start, keys, values, layers).arrays["logits"]

    def _on_pages(
        self,
        header: Mapping[str, Any],
        tokens: Sequence[int],
        start: int,
        keys: np.ndarray,
        values: np.ndarray,
        layers: range | None,
    ) -> protocol.Message:
        if not 0 <= start < len(tokens) or not keys.shape[1] == values.shape[1] == start:
            raise ValueError("on_pages needs a token to compute, and K and V of all that come before it")
        return self._exchange(header, tokens, layers, {"keys": keys, "values": values})

    def noise(self, dtype: str, tokens: Sequence[int] | None = None, layers: range | None = None) -> compare.Noise:
        """What reduction order at `dtype` does to this model, on the first 64 of `tokens` (seeded ids if None)."""
        header = {"type": "noise", "dtype": dtype}
        answer = self._exchange(header, [] if tokens is None else tokens[:NOISE_TOKENS], layers)
        raw = answer.header["noise"]
        return compare.Noise(**{**raw, "key_max": tuple(raw["key_max"]), "value_max": tuple(raw["value_max"])})

    def bounds(self, dtype: str, tokens: Sequence[int] | None = None, layers: range | None = None) -> compare.Bounds:
        return limits.bounds(self.noise(dtype, tokens, layers), limits.kind(self.config))

    def bound(self, dtype: str, tokens: Sequence[int] | None = None, layers: range | None = None) -> float:
        """How far below the reference's maximum an emitted token may lie, in logits; derived in compare.py."""
        return self.bounds(dtype, tokens, layers).logit_gap

    def perturbed(self, seed: int) -> Reference:
        """The same process, asked about the weights that `seed` changes (perturb.py). Close this one, not that."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _ask(self, header: Mapping[str, Any], tokens: Sequence[int], layers: range | None) -> dict[str, np.ndarray]:
        return self._exchange(header, tokens, layers).arrays

    def _exchange(
        self,
        header: Mapping[str, Any],
        tokens: Sequence[int],
        layers: range | None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> protocol.Message:
        span = None if layers is None else [layers.start, layers.stop]
        with self._lock:
            sent = {"tokens": np.asarray(tokens, np.int64), **(arrays or {})}
            protocol.send(self._sock, {**header, "layers": span, "seed": self._seed}, sent)
            return self._receive(CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> protocol.Message:
        answer = protocol.recv(self._sock, timeout_s)
        if answer.type == "user_error":
            raise UserError(*(str(part) for part in answer.header["parts"]))
        if answer.type == "error":
            raise ProtocolError(f"reference: {answer.header['message']}")
        return answer


class Models:
    """The checkpoint's model, and that of the seed that was asked about last."""

    def __init__(self, plain: ReferenceModel) -> None:
        self.plain = plain
        self.seed: int | None = None
        self.other: ReferenceModel | None = None

    def under(self, seed: int | None) -> ReferenceModel:
        if seed is None:
            return self.plain
        if self.other is None or self.seed != seed:
            self.other, self.seed = None, seed  # the last one's memory is free before the next takes any
            self.other = self.plain.perturbed(seed)
        return self.other


def answer(model: ReferenceModel, message: protocol.Message) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """One question -> (header, arrays)."""
    head, tokens = message.header, message.arrays["tokens"].tolist()
    layers = None if head["layers"] is None else range(*head["layers"])
    if message.type == "score":
        return {"type": "score"}, score(model, tokens, head["lengths"], head["starts"], layers)
    if message.type == "logits":
        return {"type": "logits"}, {"logits": model.forward(tokens, head["rows"], layers).logits.cpu().numpy()}
    if message.type == "after":
        return {"type": "after"}, {"logits": after(model, tokens, head, layers)}
    if message.type == "kv":
        result = model.forward(tokens, [], layers)
        return {"type": "kv"}, {"keys": result.keys.cpu().numpy(), "values": result.values.cpu().numpy()}
    if message.type == "on_pages":
        return {"type": "on_pages"}, {"logits": on_pages(model, message, layers)}
    if message.type == "orders_on_pages":
        runs = [on_pages(model, message, layers, order) for order in other_orders(head["dtype"])]
        return {"type": "orders_on_pages"}, {"logits": np.stack(runs)}
    if message.type == "noise":
        return {"type": "noise", "noise": dataclasses.asdict(measure_noise(model, head["dtype"], tokens, layers))}, {}
    raise ProtocolError(f"the reference does not know {message.type!r}")


def score(
    model: ReferenceModel, tokens: list[int], lengths: list[int], starts: list[int], layers: range | None
) -> dict[str, np.ndarray]:
    """Of sequences one behind another: what Reference.score says of each, one behind another."""
    sequences, rows = parts(tokens, lengths, starts)
    logits = model.together(sequences, rows, layers).logits
    maximum, argmax = logits.max(1)
    chosen = logits.new_tensor([tokens[row + 1] for row in rows], dtype=argmax.dtype)
    found = {"maximum": maximum, "emitted": logits.gather(1, chosen[:, None])[:, 0], "argmax": argmax}
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}


def on_pages(
    model: ReferenceModel, message: protocol.Message, layers: range | None, arithmetic: Arithmetic | None = None
) -> np.ndarray:
    """What Reference.on_pages says."""
    import torch

    keys, values = (
        torch.from_numpy(message.arrays[name].astype(np.float32)).to(model.device) for name in ("keys", "values")
    )
    return model.on_pages(message.arrays["tokens"].tolist(), keys, values, layers, arithmetic).cpu().numpy()


def parts(tokens: list[int], lengths: list[int], starts: list[int]) -> tuple[list[list[int]], list[int]]:
    """Sequences one behind another -> each of them, and the rows of all that the tokens from each one's `start` follow."""
    ends = list(itertools.accumulate(lengths))
    sequences = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    places = [range(end - length + start, end) for end, length, start in zip(ends, lengths, starts, strict=True)]
    return sequences, [place - 1 for each in places for place in each]


def after(model: ReferenceModel, tokens: list[int], head: Mapping[str, Any], layers: range | None) -> np.ndarray:
    """What Reference.after asks for."""
    from tideforge.engine.cheaper import arithmetic

    sequences, rows = parts(tokens, head["lengths"], head["starts"])
    name, dtype = head["arithmetic"]
    return (
        model.together(sequences, rows, layers, None if name is None else arithmetic(name, dtype)).logits.cpu().numpy()
    )


def other_orders(dtype: str) -> list[Arithmetic]:
    """ORDERS of them, with results rounded to `dtype`."""
    import torch

    from tideforge.engine.arithmetic import Reordered

    return [Reordered(getattr(torch, dtype), seed) for seed in range(ORDERS)]


def measure_noise(model: ReferenceModel, dtype: str, tokens: Sequence[int], layers: range | None) -> compare.Noise:
    """Runs the model in fp32 and in ORDERS other reduction orders at `dtype`."""
    from tideforge.engine.arithmetic import Arithmetic
    from tideforge.engine.reference_model import as_numpy

    if not tokens:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, NOISE_TOKENS).tolist()

    def run(arithmetic: Arithmetic) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return as_numpy(model.forward(tokens, None, layers, arithmetic))

    base = run(Arithmetic())
    return compare.measure(dtype, base, [run(order) for order in other_orders(dtype)])


def serve(sock: socket.socket, folder: Path, device: str = "cpu") -> None:
    """Answers until the peer is gone. A question that fails is answered with the reason; the next one is served."""
    from tideforge.engine.reference_model import ReferenceModel

    try:
        models = Models(ReferenceModel(folder, device))
    except UserError as error:
        protocol.send(sock, {"type": "user_error", "parts": [error.thing, error.problem, error.remedy]})
        return
    protocol.send(sock, {"type": "ready"})
    while True:
        try:
            message = protocol.recv(sock)
        except PeerGone:
            return
        try:
            header, arrays = answer(models.under(message.header.get("seed")), message)
        except UserError as error:
            header, arrays = {"type": "user_error", "parts": [error.thing, error.problem, error.remedy]}, {}
        except (ProtocolError, ValueError, IndexError, KeyError, RuntimeError) as error:
            header, arrays = {"type": "error", "message": f"{type(error).__name__}: {error}"}, {}
        protocol.send(sock, header, arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description="answer questions about a checkpoint's plain fp32 forward")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the one who asks")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    import torch

    if args.device != "cpu":
        torch.cuda.set_device(torch.device(args.device).index or 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with socket.socket(fileno=args.fd) as sock:
        serve(sock, args.model, args.device)


if __name__ == "__main__":
    main()
