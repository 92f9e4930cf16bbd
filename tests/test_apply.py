"""Functions of users: nothing is recorded in their `apply`, and all is as before after it."""

import functools
import gc
import sys
import weakref
from threading import get_ident

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.chain.state import Recorder, all_recorders, make_current, this_thread
from autofuse.hot import native
from autofuse.record import modes
from support import assert_same, elsewhere, functions_called, needs_cuda

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

    def forward(ctx, x, other):
        if other == "raise":
            raise ValueError
        return x * 1.0

    own = function(forward)
    leaf = torch.ones(3, requires_grad=True)
    for wrap in (lambda x: x.clone(), lambda x: W(x.clone()), lambda x: W(x) * 2.0):
        for _ in range(20):
            x = wrap(leaf)
            result = own.apply(x, {})
            known = weakref.ref(x), weakref.ref(result)
            del x, result
            gc.collect(0)
            assert [k() for k in known] == [None, None]
    recorder, x = this_thread.current, W(leaf)
    watched = [recorder, recorder.chain, recorder.closed, recorder.home, recorder.nowhere, own, x,
               this_thread.recorders, vars(this_thread), torch.Tensor, autofuse.Tensor]  # fmt: skip
    before = list(map(sys.getrefcount, watched))
    for _ in range(100):
        own.apply(x, {})
        own.apply(x, 1.0)
        with pytest.raises(ValueError):
            own.apply(x, "raise")
    gc.collect()
    after = list(map(sys.getrefcount, watched))
    assert all(abs(b - a) < 50 for a, b in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("make", (lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3)))
@pytest.mark.parametrize("many", (tuple, list))
def test_results_that_are_not_strided_stay_plain(on, make, many):
    """Machine code looks at the layout of what is in a tuple or a list, too."""
    own = function(lambda ctx, x: (x * 1.0, make()))
    for _ in range(4):
        first, second = many(own.apply(W(torch.ones(3))))
        strided = second.layout is torch.strided
        assert type(first) is autofuse.Tensor
        assert type(second) is (autofuse.Tensor if strided else torch.Tensor)
        second.mul_(2.0)
        assert torch.equal(second.to_dense(), make().to_dense() * 2.0)


def test_gradients_that_are_not_strided_stay_plain(on):
    weights = torch.ones(5, 3)
    for _ in range(4):
        w = W(weights.clone().requires_grad_())
        rows = torch.nn.functional.embedding(torch.tensor([1, 2]), w, sparse=True)
        (g,) = torch.autograd.grad(rows.sum(), [w])
        assert g.layout is torch.sparse_coo and type(g) is torch.Tensor
        g.mul_(2.0)
        assert g.to_dense()[1].tolist() == [2.0] * 3


def test_what_another_device_has_pending_is_computed_too(on):
    """Of a second recorder of this thread, as there is of another device."""

    def run():
        autofuse.materialize(W(torch.ones(2)) * 2.0)
        first = this_thread.current
        second = Recorder(first.device, get_ident(), False)
        all_recorders.add(second)
        this_thread.recorders[torch.device("cpu", 7)] = second
        own = function(lambda ctx, x: x * 1.0)
        for _ in range(4):
            make_current(second)
            made = W(torch.ones(3)) * 3.0
            make_current(first)
            assert autofuse.is_pending(made) and len(second.chain) == 1
            autofuse.reset_stats()
            own.apply(W(torch.ones(3)))
            assert not autofuse.is_pending(made) and autofuse.stats().flushes == {"apply": 1}
            assert_open()

    error = elsewhere(run)
    assert error is None, error


@pytest.mark.parametrize("fails", (False, True))
def test_interrupts_where_recorders_are_opened_again(on, monkeypatch, fails):
    """They come through, whatever the Function has done."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    renew, armed = modes.renew, []

    def forward(ctx, x):
        hooks.__enter__()  # so that it takes more than to undo what was done
        armed.append(True)
        if fails:
            raise ValueError
        return x * 1.0

    def interrupted(*args):
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return renew(*args)

    monkeypatch.setattr(modes, "renew", interrupted)
    own = function(forward)
    for given in (torch.ones(3, requires_grad=True), W(torch.ones(3, requires_grad=True))):
        with pytest.raises(KeyboardInterrupt):
            own.apply(given)
        hooks.__exit__(None, None, None)
        assert_open()


@pytest.mark.skipif(not native.active(), reason="there is no machine code here")
def test_a_pending_argument_takes_no_python():
    own = function(lambda ctx, x: x * 1.0)
    leaf = W(torch.ones(3, requires_grad=True))
    apply = functools.partial(own.apply)  # which Python 3.11 calls itself else
    for _ in range(4):
        apply(leaf * 2.0)
    called = functions_called(lambda: apply(leaf * 2.0))
    assert not {"apply", "run_closed", "flush", "_flush"} & {*called}


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
