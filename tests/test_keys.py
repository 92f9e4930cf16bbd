"""What is in a kernel's identity and what is not: each part has a test."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.record.modes import forget_all
from autofuse.supply.kernels import clear_kernels
from support import DEVICES, assert_same, kernels_made

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def cold():
    clear_kernels()
    forget_all("test")
    autofuse.reset_stats()


def compiled(call):
    before = kernels_made()
    autofuse.materialize(call())
    return kernels_made() - before


def tensor(device, *shape, dtype=torch.float32):
    return autofuse.wrap(torch.ones(*shape, dtype=dtype, device=device))


def misses(first, second):
    assert compiled(first) == 1
    assert compiled(second) == 1


def hits(first, second):
    assert compiled(first) == 1
    assert compiled(second) == 0


def test_the_same_chain_hits(device):
    x = tensor(device, 4, 4)
    hits(lambda: x * 2 + 1, lambda: x * 2 + 1)


def test_op_is_in_key(device):
    x = tensor(device, 4, 4)
    misses(lambda: x * x, lambda: x + x)


def test_order_of_operands_is_in_key(device):
    x, y = tensor(device, 4, 4), tensor(device, 4, 4)
    misses(lambda: (x * 2) - y, lambda: y - (x * 2))


def test_alias_of_inputs_is_in_key(device):
    x, y = tensor(device, 4, 4), tensor(device, 4, 4)
    misses(lambda: x * x, lambda: x * y)
    assert_same(x * y, torch.ones(4, 4, device=device), None)


def test_dtype_is_in_key(device):
    x, y = tensor(device, 4, 4), tensor(device, 4, 4, dtype=torch.float64)
    misses(lambda: x * x, lambda: y * y)


def test_kind_of_scalar_is_in_key(device):
    """`True == 1 == 1.0`, and a tensor of bools becomes another one with each of them."""
    x = tensor(device, 4, 4, dtype=torch.bool)
    kinds = [(1, torch.int64), (1.0, torch.float32), (True, torch.bool)]
    for again in (False, True, True):
        for scalar, dtype in kinds:
            results = []
            assert compiled(lambda: results.append(x * scalar) or results[0]) == (not again)
            assert_same(results[0], torch.ones(4, 4, dtype=dtype, device=device), None)
        kinds.reverse()


def test_modes_of_the_moment_are_in_key(device):
    """The same ops in other modes have other results, in whatever order the modes come."""
    x, n = tensor(device, 4, 4), tensor(device, 4, 4, dtype=torch.int32)
    for inference in (False, True, False, True):
        with torch.inference_mode(inference):
            y = autofuse.materialize(x * 2.0 + 1.0)
            assert y.is_inference() is inference
            assert_same(y * 2.0, torch.full((4, 4), 6.0, device=device), None)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert_same(n * 1.5, torch.full((4, 4), 1.5, dtype=dtype, device=device), None)
        finally:
            torch.set_default_dtype(torch.float32)


def test_live_outs_are_in_key(device):
    x = tensor(device, 4, 4)
    held = []

    def both():
        held.append(x * 2)
        return held[-1] + 1

    misses(lambda: x * 2 + 1, both)


def test_broadcast_is_in_key(device):
    x, row = tensor(device, 4, 4), tensor(device, 4)
    y = tensor(device, 4, 4)
    misses(lambda: x * y, lambda: x * row)


def test_layout_class_is_in_key(device):
    x, y = tensor(device, 4, 4), tensor(device, 4, 4)
    misses(lambda: x * y, lambda: x * y.T)


def test_option_strings_are_in_key(device):
    x = tensor(device, 4, 4)
    misses(lambda: F.gelu(x), lambda: F.gelu(x, approximate="tanh"))


def test_scalar_value_is_not_in_key(device):
    x = tensor(device, 4, 4)
    assert compiled(lambda: x * 0.5 + 0.25) == 1
    for k in range(1000):
        y = x * (k + 0.5) + 0.25
        assert float(y[0, 0]) == k + 0.75
    assert kernels_made() == 1


def test_size_is_not_in_key(device):
    """One kernel for aligned sizes and one for the others at most."""
    for size in range(1, 1001):
        x = autofuse.wrap(torch.ones(size, device=device))
        autofuse.materialize(x * 2 + 1)
    assert autofuse.stats().kernels_compiled <= 2


def test_rank_of_contiguous_tensors_is_not_in_key(device):
    x, y = tensor(device, 4, 4), tensor(device, 2, 2, 2, 2)
    hits(lambda: x * x, lambda: y * y)


def test_order_of_axes_is_not_in_key(device):
    x = tensor(device, 4, 6)
    y = autofuse.wrap(torch.ones(6, 4, device=device).T)
    hits(lambda: x * x, lambda: y * y)


def test_requires_grad_of_unrelated_inputs_is_not_in_key(device):
    x = tensor(device, 4, 4)
    p = torch.nn.Parameter(torch.ones(4, 4, device=device))
    q = torch.ones(4, 4, device=device)
    with torch.no_grad():
        hits(lambda: x * q, lambda: x * p)


LIKE = {
    "another": lambda d: torch.randn(4, 4, device=d),
    "strides": lambda d: torch.randn(4, 4, device=d).t(),
    "shape": lambda d: torch.randn(1, 4, device=d),
    "dtype": lambda d: torch.randn(4, 4, dtype=torch.float64, device=d),
    "requires grad": lambda d: torch.randn(4, 4, requires_grad=True, device=d),
    "parameter": lambda d: torch.nn.Parameter(torch.randn(4, 4, device=d)),
    "constant": lambda d: torch.nn.Parameter(torch.randn(4, 4, device=d), requires_grad=False),
    "negative": lambda d: torch.randn(4, 4, dtype=torch.cfloat, device=d).conj().imag,
    "inference": lambda d: torch.inference_mode()(torch.randn)(4, 4, device=d),
    "zero": lambda d: torch._efficientzerotensor((4, 4), device=d),
    "part of a larger": lambda d: torch.randn(5, 4, device=d)[1:],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", LIKE)
def test_a_plain_operand_that_is_not_what_was_met_there_before(name, grad, device):
    """What a place has met twice in a row is recognised in one call, and nothing else."""
    usual, other = LIKE["another"](device), LIKE[name](device)

    def operand(x, y):
        return x.abs() * y

    def result(x, y):
        return torch.mm(x, y) + 1

    with torch.set_grad_enabled(grad):
        for function in (operand, result):
            x = torch.randn(4, 4, device=device)
            for y in (usual, usual, usual, usual, other, other, usual, other):
                if grad and y.is_inference():
                    y = y.clone()  # which autograd can save
                if function is result and (y.dtype is not x.dtype or name == "zero"):
                    continue
                a = torch.randn(4, y.shape[0], device=device) if function is result else x
                got, want = function(autofuse.wrap(a), y), function(a, y)
                assert_same(got, want, None)
                assert got.is_inference() == want.is_inference()


def test_inference_tensors_are_told_from_others_in_inference_mode(device, on):
    """Also in one that begins where nobody sees it, and a chain goes on that was begun outside."""
    with torch.inference_mode():
        inner = torch.ones(3, 5, device=device)
    outer = torch.ones(3, 5, device=device)

    def look():
        for x in (outer, inner) * 4:
            w = autofuse.wrap(x)
            y = w * 2.0 + x
            assert w._af.inference is x.is_inference()
            assert y.tolist() == [[3.0] * 5] * 3

    for _ in range(3):
        with torch.inference_mode():
            look()
        look()
        with torch.no_grad():
            look()
        unseen = torch._C._InferenceMode(True)
        try:
            look()
        finally:
            del unseen
        look()


def test_modes_are_not_told_of_what_a_chain_finds_out(device, on):
    class Mode(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.told = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.told.append(func)
            return func(*args, **(kwargs or {}))

    def told(wrap):
        with torch.inference_mode():
            x, y = torch.ones(3, 4, device=device), torch.ones(4, device=device)
            h = wrap(x)
            with Mode() as mode:
                h = h * y + x
                h = torch.mm(h, torch.ones(4, 4, device=device)) * y
            return mode.told

    want = told(lambda x: x)
    for _ in range(5):
        assert told(autofuse.wrap) == want
