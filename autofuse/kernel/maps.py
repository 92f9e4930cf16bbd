"""Index maps: which element of a value one position of a kernel's loop reads, through views.

Pure integer arithmetic. A value that is computed inside a kernel is a function of its own indices;
a view of it is not copied but read at other indices, which are found here. A step that is read at
several places of the loop is computed once for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from dataclasses import dataclass, replace

from ..layout import Ints, contiguous
from ..ops.moves import Flipped, Move, Padded, Reshaped, Rolled
from ..program.program import CONST, Join, Pointwise, Program, Ref, Spec, Step, View

# elements between neighbours up to which one thread reads several of them, from one cache line
NEAR = 8
LINES = 192  # that a loop computes at most: their number may double with each view that is read

# Of each axis of a value: the index where the loop begins, and how far it moves along that axis
# with each axis of the loop
Place = tuple[tuple[int, Ints], ...]


@dataclass(frozen=True, slots=True)
class Read:
    """An operand in memory, as a loop goes through it."""

    ref: Ref  # an Input, or a step whose value is stored
    offset: int  # elements from where its memory begins to the first one that is read
    walk: Ints  # elements along each axis of the loop
    # axes of the loop, from which element each begins, and the size of the dimension in memory
    rolls: tuple[tuple[int, int, int], ...] = ()
    pads: tuple[tuple[int, int, int], ...] = ()  # the same, from less than none on and beyond it


Computed = tuple[int, Place]  # a step, and where it is computed
Found = Computed | Read | Ref  # a Const as its reference


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop of one kernel, and all that it computes."""

    sizes: Ints
    places: dict[int, list[Place]]  # by step
    operands: dict[Computed, list[Found]]


@dataclass(frozen=True, slots=True)
class Apart:
    """A step that has to be stored: no loop computes it where it is read, or at too many places."""

    step: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """An axis of the loop that has to be two, for it joins two of a value."""

    axis: int
    inner: int  # size of the second


