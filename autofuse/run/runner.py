"""Runners: one per program, live-outs and exact shapes; nothing is left to compute.

A Runner holds its kernels, the layout of its outputs and their packed parameters, so that a run is:
check the Inputs, allocate, write pointers and scalars, launch. `cuda` and `cpu` have one each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from ..chain.meta import Meta
from ..chain.state import Chain, Node
from ..errors import AutofuseError, StaleInputError
from ..kernel.plan import Piece
from ..program.program import COPY, NEW, WRITE, Output, Ref
from ..supply.load import Kernel
from ..torch_private import NoTorchFunction, address_of, version_of
from .words import Words


class Runner:
    """Computes the outputs of one program; counts what that saved."""

    run: Callable[[Chain], None]  # computes and settles
    bare: Callable[[Chain], None] | None = None  # `run` without the range a profiler sees
    attach: Callable[..., None] | None = None  # takes inputs, consts, late, what `made` names
    packs: tuple[tuple[int, ...], ...] = ()  # live-outs that share one tensor, one after another
    words: Words | None = None  # `run` for the machine code of `hot`
    recorded = True  # its ops were recorded, not made by autograd
    elides = True  # its dead values get no memory
    saved_bytes = 0  # kept for backward
    waiting = False  # for kernels
    ops: Callable[..., list[torch.Tensor]] | None = None  # the same by eager ops, once needed

    def __init__(
        self,
        tip: Node,
        outputs: tuple[Output, ...],
        pieces: tuple[Piece, ...] = (),
        kernels: Sequence[Kernel] = (),
    ) -> None:
        """tip: where the program ends. pieces, kernels: of its Plans, one each, or none."""
        self.tip, self.outputs, self.pieces, self.kernels = tip, outputs, pieces, kernels
        self.device, self.nodes, self.inputs = tip.recorder.device, tip.path(), tip.inputs
        self.live = tuple(output.step for output in outputs)
        self.writes = bool(outputs) and outputs[-1].kind == WRITE
        self.copied = bool(outputs) and outputs[-1].kind == COPY
        # nodes of values that get memory of their own (not WRITE), and those of them whose shells
        # get them (not STORED)
        self.owners = [self.nodes[output.step] for output in outputs if output.kind != WRITE]
        self.visible = [self.nodes[output.step] for output in outputs if output.kind in (NEW, COPY)]
        self.others = 0  # runs but those of `words`
        dead = [node for node in self.nodes if node.index not in set(self.live)]
        self.elided = len(dead) + self.writes
        self.elided_bytes = sum(node.meta.nbytes for node in dead if node.meta is not None)

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.others + (0 if self.words is None else self.words.runs)

    def made(self) -> list[int]:
        """The owners in order, a pack by its first."""
        inner = {index for pack in self.packs for index in pack[1:]}
        return [owner.index for owner in self.owners if owner.index not in inner]

    def ready(self) -> Runner:
        """What to run from now on; a runner that waits for kernels asks for them."""
        return self

    def check(self, chain: Chain) -> None:
        """Raise StaleInputError if an Input changed since it was recorded."""
        marks = chain.marks
        with NoTorchFunction():
            for k in range(len(self.inputs)):
                x = chain.inputs[k]
                version = version_of(x)
                if version != marks[2 * k] or address_of(x) != marks[2 * k + 1]:
                    raise StaleInputError(self._stale(k, marks[2 * k], version))

    def _stale(self, position: int, before: int, now: int) -> str:
        readers = [node for node in self.nodes if ~position in node.args]
        name = readers[0].op.name if readers and readers[0].op else "an op"
        meta = self.inputs[position]
        what = f"version {before} -> {now}" if before != now else "its memory was replaced"
        return (
            f"an Input of shape {meta.shape} was modified in place ({what}) after {name!r} "
            "recorded a read of it and before the recorded ops ran. Call "
            "autofuse.materialize(result) before the write, or write through the wrapped tensor."
        )


class FailedRunner(Runner):
    """Stands for a kernel that could not be built; `error` decides what becomes of its chains."""

    def __init__(self, *args: Any, error: AutofuseError) -> None:
        super().__init__(*args)
        self.kind, self.reason = type(error), str(error)  # a traceback keeps the chain's values

    def run(self, chain: Chain) -> None:  # type: ignore[override]
        self.check(chain)
        raise self.kind(self.reason)


def result_text(given: list[Ref | None], made: str) -> str:
    """The expression for an Answer's result; given: a result, an incoming one as ~k, or None."""
    items = [
        "None" if ref is None else f"inputs[{~ref}]" if ref < 0 else made.format(ref)
        for ref in given
    ]
    return f"(None, {''.join(item + ', ' for item in items)})"


def log_of(number: float) -> float:
    """The logarithm as C gives it."""
    return math.log(number) if number > 0 else float("-inf") if number == 0 else float("nan")


def reciprocal_of(number: float) -> float:
    """The reciprocal as C gives it."""
    return 1.0 / number if number else math.copysign(math.inf, number)


def packed(meta: Meta, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, stride) of a tensor for `count` values of one dense layout, one after another."""
    if count == 1:
        return tuple(meta.shape), tuple(meta.stride)
    return (count, *meta.shape), (meta.nbytes // meta.dtype.itemsize, *meta.stride)


@lru_cache(maxsize=1024)
def compiled(source: str) -> CodeType:
    """Compiled once for all sizes: numbers and addresses reach it as names."""
    return compile(source, "<autofuse runner>", "exec")


def declared(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """The arguments as objects of the types that `function` of ctypes declares.

    Calling it with them makes no container, in the midst of which Python up to 3.11 may collect.
    """
    return tuple(kind(value) for kind, value in zip(function.argtypes, arguments, strict=True))


def numbered(index: int) -> str:
    """The statement that gives the node of `v<index>` the number that its op has used up."""
    return f"v{index}.grad_fn._set_sequence_nr(late + {index})"
