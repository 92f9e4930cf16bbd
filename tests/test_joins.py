"""torch.cat and torch.stack of pending values: each is written where it belongs."""

import itertools
import subprocess
import sys

import pytest
import torch

import autofuse
from autofuse.ops.views import JOINS, cat_of, stack_of
from autofuse.record import flush
from autofuse.record.modes import forget_all
from support import DEVICES, DTYPES, assert_same, assert_same_as_eager, outcome, random_tensor

W = autofuse.wrap
SHAPE = 4, 6, 2

JOINED = {
    "cat": lambda x: torch.cat((x + x, x)),
    "cat of lists": lambda x: torch.cat([x + x, x, x * x], 1),
    "cat dim": lambda x: torch.cat((x + x, x * x), dim=-1),
    "concat": lambda x: torch.concat((x + x, x), 2),
    "concatenate": lambda x: torch.concatenate((x + x, x), 0),
    "other sizes": lambda x: torch.cat((x + x, x[:1] * x[1:2], (x * x)[2:]), 0),
    "of itself": lambda x: torch.cat((y := x + x, y), 1),
    "stack": lambda x: torch.stack((x + x, x * x)),
    "stack last": lambda x: torch.stack((x + x, x, x * x), -1),
    "stack from behind": lambda x: torch.stack((x + x, x), -4),
    "stack inside": lambda x: torch.stack([x + x, x], dim=1),
    "views": lambda x: torch.cat(((y := x + x)[1:], y[:1]), 0),
    "halves": lambda x: torch.cat([part * part for part in (x + x).chunk(2, 1)][::-1], 1),
    "columns": lambda x: torch.stack((x[..., 1], (x[..., 0] * x[..., 1])), 1),
    "columns of rows": lambda x: torch.stack((x[0, :, 1], x[1, :, 0] + x[0, :, 1]), -1),
    "columns of images": lambda x: torch.stack((x[None, ..., 1], x[None, ..., 0] * 2), -1),
    "columns side by side": lambda x: torch.cat((x[..., 1:], x[..., :1] * 2), 1),
    "turned": lambda x: torch.cat(((x + x).mT, (x * x).mT), 1),
    "nested": lambda x: torch.cat((torch.stack((x + x, x)).flatten(0, 1), x * x), 0),
    "of a view of it": lambda x: torch.stack(torch.cat((x + x, x * x), 1).chunk(2, 1)),
    "empty": lambda x: torch.cat((x + x, x[:0])),
    "old empty": lambda x: torch.cat((x + x, torch.empty(0, dtype=x.dtype, device=x.device))),
    "dtypes": lambda x: torch.cat((x + x, (x + x).double())),
    "many": lambda x: torch.stack([x + k for k in range(1, 10)], -1),
    "many of one": lambda x: torch.stack([x + x] * 9),
    "most": lambda x: torch.cat([x + 2, *x.split(1, 1), *[x] * 25], 1),
    "too many": lambda x: torch.cat([x + x, *[x] * 32], 1),
    "every second": lambda x: torch.stack((x[..., ::2] * 2, x[..., 1::2]), -1).flatten(-2),
}
LAYOUTS = [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
           lambda x: x[:1].expand(SHAPE)]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def forgotten():
    """A recorder knows so many joins at most: those of these tests are no other's."""
    yield
    forget_all("test")


def test_every_function_has_a_case():
    assert {*JOINS} <= {*JOINED}


