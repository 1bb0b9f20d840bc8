"""The tools of an llm agent, each a method that answers with text. The model's mistakes are answers, not exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.outcome import SLOW, Trial
from tideforge.errors import CandidateError
from tideforge.tasks.search.agent import Allowance, Done, Engine, ToolCall
from tideforge.tasks.search.board import Board, BoardError

ANSWER_BYTES = 60_000
WAIT_S = 60.0

Schema = dict[str, Any]


def _schema(
    name: str, description: str, required: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> Schema:
    """One tool in JSON schema; every argument is a string."""
    told = {**required, **(optional or {})}
    properties = {key: {"type": "string", "description": text} for key, text in told.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    }


SCHEMAS: tuple[Schema, ...] = (
    _schema(
        "read_file", "Read a file: of the engine's source, of the incumbent, or one you wrote.", {"path": "as listed"}
    ),
    _schema(
        "write_candidate",
        "Write one file of your candidate. It starts as a copy of the incumbent.",
        {"text": "the whole file"},
        {"path": f"relative; {ENTRY} if absent"},
    ),
    _schema(
        "submit", "Queue your candidate for measuring; gives a trial id.", {"hypothesis": "why it should be faster"}
    ),
    _schema("results", "Outcomes and figures of every trial so far, and the board's last posts.", {}),
    _schema(
        "post",
        "Tell the other agents something on the board.",
        {"text": "what"},
        {"kind": "hypothesis, result or note"},
    ),
    _schema("wait", f"Wait for a trial, at most {WAIT_S:.0f} s.", {"trial": "its id"}),
    _schema("done", "End your search: nothing is left that is worth trying.", {"reason": "why"}),
)
_ARGUMENTS = {schema["name"]: schema["parameters"] for schema in SCHEMAS}


class Workbench:
    """The environment of one llm agent: its candidate's files and its way to the engine and the board."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        board: Board,
        workspace: Path,
        allowance: Allowance,
        tier: str = SLOW,
        figure: str = "output tokens/s",
    ) -> None:
        self.name, self.engine, self.board, self.allowance = name, engine, board, allowance
        self.workspace, self.tier, self.figure = workspace, tier, figure
        self.incumbent: Forward = engine.incumbent()
        self.files: dict[str, str] = dict(self.incumbent.files)
        self.source = engine.source()
        tools = (self.read_file, self.write_candidate, self.submit, self.results, self.post, self.wait, self.done)
        self.tools: dict[str, Callable[..., str]] = {tool.__name__: tool for tool in tools}

    def run(self, call: ToolCall) -> str:
        """Raises Done when the model ends its search; everything else is an answer of at most ANSWER_BYTES."""
        wrong = mistake(call)
        if wrong:
            return f"error: {wrong}"
        answer = self.tools[call.name](**(call.arguments or {}))
        raw = answer.encode()
        return answer if len(raw) <= ANSWER_BYTES else raw[:ANSWER_BYTES].decode(errors="ignore") + "\n[cut here]"

    def read_file(self, path: str) -> str:
        shelves = {"candidate/": self.files, "incumbent/": dict(self.incumbent.files)}
        for prefix, files in shelves.items():
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                return files[path.removeprefix(prefix)]
        if path in self.source:
            return self.source[path]
        return "error: no such file. There are:\n" + "\n".join(self.listing())

    def listing(self) -> list[str]:
        own = [f"candidate/{name}" for name in self.files] + [f"incumbent/{name}" for name in self.incumbent.files]
        return sorted(own) + sorted(self.source)

    def write_candidate(self, text: str, path: str = ENTRY) -> str:
        path = path.removeprefix("candidate/")
        try:
            forward = Forward({**self.files, path: text})
            if path.endswith(".py"):
                compile(text, path, "exec", dont_inherit=True)
        except CandidateError as error:
            return f"error: {error.message}"
        except (SyntaxError, ValueError) as error:
            return f"error: it does not compile: {error}"
        self.files = dict(forward.files)
        return f"written: {path}, {len(text.encode())} bytes"

    def submit(self, hypothesis: str) -> str:
        forward = Forward(self.files)
        if forward.id == self.incumbent.id:
            return "error: the candidate is the incumbent; write_candidate first"
        trial = self.engine.submit(forward, self.tier, self.name)
        forward.save(self.workspace / "candidates")
        self._post("hypothesis", hypothesis, trial)
        return f"trial {trial} on the {self.tier} tier"

    def results(self) -> str:
        trials = [told(trial) for trial in self.engine.trials()]
        posts = [f"{post.author} ({post.kind}, {post.trial or '-'}): {post.text}" for post in self.board.posts()[-30:]]
        return "\n".join(["Trials:", *trials, "Board:", *posts])

    def post(self, text: str, kind: str = "note") -> str:
        try:
            self.board.post(self.name, kind, text)
        except BoardError as error:
            return f"error: {error}"
        return "posted"

    def wait(self, trial: str) -> str:
        known = {entry.id for entry in self.engine.trials()}
        if trial not in known:
            return "error: no such trial"
        return told(self.engine.wait(trial, min(WAIT_S, self.allowance.remaining_s)))

    def done(self, reason: str) -> str:
        raise Done(reason)

    def _post(self, kind: str, text: str, trial: str) -> None:
        """A hypothesis always goes on the board; a long one is cut rather than lost with its trial."""
        self.board.post(self.name, kind, text.encode()[:1500].decode(errors="ignore"), trial)


def mistake(call: ToolCall) -> str | None:
    """What is wrong with a call, for the model to mend; None when it can be run."""
    if call.name not in _ARGUMENTS:
        return f"there is no tool {call.name!r}; there are {', '.join(_ARGUMENTS)}"
    if call.arguments is None:
        return f"the arguments are no JSON object: {call.raw[:200]!r}"
    schema = _ARGUMENTS[call.name]
    missing = [name for name in schema["required"] if name not in call.arguments]
    unknown = [name for name in call.arguments if name not in schema["properties"]]
    if missing or unknown:
        return f"{call.name} takes {json.dumps(schema['properties'])}; missing: {missing}, unknown: {unknown}"
    wrong = [name for name, value in call.arguments.items() if not isinstance(value, str)]
    return f"{', '.join(wrong)}: strings are wanted" if wrong else None


def told(trial: Trial) -> str:
    state = f"{trial.id} by {trial.submitter or '-'}, {trial.tier} tier, forward {trial.forward[:12]}: "
    if trial.figures is not None:
        return state + f"passed, ratio to incumbent {trial.figures.told}"
    return state + (f"{trial.outcome}: {trial.message}" if trial.done else "waits or runs")
