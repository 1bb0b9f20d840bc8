"""Server launch commands: taken apart, changed for another layout, and written back with everything else untouched."""

from __future__ import annotations

import dataclasses
import re
import shlex

from tideforge.costmodel.layouts import Layout
from tideforge.errors import UserError

# engine -> flag -> (canonical name, takes a value). Names are compared with "_" as "-".
LAYOUT_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "tp": ("--tensor-parallel-size", "-tp"),
        "pp": ("--pipeline-parallel-size", "-pp"),
        "dp": ("--data-parallel-size", "-dp"),
        "dcp": ("--decode-context-parallel-size", "-dcp"),
        "pcp": ("--prefill-context-parallel-size", "-pcp"),
        "ep": ("--enable-expert-parallel", "-ep"),
    },
    "sglang": {
        "tp": ("--tp-size", "--tp", "--tensor-parallel-size"),
        "pp": ("--pp-size", "--pp", "--pipeline-parallel-size"),
        "dp": ("--dp-size", "--dp", "--data-parallel-size"),
        "ep": ("--ep-size", "--ep", "--expert-parallel-size"),
        "dp_attention": ("--enable-dp-attention",),
    },
    "trtllm": {
        "tp": ("--tp_size", "--tensor_parallel_size"),
        "pp": ("--pp_size", "--pipeline_parallel_size"),
        "ep": ("--ep_size", "--moe_expert_parallel_size"),
    },
    "tideforge": {},
}
MODEL_FLAGS = {
    "vllm": ("--model",),
    "sglang": ("--model-path", "--model"),
    "trtllm": (),
    "tideforge": ("--model", "--endpoint"),
}
BOOLEAN = {
    "--enable-expert-parallel", "-ep", "--enable-dp-attention", "--trust-remote-code", "--enforce-eager", "--async-scheduling",
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill", "--no-enable-chunked-prefill",
    "--disable-log-requests", "--disable-log-stats", "--enable-auto-tool-choice", "--language-model-only", "--enable-eplb",
    "--disable-radix-cache", "--disable-cuda-graph", "--enable-torch-compile", "--enable-metrics", "--skip-server-warmup",
    "--enable-mixed-chunk", "--disable-overlap-schedule", "--enable-two-batch-overlap", "--trust_remote_code",
}  # fmt: skip
_TIDEFORGE_VALUES = {
    "--model", "--endpoint", "--dtype", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--num-blocks",
    "--block-size", "--port", "--host", "--forward", "--threads",
}  # fmt: skip
_WHOLE = {
    "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--num-blocks", "--block-size", "--threads", "--port",
    "--max-running-requests", "--max-batch-size", "--max-num-tokens", "--context-length", "--max-seq-len",
    "--chunked-prefill-size",
}  # fmt: skip


def key_of(name: str) -> str:
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag as written. `joined`: `--name=value`. A flag without a value has value None."""

    name: str
    value: str | None = None
    joined: bool = False

    def words(self) -> list[str]:
        if self.value is None:
            return [self.name]
        return [f"{self.name}={self.value}"] if self.joined else [self.name, self.value]


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """`env` are leading NAME=VALUE words, `program` the words up to the arguments. `flags` keep their order, unknown ones
    included. `model` is the positional model or, where it came by flag, that flag's value (`model_by_flag`).
    """

    engine: str
    model: str
    flags: tuple[Flag, ...] = ()
    program: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    model_by_flag: bool = False

    def get(self, *names: str) -> str | None:
        """The value of the last flag with one of these names (dashes and underscores alike); "" for a bare flag."""
        wanted = {key_of(name) for name in names}
        return next((flag.value or "" for flag in reversed(self.flags) if key_of(flag.name) in wanted), None)

    def whole(self, *names: str) -> int | None:
        """The same as a whole number above zero. Raises UserError naming the flag."""
        value = self.get(*names)
        if value is None:
            return None
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise UserError(
                names[0], f"is not a whole number above zero: {value!r}", f"mend {names[0]} in the launch command"
            )
        return int(value)

    def __str__(self) -> str:
        words = [*self.program] if self.model_by_flag else [*self.program, self.model]
        for flag in self.flags:
            words += flag.words()
        # NAME=VALUE must not be quoted as one word, or the shell takes it for a program
        env = [f"{name}={shlex.quote(value)}" for name, _, value in (word.partition("=") for word in self.env)]
        return " ".join([*env, shlex.join(words)])


def parse(text: str) -> LaunchCommand:
    """Raises UserError naming the command or the flag that cannot be understood."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"launch command {text!r}", f"cannot be split ({error})", "mend its quotes") from None
    env: list[str] = []
    while words and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", words[0], re.DOTALL):
        env.append(words.pop(0))
    engine, program = _engine(words, text)
    flags, loose = _flags(engine, words[len(program) :])
    by_flag = next((flag.value for flag in flags if flag.name in MODEL_FLAGS[engine] and flag.value), None)
    if by_flag is None and engine == "sglang":
        raise UserError(f"launch command {text!r}", "names no model", "add --model-path MODEL")
    if by_flag is None and not loose:
        raise UserError(
            f"launch command {text!r}", "names no model", f"put it after {shlex.join(program)!r} or give --model"
        )
    if len(loose) > (by_flag is None):
        extra = loose[-1]
        raise UserError(
            f"launch command: {extra!r}", "stands alone", "put the model first and every value behind its flag"
        )
    command = LaunchCommand(engine, by_flag or loose[0], tuple(flags), tuple(program), tuple(env), by_flag is not None)
    _check(command)
    return command


