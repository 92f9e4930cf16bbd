"""What a checkpoint's second run is part of, and what its first run is spared.

The second run takes the way of the fused call that the first was part of; the first stores nothing
for hooks that read no values, and views are part of chains in both. What both save and give stands
in `test_checkpoints`.
"""

import functools
import gc
import threading
import weakref

import pytest
import torch
from test_autograd_order import Doubled
from test_checkpoints import REENTRANT, WAYS, leaves, patient
from test_contest import contest_of, exact, owners_of, rigged  # noqa: F401 - fixtures
from test_views import CASES, SHAPE, parts_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

import autofuse
from autofuse.chain.state import all_recorders, counts, this_thread
from autofuse.errors import StaleInputError
from autofuse.fused import call_plain
from autofuse.lending import loans
from autofuse.record import modes
from support import DEVICES, assert_same, elsewhere, needs_cuda, random_tensor, write_unseen

pytestmark = pytest.mark.usefixtures("on")


def block(x, w, b):
    for _ in range(3):
        x = (x * w + b).relu() * 0.5
        x = torch.where(x > 1.0, x / w, x * b) - w
    return x


def gradients(y, xs):
    """As `backward` gives them, which reentrant checkpoints want."""
    for x in xs:
        x.grad = None
    y.sum().backward()
    return [x.grad for x in xs]


def assert_nothing_is_left():
    assert not loans
    assert (this_thread.depth, this_thread.closed, this_thread.applies) == (0, 0, 0)
    assert this_thread.plain is False
    for recorder in all_recorders:
        assert not recorder.chain and not recorder.untold and recorder.running is None


# --- which way -----------------------------------------------------------------------------------


@REENTRANT
def test_the_second_run_takes_the_way_of_the_first(rigged, exact, reentrant):  # noqa: F811
    """While a contest measures, and once it has decided."""
    xs, runs = leaves("cpu"), []

    def counting(*args):
        before = autofuse.stats().ops_recorded
        try:
            return block(*args)
        finally:
            runs.append(autofuse.stats().ops_recorded > before)

    outer = autofuse.fuse(lambda *args: checkpoint(counting, *args, use_reentrant=reentrant))
    seen = set()
    for _ in range(100):
        runs.clear()
        gradients(outer(*xs), xs)
        decided = contest_of(outer).left > 0
        seen.add((*runs, decided))
        if decided:
            break
    last = contest_of(outer).way == autofuse.record.contest.FUSED
    gradients(outer(*xs), xs)
    assert {ways[:2] for ways in seen} == {(True, True), (False, False)}
    assert runs[-2:] == [last, last] and decided
    assert_nothing_is_left()


@REENTRANT
@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_fused_calls_in_the_second_run_of_a_plain_call_are_plain(reentrant, nested, always):
    cell = autofuse.fuse(block)
    xs = leaves("cpu")

    def region(*args):
        return checkpoint(cell, *args, use_reentrant=reentrant) * 2.0 if nested else cell(*args)

    y = call_plain(lambda *args: checkpoint(region, *args, use_reentrant=reentrant), xs, {})
    gradients(y, xs)
    assert autofuse.stats().ops_recorded == 0
    assert_nothing_is_left()


@REENTRANT
def test_fused_calls_in_checkpoints_are_timed_by_steps(rigged, exact, reentrant):  # noqa: F811
    """All of a step take one way, but for where it changes: first runs, or second ones."""
    cell, xs = autofuse.fuse(block), leaves("cpu")
    steps, seen = set(), []
    begin = autofuse.record.contest.Contest.begin

    def begun(contest, step, news=None):
        seen.append((contest, step))
        return begin(contest, step, news)

    for _ in range(60):
        before = counts.backwards
        y = xs[0]
        for _ in range(2):
            y = checkpoint(cell, y, *xs[1:], use_reentrant=reentrant)
        gradients(y, xs)
        steps.add(counts.backwards - before)
    assert steps == {1}  # those that reentrant checkpoints run in it are part of it
    sites = [site for owner in owners_of(cell).values() for site in owner.sites.values()]
    contests = [site.contest for site in sites]
    assert len(contests) == 1 + reentrant  # first runs without grad are calls of their own
    assert all(contest.left > 0 and contest.costs for contest in contests)


def test_a_backward_in_a_backward_is_no_step():
    before = counts.backwards
    x, w, _ = leaves("cpu")
    y, inner = x * 2.0, (w * 1.0).sum()
    y.register_hook(lambda g: inner.backward())
    y.sum().backward()
    assert counts.backwards == before + 1 and w.grad is not None


