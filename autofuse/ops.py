"""The op table: what each pointwise op computes, for which dtypes, and how torch spells it.

An `Op` is a scalar function; its expression is Python over carried values (float16 and bfloat16
are computed in float32 and rounded once, at the end, unless the expression says `rnd`); `name =
value;` in front of it names a part. A spelling
is a torch function: it takes torch's own arguments and names the Op and its operands, or returns
None where only eager PyTorch knows what to do. Adding an op is one row; a name that torch has in
`torch`, `torch.Tensor`, `torch.nn.functional` or `torch.special` is found by itself.

The expressions keep the order of PyTorch's CUDA kernels (aten/src/ATen/native/cuda); a product
and a sum inside one expression contract as they do there, never across expressions.
"""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from .dtypes import CODES, kind, result_type

Operand = object  # a tensor or a Python scalar
Chosen = tuple["Op", tuple[Operand, ...]] | None


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row: a scalar function and its dtype rule.

    params: the operands' names, in order. A suffix takes an operand out of type promotion:
        `c:bool` must be a bool tensor, `s:opmath` is a scalar in the compute type, `v:common` is
        converted to the dtype of the others.
    result: "common" (the promoted dtype), "float" (the same, integers first become the default
        float dtype), "bool", or the dtype itself (a cast).
    accepts: categories the promoted dtype may have: f(loat), i(nteger), b(ool). Others are eager.
    scalar: whether a promoting Python scalar is first rounded to the "common" dtype or stays in
        the "opmath" type: on CUDA; `cpu_scalar` is the same for the CPU.
    by_scalar: the Op that stands in when the last operand is a scalar. Its `by(x, y)` divides as
        torch does then: by multiplying with the reciprocal on CUDA, truly on the CPU.
    narrow: the expression for float16 and bfloat16, where PyTorch's kernel rounds on the way.
    grad: the derivative rules, one per operand, separated by `;`, with PyTorch's own formulas
        (tools/autograd/derivatives.yaml): over `g` (the gradient of the result), the operands,
        `out` (the result) and calls of other rows, each of which rounds as that torch function
        does; `none` where an operand has no gradient, `zeros(g, y)` for one that is zero and for
        which eager saves y. A row without rules is eager under grad.
    keeps: operands and `out` that eager's node saves even where no rule reads them; a Python
        number among them is saved as a tensor.
    eager: the torch function of the same operands, for chains that run without their kernel.
    """

    name: str
    params: str
    expr: str
    result: str | torch.dtype = "common"
    accepts: str = "f"
    scalar: str = "common"
    cpu_scalar: str = "common"
    grad: str = ""
    keeps: str = ""
    integer: str = ""  # the expression for integer and bool dtypes, if it is another
    narrow: str = ""
    takes_bool: bool = True  # as an operand, even where another one decides the dtype
    tensors_only: bool = False  # no Python scalar among the operands
    reversed: bool = False  # the result's layout follows the operands from the last to the first
    contiguous: bool = False  # the result's layout; otherwise TensorIterator decides
    by_scalar: Op | None = None
    eager: Callable[..., torch.Tensor] | None = None  # over the operands; torch.<name> if not given
    names: tuple[str, ...] = field(init=False)
    roles: tuple[str, ...] = field(init=False)
    rules: tuple[ast.expr | None, ...] = field(init=False)  # of `grad`, parsed

    def __post_init__(self) -> None:
        split = [param.partition(":") for param in self.params.split()]
        object.__setattr__(self, "names", tuple(name for name, _, _ in split))
        object.__setattr__(self, "roles", tuple(role or "promote" for _, _, role in split))

        if self.eager is None:
            object.__setattr__(self, "eager", getattr(torch, self.name, None))
        object.__setattr__(self, "rules", tuple(map(_rule, self.grad.split(";"))))
        assert not self.grad or len(self.rules) == len(self.names), self.name

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @property
    def fits(self) -> bool:
        """Whether torch converts its scalars with a check for overflow."""
        return self.name.startswith(("clamp", "hardtanh", "where", "pow")) or "opmath" in self.roles

    @property
    def scalars_apart(self) -> bool:
        """Whether torch's kernel takes Python scalars beside its operands, not as 0-d ones."""
        return self.name.startswith(("clamp", "hardtanh", "pow"))

    @property
    def copies(self) -> bool:
        """Whether a dense operand's strides carry over, as in `clone`, `to` and `empty_like`."""
        return self.name in ("clone", "hardtanh", "zeros") or isinstance(self.result, torch.dtype)

    def resolve(
        self, operands: tuple[tuple[torch.dtype | type, int], ...]
    ) -> tuple[torch.dtype, torch.dtype] | None:
        """(dtype the operands are converted to, dtype of the result), or None for "eager".

        operands: (dtype, ndim) per operand, a Python scalar as (its class, 0).
        """
        key = (self, operands, torch.get_default_dtype())
        try:
            return _resolved[key]
        except KeyError:
            _resolved[key] = found = self._resolve(operands)
            return found

    def _resolve(
        self, operands: tuple[tuple[torch.dtype | type, int], ...]
    ) -> tuple[torch.dtype, torch.dtype] | None:
        promoting = []
        if self.tensors_only and any(isinstance(dtype, type) for dtype, _ in operands):
            return None
        if not self.takes_bool and any(dtype in (torch.bool, bool) for dtype, _ in operands):
            return None
        for (dtype, ndim), role in zip(operands, self.roles, strict=True):
            scalar = isinstance(dtype, type)
            if role == "bool":
                if dtype is not torch.bool:
                    return None
            elif role == "promote":
                promoting.append((dtype, ndim))
            elif not scalar:
                return None
        common = result_type(tuple(promoting))
        if self.result == "float" and not common.is_floating_point:
            common = torch.get_default_dtype() if kind(common) in self.accepts else torch.bool
        category = kind(common)
        if category not in self.accepts or common not in CODES:
            return None
        for (dtype, _), role in zip(operands, self.roles, strict=True):
            if role in ("opmath", "common") and category != "f" and dtype is float:
                return None
        if isinstance(self.result, torch.dtype):
            return common, self.result
        return common, torch.bool if self.result == "bool" else common