def _engine(words: list[str], text: str) -> tuple[str, list[str]]:
    names = [word.rsplit("/", 1)[-1] for word in words]
    if names[:2] == ["vllm", "serve"]:
        return "vllm", words[:2]
    if names[:2] == ["tideforge", "serve"]:
        return "tideforge", words[:2]
    if names[:1] == ["trtllm-serve"]:
        return "trtllm", words[: 2 if words[1:2] == ["serve"] else 1]
    if re.fullmatch(r"python[0-9.]*", (names or [""])[0]) and words[1:2] == ["-m"]:
        module = {"sglang.launch_server": "sglang", "vllm.entrypoints.openai.api_server": "vllm"}.get(
            " ".join(words[2:3])
        )
        if module:
            return module, words[:3]
    raise UserError(
        f"launch command {text!r}",
        "is of no known server",
        "begin with 'vllm serve', 'python -m sglang.launch_server', 'trtllm-serve' or 'tideforge serve'",
    )


def _flags(engine: str, words: list[str]) -> tuple[list[Flag], list[str]]:
    """Flags in order and the words that belong to none."""
    flags: list[Flag] = []
    loose: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        following = words[position + 1] if position + 1 < len(words) else None
        position += 1
        if not _is_flag(word):
            loose.append(word)
        elif "=" in word:
            name, _, value = word.partition("=")
            flags.append(Flag(name, value, joined=True))
        elif following is None or _is_flag(following) or word in BOOLEAN:
            flags.append(Flag(word))
        else:
            flags.append(Flag(word, following))
            position += 1
    if engine != "tideforge":
        return flags, loose
    for flag in flags:
        if flag.name not in _TIDEFORGE_VALUES:
            raise UserError(
                flag.name, "is no flag of tideforge serve", f"known: {', '.join(sorted(_TIDEFORGE_VALUES))}"
            )
    return flags, loose


def _is_flag(word: str) -> bool:
    """`-1` and `-0.5` are values."""
    return bool(re.match(r"-{1,2}[A-Za-z]", word))


def _check(command: LaunchCommand) -> None:
    sizes = [names for what, names in LAYOUT_FLAGS[command.engine].items() if what not in ("ep", "dp_attention")]
    if command.engine != "vllm":
        sizes += [names for what, names in LAYOUT_FLAGS[command.engine].items() if what == "ep"]
    needs_value = {key_of(name) for names in sizes for name in names} | {key_of(name) for name in _WHOLE}
    for flag in command.flags:
        if key_of(flag.name) in needs_value:
            LaunchCommand(command.engine, "", (flag,)).whole(flag.name)
        elif command.engine == "tideforge" and not flag.value:
            raise UserError(flag.name, "has no value", f"write {flag.name} VALUE in the launch command")


def layout_of(command: LaunchCommand) -> Layout:
    """The layout that the command runs now. Raises UserError when its sizes contradict each other."""
    names = LAYOUT_FLAGS[command.engine]
    size = {what: command.whole(*names[what]) or 1 for what in ("tp", "pp", "dp", "dcp", "pcp") if what in names}
    tp, dp = size.get("tp", 1), size.get("dp", 1)
    if command.engine == "vllm":
        whole = tp * dp * size["pcp"]
        ep = whole if command.get(*names["ep"]) is not None else 1
        return Layout(tp, ep, dp, size["dcp"], size["pcp"], size["pp"])
    ep = command.whole(*names["ep"]) or 1 if "ep" in names else 1
    if command.engine == "sglang" and command.get("--enable-dp-attention") is not None:
        if tp % dp:
            raise UserError(
                "--dp-size", f"{dp} does not divide --tp-size {tp}", "under --enable-dp-attention tp-size is the whole"
            )
        tp //= dp
    return Layout(tp=tp, ep=ep, dp=dp, pp=size.get("pp", 1))


def with_layout(command: LaunchCommand, layout: Layout, moe: bool) -> LaunchCommand:
    """The same command with the flags of another layout (of one server: replicas are started one by one)."""
    names = LAYOUT_FLAGS[command.engine]
    old = {key_of(name) for group in names.values() for name in group}
    kept = tuple(flag for flag in command.flags if key_of(flag.name) not in old)
    values = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "dcp": layout.dcp, "pcp": layout.pcp}
    bare: list[Flag] = []
    if command.engine == "vllm":
        bare = [Flag(names["ep"][0])] if layout.ep > 1 else []
    else:
        values["ep"] = layout.ep
    if command.engine == "sglang" and moe and layout.dp > 1:
        values["tp"], bare = layout.tp * layout.dp, [Flag("--enable-dp-attention")]
    if command.engine == "trtllm" and layout.dp > 1:
        values["tp"] = layout.tp * layout.dp
    sizes = [
        Flag(names[what][0], str(size)) for what, size in values.items() if what in names and (size > 1 or what == "tp")
    ]
    return dataclasses.replace(command, flags=(*kept, *sizes, *bare))


def instructions(command: LaunchCommand, layout: Layout, nodes: int, gpus_per_node: int) -> tuple[str, ...]:
    """What the command line alone does not say about running this layout."""
    said = []
    if layout.replicas > 1:
        said.append(
            f"start {layout.replicas} of these behind a router, each on its own {layout.gpus_per_server} GPUs and port"
        )
    if command.engine == "trtllm" and layout.dp > 1:
        said.append("put `enable_attention_dp: true` into the YAML of --extra_llm_api_options")
    if nodes > 1 and layout.gpus_per_server > gpus_per_node:
        how = {
            "vllm": "start a Ray cluster over the nodes first (--distributed-executor-backend ray)",
            "sglang": "run it on each node with --nnodes N --node-rank I --dist-init-addr HOST:PORT",
            "trtllm": "run it under mpirun or srun over the nodes (trtllm-llmapi-launch)",
        }
        said.append(how.get(command.engine, "one server does not span nodes"))
    return tuple(said)
