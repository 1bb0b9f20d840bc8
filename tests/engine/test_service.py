"""The persistent engine: it starts once, candidates come and go, and nothing finished is lost when anything is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.client import CONTROL, EngineClient, EngineControl, call
from tideforge.engine.config import Settings
from tideforge.engine.events import log_event, read_events
from tideforge.engine.forward import Forward
from tideforge.engine.guard import start_detached
from tideforge.engine.lab import keeper_status
from tideforge.engine.outcome import Outcome
from tideforge.engine.service import Service
from tideforge.engine.service_config import ServiceConfig
from tideforge.errors import ProtocolError, UserError

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"


@pytest.fixture
def night(request, tiny, tmp_path, end_keeper):
    """A service of a tiny model. A test may ask for another `lookahead`, `trial_s`, `sandbox` or `devices`."""
    asked = getattr(request, "param", {})
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    shapes = tuple(RequestShape(6 + i, 4) for i in range(4))
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (tmp_path / "workload.json").write_text(workload.to_json())
    state = tmp_path / "s"
    state.mkdir()
    for folder in (state, state / "lane-1"):
        end_keeper(folder)
    config = ServiceConfig(
        settings=Settings(
            state=state,
            model=tiny,
            num_blocks=64,
            lookahead=asked.get("lookahead"),
            sandbox=asked.get("sandbox", "prefer"),
        ),
        devices=asked.get("devices", ()),
        night=tmp_path,
        incumbent=LLAMA,
        workload=tmp_path / "workload.json",
        passes=1,
        trial_s=asked.get("trial_s", 60.0),
        allow_imports=("subprocess",),
        exit_at=time.time() + 100,
    )
    config.write(tmp_path / "service.json")
    command = [sys.executable, "-m", "tideforge.engine.supervise", "--config", str(tmp_path / "service.json")]
    start_detached(command, tmp_path / "service.log")
    client = EngineClient(state / "engine.sock", patience_s=60)
    yield client, tmp_path
    EngineControl(state).stop()


def variant(client: EngineClient, text: str) -> Forward:
    forward = client.incumbent()
    return forward.with_file("forward.py", forward.files["forward.py"] + text)


def test_trials_pass_fail_and_repeat(night):
    client, _ = night
    good, twice = variant(client, "\n# the same arithmetic\n"), variant(client, "\n# again\n")
    doubled = good.files["forward.py"].replace("* F.linear(x, self.up_proj)", "* (1.5 * F.linear(x, self.up_proj))")
    submissions = {
        "passed": good,
        "wrong": good.with_file("forward.py", doubled),
        "forward_error": variant(client, "\ndef build(ctx):\n    return None\n"),
        "refused": variant(client, "\nimport socket\n"),
        "syntax_error": variant(client, "\ndef (:\n"),
        "knobs": good.with_file("knobs.json", '{"threads": 2}'),
    }
    ids = {name: client.submit(forward, submitter="test") for name, forward in submissions.items()}
    assert client.submit(good) == ids["passed"], "the same forward is the same trial"
    client.submit(twice)
    done = {name: client.wait(trial, 60) for name, trial in ids.items()}
    assert done.pop("knobs").outcome is Outcome.REFUSED
    assert {name: trial.outcome and trial.outcome.value for name, trial in done.items()} == {
        name: name for name in done
    }
    figures = done["passed"].figures
    assert figures is not None and 0.2 < figures.ratio < 5 and figures.ci_low < figures.ratio < figures.ci_high
    assert "reference prefers" in done["wrong"].message
    assert client.source()["engine/contract.py"].startswith('"""The seam')
    with pytest.raises(Exception, match="no trial"):
        client.trial("nothing")


def test_a_killed_service_goes_on_and_counts_nothing_twice(night):
    client, folder = night
    first = client.submit(variant(client, "\n# 1\n"))
    assert client.wait(first, 60).outcome is Outcome.PASSED
    finished = client.trial(first)
    rest = [client.submit(variant(client, f"\n# {n}\n")) for n in (2, 3)]
    os.kill(client.status()["pid"], signal.SIGKILL)
    done = [client.wait(trial, 90) for trial in rest]
    assert [trial.outcome for trial in done] == [Outcome.PASSED] * 2
    assert client.trial(first) == finished and len(client.trials()) == 3
    events = [event["event"] for event in read_events(folder)]
    assert events.count("service_start") == 2 and events.count("service_died") == 1
    assert events.count("trial_end") == 3
    assert sum(event["event"] == "weight_load" for event in read_events(folder / "s")) == 1