def _rule(text: str) -> ast.expr | None:
    text = text.strip()
    return None if text in ("", "none") else ast.parse(text, mode="eval").body


_resolved: dict[object, tuple[torch.dtype, torch.dtype] | None] = {}  # bounded by dtypes and ranks
OPS: dict[str, Op] = {}
SPELLINGS: dict[str, Callable[..., Chosen]] = {}  # torch name -> chooser, beyond the plain rows
PLAIN: dict[str, Op] = {}  # torch name -> Op of one or two operands with no options


def _op(name: str, params: str, expr: str, **columns: object) -> Op:
    row = OPS[name] = Op(name, params, expr, **columns)  # type: ignore[arg-type]
    return row


def _plain(name: str, params: str, expr: str, *aliases: str, **columns: object) -> Op:
    row = _op(name, params, expr, **columns)
    for spelling in (name, *aliases):
        PLAIN[spelling] = row
    return row


def _spelled(*names: str) -> Callable[[Callable[..., Chosen]], Callable[..., Chosen]]:
    def register(chooser: Callable[..., Chosen]) -> Callable[..., Chosen]:
        for name in names or (chooser.__name__.strip("_"),):
            SPELLINGS[name] = chooser
        return chooser

    return register


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
for _name, _grad in _UNARY_GRADS.items():
    _alias = "arc" + _name[1:]
    _aliases = (_alias,) if hasattr(torch, _alias) else ()
    _plain(_name, "x", f"{_name}(x)", *_aliases, result="float", accepts="fib", grad=_grad)

_plain("reciprocal", "x", "1 / x", result="float", accepts="fib", grad="-g * (out * out)")
_plain(
    "sigmoid",
    "x",
    "1 / (1 + exp(-x))",
    "expit",
    result="float",
    accepts="fib",
    grad="sigmoid_backward(g, out)",
)
_plain("neg", "x", "-x", "negative", accepts="fi", grad="-g")
_plain(
    "abs",
    "x",
    "abs(x)",
    "absolute",
    integer="x if x >= 0 else -x",
    accepts="fi",
    grad="g * sign(x)",
)
_plain("sign", "x", "(1 if 0 < x else 0) - (1 if x < 0 else 0)", accepts="f", grad="zeros(g)")
_plain("floor", "x", "floor(x)", grad="zeros(g)")
_plain("ceil", "x", "ceil(x)", grad="zeros(g)")
_plain("trunc", "x", "trunc(x)", "fix", grad="zeros(g)")
_plain("frac", "x", "x - trunc(x)", grad="g")
_plain("square", "x", "x * x", accepts="fi", grad="g * (2.0 * x)")
_plain("isnan", "x", "x != x", result="bool")
_plain("isinf", "x", "abs(x) == inf", result="bool")
_plain("isfinite", "x", "abs(x) < inf", result="bool")
_plain("logical_not", "x", "x == 0", result="bool", accepts="fib")
_plain("bitwise_not", "x", "~x", accepts="ib")

