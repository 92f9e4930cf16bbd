"""Results: the cells of a run and their file, written by run.py and read by all else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Cell:
    """One peer on one workload: figures in us per step, or why there are none."""

    workload: str
    device: str
    peer: str
    clock: str = "host"  # "host": wall clock; "device": CUDA events, L2 flushed
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    ratio: float | None = None  # to eager's median, from the same rounds
    tbps: float | None = None  # over the bytes that one kernel has to move
    first_s: float | None = None  # until the first result, compilers included
    same_bits: bool | None = None  # as eager's
    kernels: int | None = None  # that a step launches
    note: str = ""
    reason: str = ""  # why it has no figure

    @property
    def key(self) -> tuple[str, str, str]:
        return self.workload, self.device, self.peer

    def __str__(self) -> str:
        if self.median is None:
            return f"{self.peer:32s}  - {self.reason}"
        spread = f"({self.p20:.2f}-{self.p80:.2f})"
        ratio = f"{self.ratio:.3f}" if self.ratio is not None else "-"
        rate = f"  {self.tbps:.2f} TB/s" if self.tbps else ""
        bits = {True: "  same bits", False: "  other bits", None: ""}[self.same_bits]
        first = f"  first {self.first_s:.2f} s" if self.first_s is not None else ""
        note = f"  {self.note}" if self.note else ""
        return (
            f"{self.peer:32s}{self.median:11.2f} {spread:21s} {ratio:>7s}{rate}{bits}{first}{note}"
        )


@dataclass(slots=True)
class Results:
    """The head says on what and when, the cells what was seen."""

    head: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str, dict[str, Cell]]]:
        """(workload, device, its cells by peer), in the order of the run."""
        found: dict[tuple[str, str], dict[str, Cell]] = {}
        for cell in self.cells:
            found.setdefault((cell.workload, cell.device), {})[cell.peer] = cell
        for (workload, device), cells in found.items():
            yield workload, device, cells

    def save(self, path: Path) -> None:
        """Cells a line each, so that a difference between two files can be read."""
        lines = [json.dumps(_without_nothing(asdict(cell))) for cell in self.cells]
        cells = ",\n".join(f"  {line}" for line in lines)
        head = json.dumps(self.head, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"head": {head},\n"cells": [\n{cells}\n]}}\n')


def _without_nothing(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value not in (None, "")}


def load(path: Path) -> Results:
    content = json.loads(Path(path).read_text())
    known = {f.name for f in fields(Cell)}
    cells = [Cell(**{k: v for k, v in row.items() if k in known}) for row in content["cells"]]
    return Results(content["head"], cells)
