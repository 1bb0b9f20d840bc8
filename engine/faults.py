"""What a worker says of an exception in its forward, and what it lets the authority see of untouched logits."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from tideforge.engine.memory import UNTOUCHED
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from torch import Tensor

    from tideforge.engine.contract import Batch

T = TypeVar("T")
# torch's allocators raise plain RuntimeErrors with these words
NO_HOST_MEMORY = "can't allocate memory"
NO_SHARED_MEMORY = "shared memory(shm)"
SHARED_MEMORY = "/dev/shm"
NO_SPACE = os.strerror(errno.ENOSPC)
UNTOLD = "an exception whose text cannot be had"
_in_threads: list[BaseException] = []  # what ended a thread since the last step, and nobody has caught


def fault(otherwise: str, error: BaseException) -> CandidateError:
    """The error under its outcome: what ran out, if something did, else `otherwise` (the phase it happened in)."""
    outcome, text = otherwise, last_line(error)
    with contextlib.suppress(BaseException):  # whatever is asked of it may be the candidate's own code
        outcome = _exhausted(error, text) or otherwise
    return CandidateError(outcome, text)


def _exhausted(error: BaseException, text: str) -> str:
    """The outcome of an error that says that something ran out; "" of any other."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_HOST_MEMORY in text:
        return "out_of_memory"
    if NO_SPACE in text and (NO_SHARED_MEMORY in text or shared_memory_is_full()):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:  # RLIMIT_FSIZE
        return "too_much_output"
    return ""


def shared_memory_is_full() -> bool:
    """A worker's own, where it has a sandbox; a disk that is full has an errno in common with it."""
    try:
        return os.statvfs(SHARED_MEMORY).f_bavail == 0
    except OSError:
        return False


def observe(action: Callable[[], T], outcome: str) -> T:
    """What candidate code raises, here or in a thread of its own, as CandidateError with the outcome that was observed.

    SystemExit and KeyboardInterrupt are errors like any other: the process is not the candidate's to end.
    """
    try:
        found = action()
    except CandidateError:
        raise
    except BaseException as error:
        raise fault(outcome, error) from error
    if _in_threads:
        elsewhere = _in_threads.pop(0)
        raise fault(outcome, elsewhere) from elsewhere
    return found


def watch_threads() -> None:
    """From now on `observe` also raises what ends a thread of the calling process. sys.exit() in one ends it in peace."""

    def note(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
            _in_threads.append(ended.exc_value)
        print_it(ended)

    print_it, threading.excepthook = threading.excepthook, note


def last_line(error: BaseException) -> str:
    """Type, text and place. All of it may be the candidate's own code, which may fail in turn."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        return f"{type(error).__name__}: {_text(error)}{where}"[:500]
    except BaseException:
        return UNTOLD


def _text(error: BaseException) -> str:
    try:
        return str.__getitem__(str(error), slice(500))  # not what a kind of string of the candidate's makes of it
    except BaseException:
        return "its text cannot be had"


def poison(logits: Tensor) -> None:
    """fp32 [N, V]: NaN of bits that no arithmetic gives, so that a row left untouched differs from one that went wrong."""
    logits.view(torch.int32).fill_(UNTOUCHED)


def require_own_logits(batch: Batch, own: Tensor) -> None:
    """Raises CandidateError("wrong_shape") when the forward put another tensor in the place of `own`, or reshaped it."""
    found = batch.logits
    if not isinstance(found, torch.Tensor):
        raise CandidateError("wrong_shape", f"batch.logits was replaced by a {type(found).__name__}")
    if found.dtype != own.dtype or found.shape != own.shape or found.data_ptr() != own.data_ptr():
        raise CandidateError(
            "wrong_shape",
            f"batch.logits is now another tensor, {found.dtype} {list(found.shape)}; write into the one given, "
            f"{own.dtype} {list(own.shape)}",
        )