_op("round", "x", "round(x)", grad="zeros(g)")
_op(
    "relu",
    "x",
    "x if x != x else fmax(x, 0)",
    integer="x if x > 0 else 0",
    accepts="fi",
    grad="threshold_backward(out, g)",
)
_op("silu", "x", "x / (1 + exp(-x))", eager=F.silu, grad="silu_backward(g, x)")
_op("mish", "x", "x * tanh(log1p(exp(x)))", eager=F.mish, grad="mish_backward(g, x)")
_op(
    "hardswish",
    "x",
    "x * clip(x + 3, 0, 6) * sixth",
    eager=F.hardswish,
    grad="hardswish_backward(g, x)",
)
_op(
    "hardsigmoid",
    "x",
    "clip(x + 3, 0, 6) * sixth",
    eager=F.hardsigmoid,
    grad="hardsigmoid_backward(g, x)",
)
_op(
    "gelu",
    "x",
    "x * 0.5 * (1 + erf(x * 0.70710678118654752440))",
    eager=F.gelu,
    grad="gelu_backward(g, x)",
)
_op(
    "gelu_tanh",
    "x",
    "0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * (x * x * x))))",
    eager=partial(F.gelu, approximate="tanh"),
    grad="gelu_tanh_backward(g, x)",
)
_op(
    "leaky_relu",
    "x s:opmath",
    "x if x > 0 else x * s",
    eager=F.leaky_relu,
    grad="leaky_relu_backward(x, g, s); none",
)
_op(
    "softplus",
    "x b:opmath t:opmath",
    "x if x * b > t else log1p(exp(x * b)) / b",
    eager=F.softplus,
    grad="softplus_backward(g, x, b, t); none; none",
)
_op(
    "elu",
    "x a:opmath s:opmath i:opmath",
    "x * s if x > 0 else expm1(x * i) * (a * s)",
    eager=torch._C._nn.elu,
    grad="elu_backward(g, x, a, s, i); none; none; none",
)
_op(
    "celu",  # torch's derivative takes the scale from alpha in float32
    "x a:opmath i:opmath k:opmath",
    "x if x > 0 else expm1(x * i) * a",
    eager=lambda x, a, i, k: torch.celu(x, a),
    grad="elu_backward(g, x, a, 1.0, k); none; none; none",
)
_op("clone", "x", "x", accepts="fib", grad="g")

CASTS = {
    dtype: _op(
        f"to_{code}",
        "x",
        "x",
        result=dtype,
        accepts="fib",
        grad="g",
        eager=partial(torch.Tensor.to, dtype=dtype),
    )
    for dtype, code in CODES.items()
}


@_spelled()
def relu(input, inplace=False):
    return None if inplace else (OPS["relu"], (input,))


@_spelled()
def silu(input, inplace=False):
    return None if inplace else (OPS["silu"], (input,))


@_spelled()
def mish(input, inplace=False):
    return None if inplace else (OPS["mish"], (input,))


@_spelled()
def hardswish(input, inplace=False):
    return None if inplace else (OPS["hardswish"], (input,))


@_spelled()
def hardsigmoid(input, inplace=False):
    return None if inplace else (OPS["hardsigmoid"], (input,))


@_spelled()
def gelu(input, *, approximate="none"):
    row = {"none": OPS["gelu"], "tanh": OPS["gelu_tanh"]}.get(approximate)
    return None if row is None else (row, (input,))


@_spelled()
def leaky_relu(input, negative_slope=0.01, inplace=False):
    return None if inplace else (OPS["leaky_relu"], (input, negative_slope))


@_spelled()
def softplus(input, beta=1, threshold=20):
    return OPS["softplus"], (input, beta, threshold)


def _elu(input, alpha, scale, input_scale, inplace):
    if inplace or not all(type(s) in (int, float) for s in (alpha, scale, input_scale)):
        return None
    return OPS["elu"], (input, float(alpha), float(scale), float(input_scale))


@_spelled()
def elu(input, alpha=1.0, inplace=False):
    return _elu(input, alpha, 1.0, 1.0, inplace)


@_spelled()
def celu(input, alpha=1.0, inplace=False):
    if inplace or not _is_number(alpha) or not 1e-30 < abs(alpha) < 1e30:
        return None
    single = struct.unpack("f", struct.pack("f", alpha))[0]
    return OPS["celu"], (input, float(alpha), 1.0 / alpha, 1.0 / single)


