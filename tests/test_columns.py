"""Reductions over dimensions that others follow: rows whose elements are apart.

Without a GPU their kernels run in an emulation of its threads, and are compared with a model of
torch's order, `oracle`.
"""

import itertools

import numpy as np
import pytest
import row_oracle
import torch
from test_groups import kernels  # noqa: F401
from test_reductions import H200, emulated, launched, recorded, recording  # noqa: F401

import autofuse
from autofuse.kernel.division import scheme_of
from support import assert_same, compared_about, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# shape and dimensions: threads along results, along rows, several blocks for each
CASES = [
    ((7, 5), 0), ((2, 7, 5), 1), ((3, 4, 8), 1), ((2, 3, 6, 2), 1), ((2, 3, 6, 2), (1, 2)),
    ((40, 12), 0), ((300, 8), 0), ((2, 130, 36), -2), ((2, 3, 4, 3), (0, 1)), ((1100, 6), 0),
]  # fmt: skip


def values(shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def test_it(kernels):  # noqa: F811
    for (shape, dim), keepdim in itertools.product(CASES, (False, True)):
        x, y = values(shape), values(shape, seed=1)
        for name in ("sum", "mean", "amax", "amin", "var", "std"):
            with torch.no_grad():
                launched.clear()
                autofuse.reset_stats()
                got = getattr(autofuse.wrap(x) * y, name)(dim, keepdim=keepdim) * 2.0
                got = autofuse.materialize(got)
                print(shape, dim, keepdim, name, launched, autofuse.stats().eager_ops)
                want = getattr(x * y, name)(dim, keepdim=keepdim) * 2.0
                torch.testing.assert_close(autofuse.unwrap(got), want)
                if not keepdim: continue
                launched.clear()
                h = autofuse.wrap(x) * y
                got = h - getattr(h, name)(dim, keepdim=keepdim)
                got = autofuse.materialize(got)
                print("  whole", launched, autofuse.stats().eager_ops)
                want = x*y - getattr(x * y, name)(dim, keepdim=keepdim)
                torch.testing.assert_close(autofuse.unwrap(got), want)
