"""Source: all that the compiler has to know of one kernel, and nothing else.

The text of its element function and how its operands are walked: no torch, no op table, so that it
can be sent to a process that has neither, and names a kernel on disk. Also the type codes of the
kernel language (f64 f32 f16 bf16 i64 i32 i16 i8 u8 b1) and the order of a kernel's parameters.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Ints = tuple[int, ...]
# how an operand walks one axis of the loop; ROLLED goes on from its beginning where it ends, PADDED
# begins before its memory, or ends behind it
BROADCAST, UNIT, STRIDED, ROLLED, PADDED = range(5)
# that a kernel is given: the stride; also the element that it begins from, and the size
NUMBERS = {STRIDED: 1, ROLLED: 3, PADDED: 3}
WARP = 32
_EXACT = 8  # groups of a row's neighbours a thread, up to which each number has its own kernel...
_ALIKE = 4  # ...and how many numbers share one from there on
THREADS_PER_BLOCK = 128  # eager's block size on sm_90; 4-element threads reach copy bandwidth
ITEMSIZE = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1,
            "u8": 1, "b1": 1}  # fmt: skip


def carried(code: str) -> str:
    """The type in which a value of type `code` is computed (torch's opmath type)."""
    return "f32" if code in ("f16", "bf16") else code


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel reads or writes."""

    code: str
    axes: Ints  # BROADCAST, UNIT (innermost axis only), STRIDED..., outermost axis first


def axes_of(walk: Ints, begun: Container[int] = (), how: int = ROLLED) -> Ints:
    """How an operand with these strides goes along each axis; begun: those that go along as `how`
    says, from other elements on."""
    axes = [STRIDED if stride else BROADCAST for stride in walk]
    if walk[-1] == 1:
        axes[-1] = UNIT
    return tuple([how if axis in begun else own for axis, own in enumerate(axes)])


def numbers_of(
    walks: Sequence[Ints],
    operands: Sequence[Operand],
    begins: Sequence[Mapping[int, Sequence[int]]] = (),
) -> list[int]:
    """What a kernel is given of `operands`: strides; of ROLLED and PADDED axes also the element
    that each begins from and the size, by axis in `begins`."""
    found: list[int] = []
    for k, (walk, operand) in enumerate(zip(walks, operands, strict=True)):
        for axis, how in enumerate(operand.axes):
            if how in (ROLLED, PADDED):
                found += [walk[axis], *begins[k][axis]]
            elif how == STRIDED:
                found.append(walk[axis])
    return found


KEPT = 1 << 16  # what a Part reads of stage k: its operand is KEPT + 2k, softmax's shares 1 further


@dataclass(frozen=True, slots=True)
class Part:
    """One element function of a row kernel, in the order of the text, and what it is given."""

    reads: Ints  # loads of the kernel as k, values of the row as ~k, and as from KEPT on
    consts: Ints  # scalars of the kernel


@dataclass(frozen=True, slots=True)
class Walk:
    """How the threads of a row go through its elements."""

    vec: int  # neighbouring elements that a thread takes at once
    held: int  # how often, where all that it reads stays in registers; else 0
    full: bool  # that often exactly: no thread takes less

    @staticmethod
    def rounded(groups: int) -> int:
        """How often, for rows of so many groups of neighbours a thread: many share a kernel."""
        return groups if groups <= _EXACT else -(-groups // _ALIKE) * _ALIKE

    @property
    def sure(self) -> int:
        """How often every thread takes some, of a row that is held."""
        if self.full:
            return self.held
        return self.held - (1 if self.held <= _EXACT else _ALIKE)


@dataclass(frozen=True, slots=True)
class Stage:
    """A reduction in a row kernel: a pass over each row, which gives values of the row."""

    op: str
    kernel: str  # of torch, whose order it follows; see `kernel.division`
    across: tuple[int, int]  # threads x and y that make a result together
    walk: Walk
    uneven: bool  # vectors do not begin where rows do
    origin: int  # the load whose address then says where, -1 for memory of its own
    scalar: int  # of the kernel: the epsilon of a norm, the correction of a variance; or -1
    rounded: str  # the dtype that this and what is found are rounded to, or ""
    factor: int  # load of a number of the row that its elements are multiplied by, -1 for none
    part: Part  # gives the operand
    after: tuple[Part, ...]  # each gives another value of the row


@dataclass(frozen=True, slots=True)
class Rows:
    """What makes a kernel one over rows, the last axes of its loop: stages, then the stores."""

    threads: int  # of a row
    together: int  # rows of a block, whose threads...
    interleaved: bool  # ...take turns, so that those of neighbouring rows are neighbours
    axes: int  # of the loop that a row lies along, the last ones
    folded: tuple[bool, ...]  # of each operand: whether it goes along these, not along one
    whole_vectors: bool  # whether neighbours that a thread takes at once lie along the last of them
    stages: tuple[Stage, ...]
    walk: Walk  # of what is stored
    columns: Part | None  # gives what the first stores take
    ahead: bool  # whether what only that reads of a row is loaded before the first stage
    values: Ints  # of the row, for the other stores
    shared: bool  # by several blocks, which store what each has found
    aligned: tuple[bool, ...]  # of each operand: whether vectors of it can be moved as such

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.together

    @staticmethod
    def of(fields: dict[str, Any]) -> Rows:
        """From what `asdict` and JSON have made of one."""

        def part(fields: dict[str, Any]) -> Part:
            return Part(tuple(fields["reads"]), tuple(fields["consts"]))

        stages = [
            Stage(**{
                **stage, "across": tuple(stage["across"]), "walk": Walk(**stage["walk"]),
                "part": part(stage["part"]), "after": tuple(map(part, stage["after"])),
            })
            for stage in fields["stages"]
        ]  # fmt: skip
        columns = fields["columns"]
        return Rows(**{
            **fields, "stages": tuple(stages), "walk": Walk(**fields["walk"]),
            "columns": None if columns is None else part(columns),
            "values": tuple(fields["values"]), "aligned": tuple(fields["aligned"]),
            "folded": tuple(fields["folded"]),
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel; equal for equal kernels."""

    name: str  # as profilers show it
    text: str  # the element function, in the kernel language
    device: str  # "cuda" or "cpu"
    loads: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    consts: tuple[str, ...]  # type codes of the scalars
    rank: int  # axes of the loop
    lanes: int  # elements per thread: neighbours, moved by 16-byte accesses where over 1, or...
    wide: bool  # 64-bit index arithmetic
    relaxed: bool  # ops contract with each other
    rows: Rows | None = None  # of a row kernel, whose text has several functions
    spaced: bool = False  # ...WARP elements apart, so that those of a warp are neighbours

    def to_json(self) -> str:
        """As JSON; the same text for equal Sources."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Source:
        """The Source that `to_json` has written."""
        fields = json.loads(text)
        for name in ("loads", "stores"):
            fields[name] = tuple(Operand(o["code"], tuple(o["axes"])) for o in fields[name])
        rows = None if fields["rows"] is None else Rows.of(fields["rows"])
        return Source(**{**fields, "consts": tuple(fields["consts"]), "rows": rows})

    def ops(self) -> list[str]:
        """The names of the ops, which stand behind the statements that begin them."""
        statements = [line for line in self.text.splitlines() if " = " in line]
        return [line.rpartition("  # ")[2] for line in statements if "  # " in line]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Kernel parameters in order: load pointers, store pointers, Consts, count, then numbers.

    The count is of elements where the loop has one axis, of groups of lanes where it has more.
    Where lanes are spaced it is of groups, and the size of the last axis comes after its groups.
    """

    codes: tuple[str, ...]  # "u64" for pointers, otherwise a type code
    loads: int
    stores: int
    consts: int

    @staticmethod
    def of(source: Source) -> Parameters:
        """The parameters of a kernel."""
        index = "i64" if source.wide else "i32"
        operands = [*source.loads, *source.stores]
        strides = sum(NUMBERS.get(axis, 0) for operand in operands for axis in operand.axes)
        codes = (
            ["u64"] * len(operands)
            + [*source.consts]
            + [index] * (source.rank + source.spaced + strides)
        )
        return Parameters(tuple(codes), len(source.loads), len(source.stores), len(source.consts))


def difference(a: Source, b: Source) -> str:
    """What sets `b` apart from `a`, in words; empty for equal Sources."""
    if a.device != b.device:
        return f"for the {b.device}, not the {a.device}"
    found = []
    ops = [source.ops() for source in (a, b)]
    if len(ops[0]) != len(ops[1]):
        found.append(f"{len(ops[1])} ops, not {len(ops[0])}")
    elif ops[0] != ops[1]:
        k = next(k for k, (x, y) in enumerate(zip(*ops, strict=True)) if x != y)
        found.append(f"op {k + 1} of {len(ops[0])} is {ops[1][k]}, not {ops[0][k]}")
    for what, old, new in (("Input", a.loads, b.loads), ("result", a.stores, b.stores)):
        if len(old) != len(new):
            found.append(f"{len(new)} {what}s, not {len(old)}")
            continue
        for k, (x, y) in enumerate(zip(old, new, strict=True)):
            if x.code != y.code:
                found.append(f"{what} {k} is {y.code}, not {x.code}")
            elif x.axes != y.axes:
                found.append(f"{what} {k} has another layout: {walk(y.axes)}, not {walk(x.axes)}")
    if a.consts != b.consts:
        found.append(f"scalars are ({', '.join(b.consts)}), not ({', '.join(a.consts)})")
    if (a.lanes, a.spaced) != (b.lanes, b.spaced) or a.wide != b.wide or a.relaxed != b.relaxed:
        found.append("other vector width, index width or arithmetic")
    if a.rows != b.rows:
        found.append("rows are reduced by other threads")
    if not found and a != b:
        found.append("the same ops on other operands")
    return "; ".join(found)


def nearest(source: Source, known: list[Source]) -> Source | None:
    """The known Source that differs least."""
    from difflib import SequenceMatcher

    def likeness(other: Source) -> float:
        lines = (other.text.splitlines(), source.text.splitlines())
        same = SequenceMatcher(None, *lines, autojunk=False).ratio()
        return same + (other.device == source.device) - len(difference(other, source)) / 1e4

    return max(known, key=likeness, default=None)


def walk(axes: Ints) -> str:
    """How an operand goes through a loop, in words."""
    names = {BROADCAST: "repeats", UNIT: "unit", STRIDED: "strided", ROLLED: "rolled",
             PADDED: "padded"}  # fmt: skip
    return "x".join(names[axis] for axis in axes)