# --- what is lent --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_what_was_lent_is_lent_again(device, inside, always):
    """A checkpointed function has more at hand than its arguments."""

    def program(x, w, b, differentiate=False):
        y = checkpoint(lambda one: block(x, w, b) * one, x[:1, :1] * 2.0, use_reentrant=False)
        return torch.autograd.grad(y.sum(), (x, w, b)) if differentiate else y

    xs = leaves(device)
    want = torch.autograd.grad(program(*xs).sum(), xs)
    fused = autofuse.fuse(functools.partial(program, differentiate=inside))
    autofuse.reset_stats()
    got = fused(*xs) if inside else torch.autograd.grad(fused(*xs).sum(), xs)
    assert_same(got, want, None)
    assert autofuse.stats().ops_recorded >= 2 * 27
    assert_nothing_is_left()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_wrapped_by_then_keeps_nothing_else_plain(device, always):
    """What the first run was given may come back wrapped, beside tensors that are not."""
    x, w, b = leaves(device)
    plain = torch.ones(4, 6, device=device)

    def region(h, plain):
        return (plain * 3.0 + 1.0) * (plain - 0.5) * h[0]

    def program(x, plain):
        return checkpoint(region, [x * w], plain, use_reentrant=False) * b

    want = torch.autograd.grad(program(x, plain).sum(), (x, w, b))
    y = autofuse.fuse(program)(x, plain)
    autofuse.reset_stats()
    assert_same(torch.autograd.grad(y.sum(), (x, w, b)), want, None)
    assert autofuse.stats().ops_recorded == 5
    assert plain.__class__ is torch.Tensor
    assert_nothing_is_left()


def test_what_was_lent_is_not_kept(always):
    x, w, _ = leaves("cpu")
    other, gone = torch.ones(3), []
    known = weakref.ref(other, gone.append)
    program = lambda x, w, other: checkpoint(lambda x: block(x, w, w), x, use_reentrant=False)  # noqa: E731
    y = autofuse.fuse(program)(x, w, other)
    del other
    assert gone == [known]
    gradients(y, (x, w))
    assert_nothing_is_left()


def test_what_was_lent_goes_while_it_is_lent_again(always, recwarn):
    """A node that has saved it is all that holds it, and goes in the middle of the second run."""
    (w,) = leaves("cpu", 1)
    saving, runs = [], []

    def region(w):
        if runs:
            saving.clear()
        runs.append(w)
        return block(w, w, w)

    @autofuse.fuse
    def program(x, w):
        saving.append(torch.matmul(x, torch.ones(6, 2, requires_grad=True)))
        return checkpoint(region, w, use_reentrant=False)

    y = program(torch.ones(4, 6), w)
    gradients(y, (w,))
    assert len(runs) == 2
    assert not [str(one.message) for one in recwarn], "a tensor went that Python still had"
    assert_nothing_is_left()


# --- inside the `apply` of a Function -------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [*WAYS, "inside"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reentrant_checkpoints_record_in_all_their_runs(device, way, depth, always):
    cell = autofuse.fuse(block) if way == "inside" else block

    def nest(function, depth):
        if depth == 0:
            return function
        inner = nest(function, depth - 1)
        return lambda *args: checkpoint(inner, *args, use_reentrant=True)

    xs = leaves(device)
    want = gradients(nest(block, depth)(*xs), xs)
    program = nest(cell, depth)
    if way == "fuse":
        program = autofuse.fuse(program)
    got = gradients(program(autofuse.wrap(xs[0]) if way == "wrap" else xs[0], *xs[1:]), xs)
    assert_same(got, want, None)
    stats = autofuse.stats()
    assert stats.ops_recorded >= 27 * (depth + 1)
    assert not [key for key in stats.eager_ops if key[1] == "recording is off"]
    assert_nothing_is_left()


def test_an_error_at_the_end_of_a_first_run_leaves_recording_as_it_was(always):
    """What is pending there is flushed, and that may fail."""
    plain, w, held = torch.ones(4), torch.ones(4, requires_grad=True), []

    def stale(x):
        held.append(x * plain)
        write_unseen(plain)
        return torch.zeros(4)

    for _ in range(2):
        with pytest.raises(StaleInputError):
            checkpoint(stale, autofuse.wrap(w), use_reentrant=True)
        assert this_thread.closed == this_thread.applies == 0
        assert autofuse.is_pending(autofuse.wrap(torch.ones(4)) * 2.0)


