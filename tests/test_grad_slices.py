"""Slices of pending values under grad: steps of one Segment with the ops that use them.

Eager's gradient of a slice is zero but for that part, and such tensors are added up; a backward
writes their sum at once. Bits are compared, signs of zeros too, and kernels are counted.
"""

import os
import random

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import autofuse
from autofuse.grad import owners
from support import DEVICES, FLOATS, assert_same, assert_told_alike, random_tensor

W = autofuse.wrap
COUNT = int(os.environ.get("AUTOFUSE_TEST_SLICES", "40"))
SEED = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261125"))
WILD = (0.0, -0.0, 1.0, -1.0, 0.5, -3.0, 1e30, float("inf"), float("-inf"), float("nan"))


@pytest.fixture(autouse=True)
def every_chain(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def wild(shape, dtype, device, seed):
    """Zeros of both signs, infinities and NaN among ordinary values."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, len(WILD), shape, generator=generator)
    return torch.tensor(WILD, dtype=torch.float64).to(dtype)[which].to(device)


def assert_same_signs(got, want, what=""):
    """As `assert_same`, and zeros have their signs on the CPU too."""
    assert_same(got, want, None, what)
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            ours, theirs = autofuse.unwrap(ours).detach(), theirs.detach()
            differs = (ours.signbit() != theirs.signbit()) & ~theirs.isnan()
            assert not differs.any(), f"{what}: signs of zeros at {differs.nonzero()[0].tolist()}"


def gradients(run, leaves, seeds, wrap):
    """What `run` gives, and its gradients with respect to leaves and results."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    results = run(*map(wrap, leaves))
    roots = [x for x in results if x.requires_grad]
    targets = [x for x in leaves if x.requires_grad] + roots
    grads = [] if not roots else torch.autograd.grad(
        roots, targets, [seeds(x, k) for k, x in enumerate(roots)], allow_unused=True
    )  # fmt: skip
    return [*results, *grads]


def ordinary(x, k):
    return random_tensor(tuple(x.shape), x.dtype, x.device.type, 30 + k)


def untamed(x, k):
    return wild(tuple(x.shape), x.dtype, x.device.type, 30 + k)


def assert_differentiated_alike(run, leaves, seeds=ordinary, what=""):
    """Twice, the second time from caches."""
    want = gradients(run, leaves, seeds, lambda x: x)
    for _ in range(2):
        assert_same_signs(gradients(run, leaves, seeds, W), want, what)


def leaves_of(count, shape, device, dtype=torch.float32):
    return [random_tensor(shape, dtype, device, k).requires_grad_() for k in range(count)]


# --- kernels --------------------------------------------------------------------------------------


def counted(run, leaves, wrap=W):
    """(kernels forward, with backward, eager ops forward) once kernels are there."""
    autofuse.materialize(run(*map(wrap, leaves)))
    autofuse.reset_stats()
    results = run(*map(wrap, leaves))
    autofuse.materialize(results)
    stats = autofuse.stats()
    torch.autograd.grad(
        results, [x for x in leaves if x.requires_grad], [ordinary(x, 0) for x in results]
    )
    return stats.kernels_launched, autofuse.stats().kernels_launched, stats.ops_eager


def by_slices(x):
    n = x.shape[-1] // 2
    return torch.cat((-x[..., n:], x[..., :n]), -1)


def by_chunk(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotary(half, first=False):
    def embed(x, cos, sin):
        return half(x) * sin + x * cos if first else x * cos + half(x) * sin

    def run(h, g, cos, sin):
        return embed(h * 0.125, cos, sin), embed(g * 2.0, cos, sin)

    return run


@pytest.mark.parametrize("half", [by_slices, by_chunk])
@pytest.mark.parametrize("first", [False, True])
def test_a_rotary_embedding_of_pending_values_is_two_kernels_and_two_backward(
    device, on, half, first
):
    leaves = leaves_of(2, (2, 4, 8, 16), device)
    leaves += [x.detach() for x in leaves_of(2, (8, 16), device)]
    run = rotary(half, first)
    assert_differentiated_alike(run, leaves)
    assert_differentiated_alike(run, leaves, untamed)
    assert counted(run, leaves) == (2, 4, 0)


@pytest.mark.parametrize("half", [by_slices, by_chunk])
@pytest.mark.parametrize("first", [False, True])
def test_a_rotary_embedding_of_heads_that_lie_behind_rows(device, half, first):
    """As attention has them: [B, S, H, D] in memory, [B, H, S, D] seen."""
    leaves = leaves_of(2, (2, 8, 4, 16), device)
    leaves += [x.detach() for x in leaves_of(2, (8, 16), device)]
    run = rotary(half, first)
    turned = lambda h, g, cos, sin: run(h.transpose(1, 2), g.transpose(1, 2), cos, sin)  # noqa: E731
    assert_differentiated_alike(turned, leaves)
    forward, both, _ = counted(turned, leaves)  # views of memory are torch's
    assert (forward, both) == (2, 4)


def glu(x):
    n = x.shape[-1] // 2
    y = x * 2.0
    return (y[:, :n] * y[:, n:].relu(),)


def gates(x, c):
    n = c.shape[-1]
    y = x + 1.0
    i, f, g, o = (y[:, k * n : (k + 1) * n] for k in range(4))
    new = f.relu() * c + i * g
    return o * new.relu(), new


def test_halves_and_gates_are_one_kernel_and_one_for_each_node(device, on):
    (x,) = leaves_of(1, (8, 64), device)
    assert_differentiated_alike(glu, [x])
    assert_differentiated_alike(glu, [x], untamed)
    assert counted(glu, [x]) == (1, 2, 0)
    c = x.detach()[:, :16].clone().requires_grad_()
    assert_differentiated_alike(gates, [x, c])
    assert_differentiated_alike(gates, [x, c], untamed)
    assert counted(gates, [x, c])[0] == 1


def test_a_held_slice_that_overlaps_others_leaves_these_inside(device):
    def run(x):
        y = x * 2.0
        return y[:, 1:3], y[:, :3] - y[:, 3:].relu() + y[:, :3]

    leaves = leaves_of(1, (4, 6), device)
    assert_differentiated_alike(run, leaves)
    assert_differentiated_alike(run, leaves, untamed)
    with torch.profiler.profile(acc_events=True) as profile:
        counted(run, leaves)
    ops = {event.key: event.count for event in profile.key_averages()}
    assert ops["aten::slice_backward"] == 1  # of the held one


# --- which elements are touched by which slices ---------------------------------------------------

TOUCHED = {
    "one": lambda y: y[:, 2:5] * 3.0,
    "its begin": lambda y: y[:, :2] * 3.0,
    "its end": lambda y: y[:, -1:] * 3.0,
    "halves": lambda y: y[:, :3] * y[:, 3:],
    "twice": lambda y: y[:, :3] * y[:, 3:] + y[:, :3],
    "beside the whole": lambda y: (y[:, 3:] * 2.0).sum(1, keepdim=True) + y,
    "all of it first": lambda y: torch.cat((-y[:, 3:], y[:, :3]), 1) + y * 2.0,
    "all of it last": lambda y: y * 2.0 + torch.cat((-y[:, 3:], y[:, :3]), 1),
    "a gap": lambda y: y[:, :2] * y[:, 4:],
    "overlapping": lambda y: y[:, 1:] - y[:, :-1],
    "two axes": lambda y: y[1:, :3] * y[:-1, 3:],
    "one after another": lambda y: y[:, :2] * 2.0 + y[:2, :2].relu()[:1],
    "other axis": lambda y: y[:2] * y[2:],
    "slices of slices": lambda y: y[:, 1:5][:, :2] * y[:, 5:],
    "steps": lambda y: y[:, ::2] * y[:, 1::2],
    "with an int": lambda y: y[:, :3] * y[:, 5, None],
    "chunks too": lambda y: y.chunk(2, 1)[0] * y[:, 3:],
    "two calls": lambda y: y.chunk(2, 1)[0] * y.chunk(2, 1)[1],
    "a part of nothing": lambda y: y.split([0, 6], 1)[1] * y.split([2, 0, 4], 1)[2][:, :1],
    "two unbinds": lambda y: y.unbind(1)[0] * y.unbind(1)[5],
    "narrow": lambda y: y.narrow(1, 0, 3) * y.narrow(1, 3, 3),
    "broadcast": lambda y: y[:, :1] * y,
    "parts of parts": lambda y: (y[:, :4] * 2.0)[:, :2] * (y[:, 2:] * 3.0)[:, 2:],
    "joined and cut again": lambda y: (torch.cat((y[:, 3:], y[:, :3]), 1) * 2.0)[:, 1:4] + 1.0,
}
CONTEXTS = {
    "dead base": lambda case: lambda x, w: [case(x * w)],
    "no rule before it": lambda case: lambda x, w: [case(x + w)],
    "held base": lambda case: lambda x, w: [y := x * w, case(y)],
    "used before and after": lambda case: lambda x, w: [
        ((y := x * w) * 0.5) + 0.0 * w, case(y), y.abs()
    ],
    "two users": lambda case: lambda x, w: [case(y := x * w), case(y + 1.0), case(y)],
}  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TOUCHED)
@pytest.mark.parametrize("seeds", [ordinary, untamed])
def test_zeros_are_added_as_eager_adds_them(device, name, context, seeds):
    run = CONTEXTS[context](TOUCHED[name])
    leaves = leaves_of(2, (4, 6), device)
    assert_differentiated_alike(run, leaves, seeds)
    turned = [x.detach().t().contiguous().t().requires_grad_() for x in leaves]
    assert_differentiated_alike(run, turned, seeds)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["halves", "a gap", "all of it last", "chunks too"])