@_spelled()
def selu(input, inplace=False):
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _elu(input, alpha, scale, 1.0, inplace)


@_spelled("round")
def _round(input, *, decimals=0):
    return (OPS["round"], (input,)) if decimals == 0 else None


@_spelled()
def clone(input, *, memory_format=torch.preserve_format):
    return (OPS["clone"], (input,)) if memory_format is torch.preserve_format else None


# --- two operands --------------------------------------------------------------------------------

_ARITHMETIC = {"scalar": "opmath", "accepts": "fi"}
_plain("add", "x y", "x + y", **_ARITHMETIC, grad="g; g")
_plain("sub", "x y", "x - y", "subtract", takes_bool=False, **_ARITHMETIC, grad="g; -g")
_plain("rsub", "x y", "y - x", takes_bool=False, reversed=True, **_ARITHMETIC, grad="-g; g")
_plain("mul", "x y", "x * y", "multiply", cpu_scalar="opmath", **_ARITHMETIC, grad="g * y; g * x")
_op(
    "div_by_scalar",
    "x y",
    "by(x, y)",
    scalar="opmath",
    cpu_scalar="opmath",
    result="float",
    accepts="fib",
)
_plain(
    "div",
    "x y",
    "x / y",
    "divide",
    "true_divide",
    scalar="opmath",
    cpu_scalar="opmath",
    result="float",
    accepts="fib",
    by_scalar=OPS["div_by_scalar"],
    grad="g / y; -g * ((x / y) / y)",
)
_op(
    "add_scaled",
    "x y s:opmath",
    "fma(s, y, x)",
    integer="x + s * y",
    **_ARITHMETIC,
    eager=lambda x, y, s: torch.add(x, y, alpha=s),
    grad="g; g * s; none",
)
_op(
    "sub_scaled",
    "x y s:opmath",
    "fma(-s, y, x)",
    integer="x - s * y",
    **_ARITHMETIC,
    eager=lambda x, y, s: torch.sub(x, y, alpha=s),
    grad="g; -g * s; none",
)
_op(
    "rsub_scaled",
    "x y s:opmath",
    "fma(-s, x, y)",
    integer="y - s * x",
    reversed=True,
    **_ARITHMETIC,
    eager=lambda x, y, s: torch.rsub(x, y, alpha=s),
    grad="-g * s; g; none",
)
_op("div_trunc_by_scalar", "x y", "trunc(by(x, y))", scalar="opmath", cpu_scalar="opmath")
_op(
    "div_trunc",
    "x y",
    "trunc(rnd(x / y))",
    by_scalar=OPS["div_trunc_by_scalar"],
    eager=partial(torch.div, rounding_mode="trunc"),
    grad="zeros(g, y); zeros(g, x, y)",
)
_FLOORED = (
    "m = fmod(x, y);"
    "d = {by}(x - m, y);"
    "d = d - 1 if m != 0 and (y < 0) != (m < 0) else d;"
    "f = rnd(floor(d));"
    "f = rnd(f + 1) if d - f > 0.5 else f;"
    "{by}(x, y) if y == 0 else copysign(0, {by}(x, y)) if d == 0 else f"
)
_op("div_floor_by_scalar", "x y", _FLOORED.format(by="by"), scalar="opmath", cpu_scalar="opmath")
_op(
    "div_floor",
    "x y",
    _FLOORED.format(by="divide"),
    scalar="opmath",
    by_scalar=OPS["div_floor_by_scalar"],
    eager=partial(torch.div, rounding_mode="floor"),
    grad="zeros(g, y); zeros(g, x, y)",
)
_op(
    "floor_divide",  # the same, but torch has no derivative for it
    "x y",
    _FLOORED.format(by="divide"),
    scalar="opmath",
    by_scalar=OPS["div_floor_by_scalar"],
)
for _name, _sign in (
    ("eq", "=="),
    ("ne", "!="),
    ("lt", "<"),
    ("le", "<="),
    ("gt", ">"),
    ("ge", ">="),
):
    _long = {
        "eq": (),
        "ne": ("not_equal",),
        "lt": ("less",),
        "le": ("less_equal",),
        "gt": ("greater",),
        "ge": ("greater_equal",),
    }[_name]
    _plain(_name, "x y", f"x {_sign} y", *_long, result="bool", accepts="fi")
