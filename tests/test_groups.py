"""group_norm: a kernel of each group's statistics, and one of what has the shape of its operand."""

import math
import os
import random

import pytest
import row_oracle
import simt
import torch
import torch.nn.functional as F
from test_norms import hung, leaves, ran, trained  # noqa: F401
from test_reductions import _Kernel, emulated, launched, recorded, recording  # noqa: F401
from torch.autograd import gradcheck, gradgradcheck

import autofuse
from autofuse.chain import rowwise
from autofuse.cli import verify
from autofuse.kernel.rows import make_pieces, source_of
from autofuse.ops import reductions
from autofuse.record import policy
from autofuse.supply.kernels import Order
from support import assert_same, compared_about, cuda_autocast_on_cpu, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# shape and groups; rows of warps and blocks, kept by their threads or not, and long ones
SHAPES = [((2, 6), 2), ((3, 4, 1), 2), ((2, 6, 5), 3), ((1, 6, 4, 3), 1), ((2, 6, 1, 1), 2),
          ((2, 4, 2, 3, 2), 4), ((2, 4, 9, 31), 2), ((1, 2, 1100), 2),
          ((1, 2, 150), 1), ((1, 2, 2300), 1), ((2, 4, 3, 4), 2)]  # fmt: skip
EPS = 1e-3


@pytest.fixture
def kernels(emulated, monkeypatch):  # noqa: F811
    """All kernels run in the emulation."""

    def filled(order):
        return [emulated.setdefault(p, _Kernel(source_of(p, "sm_90"))) for p, _ in order.wanted]

    monkeypatch.setattr(Order, "filled", filled)
    monkeypatch.setattr(
        "autofuse.record.ways.make_pieces",
        lambda program, _, processors: make_pieces(program, "cuda", processors),
    )


