"""Claims: the tensors that threads are writing, using or lending at this moment."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import get_ident
from typing import Any

writing: dict[int, bool] = {}  # threads that look for readers of what they are about to write
# writes that machine code has begun where no other thread had recorded anything
begun = ctypes.c_int64(0)


# id of a tensor that fused calls have lent -> how many of them. Any thread, and what runs in the
# middle of another call, changes it in a stretch of plain code in which no Python runs: reads,
# comparisons and stores that make no container (up to Python 3.11 finalizers run there). A change
# of class is no part of one: it tells audit hooks, such as filelock's, which torch.compile brings.
# Who is not counted is plain; who is counted may be plain for a while, and its ops run eagerly.
# After a condition that did not hold Python 3.10 may run some: what it said is looked at again.
loans: dict[int, int] = {}
# threads in the middle of an op that eager PyTorch runs: what it has found concrete stays so,
# whatever a signal handler does to them
using: dict[int, bool] = {}


def announced(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let `write` flush those that read some memory, and write to it: nobody records meanwhile."""
    ident = get_ident()
    if ident in writing:
        return write(*args, **kwargs)
    try:
        writing[ident] = True
        return write(*args, **kwargs)
    finally:
        writing.pop(ident, None)


def in_use(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `run` gives, in which no concrete tensor becomes pending."""
    ident = get_ident()
    if ident in using:
        return run(*args, **kwargs)
    try:
        using[ident] = True
        return run(*args, **kwargs)
    finally:
        if ident in using:
            del using[ident]  # and to the end no Python runs, as it would after a call
