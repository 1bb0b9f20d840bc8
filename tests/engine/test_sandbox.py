"""What a candidate tries from inside its sandbox fails there, and its trial is none the worse or better for it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tideforge.data.workload import RequestShape
from tideforge.engine import lab as labs
from tideforge.engine import procfs, sandbox
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.kernels import copy_kernels
from tideforge.engine.lab import Lab, keeper_status, kernels_of, require_sandbox
from tideforge.engine.measure import draw_prompts, run_block
from tideforge.engine.ward import process_of
from tideforge.errors import CandidateError, UserError
from tideforge.tasks.endpoint import AgentSpec, Endpoint

PRELUDE = """
import ctypes, datetime, os, signal, socket, subprocess, sys, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(attempt):
    try:
        return attempt()
    except BaseException as error:
        return type(error).__name__
def called(name, *arguments):
    libc[name].restype = ctypes.c_long
    return libc[name](*arguments), os.strerror(ctypes.get_errno())
def reached(family, kind, address):
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
        sock.send(b"x")
        return "connected"
def written(path):
    with open(path, "w") as file:
        return file.write("x")
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Beside this checkout, wherever that lies: also below /tmp, of which each worker has its own."""
    folder = Path(__file__).parents[2] / f".sandbox-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def lab(home, end_keeper) -> Iterator[Lab]:
    model = tiny_llama(home / "model")
    lab = Lab(Settings(state=home / "state", model=model, num_blocks=64, sandbox="prefer"))
    if not lab.sandbox.on:
        pytest.skip(f"no sandbox can be had here: {lab.sandbox.why}")
    end_keeper(lab.settings.state)
    assert lab.weights_sha256
    yield lab
    lab.close()


@pytest.fixture
def spare(lab) -> Iterator[Callable[[], RemoteExecutor]]:
    workers: list[RemoteExecutor] = []

    def start() -> RemoteExecutor:
        workers.append(lab.spare(lab.arena(f"w{len(workers)}")))
        lab.wait_ready(workers[-1])
        return workers[-1]

    yield start
    for worker in workers:
        lab.release(worker)


@pytest.fixture
def told(lab, spare) -> Callable[..., Any]:
    def tell(expression: str, worker: RemoteExecutor | None = None) -> Any:
        """What an expression is in a candidate; the name of the exception that it raises."""
        source = f"{PRELUDE}def build(ctx):\n    raise RuntimeError('<' + repr(tried(lambda: {expression})) + '>')\n"
        with pytest.raises(CandidateError) as caught:
            lab.stage(worker or spare(), Forward({"forward.py": source}))
        return ast.literal_eval(caught.value.message.partition("<")[2].rpartition(">")[0])

    return tell


def test_a_worker_sees_no_process_but_its_own(lab, told, spare) -> None:
    other = spare()
    assert told("sorted(name for name in os.listdir('/proc') if name.isdigit())") == ["1", "2"]
    assert told("(os.getpid(), os.getppid(), os.getuid(), os.getgid())") == (2, 0, 65534, 65534)
    for refused in ("os.listdir('/proc/1/root/')", "open('/proc/1/mem', 'r+b')", "os.listdir('/proc/1/cwd/')"):
        assert told(refused) == "PermissionError"
    assert other.alive and other.ward.census().processes == 0


def test_it_cannot_signal_or_trace_others(lab, told, spare) -> None:
    other = spare()
    assert told("os.kill(-1, 9)") == "ProcessLookupError"
    assert told(f"os.kill({other.pid}, 9)") == "ProcessLookupError"
    assert told("called('ptrace', 0x4206, 1, None, None)") == (-1, os.strerror(1))
    assert other.alive


@pytest.mark.parametrize(
    "path", ["keeper.sock", "engine.sock", "control", "clock.lock", "logs/workers.log", "events.jsonl"]
)
def test_the_state_folder_is_not_there(lab, told, path) -> None:
    place = lab.settings.state / path
    place.mkdir(parents=True, exist_ok=True) if place.name == "control" else place.touch()
    assert told(f"os.stat({str(place)!r})") == "FileNotFoundError"


def test_files_of_the_harness_can_only_be_read(lab, told) -> None:
    state, here = str(lab.settings.state.resolve()), str(Path(labs.__file__).resolve().parent)
    assert told(f"sorted(os.listdir({state!r}))") == ["forwards", "logs", "scratch"]
    for path in (
        f"{state}/x",
        f"{state}/forwards/x",
        f"{state}/scratch/x",
        f"{here}/check.py",
        f"{here}/x",
        "/x",
        "/etc/x",
        "/dev/x",
    ):
        assert told(f"written({path!r})") in ("OSError", "PermissionError"), path
    assert told(f"os.listdir({state + '/logs'!r})") == []
    assert told(f"len(os.listdir({state + '/scratch'!r}))") == 1


@pytest.mark.parametrize(
    "path", ["/home", "/root/.ssh", "/root/.bashrc", "/var", "/run", "/etc/shadow", "/proc/1/environ"]
)
def test_other_peoples_files_cannot_be_read(told, path) -> None:
    assert told(f"(os.listdir if os.path.isdir({path!r}) else open)({path!r})") in (
        "FileNotFoundError",
        "PermissionError",
    )


@contextlib.contextmanager
def listening(family: int, kind: int, address: Any) -> Iterator[Any]:
    with socket.socket(family, kind) as sock:
        sock.bind(address)
        if kind == socket.SOCK_STREAM:
            sock.listen()
        yield sock.getsockname()


@pytest.mark.parametrize(
    ("family", "kind", "address", "refusal"),
    [
        ("AF_INET", "SOCK_STREAM", ("127.0.0.1", 0), "OSError"),
        ("AF_INET", "SOCK_DGRAM", ("127.0.0.1", 0), "OSError"),
        ("AF_UNIX", "SOCK_STREAM", "\0tideforge-test", "ConnectionRefusedError"),
        ("AF_UNIX", "SOCK_STREAM", "host.sock", "FileNotFoundError"),
    ],
)  # fmt: skip
def test_no_socket_of_the_machine_can_be_reached(home, told, monkeypatch, family, kind, address, refusal) -> None:
    monkeypatch.chdir(home)  # a socket's path must be short
    with listening(getattr(socket, family), getattr(socket, kind), address) as bound:
        target = str(home / bound) if bound == "host.sock" else bound
        ours = getattr(socket, family)
        with socket.socket(ours, getattr(socket, kind)) as sock:
            sock.connect(bound)  # from outside it answers
        assert told(f"reached(socket.{family}, socket.{kind}, {target!r})") == refusal


def test_it_has_no_capability_and_gets_none(told) -> None:
    lines = told("[line.split() for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew'))]")
    assert {name: int(value, 16) for name, value in lines} == {
        "CapInh:": 0, "CapPrm:": 0, "CapEff:": 0, "CapBnd:": 0, "CapAmb:": 0, "NoNewPrivs:": 1
    }  # fmt: skip
    assert told("os.setuid(0)") in ("PermissionError", "OSError")
    assert told("called('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)[0]") == -1
    assert told("called('umount2', b'/proc', 2)[0]") == -1
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):  # CLONE_NEWUSER, NEWNS, NEWPID, NEWNET
        assert told(f"called('unshare', {flag})[0]") == -1


@pytest.mark.parametrize("name", ["kernel/core_pattern", "user/max_user_namespaces", "vm/drop_caches"])
def test_the_kernels_own_switches_are_read_only(told, name) -> None:
    assert told(f"os.open('/proc/sys/{name}', os.O_WRONLY)") in ("OSError", "PermissionError")
    assert told("os.open('/proc/sysrq-trigger', os.O_WRONLY)") in ("OSError", "PermissionError", "FileNotFoundError")


def test_two_workers_share_nothing_to_write_in(told, spare) -> None:
    one, two = spare(), spare()
    assert (
        told("(written('/tmp/x'), written('/dev/shm/x'), written('x'), written(tempfile.gettempdir() + '/y'))", one)
        == (1,) * 4
    )
    assert told("called('shmget', 77, 4096, 0o1600)[0] >= 0", one) is True
    seen = "[name for place in ('/tmp', '/dev/shm', '.', tempfile.gettempdir()) for name in os.listdir(place)]"
    assert "x" in told(seen, one) and not {"x", "y"} & set(told(seen, two))
    assert told("called('shmget', 77, 4096, 0o600)[0]", two) == -1


def test_two_workers_share_no_abstract_socket(told, spare) -> None:
    one, two = spare(), spare()
    held = "globals().update(kept=socket.socket(socket.AF_UNIX)) or kept.bind(b'\\0here') or kept.listen() or setattr(sys, 'kept', kept)"
    assert told(held, one) is None
    reach = "reached(socket.AF_UNIX, socket.SOCK_STREAM, b'\\0here')"
    assert (told(reach, one), told(reach, two)) == ("connected", "ConnectionRefusedError")


def test_it_does_not_learn_the_date(told) -> None:
    days = told("(time.time(), time.sleep(0.1), datetime.datetime.now().timestamp())")
    assert days[2] - days[0] > 86400 * 0.05


def test_temporary_places_are_small(told) -> None:
    sizes = "[os.statvfs(place).f_blocks * os.statvfs(place).f_frsize for place in ('/tmp', '/dev/shm')]"
    assert told(sizes) == [64 << 20, 64 << 20]


@pytest.fixture
def below_tmp(tiny) -> Iterator[Lab]:
    """A lab of which all that a worker needs lies below /tmp, a file right in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, tempfile.NamedTemporaryFile(dir="/tmp") as file:
        model = Path(folder) / "model"
        shutil.copytree(tiny, model)
        Path(file.name).write_bytes((model / "config.json").read_bytes())
        (model / "config.json").unlink()
        (model / "config.json").symlink_to(file.name)
        lab = Lab(Settings(state=Path(folder) / "state", model=model, num_blocks=64))
        try:
            if not lab.sandbox.on:
                pytest.skip(f"no sandbox can be had here: {lab.sandbox.why}")
            yield lab
        finally:
            lab.close()
            status = keeper_status(lab.settings.state)  # while its state folder is there
            assert status is not None
            os.kill(status["pid"], signal.SIGTERM)