def arguments(shape, dtype=torch.float32, seed=0, device="cpu", kind="plain"):
    """x, weight and bias."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        x = torch.randn(shape, generator=generator, device=device)
        if kind == "wide":
            x = x * torch.exp(4 * torch.randn(shape, generator=generator, device=device))
        if kind == "special":
            chance = torch.rand(shape, generator=generator, device=device)
            chance *= 40 * math.sqrt(x.numel())
            numbers = torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -3e-41
            for k, number in enumerate(numbers):
                x[(chance > k) & (chance < k + 1)] = number
        return x.to(dtype)

    return normal(*shape), normal(shape[1]), normal(shape[1])


def oracle(x, groups, w, b, eps=EPS):
    """What CUDA gives; mean and rstd."""
    dtype, (n, c, *row) = x.dtype, x.shape
    rounded = simt.F32(torch.tensor(eps).to(dtype).float().item())
    rows = x.float().reshape(n * groups, -1).numpy()
    found = [row_oracle.group_norm_statistics(r, rounded) for r in rows]
    statistics = torch.tensor([[float(v) for v in s] for s in found]).to(dtype)
    out = torch.empty(n * c, math.prod(row))
    for k, channel in enumerate(x.float().reshape(n * c, -1).numpy()):
        mean, r = map(simt.F32, statistics[k // (c // groups)].float().tolist())
        own = [None, None] if w is None else [simt.F32(t[k % c].float().item()) for t in (w, b)]
        normed = row_oracle.group_norm(channel, mean, r, *own, out.shape[1] == 1)
        out[k] = torch.from_numpy(normed)
    mean, r = statistics.t().contiguous().view(2, n, groups)
    return out.view(x.shape).to(dtype), mean, r


# --- by kernels, emulated -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_its_order_is_torchs(kernels, shape, groups, affine, dtype):
    x, *weights = arguments(shape, dtype)
    w, b = weights if affine else (None, None)
    with torch.no_grad():
        for _ in range(3):  # the last ones by machine code
            launched.clear()
            autofuse.reset_stats()
            got = torch.relu(F.group_norm(autofuse.wrap(x), groups, w, b, EPS)) * 2.0
            got = autofuse.materialize(got)
            assert autofuse.stats().ops_eager == 0
            assert [name for name, *_ in launched] == [
                "af_rows_group_norm", "af_group_norm_relu_mul"
            ]  # fmt: skip
            got = autofuse.unwrap(got)
            want, *_ = oracle(x, groups, w, b)
            assert_same(got, torch.relu(want) * 2.0, None)


def test_what_is_before_it_is_in_both_kernels(kernels):
    x, w, b = arguments((2, 6, 4, 5))
    y, *_ = arguments((2, 6, 4, 5), seed=1)
    with torch.no_grad():
        for _ in range(3):
            launched.clear()
            h = autofuse.wrap(x) * y
            out = F.group_norm(h, 3, w, b, EPS) + y
            out, h = autofuse.materialize(out), autofuse.materialize(h)
            assert [name for name, *_ in launched] == [
                "af_rows_mul_group_norm", "af_mul_group_norm_add"
            ]  # fmt: skip
    assert_same(autofuse.unwrap(h), x * y, None)
    assert_same(autofuse.unwrap(out), oracle(x * y, 3, w, b)[0] + y, None)


def test_numbers_of_channels_are_read_with_it(kernels):
    """As a block of a diffusion model has it: shifted before, scaled after."""
    x, w, b = arguments((2, 6, 4, 5))
    shift, scale = (arguments((2, 6, 1, 1), seed=k)[0] for k in (1, 2))
    row, of_all = arguments((1, 1, 4, 5), seed=3)[0], arguments((1, 1), seed=4)[0]
    with torch.no_grad():
        for _ in range(3):
            launched.clear()
            h = autofuse.wrap(x) + shift
            out = F.group_norm(h, 3, w, b, EPS) * (autofuse.wrap(scale) + 1.0) + row
            out = autofuse.unwrap(autofuse.materialize(out * of_all))
            assert [name for name, *_ in launched] == [
                "af_rows_add_group_norm", "af_add_group_norm_add_mul_add_mul"
            ]  # fmt: skip
    want = oracle(x + shift, 3, w, b)[0] * (scale + 1.0) + row
    assert_same(out, want * of_all, None)


def test_what_else_the_chain_has(kernels):
    """Values that have nothing to do with the rows, of shapes like theirs and others."""
    x, w, b = arguments((2, 6, 4, 5))
    others = [arguments(shape, seed=1)[0] for shape in [(5, 3, 2), (2, 6, 4, 5), (6, 1, 1), (7, 8)]]
    with torch.no_grad():
        made = [autofuse.wrap(y) * 2.0 for y in others]
        out = F.group_norm(autofuse.wrap(x), 2, w, b, EPS)
        made += [out + made[2], out * made[1], *(autofuse.wrap(y) - 1.0 for y in others)]
        made = [autofuse.unwrap(autofuse.materialize(y)) for y in made]
    want = oracle(x, 2, w, b)[0]
    doubled = [y * 2.0 for y in others]
    assert_same(
        made, [*doubled, want + doubled[2], want * doubled[1], *(y - 1.0 for y in others)], None
    )
    assert sum(name == "af_rows_group_norm" for name, *_ in launched) == 1


@pytest.mark.parametrize("shape", [(2, 4, 3, 4), (2, 6, 4, 5), (1, 4, 4), (2, 6)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_are_pending(kernels, grad, shape):
    """They are stored first: channels are read by another index than the rows."""
    x, w, b = arguments(shape)
    for which in ("w", "b", "both", "one twice", "held"):
        xs = [t.clone().requires_grad_(grad) for t in (x, w, b)]
        own, weight, bias = map(autofuse.wrap, xs)
        h = own * 0.5
        weight = weight + 1.0 if which != "b" else weight
        bias = torch.relu(bias) if which in ("b", "both") else bias
        bias = weight if which == "one twice" else bias
        out = F.group_norm(h, 2, weight, bias, EPS) * 2.0
        if which != "held":
            del weight, bias
        out = autofuse.unwrap(autofuse.materialize(out)).detach()
        first = w + 1.0 if which != "b" else w
        second = torch.relu(b) if which in ("b", "both") else first if which == "one twice" else b
        assert_same(out, oracle(x * 0.5, 2, first, second)[0] * 2.0, None, which)


def test_written_to_memory_that_is_there(kernels):
    """Its operand's, too: every element is read where it is written, once statistics are known."""
    x, w, b = arguments((2, 6, 4, 5))
    own = x.clone()
    with torch.no_grad():
        target = autofuse.wrap(own)
        target.mul_(F.group_norm(target, 3, w, b, EPS))
        autofuse.materialize(target)
    assert [name for name, *_ in launched] == ["af_rows_group_norm", "af_group_norm_mul"]
    assert_same(own, x * oracle(x, 3, w, b)[0], None)