@pytest.mark.parametrize("name", JOINED)
def test_joins_are_eagers(device, on, tier, name):
    join = JOINED[name]
    x = random_tensor(SHAPE, torch.float32, device)
    for layout in LAYOUTS:
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert_same_as_eager(lambda x, layout=layout: join(layout(x)), x)
                assert_same_as_eager(lambda x, layout=layout: join(layout(x)) * 2 - 1, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", JOINED)
def test_every_dtype(device, name, dtype):
    x = random_tensor(SHAPE, dtype, device, wild=dtype.is_floating_point)
    assert_same_as_eager(JOINED[name], x)


@pytest.mark.parametrize("name", ["stack", "cat"])
def test_what_autocast_refuses(device, name):
    def run(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return getattr(torch, name)((x.neg(), x.abs()))

    for dtype in DTYPES:
        if dtype is not torch.bool:
            assert_same_as_eager(run, random_tensor(SHAPE, dtype, device))


def test_a_join_is_one_kernel_and_no_copy(device, on):
    x = random_tensor((8, 64), torch.float32, device)

    def stored(make):
        autofuse.reset_stats()
        got = make(W(x))
        assert autofuse.is_pending(got)
        autofuse.materialize(got)
        stats = autofuse.stats()
        assert stats.ops_eager == 0
        assert_same(got, make(x), None)
        return stats.kernels_launched, stats.live_outs_stored

    assert stored(lambda x: torch.stack((x * 2.0, x + 1.0, x.neg()), -1)) == (1, 1)
    assert stored(lambda x: torch.cat((x * 2.0, x), 1)) == (1, 1)
    assert stored(lambda x: torch.cat(((y := x * 2.0)[:, 32:].neg(), y[:, :32]), 1)) == (1, 1)
    assert stored(lambda x: torch.cat((x * 2.0, (x * 3.0)[0:1]))) == (2, 1)  # two shapes
    assert stored(lambda x: torch.stack([x.neg(), *(x * k for k in range(2, 33))], 1)) == (1, 1)
    x = x.view(1, 8, 16, 4).transpose(1, 2)[..., ::2]  # as heads are: one of a pair is memory
    assert stored(lambda x: torch.stack((x.neg(), x), -1)) == (1, 1)


def test_the_right_side_of_an_ode_is_one_kernel(device, on):
    """As most are written: of columns of the state, which are not contiguous."""
    x = random_tensor((1024, 2), torch.float32, device)

    def change(y):
        return torch.stack((y[:, 1], -(y[:, 0] * 0.25)), 1)

    autofuse.reset_stats()
    assert_same(autofuse.materialize(change(W(x))), change(x), None)
    assert autofuse.stats().kernels_launched == autofuse.stats().live_outs_stored == 1


def test_rotary_embedding(device, on):
    x = random_tensor((2, 8, 64), torch.float32, device)
    angles = random_tensor((8, 64), torch.float32, device, seed=1)

    def rotary(x, cos, sin):
        y = x * 2.0
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    autofuse.reset_stats()
    got = rotary(W(x), angles, angles.neg())
    autofuse.materialize(got)
    assert autofuse.stats().kernels_launched <= 2 and autofuse.stats().ops_eager == 0
    assert_same(got, rotary(x, angles, angles.neg()), None)


def test_writes_to_what_was_joined_and_to_what_came_of_it(device, on):
    x = random_tensor((4, 6), torch.float32, device)

    def run(x, written):
        a, b = x * 2.0, x + 1.0
        joined = torch.cat((a, b), 1)
        view = joined[:, 3:9]
        held = [a, b, joined, view]
        before = [one + 1.0 for one in held]
        held[written].mul_(3.0)
        return *held, *before, *(one - 1.0 for one in held)

    for written in range(4):
        got, want = run(W(x), written), run(x, written)
        assert_same(got, want, None)
        assert [one._version for one in got] == [one._version for one in want]


def test_a_chain_that_ends_in_the_middle_takes_nobodys_memory(device, on, monkeypatch):
    """Chains are full while what is joined is recorded, and run as eager ops then."""
    for nodes in range(2, 8):
        for compiled in (True, False):
            monkeypatch.setattr(autofuse.config, "max_nodes", nodes)
            if not compiled:
                monkeypatch.setattr(autofuse.config, "compile", "background")
                monkeypatch.setattr(autofuse.config, "compile_after", 1 << 30)
            x, y = (random_tensor((4, 6), torch.float32, device, seed) for seed in (0, 1))
            w, v = W(x.clone()), W(y.clone())
            got = torch.cat((w * 2.0, v, w, w + v), 1) + 1.0
            assert_same(got, torch.cat((x * 2.0, y, x, x + y), 1) + 1.0, None)
            assert_same((w, v), (x, y), None)
            flush.flush_all("test")


def test_gradients_and_errors(device, on):
    x = random_tensor((4, 6), torch.float32, device)

    def gradient(join, wrapped):
        leaf = x.clone().requires_grad_()
        join(W(leaf) if wrapped else leaf).square().sum().backward()
        return leaf.grad

    for join in (
        lambda y: torch.cat((y * 2.0, y.sigmoid() * y), 1),
        lambda y: torch.stack([y.tanh(), *(y * float(k) for k in range(2, 16))], -1),
        lambda y: torch.cat([part * k for k, part in enumerate(y.tanh().split(1, 1))], 1),
        lambda y: torch.stack((y.mT[..., ::2].neg(), y.mT[..., 1::2]), -1).flatten(-2),
    ):
        assert_same(gradient(join, True), gradient(join, False), 1e-6)
    for wrong in (
        lambda x: torch.cat((x * 2.0, x.t() * 2.0)),
        lambda x: torch.cat((x * 2.0, x), 5),
        lambda x: torch.stack((x * 2.0, x[:2])),
        lambda x: torch.stack((x * 2.0, x), 3),
        lambda x: torch.stack((x * 2.0, x), -4),
        lambda x: torch.cat((x * 2.0, 1.0)),
        lambda x: torch.cat([]),
    ):
        _, want = outcome(wrong, (x,))
        _, got = outcome(wrong, (W(x),))
        assert type(got) is type(want) and str(got) == str(want)


SIZES = [(), (0,), (1,), (3,), (0, 2), (1, 1), (2, 3), (1, 2, 1), (1, 1, 1, 1), (2, 1, 1, 1),
         (1, 1, 3, 2), (2, 3, 1, 1), (2, 3, 4, 5), (0, 3, 1, 2), (1, 1, 1, 1, 1),
         (2, 1, 2, 1, 3)]  # fmt: skip


def _last(x):
    return x.contiguous(memory_format=_FORMATS.get(x.dim(), torch.contiguous_format))


def _order(k):
    """Of the axes another one for each k."""

    def turned(x):
        orders = list(itertools.permutations(range(x.dim())))
        order = orders[k * 7 % len(orders)]
        back = [order.index(axis) for axis in range(x.dim())]
        return x.permute(order).contiguous().permute(back)

    return turned


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAID = {
    "as it is": lambda x: x,
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x,
    "channels last": _last,
    "steps": lambda x: torch.stack((x, x), -1)[..., 1],
    "steps of channels last": lambda x: (
        torch.cat((_last(x), _last(x)), -1)[..., ::2] if x.dim() else x
    ),
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and x.numel() else x,
    "expanded channels": lambda x: x[:, :1].expand(x.shape) if x.dim() > 1 and x.numel() else x,
    **{f"order {k}": _order(k) for k in range(1, 12)},
}


def _stand_in(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.parametrize("way", LAID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_what_stack_makes_is_known_without_asking(dtype, way):
    """Layouts as eager's, of all pairs of layouts along every dimension."""
    for size, other in itertools.product(SIZES, LAID.values()):
        x = torch.zeros(size, dtype=dtype)
        xs = [LAID[way](x), other(x)]
        for dim in range(-len(size) - 1, len(size) + 1):
            want, got = torch.stack(xs, dim), stack_of([*map(_stand_in, xs)], dim)
            assert got.shape == want.shape and got.dtype is want.dtype, (size, dim)
            assert got.stride() == want.stride(), (size, dim)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.int64, torch.float16)])
@pytest.mark.parametrize("way", [*LAID, "mixed"])
def test_what_cat_makes_is_known_without_asking(dtypes, way):
    """Layouts and refusals as eager's, of all pairs of shapes along every dimension."""
    layouts = [LAID[way]] * 2 if way in LAID else [LAID["channels last"], LAID["order 5"]]
    for one, other in itertools.product(SIZES, repeat=2):
        xs = [
            torch.zeros(size, dtype=dtype) for size, dtype in zip((one, other), dtypes, strict=True)
        ]
        xs = [layout(x) for layout, x in zip(layouts, xs, strict=True)]
        for dim in range(-len(one) - 1, len(one) + 1):
            want, error = outcome(torch.cat, (xs, dim))
            got, failure = outcome(cat_of, ([*map(_stand_in, xs)], dim))
            assert (failure is None) == (error is None), (one, other, dim)
            if want is not None:
                assert got.shape == want.shape and got.dtype is want.dtype, (one, other, dim)
                assert got.stride() == want.stride(), (one, other, dim)


def test_the_first_join_imports_nothing():
    """torch._dynamo takes more than a second, in which everybody would wait."""
    text = (
        "import sys, torch, autofuse\n"
        "x = autofuse.wrap(torch.ones(2, 3))\n"
        "before = set(sys.modules)\n"
        "y = torch.cat((x * 2, x + 1), 1), torch.stack((x * 2, x + 1), -1)\n"
        "x = autofuse.wrap(torch.ones(2, 3, 4, 6).transpose(1, 2))\n"
        "y += torch.cat((x * 2, x[..., 2:]), -1), torch.stack((x * 2, x), -2)\n"
        "assert all(map(autofuse.is_pending, y))\n"
        "print(*{name for name in set(sys.modules) - before if name.startswith('torch')})\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
