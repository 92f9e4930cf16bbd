"""Refusals: why ops are not recorded, and how often each has run as eager PyTorch for that."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


class Refusal:
    """Of one op, for one reason."""

    __slots__ = ("_times", "address", "op", "reason")

    def __init__(self, op: str, reason: str) -> None:
        self.op, self.reason = op, reason
        self._times = ctypes.c_int64()
        # where machine code counts: a `Counter` took 0.15 us for it, a fifth of what passing cost
        self.address = ctypes.addressof(self._times)

    @property
    def times(self) -> int:
        """How often since `reset`."""
        return self._times.value

    def count(self, told: str = "") -> None:
        """The op has run; told: what watchers hear of the reason, where that is more."""
        self._times.value += 1
        for tell in [*watchers]:
            tell(self.op, told or self.reason)

    def reset(self) -> None:
        """Count from 0."""
        self._times.value = 0


refusals: dict[tuple[str, str], Refusal] = {}
# told of every op that runs; while there are any, machine code leaves them to Python
watchers: list[Callable[[str, str], None]] = []


def refusal_of(op: str, reason: str) -> Refusal:
    """The one for `op` and `reason`."""
    found = refusals.get((op, reason))
    return refusals.setdefault((op, reason), Refusal(op, reason)) if found is None else found
