"""Reductions under grad: their nodes are torch's own, hung on what kernels have computed.

Without a GPU they are recorded on the CPU, as in test_reductions.py; in place of row kernels ops of
torch compute the outputs without grad (`hung`), so that all else, bits too, has to be eager's.
"""

import gc
import itertools
import os
import random
import sys
import threading
import weakref

import numpy as np
import pytest
import row_oracle
import simt
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from test_reductions import CALLS, emulated, launched, recorded, recording, row, table  # noqa: F401
from torch.autograd import gradcheck, gradgradcheck

import autofuse
from autofuse import errors
from autofuse.chain import rowwise, verified
from autofuse.cli import verify
from autofuse.errors import NotReadyError
from autofuse.kernel.division import scheme_of
from autofuse.kernel.rows import RowPlan
from autofuse.ops import norms, reductions
from autofuse.run import cpu, devices
from autofuse.run.eager import replayed
from autofuse.run.runner import Runner
from autofuse.run.settle import bump, publish, settle
from autofuse.supply.kernels import Order
from autofuse.supply.load import processors_of
from autofuse.torch_private import NoModes
from support import assert_same, cuda_autocast_on_cpu, needs_cuda

ran = []  # runners that have run


class _Given:
    """In place of a row kernel."""

    entry = source = None


class _HungRunner(cpu.CpuRunner):
    def __init__(self, tip, outputs, pieces=(), *args):
        self.hangs = any(isinstance(piece.plan, RowPlan) for piece in pieces)
        start = Runner.__init__ if self.hangs else cpu.CpuRunner.__init__
        start(self, tip, outputs, pieces, *args)

    def bind(self):
        if not self.hangs:
            return super().bind()
        self.run = self.replay
        return self

    def answering(self, given, numbers, places):
        if not self.hangs:
            return super().answering(given, numbers, places)

        def answer(incoming, saved, consts):
            raise NotReadyError("a row kernel")  # then torch's ops compute the gradients

        return answer

    def replay(self, chain):
        ran.append(self)
        values = replayed(chain, self.steps, self.live, None, None, grad=False)
        with NoModes():
            values = {k: x if x.grad_fn is None else x.detach() for k, x in values.items()}
            bump(chain, values)
            if self.attach is not None:
                packs = [[values[k] for k in pack] for pack, _, _ in self.memory[: len(self.made)]]
                made = [x[0] if len(x) == 1 else torch.stack(x) for x in packs]
                self.attach(chain.inputs, chain.consts, chain.late, *made)
        publish(chain, values)
        settle(chain, self.visible)


@pytest.fixture
def hung(recording, monkeypatch):  # noqa: F811
    """Reductions are recorded on the CPU, and all outputs of their chains computed without grad."""
    filled = Order.filled

    def given(order):
        if any(isinstance(plan, RowPlan) for plan, _ in order.wanted):
            return [_Given()] * len(order.wanted)
        return filled(order)

    monkeypatch.setattr(Order, "filled", given)
    monkeypatch.setitem(devices.RUNNERS, "cpu", _HungRunner)
    monkeypatch.setattr("autofuse.record.ways.processors_of", lambda device: (132, 2048))
    ran.clear()


def scaled(x, y, w, b):
    return torch.softmax(x * 0.125 + y, -1) * 2.0


def by_std(x, y, w, b):
    h = x + y
    mean, std = h.mean(-1, keepdim=True), h.std(-1, keepdim=True)
    return w * (h - mean) / (std + 1e-6) + b


