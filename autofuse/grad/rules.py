"""Derivative rules: applying them to a segment, as calls of torch or as a program of their own.

A sweep goes through a segment from its root to its sinks, in the order in which the engine would go
through the ops, and gives each rule of the op table its operands. What a rule computes with is one
of two algebras: `Straight` writes calls of torch functions, differentiable ones where grad mode is
on; `Tape` records a program, which becomes the kernel of a backward.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..chain.state import Node
from ..chain.steps import program_of
from ..kernel.rows import completed, make_pieces
from ..ops.reductions import Over, Reduction, number_a_row
from ..ops.row import OPS
from ..ops.views import JoinOp, ViewOp
from ..program.program import CONST, Output, Ref
from ..run.devices import runner_class
from ..run.generated import defined, tuple_of
from ..run.proof import Proof, proof_of
from ..run.words import Answer
from ..supply.kernels import Order
from ..torch_private import NoModes
from .reduced import Later
from .segments import Segment
from .straight import Caller, Straight, eager_of
from .tape import Seen, Tape
from .uses import reads_of

_ADD = OPS["add"]


def _value(nodes: list[Node], algebra: Tape | Straight, values: dict[Ref, Any], ref: Ref) -> Any:
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

    algebra: a Tape or a Straight. seeds: the gradients that came in, or None, by node. saved: the
    values that are at hand.
    """
    nodes = segment.nodes
    value = partial(_value, nodes, algebra, saved)
    grads = {index: g for index, g in seeds.items() if g is not None}
    gathers = segment.inner | set(segment.summed)
    given: list[Any] = []
    places: dict[Ref, int] = {}  # of the last sink of each
    parts: list[Any] = []  # gradients of those of a value that is split, the last first
    for index in reversed(segment.steps):
        g, named, op = grads.pop(index, None), segment.named(index), nodes[index].op
        if index in segment.striped:
            if g is not None:
                shape = segment.meta_of(nodes[index].base).shape
                g = algebra.padded(*segment.striped[index], g, shape)
        elif isinstance(op, ViewOp):
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
            if ref not in gathers and index not in segment.merged:
                places[ref] = len(given)
                given.append(None)
            if g is None:
                continue
            if isinstance(op, JoinOp):
                d = algebra.part(op.views[use.part], g)
            elif op is not None and op.back is not None:
                d = algebra.apply(op.back, (g, *[algebra.number(0)] * (len(op.back.names) - 1)))
            elif found:
                d = found[use.part]
            else:
                d = _evaluate(use.rule, lambda n, g=g, named=named: g if n == "g" else
                              value(named[n]), algebra)  # fmt: skip
            if (ref, index) in segment.spread:  # as the engine fits it
                over = Over(segment.spread[ref, index], keepdim=True)
                d = algebra.apply(number_a_row("sum", over), (d,))
            d = algebra.fitted(d, meta)
            if ref not in gathers:
                before = given[places[ref]]
                given[places[ref]] = d if before is None else algebra.apply(_ADD, (before, d))
            else:
                grads[ref] = algebra.apply(_ADD, (grads[ref], d)) if ref in grads else d
    return given + [grads.get(ref) for ref in segment.summed]


_ROWS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
    ast.Eq: "eq", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _evaluate(tree: ast.expr, env: Callable[[str], Any], algebra: Tape | Straight) -> Any:
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
            return algebra.cast(_evaluate(one, env, algebra), _evaluate(like, env, algebra))
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


def written(
    segment: Segment, key: tuple[bool, ...], call: Caller = eager_of
) -> Callable[..., tuple[Any, ...]]:
    """What computes an Answer's result by torch's ops: those that `call` gives.

    Of the gradients of all of the segment's `outs`, of `saved` and of the chain's Consts. key:
    whether autocast is on, then of each of these gradients whether it is None.
    """
    casting, *absent = key
    lines = Straight(segment.nodes[-1].consts, call, casting)
    values: dict[Ref, Any] = {ref: f"s[{k}]" for k, ref in enumerate(segment.saved)}
    seeds: dict[int, Any] = {
        index: None if none else f"g[{k}]"
        for k, (index, none) in enumerate(zip(segment.outs, absent, strict=True))
    }
    if segment.pack:
        values |= lines.unbound(segment.pack, values[segment.pack[0]])
        seeds |= lines.unbound(segment.pack, seeds[segment.pack[0]])
    return lines.function(sweep(segment, lines, seeds, values))


class Expected:
    """The Answer of a tape, as soon as its kernels are there."""

    def __init__(self, tape: Tape, given: list[Any], gradients: int) -> None:
        """given: of each sink a result, an incoming gradient as ~k, a view of one, strips, what
        comes of these later, or None. gradients: how many come in.
        """
        given = list(map(tape.result, given))
        self.tape, self.sinks, self.gradients = tape, given, gradients
        self.given: list[Ref | None] = []
        for x in given:
            ref = x.ref if isinstance(x, Seen) else x
            self.given.append(None if isinstance(ref, Later) else ref)
        for later in _laters(given):  # what is no result of the sinks' comes behind theirs
            self.given += [ref for ref in later.refs if self._is_given(ref)]
        live = sorted({ref for ref in self.given if ref is not None and ref >= 0})
        device = tape.recorder.device
        program = completed(program_of(tape.tip, tuple(map(Output, live))), device.type)
        self.outputs, self.pieces = program.outputs, make_pieces(program, device.type)
        self.order = Order([piece.plan for piece in self.pieces], device, counted=False)
        self.proof: Proof | None = None  # that they may be used, once they are there

    @property
    def is_refused(self) -> bool:
        """Whether torch's ops do it for good, as the proof has it."""
        return self.proof is not None and self.proof.holds is False

    def ready(self) -> Answer | None:
        """The Answer, or None; asks for the kernels that are missing."""
        tape, device = self.tape, self.tape.recorder.device
        kernels = self.order.filled()
        if kernels is None:
            return None
        if self.proof is None:
            self.runner = runner_class(device)(tape.tip, self.outputs, self.pieces, kernels)
            self.runner.recorded = False
            answer = self.runner.answering(self.given, tape.numbers, tape.places)
            simple = all(x is None or isinstance(x, int) for x in self.sinks)
            self.answer = answer if simple else self._completing(answer)
            self.proof = proof_of(tape.tip.path(), self.pieces, kernels, device)
        if self.proof is not None and not self.proof.holds:
            return None
        tape.recorder.runners.append(self.runner)
        return self.answer

    def compare(
        self, straight: Answer, grads: Sequence[Any], saved: Sequence[torch.Tensor],
        consts: list[Any],
    ) -> None:  # fmt: skip
        """Go on with the proof, if there has to be one; straight: gives the same by torch's ops.

        grads: of all of the segment's `outs`, None where there is none.
        """
        proof, count = self.proof, self.gradients
        if proof is None or proof.holds is not None:
            return

        def ours(x: Sequence[torch.Tensor]) -> Sequence[Any]:
            return self.answer(x[:count], x[count:], consts)

        def eager(x: Sequence[torch.Tensor]) -> Sequence[Any]:
            rest = iter(x)
            incoming: list[Any] = [g if g is None else next(rest) for g in grads]
            return straight(incoming, x[count:], consts)

        proof.go_on(ours, eager, [*(g for g in grads if g is not None), *saved])

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
