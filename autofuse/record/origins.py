"""Origins: where results of eager ops stay plain tensors, for wrapping them there only loses.

An origin is an instruction of a program that calls ops which run eagerly, itself or by functions
of torch. Now and then there is a trial, of all origins at once: results are wrapped and told of
what it costs that other such ops meet them, and of what chains gain that read them. By that, and by
what comes of them, the results of each origin are wrapped afterwards, or stay plain, while many
times as many are made. What races here, or is forgotten, is speed and never a value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, TypeGuard

import torch

from ..chain.liveness import ALONE, counts_of
from ..chain.meta import UNKNOWN, Unknown
from ..chain.shell import Tensor
from ..chain.state import Chain, Node, counts, this_thread
from ..settings.config import watch
from ..supply import kernels as compiling
from .contest import is_paused
from .policy import MIXED_US, PASSED_US, WRAPPED_US, gain_of, is_inexact, measures

ENOUGH = 4  # results of an origin; a trial ends when half of its results are of later ones
FIRST = 32  # results before the first trial, and before one is thought of again that cannot be
PAUSE, GROWTH = 16, 4  # results before the next one, for each of the last, and how these grow
_LONGEST = 1 << 20  # results before the next trial at most
_PATIENCE = 32  # of the results only one in so many still counts, and a trial ends at any rate
_MOST = 4096  # origins, and results of a trial
STAYS = "a result that stays plain, for no chain that pays begins with it"


class Origin:
    """An instruction, and what is known of its results."""

    __slots__ = ("after", "device_type", "first", "gain", "inexact", "made", "net", "once", "plain")

    def __init__(self) -> None:
        self.plain = False  # whether results stay so
        self.once = False  # it is decided for ever
        self.net = 0.0  # us that the results of the last trial gained, with what came of them
        self.gain = 0.0  # us by which chains pay that read them, less what these cost
        self.after: set[Origin] = set()  # those whose ops have read them

    def begin(self, device: torch.device) -> None:
        """Begin a trial, with a result on `device`."""
        self.device_type = device.type
        self.inexact = is_inexact(device, torch.is_grad_enabled())
        self.gain = math.inf if self.gain == math.inf else 0.0  # see `keep`
        self.made = 0  # results
        self.first: Tried | None = None  # the state of one
        self.after.clear()

    def leave(self) -> None:
        """End it, and hold nothing."""
        self.first = None
        self.after.clear()


class Tried(Unknown):
    """State of a concrete tensor that is a result on trial; machine code leaves it to Python."""

    __slots__ = ("origin", "trial")

    def __init__(self, origin: Origin) -> None:
        self.origin, self.trial = origin, trials.count
        if origin.first is None:
            origin.first = self


class Trials:
    """When there is a trial, and what it has seen."""

    __slots__ = ("count", "left", "pause", "results", "seen", "spent", "weight")

    def __init__(self) -> None:
        self.count = 0  # trials that are over
        self.seen: dict[int, Origin] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        for _, origin in self.close():
            origin.leave()
        self.left = FIRST  # results before the trial; in one none
        self.weight = 1  # as how many of these one counts of an origin that is not judged
        self.pause = PAUSE  # how many follow on each result of a trial

    def enter(self, key: int, origin: Origin | None, device: torch.device) -> Origin:
        """The Origin at `key`, which `origins` may not have yet, in the trial that there is now."""
        entered = self.seen.get(key)
        if entered is None:
            entered = origin or Origin()
            entered.begin(device)  # before anybody can find it
            self.seen[key] = entered
            self.left, self.weight = 0, 1
        return entered

    def close(self) -> list[tuple[int, Origin]]:
        """Let nothing be on trial any more; what was."""
        seen, self.seen = list(self.seen.items()), {}
        self.results = 0
        self.spent = 0  # of these, results of origins that had ENOUGH
        self.count += 1
        return seen

    def is_over(self) -> bool:
        """Whether enough was seen, and mostly to its end."""
        if self.results >= _MOST:
            return True
        if 2 * self.spent < self.results:
            return False
        steady = [x for x in list(self.seen.values()) if x.made > ENOUGH]
        living = _living(steady)  # with which somebody may still do something
        return 8 * living <= len(steady) or _PATIENCE * (self.results - self.spent) <= self.results

    def end(self) -> None:
        """Judge all that were seen."""
        results, seen = self.results, self.close()
        for _ in range(2):  # once more for what comes of results by way of the next turn of a loop
            for _, origin in reversed(seen):
                after = list(origin.after)
                origin.net = origin.gain + sum([max(0.0, x.net) for x in after])
        if len(origins) + len(seen) > _MOST:
            origins.clear()
        for key, origin in seen:
            if origin.made < ENOUGH and _living([origin]):
                continue  # nobody knows what becomes of it
            origin.plain, origin.once = origin.net < 0, origin.inexact
            origins[key] = origin
        for _, origin in seen:
            origin.leave()
        self.left = min(self.pause * results, _LONGEST)
        self.weight = max(self.left // min(4 * self.pause, 1024), 1)
        self.pause = min(self.pause * GROWTH, _LONGEST)


def ask(result: Any, sources: Sequence[Tried] = (), mixed: bool = False) -> Any:
    """What becomes of the result of an op that has run: STAY, None (it is wrapped), or its Origin.

    Then it is on trial, with a `Tried` as its state. sources: those of operands that are. mixed:
    other operands are wrapped at any rate, so that the op comes here whatever becomes of these.
    """
    if this_thread.closed or not measuring:
        return None
    kind = result.__class__
    if kind is torch.Tensor or issubclass(kind, _MANY):
        key = _instruction()
        origin = origins.get(key)
        verdict = STAY if origin is not None and origin.plain else None
        if trials.left > 0 and (origin is None or not origin.once):
            trials.left -= trials.weight if origin is None else 1
    else:
        key, origin, verdict = 0, None, None
    if trials.left > 0:
        return verdict
    device = _device_of(result)
    if is_paused() or compiling.outstanding() > 0 or (device and compiling.capturing(device)):
        trials.left, trials.weight = FIRST, 1  # till it is what it will be
        return verdict
    entered = reader = None
    if device and (origin is None or not origin.once):
        entered = reader = trials.enter(key, origin, device)
    elif verdict is None:
        reader = origin
    for source in sources:
        if mixed:
            source.origin.gain += MIXED_US / len(sources)
            continue
        source.origin.gain -= PASSED_US[source.origin.device_type] / len(sources)
        if reader and reader is not source.origin:
            source.origin.after.add(reader)
    if entered is None:
        return verdict
    trials.results += 1
    trials.spent += entered.made >= ENOUGH
    entered.made += 1
    if trials.results % ENOUGH == 0 and trials.is_over():
        trials.end()
        return STAY if entered.plain else None
    counts.trials += 1
    entered.gain -= WRAPPED_US
    return entered


def is_on_trial(state: Any, x: Tensor) -> TypeGuard[Tried]:
    """Whether `x`, whose state that is, is on trial; after the trial it is as any other."""
    if state.__class__ is not Tried:
        return False
    if state.trial == trials.count:
        return True
    x.__dict__["_af"] = UNKNOWN
    return False


def keep(x: Any) -> None:
    """Let results of its origin be wrapped, for it is written where of plain ones nobody knows."""
    state: Any = getattr(x, "_af", None)
    if state.__class__ is Tried:
        state.origin.gain = math.inf
        state.origin.plain = False


def credit(chain: Chain, nodes: list[Node], pays: bool) -> None:
    """Tell the origins of what `chain` has read; pays: a kernel runs it."""
    read, chain.tried = chain.tried, None
    if pays and read is not None:
        gain = gain_of(nodes) / len(read)
        for origin in read:
            origin.gain += gain


def _living(tried: list[Origin]) -> int:
    """Of how many there is still the result whose state they know."""
    states = [origin.first for origin in tried if origin.first is not None]
    return sum([count > ALONE + 1 for count in counts_of(states)])


def _device_of(result: Any) -> torch.device | None:
    """Where the first tensor is that an op has made; None where it cannot be wrapped."""
    many = result if isinstance(result, _MANY) else (result,)
    devices = [x.device for x in many if x.__class__ is torch.Tensor]
    return devices[0] if devices and devices[0].type in PASSED_US else None


def _instruction() -> int:
    """The address of the instruction that the program is at."""
    frame = sys._getframe(2)
    while True:
        key = id(frame.f_code) + frame.f_lasti
        if key in origins or not (id(frame.f_code) in between or _is_between(frame)):
            return key
        if frame.f_back is None:
            return key
        frame = frame.f_back


def _is_between(frame: FrameType) -> bool:
    if not str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        return False
    between[id(frame.f_code)] = True
    return True


_BETWEEN = (__name__.partition(".")[0] + ".", "torch.")  # a call of a module is the program's
_MANY = (tuple, list)  # classes of results, and those made of them
STAY: Any = Ellipsis  # what `ask` says of a result that stays as it is
origins: dict[int, Origin] = {}  # those that are judged, by the address of the instruction
measuring: dict[bool, bool] = {}  # has an item while results may stay plain; machine code asks
between: dict[int, bool] = {}  # has the addresses of code that calls ops for programs
trials = Trials()


def forget() -> None:
    """Judge anew, as in a new process."""
    origins.clear()
    between.clear()
    trials.reset()


def _follow(*reason: object) -> None:
    if measures():
        measuring[True] = True
    else:
        measuring.clear()


watch(_follow)
_follow()
