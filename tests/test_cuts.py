"""Ops that cut a chain: it is flushed, and another begins with them."""

import pytest
import torch
from test_reductions import recorded, recording  # noqa: F401

import autofuse
from autofuse.record import flush
from support import NATIVE, assert_same, functions_called

W = autofuse.wrap
X = torch.linspace(-2.0, 2.0, 24).view(4, 6)
Y = torch.linspace(-1.0, 3.0, 72).view(3, 4, 6)


pytestmark = pytest.mark.usefixtures("recorded")


# of x [4, 6] and y [3, 4, 6]: why a chain ends, and results
CUTS = {
    "an operator": ("rows", lambda x, y: (x.softmax(-1) * y,)),
    "of what is plain": ("rows", lambda x, y: (y - x.softmax(-1),)),
    "with an option": ("rows", lambda x, y: (torch.add(x.softmax(-1) * 2.0, y, alpha=3),)),
    "a function": ("rows", lambda x, y: (torch.atan2(x.softmax(-1) + 1.0, y) * 2.0,)),
    "where": ("rows", lambda x, y: (torch.where(y > 0.0, x.softmax(-1), y) + 1.0,)),
    "one of a view": ("views", lambda x, y: ((y * 2.0)[..., 1:].amax(-1) * 3.0,)),
    "several": ("rows", lambda x, y: (x.softmax(-1) * y, x.log_softmax(-1) + y, x * 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_results_and_flushes(name, grad, on):
    why, program = CUTS[name]
    for _ in range(3):
        x, y, u, v = (t.clone().requires_grad_(grad) for t in (X, Y, X, Y))
        autofuse.reset_stats()
        got, want = program(W(x), W(y)), program(u, v)
        if not grad:
            assert autofuse.stats().flushes[why] >= 1
            assert autofuse.stats().ops_eager == 0 and autofuse.is_pending(got[-1])
        for ours, theirs in zip(got, want, strict=True):
            assert_same(autofuse.unwrap(autofuse.materialize(ours)).detach(), theirs.detach(), 1e-6)
        if grad:
            for results in (got, want):
                sum([(one * one).sum() for one in results]).backward()
            for ours, theirs in ((x.grad, u.grad), (y.grad, v.grad)):
                assert (ours is None) is (theirs is None)
                if ours is not None:
                    assert_same(ours, theirs, 1e-5)


@pytest.mark.skipif(True not in NATIVE, reason="there is no machine code")
@pytest.mark.parametrize("name", [name for name in CUTS if name != "several"])
def test_a_cut_that_is_known_runs_no_python_but_a_flush(name, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", True)
    _, program = CUTS[name]
    x, y = W(X.clone()), W(Y.clone())
    made = []
    for _ in range(5):
        made[:] = program(x, y)
        autofuse.materialize(*made)
    called = functions_called(lambda: made.append(program(x, y)))
    assert not {"record", "handler", "spelled", "reflected", "chosen_by"} & {*called}


@pytest.mark.parametrize("name", ["an operator", "one of a view"])
def test_what_a_flush_raises_in_the_middle_of_a_cut(name, on, monkeypatch):
    _, program = CUTS[name]
    x, y = W(X.clone()), W(Y.clone())
    for _ in range(3):
        autofuse.materialize(*program(x, y))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(flush, "_run", interrupted)
        program(x, y)
    for ours, theirs in zip(program(x, y), program(X, Y), strict=True):
        assert_same(autofuse.unwrap(autofuse.materialize(ours)), theirs, 1e-6)
