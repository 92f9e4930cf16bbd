"""Derivative rules: applying them to a segment, on tensors or as a program of their own.

A sweep goes through a segment from its root to its sinks, in the order in which the engine would go
through the ops, and gives each rule of the op table its operands. What a rule computes with is one
of two algebras: `Torch` runs torch functions, differentiable ones where grad mode is on; `Tape`
records a program, which becomes the kernel of a backward.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import torch

from ..chain.meta import Meta, make_meta
from ..chain.state import Node, Recorder
from ..chain.trie import extend
from ..kernel.plan import completed
from ..kernel.rows import make_pieces
from ..ops.arithmetic import CASTS
from ..ops.reductions import Reduction
from ..ops.row import OPS, Op
from ..ops.views import JoinOp, ViewOp, join_op, view_op
from ..program.program import CONST, Output, Ref
from ..run.devices import runner_class
from ..run.generated import defined, log_of, tuple_of
from ..run.words import Answer
from ..supply.kernels import Order
from ..torch_private import AUTOCASTS, ExcludedKey, InferenceMode, NoModes
from .reduced import ROWS, Later, Needs, Values, by_torch, on_tape
from .segments import Segment, reads_of

_ADD = OPS["add"]


def _value(nodes: list[Node], algebra: Tape | Torch, values: dict[Ref, Any], ref: Ref) -> Any:
    """What `ref` stands for: a Const, a value at hand, or one that follows from these."""
    if ref >= CONST:
        return algebra.const(ref - CONST)
    if ref not in values:
        node = nodes[ref]
        assert node.op is not None and node.meta is not None
        operands = [_value(nodes, algebra, values, operand) for operand in node.args]
        if isinstance(node.op, ViewOp):
            (operand,), base = operands, nodes[node.base].meta
            assert base is not None
            values[ref] = algebra.view(node.op, operand, base)
        else:
            values[ref] = algebra.again(node.op, tuple(operands))
    return values[ref]


def sweep(
    segment: Segment, algebra: Any, seeds: dict[int, Any], saved: dict[Ref, Any]
) -> list[Any]:
    """The gradients for the segment's sinks, by its ops from the last to the first.

    algebra: a Tape or a Torch. seeds: the gradients that came in, or None, by node. saved: the
    values that are at hand.
    """
    nodes = segment.nodes
    value = partial(_value, nodes, algebra, saved)
    grads = {index: g for index, g in seeds.items() if g is not None}
    gathers = segment.inner | set(segment.summed)
    given: list[Any] = []
    parts: list[Any] = []  # gradients of those of a value that is split, the last first
    for index in reversed(segment.steps):
        g, named, op = grads.pop(index, None), segment.named(index), nodes[index].op
        if isinstance(op, ViewOp):
            parts.append(g)
            if op.part:
                continue
            metas = [segment.meta_of(index + k) for k in range(op.parts)]
            g, parts = algebra.join(op, parts[::-1], metas), []
        found: Sequence[Any] = ()
        if isinstance(op, Reduction) and g is not None:
            uses = segment.uses[index]
            read = {name: value(named[name]) for name in reads_of(uses[0].rule)}
            needs = tuple([k in [use.part for use in uses] for k in range(len(op.names))])
            operands = [segment.meta_of(ref) for ref in nodes[index].args if ref < CONST]
            found = algebra.reduced(op, g, read, tuple(operands), needs)
        for use in segment.uses[index]:
            ref, meta = use.ref, segment.meta_of(use.ref)
            if g is None:
                if ref not in gathers:
                    given.append(None)
                continue
            if isinstance(op, JoinOp):
                d = algebra.part(op.views[use.part], g)
            elif found:
                d = found[use.part]
            else:
                d = _evaluate(use.rule, lambda n, g=g, named=named: g if n == "g" else
                              value(named[n]), algebra)  # fmt: skip
            if algebra.dtype(d) is not meta.dtype and algebra.shape(d) == meta.shape:
                d = algebra.apply(CASTS[meta.dtype], (d,))
            if ref not in gathers:
                given.append(d)
            else:
                grads[ref] = algebra.apply(_ADD, (grads[ref], d)) if ref in grads else d
    return given + [grads.get(ref) for ref in segment.summed]


_ROWS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
    ast.Eq: "eq", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _evaluate(tree: ast.expr, env: Callable[[str], Any], algebra: Tape | Torch) -> Any:
    """The value of a rule, with a Python number where torch's C++ formula has a Scalar."""
    match tree:
        case ast.Constant(value=int() | float() as number):
            return algebra.number(number)
        case ast.Name(id=name):
            return env(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(operand, env, algebra)
            return -value if algebra.is_number(value) else algebra.apply(OPS["neg"], (value,))
        case ast.BinOp(left=left, op=sign, right=right):
            pass
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            pass
        case ast.Call(func=ast.Name(id="zeros"), args=[like, *_]):  # the others are only saved
            return algebra.apply(OPS["zeros"], (_evaluate(like, env, algebra),))
        case ast.Call(func=ast.Name(id="cast"), args=[one, like]):  # to the dtype of the other
            value = _evaluate(one, env, algebra)
            dtype = algebra.dtype(_evaluate(like, env, algebra))
            return value if algebra.dtype(value) is dtype else algebra.apply(CASTS[dtype], (value,))
        case ast.Call(func=ast.Name(id=name), args=args):
            values = tuple([_evaluate(arg, env, algebra) for arg in args])
            if all(map(algebra.is_number, values)):
                assert name == "log"
                return algebra.log(*values)
            return algebra.apply(OPS[name], values)
        case _:
            raise AssertionError(f"not part of a derivative rule: {ast.dump(tree)}")
    row = _ROWS[type(sign)]
    a, b = _evaluate(left, env, algebra), _evaluate(right, env, algebra)
    if not algebra.is_number(a):
        return algebra.apply(OPS[row], (a, b))
    if algebra.is_number(b):
        return {"add": operator.add, "sub": operator.sub, "mul": operator.mul,
                "div": operator.truediv}[row](a, b)  # fmt: skip
    if row == "div":
        return algebra.apply(OPS["scalar_div"], (a, b))
    return algebra.apply(OPS["rsub" if row == "sub" else _FLIPPED.get(row, row)], (b, a))


class Torch:
    """Applies rules to tensors: differentiable where grad mode is on."""

    def __init__(self, consts: list[Any]) -> None:
        self.consts = consts

    def const(self, position: int) -> Any:
        return self.consts[position]

    def number(self, value: float) -> Any:
        return value

    def is_number(self, value: Any) -> bool:
        return not isinstance(value, torch.Tensor)

    def apply(self, op: Op, operands: tuple[Any, ...]) -> torch.Tensor:
        assert op.eager is not None
        return op.eager(*operands)

    def again(self, op: Op, operands: tuple[Any, ...]) -> torch.Tensor:
        """The result of an op of the chain, whose casts by autocast are ops of it."""
        with ExcludedKey(AUTOCASTS[0], True), ExcludedKey(AUTOCASTS[1], True):
            return self.apply(op, operands)

    def view(self, op: ViewOp, value: torch.Tensor, base: Meta) -> torch.Tensor:
        """A view of the value `base` of the chain."""
        return self.apply(op, (value,))

    def join(
        self, op: ViewOp, parts: Sequence[torch.Tensor | None], metas: Sequence[Meta]
    ) -> torch.Tensor | None:
        """The gradient of what `op` has split, from those of the parts, of these Metas."""
        dim = op.dim
        assert dim is not None
        if all(part is None for part in parts):
            return None
        tensors = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if x is None else x
            for x, meta in zip(parts, metas, strict=True)
        ]
        return torch.stack(tensors, dim) if op.name == "unbind" else torch.cat(tensors, dim)

    def part(self, view: Callable[..., torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        """What `view` gives of the gradient of a join."""
        return view(value)

    def reduced(
        self, op: Reduction, g: torch.Tensor, values: Values, metas: tuple[Meta, ...], needs: Needs
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients for the operands of a reduction; see `reduced`."""
        return by_torch(op, g, values, tuple(metas[0].shape), needs)

    def dtype(self, value: torch.Tensor) -> torch.dtype:
        return value.dtype

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return value.shape

    log = staticmethod(log_of)


@dataclass(frozen=True, slots=True)
class _Number:
    """A Python number that a backward computes from the chain's Consts `c`."""

    cls: type
    text: str

    def _with(self, sign: str, other: _Number) -> _Number:
        cls = float if float in (self.cls, other.cls) or sign == "/" else int
        return _Number(cls, f"({self.text} {sign} {other.text})")

    __add__, __sub__ = partialmethod(_with, "+"), partialmethod(_with, "-")
    __mul__, __truediv__ = partialmethod(_with, "*"), partialmethod(_with, "/")

    def __neg__(self) -> _Number:
        return _Number(self.cls, f"(-{self.text})")


@dataclass(frozen=True, slots=True)
class Seen:
    """A view of a value of a Tape: torch's own where it is a result, a step where a rule reads it.

    view: of a stand-in without memory for the value.
    """

    ref: Ref
    call: Callable[..., torch.Tensor]
    view: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


class UnfusedError(Exception):
    """A rule that needs an op which is eager for these dtypes or shapes."""


class Tape:
    """Records rules as a program of its own; a value is a reference as in a program."""

    def __init__(
        self, recorder: Recorder, inputs: list[Meta], places: list[tuple[int, int]], last: Node
    ) -> None:
        """places: of each Input, the tensor it lies in and the byte at which it begins there.

        last: the last node of the chain that is differentiated.
        """
        self.places = places
        self.recorder, self.classes = recorder, last.consts
        self.tip = Node(recorder, None, None)
        self.tip.relaxed = last.relaxed
        self.tip.inputs = tuple(inputs)
        self.metas: list[Meta] = []
        self.numbers: list[str] = []
        self.known: dict[Any, int] = {}

    def const(self, position: int) -> _Number:
        return _Number(self.classes[position], f"c[{position}]")

    def number(self, value: float) -> _Number:
        return _Number(type(value), repr(value))

    def is_number(self, value: Any) -> bool:
        return isinstance(value, _Number)

    def log(self, value: _Number) -> _Number:
        return _Number(float, f"log({value.text})")

    def apply(self, op: Op, operands: tuple[Any, ...]) -> int:
        operands = tuple(map(self.step, operands))
        key = (op, *operands)
        if key not in self.known:
            numbers = [x for x in operands if isinstance(x, _Number)]
            edge = [x.cls if isinstance(x, _Number) else x for x in operands]
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

    def view(self, op: ViewOp, value: Ref, base: Meta) -> Ref:
        """As `Torch.view`; of an Input it is another one, in the same memory."""
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

    def part(self, view: Callable[..., torch.Tensor], value: Ref | Seen) -> Seen:
        """As `Torch.part`; made where it is needed."""
        if isinstance(value, Seen):
            first = value.call
            return Seen(value.ref, lambda x: view(first(x)), view(value.view))
        meta = self._meta(value)
        with NoModes(), InferenceMode(False):
            base = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            return Seen(value, view, view(base))

    def step(self, seen: Any) -> Any:
        """An operand, of which a view is a step of its own."""
        if isinstance(seen, Later):
            raise UnfusedError("a gradient that torch computes in the middle")
        if not isinstance(seen, Seen):
            return seen
        key = (Seen, seen.ref, seen.shape, seen.view.stride(), seen.view.storage_offset())
        if key not in self.known:
            op = view_op("part", seen.call, None, 0, seen.view, None)
            self.known[key] = self._seen(op, seen.ref)
        return self.known[key]

    def whole(self, value: Ref | Seen) -> Ref:
        """A value that lies in memory as it is, row after row: of another, or of a view, a copy."""
        if isinstance(value, Seen) or not self._meta(value).flat:
            return self.apply(ROWS, (value,))
        return value

    def join(
        self, op: ViewOp, parts: Sequence[Ref | Seen | None], metas: Sequence[Meta]
    ) -> Ref | None:
        """As `Torch.join`."""
        steps: list[Ref] = []
        if all(part is None for part in parts):
            return None
        for part in parts:
            if part is None:
                raise UnfusedError("a part without a gradient")
            part = self.step(part)
            own = part >= 0 and self.tip.path()[part].op.__class__ is Op
            steps.append(part if own else self.apply(OPS["clone"], (part,)))
        name = "stack" if op.name == "unbind" else "cat"
        assert op.dim is not None
        join = join_op(name, op.dim, [self.metas[step] for step in steps])
        if join is None:
            raise UnfusedError("a join that torch alone knows")
        return self.apply(join, tuple(steps))

    def _meta(self, ref: Ref) -> Meta:
        return self.metas[ref] if ref >= 0 else self.tip.inputs[~ref]

    def reduced(
        self, op: Reduction, g: Ref | Seen, values: Values, metas: tuple[Meta, ...], needs: Needs
    ) -> tuple[Ref | Seen | Later | None, ...]:
        """As `Torch.reduced`."""
        return on_tape(op, self, g, values, metas, needs)

    def dtype(self, value: Ref | Seen | Later) -> torch.dtype:
        if isinstance(value, Seen):
            return value.view.dtype
        return value.meta.dtype if isinstance(value, Later) else self._meta(value).dtype

    def shape(self, value: Ref | Seen | Later) -> tuple[int, ...]:
        if isinstance(value, Seen):
            return value.shape
        return (value.meta if isinstance(value, Later) else self._meta(value)).shape


class Expected:
    """The Answer of a tape, as soon as its kernels are there."""

    def __init__(self, tape: Tape, given: list[Ref | Seen | Later | None], gradients: int) -> None:
        """given: of each sink a result, an incoming gradient as ~k, a view of one, what comes of
        these later, or None. gradients: how many come in.
        """
        self.tape, self.sinks, self.gradients = tape, given, gradients
        self.given: list[Ref | None] = []
        for x in given:
            ref = x.ref if isinstance(x, Seen) else x
            self.given.append(None if isinstance(ref, Later) else ref)
        for later in _laters(given):  # what is no result of the sinks' comes behind theirs
            self.given += [ref for ref in later.refs if self._is_given(ref)]
        live = sorted({ref for ref in self.given if ref is not None and ref >= 0})
        device = tape.recorder.device
        program = completed(tape.tip.program(tuple(map(Output, live))), device.type)
        self.outputs, self.pieces = program.outputs, make_pieces(program, device.type)
        self.order = Order([piece.plan for piece in self.pieces], device, counted=False)

    def ready(self) -> Answer | None:
        """The Answer, or None; asks for the kernels that are missing."""
        tape, device = self.tape, self.tape.recorder.device
        kernels = self.order.filled()
        if kernels is None:
            return None
        runner = runner_class(device)(tape.tip, self.outputs, self.pieces, kernels)
        runner.recorded = False
        tape.recorder.runners.append(runner)
        answer = runner.answering(self.given, tape.numbers, tape.places)
        simple = all(x is None or isinstance(x, int) for x in self.sinks)
        return answer if simple else self._completing(answer)

    def _is_given(self, ref: Ref) -> bool:
        """Whether `ref` is a result or an incoming gradient, and nothing that is saved."""
        return ref >= 0 or ~ref < self.gradients

    def _completing(self, answer: Answer) -> Answer:
        """`answer` with views of its results, and what torch computes from them."""
        laters = _laters(self.sinks)
        calls = [(later.call, later.refs) for later in laters]
        space: dict[str, Any] = {"answer": answer, "NoModes": NoModes}
        names = [f"r{k}" for k in range(len(self.sinks))]  # of results
        lines: list[str] = []
        for n, later in enumerate(laters):
            operands = []
            for ref in later.refs:
                if self._is_given(ref):  # behind those of the sinks
                    operands.append(f"r{len(names)}")
                    names.append(operands[-1])
                    continue
                place = self.tape.places[~ref][0]
                apart = place - self.gradients
                operands.append(f"incoming[{place}]" if apart < 0 else f"saved[{apart}]")
            space[f"call{n}"] = later.call
            lines.append(f"        f{n} = call{n}{tuple_of(operands)}\n")
        gradients = ["None"]
        for k, x in enumerate(self.sinks):
            if isinstance(x, Later):
                gradients.append(f"f{calls.index((x.call, x.refs))}[{x.which}]")
            elif isinstance(x, Seen):
                space[f"view{k}"] = x.call
                gradients.append(f"view{k}(r{k})")
            else:
                gradients.append(f"r{k}")
        source = (  # straight on, in 0.9 us for a norm: loops over the sinks and calls took 4.9
            f"def completed(incoming, saved, consts):\n"
            f"    _, {''.join(name + ', ' for name in names)} = answer(incoming, saved, consts)\n"
            f"    with NoModes():\n{''.join(lines)}        return {tuple_of(gradients)}\n"
        )
        return defined(source, "completed", space)


def _laters(sinks: Sequence[Any]) -> list[Later]:
    """One of `sinks` for each call that is to come, in order."""
    return list({(x.call, x.refs): x for x in sinks if isinstance(x, Later)}.values())
