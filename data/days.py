"""The traffic log day by day, so that a night reads only files that it has not seen.

`sources/<key>.json` accounts for a file (its content and the mapping that read it), `days/<date>/<key>.parquet` are its good
rows of a day (UTC), every one of them: which are duplicates is worked out a day, against the day before, and kept beside
them as `twice-<hash>.parquet`. The hash of a derived file is that of the sources it covers, so a late file, or one that
changed or went, makes anew what it touches and nothing else. A source's JSON is written last: killed at any moment, what
has no JSON is not there, and is written over the next time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from tideforge.data.files import canonical_json, sha256_bytes, sweep, whole, write_whole
from tideforge.data.ingest_report import FileReport
from tideforge.data.mapping import Format
from tideforge.data.readers import PASSED, account, connect, load, make_raw, room, write_table
from tideforge.data.s3 import S3Object
from tideforge.data.schema import KEPT, QUARANTINE_SCHEMA
from tideforge.data.staging import Location
from tideforge.data.values import quoted
from tideforge.errors import UserError

VERSION = 1  # of the folder; part of every hash
ONE_DAY = datetime.timedelta(days=1)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What DuckDB may use; the rest goes to files in `spill`, or in the system's folder for temporary ones."""

    memory_mb: int | None = None
    threads: int | None = None
    spill: Path | None = None

    @property
    def workers(self) -> int:
        """Files or days worked on side by side."""
        return self.threads or min(4, os.cpu_count() or 1)

    def one_of(self, number: int) -> Limits:
        """For each of several connections that work side by side, a thread for each."""
        return Limits(self.memory_mb and max(1, self.memory_mb // number), 1, self.spill)

    def connect(self) -> duckdb.DuckDBPyConnection:
        db = connect()
        if self.memory_mb:
            db.execute(f"SET memory_limit = '{self.memory_mb}MB'")
        if self.threads:
            db.execute(f"SET threads = {self.threads}")
        if self.spill:
            db.execute(f"SET temp_directory = {quoted(str(self.spill))}")
        return db


class Source(BaseModel):
    """A file that was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    key: str
    location: str
    stamp: str  # changes when the file does
    formats: tuple[str, ...]  # hashes of the mappings that were given
    report: FileReport
    good: int
    quarantined: dict[str, int]
    days: dict[str, int]  # date -> good rows


def sql(name: str) -> str:
    return (resources.files("tideforge.data") / "sql" / f"{name}.sql").read_text()


def stamp_of(location: Location) -> str:
    """Of what a look at the file's entry tells, without reading it."""
    if isinstance(location, S3Object):
        return str(location.state)
    state = location.stat()
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"


class Days:
    """The folder, and the sources in it that count: those of the last `take`."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder, self.limits = folder, limits or Limits()
        self.sources: tuple[Source, ...] = self._known()

    def one_of(self, number: int) -> Days:
        """The same folder and sources within a part of the limits."""
        part = Days(self.folder, self.limits.one_of(number))
        part.sources = self.sources
        return part

    def _known(self) -> tuple[Source, ...]:
        paths = sorted((self.folder / "sources").glob("*.json"))
        return tuple(Source.model_validate_json(path.read_bytes()) for path in paths)

    def take(
        self, locations: Sequence[Location], formats: Sequence[Format] = (), say: Callable[[str], None] = lambda _: None
    ) -> tuple[Source, ...]:
        """Reads the files that were not read before or changed, and forgets those that are not named; returns the new."""
        for each in (self.folder / "sources", self.folder / "days"):
            each.mkdir(parents=True, exist_ok=True)
            sweep(each, "**/.*.tmp")
        hashes = tuple(each.sha256 for each in formats)
        before = {(each.location, each.stamp, each.formats): each for each in self.sources}
        found = {location: before.get((str(location), stamp_of(location), hashes)) for location in locations}
        unread = [location for location, known in found.items() if known is None]
        part = self.one_of(self.limits.workers)
        with concurrent.futures.ThreadPoolExecutor(self.limits.workers) as pool:
            new = []
            for source in pool.map(lambda location: part._read(location, formats), unread):
                say(f"read {source.location}: {source.good} good rows")
                new.append(source)
        kept = {source.key: source for source in (*filter(None, found.values()), *new)}
        self._forget({each.key for each in self.sources} - kept.keys())
        self.sources = tuple(kept[key] for key in sorted(kept))
        return tuple(new)

    def _read(self, location: Location, formats: Sequence[Format]) -> Source:
        stamp, hashes = stamp_of(location), tuple(each.sha256 for each in formats)
        db = self.limits.connect()
        make_raw(db)
        with room():
            report = account(db, [load(db, 0, location, formats)])[0]
            key = sha256_bytes(canonical_json([VERSION, report.sha256, list(hashes)]))[:16]
            days = {day: self._write_day(db, day, key) for day in self._days_in(db)}
            quarantined = self._write_quarantine(db, key, report)
        db.close()
        source = Source(
            key=key, location=str(location), stamp=stamp, formats=hashes, report=report,
            good=sum(days.values()), quarantined=quarantined, days=days,
        )  # fmt: skip
        write_whole(self.folder / "sources" / f"{key}.json", canonical_json(source.model_dump(mode="json")))
        return source

    def _days_in(self, db: duckdb.DuckDBPyConnection) -> list[str]:
        query = "SELECT DISTINCT arrival::DATE::VARCHAR AS day FROM raw WHERE reason IS NULL ORDER BY day"
        return [row[0] for row in db.execute(query).fetchall()]

    def _write_day(self, db: duckdb.DuckDBPyConnection, day: str, key: str) -> int:
        target = self.part(day, key)
        target.parent.mkdir(exist_ok=True)
        with whole(target) as temporary:
            written = db.execute(
                f"COPY (SELECT {', '.join(KEPT)}, row FROM raw WHERE reason IS NULL "
                f"AND epoch_us(arrival) >= {midnight_us(day)} AND epoch_us(arrival) < {midnight_us(next_day(day))}) "
                f"TO {quoted(str(temporary))} (FORMAT parquet, COMPRESSION zstd)"
            ).fetchall()
        return int(written[0][0])

    def _write_quarantine(self, db: duckdb.DuckDBPyConnection, key: str, report: FileReport) -> dict[str, int]:
        bad = f"FROM raw WHERE reason IS NOT NULL AND reason != {quoted(PASSED)}"
        counts = dict(db.execute(f"SELECT reason, count(*) {bad} GROUP BY reason ORDER BY reason").fetchall())
        if counts:
            named = [quoted(report.name) + " AS file" if name == "file" else name for name in QUARANTINE_SCHEMA.names]
            target = self.folder / "sources" / f"{key}-quarantine.parquet"
            write_table(db, f"SELECT {', '.join(named)} {bad} ORDER BY row", QUARANTINE_SCHEMA, target)
        return counts

    def _forget(self, keys: set[str]) -> None:
        for key in sorted(keys):
            for path in ((self.folder / "sources").glob(f"{key}*"), (self.folder / "days").glob(f"*/{key}.parquet")):
                for each in path:
                    each.unlink()

    def part(self, day: str, key: str) -> Path:
        return self.folder / "days" / day / f"{key}.parquet"

    @property
    def days(self) -> tuple[str, ...]:
        """Dates that have rows."""
        return tuple(sorted({day for source in self.sources for day in source.days}))

    def parts(self, day: str) -> tuple[str, ...]:
        """Keys of the sources with rows on that day."""
        return tuple(sorted(source.key for source in self.sources if day in source.days))

    def covers(self, days: Sequence[str]) -> str:
        """The hash of what those days hold."""
        return sha256_bytes(canonical_json([VERSION, *(list(self.parts(day)) for day in days)]))

    def twice(self, day: str) -> Path:
        """The rows of a day that are duplicates (see sql/day_twice.sql): part's number, row. Made where it is not there."""
        target = self.folder / "days" / day / f"twice-{self.covers([previous_day(day), day])[:16]}.parquet"
        if not target.exists():
            with self.limits.connect() as db, room():
                make_ids(db, self, day)
                with whole(target) as temporary:
                    db.execute(f"COPY ({sql('day_twice')}) TO {quoted(str(temporary))} (FORMAT parquet)")
            replace_older(target, "twice-*.parquet")
        return target

    def settle(self, days: Sequence[str]) -> None:
        """Makes `twice` of several days, side by side. Before partials are: two of them need the same one."""
        part = self.one_of(self.limits.workers)
        with concurrent.futures.ThreadPoolExecutor(self.limits.workers) as pool:
            list(pool.map(part.twice, days))

    def kept(self, day: str, columns: str) -> str:
        """SQL of those columns of a day's requests, duplicates left out. The day has parts."""
        twice = self.twice(day)
        doubled = set(pq.read_table(twice, columns=["part"])["part"].to_pylist())
        each = []
        for number, key in enumerate(self.parts(day)):
            read = f"SELECT {columns} FROM read_parquet({quoted(str(self.part(day, key)))})"
            if number in doubled:
                read += f" WHERE row NOT IN (SELECT row FROM read_parquet({quoted(str(twice))}) WHERE part = {number})"
            each.append(read)
        return " UNION ALL ".join(each)


def make_ids(db: duckdb.DuckDBPyConnection, days: Days, day: str) -> None:
    columns = "row, arrival, prompt_tokens, output_tokens, request_id"
    each = [
        f"SELECT {place} AS day, {number} AS part, {columns} FROM read_parquet({quoted(str(days.part(at, key)))})"
        for place, at in enumerate((previous_day(day), day))
        for number, key in enumerate(days.parts(at))
    ]
    if not each:
        raise UserError(day, "has no requests", "name a day that the log has")
    db.execute(f"CREATE TEMP VIEW ids AS {' UNION ALL '.join(each)}")


def replace_older(target: Path, pattern: str) -> None:
    for other in target.parent.glob(pattern):
        if other != target:
            other.unlink(missing_ok=True)


@functools.cache
def midnight_us(day: str) -> int:
    at = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC)
    return int(at.timestamp()) * 1_000_000


def next_day(day: str) -> str:
    return (datetime.date.fromisoformat(day) + ONE_DAY).isoformat()


def previous_day(day: str) -> str:
    return (datetime.date.fromisoformat(day) - ONE_DAY).isoformat()


def between(first: str, last: str) -> Iterator[str]:
    while first <= last:
        yield first
        first = next_day(first)
