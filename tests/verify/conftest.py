"""A tiny endpoint's settings and workload, and what a test says of one forward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import DOUBLES, tiny_llama, tiny_moe
from tideforge.engine.forward import Forward
from tideforge.engine.lab import end_keeper
from tideforge.engine.model_config import model_for
from tideforge.engine.reference import Reference
from tideforge.tasks.verify.sensitivity import Bench
from tideforge.tasks.verify.trialled import Trialled

SHAPES = tuple(RequestShape(8, 24) for _ in range(4))
WORK = Workload(4, SHAPES, SHAPES, tuple((7 * i + i // 11) % 250 for i in range(4000)), "p", 0)
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)


@dataclasses.dataclass(frozen=True)
class Place:
    """An endpoint of its own. `plain` is the raw forward of its architecture."""

    settings: Settings
    plain: Forward
    bounds: Bounds

    @classmethod
    def of(cls, folder: Path, model: Path, architecture: str) -> Place:
        settings = Settings(folder / "s", model, num_blocks=64, limits=LIMITS)
        settings.state.mkdir()
        with contextlib.closing(Reference.start(model)) as reference:
            bounds = reference.bounds(settings.dtype, WORK.corpus)
        return cls(settings, Forward.load(model_for(architecture)), bounds)

    @contextlib.contextmanager
    def trialled(self, candidate: Forward, **more: object) -> Iterator[Trialled]:
        made = Trialled(self.settings, self.settings.state, self.plain, candidate, WORK, self.bounds, **more)  # type: ignore[arg-type]
        with contextlib.closing(made):
            yield made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("llama")
    place = Place.of(folder, tiny_llama(folder / "model"), "LlamaForCausalLM")
    yield place
    end_keeper(place.settings.state)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("moe")
    place = Place.of(folder, tiny_moe(folder / "model"), "MixtralForCausalLM")
    yield place
    end_keeper(place.settings.state)


Benches = Callable[[str, str], tuple[Bench, Forward]]


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    """(name of a double, precision) -> its bench and its raw forward."""
    made: dict[tuple[str, str], tuple[Bench, Forward]] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str, dtype: str) -> tuple[Bench, Forward]:
            if (name, dtype) not in made:
                folder: Path = tmp_path_factory.mktemp("bench")
                bench = Bench(DOUBLES[name](folder / "model"), dtype, folder / "s")
                stack.callback(bench.close)
                made[name, dtype] = bench, Forward.load(model_for(bench.lab.config.architecture))
            return made[name, dtype]

        yield get
