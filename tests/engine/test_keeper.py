"""What the keeper holds of random weights: the values of a written checkpoint, in place, and again after a store."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tideforge.engine import device, memory, random_weights, segment, sockets
from tideforge.engine.config import Settings
from tideforge.engine.keeper import Keeper
from tideforge.engine.keepers import connect_keeper, keeper_status, retire_keepers
from tideforge.engine.lab import Lab
from tideforge.engine.random_weights import RandomWeights, describe, write
from tideforge.engine.segment import DeviceSegment, Segment, checksum
from tideforge.engine.stored import open_folder
from tideforge.engine.weights import fingerprint
from tideforge.engine.worker import map_weights
from tideforge.errors import ProtocolError, UserError

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory that is the host's."""
    monkeypatch.setattr(
        device,
        "allocate",
        lambda size, place: (memory.create_segment("fake", size), torch.empty(size, dtype=torch.uint8)),
    )
    monkeypatch.setattr(random_weights, "kind_of", lambda place: "fake")


def held(lab: Lab) -> dict[str, torch.Tensor]:
    """As a worker maps them."""
    answer = lab._ask_weights()
    assert len(answer.fds) == 1
    return map_weights(answer.fds[0], answer.header["bytes"], answer.header["entries"], DTYPES[lab.settings.dtype], CPU)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_keeper_of_its_own_process_holds_what_the_reference_draws(dtype, tmp_path, end_keeper) -> None:
    model, state = describe(tmp_path / "m", "moe-tiny", 5), tmp_path / "s"
    end_keeper(state)
    stored = open_folder(model)
    with contextlib.closing(Lab(Settings(state, model, dtype=dtype))) as lab:
        weights = held(lab)
        assert list(weights) == stored.names and len(lab.weights_sha256) == 64 and lab.weights_intact()
        for name, tensor in weights.items():
            assert torch.equal(tensor, stored.tensor(name, CPU).to(DTYPES[dtype])), name


def test_the_hash_says_which_weights_they_are(tmp_path) -> None:
    def sha256(name: str, shape: str, seed: int, dtype: str = "float32", layers: int | None = None) -> str:
        return Keeper(describe(tmp_path / name, shape, seed, layers), dtype).sha256

    one = sha256("a", "llama-tiny", 0)
    assert one == sha256("b", "llama-tiny", 0)  # whatever the folder
    others = [
        sha256("c", "llama-tiny", 1), sha256("d", "llama-tiny", 0, "bfloat16"), sha256("e", "llama-tiny", 0, layers=1),
        sha256("f", "moe-tiny", 0),
    ]  # fmt: skip
    assert len({one, *others}) == 5