def test_alone_it_is_these_kernels_too(kernels, monkeypatch):
    """Torch has three for it."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    monkeypatch.setitem(policy.FLUSH_US, "cpu", policy.FLUSH_US.get("cuda") or 10.1)
    monkeypatch.setitem(policy._OP_US, "cpu", 6.1)
    x, w, b = arguments((2, 6, 4, 5))
    with torch.no_grad():
        for _ in range(5):
            launched.clear()
            out = autofuse.materialize(F.group_norm(autofuse.wrap(x), 3, w, b, EPS))
            assert [name for name, *_ in launched] == ["af_rows_group_norm", "af_group_norm"]
            assert_same(autofuse.unwrap(out), oracle(x, 3, w, b)[0], None)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("program", ["groups", "shared rows"])
def test_what_kernels_leave_to_each_other_is_explained(kernels, program, grad, tmp_path):
    """Which is no step of the chain."""
    x, w, b = (t.requires_grad_(grad) for t in arguments((2, 6, 4, 5)))
    y = torch.linspace(-1, 1, 150_000).requires_grad_(grad)

    def run():
        if program == "groups":
            out = torch.relu(F.group_norm(autofuse.wrap(x) * 0.5, 3, w, b, EPS)).sum()
        else:
            out = (autofuse.wrap(y) * 2.0).sum() + 1.0
        autofuse.materialize(out)
        if grad:
            out.backward()

    run()
    launched.clear()
    report = autofuse.explain(run)
    names = [use.name for use in report.kernels if use.name.startswith("af_rows")]
    assert names and {*names} <= {name for name, *_ in launched}
    assert all(use.bytes_read > 0 or use.bytes_written > 0 for use in report.kernels[:1])
    report.html(str(tmp_path / "report.html"))
    assert names[0] in str(report) or names[0] in (tmp_path / "report.html").read_text()


def test_two_of_one_chain(kernels):
    """The second begins another."""
    x, w, b = arguments((2, 6, 4, 5))
    with torch.no_grad():
        h = F.group_norm(autofuse.wrap(x), 3, w, b, EPS)
        out = autofuse.unwrap(autofuse.materialize(F.group_norm(h, 2, b, w, EPS) - h))
    first = oracle(x, 3, w, b)[0]
    assert_same(out, oracle(first, 2, b, w)[0] - first, None)
    assert [name for name, *_ in launched].count("af_rows_group_norm") == 2


def test_rows_of_others_beside_it(kernels):
    x, w, b = arguments((2, 6, 4, 5))
    with torch.no_grad():
        out = F.group_norm(torch.softmax(autofuse.wrap(x), -1), 2, w, b, EPS)
        out = torch.softmax(out * 0.5, -1) + out
        out = autofuse.unwrap(autofuse.materialize(out))
    softmax = lambda x: torch.tensor(  # noqa: E731
        [[float(v) for v in row_oracle.softmax(r)] for r in x.reshape(-1, x.shape[-1]).numpy()]
    ).view(x.shape)
    normed = oracle(softmax(x), 2, w, b)[0]
    assert_same(out, softmax(normed * 0.5) + normed, None)


@pytest.mark.parametrize("seed", range(int(os.environ.get("AUTOFUSE_TEST_ORDERS", "12"))))
def test_random_programs(kernels, seed):
    """What is before and after, weights that are pending, values that are held or let go of."""
    rng = random.Random(f"{os.environ.get('AUTOFUSE_TEST_SEED', '20261128')} {seed}")
    groups, each = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    shape = (
        rng.choice([1, 2, 3]),
        groups * each,
        *rng.choices([1, 2, 3, 4, 6], k=rng.randint(1, 3)),
    )
    if math.prod(shape) // shape[0] // groups < 2:
        shape = (*shape, 5)
    channels, ones = shape[1], (1,) * (len(shape) - 2)
    x, w, b = arguments(shape, seed=seed)
    y, number = arguments(shape, seed=seed + 1)[0], arguments((channels, 1), seed=seed + 2)[0]
    columns, of_channel = y[:1, :1], number.view(channels, *ones)
    ways = [
        lambda h, y, c, r: h * y, lambda h, y, c, r: h + c, lambda h, y, c, r: torch.relu(h) - r,
        lambda h, y, c, r: h * 0.5, lambda h, y, c, r: (y + r) * h,
    ]  # fmt: skip
    before, after = (rng.choices(ways, k=rng.randint(0, 3)) for _ in "ab")
    doubles, held = rng.choice(["", "w", "b", "wb"]), rng.random() < 0.5
    asks, twice = rng.random() < 0.3, rng.random() < 0.3

    def program(norm, x, w, b, y, c, r):
        w = w * 2.0 if "w" in doubles else w
        b = b + w if "b" in doubles else b
        h = x
        for way in before:
            h = way(h, y, c, r)
        first = normed = norm(h, w, b)
        for way in after:
            normed = way(normed, y, c, r)
        if twice:
            normed = norm(normed, b, w) - first
        return [normed, *([h, first] if held else []), *([(normed > 0).any()] if asks else [])]

    own = x, w, b, y, of_channel, columns
    want = program(lambda h, w, b: oracle(h, groups, w, b)[0], *own)
    with torch.no_grad():
        for _ in range(3):
            got = program(
                lambda h, w, b: F.group_norm(h, groups, w, b, EPS), *map(autofuse.wrap, own)
            )
            got = [autofuse.unwrap(autofuse.materialize(value)) for value in got]
            assert_same(got, want, None, f"{shape} {groups}")
    assert any("group_norm" in name for name, *_ in launched)


# --- gradients ------------------------------------------------------------------------------------

PROGRAMS = {
    "silu(group_norm)": lambda x, w, b: F.silu(F.group_norm(x, 3, w, b)),
    "of a value": lambda x, w, b: F.group_norm(x * w[:, None, None], 2, w, b) * 2.0,
    "plain": lambda x, w, b: F.group_norm(x * 0.5, 6) + x,
    "one weight twice": lambda x, w, b: torch.relu(F.group_norm(x, 2, w, w)),
}


def images(dtype=torch.float32):
    return [t.requires_grad_() for t in arguments((2, 6, 3, 4), dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(hung, on, name, dtype):  # noqa: F811
    xs = images(dtype)
    program = PROGRAMS[name]
    want, grads = trained(program, xs, wrap=False)
    for _ in range(3):
        got, ours = trained(program, xs, wrap=True)
        assert_same(got, want, None)
        for a, c in zip(ours, grads, strict=True):
            assert (a is None) is (c is None)
            if a is not None:
                assert_same(a, c, 1e-6)
    assert len(ran) == 3


def test_its_node_is_torchs(hung):  # noqa: F811
    x, w, b = images()
    h = autofuse.wrap(x) * 0.5
    normed = F.group_norm(h, 3, w, b)
    autofuse.materialize(normed + 1.0)
    node, want = normed.grad_fn, F.group_norm(x * 0.5, 3, w, b).grad_fn
    assert node.name() == want.name() == "NativeGroupNormBackward0"
    assert node._saved_weight is w
    for what in ("input", "result1", "result2"):
        assert_same(*(getattr(n, f"_saved_{what}").detach() for n in (node, want)), None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_are_those_of_the_function(hung, name, monkeypatch):  # noqa: F811
    for module in (reductions, rowwise):
        monkeypatch.setattr(module, "DTYPES", {*reductions.DTYPES, torch.float64})
    xs = [x.detach().double()[:1, ..., :2].contiguous() if x.ndim > 1 else x.detach().double()
          for x in images()]  # fmt: skip

    def function(*xs):
        return autofuse.unwrap(autofuse.materialize(PROGRAMS[name](*map(autofuse.wrap, xs))))

    xs = [x.requires_grad_() for x in xs]
    assert gradcheck(function, xs)
    assert gradgradcheck(function, xs)
    assert ran


@pytest.mark.parametrize("affine", [True, False])
def test_kernels_give_what_is_saved(kernels, affine):
    """The values, and the statistics of each group, in the dtype of the tensor."""
    for dtype in DTYPES:
        x, w, b = (t.requires_grad_() for t in arguments((2, 6, 4, 5), dtype))
        launched.clear()
        normed = F.group_norm(autofuse.wrap(x) * 0.5, 3, *((w, b) if affine else ()), eps=EPS)
        autofuse.materialize(torch.relu(normed))
        assert [name for name, *_ in launched] == [
            "af_rows_mul_group_norm", "af_mul_group_norm_relu"
        ]  # fmt: skip
        x, w, b = (autofuse.unwrap(t).detach() for t in (x, w, b))
        want, mean, rstd = oracle(x * 0.5, 3, *((w, b) if affine else (None, None)))
        assert_same(autofuse.unwrap(normed).detach(), want, None)
        node = normed.grad_fn
        assert_same(node._saved_result1.detach(), mean, None)
        assert_same(node._saved_result2.detach(), rstd, None)


def test_statistics_that_nobody_saves(kernels):
    """What is computed from it under grad has no gradient."""
    x, w, b = arguments((2, 6, 4, 5))
    ours = [autofuse.wrap(t.clone().requires_grad_()) for t in (x, w, b)]
    for _ in range(3):
        launched.clear()
        mask = autofuse.materialize(F.group_norm(ours[0] * 0.5, 3, *ours[1:], EPS) > 0)
        assert [name for name, *_ in launched] == ["af_rows_mul_group_norm", "af_mul_group_norm_gt"]
        assert_same(autofuse.unwrap(mask), oracle(x * 0.5, 3, w, b)[0] > 0, None)


@pytest.mark.parametrize("name", [name for name in verify.PROGRAMS if "group_norm" in name])
def test_it_is_compared_when_a_gpu_is_verified(kernels, name, monkeypatch):
    """Here with what the order of a CPU gives."""
    seen = compared_about(monkeypatch, 1e-3, 4 if name.startswith("d ") else None)
    cases = [(5, 132, "plain", 0), (3, 7, "plain", 0), (1, 2, "plain", 1)]
    outcome = verify.compare(name, torch.float32, cases, "cpu")
    assert outcome.reduced == len(cases) and len(seen) >= len(cases)
    assert sum("group_norm" in kernel for kernel, *_ in launched) >= 2 * len(cases)


# --- how it is spelled, and what is eager ---------------------------------------------------------


def test_spellings_are_recorded(recorded):  # noqa: F811
    x, w, b = arguments((2, 6, 4, 5))
    module = torch.nn.GroupNorm(3, 6)
    with torch.no_grad():
        module.weight.copy_(w), module.bias.copy_(b)
        calls = {
            "a module": module,
            "by position": lambda x: torch.group_norm(x, 3, w, b, 1e-5, True),
            "by name": lambda x: F.group_norm(x, num_groups=3, bias=b, weight=w, eps=1e-5),
            "without weights": lambda x: F.group_norm(input=x, num_groups=2),
        }
        for call in calls.values():
            for _ in range(3):
                autofuse.reset_stats()
                if call is calls["without weights"]:
                    got = F.group_norm(input=autofuse.wrap(x) * 2.0, num_groups=2)
                else:
                    got = call(autofuse.wrap(x) * 2.0)
                assert autofuse.is_pending(got), autofuse.stats().eager_ops
                assert_same(autofuse.unwrap(autofuse.materialize(got)), call(x * 2.0), None)


@pytest.mark.parametrize("name", [
    "channels that groups do not divide", "no groups", "one weight", "another dtype",
    "too few dims", "weights of another size", "one element", "empty", "a bool", "an integer",
    "several dtypes", "numbers as weights", "no flag",
])  # fmt: skip
def test_others_are_eager(recorded, name):  # noqa: F811
    x, w, b = arguments((2, 6, 4, 5))
    call = {
        "channels that groups do not divide": lambda x: F.group_norm(x, 4, w, b),
        "no groups": lambda x: torch.group_norm(x, 0, w, b),
        "one weight": lambda x: F.group_norm(x, 3, w),
        "another dtype": lambda x: F.group_norm(x.double(), 3, w.double(), b.double()),
        "too few dims": lambda x: F.group_norm(x[0, :, 0, 0], 3),
        "weights of another size": lambda x: F.group_norm(x, 3, w[:5], b[:5]),
        "one element": lambda x: F.group_norm(x[:1, :3, :1, :1], 3),
        "empty": lambda x: F.group_norm(x[:0], 3, w, b),
        "a bool": lambda x: F.group_norm(x, True, w, b),
        "an integer": lambda x: F.group_norm(x.int(), 3),
        "numbers as weights": lambda x: F.group_norm(x * 2.0, 3, 3.0, 4.0),
        "no flag": lambda x: torch.group_norm(x, 3, w, b, 1e-5, None),
        "several dtypes": lambda x: F.group_norm(x.bfloat16(), 3, w, b),
    }[name]

    def outcome(x):
        try:
            return autofuse.unwrap(autofuse.materialize(call(x)))
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            return type(error), str(error)

    with torch.no_grad():
        for _ in range(2):
            got, want = outcome(autofuse.wrap(x)), outcome(x)
            if isinstance(want, tuple):
                assert got == want
            else:
                assert_same(got, want, None)
        got = F.group_norm(autofuse.wrap(x) * 2.0, 3, w, b)  # as if that had not been
        assert_same(
            autofuse.unwrap(autofuse.materialize(got)), F.group_norm(x * 2.0, 3, w, b), None
        )


def test_channels_last_is_eager(recorded):  # noqa: F811
    """Which copies it first."""
    x, w, b = arguments((2, 6, 4, 5))
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        got = F.group_norm(autofuse.wrap(x) * 2.0, 3, w, b) * 0.5
    assert_same(got, F.group_norm(x * 2.0, 3, w, b) * 0.5, None)


def test_sizes_of_channels_are_told_apart(recorded):  # noqa: F811
    """Of one number of columns: what was chosen for one is not taken for another."""
    with torch.no_grad():
        for channels in (6, 7, 4, 6, 8):
            x, w, b = arguments((2, channels, 4, 5))

            def outcome(x, w=w, b=b):
                try:
                    return autofuse.unwrap(autofuse.materialize(F.group_norm(x, 2, w, b)))
                except RuntimeError as error:
                    return str(error)

            got, want = outcome(autofuse.wrap(x)), outcome(x)
            assert got == want if isinstance(want, str) else torch.equal(got, want)


def test_under_autocast_it_is_float32(recorded):  # noqa: F811
    x, w, b = arguments((2, 6, 4, 5))
    with torch.no_grad(), cuda_autocast_on_cpu(), torch.autocast("cpu", torch.bfloat16):
        got = F.group_norm(autofuse.wrap(x.bfloat16()) * 2.0, 3, w, b)
        assert autofuse.is_pending(got) and got.dtype is torch.float32
        got = autofuse.unwrap(autofuse.materialize(got * 2.0))
    assert_same(got, F.group_norm((x.bfloat16() * 2.0).float(), 3, w, b) * 2.0, 1e-6)


# --- on a GPU: the bits ---------------------------------------------------------------------------

ON_GPU = [*SHAPES, ((2, 320, 64, 64), 32), ((1, 128, 256, 257), 32), ((16, 64, 28, 28), 8),
          ((3, 30, 7, 5), 5), ((4, 512, 16, 16), 32), ((700, 24, 9), 3), ((2, 33, 15, 1), 33),
          ((64, 511), 7), ((5, 1024), 2), ((2, 3, 4, 5, 6), 1)]  # fmt: skip


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(autofuse.config, "compile", "now")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", ["plain", "wide", "special"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_eagers(on_gpu, dtype, affine, kind):
    for shape, groups in ON_GPU:
        for eps in (1e-5, 1e-3):
            x, *weights = arguments(shape, dtype, 0, "cuda", kind)
            given = weights if affine else ()
            y = arguments(shape, dtype, 1, "cuda")[0]

            def block(x, y):
                h = x * y
                normed = F.group_norm(h, groups, *given, eps=eps)
                return normed, F.silu(normed) + h

            with torch.no_grad():
                want = block(x, y)
                autofuse.reset_stats()
                got = tuple(map(autofuse.materialize, block(*map(autofuse.wrap, (x, y)))))
                assert autofuse.stats().ops_eager == 0, autofuse.stats().eager_ops
                assert_same(got, want, None, f"{shape} {groups} {eps}")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_gradients_are_eagers(on_gpu, dtype, affine):
    for shape, groups in ON_GPU:
        values = arguments(shape, dtype, 0, "cuda")

        def grads(wrap):
            xs = [t.detach().clone().requires_grad_() for t in values]
            ours = list(map(autofuse.wrap, xs)) if wrap else xs
            normed = F.group_norm(ours[0] * 0.5, groups, *(ours[1:] if affine else ()))
            out = F.silu(normed) * 2.0
            out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
            g = torch.linspace(-1, 1, out.numel(), device="cuda").to(dtype).view(out.shape)
            return out.detach(), torch.autograd.grad(out, xs if affine else xs[:1], g)

        assert_same(grads(True), grads(False), None, f"{shape} {groups}")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_under_autocast_are_eagers(on_gpu, dtype):
    for shape, groups in ON_GPU:
        x, _, _ = arguments(shape, dtype, 0, "cuda")
        _, w, b = arguments(shape, torch.float32, 1, "cuda")

        def block(x):
            with torch.autocast("cuda", dtype):
                return F.silu(F.group_norm(x * 0.5, groups, w, b)).to(dtype)

        with torch.no_grad():
            got = autofuse.unwrap(autofuse.materialize(block(autofuse.wrap(x))))
            assert_same(got, block(x), None, f"{shape} {groups}")
