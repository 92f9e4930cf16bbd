"""Under torch.autocast: chains with the casts that eager makes, and no others.

What eager does on CUDA is asked of tensors without memory, which need no GPU.
"""

import ast
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import autofuse
import cases
from autofuse.ops import autocast
from autofuse.ops import row as rows
from autofuse.record.modes import forget_all
from autofuse.supply import kernels
from support import assert_same

HALF = (torch.float16, torch.bfloat16)
W = autofuse.wrap


@pytest.fixture
def of_cuda(monkeypatch):
    """Chains on the CPU are recorded with the casts of CUDA."""
    for table in (autocast.FLOAT32, autocast.ONE_DTYPE):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    forget_all("test")
    yield
    forget_all("test")


@pytest.fixture
def eager_tier(monkeypatch):
    """Chains run as the ops that they were recorded from."""
    monkeypatch.setattr(autofuse.config, "compile", "background")
    monkeypatch.setattr(autofuse.config, "compile_after", 1 << 30)
    kernels.clear_kernels()
    forget_all("test")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_are_torchs(device):
    key = f"Autocast{device.upper()}"
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    fused = {*rows.PLAIN, *rows.SPELLINGS, *rows.COMPOSITES, *rows.OPS}
    listed = autocast.FLOAT32[device] | autocast.ONE_DTYPE[device] | autocast.COMPOSITES
    assert names & fused == listed & names and len(names & fused) >= 5
    made_of_others = {name for name in listed - names if name.partition("_")[0] not in names}
    assert made_of_others <= {"scalar_div", "square", "addcdiv_scaled", "addcmul_scaled",
                              "rpow_scalar"}  # fmt: skip


def test_the_list_of_gradients_is_that_of_the_rules():
    listed = autocast.FLOAT32["cuda"] | autocast.ONE_DTYPE["cuda"]
    found = set()
    for name, row in rows.OPS.items():
        trees = [tree for rule in row.rules if rule is not None for tree in ast.walk(rule)]
        called = {tree.func.id for tree in trees if isinstance(tree, ast.Call)}
        if name not in listed and called & listed:
            found.add(name)
    assert found == autocast.GRADIENTS["cuda"]


def calls():
    for table in ("FLOAT_CALLS", "PAIR_CALLS", "TRIPLE_CALLS"):
        count = 1 + ["FLOAT_CALLS", "PAIR_CALLS", "TRIPLE_CALLS"].index(table)
        for name, call in getattr(cases, table).items():
            yield name, call, count


def dtype_on_cuda(call, dtypes, lower):
    """The dtype that eager's result has on CUDA; None where the call fails."""
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        operands = [torch.empty(3, 4, dtype=dtype, device="cuda") for dtype in dtypes]
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", lower)
        try:
            return call(*operands).dtype
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        finally:
            torch.set_autocast_enabled("cuda", was[0])
            torch.set_autocast_dtype("cuda", was[1])


@pytest.mark.parametrize("lower", HALF, ids=str)
def test_dtypes_and_values_of_every_spelling_on_cuda(lower, of_cuda, eager_tier):
    """What is recorded has the dtype that eager gives, and the values of operands cast before."""
    other = HALF[1 - HALF.index(lower)]
    compared = cast = 0
    for name, call, count in calls():
        if name in ("rrelu", "prelu"):  # random; eager under autocast
            continue
        for dtypes in ((lower,) * 3, (torch.float32,) * 3, (other,) * 3, (lower, torch.float32) * 2,
                       (torch.float32, lower, lower), (torch.float64, lower, lower)):  # fmt: skip
            want = dtype_on_cuda(call, dtypes[:count], lower)
            if want is None:
                continue
            operands = [torch.rand(3, 4).add(0.5).to(dtype) for dtype in dtypes[:count]]
            before = autofuse.stats().ops_recorded
            with torch.autocast("cpu", lower):
                try:
                    got = call(*map(W, operands))
                    pending = autofuse.is_pending(got)
                    autofuse.materialize(got)
                except RuntimeError:  # the CPU has no kernel for it
                    continue
            if not pending or autofuse.stats().ops_recorded == before:
                continue
            assert got.dtype is want, (name, dtypes[:count])
            values = call(*operands)
            if values.dtype is not want:
                cast += 1
                values = call(*[x.float() if x.dtype in HALF else x for x in operands])
            assert_same(got, values, None if name in cases.ARITHMETIC else 1e-2, name)
            compared += 1
    assert compared > 500 and cast > 50, (compared, cast)


