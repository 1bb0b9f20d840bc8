from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab, keeper_status

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lab(tiny, tmp_path_factory, end_keeper):
    lab = Lab(Settings(state=tmp_path_factory.mktemp("lab"), model=tiny, num_blocks=64))
    end_keeper(lab.settings.state)
    assert lab.weights_sha256  # starts the keeper
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def end_keeper():
    """Ends the keeper of a state folder when the module is done: call it with the folder."""
    states: list[Path] = []
    yield states.append
    for state in states:
        if (status := keeper_status(state)) is not None:
            os.kill(status["pid"], signal.SIGTERM)


@pytest.fixture(scope="session")
def plain() -> Forward:
    return Forward.load(LLAMA)