def test_a_worker_has_a_tmp_of_its_own_also_where_what_it_needs_lies_there(below_tmp) -> None:
    lab, file = below_tmp, (below_tmp.settings.model / "config.json").resolve()
    state, mine = str(lab.settings.state), f"/tmp/{lab.settings.state.parent.name}-mine"
    places = (
        mine,
        f"{state}/scratch/x",
        f"{state}/x",
        f"{lab.settings.model}/x",
        f"{lab.settings.model}/../x",
        str(file),
    )
    tried = f"[tried(lambda: written(place)) for place in {places!r}]"
    here = "sorted(os.listdir('/tmp')), os.statvfs('/tmp').f_blocks * os.statvfs('/tmp').f_frsize"
    source = f"{PRELUDE}def build(ctx):\n    raise RuntimeError('<' + repr(({tried}, {here})) + '>')\n"
    worker = lab.spare(lab.arena("w"))
    with pytest.raises(CandidateError) as caught:
        lab.stage(worker, Forward({"forward.py": source}))
    lab.release(worker)
    written, names, size = ast.literal_eval(caught.value.message.partition("<")[2].rpartition(">")[0])
    assert written[0] == 1 and set(written[1:]) <= {"OSError", "PermissionError"} and size == 64 << 20
    assert {Path(mine).name, file.name, lab.settings.state.parent.name} <= set(names) and not Path(mine).exists()


