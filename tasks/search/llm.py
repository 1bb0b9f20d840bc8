"""The llm agent: a loop between a model and its tools, whose trajectory is on disk after every step."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from tideforge.data.files import write_whole
from tideforge.engine.outcome import FAST
from tideforge.errors import ProtocolError, UserError
from tideforge.tasks.search.agent import Allowance, Cost, Done, EngineGone, Message, Model, Stop
from tideforge.tasks.search.tools import Workbench

MOST_CONTINUATIONS = 3  # of one answer that keeps hitting its limit
MOST_IDLE = 3  # answers in a row without a tool call

SYSTEM = """\
You make a language model's forward pass faster. It runs in an engine that measures candidates against the incumbent, \
checks that their tokens are right, and keeps none that is wrong. Make it as fast as possible.

A candidate is a set of files; forward.py defines build(ctx) -> forward, and forward(batch) writes fp32 logits into \
batch.logits. engine/contract.py says what ctx and batch hold. A forward may import torch, triton, math, typing and its \
own files. Leave knobs.json as it is. Memory that you keep beside ctx.weights, repacked weights above all, you declare in \
packing.json, {"bytes": N}: a worker that holds more fails verification. The figure that counts is the ratio to the \
incumbent in the figure named below with its 95 % interval; only a lower end above 1 is a gain. \
The engine's clock is the only truth: do not guess, submit and read.

Work in small steps: write_candidate, submit with your hypothesis, wait or read results, learn, go on from the best. \
Other agents share the board. Call done when nothing is left that is worth trying."""


class LLMAgent:
    def __init__(self, model: Model, workbench: Workbench, allowance: Allowance, trajectory: Path) -> None:
        self.model, self.workbench, self.allowance, self.trajectory = model, workbench, allowance, trajectory
        self.cost = Cost()
        self.messages: list[Message] = []
        self.stop: Stop | None = None
        self.idle = self.cut = 0

    def run(self) -> Stop:
        self.messages = [Message("user", opening(self.workbench))]
        try:
            while True:
                self.step()
        except Stop as stop:
            self.stop = stop
        except (UserError, ProtocolError) as error:
            self.stop = EngineGone(str(error))
        self.save()
        return self.stop

    def step(self) -> None:
        self.allowance.check_time()
        self.allowance.check_cost(self.cost)
        message, cost = self.model.query(self.messages, self.allowance.remaining_s)
        self.cost += cost
        self.messages.append(message)
        self.save()
        # A truncated answer may have lost its end in the middle of a call: nothing of it is run.
        if message.truncated:
            self.go_on(message)
        elif message.calls:
            self.idle = self.cut = 0
            self.answer(message)
        else:
            self.nudge()
        self.save()

    def answer(self, message: Message) -> None:
        for call in message.calls:
            self.allowance.check_time()
            self.messages.append(Message("tool", self.workbench.run(call), call_id=call.id))
            self.save()

    def go_on(self, message: Message) -> None:
        self.cut += 1
        if self.cut > MOST_CONTINUATIONS:
            raise Done(f"{self.cut} answers in a row were cut at the model's limit")
        for call in message.calls:
            self.messages.append(Message("tool", "error: your answer was cut, the call was not run", call_id=call.id))
        self.messages.append(
            Message("user", "Your answer was cut at its limit. Go on where it ended, in smaller parts.")
        )

    def nudge(self) -> None:
        self.idle += 1
        if self.idle >= MOST_IDLE:
            raise Done(f"{self.idle} answers in a row without a tool call")
        self.messages.append(Message("user", "Go on with a tool call, or call done."))

    def save(self) -> None:
        """The whole trajectory, whole or not at all. Keys live in the SDK's client only and cannot get here."""
        record = {
            "time": time.time(),
            "cost": dataclasses.asdict(self.cost),
            "stop": None if self.stop is None else {"reason": self.stop.reason, "message": str(self.stop)},
            "messages": [dataclasses.asdict(message) for message in self.messages],
        }
        write_whole(self.trajectory, (json.dumps(record, indent=1) + "\n").encode())


SCREENED = """\
Your candidates are measured on the fast tier: a few layers, and the ratio is of the layers alone. The best few go on to the \
slow tier, which measures the whole model and decides; a gain in embedding or head shows there only.

"""


def opening(workbench: Workbench) -> str:
    files = "\n\n".join(f"--- incumbent/{name}\n{text}" for name, text in workbench.incumbent.files.items())
    listing = "\n".join(workbench.listing())
    screened = SCREENED if workbench.tier == FAST else ""
    figure = f"The figure that counts: {workbench.figure}.\n\n"
    return f"{figure}{screened}The incumbent:\n\n{files}\n\nFiles you may read:\n{listing}\n\n{workbench.results()}"
