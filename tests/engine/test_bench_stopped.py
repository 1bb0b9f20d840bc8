"""A benchmark that is stopped or killed shows what it can and leaves no process; what it refuses is one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tideforge.engine import procfs
from tideforge.engine.bench.__main__ import main
from tideforge.engine.bench.report import Record
from tideforge.errors import UserError

PROGRAM = [sys.executable, "-m", "tideforge.engine.bench"]


def naming(folder: Path) -> list[int]:
    """Processes of this machine that were started with a path below `folder`."""
    found = []
    for pid in procfs.processes():
        try:
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and procfs.runs(pid):
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_benchmark_that_is_ended_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    state = tmp_path / "b"
    words = [*PROGRAM, "noise", "--device", "cpu", "--trials", "1000", "--state", str(state)]
    bench = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    results = state / "results" / "noise.jsonl"
    while not results.exists() or '"kind": "trial"' not in results.read_text():
        assert bench.poll() is None, bench.communicate()
        time.sleep(0.1)
    assert len(naming(state)) > 2  # service, keeper and reference among them

    words = [*PROGRAM, "noise", "--device", "cpu", "--state", str(state)]
    second = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert f"pid {bench.pid}" in second.stderr

    bench.send_signal(number)
    out, err = bench.communicate(timeout=60)
    if number == signal.SIGINT:
        assert bench.returncode == 130 and "Traceback" not in err and "noise: stopped" in err
        assert out.startswith("== noise") and "noise" in json.loads(out.splitlines()[-1])
    wait_for(lambda: naming(state) == [])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["noise", "--seconds", "nan"], "--seconds"),
        (["noise", "--seconds", "inf"], "--seconds"),
        (["noise", "--trials", "0"], "--trials"),
        (["luck"], "invalid choice: 'luck'"),
        (["merge"], "--state"),
        (["merge", "--state", "{folder}/none"], "none has no folder results"),
        (["noise", "--device", "cpu", "--state", "/dev/null/x"], "--state: /dev/null/x"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *(word.format(folder=tmp_path) for word in words)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # main sets it: to be undone
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("tideforge: ") and named in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ['{"kind": "trial"}', '{"no": "kind"}', "[1]", '{"kind": "trial", "trial": 3}'])
def test_a_line_that_no_part_wrote_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "noise.jsonl").write_text(f'{{"kind": "start"}}\n{line}\n{{"torn')
    with pytest.raises(UserError, match=r"noise\.jsonl: line 2: is no reading"):
        Record(tmp_path, "noise")


def test_what_is_tied_ends_with_whoever_asked(tmp_path: Path) -> None:
    """Even a process that the command has left in a session of its own."""
    left = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path / "left")]
    leaves = f"import subprocess, time; subprocess.Popen({left!r}, start_new_session=True); time.sleep(600)"
    asks = (
        "import sys, time; from pathlib import Path; from tideforge.engine.tied import start_tied\n"
        f"start_tied([sys.executable, '-c', {leaves!r}], Path({str(tmp_path / 'log')!r})); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", asks]) as asker:
        wait_for(lambda: len(naming(tmp_path / "left")) == 4)  # who asks, the tie, the command and what it leaves
        asker.kill()
    wait_for(lambda: naming(tmp_path) == [])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
