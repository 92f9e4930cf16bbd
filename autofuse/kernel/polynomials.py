"""Functions of float32 for the CPU, without branches and calls, so that their loops vectorise.

What programs use most is computed in float32: exponentials, logarithms, tanh and erf, to 1 ulp or
2, with polynomials that are fitted to the reduced argument or Cephes' (expf.c, tanhf.c). The others
are computed in float64, by half as many lanes, and rounded once, to less than 0.6 ulp: there 1 + x
and x * x lose nothing that float32 could show and no float32 is subnormal, so that textbook
formulas do: Taylor series of a reduced argument for exp, log, sin and cos, Cephes' polynomials for
atan and erfc (atanf.c, ndtrf.c). Knows LLVM IR and nothing above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I32, I64, F32, F64 = *map(ir.IntType, (32, 64)), ir.FloatType(), ir.DoubleType()


@dataclass(frozen=True, slots=True)
class Real:
    """A float32 or float64 in LLVM IR; a product and a sum are fused where the processor can."""

    builder: ir.IRBuilder
    ir: Any

    def typed(self, value: Real | float) -> Any:
        return value.ir if isinstance(value, Real) else ir.Constant(self.ir.type, value)

    def constant(self, value: float) -> Real:
        return Real(self.builder, self.typed(value))

    def __add__(self, other: Real | float) -> Real:
        add = self.builder.fadd(self.ir, self.typed(other), flags=("contract",))
        return Real(self.builder, add)

    def __sub__(self, other: Real | float) -> Real:
        sub = self.builder.fsub(self.ir, self.typed(other), flags=("contract",))
        return Real(self.builder, sub)

    def __rsub__(self, other: float) -> Real:
        return self.constant(other) - self

    def __mul__(self, other: Real | float) -> Real:
        mul = self.builder.fmul(self.ir, self.typed(other), flags=("contract",))
        return Real(self.builder, mul)

    def __truediv__(self, other: Real | float) -> Real:
        return Real(self.builder, self.builder.fdiv(self.ir, self.typed(other)))

    def __rtruediv__(self, other: float) -> Real:
        return self.constant(other) / self

    def __neg__(self) -> Real:
        return Real(self.builder, self.builder.fneg(self.ir))

    def __abs__(self) -> Real:
        return self.call("fabs")

    def __lt__(self, other: Real | float) -> Any:
        return self.builder.fcmp_ordered("<", self.ir, self.typed(other))

    def __gt__(self, other: Real | float) -> Any:
        return self.builder.fcmp_ordered(">", self.ir, self.typed(other))

    def equals(self, other: Real | float) -> Any:
        return self.builder.fcmp_ordered("==", self.ir, self.typed(other))

    def call(self, name: str, *others: Real) -> Real:
        """An intrinsic that vectorises."""
        kind = self.ir.type
        signature = ir.FunctionType(kind, [kind] * (1 + len(others)))
        function = self.builder.module.declare_intrinsic(f"llvm.{name}", [kind], signature)
        return Real(self.builder, self.builder.call(function, [self.ir, *(x.ir for x in others)]))

    def sqrt(self) -> Real:
        return self.call("sqrt")

    def signed(self, other: Real) -> Real:
        """This value with the sign of `other`."""
        return self.call("copysign", other)

    def clamp(self, low: float, high: float) -> Real:
        """NaN stays NaN."""
        x = where(self < low, low, self)
        return where(x > high, high, x)

    @property
    def bits(self) -> Any:
        return self.builder.bitcast(self.ir, I64 if self.ir.type == F64 else I32)

    def with_bits(self, bits: Any) -> Real:
        """The number of this type that has these bits."""
        return Real(self.builder, self.builder.bitcast(bits, self.ir.type))


def where(condition: Any, x: Real | float, y: Real | float) -> Real:
    """x where `condition` holds, y elsewhere; one of them a Real."""
    some = x if isinstance(x, Real) else y
    assert isinstance(some, Real)
    return Real(some.builder, some.builder.select(condition, some.typed(x), some.typed(y)))


def polynomial(x: Real, coefficients: Sequence[float]) -> Real:
    """With these coefficients, the highest first; by pairs, so that fewer products wait for others:
    erf takes 0.85 of what it takes by Horner's rule."""
    values = [x.constant(c) for c in reversed(coefficients)]
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [high * x + low for low, high in pairs] + values[len(values) & ~1 :]
        x = x * x
    return values[0]


