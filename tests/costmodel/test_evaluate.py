"""Scores of a ranking against measured groups, on a small file whose answer can be worked out by hand."""

import json
from pathlib import Path

import pytest

from tideforge.costmodel.evaluate import COLUMNS, MEASURED, Point, main, score
from tideforge.costmodel.layouts import Layout

HEADER = ",".join((*COLUMNS, MEASURED))
ROW = "meta-llama/Llama-3.1-70B,h100_sxm,vllm,fp8,1024,1024,{users},{replicas},{tp},1,1,{group},{measured}"


def point(group: str, tp: int, measured: float, predicted: float) -> Point:
    return Point(group, Layout(tp=tp), False, measured, predicted)


def test_score_by_hand():
    points = [point("a", 8, 100, 9), point("a", 4, 97, 10), point("a", 2, 50, 1)]  # near, not the best
    points += [point("b", 8, 100, 5), point("b", 4, 80, 5)]  # a tie: half right
    points += [point("c", 8, 10, 5), point("c", 8, 11, 5)]  # one layout twice: nothing to choose
    found = score(points)
    assert (found.groups, found.near, found.top1) == (2, 0.75, 0.25)
    assert found.mean_loss == pytest.approx((0.03 + 0.1) / 2)
    assert found.pairs == pytest.approx(2.5 / 3)


def test_the_last_line_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [ROW.format(users=1, replicas=8 // tp, tp=tp, group="g", measured=tp) for tp in (2, 4, 8)]
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    assert main([str(path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole = {"groups": 1, "near": 1.0, "top1": 1.0, "mean_loss": 0.0, "pairs": 1.0, "p90_loss": 0.0, "n_pairs": 3}
    assert last == {"folds": None, **whole}


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", HEADER + "\n", HEADER + "\n" + ROW.format(users="x", replicas=1, tp=1, group=1, measured=1)],
)
def test_bad_files_end_with_code_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "bad.csv" in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
