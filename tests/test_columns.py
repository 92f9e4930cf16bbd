"""Reductions over dimensions that others follow: rows whose elements are apart.

Without a GPU their kernels run in an emulation of its threads, and are compared with a model of
torch's order, `row_oracle`.
"""

import itertools
import math

import pytest
import row_oracle
import torch
import torch.nn.functional as F
from test_groups import kernels  # noqa: F401
from test_reductions import H200, bits, emulated, launched, recorded, recording  # noqa: F401

import autofuse
from autofuse.cli import verify
from autofuse.kernel.division import scheme_of, spatial_softmax_threads
from autofuse.layout import iteration
from support import assert_same, compared_about, needs_cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of shapes and dimensions: threads along results and along rows, of one, two and four results
CASES = [
    ((7, 5), 0), ((2, 7, 5), 1), ((3, 4, 8), 1), ((2, 3, 6, 2), 1), ((2, 3, 6, 2), (1, 2)),
    ((40, 12), 0), ((300, 8), 0), ((2, 130, 36), -2), ((2, 3, 4, 3), (1, 0)), ((3, 1, 9, 1), -2),
    ((2, 130, 1), 1), ((5, 3, 1, 7), (1, 2)), ((1, 600, 3), 1),
]  # fmt: skip
NAMES = ("sum", "mean", "amax", "amin", "var", "std", "vector_norm")


def values(shape, dtype=torch.float32, seed=0, device="cpu", kind="plain"):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    if kind == "special":
        chance = torch.rand(shape, generator=generator, device=device) * 30
        for k, number in enumerate((torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -3e-41)):
            x[(chance > k) & (chance < k + 1)] = number
    return x.to(dtype)


def reduced(name, x, dim, keepdim=False):
    if name == "vector_norm":
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    return getattr(x, name)(dim, keepdim=keepdim)


def oracle(name, x, dim, keepdim=False):
    """In torch's order, as torch rounds it."""
    dims = [d % x.ndim for d in (dim if isinstance(dim, tuple) else (dim,))]
    others = [d for d in range(x.ndim) if d not in dims]
    inner = sorted(dims, key=lambda d: -x.stride(d))  # as they lie in memory
    rows = x.float().permute(*others, *inner).reshape(-1, math.prod(x.shape[d] for d in dims))
    through = iteration(tuple(x.shape), x.stride(), tuple(dims))
    scheme = scheme_of(name, *rows.shape, x.dtype.itemsize, H200, through)
    begins = torch.arange(1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
    begins = begins.as_strided(x.shape, x.stride()).permute(*others, *inner)
    begins = begins.reshape(rows.shape)[:, 0]  # of memory that is aligned where `x` begins
    found = [
        row_oracle.reduced(name, r, begin, len(rows), scheme.across, scheme.vec, 1, scheme.blocks)
        for r, begin in zip(rows.numpy(), begins.tolist(), strict=True)
    ]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return bits(found).view(shape).to(x.dtype)


def interleaved(columns, apart):
    """How torch goes through `apart` rows that lie side by side."""
    return iteration((columns, apart), (apart, 1), (0,))


def run(program, *args):
    """What it gives of wrapped tensors, by kernels alone; and the names of these."""
    launched.clear()
    autofuse.reset_stats()
    got = program(*map(autofuse.wrap, args))
    several = isinstance(got, tuple)
    got = tuple(map(autofuse.materialize, got)) if several else autofuse.materialize(got)
    assert autofuse.stats().ops_eager == autofuse.stats().eager_flushes == 0
    names = [name for name, *_ in launched]
    got = tuple(map(autofuse.unwrap, got)) if several else autofuse.unwrap(got)
    return got, names


def compare_orders(shape, dim, keepdim):
    """Of every reduction to numbers: of products, and what they are multiplied by."""
    for name, dtype in itertools.product(NAMES, DTYPES):
        x, y = values(shape, dtype), values(shape, dtype, 1)
        want = oracle(name, x * y, dim, keepdim) * 2.0
        for _ in range(3 if dtype is torch.float32 else 1):  # the last ones by machine code
            got, names = run(lambda x, y: reduced(name, x * y, dim, keepdim) * 2.0, x, y)  # noqa: B023
            assert names == [f"af_rows_mul_{name}_mul"]
            assert_same(got, want, None, f"{name} {dtype}")


def compare_gradients(program, *shapes):
    """The first and second ones, of tensors of these shapes."""
    for again in (False, True):
        found = []
        for wrap in (lambda x: x, autofuse.wrap):
            leaves = [values(shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
            out = program(*map(wrap, leaves))
            grads = torch.autograd.grad(out.sum(), leaves, create_graph=again)
            if again:
                grads += torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
            found.append([autofuse.unwrap(t).detach() for t in (out, *grads)])
        for a, b in zip(*found, strict=True):
            assert_same(b, a, 1e-5, f"again: {again}")


def compare_bits(program, *args):
    """Of what it gives of wrapped tensors and of plain ones, on CUDA."""
    got = autofuse.unwrap(autofuse.materialize(program(*map(autofuse.wrap, args))))
    want = program(*args)
    assert got.stride() == want.stride()
    assert verify.differing(got, want) == 0, f"{[(t.shape, t.stride()) for t in args]}"


# --- by kernels, emulated -------------------------------------------------------------------------


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), CASES, ids=str)
@torch.no_grad()
def test_its_order_is_torchs(kernels, shape, dim, keepdim):  # noqa: F811
    compare_orders(shape, dim, keepdim)


SOFT = [((2, 5, 6), 1), ((3, 40, 7), 1), ((70, 3), 0), ((1, 130, 2, 3), 1), ((2, 33, 130), -2)]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "dim"), SOFT, ids=str)
@torch.no_grad()
def test_softmax_of_columns(kernels, shape, dim, name):  # noqa: F811
    """By one thread a row or several, which keep it in registers or not."""
    for dtype in DTYPES:
        x, y = values(shape, dtype), values(shape, dtype, 1)
        h = (x * 0.5).float().movedim(dim, -1)
        apart = math.prod(shape[dim % len(shape) + 1 :])
        threads = spatial_softmax_threads(h.shape[-1], apart)
        rows = h.reshape(-1, h.shape[-1]).numpy()
        log = name == "log_softmax"
        want = bits([row_oracle.softmax_of_columns(r, threads, log) for r in rows])
        want = want.view(h.shape).movedim(-1, dim).to(dtype) * y
        for _ in range(2):
            got, names = run(lambda x, y: getattr(torch, name)(x * 0.5, dim) * y, x, y)  # noqa: B023
            assert names == [f"af_rows_mul_{name}_mul"]
            assert_same(got, want.contiguous(), None, str(dtype))


