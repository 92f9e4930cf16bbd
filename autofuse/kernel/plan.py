"""Plans: from a recorded program and its live-outs to the loops that compute them.

Pure: knows nothing of torch tensors, numba or CUDA. A Plan is the part of a program that one kernel
computes, with sizes, strides and scalar values taken out (they are arguments of the kernel), so
that equal Plans share one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import layout
from ..layout import Ints
from ..ops.moves import FILLED, MOVED, Padded
from ..ops.row import Op
from ..program.program import (
    CONST,
    Join,
    Pointwise,
    Program,
    Ref,
    Spec,
    View,
)
from ..program.walk import needed
from . import maps
from .again import AGAIN, FAR_US, better_stored, written
from .maps import NEAR, Computed, Loop, Place, Read, loop_over, tiles, walk_of
from .source import ITEMSIZE, PADDED, ROLLED, STRIDED, UNIT, WARP, Operand, axes_of, numbers_of


@dataclass(frozen=True, slots=True)
class Line:
    """One op of a kernel. refs name loads as ~k, earlier lines as k, Consts as CONST + k."""

    op: Op
    refs: tuple[Ref, ...]
    common: str
    result: str


def named(lines: Sequence[Line]) -> str:
    """What a kernel of these lines is called after."""
    ops = [line.op.name for line in lines]
    return "_".join(ops[:8]) + (f"_and_{len(ops) - 8}" if len(ops) > 8 else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """The structure of one kernel; hashable, and equal for equal kernels."""

    device: str  # "cuda" or "cpu"
    loads: tuple[Operand, ...]
    consts: tuple[type, ...]
    lines: tuple[Line, ...]
    stores: tuple[tuple[int, Operand], ...]  # (line, where to); never empty
    rank: int
    lanes: int  # elements per thread: neighbours, moved by 16-byte accesses where over 1, or...
    wide: bool  # 64-bit index arithmetic
    relaxed: bool = False  # ops contract with each other, 16-bit values are rounded when stored
    spaced: bool = False  # ...WARP elements apart, in rows that are no whole vectors

    @property
    def name(self) -> str:
        """The kernel's name as profilers show it."""
        return f"af_{named(self.lines)}"

    @property
    def inverted(self) -> tuple[bool, ...]:
        """Of each Const, whether the kernel is given its reciprocal."""
        found = [False] * len(self.consts)
        for line in self.lines:
            for role, ref in zip(line.op.roles, line.refs, strict=True):
                if ref >= CONST and role == "inverse":
                    found[ref - CONST] = self.device == "cuda"
        return tuple(found)

    @property
    def vectors(self) -> tuple[bool, ...]:
        """Of each operand, whether its address has to be a multiple of 16."""
        operands = (*self.loads, *(operand for _, operand in self.stores))
        wide = self.lanes > 1 and not self.spaced
        return tuple(wide and operand.axes[-1] == UNIT for operand in operands)


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel of a flush: its Plan, and what stands for its parameters in this program."""

    plan: Any  # a Plan, or a `rows.RowPlan`
    loads: tuple[Ref, ...]  # ~k: Input k; k: the output of step k, stored by an earlier piece
    consts: Ints  # which of the chain's Consts
    stores: Ints  # steps; one in several parts several times
    offsets: Ints  # bytes from where the memory of each load and store begins to the first element
    numel: int  # elements of the loop
    numbers: Ints  # sizes of the inner axes, then strides of the STRIDED axes
    left: int = 0  # blocks, where each leaves a float32 to the next kernel with each of its stores


def make_pieces(program: Program, device: str) -> tuple[Piece, ...]:
    """The kernels that compute the outputs of `program`, which is `completed`.

    One kernel per shape of a live-out: a value of another shape that is dead is computed inside
    the kernel that needs it, one that is live is stored first and read back; or it is stored by the
    kernel that needs it, where that computes each of its elements once, in parts.
    """
    pieces: list[Piece] = []
    targets = _targets(program)
    left, stored = sorted(targets), set[int]()
    while left:
        outs = _next_outs(program, left, stored)
        if layout.numel(program.steps[outs[0]].out.shape):
            together = _together(program, outs, left, stored, device)
            if together is not None:
                others, loop = together
                pieces.append(_make_piece(program, others, loop, device, targets, outs))
                outs = [*outs, *others]
            else:
                outs, loop = _fitting(program, outs, stored, device)
                pieces.append(_make_piece(program, outs, loop, device, targets))
        left = [out for out in left if out not in outs]
        stored = {out for out in program.live if not set(written(program, out)) & {*left}}
    return tuple(pieces)


# where the value of a step is written: a step with memory, and offset and strides in that
Target = tuple[int, int, Ints]


def _targets(program: Program) -> dict[int, list[Target]]:
    """Where the values of steps are written, by those."""
    targets: dict[int, list[Target]] = {}
    for out in program.live:
        step = program.steps[out]
        parts = step.parts if isinstance(step, Join) else ((0, step.out.stride),)
        for ref, (offset, stride) in zip(written(program, out), parts, strict=True):
            targets.setdefault(ref, []).append((out, offset, stride))
    return targets


def _together(
    program: Program, outs: list[int], left: list[int], stored: set[int], device: str
) -> tuple[list[int], Loop] | None:
    """What one kernel computes that computes each element of `outs` once for it, and its loop."""
    rest = [out for out in left if out not in outs]
    if not rest or not any(isinstance(step, View) for step in program.steps):
        return None
    others = _next_outs(program, rest, stored.union(outs))
    if not others:
        return None
    loop = loop_over(program, others, stored)
    if not isinstance(loop, Loop) or 0 in loop.sizes:
        return None
    for out in outs:
        if out not in loop.places or not tiles(
            program.steps[out].out.shape, loop, loop.places[out]
        ):
            return None
        if device == "cuda" and _is_written_across(program, loop, out):
            return None
    return others, loop


def _is_written_across(program: Program, loop: Loop, out: int) -> bool:
    """Whether `loop` would store a step across its rows for longer than a loop of its own takes,
    and to read back what that has stored."""
    spec, (_, speed, launch) = program.steps[out].out, AGAIN["cuda"]
    _, walk = walk_of(spec.stride, loop.places[out][0], len(loop.sizes))
    numel = layout.numel(spec.shape)
    trip = launch + 2 * numel * ITEMSIZE[spec.code] / speed
    return numel * FAR_US > trip and walk[maps.inner_axis(program, loop)] > NEAR


def _fitting(
    program: Program, outs: list[int], stored: set[int], device: str
) -> tuple[list[int], Loop]:
    """As many of `outs` as one kernel had better compute, and its loop."""
    while True:
        loop = loop_over(program, outs, stored)
        apart = better_stored(program, loop, device) if isinstance(loop, Loop) else loop.step
        first = [out for out in outs if out == apart or apart not in _on(program, out)]
        if isinstance(loop, Loop) and (apart not in outs or first == outs):
            return outs, loop
        # the first can be computed, for what it needs is stored if it has to be
        assert len(outs) > 1, "a step that no loop computes"
        outs = first if 0 < len(first) < len(outs) else outs[:1]


def _on(program: Program, out: int, given: set[int] | tuple[()] = ()) -> list[int]:
    """The steps that `out` follows from, and itself."""
    return needed([step.args for step in program.steps], [out], given)


def _next_outs(program: Program, left: list[int], stored: set[int]) -> list[int]:
    """Of the outputs that are left, those of one shape that read none of another shape.

    All of that shape, if possible, and the smallest first: broadcast, they are read by others. None
    where all wait for a Join that is not yet whole.
    """
    joins = {out for out in program.live if isinstance(program.steps[out], Join)} - stored
    shapes = {out: program.steps[out].out.shape for out in left}
    groups: dict[Ints, list[int]] = {}
    for out in left:
        needs = {*_on(program, out, stored)}
        before = shapes.keys() & needs
        if not joins & needs and all(shapes[other] == shapes[out] for other in before):
            groups.setdefault(shapes[out], []).append(out)
    if not groups:
        return []
    counts = Counter(shapes.values())
    shape = min(groups, key=lambda s: (len(groups[s]) < counts[s], layout.numel(s), len(s)))
    return groups[shape]


def _make_piece(
    program: Program,
    outs: list[int],
    loop: Loop,
    device: str,
    targets: dict[int, list[Target]],
    parts: Sequence[int] = (),
) -> Piece:
    """The kernel for `outs`. parts: what it stores besides, wherever the loop computes it."""
    steps = program.steps
    nodes = [(index, place) for index in sorted(loop.places) for place in loop.places[index]]
    loads: list[Read] = []
    consts: list[int] = []
    position: dict[Computed, int] = {node: line for line, node in enumerate(nodes)}

    def local(operand: Computed | Read | Ref) -> Ref:
        if isinstance(operand, Read):
            if operand not in loads:
                loads.append(operand)
            return ~loads.index(operand)
        if isinstance(operand, tuple):
            return position[operand]
        consts.append(operand - CONST)
        return CONST + len(consts) - 1

    lines = []
    for node in nodes:
        step = steps[node[0]]
        assert isinstance(step, Pointwise)
        refs = tuple(map(local, loop.operands[node]))
        op = step.op
        if op.move is not None:
            op = FILLED if isinstance(op.move, Padded) else MOVED
        if op.by_scalar is not None and refs[-1] >= CONST:
            op = op.by_scalar
        for role, ref in zip(op.roles, refs, strict=True):
            assert role != "place" or not loads[~ref].offset, "a place from where no row begins"
        lines.append(Line(op, refs, step.common, step.out.code))
    own: Place = loop.places[max(outs)][0]
    computed: list[Computed] = [(out, own) for out in outs]
    computed += [(part, place) for part in parts for place in loop.places[part]]
    stores, written = list[Read](), list[Computed]()
    for node in computed:
        for memory, offset, stride in targets[node[0]]:
            begins, walk = walk_of(stride, node[1], len(loop.sizes))
            stores.append(Read(memory, offset + begins, walk))
            written.append(node)
    reads = [steps[x.ref].out if x.ref >= 0 else program.inputs[~x.ref] for x in loads]
    results = [steps[index].out for index, _ in written]
    shape = results[0].shape
    every = [*stores, *loads]
    # an axis along which something begins elsewhere stays one: nothing else moves along it alone
    begun = sorted({axis for x in every for axis, *_ in (*x.rolls, *x.pads)})
    alone = [tuple([int(axis == k) for axis in range(len(loop.sizes))]) for k in begun]
    sizes, walks = layout.collapse(loop.sizes, [*[x.walk for x in every], *alone])
    walks, alone = walks[: len(every)], walks[len(every) :]
    axis_of = {axis: own.index(1) for axis, own in zip(begun, alone, strict=True)}
    lanes, spaced = 1, False
    if device == "cuda":
        lanes = _lanes(sizes, walks, len(results), results + reads, len(lines))
        ahead = [x for x, walk in zip(every, walks, strict=True) if walk[-1] >= 0]
        if any(x.offset % lanes for x in ahead):  # they would never be aligned
            lanes = 1
    if device == "cuda" and lanes == 1 and all(walk[-1] in (0, 1) for walk in walks):
        # rows of 511 of bfloat16 go through a chain of three at 0.8 TB/s, those of 513 with four
        # lanes at 2.4 (H100)
        lanes = _busy(sizes[-1], _most_lanes(results + reads, len(lines)))
        spaced = lanes > 1
    wide = is_wide(shape, sizes, walks, results + reads)
    # from here on in the order of a kernel's parameters
    walks = walks[len(results) :] + walks[: len(results)]
    begins = [{axis_of[axis]: at for axis, *at in (*x.rolls, *x.pads)} for x in [*loads, *stores]]
    operands = [
        Operand(spec.code, axes_of(walk, own, PADDED if x.pads else ROLLED))
        for x, spec, walk, own in zip(
            [*loads, *stores], reads + results, walks, begins, strict=True
        )
    ]
    plan = Plan(
        device=device,
        loads=tuple(operands[: len(reads)]),
        consts=tuple(program.consts[k] for k in consts),
        lines=tuple(lines),
        stores=tuple(
            (position[node], to) for node, to in zip(written, operands[len(reads) :], strict=True)
        ),
        rank=len(sizes),
        lanes=lanes,
        wide=wide,
        relaxed=program.relaxed,
        spaced=spaced,
    )
    return Piece(
        plan=plan,
        loads=tuple(x.ref for x in loads),
        consts=tuple(consts),
        stores=tuple(x.ref for x in stores),
        offsets=tuple(
            x.offset * ITEMSIZE[spec.code]
            for x, spec in zip([*loads, *stores], reads + results, strict=True)
        ),
        numel=layout.numel(shape),
        numbers=(
            *(*sizes[:-1], *_last_sizes(sizes[-1], lanes, spaced))[1:],
            *numbers_of(walks, operands, begins),
        ),
    )


def is_wide(
    shape: Ints, sizes: Sequence[int], walks: Sequence[Ints], specs: Sequence[Spec]
) -> bool:
    """Whether a kernel needs 64-bit indices: for its elements, or how far its operands reach."""
    reach = max(
        sum((n - 1) * abs(s) for n, s in zip(sizes, walk, strict=True)) * ITEMSIZE[spec.code]
        for walk, spec in zip(walks, specs, strict=True)
    )
    return max(reach, layout.numel(shape)) >= 1 << 31


def unvectorised(piece: Piece) -> Piece:
    """The same kernel with an element per access, for pointers that are not 16-byte aligned."""
    plan, rank, numbers = piece.plan, piece.plan.rank, piece.numbers
    columns = piece.numel if rank == 1 else numbers[rank - 2] * plan.lanes
    operands = [*plan.loads, *(operand for _, operand in plan.stores)]
    near = all(operand.axes[-1] != STRIDED for operand in operands)
    lanes = _busy(columns, plan.lanes) if near else 1
    return replace(
        piece,
        plan=replace(plan, lanes=lanes, spaced=lanes > 1),
        numbers=(
            *numbers[: max(rank - 2, 0)],
            *_last_sizes(columns, lanes, lanes > 1)[rank == 1 :],
            *numbers[rank - 1 :],
        ),
    )


def _lanes(sizes: Ints, strides: list[Ints], stores: int, operands: list[Spec], length: int) -> int:
    """How many neighbours one thread can move at once: 16 bytes of the narrowest operand.

    stores: how many of the operands, the first, are results.
    """
    if any(walk[-1] not in (0, 1) for walk in strides[:stores]):
        return 1
    if any(abs(walk[-1]) > NEAR for walk in strides):
        return 1
    lanes = _most_lanes(operands, length)
    rows = [stride for walk in strides if walk[-1] == 1 for stride in walk[:-1]]
    fits = len(sizes) == 1 or all(number % lanes == 0 for number in (sizes[-1], *rows))
    return lanes if fits else 1


def _most_lanes(operands: list[Spec], length: int) -> int:
    """As many as 16 bytes of the narrowest operand are, for a body of so many lines."""
    lanes = min(8, 16 // min(ITEMSIZE[spec.code] for spec in operands))
    while lanes > 1 and lanes * length > 256:  # compile time grows with the body
        lanes //= 2
    return lanes


def _busy(columns: int, lanes: int) -> int:
    """At most so many spaced lanes, of which in a row a quarter has no work, or less."""
    while lanes > 1 and 3 * groups_of(columns, lanes) * lanes > 4 * columns:
        lanes //= 2
    return lanes


def _last_sizes(columns: int, lanes: int, spaced: bool) -> list[int]:
    """What a kernel is given as the size of the last axis."""
    return [groups_of(columns, lanes), columns] if spaced else [columns // lanes]


def groups_of(columns: int, lanes: int) -> int:
    """How many threads take a row whose lanes are spaced: of whole warps."""
    return -(-columns // (WARP * lanes)) * WARP
