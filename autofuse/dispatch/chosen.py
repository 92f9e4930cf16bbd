"""What choosers of `ops` make of a call of a torch function: asked once, and kept.

Machine code finds a call by all of it that a chooser may look at: what is known of its tensors, the
classes and values of its numbers and options, grad mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..chain.state import this_thread
from ..torch_private import looked_on
from .unrecorded import TARGETS

# what choosers run into with arguments that they do not know
UNKNOWN_ARGUMENTS = (TypeError, AttributeError, IndexError, ValueError, OverflowError,
                      RuntimeError)  # fmt: skip
_MOST = 256  # calls that are known of a function
_NUMBERS = (int, float, bool)


def chosen_by(choose: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a chooser or a composite makes of a call; None where torch decides."""
    # modes are told of what was called, and not of what it is made of
    if this_thread.closed or looked_on():
        return None
    try:
        return choose(*args, **kwargs)
    except UNKNOWN_ARGUMENTS:
        return None


def without_targets(options: dict[str, Any]) -> dict[str, Any]:
    """All but the keywords that say where a function writes."""
    return {key: value for key, value in options.items() if key not in TARGETS}


class Choices(dict[Any, Any]):
    """By the keys of calls of one function, what its chooser would say of them again.

    That is (op, *operands), each of which is the position of an argument or a number in a tuple; or
    the position of the argument that is handed back; or None for what only eager PyTorch does.
    """

    def __init__(self, choose: Callable[..., Any]) -> None:
        self.choose = choose

    def __call__(self, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Choose for a new `key`, in which an argument that is there twice is told."""
        values = (*args, *kwargs.values())
        try:
            chosen = None if any(map(_may_be_another, values)) else self.choose(*args, **kwargs)
        except UNKNOWN_ARGUMENTS:
            chosen = None
        if len(self) >= _MOST:
            self.clear()
        return self.setdefault(key, _placed(chosen, values))


def _may_be_another(value: Any) -> bool:
    """Whether it is a device, which may be that of now."""
    try:
        return (
            value.__class__ is torch.device or value.__class__ is str and bool(torch.device(value))
        )
    except RuntimeError:
        return False


def _placed(chosen: Any, values: tuple[Any, ...]) -> Any:
    """What was chosen, by the positions of `values`."""
    zeros = sum([value.__class__ is float and value == 0 for value in values])
    if zeros > 1:  # which have signs, and the key does not tell these
        return None
    places = {id(value): k for k, value in reversed([*enumerate(values)])}
    if isinstance(chosen, torch.Tensor):
        return places.get(id(chosen))
    if chosen.__class__ is not tuple:
        return None
    op, operands = chosen
    parts = [places.get(id(x), (x,)) for x in operands]
    made = [part[0] for part in parts if part.__class__ is tuple]
    if any(x.__class__ not in _NUMBERS for x in made) or (made and zeros):
        return None
    return (op, *parts)
