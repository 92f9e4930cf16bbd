"""Python numbers as operands and options: eager's bits, its errors, and nothing recorded inexactly.

A small part of what `bench/exhaustive.py --numbers` sweeps, and the classes of numbers that once
went wrong, one test each.
"""

import functools
import math
import os
import struct
import sys
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from scalars import DTYPES, configure, edges, numbers_for, operands_for, spellings_of, sweep

import autofuse
import cases
from autofuse.dtypes import EXACT
from autofuse.kernel.plan import Line, Plan
from autofuse.kernel.source import UNIT, Operand
from autofuse.kernel.text import render
from autofuse.ops.arithmetic import OPS
from autofuse.ops.row import since
from autofuse.program.program import CONST
from autofuse.run import generated
from autofuse.supply.kernels import clear_kernels
from support import (
    DEVICES,
    FLOATS,
    INTS,
    assert_same,
    assert_same_as_eager,
    needs_cuda,
    outcome,
    random_tensor,
)

NAN, INF = math.nan, math.inf
WIDE = (EXACT + 1, -EXACT - 1, 2**60 + 2**36 + 1, -(2**62) - 2**38 - 1, 2**63 - 1, -(2**63))
device_param = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def tiers(monkeypatch):
    """`configure`, undone afterwards."""
    for name in ("always_fuse", "compile_after"):
        monkeypatch.setattr(autofuse.config, name, getattr(autofuse.config, name))
    monkeypatch.setenv("AUTOFUSE_CACHE_DIR", os.environ["AUTOFUSE_CACHE_DIR"])
    warnings.simplefilter("ignore")
    yield configure
    autofuse.record.flush.flush_all(
        "test"
    )  # or what an op that raised has left is compiled in the end
    monkeypatch.undo()
    clear_kernels()  # and with them which directory they are in


# --- the axis of numbers --------------------------------------------------------------------------

# on the CPU these are not torch's, bit for bit, whatever their operands
INEXACT = set(
    "fmod remainder remainder_of_number operator_mod operator_rmod pow pow_of_number operator_pow "
    "operator_rpow float_power float_power_of_number xlogy xlogy_of_number xlog1py "
    "xlog1py_of_number logit polygamma elu celu softplus".split()
)
NARROW = (torch.float16, torch.bfloat16)  # on the CPU torch's kernels round some steps of these


@pytest.mark.parametrize("op", cases.NUMERIC)
def test_what_stands_in_for_a_kernel(op, tiers):
    """All dtypes and spellings: the same torch functions of the same numbers, the same errors."""
    tiers("eager")
    swept = [
        sweep(op, dtype, spelling, "eager", count=24, log2=6, tolerance=0)
        for dtype in DTYPES
        for spelling in spellings_of(cases.NUMERIC[op], dtype)
        if spelling == "function" or dtype in FLOATS[::2]
    ]
    assert not [str(result) for result in swept if result.wrong]
    assert any(result.status == "swept" for result in swept)


@pytest.mark.parametrize("op", [op for op in cases.NUMERIC if op not in INEXACT])
def test_kernels(op, tiers):
    tiers("kernel")
    swept = [
        sweep(op, dtype, "function", "kernel", count=32, log2=8, tolerance=0)
        for dtype in (torch.float32, torch.int32)
    ]
    assert not [str(result) for result in swept if result.wrong]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("tier", ["eager", "kernel"])
@pytest.mark.parametrize("op", cases.NUMERIC)
def test_bits(op, tier, tiers):
    """Every case and spelling on CUDA."""
    tiers(tier)
    swept = [
        sweep(op, dtype, spelling, tier, device="cuda", count=48, log2=12)
        for dtype in (*FLOATS, torch.int32)
        for spelling in spellings_of(cases.NUMERIC[op], dtype)
        if dtype in ((*FLOATS[:3], torch.int32) if spelling == "function" else FLOATS[2:])
    ]
    assert not [str(result) for result in swept if result.wrong]


