from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tideforge.data.hourly import hourly_of
from tideforge.data.profile import open_requests
from tideforge.data.readers import connect
from tideforge.data.schema import REQUESTS_SCHEMA
from tideforge.errors import UserError

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def row(number: int, hour: float, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    arrival = START + datetime.timedelta(hours=hour)
    return {"request_id": str(number), "arrival": arrival, "prompt_tokens": prompt, "output_tokens": output, **more}


def test_hours_bins_and_names_of_a_parquet_file(tmp_path: Path) -> None:
    rows = [
        row(0, 0.1, 1, 1, region="eu", tenant="a", cached_tokens=0),
        row(1, 0.9, 1023, 7, region="us", tenant="b", cached_tokens=1023),
        row(2, 3.0, 1024, 8, region="eu", tenant="a", model="m"),
        row(3, 3.5, 99_999_999, 99_999, tenant="a"),
    ]
    path = tmp_path / "it's.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=REQUESTS_SCHEMA), path)
    found = hourly_of(open_requests(path))
    assert (found.hours, found.scopes) == (4, ("all", "region eu", "region us"))
    assert found.first_hour == int(START.timestamp()) // 3600
    assert found.requests.tolist() == [[2, 1, 1], [0, 0, 0], [0, 0, 0], [2, 1, 0]]
    assert {tuple(map(int, cell)) for cell in np.argwhere(found.joint[:, 0])} == {
        (0, 0, 0), (0, 5, 0), (3, 6, 1), (3, 15, 10),
    }  # fmt: skip
    assert found.cached[0, 0].tolist() == [1, 0, 0, 0, 1] and found.cached[3].sum() == 0
    assert [(each.kind, each.names) for each in found.named] == [
        ("region", ("eu", "us")), ("tenant", ("a", "b")), ("model", ("m",)),
    ]  # fmt: skip
    assert found.named[1].counts.tolist() == [[1, 1], [0, 0], [0, 0], [2, 0]]
    first = found.first_hour
    assert hourly_of(open_requests(path), first + 3, first + 9).requests.tolist() == [[2, 1]]
    assert found.part(3, 4).requests.tolist() == [[2, 1, 0]]


def test_no_rows_have_no_hours() -> None:
    db = connect()
    db.register("requests", REQUESTS_SCHEMA.empty_table())
    with pytest.raises(UserError, match="no good rows"):
        hourly_of(db)
