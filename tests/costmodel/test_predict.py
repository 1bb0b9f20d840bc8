"""Physics that no price may break, on every shape and accelerator; and ranking from the question to the JSON."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tideforge.costmodel import hardware, launch, shapes
from tideforge.costmodel.coefficients import SOURCES, Coefficients
from tideforge.costmodel.layouts import Layout, enumerate_layouts, refusal
from tideforge.costmodel.memory import Limits, Precision, weight_bytes
from tideforge.costmodel.passes import Setting, coverage
from tideforge.costmodel.predict import Prediction, Traffic, predict
from tideforge.costmodel.rank import Question, rank, tie, to_dict, unfit
from tideforge.costmodel.shapes import BYTES
from tideforge.errors import UserError

CO = Coefficients()
LEGAL = {
    name: [x for x in enumerate_layouts(8, shape.experts is not None) if refusal(x, shape, "vllm") is None]
    for name, shape in shapes.catalogue().items()
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Setting, Traffic]:
    shape = shapes.get(draw(st.sampled_from(sorted(LEGAL))))
    machine = hardware.get(draw(st.sampled_from(hardware.names())))
    layout = draw(st.sampled_from(LEGAL[shape.name] or [Layout()]))
    traffic = Traffic(draw(st.floats(1, 1e5)), draw(st.floats(1, 1e4)), draw(st.floats(0.5, 5000)))
    return Setting(layout, shape, machine, Precision.of(shape), CO), traffic


def tokens_per_s(s: Setting, traffic: Traffic) -> Prediction:
    return predict(s, traffic, Limits())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_never_faster_than_bytes_and_arithmetic_allow(case: tuple[Setting, Traffic]):
    s, traffic = case
    found = tokens_per_s(s, traffic)
    shape, machine = s.shape, s.hardware
    per_s_per_gpu = found.output_tokens_per_s_per_gpu
    fewest = shape.active_parameters - shape.embedding_parameters * (1 if shape.tied else 2)
    steps = (traffic.output_tokens - 1) / traffic.output_tokens  # the first token comes out of the prefill
    assert per_s_per_gpu * 2 * fewest * steps <= max(machine.flops_per_s.values()) * (1 + 1e-6)
    # one user: each step of a server reads every weight that one token uses, spread over that server's GPUs
    alone = tokens_per_s(s, dataclasses.replace(traffic, users=0.5))
    least = BYTES[s.precision.experts] if shape.experts else BYTES[s.precision.common]
    floor_s = fewest * min(least, BYTES[s.precision.common]) / (machine.read_bytes_per_s * s.layout.gpus_per_server)
    assert alone.tpot_ms * 1e-3 >= floor_s * (1 - 1e-6)


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(1, 10), st.sampled_from(["read_bytes_per_s", "link_bytes_per_s", "node_link_bytes_per_s"]))
def test_a_faster_part_is_never_slower(case: tuple[Setting, Traffic], factor: float, field: str):
    s, traffic = case
    faster = dataclasses.replace(s.hardware, **{field: getattr(s.hardware, field) * factor})
    before, after = tokens_per_s(s, traffic), tokens_per_s(dataclasses.replace(s, hardware=faster), traffic)
    assert after.output_tokens_per_s >= before.output_tokens_per_s * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(1, 20))
def test_more_users_never_give_more_tokens_per_s_per_user(case: tuple[Setting, Traffic], factor: float):
    s, traffic = case
    more = dataclasses.replace(traffic, users=traffic.users * factor)
    assert tokens_per_s(s, more).tokens_per_s_per_user <= tokens_per_s(s, traffic).tokens_per_s_per_user * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_terms_add_up_to_the_price(case: tuple[Setting, Traffic]):
    s, traffic = case
    found = tokens_per_s(s, traffic)
    assert traffic.output_tokens / found.request_s == pytest.approx(found.output_tokens_per_s, rel=1e-6)
    assert {term.tag for term in found.terms} <= {"measured", "fitted", "spec-sheet", "guessed"}
    assert found.binding in found.terms


@settings(deadline=None)
@given(st.integers(1, 512), st.floats(1, 1e6))
def test_coverage_is_between_one_token_and_all(experts: int, tokens: float):
    per_token = max(1, experts // 16)
    assert per_token * (1 - 1e-9) <= coverage(experts, per_token, tokens) <= experts


def ask(command: str, model: str, machine: str = "h200", gpus: int = 8, nodes: int = 1, **more: object) -> Question:
    traffic = more.pop("traffic", Traffic(1024, 256, 64))
    return Question(launch.parse(command), shapes.get(model), hardware.get(machine), gpus, nodes, traffic, **more)


@pytest.mark.parametrize("machine", hardware.names())
def test_all_shapes_on_all_accelerators(machine: str):
    gpus = 1 if machine == "cpu" else 4
    for name in shapes.catalogue():
        answer = rank(ask("vllm serve m", name, machine, gpus))
        assert len(answer.ranked) + len(answer.rejected) == len(
            list(enumerate_layouts(gpus, shapes.get(name).experts is not None))
        )
        assert all(entry.reason for entry in answer.rejected)


@pytest.mark.parametrize(
    ("model", "machine"), [("Qwen3-235B-A22B", "h200"), ("DeepSeek-V3", "h200"), ("Kimi-K3", "b300")]
)
def test_mixture_models_on_eight_gpus(model: str, machine: str):
    answer = rank(ask(f"vllm serve {model} -tp 8 --max-model-len 8192", model, machine))
    worths = [entry.prediction.output_tokens_per_s for entry in answer.ranked]
    assert worths == sorted(worths, reverse=True) and answer.ranked[0].tied
    assert answer.current is not None and answer.current.layout == Layout(tp=8)
    for entry in answer.ranked:
        again = launch.parse(entry.command)
        assert dataclasses.replace(launch.layout_of(again), replicas=entry.layout.replicas) == entry.layout
        assert again.get("--max-model-len") == "8192"
        assert entry.layout.replicas == 1 or "router" in entry.instructions[0]


def test_what_does_not_fit_is_refused_with_figures():
    answer = rank(ask("vllm serve m", "Kimi-K3"))
    assert not answer.ranked
    wide = next(entry for entry in answer.rejected if entry.layout == Layout(tp=8))
    assert wide.kind == "memory" and "GiB usable" in wide.reason and "weights" in wide.reason
    s = Setting(Layout(), shapes.get("Qwen3-32B"), hardware.get("h100"), Precision("bf16", "bf16", "bf16"), CO)
    assert "KV space" in unfit(s, Traffic(100_000, 10, 1), Limits()).reason
    assert unfit(s, Traffic(100, 10, 1), Limits()) is None


def test_context_split_spares_kv_memory_and_queues_fewer_users():
    few = rank(ask("vllm serve m", "DeepSeek-V3", traffic=Traffic(30_000, 1000, 512)))
    by = {str(entry.layout): entry.prediction for entry in few.ranked}
    assert by["tp8 dcp8"].slots > 6 * by["tp8"].slots
    assert by["tp8"].queue_ms > by["tp8 dcp8"].queue_ms
    assert by["tp8 dcp8"].output_tokens_per_s > by["tp8"].output_tokens_per_s


def test_weights_spread_over_the_whole_expert_world():
    shape, precision = shapes.get("DeepSeek-V3"), Precision.of(shapes.get("DeepSeek-V3"))
    tp, dp = weight_bytes(Layout(tp=8), shape, precision), weight_bytes(Layout(ep=8, dp=8), shape, precision)
    assert tp == pytest.approx(shape.weight_bytes("fp8") / 8)
    assert tp < dp < 1.3 * tp  # attention is held by every rank, experts once


def test_ties_are_shown_and_a_clear_loser_is_not_one():
    answer = rank(ask("vllm serve m", "Llama-3.1-70B", traffic=Traffic(1024, 256, 1)))
    assert str(answer.ranked[0].layout) == "tp8"
    assert not answer.ranked[-1].tied
    best = answer.ranked[0].prediction
    assert tie("output_tps", best, best)


def test_more_users_per_gpu_favour_smaller_engines():
    """Llama-70B FP8 on H200 is measured to change from TP8 to TP4 and on to TP2 as users grow."""

    def winner(users: float) -> int:
        answer = rank(ask("vllm serve m --quantization fp8", "Llama-3.1-70B", traffic=Traffic(1024, 1024, users)))
        return next(entry.layout.tp for entry in answer.ranked if entry.layout.pp == entry.layout.pcp == 1)

    assert winner(1) == 8
    assert winner(1) > winner(512)


def test_objective_and_limits_decide_the_order():
    users = rank(ask("vllm serve m", "Llama-3.1-70B", maximize="ttft"))
    assert users.ranked[0].prediction.ttft_ms == min(entry.prediction.ttft_ms for entry in users.ranked)
    limit = sorted(entry.prediction.tpot_ms for entry in users.ranked)[2]
    limited = rank(ask("vllm serve m", "Llama-3.1-70B", tpot_limit_ms=limit))
    kept = [not entry.broken for entry in limited.ranked]
    assert kept == sorted(kept, reverse=True) and sum(kept) == 3
    assert "TPOT" in limited.ranked[-1].broken[0]


@pytest.mark.parametrize(
    "changes", [dict(gpus=9), dict(gpus=7, nodes=2), dict(gpus=0), dict(maximize="joy"), dict(gpus=32, nodes=2)]
)
def test_bad_questions_are_user_errors(changes: dict):
    with pytest.raises(UserError):
        ask("vllm serve m", "Qwen3-8B", **changes)


def test_the_answer_is_json_and_every_coefficient_has_a_source():
    answer = to_dict(rank(ask("trtllm-serve m --tp_size 8", "Qwen3-30B-A3B")))
    again = json.loads(json.dumps(answer, allow_nan=False))
    assert again["ranked"][0]["terms"][0].keys() == {"name", "seconds", "tag"}
    assert {field.name for field in dataclasses.fields(Coefficients)} - {"measured"} == SOURCES.keys()
    dp = next(entry for entry in answer["ranked"] if entry["sizes"]["dp"] > 1)
    assert any("enable_attention_dp" in line for line in dp["instructions"])


def test_one_layout_on_a_cpu():
    command = "tideforge serve --model m --dtype float32 --max-num-seqs 16 --max-model-len 2048"
    answer = rank(ask(command, "SmolLM2-135M-Instruct", "cpu", 1, traffic=Traffic(24, 48, 16)))
    assert [str(entry.layout) for entry in answer.ranked] == ["tp1"] and not answer.rejected
    assert answer.ranked[0].current and answer.ranked[0].command == command
    assert {term.tag for term in answer.ranked[0].prediction.terms} == {"guessed"}
