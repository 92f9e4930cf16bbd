"""What a checkpoint's second run is part of, and what its first run is spared.

The second run takes the way of the fused call that the first was part of; the first stores nothing
for hooks that read no values, and views are part of chains in both.
"""

import functools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_checkpoints import REENTRANT, WAYS, leaves, patient
from test_contest import contest_of, exact, rigged  # noqa: F401 - fixtures
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.chain.state import all_recorders, counts
from autofuse.lending import loans
from autofuse.record.contest import FUSED, PLAIN
from support import DEVICES, assert_same, elsewhere


def block(x, w, b):
    for _ in range(3):
        x = (x * w + b).relu() * 0.5
        x = torch.where(x > 1.0, x / w, x * b) - w
    return x


def recorded(run):
    """How many ops are recorded while `run` runs."""
    before = autofuse.stats().ops_recorded
    run()
    autofuse.record.flush.flush_all("test")
    return autofuse.stats().ops_recorded - before


def assert_nothing_is_left():
    assert not loans
    for recorder in all_recorders:
        assert not recorder.chain and not recorder.untold and recorder.running is None


# --- which way -----------------------------------------------------------------------------------


@REENTRANT
def test_the_second_run_takes_the_way_of_the_first(rigged, exact, reentrant):  # noqa: F811
    x, w, b = leaves("cpu")
    runs = []

    def counting(*args):
        before = autofuse.stats().ops_recorded
        try:
            return block(*args)
        finally:
            runs.append(autofuse.stats().ops_recorded - before > 0)

    outer = autofuse.fuse(lambda *args: checkpoint(counting, *args, use_reentrant=reentrant))
    ways = set()
    for _ in range(100):
        runs.clear()
        y = outer(x, w, b)
        contest = contest_of(outer)
        way = contest.way if contest.left == 0 else None
        y.sum().backward()
        first, second = runs
        assert first is second
        ways.add(first)
        if way is not None and len(ways) == 2 and contest.left:
            break
    assert ways == {True, False}
    assert contest_of(outer).left > 0  # decided


@REENTRANT
@pytest.mark.parametrize("inner", [False, True], ids=["once", "nested"])
def test_fused_calls_in_the_second_run_of_a_plain_call_are_plain(rigged, reentrant, inner):  # noqa: F811
    cell = autofuse.fuse(block)
    x, w, b = leaves("cpu")

    def region(*args):
        if not inner:
            return cell(*args)
        return checkpoint(cell, *args, use_reentrant=reentrant) * 2.0

    def program(*args):
        return checkpoint(region, *args, use_reentrant=reentrant)

    y = autofuse.fused.call_plain(program, (x, w, b), {})
    assert recorded(lambda: y.sum().backward()) == 0
    assert autofuse.chain.state.this_thread.depth == 0
    assert autofuse.chain.state.this_thread.plain is False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_what_was_lent_is_lent_again(device, inside, always):
    """A checkpointed function has more at hand than its arguments."""

    def program(x, w, b, differentiate=False):
        y = checkpoint(lambda one: block(x, w, b) * one, x[:1, :1] * 2.0, use_reentrant=False)
        if differentiate:
            return torch.autograd.grad(y.sum(), (x, w, b))
        return y

    xs = leaves(device)
    want = torch.autograd.grad(program(*xs).sum(), xs)
    fused = autofuse.fuse(functools.partial(program, differentiate=inside))
    if inside:
        autofuse.reset_stats()
        got = fused(*xs)
    else:
        y = fused(*xs)
        autofuse.reset_stats()
        got = torch.autograd.grad(y.sum(), xs)
    assert_same(got, want, None)
    # 16 ops in three turns, and the last product, which the second run may not come to
    assert autofuse.stats().ops_recorded >= 24
    assert_nothing_is_left()


def test_what_was_lent_is_not_kept(always):
    x, w, b = leaves("cpu")
    gone = []

    def program(x, w, other):
        return checkpoint(lambda x: block(x, w, w), x, use_reentrant=False)

    other = torch.ones(3)
    known = weakref.ref(other, gone.append)
    y = autofuse.fuse(program)(x, w, other)
    del other
    assert gone == [known]
    y.sum().backward()
    assert_nothing_is_left()


@pytest.mark.parametrize("native", [False, True])
def test_a_backward_in_a_backward_is_no_step(native):
    before = counts.backwards
    x, w, b = leaves("cpu")
    y = x
    for _ in range(3):
        y = checkpoint(block, y, w, b, use_reentrant=True)
    y.sum().backward()
    assert counts.backwards == before + 1
    y = x * 2.0
    inner = (w * 1.0).sum()
    y.register_hook(lambda g: inner.backward())
    y.sum().backward()
    assert counts.backwards == before + 2


@REENTRANT
def test_a_fused_function_in_checkpoints_is_timed_by_steps(rigged, exact, reentrant):  # noqa: F811
    """All its calls in a step take one way, whether they are a first run or a second."""
    calls = []

    def told(*args):
        calls.append(None)
        return block(*args)

    cell = autofuse.fuse(told)
    x, w, b = leaves("cpu")
    for _ in range(60):
        y = x
        for _ in range(2):
            y = checkpoint(cell, y, w, b, use_reentrant=reentrant)
        y.sum().backward()
    contests = [site.contest for site in _sites(cell).values()]
    graded = [c for c in contests if c._most]
    assert len(graded) == 1 and graded[0].left > 0 and graded[0].costs is not None


def _sites(function):
    (sites,) = [c.cell_contents for c in function.__closure__ if isinstance(c.cell_contents, dict)]
    return sites
