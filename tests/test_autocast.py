"""Under torch.autocast: chains with the casts that eager makes, and no others.

What eager does on CUDA is asked of tensors without memory, which need no GPU.
"""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from reduced import REDUCED
from test_reductions import recorded, recording  # noqa: F401
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autofuse
import cases
from autofuse.chain import verified
from autofuse.ops import autocast
from autofuse.ops import row as rows
from autofuse.torch_private import AUTOCASTS, ExcludedKey
from support import DEVICES, assert_same, assert_same_as_eager, cuda_autocast_on_cpu, needs_cuda

HALF = (torch.float16, torch.bfloat16)
W = autofuse.wrap


@pytest.fixture
def of_cuda():
    """Autocast on the CPU has the casts of CUDA."""
    with cuda_autocast_on_cpu():
        yield


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_are_torchs(device):
    key = f"Autocast{device.upper()}"
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    fused = {*rows.PLAIN, *rows.SPELLINGS, *rows.COMPOSITES, *rows.OPS, "logsumexp"}
    listed = autocast.FLOAT32[device] | autocast.ONE_DTYPE[device] | autocast.COMPOSITES
    assert names & fused == listed & names and len(names & fused) >= 5
    made_of_others = {name for name in listed - names if name.partition("_")[0] not in names}
    assert made_of_others <= {"scalar_div", "square", "addcdiv_scaled", "addcmul_scaled",
                              "rpow_scalar"}  # fmt: skip


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


@pytest.mark.usefixtures("nothing_on_disk")
def test_what_is_pending_is_cut_by_the_next_op_alone():
    """A block in which nothing of ours is called, or in which nothing changes, cuts no chain."""
    x = torch.randn(64)
    with autofuse.no_compile():
        y = W(x) * 2 + 1
        for device in ("cpu", "cuda"):
            with torch.autocast(device, torch.bfloat16, enabled=False):
                y = y * 3
        with torch.autocast("cpu", torch.bfloat16):
            pass
        y = y.abs()
    autofuse.materialize(y)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and "autocast" not in stats.flushes
    with pytest.raises(autofuse.ColdKernelError), autofuse.no_compile():
        z = W(x).abs() * x - 1
        with torch.autocast("cpu", torch.bfloat16):
            z.abs()
    assert not torch.is_autocast_enabled("cpu")
    assert_same([y, z], [((x * 2 + 1) * 3 * 3).abs(), x.abs() * x - 1], None)
    with torch.autocast("cpu", torch.bfloat16):
        z = (W(x) * 2 + 1).abs()
    z = z * 2
    assert autofuse.stats().flushes["autocast"] == 1
    assert_same(z, (x * 2 + 1).abs() * 2, None)


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


# --- whole programs: with autocast of the CPU, with that of CUDA on the CPU, on a GPU -------------


@pytest.fixture(params=["cpu", "as on cuda", *DEVICES[1:]])
def device(request, monkeypatch):
    """Where programs run; on the CPU as eager ops, so that every bit counts."""
    if request.param == "cuda":
        monkeypatch.setattr(autofuse.config, "always_fuse", True)
        return "cuda"
    request.getfixturevalue("eager_tier")
    if request.param == "as on cuda":
        request.getfixturevalue("of_cuda")
    return "cpu"


def mixed(x, y):
    """Ops of every list, over both operands."""
    z = x * 2 + y
    return z.exp() + F.mse_loss(z, x, reduction="none"), (x + 3) ** 2, torch.rsqrt(z.abs() + 1)


def raw(x, y):
    """Switched on without a block."""
    was = torch.is_autocast_enabled(x.device.type)
    before = x + 1
    torch.set_autocast_enabled(x.device.type, True)
    try:
        inside = mixed(before, y)
        torch.set_autocast_enabled(x.device.type, False)
        off = mixed(before, y)
    finally:
        torch.set_autocast_enabled(x.device.type, was)
    return [*inside, *off, before.exp()]


def decorated(x, y):
    on = torch.autocast(x.device.type, torch.bfloat16)(mixed)
    off = torch.autocast(x.device.type, enabled=False)(mixed)
    return [*on(x, y), *off(x, y), *on(*off(x, y)[:2])]


