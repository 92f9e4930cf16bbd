"""Autocast: of which ops torch.autocast casts the operands, and to what.

They are the ops of the table that have a kernel of their own for autocast in torch's dispatcher, by
device type (tests/test_autocast.py compares); the others take their operands as they come. In-place
ops and those with `out=` are never among them.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch

_LOSSES = frozenset("binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss".split())
_POWERS = frozenset(
    "pow pow_1 pow_1_5 pow_2 pow_3 pow_4 pow_half pow_minus_1 pow_minus_2 pow_minus_half "
    "pow_scalar reciprocal rpow_scalar rsqrt scalar_div square".split()
)
# ops of which every float16 and bfloat16 operand becomes float32
FLOAT32 = {
    "cpu": _LOSSES,
    "cuda": _LOSSES | _POWERS | frozenset(
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp sinh softplus tan".split()
    ),
}  # fmt: skip
# ops whose operands become float32 or the lower precision: all one dtype
ONE_DTYPE = {
    "cpu": frozenset(["prelu"]),
    "cuda": frozenset("addcdiv addcdiv_scaled addcmul addcmul_scaled atan2 prelu".split()),
}
COMPOSITES = frozenset(["l1_loss"])  # whose operands become float32 before they are composed
_HALF = (torch.float16, torch.bfloat16)


def is_half(dtype: torch.dtype) -> bool:
    """Whether autocast may cast what has this dtype to float32."""
    return dtype in _HALF


def is_cast(op: str, device_type: str) -> bool:
    """Whether autocast may cast operands of the op of this name."""
    return op in FLOAT32[device_type] or op in ONE_DTYPE[device_type]


def cast_of(op: str, device_type: str, dtypes: Sequence[torch.dtype]) -> torch.dtype | str | None:
    """The dtype that float16 and bfloat16 operands are cast to, or why torch has to do that.

    op: its name. dtypes: of its tensors. None where none is cast.
    """
    if op in FLOAT32[device_type] and any(dtype in _HALF for dtype in dtypes):
        return torch.float32
    if op in ONE_DTYPE[device_type] and any(dtype.is_floating_point for dtype in dtypes):
        return "autocast, which casts its operands"
    return None


def casts_in(rule: ast.expr, device_type: str, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether autocast may cast operands of what a derivative rule calls.

    dtypes: of what it is over.
    """
    return any(dtype in _HALF for dtype in dtypes) and any(
        isinstance(tree, ast.Call)
        and isinstance(tree.func, ast.Name)
        and is_cast(tree.func.id, device_type)
        for tree in ast.walk(rule)
    )


def casts(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor` is one of those that become float32 in an op on `device`."""
    return tensor.dtype in _HALF and tensor.device == device