# --- in float32 ----------------------------------------------------------------------------------

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1)  # fmt: skip
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
         -3.33332819422e-1)  # fmt: skip
# fitted by least squares, weighted until no error is larger than others, in parts of the function:
# (2^x - 1) / x and (e^x - 1 - x) / x^2 where exponents are rounded off, 2^-29 and 2^-32
_EXP2 = (0.0001547447744, 0.001340033637, 0.00961801077, 0.05550327551, 0.2402265129,
         0.6931472064)  # fmt: skip
_EXPM1 = (0.0001991226073, 0.001394115524, 0.008333276541, 0.04166635262, 0.166666668,
          0.5000000047)  # fmt: skip
# (log(1 + x) - x + x^2 / 2) / x^3 between sqrt(1/2) - 1 and sqrt(2) - 1: 2^-27
_LOG = (-0.07634225461, 0.1276146817, -0.1316023377, 0.1420177622, -0.1662335384, 0.2000122602,
        -0.2500082112, 0.3333333172)  # fmt: skip
# erf(x) / x - 1 up to 0.92 by x^2, 2^-31, and log(1 - erf(x)) from there on, 2^-29 of 1
_ERF_NEAR = (8.409912652e-05, -0.000815262594, 0.005201960038, -0.02685979851, 0.1128370331,
             -0.376126343, 0.1283791667)  # fmt: skip
_ERF_FAR = (0.0001949497889, -0.003033720263, 0.02218988082, -0.1038565769, -0.6372655357,
            -1.127627521, -0.0002069809575)  # fmt: skip
_TINIEST = 2.0**-25  # below it what begins with x is x


def _power(x: Real, n: Any) -> Real:
    """2^n, for an i32 between the exponents of normal numbers; x: of its type."""
    return x.with_bits(x.builder.shl(x.builder.add(n, I32(127)), I32(23)))


def _scaled(value: Real, n: Real) -> Real:
    """value * 2^n, in two factors: one alone cannot be subnormal."""
    whole = value.builder.fptosi(n.ir, I32)
    half = value.builder.ashr(whole, I32(1))
    return value * _power(value, half) * _power(value, value.builder.sub(whole, half))


def _reduced(x: Real) -> tuple[Real, Real]:
    """(n, r) of x = n ln 2 + r, n whole."""
    n = (x * (1 / math.log(2))).call("rint")
    return n, n * -_LN2_LOW + (n * -_LN2_HIGH + x)


def _exp_single(x: Real) -> Real:
    n, r = _reduced(x.clamp(-104.0, 89.0))  # 0 and infinity are reached inside
    return _scaled(polynomial(r, _EXP) * r * r + r + 1.0, n)


def _exp_of_normal(x: Real) -> Real:
    """The same for |x| < 87, where all is normal."""
    n, r = _reduced(x)
    return (polynomial(r, _EXP) * r * r + r + 1.0) * _power(x, x.builder.fptosi(n.ir, I32))


def _exp2_single(x: Real) -> Real:
    x = x.clamp(-151.0, 129.0)
    n = x.call("rint")
    return _scaled(polynomial(x - n, _EXP2) * (x - n) + 1.0, n)


def _expm1_single(x: Real) -> Real:
    n, r = _reduced(x.clamp(-20.0, 89.0))
    rest = polynomial(r, _EXPM1) * r * r + r
    half = _power(x, x.builder.sub(x.builder.fptosi(n.ir, I32), I32(1)))  # 2^128 is infinity
    return where(abs(x) < _TINIEST, x, (half * rest + (half - 0.5)) * 2.0)


