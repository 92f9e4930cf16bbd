"""Row plans: one row kernel, from the program that it computes.

Pure, as `plan` is. A row kernel goes through each row once for each reduction (a Stage), with the
pointwise ops before it at its loads, and once more for what is stored; the threads that share a row
stand in one block, and a row is what all its reductions are over: the last dimensions of one shape,
as `program.rewrite` has turned it, and mostly one. Where several blocks share a row, each leaves
what it has found of its part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import layout
from ..layout import Ints, numel
from ..program.program import CONST, LEFT, Program, Reduced, Ref, Spec, Statistic
from ..program.walk import needed
from . import plan as pointwise
from . import text
from .division import PARTIAL, Scheme
from .plan import Line, Piece, Plan, is_wide
from .row_finish import STATISTICS, finish
from .source import (
    BROADCAST,
    ITEMSIZE,
    KEPT,
    THREADS_PER_BLOCK,
    UNIT,
    Operand,
    Part,
    Rows,
    Stage,
    Walk,
    axes_of,
    numbers_of,
)

_HELD = 64  # registers for what a thread keeps of all operands of a stage
_AHEAD = 32  # ...and for what it loads ahead
_STATEMENTS = 1024  # of element functions in a row of a kernel: its compile time
_PASSING = 8  # elements that a thread has at most of a row that it goes through once
_UNROLLED = 32  # exponentials of a thread that stand in a kernel one by one
_HELD_BY_MANY = 24  # the same as _HELD where the block is so large that a thread has 64 registers


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The structure of one row kernel; hashable, and equal for equal kernels."""

    loads: tuple[Operand, ...]
    consts: tuple[type, ...]
    codes: tuple[str, ...]  # of the consts
    inverted: tuple[bool, ...]  # of each, whether the kernel is given its reciprocal
    functions: tuple[Plan, ...]  # of the parts, in order
    lines: tuple[Line, ...]  # of all of them
    stores: tuple[tuple[int, Operand], ...]
    anchored: tuple[bool, ...]  # of each load, whether torch's order is ours from 16 bytes on alone
    rank: int
    wide: bool
    rows: Rows
    device: str = "cuda"
    relaxed: bool = False

    @property
    def name(self) -> str:
        """The kernel's name as profilers show it."""
        return f"af_rows_{pointwise.named(self.lines)}"

    @property
    def vectors(self) -> tuple[bool, ...]:
        """Of each operand, whether its address has to be a multiple of 16."""
        anchored = (*self.anchored, *(False for _ in self.stores))
        return tuple(map(max, self.rows.aligned, anchored))


def spec_of(program: Program, ref: Ref) -> Spec:
    return program.steps[ref].out if ref >= 0 else program.inputs[~ref]


