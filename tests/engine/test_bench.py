from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tideforge.engine import random_weights
from tideforge.engine.bench import vllm_baseline

SCRIPT = Path(__file__).parents[2] / "engine" / "bench" / "vllm_baseline.py"


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder whose config.json is that of a written checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(random_weights.SHAPES["llama-tiny"]))
    return tmp_path


def run(*args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The script as a user starts it, in an environment that has no vLLM and nothing of this project."""
    command = [sys.executable, "-S", str(SCRIPT), *args]  # -S: no site-packages
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path}, cwd="/")


def test_baseline_names_a_missing_vllm_in_one_line(model) -> None:
    result = run("--model", str(model), "--json")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("vllm: cannot be imported (No module named 'vllm')")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--users", "0"], "--users"),
        (["--users", "1", "64"], "as many as --prompt"),
        (["--output", "1"], "--output"),
        (["--prompt", "2000"], "2048"),
        (["--mode", "eager"], "--mode"),
    ],
)
def test_baseline_refuses_bad_arguments(model, extra: list[str], named: str) -> None:
    result = run("--model", str(model), *extra)
    assert result.returncode == 2
    assert named in result.stderr.splitlines()[-1]


def test_baseline_names_a_folder_without_a_model(tmp_path) -> None:
    result = run("--model", str(tmp_path))
    assert result.returncode == 2
    assert "has no config.json" in result.stderr


FAKE = """
import types

__version__ = "0"
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **options):
        print("noise of an engine that starts")
        compilation = types.SimpleNamespace(
            mode=types.SimpleNamespace(name=str(options.get("compilation_config"))), cudagraph_mode="FULL"
        )
        config = types.SimpleNamespace(
            compilation_config=compilation, scheduler_config=types.SimpleNamespace(async_scheduling=True),
            use_v2_model_runner=True,
        )
        core = types.SimpleNamespace(shutdown=lambda: print("noise of an engine that ends"))
        self.llm_engine = types.SimpleNamespace(vllm_config=config, engine_core=core)

    def generate(self, prompts, params, use_tqdm):
        import time
        time.sleep(0.002 * params.max_tokens)
        out = types.SimpleNamespace(token_ids=[7] * (params.max_tokens - SHORT))
        return [types.SimpleNamespace(outputs=[out]) for _ in prompts]
"""


@pytest.fixture
def fake_vllm(tmp_path):
    """A package that has vLLM's names as the script uses them; each answer lacks `short` tokens."""

    def write(short: int = 0) -> str:
        package = tmp_path / "fake" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"SHORT = {short}\n{FAKE}")
        (package / "envs.py").write_text("VLLM_ENABLE_V1_MULTIPROCESSING = True\n")
        platform = "import types\ncurrent_platform = types.SimpleNamespace(get_device_name=lambda: 'none')\n"
        (package / "platforms.py").write_text(platform)
        (package.parent / "torch.py").write_text("__version__ = '0'\n")
        return str(package.parent)

    return write


def test_baseline_ends_with_one_json_object(model, fake_vllm) -> None:
    args = ["--model", str(model), "--mode", "full-decode", "--users", "3", "1", "--prompt", "4", "5"]
    result = run(*args, "--output", "11", "--repeats", "3", "--json", path=fake_vllm())
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["compilation_mode"] == str(vllm_baseline.MODES["full-decode"]["compilation_config"])
    assert (figures["users_3"]["prompt"], figures["users_1"]["prompt"]) == (4, 5)
    case = figures["users_3"]
    assert len(case["block_s"]) == len(case["first_s"]) == 3
    assert case["decode_tps"] == pytest.approx(3 * case["decode_tps_per_user"])
    assert 0 < case["output_tps"] <= 3 * 11 / 0.022
    assert figures["first_token_s"] > 0


def test_baseline_gives_no_figures_for_short_answers(model, fake_vllm) -> None:
    result = run("--model", str(model), "--users", "2", path=fake_vllm(short=1))
    assert result.returncode == 1
    assert "vLLM gave [0, 0]" in result.stderr
    assert "output_tps" not in result.stdout


def test_decode_rate_is_what_a_block_takes_beyond_its_first_tokens(monkeypatch) -> None:
    """Blocks of 2.0 s whose first tokens take 0.5 s: 30 more tokens in 1.5 s."""
    monkeypatch.setattr(vllm_baseline, "seconds_of", lambda llm, texts, output: 0.5 if output == 1 else 2.0)
    figures = vllm_baseline.measure(None, users=4, prompt=2, output=31, repeats=3, vocabulary=100)
    assert figures["decode_tps_per_user"] == pytest.approx(20.0)
    assert figures["decode_tps"] == pytest.approx(80.0)
    assert figures["output_tps"] == pytest.approx(4 * 31 / 2.0)


def test_written_configs_say_what_other_engines_ask_for() -> None:
    from transformers import AutoConfig

    for shape in random_weights.SHAPES.values():
        config = AutoConfig.for_model(**shape)
        assert config.model_type == shape["model_type"]
        assert str(config.dtype).removeprefix("torch.") == "bfloat16"
        assert config.hidden_act == "silu"
