"""Observation: what runs, told as events to whoever looks. Nothing is done while nobody does.

An Observer is added and removed. While there is one, `hooks.flushing` and `hooks.looked_up` lead
here, and refusals tell when they are counted. Observers are for the whole process, as the
counters are: other threads, and those of a backward, are seen too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import hooks
from ..chain.liveness import DEAD
from ..chain.meta import Meta
from ..chain.refusal import watchers
from ..chain.state import Chain, Node, Recorder
from ..errors import NotReadyError
from ..kernel.source import Source
from ..layout import Ints
from ..lines import Position, user_position
from ..record.ways import ShortRunner, WaitingRunner
from ..run.eager import EagerRunner
from ..run.runner import Runner
from ..supply import kernels

OUTCOMES = ("hit", "soft miss", "hard miss")  # a kernel was in memory, on disk, to be compiled
FAILED = "its kernel failed"
WAITS = "its kernel is not there yet"  # of a chain that ran as eager ops
REFUSED = "its line has had its share of kernels (max_kernels_per_line)"


@dataclass(slots=True, eq=False)
class Flush:
    """One run of a chain."""

    reason: str
    position: Position | None  # of the line that needed a value
    device: torch.device
    ops: tuple[str, ...]
    inputs: tuple[Meta, ...]
    values: tuple[Meta, ...]  # of every op
    live: Ints  # indices of the values that were stored, ascending
    outcome: str = "hit"  # the worst of its kernels
    kernels: int = 0  # that were launched
    eager: str = ""  # why it ran as eager ops, if it did
    raised: bool = False
    us: float = 0.0
    sources: tuple[Source, ...] = ()  # of these kernels
    kept: Ints = ()  # indices of the values that were stored for a backward alone
    unstored: int = 0  # bytes of those that got no memory
    # for a Report alone: lines of the program that recorded the ops, and us by which a kernel costs
    # less than them, as far as `record.policy` knows
    lines: tuple[Position | None, ...] = ()
    gain: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A kernel was needed (`made` is False), or has arrived."""

    made: bool
    source: Source
    device: torch.device
    outcome: str
    us: float  # of the lookup, or from the first need to the arrival
    position: Position | None
    flush: Flush | None  # that needs it; None for backward, and where it arrives later


class Observer:
    """Does nothing at every event; subclasses say what they want to know.

    A flush tells while it holds the lock of its recorder; what calls foreign code goes through
    `unlocked`.
    """

    def flushing(self, flush: Flush, chain: Chain, refcounts: Sequence[int], node: Node) -> None:
        """Before `chain`, which ends with `node` and has these reference counts, runs."""

    def flushed(self, flush: Flush) -> None:
        """After it ran, or raised."""

    def looked_up(self, lookup: Lookup) -> None:
        """A kernel was needed or has arrived."""

    def ran_eagerly(self, name: str, reason: str) -> None:
        """An op on wrapped tensors ran as plain PyTorch."""


_observers: list[Observer] = []
_lock = threading.RLock()  # a finalizer may look too, in the middle of it


def add(observer: Observer) -> None:
    """Tell `observer` of every event from now on."""
    with _lock:
        _observers.append(observer)
        _connect()


def remove(observer: Observer) -> None:
    """Tell it no more; nothing happens if it was not told."""
    with _lock:
        if observer in _observers:
            _observers.remove(observer)
        _connect()


def _connect() -> None:
    """Hook into the flow while there are observers."""
    if _observers and hooks.flushing is None:
        hooks.flushing = _Watch
        hooks.looked_up = _looked_up
        watchers.append(_ran_eagerly)
    elif not _observers and hooks.flushing is not None:
        hooks.flushing = hooks.looked_up = None
        watchers.remove(_ran_eagerly)


def _ran_eagerly(op: str, reason: str) -> None:
    for observer in list(_observers):
        observer.ran_eagerly(op, reason)


class _Running(threading.local):
    watch: _Watch | None = None  # of the innermost flush of this thread

    @property
    def flush(self) -> Flush | None:
        return None if self.watch is None else self.watch.flush


_running = _Running()