def test_every_dtype(device, name, dtype):
    for seeds in (ordinary, untamed):
        leaves = leaves_of(2, (4, 6), device, dtype)
        for make in CONTEXTS.values():
            assert_differentiated_alike(make(TOUCHED[name]), leaves, seeds)


def test_dtypes_that_change_on_the_way(device):
    def run(x, w):
        y = (x * w).to(torch.float64)
        return [(y[:, :2] * y[:, 4:]).to(torch.float16), x.half()[:, :3] * w[:, 3:]]

    assert_differentiated_alike(run, leaves_of(2, (4, 6), device))
    assert_differentiated_alike(run, leaves_of(2, (4, 6), device), untamed)


@pytest.mark.parametrize("name", TOUCHED)
def test_as_eager_ops(tier, name):
    for make in CONTEXTS.values():
        assert_differentiated_alike(make(TOUCHED[name]), leaves_of(2, (4, 6), "cpu"), untamed)


def test_a_gradient_that_is_zero_times_infinity(device):
    """Zeros beside a slice go on through the ops before it."""

    def run(x, w):
        return [(x * w)[:, :2] * 2.0, ((x * w) * w)[:, 2:3] + 1.0]

    x, w = leaves_of(2, (4, 6), device)
    w = wild((4, 6), torch.float32, device, 5).requires_grad_()
    assert_differentiated_alike(run, [x, w])
    assert_differentiated_alike(run, [x, w], untamed)