PROGRAMS = {
    "softmax": scaled,
    "softmax of an Input": lambda x, y, w, b: torch.softmax(x, -1) * y,
    "log_softmax": lambda x, y, w, b: torch.log_softmax(x * y, -1) + y,
    "sum": lambda x, y, w, b: (x * y).sum(-1) * 0.5,
    "sum, keepdim": lambda x, y, w, b: x * (x * y).sum(-1, keepdim=True),
    "mean": lambda x, y, w, b: (x - y).mean(-1) + 1.0,
    "norm": lambda x, y, w, b: (x * y).norm(dim=-1) * 0.5,
    "normalize": lambda x, y, w, b: F.normalize(x * y, dim=-1) * w + y,
    "length, keepdim": lambda x, y, w, b: x / torch.linalg.vector_norm(x - y, 2, -1, True),
    "var": lambda x, y, w, b: (x * y).var(-1) * 0.5,
    "std": lambda x, y, w, b: x / (x - y).std(-1, keepdim=True),
    "std, biased": lambda x, y, w, b: (x * y + w).std(-1, correction=0) + 1.0,
    "layer_norm by std": by_std,
    "variance": lambda x, y, w, b: (x - x.mean(-1, keepdim=True)).square().mean(-1),
    "logsumexp": lambda x, y, w, b: torch.logsumexp(x * y + w, -1) * 0.5,
    "logsumexp, kept": lambda x, y, w, b: x - (x * y).logsumexp(-1, keepdim=True),
    "amax": lambda x, y, w, b: (lambda h: h - h.amax(-1, keepdim=True))(x * y),
    "amin": lambda x, y, w, b: (x + y).amin(-1) * 3.0,
    "layer_norm": lambda x, y, w, b: F.relu(F.layer_norm(x, x.shape[-1:], w, b)) + y,
    "layer_norm of a value": lambda x, y, w, b: F.layer_norm(x * y, x.shape[-1:], w, b, 0.1) * y,
    "layer_norm alone": lambda x, y, w, b: F.layer_norm(x * 2.0, x.shape[-1:]) - y,
    "one weight twice": lambda x, y, w, b: F.layer_norm(x + y, x.shape[-1:], w, w) * x,
    "two": lambda x, y, w, b: F.layer_norm(F.layer_norm(x + y, x.shape[-1:], w, b) * y,
                                           x.shape[-1:], b, w) + x,
    "of one another": lambda x, y, w, b: F.layer_norm(
        F.layer_norm(x * y, x.shape[-1:]), x.shape[-1:]
    ) * 2.0,
    "RMSNorm": lambda x, y, w, b: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    ),
    "a value used before and after": lambda x, y, w, b: (
        lambda h: F.layer_norm(h, x.shape[-1:], w, b) * 2.0 + h
    )(x + y),
}  # fmt: skip
OF_ALL = {  # over several dimensions, which here are all
    "mean of squares": lambda x, y, w, b: ((x - y) ** 2).mean(),
    "sum of all": lambda x, y, w, b: (x * y).sum() * 0.5,
    "less its mean": lambda x, y, w, b: (lambda h: h - h.mean())(x * y),
    "centred, by std": lambda x, y, w, b: (
        lambda h, mean, std: (h - mean) / (std + 1e-8)
    )(*(lambda h: (h, h.mean(), h.std()))(x * y)),
    "mean of dims": lambda x, y, w, b: x * (x * y).mean((0, 1), keepdim=True),
    "var of dims": lambda x, y, w, b: x - (x * y).var((-2, -1)) * 0.5,
    "length of all": lambda x, y, w, b: x / (x * y).norm(),
    "amax of all": lambda x, y, w, b: (lambda h: h - h.amax())(x - y),
    "logsumexp of dims": lambda x, y, w, b: (x * y).logsumexp((0, 1)) * 2.0,
    "mse_loss": lambda x, y, w, b: F.mse_loss(torch.tanh(x * y), y) * 2.0,
    "mse_loss, of one value": lambda x, y, w, b: (lambda h: F.mse_loss(h, h * y))(x + y),
    "smooth_l1_loss": lambda x, y, w, b: F.smooth_l1_loss(x, y * 2.0, reduction="sum", beta=0.5),
    "huber_loss": lambda x, y, w, b: F.huber_loss(x * y, y, delta=0.75) + 1.0,
    "l1_loss": lambda x, y, w, b: F.l1_loss(x * y, y) * 0.5,
    "bce, with logits": lambda x, y, w, b: (
        F.binary_cross_entropy_with_logits(x * y, torch.sigmoid(y)) * 3.0
    ),
    "bce, sum": lambda x, y, w, b: (
        F.binary_cross_entropy_with_logits(x, y, reduction="sum") + x
    ),
}  # fmt: skip
PROGRAMS |= OF_ALL
GRADS = {"all": (1, 1, 1, 1), "x": (1, 0, 0, 0), "weights": (0, 0, 1, 1), "y": (0, 1, 0, 0),
         "bias": (0, 0, 0, 1), "none": (0, 0, 0, 0)}  # fmt: skip


def leaves(needs=GRADS["all"], dtype=torch.float32, n=12):
    values = table(5, n, 0, dtype), table(5, n, 1, dtype), row(n, 2, dtype), row(n, 3, dtype)
    return [x.requires_grad_(bool(need)) for x, need in zip(values, needs, strict=True)]


def trained(program, xs, wrap):
    """The result, and the gradients of `xs`."""
    ours = [autofuse.wrap(x) for x in xs] if wrap else xs
    out = program(*ours)
    if wrap:
        assert autofuse.is_pending(out)
        out = autofuse.unwrap(autofuse.materialize(out))
    needs = [x for x in xs if x.requires_grad]
    grads = []
    if out.requires_grad:
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
        grads = torch.autograd.grad(out, needs, g, allow_unused=True)
    return out, grads


@pytest.mark.parametrize("needs", GRADS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(hung, on, name, needs, capsys):
    xs = leaves(GRADS[needs])
    errors._said.clear()
    want, grads = trained(PROGRAMS[name], xs, wrap=False)
    for _ in range(3):
        got, ours = trained(PROGRAMS[name], xs, wrap=True)
        assert_same(got, want, 1e-6)
        for a, b in zip(ours, grads, strict=True):
            assert (a is None) is (b is None)
            if a is not None:
                assert_same(a, b, 1e-5)
    # row kernels of a backward are not there: then torch's ops compute it, which is no failure
    assert len(ran) == 3, "one kernel each"
    assert "kernel failed" not in capsys.readouterr().err


def test_gradients_that_one_node_would_add_in_another_order(hung):
    """The gradient of h is that of std, then of sub, then of mean: each has a node of its own."""

    def program(x, y, w, b):
        h = x + y
        return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6)

    xs = leaves()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_same(trained(program, xs, wrap=True), trained(program, xs, wrap=False), None)
        assert ran
        ran.clear()


