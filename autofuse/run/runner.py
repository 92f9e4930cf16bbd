"""Runners: one per program, live-outs and exact shapes; nothing is left to compute.

A Runner holds its kernels, the layout of its outputs and their packed parameters, so that a run is:
check the Inputs, allocate, write pointers and scalars, launch. `cuda` and `cpu` have one each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..chain.state import Chain, Node
from ..chain.steps import statistics_of
from ..errors import AutofuseError, StaleInputError
from ..kernel.plan import Piece
from ..lines import shown, user_position
from ..program.program import ALIAS, COPY, IN_PLACE, NEW, WRITE, Output
from ..supply.load import Kernel
from ..torch_private import NoModes, address_of, version_of
from .words import Words


class Runner:
    """Computes the outputs of one program; counts what that saved."""

    run: Callable[[Chain], None]  # computes and settles
    bare: Callable[[Chain], None] | None = None  # `run` without the range a profiler sees
    attach: Callable[..., Any] | None = None  # takes inputs, consts, late, what `made` names
    attach_views = False  # and returns `views`, of which autograd has to know
    words: Words | None = None  # `run` for the machine code of `hot`
    recorded = True  # its ops were recorded, not made by autograd
    elides = True  # its dead values get no memory
    saved_bytes = 0  # kept for backward
    waiting = False  # for kernels
    short = ""  # why it runs ops that cost less than a kernel, if it does
    margin = math.inf  # us by which they cost more under grad, if that is known
    tells = False  # hooks of saved tensors, of what `attach` saves
    ops: Callable[..., list[torch.Tensor]] | None = None  # the same by eager ops, once needed

    def __init__(
        self,
        tip: Node,
        outputs: tuple[Output, ...],
        pieces: tuple[Piece, ...] = (),
        kernels: Sequence[Kernel] = (),
        packs: Sequence[Sequence[int]] = (),
    ) -> None:
        """tip: where the program ends. pieces, kernels: of its Plans, one each, or none.

        packs: owners that share one tensor, one after another.
        """
        self.tip, self.pieces, self.kernels, self.outputs = tip, pieces, kernels, outputs
        self.device, self.nodes, self.inputs = tip.recorder.device, tip.path(), tip.inputs
        self.live = tuple(output.step for output in outputs)
        self.writes = bool(outputs) and outputs[-1].kind == WRITE
        self.copied = bool(outputs) and outputs[-1].kind == COPY
        # nodes of values that get memory of their own (not WRITE, IN_PLACE or ALIAS), and those
        # whose shells get them (not STORED), among which are views of others
        apart, seen = (WRITE, IN_PLACE, ALIAS), (NEW, COPY, IN_PLACE, ALIAS)
        self.steps = [*self.nodes, *statistics_of(self.nodes)]  # what an Output may be
        self.owners = [self.steps[output.step] for output in outputs if output.kind not in apart]
        self.visible = [self.nodes[output.step] for output in outputs if output.kind in seen]
        self.views = [self.nodes[output.step] for output in outputs if output.kind == ALIAS]
        # steps that kernels write to the memory of an Input, and which that is
        self.placed = {output.step: ~self.nodes[output.step].into  # type: ignore[operator]
                       for output in outputs if output.kind == IN_PLACE}  # fmt: skip
        # whether others go to memory of their own first, and are copied when they are given away
        self.puts_back = any(node.into is not None and node.index not in self.placed
                             for node in self.visible)  # fmt: skip
        self.stored = len(outputs) - len(self.views)
        memory = _memory(self.owners, packs)
        self.made = [pack[0] for pack, _, _ in memory]  # owners, a pack by its first
        self.memory = [*memory, *_left(pieces)]
        self.others = 0  # runs but those of `words`
        computed = [node for node in self.nodes if node.base < 0]
        dead = [node for node in computed if node.index not in set(self.live)]
        self.elided = len(dead) + self.writes
        self.elided_bytes = sum(node.meta.nbytes for node in dead if node.meta is not None)

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.others + (0 if self.words is None else self.words.runs)

    def bind(self) -> Runner:
        """Make ready for `run`; returns self."""
        return self

    def ready(self) -> Runner:
        """What to run from now on; a runner that waits for kernels asks for them."""
        return self


def check_inputs(chain: Chain) -> None:
    """Raise StaleInputError if an Input of `chain` changed since it was recorded."""
    marks = chain.marks
    with NoModes():
        for k, x in enumerate(chain.inputs):
            version = version_of(x)
            if version != marks[2 * k] or address_of(x) != marks[2 * k + 1]:
                raise StaleInputError(_stale(chain.tip, k, marks[2 * k], version))


def _stale(tip: Node, position: int, before: int, now: int) -> str:
    readers = [node for node in tip.path() if ~position in node.args]
    name = readers[0].op.name if readers and readers[0].op else "an op"
    meta = tip.inputs[position]
    what = f"version {before} -> {now}" if before != now else "its memory was replaced"
    return (
        f"an Input of shape {meta.shape} was modified in place ({what}) after {name!r} recorded a "
        f"read of it, and before the recorded ops ran at {shown(user_position())}.\n"
        "Cause: autofuse does not see every write through a plain tensor, such as those of C++ "
        "extensions and of `out=`.\n"
        "Call autofuse.materialize(result) before the write, or write through the wrapped tensor."
    )


class FailedRunner(Runner):
    """Stands for a kernel that could not be built; `error` decides what becomes of its chains."""

    def __init__(self, *args: Any, error: AutofuseError) -> None:
        super().__init__(*args)
        self.kind, self.reason = type(error), str(error)  # a traceback keeps the chain's values

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        check_inputs(chain)
        raise self.kind(self.reason)


# what is allocated: for which owners, the bytes of each, and (shape, stride, dtype)
Memory = tuple[Sequence[int], int, tuple[Any, ...]]


def _memory(owners: list[Node], packs: Sequence[Sequence[int]]) -> list[Memory]:
    packed = {index: pack for pack in packs for index in pack}
    memory = []
    for owner in owners:
        pack, meta = packed.get(owner.index, (owner.index,)), owner.meta
        assert meta is not None
        if pack[0] == owner.index:
            shape, stride = tuple(meta.shape), tuple(meta.stride)
            if len(pack) > 1:
                shape = (len(pack), *shape)
                stride = (meta.nbytes // meta.dtype.itemsize, *stride)
            memory.append((pack, meta.nbytes, (shape, stride, meta.dtype)))
    return memory


def _left(pieces: Sequence[Piece]) -> list[Memory]:
    """What one kernel leaves to the next."""
    return [
        (piece.stores, 4 * piece.left,
         ((len(piece.stores) * piece.left,), (1,), torch.float32))
        for piece in pieces if piece.left
    ]  # fmt: skip