def test_all_of_it_holds_for_what_a_worker_starts(told) -> None:
    ran = "subprocess.run(['/bin/sh', '-c', 'id -u; ls /proc | grep -c ^[0-9]; ls /root; cat /proc/self/status | grep CapEff'], "
    lines = told(f"{ran}capture_output=True, text=True).stdout.split()")
    assert lines[0] == "65534" and int(lines[1]) < 8 and lines[-1] == "0" * 16


def test_kernels_are_compiled_in_a_place_of_ones_own(lab, told, spare, plain) -> None:
    worker = spare()
    lab.stage(worker, plain)
    assert told("os.environ['TRITON_CACHE_DIR']", worker) == str(kernels_of(worker))
    assert kernels_of(worker).is_relative_to(lab.settings.state.resolve() / "scratch")


def test_only_kernels_of_a_trusted_forward_are_kept_and_given(lab, spare, plain) -> None:
    compiles = "import os\ndef build(ctx):\n    folder = os.environ['TRITON_CACHE_DIR']\n    os.makedirs(folder, exist_ok=True)\n"
    compiles += "    open(folder + '/mine.cubin', 'x').write('new')\n    return lambda batch: None\n"
    forward, worker = Forward({"forward.py": compiles}), spare()
    lab.stage(worker, forward)
    assert not lab.kernels(forward).exists()
    lab.keep_kernels(forward)
    assert (lab.kernels(forward) / "mine.cubin").read_text() == "new"
    with pytest.raises(CandidateError, match="exists"):
        lab.stage(spare(), forward)  # they are there when it begins


