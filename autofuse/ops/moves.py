"""Ops that give elements of an operand in other places, which are read where they lie.

`torch.roll` and `torch.flip`, `repeat` and `tile`, `pad` with a number, and what torch's view
functions copy, as `reshape` does of what is transposed. How a kernel reads them is in
`kernel.maps`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from ..dtypes import EXACT
from ..layout import Ints, copied_stride, joined_stride
from .row import METHODS, Op, is_number, registrar, row, spelled


@dataclass(frozen=True, slots=True)
class Rolled:
    """Along which dimensions, from the first on, and by how many, or less than none.

    What is rolled has to be in memory, where it goes on from its beginning as a dimension ends.
    """

    by: tuple[tuple[int, int], ...]

    def shape_of(self, shape: Ints) -> Ints:
        return shape


@dataclass(frozen=True, slots=True)
class Flipped:
    """Along which dimensions it is read from the end on."""

    dims: Ints

    def shape_of(self, shape: Ints) -> Ints:
        return shape


@dataclass(frozen=True, slots=True)
class Repeated:
    """How often along each dimension of the result."""

    times: Ints

    def shape_of(self, shape: Ints) -> Ints:
        missing = len(self.times) - len(shape)
        return tuple([n * by for n, by in zip((*[1] * missing, *shape), self.times, strict=True)])


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements in the same order, in another shape."""

    shape: Ints

    def shape_of(self, shape: Ints) -> Ints:
        return self.shape


@dataclass(frozen=True, slots=True)
class Padded:
    """Along which dimensions, how far before its operand it begins and how far behind it ends.

    What is padded has to be in memory; less than nothing is cut off.
    """

    by: tuple[tuple[int, int, int], ...]

    def shape_of(self, shape: Ints) -> Ints:
        sizes = list(shape)
        for dim, before, after in self.by:
            sizes[dim] += before + after
        return tuple(sizes)

    def stride_of(self, shape: Ints, stride: Ints) -> Ints:
        """The result's strides, for the operand's shape and strides."""
        result = self.shape_of(shape)
        if all(before <= 0 and after <= 0 for _, before, after in self.by):  # a part, copied
            return copied_stride(result, stride)
        return joined_stride(result, [(shape, stride)])


Move = Rolled | Flipped | Repeated | Reshaped | Padded

# of which each way to move elements is a copy; it stands for all of them in kernels, and runs as
# none; but for what is padded, which is no row, for only a kernel knows where its memory ends
MOVED = row("moved", "x", "x", accepts="fib", copies="fib", grad="g", eager=torch.clone)
FILLED = Op("filled", "x v:common", "v if beyond(x) else x", accepts="fib", grad="g; none", costs=2)

_LARGEST = 1 << 36  # elements; where few machines have the memory torch says so at once
# ways to move of each kind, each a program: shifts that are others each time would have no end
_MOST = 64
_known: defaultdict[str, dict[Any, Op]] = defaultdict(dict)  # by kind


def _op(
    name: str, move: Move, eager: Callable[..., Any], *, flat: bool = True, grad: str = "g"
) -> Op:
    """flat: whether the result is contiguous; else it is laid out as its operand, a copy of it."""
    way = "cpu cuda" if flat else ""
    return replace(MOVED, name=name, move=move, eager=eager, contiguous=way, grad=grad)


def _kept(kind: str, key: Any, make: Callable[[], Op]) -> Op | None:
    """The op of a key, made if it is the first; None where there are too many."""
    known = _known[kind]
    if key not in known and len(known) < _MOST:
        known[key] = make()
    return known.get(key)


def _is_dims(dims: Any, ndim: int) -> TypeGuard[Ints]:
    """Whether these are dimensions of such a tensor, none of them twice."""
    if type(dims) is not tuple:
        return False
    for d in dims:
        if type(d) is not int or not -ndim <= d < ndim:
            return False
    return len(dims) == 1 or len({d % ndim for d in dims}) == len(dims)


def _given(numbers: tuple[Any, ...]) -> Any:
    """What a method is given, one by one or as a sequence."""
    return numbers if len(numbers) != 1 or type(numbers[0]) is int else numbers[0]


def _are_sizes(sizes: Any) -> TypeGuard[Ints]:
    return type(sizes) is tuple and all([type(n) is int and 0 <= n <= EXACT for n in sizes])


# --- rolls ----------------------------------------------------------------------------------------


def _roll(shifts: Ints, dims: Ints, by: tuple[tuple[int, int], ...]) -> Op:
    move = Rolled(tuple([(d, n) for d, n in by if n]))
    return _op("roll", move, lambda x: torch.roll(x, shifts, dims))


