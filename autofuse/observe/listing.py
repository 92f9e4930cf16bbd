"""Listing: what became of every line of a program, and which chains are alike, as data for a page.

Knows neither how it is drawn nor who reads it; looks into source files, and nowhere else.
"""

from __future__ import annotations

import linecache
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..kernel.source import Source
from ..lines import Position
from ..record.origins import STAYS
from .events import Flush
from .findings import Findings

_AROUND = 3  # lines shown above and below one that is counted


@dataclass(slots=True)
class Tally:
    """What became of one line."""

    recorded: Counter[str] = field(default_factory=Counter)  # ops that kernels compute
    ended: Counter[str] = field(default_factory=Counter)  # chains, by reason
    eager: Counter[tuple[str, str]] = field(default_factory=Counter)  # ops, by (op, reason)
    waited: Counter[str] = field(default_factory=Counter)  # reads that make the host wait


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a listing; `text` is None where lines are left out."""

    number: int
    text: str | None
    tally: Tally | None


@dataclass(frozen=True, slots=True)
class Group:
    """Chains that are alike: the first of them, how many there are, and bytes never stored."""

    flush: Flush
    count: int
    saved: int


def tallies(report: Findings) -> dict[Position, Tally]:
    """What became of the lines of the program that are known."""
    found: dict[Position, Tally] = defaultdict(Tally)
    for flush in report.flushes:
        if flush.position is not None:
            found[flush.position].ended[flush.reason] += 1
        for op, line in zip(flush.ops, flush.lines, strict=False):
            if line is not None and flush.eager:
                found[line].eager[op, flush.eager] += 1
            elif line is not None:
                found[line].recorded[op] += 1
    for (line, op, reason), count in list(report.eager_lines.items()):  # others add some
        if line is not None and reason != STAYS:  # of an op that is counted already
            found[line].eager[op, reason] += count
    for sync in report.syncs:
        if sync.position is not None:
            found[sync.position].waited[sync.text] += 1
    return dict(found)


def listings(counted: dict[Position, Tally]) -> list[tuple[str, list[Line]]]:
    """For each file its name, and its lines that are counted, with those around them."""
    by_file: dict[str, dict[int, Tally]] = defaultdict(dict)
    for (name, number), tally in counted.items():
        by_file[name][number] = tally
    return [(name, list(_listing(name, by_file[name]))) for name in sorted(by_file)]


def _listing(name: str, counted: dict[int, Tally]) -> Iterable[Line]:
    text = linecache.getlines(name)
    shown_lines = {
        near
        for number in counted
        for near in range(number - _AROUND, number + _AROUND + 1)
        if 1 <= near <= len(text)
    } | {*counted}
    last = min(shown_lines) - 1
    for number in sorted(shown_lines):
        if number != last + 1:
            yield Line(last + 1, None, None)
        line = text[number - 1].rstrip("\n") if number <= len(text) else ""
        yield Line(number, line, counted.get(number))
        last = number


def groups(flushes: Iterable[Flush]) -> list[Group]:
    """Chains that are alike as one, in the order of the first of each."""
    alike: dict[object, list[Flush]] = {}
    for flush in flushes:
        key = (
            flush.ops, flush.lines, flush.position, flush.reason, flush.inputs, flush.values,
            flush.live, flush.kept, flush.eager, flush.raised, flush.sources,
        )  # fmt: skip
        alike.setdefault(key, []).append(flush)
    return [
        Group(same[0], len(same), sum([flush.unstored for flush in same]))
        for same in alike.values()
    ]


def texts(found: list[Group]) -> dict[Source, int]:
    """The kernels of these, each with the number of the first that has it."""
    first: dict[Source, int] = {}
    for number, group in enumerate(found):
        for source in group.flush.sources:
            first.setdefault(source, number)
    return first
