"""What a worker says of an exception in its forward, and what it lets the authority see of untouched logits."""

from __future__ import annotations

import errno
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
NO_HOST_MEMORY = "can't allocate memory"  # torch's CPU allocator raises a plain RuntimeError with these words


def fault(otherwise: str, error: Exception) -> CandidateError:
    """The error under its outcome: what ran out, if something did, else `otherwise` (the phase it happened in)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_HOST_MEMORY in last_line(error):
        otherwise = "out_of_memory"
    elif isinstance(error, OSError) and error.errno == errno.EFBIG:  # RLIMIT_FSIZE
        otherwise = "too_much_output"
    return CandidateError(otherwise, last_line(error))


def observe(action: Callable[[], T], outcome: str) -> T:
    """What candidate code raises, as CandidateError with the outcome that was observed."""
    try:
        return action()
    except CandidateError:
        raise
    except Exception as error:
        raise fault(outcome, error) from error


def last_line(error: BaseException) -> str:
    """Type, text and place. The text is the candidate's own code: it may fail in turn."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)[:500]
    except Exception:
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}{where}"[:500]


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