# --- random programs ------------------------------------------------------------------------------

OPS = ["{a} * {b}", "{a} + {b}", "{a} - {b}", "-{a}", "{a} * 0.5", "{a}.relu()", "{a} / {b}",
       "{a} * {a}", "torch.where({b} > 0, {a}, {b})"]  # fmt: skip


def make_program(rng):
    """The source of `run(x, y, z)`, all [4, 12]; values of full width and of parts of it."""
    width = {"x": 12, "y": 12, "z": 12}
    recorded, lines, kept, divided = [], [], [], {}

    def add(text, size):
        name = f"v{len(lines)}"
        lines.append(f"{name} = {text}")
        width[name] = size
        recorded.append(name)
        return name

    for _ in range(2):
        a, b = rng.sample(["x", "y", "z"], 2)
        add(f"{a} * {b}", 12)
    for _ in range(rng.randint(3, 14)):
        a = rng.choice(recorded[-4:] + recorded[:2])
        size, draw = width[a], rng.random()
        if draw < 0.4 and size > 1:
            parts = [n for n in (2, 3, 4) if size % n == 0] or [1]
            each = size // divided.setdefault(a, rng.choice(parts))
            if rng.random() < 0.1:
                start = rng.randint(0, size - each)  # wherever
            else:
                start = each * rng.randrange(size // each)
            add(f"{a}[:, {start}:{start + each}]", each)
        elif draw < 0.5 and 2 * size <= 12:
            same = [n for n in recorded if width[n] == size]
            add(f"torch.cat((-{a}, {rng.choice(same)} * 2.0), 1)", 2 * size)
        elif draw < 0.56 and size % 2 == 0:
            k = rng.randrange(2)
            add(f"{a}.chunk(2, 1)[{k}]", size // 2)
        else:
            same = [n for n in width if width[n] == size]
            add(rng.choice(OPS).format(a=a, b=rng.choice(same)), size)
        if rng.random() < 0.1:
            kept.append(recorded[-1])
    for size in {width[name] for name in recorded[-5:]}:  # which makes most of them matter
        same = [name for name in recorded if width[name] == size]
        kept.append(add(" + ".join(same[-3:]), size))
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(x, y, z):\n{body}    return [{', '.join(dict.fromkeys(kept))}]\n"


@pytest.mark.parametrize("seeds", [ordinary, untamed])
def test_random_programs(device, on, seeds):
    rng = random.Random(SEED)
    for number in range(COUNT):
        source = make_program(rng)
        space = {"torch": torch}
        exec(source, space)
        leaves = leaves_of(3, (4, 12), device)
        if rng.random() < 0.3:
            leaves[2].requires_grad_(False)
        if rng.random() < 0.3:
            leaves[0] = leaves[0].detach().t().contiguous().t().requires_grad_()
        assert_differentiated_alike(
            space["run"], leaves, seeds, f"program {number} of {SEED}\n{source}"
        )


def test_slices_are_steps_in_random_programs(monkeypatch):
    """What is compared above is what this module is about."""
    inside, declined = [], []
    real = owners.Owners._own_view

    def own(self, index):
        real(self, index)
        if index in self.striped:
            (inside if index in self.split else declined).append(index)

    monkeypatch.setattr(owners.Owners, "_own_view", own)
    autofuse.record.modes.forget_all("test")
    test_random_programs("cpu", autofuse.config.native, ordinary)
    assert len(inside) > COUNT and declined
    autofuse.record.modes.forget_all("test")


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TOUCHED)
def test_derivatives_in_double_precision(context, name):
    case = TOUCHED[name]

    def run(x, w):
        results = CONTEXTS[context](lambda y: case(y).sin())(W(x), W(w))
        return tuple(map(autofuse.unwrap, results))

    leaves = leaves_of(2, (4, 6), "cpu", torch.float64)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TOUCHED)
