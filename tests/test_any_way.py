"""Whole programs, whichever way each call goes and whenever kernels come, against plain PyTorch.

Which way is the faster is drawn instead of measured, and asked again at every call; kernels are
there or are not, ops rest, short chains are run as ops and results of ops stay plain for a while.
After every step all that a program can see is compared: values, classes, versions, strides, who
shares memory, gradients, errors.
"""

import contextlib
import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.record import policy, ways
from autofuse.record.contest import FUSED, PLAIN
from autofuse.supply import kernels
from support import assert_same, judge_results_often

STEPS = 24


class Drawn:
    """A contest that anybody may win, at any time."""

    def __init__(self, drawn: random.Random) -> None:
        self.drawn = drawn

    way = property(lambda self: self.drawn.choice((FUSED, PLAIN)))
    left = property(lambda self: self.drawn.randrange(2), lambda self, value: None)
    costs = property(lambda self: self.drawn.choice((None, (1.0, 1.0))))
    free = property(lambda self: self.drawn.randrange(2), lambda self, value: None)

    def grant(self) -> bool:
        """The next calls, until one is not free."""
        return self.drawn.random() < 0.5

    def skip(self) -> None:
        """Nothing was begun."""

    def begin(self, step: int, news: object) -> None:
        """Nothing is measured."""

    def end(self, begun: None, way: int, settled: bool) -> None:
        """Nothing was measured."""

    def keep_fused(self) -> None:
        """It does not: what a plain call gives has to be right all the same."""


@pytest.fixture(params=range(3))
def any_way(request, monkeypatch):
    drawn = random.Random(request.param)
    filled = kernels.Order.filled

    def arriving(order):
        if drawn.random() < 0.1:
            kernels.stir()
        return filled(order) if drawn.random() < 0.6 else None

    monkeypatch.setattr(autofuse.config, "measure", True)
    monkeypatch.setattr(autofuse.fused, "contest_for", lambda *_: Drawn(drawn))
    monkeypatch.setattr(autofuse.fused, "outstanding", lambda: drawn.randrange(2))
    monkeypatch.setattr(kernels, "outstanding", lambda: drawn.randrange(2))
    monkeypatch.setattr(kernels.Order, "filled", arriving)
    monkeypatch.setattr(kernels.Order, "quiet", False)
    monkeypatch.setattr(policy, "_PATIENCE", 3)
    judge_results_often(monkeypatch)
    if request.param:  # chains of fewer than four ops run as ops, and soon are not recorded
        monkeypatch.setitem(policy.FLUSH_US, "cpu", 9.3)
    if request.param < 2:  # under grad they do so otherwise
        monkeypatch.setattr(ways, "margin", lambda *_: 1 - request.param / 2 - drawn.random())


# --- programs: generators of what is to be compared after a step; exact ops alone ----------------


def chain(x, w, b):
    return (x * w + b).clamp(-3, 3) * 0.5 + x.abs()


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x, h):
        gate = (x * self.w + h).clamp(0, 1)
        return gate * h + (1 - gate) * x.relu() + self.b


def inference(fuse):
    function = fuse(chain)
    for k in range(STEPS):
        x, w = torch.randn(3, 4), torch.randn(4)
        with [torch.no_grad, torch.inference_mode, torch.enable_grad][k % 3]():
            yield function(x, w, b=w), x, w


def training(fuse):
    cell = fuse(Cell())
    optimizer = torch.optim.SGD(cell.parameters(), 0.05, momentum=0.9)
    for _ in range(STEPS):
        h = torch.zeros(2, 4)
        for _ in range(3):
            h = cell(torch.randn(2, 4), h)
        optimizer.zero_grad()
        h.square().mean().backward()
        optimizer.step()
        yield h, *cell.parameters()


def double_backward(fuse):
    function = fuse(lambda x, w: (x * w + x) * w - x)
    for _ in range(STEPS):
        x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, w).sum(), x, create_graph=True)
        first.sum().backward()
        yield first, w


class Filter(torch.nn.Module):
    """Stores what it has computed, which the next call reads."""

    state = None

    def forward(self, x):
        self.state = x * 0.1 if self.state is None else self.state * 0.9 + x * 0.1
        return self.state * 2 + 1, {"state": self.state + 1}


def stored_state(fuse):
    module = fuse(Filter())
    for k in range(STEPS):
        if k % 7 == 0:
            module.state = None
        with torch.set_grad_enabled(k % 3 == 0):
            yield module(torch.ones(4) * k)


@dataclasses.dataclass
class State:
    h: torch.Tensor
    more: list[Any]


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def containers(fuse):
    @fuse
    def advance(state, pair, *, named):
        state.h = state.h * 0.5 + pair.a
        state.more.append(state.h * pair.b)
        named["h"] = pair.a - 1
        return Pair(state.h + 1, pair.b), state, [named, (pair.a, {"twice": pair.a * 2})]

    state = State(torch.zeros(4), [])
    for _ in range(STEPS):
        pair, named = Pair(torch.randn(4), torch.randn(4)), {}
        del state.more[:]
        yield *advance(state, pair, named=named), pair, named, state.more


def views_and_arguments(fuse):
    function = fuse(lambda x, y: (x, x[1:], x.t(), (x * 2 + 1)[0], x.detach(), y, [y, x * y]))
    for k in range(STEPS):
        x, y = torch.randn(3, 4, requires_grad=k % 2 == 0), torch.randn(3, 4)
        result = function(x, y)
        yield result, x, y, result[0] is x, result[-1][0] is y


