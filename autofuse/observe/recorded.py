"""Recorded: which line of the user's program has recorded each op of a chain.

Recording asks for no line, and no event is made of it. While somebody listens, what torch and
Python call in place of an op of the table is replaced by a function that notes where that was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..chain.shell import Tensor
from ..chain.state import Chain, Node, this_thread
from ..dispatch.protocol import HANDLERS, OPTIONS
from ..dispatch.shapes import RECORDING
from ..lines import Position, user_position

_lock = threading.RLock()  # a finalizer may look too, in the middle of it
_listeners = 0
_noted: dict[Node, Position | None] = {}  # where a node was recorded last
_replaced: list[tuple[dict[Any, Any], Any, Any]] = []  # table, key, what stood there
_methods: dict[str, tuple[Any, Any]] = {}  # of wrapped tensors: what stood there, what does now


def watch() -> None:
    """Note lines from now on, in every thread."""
    global _listeners
    with _lock:
        _listeners += 1
        if _listeners == 1:
            _replace()


def unwatch() -> None:
    """End what one `watch` has begun."""
    global _listeners
    with _lock:
        _listeners -= 1
        if _listeners == 0:
            _restore()


def lines_of(path: list[Node]) -> tuple[Position | None, ...]:
    """Where the ops of a chain were recorded; None of those that nobody saw.

    A node stands in one open chain at most, so that the last line noted is this chain's.
    """
    return tuple([_noted.get(node) for node in path])


def _replace() -> None:
    noting: dict[int, Callable[..., Any]] = {}  # by id of the handler
    for func in RECORDING:
        for table in (HANDLERS, OPTIONS):
            handler = table[func]
            if id(handler) not in noting:
                noting[id(handler)] = _noting(handler)
            _replaced.append((table, func, handler))
    for table, func, handler in _replaced:
        table[func] = noting[id(handler)]
    for name, method in list(vars(Tensor).items()):
        # in Python 3.11 machine code may have put C before it, which knows the function it is for
        found = noting.get(id(method)) or noting.get(id(getattr(method, "__wrapped__", None)))
        if found is not None:
            _methods[name] = method, found
            setattr(Tensor, name, found)


def _restore() -> None:
    for table, func, handler in _replaced:
        table[func] = handler
    for name, (method, ours) in _methods.items():
        if vars(Tensor).get(name) is ours:  # machine code may have been switched meanwhile
            setattr(Tensor, name, method)
    _replaced.clear()
    _methods.clear()
    _noted.clear()


def _noting(handler: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = this_thread.current
        before = None if recorder is None else recorder.chain
        known = 0 if before is None else len(before)
        result = handler(*args, **kwargs)
        _note(before, known)
        return result

    call.__name__ = getattr(handler, "__name__", "call")
    return call


def _note(before: Chain | None, known: int) -> None:
    """Note the nodes that this thread's open chain has got since it was `before`, with so many."""
    recorder = this_thread.current
    if recorder is None:
        return
    chain = recorder.chain
    more = len(chain) - known if chain is before else len(chain)
    if more > 0:
        position, node = user_position(), chain.tip
        while more > 0 and node.op is not None and node.parent is not None:
            _noted[node] = position
            node, more = node.parent, more - 1
