"""Gradients of reductions by kernels, together with the pointwise ops around them.

Without a GPU their kernels run thread by thread, as in test_reductions.py; what they add, and in
which order, is compared with numpy (`row_oracle`), all else with eager's.
"""

import itertools

import numpy as np
import pytest
import row_oracle
import simt
import torch
import torch.nn.functional as F
from test_norms import GRADS, PROGRAMS, hung, leaves, ran, trained  # noqa: F401
from test_reductions import emulated, launched, recording, row, table  # noqa: F401

import autofuse
from autofuse.chain import rowwise, verified
from autofuse.cli import verify
from autofuse.grad import reduced
from autofuse.kernel.cuda import compile_ptx
from autofuse.kernel.division import NORM_SUMS, SOFT_SUM, Scheme, scheme_of
from autofuse.kernel.rows import source_of
from cases import NO_RULE
from support import WIDE, assert_same, compared_about, needs_cuda

EPS = 1e-5
# parts of a warp, several elements a thread, whole and broken groups of four, one round of a
# block's threads and more, more than 4096 bytes of float32 and of 16 bits
COLUMNS = (2, 3, 31, 32, 100, 128, 131, 255, 513, 1000, 1024, 1032, 1040)
AROUND = {
    "nothing before": (lambda x, y: x, lambda z, y: z * y),
    "nothing after": (lambda x, y: x * y, lambda z, y: z),
    "one op": (lambda x, y: x * y, lambda z, y: z * y),
    "three ops": (lambda x, y: (x * y + x) * 0.5, lambda z, y: (z * y + y) * 0.25),
}
REDUCE = {
    "softmax": lambda h, w, b: torch.softmax(h, -1),
    "log_softmax": lambda h, w, b: torch.log_softmax(h, -1),
    "layer_norm": lambda h, w, b: F.layer_norm(h, h.shape[-1:], None, None, EPS),
    "layer_norm, weights": lambda h, w, b: F.layer_norm(h, h.shape[-1:], w, b, EPS),
    "rms_norm": lambda h, w, b: F.rms_norm(h, h.shape[-1:], None, EPS),
    "rms_norm, weights": lambda h, w, b: F.rms_norm(h, h.shape[-1:], w, EPS),
}


def rounded(rows, dtype):
    return torch.from_numpy(np.asarray(rows, np.float32)).to(dtype)


def numpy(x):
    return x.detach().float().numpy()


def gradient(function, *xs, g):
    """For the first of `xs`, by eager PyTorch."""
    leaf = xs[0].detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf, *xs[1:]), leaf, g)
    return found


def expected(name, before, after, x, y, w, b, g):
    """The gradient for x, that of the reduction's rows by numpy."""
    dtype, eps = x.dtype, simt.F32(EPS)
    kind, _, weighted = name.partition(", ")
    h = before(x, y)
    d = gradient(after, torch.ones_like(h), y, g=g)  # arithmetic alone: no value of it is read
    rows = []
    for hk, dk in zip(numpy(h), d, strict=True):
        if kind in ("softmax", "log_softmax"):
            log_of = kind == "log_softmax"
            out = rounded(row_oracle.softmax(hk, log_of), dtype)
            given = dk if log_of else dk * out
            rows.append(row_oracle.softmax_backward(
                numpy(given), numpy(out), x.element_size(), log_of
            ))  # fmt: skip
            continue
        weight = numpy(w) if weighted else None
        statistics = getattr(row_oracle, f"{kind}_statistics")(hk, eps)
        rows.append(getattr(row_oracle, f"{kind}_backward")(numpy(dk), hk, *statistics, weight))
    return gradient(before, x, y, g=rounded(rows, dtype))


