"""What threads of row kernels give to each other, as LLVM IR: by shuffles and shared memory.

Of the arithmetic of float32 here is what all of torch's kernels have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .division import WARP
from .source import Rows, Source
from .targets import F32, I1, I32, VOID, Cuda, Value

State = list[Any]  # LLVM values


def is_known(value: Any) -> bool:
    """Whether it is a constant, which all threads have."""
    return isinstance(value, ir.Constant)


class Exchanges:
    """A thread of a block, and the others."""

    lane: Any  # its number in its warp
    tid: Any  # ...in the block
    thread: Any  # ...among those of its row
    own: Any  # the number of that row in the block

    def __init__(self, source: Source, rows: Rows, builder: ir.IRBuilder, target: Cuda) -> None:
        self.source, self.rows, self.builder, self.target = source, rows, builder, target
        self.shared: Any = None
        self.shares = 0

    # --- arithmetic ---------------------------------------------------------------------------

    def f(self, value: float) -> Any:
        return ir.Constant(F32, value)

    def do(self, name: str, *args: Any) -> Any:
        """A function of float32, rounded once."""
        return self.target.call(name, [Value(arg, "f32") for arg in args])

    def count_of(self, a: Any, b: Any) -> Any:
        """How many elements two have together: a constant where every thread takes as many, so that
        quotients by it are found before the kernel runs."""
        if is_known(a) and is_known(b):
            return self.f(a.constant + b.constant)
        return self.do("add", a, b)

    def exp_parts(self, x: Any) -> tuple[Any, Any]:
        """Two factors of the exponential, as CUDA's expf has them before its last product.

        Where torch adds it up the compiler has contracted that product with the sum.
        """
        scaled = self.target.ptx("fma.rn.sat.f32 $0, $1, 0f3BBB989D, 0f3F000000;", F32, x)
        whole = self.target.ptx("fma.rm.f32 $0, $1, 0f437C0000, 0f4B400001;", F32, scaled)
        minus = self.do("sub", self.f(12583039.0), whole)
        rest = self.target.ptx("fma.rn.f32 $0, $1, 0f3FB8AA3B, $2;", F32, x, minus)
        rest = self.target.ptx("fma.rn.f32 $0, $1, 0f32A57060, $2;", F32, x, rest)
        power = self.builder.shl(self.builder.bitcast(whole, I32), I32(23))
        return self.builder.bitcast(power, F32), self.do("ex2", rest)

    # --- threads ------------------------------------------------------------------------------

    def sync(self) -> None:
        function = self.builder.module.globals.get("llvm.nvvm.barrier0")
        if function is None:
            signature = ir.FunctionType(VOID, [])
            function = ir.Function(self.builder.module, signature, "llvm.nvvm.barrier0")
        self.builder.call(function, [])

    def shuffle(self, mode: int, value: Any, by: Any) -> Any:
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

    def down(self, state: State, first: int, combine: Callable[[State, State], State]) -> State:
        """Lane 0 of each group gets all: each lane takes those `first`, ..., 2, 1 further."""
        while first:
            state = combine(state, [x if is_known(x) else self.shuffle(2, x, first) for x in state])
            first //= 2
        return state

    def of_warp(self, value: Any, combine: Callable[[Any, Any], Any], paired: bool) -> Any:
        """What all threads of a row in a warp have, each of them; paired: of what is `dealt`."""
        halves = [1 << k for k in reversed(range(self.rows.threads.bit_length() - 1))]
        if paired:  # torch's threads 2 * k and 2 * k + 1 are half a warp from each other
            halves = [*halves[1:], halves[0]]
        for apart in halves:
            value = combine(value, self.shuffle(3, value, apart))
        return value

    def dealt(self, elements: list[Any]) -> list[Any]:
        """Of neighbours that each thread of a warp has, those that it adds, in torch's order.

        Of elements for two each, torch's thread k has number k and number k + 32. Here thread k has
        2 * k and 2 * k + 1, and adds those of torch's thread 2 * k; half a warp further, 2 * k + 1.
        """
        if len(elements) == 1:
            return elements
        builder, (a, b) = self.builder, elements
        lower = builder.icmp_unsigned("<", self.lane, I32(WARP // 2))
        given = self.shuffle(3, builder.select(lower, b, a), WARP // 2)
        return [builder.select(lower, a, given), builder.select(lower, given, b)]

    def slot(self, place: Any) -> Any:
        """Number `place` of the shared memory at hand."""
        return self.builder.gep(self.shared, [I32(0), place])

    def share(self, size: int) -> None:
        """Have shared memory that nobody has used: who puts something there need not wait."""
        kind = ir.ArrayType(F32, size)
        self.shares += 1
        name = f"{self.source.name}_shared{self.shares}"
        self.shared = ir.GlobalVariable(self.builder.module, kind, name, addrspace=3)
        self.shared.linkage, self.shared.align = "internal", 16
        self.shared.initializer = ir.Constant(kind, ir.Undefined)

    def put(self, place: Any, value: Any) -> None:
        self.builder.store(value, self.slot(place))

    def get(self, place: Any) -> Any:
        return self.builder.load(self.slot(place))

    def given(self, state: State) -> State:
        """What the first thread of the row has, for all of them."""
        builder, threads = self.builder, self.rows.threads
        if threads == 1:
            return state
        if threads <= WARP and not self.rows.interleaved:
            first = builder.and_(self.lane, I32(WARP - threads))
            return [self.shuffle(0, value, first) for value in state]
        self.share(self.rows.together * len(state))
        places = [builder.add(self.own, I32(k * self.rows.together)) for k in range(len(state))]
        with builder.if_then(builder.icmp_unsigned("==", self.thread, I32(0))):
            for place, value in zip(places, state, strict=True):
                self.put(place, value)
        self.sync()
        return list(map(self.get, places))

    def where(self, condition: Any, state: State, make: Callable[[], State]) -> State:
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

    def block(
        self, states: list[State], nothing: list[float],
        combine: Callable[[State, State], State],
    ) -> State:  # fmt: skip
        """What all threads of a block have, for each of them.

        Warps by shuffles, then what each has found likewise, which every warp does for itself.
        states: of a thread; it stands for as many of torch's, which are whole blocks of ours apart.
        """
        builder = self.builder
        own = self.rows.threads // WARP
        warps = own * len(states)
        states = [self.down(state, WARP // 2, combine) for state in states]
        size = WARP * len(nothing)
        self.share(size * self.rows.together)
        begin = builder.mul(self.own, I32(size)) if self.rows.together > 1 else I32(0)
        warp = builder.add(begin, builder.lshr(self.thread, I32(5)))
        with builder.if_then(builder.icmp_unsigned("==", self.lane, I32(0))):
            for which, state in enumerate(states):
                for k, value in enumerate(state):
                    self.put(builder.add(warp, I32(k * WARP + which * own)), value)
        self.sync()
        inside = builder.icmp_unsigned("<", self.lane, I32(warps))
        # lanes beyond read what another lane does, and do not take it
        place = builder.add(begin, builder.and_(self.lane, I32(warps - 1)))
        found = [self.get(builder.add(place, I32(k * WARP))) for k in range(len(nothing))]
        state = [
            builder.select(inside, value, self.f(none))
            for value, none in zip(found, nothing, strict=True)
        ]
        state = self.down(state, WARP // 2, combine)
        return [self.shuffle(0, value, 0) for value in state]
