"""Every op of the table against eager: bits on CUDA, the stated tolerance on the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.dtypes import CODES
from autofuse.kernel.text import PROVEN, source_of
from autofuse.ops.arithmetic import OPS
from autofuse.supply.kernels import _kernels, clear_kernels
from autofuse.supply.load import target_of
from cases import (
    ARITHMETIC,
    FLOAT_CALLS,
    FLOAT_TO_INT,
    INT_CALLS,
    INT_DIVISIONS,
    INT_PAIR_CALLS,
    INT_SHIFTS,
    PAIR_CALLS,
    TRIPLE_CALLS,
    WIDE_CALLS,
)
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

# casts in every spelling, of a float32 `x`; `o` is a bfloat16 tensor beside it
CASTS = {
    "float": lambda x, o: x.bfloat16().float(), "half": lambda x, o: x.half(),
    "bfloat16": lambda x, o: x.bfloat16(), "double": lambda x, o: torch.Tensor.double(x),
    "to": lambda x, o: x.to(torch.bfloat16), "dtype=": lambda x, o: x.to(dtype=torch.bfloat16),
    "device, dtype": lambda x, o: x.to(x.device, torch.bfloat16),
    "a string": lambda x, o: x.to(x.device.type, torch.bfloat16),
    "device=, dtype=": lambda x, o: x.to(device=o.device, dtype=torch.half),
    "device, dtype=": lambda x, o: x.to(o.device, dtype=torch.half),
    "dtype, device=": lambda x, o: x.to(None, torch.half),
    "a tensor": lambda x, o: x.to(o), "a pending one": lambda x, o: x.to((x > 0).half()),
    "a tensor, non_blocking": lambda x, o: x.to(o, True, False),
    "non_blocking": lambda x, o: x.to(torch.half, non_blocking=True).to(torch.double, True),
    "copy": lambda x, o: x.to(torch.half, copy=False).to(x.device, torch.float, False, False),
    "type_as": lambda x, o: x.type_as(o), "type": lambda x, o: x.type(torch.half),
    "type=": lambda x, o: x.type(dtype=torch.half), "int": lambda x, o: x.int().long().bool(),
    "itself": lambda x, o: itself(x),
}  # fmt: skip


def itself(x):
    same = x.to(x.device).to(device=x.device).to(x).float().to(x.dtype).to(x.device.type)
    assert same is x
    return same


# the same as wrong calls, and with what is no cast alone
OTHER_CASTS = {
    "nothing": lambda x, o: x.to(), "twice": lambda x, o: x.to(o.dtype, dtype=o.dtype),
    "five": lambda x, o: x.to(o.device, o.dtype, True, False, None),
    "a name": lambda x, o: x.to(torch.half, name=1), "a wrong device": lambda x, o: x.to("nothing"),
    "a tensor and a dtype": lambda x, o: x.to(o, dtype=torch.half),
    "no flag": lambda x, o: x.to(torch.half, non_blocking=1),
    "a copy": lambda x, o: x.to(torch.float32, copy=True), "meta": lambda x, o: x.to("meta").shape,
    "format": lambda x, o: x.to(torch.half, memory_format=torch.contiguous_format),
    "a class": lambda x, o: x.type("torch.HalfTensor"), "no dtype": lambda x, o: x.to(1.5),
    "complex": lambda x, o: x.to(torch.complex64), "a layout": lambda x, o: x.to(o.to_sparse()),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [*CASTS, *OTHER_CASTS])
def test_casts_in_every_spelling(call, device):
    cast = (CASTS | OTHER_CASTS)[call]
    x, o = torch.linspace(-2, 300, 24, device=device).t(), torch.ones(2, device=device).bfloat16()
    assert_same_as_eager(lambda x, o: cast(x * 2.0, o), x, o)
    if call in CASTS:
        autofuse.reset_stats()
        result = cast(autofuse.wrap(x) * 2.0, autofuse.wrap(o))
        assert autofuse.is_pending(result) and not autofuse.stats().eager_ops


RTOL = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tolerance(name, dtype):
    return None if name in ARITHMETIC and dtype.itemsize > 2 else RTOL[dtype]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(count, dtype, device, size=1003):
    wild = device == "cuda"
    return [random_tensor((size,), dtype, device, seed, wild) for seed in range(count)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FLOAT_CALLS)
def test_one_float(name, dtype, device):
    (x,) = inputs(1, dtype, device)
    assert_same_as_eager(FLOAT_CALLS[name], x, rtol=tolerance(name, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PAIR_CALLS)
def test_two_floats(name, dtype, device):
    x, y = inputs(2, dtype, device)
    assert_same_as_eager(PAIR_CALLS[name], x, y, rtol=tolerance(name, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TRIPLE_CALLS)
def test_three_floats(name, dtype, device):
    assert_same_as_eager(TRIPLE_CALLS[name], *inputs(3, dtype, device), rtol=RTOL[dtype])


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", INT_CALLS)
def test_one_integer(name, dtype, device):
    (x,) = inputs(1, dtype, device)
    assert_same_as_eager(INT_CALLS[name], x, rtol=RTOL[torch.float32])


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("name", WIDE_CALLS)
def test_one_wide_float(name, dtype, device):
    (x,) = inputs(1, dtype, device)
    assert_same_as_eager(WIDE_CALLS[name], x, rtol=RTOL[dtype], fused=True)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_next_after(dtype, device):
    assert_same_as_eager(torch.nextafter, *inputs(2, dtype, device), fused=True)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", INT_SHIFTS)
def test_shifts(name, dtype, device):
    assert_same_as_eager(INT_SHIFTS[name], *inputs(2, dtype, device), fused=True)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", INT_DIVISIONS)
def test_integer_division(name, dtype, device):
    """Also by zero, where CUDA has an answer and the CPU an error."""
    x, y = inputs(2, dtype, device)
    for divisor in (y, torch.where(y == 0, 1, y)):
        assert_same_as_eager(INT_DIVISIONS[name], x, divisor, fused=device == "cuda")


@pytest.mark.parametrize("dtype", (*INTS, torch.bool), ids=str)
@pytest.mark.parametrize("name", INT_PAIR_CALLS)
def test_two_integers(name, dtype, device):
    x, y = inputs(2, dtype, device)
    assert_same_as_eager(INT_PAIR_CALLS[name], x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FLOAT_TO_INT)
def test_float_to_integer(name, dtype, device):
    """Values that fit the target: beyond it C++ leaves the result open."""
    x = (random_tensor((500,), torch.float64, device) * 20).abs().clamp(max=120).to(dtype)
    assert_same_as_eager(FLOAT_TO_INT[name], x)


FUSED_FLOAT = sorted(set(FLOAT_CALLS) - {"to_float", "to_half", "to_bfloat16", "to_double"})


@pytest.mark.parametrize("calls", [FLOAT_CALLS, PAIR_CALLS, TRIPLE_CALLS], ids=["1", "2", "3"])
def test_every_float_spelling_is_recorded(calls, device):
    """Counted, not assumed: one op or more recorded, none run eagerly."""
    operands = inputs(3, torch.float32, device)
    for name, call in calls.items():
        args = (
            [autofuse.wrap(x) for x in operands[: call.__code__.co_argcount]]
            if hasattr(call, "__code__")
            else None
        )
        if args is None:
            count = 1 if calls is FLOAT_CALLS else 2 if calls is PAIR_CALLS else 3
            args = [autofuse.wrap(x) for x in operands[:count]]
        if calls is FLOAT_CALLS:
            args = args[:1]
        autofuse.reset_stats()
        result = call(*args)
        if name == "to_float":  # x itself
            assert result is args[0]
            continue
        assert autofuse.is_pending(result), f"{name}: {autofuse.stats().eager_ops}"
        assert autofuse.stats().ops_eager == 0, f"{name}: {autofuse.stats().eager_ops}"


@pytest.mark.parametrize("name", FLOAT_CALLS)
def test_of_an_integer_that_an_optimiser_knows(name, device):
    """Neither LLVM nor ptxas may compute f(1) or f(0) in its own way."""
    x = random_tensor((130,), torch.int64, device)
    call = FLOAT_CALLS[name]
    want = [outcome(call, [known]) for known in (x >= x, x ^ x)]
    for function in (lambda x: call(x >= x), lambda x: call(x ^ x)):
        if all(error is None for _, error in want):
            assert_same_as_eager(function, x, rtol=1e-5)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.f16 or op.bf16])
def test_short_expressions_of_16_bit_ops(always, name, dtype):
    """All values of one operand; for quotients all by 64, and 64 by all."""
    clear_kernels()
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(dtype)
    if name in FLOAT_CALLS:
        assert_same_as_eager(FLOAT_CALLS[name], every, fused=True)
    else:
        x = every.repeat(64)
        y = random_tensor((64,), dtype, "cuda", wild=True).repeat_interleave(len(every))
        assert_same_as_eager(PAIR_CALLS[name], x, y, fused=True)
        assert_same_as_eager(PAIR_CALLS[name], y, x, fused=True)
    short = bool(getattr(OPS[name], CODES[dtype])) and target_of(every.device) in PROVEN
    (((plan, _), kernel),) = _kernels.items()
    assert (kernel.source != source_of(plan)) == short


@pytest.mark.cuda
@needs_cuda  # on the CPU a NaN's sign is not eager's
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_sign_of_a_nan_reaches_the_next_op(dtype):
    """copysign shows it; rounding to 16 bits, for one, would lose it."""
    rows = [(name, call, 1) for name, call in FLOAT_CALLS.items()]
    rows += [(name, call, 2) for name, call in PAIR_CALLS.items()]
    rows += [(name, call, 3) for name, call in TRIPLE_CALLS.items()]
    rows += [("where", lambda x, y, z: torch.where(z > 0, x, y), 3)]
    rows = [row for row in rows if row[0] != "trigamma"]  # negates by a product with a sign
    # finite numbers besides, and one NaN at a time: of two an instruction passes on either
    operands = [torch.nan_to_num(x) for x in inputs(3, dtype, "cuda")]
    for k, x in enumerate(operands):
        negative = torch.copysign(torch.full_like(x[:25], float("nan")), -torch.ones_like(x[:25]))
        x[100 * k : 100 * k + 100 : 2] = float("nan")
        x[100 * k + 1 : 100 * k + 100 : 4] = negative
        assert x.isnan().any() and torch.copysign(torch.ones_like(x), x).signbit().any()
    failed = []
    for name, call, count in rows:
        try:
            assert_same_as_eager(lambda *args, f=call: _sign(f(*args)), *operands[:count])
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)


def _sign(x):
    if not x.dtype.is_floating_point:
        return x
    return torch.copysign(torch.ones((), dtype=torch.float32, device=x.device), x)


@pytest.mark.parametrize("alpha", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("op", [F.elu, F.celu, F.leaky_relu], ids=lambda op: op.__name__)
def test_zero_times_a_number_that_is_not_finite(op, alpha, device):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan], device=device)
    got = op(autofuse.wrap(x), alpha)
    assert autofuse.is_pending(got) or op is F.celu  # which is eager then
    assert_same(got, op(x, alpha), None if device == "cuda" else 1e-6)
