"""Regimes, drawn: as a bar of characters and as an SVG written by hand. Knows no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Protocol

MARKS = {"host": "░", "latency": "▒", "bandwidth": "█"}
COLOURS = {"host": "#d9d9d9", "latency": "#f2c14e", "bandwidth": "#4d9078"}
LINES = ("#20639b", "#d1495b", "#6a4c93", "#3d3d3d", "#8c6239")  # one per peer
CELL = 4  # characters per size

PANEL = 420, 250  # width and height of a workload
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 34, 26  # around its plot
STRIPE = 9  # height of a peer's regimes


class Point(Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def wall(self) -> float: ...
    @property
    def device(self) -> float | None: ...


class Sweep(Protocol):
    @property
    def workload(self) -> str: ...
    @property
    def peer(self) -> str: ...
    @property
    def points(self) -> Sequence[Point]: ...
    @property
    def regimes(self) -> Sequence[str]: ...
    @property
    def crossover(self) -> float | None: ...


def bar(batches: Sequence[int], regimes: Sequence[str], crossover: float | None) -> list[str]:
    """Two lines: a mark per size, and an arrow at the crossover with its batch."""
    marks = "".join(MARKS[name] * CELL for name in regimes)
    first = f"{batches[0]} "
    lines = [f"{first}{marks} {batches[-1]}"]
    if crossover is None:
        return [*lines, "no crossover up to here"]
    place = (math.log2(max(crossover, batches[0])) - math.log2(batches[0])) * CELL
    place = min(int(place), len(marks) - 1)
    return [*lines, " " * (len(first) + place) + f"^ crossover at a batch of {crossover:.0f}"]


# --- SVG -----------------------------------------------------------------------------------------


def svg(sweeps: Sequence[Sweep], caption: str) -> str:
    """A panel per workload: wall clock (line), device time (dashes), regimes (stripes)."""
    names = list(dict.fromkeys(sweep.workload for sweep in sweeps))
    peers = list(dict.fromkeys(sweep.peer for sweep in sweeps))
    width, height = PANEL
    columns = min(2, max(1, len(names)))
    rows = math.ceil(len(names) / columns)
    full = columns * width, rows * height + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full[0]} {full[1]}" '
        f'width="{full[0]}" height="{full[1]}" font-family="sans-serif" font-size="11">',
        f'<rect width="{full[0]}" height="{full[1]}" fill="white"/>',
        *_legend(peers, rows * height + 16),
        _text(8, rows * height + 36, caption),
    ]
    for k, name in enumerate(names):
        mine = [sweep for sweep in sweeps if sweep.workload == name]
        x, y = k % columns * width, k // columns * height
        parts += [f'<g transform="translate({x},{y})">', *_panel(name, mine, peers), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(peers: Sequence[str], y: float) -> list[str]:
    parts, x = [], 8.0
    for peer, colour in zip(peers, LINES, strict=False):
        parts.append(f'<line x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
                     'stroke-width="2"/>')  # fmt: skip
        parts.append(_text(x + 20, y, peer))
        x += 34 + 6.5 * len(peer)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(_text(x + 16, y, f"{name}-bound"))
        x += 90
    parts.append(_text(x, y, "line: wall clock, dashes: on the device"))
    return parts


def _panel(name: str, sweeps: Sequence[Sweep], peers: Sequence[str]) -> list[str]:
    width, height = PANEL
    floor = height - BOTTOM - STRIPE * len(sweeps) - 4  # of the plot, above the stripes
    batches = sorted({point.batch for sweep in sweeps for point in sweep.points})
    times = [t for sweep in sweeps for p in sweep.points for t in (p.wall, p.device) if t]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    octaves = max(1.0, math.log2(batches[-1] / batches[0]))

    def across(batch: float) -> float:
        return LEFT + math.log2(batch / batches[0]) / octaves * (width - LEFT - RIGHT)

    def up(us: float) -> float:
        return floor - (math.log10(us) - low) / (high - low) * (floor - TOP)

    parts = [_text(LEFT, 20, name)]
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                     'stroke="#e5e5e5"/>')  # fmt: skip
        parts.append(_text(LEFT - 5, y + 4, f"{10.0**power:g} us", "end"))
    for batch in batches[:: max(1, len(batches) // 5)]:
        parts.append(_text(across(batch), height - 8, str(batch), "middle"))
    for k, sweep in enumerate(sweeps):
        colour = LINES[peers.index(sweep.peer) % len(LINES)]
        for dashes, chosen in (("", "wall"), ("4 3", "device")):
            seen = [(p.batch, getattr(p, chosen)) for p in sweep.points]
            path = " ".join(f"{across(b):.1f},{up(t):.1f}" for b, t in seen if t)
            if path:
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                             f'stroke-width="1.6" stroke-dasharray="{dashes}"/>')  # fmt: skip
        parts += _stripe(sweep, floor + 4 + STRIPE * k, across, colour)
    return parts


def _stripe(sweep: Sweep, y: float, across, colour: str) -> list[str]:
    """The regimes of a sweep along its batches, with a tick at the crossover."""
    parts = [f'<rect x="{LEFT - 10}" y="{y}" width="6" height="{STRIPE - 2}" fill="{colour}"/>']
    right = across(sweep.points[-1].batch)
    for point, name in zip(sweep.points, sweep.regimes, strict=True):
        x = across(point.batch)
        span = max(0.0, min(across(point.batch * 2), right) - x)
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{span:.1f}" height="{STRIPE - 2}" '
                     f'fill="{COLOURS[name]}"/>')  # fmt: skip
    if sweep.crossover is not None:
        x = across(min(max(sweep.crossover, sweep.points[0].batch), sweep.points[-1].batch))
        parts.append(f'<rect x="{x - 1:.1f}" y="{y}" width="2" height="{STRIPE - 2}" '
                     'fill="black"/>')  # fmt: skip
    return parts
