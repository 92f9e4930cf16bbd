"""Tapes: programs that derivative rules record; what becomes the kernel of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import torch

from ..chain.infer import Inferred, infer
from ..chain.meta import Meta, make_meta
from ..chain.state import Node, Recorder
from ..chain.trie import extend
from ..ops.arithmetic import CASTS
from ..ops.reductions import Reduction
from ..ops.row import OPS, Op
from ..ops.views import ViewOp, join_op, view_op
from ..program.program import Ref
from ..torch_private import InferenceMode, NoModes
from . import strips
from .reduced import (
    ONE_OF_ROW,
    ROWS,
    SPREAD,
    Later,
    Needs,
    OneOfRow,
    Values,
    on_tape,
    spread_by,
)
from .strips import Striping, Strips


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that a backward computes from the chain's Consts `c`."""

    cls: type
    text: str

    def _with(self, sign: str, other: Number) -> Number:
        cls = float if float in (self.cls, other.cls) or sign == "/" else int
        return Number(cls, f"({self.text} {sign} {other.text})")

    __add__, __sub__ = partialmethod(_with, "+"), partialmethod(_with, "-")
    __mul__, __truediv__ = partialmethod(_with, "*"), partialmethod(_with, "/")

    def __neg__(self) -> Number:
        return Number(self.cls, f"(-{self.text})")


class Numbers:
    """What rules make of Python numbers: the same for tensors and for programs."""

    def __init__(self, classes: Sequence[type]) -> None:
        self.classes = classes  # of the chain's Consts

    def const(self, position: int) -> Number:
        return Number(self.classes[position], f"c[{position}]")

    def number(self, value: float) -> Number:
        return Number(type(value), repr(value))

    def is_number(self, value: Any) -> bool:
        return isinstance(value, Number)

    def log(self, value: Number) -> Number:
        return Number(float, f"log({value.text})")


@dataclass(frozen=True, slots=True)
class Seen:
    """A view of a value of a Tape: torch's own where it is a result, a step where a rule reads it.

    view: of a stand-in without memory for the value. spread: whether that is a number of each row
    which a step computes, and it is spread along the row: what rules make of such numbers alone is
    computed once a row, and spread in turn. made: whether torch's ops would have made rows of it,
    which lie in memory of their own.
    """

    ref: Ref
    call: Callable[..., torch.Tensor]
    view: torch.Tensor
    spread: bool = False
    made: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


class UnfusedError(Exception):
    """A rule that needs an op which is eager for these dtypes or shapes."""