HANGS = "\nwhile True:\n    pass\n"  # while it is imported


@pytest.mark.parametrize("night", [{"lookahead": 1, "trial_s": 10.0}], indirect=True)
def test_a_service_killed_in_mid_pipeline_begins_again_and_a_hanging_import_delays_nobody(night):
    client, folder = night
    first = client.submit(variant(client, HANGS))
    rest = [client.submit(variant(client, f"\n# {n}\n")) for n in range(3)]
    assert client.wait(rest[0], 60).outcome is Outcome.PASSED
    assert not client.trial(first).done
    os.kill(client.status()["pid"], signal.SIGKILL)
    assert [client.wait(trial, 90).outcome for trial in [first, *rest]] == [Outcome.HUNG, *[Outcome.PASSED] * 3]
    events = list(read_events(folder))
    assert sum(event["event"] == "trial_start" and event["trial"] == first for event in events) == 2
    assert sum(event["event"] == "trial_end" for event in events) == 4
    trial = client.trial(rest[1])
    assert trial.swap_s >= trial.wait_s + trial.stage_s + trial.lock_s > 0 and trial.environment["device"] == "cpu"


@pytest.mark.parametrize("night", [{"devices": ("cpu", "cpu")}], indirect=True)
def test_two_lanes_take_from_one_queue_and_one_that_dies_leaves_the_other(night):
    client, folder = night
    deadline = time.monotonic() + 60
    while sum(event["event"] == "lane_ready" for event in read_events(folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trials = [client.submit(variant(client, f"\n# {n}\n")) for n in range(4)]
    assert [client.wait(trial, 90).outcome for trial in trials] == [Outcome.PASSED] * 4
    workers = {event["worker"] for event in read_events(folder) if event["event"] == "trial_worker"}
    assert len(workers) == 4 and busy_at_once(folder) == 2
    assert (folder / "noise-1.json").exists() and (folder / "s" / "lane-1" / "logs").is_dir()
    os.kill(keeper_status(folder / "s" / "lane-1")["pid"], signal.SIGKILL)
    more = [client.submit(variant(client, f"\n# more {n}\n")) for n in range(4)]
    assert [client.wait(trial, 90).outcome for trial in more] == [Outcome.PASSED] * 4
    events = list(read_events(folder))
    assert [event["lane"] for event in events if event["event"] == "lane_died"] == ["-1"]
    assert sum(event["event"] == "service_start" for event in events) == 1


def busy_at_once(folder: Path) -> int:
    """The most trials that were under way at one time."""
    steps = {"trial_start": 1, "trial_end": -1}
    changes = [steps[event["event"]] for event in read_events(folder) if event["event"] in steps]
    return max(sum(changes[:count]) for count in range(len(changes) + 1))


def test_a_killed_measuring_worker_costs_no_trial(night):
    client, folder = night
    client.submit(variant(client, "\n# 1\n"))
    workers = [event["worker"] for event in read_events(folder) if event["event"] == "worker_start"]
    os.kill(workers[0], signal.SIGKILL)  # the incumbent's: started first
    trial = client.wait(client.submit(variant(client, "\n# 2\n")), 60)
    assert trial.outcome is Outcome.PASSED, trial.message
    assert all(one.outcome is Outcome.PASSED for one in client.trials())


def test_an_agents_socket_ends_nothing(night):
    client, folder = night
    client.incumbent()
    for request in ({"type": "stop"}, {"type": "cancel", "message": "mine first"}):
        with pytest.raises(ProtocolError, match="does not know"):
            call(client.path, request, patience_s=0)
    assert client.wait(client.submit(variant(client, "\n# 1\n")), 60).outcome is Outcome.PASSED
    path = folder / "s" / CONTROL
    assert path.parent.stat().st_mode & 0o077 == 0 and EngineControl(folder / "s").cancel("over") == 0
    with pytest.raises(ProtocolError, match="does not know"):
        call(path, {"type": "trials"}, patience_s=0)


@pytest.mark.parametrize("night", [{"sandbox": "prefer"}, {"sandbox": "off"}], indirect=True, ids=["prefer", "off"])
def test_a_candidates_worker_gets_no_answer_from_either_socket(night, request):
    """In a sandbox the sockets are not there; elsewhere they take nothing from it."""
    client, folder = night
    said = ["own workers"] if "off" in request.node.name else ["own workers", "no engine answers"]
    client.incumbent()
    asks = (
        "\n\nplain = build\n\ndef build(ctx):\n    seen = __import__('tideforge.engine.client', fromlist=['call'])\n"
        f"    for path, kind in (({str(folder / 's' / CONTROL)!r}, 'stop'), ({str(client.path)!r}, 'queue')):\n"
        "        try:\n            seen.call(__import__('pathlib').Path(path), {'type': kind, 'message': ''}, patience_s=0)\n"
        f"        except Exception as error:\n            assert any(word in str(error) for word in {said!r}), error\n"
        "        else:\n            raise AssertionError('it answered')\n    return plain(ctx)\n"
    )
    done = client.wait(client.submit(variant(client, asks)), 60)
    assert done.outcome is Outcome.PASSED, done.message
    assert client.wait(client.submit(variant(client, "\n# after it\n")), 60).outcome is Outcome.PASSED


def test_a_service_whose_keeper_is_killed_starts_again(night):
    client, folder = night
    client.incumbent()
    assert client.wait(client.submit(variant(client, "\n# 1\n")), 60).outcome is Outcome.PASSED
    os.kill(keeper_status(folder / "s")["pid"], signal.SIGKILL)
    assert client.wait(client.submit(variant(client, "\n# 2\n")), 90).outcome is Outcome.PASSED
    events = [event["event"] for event in read_events(folder)]
    assert events.count("service_died") >= 1 and events.count("service_start") == events.count("service_died") + 1


def test_nobody_there_is_one_line_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="no engine answers there"):
        EngineClient(Path(tmp_path) / "engine.sock", patience_s=0).queue()


def test_a_service_killed_while_harm_runs_goes_on_and_leaves_nothing_behind(night):
    client, folder = night
    child = (
        "import subprocess\n    subprocess.Popen(['sleep', '64.25'], start_new_session=True)\n    while True: pass\n"
    )
    plain = client.incumbent()
    harm = plain.with_file("child.py", f"def harm():\n    {child}").with_file(
        "forward.py",
        plain.files["forward.py"] + "\nimport child\n\n\ndef build(ctx):\n    return lambda batch: child.harm()\n",
    )
    first = client.submit(harm)
    rest = [client.submit(variant(client, f"\n# {n}\n")) for n in (1, 2)]
    deadline = time.monotonic() + 60
    while not sleepers("64.25"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(client.status()["pid"], signal.SIGKILL)
    assert client.wait(first, 90).outcome is Outcome.HUNG
    assert [client.wait(trial, 60).outcome for trial in rest] == [Outcome.PASSED] * 2
    assert sleepers("64.25") == 0
    events = [event["event"] for event in read_events(folder)]
    assert events.count("service_start") == 2 and len(client.trials()) == 3
    assert sum(event["event"] == "weight_load" for event in read_events(folder / "s")) == 1


def sleepers(seconds: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes() == f"sleep\0{seconds}\0".encode()
    return found


def test_a_candidate_that_the_service_never_survives_is_given_up(tiny, tmp_path):
    (tmp_path / "workload.json").write_text("{}")
    config = ServiceConfig(Settings(tmp_path / "s", tiny), tmp_path, LLAMA, tmp_path / "workload.json")
    service = Service(config)
    deadly, good, changed = (
        service.queue.archive.submit(Forward({"forward.py": text}), "slow", "x")
        for text in ("a = 1\n", "b = 1\n", "c = 1\n")
    )
    for _ in range(3):
        log_event(tmp_path, "trial_start", trial=deadly.id)
    log_event(tmp_path, "trial_start", trial=good.id)
    (tmp_path / "s" / "forwards" / changed.forward / "forward.py").write_text("c = 2\n")
    again = Service(config)
    ends = [again.queue.refused(trial) for trial in (deadly, good, changed)]
    assert [end and end.outcome for end in ends] == [Outcome.CRASHED, None, Outcome.REFUSED]
