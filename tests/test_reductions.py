"""Reductions in chains: what is recorded, what goes into one kernel, and that the bits are eager's.

Without a GPU they are recorded on the CPU, where they never are otherwise: there chains run as
eager ops, or their kernels run in an emulation of the threads of a GPU (`emulated`).
"""

import ctypes
import itertools
import os
import random
import sys
import threading
import warnings

import numpy as np
import pytest
import row_oracle
import simt
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autofuse
from autofuse.__main__ import main
from autofuse.chain import verified
from autofuse.chain.meta import UNKNOWN
from autofuse.cli import diagnose, verify
from autofuse.dispatch.chosen import forget_choices
from autofuse.hot import native
from autofuse.kernel import row_emit
from autofuse.kernel.division import scheme_of
from autofuse.kernel.rows import RowPlan, source_of
from autofuse.kernel.source import THREADS_PER_BLOCK, Parameters
from autofuse.ops import reductions
from autofuse.record import policy
from autofuse.record.modes import forget_all
from autofuse.run import cpu, cuda, devices
from autofuse.supply.disk import DiskCache
from autofuse.supply.kernels import Order
from support import assert_same, functions_called, needs_cuda

H200 = (132, 2048)
CPU = torch.device("cpu")


@pytest.fixture
def recording(monkeypatch, always):
    """Reductions are recorded on the CPU."""
    forget_choices()  # what choosers have said where these are not recorded
    reductions.DEVICES.add("cpu")
    with monkeypatch.context() as patch:  # over before settings are undone, which it follows
        patch.setattr(verified, "_met", set())
        verified.meet(CPU)
        for user in ("chain.trie", "record.record", "record.ways"):
            patch.setattr(f"autofuse.{user}.processors_of", lambda device: H200)
        forget_all("test")
        yield
        forget_all("test")
    reductions.DEVICES.discard("cpu")
    verified.wanted.pop(CPU, None)
    forget_choices()


@pytest.fixture
def recorded(recording, eager_tier):
    """Reductions are recorded on the CPU, and their chains run as eager ops."""


entries = {}  # of kernels


class _Kernel:
    def __init__(self, source):
        self.source, self.parameters = source, Parameters.of(source)
        self.entry = id(self)
        entries[self.entry] = self


launched = []  # (name, blocks, threads)
broken = []  # what kernels have raised


def _launch(entry, blocks, _y, _z, threads, _ty, _tz, _shared, _stream, params, _extra):
    """Runs all its threads."""
    kernel = entries[entry]
    source, codes = kernel.source, kernel.parameters.codes
    assert threads == (THREADS_PER_BLOCK if source.rows is None else source.rows.block)
    slots = (ctypes.c_void_p * len(codes)).from_address(params)
    kinds = {"u64": ctypes.c_uint64, "i32": ctypes.c_uint32, "i64": ctypes.c_uint64,
             "f32": ctypes.c_float}  # fmt: skip
    values = [kinds[c].from_address(at).value for c, at in zip(codes, slots, strict=True)]
    values = [simt.F32(v) if c == "f32" else v for c, v in zip(codes, values, strict=True)]
    launched.append((source.name, blocks, threads))
    try:
        simt.run(source, blocks, values, memory=simt.ProcessMemory())
    except BaseException as error:  # who calls it is C, which has no use for it
        broken.append(error)
    return 0


_launcher = ctypes.CFUNCTYPE(ctypes.c_int, *cuda.LAUNCH_TYPES)(_launch)


class _EmulatedRunner(cuda.CudaRunner):
    empty_strided = cpu.CpuRunner.empty_strided

    def launcher(self):
        return _launcher


class _Runner(cpu.CpuRunner):
    """Kernels of the emulation run there, others, where somebody lets these be used, on the CPU."""

    def __new__(cls, tip, outputs, pieces=(), kernels=(), *args):
        if any(isinstance(kernel, _Kernel) for kernel in kernels):
            return _EmulatedRunner(tip, outputs, pieces, kernels, *args)
        return super().__new__(cls)


@pytest.fixture
def emulated(monkeypatch, recording, on):
    """Reductions are recorded on the CPU, and their kernels run in an emulation of a GPU."""
    made = {}

    def filled(order):
        if not all(isinstance(plan, RowPlan) for plan, _ in order.wanted):
            return None
        return [made.setdefault(p, _Kernel(source_of(p, "sm_90"))) for p, _ in order.wanted]

    monkeypatch.setattr(Order, "filled", filled)
    monkeypatch.setitem(devices.RUNNERS, "cpu", _Runner)
    launched.clear()
    broken.clear()
    yield made
    entries.clear()
    assert not broken


