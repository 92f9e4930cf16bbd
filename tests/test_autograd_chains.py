"""Random programs under grad against eager: values, gradients, graph connectivity.

As in test_chains; the gradients are those of a random sum of what the program keeps, with respect
to its leaves and to the intermediates it keeps. Bits are compared, on the CPU for arithmetic only,
or where chains run as eager ops: so the casts of autocast on CUDA are compared on the CPU.
"""

import contextlib
import functools
import os
import random

import pytest
import torch
import torch.nn.functional as F

import autofuse
from support import DEVICES, assert_same, cuda_autocast_on_cpu, random_tensor

COUNT = int(os.environ.get("AUTOFUSE_TEST_CHAINS", "150"))
SHAPES = [(8, 12), (12,), (8, 1), (1, 12), ()]
SMOOTH = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "-{a}", "{a}.abs()", "{a} * {s}", "{a} + {s}",
    "{s} - {a}", "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "{a}.clamp(-1, 1)",
    "{a}.relu()", "{a}.float()", "{a}.double()", "{a}.square()", "torch.add({a}, {b})",
    "torch.mul({a}, {b})", "torch.neg({a})",
]  # fmt: skip
FLOATING = [
    "torch.tanh({a})", "{a}.sigmoid()", "F.gelu({a})", "F.silu({a})", "torch.exp({a})", "{a} / {b}",
    "{a} / {s}", "{a}.half()", "{a}.bfloat16()", "torch.add({a}, {b}, alpha={s})", "{a} ** 2",
    "torch.lerp({a}, {b}, 0.3)", "torch.addcmul({a}, {a}, {b}, value={s})", "{a}.sin()",
    "F.softplus({a})", "torch.sqrt({a}.abs())", "F.leaky_relu({a}, 0.1)", "{a}.erf()", "1 / {a}",
    "{a} ** 3", "F.elu({a})", "torch.rsqrt({a}.abs() + 1)", "F.logsigmoid({a})", "F.softsign({a})",
    'F.mse_loss({a}, {a} + 1, reduction="none")', "torch.xlogy({a}, {a}.abs() + 1)",
    "torch.logaddexp({a}, {a} * {s})",
]  # fmt: skip
CAST = [
    "torch.pow({a}.abs() + 1, {b})", "torch.rsqrt({a}.abs() + 1)", "{a}.log1p()", "{a}.cosh()",
    "torch.addcdiv({a}, {b}, {a}.abs() + 1)", "torch.atan2({a}, {b})", "{a}.tan()", "{a}.erfc()",
    "{a}.square()", "{a} ** 3", "{a}.asinh()", "{a}.reciprocal()", "{a}.half().exp()", "{s} ** {a}",
    "{a}.bfloat16().sigmoid()", "{a}.half() * {b}", "{a}.bfloat16().square()", "{a}.half().rsqrt()",
    "F.l1_loss({a}, {a} * 2)", "{a}.half().erf()", "({a}.bfloat16() * {s}).asinh()",
]  # fmt: skip
LOSSES = [
    'F.mse_loss({a}, {a} + 1, reduction="none")',
    'F.smooth_l1_loss({a}, {a} * 2, reduction="none")',
    "cast_loss(F.mse_loss, {a}.bfloat16())", "cast_loss(F.huber_loss, {a}.half())",
]  # fmt: skip
VIEWS = [  # their results have the shape of {a}, or go along with it
    "{a}[..., :1] if {a}.dim() else {a}", "{a}.t().t() if {a}.dim() == 2 else {a}",
    "{a}.reshape(-1).reshape({a}.shape)", "{a}.unsqueeze(0).squeeze(0)",
    "{a}.transpose(0, -1).transpose(0, -1) if {a}.dim() else {a}",
    "{a}.expand(2, *{a}.shape)[1]", "{a}.expand(2, *{a}.shape).unbind()[0]",
    "{a}[0] if {a}.dim() > 1 else {a}", "{a}[None, ...][-1]", "halves({a}, {b})",
    "{a}.unbind(-1)[-1].unsqueeze(-1) if {a}.dim() else {a}", "neighbours({a})",
    "{a}.unflatten(-1, (1, -1)).flatten(-2) if {a}.dim() else {a}", "{a}.movedim(0, 0)",
    "torch.stack(({a}, {a} * 2.0))[1]", "torch.stack(({a} * {s}, {a}), -1)[..., 0]",
    "torch.cat(({a}, -{a}), -1)[..., : {a}.shape[-1]] if {a}.dim() else {a}", "turned({a}) * {b}",
    "torch.cat(({a} + 1.0, {b}), -1).sum() if {a}.shape == {b}.shape and {a}.dim() else {a}",
    "{a}.diagonal(0, -2, -1)[..., :1] if {a}.dim() > 1 else {a}",
]  # fmt: skip
OUTSIDE = [
    "{a}.detach()", "{a}.sum(-1, keepdim=True)", "{a}.t() if {a}.dim() == 2 else {a}",
    "{a}.contiguous()", "{a}[..., :1] if {a}.dim() else {a}",
    "torch.cumsum({a}, -1) if {a}.dim() else {a}",
]  # fmt: skip


