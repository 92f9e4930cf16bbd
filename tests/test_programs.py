"""Random programs of reductions, views and pointwise ops: as a chain and op by op, the same bits.

Without a GPU the kernels for CUDA run thread by thread in an emulation. What an op gives alone is
compared with its order, written apart, in the tests of that op; here it is what is composed.
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from test_groups import kernels  # noqa: F401
from test_reductions import emulated, recording  # noqa: F401

import autofuse
from support import same_bits

POINTWISE = [
    "{a} * {b}", "{a} + {b}", "{a} - {b} * 0.5", "torch.relu({a})", "({a} * 0.25).tanh()", "-{a}",
    "torch.where({a} > {b}, {a}, {b})", "{a}.abs() + 0.5",
]  # fmt: skip
NUMBERS = [
    "{a}.sum(-1, keepdim=True)",
    "{a}.mean(-1, keepdim=True)",
    "{a}.amax(-1, keepdim=True)",
    "({a} * {b}).sum(-1, keepdim=True)",
    "{a}.norm(dim=-1, keepdim=True)",
    "({a} > 0).any(-1, keepdim=True) * 1.0",
    "{a}.logsumexp(-1, keepdim=True)",
    "{a}.var(-1, keepdim=True, correction=0)",
    "{a}.mean((1, 2), keepdim=True)",
    "({a} > {b}).sum(-1, keepdim=True) * 0.5",
    "{a}.contiguous().max(-1, keepdim=True).values",
    "{a}.min() * 0.5",
    "{a}.max()",
    "{a}.contiguous().argmin(-1, keepdim=True) * 0.25",
    "{a}.sum()",
    "{a}.amax()",
    "{a}.sum((-2, -1), keepdim=True) * 0.1",
    "F.mse_loss({a}, {d})",
]
COLUMNS = [
    "{a}.sum(1, keepdim=True)", "({a} * {b}).mean(0, keepdim=True)", "{a}.sum(1).unsqueeze(1)",
    "{a}.amax((0, 1), keepdim=True)", "{a}.mean(0) * r", "{a}.sum((0, 1)) * 0.1 + r",
    "({a} + {b}).std(1, keepdim=True, correction=0)", "{a}.logsumexp(1, keepdim=True)",
    "({a} > 0).all(0, keepdim=True) * 1.0", "{a}.mean(0) * {a}.amax(0)", "{a}.norm(dim=1)[:, None]",
]  # fmt: skip
AXES = [
    "{a}.sum((0, 2), keepdim=True)", "({a} * {b}).mean((0, -1), keepdim=True)",
    "{a}.amax((0, 2))[None, :, None]", "{a}.std((2, 0), correction=0)[:, None]",
    "({a} * {b}).transpose(0, 1).sum(1)", "{a}.permute(2, 0, 1).mean(0)[..., None]",
    "({a}.permute(1, 2, 0) * 0.5).var((0, 2), correction=0)", "({a} + n[:, None]).mean()",
    "({a} * {b}).sum((0, 2)).unsqueeze(-1)", "{a}.mT.norm(dim=1)[..., None]",
]  # fmt: skip
ROWS = [
    "F.softmax({a} * 0.5, -1)", "F.layer_norm({a}, {a}.shape[-1:])", "F.log_softmax({a}, -1)",
    "F.layer_norm({a}, {a}.shape[-1:], r, r)", "F.rms_norm({a}, {a}.shape[-1:], r)",
    "F.group_norm({a}, {g})", "F.group_norm({a}, {g}, n, n)",
    "F.group_norm({a}, {g}, n * 2.0, n + 1.0)", "F.normalize({a}, dim=1)",
    "F.log_softmax({a}, 0)", "F.softmax({a} * 0.5, 1)",
    "{a} - {a}.mean(1, keepdim=True)", "{a}.exp() / {a}.exp().sum(1, keepdim=True)",
]  # fmt: skip
VIEWS = [
    "{a}[:, :1] * {a}", "torch.cat([{a}, {d}], 1)[:, :{B}]", "{a}[:, :, :1] + {a}",
    "{a}.transpose(1, 2).contiguous().transpose(1, 2)", "{a}.flatten(1).view({A}, {B}, {C})",
    "{a}.contiguous().roll(1, 2) - {a}", "torch.roll(x.contiguous(), (2, -1), (1, 2)) * {a}",
    "y.contiguous().roll(-1, 0) + x.contiguous().roll(1, 1)",
]  # fmt: skip


def drawn(rng):
    """Sizes, and the text of a program over x and y of these, of a row, a number a row and n a
    channel; each op goes through `op`."""
    a, b, c = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 6]), rng.choice([1, 2, 3, 8, 33, 64, 130])
    groups = [k for k in (1, 2, 3) if b % k == 0]
    whole, numbers, lines, kept = ["x", "y"], ["c"], [], []
    for k in range(rng.randint(2, 9)):
        forms, into = rng.choice(
            [(POINTWISE, whole)] * 4
            + [(NUMBERS, numbers), (COLUMNS, numbers), (AXES, numbers)]
            + [(ROWS, whole), (VIEWS, whole)]
        )
        names = {
            "a": rng.choice(whole), "b": rng.choice([*whole, "r", *numbers[-3:]]),
            "d": rng.choice(whole), "g": rng.choice(groups), "A": a, "B": b, "C": c,
        }  # fmt: skip
        if rng.random() < 0.07:
            lines.append("{a} = op({a} * 1.0); {a} += {b}".format(**names))
        lines.append(f"v{k} = op({rng.choice(forms).format(**names)})")
        into.append(f"v{k}")
        kept += [f"v{k}"] if rng.random() < 0.2 else []
    result = ", ".join(dict.fromkeys([*kept, f"v{k}", f"op({whole[-1]} * 1.0)"]))
    body = "".join(f"    {line}\n" for line in [*lines, f"return [{result}]"])
    return (a, b, c), f"def run(x, y, r, c, n, op):\n{body}"


@pytest.mark.parametrize("seed", range(int(os.environ.get("AUTOFUSE_TEST_ORDERS", "16"))))
def test_a_chain_has_the_bits_of_its_ops(kernels, seed):  # noqa: F811
    rng = random.Random(f"{os.environ.get('AUTOFUSE_TEST_SEED', '20261128')} {seed}")
    (a, b, c), source = drawn(rng)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    generator = torch.Generator().manual_seed(seed)
    own = [torch.randn(shape, generator=generator).to(dtype)
           for shape in ((a, b, c), (a, b, c), (c,), (a, b, 1), (b,))]  # fmt: skip
    for k in (0, 1):
        order = rng.sample(range(3), 3) if rng.random() < 0.4 else range(3)
        memory = own[k].permute(*order).contiguous()
        own[k] = memory.permute([[*order].index(d) for d in range(3)])
    space = {"torch": torch, "F": F}
    exec(source, space)
    eager = []  # whether torch has computed some of it, in the order of a CPU

    def outcome(op):
        autofuse.reset_stats()
        with torch.no_grad():
            made = space["run"](*(autofuse.wrap(t.clone()) for t in own), op)
            made = [autofuse.materialize(value) for value in made]
        left = [reason for _, reason in autofuse.stats().eager_ops if reason != "not in the table"]
        eager.append(bool(left) or autofuse.stats().eager_flushes > 0)
        return [autofuse.unwrap(value) for value in made]

    try:
        want = space["run"](*(t.clone() for t in own), lambda value: value)
    except ValueError as error:
        pytest.skip(f"eager refuses it: {error}")
    alone = outcome(autofuse.materialize)
    for _ in range(2):
        for got, one, like in zip(outcome(lambda value: value), alone, want, strict=True):
            kinds = [(t.dtype, t.shape, t.stride()) for t in (got, like)]
            assert kinds[0] == kinds[1], source
            assert any(eager) or bool(same_bits(got, one).all()), f"{source}{(a, b, c)} {dtype}"