def test_create_graph(device, name, context):
    run = CONTEXTS[context](TOUCHED[name])

    def twice(wrap):
        leaves = leaves_of(2, (4, 6), device)
        results = run(*map(wrap, leaves))
        seeds = [ordinary(x, k) for k, x in enumerate(results)]
        first = torch.autograd.grad(results, leaves, seeds, create_graph=True)
        roots = [g for g in first if g.requires_grad]
        second = () if not roots else torch.autograd.grad(
            roots, leaves, [ordinary(g, 5) for g in roots], allow_unused=True
        )  # fmt: skip
        return [*first], [*second]

    (got, more), (want, wanted) = twice(W), twice(lambda x: x)
    assert_same(got, want, None)
    assert_same(more, wanted, 1e-5)  # eager adds those of its own formulas up, op by op


def retained(x, leaf):
    base = x * 3.0
    a, b = base[:, :3], base[:, 3:]
    base.retain_grad()
    a.retain_grad()
    (a * b).sum().backward()
    return base.grad, a.grad, leaf.grad


def hooked(x, leaf):
    seen = []
    base = x * 3.0
    a, b = base[:, :3], base[:, 3:]
    b.register_hook(lambda g: seen.append(g.clone()) or g * 2.0)
    base.register_hook(lambda g: seen.append(g.clone()))
    (a * b + a).sum().backward()
    return [*seen, leaf.grad]


def held(x, leaf):
    base = x * 3.0
    a, b = base[:, :3], base[:, 3:]
    result = a * b
    (g,) = torch.autograd.grad(result.sum(), b, retain_graph=True)
    result.sum().backward()
    return a, b, g, leaf.grad, a._base is base, b.grad_fn.name()


def one_held(x, leaf):
    base = x * 3.0
    a = base[:, :3]
    result = a * base[:, 3:] + base[:, :3]
    del base
    result.sum().backward()
    return a, a._version, leaf.grad


