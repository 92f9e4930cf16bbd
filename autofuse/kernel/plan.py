"""Plans: from a recorded program and its live-outs to the loops that compute them.

Pure: knows nothing of torch tensors, numba or CUDA. A Plan is the part of a program that one kernel
computes, with sizes, strides and scalar values taken out (they are arguments of the kernel), so
that equal Plans share one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .. import layout
from ..layout import Ints
from ..ops.row import Op
from ..program.program import CONST, Program, Ref, Spec
from ..program.walk import needed
from .source import BROADCAST, ITEMSIZE, STRIDED, UNIT, Operand


@dataclass(frozen=True, slots=True)
class Line:
    """One op of a kernel. refs name loads as ~k, earlier lines as k, Consts as CONST + k."""

    op: Op
    refs: tuple[Ref, ...]
    common: str
    result: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The structure of one kernel; hashable, and equal for equal kernels."""

    device: str  # "cuda" or "cpu"
    loads: tuple[Operand, ...]
    consts: tuple[type, ...]
    lines: tuple[Line, ...]
    stores: tuple[tuple[int, Operand], ...]  # (line, where to); never empty
    rank: int
    lanes: int  # neighbouring elements per thread, moved by 16-byte accesses where over 1
    wide: bool  # 64-bit index arithmetic
    relaxed: bool = False  # ops contract with each other, 16-bit values are rounded when stored

    @property
    def name(self) -> str:
        """The kernel's name as profilers show it."""
        ops = [line.op.name for line in self.lines]
        text = "_".join(ops[:8]) + (f"_and_{len(ops) - 8}" if len(ops) > 8 else "")
        return f"af_{text}"

    @property
    def inverted(self) -> tuple[bool, ...]:
        """Of each Const, whether the kernel is given its reciprocal."""
        found = [False] * len(self.consts)
        for line in self.lines:
            for role, ref in zip(line.op.roles, line.refs, strict=True):
                if ref >= CONST and role == "inverse":
                    found[ref - CONST] = self.device == "cuda"
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel of a flush: its Plan, and what stands for its parameters in this program."""

    plan: Any  # a Plan, or a `rows.RowPlan`
    loads: tuple[Ref, ...]  # ~k: Input k; k: the output of step k, stored by an earlier piece
    consts: Ints  # which of the chain's Consts
    stores: Ints  # steps
    numel: int  # elements of the loop
    numbers: Ints  # sizes of the inner axes, then strides of the STRIDED axes


def make_pieces(program: Program, device: str) -> tuple[Piece, ...]:
    """The kernels that compute the outputs of `program`.

    One kernel per shape of a live-out: a value of another shape that is dead is computed inside
    the kernel that needs it, one that is live is stored first and read back.
    """
    groups: dict[Ints, list[int]] = {}
    for index in program.live:
        groups.setdefault(program.steps[index].out.shape, []).append(index)
    order = sorted(groups, key=lambda shape: (layout.numel(shape), len(shape)))
    pieces: list[Piece] = []
    stored: set[int] = set()
    for shape in order:
        if layout.numel(shape):
            pieces.append(_make_piece(program, groups[shape], stored, device))
        stored.update(groups[shape])
    return tuple(pieces)


def _make_piece(program: Program, outs: list[int], stored: set[int], device: str) -> Piece:
    steps = program.steps
    nodes = needed([step.args for step in steps], outs, stored)
    loads: list[Ref] = []
    consts: list[int] = []
    position = {node: line for line, node in enumerate(nodes)}

    def local(ref: Ref) -> Ref:
        if ref >= CONST:
            consts.append(ref - CONST)
            return CONST + len(consts) - 1
        if ref in position:
            return position[ref]
        if ref not in loads:
            loads.append(ref)
        return ~loads.index(ref)

    lines = []
    for node in nodes:
        step = steps[node]
        refs = tuple(map(local, step.args))
        op = step.op
        if op.by_scalar is not None and refs[-1] >= CONST:
            op = op.by_scalar
        lines.append(Line(op, refs, step.common, step.out.code))
    reads = [steps[ref].out if ref >= 0 else program.inputs[~ref] for ref in loads]
    results = [steps[node].out for node in outs]
    shape = results[0].shape
    sizes, walks = layout.collapse(
        shape, [layout.expand(spec.shape, spec.stride, shape) for spec in results + reads]
    )
    lanes = 1
    if device == "cuda":
        lanes = _lanes(sizes, walks, len(results), results + reads, len(lines))
    reach = max(
        sum((n - 1) * s for n, s in zip(sizes, walk, strict=True)) * ITEMSIZE[spec.code]
        for walk, spec in zip(walks, results + reads, strict=True)
    )
    # from here on in the order of a kernel's parameters
    walks = walks[len(results) :] + walks[: len(results)]
    operands = [
        Operand(spec.code, axes_of(walk)) for spec, walk in zip(reads + results, walks, strict=True)
    ]
    plan = Plan(
        device=device,
        loads=tuple(operands[: len(reads)]),
        consts=tuple(program.consts[k] for k in consts),
        lines=tuple(lines),
        stores=tuple((position[k], to) for k, to in zip(outs, operands[len(reads) :], strict=True)),
        rank=len(sizes),
        lanes=lanes,
        wide=max(reach, layout.numel(shape)) >= 1 << 31,
        relaxed=program.relaxed,
    )
    strides = [
        stride
        for walk, operand in zip(walks, operands, strict=True)
        for stride, how in zip(walk, operand.axes, strict=True)
        if how == STRIDED
    ]
    return Piece(
        plan=plan,
        loads=tuple(loads),
        consts=tuple(consts),
        stores=tuple(outs),
        numel=layout.numel(shape),
        numbers=(*(*sizes[:-1], sizes[-1] // lanes)[1:], *strides),
    )


def unvectorised(piece: Piece) -> Piece:
    """The same kernel with one element per thread, for pointers that are not 16-byte aligned."""
    plan, numbers = piece.plan, list(piece.numbers)
    if plan.rank > 1:
        numbers[plan.rank - 2] *= plan.lanes  # the size of the innermost axis
    return replace(piece, plan=replace(plan, lanes=1), numbers=tuple(numbers))


def axes_of(walk: Ints) -> Ints:
    """How an operand with these strides goes along each axis."""
    axes = [STRIDED if stride else BROADCAST for stride in walk]
    if walk[-1] == 1:
        axes[-1] = UNIT
    return tuple(axes)


# elements between neighbours up to which one thread reads several of them, from one cache line
NEAR = 8


def _lanes(sizes: Ints, strides: list[Ints], stores: int, operands: list[Spec], length: int) -> int:
    """How many neighbours one thread can move at once: 16 bytes of the narrowest operand.

    stores: how many of the operands, the first, are results.
    """
    if any(walk[-1] not in (0, 1) for walk in strides[:stores]):
        return 1
    if any(walk[-1] > NEAR for walk in strides):
        return 1
    lanes = min(8, 16 // min(ITEMSIZE[spec.code] for spec in operands))
    while lanes > 1 and lanes * length > 256:  # compile time grows with the body
        lanes //= 2
    rows = [stride for walk in strides if walk[-1] == 1 for stride in walk[:-1]]
    fits = len(sizes) == 1 or all(number % lanes == 0 for number in (sizes[-1], *rows))
    return lanes if fits else 1
