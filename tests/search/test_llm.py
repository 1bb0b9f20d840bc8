"""The llm agent over real HTTP against a scripted server on loopback, through both official SDKs."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tideforge.errors import UserError
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.search import providers
from tideforge.tasks.search.agent import Allowance, Message, ToolCall
from tideforge.tasks.search.board import Board
from tideforge.tasks.search.llm import LLMAgent, opening
from tideforge.tasks.search.tools import Workbench, mistake

KEY = "sk-scripted-0123456789"


@dataclasses.dataclass
class Say:
    """One scripted answer. `calls` are (tool, arguments); text arguments are sent as they are, however malformed."""

    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = ""
    status: int = 200
    delay_s: float = 0.0
    retry_after: str = ""
    raw: bytes | None = None
    hang_up: bool = False


def openai_body(say: Say, number: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"c{number}-{i}",
            "type": "function",
            "function": {"name": n, "arguments": a if isinstance(a, str) else json.dumps(a)},
        }
        for i, (n, a) in enumerate(say.calls)
    ]
    finish = {"cut": "length", "refused": "content_filter"}.get(say.finish, "tool_calls" if calls else "stop")
    message = {"role": "assistant", "content": say.text, **({"tool_calls": calls} if calls else {})}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def anthropic_body(say: Say, number: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": say.text}] if say.text else []
    blocks += [
        {"type": "tool_use", "id": f"c{number}-{i}", "name": n, "input": a} for i, (n, a) in enumerate(say.calls)
    ]
    finish = {"cut": "max_tokens", "refused": "refusal"}.get(say.finish, "tool_use" if say.calls else "end_turn")
    usage = {"input_tokens": 100, "output_tokens": 10}
    return {
        "id": "x", "type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": finish,
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip


class Server:
    """Plays a script; the last entry repeats. Keeps every request's body and headers."""

    def __init__(self, provider: str) -> None:
        self.provider, self.script, self.seen, self.headers = provider, [Say()], [], []  # type: ignore[var-annotated]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.seen.append(body)
                outer.headers.append(dict(self.headers))
                number = len(outer.seen) - 1
                outer.answer(self, outer.script[min(number, len(outer.script) - 1)], number)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}" + ("/v1" if self.provider == "openai" else "")

    def answer(self, handler: BaseHTTPRequestHandler, say: Say, number: int) -> None:
        time.sleep(say.delay_s)
        if say.hang_up:
            handler.close_connection = True
            return
        bodies = {"openai": openai_body, "anthropic": anthropic_body}
        body = (
            bodies[self.provider](say, number) if say.status == 200 else {"error": {"message": "scripted", "type": "x"}}
        )
        raw = say.raw if say.raw is not None else json.dumps(body).encode()
        try:
            handler.send_response(say.status)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", str(len(raw)))
            if say.retry_after:
                handler.send_header("retry-after", say.retry_after)
            handler.end_headers()
            handler.wfile.write(raw)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join(10)
        self.http.server_close()


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    scripted = Server(request.param)
    yield scripted
    scripted.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.Retry, "pause_s", lambda self, attempt, headers: 0.01)
    monkeypatch.setenv("SCRIPTED_KEY", KEY)


@pytest.fixture
def make(llama: Any, tmp_path: Path, server: Server, quick: None) -> Iterator[Any]:
    closing: list[Any] = []

    def agent(script: list[Say], seconds: float = 60, dollars: float = 1.0, tokens: int = 100_000) -> LLMAgent:
        server.script = script
        spec = AgentSpec(
            kind="llm", name="l", provider=server.provider, model="m", base_url=server.url, api_key_env="SCRIPTED_KEY",
            dollars_per_million_input=1000.0, dollars_per_million_output=2000.0,
        )  # fmt: skip
        allowance = Allowance(time.time() + seconds, dollars, tokens)
        model: Any = providers.make_model(spec)
        closing.append(model.client)
        workbench = Workbench("l", llama.engine(lambda text: 1.2), Board(tmp_path / "board.jsonl"), tmp_path, allowance)
        return LLMAgent(model, workbench, allowance, tmp_path / "trajectory.json")

    yield agent
    for client in closing:
        client.close()


def trajectory(agent: LLMAgent) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(agent.trajectory.read_text())
    return record