def generated(x, y):
    """Blocks that end when somebody asks for the next value, not in order."""

    def steps(dtype, enabled):
        with torch.autocast(x.device.type, dtype, enabled=enabled):
            yield mixed(x, y)
            yield mixed(y, x)
        yield mixed(x * 0.5, y)

    found = []
    first, second = steps(torch.bfloat16, True), steps(torch.float16, False)
    for source in (first, second, first, second, first, first, second):
        found += next(source, ())
        found.append((x * 0.25).exp())
    torch.set_autocast_enabled(x.device.type, False)  # left on, as in any program
    return found


def other_device(x, y):
    """Autocast of a device type says nothing to chains on another."""
    other = "cuda" if x.device.type == "cpu" else "cpu"
    was = torch.is_autocast_enabled(other)
    before = x + 1
    torch.set_autocast_enabled(other, True)
    try:
        inside = mixed(before, y)
        with torch.autocast(x.device.type, torch.bfloat16):
            both = mixed(before, y)
    finally:
        torch.set_autocast_enabled(other, was)
    return [*inside, *both]


def below(x, y):
    """Switched off where nobody is told: by a guard of torch._C."""
    with torch.autocast(x.device.type, torch.bfloat16):
        inside = mixed(x, y)
        with ExcludedKey(AUTOCASTS[x.device.type == "cuda"], True):
            off = mixed(x, y)
        return [*inside, *off, *mixed(y, x)]


def uncached(x, y):
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return [*mixed(x, y), torch.mm(x.float(), y.float().t()).exp()]


def operands(x, y):
    """0-d tensors, Python numbers, float64 and integers beside halves."""
    zero_d, double = torch.tensor(0.5, dtype=x.dtype), y.double()
    whole = torch.arange(6)
    if x.is_cuda:
        double, whole = double.cuda(), whole.cuda()
    with torch.autocast(x.device.type, torch.bfloat16):
        return [
            2 / (x + 3), 2**x, x**2.5, (x + 1).pow(double), x * double, x.exp() * zero_d,
            (x + 2) ** whole, torch.atan2(double, x.double()), (x + 3).log() + double.log(),
            torch.addcmul(x.float(), y.float(), y.float(), value=0.5), 1 / (x + 2).sqrt(),
            torch.where(x > y, x, 0.5).exp(), (x > 0) * y.exp(), x.exp().to(x.dtype) + x.sigmoid(),
        ]  # fmt: skip


def writes(x, y):
    """In place and with `out=`, of chains that began before the block and in it."""
    a, b, c, d = (t.clone() for t in (x, y, x, y))
    before = x * 2 + 3
    with torch.autocast(x.device.type, torch.bfloat16):
        a.pow_(before)
        before += 1
        before.exp_()
        b.mul_((y + 3).log())
        inside = x + 3
        inside.log_()
        torch.exp(inside, out=c)
        late = y * 0.5
    d.copy_(late)
    late.exp_()
    with torch.autocast(x.device.type, torch.bfloat16):
        d += late.exp()
    return [a, b, c, d, before, inside, late]


def fused_inside(x, y):
    inner = autofuse.fuse(lambda a, b: mixed(a, b)[0])
    with torch.autocast(x.device.type, torch.bfloat16):
        inside = inner(x, y)
        with torch.autocast(x.device.type, enabled=False):
            off = inner(x, y)
    return [inside, off, inner(x, y)]


def threaded(x, y):
    """A thread that begins inside begins without."""
    found = []
    with torch.autocast(x.device.type, torch.bfloat16):
        inside = mixed(x, y)
        thread = threading.Thread(target=lambda: found.extend(mixed(x, y)))
        thread.start()
        thread.join()
        return [*inside, *found, *mixed(y, x)]


PROGRAMS = [raw, decorated, generated, other_device, below, uncached, operands, writes,
            fused_inside, threaded]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program, dtype, device):
    x, y = (torch.rand(2, 4, 6, device=device) - 0.2).to(dtype)
    want = program(x, y)
    for _ in range(2):
        with torch.no_grad():
            assert_same_as_eager(program, x, y)
        assert_same(autofuse.fuse(program)(x.clone(), y.clone()), want, None)
    assert autofuse.stats().ops_recorded > 10