def halves(a, b):
    """Something of the last halves of a, on which all of them depend."""
    if not a.dim() or a.shape[-1] % 2:
        return a
    x, y = a.chunk(2, -1)
    both = x * 2.0 + y * x
    return b * both[..., :1] if b.dim() and b.shape[:-1] == a.shape[:-1] else both.sum()


def turned(a):
    """Its halves the other way round, one of them negative, as in rotary embeddings."""
    if not a.dim() or a.shape[-1] % 2:
        return a
    x, y = a.chunk(2, -1)
    return torch.cat((-y, x), -1)


def neighbours(a):
    """Differences of windows that overlap."""
    if not a.dim() or a.shape[-1] < 3:
        return a
    differences = a[..., 1:] - a[..., :-1]
    return a + differences[..., 1:2]


def cast_loss(loss, x):
    """In 16 bits torch's kernels on the CPU round otherwise: here its operands become float32."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return loss(x, x * 2 - 1, reduction="none")


def make_program(rng, device, autocast=False, wide=False):
    """(source of `run(i0, i1, i2)`, its leaves).

    autocast: in regions that begin and end between its lines. wide: on the CPU too with all ops and
    dtypes.
    """
    wide = wide or device == "cuda"
    pool = SMOOTH + (FLOATING if wide else []) + (CAST if autocast and wide else [])
    if autocast:  # on the CPU the only ones that are cast there
        pool = pool + LOSSES
    dtypes = [torch.float32, torch.float32, torch.float64]
    if wide:
        dtypes += [torch.float16, torch.bfloat16]
    dtype = rng.choice(dtypes)
    shape = rng.choice([(8, 12), (2, 8, 12)])
    shapes = [shape, shape, rng.choice([shape, *SHAPES])]
    leaves = []
    for own in shapes:
        kind = dtype if rng.random() < 0.8 else rng.choice(dtypes)
        t = random_tensor(own, kind, device, rng.randrange(1 << 30))
        if len(own) >= 2 and rng.random() < 0.2:
            t = t.transpose(0, 1).contiguous().transpose(0, 1)
        leaves.append(t.requires_grad_(rng.random() < 0.8))
    leaves[0].requires_grad_()
    lines, names, depth = [], ["i0", "i1", "i2"], 0
    for k in range(rng.randint(2, 18)):
        a, b = rng.choice(names[-4:]), rng.choice(names)
        s = rng.choice(["2", "0.5", "-1.25", "3"])
        draw = rng.random()
        if autocast and depth < 3 and rng.random() < 0.25:
            lower = rng.choice(["torch.bfloat16", "torch.float16"])
            on = rng.random() < 0.75
            lines.append(f"{'    ' * depth}with torch.autocast({device!r}, {lower}, enabled={on}):")
            depth += 1
        elif depth and rng.random() < 0.3:
            depth -= 1
        indent = "    " * depth
        if draw < 0.05 and len(names) > 4:
            victim = rng.choice(names[3:])
            names.remove(victim)
            lines.append(f"{indent}del {victim}")
            continue
        kinds = OUTSIDE if draw > 0.92 else VIEWS if draw > 0.7 else pool
        rule = rng.choice(kinds).format(a=a, b=b, s=s)
        if 0.05 < draw < 0.1:
            lines.append(f"{indent}with torch.no_grad(): v{k} = {rule}")
        else:
            lines.append(f"{indent}v{k} = {rule}")
        names.append(f"v{k}")
    kept = [n for n in names[3:] if rng.random() < 0.3] or names[-1:]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(i0, i1, i2):\n{body}    return [{', '.join(kept)}]\n", leaves


def gradients(run, leaves, wrap, region=contextlib.nullcontext):
    """(what the program keeps, gradients of leaves and kept values), or the error's type.

    region: what backward runs in.
    """
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in leaves]
    try:
        kept = run(*[wrap(t) for t in leaves])
    except RuntimeError as error:
        return type(error), str(error)[:60]
    roots = [t for t in kept if t.requires_grad]
    flags = [t.requires_grad for t in kept]
    if not roots:
        return kept, flags, []
    seeds = [random_tensor(tuple(t.shape), t.dtype, t.device.type, 7) for t in roots]
    targets = [t for t in leaves if t.requires_grad] + roots
    with region():
        grads = torch.autograd.grad(roots, targets, seeds, allow_unused=True)
    values = [autofuse.unwrap(t).detach() for t in kept]
    return values, flags, list(grads)


def compare(device, same=assert_same, count=COUNT, **options):
    """Random programs and their gradients with eager's, as `same` finds; options: of programs."""
    seed = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261122"))
    rng = random.Random(seed)
    for number in range(count):
        source, leaves = make_program(rng, device, **options)
        region = contextlib.nullcontext
        if options and rng.random() < 0.3:
            lower = rng.choice([torch.bfloat16, torch.float16])
            region = functools.partial(torch.autocast, device, lower)
        space = {"torch": torch, "F": F, "cast_loss": cast_loss, "halves": halves}
        space |= {"neighbours": neighbours, "turned": turned}
        exec(source, space)
        try:
            want = gradients(space["run"], leaves, lambda t: t, region)
        # older versions on the CPU, of some losses in float16; autocast in backward, of float64
        except (NotImplementedError, RuntimeError):
            continue
        for _ in range(2):  # the second time from the caches
            got = gradients(space["run"], leaves, autofuse.wrap, region)
            what = f"program {number} of seed {seed}, {[(t.dtype, tuple(t.shape)) for t in leaves]}"
            if region is not contextlib.nullcontext:
                what += ", backward under autocast"
            try:
                same(got, want, None)
            except AssertionError as error:
                raise AssertionError(f"{what}\n{source}\n{error}") from error


@pytest.fixture(autouse=True)
def every_chain(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_under_grad(device):
    compare(device)


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_under_grad_and_autocast(device):
    compare(device, count=COUNT // 2, autocast=True)
    assert autofuse.stats().ops_recorded > COUNT


def test_with_the_casts_of_cuda_as_eager_ops(eager_tier):
    with cuda_autocast_on_cpu():
        compare("cpu", autocast=True, wide=True)
    assert autofuse.stats().ops_recorded > 2 * COUNT


def like(got, want, _):
    """Everything but the values, which other kernels round otherwise."""
    if isinstance(want, torch.Tensor):
        got = autofuse.unwrap(got)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert got.requires_grad == want.requires_grad
    elif isinstance(want, (tuple, list)):
        for ours, theirs in zip(got, want, strict=True):
            like(ours, theirs, _)
    else:
        assert got == want


def test_with_the_casts_of_cuda_as_kernels():
    with cuda_autocast_on_cpu():
        compare("cpu", like, COUNT // 5, autocast=True, wide=True)
    assert autofuse.stats().kernels_launched > COUNT // 5
