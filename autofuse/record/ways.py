"""Ways: what is to run a chain, a kernel or its eager ops, and for how long the latter."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..chain.liveness import DEAD
from ..chain.state import LATER, Chain, Node, Recorder
from ..chain.steps import program_of
from ..errors import ColdKernelError, KernelError
from ..grad.backward import Graph
from ..grad.segments import Outline, outline_of
from ..inside import is_foreign
from ..kernel.overwrite import is_overwritten, stored_last
from ..kernel.plan import Piece
from ..kernel.rows import RowPlan, completed, make_pieces
from ..layout import is_dense
from ..program.program import ALIAS, COPY, IN_PLACE, NEW, STORED, WRITE, Output
from ..run.devices import runner_class
from ..run.eager import EagerRunner
from ..run.launching import LaunchingRunner
from ..run.outside import finishing
from ..run.proof import Proof, by_both, proof_of
from ..run.runner import FailedRunner, Runner
from ..settings.config import config
from ..supply import kernels as compiling
from ..supply.kernels import Order
from ..supply.load import Kernel, processors_of
from .policy import (
    LONE,
    SHORT,
    SHORT_UNDER_GRAD,
    TRIES,
    WAITED,
    are_alone,
    is_short,
    losing,
    make_eager,
    margin,
    rest,
)
from .ranges import annotated, open_ranges

UNLIKE = "other bits than eager's"


def outputs_of(nodes: list[Node], refcounts: tuple[int, ...], writes: bool) -> tuple[Output, ...]:
    """What a flush has to compute, by the reference counts of its shells.

    writes: the last value, to memory that is there.
    """
    written = len(refcounts) - 1 if writes else -1
    return tuple(
        Output(index, WRITE if index == written else _kind_of(nodes[index]))
        for index, held in enumerate(refcounts)
        if held > DEAD or index == written
    )


def _kind_of(node: Node) -> str:
    """Where the value of `node` goes, for a shell that somebody holds."""
    if node.into is not None:
        return IN_PLACE
    return NEW if node.base < 0 else ALIAS


def runner_for(recorder: Recorder, node: Node, refcounts: tuple[int, ...], writes: bool) -> Runner:
    """What runs the chain that ends at `node`, whose shells have these reference counts."""
    if recorder.size >= config.max_trie:
        recorder.forget()
        recorder.open()
    outputs = outputs_of(node.path(), refcounts, writes)
    known: Runner | None = node.by_outputs.get(outputs)
    runner = known
    if known is None or known.waiting:
        try:
            runner = _build_runner(recorder, node, outputs) if known is None else known.ready()
        except Exception as error:
            cold = isinstance(error, ColdKernelError)
            if is_foreign(error) or (cold and not compiling.capturing(recorder.device)):
                raise
            if cold:
                return FailedRunner(node, outputs, error=error)  # not to be remembered
            failure = KernelError(f"no kernel: {error}")
            runner = FailedRunner(node, outputs, error=failure)
            if _tells(node):
                outline = _outline(node, outputs)
                graph = Graph(recorder, outline, node.path())
                runner = FailedRunner(node, _computed(outputs, graph), error=failure)
                graph.attach_to(runner)
        if runner is not known:
            recorder.runners.append(runner)
            node.by_outputs[outputs] = runner
            if open_ranges:
                annotated(runner)
        if runner.waiting:
            rest(recorder)
            return runner  # asked again next time
    assert runner is not None
    by_counts = node.writers if writes else node.runners
    if len(by_counts) > 256:  # a value may be held in any number of places
        by_counts.clear()
    by_counts[refcounts] = runner
    return runner


def _build_runner(recorder: Recorder, node: Node, outputs: tuple[Output, ...]) -> Runner:
    device, nodes = recorder.device, node.path()
    if sys.is_finalizing():  # a finalizer, when modules are gone that a kernel needs
        return EagerRunner(node, outputs)
    if are_alone(nodes):
        return ShortRunner(node, outputs, "reductions alone")
    short = is_short(nodes, [output.step for output in outputs], device.type)
    tells = _tells(node)
    if short and not tells:
        return ShortRunner(node, outputs, SHORT)
    graph, computed, gain = None, outputs, math.inf
    if tells or any(nodes[output.step].meta.requires_grad for output in outputs):  # type: ignore[union-attr]
        outline = _outline(node, outputs)
        gain = margin(nodes, outline)
        costly = gain <= 0
        if costly and not tells:
            leading = losing(nodes, outline)
            return ShortRunner(node, outputs, SHORT_UNDER_GRAD, leading)
        graph = Graph(recorder, outline, nodes)
        computed = _computed(outputs, graph)
        if short or costly:
            why = SHORT if short else SHORT_UNDER_GRAD
            alone = ShortRunner(node, computed, why)
            graph.attach_to(alone)
            return alone
    nodes[0].long = True
    program = completed(program_of(node, computed), device.type)
    computed, pieces = program.outputs, make_pieces(program, device.type, processors_of(device))
    if computed[-1:] and computed[-1].kind == WRITE:
        pieces = stored_last(pieces, node.index)
    computed = tuple([_in_memory(output, pieces, nodes) for output in computed])
    if computed[-1:] and computed[-1].kind == WRITE:
        assert node.meta is not None
        end = pieces[-1] if pieces else None  # what runs last
        # rows are read by more threads than write them
        if end is None or node.index not in end.stores or isinstance(end.plan, RowPlan):
            if not is_dense(node.meta.shape, node.meta.stride):  # a copy would be as large as all
                return EagerRunner(node, outputs)
            computed = _copied(computed)
    return WaitingRunner(node, computed, pieces, graph, gain).ready()


def _copied(computed: tuple[Output, ...]) -> tuple[Output, ...]:
    """The same, of which the last goes to memory of its own before it is written."""
    *others, last = computed
    return (*others, replace(last, kind=COPY))


def _in_memory(output: Output, pieces: Sequence[Piece], nodes: list[Node]) -> Output:
    """`output`, which if it is in place may have to go to memory of its own, and be copied."""
    into = nodes[output.step].into if output.kind == IN_PLACE else None
    if into is None or is_overwritten(pieces, output.step, into):
        return output
    return replace(output, kind=NEW)


def _tells(node: Node) -> bool:
    """Whether hooks of saved tensors are told what the chain that ends at `node` saves."""
    return node.told is LATER and node.holds_grad


def _outline(node: Node, outputs: tuple[Output, ...]) -> Outline:
    return outline_of(node.path(), node.inputs, tuple(output.step for output in outputs))


def _computed(outputs: tuple[Output, ...], graph: Graph) -> tuple[Output, ...]:
    """`outputs`, and what the graph needs besides."""
    stored = [Output(index, STORED) for index in graph.stored]
    return tuple(sorted((*outputs, *stored), key=lambda output: output.step))


def out_of_place(runner: Runner) -> Runner:
    """What computes the same by eager ops, and writes nothing in place."""
    outputs = [replace(x, kind=NEW) if x.kind == IN_PLACE else x for x in runner.outputs]
    return EagerRunner(runner.tip, tuple(outputs))


class ShortRunner(EagerRunner):
    """Runs a chain that costs less so by eager ops; it soon is not recorded any more."""

    def __init__(
        self, tip: Node, outputs: tuple[Output, ...], short: str, leading: int | None = None
    ) -> None:
        """short: why. leading: how many of its first ops not to record any more; None for all."""
        super().__init__(tip, outputs)
        self.short = LONE if len(self.nodes) == 1 else short
        self.leading = leading

    def run(self, chain: Chain) -> None:
        super().run(chain)
        if self.runs >= TRIES:
            make_eager(self.nodes[: self.leading], self.short)


class WaitingRunner(EagerRunner):
    """Runs a chain by eager ops until the kernels of `pieces` are there."""

    waiting = True

    def __init__(
        self,
        tip: Node,
        outputs: tuple[Output, ...],
        pieces: tuple[Piece, ...],
        graph: Graph | None,
        margin: float,
    ) -> None:
        """outputs: of the kernels; what nobody sees of them is not computed meanwhile."""
        tells = graph is not None and graph.tells
        seen = tuple(x for x in outputs if x.kind != STORED or tells)
        super().__init__(tip, seen, pieces)
        self.computed, self.margin = outputs, margin
        self.graph = graph  # what a runner with kernels leaves behind
        if graph is not None and tells:  # and this one too
            graph.attach_to(self)
        self.order = Order([piece.plan for piece in pieces], self.device)
        self.proof: Proof | None = None  # that they may be used, once they are there

    def run(self, chain: Chain) -> None:
        inputs, consts = chain.inputs, chain.consts
        super().run(chain)
        proof = self.proof
        if proof is not None and proof.holds is None:
            ours, eager = self.both
            proof.go_on(lambda x: ours(x, consts), lambda x: eager(x, consts), inputs)
        elif self.runs > max(TRIES, config.compile_after) and not config.always_fuse:
            unlike = proof is not None and proof.holds is False
            make_eager(self.nodes, UNLIKE if unlike else "waiting for its kernel", WAITED)

    def ready(self) -> Runner:
        """The runner that launches, or this one; asks for the kernels that are missing."""
        if self.order.quiet or (self.proof is not None and self.proof.holds is False):
            return self
        kernels = self.order.filled()
        if kernels is None:
            if self.graph is not None:
                self.graph.prepare()
            return self
        if self.proof is None:
            self.proof = proof_of(self.nodes, self.pieces, kernels, self.device)
            if self.proof is not None:
                self.both = by_both(self.tip, self.computed, self.pieces, kernels)
        if self.proof is not None and not self.proof.holds:
            return self
        runner, meta = self._launching(self.computed, kernels), self.nodes[-1].meta
        assert meta is not None
        dense = is_dense(meta.shape, meta.stride)
        if runner.writes and dense and runner.in_threads(self.pieces[-1]):
            copying = self._launching(_copied(self.computed), kernels)
            runner.run = partial(_write, runner.run, copying.run)
        return runner

    def _launching(
        self, computed: tuple[Output, ...], kernels: Sequence[Kernel]
    ) -> LaunchingRunner:
        packs = () if self.graph is None else self.graph.packs
        make = runner_class(self.device)
        runner = make(self.tip, computed, self.pieces, kernels, packs)
        runner.margin = self.margin
        if self.graph is not None:
            self.graph.attach_to(runner)
        runner.attach = finishing(runner.steps, runner.made, runner.attach)
        return runner.bind()


def _write(alone: Callable[[Chain], None], copying: Callable[[Chain], None], chain: Chain) -> None:
    """Write what is large in one step; or by several threads, elsewhere first: they are none."""
    (copying if torch.get_num_threads() > 1 else alone)(chain)
