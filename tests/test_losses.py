"""Losses, and other reductions that torch makes of several ops: one step of a chain, one kernel.

What their steps give is compared with eager's elsewhere, each by itself; here, that a reduction is
made of them. Without a GPU kernels run thread by thread, as in test_reductions.py.
"""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_norms import hung, trained  # noqa: F401
from test_reductions import emulated, launched, recorded, recording, table  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

import autofuse
from autofuse.ops import losses
from autofuse.ops.reductions import Over, components_of
from autofuse.record import policy
from support import assert_same, cuda_autocast_on_cpu, outcome

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 40), (131,), (2, 9, 7), (1, 2), (4, 600))
WIDTHS = {"smooth_l1_loss": {"beta": 0.5}, "huber_loss": {"delta": 0.75}}


def written_out(name, x, y, how):
    """A loss as the ops that torch makes of it."""
    if name == losses.LOGITS:
        each = (1 - y) * x - F.logsigmoid(x)
    else:
        each = called(name, x, y, "none")
    return getattr(each, how)()


def called(name, x, y, how):
    return getattr(F, name)(x, y, reduction=how, **WIDTHS.get(name, {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", losses.REDUCED)
@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_is_one_kernel_of_its_steps(emulated, name, how, dtype):  # noqa: F811
    for shape in SHAPES:
        n = torch.Size(shape).numel()
        x, y = table(1, n, 1, dtype).view(shape), table(1, n, 2, dtype).sigmoid().view(shape)
        before = lambda x: x * 1.5  # noqa: E731
        found = []
        for make in (lambda x: called(name, x, y, how), lambda x: written_out(name, x, y, how)):
            launched.clear()
            loss = make(before(autofuse.wrap(x))) + 0.25
            found.append(autofuse.unwrap(autofuse.materialize(loss)))
            assert len(launched) == 1, (shape, launched)
        assert found[0].shape == () and found[0].dtype is dtype
        assert_same(found[0], found[1], None)
        want = called(name, before(x), y, how) + 0.25
        torch.testing.assert_close(found[0], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_logsumexp_is_one_kernel_of_its_steps(emulated, dims, keepdim, special):  # noqa: F811
    """Of rows of infinities, too, and with one step after it that has the rows' shape."""
    x = table(6, 35, 3).view(2, 3, 35) * 4.0
    if special:
        x[0, 1], x[1, 0, 3], x[1, 1, 4] = -torch.inf, torch.inf, torch.nan
        x[1, 2, ::2] = -torch.inf
    named = tuple(range(-dims, 0)) if dims > 1 else -1

    def steps(x):
        most = x.amax(named, keepdim=True)
        most = torch.where(most.abs() == torch.inf, 0.0, most)
        found = (x - most).exp().sum(named, keepdim=True).log() + most
        return found if keepdim else found.squeeze(named)

    found = []
    for make in (lambda x: torch.logsumexp(x, named, keepdim), steps):
        launched.clear()
        h = autofuse.wrap(x) * 0.5
        total = make(h)
        rest = h - total if keepdim else total * 2.0
        found.append([autofuse.unwrap(autofuse.materialize(one)) for one in (total, rest)])
        if make is not steps:
            assert len(launched) == 1, launched
    assert_same(*found, None)
    assert_same(found[0][0], torch.logsumexp(x * 0.5, named, keepdim), 1e-5)


def test_a_loss_alone_is_worth_a_kernel(emulated, monkeypatch):  # noqa: F811
    """For eager's has two, that of a logsumexp nine."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 10.1)
    monkeypatch.setitem(policy._OP_US, "cpu", 6.1)
    x, y = table(4, 64), table(4, 64, 1)
    for call in (F.mse_loss, lambda x, y: torch.logsumexp(x, -1), F.l1_loss):
        launched.clear()
        for _ in range(5):
            autofuse.materialize(call(autofuse.wrap(x), y))
        assert len(launched) == 5
    launched.clear()
    autofuse.materialize(autofuse.wrap(x).sum())
    assert not launched


# --- gradients ------------------------------------------------------------------------------------


def _rounded(dtype):
    return lambda value: value.to(dtype).float()


def gradients(name, x, y, g, how):
    """Of x and y, as CUDA's kernels compute them: in float32, rounded to the dtype by each op."""
    rnd, n = _rounded(x.dtype), x.numel() if how == "mean" else 1
    x, y, g = x.float(), y.float(), g.float()
    if name == losses.LOGITS:
        first = rnd(rnd(rnd(torch.sigmoid(x)) - y).mul(g))
        second = rnd(x * -g)
        return [rnd(d / n) if how == "mean" else d for d in (first, second)]
    factor = rnd(torch.tensor((2.0 if name == "mse_loss" else 1.0) / n))
    (width,) = WIDTHS.get(name, {"": 1.0}).values()
    width = rnd(torch.tensor(width))

    def one(x, y):
        d = rnd(x - y)
        if name == "mse_loss":
            return rnd(rnd(factor * d) * g)
        inner, outer = rnd(rnd(factor * d) * g), rnd(factor * g)
        if name == "huber_loss":
            outer = rnd(outer * width)
        else:
            inner = rnd(inner / width)
        return torch.where(d < -width, -outer, torch.where(d > width, outer, inner))

    return [one(x, y), one(y, x)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", losses.REDUCED)
@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients_are_steps_of_one_kernel(hung, on, name, how, dtype):  # noqa: F811
    """Which has no rows: a CPU's."""
    x, y, z = (table(3, 44, k, dtype) for k in range(3))
    leaves = [one.clone().requires_grad_() for one in (x, z)]
    a, b = map(autofuse.wrap, leaves)
    loss = autofuse.materialize(called(name, a * y, b, how))
    assert loss.grad_fn.name() == called(name, leaves[0] * y, leaves[1], how).grad_fn.name()
    g = torch.tensor(0.8125, dtype=dtype)
    autofuse.reset_stats()
    got = torch.autograd.grad(autofuse.unwrap(loss), leaves, g)
    assert (autofuse.stats().kernels_launched, autofuse.stats().replays) == (1, 0)
    first, second = gradients(name, x * y, z, g, how)
    if name == losses.LOGITS:  # whose sigmoid the CPU rounds otherwise
        rtol = 1e-6 if dtype is torch.float32 else 2e-2
        want = [first.to(dtype) * y, second.to(dtype)]
        torch.testing.assert_close(list(got), want, rtol=rtol, atol=1e-4)
    else:
        assert_same(list(got), [first.to(dtype) * y, second.to(dtype)], None)


def test_gradients_of_a_logsumexp_are_steps_of_one_kernel(hung, on):  # noqa: F811
    x, y = table(3, 44), table(3, 44, 1)
    for dims in (-1, (0, 1)):
        leaf = x.clone().requires_grad_()
        out = torch.logsumexp(autofuse.wrap(leaf) * y, dims)
        out = autofuse.unwrap(autofuse.materialize(out))
        autofuse.reset_stats()
        (got,) = torch.autograd.grad(out, leaf, torch.full_like(out, 0.5))
        assert (autofuse.stats().kernels_launched, autofuse.stats().replays) == (1, 0)
        want = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(
            torch.logsumexp(want * y, dims), want, torch.full_like(out, 0.5)
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# --- what stays eager, and that it fails as eager does --------------------------------------------

ONE, OTHER = table(4, 8), table(4, 8, 1)
ODD = {
    "other shapes": lambda x: F.mse_loss(x, OTHER[:1]),
    "one column": lambda x: F.mse_loss(x[:, :1], OTHER),
    "shapes that do not fit": lambda x: F.mse_loss(x, OTHER[:, :3]),
    "other dtypes": lambda x: F.mse_loss(x, OTHER.double()),
    "a transposed target": lambda x: F.huber_loss(x, table(8, 4).t()),
    "itself transposed": lambda x: F.l1_loss(x.t(), table(8, 4)),
    "no such reduction": lambda x: F.mse_loss(x, OTHER, reduction="product"),
    "an old option": lambda x: F.mse_loss(x, OTHER, size_average=False),
    "two old options": lambda x: F.smooth_l1_loss(x, OTHER, None, False),
    "a weight": lambda x: F.binary_cross_entropy_with_logits(x, OTHER, OTHER),
    "a weight of an absolute difference": lambda x: F.l1_loss(x, OTHER, weight=OTHER.abs()),
    "a weight of squares": lambda x: F.mse_loss(x, OTHER, weight=OTHER.abs()),
    "one of a Huber loss": lambda x: F.huber_loss(x, OTHER, weight=OTHER.abs()),
    "one of another shape": lambda x: F.l1_loss(x, OTHER, weight=OTHER[0]),
    "one of none": lambda x: F.l1_loss(x, OTHER, reduction="none", weight=OTHER.abs()),
    "weights of the positive": lambda x: F.binary_cross_entropy_with_logits(
        x, OTHER, pos_weight=OTHER[0]
    ),
    "a target of another size": lambda x: F.binary_cross_entropy_with_logits(x, OTHER[:2]),
    "beta of zero": lambda x: F.smooth_l1_loss(x, OTHER, beta=0.0),
    "a beta that float16 has not": lambda x: F.smooth_l1_loss(x.half(), OTHER.half(), beta=1e10),
    "a delta that float16 has not": lambda x: F.huber_loss(x.half(), OTHER.half(), delta=1e5),
    "a negative beta": lambda x: F.smooth_l1_loss(x, OTHER, beta=-1.0),
    "no delta": lambda x: F.huber_loss(x, OTHER, delta=0.0),
    "delta of another class": lambda x: F.huber_loss(x, OTHER, delta="1"),
    "ints": lambda x: F.mse_loss(x.int(), OTHER.int()),
    "one element": lambda x: F.mse_loss(x[:1, :1], OTHER[:1, :1]),
    "no elements": lambda x: F.mse_loss(x[:0], OTHER[:0]),
    "a number": lambda x: F.huber_loss(x, 1.0),
    "torch's own": lambda x: torch._C._nn.mse_loss(x, OTHER, 2),
    "torch's own, of which none is told how": lambda x: torch._C._nn.mse_loss(x, OTHER),
    "and of logits": lambda x: torch.binary_cross_entropy_with_logits(x, OTHER),
    "and of others": lambda x: sum(
        [
            getattr(torch._C._nn, name)(x, OTHER)
            for name in ("l1_loss", "huber_loss", "smooth_l1_loss")
        ]
    ),
    "torch's own of logits": lambda x: torch.binary_cross_entropy_with_logits(
        x, OTHER, None, None, 1
    ),
    "logsumexp of the first": lambda x: x.logsumexp(0),
    "logsumexp of a dim that is not there": lambda x: x.logsumexp(2),
    "logsumexp without a dim": lambda x: torch.logsumexp(x),
    "logsumexp of a dim twice": lambda x: x.logsumexp((1, -1)),
    "logsumexp of none": lambda x: torch.logsumexp(x[:, :0], 1),
    "logsumexp of ints": lambda x: torch.logsumexp(x.int(), 1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_what_is_not_recorded_is_eagers(recorded, on, name, grad):  # noqa: F811
    def outcome():
        leaf = ONE.clone().requires_grad_(grad)
        x = (autofuse.wrap(leaf * 1.0) if wrap else leaf * 1.0) * 2.0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                out = ODD[name](x)
                out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
                result = [out.dtype, out.tolist()]
                if grad and out.requires_grad:
                    result += torch.autograd.grad(out.sum(), leaf)[0].tolist()
            except (TypeError, RuntimeError, IndexError, ValueError, AttributeError) as error:
                result = type(error), str(error)
            return result, [(one.category, str(one.message)) for one in said]

    wrap = False
    want = outcome()
    wrap = True
    for _ in range(3):
        assert str(outcome()) == str(want)  # for NaN


@pytest.mark.parametrize("name", losses.LOSSES)
def test_16_bit_operands_are_cast_under_autocast_as_eager_does(recorded, name):  # noqa: F811
    x, y = table(4, 8, 0, torch.bfloat16), table(4, 8, 1, torch.bfloat16).sigmoid()
    found = []
    with cuda_autocast_on_cpu():
        for wrap in (False, True, True):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = called(name, (autofuse.wrap(leaf) if wrap else leaf) * 2.0, y, "mean")
                assert not wrap or autofuse.is_pending(out)
                out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
            found.append([out, *torch.autograd.grad(out, [leaf])])
    assert_same(found[1], found[0], None)
    assert_same(found[2], found[0], None)


def test_a_loss_of_what_a_reduction_gives_is_in_its_kernel(emulated):  # noqa: F811
    """Of rows along the same dimensions: of all."""
    x, y = table(4, 64), table(4, 64, 1)
    h = autofuse.wrap(x) * y
    loss = F.mse_loss(y, h - h.mean())
    got = autofuse.unwrap(autofuse.materialize(loss))
    assert len(launched) == 1
    h = x * y
    assert_same(got, F.mse_loss(y, h - h.mean()), 1e-6)


def test_components_are_calls_in_order():
    over = Over()
    found = components_of("m = amax(x); sum(mul(m, x))", over, {})
    assert [(one.op.name, one.args) for one in found] == [
        ("amax", ("x",)), ("mul", (0, "x")), ("sum", (1,)),
    ]  # fmt: skip
    assert [one.op.keepdim for one in found if one.op.name != "mul"] == [True, False]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("how", ["none", "mean", "sum"])
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_backward_of_other_dtypes_is_refused_where_torch_does(loss, other, how, autocast, always):
    def program(wrap):
        x, y = torch.linspace(-1.0, 2.0, 4, requires_grad=True), torch.arange(4.0).to(other)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(wrap(x), wrap(y), reduction=how)
        value.float().sum().backward()
        return value.detach(), x.grad

    want, error = outcome(program, (torch.clone,))
    got, failure = outcome(program, (autofuse.wrap,))
    assert (type(failure), str(failure)) == (type(error), str(error))
    if error is None:
        assert_same(got, want, 1e-6)


UNDER_HOOKS = {
    **{name: partial(called, name, how="mean") for name in (*losses.LOSSES, "l1_loss")},
    "binary_cross_entropy": F.binary_cross_entropy,
    "kl_div": partial(F.kl_div, reduction="batchmean"),
    "glu": lambda x, y: F.glu(y),
    "cross_entropy": lambda x, y: F.cross_entropy(y, x),
}


@pytest.mark.parametrize("name", UNDER_HOOKS)
def test_losses_under_hooks_that_change_what_is_saved(name, always):
    """Hooks get eager's tensors: what they make of a pending one C++ would be given."""

    def program(wrap):
        x, y = wrap(torch.rand(3, 4)), wrap(torch.rand(3, 4).requires_grad_())
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            loss = UNDER_HOOKS[name]((x * 2).sigmoid(), (y + 1).sigmoid())
        loss.sum().backward()
        return y.grad

    for seed in range(4):
        torch.manual_seed(seed)
        got = autofuse.unwrap(program(autofuse.wrap))
        torch.manual_seed(seed)
        torch.testing.assert_close(got, program(lambda t: t))
