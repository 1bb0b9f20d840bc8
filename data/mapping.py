"""Log formats as declared mappings: one YAML file each in data/formats/, or a file of the user's own.

A mapping says how a file is known (`kind` and `needs`), which of its rows are finished requests (`only`) and where each
declared column comes from. It holds names, units and patterns, never SQL. This project's own Parquet needs none:
data/schema.py declares it.
"""

from __future__ import annotations

import datetime
import functools
import re
import zoneinfo
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from tideforge.data.files import canonical_json, sha256_bytes
from tideforge.data.schema import BY_NAME, KEPT
from tideforge.errors import UserError

NATIVE = "tideforge-parquet"
MOMENTS = ("arrival", "first", "end")  # first and end: of the first and the last token; they yield ttft and latency
MICROS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}  # in one of each
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Strict):
    """Where a value comes from: the first of `from` that is there.

    A name is a column of a CSV file; in JSON and Parquet it is a path whose parts are parted by `/` (`~1` is a slash in
    a name). In OTLP JSON it is a field of the span, or begins with `attributes/` or `resource/`.
    """

    origins: Names = Field(alias="from", min_length=1)
    pattern: str | None = Field(default=None, description="RE2; its one group is the value, no match is no value")
    unit: Literal["s", "ms", "us", "ns", "text", "items"] | None = Field(
        default=None, description="of a number of time; text: a written time; items: as many as a list has"
    )
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="factor of a number")
    fold: Literal["first", "sum"] = Field(default="first", description="of several lines of one request")

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        try:
            if pattern is not None and re.compile(pattern).groups != 1:
                raise ValueError("needs exactly one group, the value")
        except re.error as error:
            raise ValueError(f"is no pattern ({error})") from None
        return pattern


class Only(Strict):
    """Rows where a value of `from` matches `pattern`; others are passed over and counted, not quarantined."""

    origins: Names = Field(alias="from", min_length=1)
    pattern: str = "."


class Format(Strict):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    kind: Literal["csv", "jsonl", "otlp-json", "parquet"]
    needs: tuple[str, ...] = Field(min_length=1, description="columns or top-level names that every such file has")
    only: Only | None = None
    merge: bool = Field(default=False, description="lines with the same request id make one request")
    time_zone: str = Field(default="UTC", description="of written times that name none")
    epoch: datetime.datetime | None = Field(
        default=None, description="what numbers of time count from; 1970 if absent. Given: the log has no absolute time"
    )
    columns: dict[str, Source]

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            located(zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{zone!r} is no known time zone") from None
        return zone

    @field_validator("epoch", mode="before")
    @classmethod
    def _date_is_midnight(cls, epoch: Any) -> Any:
        whole_day = isinstance(epoch, datetime.date) and not isinstance(epoch, datetime.datetime)
        return datetime.datetime.combine(epoch, datetime.time()) if whole_day else epoch

    @model_validator(mode="after")
    def _can_be_read(self) -> Format:
        known = (*KEPT, *MOMENTS[1:])
        if strange := sorted(set(self.columns) - set(known)):
            raise ValueError(f"columns.{strange[0]} is no declared column; declared are {', '.join(known)}")
        for needed in ("prompt_tokens", "output_tokens"):
            if needed not in self.columns:
                raise ValueError(f"columns.{needed} is missing")
        if "arrival" not in self.columns and not {"end", "latency_ms"} <= set(self.columns):
            raise ValueError("columns.arrival is missing, and end and latency_ms, which would do, are not both there")
        if self.merge and "request_id" not in self.columns:
            raise ValueError("merge needs columns.request_id")
        for name, source in self.columns.items():
            if problem := misfit(name, source):
                raise ValueError(f"columns.{name} {problem}")
        return self

    @property
    def epoch_us(self) -> int:
        if self.epoch is None:
            return 0
        aware = self.epoch if self.epoch.tzinfo else self.epoch.replace(tzinfo=located(self.time_zone))
        return round(aware.timestamp() * 1e6)

    @property
    def sha256(self) -> str:
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))


def located(zone: str) -> datetime.tzinfo:
    """UTC without a database of time zones, which a machine may lack."""
    return datetime.UTC if zone == "UTC" else zoneinfo.ZoneInfo(zone)


def misfit(name: str, source: Source) -> str | None:
    """What is wrong with a source for that column, if anything."""
    moment, duration = name in MOMENTS, name in ("ttft_ms", "latency_ms")
    number = not moment and str(BY_NAME[name].type) in ("int64", "double")
    if moment and source.unit not in (*MICROS, "text"):
        return "is a time: unit is one of s, ms, us, ns, text"
    if duration and source.unit not in MICROS:
        return "is a duration: unit is one of s, ms, us, ns"
    if not moment and not duration and source.unit not in (None, "items"):
        return f"has no unit {source.unit}"
    if source.unit == "items" and not number:
        return "is no number: unit items does not fit"
    return None if number or source.scale == 1.0 else "is no number: scale does not fit"


def load_format(path: Path) -> Format:
    """UserError names the file and the first field at fault."""
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(each.name for each in known_formats())
        raise UserError(str(path), "is no format and no mapping file", f"known are {known}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({str(error).splitlines()[0]})", "write it as YAML") from None
    try:
        return Format.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        remedy = "see data/formats/ for examples"
        raise UserError(f"{path}: {field}" if field else str(path), problem, remedy) from None


@functools.cache
def known_formats() -> tuple[Format, ...]:
    """Those that come with the package, by name."""
    folder = Path(str(resources.files("tideforge.data") / "formats"))
    return tuple(load_format(path) for path in sorted(folder.glob("*.yaml")))


def chosen_formats(names: Sequence[str]) -> tuple[Format, ...]:
    """Each name is that of a known format or of a mapping file."""
    by_name = {each.name: each for each in known_formats()}
    return tuple(by_name[name] if name in by_name else load_format(Path(name).expanduser()) for name in names)
