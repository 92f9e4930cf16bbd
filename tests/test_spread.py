"""Gradients of numbers of rows that are spread along them: `x * rsqrt(mean(x * x))`, for one.

The engine adds such a gradient up for the number; here the kernel does that needs the sum, so that
a norm, or softmax, as people write it is differentiated by one kernel.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_norms import hung  # noqa: F401
from test_reductions import emulated, launched, recording, row, table  # noqa: F811,F401
from test_row_gradients import DTYPES, nodes_of, run_twice, verified_gpu  # noqa: F401

import autofuse
from autofuse.grad.backward import Backward
from cases import NO_RULE
from support import assert_same, needs_cuda


def rms_norm(x, y, w, b):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def rms_norm_in_float32(x, y, w, b):
    h = (x * y).float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.type_as(x)


def layer_norm(x, y, w, b):
    h = x + y
    centred = h - h.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return torch.tanh(centred * torch.rsqrt(variance + 1e-5) * w + b) * 0.9 + x * 0.1


def softmax(x, y, w, b):
    e = (x * y).exp()
    return e / e.sum(-1, keepdim=True)


def softmax_of_scaled(x, y, w, b):
    h = x * y * 0.25
    e = torch.exp(h - h.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True) * w


def cosine(x, y, w, b):
    return (x / x.norm(dim=-1, keepdim=True)) * (y / (y * w).norm(dim=-1, keepdim=True))


def exact(x, y, w, b):
    """Of whole numbers that float32 has, in whatever order they are added."""
    h = x * y
    s = (h * w).sum(-1, keepdim=True)
    return (h - s) * s + b


ONE_NODE = {
    "rms_norm": rms_norm,
    "rms_norm in float32": rms_norm_in_float32,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "cosine": cosine,
    "gate": lambda x, y, w, b: x * torch.sigmoid((x * y).mean(-1, keepdim=True)),
    "sum": lambda x, y, w, b: x.sum(-1, keepdim=True) * y,
    "variance": lambda x, y, w, b: x / (1 + (x * y).var(-1, keepdim=True)),
    "logsumexp": lambda x, y, w, b: (x - torch.logsumexp(x * y, -1, True)) * y,
    "exact": exact,
}
if "clamp_min" not in NO_RULE:
    ONE_NODE["normalize"] = lambda x, y, w, b: F.normalize(x * y, dim=-1) * 2.0


def _norm(x, dims):
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).pow(2).mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-6)


# along other dimensions than the last; x, y: [B, C, H, W], w: [C, 1, 1]
ACROSS = {
    "norm of channels": lambda x, y, w: _norm(x * y, 1) * w + w,
    "norm of instances": lambda x, y, w: _norm(x * y, (2, 3)) * y,
    "norm of batches": lambda x, y, w: _norm(x * y, (0, 2, 3)) * w + w,
    "norm of columns": lambda x, y, w: _norm(x * y, 0) * y,
    "gate": lambda x, y, w: x * torch.sigmoid((x * y).mean((2, 3), keepdim=True)),
    "softmax of channels": lambda x, y, w: (
        (lambda e: e / e.sum(1, keepdim=True))((x * y).exp()) * torch.softmax(x, 1)
    ),
    "softmax of two dims": lambda x, y, w: (
        (lambda e: e / e.sum((1, 2), keepdim=True))((x * y).exp())
    ),
    "exact": lambda x, y, w: (lambda h, s: (h - s) * s)(x * y, (x * w).sum((1, 2), keepdim=True)),
}  # fmt: skip
MORE = {
    "softmax of scaled": softmax_of_scaled,
    # the gradient that comes in is the number's, as it lies
    "handed on": lambda x, y, w, b: x * y + x.sum(-1, keepdim=True) * 2.0,
    # more sums than a kernel goes through rows for
    "seven": lambda x, y, w, b: sum(x * (y * k).sum(-1, keepdim=True) for k in range(1, 8)),
    # and of the number itself
    "twice": lambda x, y, w, b: (lambda s: x * s * y + s * w)((x * y).sum(-1, keepdim=True)),
    "live": lambda x, y, w, b: (lambda s: torch.cat([x * s, s], -1))((x * y).mean(-1, True)),
    "after a norm": lambda x, y, w, b: (
        F.layer_norm(x * y, x.shape[-1:], w, b) * torch.sigmoid(x.mean(-1, keepdim=True))
    ),
}  # fmt: skip
PROGRAMS = ONE_NODE | MORE


def leaves(name, *shape, dtype=torch.float32):
    n = shape[-1]
    rows = torch.Size(shape[:-1]).numel()
    xs = [table(rows, n, k).view(shape) for k in (0, 1)] + [row(n, 2), row(n, 3)]
    xs = [(x * 2).round() if name == "exact" else x for x in xs]
    return [x.to(dtype).requires_grad_() for x in xs]


def gradients(program, xs, g, wrap):
    for _ in range(3):  # the last one by machine code
        out = program(*(map(autofuse.wrap, xs) if wrap else xs))
        out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
        launched.clear()
        found = torch.autograd.grad(out, xs, g, allow_unused=True)
    return out, found


@pytest.fixture
def unfused(monkeypatch):
    """Of the backwards that torch's ops compute: the names of their ops."""
    build, found = Backward._build, []

    def noted(self, key):
        expected = build(self, key)
        if expected is None:
            found.append([self.segment.nodes[step].op.name for step in self.segment.steps])
        return expected

    monkeypatch.setattr(Backward, "_build", noted)
    return found