def loop_over(program: Program, outs: list[int], given: Container[Ref]) -> Loop | Apart:
    """The loop that computes the steps `outs`, all of one shape; the values of `given` are stored.

    It has an axis for each of theirs, or several where a view has joined those of what it reads.
    """
    parts = [[size] for size in program.steps[outs[0]].out.shape]
    while True:
        found = _loop_over(program, outs, given, parts)
        if not isinstance(found, _Cut):
            return found
        axis = found.axis
        for part in parts:
            if axis < len(part):
                part[axis : axis + 1] = [part[axis] // found.inner, found.inner]
                break
            axis -= len(part)


def _loop_over(
    program: Program, outs: list[int], given: Container[Ref], parts: list[list[int]]
) -> Loop | Apart | _Cut:
    steps = program.steps
    sizes = tuple(size for part in parts for size in part)
    own = _own_place(parts, len(sizes))
    places: dict[int, dict[Place, None]] = {index: {own: None} for index in outs}
    operands: dict[Computed, list[Found]] = {}
    for index in range(max(outs), -1, -1):
        for place in places.get(index, ()):
            step, found = steps[index], []
            move = move_of(step)
            at = place if move is None else _moved(program, step, move, place, sizes)
            if isinstance(at, _Cut):
                return at
            if at is None:
                return Apart(index)
            for ref in step.args:
                operand = _operand(program, given, ref, at, sizes)
                if isinstance(move, (Rolled, Padded)) and move.by and ref < CONST:
                    own = program.inputs[~ref] if ref < 0 else steps[ref].out
                    operand = _begun(operand, index, move, place, own)
                if isinstance(operand, (Apart, _Cut)):
                    return operand
                if isinstance(operand, tuple):
                    places.setdefault(operand[0], {})[operand[1]] = None
                found.append(operand)
            operands[index, place] = found
        if len(places.get(index, ())) > 1 and len(operands) > LINES:
            return Apart(index)
    return Loop(sizes, {step: [*found] for step, found in places.items()}, operands)


def inner_axis(program: Program, loop: Loop) -> int:
    """The innermost axis of `loop` in the memory of its last step, past those that have together no
    more than NEAR elements."""
    last, axis, near = max(loop.places), 0, 1
    _, walk = walk_of(program.steps[last].out.stride, loop.places[last][0], len(loop.sizes))
    for step, axis in sorted((step, axis) for axis, step in enumerate(walk)):
        near *= loop.sizes[axis] if step else 1
        if near > NEAR:
            break
    return axis


def across(program: Program, loop: Loop) -> dict[Computed, set[Read]]:
    """What is read across its rows for each step of `loop`, by where that is computed."""
    if not loop.sizes:
        return {}
    inner = inner_axis(program, loop)
    found: dict[Computed, set[Read]] = {}
    for node in sorted(loop.operands):
        found[node] = set()
        for operand in loop.operands[node]:
            if isinstance(operand, Read) and abs(operand.walk[inner]) > NEAR:
                found[node].add(operand)
            elif isinstance(operand, tuple):
                found[node] |= found[operand]
    return found


def tiles(shape: Ints, loop: Loop, places: list[Place]) -> bool:
    """Whether a loop that computes a value of `shape` at `places` computes each element once."""
    moves = [move for _, move in places[0]]
    if any([move for _, move in place] != moves for place in places):
        return False
    extents, used = [], set[int]()
    for move in moves:
        extent = 1
        for distance, axis in sorted((n, axis) for axis, n in enumerate(move) if n):
            if distance != extent or axis in used:
                return False
            used.add(axis)
            extent *= loop.sizes[axis]
        extents.append(extent)
    if any(size != 1 and axis not in used for axis, size in enumerate(loop.sizes)):
        return False
    counts = [divmod(size, extent) for size, extent in zip(shape, extents, strict=True)]
    if any(rest for _, rest in counts) or math.prod(n for n, _ in counts) != len(places):
        return False
    grid = [range(0, size, extent) for size, extent in zip(shape, extents, strict=True)]
    return {tuple(start for start, _ in place) for place in places} == {*itertools.product(*grid)}


def _own_place(parts: list[list[int]], rank: int) -> Place:
    """Where the loop computes a value of its own shape."""
    place, axis = [], 0
    for part in parts:
        moves = [0] * rank
        for k, size in enumerate(part):
            if size != 1:
                moves[axis + k] = math.prod(part[k + 1 :])
        place.append((0, tuple(moves)))
        axis += len(part)
    return tuple(place)


def _operand(
    program: Program, given: Container[Ref], ref: Ref, place: Place, sizes: Ints
) -> Found | Apart | _Cut:
    """Where an operand is read of a step that is computed at `place`."""
    if ref >= CONST:
        return ref
    spec = program.inputs[~ref] if ref < 0 else program.steps[ref].out
    still = (0, (0,) * len(sizes))
    lead = len(place) - len(spec.shape)
    own = tuple(still if n == 1 else place[lead + k] for k, n in enumerate(spec.shape))
    step = None if ref < 0 else program.steps[ref]
    memory = step.args[0] if isinstance(step, View) else ref
    if memory >= 0 and memory not in given and isinstance(program.steps[memory], Join):
        return Apart(memory)
    if isinstance(step, View):
        offset, walk = walk_of(spec.stride, own, len(sizes))
        offset, (base,) = offset + step.offset, step.args
        if base in given:
            return Read(base, offset, walk)
        return _place_in(program, base, offset, walk, sizes)
    if ref < 0 or ref in given:
        return Read(ref, *walk_of(spec.stride, own, len(sizes)))
    return ref, own


def move_of(step: Step) -> Move | None:
    """How it reads its operand elsewhere than where it is computed, if it does."""
    return step.op.move if isinstance(step, Pointwise) else None


def _moved(
    program: Program, step: Step, move: Move, place: Place, sizes: Ints
) -> Place | _Cut | None:
    """Where the operand is read of a step that is computed at `place`; None if nowhere evenly."""
    shape = step.out.shape
    if isinstance(move, (Rolled, Padded)) or 0 in shape:
        return place  # and begun elsewhere where it is read
    if isinstance(move, Reshaped):
        (ref,) = step.args
        own = (program.inputs[~ref] if ref < 0 else program.steps[ref].out).shape
        offset, walk = walk_of(contiguous(shape), place, len(sizes))
        return _place_of(offset, walk, own, contiguous(own), sizes)
    found = list(place)
    if isinstance(move, Flipped):
        for dim in move.dims:
            start, steps = place[dim]
            found[dim] = shape[dim] - 1 - start, tuple(-n for n in steps)
        return tuple(found)
    for dim, times in enumerate(move.times):
        if times > 1:
            split = _rest(place[dim], shape[dim] // times, sizes)
            if not isinstance(split, tuple):
                return split
            found[dim] = split
    return tuple(found)


def _rest(index: tuple[int, Ints], period: int, sizes: Ints) -> tuple[int, Ints] | _Cut | None:
    """What is left of an index divided by `period`, if it moves evenly."""
    start, steps = index
    if any(n < 0 for n in steps):
        return None
    rests = start % period, tuple(n % period for n in steps)
    if rests[0] + sum(n * (size - 1) for n, size in zip(rests[1], sizes, strict=True)) < period:
        return rests
    for axis, (n, size) in enumerate(zip(steps, sizes, strict=True)):
        inner = period // n if n and period % n == 0 else size
        if 1 < inner < size and size % inner == 0:
            return _Cut(axis, inner)
    return None


def _begun(
    operand: Found | Apart | _Cut, index: int, move: Rolled | Padded, place: Place, own: Spec
) -> Read | Apart | _Cut:
    """`operand` of step `index`, which is like `own`, as it is read where the step is computed at
    `place`: from another element on. It has to be in memory, and a dimension along one axis of the
    loop, which goes along no other, or along none."""
    if isinstance(operand, tuple):
        return Apart(operand[0])
    if not isinstance(operand, Read):
        assert isinstance(operand, (Apart, _Cut))
        return operand
    assert not operand.rolls and not operand.pads
    found, offset = [], operand.offset
    for dim, shift, *_ in move.by:
        start, moves = place[dim]
        size = own.shape[dim]
        axes = [axis for axis, move in enumerate(moves) if move]
        if not axes:  # one element, and that at a place that is known
            at = start - shift if isinstance(move, Padded) else (start - shift) % size
            if not 0 <= at < size:
                return Apart(index)
            offset += (at - start) * own.stride[dim] if size > 1 else 0
            continue
        if len(axes) != 1 or moves[axes[0]] != 1:
            return Apart(index)
        (axis,) = axes
        if any(other[axis] for k, (_, other) in enumerate(place) if k != dim):
            return Apart(index)
        found.append((axis, start - shift, size))
        offset -= start * operand.walk[axis]
    if isinstance(move, Padded):
        return replace(operand, offset=offset, pads=tuple(found))
    rolls = tuple([(axis, first % size, size) for axis, first, size in found])
    return replace(operand, offset=offset, rolls=rolls)


def walk_of(stride: Ints, place: Place, rank: int) -> tuple[int, Ints]:
    """Where in memory of these strides `place` begins, and how it moves with the loop."""
    pairs = list(zip(stride, place, strict=True))
    offset = sum(step * start for step, (start, _) in pairs)
    return offset, tuple(sum(s * moves[k] for s, (_, moves) in pairs) for k in range(rank))


def _place_in(
    program: Program, base: int, offset: int, walk: Ints, sizes: Ints
) -> Computed | Apart | _Cut:
    """Where step `base` is computed that is read, in memory that it would have, at `offset`."""
    spec = program.steps[base].out
    place = _place_of(offset, walk, spec.shape, spec.stride, sizes)
    if place is None:
        return Apart(base)
    return place if isinstance(place, _Cut) else (base, place)


def _place_of(
    offset: int, walk: Ints, shape: Ints, stride: Ints, sizes: Ints
) -> Place | _Cut | None:
    """Which element of memory laid out like this the loop meets; None if it moves unevenly."""
    # it lies without a gap, so that an address is one number with a digit for each axis: a step of
    # the loop adds digits, and as long as none carries its indices move evenly
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axes.sort(key=lambda axis: -stride[axis])
    start = _digits(offset, axes, stride)
    moves = [_digits(step, axes, stride) for step in walk]
    for axis in reversed(axes):
        far = [move[axis] * (size - 1) for move, size in zip(moves, sizes, strict=True)]
        first = start[axis] + sum(n for n in far if n < 0)
        last = start[axis] + sum(n for n in far if n > 0)
        if first >= 0 and last < shape[axis]:
            continue
        whole = shape[axis] * stride[axis]
        for k, size in enumerate(sizes):
            inner = whole // abs(walk[k]) if moves[k][axis] and whole % walk[k] == 0 else size
            if 1 < inner < size and size % inner == 0:
                return _Cut(k, inner)
        return None
    zero = (0,) * len(sizes)
    place: list[tuple[int, Ints]] = [(0, zero)] * len(shape)
    for axis in axes:
        place[axis] = start[axis], tuple(move[axis] for move in moves)
    return tuple(place)


def _digits(number: int, axes: list[int], stride: Ints) -> dict[int, int]:
    """`number` as so many steps along each of the axes, the largest first; all in one direction."""
    digits, sign, number = {}, -1 if number < 0 else 1, abs(number)
    for axis in axes:
        steps, number = divmod(number, stride[axis])
        digits[axis] = sign * steps
    return digits