def test_casts_are_steps_of_the_chain(of_cuda):
    x = torch.rand(64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = (W(x) * 2).exp() + 1
        assert y.dtype is torch.float32 and autofuse.is_pending(y)
        z = y.sigmoid().to(torch.bfloat16) * W(x)
    autofuse.materialize(y, z)
    assert autofuse.stats().kernels_launched == 1
    want = (x * 2).float().exp() + 1
    torch.testing.assert_close(autofuse.unwrap(y), want)
    torch.testing.assert_close(autofuse.unwrap(z), want.sigmoid().bfloat16() * x)


@pytest.mark.parametrize("tier", ["kernel", "eager"])
def test_gradients_go_through_the_casts(of_cuda, tier, request):
    if tier == "eager":
        request.getfixturevalue("eager_tier")
    grads = []
    for wrap in (lambda t: t, W):
        x = torch.linspace(0.5, 2, 24).bfloat16().reshape(4, 6).requires_grad_()
        y = torch.linspace(0.5, 2, 6).requires_grad_()
        a, b = wrap(x), wrap(y)
        with torch.autocast("cpu", torch.bfloat16):
            c = a * a
            float_ = (lambda t: t) if wrap is W else torch.Tensor.float
            out = torch.reciprocal(float_(c)) * b + torch.square(float_(c)) - c
        out.sum().backward()
        grads.append([autofuse.unwrap(t.grad) for t in (a, b)])
    assert_same(grads[1], grads[0], None)


def test_writes_are_not_cast(of_cuda, eager_tier):
    x = torch.rand(3, 4).add(0.5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        a = W(x) * 2
        a.exp_()
        b = torch.empty_like(x)
        torch.log(W(x) * 3, out=b)
        c = W(x.clone())
        c.pow_(W(x) * 2)
    want = (x * 2).exp_(), torch.log(x * 3, out=torch.empty_like(x)), x.clone().pow_(x * 2)
    for got, theirs in zip((a, b, c), want, strict=True):
        assert_same(got, theirs, None)


def test_a_chain_keeps_the_mode_of_its_recording(of_cuda, eager_tier):
    """Before, inside, switched off inside, inside again, after: also where others compute it."""
    x = torch.rand(3, 4).bfloat16()

    def run(x, exp):
        before = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            inside = exp(before + 1) * 2
            with torch.autocast("cpu", enabled=False):
                off = torch.exp(before) + 1
            again = exp(off)
            with torch.autocast("cpu", torch.float16):
                nested = exp(again.to(torch.float16))
        after = torch.exp(off)
        return [before, inside, off, again, nested, after]

    want = run(x, lambda t: torch.exp(t.float()))
    assert_same(run(W(x), torch.exp), want, None)
    assert_same(autofuse.fuse(run)(x, torch.exp), want, None)
    with torch.autocast("cpu", torch.bfloat16):
        pending = torch.exp(W(x) * 2) * F.mse_loss(W(x), x + 1, reduction="none")
        loss = F.mse_loss(x.float(), (x + 1).float(), reduction="none")
        thread = threading.Thread(target=lambda: autofuse.materialize(pending))
        thread.start()
        thread.join()
    assert_same(pending, torch.exp((x * 2).float()) * loss, None)


def test_a_block_whose_chain_fails_at_its_end_is_left():
    x = torch.randn(64)
    with pytest.raises(autofuse.ColdKernelError), autofuse.no_compile():
        with torch.autocast("cpu", torch.bfloat16):
            y = (W(x) * 2 + 1).abs()
    assert not torch.is_autocast_enabled("cpu")
    assert_same(y, (x * 2 + 1).abs(), None)
    assert autofuse.is_pending(W(x) * 2)


def test_losses_on_the_cpu():
    """The only ops of the table that autocast casts there."""
    x, y = torch.rand(2, 3, 4).bfloat16()
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        results = []
        for wrap in (lambda t: t, W):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(loss(wrap(x) * 2, wrap(y), reduction="none"))
        assert results[0].dtype is torch.float32
        assert_same(results[1], results[0], None)
