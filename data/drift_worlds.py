"""The declared generator of `bench_drift`: months of made traffic around the length distributions of real traces.

Nothing here is a real month. Real are the joint shapes of prompt and output (data/length_shapes.json: one hour each of three
public traces); declared are regions, curves of day and week, noise, bursts of sessions, tenants and what drifts. The second
generator differs in all of these: other traces, sharper curves, noise that lasts longer, more and longer bursts.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from tideforge.data.hourly import (
    ALL,
    OUTPUT_BINS,
    OUTPUT_LOW,
    PROMPT_BINS,
    PROMPT_LOW,
    Hourly,
    Named,
)
from tideforge.data.watches import DAY, HISTORY, WEEK

Floats = NDArray[np.float64]
STEPS = 32  # a prompt shape is tabled at this many shifts an octave
REACH = 11  # octaves that a shape may be shifted to either side
FIRST_HOUR = 490_896  # 2026-01-01T00:00Z
WATCHED = 30 * DAY
CACHED = (0.4, 0.2, 0.2, 0.1, 0.1)  # shares of CACHED_BINS
VISITORS = 6


@dataclasses.dataclass(frozen=True)
class World:
    """One generator. Noise: (standard deviation, correlation from hour to hour)."""

    name: str
    traces: tuple[tuple[str, float], ...]
    shares: tuple[float, ...]  # of the regions
    phases: tuple[int, ...]  # their hour of the most traffic, UTC
    day_rate: float
    day_octaves: float  # amplitude of mean log2 of prompts over the day
    week_rate: float  # weekend's rate over a weekday's
    week_octaves: float
    rate_noise: tuple[float, float]
    length_noise: tuple[float, float]  # octaves; a region, prompt and output apart
    bursts: tuple[float, float, int]  # chance an hour and region, most extra share of its requests, most hours
    tenants: int
    tenant_noise: tuple[float, float]
    visitor: float  # largest share of a small tenant that comes and goes
    harmonic: float = 0.0  # of the second harmonic of the day, beside the first


WORLDS = (
    World("first", (("azure_conv_2023", 0.7), ("azure_code_2023", 0.3)), (0.4, 0.4, 0.2), (14, 21, 5),
          0.6, 0.15, 0.6, -0.15, (0.15, 0.8), (0.05, 0.9), (0.01, 0.4, 2), 8, (0.15, 0.9), 0.015),
    World("second", (("mooncake_conversation", 0.6), ("azure_conv_2023", 0.4)), (0.5, 0.25, 0.25), (12, 19, 3),
          0.8, 0.25, 0.45, 0.25, (0.25, 0.6), (0.05, 0.95), (0.02, 0.4, 4), 12, (0.2, 0.95), 0.02, 0.4),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """What happens. `octaves` is the whole rise of log2 of the prompts, `ramp_hours` its time; 0 is a step."""

    name: str
    tokens: float  # mean prompt before, of the regions that change (all regions where none is named)
    octaves: float = 0.0
    ramp_hours: int = 0
    region: int | None = None
    mixed: float = 0.0  # share of requests that another mix with the same mean replaces
    tenant: float = 0.0  # share of a new tenant
    stack: bool = False
    weekend: bool = False
    goal_hours: float | None = None

    @property
    def drifts(self) -> bool:
        return bool(self.octaves or self.mixed or self.tenant or self.stack)


CASES = (
    Case("no change", 18_000),
    Case("weekend effect", 18_000, weekend=True),
    Case("region 70K to 97K in a week", 70_000, float(np.log2(97 / 70)), WEEK, region=2, goal_hours=24),
    Case("burst 18K to 33K in three days", 18_000, float(np.log2(33 / 18)), 3 * DAY, goal_hours=6),
    Case("trend 10K to 18K in two weeks", 10_000, float(np.log2(18 / 10)), 2 * WEEK, goal_hours=24),
    Case("mix shift, same mean, 20 % of requests", 18_000, mixed=0.2, goal_hours=24),
    Case("new tenant with 5 % of requests", 18_000, tenant=0.05, goal_hours=48),
    Case("change of stack", 18_000, stack=True, goal_hours=0),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """Traffic of history and watched hours; hours count from the first of history."""

    traffic: Hourly
    onset: int  # first hour with any change; the end of the run where nothing changes
    passed: int  # first hour whose change is at least the action threshold


@cache
def table(traces: tuple[tuple[str, float], ...]) -> tuple[Floats, float]:
    """([shift, prompt bins, output bins] probabilities, shift 0 in the middle; log2 of the mean prompt at shift 0)."""
    raw = json.loads((resources.files("tideforge.data") / "length_shapes.json").read_text())
    shapes = np.zeros((2 * REACH * STEPS + 1, PROMPT_BINS, OUTPUT_BINS))
    mean = 0.0
    for name, weight in traces:
        total = sum(cell[2] for cell in raw[name])
        for quarter, octave, requests in raw[name]:
            share = weight * requests / total
            low = quarter / 4
            mean += share * 2**low * (2**0.25 - 1) / (0.25 * np.log(2))
            output = min(max(octave - OUTPUT_LOW, 0), OUTPUT_BINS - 1)
            for part in (1 / 32, 3 / 32, 5 / 32, 7 / 32):  # a quarter octave as four points: steps are that fine
                bins = np.floor(low + part + (np.arange(len(shapes)) / STEPS - REACH)).astype(int) - PROMPT_LOW
                shapes[np.arange(len(shapes)), np.clip(bins, 0, PROMPT_BINS - 1), output] += share / 4
    return shapes, float(np.log2(mean))


def shapes_at(world: World, octaves: Floats) -> Floats:
    """[..., prompt bins, output bins] of prompts shifted by `octaves`, between two tabled shifts by interpolation."""
    shapes, _ = table(world.traces)
    place = np.clip((octaves + REACH) * STEPS, 0, len(shapes) - 1.001)
    below = place.astype(int)
    part = (place - below)[..., None, None]
    return np.asarray((1 - part) * shapes[below] + part * shapes[below + 1])


def lasting(rng: np.random.Generator, shape: tuple[int, ...], noise: tuple[float, float]) -> Floats:
    """First-order autoregressive noise along the first axis, stationary from the first hour."""
    deviation, correlation = noise
    drawn = rng.standard_normal(shape) * deviation * np.sqrt(1 - correlation**2)
    drawn[0] = rng.standard_normal(shape[1:]) * deviation
    for hour in range(1, shape[0]):
        drawn[hour] += correlation * drawn[hour - 1]
    return drawn


def curves(world: World, hours: int) -> tuple[Floats, Floats]:
    """([hours, regions] day curve in -1 to 1 or a little over, weekend 0 or 1)."""
    clock = (FIRST_HOUR + np.arange(hours))[:, None] - np.array(world.phases)
    day = np.cos(2 * np.pi * clock / DAY)
    day = (day + world.harmonic * np.cos(4 * np.pi * clock / DAY)) / (1 + world.harmonic)
    weekend = ((FIRST_HOUR + np.arange(hours)) // DAY + 3) % 7 >= 5  # 1970-01-01 was a Thursday
    return day, np.broadcast_to(weekend[:, None].astype(float), day.shape)


def make(world: World, case: Case, rate: float, seed: int) -> Run:
    """`rate` is the mean of requests an hour over all regions on weekdays."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{world.name} {case.name} {rate:g}".encode())])
    onset = HISTORY + int(rng.integers(DAY, DAY + WEEK)) if case.drifts else HISTORY + WATCHED
    passed = onset + (int(np.ceil(case.ramp_hours * np.log2(1.2) / case.octaves)) if case.octaves else 0)
    hours = HISTORY + WATCHED if not case.drifts else passed + 5 * DAY
    day, weekend = curves(world, hours)
    week_rate, week_octaves = (0.35, 0.6) if case.weekend else (world.week_rate, world.week_octaves)
    noise = lasting(rng, day.shape, world.rate_noise)
    requests = (
        rate * np.array(world.shares) * (1 + world.day_rate * day) * (1 - (1 - week_rate) * weekend) * np.exp(noise)
    )
    shift = world.day_octaves * day + week_octaves * weekend + lasting(rng, day.shape, world.length_noise)
    shift = shift + base_octaves(world, case, len(world.shares)) + rise(case, day.shape, onset)
    cells = shapes_at(world, shift)
    cells = outputs_shifted(cells, lasting(rng, day.shape, world.length_noise))
    if case.mixed:
        cells[onset:] = (1 - case.mixed) * cells[onset:] + case.mixed * spread_mix(world, shift[onset:])
    joint = rng.poisson(requests[..., None, None] * cells)
    joint += sessions(rng, world, joint, rate)
    return Run(as_hourly(rng, world, case, joint, onset), onset, passed)


