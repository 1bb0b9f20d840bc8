"""`tideforge serve`: the HTTP server of an endpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from tideforge.errors import MissingExtra
from tideforge.flows.commands.options import STATE, load


@click.command()
@click.option(
    "--endpoint", "endpoint_file", required=True, type=click.Path(path_type=Path), help="endpoint file (YAML)"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="port; 0 takes a free one")
@STATE
def serve(endpoint_file: Path, host: str, port: int, state: Path | None) -> None:
    """Serve an endpoint over an OpenAI-compatible HTTP API, until SIGTERM or Ctrl-C.

    It starts the keeper (weights and KV memory) if none runs, a worker with the forward that was shipped last (else the
    endpoint's first one), and writes <state>/server.json (pid, url, forward) once it answers. Requests in flight at the
    end are finished. The keeper stays, so that the next start need not load the weights.

    \b
    POST /v1/completions, /v1/chat/completions   streaming too; n = 1
    GET  /v1/models, /health, /metrics
    GET  /version           forward, release, weights hash, launch command, environment
    POST /admin/ship        an approved release takes over; needs the approver's signature
    POST /admin/rollback    likewise, back to an earlier forward
    POST /admin/flip        between the two forwards of the release shipped last, until its ship is measured

    \b
    Examples:
      tideforge serve --endpoint deployments/endpoints/smollm2-cpu.yaml --port 8000
      curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "smollm2-cpu", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}'
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name), "serve") from None
    from tideforge.data.log_writer import TrafficLog
    from tideforge.engine.serving.server import ServerConfig
    from tideforge.engine.serving.server import serve as run
    from tideforge.tasks.incumbent import first_forward
    from tideforge.tasks.machine import settings_for

    endpoint = load(endpoint_file, state)
    config = ServerConfig(
        name=endpoint.name,
        settings=settings_for(endpoint),
        forward=first_forward(endpoint),
        launch=endpoint.launch,
        keep_text=endpoint.traffic.keep_text,
        host=host,
        port=port,
    )
    traffic = TrafficLog(endpoint.state / "traffic", endpoint.traffic.keep_text)
    with contextlib.closing(traffic):
        run(config, traffic)