@pytest.fixture
def everywhere(monkeypatch):
    """As on CUDA, autograd has a node of rms_norm."""
    monkeypatch.setattr(rowwise, "has_node", lambda op, kind: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", REDUCE)
def test_rows_in_torchs_order(emulated, everywhere, name, around, dtype, on):  # noqa: F811
    """Forward and backward are a kernel each."""
    before, after = AROUND[around]
    sizes = COLUMNS if around == "one op" and dtype is torch.float32 and not on else (31, 132)
    for n in COLUMNS if WIDE else sizes:
        x, y, g = (table(2, n, k, dtype) for k in range(3))
        w, b = row(n, 3, dtype), row(n, 4, dtype)
        want = expected(name, before, after, x, y, w, b, g)
        leaf = x.clone().requires_grad_()
        out = after(REDUCE[name](before(autofuse.wrap(leaf), y), w, b), y)
        out = autofuse.unwrap(autofuse.materialize(out))
        launched.clear()
        (got,) = torch.autograd.grad(out, leaf, g)
        assert len(launched) == 1 and autofuse.stats().replays == 0, (n, launched)
        assert_same(got, want, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("after", ["nothing", "a step", "rows"])
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize(("name", "correction"), [("var", 1), ("var", 0), ("std", 1), ("std", 2.5)])
def test_variances_in_torchs_order(emulated, name, correction, keepdim, after, dtype, on):  # noqa: F811
    """Which take the mean of each row again, in a kernel."""
    m, sizes = 3, (31, 132) if after == "nothing" else (131,)
    for n in (3, 7, 100, *COLUMNS[6:]) if WIDE else sizes:
        x, y, g = (table(m, n, k, dtype) for k in range(3))
        given = g[:, :1].clone() if keepdim else g[:, 0].clone()
        leaf, h = x.clone().requires_grad_(), x * y
        out = getattr(autofuse.wrap(leaf) * y, name)(-1, correction=correction, keepdim=keepdim)
        column = given.view(m, 1)
        if after == "a step":
            out, column = out * 0.5, column * 0.5
        elif after == "rows":  # of which eager adds the gradients up
            given = g.clone()
            out = (out if keepdim else out.unsqueeze(-1)) * y
            column = (g * y).sum(-1, keepdim=True)
            if keepdim:  # and a kernel, where nothing is viewed in between
                scheme = scheme_of("sum", m, n, dtype.itemsize, (132, 2048))
                sums = [row_oracle.reduced("sum", hk, k * n, m, scheme.across, scheme.vec)
                        for k, hk in enumerate(numpy(g * y))]  # fmt: skip
                column = rounded(sums, dtype).view(m, 1)
        out = autofuse.unwrap(autofuse.materialize(out))
        launched.clear()
        (got,) = torch.autograd.grad(out, leaf, given)
        assert launched[-1][0].startswith("af_rows") and autofuse.stats().replays == 0, launched

        def reduced_by(op, h=h, n=n):
            scheme = scheme_of(op, m, n, dtype.itemsize, (132, 2048))
            vec, c = scheme.vec, correction
            rows = [row_oracle.reduced(op, hk, k * n, m, scheme.across, vec, c)
                    for k, hk in enumerate(numpy(h))]  # fmt: skip
            return rounded(rows, dtype).view(m, 1)

        if name == "std":
            root = reduced_by("std")
            column = (column / (root * 2)).masked_fill(root == 0, 0)
        want = column * (2.0 / (n - correction)) * (h - reduced_by("mean")) * y
        assert_same(got, want, None)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_schemes(itemsize):
    """Every size has threads of its own, or none."""

    def scheme(op, n):
        found = scheme_of(op, 3, n, itemsize, (132, 2048))
        return (found.kernel, found.threads, found.vec) if isinstance(found, Scheme) else None

    for n in (2, 3, 100, 1024, 5000, 50257):
        for op in NORM_SUMS:
            assert scheme(op, n) == ("fours", 128, 4)
    vec = 16 // itemsize
    blocks = {2: {1032: 64, 1040: 128, 2048: 128, 4096: 256, 8192: 512, 24536: 512},
              4: {1028: 128, 2048: 256, 4096: 512, 12268: 512}}[itemsize]  # fmt: skip
    for n, threads in {2: 2, 3: 4, 17: 32, 1024: 32}.items():
        assert scheme(SOFT_SUM, n) == ("warp", threads, 1)
    for n, threads in blocks.items():
        assert scheme(SOFT_SUM, n) == ("block", threads, vec)
    # no whole vectors, or more than shared memory has: from where they begin on it would depend
    for n in (1025, 1027, 2049, 24576, 50257):
        assert scheme(SOFT_SUM, n) is None


@pytest.mark.parametrize("name", REDUCE)
@pytest.mark.parametrize("n", [131, 1032])
def test_they_compile_without_a_gpu(emulated, everywhere, name, n):  # noqa: F811
    """To PTX."""
    x, y = (table(2, n, k, torch.bfloat16).requires_grad_() for k in range(2))
    w, b = row(n, 3, torch.bfloat16), row(n, 4, torch.bfloat16)
    out = REDUCE[name](autofuse.wrap(x) * y, w, b) * y
    out = autofuse.unwrap(autofuse.materialize(out))
    known = set(emulated)
    torch.autograd.grad(out, [x, y], table(2, n, 5, torch.bfloat16))
    (plan,) = set(emulated) - known
    assert ".entry" in compile_ptx(source_of(plan, "sm_90"), "sm_90")


# --- which nodes there are ------------------------------------------------------------------------


def nodes_of(tensor):
    """The names of autograd's nodes, but for those of leaves."""
    found, left = [], [tensor.grad_fn]
    while left:
        node = left.pop(0)
        if node is not None and "Accumulate" not in node.name() and node not in found:
            found.append(node)
            left += [following for following, _ in node.next_functions]
    return [node.name() for node in found if "Alias" not in node.name()]


def results(program, xs):
    """Of two runs, by kernels, the second by machine code if there is some."""
    for _ in range(2):
        out = autofuse.unwrap(autofuse.materialize(program(*map(autofuse.wrap, xs))))
    return out


@pytest.mark.parametrize(
    ("program", "nodes"),
    [
        (lambda x, y, w, b: F.gelu(F.layer_norm(x * y, (32,), w, b)) + y, ["AddBackward0"]),
        (lambda x, y, w, b: F.layer_norm(x * y, (32,), w, b), ["NativeLayerNormBackward0"]),
        (lambda x, y, w, b: torch.softmax(x * y, -1), ["SoftmaxBackward0"]),
        (lambda x, y, w, b: torch.log_softmax(x * y, -1), ["LogSoftmaxBackward0"]),
        (lambda x, y, w, b: (x * y).sum(-1), ["SumBackward1"]),
        (lambda x, y, w, b: (x * y).mean(-1, keepdim=True), ["MeanBackward1"]),
        (lambda x, y, w, b: (x * y).norm(dim=-1), ["LinalgVectorNormBackward0"]),
        (lambda x, y, w, b: (x * y).var(-1), ["VarBackward0"]),
        (lambda x, y, w, b: (x * y).std(-1, keepdim=True), ["StdBackward0"]),
        (lambda x, y, w, b: (x * y).mean(-1) + 1.0, ["AddBackward0"]),
        # over rows, and of numbers of them
        (lambda x, y, w, b: torch.softmax(x * y, -1).sum(-1) + 1.0,
         ["AddBackward0", "SoftmaxBackward0"]),
        (lambda x, y, w, b: (x * y).amax(-1) + 1.0,
         ["AddBackward0", "AmaxBackward0", "MulBackward0"]),
        # nothing goes along with it
        (lambda x, y, w, b: x.amax(-1, keepdim=True) * y, ["MulBackward0", "AmaxBackward0"]),
        # what is spread along rows is added up by the kernel that needs it
        (lambda x, y, w, b: x.sum(-1, keepdim=True) * y, ["MulBackward0"]),
        # a weight that is computed has a gradient of another shape
        (lambda x, y, w, b: F.layer_norm(x * y, (32,), w * 2.0, b) + y,
         ["AddBackward0", "MulBackward0"]),
    ],
)  # fmt: skip
def test_what_is_one_node(hung, program, nodes):  # noqa: F811
    """Named as eager's is."""
    xs = leaves(n=32)
    out, want = results(program, xs), program(*leaves(n=32))
    assert nodes_of(out) == nodes and len(ran) == 2
    assert out.grad_fn.next_functions[0][0].name() == want.grad_fn.name() or (
        out.grad_fn.name() == want.grad_fn.name()
    )


def test_where_gradients_would_add_in_another_order_they_are_nodes_of_their_own(hung):  # noqa: F811
    """As eager adds the one for x, that of the last op first."""

    def program(x, y, w, b):
        normed = F.layer_norm(x * y, (12,), w, b)
        doubled = x * 2.0
        return normed + y, doubled

    found = []
    for wrap in (False, True):
        xs = leaves()
        out, doubled = program(*(map(autofuse.wrap, xs) if wrap else xs))
        out, doubled = (autofuse.unwrap(autofuse.materialize(one)) for one in (out, doubled))
        total = out.square().sum() + doubled.square().sum()
        found.append(torch.autograd.grad(total, xs))
    assert_same(found[1], found[0], 1e-5)
    assert nodes_of(out) == ["AddBackward0", "NativeLayerNormBackward0", "MulBackward0"]
    assert len(ran) == 1


def test_as_many_as_a_kernel_has_room_for(emulated):  # noqa: F811
    """Each layer norm adds up twice: of four, three are together."""

    def program(x, y):
        for _ in range(4):
            x = F.layer_norm(x * y, (12,))
        return x * y

    xs = leaves()[:2]
    out, want = results(program, xs), program(*(others := leaves()[:2]))
    launched.clear()
    g = table(5, 12, 7)
    got = torch.autograd.grad(out, xs, g)
    assert_same(list(got), list(torch.autograd.grad(want, others, g)), 1e-4)
    assert len(launched) == 2


@pytest.mark.parametrize("how", ["transposed", "expanded", "misaligned"])
@pytest.mark.parametrize("n", [132, 1028])
@pytest.mark.parametrize("name", [name for name in REDUCE if "rms" not in name])  # several on a CPU
def test_gradients_that_lie_elsewhere(emulated, name, n, how):  # noqa: F811
    """Of a result that is a reduction: what torch adds up in another order then is torch's."""
    g = {"transposed": table(n, 5, 9).t(), "expanded": row(n, 9).expand(5, n),
         "misaligned": row(5 * n + 1, 9)[1:].view(5, n)}[how]  # fmt: skip
    xs, others = leaves(n=n), leaves(n=n)
    program = lambda x, y, w, b: REDUCE[name](x * y, w.detach(), b.detach())  # noqa: E731
    out, want = results(program, xs), program(*others)
    launched.clear()
    got = torch.autograd.grad(out, xs[:2], g)
    want = torch.autograd.grad(want, others[:2], g)
    assert_same(list(got), list(want), 1e-3)
    by_torch = name == "log_softmax" and how == "misaligned" and n == 1028  # it adds up g itself
    assert len(launched) == (0 if by_torch else 1), launched


def test_what_torch_is_given_for_weights_has_the_shape_of_the_rows(emulated, monkeypatch):  # noqa: F811
    """Also where the gradient is a view of what comes in, a number for each row."""
    seen, by_torch = [], reduced._norm_by_torch
    monkeypatch.setattr(reduced, "_norm_by_torch", lambda *key: lambda g, *values: (
        seen.append((g.shape, g.stride())), by_torch(*key)(g, *values))[1])  # fmt: skip
    program = lambda x, y, w, b: F.layer_norm(x * y, (2,), w, b).sum(-1)  # noqa: E731
    xs, others = leaves(n=2), leaves(n=2)
    out, want = results(program, xs), program(*others)
    got = torch.autograd.grad(out, xs, row(5, 9))
    assert_same(list(got), list(torch.autograd.grad(want, others, row(5, 9))), 1e-4)
    assert set(seen) == {((5, 2), (2, 1))}


@pytest.mark.parametrize("which", ["weight and bias", "weight", "bias"])
def test_rows_that_are_their_own_weight(emulated, on, which):  # noqa: F811
    """What torch computes of a weight is then added to what the kernel would have to go on with."""

    def program(x, y):
        h = x * y
        w, b = (h if one in which else y for one in ("weight", "bias"))
        return F.layer_norm(h, h.shape, w, b) + y

    xs, others = ([row(32, k).requires_grad_() for k in range(2)] for _ in range(2))
    for _ in range(2):
        out, want = results(program, xs), program(*others)
        got = torch.autograd.grad(out, xs, row(32, 5))
        assert_same(list(got), list(torch.autograd.grad(want, others, row(32, 5))), 1e-4)


@pytest.mark.parametrize("which", [0, 2])
def test_operands_of_rms_norm_that_are_frozen_later(hung, everywhere, which):  # noqa: F811
    """Their gradients have a graph all the same."""
    found = []
    for wrap in (False, True):
        xs = leaves()
        out = F.rms_norm(autofuse.wrap(xs[0]) if wrap else xs[0], (12,), xs[2], 1e-5) * xs[1]
        out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
        xs[which].requires_grad_(False)
        wanted = [x for k, x in enumerate(xs[:3]) if k != which]
        found.append(torch.autograd.grad(out.sum(), wanted, create_graph=True))
    assert all(x.requires_grad for x in found[1])
    assert_same(*([x.detach() for x in grads] for grads in reversed(found)), 1e-4)


def test_another_setting_of_recompute_meanwhile(recording, hung, monkeypatch, recwarn):  # noqa: F811
    xs = leaves()
    out = F.layer_norm(autofuse.wrap(xs[0]) * xs[1], (12,), xs[2], xs[3]) * 2.0
    assert autofuse.is_pending(out)
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    out = autofuse.unwrap(autofuse.materialize(out))
    got = torch.autograd.grad(out.sum(), xs)
    others = leaves()
    want = F.layer_norm(others[0] * others[1], (12,), others[2], others[3]) * 2.0
    assert_same(list(got), list(torch.autograd.grad(want.sum(), others)), 1e-5)
    assert not recwarn.list and len(ran) == 1


@pytest.mark.parametrize("needs", GRADS)
def test_weights_get_theirs_from_torch(emulated, needs):  # noqa: F811
    """Of the gradient that the kernel stores, whichever are wanted."""
    program = lambda x, y, w, b: F.layer_norm(x * y, (132,), w, b) * 2.0 + y  # noqa: E731
    xs, others = leaves(GRADS[needs], n=132), leaves(GRADS[needs], n=132)
    out, want = results(program, xs), program(*others)
    wanted = [k for k, x in enumerate(xs) if x.requires_grad]
    if not wanted:
        assert not out.requires_grad
        return
    g = table(5, 132, 9)
    launched.clear()
    for keep in (True, False):
        got = torch.autograd.grad(out, [xs[k] for k in wanted], g, retain_graph=keep)
        expect = torch.autograd.grad(want, [others[k] for k in wanted], g, retain_graph=keep)
        assert_same(list(got), list(expect), 1e-4)
    assert len(launched) == 2 * (needs in ("all", "x", "y"))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("op", ["sum", "mean", "norm"])
def test_a_number_of_each_row_of_a_norm(emulated, op, keepdim):  # noqa: F811
    """Its gradient repeats along the row: torch's op for the weights is given a copy."""
    program = lambda x, y, w, b: getattr(  # noqa: E731
        F.layer_norm(x * y, (512,), w, b), op
    )(dim=-1, keepdim=keepdim)
    xs, others = leaves(n=512), leaves(n=512)
    out, want = results(program, xs), program(*others)
    launched.clear()
    g = row(5, 9).view(out.shape)
    got, expect = (torch.autograd.grad(*one, g) for one in ((out, xs), (want, others)))
    assert_same(list(got), list(expect), 1e-4)
    assert len(launched) == 1, launched


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_is_saved_than_eager_saves(hung, name):  # noqa: F811
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = PROGRAMS[name](*leaves())
    autofuse.reset_stats()
    trained(PROGRAMS[name], leaves(), wrap=True)
    assert autofuse.stats().bytes_saved_for_backward <= sum(saved.values())
    assert kept.requires_grad


@pytest.mark.parametrize("name", [
    name for name in verify.PROGRAMS
    if name.startswith("d ")
    and not any(other in name for other in ("rms_norm", "group_norm", "columns"))
])  # fmt: skip
def test_gradients_are_compared_when_a_gpu_is_verified(emulated, name, monkeypatch):  # noqa: F811
    """Here with what another order gives."""
    seen = compared_about(monkeypatch, 1e-3, 4)
    outcome = verify.compare(name, torch.float32, [(5, 132, "plain", 0)], "cpu")
    adds = ["layer", "softmax", "var", "std", "written", "sum", "sigmoid", "logsumexp(x * y)"]
    adds += [] if "clamp_min" in NO_RULE else ["normalize"]
    in_rows = any(reduction in name for reduction in adds) and not name.endswith("of all")
    kernels = 1 + in_rows + ("by std" in name)  # whose mean is by fewer threads here
    assert len(launched) == kernels, "the others' are no row kernels, and run as ops here"
    assert outcome.reduced == in_rows and len(seen) >= 2


@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives_of_rms_norm(hung, everywhere, weighted, monkeypatch):  # noqa: F811
    """By a node of torch's, of which its op has none; that op has no kernel for a CPU."""

    def backward_of(name, needs, columns):
        def backward(g, x, rstd, *w):
            with torch.enable_grad():
                operands = [one.detach().requires_grad_() for one in (x, *w)]
                normed = torch.rms_norm(operands[0], x.shape[-1:], *(operands[1:] or [None]), EPS)
                return torch.autograd.grad(normed, operands, g)

        return backward

    monkeypatch.setattr(reduced, "_norm_by_torch", backward_of)

    def twice(wrap):
        xs = leaves()
        x, y, w, _ = map(autofuse.wrap, xs) if wrap else xs
        out = F.rms_norm(x * y, (12,), w if weighted else None, EPS) * y
        out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
        wanted = xs[: 2 + weighted]
        first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        total = sum(one.square().sum() for one in first)
        return [one.detach() for one in (*first, *torch.autograd.grad(total, wanted))]

    torch.testing.assert_close(twice(True), twice(False), rtol=1e-4, atol=1e-4)
    assert ran


@pytest.mark.parametrize("name", REDUCE)
def test_rows_of_three_dimensions(emulated, everywhere, name):  # noqa: F811
    """Beside rows that repeat, of which torch adds the gradient up."""
    x, y, g = table(6, 131).view(2, 3, 131), table(2, 131, 1).view(2, 1, 131), table(6, 131, 2)
    w, b = row(131, 3), row(131, 4)
    found = []
    for wrap in (False, True):
        xs = [one.clone().requires_grad_() for one in (x, y)]
        p, q = map(autofuse.wrap, xs) if wrap else xs
        out = REDUCE[name](p * q, w, b) * q
        out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
        launched.clear()
        found.append(torch.autograd.grad(out, xs, g.view(2, 3, 131)))
    assert_same(list(found[1]), list(found[0]), 1e-4)
    assert len(launched) == 1


# --- on a GPU -------------------------------------------------------------------------------------

ALL_COLUMNS = (1, 2, 3, 31, 32, 33, 100, 128, 131, 255, 256, 1000, 1024, 1025, 1032, 2050, 4096,
               5000, 8192)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# what is one node in the middle of its ops: backward has one kernel
MIDDLE = {
    **REDUCE,
    "two layer norms": lambda h, w, b: F.layer_norm(
        F.layer_norm(h, h.shape[-1:], w, b) + h, h.shape[-1:]
    ),
    "sum": lambda h, w, b: h.sum(-1, keepdim=True),
    "mean": lambda h, w, b: h.mean(-1),
    "norm": lambda h, w, b: h.norm(dim=-1),
    "var": lambda h, w, b: h.var(-1),
    "std": lambda h, w, b: h.std(-1, keepdim=True),
    "vector_norm": lambda h, w, b: torch.linalg.vector_norm(h, dim=-1, keepdim=True),
}


def inputs(m, n, dtype, kind, needs=GRADS["all"]):
    """Of a kind as `cli.verify` makes them; and a gradient of the rows' shape."""
    values = verify.make(dtype, (m, n, kind, 0))
    leaves = (x.requires_grad_(bool(need)) for x, need in zip(values[:4], needs, strict=True))
    return [*leaves], values.padded.clone(memory_format=torch.contiguous_format)


def run_twice(program, xs, g, **options):
    """Eager's result and gradients, ours, and how many kernels ours took forward and backward."""
    found, kernels = [], []
    wanted = [x for x in xs if x.requires_grad]
    for wrap in (False, True):
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in xs]
        autofuse.reset_stats()
        out = program(*(map(autofuse.wrap, leaves) if wrap else leaves))
        out = autofuse.unwrap(autofuse.materialize(out))
        kernels.append(autofuse.stats().kernels_launched)
        given = g if out.shape == g.shape else g[..., 0].reshape(out.shape)
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(out, wanted, given, allow_unused=True, **options)
        kernels.append(autofuse.stats().kernels_launched - kernels[-1])
        assert autofuse.stats().replays == 0
        found.append((out.detach(), *(x if x is None else x.detach() for x in grads)))
    return found, kernels[2:]


@pytest.fixture
def verified_gpu(always):
    if not verified.is_trusted(torch.device("cuda", 0)):
        pytest.skip("not verified on this GPU with this torch")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", MIDDLE)
def test_gradients_by_one_kernel_have_eagers_bits_on_cuda(name, around, dtype, verified_gpu):
    before, after = AROUND[around]

    def program(x, y, w, b):
        value = MIDDLE[name](before(x, y), w, b)
        return after(value if value.ndim == 2 else value.unsqueeze(-1), y)

    columns = ALL_COLUMNS if around == "one op" else (33, 131, 1024, 4096)
    for n, m in itertools.product(columns, (1, 5, 70, 300)):
        if n == 1 and name in ("var", "std"):
            continue  # torch warns of what has no variance
        for kind in ("plain", "wide", "special") if m == 5 else ("plain",):
            xs, g = inputs(m, n, dtype, kind, GRADS["all"])
            (want, got), (forward, backward) = run_twice(program, xs, g)
            for a, b in zip(got, want, strict=True):
                assert (a is None) is (b is None)
                if a is not None:
                    assert_same(a, b, None, f"{[m, n]} {kind}")
            long = "softmax" in name and (n > 1024 or n * dtype.itemsize > 4096)
            by_kernel = n > 1 and not (long and n * dtype.itemsize % 16)
            if by_kernel and name in REDUCE:
                assert (forward, backward) == (1, 1), [m, n]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCE)
