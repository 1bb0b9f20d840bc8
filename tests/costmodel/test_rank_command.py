"""`tideforge rank` and the node: from files, without torch, with errors as one line."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tideforge.costmodel.predict import Traffic
from tideforge.costmodel.question import question
from tideforge.costmodel.rank import rank
from tideforge.data.logs import find_logs
from tideforge.data.profile import make_profile, profile_logs
from tideforge.data.readers import read_logs
from tideforge.errors import UserError
from tideforge.flows.cli import main
from tideforge.flows.commands.rank import rank as command
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.rank import middle, traffic_of
from tideforge.tasks.rank import rank as node
from tideforge.tasks.store import Run

LOG = "sample:azure_conv_2023"
MOE = ["--launch", "vllm serve Qwen/Qwen3-235B-A22B -tp 8", "--hardware", "h200-sxm", "--gpus", "8"]


def endpoint_file(folder: Path, **changes: object) -> Path:
    path = folder / "endpoint.yaml"
    fields = dict(
        name="small",
        model="SmolLM2-135M-Instruct",
        launch="tideforge serve --model m --max-num-seqs 16 --max-model-len 2048",
        hardware={"name": "cpu"},
        traffic={"logs": [LOG]},
        state=str(folder / "state"),
    )
    path.write_text(yaml.safe_dump(fields | changes))
    return path


def test_table_shows_layouts_commands_ties_and_refusals():
    shown = CliRunner().invoke(command, MOE, catch_exceptions=False).output
    for part in ("(now)", "= 2", "--tensor-parallel-size", "refused, dcp", "note: a roofline"):
        assert part in shown
    assert re.search(r"\((fitted|spec-sheet|guessed), \d+%\)", shown), "what binds, and how sure that is"


def test_the_table_says_how_much_of_how_many_and_how_good():
    shown = CliRunner().invoke(command, [*MOE, "--top", "3"], catch_exceptions=False).output
    found = json.loads(CliRunner().invoke(command, [*MOE, "--json"], catch_exceptions=False).output)
    assert f"the first 3 of {len(found['ranked'])} legal layouts" in shown and len(found["ranked"]) > 3
    assert "off by more than 10%" in shown and found["typical_error"] == 0.1 and "+-" not in shown


def test_a_misspelt_flag_is_pointed_out_and_kept(capsys: pytest.CaptureFixture[str]):
    launch = "vllm serve Qwen/Qwen3-235B-A22B --tensor-paralel-size 8 --seed 3"
    words = ["rank", "--launch", launch, "--hardware", "h200-sxm", "--gpus", "8"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert err == "tideforge: unknown flag --tensor-paralel-size, did you mean --tensor-parallel-size?\n"
    assert "kept as they are: --tensor-paralel-size\n" in out
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["not_understood"] == {"--tensor-paralel-size": "--tensor-parallel-size"}


def test_json_from_a_log_without_torch():
    """In a process of its own, where an import of a heavy package would be seen."""
    arguments = ["rank", *MOE, "--log", LOG, "--json"]
    code = f"import sys\nfrom tideforge.flows.cli import cli\ncli({arguments!r}, standalone_mode=False)\n"
    code += "print(sorted({'torch', 'prefect', 'mlflow'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    answer, heavy = ran.stdout.splitlines()
    assert heavy == "[]"
    found = json.loads(answer)
    assert found["ranked"] and found["traffic"]["source"].startswith("profile ")


def test_endpoint_on_the_cpu_has_one_layout(tmp_path: Path):
    shown = CliRunner().invoke(command, ["--endpoint", str(endpoint_file(tmp_path)), "--json"], catch_exceptions=False)
    found = json.loads(shown.output)
    assert [entry["layout"] for entry in found["ranked"]] == ["tp1"] and found["precision"]["common"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--endpoint"),
        (["--launch", "vllm serve Qwen3-8B"], "--hardware"),
        (["--launch", "vllm serve Qwen3-8B", "--hardware", "h20o"], "h200-sxm"),
        (["--launch", "vim serve", "--hardware", "h200"], "vim serve"),
        (["--launch", "vllm serve x", "--hardware", "h200", "--config", "none/config.json"], "none/config.json"),
        (["--launch", "vllm serve Qwen3-8B", "--hardware", "h200", "--log", "none.parquet"], "none.parquet"),
        (["--endpoint", "none.yaml"], "none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["rank", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and named in said and said.count("\n") == 1


def profiled(folder: Path) -> Run:
    run = Run.create(folder, "night")
    made = make_profile(read_logs(find_logs([LOG])).db)
    run.finish("profile", {}, {"profile": run.write_bytes("profile", ".json", made.to_json())})
    return run


def test_node_writes_layouts_and_is_not_run_again(tmp_path: Path):
    run, endpoint = profiled(tmp_path), Endpoint.load(endpoint_file(tmp_path))
    manifest = node(run, endpoint)
    layouts = run.read_json(manifest, "layouts")
    assert manifest.extra["layout"] == "unchanged" and manifest.extra["recommended"] == "tp1"
    assert len(layouts["ranked"]) == manifest.extra["legal"] == 1
    assert node(run, endpoint).started == manifest.started
    other = Endpoint.load(endpoint_file(tmp_path, hardware={"name": "h200", "gpus": 2}))
    assert node(run, other).extra["rejected"] > 0


def test_node_needs_a_profile(tmp_path: Path):
    with pytest.raises(UserError, match="profile has not run"):
        node(Run.create(tmp_path, "night"), Endpoint.load(endpoint_file(tmp_path)))


def test_traffic_of_a_profile():
    made = make_profile(read_logs(find_logs([LOG])).db)
    traffic = traffic_of(made)
    assert traffic.prompt_tokens == made.prompt.mean and traffic.longest_tokens >= made.context.mean


def test_a_profile_of_one_length_is_priced_as_that_length():
    one = Traffic(1000, 100, 8)
    same = dataclasses.replace(one, prompts=((0.25, 1000.0), (0.75, 1000.0)), decode_context=one.context)
    predictions = [
        ranked.prediction
        for traffic in (one, same)
        for ranked in rank(question("vllm serve m", "Qwen3-8B", "h200", 2, 1, traffic)).ranked[:1]
    ]
    assert predictions[0].output_tokens_per_s == pytest.approx(predictions[1].output_tokens_per_s)
    assert predictions[0].ttft_ms == pytest.approx(predictions[1].ttft_ms)


def test_the_joint_distribution_counts_and_not_its_means_alone():
    """Half the prompts are long. Where the long ones have the long answers, most tokens are decoded behind a long context."""
    groups = {}
    for name, cells in {"together": ((20, 20, 50), (60, 40, 50)), "crossed": ((20, 40, 50), (60, 20, 50))}.items():
        prompt, output = (sum(middle(cell[at]) * cell[2] for cell in cells) / 100 for at in (0, 1))
        base = profile_logs(["sample:azure_conv_2023"])
        made = base.model_copy(
            update={
                "joint": cells,
                "prompt": base.prompt.model_copy(update={"mean": prompt}),
                "output": base.output.model_copy(update={"mean": output}),
            }
        )
        groups[name] = traffic_of(made)
    together, crossed = groups["together"], groups["crossed"]
    assert (together.prompt_tokens, together.output_tokens) == (crossed.prompt_tokens, crossed.output_tokens)
    assert together.prompts == crossed.prompts and sum(share for share, _ in together.prompts) == pytest.approx(1)
    assert together.decode_context > 10 * crossed.decode_context
    assert sum(share * tokens for share, tokens in crossed.prompts) == pytest.approx(crossed.prompt_tokens)
