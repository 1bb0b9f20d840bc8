"""What a launch command's flags say about precision, batch limits and memory, engine by engine."""

from __future__ import annotations

from tideforge.costmodel.launch import LaunchCommand
from tideforge.costmodel.memory import Limits, Precision
from tideforge.costmodel.shapes import ModelShape
from tideforge.errors import UserError

DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "bf16", "half": "bf16"}
# What is assumed where the command is silent. For other engines these are starting points of about the right size, checked against
# no version: theirs depend on it, on the GPU and on how they are started. tideforge's two limits are those of its own server; its
# share of memory is assumed like the others.
DEFAULT_SEQS = {"vllm": 1024, "sglang": 4096, "trtllm": 2048, "tideforge": 16}
DEFAULT_TOKENS = {"vllm": 8192, "sglang": 8192, "trtllm": 8192, "tideforge": 512}
DEFAULT_SHARE = {"vllm": 0.9, "sglang": 0.88, "trtllm": 0.9, "tideforge": 0.9}
SEQS = ("--max-num-seqs", "--max-running-requests", "--max-batch-size")
TOKENS = ("--max-num-batched-tokens", "--chunked-prefill-size", "--max-num-tokens")
LENGTH = ("--max-model-len", "--context-length", "--max-seq-len")
SHARE = ("--gpu-memory-utilization", "--mem-fraction-static", "--kv-cache-free-gpu-memory-fraction")
READ_FLAGS = (
    *SEQS,
    *TOKENS,
    *LENGTH,
    *SHARE,
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--block-size",
    "--port",
)


def limits_of(command: LaunchCommand) -> Limits:
    """Raises UserError naming the flag whose value is no number or out of range."""
    blocks, size = command.whole("--num-blocks"), command.whole("--block-size") or 16
    own = command.engine == "tideforge"
    return Limits(
        max_num_seqs=command.whole(*SEQS) or DEFAULT_SEQS[command.engine],
        max_num_batched_tokens=command.whole(*TOKENS) or DEFAULT_TOKENS[command.engine],
        max_model_len=command.whole(*LENGTH),
        memory_share=_share(command),
        kv_tokens=(blocks - 1) * size if own and blocks and blocks > 1 else None,  # block 0 is the dummy page
    )


def _share(command: LaunchCommand) -> float:
    text = command.get(*SHARE)
    if text is None:
        return DEFAULT_SHARE[command.engine]
    flag = next(name for name in SHARE if command.get(name) is not None)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UserError(flag, f"is no share of memory: {text!r}", "give a number above 0 and at most 1")
    return share


def precision_of(command: LaunchCommand, shape: ModelShape) -> Precision:
    """From --quantization, --dtype and --kv-cache-dtype where they are given, else as the checkpoint has it."""
    kv = _kv(command.get("--kv-cache-dtype", "--kv_cache_dtype"))
    quantised = _quantised((command.get("--quantization", "-q") or "").lower())
    if quantised:
        common = "bf16" if shape.experts and quantised in ("fp4", "int4") else quantised
        return Precision(common, quantised, kv or "bf16")
    dtype = command.get("--dtype")
    asked = DTYPES.get(dtype or "")
    if command.engine == "tideforge" and dtype not in (None, "", "auto") and asked is None:
        raise UserError("--dtype", f"is unknown: {dtype!r}", f"choose one of {', '.join(DTYPES)}")
    if asked and shape.precision in ("bf16", "fp32"):
        return Precision(asked, asked, kv or asked)
    return Precision.of(shape, kv)


def require_same_dtype(command: LaunchCommand, precision: str) -> None:
    """UserError when this project's server is told one precision by the endpoint file and another by its command."""
    dtype = command.get("--dtype") or "auto"
    asked = {"float": "float32", "half": "float16"}.get(dtype, dtype)
    if command.engine == "tideforge" and asked not in ("auto", precision):
        raise UserError(
            "launch: --dtype", f"is {dtype}, but the endpoint's precision is {precision}", "make the two agree"
        )


def _quantised(text: str) -> str:
    for mark, name in (
        ("fp4", "fp4"),
        ("fp8", "fp8"),
        ("awq", "int4"),
        ("gptq", "int4"),
        ("int4", "int4"),
        ("w8a8", "int8"),
    ):
        if mark in text:
            return name
    return ""


def _kv(text: str | None) -> str | None:
    if not text or text == "auto":
        return None
    if "fp8" in text or "int8" in text:
        return "fp8"
    if "fp4" in text:
        return "fp4"
    return DTYPES.get(text, "bf16")
