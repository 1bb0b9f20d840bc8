"""The engine's queue and the board from a shell, for agents that are programs: `python -m tideforge.tasks.search.ask`.

Socket, board, name and tier come from TIDEFORGE_SOCKET, TIDEFORGE_BOARD, TIDEFORGE_NAME and TIDEFORGE_TIER. Answers are JSON lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from tideforge.engine.client import EngineClient
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import SLOW
from tideforge.errors import TideforgeError
from tideforge.tasks.search.board import KINDS, Board


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="submit candidates and read results")
    commands = parser.add_subparsers(dest="what", required=True)
    submit = commands.add_parser("submit", help="queue the forward in FOLDER; prints its trial id")
    submit.add_argument("folder", type=Path)
    wait = commands.add_parser("wait", help="the trial once it is done, or as it is after SECONDS")
    wait.add_argument("trial")
    wait.add_argument("--seconds", type=float, default=60.0)
    commands.add_parser("results", help="every trial of this night")
    commands.add_parser("board", help="every post")
    post = commands.add_parser("post", help="put a text on the board")
    post.add_argument("kind", choices=KINDS)
    post.add_argument("text")
    post.add_argument("--trial")
    return parser.parse_args(argv)


def answers(args: argparse.Namespace) -> list[str]:
    name = os.environ.get("TIDEFORGE_NAME", "command")
    engine, board = EngineClient(Path(os.environ["TIDEFORGE_SOCKET"])), Board(Path(os.environ["TIDEFORGE_BOARD"]))
    if args.what == "submit":
        tier = os.environ.get("TIDEFORGE_TIER", SLOW)
        return [json.dumps({"trial": engine.submit(Forward.load(args.folder), tier, name), "tier": tier})]
    if args.what == "wait":
        return [engine.wait(args.trial, args.seconds).to_json()]
    if args.what == "results":
        return [trial.to_json() for trial in engine.trials()]
    if args.what == "board":
        return [json.dumps(dataclasses.asdict(post)) for post in board.posts()]
    return [json.dumps(dataclasses.asdict(board.post(name, args.kind, args.text, args.trial)))]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        print("\n".join(answers(args)))
    except KeyError as error:
        print(f"{error.args[0]} is not set", file=sys.stderr)
        return 2
    except TideforgeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
