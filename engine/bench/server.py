"""`python -m tideforge.engine.bench.server FILE`: the HTTP server of a benchmark, without an endpoint file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tideforge.engine.config import Settings
from tideforge.engine.serving.server import ServerConfig, serve

NAME, LAUNCH = "bench", "python -m tideforge.engine.bench"


def main() -> None:
    raw = json.loads(Path(sys.argv[1]).read_text())
    serve(ServerConfig(NAME, Settings.from_dict(raw["settings"]), Path(raw["forward"]), LAUNCH), None)


if __name__ == "__main__":
    main()
