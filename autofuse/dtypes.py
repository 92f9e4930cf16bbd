"""Data types: torch's promotion rules, and the type codes of dtypes in kernels.

Knows torch dtypes only.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CODES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}


def kind(dtype: torch.dtype) -> str:
    """'f', 'i' or 'b': the category that torch's promotion works with."""
    if dtype is torch.bool:
        return "b"
    return "f" if dtype.is_floating_point else "i"


EXACT = 1 << 53  # ints up to this are exact as float64, so that float32 rounds them once


class Wide(int):
    """Stands in edges for the class of an int beyond EXACT."""


_SCALARS = {bool: torch.bool, int: torch.int64, Wide: torch.int64}


def result_type(operands: tuple[tuple[torch.dtype | type, int], ...]) -> torch.dtype:
    """torch.result_type over (dtype, ndim) pairs; a Python scalar is given as (its class, 0).

    Source: c10's promotion as documented under "type promotion": tensors with dimensions outrank
    0-d tensors, which outrank Python scalars, unless the lower rank is of a higher category.
    """
    return _result_type(operands, torch.get_default_dtype())


@lru_cache(maxsize=4096)
def _result_type(
    operands: tuple[tuple[torch.dtype | type, int], ...], default: torch.dtype
) -> torch.dtype:
    ranks: list[torch.dtype | None] = [None, None, None]  # dimensioned, 0-d, Python scalar
    for dtype, ndim in operands:
        if isinstance(dtype, type):
            rank, dtype = 2, default if dtype is float else _SCALARS[dtype]
        else:
            rank = 0 if ndim else 1
        seen = ranks[rank]
        ranks[rank] = dtype if seen is None else torch.promote_types(seen, dtype)
    result = _combine(ranks[0], _combine(ranks[1], ranks[2]))
    assert result is not None, "an op has at least one operand"
    return result


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_floating_point:
        return higher
    if higher is torch.bool or lower.is_floating_point:
        return torch.promote_types(higher, lower)
    return higher