@pytest.mark.parametrize("exponent", [1e-40, -1e-20, 0.005])
def test_a_power_whose_gradient_is_near_a_special_one_is_left_to_torch(exponent, tiers):
    """The exponent less 1 rounds to -1, which torch's kernels take for a division."""
    tiers("kernel")
    x = autofuse.wrap(torch.rand(8, requires_grad=True))
    assert not autofuse.is_pending(x**exponent) and not autofuse.is_pending(torch.pow(x, exponent))
    assert autofuse.is_pending(autofuse.wrap(torch.rand(8)) ** exponent)
    assert autofuse.is_pending(x**0.3)


def test_the_numbers_are_many_and_reproducible():
    every = numbers_for(torch.float32, 4096)
    assert len(every) == 4096 and numbers_for(torch.float32, 4096, 2) != every
    flat = [x for (x,) in every]
    assert {type(x) for x in flat} == {bool, int, float}
    assert sum(type(x) is float and x == x and _single(x) != x for x in flat) > 1500
    assert sum(type(x) is int and abs(x) > EXACT for x in flat) > 80
    assert sum(x != x for x in flat) and sum(type(x) is float and abs(x) == INF for x in flat) == 2
    assert sum(type(x) is float and 0 < abs(x) < 2**-126 for x in flat) > 60
    assert len({(type(x), repr(x)) for x in edges()}) == len(edges())
    assert numbers_for(torch.int8, 4096) != every
    assert numbers_for(torch.int8, 4096, whole=(1, None)) == ((1,), (None,))


def _single(x):
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return INF


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_hold_the_numbers_and_their_neighbours(dtype):
    (x,) = operands_for(dtype, 1, 18, "cpu")
    if dtype.itemsize < 4:
        assert len(x.unique()) >= min(2 ** (8 * dtype.itemsize), 64000) or dtype is torch.bool
        return
    assert len(x) == 2**18
    held = set(x.tolist())
    some = [3, -7, 100] if dtype in INTS else [0.1, 2.5, 1 / 3, 0.9**3]
    for value in some:
        assert torch.tensor(value, dtype=dtype).item() in held


def test_every_op_that_takes_a_number_is_swept(tiers):
    """By its numeric parameters, or by promoting operands that may be Python scalars."""
    tiers("kernel")
    swept = set()
    for case in cases.NUMERIC.values():
        operands = [torch.rand(4, dtype=torch.float32) for _ in range(case.tensors)]
        for numbers in ((1,), (-1,)) if case.whole else ((0.25, 0.5, 0.75)[: case.numbers],):
            swept |= _recorded(case.call, operands, numbers)
        swept |= _recorded(case.call, [(x * 8).int() for x in operands], (2, 3, 5)[: case.numbers])
    backward = {name for name in OPS if "_backward" in name}
    takes = {
        name
        for name, op in OPS.items()
        if {"opmath", "common", "inverse"} & set(op.roles)
        or (len(op.names) > 1 and not op.tensors_only and name not in backward)
    }
    unlike = {
        *backward,  # of gradients, which derivative rules give their numbers
        *(name for name in OPS if name.endswith("_by_scalar")),  # stand in inside plans
        *("lerp", "pow", "prelu", "glu", "xlogy", "xlog1py", "addcmul", "addcdiv", "mse_loss"),
        *("scalar_div", "deg2rad", "rad2deg", "logit_clamped_backward"),  # with none of a caller's
    }
    assert takes - unlike <= swept, takes - unlike - swept


def _recorded(call, operands, numbers):
    """Names of the ops that a call records."""
    wrapped = [autofuse.wrap(x) for x in operands]
    result, error = None, None
    recorder = autofuse.chain.state.recorder_for(torch.device("cpu"))
    autofuse.record.flush.flush_all("test")
    try:
        result = call(*wrapped, *numbers)
        return {node.op.name for node in recorder.chain.tip.path() if node.op is not None}
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return set()
    finally:
        del result, error
        autofuse.record.flush.flush_all("test")


# --- classes of numbers ---------------------------------------------------------------------------


def same(function, *tensors, fused=False):
    assert_same_as_eager(function, *tensors, fused=fused)


