"""What autograd saves, where hooks are told of it.

The programs compute what the CPU's kernels compute with eager's bits, so that all is compared
exactly: what hooks were given and in which order, values and gradients.
"""

import contextlib
import threading

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import autofuse
from support import DEVICES, assert_same

WAYS = ["fuse", "wrap"]


@pytest.fixture(params=["kernels", "short", "waiting"])
def tier(request, monkeypatch):
    """Chains run by kernels; as eager ops where that costs less; as eager ops for want of them."""
    monkeypatch.setattr(autofuse.config, "always_fuse", request.param != "short")
    if request.param == "waiting":
        monkeypatch.setattr(autofuse.config, "compile", "background")
        monkeypatch.setattr(autofuse.config, "compile_after", 1 << 30)
        autofuse.record.modes.reopen_all("test")
    return request.param


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)


def leaves(device, count=3, shape=(4, 6)):
    generator = torch.Generator().manual_seed(3)
    made = [(torch.rand(shape, generator=generator) + 0.5).to(device) for _ in range(count)]
    return [x.requires_grad_() for x in made]


def compared(program, way, device, count=3, steps=1):
    """Run `program` of `count` leaves in eager PyTorch and by autofuse, and compare what it gives.

    Values, gradients, and whatever else it returns. The last step's counters.
    """
    seen = []
    for run in ("eager", way):
        for _ in range(steps):
            torch.manual_seed(0)
            xs = leaves(device, count)
            autofuse.reset_stats()
            if run == "fuse":
                result, *others = autofuse.fuse(program)(*xs)
            else:
                first = autofuse.wrap(xs[0]) if run == "wrap" else xs[0]
                result, *others = program(first, *xs[1:])
            backward = None
            with contextlib.suppress(RuntimeError):
                result.sum().backward()
                backward = [x.grad for x in xs]
        seen.append((result.detach(), backward, *others))
    assert_same(seen[1], seen[0], None)
    assert seen[0][1] is not None
    return autofuse.stats()


# --- hooks of the program's ----------------------------------------------------------------------


def arithmetic(x, w, b):
    """Ops of which eager saves both operands, one, none, and the result."""
    scale = w.detach() * 2.0 + 1.0  # no gradient leads here: nothing is saved
    y = x * w + b
    y = torch.where(y > 1.0, y * scale, y / w)
    return (y * y).relu() * 0.5 - x, y


class Told:
    """What hooks were given, in order; conditions stay what they are."""

    def __init__(self, xs, change=lambda t: t, back=lambda t: t):
        self.xs, self.change, self.back, self.events = xs, change, back, []

    def pack(self, t):
        leaf = [k for k, x in enumerate(self.xs) if x is t]
        facts = leaf, t.requires_grad, t.is_leaf, t._version, torch.is_grad_enabled()
        self.events.append(("pack", *facts, autofuse.unwrap(t.detach()).clone()))
        return self.change(t) if t.is_floating_point() else t

    def unpack(self, packed):
        self.events.append(("unpack", packed.dtype, packed.device.type))
        return self.back(packed) if packed.is_floating_point() else packed


CHANGES = {
    "kept": (lambda t: t, lambda t: t),
    "cloned": (lambda t: t.clone(), lambda t: t),
    "halved": (lambda t: t.to(torch.float16), lambda t: t.to(torch.float32)),
    "mutated": (lambda t: t * 2.0, lambda t: t.add_(1.0)),
    "another": (torch.zeros_like, torch.ones_like),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_are_told_what_eager_tells_them(change, way, device, tier):
    def program(*xs):
        before = xs[0] * xs[1] + 0.25  # pending when the hooks come
        told = Told(xs, *CHANGES[change])
        with saved_tensors_hooks(told.pack, told.unpack):
            z, y = arithmetic(before, xs[1], xs[2])
            count = len(told.events)
        after = z * y * xs[0]
        return after, count, told.events

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_saves_nothing_is_fused_under_hooks(device, always):
    x, y = leaves(device, 2)
    x, packed = autofuse.wrap(x.detach()), []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        z = (x * 2.0 + 1.0).relu() * x
        assert autofuse.is_pending(z) and not packed
        eager = y * z
        assert len(packed) == 1 and eager.requires_grad
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.ops_recorded == 4
    assert stats.eager_ops["mul", "saved tensor hooks"] == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_raises_raises_where_eager_does(way, device, tier):
    def program(x, w, b):
        lines, packed = [], []

        def pack(t):
            packed.append(t)
            if len(packed) == 4:
                raise KeyError("full")
            return t

        y = x
        with pytest.raises(KeyError, match="full"), saved_tensors_hooks(pack, lambda t: t):
            for k in range(5):
                lines.append(k)
                y = y * w
        return y * b, lines, len(packed)

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_nested_hooks(way, device, tier):
    def program(x, w, b):
        events = []

        def hooks(name):
            return saved_tensors_hooks(
                lambda t: events.append((name, tuple(t.shape))) or t,
                lambda t: events.append((name, "back")) or t,
            )

        with hooks("outer"):
            y = x * w
            with hooks("inner"):
                z = y * b
            z = z * x
        return z * w, events

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_mutation_is_allowed_on_saved_tensors(way, device, tier):
    def program(x, w, b):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = x * w
            z = y * b
            y.mul_(3.0)
            gradients = torch.autograd.grad((z * y).sum(), (x, w, b))
        return x * w, gradients

    compared(program, way, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_tensors_saved_on_the_cpu(way, device, tier):
    def program(x, w, b):
        with save_on_cpu():
            return arithmetic(x, w, b)

    compared(program, way, device)


def test_hooks_of_one_thread_are_not_those_of_another(always):
    x = autofuse.wrap(leaves("cpu", 1)[0])
    entered, recorded, packed = threading.Event(), threading.Event(), []

    def hook():
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            entered.set()
            recorded.wait(10)

    thread = threading.Thread(target=hook)
    thread.start()
    assert entered.wait(10)
    y = x * x + 1.0
    assert autofuse.is_pending(y)
    recorded.set()
    thread.join()
    y.sum().backward()
    assert not packed and torch.equal(x.grad, 2.0 * x.detach())
