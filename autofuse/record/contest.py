"""Contests: which of two ways of running the same calls costs less, as measured.

Knows nothing of tensors or chains. Blocks of calls in one way and in the other take turns, until
the medians of what they took tell; the better way stays for a while, and a longer one each time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

# without what `patches.streams` puts around them: to look at the time ends no chain
_record, _query, _elapsed = (
    torch.cuda.Event.record, torch.cuda.Event.query, torch.cuda.Event.elapsed_time,
)  # fmt: skip

FUSED, PLAIN = 0, 1  # the ways; a contest begins with the first
BLOCK = 4  # spans of a block that count; the one before them does not, which the other way delays
# of each way, or one of each, see _CLEAR; more where medians differ by less than _CLOSE
_BLOCKS, _CLOSE, _MOST = 3, 0.05, 9
# A block of each way is enough where every span of the fused one is shorter than any of the plain
# one, and their medians differ by so much: MPPI's step, 0.4 of eager's time, found that after 110
# calls, before there was COLD (H200). Nothing says so soon that fused calls lose, whose first ones
# find nothing in caches
_CLEAR = 0.2
_ONCE, _TWICE = 8, 2  # spans of a block, and blocks of each way, where it is decided once
# of what plain calls take, which are eager's own: as much has to be won, or a few noisy spans, of
# caches that are fuller elsewhere, decide for what loses; for ever where it is decided once
_WORTH, _WORTH_ONCE = 0.02, 0.05
LOOKS = 31  # calls, of which one is looked at and the others granted; prime, as no loop is long
_SETTLING = 50  # spans in which something is prepared before they count all the same
# calls before the first that counts: on a GPU a kernel's first 30 take up to 10 us more of the
# host, as long as what a short one is to win. Steps are longer, and come to kernels more often
COLD = 30
FIRST, _GROWTH, _LONGEST = 500, 4, 1 << 20  # calls before it is measured again, how these grow
NO_STEPS = 512  # calls without backward, after which nobody seems to run one


class Clock(Protocol):
    """What spans of time are read from."""

    def mark(self) -> Any:
        """This moment."""

    def between(self, begin: Any, end: Any) -> float | None:
        """us from one mark to the other; None while that is not known."""


class HostClock:
    """The host's."""

    mark = staticmethod(time.perf_counter)

    def between(self, begin: float, end: float) -> float:
        return (end - begin) * 1e6


