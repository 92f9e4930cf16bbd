"""The op table: what each pointwise op computes, for which dtypes, and how torch spells it.

Arithmetic, elementary functions, comparisons, casts and Python's operators stand here, activations
and losses in `activations`, special functions in `special`. Adding an op is one row; a name that
torch has in `torch`, `torch.Tensor`, `torch.nn.functional` or `torch.special` is found by itself.

The expressions keep the order of PyTorch's CUDA kernels (aten/src/ATen/native/cuda); a product
and a sum inside one expression contract as they do there, never across expressions.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..dtypes import CODES
from ..layout import Ints, result_stride
from . import activations as _activations  # noqa: F401 - they add their rows
from . import special as _special  # noqa: F401
from .row import (
    METHODS,
    OPS,
    PENDING,
    composite,
    is_nan,
    is_number,
    plain,
    returning,
    row,
    since,
    single,
    spelled,
)

# fmt: off

# --- one operand ---------------------------------------------------------------------------------

_UNARY_GRADS = {
    "exp": "g * out",
    "exp2": "g * out * 0.69314718055994530942",
    "expm1": "g * (out + 1)",
    "log": "g / x",
    "log2": "g / (x * 0.6931471805599453)",
    "log10": "g / (x * 2.3025850929940456)",
    "log1p": "g / (x + 1)",
    "sin": "g * cos(x)",
    "cos": "g * -sin(x)",
    "tan": "g * (1 + pow_2(out))",
    "asin": "g * rsqrt(-x * x + 1)",
    "acos": "g * -rsqrt(-x * x + 1)",
    "atan": "g / (x * x + 1)",
    "sinh": "g * cosh(x)",
    "cosh": "g * sinh(x)",
    "tanh": "tanh_backward(g, out)",
    "asinh": "g * rsqrt(pow_2(x) + 1)",
    "acosh": "g * rsqrt(x * x - 1)",
    "atanh": "g * 1 / (1 - pow_2(x))",
    "sqrt": "g / (2 * out)",
    "rsqrt": "-0.5 * g * pow_3(out)",
    "erf": "1.1283791670955126 * exp(-pow_2(x)) * g",
    "erfc": "-1.1283791670955126 * exp(-pow_2(x)) * g",
}
_SHORT = {
    "log": {"bf16": "lg2_wide(x) * 0.69314718055994530942"},
    "log2": {"bf16": "lg2_wide(x)"},
    "sqrt": {"f16": "sqrt_wide(x)", "bf16": "sqrt_wide(x)"},
    "tanh": {"bf16": "x if abs(x) < 0.0625 else fma(rcp(ex2(x * 2.8853900817779268) + 1), -2, 1)"},
}
# where exp does, as torch's vectors; what a vector leaves over torch computes by libm
_OVERFLOWS = {"f64": 709.782712893384, "bf16": 88.722835}
if not since(2, 14):
    _OVERFLOWS["f32"] = 88.722835
_CPU = {
    name: {code: f"{far} if abs(x) > {limit} else {name}(x)" for code, limit in _OVERFLOWS.items()}
    for name, far in (("sinh", "x * inf"), ("cosh", "inf"))
}
for _name, _grad in _UNARY_GRADS.items():
    _alias = "arc" + _name[1:]
    _aliases = (_alias,) if hasattr(torch, _alias) else ()
    plain(_name, "x", f"{_name}(x)", *_aliases, result="float", accepts="fib", grad=_grad,
          cpu=_CPU.get(_name, ""), **_SHORT.get(_name, {}))

plain("reciprocal", "x", "1 / x", f16="rcp(x)", bf16="rcp_wide(x)", result="float", accepts="fib",
      grad="-g * (out * out)")
plain("sigmoid", "x", "1 / (1 + exp(-x))", "expit",
      f16="d = 1 + exp(-x); r = rcp(d); z = fma(fma(-d, r, 1), r, r); z if z == z else r",
      bf16="rcp(fma(ex2(x * -1.4426950408889634), 0.0625, 0.0625)) * 0.0625", result="float",
      accepts="fib", grad="sigmoid_backward(g, out)")
plain("neg", "x", "-x", "negative", accepts="fi", grad="-g")
plain("abs", "x", "abs(x)", "absolute", integer="x if x >= 0 else -x", accepts="fi",
      grad="g * sign(x)")
_SIGN = "(1 if 0 < x else 0) - (1 if x < 0 else 0)"
plain("sign", "x", _SIGN, boolean="x", accepts="fib", grad="zeros(g)")
plain("sgn", "x", _SIGN, boolean="x", accepts="fib")
plain("signbit", "x", "copysign(1, x) < 0", integer="x < 0", result="bool", accepts="fi")
plain("floor", "x", "floor(x)", integer="x", accepts="fi", grad="zeros(g)")
plain("ceil", "x", "ceil(x)", integer="x", accepts="fi", grad="zeros(g)")
plain("trunc", "x", "trunc(x)", "fix", integer="x", accepts="fi", grad="zeros(g)")
plain("frac", "x", "x - trunc(x)", grad="g")
plain("square", "x", "x * x", accepts="fi", grad="g * (2.0 * pow_1(x))")
_ASKS = {"result": "bool", "accepts": "fib", "integer": "x != x"}
plain("isnan", "x", "x != x", **_ASKS)


def _compared(shape: Ints, stride: Ints) -> Ints:
    """Strides of `abs(x) == inf`."""
    return result_stride(shape, [(shape, result_stride(shape, [(shape, stride)])), ((), ())])


def _compared_twice(shape: Ints, stride: Ints) -> Ints:
    """Strides of `(x == x) * (abs(x) != inf)`."""
    equal = result_stride(shape, [(shape, stride)] * 2)
    return result_stride(shape, [(shape, equal), (shape, _compared(shape, stride))])


plain("isinf", "x", "abs(x) == inf", copies="ib", strides=_compared, **_ASKS)
plain("isposinf", "x", "x == inf", **_ASKS)
plain("isneginf", "x", "x == -inf", **_ASKS)
plain("isfinite", "x", "abs(x) < inf", copies="ib", strides=_compared_twice,
      **{**_ASKS, "integer": "x == x"})
plain("logical_not", "x", "x == 0", result="bool", accepts="fib")
plain("bitwise_not", "x", "~x", accepts="ib")
_OPMATH = {"scalar": "opmath", "cpu_scalar": "opmath"}
plain("angle", "x", "x if x != x else 3.14159265358979323846 if x < 0 else 0", result="float",
      accepts="wib")
for _name, _factor in (("deg2rad", 0.017453292519943295), ("rad2deg", 57.29577951308232)):
    _row = row(_name, "x y", "x * y", **_OPMATH, copies="f",
               eager=partial(lambda function, x, y: function(x), getattr(torch, _name)),
               grad="g * y; none")
    spelled(_name)(partial(lambda row, factor, input: (row, (input, factor)), _row, _factor))
row("nan_to_num", "x n:common p:common m:common",
    "n if x != x else p if x == inf else m if x == -inf else x", copies="f", eager=torch.nan_to_num,
    grad="g * isfinite(x); none; none; none")

row("round", "x", "round(x)", integer="x", accepts="fi", grad="zeros(g)")
row("clone", "x", "x", accepts="fib", copies="fib", grad="g")
row("clone_contiguous", "x", "x", accepts="fib", contiguous="cpu cuda", grad="g",
    eager=partial(torch.clone, memory_format=torch.contiguous_format))

CASTS = {
    dtype: row(f"to_{code}", "x", "x", result=dtype, accepts="fib", grad="g",
               eager=partial(torch.Tensor.to, dtype=dtype))
    for dtype, code in CODES.items()
}


row(
    "round_to",  # after so many decimals: t is a power of ten
    "x t:common",
    "round(x * t) / t",
    narrow="round(rnd(x * t)) / t",
    cpu="round(x * t) / t",
    eager=lambda x, t: torch.round(x, decimals=round(math.log10(t))),
    grad="zeros(g); none",
)
row("round_before", "x t:common", "round(x / t) * t", narrow="round(rnd(x / t)) * t",
    cpu="round(x / t) * t", eager=lambda x, t: torch.round(x, decimals=-round(math.log10(t))),
    grad="zeros(g); none")


_ABSENT: Any = object()


@spelled("round")
def _round(input, *, decimals=_ABSENT):
    if decimals is _ABSENT:
        return OPS["round"], (input,)
    if type(decimals) is not int or abs(decimals) > 300 or not input.is_floating_point():
        return None
    if decimals == 0:
        return OPS["round"], (input,)
    return OPS["round_to" if decimals > 0 else "round_before"], (input, 10.0 ** abs(decimals))


@spelled()
def clone(input, *, memory_format=torch.preserve_format):
    if memory_format is torch.contiguous_format:
        return OPS["clone_contiguous"], (input,)
    return (OPS["clone"], (input,)) if memory_format is torch.preserve_format else None


# --- two operands --------------------------------------------------------------------------------

_ARITHMETIC = {"scalar": "opmath", "accepts": "fi"}
_WITH_BOOL = {"scalar": "opmath", "accepts": "fib"}
plain("add", "x y", "x + y", boolean="x | y", **_WITH_BOOL, grad="g; g")
plain("sub", "x y", "x - y", "subtract", takes_bool=False, **_ARITHMETIC, grad="g; -g")
plain("rsub", "x y", "y - x", takes_bool=False, reversed=True, **_ARITHMETIC, grad="-g; g")
plain("mul", "x y", "x * y", "multiply", boolean="x & y", cpu_scalar="opmath", **_WITH_BOOL,
      grad="g * y; g * x")
# CUDA multiplies by the reciprocal of a number, which it takes in float64 since torch 2.10
row("div_by_scalar", *(("x y:inverse", "x * y") if since(2, 10) else ("x y", "x * (1 / y)")),
    cpu="x / y", scalar="opmath", cpu_scalar="opmath", result="float", accepts="fib")
plain(
    "div",
    "x y",
    "x / y",
    "divide",
    "true_divide",
    # z is q corrected by what is left of x. Operands that are finite and not 0 lie in 2^-24 to
    # 2^16: nothing underflows, and z is neither 0 nor NaN. Otherwise q has eager's bits: x = 0,
    # where z can be +0 for a q of -0, and y = 0 or either infinite, where z is NaN
    f16="r = rcp(y); q = x * r; z = fma(fma(-y, q, x), r, q); z if abs(z) > 0 else q",
    bf16="div_wide(x, y)",  # quotients of 8-bit significands lie 2^-18 from a tie, or on it
    result="float",
    accepts="fib",
    by_scalar=OPS["div_by_scalar"],
    grad="g / y; -g * ((x / y) / y)",
)
row("add_scaled", "x y s:opmath", "fma(s, y, x)", cpu="fma(rnd(s), y, x)", integer="x + s * y",
    **_ARITHMETIC, eager=lambda x, y, s: torch.add(x, y, alpha=s), grad="g; g * s; none")
row("sub_scaled", "x y s:opmath", "fma(-s, y, x)", cpu="fma(-rnd(s), y, x)", integer="x - s * y",
    takes_bool=False, **_ARITHMETIC, eager=lambda x, y, s: torch.sub(x, y, alpha=s),
    grad="g; -g * s; none")
row("rsub_scaled", "x y s:opmath", "fma(-s, x, y)", cpu="fma(-rnd(s), x, y)", integer="y - s * x",
    takes_bool=False, reversed=True, **_ARITHMETIC, eager=lambda x, y, s: torch.rsub(x, y, alpha=s),
    grad="-g * s; g; none")
_QUOTIENT = {"integer": "x / y", "accepts": "fi"}
row("div_trunc_by_scalar", "x y", "trunc(x * (1 / y))", cpu="trunc(x / y)", **_QUOTIENT,
    scalar="opmath", cpu_scalar="opmath")
row("div_trunc", "x y", "trunc(rnd(x / y))", **_QUOTIENT, by_scalar=OPS["div_trunc_by_scalar"],
    eager=partial(torch.div, rounding_mode="trunc"), grad="zeros(g, y); zeros(g, x, y)")
_FLOORED = (
    "m = fmod(x, y);"
    "d = (x - m) {by};"
    "d = d - 1 if m != 0 and (y < 0) != (m < 0) else d;"
    "f = rnd(floor(d));"
    "f = rnd(f + 1) if d - f > 0.5 else f;"
    "x {by} if y == 0 else copysign(0, x {by}) if d == 0 else f"
)
_WHOLE = {
    "integer": "q = x / y; q - 1 if (x < 0) != (y < 0) and x % y != 0 else q",
    "accepts": "fi",
}
row("div_floor_by_scalar", "x y", _FLOORED.format(by="* (1 / y)"), cpu=_FLOORED.format(by="/ y"),
    **_WHOLE, scalar="opmath", cpu_scalar="opmath")
row("div_floor", "x y", _FLOORED.format(by="/ y"), **_WHOLE, by_scalar=OPS["div_floor_by_scalar"],
    eager=partial(torch.div, rounding_mode="floor"), grad="zeros(g, y); zeros(g, x, y)")
row(
    "floor_divide",  # the same, but torch has no derivative for it
    "x y",
    _FLOORED.format(by="/ y"),
    **_WHOLE,
    by_scalar=OPS["div_floor_by_scalar"],
)
for _name, _sign, *_long in (
    ("eq", "=="), ("ne", "!=", "not_equal"), ("lt", "<", "less"), ("le", "<=", "less_equal"),
    ("gt", ">", "greater"), ("ge", ">=", "greater_equal"),
):
    plain(_name, "x y", f"x {_sign} y", *_long, result="bool", accepts="fib")
_LOGICAL = {"result": "bool", "accepts": "fib", "tensors_only": True}
plain("logical_and", "x y", "x != 0 and y != 0", **_LOGICAL)
plain("logical_or", "x y", "x != 0 or y != 0", **_LOGICAL)
plain("logical_xor", "x y", "(x != 0) != (y != 0)", **_LOGICAL)
plain("bitwise_and", "x y", "x & y", accepts="ib")
plain("bitwise_or", "x y", "x | y", accepts="ib")
plain("bitwise_xor", "x y", "x ^ y", accepts="ib")
plain("bitwise_left_shift", "x y", "x << y", accepts="i")
plain("bitwise_right_shift", "x y", "x >> y", accepts="i")
plain("maximum", "x y", "x if x != x else y if y != y else fmax(x, y)", integer="x if x > y else y",
      boolean="x | y", accepts="fib", tensors_only=True,
      grad="where(x < y, 0, where(x == y, g / 2, g)); where(x > y, 0, where(x == y, g / 2, g))")
plain("minimum", "x y", "x if x != x else y if y != y else fmin(x, y)", integer="x if x < y else y",
      boolean="x & y", accepts="fib", tensors_only=True,
      grad="where(x > y, 0, where(x == y, g / 2, g)); where(x < y, 0, where(x == y, g / 2, g))")
_TENSORS = {"accepts": "fib", "tensors_only": True}
# since torch 2.14 equal operands get half of the gradient each, what equals a number as its bound
# gets none, and fmax and fmin of two NaNs give each all of it: those are eager
_GRADED = not since(2, 14)
plain(
    "fmax",
    "x y",
    "fmax(x, y)",
    integer="x if x > y else y",
    boolean="x | y",
    **_TENSORS,
    grad="masked_fill(g, logical_not(logical_or(x >= y, isnan(y))), 0);"
    "masked_fill(g, logical_or(x >= y, isnan(y)), 0)"
    if _GRADED
    else "",
)
plain(
    "fmin",
    "x y",
    "fmin(x, y)",
    integer="x if x < y else y",
    boolean="x & y",
    **_TENSORS,
    grad="masked_fill(g, logical_not(logical_or(x <= y, isnan(y))), 0);"
    "masked_fill(g, logical_or(x <= y, isnan(y)), 0)"
    if _GRADED
    else "",
)
plain("fmod", "x y", "fmod(x, y)", integer="x % y", accepts="fi", grad="g; -g * div_trunc(x, y)")
row("remainder", "x y", "m = fmod(x, y); m + y if m != 0 and (y < 0) != (m < 0) else m",
    integer="m = x % y; m + y if m != 0 and (y < 0) != (m < 0) else m", accepts="fi",
    grad="g; -g * div_floor(x, y)")


@spelled()
def remainder(input, other):
    """torch differentiates none of a number, and says so in backward."""
    if not isinstance(input, torch.Tensor) and other.requires_grad:
        return None
    return OPS["remainder"], (input, other)


plain(
    "atan2",
    "x y",
    "atan2(x, y)",
    "arctan2",
    result="float",
    **_TENSORS,
    grad="g * y * where(x * x + y * y == 0, 0, reciprocal(x * x + y * y));"
    "g * -x * where(x * x + y * y == 0, 0, reciprocal(x * x + y * y))",
)
plain("heaviside", "x y", "y if x == 0 else 1 if x > 0 else 0", boolean="x | y", one_dtype=True,
      **_TENSORS)


@spelled()
def heaviside(input, values):
    return OPS["heaviside"], (input, values)


plain("nextafter", "x y", "nextafter(x, y)", accepts="w", tensors_only=True)
_LARGER = "x if abs(x) == inf and x == y else fmax(x, y) + "
plain("logaddexp", "x y", _LARGER + "log1p(exp(-abs(x - y)))", tensors_only=True,
      grad="g / (1 + exp(y - x)); g / (1 + exp(x - y))")
plain("logaddexp2", "x y", _LARGER + "log1p(exp2(-abs(x - y))) * 1.4426950408889634",
      tensors_only=True,
      grad="g / (1 + rpow_scalar(2.0, y - x)); g / (1 + rpow_scalar(2.0, x - y))")
plain("hypot", "x y", "hypot(x, y)", tensors_only=True, grad="g * x / out; g * y / out")
plain("copysign", "x y", "copysign(x, y)", result="float", keeps="out",
      grad="g * where(x == 0, 0, out / x); zeros(g)")
row(
    "pow",
    "x y",
    "pow(x, y)",
    keeps="out",
    one_device=True,  # a 0-d exponent on the CPU is a number
    grad="where(y == 0.0, 0, g * (y * pow(x, y - 1)));"
    "g * where(logical_and(x == 0, y >= 0), 0, out * log(cast(x, out)))",
)
row("pow_scalar", "x y", "pow(x, y)", grad="g * (y * pow(x, y - 1)); none", eager=torch.pow)
row("rpow_scalar", "x y", "pow(x, y)", keeps="y", grad="none; g * (out * log(x))",
    contiguous="cpu cuda", eager=torch.pow)
# exponents whose derivative has a form of its own
row("pow_4", "x", "pow(x, 4.0)", grad="g * (4.0 * pow_3(x))",
    eager=partial(torch.pow, exponent=4.0))
row("pow_1_5", "x", "pow(x, 1.5)", grad="g * (1.5 * pow_half(x))",
    eager=partial(torch.pow, exponent=1.5))
row("pow_half", "x", "sqrt(x)", eager=partial(torch.pow, exponent=0.5),
    grad="g * (0.5 * pow_minus_half(x))")
row("pow_2", "x", "x * x", accepts="fi", eager=partial(torch.pow, exponent=2), 
    grad="g * (2.0 * pow_1(x))")
row("pow_3", "x", "rnd(x * x) * x", integer="x * x * x", accepts="fi",
    eager=partial(torch.pow, exponent=3), grad="g * (3.0 * pow_2(x))")
row("pow_minus_half", "x", "rsqrt(x)", eager=partial(torch.pow, exponent=-0.5),
    grad="g * (-0.5 * pow(x, -1.5))")
row("pow_minus_1", "x", "1 / x", eager=partial(torch.pow, exponent=-1),
    grad="g * (-1.0 * pow_minus_2(x))")
row("pow_minus_2", "x", "1 / rnd(x * x)", cpu="1 / (x * x)", eager=partial(torch.pow, exponent=-2),
    grad="g * (-2.0 * pow(x, -3.0))")
# where both are zeros CUDA's clamp of numbers gives x since torch 2.14, and 0 or -0 before
_SIGNED = since(2, 14)
_BOUND = {"accepts": "fi", "one_device": True}
_AT_LEAST = {"integer": "x if x > y else y", **_BOUND}
_AT_MOST = {"integer": "x if x < y else y", **_BOUND}
row("clamp_min_by_scalar", "x y", "y if x < y else x", **_AT_LEAST)
row("clamp_max_by_scalar", "x y", "y if x > y else x", **_AT_MOST)
row("clamp_min", "x y", "x if x != x else y if y != y else fmax(x, y)",
    by_scalar=OPS["clamp_min_by_scalar"] if _SIGNED else None, **_AT_LEAST,
    grad="where(x >= y, g, 0); where(x < y, g, 0)" if _GRADED else "")
row("clamp_max", "x y", "x if x != x else y if y != y else fmin(x, y)",
    by_scalar=OPS["clamp_max_by_scalar"] if _SIGNED else None, **_AT_MOST,
    grad="where(x <= y, g, 0); where(x > y, g, 0)" if _GRADED else "")

_POWERS = {0.5: "half", 1.5: "1_5", 2.0: "2", 3.0: "3", 4.0: "4",
           -0.5: "minus_half", -1.0: "minus_1", -2.0: "minus_2"}


def _sum(name, input, other, *, alpha=1):
    whole = type(alpha) is int
    if whole and alpha == 1:
        return OPS[name], (input, other)
    if not is_number(alpha) or (whole and alpha == 0 and name != "add"):
        return None  # torch negates alpha: an int has no -0
    return OPS[f"{name}_scaled"], (input, other, alpha)


for _name, *_aliases in (("add",), ("sub", "subtract"), ("rsub",)):
    spelled(_name, *_aliases)(partial(_sum, _name))


@spelled("div", "divide")
def _div(input, other, *, rounding_mode=None):
    name = {None: "div", "trunc": "div_trunc", "floor": "div_floor"}.get(rounding_mode)
    return None if name is None else (OPS[name], (input, other))


@spelled()
def floor_divide(input, other):
    return OPS["floor_divide"], (input, other)


@spelled("pow")
def _pow(input, exponent):
    if not isinstance(input, torch.Tensor):
        return None if input in (0, 1) else (OPS["rpow_scalar"], (input, exponent))
    if isinstance(exponent, torch.Tensor):
        return OPS["pow"], (input, exponent)
    if not is_number(exponent):
        return None
    if exponent in (0, 1) or not math.isfinite(exponent):
        return None
    if not input.is_floating_point() and type(exponent) is float:
        return None  # the exponent promotes
    if not float(exponent).is_integer() and single(exponent).is_integer():
        return None  # on the CPU torch rounds it for a part of the elements
    if 0 < abs(exponent - (half := round(exponent * 2) / 2)) < 0.01 and half in _POWERS:
        return None  # on CUDA it may round to one of these, and is then treated as such
    if abs(exponent) < 0.01 and input.requires_grad:
        return None  # so may the exponent less 1 of the gradient
    special = _POWERS.get(exponent)
    if special is None or (special in ("4", "1_5") and not input.is_floating_point()):
        return OPS["pow_scalar"], (input, exponent)
    return OPS[f"pow_{special}"], (input,)


@composite("float_power")
def _float_power(input, exponent):
    tensors = [x for x in (input, exponent) if isinstance(x, torch.Tensor)]
    if any(x.is_complex() for x in tensors) or not all(
        isinstance(x, torch.Tensor) or is_number(x) for x in (input, exponent)
    ):
        return None
    if len(tensors) == 2 and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None  # two casts, whose gradients torch lays out in another way
    double = torch.float64
    operands = [
        x.to(double) if isinstance(x, torch.Tensor) else float(x) for x in (input, exponent)
    ]
    return torch.pow(*operands)  # type: ignore[arg-type]


@composite("float_power_")
def _float_power_(input, exponent):
    real = is_number(exponent) or isinstance(exponent, torch.Tensor) and not exponent.is_complex()
    return input.pow_(exponent) if real and input.dtype is torch.float64 else None


@composite()
def isclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    if not (is_number(rtol) and is_number(atol) and type(equal_nan) is bool):
        return None
    if not (input.dtype is other.dtype and input.is_floating_point() and rtol >= 0 <= atol):
        return None
    close = torch.eq(input, other)  # functions, for an operator may ask the right operand first
    if equal_nan:
        close |= torch.ne(input, input) & torch.ne(other, other)  # in place, as torch does
    if rtol == 0 and atol == 0:
        return close
    error = torch.abs(torch.sub(input, other))
    allowed = torch.add(torch.abs(torch.mul(other, rtol)), atol)
    close |= torch.isfinite(error) & torch.le(error, allowed)
    return close


def _selection(row, input, other=None, *rest, **options):
    reduces = rest or options or not isinstance(other, torch.Tensor)
    return None if reduces else (row, (input, other))


spelled("max")(partial(_selection, OPS["maximum"]))
spelled("min")(partial(_selection, OPS["minimum"]))


@spelled()
def nan_to_num(input, nan=None, posinf=None, neginf=None):
    if not input.is_floating_point():
        return None
    if not all(value is None or is_number(value) for value in (nan, posinf, neginf)):
        return None
    info = torch.finfo(input.dtype)
    nan = 0.0 if nan is None else float(nan)
    high = info.max if posinf is None else float(posinf)
    low = info.min if neginf is None else float(neginf)
    return OPS["nan_to_num"], (input, nan, high, low)


@returning
@composite("conj_physical", "conj", "resolve_conj", "resolve_neg", "real")
def _itself(input):
    """Functions that hand their argument back where it is real."""
    return None if input.is_complex() else input


@returning
@composite()
def positive(input):
    return None if input.dtype is torch.bool else input


@returning
@composite()
def contiguous(input, *, memory_format=torch.contiguous_format):
    return input if input.is_contiguous(memory_format=memory_format) else None


PENDING[contiguous] = OPS["clone_contiguous"]  # mostly of a view


def _bounds(input, low, high):
    if low is None and high is None:
        return None
    if is_nan(low) or is_nan(high):
        return None  # clamp and clamp_min differ, and devices do
    if high is None:
        return OPS["clamp_min"], (input, low)
    if low is None:
        return OPS["clamp_max"], (input, high)
    if isinstance(low, torch.Tensor) != isinstance(high, torch.Tensor):
        return None
    return OPS["clamp"], (input, low, high)


# --- three operands ------------------------------------------------------------------------------

row(
    "clamp",
    "x l h",
    (
        "r = l if x < l else x; r = h if h < r else r;"
        "x if x != x else l if l != l else h if h != h else r"
        if _SIGNED
        else "x if x != x else l if l != l else h if h != h else fmin(fmax(x, l), h)"
    ),
    integer="h if (x if x > l else l) > h else (x if x > l else l)",
    accepts="fi",
    one_device=True,
    # nested, for the layout: torch joins the conditions in place
    grad=(
        "where(x >= l, where(x <= h, g, 0), 0); where(x < l, where(l < h, g, 0), 0);"
        "where(x > h, g, where(h < l, g, 0))"
        if _GRADED
        else ""
    ),
)
row("where", "c:bool x y", "x if c else y", accepts="fib",
    grad="none; where(c, g, 0); where(c, 0, g)")
row("masked_fill", "x m:bool v:common", "v if m else x", accepts="fib", contiguous="cpu cuda",
    grad="masked_fill(g, m, 0); none; none")
_LERP = "d = y - x; fma(w, d, x) if abs(w) < 0.5 else fma(-d, 1 - w, y)"
_ALONE = {"one_device": True}
row("lerp", "x y w", _LERP, keeps="w", **_ALONE, grad="g * (1 - w); g * w; g * (y - x)")
row("lerp_scalar", "x y w:opmath", _LERP, **_ALONE, eager=torch.lerp,
    grad="g * (1 - w); g * w; none")
row("addcmul", "x y z", "fma(y, z, x)", integer="x + y * z", accepts="fi", **_ALONE,
    grad="g; g * z; g * y")
_ONE = since(2, 11)  # CUDA's addcmul leaves out the product with a value of 1
row("addcmul_scaled", "x y z s:opmath",
    "fma(y, z, x) if s == 1 else fma(s, y * z, x)" if _ONE else "fma(s, y * z, x)",
    cpu="fma(s * y, z, x)", integer="x + s * y * z", accepts="fi", **_ALONE,
    eager=lambda x, y, z, s: torch.addcmul(x, y, z, value=s),
    grad="g; g * (z * s); g * (y * s); none")
row("addcdiv", "x y z", "x + y / z", keeps="z", **_ALONE,
    grad="g; g * reciprocal(z); -g * (y / (z * z))")
row("addcdiv_scaled", "x y z s:opmath", "fma(s, y / z, x)", cpu="x + s * y / z", **_ALONE,
    eager=lambda x, y, z, s: torch.addcdiv(x, y, z, value=s), keeps="z",
    grad="g; g * (s / z); -g * (y * s / (z * z)); none")


@spelled("clamp", "clip")
def _clamp(input, min=None, max=None):
    return _bounds(input, min, max)


@spelled()
def clamp_min(input, min):
    return _bounds(input, min, None)


@spelled()
def clamp_max(input, max):
    return _bounds(input, None, max)


@spelled()
def where(condition, input, other):
    return OPS["where"], (condition, input, other)


METHODS["where"] = lambda input, condition, other: where(condition, input, other)


@spelled()
def masked_fill(input, mask, value):
    if not is_number(value) or input.dtype is torch.bool:
        return None
    limits = torch.finfo if input.is_floating_point() else torch.iinfo
    fits = limits(input.dtype).min <= value <= limits(input.dtype).max
    if not fits and math.isfinite(value):
        return None  # torch's error
    return OPS["masked_fill"], (input, mask, value)


@spelled()
def lerp(input, end, weight):
    if not (isinstance(end, torch.Tensor) and input.dtype is end.dtype):
        return None
    if is_number(weight):
        return OPS["lerp_scalar"], (input, end, float(weight))
    return (OPS["lerp"], (input, end, weight)) if weight.dtype is input.dtype else None


def _addc(name, input, tensor1, tensor2, *, value=1):
    if not (input.dtype is tensor1.dtype is tensor2.dtype and is_number(value)):
        return None
    if value == 1 and (_ONE or name == "addcdiv" or not input.is_cuda):
        return OPS[name], (input, tensor1, tensor2)
    return OPS[f"{name}_scaled"], (input, tensor1, tensor2, value)


for _name in ("addcmul", "addcdiv"):
    spelled(_name)(partial(_addc, _name))


# --- what derivative rules call: the kernels of PyTorch's own backward ops ------------------------

_backward = torch.ops.aten


row("pow_1", "x", "x", eager=partial(torch.pow, exponent=1))  # which autocast casts
row("zeros", "x", "0", copies="f", eager=torch.zeros_like)
row("scalar_div", "x y", "x / y", eager=lambda x, y: torch.div(torch.tensor(x, dtype=y.dtype), y))
row("sigmoid_backward", "g y", "g * (1 - y) * y", narrow="rnd(g * rnd(1 - y)) * y",
    eager=_backward.sigmoid_backward)
row("tanh_backward", "g y", "g * fma(-y, y, 1)", narrow="g * rnd(1 - rnd(y * y))",
    eager=_backward.tanh_backward)


@spelled()
def to(input, *args, **options):
    """A dtype, a device and a dtype, or another tensor; the device is that of `input`."""
    dtype = args[0] if len(args) == 1 else None
    if options or not isinstance(dtype, torch.dtype):
        if args and isinstance(args[0], torch.Tensor):
            other, *args = args
            if other.layout is not input.layout or options.keys() & {"device", "dtype"}:
                return None
            args = (other.device, other.dtype, *args)
        elif args and isinstance(args[0], torch.dtype):
            args = (None, *args)
        given = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False))
        if len(given) < len(args) or given.keys() & options.keys():
            return None
        given |= options
        device, dtype = given.pop("device", None), given.pop("dtype", None)
        flag, copy = given.pop("non_blocking", False), given.pop("copy", False)
        if flag.__class__ is not bool or copy is not False:
            return None
        if given or device is dtype is None or not is_same_device(device, input):
            return None
    if dtype is None or dtype is input.dtype:
        return input if input.dtype in CASTS else None
    row = CASTS.get(dtype)
    return None if row is None else (row, (input,))


def is_same_device(device, input):
    """Whether `device`, as `to` takes it, is that of `input`, for certain."""
    if device is None:
        return True
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != input.device.type:
        return False
    index = input.device.index
    return device.index == index or (
        device.index is None and device.type == "cuda" and torch.cuda.current_device() == index
    )


@spelled("type")
def _type(input, dtype=None, non_blocking=False):
    return to(input, dtype) if isinstance(dtype, torch.dtype) else None


@spelled()
def type_as(input, other):
    alike = other.device == input.device and other.layout is input.layout
    return to(input, other.dtype) if alike else None
