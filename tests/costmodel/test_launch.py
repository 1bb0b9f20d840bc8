"""Launch commands: what is parsed is written back, layouts change their own flags alone, nonsense is named."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tideforge.costmodel.launch import Flag, LaunchCommand, layout_of, parse, with_layout
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.memory import Precision
from tideforge.costmodel.misspelt import not_understood
from tideforge.costmodel.options import limits_of, precision_of
from tideforge.costmodel.shapes import get
from tideforge.errors import UserError

PROGRAMS = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python3", "-m", "sglang.launch_server"),
    "trtllm": ("trtllm-serve",),
    "tideforge": ("tideforge", "serve"),
}
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
values = words.filter(lambda word: not word.startswith("-"))
unknown = st.from_regex(r"--x-[a-z_.-]{1,8}", fullmatch=True)  # no engine has flags that begin so
flags = st.one_of(
    st.builds(Flag, unknown, st.none() | values),
    st.builds(lambda name, value: Flag(name, value, joined=True), unknown, words),
    st.sampled_from([Flag("--max-num-seqs", "64"), Flag("--enable-dp-attention"), Flag("--seed", "-1")]),
)
models = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9./ '_-]{0,12}", fullmatch=True)


@st.composite
def commands(draw: st.DrawFn) -> LaunchCommand:
    engine = draw(st.sampled_from(["vllm", "sglang", "trtllm"]))
    found, model = draw(st.lists(flags, max_size=6)), draw(models)
    by_flag = engine == "sglang"
    if by_flag:
        found.insert(draw(st.integers(0, len(found))), Flag("--model-path", model))
    env = draw(st.lists(st.builds(lambda value: f"A_1={value}", words), max_size=2))
    return LaunchCommand(engine, model, tuple(found), PROGRAMS[engine], tuple(env), by_flag)


@settings(deadline=None)
@given(commands())
def test_round_trip(command: LaunchCommand):
    assert parse(str(command)) == command


powers = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)
@given(commands(), powers, powers, powers)
def test_a_layout_written_into_a_command_is_read_back(command: LaunchCommand, tp: int, dp: int, pp: int):
    layout = Layout(tp=1 if command.engine == "trtllm" else tp, dp=1 if command.engine == "trtllm" else dp, pp=pp)
    if command.engine == "vllm":
        layout = Layout(tp=tp, ep=tp * dp, dp=dp, pp=pp, dcp=tp)
    written = with_layout(command, layout, moe=True)
    assert layout_of(parse(str(written))) == layout
    kept = [flag for flag in command.flags if flag.name != "--enable-dp-attention"]
    assert [flag for flag in written.flags if flag in kept] == kept


def test_known_commands_are_understood():
    command = parse(
        "HF_HOME='/a b' vllm serve org/model -tp 4 --data-parallel-size=2 --enable_expert_parallel --new-flag"
    )
    assert (command.model, command.env, layout_of(command)) == (
        "org/model",
        ("HF_HOME=/a b",),
        Layout(tp=4, ep=8, dp=2),
    )
    sglang = parse("python -m sglang.launch_server --model-path m --tp 8 --dp 4 --enable-dp-attention --ep 8")
    assert layout_of(sglang) == Layout(tp=2, ep=8, dp=4)
    assert layout_of(parse("trtllm-serve serve m --tp_size 4 --ep_size 2")) == Layout(tp=4, ep=2)
    assert "--tp-size 8 --dp-size 8 --ep-size 8 --enable-dp-attention" in str(
        with_layout(sglang, Layout(ep=8, dp=8), True)
    )


def test_flags_bear_on_precision_and_limits():
    own = parse("tideforge serve --model m --dtype float32 --num-blocks 101 --block-size 32 --max-num-seqs 4")
    limits = limits_of(own)
    assert (limits.kv_tokens, limits.max_num_seqs) == (3200, 4)
    assert precision_of(own, get("Llama-3.2-1B")) == Precision("fp32", "fp32", "fp32")
    quantised = parse("vllm serve m --quantization fp8 --kv-cache-dtype fp8_e4m3 --gpu-memory-utilization 0.5")
    assert precision_of(quantised, get("Qwen3-32B")) == Precision("fp8", "fp8", "fp8")
    assert limits_of(quantised).memory_share == 0.5
    assert precision_of(parse("vllm serve m --dtype bfloat16"), get("gpt-oss-20b")) == Precision("bf16", "fp4", "bf16")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no known server"),
        ("vllm serve 'x", "cannot be split"),
        ("llama-server -m x", "no known server"),
        ("python train.py", "no known server"),
        ("vllm serve", "names no model"),
        ("vllm serve --port 80", "names no model"),
        ("python -m sglang.launch_server --tp 8", "--model-path"),
        ("vllm serve m --tensor-parallel-size many", "--tensor-parallel-size"),
        ("vllm serve m --tensor-parallel-size", "--tensor-parallel-size"),
        ("vllm serve m -tp 0", "-tp"),
        ("vllm serve m --trust-remote-code stray", "stray"),
        ("trtllm-serve m --ep_size=x", "--ep_size"),
        ("tideforge serve --model m --tensor-parallel-size 2", "--tensor-parallel-size"),
        ("tideforge serve --model m --threads", "--threads"),
        ("tideforge serve --model m --port http", "--port"),
    ],
)
def test_unparsable_commands_name_the_thing(text: str, named: str):
    with pytest.raises(UserError) as caught:
        parse(text)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("share", ["much", "0", "1.5", "nan"])
def test_a_memory_share_out_of_range_names_the_flag(share: str):
    with pytest.raises(UserError, match="--gpu-memory-utilization"):
        limits_of(parse(shlex.join(["vllm", "serve", "m", "--gpu-memory-utilization", share])))


def test_this_projects_own_defaults_are_its_servers() -> None:
    from tideforge.costmodel.options import DEFAULT_SEQS, DEFAULT_TOKENS
    from tideforge.engine.config import Limits

    limits = Limits()
    assert (DEFAULT_SEQS["tideforge"], DEFAULT_TOKENS["tideforge"]) == (
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("vllm serve m --max-num-batched-token 8", {"--max-num-batched-token": "--max-num-batched-tokens"}),
        ("vllm serve m --tensor-parallel 8", {"--tensor-parallel": "--tensor-parallel-size"}),
        ("vllm serve m --tp-size 8", {"--tp-size": "--tensor-parallel-size"}),
        ("vllm serve m --gpu-memory-utilisation=0.9", {"--gpu-memory-utilisation": "--gpu-memory-utilization"}),
        ("trtllm-serve m --tp_sizes 8", {"--tp_sizes": "--tp_size"}),
        ("vllm serve m --tensor_parallel_size 8 -tp 8 --data-parallel-size-local 1 --seed 3 --max-cudagraph-capture-size 8", {}),
        ("python -m sglang.launch_server --model-path m --tensor-parallel-size 8 --tp 8 --enable-dp-lm-head --port 1", {}),
    ],
)  # fmt: skip
def test_near_misses_of_flags_are_told_from_flags_of_no_concern(text: str, near: dict[str, str]):
    assert not_understood(parse(text)) == near
