"""`max` and `min` of all elements and over dimensions, beside those of two tensors, and where the
first of them lies: `argmax` and `argmin`."""

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
    "over two dimensions": lambda x: torch.max(x, (0, 1)),
    "a dimension out of range": lambda x: x.max(2),
    "where, out of range": lambda x: x.argmax(-3),
    "of one element": lambda x: x[:, :1].max(1),
    "where, of nothing": lambda x: x[:0].argmin(),
    "where, over nothing": lambda x: x[:, :0].argmin(1),
    "into both": lambda x: torch.max(x, 1, out=(x.new_empty(4), x.new_empty(4, dtype=torch.int64))),
    "where, in another order": lambda x: x.t().argmax(),
    "where, of integers": lambda x: (x * 9).int().argmax(1),
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


def rows(shape, dtype, device="cpu"):
    """With several that are as large, zeros of both signs, NaN, infinities."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    each, columns = x.view(-1, shape[-1]), shape[-1]
    each[0, 1 % columns] = each[0, -1] = 50.0
    each[1 % len(each)] = torch.where(each[1 % len(each)] > 0, 0.0, -0.0)
    each[2 % len(each), columns // 2] = torch.nan
    each[3 % len(each), 0] = -torch.inf
    each[4 % len(each)] = -torch.inf
    return x.to(dtype).to(device)


OVER = [(-1, False), (0, True), (1, False), (None, False), (None, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_are_found_in_the_kernel_of_the_rows(emulated, name, dtype):  # noqa: F811
    function = getattr(torch, name)
    for shape, (dim, keepdim) in itertools.product([(4, 7), (6, 40), (2, 3, 131)], OVER):
        x = rows(shape, dtype)
        want = function(x * 2, dim, keepdim) + 1
        for _ in range(3):
            launched.clear()
            got = autofuse.materialize(function(autofuse.wrap(x) * 2, dim, keepdim) + 1)
            assert len(launched) == 1, f"{shape} {dim}"
            assert_same(autofuse.unwrap(got), want, None, f"{shape} {dim}")


OVER_ONE = {
    "both": lambda x, name, dim: [*getattr(torch, name)(x * 2, dim)],
    "kept": lambda x, name, dim: [*getattr(x * 2, name)(dim=dim, keepdim=True)],
    "values": lambda x, name, dim: getattr(x * 2, name)(dim)[0] + 1,
    "indices": lambda x, name, dim: getattr(torch, name)(x * 2, dim=dim).indices * 2,
    "what has the shape": lambda x, name, dim: x - getattr(x, name)(dim, True).values,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", OVER_ONE)
@pytest.mark.parametrize("name", ["max", "min"])
def test_over_a_dimension_they_are_in_the_kernel(emulated, name, program, dtype):  # noqa: F811
    run = OVER_ONE[program]
    for shape, dim in itertools.product([(4, 7), (6, 40), (2, 3, 131)], (-1, 0, 1)):
        x = rows(shape, dtype)
        want = run(x, name, dim)
        for _ in range(3):
            launched.clear()
            got = run(autofuse.wrap(x), name, dim)
            autofuse.materialize(got)
            assert len(launched) == 1, f"{shape} {dim}"
            got = [*map(autofuse.unwrap, got)] if isinstance(got, list) else autofuse.unwrap(got)
            assert_same(got, want, None, f"{shape} {dim}")


def test_what_is_returned_has_torchs_class(recorded):  # noqa: F811
    found = torch.max(autofuse.wrap(table(4, 8)) * 2.0, 1)
    assert isinstance(found, torch.return_types.max) and all(map(autofuse.is_pending, found))
    assert isinstance((autofuse.wrap(table(4, 8)) * 2.0).min(1), torch.return_types.min)


def test_under_grad_torch_keeps_where_they_are(recorded):  # noqa: F811
    x = table(4, 8).requires_grad_()
    found = torch.max(autofuse.wrap(x) * 2.0, 1)
    assert not autofuse.is_pending(found.values)
    (got,) = torch.autograd.grad(found.values.sum(), x)
    (want,) = torch.autograd.grad(torch.max(x * 2.0, 1).values.sum(), x)
    assert_same(got, want, None)
    assert autofuse.is_pending((autofuse.wrap(x) * 2.0).argmax(1))  # of which there is none


def test_of_one_dimension_alone_they_are_torchs(emulated, monkeypatch):  # noqa: F811
    """Which finds both at once."""
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x = table(6, 64)
    for _ in range(8):
        autofuse.reset_stats()
        found = torch.max(autofuse.wrap(x), 1)
        assert_same([autofuse.unwrap(autofuse.materialize(t)) for t in found], [*x.max(1)], None)
    assert not launched and autofuse.stats().eager_ops["max", "reductions alone"] == 1


def test_long_rows_have_no_places(recorded):  # noqa: F811
    for columns, pending in ((1 << 16, True), ((1 << 16) + 1, False)):
        w = autofuse.wrap(table(1, columns)) * 2.0
        assert autofuse.is_pending(w.argmax(-1)) is pending


def test_what_is_left_to_torch_once_is_not_for_ever(recorded):  # noqa: F811
    """Where what decides it is no part of what machine code knows a call by."""
    for left, kept, dim in (((1000, 100), (10, 100), None), ((1, 100), (10, 100), 0)):
        for shape, pending in ((left, False), (kept, True), (left, False), (kept, True)):
            for _ in range(4):
                w = autofuse.wrap(table(*shape)) * 2.0
                assert autofuse.is_pending(w.argmax(dim)) is pending


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


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["max", "min"])
def test_over_dimensions_on_a_gpu(name, dtype, always):
    shapes = ((4, 7), (70, 1025), (2, 3, 131), (40, 3, 5000), (3, 20_000), (8, 40, 4096))
    for shape, (dim, keepdim) in itertools.product(shapes, OVER):
        x = rows(shape, dtype, "cuda")
        autofuse.reset_stats()
        function = getattr(torch, f"arg{name}")
        got = [autofuse.materialize(function(autofuse.wrap(x) * 0.5, dim, keepdim) + 1)]
        want = [function(x * 0.5, dim, keepdim) + 1]
        if dim is not None:
            got += [*getattr(autofuse.wrap(x) * 0.5, name)(dim, keepdim)]
            want += [*getattr(x * 0.5, name)(dim, keepdim)]
        long = dim is None and x.numel() > 1 << 16
        assert autofuse.stats().ops_eager == 0 or long, autofuse.stats().eager_ops
        assert_same([*map(autofuse.unwrap, got)], want, None, f"{shape} {dim}")
