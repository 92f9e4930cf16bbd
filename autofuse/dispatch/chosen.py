"""What choosers of `ops` make of a call of a torch function: asked once, and kept.

Machine code finds a call by what its chooser may look at: `hot.choice.choice_for` for functions
with options, `hot.reduce.choice_of` for reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from ..chain.meta import UNKNOWN, concrete_meta, likely_meta
from ..chain.shell import Tensor
from ..chain.state import this_thread
from ..inside import is_foreign
from ..ops.reductions import Reduction
from ..ops.row import Op, Several
from ..record.record import record
from ..torch_private import in_functorch, looked_on

# what choosers run into with arguments that they do not know
_UNKNOWN_ARGUMENTS = (TypeError, AttributeError, IndexError, ValueError, OverflowError,
                      RuntimeError)  # fmt: skip
_NUMBERS = (int, float, bool)
_MEETS, _SELDOM = 100, 256  # so many calls at first, then one of so many: see `Choices.meet`


def chosen_by(choose: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a chooser or a composite makes of a call; None where torch decides."""
    # modes are told of what was called, and not of what it is made of
    if this_thread.closed or looked_on():
        return None
    return _asked(choose, args, kwargs, None)


def _asked(choose: Callable[..., Any], args: Any, kwargs: Any, failed: Any) -> Any:
    """What it says; `failed` of arguments that it does not know."""
    try:
        return choose(*args, **kwargs)
    except _UNKNOWN_ARGUMENTS as error:
        if _is_inner(error) and is_foreign(error):
            raise
        return failed


def _is_inner(error: Exception) -> bool:
    """Whether it comes from inside of a chooser, as from a signal's handler, which has a frame."""
    trace = error.__traceback__
    assert trace is not None  # a name for it where it is caught would be a cycle with the arguments
    return trace.tb_next is not None and trace.tb_next.tb_next is not None


def recorded(several: Several, eagerly: Callable[[Any], Any]) -> Any:
    """The results that were chosen, recorded; or what `eagerly` makes of why one is not."""
    shells: list[Tensor] = []
    for op, operands in several.chosen:
        shell = record(op, operands)
        if not isinstance(shell, Tensor):
            return eagerly(shell)
        shells.append(shell)
    return several.kind(shells)


def without(names: Set[str], options: dict[str, Any]) -> dict[str, Any]:
    """All keywords but those."""
    return {key: value for key, value in options.items() if key not in names}


_every: list[Choices] = []  # there are as many as functions of torch that have options
_times = [0]  # that all of them were forgotten
_cudnn = [torch.backends.cudnn.enabled]  # whether torch used it when they were chosen


def forget_choices() -> None:
    """Have all choosers asked anew."""
    _times[0] += 1
    for choices in _every:
        choices.clear()


def follow_cudnn() -> None:
    """The same if torch uses cudnn and did not, or the other way round: some look at that."""
    if torch.backends.cudnn.enabled is not _cudnn[0]:
        _cudnn[0] = torch.backends.cudnn.enabled
        forget_choices()


class Choices(dict[Any, Any]):
    """By the keys of calls of one function, what its chooser would say of them again.

    That is (op, *operands), each of which is the position of an argument, or a number or the places
    in a row in a tuple; or a list of two of these, behind what makes one result of theirs; or the
    position of the argument that is handed back; or False where it leaves the call to torch; or
    None where it has to be asked. Machine code keeps it, if the arguments are still what the key
    says.
    """

    def __init__(self, choose: Callable[..., Any]) -> None:
        self.choose = choose
        self.met = 0  # calls of `meet` that count
        _every.append(self)

    def meet(self, values: Iterable[Any]) -> None:
        """Let machine code know tensors like these the next time: of others it asks nothing.

        To learn them takes longer than the call, and of ever new sizes it is in vain.
        """
        recorder = this_thread.current
        if recorder is None or this_thread.closed or in_functorch() or looked_on():
            return
        self.met += 1
        if self.met > _MEETS and self.met % _SELDOM:
            return
        tip = recorder.chain.tip
        for x in values:
            if x.__class__ is Tensor:
                if x._af is UNKNOWN:
                    concrete_meta(x, tip)
            elif x.__class__ is torch.Tensor or x.__class__ is torch.nn.Parameter:
                likely_meta(x, tip)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What to keep of such a call."""
        values, before = (*args, *kwargs.values()), _times[0]
        if any(map(_is_device, values)):  # it may be that of now
            return None
        chosen = _asked(self.choose, args, kwargs, ...)
        made = False if chosen is None else _placed(chosen, values)
        return made if _times[0] == before else None  # another thread may have had it forgotten


def _is_device(value: Any) -> bool:
    if value.__class__ is str:
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return value.__class__ is torch.device


def _placed(chosen: Any, values: tuple[Any, ...]) -> Any:
    """What was chosen, by the positions of `values`."""
    zeros = sum([value.__class__ is float and value == 0 for value in values])
    if zeros > 1:  # which have signs, and the key does not tell these
        return None
    places = {id(value): k for k, value in reversed([*enumerate(values)])}
    if isinstance(chosen, torch.Tensor):
        return places.get(id(chosen))
    if chosen.__class__ is Several:  # whose keys have all of the shape
        each = [
            _operands(op, operands, places, zeros, every=True) for op, operands in chosen.chosen
        ]
        return None if None in each or len(each) != 2 else [chosen.kind, *each]
    return _operands(*chosen, places, zeros) if chosen.__class__ is tuple else None


def _operands(
    op: Op, operands: tuple[Any, ...], places: dict[int, int], zeros: int, every: bool = False
) -> tuple[Any, ...] | None:
    """An op and its operands, by `places` of arguments; None where they may be others next time.

    A chooser makes the same again for calls with the same key: numbers, and the places in a row,
    of the last dimension or of every one.
    """
    parts = [places.get(id(x), (x,)) for x in operands]
    made = [part[0] for part in parts if part.__class__ is tuple]
    in_rows = isinstance(op, Reduction) and op.reads_places
    for x in made:
        row = in_rows and isinstance(x, torch.Tensor) and (every or x.ndim == 1)
        if x.__class__ not in _NUMBERS and not row:
            return None
    return None if made and zeros else (op, *parts)
