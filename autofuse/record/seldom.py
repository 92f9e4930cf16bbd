"""Seldom: of which sizes chains are recorded, where these are others each time."""

from __future__ import annotations

from typing import Any

from ..chain.meta import Meta
from ..chain.state import Node
from .policy import measures

# To record and plan a chain of sizes that were not there before takes 0.3 to 2 ms, what a hundred
# of its runs gain. After so many that begin with an op on operands that differ in nothing else,
# those of other sizes have to come once more for each _FREE that there are, at most so many times
_FREE, _OFTEN = 8, 16
_REMEMBERED = 1024  # others, of which it is known how often they came
SELDOM = "sizes that seldom come"


class Sizes:
    """Of which sizes chains are recorded that begin with one kind of op."""

    __slots__ = ("recorded", "seen")

    def __init__(self) -> None:
        self.recorded = 0  # how many there are
        self.seen: dict[int, int] = {}  # of others, by hashes of their edges: how often they came

    def admit(self, edge: int) -> bool:
        """Whether a chain begins with an edge of this hash that there is not yet."""
        times = self.seen.pop(edge, 0)
        if times < min(self.recorded // _FREE, _OFTEN):
            if len(self.seen) >= _REMEMBERED:  # the one that has not come for longest
                del self.seen[next(iter(self.seen))]
            self.seen[edge] = times + 1
            return False
        self.recorded += 1
        return True


def comes_often(root: Node, key: tuple[Any, ...]) -> bool:
    """Whether a chain may begin with `key`, an edge that `root` does not have.

    Where sizes are others in each call, as those of batches and of what an expert of many gets,
    hardly any chain is run twice.
    """
    if not measures():
        return True
    known = root.recorder.sizes
    kind = (root, *[(x.dtype, x.ndim) if x.__class__ is Meta else x for x in key])
    sizes: Sizes = known.get(kind) or known.setdefault(kind, Sizes())
    return sizes.admit(hash(key))
