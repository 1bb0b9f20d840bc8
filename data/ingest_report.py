"""What became of a log's rows. Written by ingest, read by people and by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# Version 1 had no account of passed-over rows, missing columns, times and clocks; it can still be read.


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileReport(Strict):
    name: str = Field(description="behind the partitions that it lies in (date=2026-11-30/a.parquet)")
    sha256: str = Field(description="of the file as it was unpacked")
    format: str
    rows: int = Field(description="requests, good or bad: rows passed over are not among them")
    passed_over: int = Field(default=0, description="rows that the format says are no finished request")
    missing: tuple[str, ...] = Field(default=(), description="declared columns that the file cannot give")
    times: str = Field(default="", description="how its times are understood")
    steps_back: int = Field(
        default=0, description="good rows whose arrival and end both lie before those of the good row above: the clock"
    )
    largest_step_back_s: float = 0.0


class IngestReport(Strict):
    """What became of every row: rows = kept + duplicates + the sum of quarantined."""

    version: Literal[1, 2] = 2
    files: tuple[FileReport, ...]
    rows: int
    kept: int
    duplicates: int
    quarantined: dict[str, int]
    first_arrival: str | None
    last_arrival: str | None

    def lines(self) -> Iterator[str]:
        """For people."""
        for file in self.files:
            passed = f", {file.passed_over} passed over" if file.passed_over else ""
            yield f"{file.name}: {file.rows} rows ({file.format}{passed})"
            if file.steps_back:
                yield f"  its clock runs backwards {file.steps_back} times, by {file.largest_step_back_s:g} s at most"
        for missing in dict.fromkeys(file.missing for file in self.files if file.missing):
            yield f"not in {self.named(missing)}: {', '.join(missing)}"
        for times in dict.fromkeys(file.times for file in self.files if file.times not in ("", "absolute")):
            yield f"times are {times}"
        yield f"kept {self.kept} of {self.rows}, {self.duplicates} duplicates dropped"
        yield from (f"quarantined {number}: {reason}" for reason, number in self.quarantined.items())
        if self.first_arrival:
            yield f"arrivals from {self.first_arrival} to {self.last_arrival}"

    def named(self, missing: tuple[str, ...]) -> str:
        names = [file.name for file in self.files if file.missing == missing]
        return names[0] if len(names) == 1 else f"{len(names)} files"