@pytest.mark.parametrize("n", [12, 260])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_kernels_add_up(emulated, unfused, name, n, on):  # noqa: F811
    xs = leaves(name, 6, n)
    g = (table(6, n, 9) * 2).round()
    g = torch.cat([g, g[:, :1]], -1) if name == "live" else g
    _, want = gradients(PROGRAMS[name], xs, g, False)
    out, got = gradients(PROGRAMS[name], xs, g, True)
    assert_same(got, want, None if name == "exact" else 2e-5)
    if name in ONE_NODE:
        assert len(nodes_of(out)) == len(launched) == 1, nodes_of(out)
        assert "sum" in launched[0][0] or "and" in launched[0][0]
    assert not unfused


def _of_rows(x):
    return x.pow(2).mean(-1, keepdim=True)


# where nodes that add these up would add others' in another order: they are what they are without
LATE = {
    "beside a gate": lambda x, w: (lambda y: (y * torch.rsqrt(_of_rows(x) + 1e-5), y))(x.sigmoid()),
    "of what is live": lambda x, w: (
        (lambda h, s, g: (g * s + x, g))(x * w, torch.sigmoid(_of_rows(x * w)), torch.tanh(x * w))
    ),
    "times what is live": lambda x, w: (lambda h: (h.exp() * _of_rows(h), h.exp()))(x * w),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_where_gradients_would_add_in_another_order(emulated, name):  # noqa: F811
    xs = [table(6, 40, k).requires_grad_() for k in (0, 1)]
    g = [table(6, 40, k) for k in (2, 3)]
    found = []
    for wrap in (False, True):
        out = LATE[name](*(map(autofuse.wrap, xs) if wrap else xs))
        out = [autofuse.unwrap(one) for one in autofuse.materialize(list(out))]
        found.append(torch.autograd.grad(out, xs, g, allow_unused=True))
    assert_same(found[1], found[0], 1e-4)
    assert len({*nodes_of(out[0])}) <= 4


@pytest.mark.parametrize("gates", range(9))
def test_a_number_that_is_two_operands(emulated, unfused, gates):  # noqa: F811
    """Each is added up, as long as a kernel has room for it."""

    def program(x, y):
        s = (y * 0.5).mean(-1, keepdim=True)
        out = torch.addcmul(x, s, s)
        for k in range(gates):
            out = out * torch.sigmoid((x * (k + 2.0)).mean(-1, keepdim=True))
        return out

    xs = [table(6, 12, k).requires_grad_() for k in (0, 1)]
    _, want = gradients(program, xs, table(6, 12, 2), False)
    _, got = gradients(program, xs, table(6, 12, 2), True)
    assert_same(got, want, 1e-4)
    assert not unfused


GATED = {
    "layer_norm": lambda x, y, n: F.layer_norm(x + y, x.shape[-1:]) * n,
    "softmax": lambda x, y, n: torch.softmax(x * y, -1) * n,
    "of an activation": lambda x, y, n: F.silu(F.layer_norm(x + y, x.shape[-1:])) * n + x,
}


@pytest.mark.parametrize("n", [40, 1024])
@pytest.mark.parametrize("name", GATED)
def test_numbers_that_are_inputs_take_no_room_from_reductions(emulated, unfused, name, n):  # noqa: F811
    """Where both have the same threads the kernel adds up both."""
    xs = [table(4, n, 0), table(4, n, 1), table(4, 1, 2)]
    xs = [x.requires_grad_() for x in xs]
    _, want = gradients(GATED[name], xs, table(4, n, 3), False)
    out, got = gradients(GATED[name], xs, table(4, n, 3), True)
    assert_same(got, want, 5e-5)
    assert len(nodes_of(out)) == len(launched) == 1 and not unfused


def test_rows_of_nothing(emulated, capfd):  # noqa: F811
    """Beside rows that are added up."""
    xs = [table(6, 8, 0), torch.ones(6, 0), table(6, 1, 1)]
    xs = [x.requires_grad_() for x in xs]
    x, e, n = map(autofuse.wrap, xs)
    out = [x * torch.sigmoid(x.mean(-1, keepdim=True)), e * n]
    out = [autofuse.unwrap(one) for one in autofuse.materialize(out)]
    found = torch.autograd.grad(out, xs, [table(6, 8, 2), torch.ones(6, 0)])
    assert found[1].shape == (6, 0) and found[2].tolist() == [[0.0]] * 6
    assert not capfd.readouterr().err


# whose gradients are numbers of rows, and nothing else that has their shape
ALONE = {
    "sum": lambda x, y: (x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True) * 0.1,
    "mean": lambda x, y: (y - x).mean(-1, keepdim=True).sigmoid(),
    "twice": lambda x, y: -((-x - y.amax(-1, keepdim=True)).mean(-1, keepdim=True)) * 3.0,
    "of columns": lambda x, y: (x - y.amax(0, keepdim=True)).sum(0, keepdim=True).exp(),
}


@pytest.mark.parametrize("name", ALONE)
def test_gradients_that_are_numbers_of_rows_alone(hung, name, on):  # noqa: F811
    """By kernels that go over no rows, and as torch's ops make them: in memory of their own."""
    found = []
    for wrap in (False, True, True):
        xs = [table(5, 12, k).requires_grad_() for k in (0, 1)]
        out = ALONE[name](*(map(autofuse.wrap, xs) if wrap else xs))
        out = autofuse.unwrap(autofuse.materialize(out))
        g = torch.arange(1.0, out.numel() + 1).view(out.shape)
        found.append(torch.autograd.grad(out, xs, g, allow_unused=True))
    assert_same(found[1:], [found[0]] * 2, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_other_dtypes(emulated, unfused, dtype):  # noqa: F811
    """Beside rows that are added up: those that no kernel reduces the engine adds up."""
    xs = [table(6, 8, 0), table(6, 8, 1, dtype), table(6, 1, 1, dtype)]
    xs = [x.requires_grad_() for x in xs]
    found = []
    for wrap in (False, True):
        x, e, n = map(autofuse.wrap, xs) if wrap else xs
        out = [x * torch.sigmoid(x.mean(-1, keepdim=True)), e * n]
        out = [autofuse.unwrap(one) for one in autofuse.materialize(out)]
        g = [table(6, 8, 2), table(6, 8, 3, dtype)]
        found.append(torch.autograd.grad(out, xs, g))
    assert_same(found[1], found[0], 1e-5)
    assert not unfused


def images(name, *shape, dtype=torch.float32):
    xs = [table(1, torch.Size(shape).numel(), k).view(shape) for k in (0, 1)]
    xs = [*xs, row(shape[1], 2).view(-1, 1, 1), table(1, xs[0].numel(), 9).view(shape)]
    xs = [(x * 2).round() if name == "exact" else x for x in xs]
    *xs, g = (x.to(dtype) for x in xs)
    return [x.requires_grad_() for x in xs], g


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (3, 5, 7, 3)])
@pytest.mark.parametrize("name", ACROSS)
def test_rows_along_other_dimensions(emulated, unfused, name, shape, on):  # noqa: F811
    xs, g = images(name, *shape)
    _, want = gradients(ACROSS[name], xs, g, False)
    out, got = gradients(ACROSS[name], xs, g, True)
    assert_same(got, want, None if name == "exact" else 5e-5)
    assert len(nodes_of(out)) == 1 or "softmax" in name, nodes_of(out)
    assert not unfused


