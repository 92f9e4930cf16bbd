"""Shapes and strides against TensorIterator itself, over random layouts."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autofuse
from autofuse import layout
from cases import FLOAT_CALLS, NO_RULE, PAIR_CALLS
from support import DEVICES, assert_same, copied


@st.composite
def operands(draw):
    """One to three tensors that broadcast: permuted, gapped, channels-last, expanded, empty."""
    ndim = draw(st.integers(0, 4))
    sizes = st.sampled_from([1, 2, 3, 4, 0] if draw(st.integers(0, 3)) == 0 else [1, 2, 3, 4])
    shape = [draw(sizes) for _ in range(ndim)]
    tensors = []
    for k in range(draw(st.integers(1, 3))):
        own = [1 if draw(st.integers(0, 4)) == 0 and k else n for n in shape]
        own = own[draw(st.integers(0, len(own))) if draw(st.integers(0, 4)) == 0 and k else 0 :]
        tensors.append(_laid_out(draw, own))
    return tensors


def _laid_out(draw, shape):
    how = draw(st.sampled_from(["plain", "permuted", "gapped", "channels_last", "expanded"]))
    if how == "permuted":
        order = draw(st.permutations(range(len(shape))))
        inverse = [list(order).index(i) for i in range(len(order))]
        return torch.zeros([shape[i] for i in order]).permute(inverse)
    if how == "gapped":
        return torch.zeros([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
    if how == "channels_last" and len(shape) == 4:
        return torch.zeros(shape).to(memory_format=torch.channels_last)
    if how == "expanded":
        return torch.zeros([1 if draw(st.booleans()) else n for n in shape]).expand(shape)
    return torch.zeros(shape)


def views(tensors):
    return [(tuple(t.shape), t.stride()) for t in tensors]


@settings(max_examples=1500, deadline=None)
@given(operands())
def test_result_has_eagers_shape_and_strides(tensors):
    call = {1: torch.neg, 2: torch.add, 3: torch.addcmul}[len(tensors)]
    want = call(*tensors)
    shape = layout.broadcast([tuple(t.shape) for t in tensors])
    assert shape == tuple(want.shape)
    assert layout.result_stride(shape, views(tensors)) == want.stride()


@settings(max_examples=300, deadline=None)
@given(operands())
def test_a_scalar_is_a_0d_operand(tensors):
    t = tensors[0]
    want = t + 1.0
    assert layout.result_stride(tuple(t.shape), [*views([t]), ((), ())]) == want.stride()


@settings(max_examples=500, deadline=None)
@given(operands())
def test_collapse_visits_every_element_once(tensors):
    shape = layout.broadcast([tuple(t.shape) for t in tensors])
    if 0 in shape:
        return
    strides = [layout.expand(tuple(t.shape), t.stride(), shape) for t in tensors]
    sizes, merged = layout.collapse(shape, strides)
    assert layout.numel(sizes) == layout.numel(shape)

    def offsets(sizes, strides):
        points = [(0,) * len(strides)]
        for axis, size in enumerate(sizes):
            points = [
                tuple(p + k * s[axis] for p, s in zip(point, strides, strict=True))
                for point in points
                for k in range(size)
            ]
        return sorted(points)

    assert offsets(shape, strides) == offsets(sizes, merged)


@settings(max_examples=300, deadline=None)
@given(operands(), st.sampled_from([torch.float32, torch.float64]))
def test_strides_of_every_binary_op(tensors, dtype):
    """Of the pending value; operands of two dtypes, of which torch copies one for some ops."""
    x, y = tensors[0], tensors[-1].to(dtype)
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return
    calls = {**PAIR_CALLS, "where": lambda x, y: torch.where(x > y, x, y)}
    for name, call in calls.items():
        try:
            want = call(x, y)
        except (RuntimeError, UserWarning):  # of other dtypes; a loss of two shapes
            continue
        assert call(autofuse.wrap(x), y).stride() == want.stride(), name


@pytest.mark.parametrize("name", PAIR_CALLS)
def test_an_empty_result_of_another_shape_than_the_first_operand(name):
    x, y = torch.zeros(0, 2), torch.zeros(3, 0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # losses warn of shapes that differ
        got, want = PAIR_CALLS[name](autofuse.wrap(x), y), PAIR_CALLS[name](x, y)
    assert_same(got, want, None)


def test_shapes_that_do_not_broadcast():
    assert layout.broadcast([(2, 3), (4,)]) is None
    assert layout.broadcast([(2, 3), (1,), ()]) == (2, 3)


ODD = [
    torch.zeros(8, 1).t(),
    torch.zeros(4, 6).t(),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.zeros(1, 5).expand(4, 5),
    torch.zeros(8, 8)[::2, 1::3],
]


@settings(max_examples=300, deadline=None)
@given(operands())
def test_strides_of_every_unary_op(tensors):
    """Of the pending value: nothing runs. Some ops are several steps in eager."""
    t = tensors[0]
    for name, call in FLOAT_CALLS.items():
        assert call(autofuse.wrap(t)).stride() == call(t).stride(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", range(len(ODD)))
def test_strides_of_every_op_and_its_gradient(k, device, monkeypatch):
    """Scalars are operands of TensorIterator for some ops and plain arguments for others."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    calls = [(n, f, 1) for n, f in FLOAT_CALLS.items()]
    calls += [(n, f, 2) for n, f in PAIR_CALLS.items()]
    for name, call, count in calls:
        results = []
        for wrap in (lambda t: t, autofuse.wrap):
            leaf = copied(ODD[k]).to(device).requires_grad_()
            y = call(*[wrap(leaf)] * count)
            strides = [y.stride()]
            differentiates = device == "cuda" or k in (1, 2)  # a kernel each: not all on the CPU
            if (
                differentiates
                and y.requires_grad
                and y is not leaf
                and name not in NO_RULE
                and "floordiv" not in name
            ):
                seed = torch.ones_like(y).detach()
                strides.append(torch.autograd.grad(y, leaf, seed)[0].stride())
            results.append(strides)
        assert results[0] == results[1], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_elements_with_gaps(dtype, device):
    """Every n-th element of rows, with any beginning and any end, beside dense and equal ones."""

    def f(x, y, b):
        return x + y, x * 3 - b

    for columns, step, begin in itertools.product((4, 30, 64, 257), (2, 3, 8, 9), (0, 1)):
        base = (torch.randn(6, columns * step + 1, device=device) * 40).to(dtype)
        for x in (base[:, begin::step][:, :columns], base.view(-1)[begin::step]):
            y = (torch.randn(x.shape, device=device) * 40).to(dtype)
            b = y[..., :1] if x.ndim == 2 else y[:1]
            got = f(autofuse.wrap(x), autofuse.wrap(y), b)
            assert_same(got, f(x, y, b), None, f"{columns} {step} {begin}")