DONE = Say(calls=(("done", {"reason": "tried all"}),))


def test_a_good_session_ends_with_a_measured_candidate(make: Any, server: Server) -> None:
    better = "# quicker\n" + make([DONE]).workbench.incumbent.files["forward.py"]
    agent = make(
        [
            Say("I read first.", calls=(("read_file", {"path": "engine/measure.py"}),)),
            Say(calls=(("write_candidate", {"text": better}), ("submit", {"hypothesis": "fewer calls"}))),
            Say(calls=(("results", {}), ("post", {"text": "it works", "kind": "result"}))),
            DONE,
        ]
    )
    stop = agent.run()
    assert (stop.reason, str(stop)) == ("done", "tried all")
    trials = agent.workbench.engine.trials()
    assert [(trial.submitter, str(trial.outcome)) for trial in trials] == [("l", "passed")]
    posts = agent.workbench.board.posts()
    assert [(post.kind, post.text, post.trial) for post in posts] == [
        ("hypothesis", "fewer calls", trials[0].id),
        ("result", "it works", None),
    ]
    answers = [message["text"] for message in trajectory(agent)["messages"] if message["role"] == "tool"]
    assert answers[0].startswith("# the measuring protocol") and "ratio to incumbent 1.2000" in answers[3]
    assert agent.cost.tokens == 4 * 110 and agent.cost.dollars == pytest.approx(4 * 0.12)
    assert "measure.py" in json.dumps(server.seen[0]) and "as fast as possible" in json.dumps(server.seen[0])


def test_the_key_is_sent_but_never_written(make: Any, server: Server, tmp_path: Path) -> None:
    agent = make([Say(calls=(("results", {}),)), DONE])
    agent.run()
    assert any(KEY in value for value in server.headers[0].values())
    assert all(KEY not in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file())


def test_the_trajectory_is_whole_after_every_step(make: Any) -> None:
    agent = make([Say(calls=(("results", {}),)), DONE])
    agent.messages = [Message("user", "begin")]
    agent.step()
    record = trajectory(agent)
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool"]
    assert record["cost"]["input_tokens"] == 100 and record["stop"] is None
    agent.stop = None
    assert agent.run().reason == "done"
    assert trajectory(agent)["stop"] == {"reason": "done", "message": "tried all"}


def test_malformed_calls_are_answered_and_can_be_mended(make: Any, server: Server) -> None:
    malformed: Any = "{not json" if server.provider == "openai" else {"pfad": "x"}
    agent = make(
        [
            Say(
                calls=(
                    ("read_file", malformed),
                    ("fly", {}),
                    ("read_file", {"path": "nowhere.py"}),
                    ("post", {"text": 3}),
                )
            ),
            Say(calls=(("write_candidate", {"text": "def build(:"}), ("submit", {"hypothesis": "none"}))),
            Say(calls=(("write_candidate", {"text": "x", "path": "../x.py"}), ("wait", {"trial": "t-none"}))),
            DONE,
        ]
    )
    assert agent.run().reason == "done"
    answers = [message["text"] for message in trajectory(agent)["messages"] if message["role"] == "tool"]
    assert len(answers) == 8 and all(answer.startswith("error: ") for answer in answers)
    assert "no tool 'fly'" in answers[1] and "incumbent/forward.py" in answers[2] and "compile" in answers[4]
    assert agent.workbench.engine.trials() == []


def test_truncated_answers_are_continued_and_their_calls_not_run(make: Any) -> None:
    agent = make([Say("half a", finish="cut"), Say(calls=(("post", {"text": "ha"}),), finish="cut"), DONE])
    assert agent.run().reason == "done"
    messages = trajectory(agent)["messages"]
    assert [m["text"][:20] for m in messages if m["role"] == "user"][1:] == ["Your answer was cut "] * 2
    assert agent.workbench.board.posts() == []
    endless = make([Say("half", finish="cut")])
    assert "cut at the model's limit" in str(endless.run())


def test_a_refusal_ends_it(make: Any, server: Server) -> None:
    agent = make([Say("no", finish="refused")])
    assert agent.run().reason == "refused"
    assert len(server.seen) == 1