def base_octaves(world: World, case: Case, regions: int) -> Floats:
    """So that the mean prompt of the changing regions is the case's; a region beside them has 18,000 tokens."""
    _, mean = table(world.traces)
    tokens = [case.tokens if case.region in (None, region) else 18_000 for region in range(regions)]
    return np.asarray(np.log2(tokens) - mean)


def rise(case: Case, shape: tuple[int, ...], onset: int) -> Floats:
    """[hours, regions] octaves of the change: linear in log2 over the ramp, then it stays."""
    found = np.zeros(shape)
    if case.octaves:
        part = np.clip((np.arange(shape[0]) - onset) / case.ramp_hours, 0, 1) * case.octaves
        found[:, slice(None) if case.region is None else case.region] = (
            part if case.region is not None else part[:, None]
        )
    return found


def outputs_shifted(cells: Floats, octaves: Floats) -> Floats:
    """Moves part of each output bin into the next: a shift by a fraction of an octave."""
    up, down = np.maximum(octaves, 0)[..., None, None], np.maximum(-octaves, 0)[..., None, None]
    moved = cells * (1 - up - down)
    moved[..., 1:] += up * cells[..., :-1]
    moved[..., -1:] += up * cells[..., -1:]
    moved[..., :-1] += down * cells[..., 1:]
    moved[..., :1] += down * cells[..., :1]
    return np.asarray(moved)


