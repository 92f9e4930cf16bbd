"""all, any and counts: their masks are in the kernel of the rows, and no order decides them."""

import itertools

import pytest
import torch
from test_reductions import emulated, launched, recorded, recording, row, table  # noqa: F401

import autofuse
from autofuse.cli import verify
from support import assert_same, needs_cuda

DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16)
KINDS = ("plain", "wide", "special")
SPECIAL = (torch.nan, torch.inf, -0.0, 0.0, 1e-40)


def rows_of(shape, dtype, device="cpu"):
    """Rows of zeros, of ones, and with one element that is another or special."""
    x = torch.zeros(shape, device=device)
    flat = x.view(-1, shape[-1])
    flat[1::3] = 1.0
    for k, number in enumerate(SPECIAL):
        flat[(2 + 3 * k) % len(flat), (5 * k + 3) % shape[-1]] = number
        flat[(1 + 3 * k) % len(flat), (7 * k + 1) % shape[-1]] = number
    return x.to(dtype)


OVER = {
    "the last": {"dim": -1}, "kept": {"dim": 2, "keepdim": True}, "two": {"dim": (1, 2)},
    "two, kept": {"dim": (-2, -1), "keepdim": True}, "all": {},
}  # fmt: skip
PROGRAMS = {
    "of a product": lambda x, f, over: getattr(x * x, f)(**over),
    "of a comparison": lambda x, f, over: getattr(torch, f)(x == 1, **over),
    "what follows": lambda x, f, over: getattr(x != 0, f)(**over).logical_not() | False,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("function", ["all", "any"])
def test_they_are_in_the_kernel_of_the_rows(emulated, function, name, dtype):  # noqa: F811
    for columns, over in itertools.product((3, 131), OVER.values()):
        x = rows_of((2, 6, columns), dtype)
        want = PROGRAMS[name](x, function, over)
        for _ in range(3):
            launched.clear()
            got = autofuse.materialize(PROGRAMS[name](autofuse.wrap(x), function, over))
            assert len(launched) == 1, f"{columns} {over}"
            assert_same(autofuse.unwrap(got), want, None, f"{columns} {over}")


COUNTS = {
    "bools": lambda x, over: (x != 0).sum(**over),
    "in int64": lambda x, over: torch.sum(x == 1, dtype=torch.int64, **over),
    "what follows": lambda x, over: (x != 0).sum(**over) * 2 + 1,
    "a share": lambda x, over: (x == 1).sum(**over) / 4,  # on CUDA others are a product
    "nonzero": lambda x, over: torch.count_nonzero(x * x, over.get("dim")),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_in_the_kernel_of_the_rows(emulated, name, dtype):  # noqa: F811
    for columns, over in itertools.product((3, 131), OVER.values()):
        if name == "in int64" and not over:
            continue  # which torch sums in another function
        x = rows_of((2, 6, columns), dtype)
        want = COUNTS[name](x, over)
        for _ in range(3):
            launched.clear()
            got = autofuse.materialize(COUNTS[name](autofuse.wrap(x), over))
            assert len(launched) == 1, f"{columns} {over}"
            assert_same(autofuse.unwrap(got), want, None, f"{columns} {over}")


def test_a_row_has_no_more_than_float32_counts(recorded):  # noqa: F811
    """Up to there it has all whole numbers."""
    x = torch.ones(1).bool()
    for columns, pending in ((1 << 24, True), ((1 << 24) + 2, False)):
        rows = autofuse.wrap(x.expand(columns).contiguous())
        count = (rows & rows).sum(0)
        assert autofuse.is_pending(count) is pending
        assert autofuse.unwrap(autofuse.materialize(count)).item() == columns


def test_alone_they_are_torchs_kernel(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    x = rows_of((6, 64), torch.bool)
    for _ in range(5):
        for function in (torch.any, torch.sum):
            found = autofuse.materialize(function(autofuse.wrap(x), -1))
            assert_same(autofuse.unwrap(found), function(x, -1), None)
    assert not launched


def test_rows_that_several_blocks_share(emulated):  # noqa: F811
    for at in (None, 0, 77_000, 149_999):
        x = torch.ones(150_000)
        if at is not None:
            x[at] = torch.nan
        launched.clear()
        bad, fine = torch.isnan(autofuse.wrap(x)).any(), torch.isfinite(autofuse.wrap(x)).all()
        found = [autofuse.materialize(t).item() for t in (bad, fine)]
        assert found == [at is not None, at is None]
        assert len(launched) == 2, "one for the parts of both, and one for what they come to"


def test_they_meet_what_is_of_the_rows(emulated):  # noqa: F811
    """Rows that are masked all over, as in attention."""
    x, mask = table(6, 33), rows_of((6, 33), torch.bool)
    launched.clear()
    h = autofuse.wrap(x)
    got = torch.where((autofuse.wrap(mask) & (h > -9)).any(-1, keepdim=True), h * 2.0, 0.0)
    got = autofuse.unwrap(autofuse.materialize(got))
    assert len(launched) == 1
    assert_same(got, torch.where(mask.any(-1, keepdim=True), x * 2.0, 0.0), None)


def test_of_values_that_require_grad(recorded):  # noqa: F811
    """Nothing is differentiated through them."""
    x = table(4, 8).requires_grad_()
    h = autofuse.wrap(x) * 2.0
    some = (h > 0).any(-1)
    assert autofuse.is_pending(some)
    every = h.all()
    assert not every.requires_grad and not some.requires_grad
    assert_same(autofuse.unwrap(autofuse.materialize(some)), (x * 2.0 > 0).any(-1), None)
    out = (h * some.unsqueeze(-1)).sum()
    out.backward()
    assert_same(x.grad, ((x * 2.0 > 0).any(-1)[:, None] * 2.0).expand(4, 8).contiguous(), None)


@pytest.mark.parametrize("name", [
    "another dim", "a dim out of range", "integers", "uint8", "no dims", "repeated dims",
    "a number", "out", "empty", "of one element", "keepdim alone", "dim None", "kept of all",
])  # fmt: skip
@pytest.mark.parametrize("function", ["all", "any"])
def test_others_are_eager(recorded, function, name):  # noqa: F811
    x = table(4, 8)
    ask = {
        "another dim": lambda x, f: f(x > 0, 0),
        "a dim out of range": lambda x, f: f(x > 0, 2),
        "integers": lambda x, f: f(x.int(), -1),
        "uint8": lambda x, f: f(x.to(torch.uint8)),
        "no dims": lambda x, f: f(x > 0, ()),
        "repeated dims": lambda x, f: f(x > 0, (1, -1)),
        "a number": lambda x, f: f(x[0, 0] > 0),
        "out": lambda x, f: f(x > 0, 1, out=torch.empty(4, dtype=torch.bool)),
        "empty": lambda x, f: (f(x[:0] > 0), f(x[:, :0] > 0, 1)),
        "of one element": lambda x, f: f(x[:, :1] > 0, -1),
        "keepdim alone": lambda x, f: f(x > 0, keepdim=False),
        "dim None": lambda x, f: f(x > 0, dim=None),
        "kept of all": lambda x, f: f(x > 0, dim=None, keepdim=True),
    }[name]

    def outcome(x):
        try:
            found = ask(x, getattr(torch, function))
            return autofuse.unwrap(found) if isinstance(found, torch.Tensor) else found
        except (RuntimeError, IndexError, TypeError) as error:
            return type(error), str(error)

    for _ in range(2):
        got, want = outcome(autofuse.wrap(x)), outcome(x)
        if isinstance(want, torch.Tensor):
            assert_same(autofuse.unwrap(autofuse.materialize(got)), want, None)
        elif isinstance(want[0], torch.Tensor):
            assert_same([autofuse.unwrap(autofuse.materialize(t)) for t in got], [*want], None)
        else:
            assert got == want


def test_they_are_compared_when_a_gpu_is_verified(emulated):  # noqa: F811
    cases = [(rows, columns, kind, 0) for rows, columns in ((3, 7), (1, 64)) for kind in KINDS]
    for dtype in verify.DTYPES:
        for name in ("any, all", "counts", "max, min", "max, min over a dimension"):
            outcome = verify.compare(name, dtype, cases, "cpu")
            assert not outcome.wrong and outcome.reduced == outcome.cases == len(cases)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["all", "any", *COUNTS])
def test_on_a_gpu(function, dtype, always):
    shapes = [(2, 6, 3), (2, 6, 64), (3, 70, 131), (1, 40, 5000), (1, 1, 200_000), (5, 3, 1025)]
    programs = [COUNTS[function]] if function in COUNTS else [
        lambda x, over, program=program: program(x, function, over) for program in PROGRAMS.values()
    ]  # fmt: skip
    for shape, over, program in itertools.product(shapes, OVER.values(), programs):
        if function == "in int64" and not over:
            continue
        x = rows_of(shape, dtype, "cuda")
        want = program(x, over)
        autofuse.reset_stats()
        got = autofuse.materialize(program(autofuse.wrap(x), over))
        assert autofuse.stats().ops_eager == 0, autofuse.stats().eager_ops
        assert_same(autofuse.unwrap(got), want, None, f"{shape} {over}")
