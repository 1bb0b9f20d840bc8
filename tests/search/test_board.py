from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tideforge.tasks.search.board import MAX_LINE_BYTES, Board, BoardError

WRITER = """
import sys
from pathlib import Path
from tideforge.tasks.search.board import Board
for index in range(200):
    Board(Path(sys.argv[1])).post(sys.argv[2], "note", f"{index} " + "x" * 1500, trial=f"t{index}")
"""


def test_posts_of_several_processes_are_all_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"a{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    posts = Board(path).posts()
    assert len(posts) == 600
    for n in range(3):
        own = [post for post in posts if post.author == f"a{n}"]
        assert [post.trial for post in own] == [f"t{i}" for i in range(200)]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.jsonl")
    board.post("a", "note", "first")
    with board.path.open("ab") as file:
        file.write(b'\n{"author": "b", "kind": "note", "te')
    assert [post.text for post in board.posts()] == ["first"]
    board.post("c", "result", "after", trial="t1", rewrites=("x", "y"))
    last = board.posts()[-1]
    assert [post.text for post in board.posts()] == ["first", "after"]
    assert (last.author, last.kind, last.trial, last.rewrites) == ("c", "result", "t1", ("x", "y"))
    assert last.time > 0


@pytest.mark.parametrize(
    "line", [b"[]", b"null", b'{"author": 1}', b'{"author":"a","kind":"?","text":""}', b"\xff\xfe"]
)
def test_foreign_lines_are_passed_over(tmp_path: Path, line: bytes) -> None:
    board = Board(tmp_path / "board.jsonl")
    board.path.write_bytes(line + b"\n")
    board.post("a", "note", "mine")
    assert [post.text for post in board.posts()] == ["mine"]


def test_limits(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.jsonl")
    with pytest.raises(BoardError, match="shorten"):
        board.post("a", "note", "x" * MAX_LINE_BYTES)
    with pytest.raises(BoardError, match="hypothesis"):
        board.post("a", "rumour", "x")
    assert board.posts() == []
