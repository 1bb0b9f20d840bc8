"""The server's own traffic log: finished requests go to rotated Parquet files in the background.

`record` never waits: not for the disk, not for the writer. Each file appears whole, by a rename. A disk that is full
loses nothing at first: rows wait in memory up to a bound and are written when there is room; what is over the bound is
dropped and counted.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tideforge.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RequestRow:
    """A finished request; fields are the columns of data/schema.py."""

    request_id: str
    arrival: datetime.datetime  # with a time zone
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    model: str | None = None
    region: str | None = None
    tenant: str | None = None
    prefix_hashes: tuple[int, ...] | None = None
    finish_reason: str | None = None
    prompt_text: str | None = None
    output_text: str | None = None

    def __post_init__(self) -> None:
        if self.arrival.tzinfo is None:
            raise ValueError("arrival needs a time zone")


class TrafficLog:
    """Writes a file every `rows_per_file` rows or `seconds_per_file` seconds, and what is left on `close`."""

    def __init__(
        self,
        folder: Path,
        keep_text: bool = False,
        rows_per_file: int = 5000,
        seconds_per_file: float = 30.0,
        most_waiting: int = 200_000,
    ) -> None:
        self.folder, self.keep_text = folder, keep_text
        self.rows_per_file, self.seconds_per_file, self.most_waiting = rows_per_file, seconds_per_file, most_waiting
        self.dropped = 0  # rows lost because `most_waiting` were waiting already
        self.written = 0
        self._queue: queue.Queue[RequestRow] = queue.Queue(maxsize=most_waiting)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[RequestRow] = []
        self._files = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(str(folder), f"cannot be made ({error.strerror})", "mend the endpoint's `state`") from None
        self._thread = threading.Thread(target=self._run, name="traffic-log", daemon=True)
        self._thread.start()

    def record(self, row: RequestRow | Mapping[str, Any]) -> None:
        """Takes one finished request; a mapping has the fields of RequestRow. Text is dropped unless it is kept."""
        if not isinstance(row, RequestRow):
            row = RequestRow(**row)
        if not self.keep_text:
            row = dataclasses.replace(row, prompt_text=None, output_text=None)
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped += 1
        if self._queue.qsize() >= self.rows_per_file:
            self._wake.set()

    def flush(self) -> None:
        """Writes what is waiting now, in the caller's thread. UserError when the disk is full."""
        with self._lock:
            self._drain()
            while self._waiting:
                self._write(self._waiting[: self.rows_per_file])
                del self._waiting[: self.rows_per_file]

    def close(self) -> None:
        """Stops the writer and writes the rest; again is harmless. UserError when the rest cannot be written."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self.seconds_per_file)
            self._wake.clear()
            try:
                self.flush()
            except (UserError, OSError) as error:
                log.warning("traffic log: %s; %d rows wait", error, len(self._waiting))
                self._closing.wait(min(1.0, self.seconds_per_file))

    def _drain(self) -> None:
        """Moves rows from the queue to `_waiting` as far as the bound allows; the queue is bounded itself."""
        while len(self._waiting) < self.most_waiting:
            try:
                self._waiting.append(self._queue.get_nowait())
            except queue.Empty:
                return

    def _write(self, rows: list[RequestRow]) -> None:
        # Imported here so that the record can be used where pyarrow is not installed.
        import pyarrow.parquet as pq

        from tideforge.data.files import whole

        try:
            table = self._table(rows)
        except (ValueError, TypeError, OverflowError) as error:  # pyarrow's, for a value that is not of its column
            # One such row must not keep those behind it from the disk for ever.
            self.dropped += len(rows)
            log.error("traffic log: dropped %d rows: %s", len(rows), error)
            return
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        target = self.folder / f"requests-{stamp}-{os.getpid()}-{self._files}.parquet"
        with whole(target) as temporary:
            pq.write_table(table, temporary, compression="zstd")
        self._files += 1
        self.written += len(rows)

    def _table(self, rows: list[RequestRow]) -> pa.Table:
        import pyarrow as pa

        from tideforge.data.schema import LOG_SCHEMA, TEXT

        names = [name for name in LOG_SCHEMA.names if self.keep_text or name not in TEXT]
        schema = pa.schema([LOG_SCHEMA.field(name) for name in names])
        columns = [pa.array([getattr(row, name) for row in rows], schema.field(name).type) for name in names]
        return pa.table(columns, schema=schema)