def writes(fuse):
    @fuse
    def function(x, y, out):
        z = y + 1
        x.mul_(0.5)
        x += y * 2
        x[0] = y[1]
        torch.mul(x, z, out=out)
        out.clamp_(-1, 1)
        return x * 2 - y, out

    x, out = torch.randn(4), torch.empty(4)
    for k in range(STEPS):
        y = torch.randn(4) if k % 2 else x[:1].expand(4)
        yield function(x, y, out), x, y, out


def writes_under_grad(fuse):
    @fuse
    def function(x, w):
        y = x * w
        y += 1
        y[0] = 2
        return y.mul_(w).relu_() * x

    for _ in range(STEPS):
        x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        y = function(x, w)
        y.sum().backward()
        yield y, x, w


def recursion(fuse):
    @fuse
    def function(x, depth):
        if not depth:
            return x * 2 + 1
        return function(x * 0.5, depth - 1) + function(x + 1, depth - 1) * x

    for k in range(STEPS):
        yield function(torch.randn(4), k % 4)


def errors(fuse):
    @fuse
    def function(x, w, fails, kept):
        y = x * w + 1
        kept.append(y)
        x.add_(1)
        if fails == 1:
            raise KeyboardInterrupt("asked to")
        return y + torch.ones(5 if fails == 2 else 4)

    for k in range(STEPS):
        x, kept, result = torch.randn(4), [], None
        try:
            result = function(x, torch.randn(4), k % 3, kept)
        except (RuntimeError, KeyboardInterrupt) as error:
            result = repr(error)
        yield result, x, kept


def hooks(fuse):
    function = fuse(lambda x, w: ((x * w).relu() + x) * w)
    cell = fuse(Cell())
    cell.register_forward_hook(lambda module, args, result: result * 2)
    for _ in range(STEPS):
        x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        y, classes = cell(function(x, w), w), []
        y.register_hook(lambda g, classes=classes: classes.append(type(g)) or g * 0.5)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        yield y, x, w, [cls is torch.Tensor for cls in classes]


def checkpoints(fuse):
    cell = fuse(Cell())
    for k in range(STEPS):
        x = torch.randn(4, requires_grad=True)
        cell.zero_grad()
        y = cell(checkpoint(cell, x, x * 0.5, use_reentrant=k % 2 == 0), x)
        y.square().sum().backward()
        yield y, x, *cell.parameters()


def transforms(fuse):
    function = fuse(lambda x, w: ((x * w + 1).relu() * x).sum(-1))
    for _ in range(STEPS // 4):
        x, w = torch.randn(3, 4), torch.randn(4)
        mapped = torch.func.vmap(function, (0, None))(x, w)
        yield mapped, torch.func.grad(function)(w, w), function(x, w)


def sizes_and_dtypes(fuse):
    function = fuse(lambda x, y: (x * y + 1) * 2 - x)
    shapes = (4,), (3, 4), (0, 4), (), (2, 1, 4), (40, 4)
    dtypes = torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.complex64
    for k in range(STEPS):
        x = (torch.rand(shapes[k % 6]) * 4).to(dtypes[k % 5])
        yield function(x, x), function(x.mT if x.ndim == 2 else x, 3)


def threads(fuse):
    """They share arguments, which the others' calls lend."""
    function = fuse(chain)
    other = fuse(lambda x, items: [x * 2.0, {"y": x + items[0]}])
    x, y = torch.randn(8), torch.randn(8)

    def job(k):
        return (function(x, y, x), other(y, [x])) if k % 2 else (other(x, [y]), function(y, x, x))

    with ThreadPoolExecutor(3) as pool:
        for _ in range(STEPS):
            yield *pool.map(job, range(6)), x, y


PROGRAMS = [inference, training, double_backward, stored_state, containers, views_and_arguments,
            writes, writes_under_grad, recursion, errors, hooks, checkpoints, transforms,
            sizes_and_dtypes, threads]  # fmt: skip


# --- what they can see ---------------------------------------------------------------------------


def seen(value, ids, memory):
    """What can be seen of a value; a tensor is copied, and comes again as its number."""
    if isinstance(value, torch.Tensor):
        if id(value) in ids:
            return ids[id(value)]
        ids[id(value)] = len(ids)
        version = None if value.is_inference() else value._version
        address = value.untyped_storage().data_ptr() if value.numel() else 0
        facts = type(value) is autofuse.Tensor, version, value.is_leaf, value.requires_grad
        facts += value.stride(), value.storage_offset(), {*vars(value)}
        facts += memory.setdefault(address, len(memory)), value.grad_fn is None
        gradient = value.grad if value.is_leaf else None  # eager adds it up of more parts: its
        with torch.no_grad():  # version may be another; others may write to these meanwhile
            values = [autofuse.unwrap(x).clone() for x in (value, gradient) if x is not None]
        return facts, values, type(gradient).__name__
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [seen(item, ids, memory) for item in value]
    if isinstance(value, dict) or dataclasses.is_dataclass(value):
        items = value if isinstance(value, dict) else vars(value)
        return type(value).__name__, [*items], [seen(x, ids, memory) for x in items.values()]
    return value


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_as_plain(program, any_way, capsys):
    runs = []
    for fuse in (lambda function: function, autofuse.fuse):
        torch.manual_seed(0)
        runs.append([])
        with contextlib.closing(program(fuse)) as steps:
            for values in steps:
                runs[-1].append(seen(values, {}, {}))
    plain, fused = runs
    for k, (got, want) in enumerate(zip(fused, plain, strict=True)):
        assert_same(got, want, None, f"step {k}")
    assert not autofuse.lending.loans and autofuse.chain.state.this_thread.depth == 0
    assert not any(recorder.chain for recorder in autofuse.chain.state.all_recorders)
    stats = autofuse.stats()
    assert stats.ops_recorded + stats.ops_eager and capsys.readouterr() == ("", "")
