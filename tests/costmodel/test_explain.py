"""Where a winner changes, and the front: each as it is when the other loads are ranked one by one."""

from __future__ import annotations

import dataclasses
import json

from click.testing import CliRunner

from tideforge.costmodel.explain import explained
from tideforge.costmodel.predict import Traffic
from tideforge.costmodel.question import question
from tideforge.costmodel.rank import rank
from tideforge.flows.commands.rank import rank as command

LLAMA = ("vllm serve m --quantization fp8", "Llama-3.1-70B", "h200", 8, 1)


def test_winners_are_those_of_single_rankings_and_changes_lie_between_them() -> None:
    asked = question(*LLAMA, Traffic(1024, 1024, 64))
    found = explained(rank(asked))
    assert found is not None and len(set(found.winners)) > 1 and found.changes
    for users, winner in zip(found.users, found.winners, strict=True):
        one = rank(dataclasses.replace(asked, traffic=Traffic(1024, 1024, users)))
        assert str(one.ranked[0].layout) == winner
    for change in found.changes:
        below = max(at for at, users in enumerate(found.users) if users < change.users)
        assert (found.winners[below], found.winners[below + 1]) == (change.before, change.after)


def test_twice_the_prompt_costs_and_the_front_is_one() -> None:
    found = explained(rank(question(*LLAMA, Traffic(4096, 256, 64))))
    assert found is not None and 0.3 < found.doubled_prompts_ratio < 1
    a_user = [point.tokens_per_s_per_user for point in found.front]
    a_gpu = [point.output_tokens_per_s_per_gpu for point in found.front]
    assert a_user == sorted(a_user, reverse=True) and a_gpu == sorted(a_gpu) and len(found.front) > 3


def test_nothing_legal_needs_no_explanation() -> None:
    assert explained(rank(question("vllm serve m", "Kimi-K3", "h200", 8, 1, Traffic(1024, 256, 8)))) is None


def test_the_command_explains() -> None:
    words = ["--launch", "vllm serve m", "--model", "Qwen3-8B", "--hardware", "h200", "--gpus", "2", "--explain"]
    shown = CliRunner().invoke(command, words, catch_exceptions=False).output
    assert "with prompts twice as long" in shown and "what nothing else beats in both" in shown
    found = json.loads(CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False).output)["explained"]
    assert len(found["winners"]) == len(found["users"]) and found["front"]