@pytest.mark.cuda
@needs_cuda
def test_hooks_in_the_engines_thread_are_under_autocast_where_backward_is(monkeypatch):
    """One thread of torch's for all backwards of a GPU, under the modes of whoever calls them."""
    monkeypatch.setattr(autofuse.config, "backward_thread", "engine")
    found = []

    def hook(gradient):
        found.append((threading.get_ident(), (W(gradient.bfloat16()) * 2).exp().dtype))

    x = torch.ones(8, device="cuda", requires_grad=True)
    for enabled in (True, False, True):
        y = x * 2
        y.register_hook(hook)
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            y.sum().backward()
    assert [dtype for _, dtype in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert threading.get_ident() not in {ident for ident, _ in found}


# whose derivatives call what autocast casts on CUDA
CAST_GRADIENTS = {
    **{name: getattr(torch, name) for name in "sinh cosh asinh acosh erf erfc tan rsqrt".split()},
    **{name: lambda x, name=name: getattr(torch, name)(x * 0.25)
       for name in ("asin", "acos", "atanh", "erfinv")},
    "pow_3": lambda x: x**3, "pow_4": lambda x: x**4, "pow_2.5": lambda x: x**2.5,
    "pow": lambda x: x**x, "rpow": lambda x: 1.5**x, "reciprocal": torch.reciprocal,
    "sqrt": lambda x: x**0.5, "entr": torch.special.entr,
    "logaddexp": lambda x: torch.logaddexp(x, x * 0.5),
    "logaddexp2": lambda x: torch.logaddexp2(x, x * 0.5),
    "dead values, made again": lambda x: torch.sinh(torch.exp(x * 0.5)) * x,
}  # fmt: skip


@pytest.mark.parametrize("call", [torch.square, lambda x: x**2, lambda x: x.pow(2.0) + 1])
def test_what_backward_casts_does_not_overflow(call, of_cuda, monkeypatch):
    """Eager takes the derivative of a square by `pow` too, which autocast casts, then by 2 * x."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)

    def gradient(wrap, region):
        x = torch.tensor([60000.0, -40000.0, 3.0], dtype=torch.float16, requires_grad=True)
        y = call(wrap(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            return torch.autograd.grad(y, x, torch.full_like(x, 1e-3))[0]

    for region in (True, False):
        want = gradient(lambda t: t, region)
        assert bool(want.isfinite().all()) is region
        assert_same(gradient(W, region), want, None)


@pytest.mark.parametrize("tier", ["kernel", "eager"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_backward_under_autocast_casts_as_eagers_does(dtype, tier, of_cuda, monkeypatch, request):
    """Of chains from outside, whose operands are halves, and from inside, where they are cast."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    if tier == "eager":
        request.getfixturevalue("eager_tier")

    def gradient(wrap, call, inside, region):
        x = torch.linspace(1.1, 3, 24).to(dtype).reshape(4, 6).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=inside):
            y = call(wrap(x) * 1)
        seed = torch.linspace(0.5, 2, 24).to(y.dtype).reshape(4, 6)
        with torch.autocast("cpu", dtype, enabled=region):
            return torch.autograd.grad(y, x, seed, retain_graph=True)[0]

    cast = 0
    for name, call in CAST_GRADIENTS.items():
        for inside in (False, True):
            plain, under = (gradient(lambda t: t, call, inside, on) for on in (False, True))
            cast += not torch.equal(plain, under)
            # by the value of rsqrt, which the CPU's kernel rounds otherwise
            rtol = 1e-2 if (name, tier) == ("rsqrt", "kernel") else None
            assert_same(gradient(W, call, inside, True), under, rtol, f"{name}, {inside}")
            rtol = None if tier == "eager" else 1e-2
            assert_same(gradient(W, call, inside, False), plain, rtol, f"{name}, {inside}")
    assert cast >= 10
    stats = autofuse.stats()
    assert stats.ops_recorded > 2 * len(CAST_GRADIENTS)
    assert tier == "eager" or stats.kernels_launched > 2 * len(CAST_GRADIENTS)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in REDUCED if name != "cross_entropy"])
