"""Functions of users: nothing is recorded in their `apply`, and all is as before after it."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.chain.state import this_thread
from support import assert_same, elsewhere, needs_cuda

W = autofuse.wrap


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    autofuse.materialize(W(torch.ones(2)) * 2.0)  # so that there is a recorder


def state():
    """What an `apply` changes in this thread, and has to change back."""
    current = this_thread.current
    tables = [(r.off, r.shut, r.chain is r.closed, r.home is r.nowhere)
              for r in this_thread.recorders.values()]  # fmt: skip
    return this_thread.closed, this_thread.applies, current, tables


OPEN = (False, None, False, False)


def assert_open():
    closed, applies, current, tables = state()
    assert (closed, applies) == (0, 0) and current is not None and {*tables} == {OPEN}
    made = W(torch.ones(3)) * 2.0 + 1.0
    assert autofuse.is_pending(made) and made.tolist() == [3.0] * 3


def function(forward, backward=lambda ctx, *gs: gs[0]):
    """A Function of these."""
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), body)


ARGUMENTS = {
    "plain": lambda p: p,
    "wrapped": W,
    "pending": lambda p: W(p) * 1.0,
    "a view of what is pending": lambda p: (W(p) * 1.0)[:3],
    "a parameter": lambda p: torch.nn.Parameter(p.detach().clone()),
}
OTHERS = [(), (2, None, "text", torch.float32), ((1, 2), {}), ({},), ([1.0],), ({"a": 1},)]


@pytest.mark.parametrize("grad", (True, False))
@pytest.mark.parametrize("others", OTHERS, ids=repr)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_it_gives_is_eagers(on, name, others, grad):
    def forward(ctx, x, *others):
        seen.append((type(x), this_thread.closed, this_thread.applies, this_thread.current.off))
        assert others == given
        y = x * 3.0 + 1.0
        seen.append(autofuse.is_pending(y))
        return y

    def backward(ctx, g):
        return (g * 5.0, *[None] * len(given))

    own, given, seen = function(forward, backward), others, []
    leaf, plain = (torch.arange(6.0).requires_grad_(grad) for _ in range(2))
    want = own.apply(plain[:3] if "view" in name else plain * 1.0, *others)
    for _ in range(6):
        seen.clear()
        x = ARGUMENTS[name](leaf)
        with torch.set_grad_enabled(grad):
            got = own.apply(x, *others)
        assert_open()
        assert seen[0][1:] == (1, 1, True) and seen[1] is False
        assert_same(autofuse.unwrap(autofuse.materialize(got)), want.detach() if not grad else want,
                    None)  # fmt: skip
        if grad and name != "a parameter":
            (g,) = torch.autograd.grad(got, leaf, torch.ones_like(got))
            assert_same(autofuse.unwrap(g), torch.autograd.grad(
                want, plain, torch.ones_like(want), retain_graph=True)[0], None)  # fmt: skip
            assert got.grad_fn.name() == want.grad_fn.name()


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt, GeneratorExit))
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_errors_leave_the_thread_as_it_was(on, where, error):
    def fail(ctx, *args):
        raise error("mine")

    def through(ctx, x):
        return x * 1.0

    own = function(*((fail, through) if where == "forward" else (through, fail)))
    leaf = torch.ones(3, requires_grad=True)
    for given in (leaf, W(leaf), W(leaf) * 2.0):
        for _ in range(4):
            with pytest.raises(error, match="mine"):
                result = own.apply(given)
                torch.autograd.grad(result, leaf, torch.ones(3))
            assert_open()


def test_one_in_another(on):
    inner = function(lambda ctx, x: x * 2.0)
    states = []

    def forward(ctx, x):
        y = inner.apply(x)
        states.append(state()[:2])
        with torch.enable_grad():
            z = checkpoint(lambda t: inner.apply(t) + 1.0, y, use_reentrant=False)
        states.append(state()[:2])
        return z.detach()

    own = function(forward)
    leaf = torch.ones(3, requires_grad=True)
    for given in (leaf, W(leaf), W(leaf) * 1.0) * 3:
        states.clear()
        assert own.apply(given).tolist() == [5.0] * 3
        assert states == [(1, 1)] * 2
        assert_open()


def test_what_is_pending_is_computed_once_before_it(on):
    own = function(lambda ctx, x: x * 1.0)
    leaf = torch.ones(3, requires_grad=True)
    for _ in range(4):
        autofuse.reset_stats()
        other = W(torch.ones(3)) * 4.0
        result = own.apply(W(leaf) * 2.0)
        stats = autofuse.stats()
        assert not autofuse.is_pending(other) and stats.flushes == {"apply": 1}
        assert stats.ops_recorded == 2
        assert result.tolist() == [2.0] * 3


def test_nothing_is_held(on):
    """Neither what it was given, nor what it gave; nor is a reference given back twice."""
    own = function(lambda ctx, x, other: x * 1.0)
    leaf = torch.ones(3, requires_grad=True)
    for wrap in (lambda x: x.clone(), lambda x: W(x.clone()), lambda x: W(x) * 2.0):
        for _ in range(20):
            x = wrap(leaf)
            result = own.apply(x, {})
            known = weakref.ref(x), weakref.ref(result)
            del x, result
            gc.collect(0)
            assert [k() for k in known] == [None, None]


def test_threads_close_what_is_theirs(on):
    inside = []

    def forward(ctx, x):
        def record():
            y = W(torch.ones(3)) * 2.0
            inside.append((autofuse.is_pending(y), this_thread.closed, y.tolist()))

        assert elsewhere(record) is None
        return x * 1.0

    own = function(forward)
    for given in (torch.ones(3, requires_grad=True), W(torch.ones(3, requires_grad=True))) * 3:
        own.apply(given)
        assert_open()
    assert inside == [(True, 0, [2.0] * 3)] * 6
    assert elsewhere(lambda: own.apply(torch.ones(3))) is None  # a thread that has recorded nothing


def test_hooks_that_come_inside(on):
    """Recorders are opened for the modes after it, whatever went on."""

    def forward(ctx, x):
        hooks.__enter__()
        return x * 1.0

    own, told = function(forward), []
    for _ in range(4):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: told.append(t) or t, abs)
        x = W(torch.ones(3, requires_grad=True))
        own.apply(x)
        try:
            told.clear()
            autofuse.materialize((x * 2.0).sin())
            assert told
        finally:
            hooks.__exit__(None, None, None)
        assert_open()
        told.clear()
        autofuse.materialize((x * 2.0).sin())
        assert not told


@pytest.mark.cuda
@needs_cuda
def test_a_recorder_that_is_made_inside(on):
    """Of another device; it records afterwards."""

    def run():
        made = []

        def forward(ctx, x):
            made.append(W(torch.ones(3, device="cuda")) * 2.0)
            return x * 1.0

        own = function(forward)
        for _ in range(3):
            autofuse.materialize(W(torch.ones(3)) * 2.0)
            own.apply(W(torch.ones(3, requires_grad=True)))
            assert_open()
            y = W(torch.ones(3, device="cuda")) * 2.0
            assert autofuse.is_pending(y) and y.tolist() == made[-1].tolist() == [2.0] * 3

    assert elsewhere(run) is None