def _tanh_single(x: Real) -> Real:
    size = where(abs(x) > 10.0, 10.0, abs(x))  # 1 in float32
    square = size * size
    near = polynomial(square, _TANH) * square * size + size
    far = 1.0 - 2.0 / (_exp_of_normal(size + size) + 1.0)
    return where(size < 0.625, near, far).signed(x)  # also the sign of a zero


def _erf_single(x: Real) -> Real:
    size = where(abs(x) > 4.0, 4.0, abs(x))  # 1 in float32
    near = polynomial(size * size, _ERF_NEAR) * size + size
    far = 1.0 - _exp_of_normal(polynomial(size, _ERF_FAR))
    return where(size < 0.92, near, far).signed(x)


def _exponent(x: Real) -> Any:
    """n of x = m 2^n with m between sqrt(1/2) and sqrt(2), an i32."""
    return x.builder.ashr(x.builder.sub(x.bits, I32(0x3F3504F3)), I32(23))


def _log_parts(x: Real) -> tuple[Real, Real, Real]:
    """(n, f, y) with log(x) = n ln 2 + (f + y), where y is small beside f; x > 0."""
    builder, small = x.builder, x < 2.0**-126
    x = where(small, x * 2.0**23, x)
    n = _exponent(x)
    f = x.with_bits(builder.sub(x.bits, builder.shl(n, I32(23)))) - 1.0
    whole = builder.sub(n, builder.select(small, I32(23), I32(0)))
    return Real(builder, builder.sitofp(whole, F32)), f, _log_rest(f)


def _log_rest(f: Real) -> Real:
    """log(1 + f) - f."""
    return polynomial(f, _LOG) * f * (f * f) + f * f * -0.5


def _log_ends(x: Real, value: Real) -> Real:
    """`value`, but where x is no positive number."""
    value = where(x.equals(0.0), -math.inf, where(x < 0.0, math.nan, value))
    return where(x < math.inf, value, x)


def _log_single(x: Real) -> Real:
    n, f, y = _log_parts(x)
    return _log_ends(x, n * _LN2_HIGH + ((n * _LN2_LOW + y) + f))


def _log2_single(x: Real) -> Real:
    n, f, y = _log_parts(x)
    more = 1 / math.log(2) - 1.0
    return _log_ends(x, n + (f + (y + (f * more + y * more))))


def _log10_single(x: Real) -> Real:
    n, f, y = _log_parts(x)
    high, low = 0.43359375, 1 / math.log(10) - 0.43359375  # of 8 bits, and the rest
    high2, low2 = 0.30078125, math.log10(2) - 0.30078125
    return _log_ends(x, n * high2 + (f * high + (y * high + (n * low2 + (f + y) * low))))


def _log1p_single(x: Real) -> Real:
    builder, n = x.builder, _exponent(x + 1.0)
    half = builder.ashr(n, I32(1))
    first, second = (_power(x, builder.neg(k)) for k in (half, builder.sub(n, half)))
    f = x * first * second + (first * second - 1.0)
    whole = Real(builder, builder.sitofp(n, F32))
    value = whole * _LN2_HIGH + ((whole * _LN2_LOW + _log_rest(f)) + f)
    value = _log_ends(x + 1.0, value)
    return where(abs(x) < _TINIEST, x, value)


# --- in float64: exponentials and logarithms -----------------------------------------------------

_LN2 = math.log(2)
_TINY = 2.0**-22  # below it odd functions are x; above it float64's 1 + x is good to 2^-30 of x
_ROUND = 1.5 * 2.0**52  # adding it leaves an integer in the low bits of the sum
_EXP_SERIES = [1 / math.factorial(k) for k in range(8, 0, -1)]  # 2^-32 from exact
_LOG_SERIES = [2 / (2 * k + 1) for k in range(7, -1, -1)]  # 2^-45


def _exponential(x: Real, doubling: float) -> tuple[Real, Real]:
    """(2^n, e^r - 1) for x = (n + r / ln 2) * doubling and an integer n."""
    x = x.clamp(-200.0 * doubling, 200.0 * doubling)
    shifted = x * (1 / doubling) + (_ROUND + 1023)
    n = shifted - (_ROUND + 1023)
    r = (n * -doubling + x) * (_LN2 / doubling)
    power = x.with_bits(x.builder.shl(shifted.bits, I64(52)))
    return power, polynomial(r, _EXP_SERIES) * r


