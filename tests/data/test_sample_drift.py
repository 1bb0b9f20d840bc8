from __future__ import annotations

import dataclasses
import datetime
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tideforge.data.drift import detect
from tideforge.data.fidelity import fidelity
from tideforge.data.length_map import LengthMap
from tideforge.data.profile import keep_between, make_profile, profile_logs
from tideforge.data.profile_records import Profile, Turns
from tideforge.data.readers import connect
from tideforge.data.sample import sample_workload
from tideforge.data.schema import REQUESTS_SCHEMA
from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.errors import UserError


@pytest.fixture(scope="module")
def azure() -> Profile:
    return profile_logs(["sample:azure_conv_2023"])


def sample(profile: Profile, **changes: Any) -> Workload:
    numbers: dict[str, Any] = {
        "users": 16, "prompt_tokens": (16, 32), "output_tokens": 48, "search_output_tokens": 8,
        "corpus_ids": range(4000), "seed": 3,
    }  # fmt: skip
    return sample_workload(profile, **{**numbers, **changes})


def rows_of(lengths: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Requests of (region, prompt, output) a second apart."""
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return [
        {
            "request_id": str(number), "arrival": start + datetime.timedelta(seconds=number),
            "region": region, "prompt_tokens": prompt, "output_tokens": output,
        }
        for number, (region, prompt, output) in enumerate(lengths)
    ]  # fmt: skip


def made(lengths: list[tuple[str, int, int]]) -> Profile:
    db = connect()
    db.register("requests", pa.Table.from_pylist(rows_of(lengths), schema=REQUESTS_SCHEMA))
    return make_profile(db)


def lognormal(seed: int, count: int, prompt: float = 600, output: float = 120, region: str = "eu") -> list[Any]:
    rng = random.Random(seed)
    return [
        (region, int(prompt * rng.lognormvariate(0, 0.8)) + 1, int(output * rng.lognormvariate(0, 0.8)) + 1)
        for _ in range(count)
    ]


def test_a_sample_has_the_asked_shape(azure: Profile) -> None:
    made_ = sample(azure)
    assert (len(made_.search), len(made_.held_out), made_.users) == (64, 128, 16)
    assert {shape.output_tokens for shape in made_.search} == {8} and {
        shape.output_tokens for shape in made_.held_out
    } == {48}
    assert all(16 <= shape.prompt_tokens <= 32 for shape in made_.search + made_.held_out)
    assert len({shape.prompt_tokens for shape in made_.held_out}) > 5
    arrivals = [shape.arrival_s for shape in made_.held_out]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert made_.profile == azure.sha256 and made_.corpus == tuple(range(4000))


def test_the_same_seed_gives_the_same_bytes(azure: Profile) -> None:
    assert sample(azure).to_json() == sample(azure).to_json() != sample(azure, seed=4).to_json()
    assert Workload.from_json(sample(azure).to_json()) == sample(azure)


def test_scaling_keeps_order_and_reports_its_distance(azure: Profile) -> None:
    mapping = LengthMap(29, 4142, 16, 32)
    scaled = [mapping.scaled(length) for length in range(1, 20000, 7)]
    assert scaled == sorted(scaled) and (scaled[0], scaled[-1]) == (16, 32)
    assert mapping.original(16) == pytest.approx(29) and mapping.original(32) == pytest.approx(4142)
    same = LengthMap(1, 1000, 48, 48)
    large = sample(azure, held_out_requests=4000).held_out
    near = fidelity(azure.joint, mapping, same, large)
    assert near.prompt < 0.02 and near.output < 1e-9 and near.joint == pytest.approx(near.prompt)
    assert fidelity(azure.joint, mapping, same, [RequestShape(16, 48)] * 100).prompt > 0.9
    text = " ".join(sample(azure).notes)
    assert "KS distance" in text and "29 to 4142" in text and "rank correlation" in text


def test_output_lengths_are_drawn_with_the_prompts(azure: Profile) -> None:
    """Halves of the requests have long prompts and short answers, or the other way round: each marginal alone would fit."""
    crossed = made([("eu", 2000, 10), ("eu", 40, 400)] * 100)
    found = sample(crossed, output_tokens=(4, 40)).held_out
    assert {(shape.prompt_tokens > 24, shape.output_tokens > 20) for shape in found} == {(True, False), (False, True)}
    maps = LengthMap(40, 2000, 16, 32), LengthMap(10, 400, 4, 40)
    near = fidelity(crossed.joint, *maps, found)
    assert near.prompt < 0.1 and near.output < 0.1 and near.joint < 0.1
    outputs = [shape.output_tokens for shape in found]
    apart = [dataclasses.replace(one, output_tokens=n) for one, n in zip(found, sorted(outputs), strict=True)]
    shuffled = fidelity(crossed.joint, *maps, apart)
    assert shuffled.output == near.output and shuffled.joint > 0.2, "only the joint distribution tells them apart"
    wide = sample(azure, output_tokens=(4, 40), held_out_requests=4000)
    maps = (
        LengthMap(azure.prompt.quantiles["p1"], azure.prompt.quantiles["p99"], 16, 32),
        LengthMap(azure.output.quantiles["p1"], azure.output.quantiles["p99"], 4, 40),
    )
    assert fidelity(azure.joint, *maps, wide.held_out).joint < 0.03
    assert "held out: output lengths" in " ".join(wide.notes)


def test_bad_ranges_of_outputs_are_named(azure: Profile) -> None:
    with pytest.raises(UserError, match=r"workload\.output_tokens: 9 to 4 is not a range"):
        sample(azure, output_tokens=(9, 4))
    with pytest.raises(UserError, match=r"workload\.search_output_tokens: 1 to 1"):
        sample(azure, search_output_tokens=1)


def test_arrivals_are_as_bursty_as_the_profiles(azure: Profile) -> None:
    for variation in (0.2, 1.0, 3.0):
        changed = azure.arrivals.model_copy(update={"gap_cv": variation, "mean_per_s": 2.0})
        shapes = sample(azure.model_copy(update={"arrivals": changed}), held_out_requests=20_000).held_out
        near = fidelity(azure.joint, LengthMap(29, 4142, 16, 32), LengthMap(1, 999, 48, 48), shapes)
        assert near.gap_cv == pytest.approx(variation, rel=0.06)
        assert shapes[-1].arrival_s == pytest.approx(10_000, rel=0.08)


def test_the_held_out_part_is_of_later_traffic() -> None:
    early, late = made(lognormal(0, 600)), made(lognormal(1, 600, prompt=3000))
    parts = sample(early, later=late)
    middle = [sorted(shape.prompt_tokens for shape in part)[len(part) // 2] for part in (parts.search, parts.held_out)]
    assert middle[1] > middle[0] + 3
    assert "the search part is drawn from the 600 earlier requests" in " ".join(parts.notes)


def test_requests_between_two_shares_of_all() -> None:
    counts = []
    for first, last in ((0.0, 2 / 3), (2 / 3, 1.0)):
        db = connect()
        db.register("source", pa.Table.from_pylist(rows_of(lognormal(0, 30)), schema=REQUESTS_SCHEMA))
        db.execute("CREATE TABLE requests AS SELECT * FROM source")
        keep_between(db, first, last)
        counts.append([int(n) for (n,) in db.execute("SELECT request_id FROM requests ORDER BY arrival").fetchall()])
    assert counts == [list(range(20)), list(range(20, 30))]


def test_one_length_only_can_be_scaled(azure: Profile) -> None:
    flat = made([("eu", 500, 20)] * 50)
    assert {shape.prompt_tokens for shape in sample(flat).search} == {24}
    assert {shape.prompt_tokens for shape in sample(azure, prompt_tokens=(20, 20)).search} == {20}


def test_bad_numbers_are_named(azure: Profile) -> None:
    with pytest.raises(UserError, match="prompt_tokens"):
        sample(azure, prompt_tokens=(32, 16))
    with pytest.raises(UserError, match="corpus"):
        sample(azure, corpus_ids=range(100))


def test_conversations_are_sampled_where_the_profile_has_them(azure: Profile) -> None:
    assert not any(shape.turns for shape in sample(azure).held_out)
    turns = Turns(continued_share=0.5, new_tokens={"p1": 130, "p99": 260}, think_s={"p1": 2.0, "p99": 4.0})
    talks = sample(azure.model_copy(update={"turns": turns}), held_out_requests=2000, prompt_tokens=(100, 400))
    later = [turn for shape in talks.held_out for turn in shape.turns]
    assert 0.9 < len(later) / len(talks.held_out) < 1.1, "half of all go on, so one later turn each on average"
    assert max(len(shape.turns) for shape in talks.held_out) <= 15
    scale = sorted(shape.prompt_tokens for shape in talks.held_out)[1000] / azure.prompt.quantiles["p50"]
    assert {turn.output_tokens for turn in later} == {48} and all(2 <= turn.think_s <= 4 for turn in later)
    assert min(turn.new_tokens for turn in later) == pytest.approx(130 * scale, abs=2)
    assert max(turn.new_tokens for turn in later) == pytest.approx(260 * scale, abs=2)
    assert "50% of the requests have a later turn" in " ".join(talks.notes)
    assert Workload.from_json(talks.to_json()) == talks


def test_a_workload_of_before_reads_as_single_requests(azure: Profile) -> None:
    raw = json.loads(sample(azure).to_json())
    for shape in raw["search"] + raw["held_out"]:
        assert shape.pop("turns") == []
    assert Workload.from_json(json.dumps(raw)) == sample(azure)
    assert raw.pop("context_p99") == azure.context.quantiles["p99"]
    assert Workload.from_json(json.dumps(raw)).context_p99 == 0
    raw["search"][0]["turns"] = [{"new_tokens": 3, "output_tokens": 4, "think_s": 0.5}]
    assert Workload.from_json(json.dumps(raw)).search[0].turns == (Turn(3, 4, 0.5),)


@pytest.mark.parametrize("count", [200, 2000])
def test_the_same_traffic_does_not_drift(count: int) -> None:
    old = made(lognormal(0, 3000))
    decisions = [detect(old, made(lognormal(seed, count)), 0.2, 200) for seed in range(1, 9)]
    assert [decision.reason for decision in decisions if decision.drifted] == []
    assert all("psi" in decision.figures["all"] and "prompt_p90" in decision.figures["all"] for decision in decisions)
    json.dumps([decision.figures for decision in decisions], allow_nan=False)


@pytest.mark.parametrize(("changes", "word"), [({"prompt": 1200}, "prompt_p50"), ({"output": 60}, "output_p90")])
def test_a_level_shift_is_drift(changes: dict[str, float], word: str) -> None:
    decision = detect(made(lognormal(0, 3000)), made(lognormal(1, 400, **changes)), 0.2, 200)
    assert decision.drifted and word in decision.reason
    assert abs(decision.figures["all"][word]["shift"]) > 0.2


def test_a_change_of_shape_alone_is_drift() -> None:
    both = [("eu", 100, 100), ("eu", 1000, 1000)] * 500
    crossed = [("eu", 100, 1000), ("eu", 1000, 100)] * 500
    decision = detect(made(both), made(crossed), 0.2, 200)
    assert decision.drifted and "stability index" in decision.reason and "moved" not in decision.reason


def test_one_region_can_drift_alone() -> None:
    old = made(lognormal(0, 9000) + lognormal(1, 600, region="us"))
    new = made(lognormal(2, 9000) + lognormal(3, 600, prompt=1500, region="us"))
    decision = detect(old, new, 0.2, 200)
    assert decision.drifted and "region us" in decision.reason and "region eu" not in decision.reason
    assert decision.figures["region eu"]["reasons"] == []


def test_too_few_requests_are_not_judged() -> None:
    decision = detect(made(lognormal(0, 3000)), made(lognormal(1, 50, prompt=9000)), 0.2, 200)
    assert not decision.drifted and "50 new requests, below 200" in decision.reason
    assert decision.figures["all"]["new_requests"] == 50


def test_drift_is_seen_in_real_traces(azure: Profile, tmp_path: Path) -> None:
    assert not detect(azure, azure, 0.2, 200).drifted
    rows = [
        f'{{"timestamp": {n * 300}, "input_length": {6000 + 7 * n}, "output_length": {100 + n}, "hash_ids": [{n}]}}'
        for n in range(400)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert detect(azure, profile_logs([str(tmp_path)]), 0.2, 200).drifted
