"""What changed between two results, beyond the noise.

    python bench/compare.py OLD.json NEW.json [--least 0.05] [--ratios]

A cell has changed where the ranges from the 20th to the 80th percentile do not overlap and the
medians are further apart than `--least`. `--ratios` compares ratios to eager of the same rounds,
which is right between two machines, or where eager itself has changed; that is said. Exit status 1
if an autofuse cell has become slower or has lost its figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from results import Cell, Results, load  # noqa: E402

LEAST = 0.05
DRIFT = 0.1  # of eager's medians, from which on times are not comparable
OURS = ("autofuse", "autofuse.fuse")


@dataclass(frozen=True, slots=True)
class Change:
    """A cell before and after; ratio: of its times, more than 1 is slower."""

    old: Cell
    new: Cell
    ratio: float

    def __str__(self) -> str:
        new = self.new
        place = f"{new.workload} on {new.device}, {new.peer}"
        return f"{place}: {self.old.median:.2f} -> {new.median:.2f} us, {self.ratio:.2f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    slower: list[Change]
    faster: list[Change]
    lost: list[Cell]  # had a figure, and has none now
    gained: list[Cell]  # has a figure, and had none
    drift: float  # median over eager's cells of new over old

    @property
    def failed(self) -> bool:
        worse = [change.new for change in self.slower] + self.lost
        return any(cell.peer in OURS for cell in worse)


def compare(old: Results, new: Results, least: float = LEAST, ratios: bool = False) -> Comparison:
    """What changed from `old` to `new`; cells that only one of the runs tried are left out."""
    before = {cell.key: cell for cell in old.cells}
    slower, faster, lost, gained = [], [], [], []
    for cell in new.cells:
        was = before.get(cell.key)
        if was is None:
            continue
        if was.median is None or cell.median is None:
            if was.median is not None:
                lost.append(cell)
            elif cell.median is not None:
                gained.append(cell)
            continue
        found = _change(was, cell, least, ratios)
        if found is not None:
            (slower if found.ratio > 1 else faster).append(found)
    slower.sort(key=lambda change: -change.ratio)
    faster.sort(key=lambda change: change.ratio)
    return Comparison(slower, faster, lost, gained, _drift(before, new))


def _change(old: Cell, new: Cell, least: float, ratios: bool) -> Change | None:
    was, now = _range(old, ratios), _range(new, ratios)
    if was is None or now is None:
        return None
    apart = now[0] > was[2] or now[2] < was[0]
    ratio = now[1] / was[1]
    return Change(old, new, ratio) if apart and abs(ratio - 1) >= least else None


def _range(cell: Cell, ratios: bool) -> tuple[float, float, float] | None:
    """(20th percentile, median, 80th), in us or in eager's median."""
    if cell.median is None or cell.p20 is None or cell.p80 is None:
        return None
    if not ratios:
        return cell.p20, cell.median, cell.p80
    if not cell.ratio:
        return None
    unit = cell.ratio / cell.median
    return cell.p20 * unit, cell.ratio, cell.p80 * unit


def _drift(before: dict[tuple[str, str, str], Cell], new: Results) -> float:
    eager = [cell for cell in new.cells if cell.peer == "eager" and cell.median]
    pairs = [(cell, before.get(cell.key)) for cell in eager]
    ratios = [cell.median / was.median for cell, was in pairs if was and was.median and cell.median]
    return statistics.median(ratios) if ratios else 1.0


def report(old: Results, new: Results, found: Comparison) -> str:
    lines = [f"{key}: {old.head.get(key)} -> {new.head.get(key)}"
             for key in ("machine", "versions", "commit", "scale")
             if old.head.get(key) != new.head.get(key)]  # fmt: skip
    if abs(found.drift - 1) > DRIFT:
        lines.append(f"eager itself takes {found.drift:.2f} of its time before: see --ratios")
    for title, changes in (("slower", found.slower), ("faster", found.faster)):
        lines += [f"\n{title}: {len(changes)}", *(f"  {change}" for change in changes)]
    if found.lost:
        lines += ["\nwithout a figure now:"]
        lines += [f"  {c.workload} on {c.device}, {c.peer}: {c.reason}" for c in found.lost]
    if found.gained:
        lines += ["\nwith a figure now:"]
        lines += [
            f"  {c.workload} on {c.device}, {c.peer}: {c.median:.2f} us" for c in found.gained
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--least", type=float, default=LEAST, help="relative change that counts")
    parser.add_argument("--ratios", action="store_true", help="to eager, in place of times")
    args = parser.parse_args(argv)
    old, new = load(args.old), load(args.new)
    found = compare(old, new, args.least, args.ratios)
    print(report(old, new, found))
    return int(found.failed)


if __name__ == "__main__":
    sys.exit(main())