def spread_mix(world: World, shift: Floats) -> Floats:
    """One request in four three times as long, three in four a third: the mean stays, the outputs change sides."""
    three = np.log2(3)
    longer = shapes_at(world, shift + three)
    return np.asarray(0.25 * longer + 0.75 * shapes_at(world, shift - three))


def sessions(rng: np.random.Generator, world: World, joint: NDArray[np.int64], rate: float) -> NDArray[np.int64]:
    """Extra requests of one cell for some hours: one agent's session, or a client that retries.

    Where more requests come in, one client is less of them: its share falls with the root of the rate.
    """
    chance, most, longest = world.bursts
    extra = np.zeros_like(joint)
    counts = joint.sum(axis=(2, 3))
    for hour, region in np.argwhere(rng.random(counts.shape) < chance):
        cell = int(rng.choice(PROMPT_BINS * OUTPUT_BINS, p=cell_shares(joint[hour, region])))
        length = int(rng.integers(1, longest + 1))
        share = rng.uniform(0.05, most) * min(1.0, np.sqrt(200 / rate))
        number = rng.poisson(counts[hour : hour + length, region] * share)
        extra[hour : hour + length, region, cell // OUTPUT_BINS, cell % OUTPUT_BINS] += number
    return extra


def cell_shares(counts: NDArray[np.int64]) -> Floats:
    flat = counts.reshape(-1) + 1e-9
    return np.asarray(flat / flat.sum())


def as_hourly(rng: np.random.Generator, world: World, case: Case, joint: NDArray[np.int64], onset: int) -> Hourly:
    regions = tuple(f"r{number}" for number in range(joint.shape[1]))
    counts = joint.sum(axis=(2, 3))
    whole = np.concatenate([joint.sum(axis=1, keepdims=True), joint], axis=1)
    cached = rng.multinomial(counts, CACHED)
    binned = np.concatenate([cached.sum(axis=1, keepdims=True), cached], axis=1)
    tenants, shares = tenant_shares(rng, world, case, len(counts), onset)
    named = (
        Named("region", regions, counts),
        Named("tenant", tenants, rng.multinomial(counts.sum(axis=1), shares)),
        Named("model", (), np.zeros((len(counts), 0), dtype=np.int64)),
    )
    return Hourly(FIRST_HOUR, (ALL, *(f"region {region}" for region in regions)), whole, binned, named)


def tenant_shares(
    rng: np.random.Generator, world: World, case: Case, hours: int, onset: int
) -> tuple[tuple[str, ...], Floats]:
    """(names, [hours, names]): tenants that stay, small ones that come for some days and go, and the case's new one."""
    weights = np.exp(lasting(rng, (hours, world.tenants), world.tenant_noise)) / np.arange(2, world.tenants + 2)
    weights /= weights.sum(axis=1, keepdims=True)
    small = np.zeros((hours, VISITORS))
    for number in range(VISITORS):
        begin, length = int(rng.integers(0, hours)), int(rng.integers(DAY, 10 * DAY))
        small[begin : begin + length, number] = rng.uniform(0.001, world.visitor)
    newcomer = np.where(np.arange(hours) >= onset, case.tenant, 0.0)[:, None]
    rest = 1 - newcomer - small.sum(axis=1, keepdims=True)
    names = [f"t{number}" for number in range(world.tenants)] + [f"small{number}" for number in range(VISITORS)]
    return (*names, "new"), np.hstack([weights * rest, small, newcomer])
