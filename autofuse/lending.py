"""Lending: arguments of fused calls, which are wrapped tensors until the last of these ends."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, cast
from weakref import WeakSet

import torch

from .api import is_dense
from .chain.claims import loans
from .chain.meta import UNKNOWN, Meta
from .chain.shell import Tensor, set_class
from .chain.state import this_thread
from .dispatch.eager import forget, make_plain
from .dispatch.nested import SIMPLE, is_container, values_of
from .inside import in_another_thread, others_waited
from .record.flush import value_of
from .torch_private import NoModes, function_modes, keys_of

Plain = torch.Tensor

lending_codes: set[CodeType] = set()  # of functions whose `lent` is what they have lent


class Lender:
    """A thread that may lend; goes when the thread goes."""

    __slots__ = ("__weakref__",)


lenders: WeakSet[Lender] = WeakSet()


def others_lend() -> bool:
    """Whether ops of this thread may meet tensors that another one lends."""
    return len(lenders) > ("lender" in this_thread.__dict__)


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether fused calls have made it a wrapped tensor, which was found to be one."""
    return id(tensor) in loans or tensor.__class__ is Plain  # by now, as others end


def lend(values: tuple[Any, ...] | list[Any], lent: list[torch.Tensor]) -> list[Any]:
    """Lend the plain tensors of a tuple or list; returns what else may hold some."""
    others = []
    for value in values:
        cls = value.__class__
        if cls is Plain:
            if _can_be_lent(value):
                lend_one(value, lent)
        elif id(cls) not in SIMPLE:  # a Parameter stays one: it is recorded as it is
            if not isinstance(value, torch.nn.Module) or isinstance(value, tuple):
                others.append(value)
    return others


def holds_wrapped(values: list[Any]) -> bool:
    """Whether there are tensors among them that are wrapped, and not because they are lent."""
    # the walk of `tensors_in`, which takes 1.8 us more over two containers of ten values
    containers: dict[int, Any] = {}
    for value in values:  # which grow
        cls = value.__class__
        if id(cls) in SIMPLE:
            continue
        if cls is Tensor:
            if not is_lent(value):
                return True
        elif isinstance(value, tuple):
            values += value
        elif id(value) not in containers and is_container(value):
            containers[id(value)] = value
            values += values_of(value)
    return False


lendable_keys: list[int] = []  # torch's dispatch keys of tensors that can be wrapped


def is_lendable(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor can be wrapped, said once for machine code."""
    if not _can_be_lent(tensor):
        return False
    lendable_keys.append(keys_of(tensor).raw_repr())
    return True


def _can_be_lent(tensor: torch.Tensor) -> bool:
    if not function_modes():
        return is_dense(tensor)
    with NoModes():  # or they would be told
        return is_dense(tensor)


def lend_one(tensor: torch.Tensor, lent: list[torch.Tensor]) -> None:
    """Make an argument a wrapped tensor, whoever else has done so, and add it to `lent`."""
    key = id(tensor)
    while True:  # a default would come of a method object, for which the collector may run
        if key not in loans and tensor.__class__ is Plain:
            loans[key] = 1  # no Python runs in either branch before its call ends
            lent.append(tensor)
            break
        if key in loans:
            loans[key] += 1
            lent.append(tensor)
            break
        if key not in loans and tensor.__class__ is not Plain:
            return  # its user's, which somebody had made plain for a while
    if tensor.__class__ is Plain:
        tensor.__class__ = Tensor
    others_waited.clear()  # by now they may be in the middle of something with this one


def restore(lent: list[torch.Tensor]) -> None:
    """Make arguments plain again; to be repeated after an interrupt.

    The class first: what others lend meanwhile is found by the count that is looked at then. What
    is lent no more has turned out to be its user's, and stays wrapped.
    """
    met = None  # what was pending, for a signal handler has raised, or there was no stack left
    while lent:
        tensor = lent[-1]
        key, its = id(tensor), tensor.__dict__
        if key not in loans:
            del lent[-1]
            continue
        state = its["_af"] if "_af" in its else UNKNOWN
        stays = state is not UNKNOWN and state.__class__ is not Meta
        if stays and met is not tensor and key in loans and loans[key] == 1:
            met = tensor
            _compute(tensor)
            continue
        if key in loans and loans[key] == 1 and tensor.__class__ is Tensor and not stays:
            set_class(tensor, Plain)
            if key not in loans:  # an audit hook has let its user in
                set_class(tensor, Tensor)
        # no Python runs in either branch; the tensor is concrete, for all is flushed...
        if key in loans and loans[key] == 1 and stays:  # ...but where that failed, or C++ held what
            del loans[key], lent[-1]  # was in place
        elif key in loans and loans[key] == 1 and tensor.__class__ is not Tensor:
            del loans[key], lent[-1]
            its["_af"] = UNKNOWN
            del its["_af"]
        elif key in loans and loans[key] != 1:
            loans[key] -= 1
            del lent[-1]


def _compute(tensor: torch.Tensor) -> None:
    """Give a lent tensor that is pending its value, if that can be had: in another thread, which no
    signal handler interrupts and which has a stack of its own."""

    def compute() -> None:
        with suppress(BaseException):  # it fails as it has: the call has raised that
            value_of(cast(Tensor, tensor), "fuse")

    in_another_thread(compute)


def lent_here() -> Iterator[torch.Tensor]:
    """What this thread's calls lend at this moment, as often as they do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in lending_codes:
            yield from frame.f_locals.get("lent", ())
        frame = frame.f_back


def become_plain(tensor: Tensor) -> torch.Tensor:
    """A wrapped tensor as a plain one, the same object unless it stands beside its value."""
    state = tensor._af
    if (state.__class__ is Meta or state is UNKNOWN) and forget(tensor, Plain):
        return tensor
    value = value_of(tensor, "fuse")
    if value is tensor:
        make_plain(tensor, "fuse")
    return value


def forget_threads() -> None:
    """After a fork: make plain what other threads have lent, whose calls do not end here.

    What this thread lends is in the frames of its calls, which go on.
    """
    lenders.clear()
    if "lender" in this_thread.__dict__:
        lenders.add(this_thread.__dict__["lender"])
    own = Counter([key for key in map(id, lent_here()) if key in loans])
    if loans.keys() - own:
        for value in gc.get_objects():
            if type(value) is Tensor and id(value) in loans and id(value) not in own:
                become_plain(value)
    loans.clear()
    loans.update(own)
