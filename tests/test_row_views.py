"""Reductions of what is read through views of pending values, joined, or in other places.

What is viewed is stored by a kernel of its own, and the rows are read from there: of distances
between pairs of points only the points and the distances have memory.
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from test_groups import kernels  # noqa: F401
from test_reductions import emulated, launched, recorded, recording, table  # noqa: F401

import autofuse
from autofuse import errors
from autofuse.kernel import again
from autofuse.record.modes import forget_all
from support import assert_same, needs_cuda


def pairs(x, y):
    return (x * 2.0)[:, None] - (y + 1.0)[None]


PROGRAMS = {  # of x [N, K] and y [M, K]
    "distances": lambda x, y: pairs(x, y).square().sum(-1),
    "distances, scaled": lambda x, y: pairs(x, y).square().sum(-1).sqrt() * 0.5 + 1.0,
    "the nearest": lambda x, y: pairs(x, y).abs().sum(-1).mul(2.0),
    "largest of pairs": lambda x, y: pairs(x, y).amax((1, 2)) * 2.0,
    "over the first points": lambda x, y: pairs(x, y).mean(0) + 1.0,
    "over both points": lambda x, y: pairs(x, y).sum((0, 1)),
    "which is larger": lambda x, y: (pairs(x, y).max(-1).values, pairs(x, y).argmax(1)),
    "a step of a chain": lambda x, y: torch.logsumexp((x * 1.5).unsqueeze(1) + y * 0.5, 2),
    "shares of pairs": lambda x, y: torch.softmax(pairs(x, y), -1) * 2.0,
    "logarithms of these": lambda x, y: F.log_softmax(pairs(x, y) * 0.5, 1),
    "deviations": lambda x, y: pairs(x, y).std(-1, correction=0) + pairs(x, y).mean(-1),
    "a norm of what is stacked": lambda x, y: F.layer_norm(
        torch.stack([x * 2.0, x * x], 1), (2, x.shape[1])
    ),
    "of all": lambda x, y: pairs(x, y).square().sum() * 0.5,
    "flat": lambda x, y: (x * 2.0).flatten().sum(),
    "split": lambda x, y: (x * 2.0).view(len(x), 1, -1).amax((1, 2)) + 1.0,
    "turned": lambda x, y: (x * 2.0).t().sum(-1),
    "turned, beside": lambda x, y: ((x * 2.0).t() * x.t()).amax(0),
    "neighbours": lambda x, y: ((x * 2.0)[:, 1:] - (x * 2.0)[:, :-1]).square().sum(-1),
    "rows from the second on": lambda x, y: (x * 2.0)[1:].sum(0),
    "every second": lambda x, y: ((x * 2.0)[:, ::2] + 1.0).sum(-1),
    "a diagonal": lambda x, y: (x * 2.0).diagonal().sum(),
    "a view of a view": lambda x, y: ((x * 2.0).t()[:2].t() * 0.5).sum(-1),
    "expanded": lambda x, y: ((x * 2.0)[:1].expand(3, x.shape[1]) * 3.0).sum(0),
    "joined": lambda x, y: (torch.cat([x * 2.0, y * 3.0]) * 0.5).sum(-1),
    "joined, alone": lambda x, y: torch.cat([x * 2.0, y * 3.0]).amax(-1),
    "stacked": lambda x, y: torch.stack([x * 2.0, x + 1.0], -1).sum((-1, -2)),
    "rolled": lambda x, y: (torch.roll(x * 2.0, 1, 0) * x).sum(-1),
    "rolled, of memory": lambda x, y: (torch.roll(x, 1, 0) * x).amax(-1) + 1.0,
    "from its end": lambda x, y: ((x * 2.0).flip(1) + x).sum(-1),
    "padded": lambda x, y: (F.pad(x, (1, 2)) * 2.0).sum(-1),
    "repeated": lambda x, y: ((x * 2.0).repeat(2, 1) + 1.0).mean(-1),
    "held": lambda x, y: (h := pairs(x, y), h.square().sum(-1)),
    "a view that is held": lambda x, y: (h := (x * 2.0)[:, None], (h - y).square().sum(-1)),
    "what is viewed is held": lambda x, y: (h := x * 2.0, (h[:, None] - y).square().sum(-1)),
    "read by the rows too": lambda x, y: (b := x * 2.0, (b * b[:, :1]).sum(-1), b * 3.0)[1:],
    "beside another view": lambda x, y: (h := x * 2.0, h.t() * 3.0, (h[:, :1] * h).sum(-1))[1:],
    "and what is around": lambda x, y: (
        d := pairs(x, y), s := d.square().sum(-1, keepdim=True), d / (s + 1.0))[2],
    "its mean is taken off": lambda x, y: (d := pairs(x, y), d - d.mean((1, 2), keepdim=True))[1],
    "and a loss": lambda x, y: F.mse_loss((x * 2.0)[:1], (y + 1.0)[:1]),
    "a roll that is held": lambda x, y: (torch.roll(x, 1, 0), x.softmax(-1)),
    "held, of what is computed": lambda x, y: ((x * 2.0).flip(0), x.amax(-1, keepdim=True) * x),
    "a pad that is held": lambda x, y: (F.pad(x, (1, -1)) * 1.0, F.pad(x, (1, -1)), x.sum()),
    "held and read": lambda x, y: (r := x.roll(1, 0), r * 2.0, (x * 2.0).sum(-1), x.flip(-1)),
    "a copy that is held": lambda x, y: ((x * 2.0).t().reshape(x.shape), (x * 2.0).mean(-1)),
    "numbers of rows beside": lambda x, y: (
        h := x * 2.0, v := h[:, 0] + 1.0, (h.unsqueeze(1) * y).sum(-1).mean(1) * 1.0, v)[2:],
}  # fmt: skip
SHAPES = [((4, 3), (4, 3)), ((5, 8), (7, 8)), ((2, 33), (3, 33)), ((1, 5), (1, 5)),
          ((9, 130), (4, 130)), ((3, 1), (2, 1))]  # fmt: skip


def compare(name, rtol, shapes=SHAPES, device="cpu", **how):
    errors._said.clear()
    for first, second in shapes:
        x, y = table(*first, **how).to(device), table(*second, seed=1, **how).to(device)
        want = PROGRAMS[name](x, y)
        for _ in range(3):
            got = PROGRAMS[name](autofuse.wrap(x), autofuse.wrap(y))
            got, wanted = (list(t) if isinstance(t, tuple) else [t] for t in (got, want))
            got = [autofuse.unwrap(autofuse.materialize(t)) for t in got]
            assert_same(got, wanted, rtol, f"{first} {second}")
    assert not any("failed" in said for said in errors._said), errors._said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_kernels_for_cuda_read_them(kernels, name, dtype):  # noqa: F811
    compare(name, 1e-5 if dtype is torch.float32 else 2e-2, dtype=dtype)


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_by_eager_ops_the_bits_are_the_same(recorded, name):  # noqa: F811
    compare(name, None)


@pytest.mark.parametrize("name, count", [
    ("distances", 3), ("distances, scaled", 3), ("a step of a chain", 2), ("neighbours", 2),
    ("held", 3), ("what is viewed is held", 2), ("rolled, of memory", 2),
    ("and what is around", 3),
])  # fmt: skip
@torch.no_grad()
def test_the_rows_are_one_kernel(kernels, name, count):  # noqa: F811
    x, y = table(5, 8), table(7, 8, seed=1)
    for _ in range(3):
        launched.clear()
        autofuse.reset_stats()
        autofuse.materialize(PROGRAMS[name](autofuse.wrap(x), autofuse.wrap(y)))
        assert len(launched) == count, launched
        assert "views" not in autofuse.stats().flushes


@torch.no_grad()
def test_rows_are_not_read_across_views_of_much(kernels, monkeypatch):  # noqa: F811
    """What is computed from these is stored, by a kernel that goes along as it likes."""
    x, y = table(16, 16), table(16, 16, seed=1)
    for far, names in ((0.0, ["af_mul", "af_rows_add_sum"]), (1.0, ["af_mul_add", "af_rows_sum"])):
        monkeypatch.setattr(again, "FAR_US", far)
        forget_all("test")
        for _ in range(2):
            launched.clear()
            got = autofuse.materialize(((autofuse.wrap(x) * 2.0).t() + autofuse.wrap(y)).sum(-1))
        assert_same(autofuse.unwrap(got), ((x * 2.0).t() + y).sum(-1), 1e-5)
        assert [name for name, _, _ in launched] == names


@torch.no_grad()
def test_pairs_get_no_memory(kernels):  # noqa: F811
    x, y = table(16, 8), table(32, 8, seed=1)
    for _ in range(3):
        autofuse.reset_stats()
        autofuse.materialize(PROGRAMS["distances"](autofuse.wrap(x), autofuse.wrap(y)))
    stats = autofuse.stats()
    assert stats.live_outs_stored == 3 and stats.bytes_elided >= 2 * 4 * 16 * 32 * 8


@torch.no_grad()
def test_rows_that_blocks_share(kernels):  # noqa: F811
    for n in (131072 // 64, 140_000 // 64):
        x = table(64, n)
        for name in ("sum", "amax"):
            want = getattr((x * 2.0).flatten().abs(), name)()
            got = getattr((autofuse.wrap(x) * 2.0).flatten().abs(), name)()
            assert_same(autofuse.unwrap(autofuse.materialize(got)), want, 1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(recorded, name):  # noqa: F811
    """Rules go through views or through rows: there another chain begins."""
    for first, second in SHAPES[:3]:
        found = []
        for wrap in (autofuse.wrap, lambda t: t):
            xs = [table(*first).requires_grad_(), table(*second, seed=1).requires_grad_()]
            outs = PROGRAMS[name](*map(wrap, xs))
            outs = [autofuse.materialize(t) for t in (outs if isinstance(outs, tuple) else [outs])]
            total = sum((t * t).sum() for t in outs if t.requires_grad)
            found.append([*torch.autograd.grad(total, xs, allow_unused=True)])
        got, want = ([t for t in grads if t is not None] for grads in found)
        assert_same(list(map(autofuse.unwrap, got)), want, 1e-4)


@torch.no_grad()
def test_what_is_written_meanwhile(kernels):  # noqa: F811
    """The values of before it are those that are viewed and reduced."""
    for write in (lambda x: x.mul_(3.0), lambda x: x[:, :1].zero_(), lambda x: x.copy_(x + 1.0)):
        for _ in range(3):
            x, y = table(5, 8), table(7, 8, seed=1)
            w, v = autofuse.wrap(x.clone()), autofuse.wrap(y)
            want = PROGRAMS["distances"](x, y)
            write(x)
            want = [want, PROGRAMS["distances"](x, y), x]
            got = [PROGRAMS["distances"](w, v)]
            write(w)
            got += [PROGRAMS["distances"](w, v), w]
            assert_same([autofuse.unwrap(autofuse.materialize(t)) for t in got], want, 1e-5)


VIEWS = ["[:, None]", "[None]", ".unsqueeze(-1)", ".t()", "[:, ::2]", "[1:]", ".flatten()[:6]",
         ".flip(0)", ".roll(1, 1)", ".repeat(1, 2)", "[..., 0]", ".view(-1, 2)"]  # fmt: skip
REDUCED = [".sum(-1)", ".amax(0)", ".mean((0, -1), keepdim=True)", ".sum()", ".softmax(-1)",
           ".logsumexp(0)", ".var(-1, correction=0, keepdim=True)", ".argmax(-1)"]  # fmt: skip


def drawn(rng):
    """The text of a program over x and y, of views, ops between them and a reduction."""
    lines, known = [], ["x", "y"]
    for k in range(rng.randint(2, 5)):
        a, b = rng.choice(known), rng.choice(known)
        view = rng.choice(VIEWS)
        text = rng.choice([f"{a} * 2.0", f"{a}{view}", f"{a} - {b}", f"{a} * {b}",
                           f"torch.cat([{a}, {a} + 1.0])", f"({a} + 1.0){view} * 0.5"])  # fmt: skip
        lines.append(f"h{k} = {text}")
        known.append(f"h{k}")
    lines.append(f"r = ({known[-1]} * 1.5){rng.choice(REDUCED)}")
    held = rng.choice(known[2:])
    tail = rng.choice(["r * 2.0", "r", f"(r, {held} + 1.0)", f"({held}, r)"])
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(x, y):\n{body}    return {tail}\n"


@pytest.mark.parametrize("seed", range(10 * int(os.environ.get("AUTOFUSE_TEST_ORDERS", "12"))))
@torch.no_grad()
def test_random_programs(kernels, seed):  # noqa: F811
    rng = random.Random(f"{os.environ.get('AUTOFUSE_TEST_SEED', '1129')} {seed}")
    source = drawn(rng)
    space = {"torch": torch}
    exec(source, space)
    shape = rng.choice([1, 2, 4, 6]), rng.choice([2, 4, 8, 34])
    x, y = table(*shape, seed=seed), table(*shape, seed=seed + 1)
    try:
        want = space["run"](x, y)
    except (RuntimeError, IndexError, UserWarning):  # shapes that do not go together, or nothing
        return
    want = list(want) if isinstance(want, tuple) else [want]
    errors._said.clear()
    for _ in range(2):
        got = space["run"](autofuse.wrap(x), autofuse.wrap(y))
        got = list(got) if isinstance(got, tuple) else [got]
        got = [autofuse.unwrap(autofuse.materialize(t)) for t in got]
        assert_same(got, want, 1e-4, f"{shape}\n{source}")
    assert not any("failed" in said for said in errors._said), errors._said


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_on_a_gpu(name, dtype, always):
    compare(name, None, [*SHAPES, ((64, 3), (100, 3)), ((257, 64), (33, 64))], "cuda", dtype=dtype)
