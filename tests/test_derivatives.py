"""Every derivative rule against eager's gradient, and against finite differences."""

import itertools
import math

import pytest
import torch

import autofuse
from cases import ARITHMETIC, FLOAT_CALLS, NO_RULE, PAIR_CALLS, TRIPLE_CALLS
from support import DEVICES, FLOATS, assert_same, random_tensor

pytestmark = pytest.mark.parametrize("device", DEVICES)
CALLS = [
    (name, call, count)
    for count, calls in ((1, FLOAT_CALLS), (2, PAIR_CALLS), (3, TRIPLE_CALLS))
    for name, call in calls.items()
]
# on the CPU some of torch's vectorised backward kernels round differently from their scalar form
LOOSE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


def leaves(count, dtype, device, shape=(150,), wild=False):
    return [
        random_tensor(shape, dtype, device, seed=k, wild=wild).requires_grad_()
        for k in range(count)
    ]


def gradients(call, operands, wrapped):
    """(gradients of the operands or an error, ops that ran eagerly) for a fixed gradient."""
    if wrapped:
        operands = [t.detach().clone().requires_grad_() for t in operands]
    autofuse.reset_stats()
    y = call(*map(autofuse.wrap, operands)) if wrapped else call(*operands)
    if not y.requires_grad:
        return None, autofuse.stats()
    seed = random_tensor(y.shape, y.dtype, y.device.type, seed=9)
    pending = autofuse.is_pending(y)
    try:
        return torch.autograd.grad(y, operands, seed, allow_unused=True), pending
    except RuntimeError as error:
        return str(error), pending


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name, call, count", CALLS, ids=[name for name, _, _ in CALLS])
def test_gradient_of_every_op(name, call, count, dtype, device):
    """The same gradients, None where eager has none; on CUDA the same bits, for any bits."""
    for wild in (False, True) if device == "cuda" else (False,):
        operands = leaves(count, dtype, device, wild=wild)
        want, _ = gradients(call, operands, wrapped=False)
        got, pending = gradients(call, operands, wrapped=True)
        if isinstance(want, str):
            if "not implemented for" in want and not isinstance(got, str):
                pytest.skip(f"this torch cannot compare: {want}")
            assert got == want
        elif want is not None:
            assert pending or "to_" in name or name in NO_RULE, "was not recorded"
            for a, b in zip(got, want, strict=True):
                rtol = LOOSE[dtype]
                assert_same(a, b, rtol if device == "cpu" else None, name)
        else:
            assert got is None


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin", "clamp_min", "clamp_max"])
def test_gradients_where_operands_are_equal_or_nan(name, device, monkeypatch):
    """Versions of torch differ there."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    values = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan], device=device)
    x, y = torch.cartesian_prod(values, values).unbind(1)
    seed = torch.rand_like(x)
    results = []
    for wrap in (lambda t: t, autofuse.wrap):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        result = getattr(torch, name)(*map(wrap, leaves))
        results.append(torch.autograd.grad(result, leaves, seed))
    for got, want in zip(*results, strict=True):
        assert_same(got, want, None, name)


SMOOTH = [
    case for case in CALLS
    if case[0] not in ("to_half", "to_bfloat16", "to_float", "to_bool", "floordiv",
                       "floordiv_scalar", "floordiv_negative", *NO_RULE)
]  # fmt: skip


MIXED = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] is not pair[1]]


@pytest.mark.parametrize("dtypes", MIXED, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_gradients_of_operands_of_several_dtypes(dtypes, device):
    """In the dtypes in which eager computes them: the larger ones' bits tell."""
    compared = 0
    for name, call, count in CALLS:
        if count == 1:
            continue
        for odd in range(count):
            operands = [
                random_tensor((150,), dtypes[k == odd], device, seed=k).requires_grad_()
                for k in range(count)
            ]
            try:
                want, _ = gradients(call, operands, wrapped=False)
            except RuntimeError:  # an op of one dtype
                continue
            if not isinstance(want, tuple):
                continue
            got, _ = gradients(call, operands, wrapped=True)
            for ours, theirs in zip(got, want, strict=True):
                if theirs is not None:
                    rtol = None if device == "cuda" else LOOSE[theirs.dtype]
                    assert_same(ours, theirs, rtol, f"{name}, operand {odd} is {dtypes[1]}")
                    compared += 1
    assert compared > 40


@pytest.mark.parametrize("name, call, count", SMOOTH, ids=[name for name, _, _ in SMOOTH])
def test_gradcheck(name, call, count, device):
    """First and second derivatives against finite differences, in float64, away from kinks.

    The results are pending: C++ takes them without asking.
    """
    generator = torch.Generator().manual_seed(5)
    operands = [
        (torch.rand(7, generator=generator, dtype=torch.float64) * 0.35 + 0.31 + 0.2 * k)
        .to(device)
        .requires_grad_()
        for k in range(count)
    ]
    if name == "acosh":
        operands = [(t.detach() + 1.5).requires_grad_() for t in operands]

    def fused(*xs):
        return call(*[autofuse.wrap(x + 0) for x in xs])

    if call(*operands).requires_grad:
        assert torch.autograd.gradcheck(fused, operands)
        try:
            torch.autograd.gradgradcheck(call, operands)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)):
                torch.autograd.gradgradcheck(fused, operands)
        else:
            assert torch.autograd.gradgradcheck(fused, operands)


@pytest.mark.parametrize("name", sorted(ARITHMETIC & FLOAT_CALLS.keys()))
def test_gradient_through_a_chain(name, device):
    """A dead result of every op in the middle of a segment."""
    x, w = leaves(2, torch.float32, device)
    if not FLOAT_CALLS[name](x).requires_grad:
        pytest.skip("has no gradient: its result is bool")

    def chain(x, w):
        return FLOAT_CALLS[name](x * w + 1.0) * w

    want, _ = gradients(chain, (x, w), wrapped=False)
    got, pending = gradients(chain, (x, w), wrapped=True)
    assert pending
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, 1e-5 if device == "cpu" else None)
