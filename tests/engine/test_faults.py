"""What a candidate raises becomes its step's outcome with its text: whatever its kind, where it is raised, what it says."""

from __future__ import annotations

import threading

import pytest

from tideforge.data.workload import RequestShape
from tideforge.engine import faults
from tideforge.engine.blocks import BlockPool
from tideforge.engine.core import EngineCore
from tideforge.engine.faults import UNTOLD, fault, last_line, observe, watch_threads
from tideforge.engine.forward import Forward
from tideforge.engine.measure import draw_prompts, run_block
from tideforge.errors import CandidateError

# Each is one statement that raises, and what is told of it.
RAISES = {
    "an exception": ("raise ValueError('why')", "ValueError: why"),
    "its base": ("raise BaseException('why')", "BaseException: why"),
    "a kind of its base": ("raise type('Odd', (BaseException,), {})('why')", "Odd: why"),
    "a generator's end": ("raise GeneratorExit('why')", "GeneratorExit: why"),
    "an interrupt": ("raise KeyboardInterrupt('why')", "KeyboardInterrupt: why"),
    "a signal": ("import signal; signal.raise_signal(signal.SIGINT)", "KeyboardInterrupt: "),
    "an exit": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "an exit without a code": ("raise SystemExit", "SystemExit: "),
    "a broken text": ("raise type('E', (Exception,), {'__str__': lambda e: 1 / 0})", "E: its text cannot be had"),
    "a text that exits": ("raise type('E', (Exception,), {'__str__': lambda e: exit()})", "E: its text cannot be had"),
    "a giant text": ("raise ValueError('x' * (32 << 20))", "ValueError: " + "x" * 400),
    "a broken errno": ("raise type('E', (OSError,), {'errno': property(lambda e: 1 / 0)})('why')", "E: why"),
    "a thread": (
        "import threading; t = threading.Thread(target=lambda: [][1]); t.start(); t.join()",
        "IndexError: list index out of range",
    ),
}  # fmt: skip
STEPS = {
    "import_error": "{}\ndef build(ctx):\n    pass\n",
    "build_error": "def build(ctx):\n    {}\n",
    "forward_error": "def build(ctx):\n    def f(batch):\n        {}\n    return f\n",
}


def outcome_of(lab, source: str) -> CandidateError:
    """Of a candidate that does not get through a block."""
    shapes = [RequestShape(5, 3)]
    forward, limits, settings = Forward({"forward.py": source}), lab.settings.limits, lab.settings
    with pytest.raises(CandidateError) as caught:
        worker = lab.spawn(forward, lab.arena("f"))
        try:
            core = EngineCore(limits, BlockPool(settings.num_blocks, settings.block_size, prefix_cache=False))
            core.attach(forward.id, worker)
            run_block(core, forward.id, shapes, draw_prompts(shapes, range(200), 3), users=1)
        finally:
            lab.release(worker)
    return caught.value


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", RAISES)
def test_whatever_is_raised_is_the_steps_outcome_with_its_text(lab, kind: str, step: str) -> None:
    statement, told = RAISES[kind]
    error = outcome_of(lab, STEPS[step].format(statement))
    assert error.outcome == step and error.message.startswith(told), error.message


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_ends_itself_has_exited(lab, step: str) -> None:
    error = outcome_of(lab, STEPS[step].format("import os; os._exit(3)"))
    assert (error.outcome, error.message) == ("exited", "the worker ended by itself with code 3")


def test_a_signal_handler_that_raises_at_any_moment_is_told(lab) -> None:
    late = (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: [][1])\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\n"
    )
    late += "def build(ctx):\n    return lambda batch: __import__('time').sleep(60)\n"
    error = outcome_of(lab, late)
    assert error.outcome in ("import_error", "build_error", "forward_error") and "IndexError" in error.message


def test_a_child_of_a_candidates_that_fails_is_not_its_worker(lab) -> None:
    forks = "import os\nif (pid := os.fork()) == 0:\n    raise SystemExit(7)\ncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    error = outcome_of(lab, f"{forks}def build(ctx):\n    raise ValueError(f'the child gave {{code}}')\n")
    assert (error.outcome, error.message[:27]) == ("build_error", "ValueError: the child gave ")


def test_a_syntax_error_of_many_words_is_cut(lab) -> None:
    error = outcome_of(lab, "raise SyntaxError('x' * (32 << 20))\n")
    assert error.outcome == "syntax_error" and error.message.startswith("xxx") and len(error.message) <= 500


def test_what_ends_a_thread_is_told_once_and_an_exit_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's own makes a failure of it
    monkeypatch.setattr(faults, "_in_threads", [])
    watch_threads()
    for raised, count in ((SystemExit, 0), (KeyError, 1)):
        thread = threading.Thread(target=_raises, args=(raised,))
        thread.start()
        thread.join()
        assert len(faults._in_threads) == count
    with pytest.raises(CandidateError, match="KeyError") as caught:
        observe(lambda: 1, "capture_error")
    assert caught.value.outcome == "capture_error" and observe(lambda: 1, "capture_error") == 1


def _raises(kind: type[BaseException]) -> None:
    raise kind


class Hidden(type):
    @property
    def __name__(cls) -> str:
        raise BaseException


class Nameless(Exception, metaclass=Hidden):
    pass


class Words(str):
    def __getitem__(self, key: object) -> str:
        raise BaseException

    __format__ = __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class Wordy(Exception):
    def __str__(self) -> str:
        return Words("why")


def test_texts_that_fail_in_turn() -> None:
    assert last_line(Nameless()) == UNTOLD
    told = last_line(Wordy())
    assert told == "Wordy: why" and type(told) is str


@pytest.mark.parametrize(
    ("full", "error", "outcome"),
    [
        (True, OSError(28, "No space left on device"), "out_of_memory"),
        (False, OSError(28, "No space left on device"), "build_error"),
        (False, RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
         "out_of_memory"),
        (True, OSError(27, "File too large"), "too_much_output"),
        (True, ValueError("no room"), "build_error"),
    ],
)  # fmt: skip
def test_shared_memory_that_is_full_is_memory_and_a_full_disk_is_not(monkeypatch, full, error, outcome) -> None:
    monkeypatch.setattr(faults, "shared_memory_is_full", lambda: full)
    assert fault("build_error", error).outcome == outcome


FILLS = {
    "torch": "import torch\nheld = [torch.ones(4 << 20).share_memory_() for _ in range(64)]\n",
    "files": "for i in range(256): open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 20))\n",
}


@pytest.mark.parametrize("by", FILLS)
def test_filling_shared_memory_is_running_out_of_memory(lab, by: str) -> None:
    if not lab.sandbox.on:
        pytest.skip(f"the machine's own is not to be filled, and there is no sandbox here: {lab.sandbox.why}")
    error = outcome_of(lab, f"{FILLS[by]}def build(ctx):\n    pass\n")
    assert error.outcome == "out_of_memory" and "No space left" in error.message, error.message
