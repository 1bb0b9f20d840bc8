"""Training a mixture of experts: the loss falls, transformers reads the checkpoint and agrees, the load is spread."""

from __future__ import annotations

import dataclasses
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tideforge.engine import moe_net, train_text
from tideforge.engine.moe_net import Mixture, Net, Shape
from tideforge.engine.train_moe import UNSEEN, Plan, bits_per_byte, precision, run
from tideforge.errors import UserError

SMALL = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=32, experts=16, experts_per_token=4, expert_width=16)
PLAN = Plan(seconds=600, steps=200, rows=8, context=64, seed=3, measurements=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on a busy machine wait for threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A few steps on an eighth of the sample's text; all of the sample is measured."""
    folder = tmp_path_factory.mktemp("moe")
    text = UNSEEN.read_text()
    packed = folder / "part.txt.xz"
    packed.write_bytes(lzma.compress(text[: len(text) // 8].encode()))
    return folder / "out", run(folder / "out", [packed], PLAN, CPU, SMALL)


def curve(folder: Path) -> list[dict]:
    return json.loads((folder / "training.json").read_text())["curve"]


def test_the_loss_falls_on_text_that_was_held_out(trained: tuple[Path, Net]) -> None:
    points = curve(trained[0])
    assert [point["step"] for point in points] == [0, 100, 200]
    for name in ("part.txt", "corpus.txt"):
        before, between, after = (point["bits_per_byte"][name] for point in points)
        assert 5 < before < 9  # 8 bits are a byte that nothing is known of; a token is more than a byte
        assert after < between < before - 1
        assert after < 4


def test_the_router_uses_many_experts(trained: tuple[Path, Net]) -> None:
    assert min(curve(trained[0])[-1]["experts_used"]) >= 12  # of 16


def test_transformers_reads_the_checkpoint_and_gives_the_same_logits(trained: tuple[Path, Net]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, net = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = UNSEEN.read_text()[:300]
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0].tolist() == train_text.encode(text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, net(ids)[0], atol=2e-5, rtol=0)


def test_the_record_says_what_the_saved_weights_are_worth(trained: tuple[Path, Net]) -> None:
    folder, net = trained
    written = json.loads((folder / "training.json").read_text())
    held = train_text.Held("corpus.txt", torch.tensor(train_text.encode(UNSEEN.read_text())))
    assert written["bits_per_byte"]["corpus.txt"] == bits_per_byte(net, held, PLAN)
    assert written["curve"][-1]["bits_per_byte"] == written["bits_per_byte"]
    assert written["parameters"] == sum(tensor.numel() for tensor in net.checkpoint().values())
    assert written["text_sha256"].keys() == {"part.txt", "corpus.txt"}


def test_the_default_model_has_the_size_that_is_meant() -> None:
    with torch.device("meta"):
        net = Net.__new__(Net)
        nn.Module.__init__(net)
        for layer in range(Shape().layers):
            net.add_module(str(layer), Mixture(Shape()))
    assert Shape().experts == 64 and Shape().experts_per_token == 4
    assert 6e6 < 2 * sum(value.numel() for value in net.parameters()) < 12e6


def plainly(mixture: Mixture, x: Tensor) -> Tensor:
    """One token and one expert at a time."""
    odds = (x @ mixture.gate.weight.T).softmax(-1)
    rows = []
    for token, odds_of in zip(x, odds, strict=True):
        shares, chosen = odds_of.topk(mixture.experts_per_token)
        made = []
        for share, expert in zip(shares / shares.sum(), chosen.tolist(), strict=True):
            gate, up = (token @ mixture.gate_up[expert]).chunk(2)
            made.append(share * ((nn.functional.silu(gate) * up) @ mixture.down[expert]))
        rows.append(torch.stack(made).sum(0))
    return torch.stack(rows)


@pytest.fixture(params=["in turn", "at once"])
def dispatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts one by one, as on a CPU; all in one product, as on a GPU."""
    monkeypatch.setattr(moe_net, "at_once", lambda device: request.param == "at once")


@pytest.mark.usefixtures("dispatch")
def test_dispatch_equals_one_token_and_expert_at_a_time_and_so_do_gradients() -> None:
    mixture = Net(SMALL, seed=1).layers[0].mlp
    x = torch.randn(5, SMALL.hidden, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mine, plain = mixture(x)[0], plainly(mixture, x)
    assert (mixture.load == 0).any()  # experts without a token, too
    torch.testing.assert_close(mine, plain)
    weights = [x, *mixture.parameters()]
    grads = [torch.autograd.grad(made.square().sum(), weights) for made in (mine, plain)]
    for of_mine, of_plain in zip(*grads, strict=True):
        torch.testing.assert_close(of_mine, of_plain, atol=1e-5, rtol=1e-4)


def test_the_balancing_loss_is_1_for_an_even_load_and_grows_when_one_expert_takes_all() -> None:
    mixture = Mixture(dataclasses.replace(SMALL, experts=4, experts_per_token=1))
    with torch.no_grad():
        mixture.gate.weight.copy_(torch.eye(4, SMALL.hidden))
        mixture.gate_up.zero_(), mixture.down.zero_()
    even = torch.eye(4, SMALL.hidden)
    assert mixture(even)[1].item() == pytest.approx(1.0)
    assert mixture.load.tolist() == [1, 1, 1, 1]
    assert mixture(10 * even[:1].expand(4, -1))[1].item() == pytest.approx(4.0, abs=0.01)


@pytest.mark.usefixtures("dispatch")
def test_bf16_products_give_the_same_within_their_precision() -> None:
    net, ids = Net(SMALL, seed=2), torch.arange(96).view(2, 48) + 100
    with torch.autocast("cpu", torch.bfloat16):
        rounded, balance = net(ids)
    (rounded.square().mean() + balance).backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.parameters())
    exact = net(ids)[0]
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 0.05


def test_pieces_are_encoded_as_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = UNSEEN.read_text()[:20000] + "\n\n  déjà\tvu \n"
    whole = train_text.encode(text)
    monkeypatch.setattr(train_text, "PIECE_BYTES", 50)
    assert train_text.encode(text) == whole
    assert int(train_text.token_bytes()[whole].sum()) == len(text.encode())


def test_nothing_held_out_is_trained_on(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("seen " * 980 + "kept " * 20)
    corpus = train_text.load([text], [UNSEEN], CPU, least=64)
    ids = corpus.train.tolist()
    assert [held.name for held in corpus.held] == ["a.txt", "corpus.txt"]
    assert ids + corpus.held[0].ids.tolist() == train_text.encode(text.read_text())
    assert len(corpus.held[0].ids) == len(train_text.encode(text.read_text())) // train_text.HELD_OUT


def test_one_window_in_eight_is_a_chat_that_goes_on() -> None:
    corpus = train_text.Corpus(torch.tensor(train_text.encode(UNSEEN.read_text())), (), {})
    windows = corpus.sample(16, 200, torch.Generator().manual_seed(0))
    assert windows.shape == (16, 201)
    marked = (windows == 1).sum(-1).tolist()
    assert marked == [2, 2] + [0] * 14
    user = train_text.encode("<|im_start|>user\n")
    assert windows[0, : len(user)].tolist() == user


def test_bad_text_is_refused_in_one_line(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UserError, match="tokens to train on"):
        train_text.load([short], [], CPU, least=64)
    (tmp_path / "bad.txt.xz").write_bytes(b"not packed")
    command = [sys.executable, "-m", "tideforge.engine.train_moe", str(tmp_path / "out"), "--device", "cpu"]
    done = subprocess.run([*command, "--text", str(tmp_path / "bad.txt.xz")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "bad.txt.xz: cannot be read as text" in done.stderr and "Traceback" not in done.stderr


def test_a_cpu_trains_in_fp32() -> None:
    with precision(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