_LOGICAL = {"result": "bool", "accepts": "fib", "tensors_only": True}
_plain("logical_and", "x y", "x != 0 and y != 0", **_LOGICAL)
_plain("logical_or", "x y", "x != 0 or y != 0", **_LOGICAL)
_plain("logical_xor", "x y", "(x != 0) != (y != 0)", **_LOGICAL)
_plain("bitwise_and", "x y", "x & y", accepts="ib")
_plain("bitwise_or", "x y", "x | y", accepts="ib")
_plain("bitwise_xor", "x y", "x ^ y", accepts="ib")
_plain(
    "maximum",
    "x y",
    "x if x != x else y if y != y else fmax(x, y)",
    integer="x if x > y else y",
    accepts="fi",
    tensors_only=True,
    grad="where(x < y, 0, where(x == y, g / 2, g)); where(x > y, 0, where(x == y, g / 2, g))",
)
_plain(
    "minimum",
    "x y",
    "x if x != x else y if y != y else fmin(x, y)",
    integer="x if x < y else y",
    accepts="fi",
    tensors_only=True,
    grad="where(x > y, 0, where(x == y, g / 2, g)); where(x < y, 0, where(x == y, g / 2, g))",
)
_TENSORS = {"accepts": "fi", "tensors_only": True}
_plain(
    "fmax",
    "x y",
    "fmax(x, y)",
    integer="x if x > y else y",
    **_TENSORS,
    grad="masked_fill(g, logical_not(logical_or(x >= y, isnan(y))), 0);"
    "masked_fill(g, logical_or(x >= y, isnan(y)), 0)",
)
_plain(
    "fmin",
    "x y",
    "fmin(x, y)",
    integer="x if x < y else y",
    **_TENSORS,
    grad="masked_fill(g, logical_not(logical_or(x <= y, isnan(y))), 0);"
    "masked_fill(g, logical_or(x <= y, isnan(y)), 0)",
)
_plain("fmod", "x y", "fmod(x, y)", grad="g; -g * div_trunc(x, y)")
_plain(
    "remainder",
    "x y",
    "m = fmod(x, y); m + y if m != 0 and (y < 0) != (m < 0) else m",
    grad="g; -g * div_floor(x, y)",
)
_plain(
    "atan2",
    "x y",
    "atan2(x, y)",
    "arctan2",
    result="float",
    **_TENSORS,
    grad="g * y * where(x * x + y * y == 0, 0, reciprocal(x * x + y * y));"
    "g * -x * where(x * x + y * y == 0, 0, reciprocal(x * x + y * y))",
)
_plain("hypot", "x y", "hypot(x, y)", tensors_only=True, grad="g * x / out; g * y / out")
_plain(
    "copysign",
    "x y",
    "copysign(x, y)",
    result="float",
    keeps="out",
    grad="g * where(x == 0, 0, out / x); zeros(g)",
)
_op(
    "pow",
    "x y",
    "pow(x, y)",
    keeps="out",
    grad="where(y == 0.0, 0, g * (y * pow(x, y - 1)));"
    "g * where(logical_and(x == 0, y >= 0), 0, out * log(x))",
)
_op("pow_scalar", "x y", "pow(x, y)", grad="g * (y * pow(x, y - 1)); none", eager=torch.pow)
_op(
    "rpow_scalar",
    "x y",
    "pow(x, y)",
    keeps="y",
    grad="none; g * (out * log(x))",
    contiguous=True,
    eager=torch.pow,
)
# exponents whose derivative has a form of its own
_op(
    "pow_4",
    "x",
    "pow(x, 4.0)",
    grad="g * (4.0 * pow_3(x))",
    eager=partial(torch.pow, exponent=4.0),
)
_op(
    "pow_1_5",
    "x",
    "pow(x, 1.5)",
    grad="g * (1.5 * pow_half(x))",
    eager=partial(torch.pow, exponent=1.5),
)
_op(
    "pow_half",
    "x",
    "sqrt(x)",
    eager=partial(torch.pow, exponent=0.5),
    grad="g * (0.5 * pow_minus_half(x))",
)
_op("pow_2", "x", "x * x", accepts="fi", eager=partial(torch.pow, exponent=2), grad="g * (2.0 * x)")
_op(
    "pow_3",
    "x",
    "rnd(x * x) * x",
    integer="x * x * x",
    accepts="fi",
    eager=partial(torch.pow, exponent=3),
    grad="g * (3.0 * pow_2(x))",
)
_op(
    "pow_minus_half",
    "x",
    "rsqrt(x)",
    eager=partial(torch.pow, exponent=-0.5),
    grad="g * (-0.5 * pow(x, -1.5))",
)
_op(
    "pow_minus_1",
    "x",
    "1 / x",
    eager=partial(torch.pow, exponent=-1),
    grad="g * (-1.0 * pow_minus_2(x))",
)
_op(
    "pow_minus_2",
    "x",
    "1 / rnd(x * x)",
    eager=partial(torch.pow, exponent=-2),
    grad="g * (-2.0 * pow(x, -3.0))",
)
_op(
    "clamp_min",
    "x y",
    "x if x != x else y if y != y else fmax(x, y)",
    integer="x if x > y else y",
    accepts="fi",
    grad="where(x >= y, g, 0); where(x < y, g, 0)",
)
_op(
    "clamp_max",
    "x y",
    "x if x != x else y if y != y else fmin(x, y)",
    integer="x if x < y else y",
    accepts="fi",
    grad="where(x <= y, g, 0); where(x > y, g, 0)",
)

