"""`make bench-traffic`: ingest and profile of a large traffic log on two threads, beside a bare scan and pandas.

Every phase is a process of its own, so that its peak of memory is its own (it starts no children). What a phase found lies in
`<folder>/results`; called again after an interruption, the bench goes on with the next phase, and at its end it removes the
folder. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tideforge.data.days import Days, Limits
from tideforge.data.files import canonical_json, sha256_bytes, write_whole
from tideforge.data.merge import profile_days
from tideforge.data.profile import NAMES, PROBABILITIES
from tideforge.data.profile_records import Profile
from tideforge.data.traffic_generator import ROWS, Traffic, write_conversations
from tideforge.data.values import quoted
from tideforge.errors import UserError

WINDOW = 30
BYTES_A_REQUEST = 160  # log and its copy by day took 32 and 33 at 10 million; the rest is for what spills
FIGURES = ("prompt", "output", "context")
NUMBERS = ("epoch_us(arrival)", "prompt_tokens", "output_tokens", "cached_tokens", "ttft_ms", "latency_ms")
WORDS = ("model", "region", "tenant")


@dataclasses.dataclass(frozen=True)
class Bench:
    folder: Path
    requests: int
    pandas_requests: int
    prefix_requests: int
    memory_mb: int
    threads: int
    seed: int

    @property
    def traffic(self) -> Traffic:
        return Traffic(rows_a_day=self.requests // WINDOW | 1, seed=self.seed)

    @property
    def limits(self) -> Limits:
        return Limits(self.memory_mb, self.threads, self.folder / "spill")

    def log(self, number: int) -> Path:
        return self.folder / "log" / f"{self.traffic.day(number)}.parquet"

    @property
    def window(self) -> list[Path]:
        return [self.log(number) for number in range(WINDOW)]

    @property
    def small(self) -> list[Path]:
        """The logs of the last days that pandas can hold, at least one."""
        days = max(1, min(WINDOW, self.pandas_requests // self.traffic.rows_a_day))
        return self.window[-days:]


def generate(bench: Bench) -> dict[str, Any]:
    db = bench.limits.connect()
    (bench.folder / "log").mkdir(exist_ok=True)
    for number in range(WINDOW + 1):
        if not bench.log(number).exists():
            bench.traffic.write_day(db, number, bench.log(number))
            say(f"  wrote {bench.log(number).name}")
    size = sum(path.stat().st_size for path in bench.window)
    return {
        "rows": bench.traffic.rows_a_day * WINDOW,
        "bytes": size,
        "duplicates": bench.traffic.duplicates(db, WINDOW),
    }


def scan(bench: Bench, paths: list[Path], ids: bool) -> float:
    """Seconds of reading the columns, with one sum over each."""
    words = (*WORDS, "request_id") if ids else WORDS
    sums = [f"sum({name})" for name in NUMBERS] + [f"sum(strlen({name}))" for name in words]
    names = ", ".join(quoted(str(path)) for path in paths)
    with bench.limits.connect() as db:
        return timed(lambda: db.execute(f"SELECT {', '.join(sums)} FROM read_parquet([{names}])").fetchall())[0]


def bare(bench: Bench) -> dict[str, Any]:
    """The faster of two passes each: the first may have to read from the disk."""
    return {
        "with_ids_s": min(scan(bench, bench.window, True) for _ in range(2)),
        "profiled_s": min(scan(bench, bench.window, False) for _ in range(2)),
    }


def ingest(bench: Bench) -> dict[str, Any]:
    """Checks, days and duplicates; the profile finds them done."""
    shutil.rmtree(bench.folder / "days", ignore_errors=True)
    days = Days(bench.folder / "days", bench.limits)
    read_s = timed(lambda: days.take(bench.window, say=lambda line: say(f"  {line}")))[0]
    dedup_s = timed(lambda: days.settle(days.days))[0]
    size = sum(path.stat().st_size for path in (bench.folder / "days").rglob("*.parquet"))
    return {"seconds": read_s + dedup_s, "read_s": read_s, "dedup_s": dedup_s, "bytes": size}


def profile(bench: Bench) -> dict[str, Any]:
    days = Days(bench.folder / "days", bench.limits)
    for partial in (bench.folder / "days").rglob("partial-*.parquet"):
        partial.unlink()
    seconds, made = timed(lambda: profile_days(days))
    again_s = timed(lambda: profile_days(days))[0]
    write_whole(bench.folder / "profile.json", made.to_json())
    size = sum(path.stat().st_size for path in (bench.folder / "days").rglob("partial-*.parquet"))
    return {"seconds": seconds, "merge_s": again_s, "requests": made.requests, "partials_bytes": size}


def exact(bench: Bench) -> dict[str, Any]:
    """Counts and quantiles of the merged partials against those of every request, by plain counting."""
    made = Profile.read(bench.folder / "profile.json")
    days = Days(bench.folder / "days", bench.limits)
    rows = " UNION ALL ".join(f"({days.kept(day, 'prompt_tokens, output_tokens')})" for day in days.days)
    errors: dict[str, float] = {}
    with bench.limits.connect() as db:
        for name, column in zip(
            FIGURES, ("prompt_tokens", "output_tokens", "prompt_tokens + output_tokens"), strict=True
        ):
            counts = db.execute(f"SELECT {column} AS n, count(*) FROM ({rows}) GROUP BY n ORDER BY n").fetchall()
            known = true_quantiles(counts)
            found = getattr(made, name).quantiles
            errors[name] = max(abs(found[key] / known[key] - 1) for key in NAMES if key != "p99.9")
            errors[f"{name}_p99.9"] = abs(found["p99.9"] / known["p99.9"] - 1)
        bins = "floor(4 * log2(prompt_tokens))::INTEGER AS x, floor(4 * log2(output_tokens))::INTEGER AS y"
        joint = db.execute(f"SELECT {bins}, count(*) FROM ({rows}) GROUP BY ALL ORDER BY ALL").fetchall()
    same = tuple(tuple(cell) for cell in joint) == made.joint
    return {"quantile_errors": errors, "joint_counts_equal": same, "requests": sum(cell[2] for cell in joint)}


def true_quantiles(counts: list[tuple[int, int]]) -> dict[str, int]:
    total, passed, place, found = sum(number for _, number in counts), counts[0][1], 0, {}
    for name, probability in zip(NAMES, PROBABILITIES, strict=True):
        while passed < math.ceil(probability * total - 1e-9):
            place += 1
            passed += counts[place][1]
        found[name] = counts[place][0]
    return found


def one_day(bench: Bench) -> dict[str, Any]:
    """One more day: read, duplicates against the day before, its partial and the profile of the window's new 30 days; then
    a thousand rows that come a day late."""
    days = Days(bench.folder / "days", bench.limits)
    for left in (bench.folder / "days" / "days" / bench.traffic.day(WINDOW)).glob("*"):
        left.unlink()
    days.take(bench.window)
    seconds = timed(lambda: add(days, [*bench.window, bench.log(WINDOW)], bench))[0]
    late = bench.folder / "log" / "late.parquet"
    with bench.limits.connect() as db:
        rows = f"SELECT * REPLACE ('late-' || request_id AS request_id) FROM read_parquet({quoted(str(bench.log(WINDOW - 1)))})"
        db.execute(f"COPY ({rows} LIMIT 1000) TO {quoted(str(late))} (FORMAT parquet)")
    late_s = timed(lambda: add(days, [*bench.window, bench.log(WINDOW), late], bench))[0]
    days.take(bench.window)  # as it was, for a bench that goes on
    return {"seconds": seconds, "late_rows_s": late_s}


def add(days: Days, paths: list[Path], bench: Bench) -> None:
    days.take(paths)
    profile_days(days, first=bench.traffic.day(1), last=bench.traffic.day(WINDOW))


def ours_small(bench: Bench) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        days = Days(Path(scratch), bench.limits)
        seconds, made = timed(lambda: (days.take(bench.small), profile_days(days))[1])
    return {"seconds": seconds, "requests": made.requests}


def pandas_small(bench: Bench) -> dict[str, Any]:
    from tideforge.data.bench_pandas import pandas_profile

    seconds, kept = timed(lambda: pandas_profile(bench.small))
    return {"seconds": seconds, "requests": kept}


def prefixes(bench: Bench) -> dict[str, Any]:
    """Requests with block hashes: ingest, and the profile with repeated blocks and conversations."""
    path = bench.folder / "conversations.parquet"
    with bench.limits.connect() as db:
        write_conversations(db, bench.prefix_requests, path)
        query = f"SELECT count(*), sum(b % 2) FROM (SELECT unnest(prefix_hashes) AS b FROM read_parquet({quoted(str(path))}))"
        bare_s, blocks = timed(lambda: db.execute(query).fetchall()[0][0])
    shutil.rmtree(bench.folder / "conversations", ignore_errors=True)
    days = Days(bench.folder / "conversations", bench.limits)
    read_s = timed(lambda: days.take([path]))[0] + timed(lambda: days.settle(days.days))[0]
    seconds, made = timed(lambda: profile_days(days))
    return {
        "requests": made.requests, "blocks": blocks, "ingest_s": read_s, "profile_s": seconds, "bare_unnest_s": bare_s,
        "repeated_share": made.prefixes.repeated_share,
        "continued_share": made.turns.continued_share if made.turns else None,
    }  # fmt: skip


PHASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "generate": generate, "bare": bare, "ingest": ingest, "profile": profile, "exact": exact, "one_day": one_day,
    "ours_small": ours_small, "pandas_small": pandas_small, "prefixes": prefixes,
}  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = work()
    return time.perf_counter() - started, value


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_phase(bench: Bench, name: str) -> dict[str, Any]:
    """In a process of its own on as many cores as it has threads."""
    result = bench.folder / "results" / f"{name}.json"
    if result.exists():
        say(f"{name}: done before")
        return dict(json.loads(result.read_bytes()))
    say(f"{name} ...")
    cores = sorted(os.sched_getaffinity(0))[: bench.threads]
    environment = os.environ | {"OMP_NUM_THREADS": str(bench.threads)}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in dataclasses.asdict(bench).items()]
    child = subprocess.Popen(
        [sys.executable, "-m", "tideforge.data.bench_traffic", *arguments, "--phase", name],
        env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(f"phase {name}", f"ended with {child.returncode}", "see above; called again, the bench goes on")
    found = json.loads(result.read_bytes()) | {
        "peak_rss_gb": usage.ru_maxrss / 2**20,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    write_whole(result, canonical_json(found))
    say(f"{name}: {json.dumps(found)}")
    return dict(found)


def summary(bench: Bench, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    generated, scans = found["generate"], found["bare"]
    whole_s = found["ingest"]["seconds"] + found["profile"]["seconds"]
    kept = found["profile"]["requests"]
    return {
        "bench": "traffic", "requests": generated["rows"], "kept": kept, "log_gb": generated["bytes"] / 1e9,
        "counts_exact": kept == generated["rows"] - generated["duplicates"] == found["exact"]["requests"]
        and found["exact"]["joint_counts_equal"],
        "ingest_s": found["ingest"]["seconds"], "ingest_over_scan": found["ingest"]["seconds"] / scans["with_ids_s"],
        "profile_s": found["profile"]["seconds"], "profile_over_scan": found["profile"]["seconds"] / scans["profiled_s"],
        "new_day_share": found["one_day"]["seconds"] / whole_s, "late_rows_share": found["one_day"]["late_rows_s"] / whole_s,
        "over_pandas": found["pandas_small"]["seconds"] / found["ours_small"]["seconds"],
        "pandas_kept_the_same": found["pandas_small"]["requests"] == found["ours_small"]["requests"],
        "quantile_error": max(found["exact"]["quantile_errors"][name] for name in FIGURES),
        "p99.9_error": max(found["exact"]["quantile_errors"][f"{name}_p99.9"] for name in FIGURES),
        "peak_rss_gb": {name: round(found[name]["peak_rss_gb"], 2) for name in PHASES},
        "machine": {"cores": bench.threads, "memory_limit_mb": bench.memory_mb, "python": platform.python_version()},
        "load_at_end": os.getloadavg()[0], "phases": found,
    }  # fmt: skip


def table(made: dict[str, Any]) -> str:
    scans, prefix = made["phases"]["bare"], made["phases"]["prefixes"]
    rows = (
        ("log", f"{made['requests']:,} requests, {made['log_gb']:.2f} GB, {made['kept']:,} kept"),
        ("bare scan", f"{scans['with_ids_s']:.2f} s with ids, {scans['profiled_s']:.2f} s without"),
        ("ingest", f"{made['ingest_s']:.1f} s, {made['ingest_over_scan']:.1f} bare scans"),
        ("profile", f"{made['profile_s']:.1f} s, {made['profile_over_scan']:.1f} bare scans (goal 15)"),
        (
            "one new day",
            f"{made['new_day_share']:.3f} of the whole (goal 0.05); late rows {made['late_rows_share']:.3f}",
        ),
        ("pandas", f"{made['over_pandas']:.1f} times as long (goal 4)"),
        ("prefixes", f"{prefix['requests']:,} requests: {prefix['ingest_s']:.1f} s and {prefix['profile_s']:.1f} s"),
        (
            "partials",
            f"counts exact: {made['counts_exact']}; quantiles {made['quantile_error']:.2%}, P99.9 {made['p99.9_error']:.2%}",
        ),
        (
            "peak memory",
            f"{max(made['peak_rss_gb'][name] for name in ('ingest', 'profile', 'one_day', 'prefixes')):.2f} GB",
        ),
    )
    return "\n".join(f"{name:<12} {value}" for name, value in rows)


def check_room(bench: Bench) -> None:
    needed = (bench.requests + 4 * bench.prefix_requests) * BYTES_A_REQUEST
    have = shutil.disk_usage(bench.folder).free + sum(p.stat().st_size for p in bench.folder.rglob("*") if p.is_file())
    if have < needed:
        raise UserError(
            str(bench.folder),
            f"has {have / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed",
            "name another with --folder",
        )


def parsed(argv: list[str] | None) -> tuple[Bench, str | None, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--pandas-requests", type=int, default=1_000_000)
    parser.add_argument("--prefix-requests", type=int, default=1_000_000)
    parser.add_argument(
        "--memory-mb", type=int, default=2000, help="DuckDB's limit; the process needs about 1 GB besides"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".bench-traffic"))
    parser.add_argument("--keep", action="store_true", help="leave the folder when all is done")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    phase, keep = given.pop("phase"), given.pop("keep")
    if given["requests"] < WINDOW:
        parser.error(f"--requests: at least {WINDOW}")
    return Bench(**given), phase, keep


def main(argv: list[str] | None = None) -> None:
    bench, phase, keep = parsed(argv)
    if phase:
        write_whole(bench.folder / "results" / f"{phase}.json.part", canonical_json(PHASES[phase](bench)))
        (bench.folder / "results" / f"{phase}.json.part").rename(bench.folder / "results" / f"{phase}.json")
        return
    begin(bench)
    made = summary(bench, {name: run_phase(bench, name) for name in PHASES})
    say(table(made))
    print(json.dumps(made))
    if not keep:
        shutil.rmtree(bench.folder)


def begin(bench: Bench) -> None:
    """A folder that an interrupted bench of other numbers left is emptied; UserError where it is somebody else's."""
    mark = bench.folder / "bench.json"
    rows = {"rows": sha256_bytes(ROWS.encode())}  # logs of another generator do not count
    asked = canonical_json({key: str(value) for key, value in dataclasses.asdict(bench).items()} | rows)
    if bench.folder.exists() and any(bench.folder.iterdir()):
        if not mark.exists():
            raise UserError(str(bench.folder), "is not empty and no bench made it", "name another with --folder")
        if mark.read_bytes() != asked:
            shutil.rmtree(bench.folder)
    for each in (bench.folder, bench.folder / "results"):
        each.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(bench.folder / "spill", ignore_errors=True)
    check_room(bench)
    write_whole(mark, asked)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        say(f"bench-traffic: {error}")
        sys.exit(2)