DIVISORS = (0.6694689143859696, 0.1, 0.3, 3, 7, 10, 13.0, 1 - 0.9**2, 1 - 0.999**3, 0.9**5, 1e-3,
            1e39, -1e39, 3.4028235677973366e38, 1e-39, 5e-324, 1.7976931348623157e308, 65520.0,
            0, 0.0, -0.0, INF, -INF, NAN, True, False, 2**53, -(2**53))  # fmt: skip


@device_param
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int32, torch.uint8, torch.bool), ids=str)
def test_division_by_a_number(dtype, device):
    """CUDA multiplies by a reciprocal that it takes in float64."""
    x = random_tensor((4099,), dtype, device, wild=dtype not in NARROW or device == "cuda")
    with torch.no_grad():
        for s in DIVISORS:
            same(lambda x, s=s: x / s, x, fused=True)
            same(lambda x, s=s: torch.div(x * 1, s), x)
            if dtype.is_floating_point:
                same(lambda x, s=s: (x * 1).div_(s), x)
                same(lambda x, s=s: torch.div(x * 1, s, out=torch.empty_like(x)), x)


def test_a_kernel_on_cuda_is_given_the_reciprocal():
    operand = Operand("f32", (UNIT,))
    line = Line(OPS["div_by_scalar"], (~0, CONST), "f32", "f32")
    plan = Plan("cuda", (operand,), (float,), (line,), ((0, operand),), 1, 4, False)
    inverse = "inverse" in OPS["div_by_scalar"].roles
    assert inverse is since(2, 10) and plan.inverted == (inverse,)
    assert ("x0 * c0" if inverse else "x0 * (1 / c0)") in render(plan)
    on_cpu = Plan("cpu", (operand,), (float,), (line,), ((0, operand),), 1, 1, False)
    assert on_cpu.inverted == (False,) and "x0 / c0" in render(on_cpu)


def test_reciprocals_are_those_of_c():
    given = (3, 0.1, 5e-324, 0, 0.0, -0.0, INF, -INF, True, False, 2**53 - 1)
    want = (1 / 3, 10.0, INF, INF, INF, -INF, 0.0, -0.0, 1.0, INF, 1 / (2**53 - 1))
    for s, expected in zip(given, want, strict=True):
        got = generated.reciprocal_of(s)
        assert got == expected and math.copysign(1, got) == math.copysign(1, expected)
    assert math.isnan(generated.reciprocal_of(NAN))


@device_param
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_on_the_left_is_rounded_first(dtype, device):
    x = random_tensor((4099,), dtype, device, wild=True)
    calls = {"div": torch.div, "mul": torch.mul, "sub": torch.sub, "add": torch.add}
    if device == "cuda" or dtype not in NARROW:
        for mode in ("trunc", "floor"):
            calls[mode] = functools.partial(torch.div, rounding_mode=mode)
    for call in calls.values():
        for s in (3.7, 0.1, -1 / 3, 257, 1e9, 2.0**-30):
            same(lambda x, call=call, s=s: call(s, x), x)


@device_param
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.int32, torch.bool), ids=str)
def test_wide_ints_are_rounded_once(dtype, device):
    """Python makes a float64 of an int first; torch rounds it to float32 at once."""
    x = random_tensor((64,), dtype, device)
    for n in WIDE:
        for call in (
            lambda x, n=n: x + n,
            lambda x, n=n: n * x,
            lambda x, n=n: x > n,
            lambda x, n=n: torch.where(x > 0, x, n),
            lambda x, n=n: torch.add(x, x, alpha=n),
            lambda x, n=n: torch.addcmul(x, x, x, value=n),
            lambda x, n=n: torch.lerp(x, x, n),
            lambda x, n=n: F.elu(x, n),
            lambda x, n=n: x.clamp(max=n),
            lambda x, n=n: x**n,
        ):
            same(call, x)


def test_a_wide_int_stays_fused_among_integers():
    x = autofuse.wrap(torch.arange(8))
    autofuse.reset_stats()
    got = autofuse.unwrap(autofuse.materialize((x * 6364136223846793005 + 3) ^ (2**62 + 1)))
    assert torch.equal(got, (torch.arange(8) * 6364136223846793005 + 3) ^ (2**62 + 1))
    assert autofuse.stats().ops_recorded == 3