def unlocked(call: Callable[[], None]) -> None:
    """Call `call` now, or at the end of the flush that this thread is in, without its lock.

    A thread that flushes would wait for ever for a lock whose owner needs the value.
    """
    if _running.watch is None:
        call()
    else:
        _running.watch.calls.append(call)


class _Watch:
    """Makes the events of one flush."""

    def __init__(
        self, recorder: Recorder, chain: Chain, node: Node, refcounts: tuple[int, ...], reason: str
    ) -> None:
        nodes = node.path()
        self.lock, self.calls = recorder.lock, list[Callable[[], None]]()
        self.observers = list(_observers)
        self.flush = flush = Flush(
            reason=reason,
            position=user_position(),
            device=recorder.device,
            ops=tuple(one.op.name for one in nodes if one.op is not None),
            inputs=node.inputs,
            values=tuple(one.meta for one in nodes if one.meta is not None),
            live=tuple(index for index, held in enumerate(refcounts) if held > DEAD),
        )
        self.outer, _running.watch = _running.watch, self
        try:
            for observer in self.observers:
                observer.flushing(flush, chain, refcounts, node)
        except BaseException:
            _running.watch = self.outer
            raise
        self.begun = time.perf_counter()

    def failed(self, error: Exception) -> None:
        waits = isinstance(error, NotReadyError)
        self.flush.eager = WAITS if waits else f"{FAILED}: {error}"

    def ended(self, runner: Runner | None) -> None:
        flush = self.flush
        flush.us = (time.perf_counter() - self.begun) * 1e6
        if runner is None:
            flush.raised, flush.eager = True, ""
        elif not flush.eager:
            flush.eager = _why_eager(runner)
            if not flush.eager:
                flush.sources = tuple([kernel.source for kernel in runner.kernels])
                stored = [runner.steps[index] for index in runner.live]
                steps = [step.of[0] if step.of else step.index for step in stored]  # of statistics
                flush.kept = tuple(k for k in dict.fromkeys(steps) if k not in flush.live)
                flush.unstored = runner.elided_bytes if runner.elides else 0
            flush.kernels = len(flush.sources)
        if flush.eager in (WAITS, REFUSED):
            flush.outcome = "hard miss"
        try:
            for observer in self.observers:
                observer.flushed(flush)
        finally:
            _running.watch = self.outer
            if self.outer is not None:
                self.outer.calls += self.calls
            elif self.calls:
                self._call()

    def _call(self) -> None:
        """What waited for the lock; a flush may be part of something that holds it as well."""
        held = self.lock._release_save()  # type: ignore[attr-defined] - as a Condition does
        try:
            for call in self.calls:
                call()
        finally:
            self.lock._acquire_restore(held)  # type: ignore[attr-defined]


def _why_eager(runner: Runner) -> str:
    """Why `runner` runs a chain as eager ops; empty if it does not."""
    if not isinstance(runner, EagerRunner) or not runner.live:
        return ""
    if isinstance(runner, WaitingRunner):
        return REFUSED if runner.order.refused else WAITS
    if isinstance(runner, ShortRunner):
        return runner.short
    return "a write to memory with gaps, which no kernel of the chain ends with"


def _looked_up(
    made: bool,
    source: Source,
    device: torch.device,
    outcome: str,
    us: float,
    asked: Position | None = None,
) -> None:
    """Tell of a kernel; what a flush has to wait for becomes its outcome."""
    flush = _running.flush
    if flush is not None and not made:
        flush.outcome = max(flush.outcome, outcome, key=OUTCOMES.index)
    lookup = Lookup(made, source, device, outcome, us, asked or _place(flush, source), flush)
    for observer in list(_observers):
        observer.looked_up(lookup)


def _place(flush: Flush | None, source: Source) -> Position | None:
    """The user's line that needs a kernel; for one that arrives from the background, needed it."""
    position = flush.position if flush is not None else user_position()
    if position is None:
        for asked, sources in list(kernels.positions.items()):
            if source in sources:
                return asked
    return position


def spelled(meta: Meta | torch.Tensor) -> str:
    """`float32[8, 16]`."""
    return f"{str(meta.dtype).removeprefix('torch.')}[{', '.join(map(str, meta.shape))}]"
