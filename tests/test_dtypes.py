"""Type promotion against torch.result_type, exhaustively for two operands and in part for three."""

import itertools

import pytest
import torch

from autofuse.dtypes import CODES, result_type

SCALARS = {bool: True, int: 3, float: 2.5}
KINDS = [(dtype, ndim) for dtype in CODES for ndim in (0, 2)] + [(cls, 0) for cls in SCALARS]


def value(kind):
    dtype, ndim = kind
    return SCALARS[dtype] if isinstance(dtype, type) else torch.ones((2,) * ndim, dtype=dtype)


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_two_operands(default):
    torch.set_default_dtype(default)
    try:
        for a, b in itertools.product(KINDS, KINDS):
            if not isinstance(a[0], type) or not isinstance(b[0], type):
                assert result_type((a, b)) is torch.result_type(value(a), value(b)), (a, b)
    finally:
        torch.set_default_dtype(torch.float32)


def test_three_operands():
    for a, b, c in itertools.product(KINDS[::3], KINDS[1::3], KINDS[2::3]):
        tensors = [value(k) for k in (a, b, c)]
        if all(isinstance(t, torch.Tensor) for t in tensors):
            want = torch.cat([t.reshape(-1)[:0] for t in tensors]).dtype
            ranks = {k[1] for k in (a, b, c)}
            if ranks == {2}:  # cat knows no 0-d operands
                assert result_type((a, b, c)) is want
