"""Reductions over any dimensions, of tensors in any order, and what repeats along a part of a row.

Without a GPU their kernels run in an emulation of its threads, and are compared with a model of
torch's order, `row_oracle`; and the order in which TensorIterator goes through a tensor with a
literal model of that.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_columns import (
    DTYPES,
    NAMES,
    compare_bits,
    compare_gradients,
    compare_orders,
    oracle,
    reduced,
    run,
    values,
)
from test_groups import kernels  # noqa: F401
from test_reductions import H200, emulated, launched, recorded, recording  # noqa: F401

import autofuse
from autofuse.chain.steps import program_of
from autofuse.cli import verify
from autofuse.kernel.rows import RowPlan, make_pieces
from autofuse.layout import contiguous, iteration, order_of
from autofuse.program.program import Output
from support import assert_same, compared_about, needs_cuda

# --- the order ------------------------------------------------------------------------------------


def by_the_letter(shape, stride, axes):
    """The dimensions of a reduction as TensorIterator sorts and merges them: of each its size, and
    its strides in the result and in the operand."""
    ndim = len(shape)
    places = {axis % ndim for axis in axes}
    result = contiguous(tuple(1 if k in places else n for k, n in enumerate(shape)))
    result = [0 if k in places else s for k, s in enumerate(result)]

    def should_swap(a, b):
        for which, strides in enumerate((result, stride)):
            first, second = strides[a], strides[b]
            if which == 0 and (first == 0) != (second == 0):
                return 1 if second == 0 else -1
            if first == 0 or second == 0:
                continue
            if first != second:
                return -1 if first < second else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    perm = list(reversed(range(ndim)))
    for i in range(1, ndim):
        moving = i
        for other in range(i - 1, -1, -1):
            verdict = should_swap(perm[other], perm[moving])
            if verdict > 0:
                perm[other], perm[moving] = perm[moving], perm[other]
                moving = other
            elif verdict < 0:
                break
    dims = [[shape[k], result[k], stride[k]] for k in perm]
    merged = [dims[0]]
    for size, *strides in dims[1:]:
        last, *own = merged[-1]
        if last == 1 or size == 1 or all(last * a == b for a, b in zip(own, strides, strict=True)):
            merged[-1] = [last * size, *(strides if last == 1 else own)]
        else:
            merged.append([size, *strides])
    return merged


@st.composite
def reductions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    order = draw(st.permutations(range(len(shape))))
    step, stride = 1, [0] * len(shape)
    for k in order:
        stride[k] = step
        step *= shape[k] + draw(st.integers(0, 2)) * draw(st.integers(0, 1))
    axes = draw(st.sets(st.integers(-len(shape), -1), min_size=1))
    return shape, tuple(stride), tuple(sorted(axes))


@settings(max_examples=500, deadline=None)
@given(reductions())
def test_the_order_is_that_of_TensorIterator(drawn):
    shape, stride, axes = drawn
    found = by_the_letter(shape, stride, axes)
    row = [dim for dim in found if dim[0] != 1 and dim[1] == 0]
    kept = [dim for dim in found if dim[0] != 1 and dim[1] != 0]
    through = iteration(shape, stride, axes)
    assert through.row == tuple(s for _, _, s in row)
    assert through.kept == tuple(s for _, _, s in kept)
    assert through.size == (kept[0][0] if kept else 1)
    order = order_of(shape, stride, axes)
    inner = [k for k in order[len(shape) - len(axes) :] if shape[k] != 1]
    assert [stride[k] for k in inner] == sorted([stride[k] for k in inner], reverse=True)


# --- by kernels, emulated -------------------------------------------------------------------------

APART = [
    ((3, 4, 5), (0, 2)), ((2, 3, 4, 5), (0, 2, 3)), ((2, 5, 3), (0, 2)), ((2, 3, 2, 5), (1, 3)),
    ((3, 1, 4, 2), (0, 2)), ((2, 3, 2, 2, 3), (0, 2, 4)), ((6, 2, 130), (0, -1)),
    ((40, 3, 8), (2, 0)), ((2, 3, 4, 5), (0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), APART, ids=str)
@torch.no_grad()
def test_dimensions_that_do_not_follow_each_other(kernels, shape, dim, keepdim):  # noqa: F811
    compare_orders(shape, dim, keepdim)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@torch.no_grad()
def test_tensors_in_any_order(kernels, order):  # noqa: F811
    """Of every dimension and pair: in memory, and of what is computed first."""
    shape = (4, 6, 3)
    back = [order.index(k) for k in range(3)]
    x, y = (values([shape[k] for k in order], seed=k).permute(back) for k in (0, 1))
    dims = [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    for name, dim in itertools.product(("sum", "mean", "amax", "var"), dims):
        for keepdim in (False, True):
            got, names = run(lambda x, y: reduced(name, x * y, dim, keepdim) * 2.0, x, y)  # noqa: B023
            assert names == [f"af_rows_mul_{name}_mul"]
            assert_same(got, oracle(name, x * y, dim, keepdim) * 2.0, None, f"{name} {dim}")
            got, names = run(lambda x: reduced(name, x, dim, keepdim) * 2.0, x)  # noqa: B023
            assert names == [f"af_rows_{name}_mul"]
            assert_same(got, oracle(name, x, dim, keepdim) * 2.0, None, f"{name} {dim}, read")


REPEATED = {
    "all": lambda x, m: (x * m).sum(),
    "all, the mean": lambda x, m: ((x - m) * x).mean(),
    "the last two": lambda x, m: (x * m).sum((-2, -1)),
    "the first and last": lambda x, m: (x * m).sum((0, 2), True) * 0.5,
    "and their difference": lambda x, m: (h := x * m) - h.amax((1, 2), True),
    "and a quotient": lambda x, m: (h := (x * m).exp()) / (h.amax((0, 2), True) + m),
}
DIMS = {"all": (0, 1, 2), "all, the mean": (0, 1, 2), "the last two": (1, 2),
        "the first and last": (0, 2)}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("shape", [(3, 4, 8), (2, 3, 5), (2, 3, 64), (4, 8, 131)], ids=str)
@torch.no_grad()
def test_what_repeats_along_a_part_of_a_row(kernels, name, shape):  # noqa: F811
    """By vectors and without, where these lie along one dimension and where not."""
    x = values(shape)
    for kept in itertools.product((False, True), repeat=3):
        m = values([n if keep else 1 for n, keep in zip(shape, kept, strict=True)], seed=3)
        got, names = run(REPEATED[name], x, m)
        apart = name == "and a quotient" and kept[0] != kept[2]  # neither rows nor numbers
        assert len(names) == 1 + apart and names[0].startswith("af_rows")
        if name == "all":
            want = oracle("sum", x * m, DIMS[name])
        elif name == "all, the mean":
            want = oracle("mean", (x - m) * x, DIMS[name])
        elif name == "the last two":
            want = oracle("sum", x * m, DIMS[name])
        elif name == "the first and last":
            want = oracle("sum", x * m, DIMS[name], True) * 0.5
        else:
            want = REPEATED[name](x, m)
        exact = name in DIMS or "difference" in name
        assert_same(got, want, None if exact else 1e-6, f"{kept}")


@torch.no_grad()
def test_operands_of_other_strides_than_the_rows(kernels):  # noqa: F811
    x, w = values((4, 6, 8)), values((6, 16), seed=2)[:, ::2]
    y, z = values((8, 6, 4), seed=1).permute(2, 1, 0), values((4, 6, 9), seed=4)[..., 1:]
    for dtype in DTYPES:
        args = [t.to(dtype) for t in (x, y)] + [w.to(dtype), z.to(dtype)]
        for dim in ((0, 1, 2), (1, 2), (0, 2), (0, 1), 1):
            got, names = run(lambda x, y, w, z: (x * y + w * z).sum(dim) * 2.0, *args)  # noqa: B023
            x_, y_, w_, z_ = args
            assert len(names) == 1
            assert_same(got, oracle("sum", x_ * y_ + w_ * z_, dim) * 2.0, None, f"{dtype} {dim}")


@pytest.mark.parametrize("columns", [4, 7, 128, 132, 200])
@torch.no_grad()
def test_rows_with_space_between(kernels, columns):  # noqa: F811
    """Vectors begin where memory is aligned, whatever a row begins with."""
    for more, name in itertools.product((1, 2, 4, 8), ("sum", "mean", "amax", "var")):
        x = values((5, columns + more), seed=more)[:, :columns]
        got, names = run(lambda x: reduced(name, x, -1) * 2.0, x)  # noqa: B023
        assert names == [f"af_rows_{name}_mul"]
        assert_same(got, oracle(name, x, -1) * 2.0, None, f"{name} {more}")
        got, _ = run(lambda x: x.sum() + 1.0, x)
        assert_same(got, oracle("sum", x, (0, 1)) + 1.0, None, f"all {more}")


@torch.no_grad()
def test_rows_that_blocks_share(kernels):  # noqa: F811
    x, m = values((300, 2, 500)), values((300, 1, 1), seed=1)
    for dim in ((0, 2), (0, 1, 2)):
        got, names = run(lambda x, m: (x * m).sum(dim) * 2.0, x, m)  # noqa: B023
        assert len(names) == 2
        assert_same(got, oracle("sum", x * m, dim) * 2.0, None, str(dim))


@torch.no_grad()
def test_what_follows_is_in_their_kernel(kernels):  # noqa: F811
    """Of statistics of channels, with a scale for each: batch_norm as it is written by hand."""

    def program(x, w, b, mean=torch.mean):
        m = mean(x, (0, 2, 3), True)
        v = mean((x - m) ** 2, (0, 2, 3), True)
        return (x - m) * torch.rsqrt(v + 1e-5) * w + b

    x, w, b = values((2, 3, 4, 4)), values((3, 1, 1), seed=1), values((1, 3, 1, 1), seed=2)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)
        got, names = run(program, x, w, b)
        assert len(names) == 1
        want = program(x, w, b, lambda x, dim, keepdim: oracle("mean", x, dim, keepdim))
        assert_same(got, want, 1e-6)


@torch.no_grad()
def test_numbers_of_rows_meet_others(kernels):  # noqa: F811
    """Whose dimensions are those of rows, of one of them, or none."""
    x = values((4, 6, 4, 3))
    others = (6, 3), (1, 3), (), (6, 1)
    for k, shape in enumerate(others):
        c = values(shape, seed=k + 1)
        got, names = run(lambda x, c: (x * 0.5).sum((0, 2)) * c, x, c)
        assert names == ["af_rows_mul_sum_mul"]
        assert_same(got, oracle("sum", x * 0.5, (0, 2)) * c, None, str(shape))


@torch.no_grad()
def test_what_else_the_chain_has(kernels):  # noqa: F811
    """Values that have nothing to do with the rows, of more dimensions, as many and less."""
    x, m = values((2, 3, 8)), values((2, 1, 1), seed=1)
    others = [(5, 2, 3, 2), (2, 3, 8), (8, 3, 2), (3, 1), (7,), (2, 1, 2, 3, 8)]
    others = [values(shape, seed=3 + k) for k, shape in enumerate(others)]
    for dim in ((0, 2), (1, 2), 0, (0, 1, 2)):
        for _ in range(2):
            made = [autofuse.wrap(y) * 2.0 for y in others]
            out = (autofuse.wrap(x) * m).sum(dim) * 2.0
            made += [autofuse.wrap(y) - 1.0 for y in others]
            autofuse.reset_stats()
            got = [autofuse.unwrap(autofuse.materialize(y)) for y in (out, *made)]
            assert autofuse.stats().eager_flushes == 0
            want = [oracle("sum", x * m, dim) * 2.0, *[y * 2.0 for y in others]]
            for a, b in zip(got, [*want, *[y - 1.0 for y in others]], strict=True):
                assert_same(a, b, None, str(dim))


@torch.no_grad()
def test_what_lies_in_another_order_is_in_a_kernel_of_its_own(kernels):  # noqa: F811
    """If it does not follow from the rows; so no element of it is divided for."""
    x, z = values((2, 4, 6, 5)), values((5, 6, 4, 2), seed=1).permute(3, 2, 1, 0)
    for other, count in ((z, 2), (x, 1)):
        got, names = run(lambda x, z: ((x * 2.0).sum((-2, -1)), z + 1.0), x, other)
        assert len(names) == count
        assert_same(got[0], oracle("sum", x * 2.0, (-2, -1)), None)
        assert_same(got[1], other + 1.0, None)


@torch.no_grad()
def test_what_other_kernels_read_does_not_divide_rows(kernels):  # noqa: F811
    x, w = autofuse.wrap(values((2, 4, 6, 5))), values((4,), seed=1)
    y = values((2, 6, 5, 4), seed=2).permute(0, 3, 1, 2)
    for program in (lambda: F.group_norm(x * 2.0, 2, w, w) + 1.0,
                    lambda: F.group_norm(x * 2.0, 2) + y):  # fmt: skip
        out = program()
        planned = program_of(out._af, (Output(out._af.index),))
        pieces = make_pieces(planned, "cuda", H200)
        assert [piece.plan.rows.axes for piece in pieces if isinstance(piece.plan, RowPlan)] == [1]
        assert_same(autofuse.unwrap(out), autofuse.unwrap(autofuse.materialize(program())), None)


@torch.no_grad()
def test_torch_counts_what_lies_between_rows(recorded):  # noqa: F811
    """In 32 bits: it reduces parts of what reaches further, each divided by itself."""
    memory = torch.empty(3000 << 18)  # of which few pages are written
    for rows, is_recorded in ((3000, False), (2000, True)):
        x = memory.view(3000, 1 << 18)[:rows, :64]
        x.copy_(values((rows, 64)))
        y = autofuse.wrap(x).sum(0)
        assert autofuse.is_pending(y) is is_recorded
        assert_same(autofuse.unwrap(y), x.sum(0), 1e-5)


@pytest.mark.parametrize("name", ["reductions over other axes", "statistics of channels"])
def test_they_are_compared_when_a_gpu_is_verified(kernels, name, monkeypatch):  # noqa: F811
    """Here with what the order of a CPU gives."""
    seen = compared_about(monkeypatch, 1e-3, {"r": 6, "s": 2}[name[0]])
    cases = [(6, 132, "plain", 0), (3, 7, "plain", 0), (2, 2, "plain", 1)]
    outcome = verify.compare(name, torch.float32, cases, "cpu")
    assert outcome.reduced == len(cases) and len(seen) >= len(cases), outcome.left
    assert len(launched) >= len(cases)


# --- in training ----------------------------------------------------------------------------------

GRADS = {
    "sum": lambda x, m: (x * m).sum((0, 2)) * 2.0,
    "mean of all": lambda x, m: ((x - m) ** 2 * m).mean(),
    "var": lambda x, m: (x * m).var((0, 2)) + 1.0,
    "std, kept": lambda x, m: x / (x.std((0, 2), keepdim=True) + m.abs()),
    "amax": lambda x, m: (x * m).amax((0, 2)).exp(),
    "norm": lambda x, m: torch.linalg.vector_norm(x * m, 2, (0, 2)) * 0.5,
    "logsumexp": lambda x, m: torch.logsumexp(x * m, (0, 2)) * 0.5,
    "transposed": lambda x, m: (x.transpose(0, 1) * m.transpose(0, 1)).sum(1) * 2.0,
    "transposed, var": lambda x, m: (x.transpose(0, 2) * 2.0).var(-1) + (m * m).sum(),
}


@pytest.mark.parametrize("name", GRADS)
def test_gradients_are_eagers(recorded, name):  # noqa: F811
    compare_gradients(GRADS[name], (3, 5, 4), (3, 1, 4))


# --- on CUDA --------------------------------------------------------------------------------------

LARGE = [
    ((32, 64, 56, 56), (0, 2, 3)), ((64, 197, 96), (0, 2)), ((300, 2, 500), (0, 2)),
    ((16, 3, 224, 224), (0, 2, 3)), ((8, 1, 31, 257), (0, 3)), ((5000, 7, 9), (2, 0)),
]  # fmt: skip


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "special"])
@torch.no_grad()
def test_bits_on_cuda(always, dtype, kind):
    turn = itertools.cycle(NAMES)  # not each of them everywhere: a kernel takes 0.1 s to compile
    for k, (shape, dim) in enumerate((*APART, *LARGE)):
        x, y = (values(shape, dtype, k, "cuda", kind) for k in (0, 1))
        for name in NAMES:
            compare_bits(lambda x, y: reduced(name, x * y, dim, k % 2 == 0) * 2.0, x, y)  # noqa: B023
    for order in itertools.permutations(range(3)):
        for shape in ((4, 6, 3), (40, 33, 64), (12, 2, 515), (130, 700, 4)):
            back = [order.index(k) for k in range(3)]
            memory = [shape[k] for k in order]
            x, y = (values(memory, dtype, k, "cuda", kind).permute(back) for k in (0, 1))
            for dim, name in zip([0, 1, 2, (0, 1), (0, 2), (1, 2)], turn, strict=False):
                compare_bits(lambda x, y: reduced(name, x * y, dim) * 2.0, x, y)  # noqa: B023
            compare_bits(lambda x: reduced(name, x, dim) * 2.0, x)  # noqa: B023
    for shape in ((3, 4, 8), (64, 30, 131)):
        x = values(shape, dtype, 0, "cuda", kind)
        for kept in itertools.product((False, True), repeat=3):
            m = [n if keep else 1 for n, keep in zip(shape, kept, strict=True)]
            for program in REPEATED.values():
                compare_bits(program, x, values(m, dtype, 3, "cuda"))
    for columns, more in itertools.product((4, 7, 128, 132, 2000), (1, 2, 4, 8)):
        x = values((50, columns + more), dtype, 0, "cuda", kind)[:, :columns]
        for name in itertools.islice(turn, 2):
            compare_bits(lambda x: reduced(name, x, -1) * 2.0, x)  # noqa: B023
            compare_bits(lambda x: reduced(name, x, (0, 1)) + 1.0, x)  # noqa: B023


POOLED = {
    "one": lambda x: F.adaptive_avg_pool2d(torch.relu(x * 2.0), 1) * 0.5,
    "two": lambda x: torch.nn.AdaptiveAvgPool2d((1, 1))(torch.relu(x * 2.0)) * 0.5,
    "of C": lambda x: torch._C._nn.adaptive_avg_pool2d(torch.relu(x * 2.0), [1, 1]) * 0.5,
}


@pytest.mark.parametrize("name", POOLED)
@torch.no_grad()
def test_pooling_to_one_element_is_a_mean(kernels, name):  # noqa: F811
    images = values((2, 3, 4, 5))
    for x in (images, values((3, 4, 5)), images.contiguous(memory_format=torch.channels_last)):
        for _ in range(3):  # the last ones by machine code
            got, names = run(POOLED[name], x)
            assert names == ["af_rows_mul_relu_mean_mul"]
            want = POOLED[name](x)
            want.copy_(oracle("mean", torch.relu(x * 2.0), (-2, -1), True) * 0.5)
            assert_same(got, want, None)  # strides, too


def test_the_gradient_of_pooling(recorded):  # noqa: F811
    """Of channels_last torch's own, whose result is a view."""
    for layout in (torch.contiguous_format, torch.channels_last):
        found = []
        for wrap in (lambda x: x, autofuse.wrap):
            x = values((2, 3, 4, 5)).contiguous(memory_format=layout).requires_grad_()
            y = F.adaptive_avg_pool2d(wrap(x) * 2.0, 1) * 0.5
            (g,) = torch.autograd.grad(y.square().sum(), x)
            found.append([autofuse.unwrap(t).detach() for t in (y, g)])
        for a, b in zip(*found, strict=True):
            assert_same(b, a, 1e-6, str(layout))
            assert a.stride() == b.stride()


