"""Uses: the operands of a step that get a gradient, and what the rules for these read. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ..chain.meta import Meta
from ..chain.state import Node
from ..ops.views import JoinOp
from ..program.program import CONST, Ref


@dataclass(frozen=True, slots=True)
class Use:
    """A differentiable operand of a step: the rule for its gradient, and what the rule reads."""

    ref: Ref
    rule: ast.expr
    reads: frozenset[Ref]
    part: int  # which operand it is: of a join, or of a reduction, whose rule gives all gradients


G = ast.parse("g", mode="eval").body


def uses_of(
    node: Node, meta_of: Callable[[Ref], Meta], statistics: Mapping[str, Ref] = MappingProxyType({})
) -> Iterator[Use]:
    """The operands of `node` that get a gradient, in order; statistics: its own, by name."""
    assert node.op is not None
    if isinstance(node.op, JoinOp):
        for k, ref in enumerate(node.args):
            if meta_of(ref).requires_grad:
                yield Use(ref, G, frozenset(), k)
        return
    if not node.op.grad:
        return
    for k, (ref, rule) in enumerate(zip(node.args, node.op.rules, strict=True)):
        if ref < CONST and rule is not None and meta_of(ref).requires_grad:
            named = {**node.named(), **statistics}
            yield Use(ref, rule, frozenset(named[n] for n in reads_of(rule) if n in named), k)


def is_handed_on(rule: ast.expr) -> bool:
    """Whether the gradient for an operand is that of the result."""
    return isinstance(rule, ast.Name) and rule.id == "g"


@cache
def reads_of(rule: ast.expr) -> tuple[str, ...]:
    """The names that a rule reads besides the gradient, in order; a called row is none."""
    called = {id(tree.func) for tree in ast.walk(rule) if isinstance(tree, ast.Call)}
    names = (
        tree.id for tree in ast.walk(rule) if isinstance(tree, ast.Name) and id(tree) not in called
    )
    return tuple(name for name in dict.fromkeys(names) if name != "g")
