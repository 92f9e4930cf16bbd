"""What is stored besides the outputs: what would be computed again and again.

Pure, as `plan`.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from .. import layout
from ..program.program import (
    ALIAS,
    CONST,
    STORED,
    Join,
    Output,
    Pointwise,
    Program,
    View,
)
from ..program.walk import needed
from . import maps
from .maps import NEAR, Loop, loop_over
from .source import ITEMSIZE

# What it costs to compute an element again, and what to store a value and read it back: us for an
# op on 10^6 elements, bytes through memory in 1 us, and us for a launch; of functions, in ops.
# Estimates by what the machines can do: 132 processors of 128 lanes, 8 instructions for an op.
AGAIN = {"cuda": (0.28, 3.0e6, 4.0), "cpu": (250.0, 1.0e4, 2.0)}
FUNCTION = 8
# us for each element of a tensor that a loop goes through across its rows: caches give 32 bytes for
# each (images made channels_last, transposed matrices; H100)
FAR_US = 7.5e-6


def completed(program: Program, device: str) -> Program:
    """`program` with what has to be stored besides its outputs, or had better be.

    That is what somebody holds a view of; what no kernel can compute where a view of it is read;
    and what is computed more often than it has elements, because views of it overlap or repeat it
    or, on a CPU where there are functions in it, because it is broadcast, where that takes longer
    than going through memory. (GPUs compute while they wait for memory.)
    """
    outputs = {output.step: output for output in program.outputs}
    views = any(isinstance(step, (View, Join)) or maps.move_of(step) for step in program.steps)
    if not views and not (device == "cpu" and _broadcasts(program)):
        return replace(program, outputs=tuple(outputs[step] for step in sorted(outputs)))
    for output in program.outputs:
        if output.kind == ALIAS:
            (base,) = program.steps[output.step].args
            outputs.setdefault(base, Output(base, STORED))
    done = False
    while not done:
        done = True
        program = replace(program, outputs=tuple(outputs[step] for step in sorted(outputs)))
        for out, step in [(x, step) for x in program.live for step in written(program, x)]:
            if not layout.numel(program.steps[step].out.shape):
                continue
            given = {other for other in program.live if other < out and other != step}
            loop = loop_over(program, [step], given)
            apart = better_stored(program, loop, device) if isinstance(loop, Loop) else loop.step
            if apart is not None and apart not in outputs:
                outputs[apart] = Output(apart, STORED)
                done = False
                break
    return program


def _broadcasts(program: Program) -> bool:
    """Whether functions are called for steps that are smaller than what is computed of them."""
    steps = program.steps
    small = {
        ref
        for step in steps
        for ref in step.args
        if 0 <= ref < CONST and steps[ref].out.shape != step.out.shape
    }
    return any(
        isinstance(steps[k], Pointwise) and _weight(program, k) > 1
        for k in needed([step.args for step in steps], small)
    )


def better_stored(program: Program, loop: Loop, device: str) -> int | None:
    """A step that had better be stored than computed again and again in `loop`, if any."""
    computed = {step: len(at) * math.prod(loop.sizes) for step, at in loop.places.items()}
    numel = {step: layout.numel(program.steps[step].out.shape) for step in computed}
    again = [step for step in computed if computed[step] > numel[step]]
    if again:
        each, speed, launch = AGAIN[device]
        ops = sum(_weight(program, step) * (computed[step] - numel[step]) for step in again)
        # what is computed most often, and of these what most is computed for
        most = max(again, key=lambda step: (computed[step] / numel[step], step))
        trip = launch + 2 * numel[most] * ITEMSIZE[program.steps[most].out.code] / speed
        if ops * each / 1e6 > trip:
            return most
    return _read_across(program, loop) if device == "cuda" else None


def is_far(numel: int, walk: int) -> bool:
    """Whether to go `walk` elements further for each of so many takes longer than a launch."""
    return walk > NEAR and numel * FAR_US > AGAIN["cuda"][2]


def _read_across(program: Program, loop: Loop) -> int | None:
    """A step that had better be stored, for a view of it has `loop` go across the rows of several
    tensors that it is computed from; then it is one."""
    each, (_, speed, launch) = math.prod(loop.sizes) * FAR_US, AGAIN["cuda"]
    if each * len(program.inputs) <= launch:  # without a look at a small one
        return None
    found = maps.across(program, loop)
    viewed = {step.args[0] for step in program.steps if isinstance(step, View)}
    for index, place in sorted((node for node in found if node[0] in viewed), reverse=True):
        spec, reads = program.steps[index].out, len(found[index, place])
        trip = launch + layout.numel(spec.shape) * ITEMSIZE[spec.code] / speed
        if (reads - 1) * each <= trip:
            continue
        own = loop_over(program, [index], ())
        if isinstance(own, Loop):
            others = max(map(len, maps.across(program, own).values()), default=0)
            if (reads - 1 - others) * each > trip:
                return index
    return None


def _weight(program: Program, index: int) -> int:
    """What it costs to compute an element of a step, in ops."""
    step = program.steps[index]
    assert isinstance(step, Pointwise)
    calls = re.search(r"\w\(", step.op.expression(step.common, "cuda"))
    return 1 if calls is None else FUNCTION


def written(program: Program, out: int) -> tuple[int, ...]:
    """The steps whose values are written to the memory of `out`."""
    step = program.steps[out]
    return step.args if isinstance(step, Join) else (out,)