@pytest.mark.parametrize("call", [
    lambda x: F.adaptive_avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, (None, 1)),
    lambda x: torch._C._nn.adaptive_avg_pool2d(x, [1]), lambda x: F.adaptive_avg_pool2d(x[0, 0], 1),
    lambda x: F.adaptive_avg_pool2d(x[..., :1, :1].contiguous() * 2.0, 1),
    lambda x: F.adaptive_avg_pool2d(
        x[..., :1, :1].contiguous(memory_format=torch.channels_last) * 2.0, 1
    ),
    lambda x: F.adaptive_avg_pool2d(x.mT * 2.0, 1), lambda x: F.adaptive_avg_pool2d(x[..., ::2], 1),
    lambda x: F.adaptive_avg_pool2d(x, True), lambda x: F.adaptive_avg_pool2d(x, [1, 1.0]),
    lambda x: F.adaptive_avg_pool2d(x[:, :0], 1), lambda x: F.adaptive_avg_pool2d(x, (1, 1, 1)),
])  # fmt: skip
def test_other_pooling_is_torchs(recorded, call):  # noqa: F811
    found = []
    for wrap in (lambda x: x, autofuse.wrap):
        try:
            y = autofuse.unwrap(call(wrap(values((2, 3, 4, 5)))))
            found.append((y.tolist(), y.stride()))
        except (RuntimeError, ValueError, TypeError) as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]
