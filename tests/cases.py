"""Every fused spelling, as calls over operands x, y, z of one dtype and a bool mask m."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

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