RULES = ["{a} * {b}", "{a} + {b}", "{a} - {b}", "{a} / ({b}.abs() + 0.5)", "{a} * 0.5",
         "{a}.mean(-1, keepdim=True)", "{a}.sum(-1, keepdim=True) * 0.1",
         "{a} - {a}.mean(-1, keepdim=True)", "{a} / ((h - {a}).std(-1, keepdim=True) + 0.5)",
         "{a} - {a}.amax(-1, keepdim=True)"]  # fmt: skip


def test_random_programs_of_reductions_and_values_that_are_held(hung):
    rng = random.Random(int(os.environ.get("AUTOFUSE_TEST_SEED", "20261127")))
    for _ in range(int(os.environ.get("AUTOFUSE_TEST_ORDERS", "20"))):
        names, lines = ["x", "y"], ["h = x * y"]
        for k in range(rng.randint(4, 14)):
            rule = rng.choice(RULES).format(a=rng.choice([*names[-4:], "h"]), b=rng.choice(names))
            lines.append(f"v{k} = {rule}")
            names.append(f"v{k}")
        kept = [name for name in names[2:-1] if rng.random() < 0.3]
        lines.append(f"return [{', '.join([*kept, names[-1] + ' * x'])}]")
        source = "def run(x, y):" + "".join(f"\n    {line}" for line in lines)
        space = {}
        exec(source, space)
        grads = []
        for wrap in (lambda t: t, autofuse.wrap, autofuse.wrap):
            xs = leaves((1, 1, 0, 0))[:2]
            out = space["run"](*map(wrap, xs))
            loss = sum((t * t.detach()).sum() for t in out)
            got = torch.autograd.grad(loss, [*xs, *out], allow_unused=True)
            grads.append([autofuse.unwrap(t) for t in (*out, *got) if t is not None])
        assert_same(grads[1:], [grads[0]] * 2, None, source)
    assert ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_eagers_as_eager_ops(recorded, name, dtype):  # noqa: F811
    xs = leaves(dtype=dtype)
    try:
        want, grads = trained(PROGRAMS[name], xs, wrap=False)
    except NotImplementedError as error:
        pytest.skip(f"this torch has none: {error}")
    for _ in range(2):
        got, ours = trained(PROGRAMS[name], xs, wrap=True)
        assert_same(got, want, None)
        assert_same(list(ours), list(grads), None)


NORM = PROGRAMS["layer_norm of a value"]
RELU = PROGRAMS["layer_norm"]  # whose nodes compute nothing that rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [
    "layer_norm", "softmax", "sum", "mean", "norm", "normalize", "variance", "two", "var", "std",
])  # fmt: skip
def test_dtypes_of_gradients(hung, name, dtype):
    xs = leaves(dtype=dtype)
    want, grads = trained(PROGRAMS[name], xs, wrap=False)
    got, ours = trained(PROGRAMS[name], xs, wrap=True)
    assert_same(got, want, None)
    assert_same([x for x in ours if x is not None], [x for x in grads if x is not None], None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_derivatives(hung, name):
    xs = leaves()

    def twice(wrap):
        out = PROGRAMS[name](*(map(autofuse.wrap, xs) if wrap else xs))
        out = autofuse.unwrap(autofuse.materialize(out)) if wrap else out
        first = torch.autograd.grad(out.square().sum(), xs, create_graph=True, allow_unused=True)
        total = sum((x.square().sum() for x in first if x is not None), torch.zeros(()))
        second = torch.autograd.grad(total, xs, allow_unused=True)
        return [x for x in (*first, *second) if x is not None]

    want = twice(wrap=False)
    torch.testing.assert_close(twice(wrap=True), want, rtol=1e-4, atol=1e-4)
    assert ran


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("amax", "amin")])
def test_derivatives_are_those_of_the_function(hung, name, monkeypatch):
    for module in (reductions, rowwise):
        monkeypatch.setattr(module, "DTYPES", {*reductions.DTYPES, torch.float64})
    xs = [x.detach().double().requires_grad_() for x in leaves(n=4)]

    def function(*xs):
        return autofuse.unwrap(autofuse.materialize(PROGRAMS[name](*map(autofuse.wrap, xs))))

    assert gradcheck(function, xs)
    assert gradgradcheck(function, xs, fast_mode=True)  # 0.3 s instead of 3
    assert ran


