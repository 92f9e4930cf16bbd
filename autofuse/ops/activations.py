"""Rows of the op table: activations, and what their derivatives call."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from .row import FUNCTIONAL, OPS, composite, is_number, making, plain, row, since, single, spelled

# fmt: off

_backward = torch.ops.aten
_SIXTH = "0.16666667163372039794921875"  # 1.0f / 6.0f, in float64 too

_SIGNED = since(2, 14)  # as for clamp
plain("relu", "x", "0 if x < 0 else x" if _SIGNED else "x if x != x else fmax(x, 0)",
      integer="x if x > 0 else 0", accepts="fi", grad="threshold_backward(out, g)")
plain(
    "silu",
    "x",
    "x / (1 + exp(-x))",
    # as `div`: q where x is 0 or infinite, and below -87.3, where d exceeds 2^126, r is flushed to
    # 0 and the quotient rounds to the zero that q is (NaN of -inf)
    f16="d = 1 + exp(-x); r = rcp(d); q = x * r; z = fma(fma(-d, q, x), r, q);"
    "z if abs(z) > 0 else q",
    # x by the whole of sigmoid's: x * rcp(..) is up to 16 x and would overflow
    bf16="x * (rcp(fma(ex2(x * -1.4426950408889634), 0.0625, 0.0625)) * 0.0625)",
    eager=F.silu,
    grad="silu_backward(g, x)",
)
plain("mish", "x", "x * tanh(log1p(exp(x)))", eager=F.mish, grad="mish_backward(g, x)")
plain("hardswish", "x", f"x * clip(x + 3, 0, 6) * {_SIXTH}", cpu="x * clip(x + 3, 0, 6) / 6",
      eager=F.hardswish, grad="hardswish_backward(g, x)")
plain("hardsigmoid", "x", f"clip(x + 3, 0, 6) * {_SIXTH}", cpu="clip(x + 3, 0, 6) / 6",
      eager=F.hardsigmoid, grad="hardsigmoid_backward(g, x)")
row("gelu", "x", "x * 0.5 * (1 + erf(x * 0.70710678118654752440))", eager=F.gelu,
    grad="gelu_backward(g, x)")
row(
    "gelu_tanh",
    "x",
    "0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * (x * x * x))))",
    bf16="u = 0.79788456080286535588 * (x + 0.044715 * (x * x * x));"
    "t = fma(rcp(ex2(abs(u) * 2.8853900817779268) + 1), -2, 1);"
    "0.5 * x * (1 + copysign(t, u))",
    eager=partial(F.gelu, approximate="tanh"),
    grad="gelu_tanh_backward(g, x)",
)
plain("log_sigmoid", "x", "(x if x < 0 else 0) - log1p(exp(-abs(x)))", "logsigmoid",
      contiguous="cpu", copies="f", eager=F.logsigmoid, grad="log_sigmoid_backward(g, x)")
row("leaky_relu", "x s:opmath", "x if x > 0 else x * s", eager=F.leaky_relu,
    grad="leaky_relu_backward(x, g, s); none")
row("prelu", "x w", "x if x > 0 else w * x", one_dtype=True, one_device=True, tensors_only=True,
    copies="f", eager=torch._prelu_kernel, grad="where(x > 0, g, w * g); where(x > 0, 0, x * g)")
row("softplus", "x b:opmath t:opmath", "x if x * b > t else log1p(exp(x * b)) / b",
    eager=F.softplus, grad="softplus_backward(g, x, b, t); none; none")
row("elu", "x a:opmath s:opmath i:opmath", "x * s if x > 0 else expm1(x * i) * (a * s)",
    cpu="x * s if x >= 0 else expm1(x * i) * (a * s)",  # another value at 0 if a is not finite
    eager=torch._C._nn.elu, grad="elu_backward(g, x, a, s, i); none; none; none")
row(
    "celu",  # torch's derivative takes the scale from alpha in float32
    "x a:opmath i:opmath k:opmath",
    "x if x > 0 else expm1(x * i) * a",
    cpu="x if x >= 0 else expm1(x * i) * a",
    eager=lambda x, a, i, k: torch.celu(x, a),
    grad="elu_backward(g, x, a, 1.0, k); none; none; none",
)
row(
    "hardtanh",
    "x l h",
    "r = l if x < l else x; h if h < r else r"
    if _SIGNED
    else "x if x != x else l if l != l else h if h != h else fmin(fmax(x, l), h)",
    copies="f",
    grad="hardtanh_backward(g, x, l, h); none; none",
    eager=F.hardtanh,
)
row("hardshrink", "x l:common", "0 if x >= -l and x <= l else x",
    grad="shrink_backward(g, x, l); none")
row("softshrink", "x l:common", "x if x != x else x - l if x > l else x + l if x < -l else 0",
    narrow="x if x != x else rnd(x - l) if x > l else rnd(x + l) if x < -l else 0",
    eager=F.softshrink, grad="shrink_backward(g, x, l); none")
row("threshold", "x t:common v:common", "v if x <= t else x", accepts="fi",
    grad="threshold_backward_at(x, g, t); none; none")
row("glu", "x y", "x * (1 / (1 + exp(-y)))", eager=lambda x, y: torch.mul(x, torch.sigmoid(y)))


@spelled()
def gelu(input, *, approximate="none"):
    row = {"none": OPS["gelu"], "tanh": OPS["gelu_tanh"]}.get(approximate)
    return None if row is None else (row, (input,))


@spelled()
def leaky_relu(input, negative_slope=0.01):
    return OPS["leaky_relu"], (input, negative_slope)


@spelled()
def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False):
    graph = torch.is_grad_enabled() and input.requires_grad
    if training or graph or not input.is_contiguous():
        return None
    if not (is_number(lower) and is_number(upper) and -math.inf < lower <= upper < math.inf):
        return None
    if type(lower) is type(upper) is int:
        return None  # torch halves their sum as an int64 tensor, in the default dtype
    return OPS["leaky_relu"], (input, (float(lower) + float(upper)) / 2)


@making
@spelled()
def prelu(input, weight):
    count = weight.numel()
    if weight.ndim > 1 or (count != 1 and (input.ndim < 2 or count != input.shape[1])):
        return None
    if weight.ndim != input.ndim:
        weight = weight.reshape([1, count, *[1] * (input.ndim - 2)][: input.ndim])
    return OPS["prelu"], (input, weight)


@spelled("_prelu_kernel")
def _prelu(input, weight):
    return OPS["prelu"], (input, weight)


@spelled()
def softplus(input, beta=1, threshold=20):
    return OPS["softplus"], (input, beta, threshold)


def _elu(input, alpha, scale, input_scale):
    if not all(map(is_number, (alpha, scale, input_scale))):
        return None
    return OPS["elu"], (input, float(alpha), float(scale), float(input_scale))


@spelled()
def elu(input, alpha=1.0):
    return _elu(input, alpha, 1.0, 1.0)


@spelled()
def celu(input, alpha=1.0):
    if not is_number(alpha) or not 1e-30 < abs(alpha) < 1e30:
        return None
    return OPS["celu"], (input, float(alpha), 1.0 / alpha, 1.0 / single(alpha))


@spelled()
def selu(input):
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _elu(input, alpha, scale, 1.0)


@spelled()
def hardtanh(input, min_val=-1.0, max_val=1.0):
    if not (is_number(min_val) and is_number(max_val) and min_val <= max_val):
        return None
    if not input.is_floating_point():
        return None
    return OPS["hardtanh"], (input, min_val, max_val)


@spelled()
def relu6(input):
    return hardtanh(input, 0.0, 6.0)


@spelled()
def hardshrink(input, lambd=0.5):
    return OPS["hardshrink"], (input, lambd)


@spelled()
def softshrink(input, lambd=0.5):
    return (OPS["softshrink"], (input, lambd)) if 0 <= lambd < math.inf else None


@spelled("threshold", "_threshold")
def threshold(input, threshold, value):
    return OPS["threshold"], (input, threshold, value)


@making
@spelled()
def glu(input, dim=-1):
    graph = torch.is_grad_enabled() and input.requires_grad
    if graph or not input.is_floating_point() or input.shape[dim] % 2:
        return None  # its backward writes both halves of the gradient at once
    half = input.shape[dim] // 2
    return OPS["glu"], (input.narrow(dim, 0, half), input.narrow(dim, half, half))


@composite()
def softsign(input):
    return input / (input.abs() + 1)


@composite()
def tanhshrink(input):
    return input - input.tanh()


FUNCTIONAL.update(("dropout", "alpha_dropout"))


@spelled("dropout", "alpha_dropout")
def _dropout(input, p=0.5, training=True, inplace=False):
    if training.__class__ is not bool or not is_number(p):  # torch says what is wrong
        return None
    idle = (not training or p == 0) and 0 <= p <= 1 and not inplace
    return input if idle else None


# --- what their derivatives call: the kernels of PyTorch's own backward ops -----------------------


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


row("threshold_backward", "y g", "0 if y <= 0 else g",
    eager=lambda y, g: _backward.threshold_backward(g, y, 0))
row("silu_backward", "g x", "s = 1 / (1 + exp(-x)); g * s * (1 + x * (1 - s))",
    eager=_silu_backward)
row("mish_backward", "g x",
    "s = 1 / (1 + exp(-x)); t = tanh(log1p(exp(x))); g * (t + x * s * fma(-t, t, 1))",
    eager=_mish_backward)
row("hardswish_backward", "g x", "0 if x <= -3 else g * (x / 3 + 0.5) if x < 3 else g",
    eager=_backward.hardswish_backward)
row("hardsigmoid_backward", "g x", f"g * {_SIXTH} if x > -3 and x < 3 else 0",
    eager=_backward.hardsigmoid_backward)
row(
    "gelu_backward",
    "g x",
    "c = 0.5 * (1 + erf(x * 0.70710678118654752440));"
    "p = exp(-0.5 * x * x) * 0.3989422804014327;"
    "g * (c + x * p)",
    eager=_backward.gelu_backward,
)
row(
    "gelu_tanh_backward",
    "g x",
    "q = x * x;"
    "t = tanh(0.79788456080286535588 * (x + 0.044715 * (q * x)));"
    "i = 0.79788456080286535588 * (1 + 3 * 0.044715 * q);"
    "g * (0.5 * (1 + t) + 0.5 * x * fma(-t, t, 1) * i)",
    eager=partial(_backward.gelu_backward, approximate="tanh"),
)
row("leaky_relu_backward", "x g s:opmath", "g if x > 0 else g * s",
    eager=lambda x, g, s: _backward.leaky_relu_backward(g, x, s, False))
row("softplus_backward", "g x b:opmath t:opmath",
    "z = exp(x * b); g if x * b > t else g * z / (z + 1)", eager=_backward.softplus_backward)
row("elu_backward", "g x a:opmath s:opmath i:opmath",
    "g * i * (a * s) * exp(x * i) if x <= 0 else g * s",
    eager=lambda g, x, a, s, i: _backward.elu_backward(g, a, s, i, False, x))
row("hardtanh_backward", "g x l:opmath h:opmath", "0 if x <= l or x >= h else g",
    eager=_backward.hardtanh_backward)
row("log_sigmoid_backward", "g x",
    "z = exp(-abs(x)); s = 1 if x < 0 else -1; g * ((1 if x < 0 else 0) - s * (z / (1 + z)))",
    copies="f", eager=lambda g, x: _backward.log_sigmoid_backward(g, x, _buffer(x)))
row("shrink_backward", "g x l:common", "0 if x >= -l and x <= l else g",
    eager=_backward.softshrink_backward)
row("threshold_backward_at", "x g t:common", "0 if x <= t else g", accepts="fi",
    eager=lambda x, g, t: _backward.threshold_backward(g, x, t))


def _buffer(x):
    """What `log_sigmoid` keeps for its backward: nothing on CUDA."""
    if x.is_cuda:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    return torch.exp(torch.neg(torch.abs(torch.detach(x))))
