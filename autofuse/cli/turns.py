"""What programs that ran in turns, as they are and fused, tell of which is faster. Runs nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PAIRS = 9  # at most, the first included
SAME, FIRST = 0.04, 0.2  # of the time, and seconds, as first calls take: less is no difference
SHORT = 1.0  # seconds, of which first calls and compiles are too much to say who is slower
# Student's t, two-sided, 1 % outside, of 1, 2, ... degrees of freedom
_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50)

FASTER, SLOWER, EQUAL = "faster", "slower", "no difference that can be told"
TOO_SHORT = "too short to tell"


@dataclass(frozen=True, slots=True)
class Told:
    """How long fused runs take, as a part of the plain ones' time."""

    pairs: int  # that count
    ratio: float  # geometric mean of the pairs'
    low: float  # between this and `high` it lies, but for 1 of 100 such looks; 0 where one
    high: float  # pair counts, and infinite, for then nobody knows
    word: str | None  # of the above; None as long as more pairs may tell


def told(plain: Sequence[float], fused: Sequence[float]) -> Told:
    """plain, fused: seconds of as many runs of each, taken in turns.

    Where there is more than one pair the first does not count: it finds no files in memory and no
    kernels on disk. Few pairs may agree by chance, on a busy machine too: before the last turn a
    difference is told only where every run of one way took less than any of the other.
    """
    pairs = list(zip(plain, fused, strict=True))
    pairs = pairs[1:] or pairs
    logs = [math.log(max(b, 1e-9) / max(a, 1e-9)) for a, b in pairs]
    middle, around = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        around = _T[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    ratio, low, high = math.exp(middle), math.exp(middle - around), _exp(middle + around)
    plain, fused = zip(*pairs, strict=True)
    usual = statistics.median(plain), statistics.median(fused)
    last = len(logs) + 1 >= PAIRS
    clear = last or max(plain) < min(fused) or max(fused) < min(plain)
    margin = max(SAME, FIRST / max(usual[0], 1e-9))
    word = None
    if max(usual) < SHORT and ratio > 1 - margin:
        word = TOO_SHORT
    elif clear and high < 1 and ratio < 1 - margin:
        word = FASTER
    elif clear and low > 1 and ratio > 1 + margin:
        word = SLOWER
    elif (1 - margin < low and high < 1 + margin) or last:
        word = EQUAL
    return Told(len(pairs), ratio, low, high, word)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