def test_what_is_saved_is_what_eager_saves(hung):
    """The dead operand of a softmax or a sum has no memory, that of a layer norm has."""
    xs = leaves()
    for name, stored in (
        ("softmax", 2), ("log_softmax", 2), ("sum", 1), ("mean", 1), ("layer_norm", 4), ("norm", 3),
        ("var", 2), ("std, biased", 3),
        ("layer_norm of a value", 5), ("layer_norm alone", 4),
    ):  # fmt: skip
        trained(PROGRAMS[name], xs, wrap=True)
        assert ran[-1].stored == stored, name
    x, y, w, b = map(autofuse.wrap, xs)
    h = x * y
    normed = F.layer_norm(h, (12,), w, b)  # with nothing to go along with in backward
    autofuse.materialize(normed * 2.0)
    p, q, *affine = leaves()
    node, want = normed.grad_fn, F.layer_norm(p * q, (12,), *affine).grad_fn
    assert node.name() == want.name() == "NativeLayerNormBackward0"
    assert node._saved_weight is xs[2] and node._saved_bias is xs[3]
    for what in ("input", "result1", "result2"):
        assert_same(*(getattr(n, f"_saved_{what}").detach() for n in (node, want)), None)
    soft = torch.softmax(h, -1)
    autofuse.materialize(soft * 2.0)
    assert soft.grad_fn._saved_result.data_ptr() == autofuse.unwrap(soft).data_ptr()


def test_whose_rows_nobody_reads_have_no_memory(hung):
    x, y = (table(1, 512, k).requires_grad_() for k in range(2))

    def run(x, y):
        return F.layer_norm(x * y, (512,)).sum(-1) * 2.0

    want, grads = trained(run, [x, y], wrap=False)
    got, ours = trained(run, [x, y], wrap=True)
    assert_same([got, *ours], [want, *grads], 1e-4)
    assert [owner.op.name for owner in ran[0].owners] == [
        "mul", "mul", "mean_of_layer_norm", "rstd_of_layer_norm"
    ]  # fmt: skip


def test_nothing_keeps_values_alive(hung):
    for call in (lambda x, y, w, b: torch.softmax(x * y, -1), NORM):
        xs = leaves()
        value = call(*map(autofuse.wrap, xs))
        out = autofuse.unwrap(autofuse.materialize(value * 2.0))
        seen = weakref.ref(autofuse.unwrap(value).untyped_storage())
        del value, out
        gc.disable()
        try:
            assert ran and seen() is None
        finally:
            gc.enable()


def test_hooks_and_leaves(hung):
    """Hooks of values in the middle, gradients that are retained, and those of leaves."""

    def run(wrap):
        told = []
        xs = leaves()
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        h = x * y
        normed = F.layer_norm(h, (12,), w, b)
        out = F.relu(normed) + x
        for value in (h, normed):
            value.register_hook(lambda g: told.append(g.clone()))
        normed.retain_grad()
        out.sum().backward()
        return [*told, normed.grad, *(x.grad for x in xs)]

    assert_same(run(True), run(False), 1e-6)


def test_a_value_in_the_middle_may_be_seen(hung):
    """Gradients with regard to it, and its own uses elsewhere."""

    def run(wrap):
        xs = leaves()
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        h = x + y
        normed = F.layer_norm(h, (12,), w, b)
        out = normed * y
        if wrap:
            autofuse.materialize(out)
        loss = out.sum() + normed.sum() * 2.0 + h.sum()
        return torch.autograd.grad(loss, [h, normed, *xs])

    assert_same(list(run(True)), list(run(False)), 1e-5)
    assert len(ran) == 2  # that of rows, and that of the three sums


def failure(run):
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("which", ["operand", "result", "weight"])
def test_writes_to_what_is_saved_are_refused(hung, which):
    def run(wrap):
        xs = leaves()
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        h = x * y
        soft = torch.softmax(h, -1) if which == "result" else F.layer_norm(h, (12,), w, b)
        out = soft + 1.0
        if wrap:
            autofuse.materialize(out)
        with torch.no_grad():
            {"operand": h, "result": soft, "weight": w}[which].add_(1.0)
        out.sum().backward()

    got, want = failure(lambda: run(True)), failure(lambda: run(False))
    assert "modified by an inplace operation" in want and got == want
    assert ran


def test_an_inplace_op_on_a_pending_result(hung):
    """Which the node has saved: refused in backward, or not saved and so all right."""

    def run(wrap, call):
        xs = leaves()
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        value = call(x * y, w, b)
        value.mul_(2.0)
        value.sum().backward()
        return [x.grad for x in xs if x.grad is not None]

    def soft(h, w, b):
        return torch.softmax(h, -1)

    def normed(h, w, b):
        return F.layer_norm(h, (12,), w, b)

    assert failure(lambda: run(True, soft)) == failure(lambda: run(False, soft))
    assert_same(run(True, normed), run(False, normed), 1e-6)


def test_graphs_are_freed_and_retained(hung):
    out, _ = trained(NORM, xs := leaves(), wrap=True)
    want, _ = trained(NORM, xs, wrap=False)

    def again(out):
        out.sum().backward()

    assert ran and failure(lambda: again(out)) == failure(lambda: again(want))
    for _ in range(2):
        out, want = NORM(*map(autofuse.wrap, xs)), NORM(*xs)
        for _ in range(2):
            ours, grads = (
                torch.autograd.grad(y.square().sum(), xs, retain_graph=True) for y in (out, want)
            )
            assert_same(ours, grads, 1e-4)