@pytest.mark.parametrize("make", [describe, write])
def test_a_store_into_device_memory_is_seen_and_undone(make: Callable[..., Path], tmp_path, fake_device) -> None:
    model = make(tmp_path / "m", "llama-tiny", 2)
    keeper = Keeper(model, "bfloat16", "cuda")
    assert isinstance(keeper.weights, DeviceSegment)
    pages = keeper.weights.pages
    assert len(keeper.weights.fds) == (1 if make is describe else 2)  # no mirror of what can be drawn
    stored = open_folder(model)
    for entry in keeper.entries:
        found = pages[entry.offset : entry.offset + entry.bytes].view(torch.bfloat16).reshape(entry.shape)
        assert torch.equal(found, stored.tensor(entry.name, CPU))
    before = pages.clone()
    assert keeper.answer({"type": "intact"})[0]["intact"]
    for at in (0, len(pages) // 2, len(pages) - 1):
        pages[at] ^= 1
        assert not keeper.answer({"type": "intact"})[0]["intact"]
        assert torch.equal(pages, before)
        assert keeper.answer({"type": "intact"})[0]["intact"]
    assert keeper.loads == 1


@pytest.mark.parametrize("make", [describe, write])
def test_experts_lie_at_equal_distances(make: Callable[..., Path], tmp_path) -> None:
    keeper = Keeper(make(tmp_path / "m", "moe-tiny"), "bfloat16")
    places = {entry.name: entry.offset for entry in keeper.entries}
    sizes = {entry.name: entry.bytes for entry in keeper.entries}
    for part in ("gate_proj", "up_proj", "down_proj"):
        found = [places[f"model.layers.1.mlp.experts.{expert}.{part}.weight"] for expert in range(16)]
        assert {b - a for a, b in itertools.pairwise(found)} == {3 * 48 * 64 * 2}
    ordered = sorted(places, key=places.__getitem__)
    assert all(places[a] + sizes[a] <= places[b] for a, b in itertools.pairwise(ordered))
    assert places[ordered[-1]] + sizes[ordered[-1]] <= keeper.size < sum(sizes.values()) + 64 * len(sizes)


def test_what_cannot_be_written_again_is_an_error(fake_device) -> None:
    values = iter(range(1, 9))

    def fill(pages: torch.Tensor) -> None:
        pages.fill_(next(values))

    unsteady = DeviceSegment("w", 64, "cuda", fill)
    unsteady.publish()
    assert unsteady.restore()
    unsteady.pages[3] = 0
    with pytest.raises(ProtocolError, match="cannot be restored"):
        unsteady.restore()


def test_drawn_host_memory_is_sealed() -> None:
    def fill(pages: torch.Tensor) -> None:
        pages.fill_(7)

    made = Segment("w", 4096, fill)
    made.publish()
    assert os.pread(made.fds[0], 4097, 0) == bytes([7]) * 4096
    with pytest.raises(PermissionError):
        mmap.mmap(made.fds[0], 4096)
    assert made.restore()
    made.close()


def test_a_checksum_counts_every_bit_and_its_place(monkeypatch) -> None:
    monkeypatch.setattr(segment, "WORDS", 16)  # of 64: several parts
    torch.manual_seed(0)
    pages = torch.randint(0, 256, (512,), dtype=torch.uint8)
    words = [int.from_bytes(bytes(pages[at : at + 8].tolist()), "little") for at in range(0, 512, 8)]
    assert checksum(pages) == sum(word * (2 * place + 1) for place, word in enumerate(words)) % (1 << 64)
    before = checksum(pages)
    for at in range(512):
        pages[at] ^= 1 << at % 8
        assert checksum(pages) != before
        pages[at] ^= 1 << at % 8
    assert checksum(pages) == before != checksum(torch.cat((pages[8:16], pages[:8], pages[16:])))


def test_tensors_are_drawn_into_the_segment_and_nowhere_else(tmp_path, fake_device, monkeypatch) -> None:
    """However large the model: nothing as large as a tensor of several chunks is made beside it."""
    monkeypatch.setattr(random_weights, "CHUNK", 1 << 10)
    made: list[int] = []
    plain = torch.empty

    def counted(*size, **options) -> torch.Tensor:
        made.append(size[0])
        return plain(*size, **options)

    monkeypatch.setattr(random_weights.torch, "empty", counted)
    monkeypatch.setattr(RandomWeights, "tensor", None)
    keeper = Keeper(describe(tmp_path / "m", "moe-tiny"), "float32", "cuda")
    assert len(made) > len(keeper.entries) and max(made[1:]) == 1 << 10


class _FakeKeeping:
    """A keeper's segment in this process."""

    def __init__(self, kept: DeviceSegment) -> None:
        self.kept = kept

    def fetch(self, offset: int, count: int) -> None:
        self.kept.fetch(offset, count)

    def store(self, offset: int, count: int) -> None:
        self.kept.store(offset, count)

    def fill(self, count: int, value: int) -> None:
        self.kept.fill(count, value)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_authority_writes_slots_and_nothing_else(dtype: str, on_device: bool, fake_device) -> None:
    layout = memory.ArenaLayout(2, 3, 4, 2, 3, 5, dtype, 1, 8)
    kept = DeviceSegment("a", layout.bytes, "cuda") if on_device else Segment("a", layout.bytes)
    arena = memory.Arena(layout, kept.fds[:1], _FakeKeeping(kept) if isinstance(kept, DeviceSegment) else None)
    arena.fill(0x11)
    before = {(layer, side): arena.plane(layer, side).copy() for layer in range(2) for side in (False, True)}
    data = np.arange(20, dtype=before[0, True].dtype).reshape(2, 2, 5)
    arena.store(1, True, [11, 5], data)
    for (layer, side), old in before.items():
        new = arena.plane(layer, side).reshape(12, 2, -1)
        expected = old.reshape(12, 2, -1).copy()
        if (layer, side) == (1, True):
            expected[[11, 5]] = data
        assert np.array_equal(new, expected)
    if isinstance(kept, DeviceSegment):
        at, size = layout.plane_offset(1, True), layout.plane_bytes(True)
        assert bytes(kept.pages[at : at + size].tolist()) == arena.plane(1, True).tobytes()
    kept.close()


def test_a_keeper_that_ends_while_it_is_asked_is_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "keeper.sock"))
        listener.listen(1)
        ending = threading.Thread(target=lambda: listener.accept()[0].close())
        ending.start()
        assert keeper_status(tmp_path) is None
        ending.join()


