"""Every fused spelling, as calls over operands x, y, z of one dtype and a bool mask m."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Call = Callable[..., torch.Tensor]

UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sqrt rsqrt erf erfc reciprocal sigmoid neg abs sign floor ceil trunc frac square round "
    "isnan isinf isfinite logical_not relu clone"
).split()
BINARY = (
    "add sub mul div maximum minimum fmax fmin fmod remainder atan2 hypot copysign pow "
    "eq ne lt le gt ge logical_and logical_or logical_xor"
).split()
ARITHMETIC = set(
    "neg abs sign floor ceil trunc frac square round isnan isinf isfinite logical_not relu clone "
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
}
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
}
INT_PAIR_CALLS: dict[str, Call] = {
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor "
            "bitwise_and bitwise_or bitwise_xor"
        ).split()
    },
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
}
FLOAT_TO_INT: dict[str, Call] = {
    f"to_{str(dtype)[6:]}": (lambda x, dtype=dtype: x.to(dtype))
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
}
