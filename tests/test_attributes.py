"""Gradients, data and whether gradients are required, as attributes: what they do is eager's."""

import contextlib
import os
import random
import sys
import weakref

import pytest
import torch

import autofuse
from autofuse.hot import native
from support import DEVICES, assert_same, elsewhere, functions_called

PROGRAMS = int(os.environ.get("AUTOFUSE_TEST_CHAINS", "120"))


def delete(x, name):
    delattr(x, name)


def add(x, y):
    with torch.no_grad():
        x += y


# of x, which is changed, y and a number k
CHANGES = {
    "x.grad": lambda x, y, k: x.grad,
    "x.grad = None": lambda x, y, k: setattr(x, "grad", None),
    "x.grad = y": lambda x, y, k: setattr(x, "grad", y.detach()),
    "x.grad = y * 2": lambda x, y, k: setattr(x, "grad", y.detach() * 2.0),
    "x.grad = itself": lambda x, y, k: setattr(x, "grad", x),
    "x.grad = 1": lambda x, y, k: setattr(x, "grad", 1),
    "x.grad = another shape": lambda x, y, k: setattr(x, "grad", y[0]),
    "x.grad = another dtype": lambda x, y, k: setattr(x, "grad", y.detach().double()),
    "x.grad += y": lambda x, y, k: setattr(x, "grad", x.grad.add_(y.detach())),
    "x.grad.zero_()": lambda x, y, k: x.grad.zero_(),
    "del x.grad": lambda x, y, k: delete(x, "grad"),
    "x.data": lambda x, y, k: x.data,
    "x.data = y": lambda x, y, k: setattr(x, "data", y.detach()),
    "x.data = y * 2": lambda x, y, k: setattr(x, "data", y * 2.0),
    "x.data = x + 1": lambda x, y, k: setattr(x, "data", x.data + 1.0),
    "x.data = another layout": lambda x, y, k: setattr(x, "data", y.detach().t().clone().t()),
    "x.data = another dtype": lambda x, y, k: setattr(x, "data", y.detach().double()),
    "x.data = None": lambda x, y, k: setattr(x, "data", None),
    "x.data -= x.grad": lambda x, y, k: setattr(x, "data", x.data.sub_(x.grad.data, alpha=k)),
    "x.data.mul_()": lambda x, y, k: x.data.mul_(k),
    "del x.data": lambda x, y, k: delete(x, "data"),
    "requires_grad_()": lambda x, y, k: x.requires_grad_(),
    "requires_grad_(False)": lambda x, y, k: x.requires_grad_(False),
    "requires_grad_(requires_grad=)": lambda x, y, k: x.requires_grad_(requires_grad=k > 0.5),
    "requires_grad_('a')": lambda x, y, k: x.requires_grad_("a"),
    "no_grad: requires_grad_()": lambda x, y, k: torch.no_grad()(x.requires_grad_)(),
    "x.requires_grad =": lambda x, y, k: setattr(x, "requires_grad", k > 0.5),
    "x.requires_grad = None": lambda x, y, k: setattr(x, "requires_grad", None),
    "del x.requires_grad": lambda x, y, k: delete(x, "requires_grad"),
    "x.mark": lambda x, y, k: setattr(x, "mark", k),
    "x.T =": lambda x, y, k: setattr(x, "T", y),
    "del x.T": lambda x, y, k: delete(x, "T"),
    "x += y": lambda x, y, k: add(x, y.detach()),
    "backward": lambda x, y, k: ((x * y * k).sum()).backward(),
    "twice": lambda x, y, k: ((x * k).tanh().sum() + (x + y).sum()).backward(),
    "retain_grad": lambda x, y, k: x.retain_grad(),
}  # fmt: skip
# what becomes of a tensor beside that
STEPS = {
    "x * k": lambda x, y, k: x * k,
    "x + y": lambda x, y, k: x + y,
    "detach": lambda x, y, k: x.detach(),
    "detach, require": lambda x, y, k: x.detach().requires_grad_(),
    "x.data * 2": lambda x, y, k: x.data * 2.0,
    "view": lambda x, y, k: x.view(-1).view(x.shape),
    "k ** x": lambda x, y, k: k**x,
    "2 ** x": lambda x, y, k: 2**x,
}  # fmt: skip


