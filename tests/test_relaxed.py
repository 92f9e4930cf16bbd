"""`config.relaxed`: contraction between ops, no rounding of 16-bit values inside a chain."""

import pytest
import torch

import autofuse
from autofuse.kernel.rows import RowPlan
from autofuse.kernel.text import render
from autofuse.supply import kernels
from support import DEVICES, random_tensor

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def relaxed(monkeypatch):
    monkeypatch.setattr(autofuse.config, "relaxed", True)


def chain(x, y):
    return ((x * y + x) * 1.25 - y).tanh()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_inside_a_chain_are_not_rounded(dtype, device):
    """Nearer to float64 than eager is: one rounding instead of five."""
    x, y = (random_tensor((4096,), dtype, device, seed) for seed in range(2))
    got = autofuse.unwrap(chain(autofuse.wrap(x), autofuse.wrap(y)))
    exact = chain(x.double(), y.double())
    assert got.dtype is dtype
    ours, theirs = ((value.double() - exact).abs().mean() for value in (got, chain(x, y)))
    assert ours < 0.6 * theirs


def test_products_contract_with_sums(device):
    """On CUDA; LLVM contracts nothing on the CPU unless it is told to."""
    x, y = (random_tensor((4096,), torch.float32, device, seed) for seed in range(2))
    got = autofuse.unwrap(autofuse.wrap(x) * autofuse.wrap(y) + autofuse.wrap(x))
    exact = (x.double() * y.double() + x.double()).float()
    differs = (got != x * y + x).any()
    assert bool(differs) == (device == "cuda")
    assert torch.allclose(got, exact, rtol=1e-6, atol=1e-6)


def test_casts_and_integers_stay_what_they_are(device):
    x = autofuse.wrap(random_tensor((100,), torch.float32, device))
    n = autofuse.wrap(random_tensor((100,), torch.int8, device, wild=True))
    got = (x.bfloat16().float() - x, n + n, (x > 0) & (n > 0))
    autofuse.materialize(*got)
    plain, whole = autofuse.unwrap(x), autofuse.unwrap(n)
    want = (plain.bfloat16().float() - plain, whole + whole, (plain > 0) & (whole > 0))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(autofuse.unwrap(ours), theirs)


def test_gradients_come_out_close(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    leaves = [random_tensor((64,), torch.float32, device, k).requires_grad_() for k in range(2)]
    want = torch.autograd.grad(chain(*leaves).sum(), leaves)
    got = torch.autograd.grad(chain(*map(autofuse.wrap, leaves)).sum(), leaves)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_ops_with_other_bits_are_fused_by_request_alone(device, monkeypatch):
    x = random_tensor((100,), torch.float64, device).abs()
    y = torch.special.bessel_j0(autofuse.wrap(x))
    assert autofuse.is_pending(y)
    want = torch.special.bessel_j0(x)
    torch.testing.assert_close(autofuse.unwrap(y), want, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(autofuse.config, "relaxed", False)
    assert not autofuse.is_pending(torch.special.bessel_j0(autofuse.wrap(x)))


def test_the_setting_is_part_of_a_kernel_and_of_what_was_recorded(device, monkeypatch):
    """A chain keeps the setting it was recorded under; the same chain without it is another."""
    x, y = (random_tensor((256,), torch.bfloat16, device, seed) for seed in range(2))
    before = chain(autofuse.wrap(x), autofuse.wrap(y))
    monkeypatch.setattr(autofuse.config, "relaxed", False)
    after = chain(autofuse.wrap(x), autofuse.wrap(y))
    before, after = autofuse.unwrap(before), autofuse.unwrap(after)
    assert not torch.equal(before, after)
    if device == "cuda":
        assert torch.equal(after, chain(x, y))
    plans = [plan for plan, _ in kernels._kernels if not isinstance(plan, RowPlan)]
    sources = [render(plan) for plan in plans if plan.lines[-1].op.name == "tanh"]
    assert any("bf16 = tanh" in source for source in sources)
    assert any(" = tanh" in source and "bf16 = v" in source for source in sources)
