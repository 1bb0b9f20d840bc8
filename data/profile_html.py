"""A profile as one HTML page: tables and plots as inline SVG. Nothing in it is fetched, and it runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tideforge.data.profile_diff import Counts, marginals
from tideforge.data.profile_records import Group, Profile, bin_edges

STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2530}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.15rem .7rem;text-align:right;"
    "border-bottom:1px solid #dde3ea}td:first-child,th:first-child{text-align:left}h2{font-size:1.05rem;margin-top:2rem}"
    "svg{display:block;margin:.5rem 0}svg text{font:11px system-ui,sans-serif;fill:#56616e}small{color:#56616e}"
)
QUANTILES = ("p50", "p90", "p99", "p99.9")
WIDTH, HEIGHT, BLUE = 640, 130, "#2b6cb0"


def page(made: Profile) -> str:
    arrivals, flight = made.arrivals, made.concurrency
    facts = [
        ("requests", f"{made.requests:,}"),
        ("from", f"{made.first_arrival}, {made.span_s:,.0f} s ({made.closed_days} days of silence left out)"),
        ("arrivals", f"{arrivals.mean_per_s:.3g}/s; a minute p50 {arrivals.per_minute['p50']}, most {arrivals.per_minute['most']}"),
        ("burstiness (Poisson: 1, 1)", f"dispersion {figure(arrivals.dispersion)}, gap CV {figure(arrivals.gap_cv)}"),
        ("in flight", f"mean {flight.mean:.1f}, p50 {flight.p50}, p99 {flight.p99}, most {flight.most}"),
        ("rule", f"{flight.rule} ({made.requests - flight.measured_requests:,} requests)"),
        ("from a prefix cache", f"{figure(made.prefixes.cached_share)} of the prompt tokens"),
        ("blocks that had occurred before", figure(made.prefixes.repeated_share)),
        ("quantiles are off by at most", f"{made.quantile_error:.1%}"),
    ]  # fmt: skip
    parts = [table(("", ""), facts), "<h2>Lengths in tokens</h2>", lengths(made)]
    for name, counts in marginals(made).items():
        if name != "hour":
            parts += [f"<h2>{name} tokens, requests a bin</h2>", bars(counts)]
    parts += [
        "<h2>Prompt (across) and output (up) together</h2>",
        heatmap(made),
        "<h2>Over the day (UTC)</h2>",
        day(made),
    ]
    for title, groups in (("Region", made.regions), ("Model", made.models), ("Tenant", made.by_tenant)):
        if groups:
            parts += [f"<h2>{title}</h2>", group_table(title, groups)]
    title = f"Traffic profile {made.sha256[:16]}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(parts)}<p><small>SHA-256 {made.sha256}, version {made.version}</small></p></body></html>\n"
    )


def figure(value: float | None) -> str:
    return "not in the log" if value is None else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    shown = line(head, "th") if any(head) else ""
    return f"<table>{shown}{''.join(line(row, 'td') for row in rows)}</table>"


def lengths(made: Profile) -> str:
    kinds = {"prompt": made.prompt, "output": made.output, "context": made.context, "cached prefix": made.cached}
    rows = [
        (name, each.least, f"{each.mean:.1f}", *(each.quantiles[key] for key in QUANTILES), each.most)
        for name, each in kinds.items()
        if each
    ]
    return table(("", "least", "mean", *QUANTILES, "most"), rows)


def group_table(title: str, groups: dict[str, Group]) -> str:
    rows = [
        (name, f"{each.requests:,}", each.prompt_p50, each.prompt_p90, each.output_p50, each.output_p90)
        for name, each in groups.items()
    ]
    return table((title, "requests", "prompt p50", "p90", "output p50", "p90"), rows)


def svg(height: int, inside: Sequence[str]) -> str:
    return f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">{"".join(inside)}</svg>'


def box(x: float, y: float, width: float, height: float, title: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{BLUE}" '
        f'fill-opacity="{opacity:.3f}"><title>{escape(title)}</title></rect>'
    )


def word(x: float, y: float, text: object, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(text))}</text>'


def bars(counts: Counts) -> str:
    """One bar a bin of a quarter octave, labelled by the octave."""
    low, high, top = min(counts), max(counts), max(counts.values())
    step = WIDTH / (high - low + 1)
    inside = []
    for index in range(low, high + 1):
        number, x = counts.get(index, 0), (index - low) * step
        tall = (HEIGHT - 20) * number / top
        least = bin_edges(index)[0] if index >= 0 else 0
        inside.append(box(x, HEIGHT - 18 - tall, max(step - 1, 0.5), tall, f"from {least}: {number}"))
        if index >= 0 and index % 8 == 0:
            inside.append(word(x, HEIGHT - 4, least, "start"))
    return svg(HEIGHT, inside)


def heatmap(made: Profile) -> str:
    xs, ys = [cell[0] for cell in made.joint], [cell[1] for cell in made.joint]
    left, bottom, top = min(xs), min(ys), max(cell[2] for cell in made.joint)
    step = min(14.0, (WIDTH - 60) / (max(xs) - left + 1))
    height = (max(ys) - bottom + 1) * step
    inside = []
    for x, y, number in made.joint:
        title = f"prompt from {bin_edges(x)[0]}, output from {bin_edges(y)[0]}: {number}"
        place = (50 + (x - left) * step, height - (y - bottom + 1) * step)
        inside.append(box(*place, step, step, title, 0.08 + 0.92 * (number / top) ** 0.5))
    for x in range(left, max(xs) + 1):
        if x % 8 == 0:
            inside.append(word(50 + (x - left) * step, height + 14, bin_edges(x)[0], "start"))
    for y in range(bottom, max(ys) + 1):
        if y % 8 == 0:
            inside.append(word(46, height - (y - bottom) * step, bin_edges(y)[0], "end"))
    return svg(round(height) + 20, inside)


def day(made: Profile) -> str:
    rows = [
        (
            hour,
            f"{each.requests:,}",
            f"{each.requests / each.observed_s:.3g}" if each.observed_s else "",
            f"{each.in_flight_mean:.1f}",
            each.in_flight_most,
            f"{each.decoding_mean:.1f}",
            each.decoding_most,
        )
        for hour, each in made.day.items()
    ]
    head = ("hour", "requests", "a second", "in flight", "most", "decoding", "most")
    return bars_of_day(made) + table(head, rows)


def bars_of_day(made: Profile) -> str:
    top, step = max((each.in_flight_mean for each in made.day.values()), default=0.0) or 1.0, WIDTH / 24
    inside = [word((hour + 0.5) * step, HEIGHT - 4, f"{hour:02d}") for hour in range(24)]
    for hour, each in made.day.items():
        tall = (HEIGHT - 20) * each.in_flight_mean / top
        inside.append(box(int(hour) * step, HEIGHT - 18 - tall, step - 2, tall, f"{each.in_flight_mean:.1f} in flight"))
    return svg(HEIGHT, inside)
