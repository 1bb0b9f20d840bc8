"""A forked worker is as a fresh process would be: nothing of its parents is left in it but what they had imported."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tideforge.engine import procfs
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab, worker_environment
from tideforge.errors import CandidateError

PRELUDE = "import os, random, signal, sys, tempfile, threading\nimport numpy, torch\n"


@pytest.fixture
def spare(lab):
    workers = []

    def start():
        workers.append(lab.spare(lab.arena("w")))
        lab.wait_ready(workers[-1])
        return workers[-1]

    yield start
    for worker in workers:
        lab.release(worker)  # again, where a test has done so


def told(lab, worker, expression: str) -> object:
    """What an expression is in a worker. It can still be given another."""
    source = f"{PRELUDE}def build(ctx):\n    raise RuntimeError('<' + repr({expression}) + '>')\n"
    with pytest.raises(CandidateError) as caught:
        lab.stage(worker, Forward({"forward.py": source}))
    return ast.literal_eval(caught.value.message.partition("<")[2].rpartition(">")[0])


def fresh(expression: str) -> object:
    """What it is in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{PRELUDE}print(repr({expression}))"],
        env=worker_environment(1), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ast.literal_eval(done.stdout)


def strings(pid: int, name: str) -> list[str]:
    return [one for one in Path(f"/proc/{pid}/{name}").read_text().split("\0") if one]