LAYOUTS = {
    "permuted": lambda shape: table(24, shape[-1], 9).view(2, 4, 3, -1).transpose(1, 2),
    "rows across": lambda shape: table(24, shape[-1], 9).view(2, 3, -1, 4).transpose(-1, -2),
    "every second": lambda shape: table(24, 2 * shape[-1], 9).view(*shape[:-1], -1)[..., ::2],
    "one for all": lambda shape: torch.tensor(0.5).expand(shape),
    "one a row": lambda shape: table(6, 4, 9).view(2, 3, 4, 1).expand(shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*ONE_NODE, "handed on"])
def test_gradients_in_any_layout(emulated, name, layout):  # noqa: F811
    """Where torch would add in an order that is not known, its ops do."""
    xs = leaves(name, 2, 3, 4, 12)
    g = LAYOUTS[layout]((2, 3, 4, 12))
    _, want = gradients(PROGRAMS[name], xs, g, False)
    _, got = gradients(PROGRAMS[name], xs, g, True)
    assert_same(got, want, 2e-5)


def test_a_gradient_that_comes_from_elsewhere_is_not_added_up(emulated):  # noqa: F811
    xs = leaves("", 6, 12)
    out, _ = gradients(PROGRAMS["handed on"], xs, torch.ones(()).expand(6, 12), True)
    assert "SumBackward1" in nodes_of(out)


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_derivatives(emulated, name):  # noqa: F811
    found = []
    for wrap in (False, True):
        xs = leaves(name, 3, 12)
        out = PROGRAMS[name](*(map(autofuse.wrap, xs) if wrap else xs))
        out = autofuse.unwrap(autofuse.materialize(out))
        g = table(3, out.shape[-1], 9).requires_grad_()
        first = torch.autograd.grad(out, xs, g, create_graph=True, allow_unused=True)
        total = sum((one * one).sum() for one in first if one is not None)
        found.append(torch.autograd.grad(total, [*xs, g], allow_unused=True))
    assert_same(found[1], found[0], 2e-4)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gate", "twice"])