_POWERS = {0.5: "half", 1.5: "1_5", 2.0: "2", 3.0: "3", 4.0: "4",
           -0.5: "minus_half", -1.0: "minus_1", -2.0: "minus_2"}  # fmt: skip


def _is_number(value: Operand) -> bool:
    return type(value) in (int, float)


def _same(value: Operand, number: float) -> bool:
    return _is_number(value) and value == number


@_spelled()
def add(input, other, *, alpha=1):
    if _same(alpha, 1):
        return OPS["add"], (input, other)
    return OPS["add_scaled"], (input, other, alpha)


@_spelled("sub", "subtract")
def _sub(input, other, *, alpha=1):
    if _same(alpha, 1):
        return OPS["sub"], (input, other)
    return OPS["sub_scaled"], (input, other, alpha)


@_spelled()
def rsub(input, other, *, alpha=1):
    if _same(alpha, 1):
        return OPS["rsub"], (input, other)
    return OPS["rsub_scaled"], (input, other, alpha)


@_spelled("div", "divide")
def _div(input, other, *, rounding_mode=None):
    name = {None: "div", "trunc": "div_trunc", "floor": "div_floor"}.get(rounding_mode)
    return None if name is None else (OPS[name], (input, other))


@_spelled()
def floor_divide(input, other):
    return OPS["floor_divide"], (input, other)


@_spelled("pow")
def _pow(input, exponent):
    if not isinstance(input, torch.Tensor):
        return None if input in (0, 1) else (OPS["rpow_scalar"], (input, exponent))
    if not _is_number(exponent):
        return None if type(exponent) is bool else (OPS["pow"], (input, exponent))
    if exponent in (0, 1) or not math.isfinite(exponent):
        return None
    if not input.is_floating_point() and type(exponent) is float:
        return None  # the exponent promotes
    special = _POWERS.get(exponent)
    if special is None or (special in ("4", "1_5") and not input.is_floating_point()):
        return OPS["pow_scalar"], (input, exponent)
    return OPS[f"pow_{special}"], (input,)


def _bounds(input, low, high):
    if low is None and high is None:
        return None
    if high is None:
        return OPS["clamp_min"], (input, low)
    if low is None:
        return OPS["clamp_max"], (input, high)
    return OPS["clamp"], (input, low, high)


# --- three operands ------------------------------------------------------------------------------

_op(
    "clamp",
    "x l h",
    "x if x != x else l if l != l else h if h != h else fmin(fmax(x, l), h)",
    integer="h if (x if x > l else l) > h else (x if x > l else l)",
    accepts="fi",
    # nested, for the layout: torch joins the conditions in place
    grad="where(x >= l, where(x <= h, g, 0), 0); where(x < l, where(l < h, g, 0), 0);"
    "where(x > h, g, where(h < l, g, 0))",
)
_op(
    "hardtanh",
    "x l h",
    OPS["clamp"].expr,
    grad="hardtanh_backward(g, x, l, h); none; none",
    eager=F.hardtanh,
)
_op(
    "where",
    "c:bool x y",
    "x if c else y",
    accepts="fib",
    grad="none; where(c, g, 0); where(c, 0, g)",
)
_op(
    "masked_fill",
    "x m:bool v:common",
    "v if m else x",
    accepts="fib",
    contiguous=True,
    grad="masked_fill(g, m, 0); none; none",
)
_LERP = "d = y - x; fma(w, d, x) if abs(w) < 0.5 else fma(-d, 1 - w, y)"
_op("lerp", "x y w", _LERP, keeps="w", grad="g * (1 - w); g * w; g * (y - x)")
_op("lerp_scalar", "x y w:opmath", _LERP, eager=torch.lerp, grad="g * (1 - w); g * w; none")
_op("addcmul", "x y z", "fma(y, z, x)", integer="x + y * z", accepts="fi", grad="g; g * z; g * y")
_op(
    "addcmul_scaled",
    "x y z s:opmath",
    "fma(s, y * z, x)",
    integer="x + s * y * z",
    accepts="fi",
    eager=lambda x, y, z, s: torch.addcmul(x, y, z, value=s),
    grad="g; g * (z * s); g * (y * s); none",
)
_op("addcdiv", "x y z", "x + y / z", keeps="z", grad="g; g * reciprocal(z); -g * (y / (z * z))")
_op(
    "addcdiv_scaled",
    "x y z s:opmath",
    "fma(s, y / z, x)",
    eager=lambda x, y, z, s: torch.addcdiv(x, y, z, value=s),
    keeps="z",
    grad="g; g * (s / z); -g * (y * s / (z * z)); none",
)


