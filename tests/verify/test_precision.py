"""The precision gate finds the error of each cheaper arithmetic, and only that."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tideforge.engine import cheaper, matched
from tideforge.engine.arithmetic import Fused, OneChain, Split
from tideforge.engine.cheaper_names import NAMES
from tideforge.engine.doubles import DOUBLES
from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES
from tideforge.engine.reference_model import ReferenceModel
from tideforge.tasks.verify.sensitivity import Bench

gate = importlib.import_module("tideforge.engine.gates.precision")  # the name in there is the gate's own function
Benches = Callable[[str, str], tuple[Bench, Forward]]
# Written anew, so that gate and cheat share no code.
CHEAT = """

def low(name, w):
    if w.dim() < 2 or "embed" in name:
        return w
    scale = w.float().abs().amax(1, keepdim=True) / {levels}
    return ((w.float() / scale).round() * scale).to(w.dtype)


def cheat(ctx):
    return type(ctx)(**{{**vars(ctx), "weights": {{n: low(n, w) for n, w in ctx.weights.items()}}}})
"""


def int8(raw: Forward, build: str) -> Forward:
    source = raw.files["forward.py"].replace(f"return {build}(ctx)", f"return {build}(cheat(ctx))")
    return raw.with_file("forward.py", source + CHEAT.format(levels=127))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "moe", "deepseek"])
def test_raw_forwards_pass_with_power_at_every_filter(name: str, dtype: str, benches: Benches) -> None:
    bench, raw = benches(name, dtype)
    with bench.probe(raw) as probe:
        figures = GATES["precision"](probe)
    assert set(figures["shares"]) == set(NAMES[dtype])
    assert all(share <= figures["bounds"][name] for name, share in figures["shares"].items())
    assert figures["without_power"] == [], figures["rows_needed"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "build"), [("llama", "Llama"), ("deepseek", "DeepSeek")])
def test_weights_in_eight_bits_are_caught_by_name(name: str, build: str, dtype: str, benches: Benches) -> None:
    bench, raw = benches(name, dtype)
    said = bench.run(int8(raw, build), ["precision"])["precision"]
    assert re.match(r"(weights|head):int8g?: [\d.]+ of the error that it makes shows", said), said


def test_keys_and_values_in_eight_bits_are_caught_by_name(benches: Benches) -> None:
    bench, raw = benches("llama", "bfloat16")
    source = raw.files["forward.py"]
    for name in "kv":
        source = source.replace(
            f"index_copy_(0, slots, {name})", f"index_copy_(0, slots, {name}.to(torch.float8_e4m3fn).to({name}.dtype))"
        )
    said = bench.run(raw.with_file("forward.py", source), ["precision"])["precision"]
    assert said.startswith("kv:fp8u: "), said


def test_arithmetic_in_half_the_bits_under_fp32_is_caught(benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    source = raw.files["forward.py"].replace("return Llama(ctx)", "return Llama(cheat(ctx))") + (
        "\n\ndef cheat(ctx):\n"
        "    half = {n: w.bfloat16().to(w.dtype) for n, w in ctx.weights.items()}\n"
        "    return type(ctx)(**{**vars(ctx), 'weights': half})\n"
    )
    said = bench.run(raw.with_file("forward.py", source), ["precision"])["precision"]
    assert said.startswith("weights:bfloat16: "), said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cheat_shows_all_of_its_error_and_another_order_none(
    dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = ReferenceModel(DOUBLES["llama"](tmp_path_factory.mktemp("filters")))
    tokens, precision = [(7 * i + i // 11) % 250 for i in range(120)], getattr(torch, dtype)

    def run(how: cheaper.Arithmetic) -> np.ndarray:
        return np.asarray(model.forward(tokens, range(8, 120), None, how).logits.numpy())

    base = run(cheaper.arithmetic("", dtype))
    orders = [matched.centred(run(cheaper.arithmetic(f"order:{seed}", dtype)) - base) for seed in (1, 2)]
    for name in NAMES[dtype]:
        error = matched.centred(run(cheaper.arithmetic(name, dtype)) - base)
        caught = matched.reading(error, orders, error)
        assert caught is not None and caught.share == pytest.approx(1)
        for honest in (OneChain(precision, 3), Split(precision, 4), Fused(precision, 5)):
            passed = matched.reading(matched.centred(run(honest) - base), orders, error)
            assert passed is not None and abs(passed.share) < matched.HALF / 2, (name, type(honest).__name__)


def test_a_row_that_the_cheaper_arithmetic_leaves_alone_says_nothing() -> None:
    cheap = np.array([[1.0, -1.0], [0.0, 0.0]])
    assert matched.shares(np.ones((2, 2)) * [0.5, -0.5], cheap).tolist() == [0.5]
    assert matched.reading(cheap, [cheap], np.zeros((2, 2))) is None


def test_names_are_known_and_others_refused() -> None:
    x = torch.linspace(-3, 3, 256).reshape(2, 128)
    for name in {name for names in NAMES.values() for name in names}:
        how = cheaper.Cheaper(name, "float32")
        assert how.scheme is not None
        rounded = how.scheme(x)
        assert not torch.equal(rounded, x)
        torch.testing.assert_close(rounded, x, atol=0.25, rtol=0.1)
        torch.testing.assert_close(how.scheme(rounded), rounded, atol=1e-6, rtol=1e-6)
    for wrong in ("weights:int3", "sums:int8", "int8"):
        with pytest.raises(ValueError, match="no cheaper arithmetic"):
            cheaper.Cheaper(wrong, "float32")


def test_rounds_go_on_while_a_filter_can_still_become_sharp() -> None:
    def reading(bound: float) -> matched.Reading:
        return matched.Reading(0.0, 0.0, bound, 48)

    assert gate.enough({"a": reading(0.1)}, 1.0, 1)
    assert not gate.enough({"a": reading(0.1), "b": reading(0.3)}, 1.0, 15)
    assert not gate.enough({"b": reading(3.0)}, 1.0, gate.FEW - 1)
    assert gate.enough({"b": reading(3.0)}, 1.0, gate.FEW)  # in all rounds it would come to 1.5
    assert not gate.enough({"b": reading(0.9), "c": reading(3.0)}, 1.0, gate.FEW)
