"""Costs: how many ops of eager's a chain is, and how many bytes it moves, eagerly and fused. Pure.

What these take stands in `policy`; here, what kernels save of elements on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..chain.state import Node
from ..kernel.text import functions_of
from ..layout import Ints
from ..ops.moves import Rolled
from ..ops.reductions import Reduction
from ..ops.row import OPS, Op
from ..ops.views import JoinOp
from ..program.program import CONST

# torch takes as long for a bool that it counts as memory for 26 bytes (H200; bench/overhead.py)
_COUNTING = 16
# us that kernels save of what eager ops take for 1000 elements on one thread of a CPU, beside the
# call: of arithmetic, which is bound by memory, half, for a kernel goes through it once; and of
# functions (AMD EPYC with AVX2, torch 2.13). Where eager's vectors are as good that is little or
# less than nothing, and so it is of float64, where most of ours take one element at a time
ARITHMETIC_US = 0.05
_INLINE = {"fma", "sqrt", "rsqrt"}  # which processors have instructions for
SAVED_US = {  # by the name of an op; "" for all others that call functions
    "f32": {
        "": 0.5, "sigmoid": 0.12, "silu": 0.12, "glu": 0.12, "rsqrt": 0.0, "sqrt": 0.25,
        "lerp": 0.0, "lerp_scalar": 0.0, "addcmul": 0.0, "addcmul_scaled": 0.0, "exp2": 0.07,
        "pow_half": 0.25, "pow_minus_half": 0.0,
        "exp": 0.27, "log": 0.35, "log2": 0.35, "log10": 0.35, "erf": 0.35, "gelu": 0.0,
        "tanh": 1.5, "gelu_tanh": 1.5, "elu": 1.0, "expm1": 1.0, "atan": 1.0, "mish": 2.0,
        "sin": -0.9, "cos": -0.8, "tan": -1.9, "asin": -0.4, "acos": -0.6, "atanh": -0.2,
        "erfc": -0.5, "nextafter": -1.3, "lgamma": -1.2, "erfinv": -4.6, "digamma": -18.0,
        "fmod": -9.5, "remainder": -9.5, "div_floor": -9.5, "floor_divide": -9.5,
        "bessel_j0": -1.3, "bessel_j1": -1.3, "bessel_y0": -1.3, "bessel_y1": -1.3,
    },
    "f64": {
        "": -2.5, "rsqrt": 0.0, "sqrt": 0.7, "pow_half": 0.7, "gelu": 0.7, "xlogy": 0.5, "i0": 9.0,
        "i0e": 9.0, "i1": 9.0, "i1e": 9.0, "log1p": -5.0, "tanh": -6.0, "atan2": -9.0,
        "softplus": -9.0, "sinh": -9.0, "log_sigmoid": -9.0, "ndtri": -9.0, "mish": -19.0,
    },
}  # fmt: skip
# ...of 1000 bytes that an op gives to the next one where they do not stay in the caches, and where
# they are given back to the system at once
_MEMORY_US = ((32 << 20, 0.22), (3 << 20, 0.1))
# ...and what reading on from the beginning of the last dimension takes there, where nothing is
# vectorised, of 16 bits and of more: a wave of 256x256 (bench/overhead.py) otherwise lost, at 1.06
# and 4.1 of eager's time
_TURNED_US = {2: 2.2, 4: 0.5}


def _eager(nodes: list[Node], first: int = 0) -> Iterator[Node]:
    """Those from `first` on that eager runs an op for: views cost the same either way, and what a
    join reads from memory is a step of its own here."""
    read = {ref for node in nodes if isinstance(node.op, JoinOp) for ref in node.args}
    for node in nodes[first:]:
        if node.base < 0 and not (node.index in read and node.op is OPS["clone"]):
            yield node


def ops_of(nodes: list[Node], first: int = 0) -> int:
    """How many ops of eager's these are from `first` on."""
    return sum(node.op.costs if isinstance(node.op, Op) else 1 for node in _eager(nodes, first))


def stored_of(nodes: list[Node], results: Sequence[int]) -> list[Node]:
    """Those of `results` that get memory."""
    return [node for node in nodes if node.index in results and node.base < 0]


def shapes_of(nodes: list[Node], stored: Sequence[Node]) -> set[Ints]:
    """The shapes of what is stored; a join is as many as its parts have."""
    shapes = set[Ints]()
    for node in stored:
        parts = [nodes[ref] for ref in node.args] if isinstance(node.op, JoinOp) else [node]
        shapes.update(part.meta.shape for part in parts)  # type: ignore[union-attr]
    return shapes


def traffic(nodes: list[Node], results: Sequence[int]) -> tuple[int, int]:
    """Bytes that eager ops move, and those of kernels that read all Inputs, and write `results`.

    There is one for each shape, but that rows of which each has one block are in one with what is
    found of them, and groups of channels have one more.
    """
    inputs, rows, every = nodes[-1].inputs, nodes[-1].rows, 0

    def size(ref: int) -> int:
        if ref >= CONST:
            return 0
        meta = nodes[ref].meta if ref >= 0 else inputs[~ref]
        return 0 if meta is None else meta.nbytes

    for node in _eager(nodes):
        every += size(node.index) + sum(map(size, node.args))
        counts = isinstance(node.op, Reduction) and node.op.name in ("sum", "count_nonzero")
        if counts and node.op.has_no_order:  # type: ignore[union-attr]
            every += _COUNTING * sum(map(size, node.args))
    stored = stored_of(nodes, results)
    kernels = max(1, len(shapes_of(nodes, stored)))
    if rows is not None and rows.blocks == 1:
        kernels = 1 + (rows.groups > 0)
    once = kernels * sum(meta.nbytes for meta in inputs)
    return every, once + sum(node.meta.nbytes for node in stored if node.meta is not None)


def us_saved(nodes: list[Node]) -> float:
    """us that a kernel saves of what eager ops take for their elements, on one thread of a CPU."""
    total, before = 0.0, 0  # bytes that the op before has given
    for node in nodes:
        assert node.op is not None and node.meta is not None
        if node.base >= 0:
            continue
        total += next((us * before / 1000 for size, us in _MEMORY_US if before >= size), 0.0)
        before = node.meta.nbytes
        saved = SAVED_US["f64" if node.common == "f64" else "f32"]
        functions = functions_of(node.op, node.common)
        each = saved[""] if functions - _INLINE else ARITHMETIC_US / 2
        if functions:
            each = saved.get(node.op.name, each)
        rolls = node.op.move.by if isinstance(node.op.move, Rolled) else ()
        if any([dim == node.meta.ndim - 1 for dim, _ in rolls]):
            each -= _TURNED_US[min(max(node.meta.dtype.itemsize, 2), 4)]
        total += each * math.prod(node.meta.shape) / 1000
    return total