def test_they_follow_the_numbers_of_eagers_nodes(hung):
    """Made after another node, they come in backward where they would have."""
    xs = leaves()
    x, y, w, b = map(autofuse.wrap, xs)
    soft = torch.softmax(x * y, -1)
    out = soft * 2.0
    later = xs[0] * 3.0
    autofuse.materialize(out)
    numbers = [value.grad_fn._sequence_nr() for value in (soft, out, later)]
    assert numbers == sorted(numbers) and ran


def test_values_without_a_graph_meet_those_with_one(hung):
    """What a rule reads of rows is stored."""
    x, p = table(4, 8), torch.ones(4, 1, requires_grad=True)

    def run(x, p):
        return torch.rsqrt((x * 2.0).square().mean(-1, keepdim=True) + 1.0) * p

    got, ours = trained(run, [x, p], wrap=True)
    want, grads = trained(run, [x, p], wrap=False)
    assert_same([got, *ours], [want, *grads], 1e-6)
    assert len(ran) == 1


def test_where_all_is_computed_again_they_are_eager(recorded, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autofuse.config, "recompute", "inputs")
    xs = leaves()
    y = torch.softmax(autofuse.wrap(xs[0]) * 2.0, -1)
    assert not autofuse.is_pending(y)
    assert "a reduction under grad, which is not computed again" in str(autofuse.stats().eager_ops)
    mean = (autofuse.wrap(xs[0].detach()) * 2.0).mean(-1, keepdim=True)
    scaled = mean * xs[1]
    assert autofuse.is_pending(scaled) and not autofuse.is_pending(mean)


def test_what_autograd_takes_apart_is_eager(recorded):  # noqa: F811
    """As rms_norm is on the CPU."""
    xs = leaves()
    y = F.rms_norm(autofuse.wrap(xs[0]) * 2.0, (12,))
    assert not autofuse.is_pending(y)
    assert ("rms_norm", "a reduction that autograd takes apart") in autofuse.stats().eager_ops
    with torch.no_grad():
        assert autofuse.is_pending(F.rms_norm(autofuse.wrap(xs[0]) * 2.0, (12,)))


