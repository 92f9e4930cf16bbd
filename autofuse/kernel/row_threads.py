"""The threads of row kernels, as LLVM IR: which elements each takes, what it loads and stores.

A row has `rows.threads` threads, of which each takes elements as torch's thread of that number
does. What is done with them stands in `row_emit`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir

from .division import WARP
from .emit import packed, unpacked
from .lower import Element
from .row_exchange import Exchanges, State
from .source import BROADCAST, ITEMSIZE, KEPT, UNIT, Operand, Parameters, Part, Source, Stage, Walk
from .targets import F32, I8, I16, I32, I64, STORED, Cuda, Value, special_register

_MOST_AT_ONCE = 4  # groups of a row that is not kept, which are loaded before they are stored...
_IN_FLIGHT = 16  # ...in so many registers, and in so many statements:
_STATEMENTS = 256


class RowThreads(Exchanges):
    """The work of one thread, but for the reductions."""

    def __init__(
        self, source: Source, builder: ir.IRBuilder, target: Cuda, params: list[Any]
    ) -> None:
        assert source.rows is not None
        super().__init__(source, source.rows, builder, target)
        self.element = Element(builder, target)
        self.word = I64 if source.wide else I32
        layout = Parameters.of(source)
        cut = layout.loads + layout.stores
        self.pointers, rest = params[:cut], params[cut:]
        self.consts, rest = rest[: layout.consts], rest[layout.consts :]
        self.count, *rest = rest
        sizes, end = rest[: source.rank - 1], source.rank - 1 - self.rows.axes
        self.inner, self.row_sizes = sizes[:end], sizes[end:]
        self.columns = reduce(builder.mul, self.row_sizes)
        self.strides = rest[source.rank - 1 :]
        tree = ast.parse(source.text)
        functions = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
        parts = [part for stage in self.rows.stages for part in (stage.part, *stage.after)]
        parts += [self.rows.columns] if self.rows.columns is not None else []
        self.functions = {id(p): f for p, f in zip(parts, functions, strict=True)}
        self.turn: Any = self.word(0)  # the block's number among those of its row
        self.values: list[Value] = []  # of the row
        # in registers: operands of stages and shares of softmax, of each element of the thread
        self.found: dict[int, list[Value]] = {}
        self.stage = -1  # at work
        self.kept: dict[tuple[int, int, int], list[Any]] = {}  # load, group, vec: what it gave

    # --- the kernel ---------------------------------------------------------------------------

    def emit(self) -> None:
        builder, rows, word = self.builder, self.rows, self.word
        tid = special_register(builder, "tid.x")
        self.lane = builder.and_(tid, I32(WARP - 1))
        self.tid = tid  # in the block
        by = rows.together if rows.interleaved else rows.threads
        of, which = builder.lshr(tid, I32(by.bit_length() - 1)), builder.and_(tid, I32(by - 1))
        # its number in the row, and the row's in the block
        self.thread, self.own = (of, which) if rows.interleaved else (which, of)
        block = self.index(special_register(builder, "ctaid.x"))
        # of the row's groups: the thread's first, and how far from there its next is
        self.first, self.apart = self.index(self.thread), word(rows.threads)
        if rows.shared:
            blocks = self.index(special_register(builder, "nctaid.x"))
            count = builder.add(self.count, word(rows.together - 1))
            count = builder.lshr(count, word(rows.together.bit_length() - 1))
            blocks = builder.udiv(blocks, count)
            row = builder.udiv(block, blocks)
            self.turn = builder.sub(block, builder.mul(row, blocks))
            further = builder.mul(self.turn, self.apart)
            self.first = builder.add(self.first, further)
            self.apart = builder.mul(self.apart, blocks)
            block = row
        row = builder.add(builder.mul(block, word(rows.together)), self.index(self.own))
        self.live = builder.icmp_unsigned("<", row, self.count)
        # threads of no row go along with the last one: there are barriers
        row = builder.select(self.live, row, builder.sub(self.count, word(1)))
        self.row = row
        self.offsets = self.offsets(row)
        for self.stage, stage in enumerate(rows.stages):
            self.reduce(stage)
            for part in stage.after:
                self.values += self.call(part, [self.lanes(part, word(0), 1, -1)[0]])[0]
        if rows.columns is not None:
            self._store_columns(rows.columns)
        first = len(self.source.stores) - len(rows.values)
        if rows.values:
            one = builder.icmp_unsigned("==", self.thread, I32(0))
            with builder.if_then(builder.and_(one, self.live)):
                for k, value in enumerate(rows.values, first):
                    place = len(self.source.loads) + k
                    code = self.source.stores[k].code
                    bits = self.element.storable(self.values[value], code)
                    builder.store(bits, self._at(place, self.turn))

    def reduce(self, stage: Stage) -> None:
        """A stage: `values` get what it finds."""
        raise NotImplementedError

    def index(self, value: Any) -> Any:
        return value if value.type == self.word else self.builder.zext(value, self.word)

    def cut(self, address: Any) -> Any:
        """The low bits of a pointer, as an index has."""
        return address if self.word is I64 else self.builder.trunc(address, I32)

    def offsets(self, row: Any) -> list[Any]:
        """Of each operand, where the row begins, in elements; and its strides along columns."""
        builder, axes = self.builder, self.rows.axes
        walks = []
        for size in reversed(self.inner):
            quotient = builder.udiv(row, size)
            walks.append(builder.sub(row, builder.mul(quotient, size)))
            row = quotient
        walks.append(row)
        walks.reverse()
        strides, offsets = iter(self.strides), []
        self.steps = []  # along the dimensions of a row
        for operand in (*self.source.loads, *self.source.stores):
            offset = self.word(0)
            for how, walk in zip(operand.axes[:-axes], walks, strict=True):
                if how != BROADCAST:
                    offset = builder.add(offset, builder.mul(walk, next(strides)))
            self.steps.append(
                [
                    next(strides) if how not in (BROADCAST, UNIT) else self.word(int(how == UNIT))
                    for how in operand.axes[-axes:]
                ]
            )
            offsets.append(offset)
        return offsets

    # --- memory -------------------------------------------------------------------------------

    def _operand(self, place: int) -> Operand:
        return (*self.source.loads, *self.source.stores)[place]

    def _at(self, place: int, column: Any, further: int = 0) -> Any:
        """Where an operand has its element of `column`, or `further` neighbours behind that."""
        builder, kind = self.builder, STORED[self._operand(place).code]
        steps, offset = self.steps[place], self.offsets[place]
        beside = further and self.rows.folded[place] and self.rows.whole_vectors
        if beside:  # along the last dimension: no division for each
            offset = builder.add(offset, builder.mul(self.word(further), steps[-1]))
        elif further:
            column = builder.add(column, self.word(further))
        if self.rows.folded[place]:
            for size, step in zip(self.row_sizes[:0:-1], steps[:0:-1], strict=True):
                quotient = builder.udiv(column, size)
                digit = builder.sub(column, builder.mul(quotient, size))
                offset = builder.add(offset, builder.mul(digit, step))
                column = quotient
        step = steps[0 if self.rows.folded[place] else -1]
        offset = builder.add(offset, builder.mul(column, step))
        base = builder.inttoptr(self.pointers[place], self.target.pointer_to(kind))
        return builder.gep(base, [offset])

    def _repeats(self, place: int) -> bool:
        """Whether an operand has one element for all that a thread takes of a row at once."""
        if self._operand(place).axes[-1] != BROADCAST:
            return False
        return self.rows.whole_vectors or not self.rows.folded[place]

    def _moves(self, place: int, vec: int) -> bool:
        """Whether `vec` neighbours of an operand are moved as vectors."""
        nbytes = vec * ITEMSIZE[self._operand(place).code]
        return vec > 1 and self.rows.aligned[place] and nbytes % 4 == 0

    def _load(self, place: int, column: Any, vec: int) -> list[Any]:
        """`vec` neighbours from `column` on: the bits of each, or words that hold several."""
        builder, operand = self.builder, self._operand(place)
        if self._repeats(place):
            return [builder.load(self._at(place, column))] * vec
        if not self._moves(place, vec):
            return [builder.load(self._at(place, column, k)) for k in range(vec)]
        kind = STORED[operand.code]
        each, narrow = self._vector(kind, vec)
        bits: list[Any] = []
        for first in range(0, vec, each):
            at = self._at(place, column, first)
            size = each * kind.width // 8 if narrow else each * ITEMSIZE[operand.code]
            vector = ir.VectorType(I32, size // 4) if narrow else ir.VectorType(kind, each)
            packed = builder.load(builder.bitcast(at, self.target.pointer_to(vector)), align=size)
            bits += [builder.extract_element(packed, I32(k)) for k in range(vector.count)]
        return bits

    def _store(self, place: int, column: Any, values: list[Any]) -> None:
        builder, operand = self.builder, self._operand(place)
        if not self._moves(place, len(values)):
            for k, value in enumerate(values):
                builder.store(value, self._at(place, column, k))
            return
        kind = STORED[operand.code]
        each, narrow = self._vector(kind, len(values))
        for first in range(0, len(values), each):
            part = values[first : first + each]
            size = each * ITEMSIZE[operand.code]
            part = packed(self.builder, part) if narrow else part
            vector = ir.Constant(ir.VectorType(part[0].type, len(part)), ir.Undefined)
            for k, value in enumerate(part):
                vector = builder.insert_element(vector, value, I32(k))
            at = self._at(place, column, first)
            at = builder.bitcast(at, self.target.pointer_to(vector.type))
            builder.store(vector, at, align=size)

    @staticmethod
    def _vector(kind: Any, vec: int) -> tuple[int, bool]:
        """How many of `vec` neighbours one access moves, and whether in 32-bit words."""
        narrow = isinstance(kind, ir.IntType) and kind.width < 32
        nbytes = {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4}.get(kind, 8)
        return min(vec, 16 // nbytes), narrow

    # --- element functions --------------------------------------------------------------------

    def lanes(self, part: Part, column: Any, vec: int, group: int) -> list[list[Value]]:
        """The arguments of a part for `vec` elements from `column` on, one list each.

        group: the number of the thread's group where what it reads is kept, else -1.
        """
        read: list[list[Value]] = []
        for which in part.reads:
            if which < 0:
                read.append([self.values[~which]] * vec)
                continue
            if which >= KEPT:
                read.append(self.found[which][group * vec : (group + 1) * vec])
                continue
            code = self.source.loads[which].code
            bits = self._kept(which, column, vec, group)
            if len(bits) < vec:
                bits = unpacked(self.builder, bits, STORED[code])
            read.append([self.element.loaded(x, code) for x in bits])
        consts = [Value(self.consts[k], self.source.consts[k]) for k in part.consts]
        return [[*(values[k] for values in read), *consts] for k in range(vec)]

    def _kept(self, which: int, column: Any, vec: int, group: int) -> list[Any]:
        """What a load gives, loaded once for each group that is kept."""
        if group < 0:
            return self._load(which, column, vec)
        key = (which, group, vec)
        bits = self.kept.get(key)
        if bits is None:
            bits = self.kept[key] = self._load(which, column, vec)
        elif len(bits) < vec:  # or LLVM would keep what it has unpacked, in twice the registers
            bits = [self.target.barrier(word) for word in bits]
        return bits

    def _prefetch(self) -> None:
        """Load what the stores read of each row before the threads wait for each other."""
        part, walk, loads = self.rows.columns, self.rows.walk, self.source.loads
        if part is None or not self.rows.ahead:
            return
        groups = self.groups(walk)
        for which in part.reads:
            if not 0 <= which < KEPT:
                continue
            if loads[which].axes[-1] != BROADCAST and any(loads[which].axes[:-1]):
                for k in range(walk.held):
                    key = (which, k, walk.vec)
                    if key not in self.kept:
                        column, _ = self.held(walk, groups, k)
                        self.kept[key] = self._load(which, column, walk.vec)

    def groups(self, walk: Walk) -> Any:
        """How many groups of neighbours a row has."""
        if walk.vec == 1:
            return self.columns
        return self.builder.lshr(self.columns, self.word(walk.vec.bit_length() - 1))

    def call(self, part: Part, lanes: list[list[Value]]) -> list[list[Value]]:
        """What the function of a part gives for each lane."""
        results: list[list[Value]] = []
        for k in range(0, len(lanes), 2):
            results += self.element.run(self.functions[id(part)], lanes[k : k + 2])
        return results

    def elements(self, part: Part, column: Any, vec: int, group: int) -> list[Any]:
        """The operand of a stage, as float32."""
        found = self.call(part, self.lanes(part, column, vec, group))
        return [value.ir for (value,) in found]

    # --- loops --------------------------------------------------------------------------------

    def each(
        self, start: Any, step: Any, inside: Callable[[Any], Any], state: State,
        body: Callable[[Any, State], State],
    ) -> State:  # fmt: skip
        """`state` after `body` of start, start + step, ... as long as `inside` holds."""
        builder = self.builder
        before, head = builder.block, builder.append_basic_block("head")
        builder.branch(head)
        builder.position_at_end(head)
        position = builder.phi(start.type)
        phis = [builder.phi(value.type) for value in state]
        position.add_incoming(start, before)
        for phi, value in zip(phis, state, strict=True):
            phi.add_incoming(value, before)
        inner, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.cbranch(inside(position), inner, after)
        builder.position_at_end(inner)
        new = body(position, phis)
        position.add_incoming(builder.add(position, step), builder.block)
        for phi, value in zip(phis, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return phis

    def sweep(
        self, stage: Stage, state: State, take: Callable[[State, list[Any], int], State],
        cycle: int = 1,
    ) -> State:  # fmt: skip
        """`state` after `take` of each group of the thread's elements, in order.

        take: of state, the elements and the number of the group, by `cycle` where there are many.
        """
        builder, word, walk = self.builder, self.word, stage.walk
        vec, groups = walk.vec, self.groups(walk)
        if not walk.held:

            def body(group: Any, state: State) -> State:
                for k in range(cycle):
                    at, inside = self._further(group, k, groups)
                    elements = self.elements(stage.part, builder.mul(at, word(vec)), vec, -1)
                    state = self.chosen(inside, take(state, elements, k), state)
                return state

            inside = lambda group: builder.icmp_unsigned("<", group, groups)  # noqa: E731
            step = builder.mul(self.apart, word(cycle))
            return self.each(self.first, step, inside, state, body)
        places = [self.held(walk, groups, k) for k in range(walk.held)]
        found = self.found.get(KEPT + 2 * self.stage)
        if found is None:
            lanes = [
                lane
                for k, (column, _) in enumerate(places)
                for lane in self.lanes(stage.part, column, vec, k)
            ]
            self._prefetch()
            found = [value for (value,) in self.call(stage.part, lanes)]
            self.found[KEPT + 2 * self.stage] = found
        for k, (_, inside) in enumerate(places):
            new = take(state, [value.ir for value in found[k * vec : (k + 1) * vec]], k)
            state = self.chosen(inside, new, state)
        return state

    def sweep_ahead(
        self, stage: Stage, state: State, take: Callable[[State, list[Any], int], State], many: int
    ) -> State:
        """As `sweep` of a row that is not held, without vectors, by `many`: so many are loaded
        before the first is taken, where `take` has branches that no load would be moved across."""
        builder, word = self.builder, self.word
        places = [builder.mul(self.apart, word(k)) for k in range(many)]

        def some(column: Any, state: State, masked: bool) -> State:
            loaded, masks = [], []
            for place in places:
                at, inside = builder.add(column, place), None
                if masked:
                    inside = builder.icmp_unsigned("<", at, self.columns)
                    at = builder.select(inside, at, word(0))
                loaded += self.elements(stage.part, at, 1, -1)
                masks.append(inside)
            every = zip(self.target.together(loaded), masks, strict=True)
            for k, (x, inside) in enumerate(every):
                state = self.chosen(inside, take(state, [x], k), state)
            return state

        def body(column: Any, state: State) -> State:
            *state, _ = state
            return [*some(column, state, False), builder.add(column, step)]

        step = builder.mul(self.apart, word(many))
        last = places[-1]
        inside = lambda column: builder.icmp_unsigned(  # noqa: E731
            "<", builder.add(column, last), self.columns
        )
        *state, column = self.each(self.first, step, inside, [*state, self.first], body)
        behind = builder.icmp_unsigned("<", column, self.columns)
        return self.where(behind, state, lambda: some(column, state, True))

    def chosen(self, inside: Any, new: State, state: State) -> State:
        """`new` where `inside` holds, or is not asked, else `state`."""
        if inside is None:
            return new
        return [
            self.builder.select(inside, a, b) if a is not b else a
            for a, b in zip(new, state, strict=True)
        ]

    def held(self, walk: Walk, groups: Any, k: int) -> tuple[Any, Any]:
        """Where the thread's group k begins, the first one for none; and whether there is one."""
        builder, word = self.builder, self.word
        group = builder.add(self.index(self.thread), word(k * self.rows.threads))
        inside = None
        if k >= walk.sure:
            inside = builder.icmp_unsigned("<", group, groups)
            group = builder.select(inside, group, word(0))
        return builder.mul(group, word(walk.vec)), inside

    def _further(self, group: Any, k: int, groups: Any) -> tuple[Any, Any]:
        """The thread's group k after `group`, the row's first for none; and whether there is one,
        None for `group` itself."""
        if not k:
            return group, None
        builder, word = self.builder, self.word
        at = builder.add(group, builder.mul(self.apart, word(k)))
        inside = builder.icmp_unsigned("<", at, groups)
        return builder.select(inside, at, word(0)), inside

    def _at_once(self, part: Part, vec: int) -> int:
        """How many groups are loaded before the first is stored: no load moves across a store."""
        lines = len(self.functions[id(part)].body)
        loads = [self.source.loads[which] for which in part.reads if 0 <= which < KEPT]
        words = [
            max(1, vec * ITEMSIZE[operand.code] // 4)
            for operand in loads if operand.axes[-1] != BROADCAST
        ]  # fmt: skip
        if not words:
            return 1
        return max(1, min(_MOST_AT_ONCE, _IN_FLIGHT // sum(words), _STATEMENTS // (vec * lines)))

    def _store_columns(self, part: Part) -> None:
        builder, word, walk = self.builder, self.word, self.rows.walk
        loads, count = len(self.source.loads), len(self.source.stores) - len(self.rows.values)
        groups = self.groups(walk)

        def put(column: Any, lanes: list[list[Value]], live: Any) -> None:
            found = self.call(part, lanes)
            stores = [
                [self.element.storable(lane[k], self.source.stores[k].code) for lane in found]
                for k in range(count)
            ]
            with builder.if_then(live):
                for k, values in enumerate(stores):
                    self._store(loads + k, column, values)

        if walk.held:
            for k in range(walk.held):
                column, inside = self.held(walk, groups, k)
                live = self.live if inside is None else builder.and_(inside, self.live)
                put(column, self.lanes(part, column, walk.vec, k), live)
            return
        many = self._at_once(part, walk.vec)

        def body(group: Any, state: State) -> State:
            read = []
            for k in range(many):
                at, inside = self._further(group, k, groups)
                live = self.live if inside is None else builder.and_(inside, self.live)
                column = builder.mul(at, word(walk.vec))
                read.append((column, self.lanes(part, column, walk.vec, -1), live))
            for what in read:
                put(*what)
            return state

        inside = lambda group: builder.icmp_unsigned("<", group, groups)  # noqa: E731
        self.each(self.first, builder.mul(self.apart, word(many)), inside, [], body)
