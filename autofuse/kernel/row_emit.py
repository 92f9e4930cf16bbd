"""Row kernels as LLVM IR: in the order of torch's reduction kernels, addition by addition.

A row has `rows.threads` threads, of which each takes elements as torch's thread of that number
does; the steps of every kernel stand in the functions named after them. Contraction never decides:
every product that is added is either a fused multiply-add here or rounded.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .lower import Element
from .source import BROADCAST, ITEMSIZE, UNIT, Operand, Parameters, Part, Source, Stage, Walk
from .targets import F32, I1, I8, I16, I32, I64, STORED, VOID, Cuda, Value, special_register

State = list[Any]  # LLVM values
WARP = 32
_INFINITY = float("inf")
_LOWEST = -3.4028234663852886e38  # of float32
_FLOAT = {"sum": 0.0, "mean": 0.0, "amax": -_INFINITY, "amin": _INFINITY}


def emit_rows(
    source: Source, builder: ir.IRBuilder, capability: tuple[int, int], params: list[Any]
) -> None:
    """Emit a whole row kernel: the work of one thread."""
    _Rows(source, builder, Cuda(builder, capability), params).emit()


class _Rows:
    def __init__(
        self, source: Source, builder: ir.IRBuilder, target: Cuda, params: list[Any]
    ) -> None:
        assert source.rows is not None
        self.source, self.rows = source, source.rows
        self.builder, self.target, self.element = builder, target, Element(builder, target)
        self.word = I64 if source.wide else I32
        layout = Parameters.of(source)
        cut = layout.loads + layout.stores
        self.pointers, rest = params[:cut], params[cut:]
        self.consts, rest = rest[: layout.consts], rest[layout.consts :]
        self.count, *rest = rest
        *self.inner, self.columns = rest[: source.rank - 1]
        self.strides = rest[source.rank - 1 :]
        tree = ast.parse(source.text)
        functions = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
        parts = [part for stage in self.rows.stages for part in (stage.part, *stage.after)]
        parts += [self.rows.columns] if self.rows.columns is not None else []
        self.functions = {id(p): f for p, f in zip(parts, functions, strict=True)}
        self.values: list[Value] = []  # of the row
        self.shared: Any = None
        self.kept: dict[tuple[int, int, int], list[Any]] = {}  # load, group, vec: bits of its lanes

    # --- the kernel ---------------------------------------------------------------------------

    def emit(self) -> None:
        builder, rows, word = self.builder, self.rows, self.word
        tid = special_register(builder, "tid.x")
        self.lane = builder.and_(tid, I32(WARP - 1))
        self.tid = tid  # in the block
        self.thread = builder.and_(tid, I32(rows.threads - 1))  # in the row
        own = builder.lshr(tid, I32(rows.threads.bit_length() - 1))
        self.own = own  # row of the block
        block = self._word(special_register(builder, "ctaid.x"))
        row = builder.add(builder.mul(block, word(rows.together)), self._word(own))
        self.live = builder.icmp_unsigned("<", row, self.count)
        # threads of no row go along with the last one: there are barriers
        row = builder.select(self.live, row, builder.sub(self.count, word(1)))
        self.row = row
        self.offsets = self._offsets(row)
        for stage in rows.stages:
            self._reduce(stage)
            for part in stage.after:
                self.values += self._call(part, [self._lanes(part, word(0), 1, -1)[0]])[0]
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
                    builder.store(bits, self._at(place, word(0)))

    def _word(self, value: Any) -> Any:
        return value if value.type == self.word else self.builder.zext(value, self.word)

    def _offsets(self, row: Any) -> list[Any]:
        """Of each operand, where the row begins, in elements; and its strides along columns."""
        builder = self.builder
        walks = []
        for size in reversed(self.inner):
            quotient = builder.udiv(row, size)
            walks.append(builder.sub(row, builder.mul(quotient, size)))
            row = quotient
        walks.append(row)
        walks.reverse()
        strides, offsets = iter(self.strides), []
        self.steps = []  # along columns
        for operand in (*self.source.loads, *self.source.stores):
            offset = self.word(0)
            for how, walk in zip(operand.axes[:-1], walks, strict=True):
                if how != BROADCAST:
                    offset = builder.add(offset, builder.mul(walk, next(strides)))
            how = operand.axes[-1]
            self.steps.append(
                next(strides) if how not in (BROADCAST, UNIT) else self.word(int(how == UNIT))
            )
            offsets.append(offset)
        return offsets

    # --- memory -------------------------------------------------------------------------------

    def _operand(self, place: int) -> Operand:
        return (*self.source.loads, *self.source.stores)[place]

    def _at(self, place: int, column: Any) -> Any:
        """Where an operand has its element of `column`."""
        builder, kind = self.builder, STORED[self._operand(place).code]
        moved = builder.mul(column, self.steps[place])
        offset = builder.add(self.offsets[place], moved)
        base = builder.inttoptr(self.pointers[place], self.target.pointer_to(kind))
        return builder.gep(base, [offset])

    def _moves(self, place: int, vec: int) -> bool:
        """Whether `vec` neighbours of an operand are moved as vectors."""
        nbytes = vec * ITEMSIZE[self._operand(place).code]
        return vec > 1 and self.rows.aligned[place] and nbytes % 4 == 0

    def _load(self, place: int, column: Any, vec: int) -> list[Any]:
        """The bits of `vec` neighbours from `column` on."""
        builder, operand = self.builder, self._operand(place)
        if operand.axes[-1] == BROADCAST:
            return [builder.load(self._at(place, self.word(0)))] * vec
        if not self._moves(place, vec):
            return [
                builder.load(self._at(place, builder.add(column, self.word(k)))) for k in range(vec)
            ]
        kind = STORED[operand.code]
        each, narrow = self._vector(kind, vec)
        bits: list[Any] = []
        for first in range(0, vec, each):
            at = self._at(place, builder.add(column, self.word(first)))
            size = each * kind.width // 8 if narrow else each * ITEMSIZE[operand.code]
            vector = ir.VectorType(I32, size // 4) if narrow else ir.VectorType(kind, each)
            packed = builder.load(builder.bitcast(at, self.target.pointer_to(vector)), align=size)
            words = [builder.extract_element(packed, I32(k)) for k in range(vector.count)]
            bits += self._unpacked(words, kind) if narrow else words
        return bits

    def _store(self, place: int, column: Any, values: list[Any]) -> None:
        builder, operand = self.builder, self._operand(place)
        if not self._moves(place, len(values)):
            for k, value in enumerate(values):
                builder.store(value, self._at(place, builder.add(column, self.word(k))))
            return
        kind = STORED[operand.code]
        each, narrow = self._vector(kind, len(values))
        for first in range(0, len(values), each):
            part = values[first : first + each]
            size = each * ITEMSIZE[operand.code]
            part = self._packed(part) if narrow else part
            vector = ir.Constant(ir.VectorType(part[0].type, len(part)), ir.Undefined)
            for k, value in enumerate(part):
                vector = builder.insert_element(vector, value, I32(k))
            at = self._at(place, builder.add(column, self.word(first)))
            at = builder.bitcast(at, self.target.pointer_to(vector.type))
            builder.store(vector, at, align=size)

    @staticmethod
    def _vector(kind: Any, vec: int) -> tuple[int, bool]:
        """How many of `vec` neighbours one access moves, and whether in 32-bit words."""
        narrow = isinstance(kind, ir.IntType) and kind.width < 32
        nbytes = {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4}.get(kind, 8)
        return min(vec, 16 // nbytes), narrow

    def _unpacked(self, words: list[Any], kind: ir.IntType) -> list[Any]:
        builder, bits = self.builder, kind.width
        return [
            builder.trunc(builder.lshr(word, I32(place)), kind)
            for word in words
            for place in range(0, 32, bits)
        ]

    def _packed(self, values: list[Any]) -> list[Any]:
        builder, bits = self.builder, values[0].type.width
        words = []
        for k in range(0, len(values), 32 // bits):
            word = I32(0)
            for place, value in enumerate(values[k : k + 32 // bits]):
                wide = builder.zext(value, I32)
                word = builder.or_(word, builder.shl(wide, I32(place * bits)))
            words.append(word)
        return words

    # --- element functions --------------------------------------------------------------------

    def _lanes(self, part: Part, column: Any, vec: int, group: int) -> list[list[Value]]:
        """The arguments of a part for `vec` elements from `column` on, one list each.

        group: the number of the thread's group where what it reads is kept, else -1.
        """
        read: list[list[Value]] = []
        for which in part.reads:
            if which < 0:
                read.append([self.values[~which]] * vec)
                continue
            key = (which, group, vec)
            bits = self.kept.get(key) if group >= 0 else None
            if bits is None:
                bits = self._load(which, column, vec)
                if group >= 0:
                    self.kept[key] = bits
            code = self.source.loads[which].code
            read.append([self.element.loaded(x, code) for x in bits])
        consts = [Value(self.consts[k], self.source.consts[k]) for k in part.consts]
        return [[*(values[k] for values in read), *consts] for k in range(vec)]

    def _call(self, part: Part, lanes: list[list[Value]]) -> list[list[Value]]:
        """What the function of a part gives for each lane."""
        results: list[list[Value]] = []
        for k in range(0, len(lanes), 2):
            results += self.element.run(self.functions[id(part)], lanes[k : k + 2])
        return results

    def _elements(self, part: Part, column: Any, vec: int, group: int) -> list[Any]:
        """The operand of a stage, as float32."""
        found = self._call(part, self._lanes(part, column, vec, group))
        return [value.ir for (value,) in found]

    # --- loops --------------------------------------------------------------------------------

    def _each(
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

    def _sweep(
        self, part: Part, walk: Walk, state: State,
        take: Callable[[State, list[Any], int], State],
    ) -> State:  # fmt: skip
        """`state` after `take` of each group of the thread's elements, in order.

        take: of state, the elements and the number of the group, -1 where it is not known.
        """
        builder, word = self.builder, self.word
        threads, vec = self.rows.threads, walk.vec
        groups = self.columns
        if vec > 1:
            groups = builder.lshr(groups, word(vec.bit_length() - 1))
        first = self._word(self.thread)
        if not walk.held:

            def body(group: Any, state: State) -> State:
                column = builder.mul(group, word(vec))
                return take(state, self._elements(part, column, vec, -1), -1)

            inside = lambda group: builder.icmp_unsigned("<", group, groups)  # noqa: E731
            return self._each(first, word(threads), inside, state, body)
        places = [self._held(walk, groups, k) for k in range(walk.held)]
        lanes = [self._lanes(part, column, vec, k) for k, (column, _) in enumerate(places)]
        for k, (_, inside) in enumerate(places):
            elements = [value.ir for (value,) in self._call(part, lanes[k])]
            new = take(state, elements, k)
            if inside is not None:
                new = [
                    builder.select(inside, a, b) if a is not b else a
                    for a, b in zip(new, state, strict=True)
                ]
            state = new
        return state

    def _held(self, walk: Walk, groups: Any, k: int) -> tuple[Any, Any]:
        """Where the thread's group k begins, the first one for none; and whether there is one."""
        builder, word = self.builder, self.word
        group = builder.add(self._word(self.thread), word(k * self.rows.threads))
        inside = None
        if not walk.full:
            inside = builder.icmp_unsigned("<", group, groups)
            group = builder.select(inside, group, word(0))
        return builder.mul(group, word(walk.vec)), inside

    def _store_columns(self, part: Part) -> None:
        builder, word, walk = self.builder, self.word, self.rows.walk
        loads, count = len(self.source.loads), len(self.source.stores) - len(self.rows.values)
        groups = self.columns
        if walk.vec > 1:
            groups = builder.lshr(groups, word(walk.vec.bit_length() - 1))

        def put(column: Any, group: int, live: Any) -> None:
            lanes = self._call(part, self._lanes(part, column, walk.vec, group))
            stores = [
                [self.element.storable(lane[k], self.source.stores[k].code) for lane in lanes]
                for k in range(count)
            ]
            with builder.if_then(live):
                for k, values in enumerate(stores):
                    self._store(loads + k, column, values)

        if walk.held:
            for k in range(walk.held):
                column, inside = self._held(walk, groups, k)
                put(column, k, self.live if inside is None else builder.and_(inside, self.live))
            return

        def body(group: Any, state: State) -> State:
            put(builder.mul(group, word(walk.vec)), -1, self.live)
            return state

        inside = lambda group: builder.icmp_unsigned("<", group, groups)  # noqa: E731
        self._each(self._word(self.thread), word(self.rows.threads), inside, [], body)

    # --- arithmetic ---------------------------------------------------------------------------

    def _f(self, value: float) -> Any:
        return ir.Constant(F32, value)

    def _do(self, name: str, *args: Any) -> Any:
        """A function of float32, rounded once."""
        return self.target.call(name, [Value(arg, "f32") for arg in args])

    def _exp_parts(self, x: Any) -> tuple[Any, Any]:
        """Two factors of the exponential, as CUDA's expf has them before its last product.

        Where torch adds it up the compiler has contracted that product with the sum.
        """
        scaled = self.target.ptx("fma.rn.sat.f32 $0, $1, 0f3BBB989D, 0f3F000000;", F32, x)
        whole = self.target.ptx("fma.rm.f32 $0, $1, 0f437C0000, 0f4B400001;", F32, scaled)
        minus = self._do("sub", self._f(12583039.0), whole)
        rest = self.target.ptx("fma.rn.f32 $0, $1, 0f3FB8AA3B, $2;", F32, x, minus)
        rest = self.target.ptx("fma.rn.f32 $0, $1, 0f32A57060, $2;", F32, x, rest)
        power = self.builder.shl(self.builder.bitcast(whole, I32), I32(23))
        return self.builder.bitcast(power, F32), self._do("ex2", rest)

    # --- threads ------------------------------------------------------------------------------

    def _sync(self) -> None:
        function = self.builder.module.globals.get("llvm.nvvm.barrier0")
        if function is None:
            signature = ir.FunctionType(VOID, [])
            function = ir.Function(self.builder.module, signature, "llvm.nvvm.barrier0")
        self.builder.call(function, [])

    def _shuffle(self, mode: int, value: Any, by: Any) -> Any:
        """What another lane of the warp has; mode: 0 for lane `by`, 2 for `by` further, 3 for xor.

        All 32 lanes of a warp come by, whatever row they are at.
        """
        builder, name = self.builder, "llvm.nvvm.shfl.sync.i32"
        function = builder.module.globals.get(name)
        if function is None:
            result = ir.LiteralStructType((I32, I1))
            function = ir.Function(builder.module, ir.FunctionType(result, [I32] * 5), name)
        bits = builder.bitcast(value, I32) if value.type == F32 else value
        by = by if isinstance(by, ir.Value) else I32(by)
        moved = builder.call(function, [I32(-1), I32(mode), bits, by, I32(WARP - 1)])
        moved = builder.extract_value(moved, 0)
        return builder.bitcast(moved, F32) if value.type == F32 else moved

    def _down(self, state: State, first: int, combine: Callable[[State, State], State]) -> State:
        """Lane 0 of each group gets all: each lane takes those `first`, ..., 2, 1 further."""
        while first:
            state = combine(state, [self._shuffle(2, value, first) for value in state])
            first //= 2
        return state

    def _slot(self, place: Any) -> Any:
        """Shared memory number `place`."""
        if self.shared is None:
            size = max(self.rows.block, 3 * WARP)
            kind = ir.ArrayType(F32, size)
            name = f"{self.source.name}_shared"
            self.shared = ir.GlobalVariable(self.builder.module, kind, name, addrspace=3)
            self.shared.linkage, self.shared.align = "internal", 16
            self.shared.initializer = ir.Constant(kind, ir.Undefined)
        return self.builder.gep(self.shared, [I32(0), place])

    def _put(self, place: Any, value: Any) -> None:
        self.builder.store(value, self._slot(place))

    def _get(self, place: Any) -> Any:
        return self.builder.load(self._slot(place))

    def _given(self, state: State) -> State:
        """What the first thread of the row has, for all of them."""
        builder, threads = self.builder, self.rows.threads
        if threads <= WARP:
            first = builder.and_(self.lane, I32(WARP - threads))
            return [self._shuffle(0, value, first) for value in state]
        self._sync()
        place = builder.mul(self.own, I32(len(state)))
        with builder.if_then(builder.icmp_unsigned("==", self.thread, I32(0))):
            for k, value in enumerate(state):
                self._put(builder.add(place, I32(k)), value)
        self._sync()
        return [self._get(builder.add(place, I32(k))) for k in range(len(state))]

    def _where(self, condition: Any, state: State, make: Callable[[], State]) -> State:
        """`make()` where the condition holds, else `state`."""
        builder, before = self.builder, self.builder.block
        with builder.if_then(condition):
            new = make()
            inside = builder.block
        merged = []
        for a, b in zip(new, state, strict=True):
            phi = builder.phi(a.type)
            phi.add_incoming(a, inside)
            phi.add_incoming(b, before)
            merged.append(phi)
        return merged

    def _block(
        self, state: State, nothing: list[float], combine: Callable[[State, State], State]
    ) -> State:
        """Thread 0 gets all: warps by shuffles, then the first warp what each has found."""
        builder = self.builder
        warps = self.rows.threads // WARP
        state = self._down(state, WARP // 2, combine)
        warp = builder.lshr(self.thread, I32(5))
        self._sync()
        with builder.if_then(builder.icmp_unsigned("==", self.lane, I32(0))):
            for k, value in enumerate(state):
                self._put(builder.add(warp, I32(k * WARP)), value)
        self._sync()
        inside = builder.icmp_unsigned("<", self.thread, I32(warps))
        # lanes beyond read what another lane has written, and do not take it
        place = builder.and_(self.lane, I32(warps - 1))
        found = [self._get(builder.add(place, I32(k * WARP))) for k in range(len(state))]
        state = [
            builder.select(inside, value, self._f(none))
            for value, none in zip(found, nothing, strict=True)
        ]
        return self._down(state, WARP // 2, combine)

    # --- torch's kernels ----------------------------------------------------------------------

    def _reduce(self, stage: Stage) -> None:
        """A stage: `values` get what it finds."""
        if stage.kernel == "reduce":
            found = self._reduce_kernel(stage)
        elif stage.op in ("softmax", "log_softmax"):
            found = self._softmax(stage)
        else:
            found = self._norm(stage)
        self.values += [Value(value, "f32") for value in found]

    def _combine(self, op: str, a: Any, b: Any) -> Any:
        """What the reduce kernel makes of what it has, `a`, and another one."""
        if op in ("sum", "mean"):
            return self._do("add", a, b)
        builder = self.builder
        better = builder.fcmp_ordered(">" if op == "amax" else "<", a, b)
        nan = builder.fcmp_unordered("uno", a, a)
        return builder.select(builder.or_(nan, better), a, b)

    def _reduce_kernel(self, stage: Stage) -> State:
        """Reduce.cuh."""
        builder, op, vec = self.builder, stage.op, stage.walk.vec
        slots = vec if vec > 1 else 4
        combine = lambda a, b: [self._combine(op, x, y) for x, y in zip(a, b, strict=True)]  # noqa: E731
        state = [self._f(_FLOAT[op])] * slots

        def take(state: State, elements: list[Any], group: int) -> State:
            if vec > 1:
                return combine(state, elements)
            assert group >= 0  # short rows: the elements of a thread go to one slot after another
            new = list(state)
            new[group % 4] = self._combine(op, state[group % 4], elements[0])
            return new

        if stage.uneven:
            state = self._shifted(stage, state, take)
        else:
            state = self._sweep(stage.part, stage.walk, state, take)
        value, *others = state
        for other in others:
            value = self._combine(op, value, other)
        value = self._across(stage, value)
        if op == "mean":
            value = self._do("mul", value, self._factor())
        return self._given([value])

    def _factor(self) -> Any:
        """What a sum is multiplied by for the mean: results by elements, each as a float32."""
        builder = self.builder
        rows, every = self.count, builder.mul(self.count, self.columns)
        return builder.fdiv(builder.uitofp(rows, F32), builder.uitofp(every, F32))

    def _shifted(
        self, stage: Stage, state: State, take: Callable[[State, list[Any], int], State]
    ) -> State:
        """Vectors that begin at multiples of their size from where the first row begins.

        In front of them and behind them the first threads take one element each.
        """
        builder, word, part = self.builder, self.word, stage.part
        vec, op, thread = stage.walk.vec, stage.op, self._word(self.thread)
        shift = builder.and_(builder.mul(self.row, self.columns), word(vec - 1))
        shifted = builder.icmp_unsigned("!=", shift, word(0))
        head = builder.and_(
            builder.icmp_unsigned(">=", thread, shift), builder.icmp_unsigned("<", thread, word(vec))
        )
        head = builder.and_(head, shifted)

        def one(state: State, inside: Any, column: Any) -> State:
            column = builder.select(inside, column, word(0))
            (element,) = self._elements(part, column, 1, -1)
            first = builder.select(inside, self._combine(op, state[0], element), state[0])
            return [first, *state[1:]]

        state = one(state, head, builder.sub(thread, shift))
        before = builder.select(shifted, builder.sub(word(vec), shift), word(0))
        left = builder.sub(self.columns, before)
        whole = builder.lshr(left, word(vec.bit_length() - 1))

        def body(group: Any, state: State) -> State:
            column = builder.add(before, builder.mul(group, word(vec)))
            return take(state, self._elements(part, column, vec, -1), -1)

        inside = lambda group: builder.icmp_unsigned("<", group, whole)  # noqa: E731
        state = self._each(thread, word(self.rows.threads), inside, state, body)
        column = builder.add(builder.add(before, builder.mul(whole, word(vec))), thread)
        return one(state, builder.icmp_unsigned("<", column, self.columns), column)

    def _across(self, stage: Stage, value: Any) -> Any:
        """The first thread of the row gets what all have: along x, then along y."""
        builder, (width, height) = self.builder, stage.across
        combine = lambda a, b: [self._combine(stage.op, a[0], b[0])]  # noqa: E731
        x = builder.and_(self.thread, I32(width - 1))
        state = [value]

        def halve(state: State, place: Any, at: Any, first: int, last: int, apart: int) -> State:
            self._sync()
            self._put(place, state[0])
            while first >= last:
                self._sync()
                near = builder.icmp_unsigned("<", at, I32(first))
                further = builder.add(place, I32(first * apart))

                def make(state: State = state, further: Any = further) -> State:
                    found = combine(state, [self._get(further)])
                    self._put(place, found[0])
                    return found

                state = self._where(near, state, make)
                first //= 2
            return state

        if width > WARP:
            state = halve(state, self.tid, x, width // 2, WARP, 1)
        state = self._down(state, min(width, WARP) // 2, combine)
        if height > 1:
            y = builder.lshr(self.thread, I32(width.bit_length() - 1))
            state = halve(state, self.tid, y, height // 2, 1, width)
        return state[0]

    def _softmax(self, stage: Stage) -> State:
        """SoftMax.cu: PersistentSoftmax.cuh for a warp, cunn_SoftMaxForwardReg for a block."""
        builder, part, walk = self.builder, stage.part, stage.walk
        by_warp, log = stage.kernel == "warp", stage.op == "log_softmax"

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", a, b), b, a)

        def most(state: State, elements: list[Any], group: int) -> State:
            (best,), (x,) = state, elements
            if by_warp:
                return [builder.select(builder.fcmp_ordered(">", best, x), best, x)]
            return [self._do("fmax", best, x)]

        state = self._sweep(part, walk, [self._f(-_INFINITY if by_warp else _LOWEST)], most)
        if by_warp:
            (best,) = self._exchanged(state, larger)
        else:
            state = self._block(state, [_LOWEST], lambda a, b: [larger(a[0], b[0])])
            (best,) = self._given(state)

        def add(state: State, elements: list[Any], group: int) -> State:
            (total,), (x,) = state, elements
            x = self._do("sub", x, best)
            if by_warp and not log:
                return [self._do("add", total, self._do("exp", x))]
            power, fraction = self._exp_parts(x)
            return [self._do("fma", power, fraction, total)]

        plus = lambda a, b: self._do("add", a, b)  # noqa: E731
        state = self._sweep(part, walk, [self._f(0.0)], add)
        if by_warp:
            (total,) = self._exchanged(state, plus)
        else:
            state = self._block(state, [0.0], lambda a, b: [plus(a[0], b[0])])
            (total,) = self._given(state)
        return [best, self._do("log", total) if log else total]

    def _exchanged(self, state: State, combine: Callable[[Any, Any], Any]) -> State:
        """What all threads of a row in a warp have, for each of them."""
        (value,) = state
        apart = self.rows.threads // 2
        while apart:
            value = combine(value, self._shuffle(3, value, apart))
            apart //= 2
        return [value]

    def _norm(self, stage: Stage) -> State:
        """layer_norm_kernel.cu: by vectors, or by elements; rms_norm is the same kernels'."""
        eps = self.consts[stage.eps]
        rms = stage.op == "rms_norm"
        if stage.kernel == "vectors":
            n = self.builder.uitofp(self.columns, F32)
            if rms:
                squares = self._by_vectors(stage, [0.0], self._square, self._sum)
                mean, variance = None, self._div(squares[0], n)
            else:
                mean, second, _ = self._by_vectors(
                    stage, [0.0, 0.0, 0.0], self._welford_fast, self._merge_fast
                )
                variance = self._div(second, n)
        else:
            mean, second, n = self._by_elements(stage)
            variance = self._div(second, n)
            if rms:
                variance, mean = self._do("fma", mean, mean, variance), None
        scale = self._do("rsqrt", self._do("add", variance, eps))
        return self._given([scale] if mean is None else [mean, scale])

    def _div(self, a: Any, b: Any) -> Any:
        return self.builder.fdiv(a, b)

    def _by_vectors(
        self, stage: Stage, nothing: list[float],
        one: Callable[[State, Any], State], merge: Callable[[State, State], State],
    ) -> State:  # fmt: skip
        """vectorized_layer_norm_kernel: four warps a row, of which each merges, then all four."""
        builder = self.builder

        def take(state: State, elements: list[Any], group: int) -> State:
            for x in elements:
                state = one(state, x)
            return state

        state = self._sweep(stage.part, stage.walk, list(map(self._f, nothing)), take)
        state = self._down(state, WARP // 2, merge)
        warp = builder.lshr(self.thread, I32(5))
        first = builder.icmp_unsigned("==", self.lane, I32(0))
        self._sync()
        for apart in (2, 1):
            upper = builder.and_(
                builder.icmp_unsigned(">=", warp, I32(apart)),
                builder.icmp_unsigned("<", warp, I32(2 * apart)),
            )
            with builder.if_then(builder.and_(first, upper)):
                for k, value in enumerate(state):
                    place = builder.sub(warp, I32(apart))
                    self._put(builder.add(place, I32(2 * k)), value)
            self._sync()
            lower = builder.and_(first, builder.icmp_unsigned("<", warp, I32(apart)))

            def make(state: State = state) -> State:
                there = [self._get(builder.add(warp, I32(2 * k))) for k in range(len(state))]
                return merge(state, there)

            state = self._where(lower, state, make)
            self._sync()
        return state

    def _square(self, state: State, x: Any) -> State:
        return [self._do("fma", x, x, state[0])]

    def _sum(self, a: State, b: State) -> State:
        return [self._do("add", a[0], b[0])]

    def _welford_fast(self, state: State, x: Any) -> State:
        mean, second, count = state
        apart = self._do("sub", x, mean)
        count = self.builder.fadd(count, self._f(1.0))  # LLVM may know it, and the reciprocal
        mean = self._do("fma", apart, self._reciprocal(count), mean)
        return [mean, self._do("fma", apart, self._do("sub", x, mean), second), count]

    def _merge_fast(self, a: State, b: State) -> State:
        """cuWelfordCombine of what a thread has, `a`, and another's."""
        builder = self.builder
        apart = self._do("sub", a[0], b[0])
        count = self._do("add", b[2], a[2])
        factor = self._reciprocal(count)
        others, own = self._do("mul", b[2], factor), self._do("mul", a[2], factor)
        mean = self._do("fma", b[0], others, self._do("mul", own, a[0]))
        between = self._do("mul", b[2], self._do("mul", apart, apart))
        second = self._do("fma", own, between, self._do("add", b[1], a[1]))
        some = builder.fcmp_ordered(">", count, self._f(0.0))
        zero = self._f(0.0)
        return [builder.select(some, mean, zero), builder.select(some, second, zero), count]

    def _reciprocal(self, x: Any) -> Any:
        return self.builder.fdiv(self._f(1.0), x)

    def _by_elements(self, stage: Stage) -> State:
        """RowwiseMomentsCUDAKernel: mean, sum of squares about it, and how many, by 512 threads."""
        builder = self.builder

        def take(state: State, elements: list[Any], group: int) -> State:
            mean, second, count = state
            (x,) = elements
            count = builder.fadd(count, self._f(1.0))
            apart = self._do("sub", x, mean)
            mean = self._do("add", mean, self._div(apart, count))
            return [mean, self._do("fma", apart, self._do("sub", x, mean), second), count]

        def merge(a: State, b: State) -> State:
            apart, count = self._do("sub", b[0], a[0]), self._do("add", a[2], b[2])
            ratio = self._div(b[2], count)
            mean = self._do("fma", apart, ratio, a[0])
            between = self._do("mul", self._do("mul", apart, apart), a[2])
            second = self._do("fma", between, ratio, self._do("add", a[1], b[1]))
            none_there = builder.fcmp_ordered("==", b[2], self._f(0.0))
            none_here = builder.fcmp_ordered("==", a[2], self._f(0.0))
            return [
                builder.select(none_here, y, builder.select(none_there, x, new))
                for x, y, new in zip(a, b, [mean, second, count], strict=True)
            ]

        state = self._sweep(stage.part, stage.walk, [self._f(0.0)] * 3, take)
        return self._block(state, [0.0] * 3, merge)
