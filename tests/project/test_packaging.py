"""What is installed works where it is installed: a wheel beside a user's own names, the engine with next to nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tideforge.engine.lab import keeper_status

ROOT = Path(__file__).parents[2]
RANK = [
    "rank", "--launch", "vllm serve Qwen/Qwen3-235B-A22B", "--config", "Qwen3-235B-A22B", "--hardware", "h200-sxm",
    "--gpus", "8", "--json",
]  # fmt: skip
# Refuses every installed top-level package but these and what they need themselves.
BLOCKER = """
import importlib.abc, importlib.metadata, sys
NEEDS = {"torch", "torchgen", "functorch", "triton", "numpy", "safetensors", "typing_extensions", "sympy", "mpmath", "networkx",
         "jinja2", "markupsafe", "fsspec", "filelock", "setuptools", "pkg_resources", "_distutils_hack", "tideforge", "nvidia"}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
BLOCKED = set(importlib.metadata.packages_distributions()) - NEEDS - set(sys.stdlib_module_names)
sys.meta_path.insert(0, Refuse())
"""
TRIAL = """
import contextlib, json, sys, time
from pathlib import Path
from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.evaluate import Bench
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.outcome import Trial
folder = Path(sys.argv[1])
shapes = tuple(RequestShape(6 + i, 3) for i in range(4))
work = Workload(4, shapes, shapes, tuple((7 * i + i // 11) % 250 for i in range(2000)), "p", 0)
(folder / "w.json").write_text(work.to_json())
settings = Settings(folder / "s", tiny_llama(folder / "model"), num_blocks=64)
config = ServiceConfig(settings, folder, Path(sys.argv[2]), folder / "w.json", passes=1, tune=False)
with contextlib.closing(Bench(config)) as bench:
    forward = bench.incumbent.with_file("forward.py", bench.incumbent.files["forward.py"] + "\\n# another\\n")
    done = bench.evaluate(Trial("t", forward.id, "slow", "x", time.time()), forward)
try:
    import duckdb
    blocked = False
except ModuleNotFoundError:
    blocked = True
print(json.dumps([done.outcome, done.message, blocked]))
"""


def test_the_engine_runs_with_torch_triton_numpy_and_safetensors_only(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)  # workers are blocked too: they get PYTHONPATH and little else
    command = [sys.executable, "-c", TRIAL, str(tmp_path), str(ROOT / "engine" / "models" / "llama")]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == ["passed", "", True]
    finally:
        if status := keeper_status(tmp_path / "s"):
            os.kill(int(status["pid"]), signal.SIGTERM)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build/ left in the checkout would bring files that are no longer packaged
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    pip += ["-w", str(folder), str(source)]
    subprocess.run(pip, check=True, timeout=300)
    return next(folder.glob("tideforge-*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_carries_what_it_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "tideforge/data/hardware.json", "tideforge/data/model_shapes.json", "tideforge/data/samples/README.md",
        "tideforge/data/samples/corpus.txt", "tideforge/engine/models/llama/forward.py", "tideforge/engine/models/llama/knobs.json",
        "tideforge/engine/models/moe/paged_attention.py", "tideforge/engine/models/mla/experts.py",  # links in the checkout
    }  # fmt: skip
    assert wanted <= names
    assert any(name.startswith("tideforge/data/sql/") for name in names)
    assert any(name.endswith(".parquet") for name in names)
    assert all(name.startswith(("tideforge/", "tideforge-")) for name in names), "nothing lands beside the package"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_install_ranks_beside_a_users_own_tasks_and_data(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    constraints = str(ROOT / "deployments" / "constraints.txt")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", constraints, str(wheel)]
    subprocess.run(install, check=True, timeout=600)
    folder = tmp_path / "theirs"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "__init__.py").write_text("raise RuntimeError('the data of somebody else')\n")
    (folder / "tasks.py").write_text("raise RuntimeError('the tasks of somebody else')\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for command in ([str(home / "bin" / "tideforge"), *RANK], [python, "-m", "tideforge.flows.cli", *RANK]):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["ranked"]
    torch = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False, cwd=tmp_path)
    assert torch.returncode != 0, "a plain install brings no torch"