@_spelled("clamp", "clip")
def _clamp(input, min=None, max=None):
    return _bounds(input, min, max)


@_spelled()
def clamp_min(input, min):
    return OPS["clamp_min"], (input, min)


@_spelled()
def clamp_max(input, max):
    return OPS["clamp_max"], (input, max)


@_spelled()
def hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False):
    if inplace or not input.is_floating_point() or not min_val <= max_val:
        return None
    return OPS["hardtanh"], (input, min_val, max_val)


@_spelled()
def relu6(input, inplace=False):
    return hardtanh(input, 0.0, 6.0, inplace)


@_spelled()
def where(condition, input, other):
    return OPS["where"], (condition, input, other)


@_spelled()
def masked_fill(input, mask, value):
    if not _is_number(value) or input.dtype is torch.bool:
        return None
    limits = torch.finfo if input.is_floating_point() else torch.iinfo
    fits = limits(input.dtype).min <= value <= limits(input.dtype).max
    if not fits and math.isfinite(value):
        return None  # torch's error
    return OPS["masked_fill"], (input, mask, value)


@_spelled()
def lerp(input, end, weight):
    if not (isinstance(end, torch.Tensor) and input.dtype is end.dtype):
        return None
    if _is_number(weight):
        return OPS["lerp_scalar"], (input, end, float(weight))
    return (OPS["lerp"], (input, end, weight)) if weight.dtype is input.dtype else None


def _addc(name, input, tensor1, tensor2, value):
    if not input.dtype is tensor1.dtype is tensor2.dtype:
        return None
    if _same(value, 1):
        return OPS[name], (input, tensor1, tensor2)
    return OPS[f"{name}_scaled"], (input, tensor1, tensor2, value)


@_spelled()
def addcmul(input, tensor1, tensor2, *, value=1):
    return _addc("addcmul", input, tensor1, tensor2, value)


@_spelled()
def addcdiv(input, tensor1, tensor2, *, value=1):
    return _addc("addcdiv", input, tensor1, tensor2, value)


# --- what derivative rules call: the kernels of PyTorch's own backward ops ------------------------

_backward = torch.ops.aten


def _silu_backward(g, x):
    if not torch.is_grad_enabled():
        return _backward.silu_backward(g, x)
    s = torch.sigmoid(x)  # the kernel itself has no derivative
    return torch.mul(torch.mul(g, s), torch.add(torch.mul(x, torch.rsub(s, 1)), 1))


def _mish_backward(g, x):
    if not torch.is_grad_enabled():
        return _backward.mish_backward(g, x)
    t = torch.tanh(torch.log1p(torch.exp(x)))
    inner = torch.mul(torch.mul(x, torch.sigmoid(x)), torch.rsub(torch.square(t), 1))
    return torch.mul(g, torch.add(inner, t))