def rewritten(model: Path) -> None:
    describe(model, "llama-tiny", 1)


def same(model: Path) -> None:
    describe(model, "llama-tiny", 0)  # the files are new, what they say is not


def touched(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


def grown(model: Path) -> None:
    (model / "another.safetensors").write_bytes(b"")


def unrelated(model: Path) -> None:
    (model / "README.md").write_text("words")


@pytest.mark.parametrize(
    ("make", "change", "differs"),
    [
        (describe, rewritten, True), (describe, same, False), (describe, unrelated, False),
        (write, touched, True), (write, grown, True), (write, unrelated, False),
    ],
)  # fmt: skip
def test_a_fingerprint_is_of_what_says_which_weights_they_are(
    make: Callable[..., Path], change: Callable[[Path], None], differs: bool, tmp_path: Path
) -> None:
    model = make(tmp_path / "m", "llama-tiny")
    before = fingerprint(model)
    change(model)
    assert (fingerprint(model) != before) is differs


def test_a_keeper_of_changed_files_makes_way_unless_it_is_used(tmp_path: Path, end_keeper) -> None:
    model, state = describe(tmp_path / "m", "llama-tiny", 0), tmp_path / "s"
    end_keeper(state)
    settings = Settings(state, model)
    with contextlib.closing(Lab(settings)) as lab:
        old, pid = lab.weights_sha256, keeper_status(state)["pid"]
        rewritten(model)
        with pytest.raises(UserError, match=r"its keeper holds .* as it was; stop what uses it first"):
            connect_keeper(settings)
        with pytest.raises(UserError, match="its keeper is used"):
            retire_keepers(state)
        assert keeper_status(state)["pid"] == pid and lab.weights_intact()
    with contextlib.closing(Lab(settings)) as lab:
        assert lab.weights_sha256 != old and keeper_status(state)["pid"] != pid
    assert retire_keepers(state) == 1 and keeper_status(state) is None and retire_keepers(state) == 0


def test_a_keeper_that_cannot_read_its_model_says_so_itself(tmp_path: Path) -> None:
    model = write(tmp_path / "m", "llama-tiny")
    (model / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"^\S+model\.safetensors: is truncated or no safetensors file; fetch"):
        (tmp_path / "s").mkdir()
        connect_keeper(Settings(tmp_path / "s", model))
    assert keeper_status(tmp_path / "s") is None


def test_a_socket_has_as_long_a_path_as_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 40) / ("er" * 80)
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        sockets.connect(folder / "x.sock")
    for _ in range(2):  # the second one takes the place of the first
        with sockets.listen(folder / "x.sock", 1) as listener, sockets.connect(folder / "x.sock") as sock:
            sock.sendall(b"here")
            with listener.accept()[0] as accepted:
                assert accepted.recv(4) == b"here"
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(folder / "x.sock")
    assert os.stat(folder / "x.sock").st_mode & 0o077 == 0