@pytest.mark.parametrize("name", ["sum", "mean", "var", "amax"])
@pytest.mark.parametrize("shape", [(1100, 128), (66000, 2), (9000, 33)], ids=str)
@torch.no_grad()
def test_rows_that_several_blocks_share_are_two_kernels(kernels, shape, name):  # noqa: F811
    x = values(shape)
    assert (
        scheme_of(name, shape[1], shape[0], 4, H200, iteration(shape, (shape[1], 1), (0,))).blocks
        > 1
    )
    got, names = run(lambda x: reduced(name, x * 0.5, 0) * 2.0, x)
    assert names == [f"af_rows_mul_{name}_mul", f"af_rows_{name}_mul"]
    assert_same(got, oracle(name, x * 0.5, 0) * 2.0, None)


def _normed(x):
    """A layer norm of channels, as ConvNeXt has it."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)


def _normed_in_order(x):
    apart = x - oracle("mean", x, 1, True)
    return apart / torch.sqrt(oracle("mean", apart.pow(2), 1, True) + 1e-6)


@pytest.mark.parametrize("shape", [(2, 12, 3, 5), (2, 600, 3), (3, 70, 8)], ids=str)
@torch.no_grad()
def test_what_has_the_shape_of_rows_is_in_their_kernel(kernels, shape):  # noqa: F811
    """Whether its threads keep a row in registers or not."""
    x, w = values(shape), values((shape[1], *(1 for _ in shape[2:])), seed=2)
    got, names = run(lambda x, w: _normed(x * 0.5) * w, x, w)
    assert len(names) == 1
    assert_same(got, _normed_in_order(x * 0.5) * w, 1e-6)
    got, names = run(lambda x: (x - x.amax(1, True)).exp(), x)
    assert len(names) == 1
    assert_same(got, (x - x.amax(1, True)).exp(), 1e-6)


@torch.no_grad()
def test_what_is_read_with_rows_and_with_their_numbers(kernels):  # noqa: F811
    """Of shapes that could be taken for one another."""
    x = values((4, 4, 6))
    of_columns, of_both, kept = values((6,), seed=1), values((4, 6), seed=2), values((4, 1, 6))
    for c in (of_columns, of_both, kept):  # of [4, 6]: an element of a row and one after it
        want = oracle("sum", x + c, 1, c.ndim == 3) * c
        got, names = run(lambda x, c: reduced("sum", x + c, 1, c.ndim == 3) * c, x, c)  # noqa: B023
        assert names == ["af_rows_add_sum_mul"]
        assert_same(got, want, None, str(c.shape))
    # what was computed of it in between is one or the other, so another chain begins
    program = lambda x, c: (x + (c * 2.0)).sum(1) * (c * 2.0)  # noqa: E731
    for c in (of_columns, of_both):
        got, names = run(program, x, c)
        assert_same(got, oracle("sum", x + c * 2.0, 1) * (c * 2.0), None, str(c.shape))
    # and what no dimension tells apart
    got, names = run(lambda x, c: (h := x * 2.0) - h.sum(1, True) * c, x, kept)
    assert len(names) == 1
    assert_same(got, x * 2.0 - oracle("sum", x * 2.0, 1, True) * kept, None)


@torch.no_grad()
def test_operands_of_other_layouts(kernels):  # noqa: F811
    x, y = values((3, 10, 6)), values((6, 10, 3), seed=1).permute(2, 1, 0)
    w = values((10, 12), seed=2)[:, ::2]
    got, _ = run(lambda x, y, w: (x * y + w).mean(1) * 2.0, x, y, w)
    assert_same(got, oracle("mean", x * y + w, 1) * 2.0, None)


@torch.no_grad()
def test_where_rows_begin_decides_how_torch_reads_them(kernels):  # noqa: F811
    """Two or four neighbours at once, from aligned memory; ours would be another order."""
    for columns, anchored in ((8, True), (6, True), (7, False)):
        memory = values((9 * columns + 1,))
        for first in (0, 1):
            x = memory[first : first + 9 * columns].view(9, columns)
            launched.clear()
            got = autofuse.unwrap(autofuse.materialize(autofuse.wrap(x).sum(0) * 2.0))
            assert len(launched) == int(not (anchored and first))
            want = x.sum(0) * 2.0
            assert_same(got, oracle("sum", x, 0) * 2.0 if launched else want, None)
            # what is computed first would begin in memory of its own
            got, names = run(lambda x: (x * 0.5).sum(0), x)
            assert names == ["af_rows_mul_sum"]
            assert_same(got, oracle("sum", x * 0.5, 0), None)


COMPOSED = {
    "logsumexp": lambda x: torch.logsumexp(x * 2.0, 1),
    "normalize": lambda x: F.normalize(x * 2.0, dim=1) * 0.5,
    "any": lambda x: torch.isnan(x * 2.0).any(1),
    "all, kept": lambda x: (x * 2.0 < 3).all(-2, True),
    "norm": lambda x: (x * 2.0).norm(dim=-2) + 1.0,
    "linalg.norm": lambda x: torch.linalg.norm(x * 2.0, dim=1) + 1.0,
    "correction": lambda x: torch.var(x * 2.0, 1, correction=0) + 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
@torch.no_grad()
def test_what_torch_makes_of_them(kernels, name):  # noqa: F811
    for shape in ((2, 9, 5), (3, 40, 8), (4, 5, 1)):
        x = values(shape)
        got, names = run(COMPOSED[name], x)
        assert len(names) == 1
        assert_same(got, COMPOSED[name](x), 1e-5 if got.is_floating_point() else None)


def test_few_rows_of_softmax_have_many_processors():
    """Its order is one thread's, or that of so many; what else is in a block is of no moment."""
    for rows, columns, apart in ((2048, 512, 1024), (195, 64, 65), (10**6, 20, 4096), (4, 2000, 2)):
        scheme = scheme_of("softmax", rows, columns, 4, H200, interleaved(columns, apart))
        assert scheme.threads == spatial_softmax_threads(columns, apart)
        block = scheme.threads * scheme.interleaved
        assert block <= max(256, 2 * scheme.threads) and block & (block - 1) == 0
        blocks = -(-rows // scheme.interleaved)
        assert blocks >= H200[0] or block <= max(32, 2 * scheme.threads)
    assert scheme_of("softmax", 10**6, 20, 4, H200, interleaved(20, 4096)).interleaved == 256


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_softmax_are_one_kernel(kernels, name):  # noqa: F811
    for shape, dim in SOFT:
        x, y, g = (values(shape, seed=k) for k in range(3))
        program = lambda x, y: getattr(torch, name)(x * 0.5, dim) * y  # noqa: B023, E731
        leaf = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(program(leaf, y), leaf, g)
        out = autofuse.unwrap(autofuse.materialize(program(autofuse.wrap(leaf), y)))
        launched.clear()
        (got,) = torch.autograd.grad(out, leaf, g)
        ((kernel, _, threads),) = launched
        assert f"softmax_sum_{name}_backward" in kernel and threads <= 1024
        assert_same(got, want, 1e-5)


COMPARED = [name for name in verify.PROGRAMS if "columns" in name and "batch_norm" not in name]


@pytest.mark.parametrize("name", [*COMPARED, "norm of channels"])
def test_they_are_compared_when_a_gpu_is_verified(kernels, name, monkeypatch):  # noqa: F811
    """Here with what the order of a CPU gives."""
    several = {"d": 4, "numbers": 4, "extrema": 3}
    seen = compared_about(monkeypatch, 1e-3, several.get(name.split()[0]))
    cases = [(5, 132, "plain", 0), (3, 7, "plain", 0), (2, 2, "plain", 1)]
    outcome = verify.compare(name, torch.float32, cases, "cpu")
    assert outcome.reduced == len(cases) and len(seen) >= len(cases), outcome.left
    assert len(launched) >= len(cases)


# --- recorded, run as eager ops -------------------------------------------------------------------

GRADS = {
    "sum": lambda x, y: (x * y).sum(1) * 2.0,
    "mean, kept": lambda x, y: (x * y).mean(0, True) * y,
    "two dims": lambda x, y: (x * y).sum((0, 1)).exp() * 2.0,
    "amax": lambda x, y: (x * y).amax(1) + 1.0,
    "spread": lambda x, y: (h := x * y) - h.mean(1, keepdim=True),
    "std": lambda x, y: (x * y).std(1) * 2.0,
    "var, kept": lambda x, y: y / (x * y).var(1, keepdim=True),
    "norm": lambda x, y: torch.linalg.vector_norm(x * y, 2, 1) * 2.0,
    "normalize": lambda x, y: F.normalize(x * y, dim=1) * y,
    "logsumexp": lambda x, y: torch.logsumexp(x * y, 1) * 2.0,
}


@pytest.mark.parametrize("name", GRADS)
def test_gradients_are_eagers(recorded, name):  # noqa: F811
    compare_gradients(GRADS[name], (3, 5, 4), (3, 5, 4))


EAGER = {
    "softmax of transposed": lambda x: x.transpose(0, 1).softmax(0),
    "expanded": lambda x: x[:1].expand(5, 4, 5).sum(1),
    "correction": lambda x: x.var(1, correction=2),
    "norm of matrices": lambda x: torch.linalg.norm(x, dim=(0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGER)
def test_others_are_eager(recorded, name):  # noqa: F811
    x = values((3, 4, 5))
    y = EAGER[name](autofuse.wrap(x))
    assert not autofuse.is_pending(y)
    assert_same(autofuse.unwrap(y), EAGER[name](x), None)


@pytest.mark.parametrize("call", [
    lambda x: x.sum(3), lambda x: x.sum((0, 0)), lambda x: x.sum((0, -3)), lambda x: x.amax((1, 4)),
    lambda x: x.mean(-4), lambda x: torch.logsumexp(x, (0, 7)), lambda x: x.var((1, 1)),
    lambda x: x.norm(dim=5), lambda x: x.all(4), lambda x: x[:, :0].amax(1),
])  # fmt: skip
def test_errors_are_eagers(recorded, call):  # noqa: F811
    x, said = values((3, 4, 5)), []
    for wrap in (lambda x: x, autofuse.wrap):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            call(wrap(x))
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


# --- on a GPU -------------------------------------------------------------------------------------

LARGE = [
    ((1024, 128), 0), ((5000, 129), 0), ((100_000, 2), 0), ((65_536, 66), 0), ((8, 197, 768), 1),
    ((2, 4096, 320), 1), ((4, 64, 28, 28), 1), ((33, 17, 65), 1), ((16, 12, 64, 6), (0, 1)),
]  # fmt: skip


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "special"])
@torch.no_grad()
def test_bits_on_cuda(always, dtype, kind):
    for shape, dim in (*CASES, *LARGE):
        x, y = (values(shape, dtype, k, "cuda", kind) for k in (0, 1))
        for name, keepdim in itertools.product(NAMES, (False, True)):
            compare_bits(lambda x, y: reduced(name, x * y, dim, keepdim) * 2.0, x, y)  # noqa: B023
        for soft in (torch.softmax, torch.log_softmax) if isinstance(dim, int) else ():
            compare_bits(lambda x, y: soft(x * y, dim) * y, x, y)  # noqa: B023
        compare_bits(lambda x, y: (h := x * y) - h.mean(dim, keepdim=True), x, y)  # noqa: B023
