"""Views that somebody holds: torch's own, of the memory of the step that each lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..chain.state import Node
from ..ops.views import ViewOp
from ..torch_private import set_grad_enabled
from .generated import defined, tuple_of


def viewer(nodes: list[Node], wanted: list[Node]) -> tuple[list[int], Callable[..., Any]]:
    """The steps that `wanted`, which are views, lie in, and a function from their tensors to these.

    It calls what was called when they were recorded, in that grad mode: torch keeps of a view how
    it was made. A function that gives several is called once.
    """
    bases = sorted({node.base for node in wanted})
    space: dict[str, Any] = {"grad_is_on": torch.is_grad_enabled, "set_grad": set_grad_enabled}
    lines: list[str] = []
    calls: dict[tuple[int, int, int | None], str] = {}  # results not given yet, by operand
    known = set(bases)

    def need(node: Node) -> None:
        if node.index in known:
            return
        known.add(node.index)
        (operand,), op = node.args, node.op
        need(nodes[operand])
        assert isinstance(op, ViewOp)
        name = calls.pop((operand, id(op.call), op.part), "")
        if not name:
            name = f"made{node.index}"
            space[f"f_{name}"] = op.call
            lines.append(f"{name} = f_{name}(v{operand})")
            calls.update(((operand, id(op.call), k), name) for k in range(op.parts) if k != op.part)
        lines.append(f"v{node.index} = {name}" + ("" if op.part is None else f"[{op.part}]"))

    for node in wanted:
        need(node)
    results = tuple_of(f"v{node.index}" for node in wanted)
    body = "".join(f"        {line}\n" for line in [*lines, f"return {results}"])
    mode = wanted[0].grad_mode
    source = (
        f"def views({', '.join(f'v{base}' for base in bases)}):\n"
        f"    was = grad_is_on()\n    try:\n        set_grad({mode})\n{body}"
        f"    finally:\n        set_grad(was)\n"
    )
    return bases, defined(source, "views", space)
