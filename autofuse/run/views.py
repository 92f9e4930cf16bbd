"""Views that somebody holds: torch's own, of the memory of the step that each lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..chain.state import Node
from ..ops.views import ViewOp
from ..torch_private import above_autograd, set_grad_enabled
from .generated import defined, tuple_of


class Calls:
    """Statements that make views as they were asked for: who gives several is called once."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.space = space  # what the statements name
        self.calls: dict[int, str] = {}  # that give several results: who, by the first one's step

    def lines_for(self, node: Node) -> list[str]:
        """Statements that make `v<index>` of the operand of `node`."""
        (operand,), op = node.args, node.op
        assert isinstance(op, ViewOp)
        # the same view again is another tensor, and the same call again another node of autograd's
        first = node.index - (op.part or 0)
        known = first in self.calls
        name = self.calls.setdefault(first, f"made{node.index}")
        self.space[f"f_{name}"] = op.call
        part = "" if op.part is None else f"[{op.part}]"
        lines = [] if known else [f"{name} = f_{name}(v{operand})"]
        return [*lines, f"v{node.index} = {name}{part}"]


def number_of_view(node: Node, space: dict[str, Any]) -> str:
    """The statement that gives the nodes of the view `v<index>` the number that its op has used up.

    space: what the statement names.
    """
    space["number_view"] = _number
    (operand,) = node.args
    return f"number_view(v{node.index}, v{operand}, late + {node.index})"


def _number(view: torch.Tensor, operand: torch.Tensor, number: int) -> None:
    found, end = view.grad_fn, operand.grad_fn
    while found is not None and found is not end:  # an index may make several
        found._set_sequence_nr(number)  # type: ignore[attr-defined]
        found = found.next_functions[0][0]


def viewer(nodes: list[Node], wanted: list[Node]) -> tuple[list[int], Callable[..., Any]]:
    """The steps that `wanted`, which are views, lie in, and a function from their tensors to these.

    It calls what was called when they were recorded, in that grad mode: torch keeps of a view how
    it was made.
    """
    bases = sorted({node.base for node in wanted})
    needed: set[int] = set()
    for node in wanted:
        while node.base >= 0:
            needed.add(node.index)
            node = nodes[node.args[0]]
    space: dict[str, Any] = {"grad_is_on": torch.is_grad_enabled, "set_grad": set_grad_enabled}
    calls = Calls(space)
    lines = [line for index in sorted(needed) for line in calls.lines_for(nodes[index])]
    lines.append(f"return {tuple_of(f'v{node.index}' for node in wanted)}")
    body, grad = "".join(f"        {line}\n" for line in lines), wanted[0].grad_mode
    source = (
        f"def views({', '.join(f'v{base}' for base in bases)}):\n"
        f"    was = grad_is_on()\n"
        f"    try:\n        if was is not {grad}: set_grad({grad})\n{body}"
        f"    finally:\n        if was is not {grad}: set_grad(was)\n"
    )
    return bases, above_autograd(defined(source, "views", space))