def test_gradients_that_lie_elsewhere_on_cuda(name, dtype, verified_gpu):
    program = lambda x, y, w, b: REDUCE[name](x * y, w, b)  # noqa: E731
    for m, n in itertools.product((1, 5, 300), (33, 132, 1000, 1028, 4096)):
        xs, g = inputs(m, n, dtype, "plain")
        shifted = torch.empty(m * n + 1, dtype=dtype, device="cuda")[1:].view(m, n)
        for how in (g.t().contiguous().t(), g[0].expand(m, n), g[:, :1].expand(m, n),
                    shifted.copy_(g)):  # fmt: skip
            (want, got), _ = run_twice(program, xs, how)
            assert_same(list(got), list(want), None, f"{[m, n]} {how.stride()}")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needs", [need for need in GRADS if need != "none"])
@pytest.mark.parametrize("name", ["layer_norm, weights", "rms_norm, weights"])
def test_whichever_gradients_are_wanted_on_cuda(name, needs, dtype, verified_gpu):
    """From the sizes on at which torch's kernels of weights change."""
    program = lambda x, y, w, b: REDUCE[name](x * y, w, b) * 2.0 + 1.0  # noqa: E731
    if needs == "bias":  # rms_norm has none, and torch 2.11's node of layer_norm raises
        return
    for m in (1, 63, 64, 128, 300, 70000):
        xs, g = inputs(m, 96, dtype, "plain", GRADS[needs])
        (want, got), _ = run_twice(program, xs, g)
        assert_same(list(got), list(want), None, f"{m} rows")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", REDUCE)