class Tape(Numbers):
    """Records rules as a program of its own; a value is a reference as in a program."""

    def __init__(
        self, recorder: Recorder, inputs: list[Meta], places: list[tuple[int, int]], last: Node
    ) -> None:
        """places: of each Input, the tensor it lies in and the byte at which it begins there.

        last: the last node of the chain that is differentiated.
        """
        self.places = places
        super().__init__(last.consts)
        self.recorder = recorder
        self.tip = Node(recorder, None, None)
        self.tip.relaxed = last.relaxed
        self.tip.inputs = tuple(inputs)
        self.metas: list[Meta] = []
        self.numbers: list[str] = []
        self.known: dict[Any, int] = {}
        self.unsigned: set[int] = set()  # sums with zeros, which are never -0.0

    def apply(self, op: Op, operands: tuple[Any, ...]) -> Any:
        if op.move is None and any(isinstance(x, Strips) for x in operands):
            return strips.apply(self, op, operands)
        spread = next((x for x in operands if isinstance(x, Seen) and x.spread), None)
        if spread is not None:
            return self._apply_to_spread(op, operands, spread)
        operands = tuple(map(self.step, operands))
        key = (op, *operands)
        if key not in self.known:
            numbers = [x for x in operands if isinstance(x, Number)]
            edge = [x.cls if isinstance(x, Number) else x for x in operands]
            node = extend(self.recorder, self.tip, op, edge, self.metas)
            if node.reason or node.cuts:
                raise UnfusedError(node.reason or node.cuts)
            assert node.meta is not None
            self.tip = node
            self.metas.append(node.meta)
            self.numbers += [x.text for x in numbers]
            self.known[key] = node.index
        return self.known[key]

    again = apply

    def _apply_to_spread(self, op: Op, operands: tuple[Any, ...], spread: Seen) -> Any:
        """`apply`, of operands of which some are numbers of rows as `spread` is."""
        numbers = tuple([x.ref if isinstance(x, Seen) and x.spread else x for x in operands])
        shape = torch.broadcast_shapes(*(self.shape(x) for x in numbers if not self.is_number(x)))
        if op.__class__ is not Op or shape not in (spread.shape, self.shape(spread.ref)):
            return self.apply(op, tuple(map(self.in_full, operands)))
        found = self.apply(op, numbers)
        if shape == spread.shape:  # beside what has all elements of the rows
            return found
        seen = self.part(lambda x: x.expand(spread.shape), found)
        return replace(seen, spread=True, made=True)

    def in_full(self, value: Any) -> Any:
        """A value, of a spread one with all the elements of its rows."""
        if not isinstance(value, Seen) or not value.spread:
            return value
        for k, meta in enumerate(self.tip.inputs):  # beside which it can be computed
            if meta.shape == value.shape and meta.flat and meta.dtype is value.view.dtype:
                return self.apply(SPREAD, (value.ref, ~k))
        if self.tip.rows is not None:
            raise UnfusedError("rows that are not read")
        return self.apply(ROWS, (self.step(value),))

    def result(self, value: Any) -> Any:
        """What a kernel gives for a value."""
        if isinstance(value, Strips):
            return self.step(value)
        return self.in_full(value) if isinstance(value, Seen) and value.made else value

    def cast(self, value: Any, like: Any) -> Any:
        """`value` in the dtype of `like`."""
        dtype = self.dtype(like)
        return value if self.dtype(value) is dtype else self.apply(CASTS[dtype], (value,))

    def fitted(self, value: Any, meta: Meta) -> Any:
        """A gradient for what has this Meta; with its shape, also with its dtype."""
        if self.dtype(value) is meta.dtype or self.shape(value) != meta.shape:
            return value
        return self.apply(CASTS[meta.dtype], (value,))

    def view(self, op: ViewOp, value: Ref, base: Meta) -> Ref:
        """A view of the value `base` of the chain; of an Input another one, in the same memory."""
        if self._meta(value).spec != base.spec:
            raise UnfusedError("a view of another layout")
        return self._seen(op, value)

    def _seen(self, op: ViewOp, value: Ref) -> Ref:
        if value >= 0:
            return self.apply(op, (value,))
        key = (op, value)
        if key not in self.known:
            place, begins = self.places[~value]
            self.places.append((place, begins + op.offset * op.dtype.itemsize))
            meta = make_meta(op.dtype, op.shape, op.stride, self.recorder.device)
            self.tip.inputs = (*self.tip.inputs, meta)
            self.known[key] = ~(len(self.places) - 1)
        return self.known[key]

    def part(self, view: Callable[..., torch.Tensor], value: Any) -> Seen:
        """What `view` gives of the gradient of a join; made where it is needed."""
        if isinstance(value, Strips):
            value = self.step(value)
        if isinstance(value, Seen):
            first = value.call
            return Seen(value.ref, lambda x: view(first(x)), view(value.view))
        meta = self._meta(value)
        node = self.tip.path()[value] if value >= 0 else None
        base = meta if node is None or node.base < 0 else self.metas[node.base]
        with NoModes(), InferenceMode(False):
            x = torch.empty_strided(base.shape, base.stride, dtype=meta.dtype, device="meta")
            if node is not None and node.base >= 0:  # whose own views are views of its base
                x = x.as_strided(meta.shape, meta.stride, node.offset)
            return Seen(value, view, view(x))

    def step(self, seen: Any) -> Any:
        """An operand, of which a view is a step of its own."""
        if isinstance(seen, Later):
            raise UnfusedError("a gradient that torch computes in the middle")
        if isinstance(seen, Strips):
            return strips.whole(self, seen)
        if isinstance(seen, OneOfRow):
            return self.apply(ONE_OF_ROW, (seen.value, seen.mask))
        if not isinstance(seen, Seen):
            return seen
        key = (Seen, seen.ref, seen.shape, seen.view.stride(), seen.view.storage_offset())
        if key not in self.known:
            op = view_op("part", seen.call, None, 0, seen.view, None)
            self.known[key] = self._seen(op, seen.ref)
        return self.known[key]

    def computed(self, value: Ref | Seen) -> Ref:
        """A value as a step that computes it, as those that are joined are."""
        step = self.step(value)
        own = step >= 0 and self.tip.path()[step].op.__class__ is Op
        return step if own else self.apply(OPS["clone"], (step,))

    def along(self, op: Reduction, number: Any, shape: tuple[int, ...]) -> Seen:
        """Rows of `shape` of which each element is the row's `number`, as a result of `op` is."""
        seen = self.part(spread_by(op, shape), number)
        is_computed = isinstance(number, int) and number >= 0
        return replace(seen, spread=True) if op.keepdim and is_computed else seen

    def whole(self, value: Any) -> Ref:
        """A value that lies in memory as it is, row after row: of another, or of a view, a copy."""
        value = self.in_full(value)
        if isinstance(value, (Seen, Strips)) or not self._meta(value).flat:
            return self.apply(ROWS, (self.step(value),))
        return value

    def padded(self, striping: Striping, k: int, g: Any, shape: tuple[int, ...]) -> Strips:
        """A gradient of `shape` that is `g` in strip k and zero elsewhere."""
        return strips.padded(self, striping, k, g, shape)

    def join(
        self, op: ViewOp, parts: Sequence[Any], metas: Sequence[Meta]
    ) -> Ref | Strips | None:  # fmt: skip
        """The gradient of what `op` has split, from those of the parts, of these Metas."""
        if all(part is None for part in parts):
            return None
        if None in parts:
            raise UnfusedError("a part without a gradient")
        steps = list(map(self.computed, parts))
        name = "stack" if op.name == "unbind" else "cat"
        assert op.dim is not None
        join = join_op(name, op.dim, [self.metas[step] for step in steps])
        if join is None:
            raise UnfusedError("a join that torch alone knows")
        if name == "stack":
            return self.apply(join, tuple(steps))
        dim = op.dim % len(join.shape)
        striping = Striping(dim, tuple(meta.shape[dim] for meta in metas))
        return Strips(striping, join.shape, join.stride, tuple(steps))

    def meta_of(self, op: Op, operands: tuple[Any, ...]) -> Meta:
        """What `op` makes of such operands, of which none is another's."""
        given: list[Meta | type] = []
        for x in operands:
            if isinstance(x, (Seen, Strips)):
                stride = x.view.stride() if isinstance(x, Seen) else x.stride
                given.append(make_meta(self.dtype(x), x.shape, stride, self.recorder.device))
            else:
                given.append(x.cls if isinstance(x, Number) else self._meta(self.step(x)))
        tip = self.tip
        found = infer(op, given, (), (), (), self.recorder.device, False, tip.relaxed)
        if not isinstance(found, Inferred):
            raise UnfusedError(found)
        return found.meta

    def _meta(self, ref: Ref) -> Meta:
        return self.metas[ref] if ref >= 0 else self.tip.inputs[~ref]

    def reduced(
        self, op: Reduction, g: Ref | Seen, values: Values, metas: tuple[Meta, ...], needs: Needs
    ) -> tuple[Ref | Seen | Later | None, ...]:
        """The gradients for the operands of a reduction, of these Metas."""
        return on_tape(op, self, g, values, metas, needs)

    def dtype(self, value: Any) -> torch.dtype:
        if isinstance(value, Strips):
            value = next(x for x in value.values if x is not None)
        if isinstance(value, Seen):
            return value.view.dtype
        return self._meta_at(value).dtype

    def shape(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, (Seen, Strips)):
            return value.shape
        return self._meta_at(value).shape

    def _meta_at(self, value: Ref | Later | OneOfRow) -> Meta:
        return value.meta if isinstance(value, (Later, OneOfRow)) else self._meta(value)
