"""Where logs lie: packed, in folders partitioned by date, behind globs, in S3 (a real server of its protocol on loopback)."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pytest

from tests.data.format_samples import SAMPLES, Sample, otel_parquet
from tideforge.data.logs import find_logs, label
from tideforge.data.readers import head, read_logs
from tideforge.data.s3 import S3Object, translated
from tideforge.errors import UserError
from tideforge.flows.cli import main
from tideforge.tasks.endpoint import Endpoint, Hardware, Traffic
from tideforge.tasks.ingest import ingest
from tideforge.tasks.store import Run

ROW = {"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}
PACKERS = {
    "gz": gzip.compress,
    "zst": lambda raw: pa.compress(raw, codec="zstd", asbytes=True),
}


def log(*times: int) -> bytes:
    return "".join(json.dumps({**ROW, "timestamp": at}) + "\n" for at in times).encode()


def put(root: Path, **files: bytes) -> None:
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.name}-{sample.file}")
def test_a_packed_file_gives_the_same_requests(tmp_path: Path, sample: Sample, packer: str) -> None:
    plain = sample.make(tmp_path)
    packed = tmp_path / f"{sample.file}.{packer}"
    packed.write_bytes(PACKERS[packer](plain.read_bytes()))
    head(packed)
    both = read_logs([plain, packed])
    assert both.report.kept == len(sample.rows) == both.report.duplicates  # ids too are those of the plain file
    assert {file.sha256 for file in both.report.files} == {both.report.files[0].sha256}
    assert find_logs([str(tmp_path)]) == sorted([plain.resolve(), packed.resolve()])


@pytest.mark.parametrize(("packer", "named"), [("gz", "gzip"), ("zst", "zstd")])
def test_a_torn_packed_file_is_named(tmp_path: Path, packer: str, named: str) -> None:
    path = tmp_path / f"a.jsonl.{packer}"
    raw = PACKERS[packer](b"".join(log(number) for number in range(5000)))
    spoilt = raw[:60] + b"\0" * 40 + raw[100:] if packer == "gz" else raw[:4] + b"\xff" * 40
    for damaged in (raw[: len(raw) // 2], spoilt):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"truncated or damaged {named}") as caught:
            read_logs([path])
        assert path.name in caught.value.thing


def test_files_packed_one_behind_the_other_are_read_whole(tmp_path: Path) -> None:
    for packer, pack in PACKERS.items():
        put(tmp_path, **{f"a.jsonl.{packer}": pack(log(1, 2)) + pack(log(3))})
        assert read_logs([tmp_path / f"a.jsonl.{packer}"]).report.kept == 3


def test_nothing_is_left_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    put(tmp_path, **{"a.jsonl.gz": gzip.compress(log(1, 2)), "b.jsonl.gz": gzip.compress(log(1, 2))[:-9]})
    assert read_logs([tmp_path / "a.jsonl.gz"]).report.kept == 2
    with pytest.raises(UserError):
        read_logs([tmp_path / "b.jsonl.gz"])
    assert list(scratch.iterdir()) == []


PARTITIONED = {
    "date=2026-11-29/a.jsonl": log(1),
    "date=2026-11-30/region=eu/a.jsonl": log(2),
    "2026/11/30/a.jsonl.gz": gzip.compress(log(3)),
    "2026-11-30/host_0.log.2026-11-30_10": log(4),
    "a.ndjson": log(5),
}
ASIDE = {"date=2026-11-30/.hidden.jsonl": b"x", "date=2026-11-30/_SUCCESS": b"", "old/a.jsonl": b"x", "notes.txt": b"x"}


def test_a_folder_partitioned_by_date_is_one_log(tmp_path: Path) -> None:
    put(tmp_path, **PARTITIONED, **ASIDE)
    found = find_logs([str(tmp_path)])
    assert {str(path.relative_to(tmp_path.resolve())) for path in found if isinstance(path, Path)} == set(PARTITIONED)
    reading = read_logs(found)
    assert reading.report.kept == 5
    assert {file.name for file in reading.report.files} == set(PARTITIONED)
    assert len(find_logs([str(tmp_path / "date=*" / "**" / "*.jsonl")])) == 2


def test_quarantined_rows_name_the_partition(tmp_path: Path) -> None:
    put(tmp_path, **{"date=2026-11-29/a.jsonl": log(1), "date=2026-11-30/a.jsonl": b"{}\n" + log(2)})
    reading = read_logs(find_logs([str(tmp_path)]))
    assert reading.db.sql("SELECT file, row FROM quarantine").fetchall() == [("date=2026-11-30/a.jsonl", 0)]
    assert label(Path("/var/log/2026.d/a.csv")) == "a.csv"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> pa.fs.S3FileSystem:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    files = pa.fs.S3FileSystem(
        endpoint_override=server.removeprefix("http://"), scheme="http", region="us-east-1", allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )  # fmt: skip
    if files.get_file_info("traffic").type != pa.fs.FileType.NotFound:
        files.delete_dir("traffic")
    files.create_dir("traffic")
    return files


def upload(bucket: pa.fs.S3FileSystem, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        with bucket.open_output_stream(f"traffic/{name}", compression=None) as out:
            out.write(raw)


def test_logs_in_s3_are_found_and_read_like_local_ones(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    put(tmp_path, **PARTITIONED)
    upload(bucket, {f"logs/{name}": raw for name, raw in (PARTITIONED | ASIDE).items()})
    found = find_logs(["s3://traffic/logs/"])
    assert {str(each).removeprefix("s3://traffic/logs/") for each in found} == set(PARTITIONED)
    there, here = read_logs(found), read_logs(find_logs([str(tmp_path)]))
    assert there.report == here.report
    there.write_requests(tmp_path / "there.parquet")
    here.write_requests(tmp_path / "here.parquet")
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()


def test_an_object_and_a_glob_in_s3(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    otel_parquet(tmp_path / "spans.parquet")
    packed = gzip.compress((tmp_path / "spans.parquet").read_bytes())
    upload(bucket, {"day/1/a.jsonl": log(1), "day/2/a.jsonl": log(2), "day/2/b": log(3), "spans.parquet.gz": packed})
    assert read_logs(find_logs(["s3://traffic/day/*/a.jsonl"])).report.kept == 2
    assert read_logs(find_logs(["s3://traffic/**/a.jsonl", "s3://traffic/day/2/b"])).report.kept == 3
    (spans,) = find_logs(["s3://traffic/spans.parquet.gz"])
    head(spans)
    assert read_logs([spans]).report.files[0].format == "otel-genai-parquet"


def test_what_is_wrong_in_s3_is_one_line_without_credentials(
    bucket: pa.fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(bucket, {"a.jsonl": log(1)})
    for pattern in ("s3://traffic/none", "s3://traffic/*.csv", "s3://nowhere/logs", "s3://"):
        with pytest.raises(UserError) as caught:
            find_logs([pattern])
        assert caught.value.thing == pattern
    (found,) = find_logs(["s3://traffic/a.jsonl"])
    bucket.delete_file("traffic/a.jsonl")
    with pytest.raises(UserError, match=r"s3://traffic/a\.jsonl: cannot be read"):
        read_logs([found])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:1")
    with pytest.raises(SystemExit) as stopped:
        main(["ingest", "s3://traffic/a.jsonl"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith("tideforge: AWS_ENDPOINT_URL: is no http(s) address")
    assert "secret-testing" not in said and said.count("\n") == 1


def test_a_night_ingests_again_when_an_object_was_replaced(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    upload(bucket, {"logs/a.jsonl": log(1)})
    endpoint = Endpoint(
        name="x", model=tmp_path, launch="tideforge serve", hardware=Hardware(name="cpu"), state=tmp_path,
        traffic=Traffic(logs=["s3://traffic/logs"]),
    )  # fmt: skip
    run = Run.create(tmp_path / "runs", "r")
    first = ingest(run, endpoint)
    assert ingest(run, endpoint) == first and first.extra["kept"] == 1
    upload(bucket, {"logs/a.jsonl": log(1, 2)})
    assert ingest(run, endpoint).extra["kept"] == 2


def test_a_server_that_is_not_there_is_an_error_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-testing")
    with pytest.raises(UserError, match="s3://traffic/logs: cannot be read") as caught:
        find_logs(["s3://traffic/logs"])
    assert "secret-testing" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "matches", "not_these"),
    [
        ("b/*/a.csv", ["b/x/a.csv"], ["b/a.csv", "b/x/y/a.csv", "b/x/aXcsv"]),
        ("b/**/a.csv", ["b/a.csv", "b/x/y/a.csv"], ["b/xa.csv"]),
        ("b/a?[0-9].[!z]", ["b/ax1.y"], ["b/a/1.y", "b/ax1.z", "b/axx.y"]),
        ("b/a[1", ["b/a[1"], ["b/a1"]),
    ],
)
def test_wildcards_of_s3_stay_within_folders(pattern: str, matches: list[str], not_these: list[str]) -> None:
    made = re.compile(translated(pattern))
    assert all(made.fullmatch(name) for name in matches) and not any(made.fullmatch(name) for name in not_these)


def test_a_local_name_is_no_pattern(tmp_path: Path) -> None:
    put(tmp_path, **{"a[1]*.jsonl": log(1), "a1.jsonl": log(2, 3), "b.jsonl.gz": log(4)})
    assert read_logs([tmp_path / "a[1]*.jsonl"]).report.kept == 1
    assert read_logs([tmp_path / "b.jsonl.gz"]).report.kept == 1  # plain, whatever its name says


def test_an_object_is_another_when_it_was_replaced() -> None:
    assert S3Object("s3://b/a", "1 bytes, 1 ns") != S3Object("s3://b/a", "1 bytes, 2 ns")
