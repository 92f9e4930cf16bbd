"""Explaining: what autofuse did with a region of a program, why, and what would help.

A Report is an Observer with a memory. It holds no values: what it keeps of a tensor is its dtype,
shape and who held it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..chain.liveness import DEAD
from ..chain.meta import Meta
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, all_recorders
from ..fused import Site, call_fused
from ..lines import user_position
from ..program.program import LEFT, Ref
from ..record.policy import gain_of
from ..run.runner import Runner
from ..supply.load import target_of
from . import counters, events, reads, recorded
from .advice import advice_on
from .events import Flush, Lookup, Observer, spelled
from .findings import Findings, KernelUse, LiveOut, Sync
from .holders import ARGUMENT, holders
from .page import document, fragment
from .text import lines_of, summary


class Report(Findings):
    """What `explain` found; a context manager around the region it is about.

    Covers the whole process, as `stats` does, while it is open. `print` it.

    flushes: every run of a chain: its ops, Inputs, reason, position, microseconds.
    stored: the values that were written to memory, and who held them.
    syncs: the reads that made the host wait.
    lookups: kernels that were needed or arrived: hit, soft miss or hard miss.
    kernels: what was launched, with text, PTX, and bytes; known when the region has ended.
    launches, bytes_saved, values_elided: kernels launched; dead intermediates that never got
        memory, and their bytes.
    ops_eager: ops that ran as plain PyTorch, by (op, reason).
    pending: ops that were recorded inside and had not run at its end.
    result: of the function that was explained.

    In a notebook it is a page, and `html` writes that to a file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._witness: _Witness | None = None  # while it is open
        self._runs: dict[Runner, int] = {}  # before the region
        self._totals: Counter[str] = Counter()

    # --- the region ---

    def __enter__(self) -> Report:
        if self.open or self.flushes or self._runs:
            raise RuntimeError("this report is about another region; call autofuse.explain() again")
        self._begin()
        self._runs = {runner: runner.runs for runner in _runners()}
        self._totals = counters.summed()
        self._witness = witness = _Witness(self)
        reads.watch(witness.read)
        recorded.watch()
        events.add(witness)
        return self

    def __exit__(self, *exc: object) -> None:
        witness, self._witness = self._witness, None
        assert witness is not None
        events.remove(witness)
        recorded.unwatch()
        reads.unwatch(witness.read)
        since = counters.summed()
        since.subtract(self._totals)
        used: Counter[KernelUse] = Counter()
        for runner in _runners():
            runs = runner.runs - self._runs.get(runner, 0)
            if runs > 0:
                used.update(dict.fromkeys(_uses(runner), runs))
        kernels = [replace(use, launches=runs) for use, runs in used.most_common()]
        self._runs = {}
        self._end(since, kernels, sum(len(recorder.chain) for recorder in all_recorders))

    @property
    def advice(self) -> list[str]:
        """What would help, in plain words; first what is known to gain most."""
        return [one.text for one in advice_on(self)]

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one page for a browser; where that is.

        Nothing is loaded from elsewhere: source, chains and the text of kernels are in the file.
        """
        place = Path(path)
        place.write_text(document(self), encoding="utf-8", errors="backslashreplace")
        return place

    def _repr_html_(self) -> str:
        """The same inside a page, such as a notebook's."""
        return fragment(self, f"autofuse-{id(self):x}-")

    def __str__(self) -> str:
        return "\n".join(lines_of(self))

    def __repr__(self) -> str:
        return f"<autofuse report: {summary(self)}>"