def test_of_a_workers_folder_only_files_are_taken(tmp_path) -> None:
    source, secret = tmp_path / "source", tmp_path / "secret"
    (source / "a" / "tmp.1").mkdir(parents=True)
    secret.mkdir()
    (secret / "key").write_text("hush")
    (source / "a" / "kernel.cubin").write_bytes(b"bits")
    (source / "a" / "tmp.1" / "half").write_bytes(b"b")
    (source / "link").symlink_to(secret / "key")
    (source / "folder").symlink_to(secret)
    os.mkfifo(source / "a" / "pipe")
    copy_kernels(source, tmp_path / "target")
    found = {str(path.relative_to(tmp_path / "target")): path for path in (tmp_path / "target").rglob("*")}
    assert set(found) == {"a", "a/kernel.cubin"} and found["a/kernel.cubin"].read_bytes() == b"bits"
    (tmp_path / "other").symlink_to(secret)
    copy_kernels(tmp_path / "other" / "none", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_processor_time_is_seen_from_outside(lab, spare) -> None:
    idle, busy = spare(), spare()
    turns = "import os\ndef build(ctx):\n    while sum(os.times()[:2]) < 0.3:\n        pass\n    return lambda batch: None\n"
    before = busy.ward.cpu_seconds(), idle.ward.cpu_seconds()
    lab.stage(busy, Forward({"forward.py": turns}))
    assert busy.ward.cpu_seconds() - before[0] > 0.1 > idle.ward.cpu_seconds() - before[1]
    lab.release(busy)
    assert busy.ward.cpu_seconds() == 0


def test_processor_time_of_children_counts(lab, spare) -> None:
    forks = "import os\ndef build(ctx):\n    if os.fork() == 0:\n        while sum(os.times()[:2]) < 0.4:\n            pass\n"
    forks += "        os._exit(0)\n    os.wait()\n    return lambda batch: None\n"
    worker = spare()
    before = worker.ward.cpu_seconds()
    lab.stage(worker, Forward({"forward.py": forks}))
    assert worker.ward.cpu_seconds() - before >= 0.35


def test_the_authority_sees_and_ends_what_is_in_there(lab, spare, plain) -> None:
    worker = spare()
    lab.stage(worker, plain)
    assert worker.ward.anonymous_bytes() > 1 << 20
    levels = next(
        line.split()[1:]
        for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
        if line.startswith("NSpid")
    )
    assert levels[0] == str(worker.pid) and levels[-1] == "2"
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.ward.end(5).error().message == "the worker died of SIGKILL"


def test_an_ended_process_has_no_number() -> None:
    with subprocess.Popen(["true"]) as process:
        pidfd = os.pidfd_open(process.pid)
    with pytest.raises(ProcessLookupError):
        process_of(pidfd)
    os.close(pidfd)


@pytest.fixture
def unprovided(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "BWRAP", "no-such-bubblewrap")


def test_without_bubblewrap_it_is_required_or_done_without(tiny, tmp_path, unprovided) -> None:
    settings = Settings(state=tmp_path, model=tiny, sandbox="require")
    with pytest.raises(UserError, match="bubblewrap is not on PATH"):
        Lab(settings)
    with pytest.raises(UserError, match="sandbox: require"):
        require_sandbox(tiny, "cpu")
    for mode, why in (("prefer", "not on PATH"), ("off", "off in the endpoint file")):
        plain = Lab(dataclasses.replace(settings, sandbox=mode))
        assert not plain.sandbox.on and str(plain.sandbox).startswith("none: ") and why in str(plain.sandbox)
        plain.close()


def test_what_is_refused_inside_is_told(tiny, tmp_path, monkeypatch) -> None:
    """As in a container that lets nobody mount /proc."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    kept = sandbox.arguments
    monkeypatch.setattr(sandbox, "CAPABILITIES", ("CAP_SETPCAP", "CAP_SYS_RESOURCE"))
    lab = Lab(Settings(state=tmp_path, model=tiny))
    assert sandbox.arguments is kept and "namespace" in lab.sandbox.why
    lab.close()


def test_a_worker_without_a_sandbox_runs_as_before(tiny, tmp_path, plain, end_keeper, unprovided) -> None:
    lab = Lab(Settings(state=tmp_path, model=tiny, num_blocks=64))
    end_keeper(tmp_path)
    worker = lab.spawn(plain, lab.arena("w"))
    assert worker.alive and worker.ward.cpu_seconds() > 0
    lab.close()


@pytest.mark.parametrize(("kind", "mode"), [("offline", "prefer"), ("llm", "require"), ("command", "require")])
def test_agents_that_run_strangers_source_require_it(tiny, kind, mode) -> None:
    raw: dict[str, Any] = {"name": "e", "model": tiny, "launch": "tideforge serve", "hardware": {"name": "cpu"}}
    agents = [AgentSpec(name="a"), AgentSpec(kind=kind, name="b")]
    assert Endpoint(**raw, agents=agents).sandbox == mode
    assert Endpoint(**raw, agents=agents, sandbox="off").sandbox == "off"
    assert Endpoint(**raw).sandbox == "prefer"


def until(true: Callable[[], bool]) -> bool:
    """Within half a minute."""
    deadline = time.monotonic() + 30
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def sandboxes(state: Path) -> list[int]:
    """Bubblewrap's processes around the workers of a state folder."""
    found = []
    for pid in procfs.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] if words[0].endswith(b"bwrap") and os.fsencode(state) in words else []
    return found