def row(n, seed=0, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(m, n, seed=0, dtype=torch.float32):
    return row(m * n, seed, dtype).view(m, n)


def bits(values):
    return torch.from_numpy(np.asarray(values, np.float32))


# --- by kernels, emulated -------------------------------------------------------------------------


def test_layer_norm_between_pointwise_ops_is_one_kernel(emulated):
    x, res, w, b = table(5, 260), table(5, 260, 1), row(260, 2), row(260, 3)
    with torch.no_grad():
        for _ in range(3):  # the last ones by machine code
            h = autofuse.wrap(x) + res
            y = F.relu(F.layer_norm(h, (260,), w, b)) + res
            y, h = autofuse.materialize(y), autofuse.materialize(h)
    assert len(launched) == 3 and {one[1:] for one in launched} == {(5, 128)}
    rows = (x + res).numpy()
    normed = [row_oracle.layer_norm(r, w.numpy(), b.numpy(), simt.F32(1e-5)) for r in rows]
    assert_same(autofuse.unwrap(h), x + res, None)
    assert_same(autofuse.unwrap(y), torch.relu(bits(normed)) + res, None)


def test_several_rows_a_block_and_numbers_of_rows(emulated):
    x = table(10, 100)
    total = autofuse.wrap(x).mul(2.0).sum(-1)
    y = total + 1.0
    total, y = map(autofuse.unwrap, (autofuse.materialize(total), autofuse.materialize(y)))
    assert launched == [("af_rows_mul_sum_add", 5, 128)], "two rows a block"
    scheme = scheme_of("sum", 10, 100, 4, H200)
    want = [
        row_oracle.reduced("sum", r, k * 100, 10, scheme.across, scheme.vec)
        for k, r in enumerate((x * 2.0).numpy())
    ]
    assert_same(total, bits(want), None)
    assert_same(y, bits(want) + 1.0, None)


def test_operands_of_other_layouts(emulated):
    """Columns of a transposed one, rows that repeat, of three dimensions."""
    x, y = table(6, 130).view(2, 3, 130), table(130, 6, 1).t().reshape(2, 3, 130)
    y = y.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    m = row(130, 2).view(1, 130)[:, None]
    assert y.stride(-1) > 1
    got = autofuse.unwrap(autofuse.materialize(F.rms_norm(autofuse.wrap(x) + y, (130,)) + m))
    assert len(launched) == 1
    rows = (x + y).view(6, 130).numpy()
    ones = np.ones(130, np.float32)
    eps = simt.F32(torch.finfo(torch.float32).eps)
    want = bits([row_oracle.rms_norm(r, ones, eps) for r in rows]).view(2, 3, 130) + m
    assert_same(got, want, None)


def test_choices_by_a_mask(emulated):
    """A bool operand, of which four are moved at once."""
    x, y, mask = table(3, 64), table(3, 64, 1), table(3, 64, 2) > 0
    h = torch.where(autofuse.wrap(mask), autofuse.wrap(x), y)
    got = autofuse.unwrap(autofuse.materialize(F.layer_norm(h, (64,)) * 2.0))
    assert len(launched) == 1
    rows = torch.where(mask, x, y).numpy()
    want = bits([row_oracle.layer_norm(r, None, None, simt.F32(1e-5)) for r in rows])
    assert_same(got, want * 2.0, None)


def test_reductions_alone_run_as_torchs_kernels(emulated, monkeypatch):
    """Even where longer chains begin with the same; with something after them they are a kernel."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x = table(4, 64)

    def run(after):
        y = torch.softmax(autofuse.wrap(x), -1)
        return autofuse.unwrap(autofuse.materialize(after(y)))

    for _ in range(2):
        assert_same(run(lambda y: y), torch.softmax(x, -1), None)
        assert not launched
    run(lambda y: -y)
    assert len(launched) == 1
    for _ in range(5):
        assert_same(run(lambda y: y), torch.softmax(x, -1), None)
    assert len(launched) == 1


def test_a_write_to_memory_that_is_there(emulated):
    """By a copy: a row is read by more threads than write it."""
    x = table(4, 64)
    own = x.clone()
    w = autofuse.wrap(own)
    w.sub_(torch.softmax(w * 0.5, -1))
    assert launched == [("af_rows_mul_softmax_sub", 1, 128)]
    want = bits([row_oracle.softmax(r) for r in (x * 0.5).numpy()])
    assert_same(own, x - want, None)


def test_rows_that_begin_where_torch_takes_them_otherwise_run_as_eager_ops(emulated):
    """Of whole vectors, as they are in memory; with an op before them memory would be their own."""
    x = row(4 * 64 + 1)[1:].view(4, 64)
    assert x.data_ptr() % 16
    for _ in range(3):
        y = F.layer_norm(autofuse.wrap(x), (64,)) * 2.0
        assert_same(autofuse.unwrap(autofuse.materialize(y)), F.layer_norm(x, (64,)) * 2.0, None)
        assert not launched
    for _ in range(3):
        y = F.layer_norm(autofuse.wrap(x) + 1.0, (64,)) * 2.0
        rows = [row_oracle.layer_norm(r, None, None, simt.F32(1e-5)) for r in (x + 1.0).numpy()]
        assert_same(autofuse.unwrap(autofuse.materialize(y)), bits(rows) * 2.0, None)
    assert len(launched) == 3


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_uneven_rows_are_kernels(emulated, shift):
    """Wherever they begin."""
    x, b = row(4 * 131 + shift, 1)[shift:].view(4, 131), row(131 + shift, 2)[shift:]
    scheme = scheme_of("mean", 4, 131, 4, H200)

    def mean(rows, start):
        made = (row_oracle.reduced("mean", r, start + k * 131, 4, scheme.across, scheme.vec)
                for k, r in enumerate(rows.numpy()))  # fmt: skip
        return bits(list(made)).view(4, 1)

    for _ in range(2):
        y = autofuse.wrap(x) + b
        y = autofuse.unwrap(autofuse.materialize(y - y.mean(-1, keepdim=True)))
        assert_same(y, (x + b) - mean(x + b, 0), None)
        y = autofuse.wrap(x)
        y = autofuse.unwrap(autofuse.materialize(y - y.mean(-1, keepdim=True)))
        assert_same(y, x - mean(x, shift), None)
    assert len(launched) == 4


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "vector_norm", "var", "std"])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((3, 40), 2),
        ((2, 3, 5, 8), 2),
        ((4, 3, 44), 2),
        ((1, 6, 30), 2),
        ((131,), 1),
        ((2, 9, 7), 3),
    ],
)
def test_rows_along_several_dims(emulated, name, shape, dims):
    """Or along all; with operands that have none of theirs, and those that have only them."""
    x, y, c = (
        row(int(np.prod(shape))).view(shape),
        row(int(np.prod(shape)), 1).view(shape),
        row(1, 2),
    )
    row_shape = shape[len(shape) - dims :]
    w, number = row(int(np.prod(row_shape)), 3).view(row_shape), c.reshape(())
    n = int(np.prod(shape[: len(shape) - dims]))
    before = (((x - y) * w) * c + number).view(n, -1)
    scheme = scheme_of(name, *before.shape, 4, H200)
    want = bits([
        row_oracle.reduced(name, r, k * len(r), n, scheme.across, scheme.vec)
        for k, r in enumerate(before.numpy())
    ]).view(shape[: len(shape) - dims])  # fmt: skip
    function = torch.linalg.vector_norm if name == "vector_norm" else getattr(torch, name)
    for keepdim in (False, True):
        launched.clear()
        for _ in range(2):
            h = (autofuse.wrap(x) - y) * w * c + number
            found = function(h, dim=tuple(range(-dims, 0)), keepdim=keepdim)
            beside = h * 2.0 if dims == len(shape) or keepdim else h
            after = beside - found if dims == len(shape) or keepdim else found * 3.0
            found, after, h = map(autofuse.materialize, (found, after, h))
            shown = want.view(*want.shape, *(1 for _ in row_shape)) if keepdim else want
            assert_same(autofuse.unwrap(found), shown, None)
            assert_same(autofuse.unwrap(h), before.view(shape), None)
            rest = (
                (before.view(shape) * 2.0 - shown) if dims == len(shape) or keepdim else want * 3.0
            )
            assert_same(autofuse.unwrap(after), rest, None)
        assert len(launched) == 2
    if dims == len(shape) and name not in ("var", "std"):  # with no dimensions named
        function = torch.norm if name == "vector_norm" else function
        got = function((autofuse.wrap(x) - y) * w * c + number)
        assert_same(autofuse.unwrap(autofuse.materialize(got)), want, None)


# --- what is recorded -----------------------------------------------------------------------------

CALLS = {
    "sum": lambda x: x.sum(-1),
    "sum, dim of the last": lambda x: torch.sum(x, x.ndim - 1, keepdim=True),
    "sum, dims": lambda x: x.sum((-1,)),
    "mean": lambda x: x.mean(dim=-1, keepdim=True),
    "amax": lambda x: torch.amax(x, -1),
    "amin": lambda x: x.amin(1, True),
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "Softmax": lambda x: torch.nn.Softmax(-1)(x),
    "special.softmax": lambda x: torch.special.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "LayerNorm": lambda x: torch.nn.LayerNorm(8, elementwise_affine=False)(x),
    "torch.layer_norm": lambda x: torch.layer_norm(x, [8]),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "RMSNorm": torch.nn.RMSNorm(8).requires_grad_(False),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "linalg.norm": lambda x: torch.linalg.norm(x, 2, -1, keepdim=True),
    "torch.norm": lambda x: torch.norm(x, dim=1),
    "norm": lambda x: x.norm(2, -1, True),
    "norm, names": lambda x: x.norm(p="fro", dim=(-1,), keepdim=False),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "var": lambda x: x.var(-1),
    "torch.var": lambda x: torch.var(x, dim=(1,), keepdim=True),
    "var, biased": lambda x: torch.var(x, -1, False),
    "std": lambda x: torch.std(x, -1, keepdim=True, unbiased=False),
    "std, correction": lambda x: x.std(-1, correction=0, keepdim=True),
    "std, both": lambda x: x.std(-1, True, True),
    "std, none": lambda x: torch.std(x, -1, correction=None),
    "var, fraction": lambda x: x.var(dim=1, correction=1.5),
    "sum of all": lambda x: x.sum(),
    "torch.mean of all": lambda x: torch.mean(x),
    "mean of dims": lambda x: x.mean((0, 1)),
    "sum of dims, kept": lambda x: torch.sum(x, (-1, 0), keepdim=True),
    "mean of three dims": lambda x: x.view(2, 2, 8).mean((1, 2)),
    "amin of all": lambda x: x.amin(),
    "amax of all, kept": lambda x: torch.amax(x, keepdim=True),
    "norm of all": lambda x: x.norm(),
    "norm of dims": lambda x: torch.linalg.vector_norm(x, 2, (0, 1)),
    "linalg.norm of all": lambda x: torch.linalg.norm(x),
    "var of all": lambda x: x.var(),
    "std of all": lambda x: torch.std(x, correction=0),
    "std of dims": lambda x: x.view(2, 2, 8).std((-2, -1), keepdim=True),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "logsumexp, kept": lambda x: x.logsumexp((1,), True),
    "special.logsumexp": lambda x: torch.special.logsumexp(x, dim=1, keepdim=False),
    "logsumexp of dims": lambda x: x.logsumexp(dim=(0, 1)),
    "F.mse_loss": lambda x: F.mse_loss(x, TARGET),
    "F.mse_loss, sum": lambda x: F.mse_loss(x, TARGET, reduction="sum"),
    "F.MSELoss": lambda x: torch.nn.MSELoss()(x, TARGET),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, TARGET, beta=0.5),
    "F.huber_loss": lambda x: F.huber_loss(x, TARGET, "sum", 2),
    "F.l1_loss": lambda x: F.l1_loss(x, TARGET),
    "F.bce": lambda x: F.binary_cross_entropy_with_logits(x, TARGET),
}
TARGET = torch.linspace(-1, 1, 32).view(4, 8)
MADE = [name for name in CALLS if "logsum" in name or "oss" in name or name == "F.bce"]
IN_PYTHON = ("normalize", "F.l1_loss")  # composites, of several ops


@pytest.mark.parametrize("name", CALLS)
def test_spellings_are_recorded(recorded, name):
    x = table(4, 8)
    with torch.no_grad():
        y = CALLS[name](autofuse.wrap(x) * 2.0)
        assert autofuse.is_pending(y)
        want = CALLS[name](x * 2.0)
        assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())
        assert_same(autofuse.unwrap(autofuse.materialize(y)), want, None)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in IN_PYTHON])
def test_calls_as_before_are_recorded_by_machine_code(recorded, name, monkeypatch):
    """And run by it where nothing follows; a function in Python asks Python then."""
    if not native.active():
        pytest.skip("there is none")
    w, call = autofuse.wrap(table(4, 8)), CALLS[name]
    want = call(autofuse.unwrap(w))
    with torch.no_grad():
        for _ in range(3):
            assert_same(autofuse.unwrap(autofuse.materialize(call(w) * 2.0)), want * 2.0, None)
        made = []
        assert functions_called(lambda: made.append(call(w))) == []
        assert autofuse.is_pending(made[0])
        assert_same(autofuse.unwrap(autofuse.materialize(made[0])), want, None)
        monkeypatch.setattr(autofuse.config, "always_fuse", False)
        forget_all("test")
        for _ in range(2 * policy.TRIES):
            autofuse.materialize(call(w))
        made.clear()
        called = functions_called(lambda: made.append(call(w)))
        if name in MADE:  # one op for two of torch's kernels, and for more
            assert called == [] and autofuse.is_pending(made[0])
            return
        assert (
            called == []
            if "F." not in name and "orm" not in name and name != "Softmax"
            else (set(called) <= {"<lambda>"})
        ), called
        assert not autofuse.is_pending(made[0])
        assert_same(autofuse.unwrap(made[0]), want, None)


def outcome(call, x):
    """What a call gives, or how it fails."""
    try:
        y = call(x)
        y = autofuse.materialize(y) if type(y) is autofuse.Tensor else y
        return y.shape, y.dtype, autofuse.unwrap(y).tolist()
    except (TypeError, RuntimeError, IndexError) as error:
        return type(error), str(error)


ALIKE = {
    "True and 1": [lambda x: x.sum(-1, True), lambda x: x.sum(-1, 1), lambda x: x.sum(True)],
    "1 and 1.0": [lambda x: x.sum(1), lambda x: x.sum(1.0), lambda x: x[None].sum(1)],
    "columns": [lambda x: F.layer_norm(x, (8,)), lambda x: F.layer_norm(x[:, :4] * 1.0, (8,)),
                lambda x: F.layer_norm(x[:, :4] * 1.0, (4,))],
    "dtypes": [lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x.double(), -1),
               lambda x: torch.softmax(x.half(), -1), lambda x: torch.softmax(x.int(), -1)],
    "numbers": [lambda x: F.rms_norm(x, (8,), None, 1.0), lambda x: F.rms_norm(x, (8,), None, 1),
                lambda x: F.rms_norm(x, (8,), None, True), lambda x: F.rms_norm(x, (8,), None, 3.0),
                lambda x: F.rms_norm(x, (8,), None, None)],
    "weights": [lambda x: F.layer_norm(x, (8,), x[0], x[1]), lambda x: F.layer_norm(x, (8,), x[0]),
                lambda x: F.layer_norm(x, (8,), None, x[0]),
                lambda x: F.layer_norm(x, (8,), x[2], x[2]),
                lambda x: F.layer_norm(x, (8,), x[0, :4], x[1, :4]),
                lambda x: F.layer_norm(x, x.shape[1:], x[1], x[0])],
    "names": [lambda x: x.sum(dim=-1, keepdim=True), lambda x: x.sum(keepdim=True, dim=-1),
              lambda x: torch.sum(x, dim=-1, dtype=torch.float64), lambda x: torch.sum(x, dim=0),
              lambda x: torch.sum(x, dim=(-1,)), lambda x: torch.sum(x, dim=[-1]),
              lambda x: torch.sum(x, dim=(0, 1)), lambda x: torch.sum(x)],
    "names of weights": [
        lambda x: F.layer_norm(x, (8,), weight=x[0], bias=x[1]),
        lambda x: F.layer_norm(x, (8,), bias=x[0], weight=x[1]),
        lambda x: F.layer_norm(x, (8,), bias=x[0], weight=x[1], eps=0.5),
        lambda x: torch.layer_norm(x, (8,), x[1], x[0], 0.5, False),
    ],
    "nothing": [lambda x: x.amax(-1), lambda x: x.amax(), lambda x: x.amax(()),
                lambda x: x[:, :0].amax(-1), lambda x: x[:0].amax(-1)],
}  # fmt: skip


@pytest.mark.parametrize("before", ["one", "weight is row", "bias is row"])
def test_an_argument_that_was_there_twice_is_told_from_two(recorded, before, on):
    """A weight that was a bias too, say, which the chain has read before."""
    rows, (w, b) = torch.randn(8, 32), torch.randn(2, 32)

    def run(x, w, b):
        return F.layer_norm(x * w, (32,), w, b) * 2.0

    def of_row(x, w, b):
        h = x[0] * w
        return F.layer_norm(h, (32,), *((h, b) if before == "weight is row" else (w, h)))

    calls = [(run, w, w), (run, w, b), (run, b, w), (run, b, b)]
    if before != "one":
        calls = [(of_row, w, b), (run, w, b)]
    for _ in range(3):
        for program, *weights in calls:
            assert_same(program(autofuse.wrap(rows), *weights), program(rows, *weights), 1e-5)


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_look_alike_are_told_apart(recorded, name):
    x = table(4, 8)
    w = autofuse.wrap(x)
    with torch.no_grad():
        for order in (ALIKE[name], ALIKE[name][::-1]):
            for call in order:
                want = outcome(call, x)
                for _ in range(3):
                    assert outcome(call, w) == want


def test_operands_that_were_one_object_when_calls_were_first_met(recorded):
    x, a, b = table(4, 8), table(1, 8)[0], table(2, 8)[1]
    w, ours, theirs = map(autofuse.wrap, (x, a, b))

    def normed(x, a, b, weight, bias):
        return F.layer_norm(x * a + b, (8,), weight, bias) + 1.0

    def scaled(x, same):
        t = x * 2.0
        return F.rms_norm(t, (8,), t if same else x + 3.0) + 1.0

    with torch.no_grad():
        for weight, bias in ((ours, ours), (ours, theirs), (theirs, ours), (theirs, theirs)):
            want = normed(x, a, b, autofuse.unwrap(weight), autofuse.unwrap(bias))
            for _ in range(3):
                assert_same(autofuse.unwrap(normed(w, ours, theirs, weight, bias)), want, None)
        for same in (True, False, True):
            for _ in range(3):
                assert_same(autofuse.unwrap(scaled(ours, same)), scaled(a, same), None)


def test_an_interrupt_where_a_device_is_met_leaves_it_to_the_next(recorded, monkeypatch):
    device, asked = torch.device("cpu"), []

    def refusal(device):
        asked.append(device)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(verified, "_met", set())
    monkeypatch.setattr(verified, "wanted", {})
    monkeypatch.setattr(verified, "refusal", refusal)
    with pytest.raises(KeyboardInterrupt):
        verified.meet(device)
    assert not verified.wanted
    verified.meet(device)
    assert device in verified.wanted


def test_a_setting_that_changes_while_a_device_is_met(recorded, monkeypatch):
    device = torch.device("cpu")

    def refusal(device):
        autofuse.config.reductions = False
        return ""

    monkeypatch.setattr(verified, "_met", set())
    monkeypatch.setattr(verified, "refusal", refusal)
    try:
        verified.meet(device)
        assert device not in verified.wanted
    finally:
        monkeypatch.undo()
        autofuse.config.reductions = True


EAGER_CALLS = {
    "dims that are none": lambda x: x.sum(()),
    "norm of another kind": lambda x: x.norm("nuc"),
    "var of all but few": lambda x: x.var(correction=3),
    "none of its dims": lambda x: x.mean(None),
    "dtype": lambda x: x.sum(-1, dtype=torch.float64),
    "softmax to another dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "amax of no dims": lambda x: x.amax(()),
    "out": lambda x: torch.sum(x, -1, out=torch.empty(4)),
    "weight alone": lambda x: F.layer_norm(x, (8,), torch.ones(8)),
    "two dims of layer_norm": lambda x: F.layer_norm(x, (4, 8)),
    "one column": lambda x: x[:, :1].contiguous().sum(-1),
    "int": lambda x: x.int().sum(-1),
    "double": lambda x: torch.softmax(x.double(), -1),
    "norm of a matrix": lambda x: torch.linalg.norm(x, "fro", (0, 1)),
    "another norm": lambda x: x.norm(1, -1),
    "norm to another dtype": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64),
    "biased var of all": lambda x: x.var(False),
    "var by numpy's names": lambda x: torch.var(x, axis=-1),
    "var of doubles": lambda x: x.double().var(-1),
    "std in place of another": lambda x: torch.std(x, -1, out=torch.empty(4)),
    "var of more than all": lambda x: x.var(-1, correction=-1),
    "normalized, empty": lambda x: F.normalize(x[:, :0].t(), dim=-1),
    "normalized with a tensor": lambda x: F.normalize(x, dim=-1, eps=torch.tensor(0.5)),
    "normalized by another norm": lambda x: F.normalize(x, 3.0, -1),
}


@pytest.mark.parametrize("name", EAGER_CALLS)
def test_others_are_eager(recorded, name):
    x = table(4, 8)
    y = EAGER_CALLS[name](autofuse.wrap(x))
    assert not autofuse.is_pending(y)
    assert_same(autofuse.unwrap(y), EAGER_CALLS[name](x), None)


@pytest.mark.parametrize("call", [
    lambda x: x.var(-1, correction=8), lambda x: torch.std(x, -1, correction=9.5, keepdim=True),
    lambda x: x[:, :1].std(-1),
])  # fmt: skip
def test_what_eager_warns_of_is_eagers(recorded, call):
    """As often."""
    x = table(4, 8)

    def warned(x):
        with pytest.warns(UserWarning, match="degrees of freedom is <= 0") as told:
            y = call(x)
        return y, [str(one.message) for one in told]

    want, wanted = warned(x)
    got, told = warned(autofuse.wrap(x) * 1.0)
    assert told == wanted and not autofuse.is_pending(got)
    assert_same(autofuse.unwrap(got), want, None)


def test_corrections_of_one_line_are_told_apart(recorded):
    """Those after which elements are left, and the others; by machine code too, where that is."""
    x = table(4, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for c in 3 * [0, 1, 1.0, 2.5, 7, 8, 0.5, -1, 7.5, 9, None]:
            y = torch.var(autofuse.wrap(x) * 1.5, -1, correction=c)
            assert autofuse.is_pending(y) is (c is None or 0 <= c < 8), c
            want = torch.var(x * 1.5, -1, correction=c)
            assert_same(autofuse.unwrap(autofuse.materialize(y)), want, None)


ERRORS = {
    "dim": lambda x: x.sum(2),
    "dim of softmax": lambda x: torch.softmax(x, 5),
    "repeated": lambda x: x.sum((1, 1)),
    "empty": lambda x: x[:, :0].amax(-1),
    "normalized_shape": lambda x: F.layer_norm(x, (7,)),
    "weight": lambda x: F.layer_norm(x, (8,), torch.ones(7), torch.ones(7)),
    "argument": lambda x: x.sum(-1, wrong=True),
    "too many": lambda x: torch.amax(x, -1, True, True, True),
    "norm": lambda x: torch.linalg.norm(x, "fro", -1),
    "dim of norm": lambda x: x.norm(dim=3),
    "out of a method": lambda x: x.norm(2, -1, out=None),
    "too many for a method": lambda x: x.norm(2, -1, False, None, None),
    "normalize": lambda x: F.normalize(x, dim=4),
    "dim of var": lambda x: x.var(2),
    "two ways to say it": lambda x: x.var(-1, True, correction=1),
    "unbiased": lambda x: torch.std(x, -1, unbiased=None),
    "correction": lambda x: torch.std(x, -1, correction="1"),
    "too many for var": lambda x: torch.var(x, -1, True, False, 1),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_eagers(recorded, name):
    x = table(4, 8)
    with pytest.raises((IndexError, RuntimeError, TypeError)) as want:
        ERRORS[name](x * 2.0)
    with pytest.raises(type(want.value)) as got:
        ERRORS[name](autofuse.wrap(x) * 2.0)
    assert str(got.value) == str(want.value)


def test_nothing_is_recorded_on_the_cpu():
    x = table(4, 8)
    y = (autofuse.wrap(x) * 2.0).sum(-1)
    assert not autofuse.is_pending(y)
    assert autofuse.stats().eager_ops["sum", "not in the table"] == 1


def flushes():
    return dict(autofuse.stats().flushes)


def test_what_has_other_rows_is_another_chain(recorded):
    x = table(4, 8)
    y = torch.softmax(autofuse.wrap(x) * 2.0, -1)
    z = autofuse.wrap(x.reshape(8, 4)) * 3.0
    t = torch.softmax(z, -1)
    assert not autofuse.is_pending(y) and autofuse.is_pending(t)
    assert flushes() == {"rows": 1}
    assert_same(autofuse.unwrap(t), torch.softmax(x.reshape(8, 4) * 3.0, -1), None)
    for _ in range(3):  # the same from the trie
        y = torch.softmax(autofuse.wrap(x) * 2.0, -1)
        t = torch.softmax(autofuse.wrap(x.reshape(8, 4)) * 3.0, -1)
        assert_same(autofuse.unwrap(t), torch.softmax(x.reshape(8, 4) * 3.0, -1), None)


def test_numbers_of_rows_meet_what_is_no_row_of_theirs(recorded):
    """[4] along the columns of [4, 4], and a row's number along other columns than its own."""
    x = table(4, 4)
    total = (autofuse.wrap(x) * 2.0).sum(-1)
    y = total + x
    assert flushes() == {"rows": 1}
    assert_same(autofuse.unwrap(y), (x * 2.0).sum(-1) + x, None)
    kept = (autofuse.wrap(x) * 2.0).sum(-1, keepdim=True)
    z = kept * torch.ones(1, 7)
    assert flushes()["rows"] == 2
    assert_same(autofuse.unwrap(z), (x * 2.0).sum(-1, keepdim=True) * torch.ones(1, 7), None)


def test_standardized_as_written_is_one_kernel(emulated):
    """Of a whole tensor, as advantages are; from so many elements on both have as many threads."""
    x, y = table(32, 64), table(32, 64, 1)
    for _ in range(2):
        h = autofuse.wrap(x) - y
        got = (h - h.mean()) / (h.std() + 1e-8)
        got = autofuse.unwrap(autofuse.materialize(got))
    assert len(launched) == 2
    h = (x - y).view(-1).numpy()
    mean, std = (
        bits(row_oracle.reduced(op, h, 0, 1, scheme.across, scheme.vec))
        for op in ("mean", "std") for scheme in [scheme_of(op, 1, h.size, 4, H200)]
    )  # fmt: skip
    assert_same(got, ((x - y) - mean) / (std + 1e-8), None)


@pytest.mark.parametrize(
    ("shape", "grad"), [((131072 + 5,), True), ((2, 3, 43694), False), ((3, 131076), True)]
)
def test_rows_that_several_blocks_share_are_two_kernels(emulated, shape, grad):
    """With what follows from their numbers."""
    x, y = (row(int(np.prod(shape)), seed).view(shape) for seed in (0, 1))
    keepdim, dims = len(shape) > 1, (-2, -1) if len(shape) > 2 else -1
    rows = 1 if len(shape) == 1 else shape[0]
    numbers = ((x - y) * 0.5).view(rows, -1).numpy()
    want = {}
    for op in ("mean", "vector_norm"):
        scheme = scheme_of(op, *numbers.shape, 4, H200)
        assert scheme.blocks > 1
        want[op] = bits([
            row_oracle.reduced(op, r, k * len(r), rows, scheme.across, scheme.vec, 1, scheme.blocks)
            for k, r in enumerate(numbers)
        ])  # fmt: skip
    for _ in range(2):  # the last ones by machine code
        launched.clear()
        before = autofuse.stats().kernels_launched
        with torch.set_grad_enabled(grad):
            h = (autofuse.wrap(x.requires_grad_(grad)) - y) * 0.5
            mean = h.mean(dims, keepdim) + 1.0
            length = None if grad else torch.linalg.vector_norm(h, dim=dims)  # which saves h
            del h
            mean = autofuse.unwrap(mean)
        assert len(launched) == autofuse.stats().kernels_launched - before == 2
        assert_same(mean.detach().view(-1), want["mean"] + 1.0, None)
        assert mean.requires_grad is grad
        if length is not None:
            assert_same(autofuse.unwrap(length), want["vector_norm"], None)


def test_what_follows_from_shared_rows_on_all_is_another_chain(recorded):
    x = torch.randn(2, 131072)
    h = autofuse.wrap(x) * 2.0
    mean = h.mean(-1, keepdim=True)
    more = mean * 2.0 + mean.abs()
    assert not flushes()
    out = h - more  # reads what no block knows before all are done
    assert sum(flushes().values()) == 1
    assert_same(autofuse.unwrap(out), x * 2 - ((x * 2).mean(-1, keepdim=True) * 2
                + (x * 2).mean(-1, keepdim=True).abs()), None)  # fmt: skip
    autofuse.reset_stats()
    rows = autofuse.wrap(x) * 2.0
    again = (rows.mean(-1) * rows.amax(-1)).sum()  # of numbers of rows, which is another row
    assert sum(flushes().values()) == 1
    want = ((x * 2).mean(-1) * (x * 2).amax(-1)).sum()
    assert_same(autofuse.unwrap(again), want, None)
    shared = "rows that several blocks share"
    assert_same(autofuse.unwrap(torch.logsumexp(autofuse.wrap(x) * 2.0, -1)),
                torch.logsumexp(x * 2, -1), None)  # fmt: skip
    assert autofuse.stats().eager_ops["logsumexp", shared] == 1
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        var = (autofuse.wrap(leaf) * 2.0).var(-1)
        assert_same(autofuse.unwrap(var).detach(), (x * 2).var(-1), None)
    assert autofuse.stats().eager_ops["var", shared] == 1
    with torch.no_grad():
        var = (autofuse.wrap(leaf) * 2.0).var(-1)
        assert autofuse.is_pending(var)


LONG = 131072  # elements of a row from which on several blocks share it
REDUCED_TO_NUMBERS = (
    torch.sum, torch.mean, torch.amax, torch.amin, torch.var, torch.std, torch.norm,
    lambda h: h.sum(-1), lambda h: h.mean(-1, keepdim=True), lambda h: h.amax(-1),
    lambda h: torch.logsumexp(h, -1), lambda h: h.var(-1, keepdim=True),
    lambda h: F.mse_loss(h, h * 0.5), lambda h: F.l1_loss(h, h.detach() * 0.5),
    lambda h: F.smooth_l1_loss(h, h + 1.0, reduction="sum"), lambda h: torch.softmax(h, -1),
    lambda h: F.normalize(h, dim=-1), lambda h: h.bfloat16().sum(), lambda h: h.bfloat16().mean(-1),
)  # fmt: skip


def _of_long_rows(seed, grad, wrap):
    """Values of a random program: numbers of long rows, what follows from them, and writes."""
    chosen = random.Random(seed)
    shape = chosen.choice([(LONG,), (2, LONG), (1, LONG + 3), (3, 2, LONG // 2), (LONG // 64, 64)])
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=generator) for _ in range(2))
    leaf, memory = x.requires_grad_(grad), torch.zeros(shape)
    with torch.set_grad_enabled(grad):
        other, written = wrap(y), wrap(memory)
        h = (wrap(leaf * 1.0) - other) * 0.5
        values = [h.sum()]
        for _ in range(12):
            kind, value = chosen.randrange(7), chosen.choice(values)
            if kind == 0:
                h = h * 0.5 + other
            elif kind == 1:
                values.append(h)  # which somebody holds
            elif kind in (2, 3):
                values.append(chosen.choice(REDUCED_TO_NUMBERS)(h))
            elif kind == 4 and (not value.ndim or value.shape in (h.shape, (*h.shape[:-1], 1))):
                values.append(value * 2.0 + 1.0)
                h = h - value if chosen.random() < 0.5 else h
            elif kind == 5 and not grad:
                written.add_(h)
                values.append(written.sum())
            elif kind == 6 and not value.ndim:
                values.append(value * values[0])
        total = sum(value.float().sum() for value in values)
    if grad:
        total.backward()
    return [*(autofuse.unwrap(value).detach() for value in values), memory, leaf.grad]


@pytest.mark.parametrize("recompute", ["free", "inputs"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("AUTOFUSE_TEST_CHAINS", "120")) // 3))
def test_what_is_recorded_of_long_rows_can_be_computed(recorded, seed, recompute, monkeypatch):
    """Every chain of a random program, and of its backward, is planned as kernels."""
    monkeypatch.setattr(autofuse.config, "recompute", recompute)
    for grad in (False, True):
        want = _of_long_rows(seed, grad, lambda x: x)
        for a, b in zip(_of_long_rows(seed, grad, autofuse.wrap), want, strict=True):
            assert_same(a, b, None)


REPEATING = {
    "a bias": lambda x: x + torch.ones(6),
    "one for each of its rows": lambda x: x * torch.ones(5, 1),
    "turned": lambda x: x * torch.ones(6, 5).t(),
    "with gaps": lambda x: x * torch.ones(5, 8)[:, :6],
}


@pytest.mark.parametrize("name", REPEATING)
def test_what_repeats_within_a_row_of_several_dims_is_in_its_kernel(recorded, name):
    """Before or after the reduction."""
    x = table(5, 6)
    change = REPEATING[name]
    for _ in range(3):
        got = change(autofuse.wrap(x)).sum()
        assert autofuse.is_pending(got)
        assert_same(autofuse.unwrap(got), change(x).sum(), None)
        h = autofuse.wrap(x) * 2.0
        total = h.sum()
        got = change(h - total)
        assert autofuse.is_pending(total) and "rows" not in flushes()
        assert_same(autofuse.unwrap(got), change(x * 2.0 - (x * 2.0).sum()), None)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 1), (1, 1), (1,), (), (2, 2, 1, 1), (2, 2)])
