"""Every fused spelling, as calls over operands x, y, z of one dtype and a bool mask m."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from autofuse.ops.row import since

Call = Callable[..., torch.Tensor]

UNARY = (
    "deg2rad rad2deg sgn signbit isposinf isneginf lgamma digamma erfinv i0 sinc logit "
    "nan_to_num exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh "
    "atanh sqrt rsqrt erf erfc reciprocal sigmoid neg abs sign floor ceil trunc frac square round "
    "isnan isinf isfinite logical_not relu clone"
).split()
BINARY = (
    "add sub mul div maximum minimum fmax fmin fmod remainder atan2 hypot copysign pow "
    "eq ne lt le gt ge logical_and logical_or logical_xor heaviside logaddexp logaddexp2 xlogy max "
    "min"
).split()
ARITHMETIC = set(
    "deg2rad rad2deg angle sgn signbit isposinf isneginf nan_to_num heaviside nextafter "
    "threshold hardshrink softshrink prelu l1_loss neg abs sign floor ceil trunc frac square round "
    "isnan isinf isfinite logical_not relu clone "
    "add sub mul div maximum minimum fmax fmin eq ne lt le gt ge "
    "logical_and logical_or logical_xor reciprocal".split()
)  # bit-identical on the CPU too

FLOAT_CALLS: dict[str, Call] = {
    **{name: getattr(torch, name) for name in UNARY if name != "relu"},
    "relu": F.relu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 3.0),
    "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, 1.7),
    "celu": lambda x: F.celu(x, 1.3),
    "selu": F.selu,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "clamp": lambda x: torch.clamp(x, -0.5, 1.5),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "clamp_max": lambda x: x.clamp(max=0.25),
    "add_scalar": lambda x: x + 1.3,
    "radd": lambda x: 1.3 + x,
    "sub_scalar": lambda x: x - 1.3,
    "rsub_scalar": lambda x: 1.3 - x,
    "mul_scalar": lambda x: x * 0.7,
    "mul_int": lambda x: x * 3,
    "div_scalar": lambda x: x / 3.0,
    "div_int": lambda x: x / 7,
    "rdiv": lambda x: 2.0 / x,
    "mod_scalar": lambda x: x % 0.7,
    "fmod_scalar": lambda x: torch.fmod(x, 0.7),
    "lt_scalar": lambda x: x < 0.3,
    "eq_int": lambda x: x == 1,
    "div_trunc_scalar": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "floordiv_scalar": lambda x: x // 0.3,
    "floordiv_negative": lambda x: x // -3,
    "masked_fill": lambda x: x.masked_fill(x > 0, -2.0),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.1),
    **{
        f"pow_{p}": (lambda x, p=p: x**p) for p in (0.5, 2, 2.0, 3, -0.5, -1, -2, 1.7, -3.0)
    },
    "rpow": lambda x: 2.0**x,
    "to_half": lambda x: x.half(),
    "to_bfloat16": lambda x: x.bfloat16(),
    "to_float": lambda x: x.to(torch.float32),
    "to_double": lambda x: x.double(),
    "to_bool": lambda x: x.bool(),
    "selfmul": lambda x: x * x,
    "logit_eps": lambda x: torch.logit(x, 0.125),
    "nan_to_num_values": lambda x: torch.nan_to_num(x, 1.5, 7.0, -8.0),
    "trigamma": lambda x: torch.polygamma(1, x),
    "polygamma_0": lambda x: torch.polygamma(0, x),
    **{
        f"special_{name}": getattr(torch.special, name)
        for name in "entr i0e ndtr expit psi gammaln".split()
    },
    "log_sigmoid": F.logsigmoid,
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.25, -3.0),
    "rrelu": lambda x: F.rrelu(x),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "round_2": lambda x: torch.round(x, decimals=2),
    "round_minus_1": lambda x: torch.round(x * 30, decimals=-1),
    "xlogy_scalar": lambda x: torch.xlogy(2.5, x),
    "xlog1py_scalar": lambda x: torch.special.xlog1py(x, 0.7),
    "float_power": lambda x: torch.float_power(x, 2.5),
}  # fmt: skip

PAIR_CALLS: dict[str, Call] = {
    **{name: getattr(torch, name) for name in BINARY},
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.37),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=0.37),
    "rsub": torch.rsub,
    "rsub_alpha": lambda x, y: torch.rsub(x, y, alpha=0.37),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floordiv": lambda x, y: x // y,
    "lerp_scalar": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_scalar_high": lambda x, y: torch.lerp(x, y, 0.8),
    "clamp_tensor": lambda x, y: torch.clamp(x, min=y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "xlog1py": torch.special.xlog1py,
    "prelu": lambda x, y: torch._prelu_kernel(x, y),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.7),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.7),
    "float_power_pair": torch.float_power,
    "isclose": lambda x, y: torch.isclose(x, y, rtol=0.3),
}
# eager under grad: torch has no derivative either, or one that the table does not have
NO_RULE = set(
    "angle sgn i0 special_i0e trigamma rrelu xlogy_scalar xlog1py_scalar heaviside isclose "
    "float_power_pair".split()
)
if since(2, 14):  # see their rows
    NO_RULE |= {*"clamp clamp_min clamp_max clamp_tensor clamp_tensors fmax fmin".split()}
WIDE_CALLS: dict[str, Call] = {
    "angle": torch.angle,
    **{name: getattr(torch.special, name) for name in "i1 i1e ndtri".split()},
}  # float32 and float64 alone
TRIPLE_CALLS: dict[str, Call] = {
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
    "addcmul_value": lambda x, y, z: torch.addcmul(x, y, z, value=0.37),
    "addcdiv": torch.addcdiv,
    "addcdiv_value": lambda x, y, z: torch.addcdiv(x, y, z, value=0.37),
    "clamp_tensors": torch.clamp,
}
INT_CALLS: dict[str, Call] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "relu": torch.relu,
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "clamp": lambda x: x.clamp(-3, 17),
    "add_scalar": lambda x: x + 3,
    "mul_scalar": lambda x: x * -3,
    "rsub_scalar": lambda x: 5 - x,
    "exp_of_int": lambda x: torch.exp(x),
    "div_of_int": lambda x: x / 3,
    "float_scalar": lambda x: x * 0.5,
    "bitwise_not": torch.bitwise_not,
    "logical_not": torch.logical_not,
    "to_float": lambda x: x.float(),
    "to_int": lambda x: x.int(),
    "to_bool": lambda x: x.bool(),
    **{
        name: getattr(torch, name)
        for name in (
            "sign sgn signbit floor ceil trunc round isnan isinf isfinite isposinf isneginf "
            "deg2rad angle digamma"
        ).split()
    },
    "threshold": lambda x: F.threshold(x, 3, 7),
    "shift_scalar": lambda x: (x << 2) >> 1,
}
INT_PAIR_CALLS: dict[str, Call] = {
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor "
            "bitwise_and bitwise_or bitwise_xor fmax fmin heaviside"
        ).split()
    },
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
}
INT_SHIFTS: dict[str, Call] = {
    "left_shift": lambda x, y: x << (y & 15) - 3,
    "right_shift": lambda x, y: torch.bitwise_right_shift(x, (y & 15) - 3),
}
INT_DIVISIONS: dict[str, Call] = {
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod_scalar": lambda x, y: x % 7,
    "floordiv_scalar": lambda x, y: x // -3,
}  # fused on CUDA
FLOAT_TO_INT: dict[str, Call] = {
    f"to_{str(dtype)[6:]}": (lambda x, dtype=dtype: x.to(dtype))
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
}


# --- Python numbers as operands and options -------------------------------------------------------


class Numeric(NamedTuple):
    """A call over `tensors` operands and then `numbers` Python numbers, in its spellings.

    whole: the numbers to call it with, where they are ints by their nature.
    """

    call: Call
    tensors: int = 1
    numbers: int = 1
    inplace: Call | None = None  # writes the first operand
    out: Call | None = None  # takes `out` as well
    whole: tuple[object, ...] = ()

    @property
    def spellings(self) -> dict[str, Call]:
        """Those that torch has, by their names."""
        named = {"function": self.call, "in-place": self.inplace, "out=": self.out}
        return {name: call for name, call in named.items() if call is not None}


def _plainly(function: Call, *operands: object) -> torch.Tensor:
    return function(*operands)


def _numeric(
    name: str,
    form: Callable[..., torch.Tensor] = _plainly,
    tensors: int = 1,
    numbers: int = 1,
    place: object = torch,
    whole: tuple[object, ...] = (),
) -> Numeric:
    """`form` of a function of `place`, of its in-place method and with `out=`."""
    function = getattr(place, name)
    method = getattr(torch.Tensor, f"{name}_", None)
    return Numeric(
        functools.partial(form, function),
        tensors,
        numbers,
        functools.partial(form, method) if method is not None else None,
        lambda *operands, out: form(functools.partial(function, out=out), *operands),
        whole,
    )


def _left(
    name: str, form: Callable[..., torch.Tensor] | None = None, place: object = torch
) -> Numeric:
    """`name` with its number on the left."""
    form = form or (lambda function, x, s: function(s, x))
    return _numeric(name, form, place=place)._replace(inplace=None)


def _reflected(function: Call, x: torch.Tensor, s: object) -> torch.Tensor:
    return function(s, x)


def _activation(name: str, numbers: int = 1, inplace: bool = True) -> Numeric:
    function = getattr(F, name)
    written = functools.partial(function, inplace=True) if inplace else None
    return Numeric(function, 1, numbers, written)


_RIGHT = (
    "add sub mul div floor_divide fmod remainder copysign pow float_power xlogy rsub eq ne lt le "
    "gt ge bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift clamp_min "
    "clamp_max"
).split()
_LEFT = (
    "add sub mul div floor_divide remainder pow float_power xlogy bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift"
).split()
_QUOTIENTS = "div divide fmod remainder floordiv rfloordiv mod rmod".split()
_OPERATORS = "add truediv floordiv mod pow".split()
_REFLECTED = "add sub mul truediv floordiv mod pow and_ xor lshift lt".split()

# for what takes ints alone; of polygamma more would not end: torch sums the distance to zero up
_ODD = (True, False, 2**63, 2**64, 1.0, 0.5, float("nan"), None)

NUMERIC: dict[str, Numeric] = {
    **{name: _numeric(name) for name in _RIGHT},
    **{f"{name}_of_number": _left(name) for name in _LEFT},
    **{
        f"operator_{name}": Numeric(
            getattr(operator, name), inplace=getattr(operator, f"i{name.rstrip('_')}")
        )
        for name in _OPERATORS
    },
    **{
        f"operator_r{name}": Numeric(functools.partial(_reflected, getattr(operator, name)))
        for name in _REFLECTED
    },
    **{
        f"div_{mode}": _numeric("div", lambda f, x, s, m=mode: f(x, s, rounding_mode=m))
        for mode in ("trunc", "floor")
    },
    **{
        f"div_{mode}_of_number": _left("div", lambda f, x, s, m=mode: f(s, x, rounding_mode=m))
        for mode in ("trunc", "floor")
    },
    "xlog1py": _numeric("xlog1py", place=torch.special),
    "xlog1py_of_number": _left("xlog1py", place=torch.special),
    **{
        f"{name}_alpha": _numeric(name, lambda f, x, y, a: f(x, y, alpha=a), tensors=2)
        for name in ("add", "sub", "rsub")
    },
    **{
        f"{name}_number_alpha": _numeric(name, lambda f, x, s, a: f(x, s, alpha=a), numbers=2)
        for name in ("add", "sub", "rsub")
    },
    **{
        f"{name}_of_number_alpha": _left(name, lambda f, x, s, a: f(s, x, alpha=a))._replace(
            numbers=2
        )
        for name in ("add", "sub")
    },
    **{
        f"{name}_value": _numeric(name, lambda f, x, y, z, v: f(x, y, z, value=v), tensors=3)
        for name in ("addcmul", "addcdiv")
    },
    "lerp_weight": _numeric("lerp", tensors=2),
    "clamp_min_only": _numeric("clamp", lambda f, x, low: f(x, min=low)),
    "clamp_max_only": _numeric("clamp", lambda f, x, high: f(x, max=high)),
    "clamp": _numeric("clamp", numbers=2),
    "where_number": Numeric(lambda x, y, s: torch.where(y > 0, x, s), 2),
    "where_of_number": Numeric(lambda x, y, s: torch.where(y > 0, s, x), 2),
    "where_numbers": Numeric(lambda x, s, t: torch.where(x > 0, s, t), 1, 2),
    "masked_fill": Numeric(
        lambda x, y, s: x.masked_fill(y > 0, s), 2, 1, lambda x, y, s: x.masked_fill_(y > 0, s)
    ),
    "nan_to_num": _numeric("nan_to_num", numbers=3),
    "logit": _numeric("logit"),
    "round_decimals": _numeric(
        "round", lambda f, x, d: f(x, decimals=d), whole=(*range(-2000, 2001), *_ODD)
    ),
    "polygamma": _numeric(
        "polygamma", lambda f, x, n: f(n, x), whole=(*range(-20, 2), *_ODD)
    )._replace(inplace=lambda x, n: x.polygamma_(n)),
    "isclose": Numeric(lambda x, y, r, a: torch.isclose(x, y, rtol=r, atol=a), 2, 2),
    "leaky_relu": _activation("leaky_relu"),
    "elu": _activation("elu"),
    "celu": _activation("celu"),
    "softplus": _activation("softplus", 2, inplace=False),
    "hardtanh": _activation("hardtanh", 2),
    "hardshrink": _activation("hardshrink", inplace=False),
    "softshrink": _activation("softshrink", inplace=False),
    "threshold": _activation("threshold", 2),
    "rrelu": Numeric(
        lambda x, low, high: F.rrelu(x, low, high),
        1,
        2,
        lambda x, low, high: F.rrelu(x, low, high, inplace=True),
    ),
    "smooth_l1_beta": Numeric(
        lambda x, y, b: F.smooth_l1_loss(x, y, reduction="none", beta=b), 2
    ),
    "huber_delta": Numeric(lambda x, y, d: F.huber_loss(x, y, reduction="none", delta=d), 2),
    "dropout": Numeric(lambda x, p: F.dropout(x * 1, p, training=False), 1),
}  # fmt: skip
DIVISIONS = {name for name in NUMERIC if set(name.split("_")) & set(_QUOTIENTS)}  # of integers too
