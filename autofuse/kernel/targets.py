"""Targets: how the primitives of the kernel language are spelled in LLVM IR on CUDA and the CPU.

Functions, rounding, conversions to 16 bits, pointers. Knows LLVM IR and nothing above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .polynomials import F32, F64, I32, I64, vectorised

I1, I8, I16, F16, VOID = *map(ir.IntType, (1, 8, 16)), ir.HalfType(), ir.VoidType()
CARRIED = {"f64": F64, "f32": F32, "i64": I64, "i32": I32, "i16": I16, "i8": I8, "u8": I8, "b1": I1}
STORED = {**CARRIED, "f16": I16, "bf16": I16, "b1": I8}
ONES = {"f16": 0x3C00, "bf16": 0x3F80}
_REGISTERS = {I16: "h", I32: "r", I64: "l", F32: "f", F64: "d"}  # of PTX, as LLVM calls them


@dataclass(frozen=True, slots=True)
class Value:
    """An LLVM value and the type code that says how to read its bits."""

    ir: Any
    code: str
    bits: Any = None  # i16 of a value that is rounded to 16 bits, where they are at hand
    place: Any = None  # of what was read: how many elements after the first one it lies
    beyond: Any = None  # of what is padded: whether its place is in no memory

    @property
    def floating(self) -> bool:
        return self.code in ("f32", "f64")


class Cuda:
    """What differs on CUDA: libdevice, contraction control, hardware conversions."""

    # libdevice names: the IEEE forms where it has a choice, otherwise with `f` for float32
    ROUNDED = {"sqrt", "add", "sub", "mul"}
    FUNCTIONS = {"abs": "fabs", "round": "nearbyint"}

    # float32 to some 22 bits; ex2 and rcp take subnormals for 0 and are one instruction, the wide
    # ones are some four
    APPROXIMATE = {
        "ex2": "ex2.approx.ftz",
        "rcp": "rcp.approx.ftz",
        "rcp_wide": "rcp.approx",
        "div_wide": "div.full",
        "sqrt_wide": "sqrt.approx",
        "lg2_wide": "lg2.approx",
    }

    def __init__(self, builder: ir.IRBuilder, capability: tuple[int, int]) -> None:
        self.builder, self.capability = builder, capability

    def call(self, name: str, args: list[Value]) -> Any:
        code = args[0].code
        values = [arg.ir for arg in args]
        if name in self.APPROXIMATE:
            places = ", ".join(f"${k}" for k in range(len(values) + 1))
            return self.ptx(f"{self.APPROXIMATE[name]}.f32 {places};", F32, *values)
        if name in self.ROUNDED:
            symbol = f"{'f' if code == 'f32' else 'd'}{name}_rn"
        else:
            symbol = self.FUNCTIONS.get(name, name) + ("f" if code == "f32" else "")
        return _external(self.builder, f"__nv_{symbol}", values)

    def exact(self, name: str, a: Value, b: Value) -> Any:
        """add, sub or mul that neither LLVM nor ptxas contracts with its neighbours."""
        return self.call(name, [a, b])

    def divide(self, name: str, a: Any, b: Any) -> Any:
        """div or rem of signed integers; where 64 bits hold two words, unsigned, as in nvcc.

        LLVM's own would let it make use of a divisor not being 0.
        """
        if a.type == I32:
            return self.ptx(f"{name}.s32 $0, $1, $2;", I32, a, b)
        builder = self.builder
        high = builder.lshr(builder.or_(a, b), I64(32))
        with builder.if_else(builder.icmp_unsigned("==", high, I64(0))) as (then, otherwise):
            with then:
                words = (builder.trunc(x, I32) for x in (a, b))
                short = self.ptx(f"{name}.u32 $0, $1, $2;", I32, *words)
                short = builder.zext(short, I64), builder.block
            with otherwise:
                long = self.ptx(f"{name}.s64 $0, $1, $2;", I64, a, b), builder.block
        return joined(builder, short, long)

    def ptx(self, text: str, result: ir.Type, *args: Any) -> Any:
        """A PTX instruction, of which LLVM knows nothing; $0 is its result."""
        registers = [_REGISTERS[kind] for kind in (result, *(x.type for x in args))]
        signature = ir.FunctionType(result, [x.type for x in args])
        return self.builder.asm(signature, text, "=" + ",".join(registers), list(args), False)

    def barrier(self, value: Any) -> Any:
        """Ends an op: what follows does not contract with `value`."""
        signature = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(signature, "", f"={_REGISTERS[value.type]},0", [value], False)

    def together(self, values: list[Any]) -> list[Any]:
        """`values`, of one type, none of which is there before all are: loads stay ahead of what
        has branches."""
        kind, count = values[0].type, len(values)
        signature = ir.FunctionType(ir.LiteralStructType([kind] * count), [kind] * count)
        ties = ",".join([f"={_REGISTERS[kind]}"] * count + [str(k) for k in range(count)])
        found = self.builder.asm(signature, "", ties, values, False)
        return [self.builder.extract_value(found, k) for k in range(count)]

    def opaque(self, value: Any) -> Any:
        """The integer `value`, which no optimiser may know: it is ored with %tid.z, always 0."""
        zero = special_register(self.builder, "tid.z")
        kind = value.type
        if kind.width != 32:
            zero = (self.builder.zext if kind.width > 32 else self.builder.trunc)(zero, kind)
        return self.builder.or_(value, zero)

    def narrowed(self, value: Any) -> Any:
        """float64 `value` rounded to float32."""
        return self.builder.fptrunc(value, F32)

    def round16(self, value: Any, code: str) -> Value:
        """float32 `value` rounded to bfloat16 or float16, as float32."""
        builder = self.builder
        if code == "f16":
            return Value(self.from_half(self.to_half(value)), "f32")
        if self.capability < (8, 0):
            return Value(_round_bf16(builder, value), "f32")
        # one F2FP instruction; the scalar conversion compiles to two slower ones
        word = self.ptx("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", I32, value)
        return Value(builder.bitcast(word, F32), "f32")

    def pairs(self, code: str) -> bool:
        """Whether the arithmetic of `code` comes in pairs: two 16-bit values in a register."""
        return code in ONES and self.capability >= (8, 0)

    def round_pair(self, low: Any, high: Any, code: str) -> Any:
        """Two float32 values rounded to `code`, as one word."""
        return self.ptx(f"cvt.rn.{code}x2.f32 $0, $2, $1;", I32, low, high)

    def pair(self, name: str, a: Any, b: Any, code: str) -> Any:
        """add, sub or mul of two pairs, with the bits that float32 gives once it is rounded.

        float32 has more than twice the bits of either type and two to spare, so that its own
        rounding is never seen; a NaN becomes the canonical one here too.
        """
        halves = (ONES[code], ONES[code] | 1 << 15, 1 << 15)
        one, minus_one, minus_zero = (I32(half << 16 | half) for half in halves)
        args = {"add": (a, one, b), "sub": (b, minus_one, a), "mul": (a, b, minus_zero)}[name]
        return self.ptx(f"fma.rn.{code}x2 $0, $1, $2, $3;", I32, *args)

    def to_half(self, value: Any) -> Any:
        return self.ptx("cvt.rn.f16.f32 $0, $1;", I16, value)

    def from_half(self, bits: Any) -> Any:
        # LLVM's own fpext would be looked through: copysign would then see the sign of a NaN
        return self.ptx("cvt.f32.f16 $0, $1;", F32, bits)

    def pointer_to(self, pointee: ir.Type) -> ir.Type:
        return pointee.as_pointer(1)  # global memory


class Cpu:
    """What differs on the CPU: libm, and LLVM contracts nothing on its own.

    A call of libm keeps a loop from vectorising, so most float32 functions are polynomials.

    halves: whether the processor converts float16; one that does not would call a compiler's
        runtime library, which no process need have. zero: an i64 of 0 that LLVM does not know.
    """

    INTRINSICS = {
        "sqrt", "sin", "cos", "exp", "exp2", "log", "log2", "log10", "fma", "pow",
        "floor", "ceil", "trunc", "copysign",
    }  # fmt: skip
    RENAMED = {"abs": "fabs", "round": "nearbyint", "fmax": "maxnum", "fmin": "minnum"}

    def __init__(self, builder: ir.IRBuilder, halves: bool, zero: Any) -> None:
        self.builder, self.halves, self.zero = builder, halves, zero

    def call(self, name: str, args: list[Value]) -> Any:
        values = [arg.ir for arg in args]
        kind = values[0].type
        if kind == F32 and (value := vectorised(self.builder, name, values)) is not None:
            return value if value.type == F32 else self.narrowed(value)
        if name == "rsqrt":
            return self.builder.fdiv(ir.Constant(kind, 1.0), self.call("sqrt", args))
        if name == "fmod":
            return self.builder.frem(*values)
        if name in self.INTRINSICS or name in self.RENAMED:
            symbol = f"llvm.{self.RENAMED.get(name, name)}.{args[0].code}"
        else:
            symbol = name + ("f" if kind == F32 else "")
        return _external(self.builder, symbol, values)

    def exact(self, name: str, a: Value, b: Value) -> Any:
        return getattr(self.builder, f"f{name}")(a.ir, b.ir)

    def barrier(self, value: Any) -> Any:
        return value

    def pairs(self, code: str) -> bool:
        return False

    def opaque(self, value: Any) -> Any:
        return value

    def narrowed(self, value: Any) -> Any:
        """float64 `value` rounded to float32, behind which LLVM cannot look.

        Where the result is rounded to float16 it would let a copysign be one of float16, whose sign
        is then a float64 that becomes a float16: by the runtime library, but for AVX512-FP16.
        """
        builder = self.builder
        bits = builder.bitcast(builder.fptrunc(value, F32), I32)
        return builder.bitcast(builder.or_(bits, builder.trunc(self.zero, I32)), F32)

    def round16(self, value: Any, code: str) -> Value:
        if code == "bf16":
            return Value(_round_bf16(self.builder, value), "f32")
        bits = self.to_half(value)
        return Value(self.from_half(bits), "f32", bits)

    def to_half(self, value: Any) -> Any:
        builder = self.builder
        if not self.halves:
            return _half_of(builder, value)
        return builder.bitcast(builder.fptrunc(value, F16), I16)

    def from_half(self, bits: Any) -> Any:
        if not self.halves:
            return _from_half(self.builder, bits)
        return self.builder.fpext(self.builder.bitcast(bits, F16), F32)

    def pointer_to(self, pointee: ir.Type) -> ir.Type:
        return pointee.as_pointer()


def special_register(builder: ir.IRBuilder, name: str) -> Any:
    """A special register of PTX as i32."""
    return _external(builder, f"llvm.nvvm.read.ptx.sreg.{name}", [], I32)


def joined(builder: ir.IRBuilder, *ways: tuple[Any, Any]) -> Any:
    """The value of the way that was taken here; ways: (value, block that it comes from)."""
    phi = builder.phi(ways[0][0].type)
    for value, block in ways:
        phi.add_incoming(value, block)
    return phi


def _external(
    builder: ir.IRBuilder, symbol: str, args: list[Any], result: ir.Type | None = None
) -> Any:
    """A call of `symbol`, which gives what it takes unless a result type is given."""
    module = builder.module
    signature = ir.FunctionType(result or args[0].type, [arg.type for arg in args])
    function = module.globals.get(symbol)
    if function is None:
        function = ir.Function(module, signature, symbol)
    return builder.call(function, args)


def _round_bf16(builder: ir.IRBuilder, value: Any) -> Any:
    """Round to nearest even in integer arithmetic; NaN becomes the quiet NaN."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.and_(
        builder.add(builder.add(bits, I32(0x7FFF)), odd), ir.Constant(I32, 0xFFFF0000)
    )
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.bitcast(builder.select(nan, I32(0x7FC00000), rounded), F32)