def facts(x):
    """What is seen of a tensor, but what makes it; or the error of asking."""
    try:
        gradient = x.grad
        seen = [x.requires_grad, x.is_leaf, x.dtype, x.stride(), x._version]
        seen += [getattr(x, "mark", None), None if gradient is None else gradient.dtype]
    except RuntimeError as error:  # of a view whose base was written in another mode
        return [str(error)], []
    return seen, [t.detach().clone() for t in (x, gradient) if t is not None]


def played(seed, wrap, device):
    """What a random program sees: facts of its tensors after each step, and errors."""
    draw = random.Random(seed)
    values = torch.Generator().manual_seed(seed)
    tensors = [
        wrap(torch.rand(3, 4, generator=values).to(device).requires_grad_(k == 0)) for k in range(3)
    ]
    told = []
    for _ in range(draw.randint(4, 12)):
        steps = STEPS if draw.random() < 0.35 else CHANGES
        name = draw.choice([*steps])
        x, y = draw.choice(tensors), draw.choice(tensors)
        mode = draw.choice([contextlib.nullcontext, contextlib.nullcontext, torch.no_grad])
        k = draw.choice([0.25, 0.75])
        try:
            with mode():
                result = steps[name](x, y, k)
        except (RuntimeError, TypeError, AttributeError) as error:
            told.append((name, type(error), str(error).split("\n")[0]))
            continue
        told.append((name, result is x, result is x.grad if name == "x.grad" else None))
        if steps is STEPS:
            tensors[draw.randrange(len(tensors))] = result
        if draw.random() < 0.3:
            told.append(facts(x))
        del x, y, result
    return told + [facts(x) for x in tensors]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", range(8))
def test_random_programs_of_attributes(part, device, on, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    for seed in range(part * 10**6, part * 10**6 + PROGRAMS):
        want = played(seed, lambda t: t, device)
        got = played(seed, autofuse.wrap, device)
        for a, b in zip(got, want, strict=True):
            if isinstance(b[0], list):
                assert a[0] == b[0], (seed, want)
                assert_same(a[1], b[1], 1e-6 if device == "cpu" else None, f"program {seed}")
            else:
                assert a == b, (seed, want)


@pytest.mark.skipif(not native.active(), reason="there is no machine code here")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 runs what Python calls")
@pytest.mark.parametrize("device", DEVICES)
def test_they_run_no_python(device):
    x = autofuse.wrap(torch.rand(4, 4, device=device).requires_grad_())
    y = autofuse.wrap(torch.rand(4, 4, device=device))
    (x * 1.0).sum().backward()

    def program():
        g = x.grad
        x.grad = None
        x.grad = g
        x.data = y
        x.requires_grad_()
        x.requires_grad = True
        x.mark = g
        return x.data

    for _ in range(3):
        program()
    assert not functions_called(program)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_goes_ends_no_chain(device, on, monkeypatch):
    """Of a tensor that the chain does not read; a gradient is memory of another."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = autofuse.wrap(torch.ones(3, device=device).requires_grad_())
    x.sum().backward()
    y = autofuse.wrap(torch.ones(3, device=device)) * 2.0 + x.grad
    x.grad = None
    assert autofuse.is_pending(y)
    x.data = torch.zeros(3, device=device)
    assert not autofuse.is_pending(y)
    assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ("out", "of data", "in place"))
def test_what_runs_when_a_gradient_goes(way, device, on, monkeypatch):
    """It may write what is pending, and meets wrapped tensors."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, other = (autofuse.wrap(torch.ones(3, device=device)) for _ in range(2))
    x.requires_grad_()
    new = autofuse.wrap(torch.zeros(3, device=device))
    (x * 1.0).sum().backward()
    autofuse.materialize(new + 1.0)
    read, met = other * 2.0 + 1.0, []

    def write(other):
        met.extend(type(t) is autofuse.Tensor for t in (x, new, other))
        if way == "in place":
            torch.ops.aten.add_(other, 1)
        else:
            there = other if way == "out" else other.data
            torch.add(there, 1, out=there)

    weakref.finalize(x.grad, write, other)
    x.grad = new
    assert met == [True] * 3
    assert read.tolist() == [3.0] * 3 and other.tolist() == [2.0] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_another_thread_has_pending_is_flushed(device, on, monkeypatch):
    """Before what it reads gets other memory."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, read = autofuse.wrap(torch.ones(3, device=device)), []
    assert elsewhere(lambda: read.append(x * 2.0)) is None
    x.data = torch.zeros(3, device=device)
    assert read[0].tolist() == [2.0] * 3 and x.tolist() == [0.0] * 3
