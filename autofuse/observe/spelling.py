"""Spelling: numbers, sizes and lists as people read them. Imports nothing of autofuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def plural(count: float, noun: str) -> str:
    """`3 ops`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:g} {noun}{ending}"


def listed(items: Sequence[str]) -> str:
    """`2 x a, b`."""
    counted = Counter(items).items()
    return ", ".join(f"{n} x {item}" if n > 1 else item for item, n in counted) or "nothing"


def sized(count: float) -> str:
    """`1.5 KiB`."""
    if count == 1:
        return "1 byte"
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