def gone(pids: list[int], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_nursery_has_one_thread_and_one_child_a_worker(lab, spare):
    workers = [spare(), spare()]
    assert procfs.threads(lab.nursery.pid) == 1
    wardens = {parent(worker.pid) for worker in workers}
    assert len(wardens) == 2 and {parent(warden) for warden in wardens} == {lab.nursery.pid}
    lab.release(workers[0])
    assert gone([workers[0].pid, *(warden for warden in wardens if warden != parent(workers[1].pid))])


def held(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]


def test_a_worker_holds_no_descriptor_but_its_own(lab, spare):
    worker = spare()
    kinds = sorted(what.split(":")[0] for what in held(worker.pid))
    assert kinds == ["/dev/null", "/memfd", "/memfd", "pipe", "pipe", "socket"]  # a mapping keeps its descriptor
    sockets = {what for what in held(worker.pid) if what.startswith("socket")}
    assert not sockets & {*held(parent(worker.pid)), *held(lab.nursery.pid)}
    assert sorted(fd for fd in os.listdir(f"/proc/{worker.pid}/fd") if survives_exec(worker.pid, fd)) == ["0", "1", "2"]


def survives_exec(pid: int, fd: str) -> bool:
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    return next(not int(line.split()[1], 8) & os.O_CLOEXEC for line in lines if line.startswith("flags:"))


def test_its_environment_is_what_it_may_see(lab, spare, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    worker = spare()
    seen = dict(line.split("=", 1) for line in strings(worker.pid, "environ"))
    own = seen["TMPDIR"]
    assert set(seen) - set(worker_environment(1)) == {
        "TIDEFORGE_WARD", "HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
    }  # fmt: skip
    assert Path(own).parent == (lab.settings.state / "scratch").resolve()
    assert told(lab, worker, "sorted(os.environ)[-9:]") == sorted(seen)[-9:]
    assert told(lab, worker, "(tempfile.gettempdir(), os.getcwd(), os.path.expanduser('~'))") == (own, own, own)
    assert "SECRET_KEY" not in "".join(strings(lab.nursery.pid, "environ"))


def test_it_is_shown_as_what_it_is(spare):
    worker = spare()
    shown = strings(worker.pid, "cmdline")
    assert shown[:-1] == [sys.executable, "-P", "-m", "tideforge.engine.worker", "--fd"]
    assert os.readlink(f"/proc/{worker.pid}/fd/{shown[-1]}").startswith("socket:")
    assert strings(parent(worker.pid), "cmdline") == [sys.executable, "-P", "-m", "tideforge.engine.warden"]


def test_two_workers_draw_different_numbers(lab, spare):
    workers = [spare(), spare()]
    for draw in (
        "random.random()",
        "float(numpy.random.rand())",
        "torch.rand(1).item()",
        "next(tempfile._get_candidate_names())",
    ):
        assert len({told(lab, worker, draw) for worker in workers}) == 2, draw


def test_signals_limits_and_threads_are_those_of_a_fresh_process(lab, spare):
    worker = spare()
    for same in (
        "[str(signal.getsignal(n))[:30] for n in sorted(signal.valid_signals())]", "signal.set_wakeup_fd(-1)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()", "threading.active_count()",
        "threading.current_thread() is threading.main_thread()", "os.umask(18)", "sys.flags.safe_path",
    ):  # fmt: skip
        assert told(lab, worker, same) == fresh(same), same
    assert procfs.threads(worker.pid) == 1


def test_threads_are_as_the_settings_say(lab):
    two = Lab(dataclasses.replace(lab.settings, threads=2))
    try:
        worker = two.spare(two.arena("w"))
        two.wait_ready(worker)
        before = worker.ward.census().threads
        assert told(two, worker, "(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])") == (2, "2")
        product = "(torch.ones(600, 600) @ torch.ones(600, 600)).sum().item() + torch.ones(1 << 22).sum().item()"
        assert told(two, worker, product) == 600.0**3 + (1 << 22)
        assert worker.ward.census().threads == before + 1
    finally:
        two.close()


def test_a_spare_is_ready(lab, spare):
    """`pytest -s` shows how soon."""
    spare()
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        worker = spare()
        taken.append(1000 * (time.perf_counter() - begin))
        assert worker.alive
        lab.release(worker)
    print(f"\nfrom lab.spare to ready: median {statistics.median(taken):.0f} ms, most {max(taken):.0f}")


def test_a_worker_outlives_the_nursery_and_the_next_has_another(lab, spare, plain):
    worker, old = spare(), lab.nursery.pid
    os.kill(old, signal.SIGKILL)
    assert spare().alive and lab.nursery.pid != old
    lab.stage(worker, plain)
    assert worker.alive and worker.attach_s.keys() == {"context", "map", "rehearse"}


AUTHORITY = """
import dataclasses, pickle, sys, time
from pathlib import Path
from tideforge.engine.config import Settings
from tideforge.engine.lab import Lab
lab = Lab(Settings(state=Path(sys.argv[1]), model=Path(sys.argv[2]), num_blocks=64))
worker = lab.spare(lab.arena("w"))
lab.wait_ready(worker)
print(lab.nursery.pid, worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("alone", [False, True])
def test_nothing_outlives_an_authority_that_is_killed(lab, alone):
    """`alone`: the nursery died before."""
    command = [sys.executable, "-c", AUTHORITY, str(lab.settings.state), str(lab.settings.model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as authority:
        assert authority.stdout is not None
        pids = [int(word) for word in authority.stdout.readline().split()]
        pids += [parent(pids[1])]
        if alone:
            os.kill(pids[0], signal.SIGKILL)
        authority.kill()
    assert len(pids) == 3 and gone(pids)


ENDS = {
    "returns": "pass",
    "exits": "sys.exit()",
    "exits with a code": "sys.exit(3)",
    "exits with a large code": "sys.exit(259)",
    "exits with words": "sys.exit('enough')",
    "raises": "1 / 0",
    "raises what is no Exception": "raise GeneratorExit",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_program_ends_as_an_interpreter_does(end):
    work = f"import os, sys\nprint('said', end='')\n{ENDS[end]}\n"
    forked = textwrap.dedent(f"""
        import atexit, os
        from tideforge.engine.forked import run_as_program
        atexit.register(print, "the parent's")
        if (pid := os.fork()) == 0:
            try:
                run_as_program(lambda: exec({work!r}, {{}}))
            finally:
                print("the parent's")
        os.write(2, b"code %d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    """)
    plain, fork = (
        subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, env=worker_environment(1))
        for source in (work, forked)
    )
    assert (plain.stdout, fork.stdout) == ("said", "said")
    assert fork.stderr.endswith(f"code {plain.returncode}")
    assert plain.stderr.splitlines()[-1:] == fork.stderr.rpartition("code")[0].splitlines()[-1:]