def test_reductions_in_blocks_within_blocks(recorded, of_cuda, on, always, name, dtype):  # noqa: F811
    """Of values from outside and from blocks of other dtypes, or of none, that are pending."""

    def run(wrap):
        xs = [torch.linspace(0.1, 2, 32).view(4, 8), torch.linspace(1, 0.5, 32).view(4, 8)]
        xs = [x.to(dtype).requires_grad_() for x in (*xs, xs[0][0], xs[1][0])]
        x, y, w, b = (wrap(x) for x in xs)
        call = REDUCED[name]
        before = x * 1.5
        with torch.autocast("cpu", torch.bfloat16):
            outer = call(before, y, w, b)
            with torch.autocast("cpu", torch.float16):
                inner = call(before + x, y, w, b)
                with torch.autocast("cpu", enabled=False):
                    off = call(before * 0.5, y, w, b)
                mixed = (outer.float() + inner).sum() + off.sum()
            again = call(x - 0.25, y, w, b)
        after = call(before, y, w, b) * again.to(dtype)
        found = [outer, inner, off, mixed, again, after]
        total = sum(one.float().sum() for one in found)
        needs = [x for x in xs[: 2 + 2 * ("norm" in name)]]
        with torch.autocast("cpu", torch.bfloat16):
            found += torch.autograd.grad(total, needs, allow_unused=True)
        return [one if one is None else autofuse.unwrap(one).detach() for one in found]

    want = run(lambda t: t)
    for _ in range(2):
        assert_same(run(W), want, None)
    assert autofuse.stats().ops_recorded > 16


# --- what is not recorded: the casts of weights, and who keeps them ------------------------------


class Layers(nn.Module):
    """Every kind of product that autocast casts, with chains between; x: [2, 4, 6]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.square = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6, 6))
        self.kernel = nn.Parameter(torch.randn(2, 1, 3, 3))
        self.batch = nn.Parameter(torch.randn(2, 6, 7))

    def forward(self, x):
        y = x * 2 + x
        a = F.linear(y, self.w).relu() * 0.5
        b = F.linear(y - 1, self.w) + a  # cast once in a block
        c = (torch.bmm(y, self.batch) * 2).relu()
        d = F.conv2d(y[:, None] + 1, self.kernel, padding=1) - 1
        e = torch.einsum("bij,jk->bik", y * 0.5, self.square) + y
        q = torch.mm(e[0] * 2, self.square).relu() @ self.square
        f = F.scaled_dot_product_attention(e * 0.5, e + 1, e) - e
        return [b * 2, c - 1, d.relu(), f * 0.5, q + 1]


SHAPES = [(5, 6), (6, 6), (2, 1, 3, 3), (2, 6, 7)]


def copies(step):
    """What `step` returns, and how many casts there were of tensors of these shapes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as trace:
        result = step()
    cast = [tuple(e.input_shapes[0]) for e in trace.events() if e.name == "aten::_to_copy"]
    return result, [cast.count(shape) for shape in SHAPES]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_cast_as_often_as_in_eager(device, cached):
    """Once in a block, nested ones among it, and again in the next; bits of gradients too."""

    def steps(model, wrap):
        x = wrap(torch.linspace(-1, 1, 48, device=device).reshape(2, 4, 6))
        found = []
        for _ in range(2):
            with torch.autocast(device, torch.bfloat16, cache_enabled=cached):
                outs = model(x)
                with torch.autocast(device, torch.bfloat16, cache_enabled=cached):
                    outs += model(x * 2)
                with torch.autocast(device, enabled=False):
                    outs += [x.exp().relu()]
                with torch.no_grad():
                    outs += model(x)
            loss = sum(out.float().square().sum() for out in outs)
            found += [autofuse.unwrap(out).detach() for out in outs[:5]]
            found += torch.autograd.grad(loss, list(model.parameters()))
        return found

    plain = Layers().to(device)
    want, counts = copies(lambda: steps(plain, lambda t: t))
    assert min(counts) > 0 and (counts[0] == 4) is cached  # two blocks, forward and backward
    for model, wrap in ((Layers(), W), (autofuse.fuse(Layers()), lambda t: t)):
        model.to(device)
        for _ in range(2):
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            got, ours = copies(lambda model=model, wrap=wrap: steps(model, wrap))
            assert ours == counts
            assert_same(got, want, None)
            del got
            if device == "cuda":
                assert torch.cuda.memory_allocated() <= before
    assert autofuse.stats().ops_recorded > 20


