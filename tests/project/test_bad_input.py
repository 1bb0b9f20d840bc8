"""Bad input at the command line: one line that names the thing and the remedy, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tideforge.data.logs import sample_path
from tideforge.flows.cli import main
from tideforge.tasks.endpoint import TRACKING, Endpoint
from tideforge.tasks.machine import settings_for
from tideforge.tasks.verify.plan import Plan

SAMPLE = "sample:azure_conv_2023"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tideforge.engine.doubles import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture
def endpoint_file(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """Writes a good endpoint file with the given fields changed."""

    def write(**changed: Any) -> Path:
        raw = {
            "name": "tiny",
            "model": str(model),
            "launch": f"tideforge serve --model {model}",
            "hardware": {"name": "cpu"},
            "traffic": {"logs": [SAMPLE]},
            "state": str(tmp_path / "s"),
        }
        path = tmp_path / "e.yaml"
        path.write_text(yaml.safe_dump({**raw, **changed}))
        return path

    return write


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "", (out, err)
    assert err.count("\n") == 1 and err.startswith("tideforge: ") and "; " in err, err
    return err


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- traffic logs


def missing(path: Path) -> str:
    return "no traffic log there"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return "is empty"


def without_rows(path: Path) -> str:
    pq.write_table(pq.read_table(sample_path("azure_conv_2023")).slice(0, 0), path)
    return "has no rows"


def truncated(path: Path) -> str:
    raw = sample_path("azure_conv_2023").read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    return "is truncated or damaged"


def wrongly_typed(path: Path) -> str:
    table = pq.read_table(sample_path("azure_conv_2023")).slice(0, 100)
    at = table.schema.get_field_index("prompt_tokens")
    pq.write_table(table.set_column(at, "prompt_tokens", table["prompt_tokens"].cast(pa.string())), path)
    return "prompt_tokens: has type string; write it as int64"


def without_a_column(path: Path) -> str:
    pq.write_table(pq.read_table(sample_path("azure_conv_2023")).drop_columns(["arrival"]), path)
    return "arrival: the column is missing"


LOGS = [missing, empty, without_rows, truncated, wrongly_typed, without_a_column]


@pytest.mark.parametrize("make", LOGS, ids=[make.__name__ for make in LOGS])
def test_a_bad_traffic_log_is_named(
    tmp_path: Path, endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], make: Callable[[Path], str]
) -> None:
    log, out = tmp_path / "log.parquet", tmp_path / "out"
    problem = make(log)
    there = files(tmp_path)
    for words in (["ingest", str(log), "--out", str(out)], ["profile", str(log)]):
        assert all(part in refused(capsys, *words) for part in (str(log), problem))
    assert files(tmp_path) == there
    file = endpoint_file(traffic={"logs": [str(log)]})
    error = refused(capsys, "node", "ingest", "--endpoint", str(file), "--run", "n1")
    assert str(log) in error and problem in error
    left = {path.split("-")[0] for path in files(tmp_path / "s" / "runs" / "n1")}
    assert left <= {"run.json", "endpoint"}, left
    if make is not without_rows:  # its head is good: the night says it, in its first node
        for command in (["recompile", "--local"], ["up"], ["demo"]):
            assert problem in refused(capsys, *command, "--endpoint", str(file))


# --- endpoint files


def field(**changed: Any) -> Callable[[Callable[..., Path]], Path]:
    return lambda write: write(**changed)


def absent(write: Callable[..., Path]) -> Path:
    path = write()
    path.unlink()
    return path


def not_yaml(write: Callable[..., Path]) -> Path:
    path = write()
    path.write_text("name: [tiny")
    return path


ENDPOINTS: dict[str, tuple[Callable[[Callable[..., Path]], Path], str]] = {
    "missing file": (absent, "e.yaml: does not exist"),
    "not YAML": (not_yaml, "e.yaml: cannot be read"),
    "unknown field": (field(speed="high"), "e.yaml: speed: is no known field; known there: name, model, "),
    "unknown field of a part": (
        field(budget={"serch_s": 3}),
        "e.yaml: budget.serch_s: is no known field; known there: search_s, trial_s, ",
    ),
    "unknown field in a list": (
        field(agents=[{"kid": "llm"}]),
        "e.yaml: agents.0.kid: is no known field; known there: kind, name, ",
    ),
    "two agents of one name": (
        field(agents=[{"name": "a"}, {"name": "b"}, {"name": "a"}]),
        "agents: 3 agents, but several are named a",
    ),
    "unknown tracking scheme": (
        field(tracking_uri="bogus://u:word@x"),
        "tracking_uri: has bogus://; MLflow is reached by http, ",
    ),
    "tracking without a scheme": (field(tracking_uri="mlruns"), "tracking_uri: has no scheme"),
    "another precision": (
        field(launch="tideforge serve --model m --dtype float32", precision="bfloat16"),
        "launch: --dtype: is float32, but the endpoint's precision is bfloat16",
    ),
    "another model": (
        field(launch="tideforge serve --model other"),
        "launch: --model: is other, but the endpoint's model is ",
    ),
    "another engine": (field(launch="vllm serve m"), "launch: names vllm, which only `tideforge rank` knows"),
    "unknown objective": (field(objective={"maximize": "joy"}), "objective.maximize: Input should be 'output_tps', "),
    "unknown arrivals": (
        field(objective={"arrivals": "late"}),
        "objective.arrivals: Input should be 'closed' or 'open'",
    ),
    "no pace": (field(objective={"pace": 0}), "objective.pace: Input should be greater than 0"),
    "a pace of nothing": (
        field(objective={"pace": 2}),
        "objective: pace is of open arrivals and of `think_s: traffic`",
    ),
    "pauses twice": (field(objective={"arrivals": "open", "think_s": 1}), "objective: think_s is of closed arrivals"),
    "no pause": (field(objective={"think_s": -1}), "objective.think_s"),
    "no wait": (field(objective={"ttft_p90_ms": -5}), "objective.ttft_p90_ms: Input should be greater than 0"),
    "wrong type": (field(budget={"search_s": "long"}), "budget.search_s"),
    "no number": (field(budget={"trial_s": float("nan")}), "budget.trial_s: Input should be a finite number"),
    "endless": (field(drift={"threshold": float("inf")}), "drift.threshold: Input should be a finite number"),
    "below nothing": (field(objective={"ttft_p90_ms": -5}), "objective.ttft_p90_ms: Input should be greater than 0"),
    "empty prompts": (field(workload={"prompt_tokens": [0, 4]}), "workload.prompt_tokens.0: Input should be greater"),
    "paid back": (
        field(agents=[{"dollars_per_million_input": -1}]),
        "agents.0.dollars_per_million_input: Input should be greater",
    ),
    "a device that is not there": (
        field(search={"devices": ["cpu", "cuda:99"]}),
        "search.devices: names cuda:99, but ",
    ),
    "unknown hardware": (field(hardware={"name": "h20o-sxm"}), "h20o-sxm"),
    "open quote": (field(launch="tideforge serve --model 'm"), "cannot be split"),
    "unknown server": (field(launch="make me fast"), "is of no known server"),
    "bad number": (field(launch="tideforge serve --model m --max-num-seqs many"), "--max-num-seqs"),
    "missing model": (field(model="no/such/model"), "no/such/model"),
    "missing forward": (field(forward="no/such/forward"), "no/such/forward"),
    "missing log": (field(traffic={"logs": ["no/such.parquet"]}), "no/such.parquet"),
}


@pytest.mark.parametrize("command", ["recompile", "up"])
@pytest.mark.parametrize(("make", "named"), ENDPOINTS.values(), ids=ENDPOINTS)
def test_a_bad_endpoint_file_starts_nothing(
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    command: str,
    make: Callable[[Callable[..., Path]], Path],
    named: str,
) -> None:
    file = make(endpoint_file)
    local = ["--local"] if command == "recompile" else []
    assert named in refused(capsys, command, "--endpoint", str(file), *local)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"launch": "vllm serve m"},
        {"precision": "float16", "launch": "tideforge serve --model m --dtype float32"},
        {"tracking_uri": "bogus://x"},
    ],
)
def test_the_server_refuses_an_endpoint_that_contradicts_itself(
    changed: dict[str, str], endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "e.yaml: tracking_uri" in (
        error := refused(capsys, "serve", "--endpoint", str(endpoint_file(**changed)))
    ) or ("launch" in error)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("uri", [f"{scheme}://x" for scheme in (*TRACKING, "postgresql+psycopg2", "mysql+pymysql")])
def test_what_mlflow_takes_is_taken(uri: str, endpoint_file: Callable[..., Path]) -> None:
    assert Endpoint.load(endpoint_file(tracking_uri=uri)).tracking_uri == uri


@pytest.mark.parametrize("dtype", ["float16", "half", "auto"])
def test_words_for_one_precision_agree(dtype: str, endpoint_file: Callable[..., Path], model: Path) -> None:
    file = endpoint_file(precision="float16", launch=f"tideforge serve --model {model} --dtype {dtype}")
    assert settings_for(Endpoint.load(file)).dtype == "float16"


def test_a_verdict_rests_on_8_pairs_unless_the_file_plans_fewer(endpoint_file: Callable[..., Path]) -> None:
    assert Plan.of(Endpoint.load(endpoint_file()).budget).least == 8
    assert Plan.of(Endpoint.load(endpoint_file(budget={"held_out_pairs": 16})).budget).least == 8
    assert Plan.of(Endpoint.load(endpoint_file(budget={"held_out_pairs": 4})).budget).least == 4


# --- paths and words of the command line


@pytest.mark.parametrize(
    "words",
    [
        ["ingest", SAMPLE, "--out", "{file}/sub"],
        ["recompile", "--local", "--no-ship", "--endpoint", "{below}"],
        ["watch", "--local", "--endpoint", "{below}"],
        ["serve", "--endpoint", "{below}"],
        ["up", "--endpoint", "{below}"],
        ["down", "--state", "{file}/sub"],
    ],
    ids=" ".join,
)
def test_a_path_below_a_file_is_named(
    words: list[str],
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "PREFECT" not in name})
    file = tmp_path / "file"
    file.write_text("not a folder")
    below = endpoint_file(state=str(file / "sub"))
    there = files(tmp_path)
    assert str(file) in refused(capsys, *[word.format(file=file, below=below) for word in words])
    assert files(tmp_path) == there


ENGINE = [["start"], ["status"], ["submit", "."], ["trials"], ["stop"]]


@pytest.mark.parametrize("words", ENGINE, ids=" ".join)
@pytest.mark.parametrize("state", ["/dev/null/x", "{file}", "{file}/deep/er"])
def test_a_state_folder_that_is_none_is_named(
    words: list[str],
    state: str,
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = state.format(file=tmp_path / "file")
    there = files(tmp_path)
    error = refused(capsys, "engine", *words, "--endpoint", str(endpoint_file()), "--state", path)
    assert f"{path}: cannot be used (not a directory)" in error
    assert files(tmp_path) == there | {"e.yaml"}


@pytest.mark.parametrize("words", [["status"], ["stop", "--keeper"]], ids=" ".join)
def test_a_state_folders_path_may_be_longer_than_a_sockets(
    words: list[str], tmp_path: Path, endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = endpoint_file(state=str(tmp_path / ("long" * 50)))
    with pytest.raises(SystemExit) as stopped:
        main(["engine", *words, "--endpoint", str(file)])
    assert stopped.value.code == 0, capsys.readouterr().err


def test_a_missing_device_is_named_before_a_missing_profile(
    endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = endpoint_file(search={"devices": ["cuda:99"]})
    assert "search.devices: names cuda:99" in refused(capsys, "engine", "start", "--endpoint", str(file))
    assert not (tmp_path / "s").exists()


def test_requests_longer_than_the_context_are_named(
    tmp_path: Path, model: Path, endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    launch = f"tideforge serve --model {model} --max-model-len 128"
    file = endpoint_file(launch=launch, workload={"prompt_tokens": [150, 160], "output_tokens": 8})
    for node in ("ingest", "profile"):
        with pytest.raises(SystemExit) as stopped:
            main(["node", node, "--endpoint", str(file), "--run", "n1"])
        assert stopped.value.code == 0
    capsys.readouterr()
    error = refused(capsys, "engine", "start", "--endpoint", str(file))
    assert "workload.prompt_tokens: with output_tokens a request is of 168 tokens" in error
    assert "--max-model-len" in error and not (tmp_path / "s" / "engine.sock").exists()


def test_a_full_disk_without_a_path_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tideforge.flows.cli.cli.main", full)
    assert "the disk: cannot be used (no space left on device); free space" in refused(capsys, "rank")


def test_an_error_without_a_path_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the input, and hiding where it came from would help nobody."""

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    monkeypatch.setattr("tideforge.flows.cli.cli.main", lost)
    with pytest.raises(ConnectionResetError):
        main(["rank"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rank", "--gpus", "0"], "tideforge: --gpus: 0 is not in the range x>=1; see `tideforge rank --help`\n"),
        (["rank", "--maximize", "luck"], "tideforge: --maximize: 'luck' is not one of "),
        (
            ["rank", "--gpu", "2"],
            "tideforge: --gpu: no such option (did you mean --gpus, ",
        ),
        (["reject", "run"], "tideforge: --why: is missing; see `tideforge reject --help`\n"),
        (["reject", "run", "--why"], "tideforge: --why: has no value"),
        (["node", "--run", "n", "--endpoint", "e"], "tideforge: NAME: is missing; see `tideforge node --help`\n"),
        (["rank", "--users", "nan"], "tideforge: --users: nan is not a finite number"),
        (["rank", "--ttft-limit-ms", "inf"], "tideforge: --ttft-limit-ms: inf is not a finite number"),
        (["serve"], "tideforge: --endpoint: is missing; see `tideforge serve --help`\n"),
        (["rnk"], "tideforge: tideforge: No such command 'rnk'"),
    ],
)
def test_clicks_own_complaints_have_the_same_form(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *words).startswith(line)


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["rank", "--help"], 0), ([], 2)])
def test_help_and_version_are_not_errors(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert stopped.value.code == code and ("Usage:" in out + err or "version" in out)


def test_the_server_refuses_a_missing_model(
    endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = endpoint_file(model="no/such/model")
    assert "no/such/model" in refused(capsys, "serve", "--endpoint", str(file))
    assert not (tmp_path / "s" / "server.json").exists()


# --- rank


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--launch", "vllm serve Qwen3-8B", "--hardware", "h20o-sxm"], "h20o-sxm"),
        (["--launch", "vllm serve 'Qwen3-8B", "--hardware", "h200-sxm"], "cannot be split"),
        (["--launch", "vllm serve Qwen3-8B -tp two", "--hardware", "h200-sxm"], "two"),
    ],
)
def test_rank_names_what_it_cannot_read(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(capsys, "rank", *words)


# --- servers


@pytest.mark.parametrize("command", ["recompile", "watch"])
def test_a_prefect_that_does_not_answer_is_named(
    command: str,
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"})
    error = refused(capsys, command, "--endpoint", str(endpoint_file()))
    assert "Prefect at http://127.0.0.1:9/api: does not answer" in error and "tideforge up" in error
    assert not (tmp_path / "s").exists()


def test_an_mlflow_that_does_not_answer_is_named(
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "PREFECT" not in name})
    file = endpoint_file(tracking_uri="http://127.0.0.1:9")
    error = refused(capsys, "recompile", "--endpoint", str(file))
    assert "MLflow at http://127.0.0.1:9: does not answer" in error and "tracking_uri" in error
    assert not (tmp_path / "s").exists()


def another(**said: str) -> dict[str, Any]:
    told = {"forward": "f" * 64, "release": "", "weights_sha256": "w", "environment": {}, "endpoint": "tiny"}
    return {**told, **said}


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (None, "no server serves it"),
        ("gone", "no server serves it"),
        (another(launch="tideforge serve --other"), "runs with another launch"),
        (another(endpoint="other", launch="x"), "runs with another endpoint"),
    ],
    ids=["none", "gone", "another launch", "another endpoint"],
)
def test_a_night_whose_release_could_go_nowhere_is_refused_at_the_start(
    server: Any,
    problem: str,
    tmp_path: Path,
    endpoint_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "PREFECT" not in name})
    file, state = endpoint_file(), tmp_path / "s"
    if server is not None:
        state.mkdir()
        (state / "server.json").write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:9", "forward": "f" * 64}))
    if isinstance(server, dict):
        monkeypatch.setattr("tideforge.tasks.live.ask", lambda *_, **__: server)
    there = files(tmp_path)
    error = refused(capsys, "recompile", "--endpoint", str(file), "--local")
    assert f"endpoint tiny: {problem}" in error or f"endpoint tiny: its server {problem}" in error, error
    assert "--no-ship" in error and (isinstance(server, dict) or f"tideforge serve --endpoint {file}" in error)
    assert files(tmp_path) == there


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB. Only root can mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}; the patched write below is tested instead")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_a_full_disk_is_named_and_nothing_half_written_stays(
    small_disk: Path, endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = small_disk / "out"
    error = refused(capsys, "ingest", SAMPLE, "--out", str(out))
    assert str(out) in error and "the disk is full" in error and "free space" in error
    assert files(small_disk) == set()
    state = small_disk / "s"
    error = refused(capsys, "node", "ingest", "--endpoint", str(endpoint_file(state=str(state))), "--run", "n1")
    assert str(state) in error and "the disk is full" in error
    assert {path.split("-")[0] for path in files(state / "runs" / "n1")} == {"run.json", "endpoint"}


