"""The night in MLflow: sqlite and a real server, twice the same, outages spooled, aliases that move."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tideforge.tasks import stack, track
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import check_mlflow

# mlflow and what it brings warn about each other at import and on each new event loop; none of it is ours
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `mlflow server` on loopback."""
    folder = tmp_path_factory.mktemp("mlflow")
    url = f"http://127.0.0.1:{stack.free_port(0)}"
    servers = stack.Stack("http://127.0.0.1:1", url, "http://127.0.0.1:1", "")
    command, ready = stack.commands(servers, folder, f"sqlite:///{folder}/mlflow.db")["mlflow"]
    process = stack.spawn("mlflow", command, folder, {**os.environ, **stack.QUIET}, ready)
    try:
        stack.wait_ready(process, 100)
        yield url
    finally:
        assert stack.stop(process)


def checked(endpoint: Endpoint, parent: str, children: dict[str, str]) -> Any:
    mlflow = track.client(endpoint)
    figures = mlflow.get_run(parent).data
    assert figures.metrics["ratio"] == pytest.approx(1.3017, abs=1e-4) and figures.metrics["pairs"] == 3
    assert figures.metrics["ci_low"] == pytest.approx(1.2265, abs=2e-3), "of the pairs, not as the verdict sums them up"
    assert figures.metrics["candidates"] == 2 and figures.metrics["outcomes.build_error"] == 1
    passed = mlflow.get_run(children["000000-a"])
    assert passed.data.tags["mlflow.parentRunId"] == parent and passed.data.metrics["tps_per_user_p90"] == 8.0
    assert "ratio" not in mlflow.get_run(children["000001-b"]).data.metrics
    assert {file.path for file in mlflow.list_artifacts(children["000000-a"])} == {"forward", "incumbent.diff"}
    assert {"verdict", "board", "trials"} <= {
        Path(f.path).name.split("-")[0] for f in mlflow.list_artifacts(parent, "night")
    }
    return mlflow


@pytest.mark.timeout(180)
def test_a_night_is_tracked_once_through_a_server_and_aliases_move(server: str, tmp_path: Path, nights: Any) -> None:
    endpoint = nights.endpoint_in(tmp_path / "s", server)
    check_mlflow(server)
    run = nights.make_night(endpoint)
    first = track.track(run, endpoint).extra
    mlflow = checked(endpoint, first["parent"], first["children"])
    (run.folder / "track.json").unlink()
    assert track.track(run, endpoint).extra == first
    assert len(mlflow.search_runs([first["experiment"]])) == 3
    aliases = mlflow.get_registered_model("tiny").aliases
    assert {name: str(version) for name, version in aliases.items()} == {
        "champion": first["incumbent"],
        "challenger": first["finalist"],
    }
    version = mlflow.get_model_version("tiny", first["finalist"])
    assert version.source == f"runs:/{first['parent']}/forward" and version.tags[track.FORWARD] == nights.WINNER.id

    assert track.moved(endpoint, "ship", nights.WINNER.id, run)
    assert mlflow.get_model_version_by_alias("tiny", "champion").version == first["finalist"]
    assert "challenger" not in mlflow.get_registered_model("tiny").aliases
    assert track.moved(endpoint, "rollback", nights.INCUMBENT.id)
    assert mlflow.get_model_version_by_alias("tiny", "champion").version == first["incumbent"]


@pytest.mark.timeout(180)
def test_an_outage_is_spooled_and_written_later_to_sqlite(tmp_path: Path, nights: Any) -> None:
    away = nights.endpoint_in(tmp_path / "s", f"http://127.0.0.1:{stack.free_port(0)}")
    run = nights.make_night(away)
    assert track.track(run, away).extra["spooled"] is True
    assert not track.moved(away, "ship", nights.WINNER.id, run)
    assert {path.name for path in (run.folder / "spool").iterdir()} == {"track.json", "ship.json"}
    assert track.sync(away) == (0, 2)

    back = nights.endpoint_in(tmp_path / "s")
    assert track.sync(back) == (2, 0)
    assert track.sync(back) == (0, 0)
    extra = run.need("track").extra
    mlflow = checked(back, extra["parent"], extra["children"])
    assert str(mlflow.get_model_version_by_alias("tiny", "champion").version) == extra["finalist"]