@pytest.mark.parametrize("op", [torch.add, torch.mul])
def test_numbers_of_rows_meet_tensors_of_few_elements(emulated, op, sizes, keepdim):
    """Whose last sizes are 1, as those of numbers beside rows are."""
    x, w = table(8, 16).view(2, 2, 2, 4, 4), row(int(np.prod(sizes)), 1).view(sizes)
    if not keepdim and len(sizes) == 4:
        pytest.skip("does not go with [2, 2, 2]")
    for _ in range(2):
        total = (autofuse.wrap(x) * 1.0).sum((3, 4), keepdim=keepdim)
        got = autofuse.unwrap(autofuse.materialize(op(total, w)))
        total = autofuse.unwrap(autofuse.materialize(total))
        assert_same(got, op(total, w), None)
        assert_same(total, (x * 1.0).sum((3, 4), keepdim=keepdim), 1e-5)


def _broadcast_to(draw, shape):
    """Sizes that go with `shape`."""
    sizes = [1 if draw.random() < 0.35 else n for n in shape]
    return sizes[draw.randrange(len(sizes) + 1) :]


def _reduced_at_random(draw, shape, dims, keepdim, wrap):
    """Ops on a tensor of `shape`, a reduction of its last `dims`, ops on that; all that is held."""
    more = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def drawn(sizes):
        return torch.rand(sizes, generator=more) + 1.0

    h = wrap(drawn(shape)) * 1.5
    for _ in range(draw.randrange(3)):
        h = draw.choice([torch.add, torch.mul])(h, wrap(drawn(_broadcast_to(draw, shape))))
    reduce = draw.choice([torch.sum, torch.mean, torch.amax])
    number = reduce(h, tuple(range(-dims, 0)), keepdim=keepdim)
    held = [number]
    for _ in range(draw.randrange(1, 4)):
        if keepdim and draw.random() < 0.5:
            held.append((h - number) * drawn(_broadcast_to(draw, shape)))
        else:
            other = drawn(_broadcast_to(draw, number.shape))
            number = draw.choice([torch.add, torch.mul])(number, other)
    return [*held, number, *([h - number] if number.ndim == 0 else [])]


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_over_several_dims(emulated, seed):
    """Each value is where it belongs, whatever the sizes of what it meets."""
    for program in range(8):
        name = f"{seed} {program}"
        draw = random.Random(name)
        shape = [draw.randrange(1, 5) for _ in range(draw.randrange(2, 6))]
        dims, keepdim = draw.randrange(1, len(shape) + 1), draw.random() < 0.5

        def run(wrap, name=name, shape=shape, dims=dims, keepdim=keepdim):
            return _reduced_at_random(random.Random(name), shape, dims, keepdim, wrap)

        got = [autofuse.unwrap(autofuse.materialize(y)) for y in run(autofuse.wrap)]
        assert_same(got, run(lambda x: x), 1e-5)
    assert launched