@pytest.mark.parametrize("place", ["begins", "ends"])
def test_an_interrupt_where_apply_begins_or_ends_leaves_recording_as_it_was(
    place, always, monkeypatch
):
    name = "close_thread" if place == "begins" else "reopen"
    original, done = getattr(modes, name), []

    def interrupted(reason, *nested):
        original(reason, *nested)
        if len(done) == (place == "ends"):  # the first closes the thread
            done.append(reason)
            raise KeyboardInterrupt
        done.append(reason)

    x = torch.ones(4, requires_grad=True)
    # machine code calls neither of these; see test_apply.py
    monkeypatch.setattr(autofuse.config, "native", False)
    monkeypatch.setattr(modes, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Doubled.apply(x)
    monkeypatch.undo()
    assert this_thread.closed == this_thread.applies == 0
    assert autofuse.is_pending(autofuse.wrap(torch.ones(4)) * 2.0)


def test_inside_disabled_nothing_is_recorded(always):
    xs = leaves("cpu")
    with autofuse.disabled():
        y = checkpoint(block, autofuse.wrap(xs[0]), *xs[1:], use_reentrant=True)
        gradients(y, xs)
    assert autofuse.stats().ops_recorded == 0
    assert_nothing_is_left()


# --- what the first run is spared ----------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_run_stores_what_somebody_sees(device, way, always):
    xs = leaves(device)
    program = lambda *args: checkpoint(block, *args, use_reentrant=False)  # noqa: E731
    if way == "fuse":
        program = autofuse.fuse(program)
    y = program(autofuse.wrap(xs[0]) if way == "wrap" else xs[0], *xs[1:])
    autofuse.record.flush.flush_all("test")
    stats = autofuse.stats()
    assert stats.kernels_launched == stats.live_outs_stored == 1
    assert stats.bytes_saved_for_backward == 0
    assert_same(gradients(y, xs), gradients(block(*xs), xs), None)
    assert autofuse.stats().live_outs_stored > 1  # what the second run saves, backward reads


@pytest.mark.cuda
@needs_cuda
def test_a_checkpointed_chain_takes_no_more_memory_than_in_eager(always):
    x = torch.rand(1 << 22, device="cuda", requires_grad=True)

    def chain(x):
        for _ in range(12):
            x = torch.tanh(x * x + 0.5)
        return x

    peaks = {}
    for run in (chain, autofuse.fuse(chain)):
        for differentiate in (False, True):
            for _ in range(3):
                x.grad = None
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                y = checkpoint(run, x, use_reentrant=False)
                if differentiate:
                    y.sum().backward()
                peaks[run, differentiate] = torch.cuda.max_memory_allocated() - before
                del y
    eager, fused = (peaks[run, False] for run in dict.fromkeys(run for run, _ in peaks))
    assert fused <= eager
    eager, fused = (peaks[run, True] for run in dict.fromkeys(run for run, _ in peaks))
    assert fused <= eager * 1.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("create", [False, True], ids=["once", "create_graph"])
def test_gradients_of_values_that_were_not_stored(device, create, tier):
    """Also of dead values where segments meet, of what has no gradient, of the same value twice."""

    def region(x, w, b):
        scale = w.detach() * 2.0 + 1.0
        a = x * w
        c = a * b + a * a
        d = torch.where(c > 1.0, c * scale, c / w)
        return d * d * x, a[:2]

    def program(x, w, b):
        y, part = checkpoint(region, x * 1.5, w, b, use_reentrant=False)
        grads = torch.autograd.grad((y * y).sum() + part.sum(), (x, w, b), create_graph=create)
        if create:
            grads += torch.autograd.grad(sum((g * g).sum() for g in grads), (x, w, b))
        return [y, part, *grads]

    xs = leaves(device)
    want = program(*xs)
    for _ in range(2):
        got = program(autofuse.wrap(xs[0]), *xs[1:])
        assert_same(got, want, 1e-5 if create else None)


# --- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_no_view_saves_a_tensor(name):
    told = []
    x = random_tensor(SHAPE, torch.float32).requires_grad_()
    with saved_tensors_hooks(lambda t: told.append(t) or t, lambda t: t):
        for layout in (lambda t: t * 1.0, lambda t: (t * 1.0).transpose(0, 1)):
            value = layout(x)
            told.clear()
            parts = parts_of(CASES[name](value)) if value.shape == x.shape else []
            assert not told
            torch.stack([*parts[:1], *parts[:1]]) if parts else None
            assert not told


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["hooks", "patient hooks"])
def test_every_view_in_a_checkpoint_and_under_patient_hooks(device, name, kind, always):
    """Dead ones, such as somebody holds, and such as an op saves."""
    case = CASES[name]

    def run(x, y):
        base = x * y
        held = parts_of(case(base))
        dead = [part.relu() * 3.0 for part in parts_of(case(x + y))]
        saved = [part * part + 1.0 for part in parts_of(case(base - y))]
        return (base, *held, *dead, *saved)

    def program(wrap):
        xs = [random_tensor(SHAPE, torch.float32, device, k).requires_grad_() for k in range(2)]
        told = []
        if kind == "hooks":
            results = checkpoint(run, *map(wrap, xs), use_reentrant=False)
        else:
            pack = lambda t: told.append(autofuse.unwrap(t.detach()).clone()) or t.detach()  # noqa: E731
            with patient(pack):
                results = run(*map(wrap, xs))
        sum((x * x.detach()).sum() for x in results).backward()
        return [x.grad for x in xs], list(results), told

    want = program(lambda x: x)
    for _ in range(2):
        assert_same(program(autofuse.wrap), want, None)


