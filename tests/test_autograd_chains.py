"""Random programs under grad against eager: values, gradients, graph connectivity.

As in test_chains; the gradients are those of a random sum of what the program keeps, with respect
to its leaves and to the intermediates it keeps. Bits are compared, on the CPU for arithmetic only.
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F

import autofuse
from support import DEVICES, assert_same, random_tensor

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
OUTSIDE = [
    "{a}.detach()", "{a}.sum(-1, keepdim=True)", "{a}.t() if {a}.dim() == 2 else {a}",
    "{a}.contiguous()", "{a}[..., :1] if {a}.dim() else {a}",
    "torch.cumsum({a}, -1) if {a}.dim() else {a}",
]  # fmt: skip


def make_program(rng, device):
    """(source of `run(i0, i1, i2)`, its leaves)."""
    pool = SMOOTH + (FLOATING if device == "cuda" else [])
    dtypes = [torch.float32, torch.float32, torch.float64]
    if device == "cuda":
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
    lines, names = [], ["i0", "i1", "i2"]
    for k in range(rng.randint(2, 18)):
        a, b = rng.choice(names[-4:]), rng.choice(names)
        s = rng.choice(["2", "0.5", "-1.25", "3"])
        draw = rng.random()
        if draw < 0.05 and len(names) > 4:
            victim = rng.choice(names[3:])
            names.remove(victim)
            lines.append(f"del {victim}")
            continue
        rule = rng.choice(OUTSIDE if draw > 0.92 else pool).format(a=a, b=b, s=s)
        if 0.05 < draw < 0.1:
            lines.append(f"with torch.no_grad(): v{k} = {rule}")
        else:
            lines.append(f"v{k} = {rule}")
        names.append(f"v{k}")
    kept = [n for n in names[3:] if rng.random() < 0.3] or names[-1:]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(i0, i1, i2):\n{body}    return [{', '.join(kept)}]\n", leaves


def gradients(run, leaves, wrap):
    """(what the program keeps, gradients of leaves and kept values), or the error's type."""
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
    grads = torch.autograd.grad(roots, targets, seeds, allow_unused=True)
    values = [autofuse.unwrap(t).detach() for t in kept]
    return values, flags, list(grads)


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_under_grad(device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    seed = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261122"))
    rng = random.Random(seed)
    for number in range(COUNT):
        source, leaves = make_program(rng, device)
        space = {"torch": torch, "F": F}
        exec(source, space)
        want = gradients(space["run"], leaves, lambda t: t)
        for _ in range(2):  # the second time from the caches
            got = gradients(space["run"], leaves, autofuse.wrap)
            what = f"program {number} of seed {seed}, {[(t.dtype, tuple(t.shape)) for t in leaves]}"
            try:
                assert_same(got, want, None)
            except AssertionError as error:
                raise AssertionError(f"{what}\n{source}\n{error}") from error
