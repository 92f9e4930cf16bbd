"""Programs: what a chain recorded, as data. Pure: knows no tensors and no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..layout import Ints, contiguous, grouped, turned
from ..ops.reductions import Reduction
from ..ops.row import Op

# references: step >= 0, Input k as ~k, Const k as CONST + k; what one kernel leaves to the next
CONST, LEFT = 1 << 20, 1 << 19
Ref = int


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor as a program knows it: its type code, and its shape and stride in elements."""

    code: str
    shape: Ints
    stride: Ints


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A step that computes each element of its result from one element of each operand."""

    op: Op
    args: tuple[Ref, ...]
    common: str  # type code the operands are converted to
    out: Spec


@dataclass(frozen=True, slots=True)
class Reduced(Pointwise):
    """A step that computes its result from rows of its first operand; its op is a `Reduction`."""


@dataclass(frozen=True, slots=True)
class Statistic(Pointwise):
    """A step that gives what another one, Reduced or Outside, finds of its rows on the way."""

    of: int  # that one
    which: int  # of the statistics of its op


@dataclass(frozen=True, slots=True)
class Outside(Pointwise):
    """A step that torch computes, of values in memory, once kernels have; its op says how."""


def kind_of(op: Op) -> type[Pointwise]:
    """Which of these a step of `op` is."""
    if not isinstance(op, Reduction):
        return Pointwise
    return Reduced if op.outside is None else Outside


@dataclass(frozen=True, slots=True)
class View:
    """A step that computes nothing: its value lies in the memory of another step's."""

    args: tuple[Ref]  # whose: a step that has memory of its own wherever it has any
    out: Spec
    offset: int  # of its first element in that memory, in elements


@dataclass(frozen=True, slots=True)
class Join:
    """A step with memory of its own, in which the values of others are written side by side."""

    args: tuple[Ref, ...]  # Pointwise steps
    out: Spec
    parts: tuple[tuple[int, Ints], ...]  # of each: where it begins in that memory, and its strides


Step = Pointwise | View | Join

# kinds of Outputs
NEW = "new"  # memory of its own, for a shell that somebody holds
STORED = "stored"  # memory of its own, for a backward alone
WRITE = "write"  # memory that is there, in one step with computing it; only the last value
COPY = "copy"  # memory of its own, which is then copied to memory that is there; likewise
IN_PLACE = "in place"  # that of an Input which nobody else reads, once the kernel has read it
ALIAS = "alias"  # none of its own: torch's view of the memory of the step that it lies in


@dataclass(frozen=True, slots=True)
class Output:
    """A value of a program that gets memory."""

    step: int
    kind: str = NEW


@dataclass(frozen=True, slots=True)
class Program:
    """What a chain recorded, and what of it is wanted."""

    steps: tuple[Step, ...]
    inputs: tuple[Spec, ...]
    consts: tuple[type, ...]  # classes of the Consts: float, int or bool
    outputs: tuple[Output, ...] = ()  # by steps, ascending
    relaxed: bool = False

    @property
    def live(self) -> Ints:
        """The steps whose values get memory of their own, or are written, ascending."""
        return tuple(output.step for output in self.outputs if output.kind != ALIAS)


class RowsOf(NamedTuple):
    """The rows that reductions of one chain are over."""

    shape: Ints  # of all of them
    order: Ints  # of its dimensions, as they lie in memory, those of a row last
    dims: int  # how many of these a row lies along
    threads: int  # of each
    blocks: int  # ...and blocks of so many threads, where several share it
    groups: int = 0  # of channels, which are then two dimensions of `seen`
    interleaved: int = 1  # rows whose threads take turns in a block

    @property
    def as_they_lie(self) -> bool:
        """Whether they are read as they are: each lies along the last dimension."""
        return self.dims == 1 and not self.groups and self.order == (*range(len(self.shape)),)

    def seen(self, shape: Ints, stride: Ints, numbers: bool = False) -> tuple[Ints, Ints]:
        """A tensor that is read with the rows, as they lie along its last dimensions.

        numbers: whether with what has the dimensions of numbers of rows, and none of a row.
        """
        if self.groups:
            channels = self.groups, self.shape[1] // self.groups
            return grouped(shape, stride, channels, len(self.shape) - 2)
        return turned(shape, stride, self.order, self.dims, numbers)

    @property
    def row(self) -> Ints:
        """The shape of each."""
        shape, _ = self.seen(self.shape, contiguous(self.shape))
        return shape[len(shape) - self.dims :]