def test_a_write_that_finds_the_disk_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tideforge.data.files.os.fsync", full)
    error = refused(capsys, "ingest", SAMPLE, "--out", str(tmp_path / "out"))
    assert "the disk is full" in error and files(tmp_path) == set()


def test_the_installed_program_says_the_same(tmp_path: Path) -> None:
    """Through a process of its own, as a shell sees it."""
    command = [sys.executable, "-m", "tideforge.flows.cli", "recompile", "--endpoint", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"tideforge: {tmp_path / 'none.yaml'}: does not exist; ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_id_that_leaves_the_state_folder_is_refused(
    tmp_path: Path, endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = endpoint_file()
    (Endpoint.load(path).state / "runs").mkdir(parents=True)
    before = files(tmp_path)
    assert "'../..'" in refused(capsys, "node", "ingest", "--endpoint", str(path), "--run", "../..")
    assert files(tmp_path) == before


def test_a_node_and_down_take_another_state_folder(
    endpoint_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, other = str(endpoint_file()), tmp_path / "other"
    for command in (["node", "ingest", "--run", "n1"], ["ingest", "--run", "n2"]):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--endpoint", file, "--state", str(other)])
        assert stopped.value.code == 0, capsys.readouterr().err
    assert {path.name for path in (other / "runs").iterdir()} == {"n1", "n2"} and not (tmp_path / "s").exists()
    with pytest.raises(SystemExit):
        main(["down", "--state", str(other)])
    assert "nothing was running" in capsys.readouterr().out