class _Witness(Observer):
    """Tells a Report what runs."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.held: dict[object, tuple[str, ...]] = {}  # by place and trie node: gc takes 20 ms

    def flushing(self, flush: Flush, chain: Chain, refcounts: Sequence[int], node: Node) -> None:
        path = node.path()
        flush.lines, flush.gain = recorded.lines_of(path), gain_of(path, flush.live)
        self.report.flushes.append(flush)
        shells = [chain[index] for index in flush.live]
        held, stored = self._holders(flush, shells, refcounts, node), {*flush.live}
        for index, who in zip(flush.live, held, strict=True):
            op, meta, last = flush.ops[index], flush.values[index], index == len(flush.ops) - 1
            base = path[index].base
            if base in stored:  # a view takes no memory of its own
                continue
            stored.add(index if base < 0 else base)
            nbytes = flush.values[index if base < 0 else base].nbytes
            out = LiveOut(op, spelled(meta), nbytes, flush.position, who, last)
            self.report.stored.append(out)

    def flushed(self, flush: Flush) -> None:
        if flush.eager:
            for op in flush.ops:
                self.report.ops_eager[op, flush.eager] += 1

    def looked_up(self, lookup: Lookup) -> None:
        self.report.lookups.append(lookup)

    def ran_eagerly(self, name: str, reason: str) -> None:
        self.report.ops_eager[name, reason] += 1
        self.report.eager_lines[user_position(), name, reason] += 1
        if name in reads.SYNCS:
            self.read(name)

    def read(self, name: str) -> None:
        """Note a read that makes the host wait."""
        position = user_position()
        self.report.syncs.append(Sync(name.strip("_"), position, reads.said(name, position)))

    def _holders(
        self, flush: Flush, shells: list[Tensor], refcounts: Sequence[int], node: Node
    ) -> list[tuple[str, ...]]:
        """Who holds each of the live `shells` of a chain that ends with `node`."""
        keys = [(flush.position, node, index) for index in flush.live]
        if not all(key in self.held for key in keys):
            counts = [refcounts[index] - DEAD for index in flush.live]
            found = holders(shells, counts)
            if flush.reason == "fuse":  # the outermost fused call has just returned it
                found = [("the result of the call",) if who == (ARGUMENT,) else who
                         for who in found]  # fmt: skip
            self.held.update(zip(keys, found, strict=True))
        return [self.held[key] for key in keys]


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Report:
    """What autofuse does with `fn(*args, **kwargs)`, or with the region of a `with` statement.

    fn: a function or module, run once as `autofuse.fuse` would run it; its result is
        `report.result`. Without it, `with autofuse.explain() as report:` explains what is inside.

    Results are what they are without it; the region runs slower, because lines of the program and
    holders of values are looked up. A first run compiles: explain a second one to see steady state.
    Raises whatever the function raises.
    """
    report = Report()
    if fn is not None:
        with report:
            report.result = call_fused(fn, args, kwargs, Site())
    return report


def _runners() -> list[Runner]:
    return [runner for recorder in all_recorders for runner in list(recorder.runners)]


def _uses(runner: Runner) -> list[KernelUse]:
    """What one run of `runner` launches."""
    found = []

    def metas_of(refs: Iterable[Ref]) -> list[Meta]:
        """Of tensors; what one kernel leaves to the next is a few numbers."""
        known = [runner.inputs[~ref] if ref < 0 else runner.steps[ref].meta
                 for ref in refs if ref < LEFT]  # fmt: skip
        return [meta for meta in known if meta is not None]

    for piece, kernel in zip(runner.pieces, runner.kernels, strict=False):
        moved = metas_of(piece.loads), metas_of(piece.stores)
        found.append(
            KernelUse(
                name=kernel.source.name,
                launches=1,
                reads=tuple(map(spelled, moved[0])),
                writes=tuple(map(spelled, moved[1])),
                bytes_read=sum(_moved(meta, piece.numel) for meta in moved[0]),
                bytes_written=sum(_moved(meta, piece.numel) for meta in moved[1]),
                backward=not runner.recorded,
                target=target_of(runner.device),
                kernel=kernel.source,
            )
        )
    return found


def _moved(meta: Meta, numel: int) -> int:
    """Bytes that a loop over so many elements moves of a tensor, of which it may see a part."""
    return min(meta.nbytes, numel * meta.dtype.itemsize)
