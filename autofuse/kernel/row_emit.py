"""Row kernels as LLVM IR: in the order of torch's reduction kernels, addition by addition.

The steps of every kernel stand in the functions named after it. Contraction never decides: every
product that is added is either a fused multiply-add here or rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from .division import AS_ONE, BY_ELEMENTS, MOMENTS, NORMS, SOFT, WARP, slots_of
from .row_exchange import State, is_known
from .row_threads import RowThreads
from .source import ITEMSIZE, KEPT, Source, Stage
from .targets import F32, I1, I32, Cuda, Value, joined

_INFINITY = float("inf")
_AT_ONCE = 2 * AS_ONE  # elements that a thread loads of a long row before it takes them
_LOWEST = -3.4028234663852886e38  # of float32
_SMALL = (127 - 96) << 23  # the bits of 2^-96, whose remainders have 2^-143 for their last place
# what the reduce kernel begins with: one number, or the mean, the sum of squares about it, and how
# many there are
_NOTHING = {"amax": [-_INFINITY], "amin": [_INFINITY], **dict.fromkeys(MOMENTS, [0.0] * 3)}


def emit_rows(
    source: Source, builder: ir.IRBuilder, capability: tuple[int, int], params: list[Any]
) -> None:
    """Emit a whole row kernel: the work of one thread."""
    _Reductions(source, builder, Cuda(builder, capability), params).emit()


class _Reductions(RowThreads):
    def reduce(self, stage: Stage) -> None:
        """A stage: `values` get what it finds."""
        if stage.kernel == "reduce":
            found = self._reduce_kernel(stage)
        elif stage.kernel == "blocks":
            found = self._of_blocks(stage)
        elif stage.op in SOFT:
            found = self._softmax(stage)
        elif stage.op in NORMS:
            found = self._norm(stage)
        else:
            found = self._sum_of_gradients(stage)
        self.values += [Value(value, "f32") for value in found]

    def _combine(self, op: str, a: State, b: State) -> State:
        """What the reduce kernel makes of what it has, `a`, and what another thread has."""
        if op in MOMENTS:
            return self._merge(a, b)
        (x,), (y,) = a, b
        if op in ("sum", "mean", "vector_norm"):
            return [self.do("add", x, y)]
        builder = self.builder
        better = builder.fcmp_ordered(">" if op == "amax" else "<", x, y)
        nan = builder.fcmp_unordered("uno", x, x)
        return [builder.select(builder.or_(nan, better), x, y)]

    def _taken(self, op: str, a: State, x: Any) -> State:
        """What it makes of what it has and an element."""
        if op in MOMENTS:
            return self._welford(a, x)
        return self._square(a, x) if op == "vector_norm" else self._combine(op, a, [x])

    def _reduce_kernel(self, stage: Stage) -> State:
        """Reduce.cuh."""
        op, vec = stage.op, stage.walk.vec
        nothing = list(map(self.f, _NOTHING.get(op, [0.0])))
        slots, size = vec if vec > 1 else slots_of(op), len(nothing)

        def take(state: State, elements: list[Any], group: int) -> State:
            new = list(state)
            for k, x in enumerate(elements):  # of a vector; or to one slot after another
                at = size * (k if vec > 1 else group % slots)
                new[at : at + size] = self._taken(op, state[at : at + size], x)
            return new

        if stage.uneven:
            state = self._shifted(stage, nothing * slots, take)
        else:
            state = self.sweep(stage, nothing * slots, take, 1 if vec > 1 else slots)
        value = state[:size]
        for at in range(size, len(state), size):
            value = self._combine(op, value, state[at : at + size])
        value = self._across(stage, value)
        if self.rows.shared:
            return [*value, self._factor()] if op == "mean" else value
        return self.given([self._result(stage, value, self._factor)])

    def _of_blocks(self, stage: Stage) -> State:
        """The end of it, where several blocks have a row, from what each of them has left."""
        nothing = list(map(self.f, _NOTHING.get(stage.op, [0.0])))

        def left(block: Any) -> State:
            (found,) = self.call(stage.part, self.lanes(stage.part, block, 1, -1))
            return [value.ir for value in found]

        def body(block: Any, state: State) -> State:
            return self._combine(stage.op, state, left(block)[: len(state)])

        inside = lambda block: self.builder.icmp_unsigned("<", block, self.columns)  # noqa: E731
        value = self.each(self.first, self.apart, inside, nothing, body)
        value = self._across(stage, value)
        return self.given([self._result(stage, value, lambda: left(self.word(0))[-1])])

    def _result(self, stage: Stage, state: State, factor: Callable[[], Any]) -> Any:
        """The number of the row; factor: what a mean is multiplied by."""
        op, value = stage.op, state[0]
        if op == "mean":
            return self.do("mul", value, factor())
        if op in MOMENTS:
            _, second, count = state
            correction, zero = self.consts[stage.scalar], self.f(0.0)
            more = self.builder.fcmp_ordered(">", count, correction)
            left = self.builder.select(more, self.do("sub", count, correction), zero)
            value = self._div(second, left)
        return self.do("sqrt", value) if op in ("vector_norm", "std") else value

    def _factor(self) -> Any:
        """What a sum is multiplied by for the mean: results by elements, each as a float32."""
        builder = self.builder
        rows, every = self.count, builder.mul(self.count, self.columns)
        return builder.fdiv(builder.uitofp(rows, F32), builder.uitofp(every, F32))

    def _shifted(
        self, stage: Stage, state: State, take: Callable[[State, list[Any], int], State]
    ) -> State:
        """Vectors that begin at addresses which are multiples of their size.

        In front of them and behind them the first threads take one element each.
        """
        builder, word, part = self.builder, self.word, stage.part
        vec, op, thread = stage.walk.vec, stage.op, self.index(self.thread)
        slot = len(state) // vec
        ours = builder.icmp_unsigned("==", self.turn, word(0))  # others have what is between
        begin = builder.mul(self.row, self.columns)
        if stage.origin >= 0:  # of memory that may have space between its rows
            size = ITEMSIZE[self.source.loads[stage.origin].code]
            address = self.pointers[stage.origin]
            elements = builder.lshr(address, address.type(size.bit_length() - 1))
            begin = builder.add(self.offsets[stage.origin], self.cut(elements))
        shift = builder.and_(begin, word(vec - 1))
        shifted = builder.icmp_unsigned("!=", shift, word(0))
        head = builder.and_(
            builder.icmp_unsigned(">=", thread, shift),
            builder.icmp_unsigned("<", thread, word(vec)),
        )
        head = builder.and_(builder.and_(head, shifted), ours)

        def one(state: State, inside: Any, column: Any) -> State:
            column = builder.select(inside, column, word(0))
            (element,) = self.elements(part, column, 1, -1)
            own, others = state[:slot], state[slot:]
            return [*self.chosen(inside, self._taken(op, own, element), own), *others]

        state = one(state, head, builder.sub(thread, shift))
        before = builder.select(shifted, builder.sub(word(vec), shift), word(0))
        left = builder.sub(self.columns, before)
        whole = builder.lshr(left, word(vec.bit_length() - 1))

        def body(group: Any, state: State) -> State:
            column = builder.add(before, builder.mul(group, word(vec)))
            return take(state, self.elements(part, column, vec, -1), -1)

        inside = lambda group: builder.icmp_unsigned("<", group, whole)  # noqa: E731
        state = self.each(self.first, self.apart, inside, state, body)
        column = builder.add(builder.add(before, builder.mul(whole, word(vec))), thread)
        behind = builder.and_(builder.icmp_unsigned("<", column, self.columns), ours)
        return one(state, behind, column)

    def _across(
        self, stage: Stage, state: State, combine: Callable[[State, State], State] | None = None
    ) -> State:
        """The first thread of the row gets what all have: along x, then along y; of blocks along y
        first."""
        op, (width, height), block = stage.op, stage.across, self.rows.block
        builder, combine = self.builder, combine or partial(self._combine, op)
        x = builder.and_(self.thread, I32(width - 1))

        def put(place: Any, state: State) -> None:
            for k, value in enumerate(state):
                self.put(builder.add(place, I32(k * block)), value)

        def halve(state: State, place: Any, at: Any, first: int, last: int, apart: int) -> State:
            put(place, state)
            while first >= last:
                self.sync()
                near = builder.icmp_unsigned("<", at, I32(first))
                further = builder.add(place, I32(first * apart))

                def make(state: State = state, further: Any = further) -> State:
                    others = [builder.add(further, I32(k * block)) for k in range(len(state))]
                    found = combine(state, list(map(self.get, others)))
                    put(place, found)
                    return found

                state = self.where(near, state, make)
                first //= 2
            return state

        shares = 0

        def room() -> None:
            nonlocal shares
            shares += 1
            if shares > 1 and op in MOMENTS:  # six of them would have more than a block may
                self.sync()
            else:
                self.share(block * len(state))

        def along_x(state: State) -> State:
            if width > WARP:
                room()
                state = halve(state, self.tid, x, width // 2, WARP, 1)
            return self.down(state, min(width, WARP) // 2, combine)

        def along_y(state: State) -> State:
            if height == 1:
                return state
            room()
            y = builder.lshr(self.thread, I32(width.bit_length() - 1))
            apart = self.rows.together if self.rows.interleaved else width
            return halve(state, self.tid, y, height // 2, 1, apart)

        return along_x(along_y(state)) if stage.kernel == "blocks" else along_y(along_x(state))

    def _softmax(self, stage: Stage) -> State:
        """SoftMax.cu: PersistentSoftmax.cuh for a warp, cunn_SoftMaxForwardReg for a block, and
        cunn_SpatialSoftMaxForward for interleaved rows."""
        builder = self.builder
        by_warp, log = stage.kernel == "warp", stage.op == "log_softmax"
        slots = AS_ONE if stage.kernel == "block" else 1
        at_once = 1 if by_warp else AS_ONE

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", a, b), b, a)

        def most(state: State, elements: list[Any], group: int) -> State:
            best = state[group % slots]
            for x in elements:
                if by_warp:
                    best = builder.select(builder.fcmp_ordered(">", best, x), best, x)
                else:
                    best = self.do("fmax", best, x)
            return replaced(state, group, best)

        def replaced(state: State, group: int, value: Any) -> State:
            return [value if k == group % slots else old for k, old in enumerate(state)]

        least = self.f(-_INFINITY if by_warp else _LOWEST)
        state = self.sweep(stage, [least] * slots, most, at_once)
        best = self._of_all(stage, state, larger, _LOWEST)

        shares = self.found[KEPT + 2 * self.stage + 1] = []  # exponentials at first

        def add(state: State, elements: list[Any], group: int) -> State:
            total = state[group % slots]
            parts = [
                self.exp_parts(self.do("sub", x, best))
                for x in (self.dealt(elements) if log and by_warp else elements)
            ]
            if not log:
                exponentials = [self.do("mul", *factors) for factors in parts]
                if stage.walk.held:
                    shares.extend([Value(x, "f32") for x in exponentials])
                if by_warp:
                    return [self._added(total, self.dealt(exponentials))]
            for power, fraction in parts:
                total = self.do("fma", power, fraction, total)
            return replaced(state, group, total)

        plus = lambda a, b: self.do("add", a, b)  # noqa: E731
        state = self.sweep(stage, [self.f(0.0)] * slots, add, at_once)
        total = self._of_all(stage, state, plus, 0.0)
        if shares:
            shares[:] = self._shares(shares, total)
        return [best, self.do("log", total) if log else total]

    def _of_all(
        self, stage: Stage, state: State, combine: Callable[[Any, Any], Any], nothing: float
    ) -> Any:
        """What all threads of the row have, for each of them, as torch's kernel combines it."""
        if stage.kernel == "warp":
            return self.of_warp(*state, combine, stage.walk.vec > 1)
        both = lambda a, b: [combine(a[0], b[0])]  # noqa: E731
        if stage.kernel == "spatial":
            return self.given(self._across(stage, state, both))[0]
        return self.block([[value] for value in state], [nothing], both)[0]

    def _shares(self, values: list[Value], total: Any) -> list[Value]:
        """Quotients of values from 0 to 1 and their total, at least 1 or NaN, as IEEE rounds them.

        By its one reciprocal: the first remainder leaves a quotient that is one of the two next to
        the exact one, and the second, which is exact, the nearest (Markstein, 1990). Where values
        are so small that a remainder may be subnormal, all of the thread's are divided.
        """
        builder, small, shares = self.builder, I1(0), []
        for value in values:
            bits = builder.sub(builder.bitcast(value.ir, I32), I32(1))  # of 0 the largest
            small = builder.or_(small, builder.icmp_unsigned("<", bits, I32(_SMALL)))
        with builder.if_else(small, likely=False) as (then, otherwise):
            with then:
                divided = [self._div(value.ir, total) for value in values]
                ways = [(divided, builder.block)]
            with otherwise:
                minus, reciprocal = self.do("mul", total, self.f(-1.0)), self._reciprocal(total)
                for value in values:
                    share = self.do("mul", value.ir, reciprocal)
                    for _ in range(2):
                        remainder = self.do("fma", minus, share, value.ir)
                        share = self.do("fma", remainder, reciprocal, share)
                    shares.append(share)
                ways.append((shares, builder.block))
        return [
            Value(joined(builder, *((found[k], block) for found, block in ways)), "f32")
            for k in range(len(values))
        ]

    def _added(self, total: Any, elements: list[Any]) -> Any:
        for x in elements:
            total = self.do("add", total, x)
        return total

    def _norm(self, stage: Stage) -> State:
        """layer_norm_kernel.cu: by vectors, or by elements; rms_norm is the same kernels'."""
        eps = self._rounded(stage, self.consts[stage.scalar])
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
                variance, mean = self.do("fma", mean, mean, variance), None
        scale = self.do("rsqrt", self.do("add", variance, eps))
        return [scale] if mean is None else [self._rounded(stage, x) for x in (mean, scale)]

    def _rounded(self, stage: Stage, x: Any) -> Any:
        return self.element.convert(Value(x, "f32"), stage.rounded).ir if stage.rounded else x

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

        state = self.sweep(stage, list(map(self.f, nothing)), take)
        state = self.down(state, WARP // 2, merge)
        self.share(4 * len(state))
        warp = builder.lshr(self.thread, I32(5))
        with builder.if_then(builder.icmp_unsigned("==", self.lane, I32(0))):
            for k, value in enumerate(state):
                if not is_known(value):
                    self.put(builder.add(warp, I32(4 * k)), value)
        self.sync()  # every thread then does what torch's first warps do
        warps = [
            [x if is_known(x) else self.get(I32(w + 4 * k)) for k, x in enumerate(state)]
            for w in range(4)
        ]
        return merge(merge(warps[0], warps[2]), merge(warps[1], warps[3]))

    def _square(self, state: State, x: Any) -> State:
        return [self.do("fma", x, x, state[0])]

    def _sum(self, a: State, b: State) -> State:
        return [self.do("add", a[0], b[0])]

    def _welford_fast(self, state: State, x: Any) -> State:
        mean, second, count = state
        apart = self.do("sub", x, mean)
        count = self.count_of(count, self.f(1.0))
        mean = self.do("fma", apart, self._reciprocal(count), mean)
        return [mean, self.do("fma", apart, self.do("sub", x, mean), second), count]

    def _merge_fast(self, a: State, b: State) -> State:
        """cuWelfordCombine of what a thread has, `a`, and another's."""
        builder = self.builder
        apart = self.do("sub", a[0], b[0])
        count = self.count_of(b[2], a[2])
        factor = self._reciprocal(count)
        others, own = self.do("mul", b[2], factor), self.do("mul", a[2], factor)
        mean = self.do("fma", b[0], others, self.do("mul", own, a[0]))
        between = self.do("mul", b[2], self.do("mul", apart, apart))
        second = self.do("fma", own, between, self.do("add", b[1], a[1]))
        some = builder.fcmp_ordered(">", count, self.f(0.0))
        zero = self.f(0.0)
        return [builder.select(some, mean, zero), builder.select(some, second, zero), count]

    def _reciprocal(self, x: Any) -> Any:
        return self.builder.fdiv(self.f(1.0), x)

    def _by_elements(self, stage: Stage) -> State:
        """RowwiseMomentsCUDAKernel: mean, sum of squares about it, and how many, of a thread that
        stands for `slots` of torch's."""
        slots = max(1, BY_ELEMENTS // self.rows.threads) if self.rows.threads > WARP else 1

        def take(state: State, elements: list[Any], group: int) -> State:
            (x,), at = elements, 3 * (group % slots)
            return [*state[:at], *self._welford(state[at : at + 3], x), *state[at + 3 :]]

        nothing = [self.f(0.0)] * (3 * slots)
        if stage.walk.held:
            state = self.sweep(stage, nothing, take)
        else:
            state = self.sweep_ahead(stage, nothing, take, _AT_ONCE)
        states = [state[at : at + 3] for at in range(0, 3 * slots, 3)]
        return self.block(states, [0.0] * 3, self._merge)

    def _welford(self, state: State, x: Any) -> State:
        """WelfordOps: the mean, the sum of squares about it and how many, with one more."""
        mean, second, count = state
        count = self.count_of(count, self.f(1.0))
        apart = self.do("sub", x, mean)
        mean = self.do("add", mean, self._div(apart, count))
        return [mean, self.do("fma", apart, self.do("sub", x, mean), second), count]

    def _merge(self, a: State, b: State) -> State:
        """...and with those of another thread."""
        builder = self.builder
        known = is_known(a[2]) and is_known(b[2])
        if known and not (a[2].constant and b[2].constant):
            return a if a[2].constant else b
        apart, count = self.do("sub", b[0], a[0]), self.count_of(a[2], b[2])
        ratio = self._div(b[2], count)
        mean = self.do("fma", apart, ratio, a[0])
        between = self.do("mul", self.do("mul", apart, apart), a[2])
        second = self.do("fma", between, ratio, self.do("add", a[1], b[1]))
        if known:
            return [mean, second, count]
        none_there = builder.fcmp_ordered("==", b[2], self.f(0.0))
        none_here = builder.fcmp_ordered("==", a[2], self.f(0.0))
        return [
            builder.select(none_here, y, builder.select(none_there, x, new))
            for x, y, new in zip(a, b, [mean, second, count], strict=True)
        ]

    def _sum_of_gradients(self, stage: Stage) -> State:
        """The backward of both: softmax_warp_backward, cunn_SoftMaxBackwardSmem and
        cunn_SpatialSoftMaxBackward; and the two sums of layer_norm_grad_input_kernel, which its
        vectorised form adds alike."""
        factor = None
        if stage.factor >= 0:
            (bits,) = self._load(stage.factor, self.word(0), 1)
            factor = self.element.loaded(bits, self.source.loads[stage.factor].code).ir

        def take(state: State, elements: list[Any], group: int) -> State:
            (total,) = state
            if stage.kernel == "warp":
                elements = self.dealt(elements)
            if factor is None:
                return [self._added(total, elements)]
            for x in elements:
                total = self.do("fma", factor, x, total)
            return [total]

        plus = lambda a, b: self.do("add", a, b)  # noqa: E731
        state = self.sweep(stage, [self.f(0.0)], take, AS_ONE if stage.kernel == "spatial" else 1)
        if stage.uneven:
            state = self._behind(stage, state, take)
        return [self._of_all(stage, state, plus, 0.0)]

    def _behind(
        self, stage: Stage, state: State, take: Callable[[State, list[Any], int], State]
    ) -> State:
        """`state` after the elements behind the last whole group, which one thread takes."""
        builder, word, vec = self.builder, self.word, stage.walk.vec
        groups = self.groups(stage.walk)
        turn = builder.and_(groups, word(self.rows.threads - 1))
        own = builder.icmp_unsigned("==", self.index(self.thread), turn)
        for k in range(vec - 1):
            column = builder.add(builder.mul(groups, word(vec)), word(k))
            inside = builder.and_(own, builder.icmp_unsigned("<", column, self.columns))
            elements = self.elements(stage.part, builder.select(inside, column, word(0)), 1, -1)
            state = self.chosen(inside, take(state, elements, 0), state)
        return state
