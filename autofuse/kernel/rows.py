"""Row kernels: from a program that reduces rows to the kernels that compute it in torch's order.

Pure, as `plan` is. What follows from reductions, or has the shape of what is reduced, one kernel
computes (`row_plan`); where torch has several blocks share a row, it is two, of which the second
combines what the blocks of the first have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..layout import Ints, contiguous, iteration, numel, order_of
from ..ops.groups import finished
from ..ops.reductions import Reduction
from ..program.program import LEFT, Output, Outside, Program, Reduced, RowsOf, Spec, Statistic
from ..program.rewrite import (
    combining,
    finishing,
    seen,
    straightened,
    turned,
    unfolded,
    with_statistics,
    within,
)
from ..program.walk import needed
from . import plan as pointwise
from . import text
from .division import PARTIAL, Scheme, scheme_of
from .plan import Piece, Plan
from .row_plan import RowPiece, RowPlan, spec_of
from .source import ITEMSIZE, THREADS_PER_BLOCK, Source

AnyPlan = Plan | RowPlan


def source_of(plan: AnyPlan, target: str = "") -> Source:
    """What the compiler gets to see of `plan`, of either kind."""
    if isinstance(plan, Plan):
        return text.source_of(plan, target)
    functions = [text.render(function, target) for function in plan.functions]
    return Source(
        name=plan.name,
        text="".join(functions),
        device=plan.device,
        loads=plan.loads,
        stores=tuple(operand for _, operand in plan.stores),
        consts=plan.codes,
        rank=plan.rank,
        lanes=4 if any(plan.rows.aligned) else 1,
        wide=plan.wide,
        relaxed=False,
        rows=plan.rows,
    )


def launch_of(piece: Piece) -> tuple[int, int, int]:
    """What a kernel counts (elements, groups of lanes or rows), its blocks, and threads of each."""
    plan = piece.plan
    if isinstance(plan, RowPlan):
        end = plan.rank - 1
        count = piece.numel // numel(piece.numbers[end - plan.rows.axes : end])
        shared = piece.left // count if plan.rows.shared else 1
        return count, -(-count // plan.rows.together) * shared, plan.rows.block
    if plan.spaced:
        columns = piece.numbers[plan.rank - 1]
        count = piece.numel // columns * pointwise.groups_of(columns, plan.lanes)
        return count, -(-count // THREADS_PER_BLOCK), THREADS_PER_BLOCK
    count = piece.numel if plan.rank == 1 else piece.numel // plan.lanes
    groups = -(-piece.numel // plan.lanes)
    return count, -(-groups // THREADS_PER_BLOCK), THREADS_PER_BLOCK


def make_pieces(
    program: Program, device: str, processors: tuple[int, int] = (132, 2048)
) -> tuple[Piece, ...]:
    """The kernels that compute the outputs of `program`, with reductions or without.

    Where several blocks share a row, another kernel combines what they have found. What torch
    computes once they have run is not theirs. processors: as in `scheme_of`.
    """
    if any(isinstance(program.steps[output.step], Outside) for output in program.outputs):
        return make_pieces(within(program), device, processors)
    if any(isinstance(step, Reduced) and step.op.components for step in program.steps):
        program, places = unfolded(program)
        known = {place: index for index, place in enumerate(places)}
        return tuple([
            replace(piece, stores=tuple([known.get(k, k) for k in piece.stores]),
                    loads=tuple([known.get(ref, ref) for ref in piece.loads]))
            for piece in make_pieces(program, device, processors)
        ])  # fmt: skip
    steps = program.steps
    wanted = needed([step.args for step in steps], program.live)
    reduced = [index for index in wanted if isinstance(steps[index], Reduced)]
    if not reduced:
        return pointwise.make_pieces(program, device)
    first = steps[reduced[0]]
    if isinstance(first.op, Reduction) and first.op.groups:
        return _of_groups(program, reduced[0], first.op, device, processors)
    whole, axes = spec_of(program, first.args[0]), first.op.axes
    shape = whole.shape
    rows, columns = first.op.count(shape)
    schemes = {}
    for index in reduced:
        step = steps[index]
        x = spec_of(program, step.args[0])
        schemes[index] = scheme = scheme_of(
            step.op.name, rows, columns, ITEMSIZE[x.code], processors,
            iteration(shape, x.stride, axes),
        )  # fmt: skip
        assert isinstance(scheme, Scheme), scheme
    ((threads, blocks, interleaved),) = {
        (x.threads, x.blocks, x.interleaved) for x in schemes.values()
    }
    following = followers(program)
    order = order_of(shape, whole.stride, axes)
    along = {
        k for k, step in enumerate(steps)
        if step.out.shape == shape and order_of(shape, step.out.stride, axes) == order
    }  # fmt: skip
    ours = following | along if blocks == 1 else following
    row_program, pieces = _parted(program, ours, device)
    inputs: Sequence[int] = range(len(program.inputs))
    outer, row = shape[:-1], shape[-1:]
    rows_of = RowsOf(shape, order, len(axes), threads, blocks, 0, interleaved)
    if not rows_of.as_they_lie:
        row_program, inputs = turned(row_program, rows_of, following)
        shape = tuple([shape[k] for k in order])
        outer = shape[: -len(axes)]
        row_program, row = straightened(row_program, shape, len(axes))
    shape = outer + row
    known = len(inputs)

    def placed(piece: Piece) -> Piece:
        loads = [~inputs[~ref] if ~ref < known else LEFT + ~ref - known for ref in piece.loads]
        return replace(piece, loads=tuple(loads))

    if blocks == 1:
        return (*pieces, placed(RowPiece(row_program, shape, following, schemes, len(row)).piece()))
    left = _left_by(outer, blocks, interleaved > 1)
    part = RowPiece(row_program, shape, following, schemes, len(row), left).piece()
    counts = {index: PARTIAL.get(steps[index].op.name, 1) for index in reduced}
    ends = {
        k: replace(x, kernel="blocks", vec=1, uneven=False, anchored=False)
        for k, x in schemes.items()
    }
    ending = combining(row_program, counts, left, len(row))
    end = RowPiece(ending, left.shape, following, ends).piece()
    return (*pieces, placed(part), placed(end))


def _left_by(outer: Ints, blocks: int, interleaved: bool) -> Spec:
    """What blocks leave of rows that they share; those that are interleaved are so there, too."""
    shape = (*outer, blocks)
    first, *others = contiguous((blocks, *outer))
    return Spec("f32", shape, (*others, first) if interleaved else contiguous(shape))


def _parted(program: Program, ours: set[int], device: str) -> tuple[Program, tuple[Piece, ...]]:
    """`program` with the outputs that are computed with its rows, those of steps of `ours`; and the
    kernels of the others."""
    own = tuple(output for output in program.outputs if output.step in ours)
    others = tuple(output for output in program.outputs if output.step not in ours)
    pieces = pointwise.make_pieces(replace(program, outputs=others), device) if others else ()
    return replace(program, outputs=own), pieces


def _of_groups(
    program: Program, index: int, op: Reduction, device: str, processors: tuple[int, int]
) -> tuple[Piece, ...]:
    """Those of a program that reduces groups of channels, by `op` in step `index`: one gives
    statistics of rows, and the next, which has all processors, what has the shape of the rows."""
    x, *_ = program.steps[index].args
    shape, following = spec_of(program, x).shape, followers(program)
    ours = {k for k, step in enumerate(program.steps) if step.out.shape == shape}
    own, pieces = _parted(program, following | ours, device)
    count, columns = op.count(shape)
    size = ITEMSIZE[spec_of(program, x).code]
    scheme = scheme_of(op.name, count, columns, size, processors)
    assert isinstance(scheme, Scheme), scheme
    order, dims = tuple(range(len(shape))), len(op.axes)
    rows = RowsOf(shape, order, dims, scheme.threads, scheme.blocks, op.groups)
    parts, statistics = with_statistics(seen(own, rows), index)
    outputs = tuple(map(Output, statistics))
    outer = (shape[0], op.groups)
    straight, row = straightened(replace(parts, outputs=outputs), outer + rows.row, dims)
    first = RowPiece(straight, outer + row, followers(straight), {index: scheme}, len(row)).piece()
    places = {k: k for k in statistics}
    saved = {*statistics} & {*program.live}
    assert len(saved) in (0, len(statistics)), "a node saves all of them"
    if not saved:  # they are left to the next kernel alone
        places = {k: LEFT + which for which, k in enumerate(statistics)}
        first = replace(first, left=count)
    first = replace(first, stores=tuple([places[k] for k in first.stores]))
    rest = finishing(parts, index, statistics, finished(op, shape))
    known = len(program.inputs)
    ends = [
        replace(piece, loads=tuple([
            ref if ~ref < known else places[statistics[~ref - known]] for ref in piece.loads
        ]))
        for piece in pointwise.make_pieces(rest, device)
    ]  # fmt: skip
    return (*pieces, first, *ends)


def unvectorised(piece: Piece) -> Piece:
    """The same kernel with one element per access, for pointers that are not 16-byte aligned."""
    plan = piece.plan
    if not isinstance(plan, RowPlan):
        return pointwise.unvectorised(piece)
    rows = replace(plan.rows, aligned=(False,) * len(plan.rows.aligned))
    return replace(piece, plan=replace(plan, rows=rows))


def followers(program: Program) -> set[int]:
    """The steps that are reductions, or follow from one."""
    found: set[int] = set()
    for index, step in enumerate(program.steps):
        if isinstance(step, (Reduced, Statistic)) or not found.isdisjoint(step.args):
            found.add(index)
    return found