def written_base(x, leaf):
    base = x * 2.0
    result = base[:, :3] + base[:, 3:]
    base.mul_(3.0)
    (result.sum() + base.sum()).backward()
    return result, base, base._version, leaf.grad


def written_slice(x, leaf):
    base = x * 2.0
    a = base[:, :3]
    result = a + base[:, 3:]
    a.mul_(3.0)
    (result.sum() + base.sum()).backward()
    return result, base, a, base._version, leaf.grad


def saved_and_written(name):
    """What is saved is written before backward: the memory of both parts, of one, across them."""

    def run(x, leaf):
        base = x * 2.0
        a, other = base[:, :3], base[:1]
        result = a * base[:, 3:]
        held = {"base": [base], "slice": [a, base], "other slice": [other]}[name]
        del base, a, other
        autofuse.materialize((held[0], result))
        held[0].add_(1.0)
        result.sum().backward()
        return [leaf.grad]

    run.__name__ = f"saved_and_written, {name}"
    return run


def backward_twice(x, leaf):
    base = x * x
    result = (base[:, :3] * base[:, 3:]).sum()
    result.backward(retain_graph=True)
    result.backward()
    result.backward()
    return [leaf.grad]


def told(x, leaf):
    seen = []
    with saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        base = x * x
        result = base[:, :3] * base[:, 3:] + base[:, :3]
    result.sum().backward()
    return [seen, leaf.grad]


def told_between(x, leaf):
    seen = []
    base = x * x
    a = base[:, :3] * 2.0
    with saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        result = a * base[:, 3:]
    result.sum().backward()
    return [seen, leaf.grad]


def on_cpu(x, leaf):
    with torch.autograd.graph.save_on_cpu():
        base = x * x
        result = base[:, :3] * base[:, 3:]
    result.sum().backward()
    return [leaf.grad]


def checkpointed(x, leaf):
    def block(x):
        base = x * 2.0
        return base[:, :3].relu() * base[:, 3:]

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    return [leaf.grad]


def mute(x, leaf):
    base = x * 3.0
    with torch.no_grad():
        still = base[:, :3] * 2.0
    (base[:, 3:] * still * base[:, :3].detach()).sum().backward()
    return [still.requires_grad, leaf.grad]


def autocast(x, leaf):
    with torch.autocast(x.device.type, torch.bfloat16):
        base = x * 2.0
        loss = torch.nn.functional.mse_loss(base[:, :3] * 1.5, base[:, 3:])
    loss.backward()
    return [loss, leaf.grad]


def between(x, leaf):
    """A node of torch's own is made between the slices."""
    base = x * 2.0
    a = base[:, :3]
    other = leaf.cumsum(0)
    result = a * base[:, 3:]
    (result.sum() + other.sum() * 3.0).backward()
    return [leaf.grad]


def elsewhere(x, leaf):
    """Gradients of the base come from later chains too."""
    base = x * x
    result = base[:, :3] * base[:, 3:] + base[:, :3]
    autofuse.materialize(result)
    later = base * 0.3
    (result.sum() + (later * later).sum() + base.cumsum(0).sum()).backward()
    return [leaf.grad]


def two_calls(x, leaf):
    """Each has a node of its own, whose parts that nobody uses have gradients of zeros."""
    base = x * 2.0
    a, b = base.chunk(2, 1)[0], base.chunk(2, 1)[1]
    c, d = base.chunk(2, 1)
    (a * b + c * d).sum().backward()
    return [a.grad_fn is b.grad_fn, c.grad_fn is d.grad_fn, a.grad_fn is c.grad_fn, leaf.grad]


PROGRAMS = [retained, hooked, held, one_held, written_base, written_slice, backward_twice, told,
            told_between, on_cpu, checkpointed, mute, autocast, between, elsewhere, two_calls,
            *map(saved_and_written, ("base", "slice", "other slice"))]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda run: run.__name__)
def test_whatever_is_done_with_them(device, on, tier, program):
    assert_told_alike(program, random_tensor((4, 6), torch.float32, device))


def test_in_check_mode(device, monkeypatch):
    """Every chain and every backward is compared with eager's."""
    monkeypatch.setattr(autofuse.config, "check", True)
    for case in TOUCHED.values():
        for make in CONTEXTS.values():
            assert_differentiated_alike(make(case), leaves_of(2, (4, 6), device))
