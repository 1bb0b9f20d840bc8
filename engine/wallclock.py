"""What time it is must not matter to a forward: one that is honest at the hour of its verification may be another one by day.

In a worker the calendar's clocks begin anywhere in forty years and run a day in a second, in trials and in service alike. So the
gates see many hours and days, and service sees no other distribution of them. Clocks that only count (perf_counter, monotonic) are
as they were.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from typing import Any

RATE = 86400.0  # seconds of the calendar a second
YEARS = (2000, 2040)
_CALENDAR = ("CLOCK_REALTIME", "CLOCK_TAI")


def unhinge() -> None:
    """From now on the calling process knows no date, as far as Python's `time` and `datetime` tell it.

    Not what C reads by itself (ctypes, numpy's "now", the times of new files, /proc).
    """
    now = _strayed(*(datetime.datetime(year, 1, 1, tzinfo=datetime.UTC).timestamp() for year in YEARS))
    _unhinge_time(now)
    _unhinge_datetime(now)


def _strayed(first: float, last: float) -> Callable[[], float]:
    """Seconds since the epoch, as it is said from now on."""
    start, begin, count = random.SystemRandom().uniform(first, last), time.monotonic(), time.monotonic
    return lambda: start + RATE * (count() - begin)


def _unhinge_time(now: Callable[[], float]) -> None:
    read, asctime, strftime = time.clock_gettime, time.asctime, time.strftime
    calendar = {number for name in _CALENDAR if (number := getattr(time, name, None)) is not None}

    def clock_gettime(number: int) -> float:
        return now() if number in calendar else read(number)

    told: dict[str, Callable[..., Any]] = {
        name: _by_default(getattr(time, name), now) for name in ("gmtime", "localtime", "ctime")
    }
    here = told["localtime"]
    told |= {
        "time": now,
        "time_ns": lambda: int(now() * 1e9),
        "clock_gettime": clock_gettime,
        "clock_gettime_ns": lambda number: int(clock_gettime(number) * 1e9),
        "asctime": lambda moment=None: asctime(here() if moment is None else moment),
        "strftime": lambda form, moment=None: strftime(form, here() if moment is None else moment),
    }
    for name, function in told.items():
        setattr(time, name, function)


def _by_default(function: Callable[[float], Any], now: Callable[[], float]) -> Callable[..., Any]:
    return lambda seconds=None: function(now() if seconds is None else seconds)


def _unhinge_datetime(now: Callable[[], float]) -> None:
    class Date(datetime.date):
        @classmethod
        def today(cls) -> Date:
            return cls.fromtimestamp(now())

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Moment:
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def utcnow(cls) -> Moment:
            return cls.fromtimestamp(now(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Moment:
            return cls.fromtimestamp(now())

    for name, kind in (("date", Date), ("datetime", Moment)):
        kind.__name__ = kind.__qualname__ = name
        setattr(datetime, name, kind)
