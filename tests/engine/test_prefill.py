"""Times to the first token by prompt length, at few layers, through workers of their own."""

from __future__ import annotations

import dataclasses

import pytest

from tideforge.engine import prefill
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.lab import Lab, keeper_status
from tideforge.engine.prefill import PrefillTime, contexts_up_to, draw_context, prefill_times, sized_for, ttft_ratio
from tideforge.engine.reference import Reference
from tideforge.errors import CandidateError, UserError

CORPUS = tuple((7 * i + i // 11) % 250 for i in range(2500))


@pytest.fixture(scope="module")
def reference(tiny):
    made = Reference.start(tiny)
    yield made
    made.close()


def test_several_thousand_tokens_are_timed_and_right(lab, plain, reference) -> None:
    other = plain.with_file("forward.py", plain.files["forward.py"] + "\n# the same\n")
    found = prefill_times(lab, [plain, other], [40, 3000], 1, CORPUS, reference, repeats=2)
    assert [(r.forward, r.context) for r in found] == [(f.id, n) for n in (40, 3000) for f in (plain, other)]
    for record in found:
        assert len(record.times_s) == 2 and record.depth == 1 and record.gap is not None
        assert record.tokens_per_s == pytest.approx(record.context / record.ttft_s) and record.ttft_s > 0
    assert found[3].gap == found[2].gap, "the same arithmetic on the same prompt"
    assert not any(name.startswith("prefill") for name in keeper_status(lab.settings.state)["arenas"])


def test_prompts_beyond_the_reference_are_checked_to_be_finite(lab, plain, reference, monkeypatch) -> None:
    monkeypatch.setattr(prefill, "CHECKED", 39)
    assert [r.gap for r in prefill_times(lab, [plain], [40], 2, CORPUS, reference, repeats=1)] == [None]
    ending = (
        "\n\nplain = build\n\ndef build(ctx):\n    inner = plain(ctx)\n    def forward(batch):\n        inner(batch)\n"
    )
    bad = ending + "        batch.logits[:, 7:] = float('inf')\n    return forward\n"
    infinite = plain.with_file("forward.py", plain.files["forward.py"] + bad)
    with pytest.raises(CandidateError, match="not finite"):
        prefill_times(lab, [infinite], [40], 2, CORPUS, reference, repeats=1)


def test_a_wrong_answer_is_not_timed(lab, plain, reference) -> None:
    upside_down = "\n        batch.logits.neg_()\n\n\ndef build("
    wrong = plain.with_file("forward.py", plain.files["forward.py"].replace("\n\n\ndef build(", upside_down))
    with pytest.raises(CandidateError, match="the reference prefers"):
        prefill_times(lab, [wrong], [700], 2, CORPUS, reference, repeats=1)


def test_a_depth_that_is_not_there_is_named(lab, plain) -> None:
    with pytest.raises(UserError, match="the model has 2 layers"):
        prefill_times(lab, [plain], [40], 3, CORPUS)


def test_contexts_double_up_to_the_longest() -> None:
    assert contexts_up_to(98_304) == (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 98304)
    assert contexts_up_to(1024) == (512, 1024) and contexts_up_to(300) == (300,) and contexts_up_to(600) == (512, 600)


def test_settings_hold_one_long_prompt() -> None:
    settings = Settings(
        ".", ".", limits=Limits(64, 8192, 4096, 100), capture_rows=(1, 64), capture_tokens=(16, 4096, 2048)
    )
    made = sized_for(settings, 98_304)
    assert made.limits == Limits(1, 8192, 98_305, 100) and made.num_blocks == 6146
    assert made.graph_shapes == [(False, 1, 1, 131072), (True, 16, 1, 131072), (True, 2048, 1, 131072)]
    assert sized_for(dataclasses.replace(settings, capture_rows=()), 98_304).graph_shapes == []


def test_a_prompt_may_be_longer_than_the_corpus() -> None:
    drawn = draw_context(CORPUS, 9000, 3)
    assert len(drawn) == 9000 and drawn == draw_context(CORPUS, 9000, 3) != draw_context(CORPUS, 9000, 4)
    assert "".join(map(chr, drawn[:1024])) in "".join(map(chr, CORPUS))
    assert len(draw_context(CORPUS[:5], 9, 1)) == 9


def test_the_ratio_is_of_the_same_prompts() -> None:
    a = PrefillTime("a", 8, 1, (0.2, 0.4, 0.3), None)
    b = PrefillTime("b", 8, 1, (0.1, 0.2, 0.15), None)
    found = ttft_ratio(a, b)
    assert found.ratio == pytest.approx(2) and found.low == pytest.approx(2) and found.pairs == 3


def test_a_lab_with_one_layer_model(tmp_path, plain, end_keeper) -> None:
    settings = Settings(state=tmp_path / "s", model=tiny_llama(tmp_path / "m", layers=1), num_blocks=8)
    end_keeper(settings.state)
    lab = Lab(settings)
    try:
        (record,) = prefill_times(lab, [plain], [5000], 1, CORPUS, repeats=1)
    finally:
        lab.close()
    assert record.context == 5000 and record.gap is None
