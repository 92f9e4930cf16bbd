"""`max` and `min` of all elements, beside those of two tensors, which share their names."""

import itertools

import pytest
import torch
from test_reductions import emulated, launched, recorded, recording, table  # noqa: F401

import autofuse
from support import assert_same, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40)
WAYS = {
    "method": lambda x, name: getattr(x, name)(),
    "function": lambda x, name: getattr(torch, name)(x),
}
SHAPES = ((2,), (7,), (3, 40), (2, 3, 131), (5, 4, 1))


def values(shape, dtype, kind, device="cpu"):
    """Normal ones; with special numbers; or zeros of both signs, in some order."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    if kind == "special":
        for k, number in enumerate(SPECIAL):
            x.view(-1)[(5 * k + 1) % x.numel()] = number
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["max", "min"])
def test_of_all_they_are_in_the_kernel(emulated, name, way, dtype):  # noqa: F811
    program = WAYS[way]
    for shape, kind in itertools.product(SHAPES, ("plain", "special")):
        x = values(shape, dtype, kind)
        want = program((x * 2).abs(), name) + 1
        for _ in range(3):  # the last ones by machine code
            launched.clear()
            got = autofuse.materialize(program((autofuse.wrap(x) * 2).abs(), name) + 1)
            assert len(launched) == 1, f"{shape}"
            assert_same(autofuse.unwrap(got), want, None, f"{shape} {kind}")


def test_alone_they_are_torchs_kernel(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x = table(6, 64)
    for _ in range(5):
        assert_same(autofuse.unwrap(autofuse.materialize(autofuse.wrap(x).max())), x.max(), None)
    assert not launched


@pytest.mark.parametrize("name", ["max", "min"])
def test_gradients_are_eagers(recorded, name):  # noqa: F811
    """Shared by all elements that are as large; by torch's own node."""
    x = table(4, 8)
    x[1, 2] = x[3, 3] = 9.0
    x[0, 0] = x[0, 1] = -9.0
    x.requires_grad_()

    def run(wrap):
        found = getattr(wrap(x) * 2.0, name)()
        pending = autofuse.is_pending(found) if wrap is autofuse.wrap else False
        out = autofuse.unwrap(autofuse.materialize(found * 3.0))
        return pending, out.detach(), *torch.autograd.grad(out, x)

    _, *want = run(lambda t: t)
    for _ in range(3):
        pending, *got = run(autofuse.wrap)
        assert pending
        assert_same(got, want, None)
    found = getattr(autofuse.wrap(x) * 2.0, name)()
    assert autofuse.materialize(found).grad_fn.name() == f"{name.capitalize()}Backward1"


CALLS = {
    "of two": lambda x: torch.max(x, x * 0.5),
    "over a dimension": lambda x: torch.max(x, 1),
    "kept": lambda x: x.max(dim=0, keepdim=True).indices,
    "out": lambda x: torch.max(x, out=torch.zeros((), dtype=x.dtype)),
    "integers": lambda x: (x * 9).int().max(),
    "bools": lambda x: (x > 0).min(),
    "float64": lambda x: x.double().max(),
    "a number": lambda x: x[0, 0].max(),
    "nothing": lambda x: x[:0].max(),
    "an option that is none": lambda x: x.max(keepdim=True),
    "a word": lambda x: torch.min(x, "0"),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_calls_are_eagers(recorded, call):  # noqa: F811
    x = table(4, 8)

    def outcome(x):
        try:
            found = CALLS[call](x)
        except (RuntimeError, IndexError, TypeError) as error:
            return type(error), str(error)
        found = found if isinstance(found, tuple) else (found,)
        return [autofuse.unwrap(autofuse.materialize(one)) for one in found]

    for _ in range(2):
        got, want = outcome(autofuse.wrap(x)), outcome(x)
        if isinstance(want, list):
            assert_same(got, want, None)
        else:
            assert got == want


def test_of_two_they_are_recorded_as_before(on):
    x, y = table(3, 4), table(3, 4, 1)
    w = autofuse.wrap(x)
    assert autofuse.is_pending(torch.max(w * 2.0, y)) and autofuse.is_pending(w.min(y))


def test_where_reductions_are_off_they_are_eager(recorded, monkeypatch):  # noqa: F811
    w = autofuse.wrap(table(3, 4))
    assert autofuse.is_pending((w * 2.0).max())
    monkeypatch.setattr(autofuse.config, "reductions", False)
    assert not autofuse.is_pending((w * 2.0).max())
    monkeypatch.setattr(autofuse.config, "reductions", True)
    assert autofuse.is_pending((w * 2.0).max())


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["max", "min"])
def test_on_a_gpu(name, dtype, always):
    shapes = (*SHAPES, (1000,), (70, 1025), (3, 50_001), (8, 40, 4096))
    for shape, kind in itertools.product(shapes, ("plain", "special", "zeros")):
        x = values(shape, dtype, kind, "cuda")
        autofuse.reset_stats()
        got = autofuse.materialize(getattr(autofuse.wrap(x) * 0.5, name)() * 2.0)
        assert autofuse.stats().ops_eager == 0, autofuse.stats().eager_ops
        assert_same(autofuse.unwrap(got), getattr(x * 0.5, name)() * 2.0, None, f"{shape} {kind}")
