"""Detokenisation and stop strings: what is shown piece by piece is what the whole decodes to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tideforge.engine.doubles import tiny_llama
from tideforge.engine.serving.text import Detokenizer, StopStrings, Text
from tideforge.errors import UserError


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tiny_llama(tmp_path_factory.mktemp("model")))


def shown(text: Text, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(text)
    return [*(detokenizer.add(token) for token in ids), detokenizer.end()]


@pytest.mark.parametrize(
    "sample", ["plain words, again", "naïve café — 東京 🌊🔨", "🌊" * 12, " leading", "a\n\n b\t", "ß"]
)
def test_pieces_join_to_the_whole_and_no_piece_is_broken(text: Text, sample: str) -> None:
    pieces = shown(text, list(text.encode(sample)))
    assert "".join(pieces) == sample
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(sample=st.text(max_size=40))
def test_any_text_survives(text: Text, sample: str) -> None:
    sample = sample.replace("\ufffd", "")
    assert "".join(shown(text, list(text.encode(sample)))) == sample


def test_a_character_cut_off_at_the_end_is_not_shown(text: Text) -> None:
    ids = list(text.encode("ok 🌊"))
    pieces = shown(text, ids[:-1])
    assert "".join(pieces) == "ok "


def test_bytes_that_are_no_text_come_out_valid_and_bounded(text: Text) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(3, text.vocab_size) for _ in range(400)]
    pieces = shown(text, ids)
    "".join(pieces).encode("utf-8")  # raises on a lone surrogate
    quiet = "".join("0" if not piece else "1" for piece in pieces)
    assert "0" * 9 not in quiet  # nothing is held for more than LONGEST_HELD tokens


def test_special_tokens_are_not_shown(text: Text) -> None:
    assert "".join(shown(text, [*text.encode("hi"), 2])) == "hi"


@settings(max_examples=100, deadline=None)
@given(
    sample=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 5),
)
def test_stop_strings_cut_at_the_first_hit_however_the_text_is_cut_up(sample: str, stops: list[str], size: int) -> None:
    buffer, out = StopStrings(stops), ""
    for start in range(0, len(sample), size):
        out += buffer.add(sample[start : start + size])
        if buffer.hit:
            break
    out += buffer.end()
    hits = [sample.index(stop) for stop in stops if stop in sample]
    if not hits:
        assert out == sample and not buffer.hit
        return
    # The first stop string to be complete decides; another may begin earlier but end later.
    ends = min(sample.index(stop) + len(stop) for stop in stops if stop in sample)
    assert buffer.hit and out == sample[: len(out)]
    assert min(hits) <= len(out) <= ends
    assert not any(stop in out for stop in stops)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        Text(tmp_path)