def test_second_derivatives_are_eagers_on_cuda(name, verified_gpu):
    def twice(wrap):
        xs, g = inputs(40, 128, torch.float32, "plain")
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        out = autofuse.unwrap(autofuse.materialize(REDUCE[name](x * y, w, b) * y))
        wanted = [one for one in xs if one.requires_grad]
        first = torch.autograd.grad(out, wanted, g, create_graph=True, allow_unused=True)
        total = sum(one.square().sum() for one in first if one is not None)
        second = torch.autograd.grad(total, wanted, allow_unused=True)
        return [one for one in (*first, *second) if one is not None]

    for a, b in zip(twice(True), twice(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", REDUCE)
def test_retained_hooked_and_written_on_cuda(name, verified_gpu):
    """Twice through one graph; with hooks in the middle; after a write to what is saved."""
    results = []
    for wrap in (False, True):
        xs, g = inputs(40, 132, torch.float32, "plain")
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        told = []
        h = x * y
        h.register_hook(lambda g, told=told: told.append(g.clone()))
        out = autofuse.unwrap(autofuse.materialize(REDUCE[name](h, w, b) * y))
        del h
        for keep in (True, True, False):
            told += [
                one for one in torch.autograd.grad(
                    out, xs, g, retain_graph=keep, allow_unused=True
                ) if one is not None
            ]  # fmt: skip
        again = autofuse.unwrap(autofuse.materialize(REDUCE[name](x * y, w, b) * y))
        with torch.no_grad():
            y.add_(1.0)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(again, xs[0], g)
        results.append((told, str(caught.value)))
    assert_same(results[1][0], results[0][0], None)
    assert results[1][1] == results[0][1]
