"""Row kernels: from a program that reduces rows to the kernels that compute it in torch's order.

Pure, as `plan` is. What follows from reductions, or has the shape of what is reduced, one kernel
computes (`row_plan`); where torch has several blocks share a row, it is two, of which the second
combines what the blocks of the first have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import layout
from ..layout import Ints, contiguous, iteration, numel, order_of
from ..ops.groups import finished
from ..ops.reductions import Reduction
from ..program.program import (
    CONST,
    LEFT,
    STORED,
    Join,
    Output,
    Outside,
    Program,
    Reduced,
    RowsOf,
    Spec,
    Statistic,
    Step,
    View,
)
from ..program.rewrite import (
    combining,
    finishing,
    reading,
    seen,
    straightened,
    turned,
    unfolded,
    with_statistics,
    within,
)
from ..program.walk import needed
from . import again, text
from . import plan as pointwise
from .division import PARTIAL, Scheme, scheme_of
from .maps import move_of
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
    op, (operand, *_) = steps[reduced[0]].op, steps[reduced[0]].args
    if isinstance(op, Reduction) and op.groups:
        return _of_groups(program, reduced[0], op, device, processors)
    whole, axes = spec_of(program, operand), op.axes
    shape = whole.shape
    rows, columns = op.count(shape)
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
    following, apart = followers(program), _stored_first(program)
    order = order_of(shape, whole.stride, axes)
    ours = following | _along(program, reduced[0]) if blocks == 1 else following
    others = apart.union(program.live) - ours  # and what these are computed from come first
    ours -= {*needed([step.args for step in steps], apart | others)}
    row_program, pieces = _parted(program, ours, device)
    row_program, places = reading(row_program, apart)
    inputs: Sequence[int] = range(len(row_program.inputs))
    outer, row = shape[:-1], shape[-1:]
    rows_of = RowsOf(shape, order, len(axes), threads, blocks, 0, interleaved)
    if not rows_of.as_they_lie:
        row_program, inputs = turned(row_program, rows_of, following)
        shape = tuple([shape[k] for k in order])
        outer = shape[: -len(axes)]
        row_program, row = straightened(row_program, shape, len(axes))
    shape = outer + row
    known, given = len(inputs), len(program.inputs)

    def placed(piece: Piece) -> Piece:
        loads, offsets = [], list(piece.offsets)
        for k, ref in enumerate(piece.loads):
            which = inputs[~ref] if ~ref < known else -1
            if which >= given:
                base, offset = places[which - given]
                loads.append(base)
                offsets[k] = offset * ITEMSIZE[steps[base].out.code]
            else:
                loads.append(~which if which >= 0 else LEFT + ~ref - known)
        return replace(piece, loads=tuple(loads), offsets=tuple(offsets))

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


def completed(program: Program, device: str) -> Program:
    """As `again.completed`; with what torch computes others from, and with what rows read through
    views, or in other places, which is stored first."""
    following, steps = followers(program), program.steps
    more = _stored_first(program)
    for output in program.outputs:
        step = steps[output.step]
        more |= {*step.args} if isinstance(step, Outside) else set()
    outputs = {output.step: output for output in program.outputs}
    outputs |= {k: Output(k, STORED) for k in more if 0 <= k < CONST and k not in outputs}
    every = [outputs[step] for step in sorted(outputs)]
    rest = replace(program, outputs=tuple([x for x in every if x.step not in following]))
    every = [x for x in every if x.step in following]
    every += again.completed(rest, device).outputs
    return replace(program, outputs=tuple(sorted(every, key=lambda output: output.step)))


def _stored_first(program: Program) -> set[int]:
    """The steps that have to be in memory for the rows of `program`, for no row kernel reads index
    maps: what is viewed, joined, or gives elements in other places. Where rows would be read across
    a view it is what is computed from that: a kernel that is none of rows sees to it."""
    steps, following = program.steps, followers(program)
    reduced = [k for k in sorted(following) if isinstance(steps[k], Reduced)]
    if not reduced:
        return set()
    ours, first = following | _along(program, reduced[0]), steps[reduced[0]]
    assert isinstance(first, Reduced)
    whole = spec_of(program, first.args[0])
    inner = order_of(whole.shape, whole.stride, first.op.axes)[-1]
    size = numel(whole.shape)

    def is_across(step: Step) -> bool:
        if isinstance(step, Reduced) or step.out.shape != whole.shape:
            return False
        read = [steps[ref] for ref in step.args if 0 <= ref < CONST]
        views = [x.out for x in read if isinstance(x, View)]
        walks = [layout.expand(view.shape, view.stride, whole.shape) for view in views]
        return any(again.is_far(size, walk[inner]) for walk in walks)

    found, met = set[int](), set[int]()
    stack = [k for k in program.live if k in ours]
    while stack:
        for ref in steps[stack.pop()].args:
            if not 0 <= ref < CONST or ref in met:
                continue
            met.add(ref)
            step = steps[ref]
            if isinstance(step, View):
                found.add(step.args[0])
            elif isinstance(step, Join) or move_of(step) is not None or is_across(step):
                found.add(ref)
            else:
                stack.append(ref)
    return found


def _along(program: Program, reduced: int) -> set[int]:
    """The steps whose values lie as what step `reduced` reduces, and are at hand where a row is."""
    first = program.steps[reduced]
    assert isinstance(first, Reduced)
    whole, axes = spec_of(program, first.args[0]), first.op.axes
    order = order_of(whole.shape, whole.stride, axes)
    return {
        k for k, step in enumerate(program.steps)
        if step.out.shape == whole.shape
        and order_of(whole.shape, step.out.stride, axes) == order
        and not (isinstance(step, (View, Join)) or move_of(step))
    }  # fmt: skip


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