def test_hooks_are_told_of_what_eager_saves(emulated, name):  # noqa: F811
    told = []
    for wrap in (False, True):
        packed = []
        xs = leaves(name, 3, 12)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, packed=packed: (packed.append((x.shape, x.dtype)), x)[1], lambda x: x
        ):
            out = PROGRAMS[name](*(map(autofuse.wrap, xs) if wrap else xs))
            out = autofuse.unwrap(autofuse.materialize(out))
            grads = torch.autograd.grad(out, xs, table(3, 12, 9), allow_unused=True)
        told.append((packed, out, grads))
    assert told[0][0] == told[1][0]
    assert_same(told[1][1:], told[0][1:], 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_torch_adds_up(emulated, dtype):  # noqa: F811
    """Where a backward runs under it, too, whose sums are of float32."""
    found = []
    for wrap in (False, True):
        xs = leaves("", 3, 12, dtype=dtype)
        out = ONE_NODE["sum"](*(map(autofuse.wrap, xs) if wrap else xs))
        out = autofuse.unwrap(autofuse.materialize(out))
        with torch.autocast("cpu", dtype):
            found.append(torch.autograd.grad(out, xs[:2], table(3, 12, 9, dtype)))
    assert_same(found[1], found[0], None)


def test_rows_that_several_blocks_would_share(emulated):  # noqa: F811
    """On a GPU with enough processors; nothing of these is added up with others."""
    xs = [table(1, 1 << 18, k).requires_grad_() for k in range(2)]
    out = autofuse.wrap(xs[0]) * torch.sigmoid((autofuse.wrap(xs[1]) * 0.5).sum(-1, keepdim=True))
    out = autofuse.unwrap(autofuse.materialize(out))
    assert len(nodes_of(out)) > 1


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_have_eagers_bits_on_cuda(name, dtype, verified_gpu):  # noqa: F811
    for m, n in itertools.product((1, 5, 300), (2, 33, 132, 1000, 1028, 4096)):
        xs = [x.detach().cuda().requires_grad_() for x in leaves(name, m, n, dtype=dtype)]
        g = table(m, n + (name == "live"), 9, dtype).cuda()
        (want, got), (forward, backward) = run_twice(PROGRAMS[name], xs, g)
        assert_same(got, want, None, f"{[m, n]}")
        of_two = name == "logsumexp" and dtype.itemsize == 2  # whose extreme has other threads
        if name in ONE_NODE and "float32" not in name and not of_two:
            assert (forward, backward) == (1, 1), [m, n]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACROSS)
def test_rows_along_other_dimensions_on_cuda(name, dtype, verified_gpu):  # noqa: F811
    for shape in ((2, 3, 4, 8), (3, 5, 7, 3), (4, 64, 8, 8), (32, 20, 5, 33), (2, 256, 14, 14)):
        xs, g = images(name, *shape, dtype=dtype)
        xs, g = [x.detach().cuda().requires_grad_() for x in xs], g.cuda()
        (want, got), _ = run_twice(ACROSS[name], xs, g)
        assert_same(got, want, None, f"{shape}")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_NODE)
def test_gradients_in_any_layout_on_cuda(name, dtype, layout, verified_gpu):  # noqa: F811
    for n in (12, 128, 1000):
        xs = [x.detach().cuda().requires_grad_() for x in leaves(name, 2, 3, 4, n, dtype=dtype)]
        g = LAYOUTS[layout]((2, 3, 4, n)).to(dtype).cuda()
        if layout.startswith("one"):  # which stay as they lie
            g = (g[..., :1] if layout == "one a row" else g[:1, :1, :1, :1]).expand(g.shape)
        (want, got), _ = run_twice(PROGRAMS[name], xs, g)
        assert_same(got, want, None, f"{n}")