@spelled()
def roll(input: Any, shifts: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    shifts, dims = ((x,) if type(x) is int else x for x in (shifts, dims))
    shifts, dims = (tuple(x) if type(x) is list else x for x in (shifts, dims))
    if dims is None and input.ndim == 1:
        dims = (0,)
    if type(shifts) is not tuple or not _is_dims(dims, input.ndim):
        return None
    if not 0 < len(dims) == len(shifts) or not all(type(x) is int for x in shifts):
        return None
    if not input.is_contiguous() or not input.numel() or max(map(abs, shifts)) > EXACT:
        return None
    dims = tuple([d % input.ndim for d in dims])  # an op is that of all tensors which have these
    by = tuple([(d, n % input.shape[d]) for d, n in zip(dims, shifts, strict=True)])

    def make() -> Op:
        # as torch's node does, whose dimensions come in the opposite order
        against = tuple([(d, -n) for d, n in by])
        back = _roll(tuple([-n for n in shifts[::-1]]), dims[::-1], against)
        return replace(_roll(shifts, dims, by), back=back)

    op = _kept("roll", (shifts, dims, by), make)
    return None if op is None else (op, (input,))


# --- flips ----------------------------------------------------------------------------------------


@spelled()
def flip(input: Any, dims: Any) -> tuple[Op, tuple[Any, ...]] | None:
    dims = tuple(dims) if type(dims) is list else dims
    if not _is_dims(dims, input.ndim):
        return None
    return _flipped(input, tuple([d % input.ndim for d in dims]))


@registrar(METHODS)("flip")
def _flip_method(input: Any, *given: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    return None if given and dims is not None else flip(input, _given(given) if given else dims)


@spelled()
def fliplr(input: Any) -> tuple[Op, tuple[Any, ...]] | None:
    return _flipped(input, (1,)) if input.ndim > 1 else None


@spelled()
def flipud(input: Any) -> tuple[Op, tuple[Any, ...]] | None:
    return _flipped(input, (0,)) if input.ndim else None


def _flipped(input: Any, dims: Ints) -> tuple[Op, tuple[Any, ...]] | None:
    def make() -> Op:
        made = _op("flip", Flipped(dims), lambda x: torch.flip(x, dims), flat=False)
        return replace(made, back=made)

    op = _kept("flip", dims, make)
    return None if op is None else (op, (input,))


# --- repetitions, whose gradients are sums that torch makes ---------------------------------------


@spelled("repeat")
def _repeat(input: Any, *repeats: Any) -> tuple[Op, tuple[Any, ...]] | None:
    times = _given(repeats)
    times = tuple(times) if type(times) in (list, torch.Size) else times
    if not _are_sizes(times) or len(times) < input.ndim:
        return None
    if not repeats or math.prod(n for n in (*times, *input.shape) if n) >= _LARGEST:
        return None

    def make() -> Op:
        return _op("repeat", Repeated(times), lambda x: torch.Tensor.repeat(x, times), grad="")

    op = _kept("repeat", times, make)
    return None if op is None else (op, (input,))


@spelled()
def tile(input: Any, dims: Any) -> tuple[Op, tuple[Any, ...]] | None:
    times = tuple(dims) if type(dims) is list else dims
    if not _are_sizes(times):
        return None
    return _repeat(input, (1,) * (input.ndim - len(times)) + times)


@registrar(METHODS)("tile")
def _tile_method(input: Any, *given: Any, dims: Any = None) -> tuple[Op, tuple[Any, ...]] | None:
    return None if given and dims is not None else tile(input, _given(given) if given else dims)


# --- padding --------------------------------------------------------------------------------------


@spelled()
def pad(
    input: Any, pad: Any, mode: Any = "constant", value: Any = None
) -> tuple[Op, tuple[Any, ...]] | None:
    return _padded(input, pad, 0 if value is None else value) if mode == "constant" else None


@spelled()
def constant_pad_nd(input: Any, pad: Any, value: Any = 0) -> tuple[Op, tuple[Any, ...]] | None:
    return _padded(input, pad, value)


def _padded(input: Any, pad: Any, value: Any) -> tuple[Op, tuple[Any, ...]] | None:
    pad = tuple(pad) if type(pad) in (list, torch.Size) else pad
    if type(pad) is not tuple or not all(type(n) is int and abs(n) <= EXACT for n in pad):
        return None
    if len(pad) % 2 or len(pad) > 2 * input.ndim or not any([n > 0 for n in pad]):
        return None
    if not is_number(value) or (type(value) is float and not input.is_floating_point()):
        return None
    pairs = zip(pad[::2], pad[1::2], strict=True)  # from the last dimension on
    found = [(input.ndim - 1 - k, *ends) for k, ends in enumerate(pairs) if ends != (0, 0)]
    by, shape = tuple(found[::-1]), tuple(input.shape)
    sizes = Padded(by).shape_of(shape)
    # where memory may not do, or less than nothing is left, torch says so
    if 0 in shape or 0 in sizes or math.prod(sizes) >= _LARGEST:
        return None
    if any([shape[dim] + min(before, 0) + min(after, 0) < 1 for dim, before, after in by]):
        return None

    def make() -> Op:
        back = tuple([(dim, -before, -after) for dim, before, after in by])
        return replace(_pad(pad, by), back=_pad(tuple([-n for n in pad]), back))

    op = _kept("pad", (pad, by), make)
    return None if op is None else (op, (input, value))


def _pad(pad: Ints, by: tuple[tuple[int, int, int], ...]) -> Op:
    move = Padded(by)
    eager = lambda x, value: torch.constant_pad_nd(x, pad, value)  # noqa: E731
    return replace(FILLED, name="constant_pad_nd", move=move, eager=eager, strides=move.stride_of)


# --- copies in another shape ----------------------------------------------------------------------


def reshaped(shape: Ints, to: Ints) -> Op | None:
    """The op that copies elements of `shape` to memory of their own, of another shape.

    None where a kernel would find them by division.
    """
    ends = sorted({*_ends(shape), *_ends(to)})
    if any(b % a for a, b in itertools.pairwise(ends)) or math.prod(to) >= _LARGEST:
        return None

    def make() -> Op:  # its gradient is a view of what comes in, where torch can make one
        return _op("reshape", Reshaped(to), lambda x: torch.reshape(x, to), grad="")

    return _kept("reshape", (shape, to), make)


def _ends(shape: Sequence[int]) -> list[int]:
    """How many elements the last dimensions have, with each further one."""
    return [math.prod(shape[k:]) for k in range(len(shape))]