@device_param
@pytest.mark.parametrize("n", [2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1, 2**1024])
def test_ints_beyond_64_bits_are_errors_where_they_are_eagers(n, device):
    x = random_tensor((8,), torch.float32, device)
    for call in (
        lambda x: x + n,
        lambda x: torch.float_power(x, n),
        lambda x: torch.lerp(x, x, n),
        lambda x: F.elu(x, n),
        lambda x: F.celu(x, n),
        lambda x: F.rrelu(x, 0.1, n),
        lambda x: F.leaky_relu(x, n),
        lambda x: torch.addcdiv(x, x, x, value=n),
        lambda x: torch.nan_to_num(x, n),
        lambda x: F.smooth_l1_loss(x, x, reduction="none", beta=n),
        lambda x: torch.xlogy(n, x),
    ):
        same(call, x)


@device_param
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_alpha(dtype, device):
    """Of 0 the sign counts, which an int has not; 1.0 is no int; True is an error."""
    x = random_tensor((64,), dtype, device, wild=True)
    y = x.flip(0).contiguous()
    for a in (0, 0.0, -0.0, 1, 1.0, True, False, -1, 0.37, NAN, INF):
        for name in ("add", "sub", "rsub"):
            call = functools.partial(getattr(torch, name), alpha=a)
            if device == "cpu" and not (dtype in NARROW and a == 0.37):
                same(lambda x, y, call=call: call(x, y), x, y)
                continue
            same(lambda x, y, call=call: call(x, y), x, y)


@device_param
@pytest.mark.parametrize("dtype", (*INTS, torch.bool), ids=str)
def test_alpha_of_integers(dtype, device):
    x = random_tensor((64,), dtype, device)
    low = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    for a in (0, 1, 1.0, 2, -1, True, low, low + 1, 0.5):
        for name in ("add", "sub", "rsub"):
            same(lambda x, name=name, a=a: getattr(torch, name)(x, x, alpha=a), x)


@device_param
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_comparisons_of_integers(dtype, device):
    """torch compares with the number modulo 2 ** bits; one that fits is recorded."""
    x, info = random_tensor((64,), dtype, device), torch.iinfo(dtype)
    x[:4] = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    compare = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
    for number in (0, 1, -1, True, 0.5, -0.5, info.min, info.max, info.min + 1, info.max - 1):
        for call in compare:
            same(lambda x, call=call, number=number: call(x, number), x)
            same(lambda x, call=call, number=number: call(x + x, number) & (x != 3), x)
    for number in (info.max + 1, info.max + 2, info.min - 1, 300, -300, *WIDE):
        for call in compare:
            same(lambda x, call=call, number=number: call(x, number), x)
            same(lambda x, call=call, number=number: call(x, number) | (x == 3), x)
    autofuse.reset_stats()
    for number in (0, True, info.max, info.min):
        autofuse.unwrap((autofuse.wrap(x) + 1 == number) | (autofuse.wrap(x) < number))
    assert {name for name, _ in autofuse.stats().eager_ops} <= {"detach"}, "what unwraps"


@device_param
@pytest.mark.parametrize("value", [1, 1.0, True, 0, 0.0, 0.37, -1, 1 + 1e-12, NAN])
def test_value(value, device):
    """CUDA's addcmul leaves the product with a value of 1 out, True among them."""
    x, y, z = (random_tensor((4099,), torch.float32, device, seed) for seed in range(3))
    same(lambda x, y, z: torch.addcmul(x, y, z, value=value), x, y, z)
    same(lambda x, y, z: torch.addcdiv(x, y, z, value=value), x, y, z)


@device_param
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int32), ids=str)
def test_bounds(dtype, device):
    """A bound of NaN is no bound for `clamp` on CUDA, and a result for the others."""
    x = random_tensor((64,), dtype, device)
    bounds = (NAN, INF, -INF, 0.0, -0.0, 0.25, 1e39, 70000.0, True, 2)
    for b in bounds:
        same(lambda x, b=b: x.clamp(min=b), x)
        same(lambda x, b=b: x.clamp(max=b), x)
        same(lambda x, b=b: torch.clamp_min(x, b), x)
        same(lambda x, b=b: torch.clamp_max(x, b), x)
        for other in bounds:
            same(lambda x, b=b, other=other: x.clamp(b, other), x)
            same(lambda x, b=b, other=other: F.hardtanh(x, b, other), x)


