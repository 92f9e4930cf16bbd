"""Liveness from reference counts: which values of a chain somebody else still holds."""

from __future__ import annotations

from sys import getrefcount
from typing import Any


def counts_of(shells: list[Any]) -> tuple[int, ...]:
    return tuple(map(getrefcount, shells))


def _held_here() -> int:
    """The count of an object that one local variable holds."""
    held = object()
    return getrefcount(held)


ALONE = counts_of([object()])[0]  # of an object that only the list holds
HELD_HERE = _held_here()
DEAD = ALONE + 1  # its trie node holds it too
