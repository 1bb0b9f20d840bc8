"""In a worker no clock tells the date, and the clocks that count go on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LOOK = """
import json, sys, time
before = time.perf_counter()
from tideforge.engine.wallclock import unhinge
if "as-it-is" not in sys.argv:
    unhinge()
import datetime
looks = []
for _ in range(3):
    looks.append([
        time.time(), time.time_ns() / 1e9, time.clock_gettime(time.CLOCK_REALTIME), time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
        time.mktime(time.localtime()), time.mktime(time.strptime(time.ctime())), time.mktime(time.strptime(time.asctime())),
        float(time.mktime(time.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S"))),
        datetime.datetime.now().timestamp(), datetime.datetime.now(datetime.UTC).timestamp(), datetime.datetime.today().timestamp(),
        datetime.datetime.utcnow().replace(tzinfo=datetime.UTC).timestamp() if "warned" in sys.argv else time.time(),
    ])
    time.sleep(0.1)
print(json.dumps({
    "looks": looks, "counted": time.perf_counter() - before, "day": datetime.date.today().toordinal(),
    "epoch": [time.gmtime(0).tm_year, str(datetime.datetime.fromtimestamp(0, datetime.UTC)), time.strftime("%Y", time.gmtime(0))],
    "kinds": [isinstance(datetime.datetime.now(), datetime.date), datetime.datetime(2000, 1, 2).isoformat()],
}))
"""


def look(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOOK, "warned", *words]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # type: ignore[no-any-return]


def test_every_clock_tells_the_same_wrong_date_and_days_go_by() -> None:
    one, other = look(), look()
    for told in (one, other):
        first, second, third = (min(moments) for moments in told["looks"])
        assert third - second > 86400 * 0.05 < second - first
        assert all(max(moments) - min(moments) < 60 * 86400 for moments in told["looks"])
        assert told["counted"] < 3600
        assert told["epoch"] == [1970, "1970-01-01 00:00:00+00:00", "1970"]
    assert abs(one["looks"][0][0] - other["looks"][0][0]) > 3600, "two workers begin far from each other"


def test_what_only_converts_is_as_it_was() -> None:
    strayed, plain = look(), look("as-it-is")
    assert strayed["epoch"] == plain["epoch"] and strayed["kinds"][1] == plain["kinds"][1]
    assert plain["looks"][2][0] - plain["looks"][0][0] < 86400 * 0.05