@device_param
def test_thresholds_out_of_range(device):
    for dtype in (torch.float32, torch.float16):
        x = random_tensor((64,), dtype, device)
        for s in (INF, NAN, 1e39, 65520.0, -1.0, -0.0, 0, True):
            same(lambda x, s=s: F.softshrink(x, s), x)
            same(lambda x, s=s: F.hardshrink(x, s), x)
            same(lambda x, s=s: F.threshold(x, s, 1.5), x)
            same(lambda x, s=s: F.rrelu(x, s, 2.0), x)
            same(lambda x, s=s: F.rrelu(x, -INF, s), x)
    same(lambda x: F.rrelu(x, -(2**35) - 1, -1), random_tensor((64,), torch.float64, device))


@device_param
@pytest.mark.parametrize("dtype", (torch.int32, torch.uint8, torch.bool), ids=str)
def test_decimals_of_integers_are_an_error(dtype, device):
    x = random_tensor((8,), dtype, device)
    for decimals in (2, -1, 0):
        same(lambda x, d=decimals: torch.round(x, decimals=d), x)


@device_param
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_an_exponent_that_rounds_to_an_integer(size, dtype, device):
    """torch's CPU kernel rounds it for whole vectors and not for what is left."""
    x = torch.full((size,), -1.6, dtype=dtype, device=device)
    for e in (5e-324, 1e-46, 2 + 1e-9, 3 - 1e-12, 0.5 + 1e-10, 16777216.5, 1e300):
        same(lambda x, e=e: x**e, x)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_an_exponent_that_rounds_to_one_with_a_form_of_its_own(dtype):
    x = random_tensor((4099,), dtype, "cuda", wild=True)
    for e in (3.004444613795161, 2.001, 1.999, 0.5001, -1.0001, -1.998, -0.4999):
        same(lambda x, e=e: x**e, x)


@pytest.mark.cuda
@needs_cuda
def test_a_number_that_is_a_tensor_on_the_cpu():
    """Some of torch's ops take it beside tensors on CUDA, for others it is an error."""
    x = random_tensor((64,), torch.float32, "cuda")
    for s in (torch.tensor(0.0), torch.tensor(3), torch.tensor(0.7, dtype=torch.float64)):
        for call in (
            lambda x, s: x.clamp(min=s),
            lambda x, s: x.clamp(max=s),
            lambda x, s: x.clamp(s, s),
            lambda x, s: x.clamp(s, 1.0),
            lambda x, s: torch.clamp_min(x, s),
            lambda x, s: torch.lerp(x, s, 0.5),
            lambda x, s: torch.lerp(s, x, 0.5),
            lambda x, s: torch.addcmul(x, s, x),
            lambda x, s: torch.addcmul(x, x, s),
            lambda x, s: torch.addcmul(s, x, x, value=0.5),
            lambda x, s: torch.addcdiv(x, x, s),
            lambda x, s: torch._prelu_kernel(x, s),
            lambda x, s: x**s,
            lambda x, s: s**x,
            lambda x, s: x / s,
            lambda x, s: s / x,
        ):
            for number in (s, autofuse.wrap(s.clone())):
                want, error = outcome(call, (x, s))
                got, failure = outcome(call, (autofuse.wrap(x.clone()), number))
                assert (type(failure), str(failure)) == (type(error), str(error))
                if error is None:
                    assert torch.equal(autofuse.unwrap(got).nan_to_num(), want.nan_to_num())