@pytest.mark.parametrize("before", ["its first worker", "its end"])
def test_a_sandbox_ends_with_what_lives_in_it(tiny, tmp_path, end_keeper, before) -> None:
    lab = Lab(Settings(state=tmp_path, model=tiny, num_blocks=64))
    end_keeper(tmp_path)
    if not lab.sandbox.on:
        pytest.skip(f"no sandbox can be had here: {lab.sandbox.why}")
    lab.nursery.start()
    assert until(lambda: bool(sandboxes(tmp_path)))
    if before == "its end":
        worker = lab.spare(lab.arena("w"))
        lab.wait_ready(worker)
        lab.nursery.close()
        assert worker.alive and sandboxes(tmp_path), "its wardens go on without it"
    lab.close()
    assert until(lambda: not sandboxes(tmp_path))


MEDDLES = PRELUDE + """
attempts = (
    lambda: os.kill(-1, 9), lambda: os.kill(1, 9), lambda: called('ptrace', 0x4206, 1, None, None), lambda: os.setuid(0),
    lambda: called('unshare', 0x10000000), lambda: called('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None),
    lambda: reached(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', 22)), lambda: written('/proc/sys/kernel/core_pattern'),
    lambda: written(__file__), lambda: open(STATE + '/keeper.sock'),
    lambda: reached(socket.AF_UNIX, socket.SOCK_STREAM, STATE + '/keeper.sock'),
)
meddled = [tried(attempt) for attempt in attempts]
plainly = build
def build(ctx):
    forward = plainly(ctx)
    def step(batch):
        [tried(attempt) for attempt in attempts]
        return forward(batch)
    return step
"""  # fmt: skip


def test_a_candidate_that_tries_in_vain_answers_like_any_other(lab, plain, spare) -> None:
    """And so it is judged by its answers and its speed alone."""

    def answers(forward: Forward) -> list[tuple[int, ...]]:
        worker = spare()
        lab.stage(worker, forward)
        core = EngineCore(lab.settings.limits, BlockPool(64, lab.settings.block_size, prefix_cache=False))
        core.attach(forward.id, worker)
        shapes = [RequestShape(9, 4), RequestShape(5, 3)]
        block = run_block(core, forward.id, shapes, draw_prompts(shapes, range(200), 3), users=2)
        assert worker.alive and worker.ward.census().processes == 0
        return [answer.tokens for answer in block.answers]

    bystander, state = spare(), str(lab.settings.state.resolve())
    meddles = plain.files["forward.py"] + MEDDLES.replace("STATE", repr(state))
    assert answers(plain.with_file("forward.py", meddles)) == answers(plain)
    assert bystander.alive and keeper_status(lab.settings.state) is not None
