"""What vLLM does with a model folder: the figures to set beside `python -m tideforge.engine.bench decode` on the same GPU.

    python engine/bench/vllm_baseline.py --model DIR --mode default --users 1 64 --prompt 32 512 --output 128

Runs in vLLM's own environment (written against 0.26.0), so it imports nothing of this project. The last line is one JSON
object with a `users_N` for each number of users. Decoding is what a run of `output` tokens takes beyond a run of one token,
on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "full-decode": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},  # no torch.compile
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
MAX_MODEL_LEN = 2048


def main() -> int:
    args = arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        print(
            f"vllm: cannot be imported ({error}); run this with the python of an environment that has it",
            file=sys.stderr,
        )
        return 2
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    llm = vllm.LLM(
        model=str(args.model), skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=args.memory, **MODES[args.mode],
    )  # fmt: skip
    try:
        seconds_of(llm, prompts(args.users[0], args.prompt[0], vocabulary, 0), 1)
        figures: dict[str, Any] = {"first_token_s": seconds_since_process_start()}
        for users, prompt in zip(args.users, args.prompt, strict=True):
            figures[f"users_{users}"] = measure(llm, users, prompt, args.output, args.repeats, vocabulary)
    finally:
        llm.llm_engine.engine_core.shutdown()  # what it logs comes before the last line
    if not args.json:
        table(args.mode, figures)
    print(json.dumps({"engine": "vllm", **versions(), "mode": args.mode, **settings(llm), **figures}), flush=True)
    return 0


def table(mode: str, figures: Mapping[str, Any]) -> None:
    print(f"vLLM, {mode}: {figures['first_token_s']:.1f} s from the start of the process to the first token")
    for name, case in figures.items():
        if name.startswith("users_"):
            print(
                f"{case['users']:4d} users, {case['prompt']} + {case['output']} tokens: {case['output_tps']:9.1f} tokens/s, "
                f"decodes {case['decode_tps']:9.1f}, a user {case['decode_tps_per_user']:7.1f}"
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--mode", choices=sorted(MODES), default="default")
    parser.add_argument("--users", type=int, nargs="+", default=[1], help="requests that come at once")
    parser.add_argument("--prompt", type=int, nargs="+", default=[32], help="tokens, for each number of users")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--json", action="store_true", help="the JSON line alone")
    args = parser.parse_args()
    if len(args.users) != len(args.prompt) or len(set(args.users)) < len(args.users):
        parser.error("--users: different numbers, and as many as --prompt has")
    if min(*args.users, *args.prompt, args.repeats) < 1 or args.output < 2:
        parser.error("--users, --prompt and --repeats are at least 1, --output at least 2")
    if max(args.prompt) + args.output > MAX_MODEL_LEN:
        parser.error(f"--prompt and --output are {MAX_MODEL_LEN} tokens at most together")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json")
    return args


def measure(llm: Any, users: int, prompt: int, output: int, repeats: int, vocabulary: int) -> dict[str, Any]:
    """Medians over repeats, each on prompts of its own; `block_s` and `first_s` are the readings behind them."""
    block_s, first_s = [], []
    for index in range(repeats + 1):
        texts = prompts(users, prompt, vocabulary, index)
        block_s.append(seconds_of(llm, texts, output))
        first_s.append(seconds_of(llm, texts, 1))
    block_s, first_s = block_s[1:], first_s[1:]  # kernels are compiled in the first
    block = statistics.median(block_s)
    per_user = (output - 1) / (block - statistics.median(first_s))
    return {
        "users": users, "prompt": prompt, "output": output, "repeats": repeats,
        "output_tps": users * output / block, "decode_tps": users * per_user, "decode_tps_per_user": per_user,
        "block_s": block_s, "first_s": first_s,
    }  # fmt: skip


def seconds_of(llm: Any, texts: list[list[int]], output: int) -> float:
    """Wall time until every user has `output` tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    found = [len(answer.outputs[0].token_ids) for answer in answers]
    if found != [output] * len(texts):
        raise RuntimeError(f"{output} tokens for each of {len(texts)} users were asked for, vLLM gave {found}")
    return seconds


def prompts(users: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(users)]


def seconds_since_process_start() -> float:
    """Linux: the interpreter's own start and all imports are counted."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, Any]:
    import torch
    import vllm
    from vllm.platforms import current_platform

    return {"version": vllm.__version__, "torch": torch.__version__, "gpu": current_platform.get_device_name()}


def settings(llm: Any) -> dict[str, Any]:
    """What vLLM made of the mode."""
    from vllm import envs

    config = llm.llm_engine.vllm_config
    return {
        "compilation_mode": config.compilation_config.mode.name,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "own_process": envs.VLLM_ENABLE_V1_MULTIPROCESSING,  # the engine's, apart from this one
        "v2_model_runner": config.use_v2_model_runner,
    }


if __name__ == "__main__":
    sys.exit(main())