class RowPiece:
    """The making of one row kernel.

    axes: along how many of the last dimensions of `shape` a row lies. left: where each of several
    blocks leaves its part of a row.
    """

    def __init__(
        self, program: Program, shape: Ints, following: set[int], schemes: dict[int, Scheme],
        axes: int = 1, left: Spec | None = None,
    ) -> None:  # fmt: skip
        self.program, self.steps, self.shape = program, program.steps, shape
        self.outer, self.row = shape[: len(shape) - axes], shape[len(shape) - axes :]
        self.schemes, self.left = schemes, left
        self.blocks = 1 if left is None else left.shape[-1]
        self.args = [step.args for step in program.steps]
        # what a number of a row is computed from once its row is reduced: from statistics alone
        self.finishing = [
            () if isinstance(step, Reduced) and step.out.shape != shape else step.args
            for step in program.steps
        ]
        self.loads: list[tuple[Ref, Ints]] = []  # what is read, and the shape it is read in
        self.consts: list[int] = []
        self.codes: list[str] = []
        self.inverted: list[bool] = []
        self.functions: list[Plan] = []
        self.values: dict[tuple[int, int], int] = {}  # of the row, by step and which of its own
        self.walks: list[Walk] = []  # of stages
        wanted = set(needed(self.args, program.live))
        self.reduced = [k for k in sorted(wanted) if isinstance(self.steps[k], Reduced)]
        self.statistics = {k: x for k, x in enumerate(self.steps) if isinstance(x, Statistic)}
        self.numbers = [  # steps that give one number a row, and follow from a reduction
            k for k in sorted((wanted & following) - self.statistics.keys())
            if self.steps[k].out.shape != shape and left is None
        ]  # fmt: skip

    def piece(self) -> Piece:
        steps, shape = self.steps, self.shape
        rows, columns = numel(self.outer), numel(self.row)
        ((threads, interleaved),) = {(x.threads, x.interleaved) for x in self.schemes.values()}
        drafts = [self._stage(index, columns) for index in self.reduced]
        whole = [k for k in self.program.live if steps[k].out.shape == shape]
        # the last stage's, whose loads are at hand, if all elements can be gone through so
        last = drafts[-1]
        walk = Walk(1, 0, False) if last.uneven else last.walk
        columns_part = self._part(whole, shape, walk) if whole and self.left is None else None
        if self.left is not None:
            values = [*range(len(self.values))]
            stores = [(LEFT + k, self.left, self.left.shape) for k in values]
        else:
            kept = [k for k in self.program.live if k not in whole]
            values = [self.values[k, 0] for k in kept]
            stores = [(k, steps[k].out, shape) for k in whole]
            stores += [(k, steps[k].out, steps[k].out.shape) for k in kept]
        sizes, walks = self._walks([*self.loads, *((spec, space) for _, spec, space in stores)])
        specs = [self._read(ref) for ref, _ in self.loads] + [spec for _, spec, _ in stores]
        wide = is_wide(shape, sizes, walks, specs)
        folded = tuple([
            spec is not self.left and self._is_folded(walk)
            for spec, walk in zip(specs, walks, strict=True)
        ])  # fmt: skip
        walks = [x if own else self._unfolded(x) for own, x in zip(folded, walks, strict=True)]
        operands = [
            Operand(spec.code, axes_of(walk)) for spec, walk in zip(specs, walks, strict=True)
        ]
        vec = max(scheme.group for scheme in self.schemes.values())
        # vectors begin where they would in contiguous rows: there those of an operand have to
        flat, axes = layout.contiguous(sizes), len(self.row)
        ragged = any(x.uneven and x.kernel == "fours" for x in self.schemes.values())
        whole_vectors = self.row[-1] % vec == 0 and not any(x.uneven for x in self.schemes.values())
        aligned = tuple(
            spec is not self.left  # one number for each block
            and operand.axes[-1] == UNIT
            and vec > 1
            and vec * ITEMSIZE[operand.code] % 4 == 0
            and not ragged  # whose vectors begin where rows do
            and (whole_vectors or not own)
            # along those in front alone: a row goes along one axis if it is not folded
            and all(
                (a - b) % vec == 0 or size == 1
                for a, b, size in zip(walk[: -1 if own else -axes], flat, sizes, strict=False)
            )
            for operand, spec, walk, own in zip(operands, specs, walks, folded, strict=True)
        )
        anchors = set().union(*map(self._anchors, self.reduced))
        stages = tuple(drafts)
        plan = RowPlan(
            loads=tuple(operands[: len(self.loads)]),
            consts=tuple(self.program.consts[k] for k in self.consts),
            codes=tuple(self.codes),
            inverted=tuple(self.inverted),
            functions=tuple(self.functions),
            lines=tuple(self._lines()),
            stores=tuple(
                (k, operand)
                for (k, _, _), operand in zip(stores, operands[len(self.loads) :], strict=True)
            ),
            anchored=tuple(ref in anchors for ref, _ in self.loads),
            rank=len(sizes),
            wide=wide,
            rows=Rows(
                threads=threads,
                together=interleaved if interleaved > 1 else max(1, THREADS_PER_BLOCK // threads),
                interleaved=interleaved > 1,
                axes=axes,
                folded=folded,
                whole_vectors=whole_vectors,
                stages=stages,
                walk=walk,
                columns=columns_part,
                ahead=self._is_ahead(columns_part, stages[0], walk),
                values=tuple(values),
                shared=self.blocks > 1,
                aligned=aligned,
            ),
        )
        return Piece(
            plan=plan,
            loads=tuple(ref for ref, _ in self.loads),
            consts=tuple(self.consts),
            offsets=(0,) * (len(self.loads) + len(stores)),
            stores=tuple(k for k, _, _ in stores),
            numel=numel(shape),
            numbers=(*sizes[1:], *numbers_of(walks, operands)),
            left=rows * self.blocks if self.blocks > 1 else 0,
        )

    def _anchors(self, index: int) -> set[Ref]:
        """The operands of a reduction that torch goes through otherwise where they begin elsewhere.

        Those of uneven rows begin anywhere. What was computed before would be in memory of its own.
        """
        step, scheme = self.steps[index], self.schemes[index]
        if scheme.vec == 1 or scheme.uneven or scheme.kernel == "fours":
            return {ref for ref in step.args if ref < 0 and scheme.anchored}
        return {ref for ref in step.args if ref < 0}

    def _read(self, ref: Ref) -> Spec:
        return spec_of(self.program, ref)

    def _walks(self, operands: list[tuple[Ref | Spec, Ints]]) -> tuple[Ints, list[Ints]]:
        """Sizes of the loop, and the strides of operands along it, each given with its shape."""
        shape, outer, walks = self.shape, len(self.outer), []
        nowhere = (0,) * len(self.row)
        for what, space in operands:
            spec = what if isinstance(what, Spec) else self._read(what)
            walk = layout.expand(spec.shape, spec.stride, space)
            if spec is self.left:  # along blocks
                walks.append(walk[:outer] + nowhere[1:] + walk[-1:])
                continue
            number = len(space) < len(shape) or (space != shape and numel(space[outer:]) == 1)
            walks.append(walk[:outer] + nowhere if number else walk)
        order = layout.contiguous(self.outer)
        sizes, (_, *merged) = layout.collapse(self.outer, [order, *[w[:outer] for w in walks]])
        if sizes == (1,):  # a row alone: nothing goes along it
            merged = [(0,)] * len(walks)
        return sizes + self.row, [a + w[outer:] for a, w in zip(merged, walks, strict=True)]

    def _is_folded(self, walk: Ints) -> bool:
        """Whether an operand does not go along the dimensions of a row as along one."""
        own = walk[len(walk) - len(self.row) :]
        return any(own) and any(
            a != b * own[-1] for a, b in zip(own, layout.contiguous(self.row), strict=True)
        )

    def _unfolded(self, walk: Ints) -> Ints:
        """The strides of one that does: along the last of them."""
        return (*walk[: len(walk) - len(self.row)], *(0 for _ in self.row[1:]), walk[-1])

    def _walk(self, vec: int, columns: int, threads: int, part: Part | None) -> Walk:
        """How a thread of a row goes through what `part` reads."""
        groups = -(-columns // (vec * threads))
        most = _HELD_BY_MANY if threads > 512 else _HELD
        rounded = Walk.rounded(groups)
        lines = max((len(function.lines) for function in self.functions), default=1)
        words = 0 if part is None else self._words(part.reads, vec)
        if rounded * max(1, words) > most or rounded * vec * lines > _STATEMENTS:
            return Walk(vec, 0, False)
        return Walk(vec, rounded, columns == rounded * vec * threads)

    def _is_ahead(self, columns: Part | None, first: Stage, walk: Walk) -> bool:
        """Whether there are registers for what the stores read besides the first stage."""
        if columns is None or first.walk.held == 0:
            return False
        more = set(columns.reads) - set(first.part.reads)
        return 0 < walk.held * self._words(more, walk.vec) <= _AHEAD

    def _words(self, reads: Iterable[int], vec: int) -> int:
        """Registers for what a thread reads at once of rows."""
        found = 0
        for k in reads:
            if 0 <= k < KEPT and self.loads[k][1] == self.shape:
                size = ITEMSIZE[self._read(self.loads[k][0]).code]
                found += max(1, vec * size // 4) if vec > 1 else max(1, size // 4)
        return found

    def _stage(self, index: int, columns: int) -> Stage:
        step, scheme = self.steps[index], self.schemes[index]
        operands, op = [arg for arg in step.args if arg < CONST], step.op
        operand = operands[0]
        before = self.walks[-1] if self.walks else None
        if before is not None and before.held and before.vec == scheme.group:
            walk = before
            part = self._part([operand], self.shape, walk)
        else:
            of_blocks = scheme.kernel == "blocks"
            part = self._part(operands if of_blocks else [operand], self.shape)
            walk = self._walk(scheme.group, columns, scheme.threads, part)
            # no row of groups is stored, so nothing of it is needed twice
            passing = op.name == "group_norm" and walk.held > _PASSING
            passing = passing or (scheme.kernel == "spatial" and walk.held > _UNROLLED)
            if scheme.uneven or of_blocks or self.blocks > 1 or passing:
                walk = Walk(scheme.group, 0, False)
        self.walks.append(walk)
        scalars = [arg - CONST for arg in step.args if arg >= CONST]
        scalar = self._const(*scalars, "f32", False) if scalars else -1
        factor = -1
        if op.name == "norm_dot":
            key = (step.args[-1], self.shape)
            if key not in self.loads:
                self.loads.append(key)
            factor = self.loads.index(key)
        first = len({*self.values.values()})  # a statistic that is stored has two keys
        counts = STATISTICS if self.blocks == 1 else PARTIAL
        for which in range(counts.get(op.name, 1)):
            self.values[index, -1 - which] = first + which
        own = [(k, found.which) for k, found in self.statistics.items() if found.of == index]
        self.values.update(((k, 0), first + which) for k, which in own)
        after = []
        for number in self.numbers:
            known = (number, 0) in self.values
            if not known and self._is_known(number):
                after.append(self._part([number], self.steps[number].out.shape))
                self.values[number, 0] = len({*self.values.values()})
        origin = self.loads.index((operand, self.shape)) if scheme.uneven and operand < 0 else -1
        return Stage(
            op.name, scheme.kernel, scheme.across, walk, scheme.uneven, origin, scalar,
            step.common if op.name == "group_norm" else "", factor, part, tuple(after),
        )  # fmt: skip

    def _is_known(self, number: int) -> bool:
        """Whether all the reductions are done from which a number of the row follows."""
        given = {k for k in self.numbers if (k, 0) in self.values}
        steps = needed(self.args, [number], given)
        return all((k, -1) in self.values for k in steps if isinstance(self.steps[k], Reduced))

    def _const(self, const: int, code: str, inverse: bool) -> int:
        self.consts.append(const)
        self.codes.append(code)
        self.inverted.append(inverse)
        return len(self.consts) - 1

    def _kept(self, walk: Walk | None) -> dict[Ref, int]:
        """Operands of stages that a thread has in registers when it goes through a row so."""
        if walk is None or not walk.held:
            return {}
        return {
            self.args[index][0]: KEPT + 2 * stage
            for stage, (index, own) in enumerate(zip(self.reduced, self.walks, strict=False))
            if own == walk and self.args[index][0] >= 0
        }

    def _part(self, targets: list[Ref], space: Ints, walk: Walk | None = None) -> Part:
        """The function that computes `targets` for an element of `space`, given what is known.

        walk: how a thread goes through what it reads.
        """
        steps = self.steps
        kept = self._kept(walk)
        given = {k for k in self.numbers if (k, 0) in self.values and k not in targets}
        given |= kept.keys()
        own = [k for k in targets if k >= 0 and k not in given]
        nodes = needed(self.finishing, own, given)
        position = {node: line for line, node in enumerate(nodes)}
        reads: list[int] = []  # loads of the kernel, or ~values of the row
        operands: list[Operand] = []
        consts: list[int] = []

        def read(which: int, code: str, how: int) -> Ref:
            if which not in reads:
                reads.append(which)
                operands.append(Operand(code, (how,)))
            return ~reads.index(which)

        def local(ref: Ref) -> Ref:
            if ref >= CONST:
                consts.append(ref - CONST)
                return CONST + len(consts) - 1
            if ref in position:
                return position[ref]
            if ref in kept:
                return read(kept[ref], steps[ref].out.code, UNIT)
            if ref in given:
                return read(~self.values[ref, 0], steps[ref].out.code, BROADCAST)
            key = (ref, space)
            if key not in self.loads:
                self.loads.append(key)
            return read(self.loads.index(key), self._read(ref).code, UNIT)

        lines = []
        for node in nodes:
            step = steps[node]
            if isinstance(step, Reduced):
                shares = self._shares(node, walk)
                kernel = self.schemes[node].kernel
                op = finish(step.op.name, step.op.params, kernel, shares >= 0)
                values = [self.values[node, -1 - k] for k in range(STATISTICS.get(op.name, 1))]
                if shares >= 0:
                    lines.append(Line(op, (read(shares, "f32", UNIT),), "f32", step.out.code))
                    continue
                names = op.names[: len(op.names) - len(values)]
                refs = [local(step.args[step.op.names.index(name)]) for name in names]
                refs += [read(~value, "f32", BROADCAST) for value in values]
                lines.append(Line(op, tuple(refs), "f32", step.out.code))
                continue
            refs = [local(ref) for ref in step.args]
            op = step.op
            if op.by_scalar is not None and refs[-1] >= CONST:
                op = op.by_scalar
            lines.append(Line(op, tuple(refs), step.common, step.out.code))
        results = [position[k] if k in position else local(k) for k in targets]
        plan = Plan(
            device="cuda",
            loads=tuple(operands),
            consts=tuple(self.program.consts[k] for k in consts),
            lines=tuple(lines),
            stores=tuple(
                (result, Operand(self._read(k).code, (UNIT,)))
                for result, k in zip(results, targets, strict=True)
            ),
            rank=1,
            lanes=1,
            wide=False,
        )
        first = len(self.consts)
        for k, const in enumerate(consts):
            self._const(const, text.const_code(plan, k), plan.inverted[k])
        self.functions.append(plan)
        return Part(tuple(reads), tuple(range(first, len(self.consts))))

    def _shares(self, index: int, walk: Walk | None) -> int:
        """Where a thread has what a softmax gives; -1 if it has not kept it."""
        stage = self.reduced.index(index)
        held = walk is not None and walk.held and self.walks[stage] == walk
        return KEPT + 2 * stage + 1 if held and self.steps[index].op.name == "softmax" else -1

    def _lines(self) -> Iterable[Line]:
        """Each op of the kernel once, in order, for its name."""
        for index in needed(self.args, self.program.live):
            step = self.steps[index]
            if index not in self.statistics:
                yield Line(step.op, (), step.common, step.out.code)
