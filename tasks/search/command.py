"""Any program as an agent: it gets a folder with the incumbent's source, the engine's socket and the board."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tideforge.errors import ProtocolError, UserError
from tideforge.tasks.search.agent import AgentTask, Cost, DeadlineReached, Done, Engine, EngineGone, Stop

TERM_S = 2.0  # between SIGTERM and SIGKILL at the deadline


class CommandAgent:
    """Variables: TIDEFORGE_SOCKET, TIDEFORGE_BOARD, TIDEFORGE_NAME, TIDEFORGE_TIER (slow or fast), TIDEFORGE_FIGURE (what the
    ratio is of, in words), TIDEFORGE_INCUMBENT (a folder), TIDEFORGE_DEADLINE.

    `python -m tideforge.tasks.search.ask` submits and asks from a shell.
    """

    def __init__(self, task: AgentTask, engine: Engine) -> None:
        self.task, self.engine, self.cost = task, engine, Cost()

    def run(self) -> Stop:
        """UserError when the command cannot be started."""
        try:
            self.task.allowance.check_time()
            folder = self.engine.incumbent().save(self.task.workspace / "incumbent")
        except Stop as stop:
            return stop
        except (UserError, ProtocolError) as error:
            return EngineGone(str(error))
        return self.execute({**os.environ, **self.variables(), "TIDEFORGE_INCUMBENT": str(folder)})

    def variables(self) -> dict[str, str]:
        return {
            "TIDEFORGE_SOCKET": str(self.task.socket),
            "TIDEFORGE_BOARD": str(self.task.board),
            "TIDEFORGE_NAME": self.task.agent.name,
            "TIDEFORGE_TIER": self.task.tier,
            "TIDEFORGE_FIGURE": self.task.figure,
            "TIDEFORGE_DEADLINE": f"{self.task.deadline:.3f}",
        }

    def execute(self, variables: dict[str, str]) -> Stop:
        command = self.task.agent.command
        if not command:
            raise UserError(f"agent {self.task.agent.name}", "has no command", "give `command` in the endpoint file")
        try:
            process = subprocess.Popen(command, cwd=self.task.workspace, env=variables, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise UserError(command[0], f"cannot be started ({error.strerror})", "mend the agent's `command`") from None
        try:
            code = process.wait(max(0.0, self.task.deadline - time.time()))
        except subprocess.TimeoutExpired:
            self.end(process)
            return DeadlineReached("the command's time is over")
        return Done(f"the command ended with code {code}")

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