@pytest.mark.parametrize("device", DEVICES)
@REENTRANT
def test_a_chain_goes_through_views_in_both_runs(device, reentrant, always):
    """One kernel for a step of a cell, once more, and those of a backward without checkpoints."""

    def cell(gates, c):
        i, f, g, o = gates.chunk(4, 1)
        c = f.relu() * c + i.relu() * g.relu()
        return o.relu() * c.relu(), c

    gates, c, w, _ = leaves(device, 4, (4, 24))

    def region(gates, c):
        return cell(gates * w + 1.0, c)

    def program(gates, c):
        return checkpoint(region, gates, c, use_reentrant=reentrant)

    xs = gates, c[:, :6].detach().requires_grad_(), w
    want = gradients(torch.cat(program(*xs[:2])), xs)
    assert_same(gradients(torch.cat(autofuse.fuse(region)(*xs[:2])), xs), want, None)
    once = autofuse.stats().kernels_launched
    autofuse.reset_stats()
    results = autofuse.fuse(program)(*xs[:2])
    assert autofuse.stats().kernels_launched == 1
    assert_same(gradients(torch.cat(results), xs), want, None)
    assert autofuse.stats().kernels_launched == once + 1
    assert_nothing_is_left()


# --- whatever ends the second run ----------------------------------------------------------------


class Error(Exception):
    pass


@REENTRANT
@pytest.mark.parametrize("ending", ["early stop", "error", "fewer", "more"])
@pytest.mark.parametrize("way", [*WAYS, "inside"])
def test_whatever_ends_the_second_run_leaves_nothing(way, ending, reentrant, tier):
    """And the next step is as if nothing had been."""

    def run(way):
        runs, said = [], []
        xs = leaves("cpu")

        def changing(x, w, b):
            runs.append(None)
            second = len(runs) == 2
            turns = 3 + {"fewer": -1, "more": 1}.get(ending, 0) * second
            for k in range(turns):
                x = x * w + b
                if second and ending == "error" and k == 1:
                    raise Error("in the middle")
            return x * w

        function = autofuse.fuse(changing) if way == "inside" else changing
        program = functools.partial(
            checkpoint, function, use_reentrant=reentrant,
            **({} if reentrant else {"early_stop": ending == "early stop"}),
        )  # fmt: skip
        if way == "fuse":
            program = autofuse.fuse(program)
        for _ in range(2):
            y = program(autofuse.wrap(xs[0]) if way == "wrap" else xs[0], *xs[1:])
            try:
                said.append(gradients(y, xs))
            except (Error, CheckpointError) as error:
                said.append((type(error).__name__, str(error)))
            if way != "eager":
                assert_nothing_is_left()
        return said, len(runs)

    assert_same(run(way), run("eager"), None)


@REENTRANT
@pytest.mark.parametrize("device", DEVICES)
def test_the_second_run_in_another_thread(device, reentrant, always):
    """It is recorded there, and its hooks are told there."""
    xs = leaves(device)
    want = gradients(block(*xs), xs)
    threads = []

    def told(*args):
        threads.append(threading.get_ident())
        return block(*args)

    y = autofuse.fuse(lambda *args: checkpoint(told, *args, use_reentrant=reentrant))(*xs)
    autofuse.reset_stats()
    got = []
    error = elsewhere(lambda: got.extend(gradients(y, xs)))
    assert error is None and len(set(threads)) == 2
    assert_same(got, want, None)
    assert autofuse.stats().ops_recorded >= 27
    assert_nothing_is_left()


@REENTRANT
@pytest.mark.parametrize("way", WAYS)
def test_under_autocast(way, reentrant, always):
    """The second run has the casts of the first, and its dtypes."""

    def region(x, w, b):
        y = ((x @ w.t()) * 2.0 + 1.0).relu()
        return (y @ w)[:, :6] * x + b

    def run(way):
        xs = leaves("cpu")
        program = lambda *args: checkpoint(region, *args, use_reentrant=reentrant)  # noqa: E731
        if way == "fuse":
            program = autofuse.fuse(program)
        first = autofuse.wrap(xs[0]) if way == "wrap" else xs[0]
        with torch.autocast("cpu", torch.bfloat16):
            y = program(first, *xs[1:])
        return y.dtype, gradients(y, xs)

    want = run("eager")
    for _ in range(2):
        assert_same(run(way), want, None)
    assert autofuse.stats().ops_recorded
    assert_nothing_is_left()
