"""Origins: where results of eager ops stay plain tensors, for wrapping them there only loses.

An origin is an instruction of a program that calls ops which run eagerly, itself or by functions
of torch. Now and then there is a trial, of all origins at once or, sooner, of those that are new:
results are wrapped and told of what it costs that other such ops meet them, and of what chains gain
that read them. By that, and by what comes of them, the results of each origin are wrapped
afterwards, or stay plain, while many times as many are made. Where it differs from one caller of
the function that has the instruction to the other, as of a layer that is used everywhere, each
caller has its own verdict. What races here, or is forgotten, is speed and never a value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, TypeGuard

import torch

from ..chain.liveness import ALONE, counts_of
from ..chain.meta import UNKNOWN, Meta, Place, Unknown, concrete_meta, remember
from ..chain.shell import Tensor
from ..chain.state import Chain, counts, this_thread
from ..run.runner import Runner
from ..settings.config import watch
from ..supply import kernels as compiling
from .contest import is_paused
from .policy import MIXED_US, PASSED_US, WRAPPED_US, gain_of, is_inexact, measures

ENOUGH = 4  # results of an origin; a trial ends when half of its results are of later ones
FIRST = 32  # results of new origins before their trial, and before one that could not be
PAUSE, GROWTH = 16, 4  # results before the next one, for each of the last, and how these grow
_LONGEST = 1 << 20  # results before the next trial at most
_PATIENCE = 32  # of the results only one in so many still counts, and a trial ends at any rate
_MOST, _FEW = 4096, 256  # origins, and results of a trial; of one of new origins alone
_CALLERS = 16  # of an origin that are told apart
_PUT_OFF = 32  # trials of an origin that say nothing, for its results were read too early
STAYS = "a result that stays plain, for no chain that pays begins with it"


class Origin:
    """An instruction, or it and a caller, and what is known of its results."""

    __slots__ = ("after", "device_type", "early", "first", "gain", "inexact", "made", "net", "once",
                 "parts", "plain", "tried", "whole")  # fmt: skip

    def __init__(self, whole: Origin | None = None) -> None:
        """whole: the instruction, of one of its callers."""
        self.plain = False  # whether results stay so
        self.once = False  # it is decided for ever
        # by callers, where these differ; that of 0 is for all others, if there were many
        self.parts: dict[int, Origin] | None = None
        self.net = 0.0  # us that the results of the last trial gained, with what came of them
        self.gain = 0.0  # us by which chains pay that read them, less what these cost; or `keep`
        # those whose ops have read them, and how much of what these gain is theirs: one of several
        # operands that is wrapped would do
        self.after: dict[Origin, float] = {}
        self.tried: dict[int, Origin] = {}  # parts in a trial
        self.whole = whole
        self.made = 0  # results in a trial
        # of a part: the state of one; whether it leads to an op that is recorded later
        self.first: Tried | None = None
        self.early = False

    def begin(self, device: torch.device) -> None:
        """Begin a trial, with a result on `device`."""
        self.device_type = device.type
        self.inexact = is_inexact(device, torch.is_grad_enabled())
        self.made = 0

    def part(self, caller: int) -> Origin:
        """What of it is on trial where `caller` calls the function that has it."""
        if caller not in self.tried and len(self.tried) >= _CALLERS:
            caller = 0  # all others
        part = self.tried.get(caller)
        if part is None:
            part = Origin(self)
            part.device_type, part.gain = self.device_type, self.gain
            part = self.tried.setdefault(caller, part)
        return part

    def of(self, caller: int) -> Origin:
        """What is known of the results for `caller`, as of any that was in no trial."""
        parts = self.parts
        if parts is None:  # `keep` has come in the middle
            return self
        part = parts.get(caller)
        if part is None:
            part = parts.get(0)
            if part is None:
                part = parts[0] = Origin(self)
                part.plain, part.once = self.plain, self.once
            if len(parts) < _FEW:  # so that machine code finds it
                parts[caller] = part
        return part

    @property
    def each(self) -> float:
        """us that each of its results has gained in the last trial, with what came of them."""
        return max(self.net, 0.0) / max(self.made, 1)

    @property
    def known(self) -> bool:
        """Whether it was seen what becomes of its results."""
        return self.made >= ENOUGH or not _living([self])

    def judge(self) -> None:
        """Decide by what its parts have gained."""
        parts = dict(self.tried)
        for part in parts.values():
            loses = part.net < 0 and self.gain != math.inf
            part.plain, part.once = loses and part.known, self.inexact and part.known
        plain = [part.plain for part in parts.values()]
        self.once = self.inexact and all([part.once for part in parts.values()])
        self.plain = all(plain)
        self.parts = parts if any(plain) and not self.plain else None
        self.net = sum([part.net for part in parts.values()])

    def leave(self) -> None:
        """End it, and hold nothing."""
        for part in self.tried.values():
            part.first = None
            part.after.clear()
        self.tried = {}


class Tried(Unknown):
    """State of a concrete tensor that is a result on trial; machine code leaves it to Python."""

    __slots__ = ("origin", "trial")

    def __init__(self, origin: Origin) -> None:
        """origin: of the caller."""
        self.origin, self.trial = origin, trials.count
        if origin.first is None:
            origin.first = self


class Trials:
    """When there is a trial, and what it has seen."""

    __slots__ = ("count", "left", "new", "parts", "pause", "put_off", "results", "seen", "spent")

    def __init__(self) -> None:
        self.count = 0  # trials that are over
        self.seen: dict[int, Origin] = {}
        self.parts: dict[Origin, None] = {}  # of these, in the order of their first results
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        for _, origin in self.close():
            origin.leave()
        self.left = self.new = FIRST  # results before a trial, and those of new origins; none in it
        self.pause = PAUSE  # how many follow on each result of a trial
        self.put_off: dict[int, int] = {}  # how many trials of an origin have said nothing

    def enter(self, key: int, caller: int, device: torch.device) -> Origin:
        """The part of the Origin at `key`, which may be new, in the trial that there is now."""
        entered = self.seen.get(key)
        if entered is None:
            entered = origins.get(key) or Origin()
            entered.begin(device)  # before anybody can find it
            self.seen[key] = entered
            self.new = 0
        part = entered.part(caller)
        self.parts.setdefault(part)
        return part

    def close(self) -> list[tuple[int, Origin]]:
        """Let nothing be on trial any more; what was."""
        seen, self.seen = list(self.seen.items()), {}
        self.parts = {}
        self.results = 0
        self.spent = 0  # of these, results of origins that had ENOUGH
        self.count += 1
        return seen

    def is_over(self) -> bool:
        """Whether enough was seen, and mostly to its end."""
        if self.results >= (_MOST if self.left <= 0 else _FEW):
            return True
        if 2 * self.spent < self.results:
            return False
        steady = [x for x in list(self.seen.values()) if x.made > ENOUGH]
        living = _living(steady)  # with which somebody may still do something
        return 8 * living <= len(steady) or _PATIENCE * (self.results - self.spent) <= self.results

    def end(self) -> None:
        """Judge all that were seen."""
        of_all = self.left <= 0
        results, spent, parts, seen = self.results, self.spent, list(self.parts), self.close()
        parts = _last_first(parts)
        for _ in range(2):  # once more for what comes of results by way of the next turn of a loop
            for part in parts:
                after = list(part.after.items())
                part.net = part.gain + sum([max(0.0, x.net) * share for x, share in after])
                part.early |= any([x.early for x, _ in after])
        if len(origins) + len(seen) > _MOST:
            origins.clear()
        for key, origin in seen:
            if not origin.known or self._puts_off(key, origin):
                continue
            origin.judge()
            origins[key] = origin
            self.put_off.pop(key, None)
        for _, origin in seen:
            origin.leave()
        # of what is made once, or is another each time, few are tried
        self.new = FIRST if 2 * spent >= results else 4 * results
        if of_all:
            self.left = min(self.pause * results, _LONGEST)
            self.pause = min(self.pause * GROWTH, _LONGEST)

    def _puts_off(self, key: int, origin: Origin) -> bool:
        """Whether another trial is to judge `origin`, of whose results chains will be, it seems."""
        times = self.put_off.get(key, 0)
        if times >= _PUT_OFF or not any([part.early for part in origin.tried.values()]):
            return False
        if len(self.put_off) >= _MOST:
            self.put_off.clear()
        self.put_off[key] = times + 1
        return True


def ask(
    result: Any, sources: Sequence[Tried] = (), mixed: bool = False, early: bool = False
) -> Any:
    """What becomes of the result of an op that has run: STAY, None (it is wrapped), or its Origin.

    Then it is on trial, with a `Tried` as its state. sources: those of operands that are. mixed:
    other operands are wrapped at any rate, so that the op comes here whatever becomes of these.
    early: the op is of sizes of which it is not recorded until they have come often.
    """
    if not measuring:
        return None
    if this_thread.closed:  # in a Function of the user's nothing is recorded that could read it
        return STAY if this_thread.closed == this_thread.applies else None
    kind = result.__class__
    key, frame, origin, verdict = 0, None, None, None
    if kind is torch.Tensor or issubclass(kind, _MANY):
        key, frame = instruction()
        origin = origins.get(key)
        if origin is not None and origin.parts is not None:
            origin = origin.of(_caller(frame))
        verdict = STAY if origin is not None and origin.plain else None
        if origin is None:
            trials.new -= trials.new > 0
            if trials.new <= 0 and not origins:
                trials.left = 0  # all are new
        elif not origin.once and trials.new > 0:
            trials.left -= trials.left > 0
    of_all = trials.left <= 0
    if trials.new > 0 and not of_all:
        return verdict
    device = _device_of(result)
    if is_paused() or compiling.outstanding() > 0 or (device and compiling.capturing(device)):
        trials.new = FIRST  # till it is what it will be
        trials.left = max(trials.left, FIRST)
        return verdict
    entered = reader = None
    if device and (origin is None or (of_all and not origin.once)):
        entered = reader = trials.enter(key, 0 if frame is None else _caller(frame), device)
    elif verdict is None:
        reader = origin
    share = 1 / max(len({source.origin for source in sources}), 1)
    for source in sources:
        source.origin.early |= early
        if mixed:
            source.origin.gain += MIXED_US / len(sources)
            continue
        source.origin.gain -= PASSED_US[source.origin.device_type] / len(sources)
        if entered is not None:
            if entered is not source.origin:
                source.origin.after[entered] = share
        elif reader is not None:  # it was in an earlier trial
            source.origin.gain += share * reader.each
    if entered is None:
        return verdict
    whole = entered.whole
    assert whole is not None
    trials.results += 1
    trials.spent += whole.made >= ENOUGH
    whole.made += 1
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
    remember(x, UNKNOWN)
    return False


def meta_of_concrete(x: Tensor, state: Any, place: Place | None) -> Meta | None:
    """`concrete_meta` of `x`, whose state that is, and stays if it is on trial.

    For the chain that reads it, and for who runs the op if it is not recorded.
    """
    tried = is_on_trial(state, x)
    meta = concrete_meta(x, place)
    if tried:
        remember(x, state)
    return meta


def keep(x: Any) -> None:
    """Let results of its origin be wrapped, for it is written where of plain ones nobody knows."""
    state: Any = getattr(x, "_af", None)
    if state.__class__ is Tried:
        for origin in (state.origin, state.origin.whole):
            origin.gain = math.inf
            origin.plain, origin.parts = False, None


def credit(chain: Chain, runner: Runner) -> None:
    """Tell the origins of what `chain` has read, if a kernel runs it."""
    read, chain.tried = chain.tried, None
    if runner.pieces and read is not None:
        gain = gain_of(runner.nodes, runner.made) / len(read)
        for origin in read:
            origin.gain += gain


def _last_first(parts: list[Origin]) -> list[Origin]:
    """`parts`, each after all that its results lead to, but where it is by a loop.

    The order in which they came is not enough: a trial begins wherever the program is.
    """
    ordered: dict[Origin, None] = {}
    begun: set[Origin] = set()
    left = parts[:]
    while left:
        part = left[-1]
        if part in begun:
            left.pop()
            ordered.setdefault(part)
        else:
            begun.add(part)
            left += [x for x in list(part.after) if x not in begun]
    return [*ordered]


def _living(tried: list[Origin]) -> int:
    """Of how many, wholes or parts, there is still the result whose state they know."""
    parts = [(k, part) for k, x in enumerate(tried) for part in (*x.tried.values(), x)]
    known = [(k, part) for k, part in parts if part.first is not None]
    states = [part.first for _, part in known]
    held = zip(known, counts_of(states), strict=True)
    return len({k for (k, _), count in held if count > ALONE + 1})


def _device_of(result: Any) -> torch.device | None:
    """Where the first tensor is that an op has made; None where it cannot be wrapped."""
    many = result if isinstance(result, _MANY) else (result,)
    devices = [x.device for x in many if x.__class__ is torch.Tensor]
    return devices[0] if devices and devices[0].type in PASSED_US else None


def instruction() -> tuple[int, FrameType]:
    """The address of the instruction that the program is at, and its frame."""
    frame = sys._getframe(2)
    while True:
        key = id(frame.f_code) + frame.f_lasti
        if key in origins or not (id(frame.f_code) in between or _is_between(frame)):
            return key, frame
        if frame.f_back is None:
            return key, frame
        frame = frame.f_back


def _caller(frame: FrameType) -> int:
    """The address of the instruction by which the program has called the function of `frame`."""
    back = frame.f_back
    while back is not None:
        if not (id(back.f_code) in between or _is_between(back)):
            return id(back.f_code) + back.f_lasti
        back = back.f_back
    return 0


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
