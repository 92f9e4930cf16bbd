"""Threads that others may have to wait for: they wait for nobody themselves.

A thread is inside while it flushes a chain, compiles a kernel, or works for one that does. What
then runs in the middle of it must not wait for another such thread, which may be waiting for this.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

inside: dict[int, bool] = {}  # the idents of these threads; in one step of Python each


@contextmanager
def being_inside() -> Iterator[None]:
    """Count this thread as one that is inside."""
    ident = get_ident()
    already = ident in inside
    try:
        inside[ident] = True
        yield
    finally:
        if not already:
            inside.pop(ident, None)


_SIGNALS = signal.valid_signals()


def is_foreign(error: BaseException) -> bool:
    """Whether `error` is not of what it has ended: an interrupt, or from a signal handler."""
    if not isinstance(error, Exception):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in _SIGNALS}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False
