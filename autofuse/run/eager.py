"""Running a program as the ops that it was recorded from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..chain.state import LATER, Chain, Node
from ..program.program import CONST
from ..program.walk import needed
from ..torch_private import (
    Hooks,
    NoModes,
    above_autograd,
    detach,
    pop_hooks,
    push_hooks,
    set_grad_enabled,
    top_hooks,
    without_autocast,
)
from .generated import defined, numbered, operand_of
from .runner import Runner, check_inputs
from .settle import publish, settle
from .views import Calls, number_of_view


def _itself(packed: torch.Tensor) -> torch.Tensor:
    return packed


# in place of hooks that are told nothing: by itself a shell would take away a value that it holds
HOLDING: Hooks = detach, _itself


class EagerRunner(Runner):
    """Runs a chain as the ops it was recorded from."""

    elides = False

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        check_inputs(chain)
        run_ops(chain, self)


def run_ops(chain: Chain, runner: Runner) -> None:
    """Do what `runner` does by the eager ops that the chain was recorded from."""
    if runner.ops is None:
        runner.ops = replaying(runner.steps, runner.live)
    if runner.tells:
        assert runner.attach is not None
        nodes, live = runner.nodes, runner.live
        values = replayed(chain, nodes, live, chain.bumps, None, runner.ops, grad=False)
        with NoModes():
            made = [values[index] for index in runner.made]
            views = runner.attach(chain.inputs, chain.consts, chain.late, *made)
        if runner.attach_views:
            values |= zip([node.index for node in runner.views], views, strict=True)
        publish(chain, values)
        settle(chain, runner.visible)
        return
    values = replayed(chain, runner.nodes, runner.live, chain.bumps, chain.late, runner.ops)
    publish(chain, values)
    settle(chain, runner.visible)


class Operands(NamedTuple):
    """What the ops of a chain read."""

    inputs: Sequence[torch.Tensor]
    consts: Sequence[Any]


@above_autograd
@without_autocast  # whose casts are steps of the chain
def replayed(
    chain: Chain | Operands,
    nodes: list[Node],
    live: tuple[int, ...],
    bumps: dict[int, int] | None,
    late: int | None,
    ops: Callable[..., list[torch.Tensor]] | None = None,
    grad: bool = True,
) -> dict[int, torch.Tensor]:
    """The values `live` of `chain`, by node index, made by eager ops; `chain` stays as it is.

    grad: with autograd's nodes, of which hooks are told nothing: the flush does that.
    """
    told = nodes[-1].told is LATER or top_hooks() is not None
    with NoModes():
        was = torch.is_grad_enabled()
        try:
            try:
                if told:
                    push_hooks(*HOLDING)
                set_grad_enabled(grad and nodes[-1].grad_mode)
                made = (ops or replaying(nodes, live))(chain.inputs, chain.consts, bumps, late)
            finally:
                if told:
                    pop_hooks()
        finally:
            set_grad_enabled(was)
    return dict(zip(live, made, strict=True))


def replaying(nodes: list[Node], live: tuple[int, ...]) -> Callable[..., list[torch.Tensor]]:
    """A function of what a chain has of these names that runs the ops; dead values go early."""
    space: dict[str, Any] = {"bump": torch.autograd.graph.increment_version}
    lines = []
    wanted = {*needed([node.args for node in nodes], live)}
    last = {ref: node.index for node in nodes if node.index in wanted for ref in node.args}
    viewed = {nodes[index].base for index in live}
    views = Calls(space)
    for index, node in enumerate(nodes):
        assert node.op is not None
        if index not in wanted:
            continue
        if node.base >= 0:
            lines += views.lines_for(node)
        else:
            space[f"f{index}"] = node.op.eager
            lines.append(f"v{index} = f{index}({', '.join(map(operand_of, node.args))})")
        if node.meta is not None and node.meta.requires_grad:
            number = numbered(index) if node.base < 0 else number_of_view(node, space)
            lines.append(f"if late is not None: {number}")
        if index in live or index in viewed:  # before another op saves it
            lines.append(f"for _ in range(bumps and bumps.get({index}, 0) or 0): bump(v{index})")
        values = {ref for ref in node.args if 0 <= ref < CONST}
        done = [f"v{ref}" for ref in values if last[ref] == index and ref not in live]
        if done:
            lines.append(f"del {', '.join(done)}")
    results = ", ".join(f"v{index}" for index in live)
    body = "".join(f"    {line}\n" for line in lines)
    signature = "replay(inputs, consts, bumps, late)"
    return defined(f"def {signature}:\n{body}    return [{results}]\n", "replay", space)
