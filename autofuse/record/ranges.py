"""Ranges: every run of a chain under a name that profilers show."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ..chain.state import Chain, all_recorders
from ..inside import patient
from ..run.runner import Runner

open_ranges: list[Callable[[str], contextlib.AbstractContextManager[Any]]] = []  # for profilers
_lock = threading.RLock()  # threads may begin and end profiles at the same time


def annotate(make: Callable[[str], contextlib.AbstractContextManager[Any]], on: bool) -> None:
    """Make every run of a chain a range, which `make` gives for a name, or stop that.

    The runners change, so that a flush need not ask.
    """
    with _lock:
        if on is (make in open_ranges):
            return
        open_ranges.append(make) if on else open_ranges.remove(make)
    for recorder in all_recorders:
        with patient(recorder.lock):
            for runner in recorder.runners:
                if runner.recorded:  # autograd's have no flush
                    annotated(runner)


def annotated(runner: Runner) -> None:
    """Let `runner` run inside ranges that are named after its kernels, or its ops without one."""
    if runner.bare is not None:
        runner.run, runner.bare = runner.bare, None
    if not open_ranges:
        return
    names = [piece.plan.name for piece in runner.pieces if runner.kernels]
    ops = [node.op.name for node in runner.nodes if node.op is not None]
    label = f"autofuse: {', '.join(names)}" if names else f"autofuse, eager: {', '.join(ops)}"
    run, makers = runner.run, list(open_ranges)
    runner.bare = run

    def ranged(chain: Chain) -> None:
        with contextlib.ExitStack() as stack:
            for make in makers:
                stack.enter_context(make(label))
            run(chain)

    runner.run = ranged
