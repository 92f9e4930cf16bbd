"""Random programs against eager: ops, dtypes, shapes, layouts, liveness and reads mixed.

A failure prints the program as plain code. On the CPU the programs use arithmetic only and every
bit counts; on CUDA they use the whole table, and every bit counts there too.
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F  # noqa: F401 - the programs use it

import autofuse
from support import DEVICES, assert_same, random_tensor

EXACT = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "-{a}", "{a}.abs()", "{a} * {s}", "{a} + {s}",
    "{s} - {a}", "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "{a}.clamp(-1, 1)",
    "{a}.relu()", "{a}.float()", "{a}.double()", "{a} == {b}", "{a} < {s}", "{a}.square()",
    "torch.add({a}, {b})", "torch.mul({a}, {b})", "torch.neg({a})",
]  # fmt: skip
FLOATING = [
    "torch.tanh({a})", "{a}.sigmoid()", "F.gelu({a})", "F.silu({a})", "torch.exp({a})", "{a} / {b}",
    "{a} / {s}", "{a}.half()", "{a}.bfloat16()", "torch.add({a}, {b}, alpha={s})", "{a} ** 2",
    "torch.lerp({a}, {b}, 0.3)", "torch.addcmul({a}, {a}, {b}, value={s})", "{a}.sin()",
    "F.softplus({a})", "torch.sqrt({a}.abs())", "F.leaky_relu({a}, 0.1)", "{a}.erf()", "1 / {a}",
    "{a} ** 3", "F.elu({a})", "torch.rsqrt({a}.abs() + 1)",
]  # fmt: skip
READS = ["{a} = {a}.contiguous()", "{a} = {a}.clone()", "float({a}.float().sum())", "del {a}"]
SHAPES = [(8, 12), (12,), (8, 1), (1, 12), (), (2, 8, 12), (7, 5)]
COUNT = int(os.environ.get("AUTOFUSE_TEST_CHAINS", "150"))


def make_program(rng, device):
    """(source of `run(i0, i1, i2)`, its inputs)."""
    dtypes = [torch.float32, torch.float32, torch.float64, torch.int32]
    pool = EXACT
    if device == "cuda":
        dtypes += [torch.float16, torch.bfloat16]
        pool = EXACT + FLOATING
    shape = rng.choice(SHAPES[:1] + SHAPES[5:])
    shapes = [shape, shape, rng.choice([shape, *SHAPES[:5]] if shape != (7, 5) else [shape, ()])]
    dtype = rng.choice(dtypes)
    inputs = []
    for own in shapes:
        kind = dtype if rng.random() < 0.8 else rng.choice(dtypes)
        t = random_tensor(own, kind, device, rng.randrange(1 << 30))
        if len(own) >= 2 and rng.random() < 0.3:
            t = t.transpose(0, 1).contiguous().transpose(0, 1)
        if own and rng.random() < 0.15:
            t = torch.stack([t, t], -1)[..., 0]
        inputs.append(t)
    lines, names = [], ["i0", "i1", "i2"]
    for k in range(rng.randint(2, 20)):
        if rng.random() < 0.06 and len(names) > 4:
            victim = rng.choice(names[3:])
            read = rng.choice(READS)
            lines.append(read.format(a=victim))
            if read.startswith("del"):
                names.remove(victim)
            continue
        a, b = rng.choice(names[-4:]), rng.choice(names)
        s = rng.choice(["2", "0.5", "-1.25", "3"])
        lines.append(f"v{k} = " + rng.choice(pool).format(a=a, b=b, s=s))
        names.append(f"v{k}")
    kept = [n for n in names[3:] if rng.random() < 0.4] or names[-1:]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def run(i0, i1, i2):\n{body}    return [{', '.join(kept)}]\n", inputs


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs(device):
    seed = int(os.environ.get("AUTOFUSE_TEST_SEED", "20261121"))
    rng = random.Random(seed)
    for number in range(COUNT):
        source, inputs = make_program(rng, device)
        space = {"torch": torch, "F": F}
        exec(source, space)
        report = f"seed {seed}, program {number}\n{source}" + "".join(
            f"# i{k}: {tuple(t.shape)} {t.stride()} {t.dtype}\n" for k, t in enumerate(inputs)
        )
        try:
            want = space["run"](*inputs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            with pytest.raises(type(error)):
                autofuse.materialize(space["run"](*map(autofuse.wrap, inputs)))
            continue
        got = space["run"](*map(autofuse.wrap, inputs))
        autofuse.materialize(got)
        for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            assert_same(ours, theirs, None, f"{report}result {index}")
    assert autofuse.stats().ops_recorded > 5 * COUNT