def test_hooks_of_saved_tensors_are_told_by_eager(recorded):  # noqa: F811
    def run(wrap):
        xs, told = leaves(), []
        x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
        pack = lambda t: told.append(tuple(t.shape)) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = F.layer_norm(x * y, (12,), w, b) * 2.0
            assert not wrap or not autofuse.is_pending(out)
        out.sum().backward()
        return told, [x.grad for x in xs]

    (told, ours), (want, grads) = run(True), run(False)
    assert told == want
    assert_same(ours, grads, None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_checkpoints(hung, reentrant):
    xs = leaves()
    want, grads = trained(NORM, xs, wrap=False)
    fused = autofuse.fuse(
        lambda *xs: torch.utils.checkpoint.checkpoint(NORM, *xs, use_reentrant=reentrant)
    )
    out = fused(*xs)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    assert_same(out, want, 1e-6)
    out.backward(g)
    assert_same([x.grad for x in xs], list(grads), 1e-5)


def test_values_that_others_need(hung):
    """Another thread; this one where autocast, inference mode or hooks are on by then."""
    xs = leaves()
    want, grads = trained(RELU, xs, wrap=False)
    g = torch.randn(want.shape, generator=torch.Generator().manual_seed(9))

    def in_a_thread(value):
        thread = threading.Thread(target=autofuse.materialize, args=(value,))
        thread.start()
        thread.join()

    def under(context):
        def need(value):
            with context():
                autofuse.materialize(value)

        return need

    told = []
    for need in (
        in_a_thread,
        under(lambda: torch.autocast("cpu", torch.bfloat16)),
        under(torch.inference_mode),
        under(torch.no_grad),
        under(lambda: torch.autograd.graph.saved_tensors_hooks(told.append, lambda t: t)),
    ):
        value = RELU(*map(autofuse.wrap, xs))
        assert autofuse.is_pending(value)
        need(value)
        out = autofuse.unwrap(value)
        assert_same(out, want, None)
        assert_same(list(torch.autograd.grad(out, xs, g)), list(grads), None)
    assert len(ran) == 5 and not told


def test_reductions_with_nothing_to_fuse_are_eager_under_grad(hung, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", False)
    xs = leaves()
    for _ in range(5):
        out = autofuse.materialize(torch.softmax(autofuse.wrap(xs[0]), -1))
    assert not ran and out.grad_fn.name() == "SoftmaxBackward0"


def test_another_node_than_the_expected_one_is_not_believed(hung, monkeypatch, capsys):
    """Then eager ops run."""
    monkeypatch.setitem(reductions.NODES, "amin", "amax")
    xs, program = leaves(), PROGRAMS["amin"]
    want, grads = trained(program, xs, wrap=False)
    got, ours = trained(program, xs, wrap=True)
    assert ran and "another autograd node" in capsys.readouterr().err
    assert_same([got, *ours[:2]], [want, *grads[:2]], None)


def test_what_is_around_amax_in_backward_is_a_kernel(hung):
    """The gradient of relu(amax(x * y)) * 2: one before torch's op, and one after it."""
    xs = leaves()
    x, y, *_ = map(autofuse.wrap, xs)
    out = F.relu((x * y).amax(-1, keepdim=True)) * 2.0
    out = autofuse.unwrap(autofuse.materialize(out))
    assert autofuse.stats().kernels_launched == 1
    torch.autograd.grad(out, xs[:2], torch.ones_like(out))
    assert autofuse.stats().kernels_launched == 3


STEPS = {
    "add": lambda p, q, w, b: p + q, "sub": lambda p, q, w, b: p - q,
    "mul": lambda p, q, w, b: p * q, "half": lambda p, q, w, b: p * 0.5,
    "relu": lambda p, q, w, b: torch.relu(p), "neg": lambda p, q, w, b: -p,
    "softmax": lambda p, q, w, b: torch.softmax(p, -1),
    "log_softmax": lambda p, q, w, b: torch.log_softmax(p, -1),
    "layer_norm": lambda p, q, w, b: F.layer_norm(p, p.shape[-1:]),
    "layer_norm, weights": lambda p, q, w, b: F.layer_norm(p, p.shape[-1:], w, b),
    "sum": lambda p, q, w, b: p * q.sum(-1, keepdim=True),
    "mean": lambda p, q, w, b: p - q.mean(-1, keepdim=True),
    "amax": lambda p, q, w, b: p - p.amax(-1, keepdim=True),
    "norm": lambda p, q, w, b: p / (q.norm(dim=-1, keepdim=True) + 1.0),
    "std": lambda p, q, w, b: p / (q.std(-1, keepdim=True) + 1.0),
    "var": lambda p, q, w, b: p * q.var(-1, keepdim=True, correction=0),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(hung, seed, monkeypatch):
    """Over all of their values so far, of which another one than the last is held and used.

    Their pointwise ops do arithmetic alone, which has eager's bits on the CPU too.
    """
    for module in (reductions, rowwise):
        monkeypatch.setattr(module, "DTYPES", {*reductions.DTYPES, torch.float64})
    rng = random.Random(seed)
    for _ in range(10):
        count = rng.randint(2, 9)
        program = [(rng.choice(list(STEPS)), rng.randrange(k), rng.randrange(k))
                   for k in range(2, 2 + count)]  # fmt: skip
        held = rng.randrange(2, 2 + count)
        needs = rng.choice([need for need in GRADS.values() if any(need)])
        xs = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves(needs)]
        results = []
        for wrap in (False, True, True):
            x, y, w, b = map(autofuse.wrap, xs) if wrap else xs
            values = [x, y]
            for name, p, q in program:
                values.append(STEPS[name](values[p], values[q], w, b))
            pair = values[-1], values[held]
            del values
            pair = [autofuse.materialize(one) for one in pair] if wrap else pair
            total = (pair[0] * xs[1].detach()).sum() + (pair[1] * 0.25).sum()
            wanted = [one for one in xs if one.requires_grad]
            grads = []
            if total.requires_grad:
                grads = torch.autograd.grad(total, wanted, allow_unused=True)
            results.append([one for one in (total, *grads) if one is not None])
        for got in results[1:]:
            torch.testing.assert_close(got, results[0], rtol=0, atol=0, equal_nan=True)
    assert len(ran) >= 10


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(12) for _ in range(2))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x) * 2.0)) + x
        return torch.log_softmax(x * 0.5, -1) * 2.0


def test_steps_of_a_model(hung):
    """With an optimizer, whose writes come between them."""
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        net = Net()
        call = autofuse.fuse(net) if fuse else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            loss = F.nll_loss(call(table(5, 12, step)), torch.arange(5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([loss, *net.parameters()])
    assert_same(results[1], results[0], 1e-5)
    assert len(ran) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "RMSNorm"])
def test_under_autocast(recorded, name, dtype):  # noqa: F811
    """As CUDA casts: operands of layer norms and softmaxes first, what sums read in themselves."""
    with cuda_autocast_on_cpu():
        x = table(4, 8, dtype=dtype).requires_grad_()
        found = []
        for wrap in (False, True, True):
            with torch.autocast("cpu", torch.bfloat16):
                out = CALLS[name](autofuse.wrap(x) if wrap else x)
                pending = autofuse.is_pending(out) if wrap else None
                out = out * 2.0
                if wrap:
                    out = autofuse.unwrap(autofuse.materialize(out))
            g = torch.ones_like(out)
            found.append([out, *torch.autograd.grad(out, [x], g)])
            if wrap:
                lengths = ("vector_norm", "linalg.norm", "torch.norm", "norm,", "norm of")
                casts = name == "norm" or name.startswith(("sum", *lengths))
                eager = name in ("rms_norm", "F.l1_loss") or casts and dtype is torch.bfloat16
                assert pending is not eager
                assert_same(found[-1], found[0], None)