WRONG = {
    "more dims than there are": lambda x: x.sum((-3, -2, -1)),
    "one too many": lambda x: x[0].mean((-2, -1)),
    "out of range": lambda x: x.amax((-3, 0)),
    "twice": lambda x: x.var((1, -1)),
    "kept of none": lambda x: x.sum(keepdim=False),
    "mean kept of none": lambda x: x.mean(keepdim=True),
    "unbiased and kept": lambda x: x.var(unbiased=True, keepdim=True),
    "dots": lambda x: x.sum(...),
    "dots by name": lambda x: torch.var(x, dim=...),
    "a matrix of three dims": lambda x: x[None].norm(dim=(0, 1, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_dims_that_eager_refuses(recorded, name):
    """At the same line, with the same words."""
    x = table(4, 8)
    with pytest.raises((IndexError, RuntimeError, TypeError)) as want:
        WRONG[name](x)
    for _ in range(3):
        with pytest.raises(type(want.value)) as got:
            WRONG[name](autofuse.wrap(x) * 2.0)
        assert str(got.value) == str(want.value)


def test_a_warning_of_too_few_elements_is_not_lost(recorded):
    """Where the same call of others is known by then."""

    def call(n, correction):
        return autofuse.materialize((autofuse.wrap(table(n, 8)) * 2.0).var(correction=correction))

    with torch.no_grad():
        for n, correction in [(2, 1)] * 3 + [(5, 20)] * 3:
            call(n, correction)
        with pytest.warns(UserWarning, match="degrees of freedom"):
            call(2, 20)


def test_numbers_of_rows_that_are_as_rows_are(recorded):
    """[4, 2] over the last two of [4, 2, 4, 2] could be taken for a row by its shape."""
    x = table(8, 8).view(4, 2, 4, 2)
    w = autofuse.wrap(x) * 2.0
    total = w.sum((2, 3))
    got = total * autofuse.wrap(x[0, 0, :4, :2] * 1.0) + total
    assert autofuse.is_pending(total)
    want = (x * 2.0).sum((2, 3))
    assert_same(autofuse.unwrap(got), want * x[0, 0, :4, :2] + want, None)
    w = autofuse.wrap(x) * 2.0
    total = w.sum((2, 3), keepdim=True)
    got = w - total
    assert autofuse.is_pending(total)
    assert_same(autofuse.unwrap(got), x * 2.0 - (x * 2.0).sum((2, 3), keepdim=True), None)


def test_rows_of_one_and_of_several_dims_are_two_chains(recorded):
    x = table(4, 8)
    w = autofuse.wrap(x) * 2.0
    a, b = w.sum(-1), w.sum()
    assert flushes() == {"rows": 1}
    assert_same(autofuse.unwrap(a), (x * 2.0).sum(-1), None)
    assert_same(autofuse.unwrap(b), (x * 2.0).sum(), None)


def test_a_number_a_row_is_no_weight_of_columns(recorded):
    """Which its shape says, where there are as many rows."""
    x = table(8, 8)
    w = autofuse.wrap(x)
    total = w.sum(-1)
    got = F.rms_norm(w, (8,), total)
    assert not autofuse.is_pending(total)
    assert_same(autofuse.unwrap(got), F.rms_norm(x, (8,), x.sum(-1)), None)


@pytest.mark.parametrize("call", [
    lambda x: torch.softmax(x, -1, 3), lambda x: torch.softmax(x, -1, third=3),
    lambda x: x.softmax(-1, "a"), lambda x: F.layer_norm(x, (8,), eps="1e-5"),
    lambda x: F.rms_norm(x, (8,), None, "1e-5"), lambda x: F.layer_norm(x, (8.0,)),
    lambda x: F.rms_norm(x, [8.0]),
])  # fmt: skip
def test_calls_that_eager_refuses_are_refused(recorded, call):
    x = table(4, 8)
    with pytest.raises(TypeError) as want:
        call(x)
    with pytest.raises(TypeError) as got:
        call(autofuse.wrap(x) * 2.0)
    assert str(got.value) == str(want.value)


def test_none_is_recorded_if_that_is_switched_off(recorded, monkeypatch):
    monkeypatch.setattr(autofuse.config, "reductions", False)
    x = table(4, 8)
    y = torch.softmax(autofuse.wrap(x) * 2.0, -1)
    assert not autofuse.is_pending(y) and flushes() == {"softmax": 1}
    assert_same(autofuse.unwrap(y), torch.softmax(x * 2.0, -1), None)


def test_views_and_joins_of_reductions_are_in_chains_of_their_own(recorded):
    x, y = table(4, 16), table(4, 16, 1)
    w, v = autofuse.wrap(x), autofuse.wrap(y)

    def half(x, y):
        return torch.softmax((x * 2.0)[:, :8] + y[:, 8:], -1) * 3.0

    def columns(x, y):
        return torch.softmax(x * 2.0, -1).t() + y.t()

    def beside(x, y):
        return torch.cat([torch.softmax(x * 2.0, -1), y + 1.0]) * 2.0

    def after(x, y):
        return torch.softmax(torch.stack([x * 2.0, y]), -1) + 1.0

    for program, reason in ((half, ""), (columns, "t"), (beside, "cat"), (after, "")):
        for _ in range(3):  # what is known of a value in one chain is not used in another
            autofuse.reset_stats()
            got = program(w, v)
            assert flushes() == ({reason: 1} if reason else {}), program
            assert_same(autofuse.unwrap(got), program(x, y), None)
            assert_same(autofuse.unwrap((w * 2.0).t() + 1.0), (x * 2.0).t() + 1.0, None)


def test_reductions_by_other_threads_are_another_chain(recorded):
    x = table(4, 64)
    y = F.layer_norm(autofuse.wrap(x) * 2.0, (64,))
    z = torch.softmax(y + 1.0, -1)
    assert flushes() == {"rows": 1}
    assert_same(autofuse.unwrap(z), torch.softmax(F.layer_norm(x * 2.0, (64,)) + 1.0, -1), None)


def test_few_long_rows_leave_other_processors_idle(recorded, monkeypatch):
    """So what takes long is computed before them, by a kernel of its own, and after them."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)

    def run(m, n, ops, after=0, name="mean"):
        x = table(m, n)
        reduce = lambda y: getattr(torch, name)(y, -1, keepdim=True)  # noqa: E731
        before = flushes().get("narrow rows", 0)
        for _ in range(2):
            y, want = autofuse.wrap(x), x
            for _ in range(ops):
                y, want = y.sigmoid(), want.sigmoid()
            y, want = y - reduce(y), want - reduce(want)
            for _ in range(after):
                y, want = y.sigmoid(), want.sigmoid()
            assert_same(autofuse.unwrap(autofuse.materialize(y)), want, None)
        return flushes().get("narrow rows", 0) - before

    assert run(1, 60_000, 4) == 2
    assert run(1, 60_000, 0, after=4) == 2
    assert run(100, 60_000, 4) == 2
    assert run(1, 600, 4) == 0 and run(1, 60_000, 0) == 0
    assert run(132, 6_000, 4) == 0, "a row for each processor"
    assert run(1, 7_500, 2) == 0 and run(1, 7_500, 2, name="logsumexp") == 2, "one pass more"


def test_a_loop_of_reductions_has_kernels_of_a_few(recorded):
    x = table(4, 8)
    y, want = autofuse.wrap(x), x
    for _ in range(20):
        y, want = torch.softmax(y * 2.0, -1), torch.softmax(want * 2.0, -1)
    assert flushes() == {"rows": 3}
    assert_same(autofuse.unwrap(y), want, None)


def test_where_the_order_is_not_known_they_are_eager():
    assert verified.is_verified("2.11.0+cu130", "13.0", (9, 0))
    for version, toolkit, capability in (
        ("2.14.0", "13.0", (9, 0)), ("2.11.0", "13.0", (8, 0)), ("2.11.0+cu128", "12.8", (9, 0)),
        ("3.0.1+cu140", "14.0", (10, 0)),
    ):  # fmt: skip
        assert not verified.is_verified(version, toolkit, capability)


def test_what_a_comparison_found_is_kept(monkeypatch, tmp_path):
    """Beside the kernels, for this torch and this GPU; of all kinds, or of one."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(verified, "processors_of", lambda device: (84, 1536))
    monkeypatch.setattr(verified, "DiskCache", lambda: DiskCache(tmp_path))
    monkeypatch.setattr(verified, "_compared", {})
    assert verified.refusal(device) == "" and not verified.is_trusted(device)
    with verified.assumed():
        assert verified.is_trusted(device)
    assert verified.keep(device, False, "softmax") == ""
    assert "softmax" in verified.refusal(device, "softmax")
    assert verified.refusal(device, "sum") == "" == verified.refusal(device)
    assert verified.keep(device, True) == "" and verified.is_trusted(device)
    assert verified.refusal(device, "softmax") == ""  # the later comparison was of all
    assert verified.keep(device, False) == "" and not verified.is_trusted(device)
    monkeypatch.setattr(verified, "is_verified", lambda *_: True)  # it says more than the authors
    verified._compared.clear()  # as in another process
    assert "other bits than eager's" in verified.refusal(device, "sum")
    before = verified.key_of(device), verified.key_of(device, "sum")
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert before[0] != before[1]
    assert not {verified.key_of(device), verified.key_of(device, "sum")} & {*before}


def test_where_none_is_recorded_that_is_said(recorded, monkeypatch):
    """Once in a report, with what to do; they pass as ops that nobody records."""
    reason = "a reduction, not compared: do"
    monkeypatch.setattr(verified, "refusal", lambda device, kind="": reason)
    monkeypatch.setattr(verified, "_met", set())
    verified.wanted.pop(CPU)
    verified.meet(CPU)
    w = autofuse.wrap(table(4, 8))

    def step():
        for _ in range(5):
            assert not autofuse.is_pending(torch.softmax(w * 2.0, -1))

    report = autofuse.explain(step)
    (said,) = [text for text in report.advice if reason in text]
    assert said.startswith("reductions ended chains (5 x softmax)")
    monkeypatch.setattr(autofuse.config, "reductions", False)
    assert not any(reason in text for text in autofuse.explain(step).advice)


def test_a_report_says_whether_they_are_fused(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(verified, "refusal", lambda device: "")
    monkeypatch.setattr(verified, "is_trusted", lambda device: True)
    assert diagnose.reductions(device) == "fused"
    monkeypatch.setattr(verified, "is_trusted", lambda device: False)
    assert "once it was compared" in diagnose.reductions(device)
    monkeypatch.setattr(verified, "refusal", lambda device: "not compared")
    assert diagnose.reductions(device) == "eager: not compared"
    monkeypatch.setattr(autofuse.config, "reductions", False)
    assert "AUTOFUSE_REDUCTIONS" in diagnose.reductions(device)


def test_devices_are_met_by_who_records(monkeypatch):
    """And no other thread, nor a wrapped tensor alone, makes anybody look at one."""
    met = []
    monkeypatch.setattr(verified, "meet", met.append)
    forget_all("test")
    w = autofuse.wrap(table(4, 8))
    thread = threading.Thread(target=lambda: autofuse.materialize(w * 2.0))
    assert not met
    thread.start()
    thread.join()
    assert met == [CPU]


def test_a_mode_is_told_of_them_as_by_eager(recorded):
    """And of nothing that looking at the operands takes."""
    seen = []

    class Told(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **kwargs or {})

    def told(x, call):
        seen.clear()
        with Told():
            call(x)
        return list(seen)

    for grad in (False, True):
        x = table(4, 8).requires_grad_(grad)
        for name, call in CALLS.items():
            for state in (None, UNKNOWN):
                w = autofuse.wrap(x)
                if state is not None:
                    w.__dict__["_af"] = state
                assert told(w, call) == told(x, call), name


def test_verify_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify"]) == 2
    assert "no GPU" in capsys.readouterr().out


def test_a_wrong_order_is_found(emulated, monkeypatch):
    """By the comparison, which then says which program differs over which rows."""
    over = [(5, 132, "plain", 0)]
    with torch.no_grad():
        monkeypatch.setattr(verify, "differing", lambda got, want: int(not torch.equal(got, want)))
        rows = table(5, 132, 3)
        want = bits([
            row_oracle.reduced("sum", r, k * 132, 5, scheme_of("sum", 5, 132, 4, H200).across, 4)
            for k, r in enumerate(rows.numpy())
        ])  # fmt: skip
        values = verify.Values(rows, rows, rows[0], rows[0], rows[:, :1], rows, rows)
        monkeypatch.setattr(verify, "make", lambda *_: values)
        programs = {"sum": lambda v: v.x.sum(-1) + 0.0 if type(v.x) is not torch.Tensor else want}
        monkeypatch.setattr(verify, "PROGRAMS", programs)
        assert verify.compare("sum", torch.float32, over, "cpu").wrong == []
        forget_all("test")
        monkeypatch.setattr(row_emit._Reductions, "_across", lambda self, stage, value: value)
        emulated.clear()
        simt.translated.cache_clear()
        (wrong,) = verify.compare("sum", torch.float32, over, "cpu").wrong
        assert wrong.startswith("[5, 132] plain")
    simt.translated.cache_clear()


# --- on a GPU -------------------------------------------------------------------------------------

PROGRAMS = {
    "softmax": lambda x, y, w, b: F.softmax(x * 0.125 + y, -1),
    "log_softmax": lambda x, y, w, b: F.log_softmax(x + y, -1) * 2.0,
    "layer_norm": lambda x, y, w, b: F.relu(F.layer_norm(x, x.shape[-1:], w, b)) + y,
    "rms_norm": lambda x, y, w, b: F.rms_norm(x + y, x.shape[-1:], w, 1e-6),
    "RMSNorm": lambda x, y, w, b: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    ),
    "centred": lambda x, y, w, b: x - x.mean(-1, keepdim=True),
    "numbers": lambda x, y, w, b: (x * y).sum(-1),
    "extrema": lambda x, y, w, b: (x + y).amax(-1, keepdim=True) - (x * y).amin(-1, keepdim=True),
    "lengths": lambda x, y, w, b: (x + y).norm(dim=-1) * 2.0,
    "normalize": lambda x, y, w, b: F.normalize(x * y, dim=-1) * w,
}  # fmt: skip


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_eagers_bits_on_cuda(name, dtype, on, always):
    if not verified.is_trusted(torch.device("cuda", 0)):
        pytest.skip("not verified on this GPU with this torch")
    program = PROGRAMS[name]
    for (m, n), special in itertools.product(
        [(3, 2), (5, 33), (40, 128), (40, 131), (64, 1024), (7, 2050), (5, 5000)], [False, True]
    ):
        x, y, w, b = (
            t.to("cuda") for t in (table(m, n, 0, dtype), table(m, n, 1, dtype),
                                   row(n, 2, dtype), row(n, 3, dtype))
        )  # fmt: skip
        if special:
            x.view(-1)[::7] = torch.inf
            x.view(-1)[::11] = -0.0
            y.view(-1)[:: 5 * n] = torch.nan
        with torch.no_grad():
            autofuse.reset_stats()
            got = program(*map(autofuse.wrap, (x, y, w, b)))
            assert autofuse.is_pending(got)
            got = autofuse.unwrap(autofuse.materialize(got))
            assert autofuse.stats().kernels_launched == 1
            assert_same(got, program(x, y, w, b), None)


@pytest.mark.cuda
@needs_cuda
def test_where_rows_begin_does_not_matter_on_cuda(always):
    for shift, n in itertools.product((1, 2, 3, 4), (64, 131, 1024)):
        x = torch.randn(6 * n + shift, device="cuda")[shift:].view(6, n)
        for program in PROGRAMS.values():
            y, w, b = torch.randn_like(x), torch.randn_like(x[0]), torch.randn_like(x[0])
            with torch.no_grad():
                got = autofuse.unwrap(autofuse.materialize(program(autofuse.wrap(x), y, w, b)))
                assert_same(got, program(x, y, w, b), None)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", verify.DTYPES)
@pytest.mark.parametrize("name", verify.PROGRAMS)
def test_rows_of_all_lengths_beside_all_layouts_on_cuda(name, dtype, on, always):
    over = itertools.product((2, 6), (131, 132, 260, 257), ["plain"], (0, 1, 4))
    outcome = verify.compare(name, dtype, over)
    assert outcome.wrong == [] and outcome.kernels >= 8


def written_elsewhere(w, u):
    v = w * 2.0 + 1.0
    u.sub_(v / (v * v).mean(-1, keepdim=True))


def written_and_held(w, u):
    v = w * 2.0
    norm = (v * v).mean(-1, keepdim=True)
    u.sub_(v / norm)
    return v, norm


def written_in_parts(w, u):
    v = w * 2.0 + 1.0
    u[:, :] = v / v.mean(-1, keepdim=True)


def written_over(w, u):
    u.copy_(w / w.mean(-1, keepdim=True))


def written_and_read(w, u):
    u.sub_((w * 2.0 + u).mean(-1, keepdim=True))


WRITTEN = (written_elsewhere, written_and_held, written_in_parts, written_over, written_and_read)


@pytest.mark.parametrize("program", WRITTEN)
@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_written_by_machine_code(emulated, on, program, wraps, grad):
    """Their kernel stores them elsewhere, and what it has made is copied: no Python runs, but for
    the copy where grad mode is on."""
    w, u = table(4, 96), table(4, 96, 1)
    wrapped, ours = autofuse.wrap(w.clone()), u.clone()
    if wraps:
        ours = autofuse.wrap(ours)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            expected, made = program(w, u), program(wrapped, ours)
        versions = ours._version
        launched.clear()
        called = functions_called(lambda: program(wrapped, ours))
        program(w, u)
    others = {"block", "of", "<genexpr>"}  # of the emulation
    if sys.version_info < (3, 12):  # where methods of plain tensors are Python's to call
        others |= {"call", "_asks_us"}
    assert not on or grad or {*called} <= others
    assert len(launched) == 1 and ours._version == versions + 1 == u._version
    assert_same(u, autofuse.unwrap(ours), rtol=1e-5)
    for one, other in zip(expected or (), made or (), strict=True):
        assert_same(one, autofuse.unwrap(other), rtol=1e-5)