def exp(x: Real) -> Real:
    power, rest = _exponential(x, _LN2)
    return power * rest + power


def exp2(x: Real) -> Real:
    power, rest = _exponential(x, 1.0)
    return power * rest + power


def sinh(x: Real) -> Real:
    e = exp(abs(x))
    return where(abs(x) < _TINY, x, ((e - 1.0 / e) * 0.5).signed(x))


def cosh(x: Real) -> Real:
    e = exp(abs(x))
    return (e + 1.0 / e) * 0.5


def log(x: Real) -> Real:
    builder = x.builder
    high = builder.trunc(builder.lshr(x.bits, I64(32)), I32)  # 32-bit lanes are twice as many
    exponent = builder.ashr(builder.sub(high, I32(0x3FE6A09E)), I32(20))  # of x / sqrt(1/2)
    shift = builder.shl(builder.zext(exponent, I64), I64(52))
    mantissa = x.with_bits(builder.sub(x.bits, shift))  # from sqrt(1/2) to sqrt(2)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    whole = Real(builder, builder.sitofp(exponent, F64))
    value = whole * _LN2 + polynomial(s * s, _LOG_SERIES) * s
    value = where(x.equals(0.0), -math.inf, where(x < 0.0, math.nan, value))
    return where(x < math.inf, value, x)  # infinity, NaN


def log2(x: Real) -> Real:
    return log(x) * (1 / _LN2)


def asinh(x: Real) -> Real:
    return where(abs(x) < _TINY, x, log(abs(x) + (x * x + 1.0).sqrt()).signed(x))


def acosh(x: Real) -> Real:
    return where(x < 1.0, math.nan, log(x + (x * x - 1.0).sqrt()))


def atanh(x: Real) -> Real:
    return where(abs(x) < _TINY, x, log((x + 1.0) / (1.0 - x)) * 0.5)


def pow(x: Real, y: Real) -> Real:
    """As C has it: pow(1, y) and pow(x, 0) are 1 even for NaN."""
    builder, size = x.builder, abs(x)
    value = where(size.equals(1.0), 1.0, exp2(y * log2(size)))
    whole = y.equals(y.call("rint"))
    even = (y * 0.5).equals((y * 0.5).call("rint"))
    negative = builder.icmp_signed("<", x.bits, I64(0))
    odd = builder.and_(negative, builder.and_(whole, builder.not_(even)))
    value = where(odd, -value, value)
    finite = builder.and_(x < 0.0, x > -math.inf)
    value = where(builder.and_(finite, builder.not_(whole)), math.nan, value)
    return where(builder.or_(x.equals(1.0), y.equals(0.0)), 1.0, value)


def hypot(x: Real, y: Real) -> Real:
    endless = x.builder.or_(abs(x).equals(math.inf), abs(y).equals(math.inf))
    return where(endless, math.inf, (x * x + y * y).sqrt())


# --- circular functions --------------------------------------------------------------------------

# 1 / 2 pi in pieces of 28 bits, whose product with a float32 is exact
_TURN = [
    piece * 2.0 ** (-28 * k)
    for k, piece in enumerate(
        (0x28BE60D, 0xB939105, 0x4A7F09D, 0x5F47D4D, 0x377036D, 0x8A5664F, 0x10E4107), 1
    )
]
_SIN_SERIES = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]  # 2^-30


def _turns(x: Real) -> list[Real]:
    """Parts of x / 2 pi but for whole turns, for every float32, after Payne and Hanek."""
    far = abs(x) > 2.0**81  # from here on the first two pieces give whole turns
    pieces = [where(far, x.constant(b), a) for a, b in zip(_TURN, _TURN[2:], strict=False)]
    turns = [x * piece for piece in pieces]
    return [turn - turn.call("rint") for turn in turns[:3]] + turns[3:]  # the others are small


