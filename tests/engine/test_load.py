"""Loads: who is sent what and when, what a turn's prompt holds, and what a comparison of two sides says."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tideforge.data.workload import RequestShape, Turn
from tideforge.engine import load as loads
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled
from tideforge.engine.load import Closed, LoadBlock, Open, Reply, compare, draw_script, measure_load, run_load
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.measure import Answer, Side
from tideforge.errors import CandidateError

TALKS = (
    RequestShape(20, 5, 0.0, (Turn(7, 4, 0.01), Turn(3, 6, 0.0))),
    RequestShape(9, 3, 0.02),
    RequestShape(33, 4, 0.03, (Turn(5, 2, 0.02),)),
)
CORPUS = tuple((7 * i + i // 11) % 250 for i in range(2000))
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)


class Spy:
    """Answers each row with a running number and remembers who was under way together."""

    def __init__(self, bad_at: int | None = None) -> None:
        self.steps, self.bad_at, self.log = 0, bad_at, []

    def execute(self, step):
        self.steps += 1
        self.log.append(set(step.request_ids))
        return [Sampled([-1 if self.steps == self.bad_at else self.steps] * len(step.request_ids))]

    def halt(self) -> None:
        pass


def spied(load: loads.Load, name: str = "f", spy: Spy | None = None) -> tuple[Side, Spy]:
    spy = spy or Spy()
    return Side.of(name, loads.core_for(Settings(".", ".", limits=LIMITS, num_blocks=64, block_size=8), load), spy), spy


def replies(block: LoadBlock) -> dict[tuple[int, int], Reply]:
    return {(reply.conversation, reply.turn): reply for reply in block.replies}


@pytest.mark.parametrize(
    "load", [Closed(2, TALKS), Closed(1, TALKS), Open(TALKS), Open(TALKS, pace=4, shared_tokens=16)]
)
def test_every_turn_is_answered_with_all_that_was_said(load):
    side, _ = spied(load)
    script = draw_script(load, CORPUS, secret=1)
    block = run_load(side, load, script)
    found = replies(block)
    assert set(found) == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)} and len(block.replies) == 6
    for (talk, number), reply in found.items():
        shape = TALKS[talk]
        asked = shape.turns[number - 1].output_tokens if number else shape.output_tokens
        assert len(reply.answer.tokens) == len(reply.answer.times_s) == asked
        before = found[talk, number - 1].answer if number else None
        assert reply.answer.prompt == (before.prompt + before.tokens if before else ()) + script[talk][number]
        assert list(reply.answer.times_s) == sorted(reply.answer.times_s) and reply.answer.ttft_s > 0
        assert reply.finish_s <= block.seconds and len(reply.gaps_s) == asked - 1
    assert side.core.pool.num_free == side.core.pool.capacity and not side.core.has_work()


def test_a_user_thinks_before_the_next_turn_and_arrivals_are_kept():
    load = Open(TALKS, pace=0.5)
    found = replies(run_load(spied(load)[0], load, draw_script(load, CORPUS, 2)))
    assert [found[talk, 0].sent_s for talk in range(3)] == [0.0, 0.04, 0.06]
    assert found[0, 1].sent_s == pytest.approx(found[0, 0].finish_s + 0.02)
    assert found[0, 2].sent_s == pytest.approx(found[0, 1].finish_s)
    assert found[2, 1].sent_s == pytest.approx(found[2, 0].finish_s + 0.04)


def test_a_closed_load_keeps_its_users_busy_and_no_more():
    load = Closed(2, tuple(RequestShape(6, 3 + i % 3) for i in range(7)))
    side, spy = spied(load)
    block = run_load(side, load, draw_script(load, CORPUS, 3))
    assert len(block.replies) == 7 and max(map(len, spy.log)) == 2
    assert not side.core.pool.prefix_cache, "single requests share nothing: all of a prompt is computed"
    sent = sorted(reply.sent_s for reply in block.replies)
    ends = sorted(reply.finish_s for reply in block.replies)
    assert sent[:2] == [0.0, 0.0] and sent[2:] == pytest.approx(ends[:5])


def test_a_user_thinks_before_its_next_conversation():
    load = Closed(1, tuple(RequestShape(6, 3) for _ in range(3)), think_s=0.05)
    found = replies(run_load(spied(load)[0], load, draw_script(load, CORPUS, 3)))
    assert found[0, 0].sent_s == 0
    assert [found[n, 0].sent_s for n in (1, 2)] == pytest.approx([found[n, 0].finish_s + 0.05 for n in (0, 1)])


def test_an_open_load_does_not_wait_for_answers():
    load = Open(tuple(RequestShape(6, 30) for _ in range(4)))
    side, spy = spied(load)
    run_load(side, load, draw_script(load, CORPUS, 3))
    assert max(map(len, spy.log)) == 4


def test_text_depends_on_the_secret_and_begins_alike_where_it_is_shared():
    load = Closed(2, TALKS, shared_tokens=12)
    script = draw_script(load, CORPUS, 5)
    assert script == draw_script(load, CORPUS, 5) != draw_script(load, CORPUS, 6)
    assert len({talk[0][:12] for talk in script}) == 1
    assert [[len(span) for span in talk] for talk in script] == [[32, 7, 3], [21], [45, 5]]
    with pytest.raises(ValueError, match="shorter"):
        draw_script(load, CORPUS[:30], 5)


def test_a_load_with_turns_asks_for_a_prefix_cache():
    load, alone = Closed(2, TALKS), Closed(2, (RequestShape(6, 3),))
    side, _ = spied(alone)
    with pytest.raises(ValueError, match="prefix cache"):
        run_load(side, load, draw_script(load, CORPUS, 1))


def test_what_an_executor_raises_comes_through():
    load = Closed(2, TALKS)
    side, _ = spied(load, spy=Spy(bad_at=3))
    with pytest.raises(CandidateError, match="NaN"):
        run_load(side, load, draw_script(load, CORPUS, 1))
    assert not side.core.has_work()


def test_turns_that_outgrow_the_context_are_left_out():
    assert TALKS[0].context_tokens == 45
    assert loads.fitting(TALKS[0], 45) == TALKS[0]
    assert loads.fitting(TALKS[0], 44) == dataclasses.replace(TALKS[0], turns=TALKS[0].turns[:1])
    assert loads.fitting(TALKS[0], 5).turns == ()


def test_later_turns_take_their_prefix_from_the_cache_and_answer_as_without_it(tiny, plain, tmp_path):
    settings = Settings(tmp_path, tiny, limits=LIMITS, num_blocks=64)
    load = Closed(2, TALKS)
    side = Side.of(plain.id, loads.core_for(settings, load), LocalExecutor(plain, LocalMemory(settings)))
    block = run_load(side, load, draw_script(load, CORPUS, 7))
    found = replies(block)
    assert found[0, 0].cached_tokens == 0
    assert found[0, 1].cached_tokens == 16 and found[0, 2].cached_tokens == 32 and found[2, 1].cached_tokens == 32
    alone = Closed(1, (RequestShape(1, 1),))
    fresh = Side.of(plain.id, loads.core_for(settings, alone), LocalExecutor(plain, LocalMemory(settings)))
    for reply in block.replies:
        prompt, tokens = reply.answer.prompt, reply.answer.tokens
        single = Closed(1, (RequestShape(len(prompt), len(tokens)),))
        again = run_load(fresh, single, ((prompt,),))
        assert again.replies[0].answer.tokens == tokens and again.replies[0].cached_tokens == 0


def test_both_sides_get_the_same_load_in_turned_order(tiny, plain, tmp_path):
    settings = Settings(tmp_path, tiny, limits=LIMITS, num_blocks=64)
    other = plain.with_file("forward.py", plain.files["forward.py"] + "\n# the same\n")
    load, order = Open(TALKS, pace=10), []

    class Told(LocalExecutor):
        def execute(self, step):
            if not order or order[-1] != step.forward:
                order.append(step.forward)
            return super().execute(step)

    a, b = (
        Side.of(forward.id, loads.core_for(settings, load), Told(forward, LocalMemory(settings)))
        for forward in (plain, other)
    )
    found = measure_load(a, b, load, CORPUS, pairs=4)
    assert order in ([a.forward, b.forward, a.forward, b.forward, a.forward], [b.forward, a.forward] * 2 + [b.forward])
    assert [interval.pairs for interval in (found.ttft_p50, found.ttft_p90, found.output_tps)] == [4] * 3
    for ours, theirs in found.blocks:
        mine, other_replies = replies(ours), replies(theirs)
        assert {key: r.answer.prompt for key, r in mine.items()} == {
            key: r.answer.prompt for key, r in other_replies.items()
        }
        assert mine[0, 0].cached_tokens == other_replies[0, 0].cached_tokens == 0, "no prefix of the last pair"
    assert measure_load(a, b, load, CORPUS, pairs=4, most_s=0).ttft_p50.pairs == 1, "time is up after the first"
    texts = {ours.replies[0].answer.prompt for ours, _ in found.blocks}
    assert len(texts) == 4


def block_of(ttfts: list[float], gap_s: float, tokens: int = 5) -> LoadBlock:
    answers = (Answer((1, 2), (3,) * tokens, tuple(ttft + gap_s * i for i in range(tokens))) for ttft in ttfts)
    made = tuple(Reply(i, 0, 0.5, answer, 0) for i, answer in enumerate(answers))
    return LoadBlock(max(reply.finish_s for reply in made), made)


def test_a_comparison_tells_first_tokens_from_the_others():
    rng = random.Random(4)
    blocks = []
    for _ in range(6):
        ttfts = [rng.uniform(0.1, 0.2) for _ in range(20)]
        noisy = [ttft / 1.25 * rng.uniform(0.99, 1.01) for ttft in ttfts]
        blocks.append((block_of(ttfts, 0.01), block_of(noisy, 0.02)))
    found = compare(blocks)
    for interval in (found.ttft_p50, found.ttft_p90):
        assert interval.low < 1.25 < interval.high and interval.low > 1.2 and interval.pairs == 6
    assert found.user_tps_p90.ratio == pytest.approx(0.5) and found.user_tps_p90.high < 0.51
    assert compare([(block_of([0.1], 0, 1), block_of([0.2], 0, 1))]).user_tps_p90 is None


def test_figures_of_a_block():
    block = block_of([0.1, 0.2, 0.3], 0.1)
    assert block.ttft_s(0.5) == pytest.approx(0.2) and block.ttft_s(0.9) == pytest.approx(0.28)
    assert block.user_tps_p90 == pytest.approx(10) and block.seconds == pytest.approx(0.5 + 0.3 + 0.4)
    assert block.output_tps == pytest.approx(15 / block.seconds) and block.total_tps == pytest.approx(
        21 / block.seconds
    )


def test_cores_of_a_load():
    settings = Settings(".", ".", limits=LIMITS)
    assert isinstance(loads.core_for(settings, Open(TALKS)), EngineCore)
    assert loads.core_for(settings, Open(TALKS)).pool.prefix_cache
    assert loads.core_for(settings, Open(TALKS[1:2], shared_tokens=8)).pool.prefix_cache
    assert not loads.core_for(settings, Open(TALKS[1:2])).pool.prefix_cache
