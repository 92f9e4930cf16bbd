"""Ways: what is to run a chain, a kernel or its eager ops, and for how long the latter."""

from __future__ import annotations

from typing import Any

from ..chain.liveness import DEAD
from ..chain.state import Node, Recorder
from ..errors import ColdKernelError, KernelError
from ..grad.node import Graph, graded, graph_of
from ..grad.segments import outline_of
from ..inside import is_foreign
from ..kernel.plan import make_pieces
from ..run.devices import runner_class
from ..run.eager import EagerRunner, ShortRunner
from ..run.runner import FailedRunner, Runner
from ..settings.config import config
from ..supply import kernels as compiling
from ..supply.kernels import Order
from .policy import SHORTEST, pays, rest
from .ranges import annotated, open_ranges


def runner_for(recorder: Recorder, node: Node, alive: tuple[int, ...], into: bool) -> Runner:
    if recorder.size >= config.max_trie:
        recorder.forget()
        recorder.open()
    live = tuple(index for index, held in enumerate(alive) if held > DEAD)
    mask = (-3 if into else -1, *live)  # no reference count is negative: one dict serves all
    known: Runner | None = node.runners.get(mask)
    runner = known
    if known is None or known.waiting:
        try:
            runner = _build_runner(recorder, node, live, into) if known is None else known.ready()
        except Exception as error:
            cold = isinstance(error, ColdKernelError)
            if is_foreign(error) or (cold and not compiling.capturing(recorder.device)):
                raise
            args = (recorder.device, node.path(), node.inputs, live, (), into)
            if cold:
                return FailedRunner(*args, error=error)  # not to be remembered
            runner = FailedRunner(*args, error=KernelError(f"no kernel: {error}"))
        if runner is not known:
            recorder.runners.append(runner)
            node.runners[mask] = runner
            if open_ranges:
                annotated(runner)
        if runner.waiting:
            rest(recorder)
            return runner  # asked again next time
    assert runner is not None
    if len(node.runners) > 256:  # a value may be held in any number of places
        node.runners = {key: kept for key, kept in node.runners.items() if key[0] in (-1, -3)}
    node.runners[(-2, *alive) if into else alive] = runner
    return runner


def _build_runner(recorder: Recorder, node: Node, live: tuple[int, ...], into: bool) -> Runner:
    device, nodes = recorder.device, node.path()
    if len(nodes) < SHORTEST[device.type] and not (nodes[0].long or config.always_fuse):
        alone = ShortRunner(device, nodes, node.inputs, live, (), into)
        alone.until_long = True
        return alone
    graph = None
    computed = live
    if any(nodes[index].meta.requires_grad for index in live):  # type: ignore[union-attr]
        outline = outline_of(nodes, node.inputs, live)
        if outline is None:
            return EagerRunner(device, nodes, node.inputs, live, (), into)
        if not (config.always_fuse or pays(nodes, outline)):
            return ShortRunner(device, nodes, node.inputs, live, (), into)
        graph = graph_of(recorder, outline)
        computed = tuple(sorted({*live, *graph.stored}))
    nodes[0].long = True
    pieces = make_pieces(node.program(), computed, device.type)
    written = into and bool(pieces) and node.index in pieces[-1].stores
    args = (device, nodes, node.inputs, live, pieces, written)
    waiting = WaitingRunner(*args, graph=graph, computed=computed)
    waiting.copied = into and not written
    return waiting.ready()


class WaitingRunner(EagerRunner):
    """The same until the kernels of `pieces` are there."""

    waiting = True

    def __init__(self, *args: Any, graph: Graph | None, computed: tuple[int, ...]) -> None:
        super().__init__(*args)
        self.graph = graph  # what a runner with kernels leaves behind
        self.computed = computed  # the live-outs, and what `graph` stores
        self.order = Order([piece.plan for piece in self.pieces], self.device)

    def ready(self) -> Runner:
        """The runner that launches, or this one; asks for the kernels that are missing."""
        if self.order.quiet:
            return self
        kernels = self.order.filled()
        if kernels is None:
            if self.graph is not None:
                self.graph.prepare()
            return self
        make = runner_class(self.device)
        runner = make(self.device, self.nodes, self.inputs, self.computed, self.pieces, self.into,
                      kernels)  # fmt: skip
        runner.copied = self.copied
        if self.graph is not None:
            runner = graded(runner, self.graph, self.live)
        return runner.settling()