def _sine(turns: list[Real], ahead: float) -> Real:
    """The sine of the sum of `turns` and `ahead`; the sums here are exact where it matters."""
    shifted = (turns[0] + turns[1] + turns[2] + ahead) * 2.0 + _ROUND
    rest = (shifted - _ROUND) * -0.5 + ahead
    for turn in turns:
        rest = rest + turn
    r = rest * math.tau
    value, builder = polynomial(r * r, _SIN_SERIES) * r, rest.builder
    odd = builder.shl(shifted.bits, I64(63))
    return value.with_bits(builder.xor(value.bits, odd))


def sin(x: Real) -> Real:
    return where(abs(x) < _TINY, x, _sine(_turns(x), 0.0))


def cos(x: Real) -> Real:
    return _sine(_turns(x), 0.25)


def tan(x: Real) -> Real:
    turns = _turns(x)
    return where(abs(x) < _TINY, x, _sine(turns, 0.0) / _sine(turns, 0.25))


_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def atan2(y: Real, x: Real) -> Real:
    """As C has it, also where both are zero or infinite."""
    a, b = abs(y).clamp(0.0, 1e300), abs(x).clamp(1e-300, 1e300)
    steep, diagonal = a > b * math.tan(3 * math.pi / 8), a > b * math.tan(math.pi / 8)
    t = where(steep, -b, where(diagonal, a - b, a)) / where(steep, a, where(diagonal, a + b, b))
    square = t * t
    angle = polynomial(square, _ATAN) * square * t + t
    angle = where(steep, angle + math.pi / 2, where(diagonal, angle + math.pi / 4, angle))
    left = x.builder.icmp_signed("<", x.bits, I64(0))
    return where(left, math.pi - angle, angle).signed(y)


def atan(x: Real) -> Real:
    return atan2(x, x.constant(1.0))


def asin(x: Real) -> Real:
    return atan2(x, ((x + 1.0) * (1.0 - x)).sqrt())


def acos(x: Real) -> Real:
    return atan2((1.0 - x).sqrt(), (x + 1.0).sqrt()) * 2.0


# --- error functions -----------------------------------------------------------------------------

_ERFC_NEAR = (7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3,
              -2.685381193529856e-2, 1.128358514861418e-1, -3.761262582423300e-1,
              1.128379165726710)  # fmt: skip
_ERFC_FROM_1 = (2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1,
                -5.824733027278666e-1, 6.210004621745983e-1, -4.944515323274145e-1,
                3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1)  # fmt: skip
_ERFC_FROM_2 = (-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786,
                -1.015265279202700, 4.218463358204948e-1, -2.820767439740514e-1,
                5.641895067754075e-1)  # fmt: skip


def erfc(x: Real) -> Real:
    size = abs(x)
    inverse = 1.0 / size
    square = inverse * inverse
    tail = where(size < 2.0, polynomial(square, _ERFC_FROM_1), polynomial(square, _ERFC_FROM_2))
    far = exp(-(x * x)) * inverse * tail
    near = 1.0 - polynomial(x * x, _ERFC_NEAR) * x
    return where(size < 1.0, near, where(x < 0.0, 2.0 - far, far))


SINGLE: dict[str, Callable[..., Real]] = {
    "exp": _exp_single, "exp2": _exp2_single, "expm1": _expm1_single, "log": _log_single,
    "log2": _log2_single, "log10": _log10_single, "log1p": _log1p_single, "tanh": _tanh_single,
    "erf": _erf_single,
}  # fmt: skip
DOUBLE: dict[str, Callable[..., Real]] = {
    function.__name__: function
    for function in (
        sinh, cosh, asinh, acosh, atanh, pow, hypot, sin, cos, tan, asin, acos, atan, atan2, erfc,
    )
}  # fmt: skip


def vectorised(builder: ir.IRBuilder, name: str, args: Sequence[Any]) -> Any:
    """The function `name` of float32 values, still to be rounded if it is a float64.

    None if it is not one of these.
    """
    if name in SINGLE:
        return SINGLE[name](*(Real(builder, x) for x in args)).ir
    if name in DOUBLE:
        return DOUBLE[name](*(Real(builder, builder.fpext(x, F64)) for x in args)).ir
    return None