_op("zeros", "x", "0", eager=torch.zeros_like)
_op(
    "scalar_div",
    "x y",
    "x / y",
    eager=lambda x, y: torch.div(torch.tensor(x, dtype=y.dtype), y),
)
_op(
    "sigmoid_backward",
    "g y",
    "g * (1 - y) * y",
    narrow="rnd(g * rnd(1 - y)) * y",
    eager=_backward.sigmoid_backward,
)
_op(
    "tanh_backward",
    "g y",
    "g * fma(-y, y, 1)",
    narrow="g * rnd(1 - rnd(y * y))",
    eager=_backward.tanh_backward,
)
_op(
    "threshold_backward",
    "y g",
    "0 if y <= 0 else g",
    eager=lambda y, g: _backward.threshold_backward(g, y, 0),
)
_op(
    "silu_backward",
    "g x",
    "s = 1 / (1 + exp(-x)); g * s * (1 + x * (1 - s))",
    eager=_silu_backward,
)
_op(
    "mish_backward",
    "g x",
    "s = 1 / (1 + exp(-x)); t = tanh(log1p(exp(x))); g * (t + x * s * fma(-t, t, 1))",
    eager=_mish_backward,
)
_op(
    "hardswish_backward",
    "g x",
    "0 if x <= -3 else g * (x / 3 + 0.5) if x < 3 else g",
    eager=_backward.hardswish_backward,
)
_op(
    "hardsigmoid_backward",
    "g x",
    "g * 0.1666666716337204 if x > -3 and x < 3 else 0",  # 1.0f / 6.0f in every dtype
    eager=_backward.hardsigmoid_backward,
)
_op(
    "gelu_backward",
    "g x",
    "c = 0.5 * (1 + erf(x * 0.70710678118654752440));"
    "p = exp(-0.5 * x * x) * 0.3989422804014327;"
    "g * (c + x * p)",
    eager=_backward.gelu_backward,
)
_op(
    "gelu_tanh_backward",
    "g x",
    "q = x * x;"
    "t = tanh(0.79788456080286535588 * (x + 0.044715 * (q * x)));"
    "i = 0.79788456080286535588 * (1 + 3 * 0.044715 * q);"
    "g * (0.5 * (1 + t) + 0.5 * x * fma(-t, t, 1) * i)",
    eager=partial(_backward.gelu_backward, approximate="tanh"),
)
_op(
    "leaky_relu_backward",
    "x g s:opmath",
    "g if x > 0 else g * s",
    eager=lambda x, g, s: _backward.leaky_relu_backward(g, x, s, False),
)
_op(
    "softplus_backward",
    "g x b:opmath t:opmath",
    "z = exp(x * b); g if x * b > t else g * z / (z + 1)",
    eager=_backward.softplus_backward,
)
_op(
    "elu_backward",
    "g x a:opmath s:opmath i:opmath",
    "g * i * (a * s) * exp(x * i) if x <= 0 else g * s",
    eager=lambda g, x, a, s, i: _backward.elu_backward(g, a, s, i, False, x),
)
_op(
    "hardtanh_backward",
    "g x l:opmath h:opmath",
    "0 if x <= l or x >= h else g",
    eager=_backward.hardtanh_backward,
)


# --- casts: `x.to(dtype)`, `x.float()` and so on; one to the dtype x has is x itself ------------

CAST_METHODS = {
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


@_spelled()
def to(input, *args, **options):
    dtype = options.get("dtype") if not args else args[0]
    plain = len(args) <= 1 and options.keys() <= {"dtype"} and bool(args) != bool(options)
    row = CASTS.get(dtype) if plain and isinstance(dtype, torch.dtype) else None
    return None if row is None or dtype is input.dtype else (row, (input,))


@_spelled("type")
def _type(input, dtype=None, non_blocking=False):
    return to(input, dtype) if isinstance(dtype, torch.dtype) else None


@_spelled()
def type_as(input, other):
    return to(input, other.dtype)


# --- Python's operators -------------------------------------------------------------------------

BINARY_OPERATORS = {
    "__add__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__truediv__": "div",
    "__mod__": "remainder",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
}
# with a tensor on the left Python asks the subclass on the right first; the operands' order then
# decides layout and error text, so that a scalar and a tensor are two cases
REFLECTED_OPERATORS = {
    "__radd__": ("add", "add"),
    "__rsub__": ("sub", "rsub"),
    "__rmul__": ("mul", "mul"),
    "__rtruediv__": ("div", None),
    "__rand__": ("bitwise_and", "bitwise_and"),
    "__ror__": ("bitwise_or", "bitwise_or"),
    "__rxor__": ("bitwise_xor", "bitwise_xor"),
}
UNARY_OPERATORS = {"__neg__": "neg", "__abs__": "abs", "__invert__": "bitwise_not"}
SPELLED_OPERATORS = {"__pow__": "pow", "__floordiv__": "floor_divide"}
INPLACE_OPERATORS = {
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__itruediv__": "div",
    "__idiv__": "div",
    "__imod__": "remainder",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
}