def _half_of(builder: ir.IRBuilder, value: Any) -> Any:
    """float32 rounded to nearest even as the bits of a float16; NaN becomes a quiet NaN.

    Nothing here is subnormal but `value`, so that it does not matter whether those count as 0.
    """
    bits = builder.bitcast(value, I32)
    size = builder.and_(bits, I32(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, I32(13)), I32(1))
    biased = builder.sub(size, I32((112 << 23) - 0xFFF))  # exponents begin at -15, not at -127
    normal = builder.lshr(builder.add(biased, odd), I32(13))
    half = I32(126 << 23)  # of 0.5, whose last place is float16's smallest number
    shifted = builder.fadd(builder.bitcast(size, F32), builder.bitcast(half, F32))
    small = builder.sub(builder.bitcast(shifted, I32), half)
    nan = builder.icmp_unsigned(">", size, I32(0xFF << 23))
    large = builder.select(nan, I32(0x7E00), I32(0x7C00))
    rounded = builder.select(builder.icmp_unsigned("<", size, I32(113 << 23)), small, normal)
    rounded = builder.select(builder.icmp_unsigned(">=", size, I32(143 << 23)), large, rounded)
    sign = builder.and_(builder.lshr(bits, I32(16)), I32(0x8000))
    return builder.trunc(builder.or_(rounded, sign), I16)


def _from_half(builder: ir.IRBuilder, bits: Any) -> Any:
    """The float32 that the bits of a float16 stand for."""
    word = builder.zext(bits, I32)
    size = builder.shl(builder.and_(word, I32(0x7FFF)), I32(13))
    normal = builder.add(size, I32(112 << 23))
    large = builder.add(size, I32(224 << 23))  # infinity, NaN
    least = I32(113 << 23)  # of 2^-14, the smallest normal number
    shifted = builder.bitcast(builder.add(size, least), F32)
    small = builder.bitcast(builder.fsub(shifted, builder.bitcast(least, F32)), I32)
    value = builder.select(builder.icmp_unsigned("<", size, I32(1 << 23)), small, normal)
    value = builder.select(builder.icmp_unsigned(">=", size, I32(31 << 23)), large, value)
    sign = builder.shl(builder.and_(word, I32(0x8000)), I32(16))
    return builder.bitcast(builder.or_(value, sign), F32)
