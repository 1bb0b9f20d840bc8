"""One agent in a process of its own: `python -m tideforge.tasks.search.main --spec FILE`.

Writes report.json into its workspace and exits with 0 however its search ended; anything else is a defect or a kill.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from tideforge.errors import UserError
from tideforge.tasks.search.agent import Agent, AgentReport, AgentTask, Engine
from tideforge.tasks.search.board import Board
from tideforge.tasks.search.search import REPORT


def make_agent(task: AgentTask, engine: Engine) -> Agent:
    """The agent of the task's kind. UserError when its key or package is missing."""
    board, allowance, spec = Board(task.board), task.allowance, task.agent
    if spec.kind == "offline":
        from tideforge.tasks.search.offline.agent import OfflineAgent
        from tideforge.tasks.search.offline.rules import RULES

        return OfflineAgent(spec.name, spec.seed, engine, board, allowance, RULES, task.tier, task.weights_bytes)
    if spec.kind == "llm":
        from tideforge.tasks.search.llm import LLMAgent
        from tideforge.tasks.search.providers import make_model
        from tideforge.tasks.search.tools import Workbench

        model = make_model(spec)
        workbench = Workbench(spec.name, engine, board, task.workspace, allowance, task.tier, task.figure)
        return LLMAgent(model, workbench, allowance, task.workspace / "trajectory.json")
    from tideforge.tasks.search.command import CommandAgent

    return CommandAgent(task, engine)


def run(task: AgentTask, engine: Engine) -> AgentReport:
    agent = make_agent(task, engine)
    stop = agent.run()
    return AgentReport(
        name=task.agent.name,
        kind=task.agent.kind,
        reason=stop.reason,
        message=str(stop)[:500],
        input_tokens=agent.cost.input_tokens,
        output_tokens=agent.cost.output_tokens,
        dollars=agent.cost.dollars,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run one agent of the search until it ends")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of an AgentTask")
    path: Path = parser.parse_args(argv).spec
    try:
        task = AgentTask.model_validate_json(path.read_bytes())
        from tideforge.engine.client import EngineClient

        run(task, EngineClient(task.socket)).write(task.workspace / REPORT)
    except (OSError, ValidationError) as error:
        print(f"{path}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
