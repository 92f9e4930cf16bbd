"""Rewrites: from a program as it was recorded to one that a row kernel can compute. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from ..dtypes import CODES
from ..layout import Ints, collapse, contiguous, expand
from ..ops.reductions import Reduction
from ..ops.row import Op
from .program import (
    CONST,
    Outside,
    Pointwise,
    Program,
    Reduced,
    Ref,
    RowsOf,
    Spec,
    Statistic,
    Step,
    View,
)
from .walk import needed


def within(program: Program) -> Program:
    """`program` without the outputs that torch computes, once its kernels have run."""
    steps = program.steps

    def is_apart(step: Step) -> bool:
        return isinstance(steps[step.of] if isinstance(step, Statistic) else step, Outside)

    outputs = [output for output in program.outputs if not is_apart(steps[output.step])]
    return replace(program, outputs=tuple(outputs))


def reading(program: Program, stored: Container[int]) -> tuple[Program, list[tuple[int, int]]]:
    """`program` whose outputs are computed from steps that are in memory, and views of these, as
    from further Inputs; and of each of these the step, and how many elements behind it begins."""
    found: dict[tuple[int, int, Spec], Ref] = {}

    def read(ref: Ref) -> Ref:
        if not 0 <= ref < CONST:
            return ref
        step = program.steps[ref]
        base, offset = (step.args[0], step.offset) if isinstance(step, View) else (ref, 0)
        if base not in stored:
            return ref
        return found.setdefault((base, offset, step.out), ~(len(program.inputs) + len(found)))

    steps, wanted = list(program.steps), {*program.live}
    for k, step in reversed([*enumerate(steps)]):
        if k in wanted:
            args, out = tuple(map(read, step.args)), step.out
            wanted.update(ref for ref in args if 0 <= ref < CONST)
        else:  # what is computed elsewhere may have any shape, and read anything
            args, out = (), Spec(step.out.code, (), ())
        steps[k] = replace(step, args=args, out=out)  # type: ignore[arg-type]
    inputs = (*program.inputs, *(spec for _, _, spec in found))
    places = [(base, offset) for base, offset, _ in found]
    return replace(program, steps=tuple(steps), inputs=inputs), places


def unfolded(program: Program) -> tuple[Program, Ints]:
    """`program` in which reductions that torch makes of several ops are these ops, and which step
    of it each step of `program` is."""
    steps: list[Step] = []
    places: list[int] = []

    def moved(ref: Ref) -> Ref:
        return places[ref] if 0 <= ref < CONST else ref

    for step in program.steps:
        args = tuple(map(moved, step.args))
        if isinstance(step, Reduced) and step.op.components:
            first = args[0]
            whole = steps[first].out if first >= 0 else program.inputs[~first]
            steps += _components(replace(step, args=args), whole, len(steps))
        elif isinstance(step, Statistic):
            steps.append(replace(step, args=args, of=places[step.of]))
        else:
            steps.append(replace(step, args=args))
        places.append(len(steps) - 1)
    outputs = tuple([replace(output, step=places[output.step]) for output in program.outputs])
    return replace(program, steps=tuple(steps), outputs=outputs), tuple(places)


def _components(step: Reduced, whole: Spec, start: int) -> list[Step]:
    """The steps of which `step`, over rows of `whole`, is made, from position `start` on."""
    op = step.op
    assert isinstance(op, Reduction)
    operands = dict(zip(op.names, step.args, strict=True))
    number = op.kept(whole.shape)
    found: list[Step] = []
    numbers: set[int] = set()  # of rows

    def read(args: Sequence[str | int]) -> tuple[Ref, ...]:
        return tuple([operands[a] if isinstance(a, str) else start + a for a in args])

    def common(args: Sequence[str | int]) -> str:
        codes = {found[a].out.code for a in args if isinstance(a, int)}
        return codes.pop() if codes else step.common  # of one dtype each

    for k, one in enumerate(op.components):
        reduces = isinstance(one.op, Reduction)
        if reduces or numbers.issuperset(one.args):  # type: ignore[arg-type]
            numbers.add(k)
        lies = (number, contiguous(number)) if k in numbers else (whole.shape, whole.stride)
        code, result = common(one.args), one.op.result
        out = Spec(CODES.get(result, code), *lies)  # type: ignore[arg-type]
        found.append((Reduced if reduces else Pointwise)(one.op, read(one.args), code, out))
    found[-1] = replace(found[-1], out=step.out)
    return found


def straightened(program: Program, shape: Ints, dims: int) -> tuple[Program, Ints]:
    """`program` whose rows of `shape` lie along as few dimensions as all that is in memory allows,
    of the last `dims`; and the sizes of these."""
    row = shape[len(shape) - dims :]
    inputs, steps = len(program.inputs), program.steps
    specs = [*program.inputs, *[step.out for step in steps]]
    # with all dimensions in front; a tensor that does not repeat along all of a row is expanded
    heads, walks = list[tuple[Ints, Ints]](), dict[int, Ints]()
    for k, spec in enumerate(specs):
        lead = len(shape) - len(spec.shape)
        own, stride = (1,) * lead + spec.shape, (0,) * lead + spec.stride
        heads.append((own[:-dims], stride[:-dims]))
        if any(n != 1 for n in own[-dims:]):
            walks[k] = expand(own[-dims:], stride[-dims:], row)
    # steps that are not stored are nowhere, and other Inputs than those of these are not read
    args = [step.args[:1] if _is_of_groups(step) else step.args for step in steps]
    read = {~ref for k in needed(args, program.live) for ref in args[k] if ref < 0}
    places = [k for k in walks if k in read or k - inputs in program.live]
    sizes, (_, *merged) = collapse(row, [contiguous(row), *[walks[k] for k in places]])
    found = dict(zip(places, merged, strict=True))
    once, nowhere = (1,) * len(sizes), (0,) * len(sizes)

    def straight(k: int) -> Spec:
        (outer, stride), own = heads[k], sizes if k in walks else once
        return Spec(specs[k].code, outer + own, stride + found.get(k, nowhere))

    made = [replace(step, out=straight(k)) for k, step in enumerate(steps, inputs)]
    return replace(program, inputs=tuple(map(straight, range(inputs))), steps=tuple(made)), sizes


def _is_of_groups(step: Step) -> bool:
    """Whether it reduces groups, and so reads weights in the next kernel alone."""
    return isinstance(step, Reduced) and isinstance(step.op, Reduction) and step.op.groups > 0


def combining(program: Program, left: Mapping[int, int], spec: Spec, dims: int) -> Program:
    """`program` whose reductions are of what blocks have left of rows that they share, which lay
    along `dims` dimensions.

    left: how many numbers each block leaves for a reduction, by its step; each of these is a
    further Input, of `spec`, along whose last dimension the blocks lie.
    """

    def short(known: Spec) -> Spec:
        shape, stride = known.shape[: 1 - dims or None], known.stride[: 1 - dims or None]
        return Spec(known.code, shape, stride)

    steps = [replace(step, out=short(step.out)) for step in program.steps]
    inputs = list(map(short, program.inputs))
    for index, count in left.items():
        step = steps[index]
        numbers = tuple([~(len(inputs) + k) for k in range(count)])
        inputs += [spec] * count
        steps[index] = replace(step, args=(*numbers, *[arg for arg in step.args if arg >= CONST]))
    return replace(program, steps=tuple(steps), inputs=tuple(inputs))


def seen(program: Program, rows: RowsOf) -> Program:
    """`program` as it is read with `rows` of groups: with its channels as two dimensions."""

    def spec(known: Spec) -> Spec:
        return Spec(known.code, *rows.seen(known.shape, known.stride))

    steps = [
        step if isinstance(step, Statistic) else replace(step, out=spec(step.out))
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps), inputs=tuple(map(spec, program.inputs)))


def turned(program: Program, rows: RowsOf, following: Container[int]) -> tuple[Program, Ints]:
    """`program` as it is read with `rows` whose dimensions are not the last, or several; and which
    Input of it each Input is.

    following: steps that are reductions, or follow from one. What is read with numbers of rows that
    have no dimensions for these may be read otherwise with rows: then it is two Inputs.
    """
    steps, inputs, places = list[Step](), list[Spec](), list[int]()

    def is_number(index: int) -> bool:
        return index in following and len(program.steps[index].out.shape) < len(rows.shape)

    def moved(ref: Ref, numbers: bool) -> Ref:
        if ref >= 0:
            return ref
        known = program.inputs[~ref]
        spec = Spec(known.code, *rows.seen(known.shape, known.stride, numbers))
        for k, (place, other) in enumerate(zip(places, inputs, strict=True)):
            if place == ~ref and other == spec:
                return ~k
        places.append(~ref)
        inputs.append(spec)
        return ~(len(inputs) - 1)

    for index, step in enumerate(program.steps):
        numbers = is_number(index) and not isinstance(step, Reduced)
        args = tuple([moved(ref, numbers) for ref in step.args])
        shape, stride = rows.seen(step.out.shape, step.out.stride, is_number(index))
        steps.append(replace(step, args=args, out=Spec(step.out.code, shape, stride)))
    return replace(program, steps=tuple(steps), inputs=tuple(inputs)), tuple(places)


def with_statistics(program: Program, index: int) -> tuple[Program, tuple[int, ...]]:
    """`program` with all statistics of step `index`, which steps these are.

    Each follows from that step, and has its dimensions: numbers of rows could be taken for a row.
    """
    steps = list(program.steps)
    op, common, out = steps[index].op, steps[index].common, steps[index].out
    assert isinstance(op, Reduction)
    shape = (out.shape[0], op.groups, *(1 for _ in out.shape[2:]))
    spec = Spec(out.code, shape, contiguous(shape))
    own = [k for k, step in enumerate(steps) if isinstance(step, Statistic) and step.of == index]
    for which, statistic in enumerate(op.statistics):
        made = Statistic(statistic, (index,), common, spec, index, which)
        if len(own) == which:
            own.append(len(steps))
            steps.append(made)
        steps[own[which]] = made
    return replace(program, steps=tuple(steps)), tuple(own)


def finishing(program: Program, index: int, statistics: Sequence[int], op: Op) -> Program:
    """`program` in which step `index` is `op`, of its tensors and of further Inputs: these are its
    statistics, which no step gives."""
    step, known = program.steps[index], len(program.inputs)
    args = [arg for arg in step.args if arg < CONST]
    args += [~(known + k) for k in range(len(statistics))]
    inputs = (*program.inputs, *(program.steps[k].out for k in statistics))
    steps = list(program.steps)
    steps[index] = Pointwise(op, tuple(args), step.common, step.out)
    outputs = [output for output in program.outputs if output.step not in statistics]
    return Program(tuple(steps), inputs, program.consts, tuple(outputs), program.relaxed)