@pytest.mark.parametrize("cast", [{"cast_inputs": torch.float32}, {}], ids=["cast", "as they are"])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_functions_with_casts_of_their_own(device, enabled, cast):
    """torch.amp.custom_fwd may cast inputs, and then switches autocast off; custom_bwd follows."""
    seen = []

    class Scaled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, **cast)
        def forward(ctx, x, w):
            seen.append((x.dtype, torch.is_autocast_enabled(device)))
            ctx.save_for_backward(x, w)
            return x * 2 + w

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            seen.append((gradient.dtype, torch.is_autocast_enabled(device)))
            return (gradient * 2 + x * 0).to(x.dtype), (gradient * w.sign() * 0 + gradient).float()

    def step(x, w):
        x, w = x.clone(), w.clone()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            y = Scaled.apply(x.bfloat16() * 2, w + 1) * 3
            z = y.to(torch.bfloat16) + 1
        return [y, z, *torch.autograd.grad((y * z).sum(), [x, w])]

    x, w = torch.linspace(-1, 1, 12, device=device), torch.linspace(0, 2, 12, device=device)
    x.requires_grad_(), w.requires_grad_()
    want = step(x, w)
    for run in (lambda: step(W(x), W(w)), lambda: autofuse.fuse(step)(x, w)):
        before = list(seen[:2])
        seen.clear()
        assert_same(run(), want, None)
        assert seen == before