def test_rate_limits_and_failures_are_waited_out(make: Any, server: Server) -> None:
    agent = make([Say(status=429, retry_after="0"), Say(status=503), Say(hang_up=True), Say(status=529), DONE])
    assert agent.run().reason == "done"
    assert len(server.seen) == 5


@pytest.mark.parametrize("raw", [b"{}", b"[]", b'{"choices": [', b'{"content": null}'])
def test_answers_that_are_none_are_asked_again(make: Any, server: Server, raw: bytes) -> None:
    agent = make([Say(raw=raw), DONE])
    assert agent.run().reason == "done"
    assert len(server.seen) == 2


def test_slow_answers_are_given_up_and_asked_again(make: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "REQUEST_S", 0.4)
    agent = make([Say(delay_s=1.5), DONE])
    assert agent.run().reason in ("done", "model_unreachable")
    assert len(server.seen) >= 2


def test_endless_trouble_stops_cleanly(make: Any, server: Server) -> None:
    agent = make([Say(status=429)])
    stop = agent.run()
    assert (stop.reason, "HTTP 429" in str(stop)) == ("model_unreachable", True)
    assert len(server.seen) == providers.TRIES
    assert trajectory(agent)["stop"]["reason"] == "model_unreachable"


def test_a_wrong_request_is_not_repeated(make: Any, server: Server) -> None:
    stop = make([Say(status=401)]).run()
    assert stop.reason == "model_rejected" and "401" in str(stop)
    assert len(server.seen) == 1


def test_limits_of_money_tokens_and_time(make: Any, server: Server) -> None:
    busy = Say(calls=(("results", {}),))
    assert make([busy], dollars=0.3).run().reason == "budget"
    assert len(server.seen) == 3  # 0.12 an answer: the third passes the limit
    assert make([busy], tokens=150).run().reason == "budget"
    assert make([busy], seconds=-1).run().reason == "deadline"
    assert make([Say(delay_s=2.0)], seconds=0.5).run().reason == "deadline"


def test_talk_without_tools_is_nudged_then_ended(make: Any, server: Server) -> None:
    stop = make([Say("I think it is fine.")]).run()
    assert stop.reason == "done" and "without a tool call" in str(stop)
    assert len(server.seen) == 3


def test_missing_key_and_model_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRIPTED_KEY", raising=False)
    with pytest.raises(UserError, match="SCRIPTED_KEY: is not set"):
        providers.make_model(AgentSpec(kind="llm", model="m", api_key_env="SCRIPTED_KEY"))
    monkeypatch.setenv("SCRIPTED_KEY", "x")
    with pytest.raises(UserError, match="has no model"):
        providers.make_model(AgentSpec(kind="llm", api_key_env="SCRIPTED_KEY"))


def test_pauses_follow_the_server_and_grow() -> None:
    retry = providers.Retry(None, first_pause_s=1.0)
    assert retry.pause_s(1, {"retry-after": "7"}) == 7
    assert retry.pause_s(1, {"retry-after": "9999"}) == providers.LONGEST_PAUSE_S
    assert 0.5 <= retry.pause_s(1, None) <= 1 < 4 <= retry.pause_s(4, {"retry-after": "soon"}) <= 8


def test_a_model_is_told_which_tier_a_figure_is_of(llama: Any, tmp_path: Path) -> None:
    allowance, board = Allowance(time.time() + 9), Board(tmp_path / "board.jsonl")
    benches = [
        Workbench("l", llama.engine(lambda text: 1.2), board, tmp_path, allowance, tier) for tier in ("slow", "fast")
    ]
    assert ["fast tier" in opening(bench) for bench in benches] == [False, True]
    assert opening(benches[0]).startswith("The figure that counts: output tokens/s.")
    for bench, tier in zip(benches, ("slow", "fast"), strict=True):
        bench.write_candidate("# quicker\n" + bench.incumbent.files["forward.py"])
        assert bench.submit("fewer calls").endswith(f"on the {tier} tier")
        assert f"{tier} tier" in bench.results() and bench.engine.trials()[0].tier == tier


def test_mistakes_are_named() -> None:
    assert mistake(ToolCall("1", "results", {})) is None
    assert "no JSON" in str(mistake(ToolCall("1", "results", None, "{")))
    assert "unknown: ['x']" in str(mistake(ToolCall("1", "results", {"x": "1"})))