class StreamClock:
    """The current stream's, without waiting for it: work takes what the stream or the host needs.

    A stream that waits for the host goes on counting, and one that is behind counts its own work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        _record(event, torch.cuda.current_stream(self._device))
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        known = _query(end) and _query(begin)  # which may be on another stream
        return _elapsed(begin, end) * 1e3 if known else None


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on `device`."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


# captures into CUDA graphs, by any key: one ends if any thread asks for an event
_captures: dict[int, bool] = {}


def pause(capture: int) -> None:
    """Let nothing be measured until this capture ends."""
    _captures[capture] = True


def resume(capture: int) -> None:
    """End what `pause` has begun."""
    _captures.pop(capture, None)


def is_paused() -> bool:
    """Whether ways have to stay what they are."""
    return bool(_captures)


class Contest:
    """The ways of one place that calls come by; asked before and told after each."""

    __slots__ = ("_calls", "_clock", "_counted", "_done", "_most", "_news", "_once", "_owed",
                 "_pause", "_settled", "_spans", "_start", "_step", "_waits", "costs",
                 "free", "left", "way")  # fmt: skip

    def __init__(self, clock: Clock, steps: bool = False, once: bool = False) -> None:
        """steps: what counts are not calls but what lies between two steps, see `begin`.

        once: results of the ways may differ, so that the better one stays for ever.
        """
        self.way = FUSED
        self.left = 0  # calls before something is measured
        self.free = 0  # of these, those that were granted, as long as the way stays
        self.costs: tuple[float, float] | None = None  # us in each way, when it was decided
        self._clock, self._once = clock, once
        self._pause = FIRST
        self._most = NO_STEPS if steps else 0  # calls of a step; after more there seem to be none
        self._step, self._calls = -1, 0  # this step, and its calls while something is measured
        self._begin_anew()
        self._owed += 0 if steps else COLD

    def _begin_anew(self) -> None:
        self._spans: tuple[list[Any], list[Any]] = [], []
        self._done = False  # measured, and not yet known
        self._waits = self._counted = 0
        self._owed = 1  # spans that do not count yet
        self._start: Any = None
        self._settled, self._news = True, None
        self.free = 0

    def keep_fused(self) -> None:
        """Never go the other way again."""
        self.way, self.left, self.costs = FUSED, sys.maxsize, None
        self._begin_anew()

    def grant(self) -> bool:
        """Let some of the calls that are left not be counted one by one, where there are any.

        Such calls may be another place's, whose results must not depend on the way, or that begins
        with fused calls.
        """
        if (self._once and self.way == PLAIN) or self.left < LOOKS:
            return False
        self.free = LOOKS - 1
        self.left -= self.free
        return True

    def skip(self) -> None:
        """A call goes a way that this does not choose: the step that it is in does not count."""
        self._start = None

    def begin(self, step: int, news: Any = None) -> Any:
        """A call begins, in this step: gives what `end` is to be told, None if nothing.

        What `way` is then is the call's; other threads may change it while it runs.

        step: a number that changes where a new step begins, such as that of backwards so far.
        news: something else whenever something was prepared that steps need, in whatever part of
        them: in one that it changes in, not all was there.
        """
        if self._most and step != self._step:
            if self._calls > self._most:  # there are steps all the same, with so many calls
                self._most, self._pause = 2 * self._calls, FIRST
                self._begin_anew()
            self._step, self._calls = step, 0
        elif self._calls < self._most:
            self._calls += 1
            return None
        self._calls += 1
        if self._calls == self._most + 1 > 1:  # from now on calls are what counts
            self._begin_anew()
        if self._done:
            self._decide()
            self._start = None
        elif self._calls > self._most:
            return self._clock.mark()
        else:
            mark = self._clock.mark()
            if self._start is not None:
                self._count(self._start, mark, self.way, self._settled and news == self._news)
            self._start, self._settled, self._news = mark, True, news
        return None

    def end(self, begun: Any, way: int, settled: Callable[[], bool]) -> None:
        """The call has ended, which went that way.

        settled: whether nothing of what it needed was still being prepared; asked of both ways, and
        once it is known what the call took, for that takes its time, too.
        """
        if begun is not None:
            mark = self._clock.mark()
            self._count(begun, mark, way, settled())
        elif not settled() or way != self.way:
            self._settled = False

    def _count(self, begin: Any, end: Any, way: int, settled: bool) -> None:
        if way != self.way:  # another thread has changed it, or this call could not go it
            return
        if not settled and self._waits < _SETTLING:
            self._waits += 1
            self._owed = max(self._owed, 1)
        elif self._owed > 0:
            self._owed -= 1
        else:
            self._spans[way].append((begin, end))
            self._counted += 1
            block, blocks = (_ONCE, _TWICE) if self._once else (BLOCK, 1)
            if self._counted % block == 0:
                self._owed, self.free = 1, 0
                self.way = PLAIN - self.way
                enough = min(map(len, self._spans)) >= block * blocks
                self._done = enough and self._counted % (2 * block) == 0

    def _decide(self) -> None:
        """Stay with the better way, or go on where the two are close or too little is known."""
        early = not self._once and self._counted < 2 * BLOCK * _BLOCKS
        spans_of, costs, slowest, fastest = self._spans, [0.0, 0.0], 0.0, 0.0
        for way in (PLAIN - self.way, self.way):  # the last first: one look while it is not known
            times = []
            for span in reversed(spans_of[way]):
                time = self._clock.between(*span)
                if time is None:
                    self._done = not early
                    return
                times.append(time)
            if not times:  # another thread has decided meanwhile
                return
            costs[way] = median(times)
            if way == FUSED:
                slowest = max(times)
            else:
                fastest = min(times)
        fused, plain = costs
        self._done = False
        close = abs(fused - plain) <= _CLOSE * plain  # of two that are nothing, too
        if close and not self._once and self._counted < 2 * BLOCK * _MOST:
            return
        if early and (slowest >= fastest or fused > (1 - _CLEAR) * plain):
            return
        self.costs = fused, plain
        worth = _WORTH_ONCE if self._once else _WORTH
        self.way = FUSED if fused <= (1 - worth) * plain else PLAIN
        self.left = sys.maxsize if self._once else self._pause
        self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._begin_anew()