@pytest.mark.parametrize("device", DEVICES)
def test_a_grad_scaler_does_what_it_does_in_eager(device, monkeypatch):
    """Scales, steps and states: also where gradients overflow, and of a parameter without one."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    def train(fuse, wrap):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 5, device=device))
        b, unused = (nn.Parameter(torch.zeros(5, device=device)) for _ in range(2))
        optimizer = torch.optim.SGD([w, b, unused], 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
        found = []

        def loss_of(x, factor):
            y = (x @ w + b).relu() * 2 - 1
            return (y.float() * y.float() * factor + 1).mean()

        step = fuse(loss_of)
        for k in range(6):
            x = wrap(torch.linspace(-1, 1, 24, device=device).reshape(4, 6) + k / 8)
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                loss = step(x, float("inf") if k == 3 else 1.0)
            scaled = scaler.scale(loss)
            assert autofuse.is_pending(scaled) is (wrap is W)  # as any other product
            scaled.backward()
            if k != 4:  # otherwise `step` does it
                scaler.unscale_(optimizer)
                found += [p.grad.clone() for p in (w, b)]
            if k != 3:
                nn.utils.clip_grad_norm_([w, b], 1.0)
            scaler.step(optimizer)
            scaler.update()
            found += [w.detach().clone(), b.detach().clone(), scaler.get_scale()]
            found += [scaler._get_growth_tracker(), autofuse.unwrap(loss).detach()]
        assert unused.grad is None
        return found

    same = lambda x: x  # noqa: E731
    want = train(same, same)
    assert [x for x in want if isinstance(x, float)] == [256, 512, 512, 256, 256, 512]
    for fuse, wrap in ((same, W), (autofuse.fuse, same)):
        got = train(fuse, wrap)
        for ours, theirs in zip(got, want, strict=True):
            assert_same(ours, theirs, None)


REFUSED = {
    "float32": lambda x, block: block("cpu", torch.float32),
    "float64": lambda x, block: block("cpu", torch.float64),
    "int32": lambda x, block: block("cpu", torch.int32),
    "no dtype": lambda x, block: block("cpu", "bfloat16"),
    "no device": lambda x, block: block("nothing", torch.bfloat16),
    "no string": lambda x, block: block(torch.device("cpu"), torch.bfloat16),
    "unsafe": lambda x, block: F.binary_cross_entropy(block("cpu", torch.bfloat16), x),
    "two dtypes": lambda x, block: torch.mm(block("cpu", torch.bfloat16).float(), x.double().t()),
    "inside": lambda x, block: block("cpu", torch.bfloat16)["nothing"],
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_autocast_refuses_is_said_and_done_as_in_eager(call, eager_tier):
    """Dtypes that it does not know, of which it warns, doing nothing; errors in its block."""

    def run(wrap):
        x = wrap(torch.rand(3, 4))
        before = x * 2.0

        def block(*options):
            with torch.autocast(*options):
                return ((before + 1.0) * 0.25).abs() * torch.mm(x, x.t()).sum()

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                result = call(x * 0.5, block)
            except Exception as error:
                result = type(error).__name__, str(error)
        assert not torch.is_autocast_enabled("cpu")
        found = [result, before - 1.0, (x * 2).exp().dtype]
        return [str(w.message) for w in said], [autofuse.unwrap(t) for t in found if t is not None]

    torch.manual_seed(0)
    want = run(lambda t: t)
    assert want[0] or isinstance(want[1][0], tuple)
    torch.manual_seed(0)
    got = run(W)
    assert got[0] == want[0]
    assert_same(got[1], want[1], None)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_of_another_device_begins_no_other_chain(enabled, monkeypatch):
    """As whenever a checkpoint runs again: it enters the modes of its first run."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = W(torch.ones(4))
    y = x * 2.0
    with torch.autocast("cuda", enabled=enabled), torch.autocast("cpu", enabled=False):
        y = y + 1.0
    assert autofuse.is_pending(y) and (y * y).tolist() == [9.0] * 4
    assert autofuse.stats().kernels_launched == 1


# --- what stands around the products of a model in bfloat16 ---------------------------------------


def rms_norm(x, weight):
    """As many models write it: in float32, and back."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


def typical(x, norm, up, gate, down, bias, linear):
    """A block with RMSNorm and SwiGLU in float32, and one with a bias and GELU, and residuals."""
    h = rms_norm(x, norm)
    gated, y = linear(h, gate), linear(h, up)
    gated = gated.to(torch.float32)
    y = gated * torch.sigmoid(gated) * y.to(dtype=torch.float32)
    x = x + linear(y.to(x), down)
    y = F.gelu(linear(x, up) + bias, approximate="tanh")
    return x + linear(y, down) * 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_there_is_one_kernel_between_two_products(mode, grad, device, monkeypatch):
    """But for a norm where no reduction is recorded; backward reads its scale, of another shape."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    torch.manual_seed(0)
    shapes = [(4, 8), (8,), (16, 8), (16, 8), (8, 16), (16,)]
    given = [torch.rand(shape, device=device) - 0.25 for shape in shapes]
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16

    def run(wrap):
        xs = [t.to(dtype).requires_grad_(grad) for t in given]
        kernels = []

        def linear(x, w):
            y = F.linear(x, w)
            kernels.append(autofuse.stats().kernels_launched)
            return y

        autofuse.reset_stats()
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            result = typical(wrap(xs[0]), *xs[1:], linear)
        autofuse.materialize(result)
        kernels.append(autofuse.stats().kernels_launched)
        gradients = torch.autograd.grad(result.float().sum(), xs) if grad else ()
        return [autofuse.unwrap(t).detach() for t in (result, *gradients)], kernels

    want, _ = run(lambda t: t)
    for _ in range(2):
        got, kernels = run(autofuse.wrap)
        assert_same(got, want, 5e-2)
        between = [b - a for a, b in zip(kernels, kernels[1:], strict=False)]
        norm = 1 if device == "cuda" and verified.wanted else 2 + grad
        assert kernels[0] == norm and between == [0, 1, 1, 1, 1], kernels