def _gradient(call, x, s):
    """What `call` gives, under grad with the gradient of x."""
    y = call(x, s)
    return [y, *torch.autograd.grad(y.sum(), [x])] if y.requires_grad else [y]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("number", [torch.tensor(1.5), torch.tensor(2), torch.tensor([1.5]),
                                    torch.tensor([1]), torch.tensor([1.5, 2.0]), torch.tensor(True),
                                    torch.tensor(1.5, requires_grad=True)],
                         ids=lambda x: f"{x.dtype}{list(x.shape)}{x.requires_grad}")  # fmt: skip
@pytest.mark.parametrize("call", [
    lambda x, s: F.hardtanh(x, -1.0, s), lambda x, s: F.hardtanh(x, s, 2.0),
    lambda x, s: F.hardtanh(x * 1, -1.0, s, inplace=True), lambda x, s: F.leaky_relu(x, s),
    lambda x, s: F.elu(x, s), lambda x, s: F.celu(x, s), lambda x, s: F.threshold(x, s, 0.0),
    lambda x, s: F.threshold(x, 0.1, s), lambda x, s: F.softplus(x, s),
    lambda x, s: F.hardshrink(x, s), lambda x, s: F.softshrink(x, s),
    lambda x, s: torch.add(x, x, alpha=s), lambda x, s: torch.sub(x, x, alpha=s),
    lambda x, s: torch.addcmul(x, x, x, value=s), lambda x, s: torch.addcdiv(x, x, x, value=s),
    lambda x, s: torch.nan_to_num(x, s), lambda x, s: torch.logit(x, s),
    lambda x, s: x.masked_fill(x > 0, s), lambda x, s: torch.full_like(x, s),
    lambda x, s: F.huber_loss(x, x * 3, delta=s), lambda x, s: F.smooth_l1_loss(x, x * 3, beta=s),
    lambda x, s: F.layer_norm(x, (3,), eps=s), lambda x, s: F.normalize(x, s),
    lambda x, s: F.pad(x, (0, 1), value=s), lambda x, s: torch.float_power(x, s),
])  # fmt: skip
def test_tensors_where_torch_takes_numbers(call, number, grad):
    """Some are taken for numbers, others refused, wrapped and pending as plain ones."""
    x = torch.tensor([[0.3, 1.7, 2.6], [-0.4, -2.0, 0.5]], requires_grad=grad)
    want, error = outcome(functools.partial(_gradient, call), (x, number))
    for change in (lambda s: s, lambda s: s | s if s.dtype is torch.bool else s * 1):
        if number.requires_grad:
            change = lambda s: s  # noqa: E731 - computed, it has lost its gradient by then
        operands = (
            autofuse.wrap(x.detach().clone().requires_grad_(grad)),
            autofuse.wrap(number.detach().clone().requires_grad_(number.requires_grad)),
        )
        got, failure = outcome(
            functools.partial(_gradient, call), (operands[0], change(operands[1]))
        )
        assert (type(failure), str(failure)) == (type(error), str(error))
        if error is None:
            for a, b in zip(got, want, strict=True):
                assert_same(autofuse.unwrap(a.detach()), b.detach(), 2e-6)


class Elsewhere(float):
    """A float that C sees as another number than Python's `float` does."""

    def __float__(self):
        return 9.0


@pytest.mark.parametrize("number", [Fraction(1, 3), Decimal("0.5"), np.array(2.0), np.float32(0.5),
                                    np.float64(0.5), Elsewhere(2.0), True, "1.5", None],
                         ids=lambda x: f"{type(x).__name__}")  # fmt: skip
@pytest.mark.parametrize("call", [
    lambda x, s: torch.nn.functional.smooth_l1_loss(x, x + 1, reduction="none", beta=s),
    lambda x, s: torch.nn.functional.huber_loss(x, x + 1, reduction="none", delta=s),
    lambda x, s: (x * 1).round_(decimals=s),
    lambda x, s: torch.round(x * 1, decimals=s),
    lambda x, s: torch.isclose(x, x, atol=s),
    lambda x, s: torch.isclose(x, x, equal_nan=s),
])  # fmt: skip
def test_numbers_of_other_kinds(call, number):
    """They are taken as torch's parser takes them, or refused with its words."""
    assert_same_as_eager(lambda x: call(x, number), torch.tensor([0.3, 1.7, 2.6]), rtol=1e-6)
