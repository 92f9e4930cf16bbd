"""Findings: what is known of a region of a program once it has run, as data.

No values: what is kept of a tensor is its dtype, shape and who held it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..kernel.source import Source
from ..lines import Position
from ..record.origins import STAYS
from ..record.policy import ASIDE
from .events import Flush, Lookup
from .logs import assembly


@dataclass(frozen=True, slots=True)
class LiveOut:
    """A value that was written to memory because something outside the chain could see it."""

    op: str
    what: str  # "float32[8, 16]"
    nbytes: int
    position: Position | None  # of the flush
    holders: tuple[str, ...]  # "variable h", "list outs", "attribute h of Cell", "C++", ...
    last: bool  # it is what its chain ends with


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that ran, and how often; one entry for each set of sizes."""

    name: str
    launches: int
    reads: tuple[str, ...]  # "float32[8, 16]"
    writes: tuple[str, ...]
    bytes_read: int  # of one launch
    bytes_written: int
    backward: bool
    target: str  # "sm_90" or "cpu"
    kernel: Source

    @property
    def source(self) -> str:
        """The text that was compiled."""
        return self.kernel.text

    @property
    def ptx(self) -> str:
        """The PTX, made again with the compiler; of a CPU kernel its LLVM IR."""
        return assembly(self.kernel, self.target)[1]


@dataclass(frozen=True, slots=True)
class Sync:
    """A read that made the host wait."""

    name: str  # "item", "bool", ...
    position: Position | None
    text: str  # "loss.item()", as the program says it


class Findings:
    """What a Report has found; see there for what each is."""

    def __init__(self) -> None:
        self.result: Any = None
        self.flushes: list[Flush] = []
        self.stored: list[LiveOut] = []
        self.syncs: list[Sync] = []
        self.lookups: list[Lookup] = []
        self.kernels: list[KernelUse] = []
        self.ops_eager: Counter[tuple[str, str]] = Counter()
        # what ran as plain PyTorch where it was called, without chains: (line, op, reason)
        self.eager_lines: Counter[tuple[Position | None, str, str]] = Counter()
        self.launches: int = 0
        self.bytes_saved: int = 0
        self.values_elided: int = 0
        self.pending: int = 0
        self.open: bool = False

    def _begin(self) -> None:
        """The region begins."""
        self.open = True

    def _end(self, totals: Counter[str], kernels: list[KernelUse], pending: int) -> None:
        """It has ended, and this is what it came to; totals: as `counters.summed` has them."""
        self.open = False
        self.launches, self.bytes_saved = totals["kernels_launched"], totals["bytes_elided"]
        self.values_elided = totals["nodes_elided"]
        self.kernels, self.pending = kernels, pending

    @property
    def ops_fused(self) -> Counter[str]:
        """Ops that were computed by kernels, or not at all because nobody could see them."""
        fused = (flush for flush in self.flushes if not flush.eager and not flush.raised)
        return Counter(op for flush in fused for op in flush.ops)

    @property
    def ops_seen(self) -> Counter[str]:
        """Every op on a wrapped tensor that ran, fused or not."""
        seen = self.ops_fused
        for (op, reason), count in list(self.ops_eager.items()):  # others may run some meanwhile
            if not reason.startswith(ASIDE) and reason != STAYS:
                seen[op] += count
        return seen

    def eager_for(self, *reasons: str) -> Counter[tuple[str, str]]:
        """What of `ops_eager` ran so for a reason that begins like one of these."""
        counted = list(self.ops_eager.items())
        return Counter({which: n for which, n in counted if which[1].startswith(reasons)})

    @property
    def chains(self) -> list[int]:
        """Ops of each chain that ran."""
        return [len(flush.ops) for flush in self.flushes]

    @property
    def median_chain(self) -> float:
        """Median of `chains`; 0 if there is none."""
        from statistics import median  # 3 ms, of every import

        return median(self.chains or [0])

    @property
    def longest_chain(self) -> int:
        """The longest of `chains`; 0 if there is none."""
        return max(self.chains, default=0)

    @property
    def reasons(self) -> Counter[tuple[str, Position | None]]:
        """Flushes by reason and the user's file and line."""
        return Counter((flush.reason, flush.position) for flush in self.flushes)