def test_a_layer_norm_with_weights_under_autocast(hung):
    """Of 16-bit rows and parameters of float32."""
    xs = leaves()
    xs[0] = xs[0].detach().bfloat16().requires_grad_()

    def run(x, y, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.relu(F.layer_norm(x * 2.0, (12,), w, b)) + y

    with cuda_autocast_on_cpu():
        want, grads = trained(run, xs, wrap=False)
        for runs in range(1, 3):
            got, ours = trained(run, xs, wrap=True)
            assert_same([got, *ours], [want, *grads], None)
            assert len(ran) == runs


# --- by kernels, emulated -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [131, 260])
def test_statistics_come_from_the_kernel(emulated, n):  # noqa: F811
    """And eager's backward gets them."""
    xs = leaves(n=n)
    x, res, w, b = xs
    eps = simt.F32(1e-5)
    for runs in range(1, 4):
        ours = list(map(autofuse.wrap, xs))
        h = ours[0] + ours[1]
        normed = F.layer_norm(h, (n,), ours[2], ours[3])
        out = F.relu(normed) + ours[1]
        autofuse.materialize(out)
        assert len(launched) == runs
        node, rows = normed.grad_fn, (x + res).detach().numpy()
        found = zip(*(row_oracle.layer_norm_statistics(r, eps) for r in rows), strict=True)
        mean, rstd = (torch.from_numpy(np.array(one)).view(5, 1) for one in found)
        assert_same([node._saved_result1, node._saved_result2], [mean, rstd], None)
        want = [row_oracle.layer_norm(r, *(p.detach().numpy() for p in (w, b)), eps) for r in rows]
        want = torch.from_numpy(np.array(want))
        assert_same(autofuse.unwrap(out).detach(), torch.relu(want) + res.detach(), None)
        g = table(5, n, 7)
        gx, gw, gb = torch.ops.aten.native_layer_norm_backward(
            g * (want > 0), (x + res).detach(), (n,), mean, rstd, w.detach(), b.detach(), [True] * 3
        )
        got = torch.autograd.grad(autofuse.unwrap(out), xs, g)
        assert_same(list(got), [gx, g + gx, gw, gb], None)


@pytest.mark.parametrize("name", ["two", "of one another"])
def test_what_follows_on_statistics_comes_from_the_kernel(emulated, name):  # noqa: F811
    """Whose places among the numbers of a row are each its own."""
    program = PROGRAMS[name]
    (want, grads), (got, ours) = (trained(program, leaves(n=131), wrap) for wrap in (False, True))
    assert len(launched) == 2, "forward and backward"
    assert_same(autofuse.unwrap(got).detach(), want.detach(), 1e-4)
    for a, b in zip(ours, grads, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, 1e-3, 1e-3)


def test_what_norms_save_is_compared_when_a_gpu_is_verified(emulated, monkeypatch):  # noqa: F811
    """Here with what another order gives."""
    seen = []

    def differing(got, want):
        seen.append(got)
        assert_same(list(got), list(want), 1e-5)
        return 0

    monkeypatch.setattr(verify, "differing", differing)
    outcome = verify.compare("what layer_norm saves", torch.float32, [(5, 132, "plain", 0)], "cpu")
    assert outcome.reduced == outcome.kernels == len(launched) == 1
    assert [len(one) for one in seen] == [2] and not seen[0][0].requires_grad


# --- on a GPU -------------------------------------------------------------------------------------

NORMS = {
    **PROGRAMS,
    "rms_norm": lambda x, y, w, b: F.rms_norm(x + y, x.shape[-1:], w) * y,
    "rms_norm alone": lambda x, y, w, b: F.rms_norm(x * 2.0, x.shape[-1:]) - y,
}


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("needs", GRADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_have_eagers_bits_on_cuda(name, dtype, needs, on, always):
    if not verified.is_trusted(torch.device("cuda", 0)):
        pytest.skip("not verified on this GPU with this torch")
    sizes = [(5, 33), (40, 128), (40, 131), (300, 1024), (7, 2050)]
    for m, n in sizes if needs in ("all", "x") else sizes[1:3]:
        values = table(m, n, 0, dtype), table(m, n, 1, dtype), row(n, 2, dtype), row(n, 3, dtype)
        xs = [
            x.cuda().requires_grad_(bool(need))
            for x, need in zip(values, GRADS[needs], strict=True)
        ]
        g = None
        results = []
        for wrap in (False, True, True):
            autofuse.reset_stats()
            out = NORMS[name](*(map(autofuse.wrap, xs) if wrap else xs))
            if wrap:
                # torch gives means and variances of most 16-bit rows other numbers of threads,
                # maxima and sums too, and very long ones several blocks
                rows = (1, m * n) if name in OF_ALL else (m, n)
                schemes = [
                    scheme_of(op, *rows, dtype.itemsize, processors_of(torch.device("cuda", 0)))
                    for op in ("mean", "std", "amax", "sum")
                ]
                is_kernel = not any(isinstance(scheme, str) for scheme in schemes)
                assert autofuse.is_pending(out) or not is_kernel
                out = autofuse.unwrap(autofuse.materialize(out))
                if is_kernel:
                    mean, std, most, total = (scheme.threads for scheme in schemes)
                    apart = name.endswith("by std") and mean != std
                    if any(scheme.blocks > 1 for scheme in schemes):
                        # two for the row, what is stored of all elements or follows in its own
                        assert autofuse.stats().kernels_launched >= 2
                    elif not name.startswith("logsumexp") or most == total:
                        assert autofuse.stats().kernels_launched == 1 + apart
            g = torch.randn_like(out) if g is None else g
            wanted = [x for x in xs if x.requires_grad]
            grads = []
            if out.requires_grad:
                grads = torch.autograd.grad(out, wanted, g, allow_unused=True)
            results.append((out, *(x for x in grads if x is not None)))
        for got in results[1:]:
            assert_same(got, results[0], None)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_statistics_have_eagers_bits_on_cuda(norm, dtype, always):
    if not verified.is_trusted(torch.device("cuda", 0)):
        pytest.skip("not verified on this GPU with this torch")
    for m, n in itertools.product((1, 3, 70, 300), (2, 5, 64, 131, 260, 513, 1024, 4096, 5000)):
        x = (torch.randn(m, n, device="cuda") * 3 + 1).to(dtype).requires_grad_()
        found = []
        for wrap in (False, True):
            h = (autofuse.wrap(x) if wrap else x) * 2.0
            normed = getattr(F, norm)(h, (n,))
            out = normed + 1.0
            if wrap:
                autofuse.materialize(out)
            node = normed.grad_fn
            names = ["input", *(f"result{k}" for k in (1, 2))][: 3 - (norm == "rms_norm")]
            found.append([getattr(node, f"_saved_{name}").detach() for name in names])
        assert_same(found[1], found[0], None)


# --- in the middle --------------------------------------------------------------------------------

MIDDLE = {
    "sum": (lambda x: x.sum(-1) * 0.5, lambda x: x.sum(0)),
    "softmax": (lambda x: torch.softmax(x, -1) * 0.5, lambda x: torch.softmax(x, 0)),
    "layer_norm": (
        lambda x: F.layer_norm(x, (12,)) * 0.5, lambda x: F.layer_norm(x, (12,), eps=0.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIDDLE)
def test_an_op_in_the_middle_of_a_node_is_computed(hung, name):
    """Of the same operand too: a handler or finalizer, once the mode is on."""
    program, other = MIDDLE[name]
    x = table(12, 12, 0, torch.float32).requires_grad_()
    want, grads = trained(lambda x: program(x), [x], wrap=False)
    expected, seen = other(x.detach()), []

    def look(frame, event, _):
        files = reductions.__file__, norms.__file__
        if frame.f_code.co_filename in files and frame.f_code.co_name == "<lambda>":
            sys.settrace(None)
            seen.append(other(x).detach())

    leaf = x.detach().clone().requires_grad_()
    ours = autofuse.wrap(leaf)
    out = program(ours)
    autofuse.reset_stats()
    x = autofuse.unwrap(ours)
    sys.settrace(look)
    try:
        autofuse.materialize(out)
    finally:
        sys.settrace(None)
    assert len(seen) == 1 and autofuse.stats().replays == 0
    assert_same(seen[0], expected, 0.0)
    out = autofuse.unwrap(out)
    assert_same(out, want, 1e-6)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    assert_same(list(torch.autograd.grad(out, [leaf], g)), list(grads), 1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_a_flush_below_autograd_keeps_its_nodes(hung, name):
    class Sub(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            autofuse.materialize(out)
            return torch.zeros(3)

    xs = leaves()
    _, grads = trained(PROGRAMS[name], xs, wrap=False)
    ours = leaves()
    out = PROGRAMS[name](*map(autofuse.wrap, ours))
    autofuse.reset_stats()
    sub = torch.Tensor._make_wrapper_subclass(Sub, (3,))
    torch.ops.aten.neg(sub)
    assert autofuse.stats().replays == 0 and len(ran) == 1
    assert out.requires_grad and out.grad_fn is not None
    out = autofuse.unwrap(out)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    got = torch.autograd.grad(out, ours, g, allow_unused=True)
    for a, b in zip(got, grads, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, 1e-5, 1e-6)


def test_what_a_hook_raises_in_the_middle_of_normalize_is_raised(hung):
    """Once, and the hook is told of no value twice."""
    x = leaves()[0]
    for wrap in (False, True):
        told = []

        def pack(t, told=told):
            told.append(tuple(t.shape))
            raise RuntimeError("of the user's hook")

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with pytest.raises(RuntimeError, match="of the user's hook"):
                autofuse.materialize(F.normalize(autofuse.wrap(x) if wrap else x, dim=-1))
        assert len(told) == 1
