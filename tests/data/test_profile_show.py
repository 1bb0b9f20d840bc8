from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tideforge.data.profile import profile_logs
from tideforge.data.profile_diff import difference, ks, total_variation
from tideforge.data.profile_html import page
from tideforge.data.profile_records import Group, Profile
from tideforge.flows.cli import cli, main

CONV, CODE = "sample:azure_conv_2023", "sample:azure_code_2023"


@pytest.fixture(scope="module")
def conversations() -> Profile:
    return profile_logs([CONV])


@pytest.fixture(scope="module")
def coding() -> Profile:
    return profile_logs([CODE])


@pytest.fixture
def file(conversations: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    path.write_bytes(conversations.to_json())
    return path


def said(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["profile", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(conversations: Profile) -> None:
    evil = "<script src='https://x'>"
    group = Group(requests=1, prompt_p50=1, prompt_p90=1, output_p50=1, output_p90=1)
    text = page(conversations.model_copy(update={"regions": {evil: group}}))
    parser = Page()
    parser.feed(text)
    assert parser.open == [] and "http" not in text.replace("https://x", "") and "url(" not in text
    assert not {tag for tag, _ in parser.seen} & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not [found for _, found in parser.seen if {"src", "href"} & found.keys()]
    assert sum(tag == "rect" for tag, _ in parser.seen) > len(conversations.joint)
    assert f"{conversations.requests:,}" in text and str(conversations.prompt.quantiles["p99.9"]) in text


def test_show_takes_a_profile_a_log_and_what_json_printed(file: Path, tmp_path: Path, conversations: Profile) -> None:
    printed = tmp_path / "printed.json"
    printed.write_text(said(CONV, "--json"))
    for name in (str(file), str(printed), CONV):
        assert json.loads(said("show", name, "--json"))["sha256"] == conversations.sha256
    shown = said("show", str(file), "--html", str(tmp_path / "p.html"))
    assert "19366" in shown and "▓" in shown and "decoding" in shown
    assert (tmp_path / "p.html").read_text() == page(conversations)


def test_diff_says_what_moved(file: Path, conversations: Profile, coding: Profile) -> None:
    assert said("diff", str(file), CONV) == "the profiles are the same\n"
    found = json.loads(said("diff", str(file), CODE, "--json", "--least", "0.1"))
    moved = {each["name"]: each for each in found["moved"]}
    assert moved["output.quantiles.p50"]["before"] == conversations.output.quantiles["p50"]
    assert moved["output.quantiles.p50"]["after"] == coding.output.quantiles["p50"]
    assert moved["requests"]["change"] == pytest.approx(coding.requests / conversations.requests - 1)
    assert all(each["change"] is None or abs(each["change"]) >= 0.1 for each in found["moved"])
    assert 0.3 < found["ks"]["output"] <= 1 and 0 < found["joint"] <= 1
    assert "output.quantiles.p50" in said("diff", CONV, CODE)


def test_distances_at_their_ends() -> None:
    assert ks({1: 4, 2: 4}, {1: 1, 2: 1}) == 0 and ks({1: 4}, {2: 1}) == 1 and ks({1: 1, 2: 3}, {1: 3, 2: 1}) == 0.5
    assert total_variation(((4, 4, 2),), ((5, 4, 9),)) == 0 and total_variation(((4, 4, 2),), ((8, 4, 9),)) == 1


def test_a_profile_does_not_differ_from_itself(conversations: Profile) -> None:
    found = difference(conversations, conversations, 0)
    assert (found.moved, found.joint, set(found.ks.values())) == ((), 0, {0})


def test_profile_takes_a_format(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01,5,6\n")
    assert json.loads(said(str(path), "--format", "azure-llm-inference-csv", "--json"))["requests"] == 1


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "b.json"
    broken.write_text('{"version": 1, "joint": []}')
    cases = (
        ["show", str(broken)],
        ["show", str(tmp_path / "none.json")],
        ["diff", CONV],
        ["show", CONV, "--html", "/no/p"],
    )
    for arguments in cases:
        with pytest.raises(SystemExit) as caught:
            main(["profile", *arguments])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.count("\n") == 1 and error.startswith("tideforge: "), arguments


def test_days_are_kept_and_only_new_files_read(tmp_path: Path, conversations: Profile) -> None:
    arguments = ["profile", CONV, "--days", str(tmp_path / "days"), "--json"]
    first, again = CliRunner().invoke(cli, arguments), CliRunner().invoke(cli, arguments)
    assert "19366 good rows" in first.stderr and again.stderr == "" and again.stdout == first.stdout
    found = Profile.from_json(json.dumps({k: v for k, v in json.loads(first.stdout).items() if k != "sha256"}))
    assert (found.requests, found.joint, found.quantile_error) == (conversations.requests, conversations.joint, 0.01)
