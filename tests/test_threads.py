"""Several threads: each records its own chains, and values may travel between them."""

import contextlib
import gc
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections import Counter
from weakref import ref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse import inside
from autofuse.chain import state
from autofuse.chain.state import this_thread
from autofuse.dispatch import eager as dispatched
from autofuse.observe import advice, events, findings, listing, page, text
from autofuse.patches import install as boundaries
from autofuse.patches import memory
from autofuse.record import flush as flushing
from autofuse.record import ways
from autofuse.record.contest import FUSED, PLAIN, Contest, HostClock
from autofuse.record.modes import forget_all
from autofuse.run import eager, launching
from autofuse.supply import kernels
from support import (
    DEVICES,
    NATIVE,
    around_runs,
    assert_same,
    before_launches,
    elsewhere,
    let_fail,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run(*targets):
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_record_independently(device):
    def work(seed):
        def body():
            x = torch.full((64,), float(seed), device=device)
            w = autofuse.wrap(x)
            for k in range(300):
                got = (w * 2.0 + float(k)) - 1.0
                assert got[0].item() == 2.0 * seed + k - 1

        return body

    run(*(work(seed) for seed in range(4)))


def test_pending_values_travel(device):
    """One thread records, the other reads while the first goes on recording."""
    pipe: queue.Queue = queue.Queue()
    x = torch.arange(64.0, device=device)

    def produce():
        w = autofuse.wrap(x)
        try:
            for k in range(400):
                y = w * float(k)
                pipe.put((k, y))
                for _ in range(k % 5):
                    y = y + 1.0
        finally:
            pipe.put(None)

    def consume():
        while (item := pipe.get(timeout=60)) is not None:
            k, y = item
            assert_same(y + 1.0, x * float(k) + 1.0, None)

    run(produce, consume)


def test_pending_values_are_ops_operands_elsewhere(device):
    x = torch.arange(64.0, device=device)
    y = autofuse.wrap(x) * 2
    found = []
    run(lambda: found.append(autofuse.unwrap(y * 3 + y)))
    assert_same(found[0], x * 2 * 3 + x * 2, None)


# --- threads that end with ops pending ----------------------------------------------------------


@pytest.fixture
def no_gc():
    """What goes, goes without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def recorders():
    return len(list(state.all_recorders))


def tracked():
    """How many objects of autofuse's there are, by class."""
    found = Counter(type(item) for item in gc.get_objects())
    kept = {cls: n for cls, n in found.items() if str(cls.__module__).startswith("autofuse")}
    return kept | {autofuse.Tensor: found[autofuse.Tensor]}


def pending_anywhere():
    return sum(len(recorder.chain) for recorder in state.all_recorders)


def test_a_thread_that_ends_with_ops_pending_leaves_nothing(device, no_gc):
    sources = []

    def work():
        x = autofuse.wrap(torch.ones(1 << 12, device=device))
        sources.append(ref(x))
        y = x * 2
        z = y + 1.0 if len(sources) % 2 else y.neg_()
        assert autofuse.is_pending(z)

    for _ in range(3):
        assert elsewhere(work) is None
    before, ops = tracked(), autofuse.stats().ops_recorded
    for _ in range(50):
        assert elsewhere(work) is None
    assert tracked() == before and not pending_anywhere()
    assert not any(source() is not None for source in sources)
    assert autofuse.stats().ops_recorded == ops + 100  # they count as before
    assert autofuse.stats().kernels_launched == 0


def test_a_thread_may_end_with_what_it_has_flushed_before(device):
    """Then nothing is left to decide, and machine code does it."""
    w, before = autofuse.wrap(torch.ones(4, device=device)), set(inside.inside)

    def work():
        for _ in range(3):
            _ = w * 2.0 + 1.0
            del _
            flushing.flush_thread("test")
        _ = w * 2.0 + 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run(work)
    assert set(inside.inside) <= before


@pytest.mark.parametrize("graded", [False, True])
def test_a_thread_that_ends_after_it_has_run_its_chains_leaves_nothing(
    graded, device, no_gc, monkeypatch
):
    """Not even until the garbage collector comes: meanwhile writes would look for its reads."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = torch.rand(64, device=device, requires_grad=graded)
    unaligned = torch.rand(65, device=device)[1:]

    def work():
        v = autofuse.wrap(torch.zeros(64, device=device))
        for _ in range(4):
            y = (autofuse.wrap(x.detach()) * x + unaligned).sigmoid() * 2.0
            with torch.no_grad():
                v.add_(autofuse.wrap(unaligned) * 2.0 + 1.0)
            if graded:
                y.sum().backward()
            else:
                y.tolist()

    for _ in range(2):
        assert elsewhere(work) is None
    gc.collect()
    alone = state.is_alone()  # threads of other tests may be there
    before, launched = tracked(), autofuse.stats().kernels_launched
    for _ in range(5):
        assert elsewhere(work) is None
    assert tracked() == before and state.is_alone() is alone
    assert autofuse.stats().kernels_launched > launched


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx, g):
        return g * 3.0


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 10.0


@torch.jit.script
def scripted(x):
    return x.exp() * 2.0


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "call", [Scaled.apply, Same.apply, scripted], ids=["in place", "it", "jit"]
)
def test_what_cpp_holds_of_a_value_that_another_thread_has_pending(call, recorded, device):
    """Which it would read past Python: a gradient would be another, or none."""

    def run(wrap):
        x = torch.arange(1.0, 5.0, device=device).requires_grad_()
        h, made = wrap(x) * 2.0, []

        def work():
            if recorded:
                (wrap(torch.ones(3, device=device)) * 2.0).sum()
            made.append((call(h) * 2.0).sum())

        assert elsewhere(work) is None
        (gradient,) = torch.autograd.grad(made[0], x)
        return [autofuse.unwrap(t.detach()) for t in (made[0], gradient, h)], h._version

    want, version = run(lambda x: x)
    got, ours = run(autofuse.wrap)
    assert_same(got, want, 1e-5)
    assert ours == version


class Held(torch.autograd.Function):
    """Returns what C++ does not see among the arguments."""

    @staticmethod
    def forward(ctx, x, held):
        return held[0]

    @staticmethod
    def backward(ctx, g):
        return g * 5.0, None


def _tangent(h):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, torch.ones_like(h))
        return forward_ad.unpack_dual(dual * dual).tangent


def _backward(h, x, *args, **kwargs):
    torch.autograd.backward(*args, **kwargs)
    return x.grad


OF_OTHERS = {
    "held by a Function": lambda h, x: torch.autograd.grad(
        Held.apply(x * 1.0, (h,)).sum(), x, allow_unused=True
    ),
    "checkpoint": lambda h, x: _backward(
        h, x, checkpoint(lambda t: t * 2.0, h, use_reentrant=True).sum()
    ),
    "backward": lambda h, x: _backward(h, x, [h], [torch.ones_like(x)]),
    "backward to": lambda h, x: _backward(
        h, x, tensors=h, grad_tensors=torch.ones_like(x), inputs=[x]
    ),
    "gradients given": lambda h, x: torch.autograd.grad(x * 2.0, x, grad_outputs=h.detach()),
    "vmap": lambda h, x: torch.vmap(lambda t: t * 2.0)(h),
    "vjp": lambda h, x: torch.func.vjp(lambda t: t * t, h)[0],
    "grad": lambda h, x: torch.func.grad(lambda t: (t * t).sum())(h),
    "jacrev": lambda h, x: torch.func.jacrev(lambda t: t * t)(h),
    "jvp": lambda h, x: torch.func.jvp(lambda t: t * t, (h,), (torch.ones_like(x),)),
    "enclosed": lambda h, x: torch.func.grad(lambda t: (t * h).sum())(torch.ones_like(x)),
    "forward mode": lambda h, x: _tangent(h),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_torch_differentiates_of_a_value_that_another_thread_has_pending(name, on, device):
    def run(wrap):
        x, made = torch.arange(1.0, 5.0, device=device).requires_grad_(), queue.Queue()
        over = threading.Event()

        def work():
            made.put(wrap(x) * 3.0)
            over.wait()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            result = OF_OTHERS[name](made.get(), x)
        finally:
            over.set()
            thread.join()
        results = result if isinstance(result, tuple) else (result,)
        return [(x.requires_grad, autofuse.unwrap(x.detach())) for x in results if x is not None]

    want, got = run(lambda x: x), run(autofuse.wrap)
    assert [graph for graph, _ in got] == [graph for graph, _ in want]
    assert_same([x for _, x in got], [x for _, x in want], 1e-6)


def test_levels_of_torch_func_compute_nothing_that_another_thread_records_meanwhile(on, device):
    """A level within another one: what is made there has no graph."""
    x, begin, made, over = torch.ones(4, device=device), *(queue.Queue() for _ in range(3))

    def work():
        begin.get()
        leaf = torch.arange(1.0, 5.0, device=device).requires_grad_()
        h = autofuse.wrap(leaf) * 3.0 + 1.0
        made.put(0)
        over.get()
        made.put(torch.autograd.grad((h * h).sum(), leaf)[0])

    def inner(t):
        begin.put(0)
        made.get()
        return torch.vmap(lambda row: row * 2.0)(t).sum()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        slope = torch.func.grad(inner)(x)
    finally:
        over.put(0)
        gradient = made.get()
        thread.join()
    assert slope.tolist() == [2.0] * 4 and this_thread.closed == 0
    assert gradient.tolist() == [24.0, 42.0, 60.0, 78.0]


@pytest.mark.parametrize("ends", ["after a block", "in a block"])
def test_a_thread_that_was_closed_leaves_nothing(ends, device, no_gc):
    def work():
        y = autofuse.wrap(torch.ones(8, device=device)) * 2
        block = autofuse.disabled()
        block.__enter__()
        autofuse.materialize(y + 1.0)
        if ends == "after a block":
            block.__exit__(None, None, None)
            assert autofuse.is_pending(y * 3.0)

    for _ in range(3):
        assert elsewhere(work) is None
    before = tracked()
    for _ in range(20):
        assert elsewhere(work) is None
    assert tracked() == before


@pytest.mark.parametrize("graded", [False, True])
def test_values_of_a_thread_that_has_gone_are_computed_by_who_needs_them(graded, device):
    x = torch.randn(64, device=device, requires_grad=graded)
    kept = []

    def work():
        kept.append((autofuse.wrap(x) * 2.0 + 1.0).sigmoid())

    def use():  # likely to have the number of a thread that has gone
        kept.append(kept.pop() * x)

    want = (x * 2.0 + 1.0).sigmoid()
    for _ in range(20):
        assert elsewhere(work) is None
        assert autofuse.is_pending(kept[-1])
        assert elsewhere(use) is None
        assert_same(kept.pop(), want * x, 1e-6)
        assert elsewhere(work) is None
        assert_same(kept.pop(), want, 1e-6)
    gc.collect()
    assert not pending_anywhere()


def test_the_holders_of_its_values_alone_keep_a_recorder(device):
    """In a cycle with the value, as any object that refers to itself."""
    before = recorders()
    kept = []

    def work():
        kept.append(autofuse.wrap(torch.ones(4, device=device)) * 2)

    for _ in range(20):
        assert elsewhere(work) is None
    assert recorders() == before + 20
    del kept[5:]
    gc.collect()
    assert recorders() == before + 5
    assert [y.sum().item() for y in kept] == [8.0] * 5
    assert recorders() == before  # without the garbage collector


def test_a_write_has_to_look_at_a_thread_that_has_gone_once(device):
    x, kept = torch.ones(64, device=device), []
    assert elsewhere(lambda: kept.append(autofuse.wrap(x) * 2)) is None
    assert elsewhere(lambda: kept.append(autofuse.wrap(torch.ones(4, device=device)) * 2)) is None
    torch.zeros(3, device=device).add_(1)
    assert not pending_anywhere()
    x.add_(1)
    assert [y.sum().item() for y in kept] == [128.0, 8.0]


def test_a_stale_read_of_a_thread_that_has_gone_is_told_to_the_reader(device):
    x, kept = torch.ones(64, device=device), []
    assert elsewhere(lambda: kept.append(autofuse.wrap(x) * 2)) is None
    torch._C._increment_version([x])  # a write that nobody could see
    torch.zeros(3, device=device).add_(1)
    assert not pending_anywhere()
    with pytest.raises(autofuse.StaleInputError):
        kept[0].tolist()


def test_a_thread_that_ends_while_another_flushes_it(device, monkeypatch):
    gc.collect()
    before = recorders()
    begun, ended, kept = threading.Event(), threading.Event(), []
    runner_for = ways.runner_for

    def slow(recorder, *args):
        begun.set()
        assert ended.wait(60)
        return runner_for(recorder, *args)

    def work():
        kept.append(autofuse.wrap(torch.ones(64, device=device)) * 2)
        assert begun.wait(60)

    worker = threading.Thread(target=work)
    worker.start()
    while not kept:
        pass
    monkeypatch.setattr(flushing, "runner_for", slow)
    reader = threading.Thread(target=lambda: kept.append(kept[0].tolist()))
    reader.start()
    worker.join()
    ended.set()
    reader.join()
    assert kept[1] == [2.0] * 64
    assert recorders() == before


def test_data_of_a_thread_that_another_one_frees(device, no_gc):
    """As where the frame of an error keeps them, or a fork ends the thread."""
    before = recorders()
    kept = []

    def work():
        x = autofuse.wrap(torch.ones(4, device=device))
        kept.append((state.this_thread.recorders, x * 2))
        x + 1.0

    assert elsewhere(work) is None
    owned, y = kept.pop()
    del owned
    assert pending_anywhere()
    assert y.tolist() == [2.0] * 4
    assert recorders() == before


def test_a_forked_child_computes_what_its_parents_threads_had_pending(device, monkeypatch):
    if device == "cuda":
        pytest.skip("a forked child cannot use CUDA once its parent does")
    monkeypatch.setattr(boundaries, "flush_all", lambda reason: None)  # as if recorded after it
    kept, locked, stop = [], threading.Event(), threading.Event()

    def work():
        kept.append(autofuse.wrap(torch.ones(4)) * 2)

    def stay():  # the child has the lock and not the thread that would release it
        work()
        with kept[-1]._af.recorder.lock:
            locked.set()
            stop.wait(60)

    assert elsewhere(work) is None
    thread = threading.Thread(target=stay)
    thread.start()
    assert locked.wait(60)
    with warnings.catch_warnings():  # of threads, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        done = []
        reader = threading.Thread(target=lambda: done.extend(y.tolist() for y in kept), daemon=True)
        reader.start()
        reader.join(30)
        os._exit(done != [[2.0] * 4] * 2 or pending_anywhere())
    stop.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_lends_nothing_that_its_parents_threads_did(device):
    """Their calls do not end in it: nobody else would make the arguments plain there."""
    if device == "cuda":
        pytest.skip("a forked child cannot use CUDA once its parent does")
    x, inside, go_on = torch.ones(4), threading.Event(), threading.Event()
    parent = os.getpid()

    def pause():
        inside.set()
        assert os.getpid() != parent or go_on.wait(60)

    slow = autofuse.fuse(lambda x, items: (pause(), x * items[0])[1])
    thread = threading.Thread(target=slow, args=(x, [x]))
    thread.start()
    assert inside.wait(60) and type(x) is autofuse.Tensor
    with warnings.catch_warnings():  # of threads, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        left = autofuse.lending.loans or autofuse.lending.others_lend() or {"_af"} & vars(x).keys()
        os._exit(bool(left) or {type(x), type(x * 2), type(slow(x, [x]))} != {torch.Tensor})
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0 and type(x) is torch.Tensor


def test_a_child_forked_in_a_fused_call_lends_what_that_does(device):
    """And nothing else: other threads' calls end in the parent alone."""
    if device == "cuda":
        pytest.skip("a forked child cannot use CUDA once its parent does")
    x, y, inside, go_on = torch.ones(4), torch.ones(4), threading.Event(), threading.Event()
    slow = autofuse.fuse(lambda *_: (inside.set(), go_on.wait(60)))
    thread = threading.Thread(target=slow, args=(x, y))

    @autofuse.fuse
    def fork(x, items):
        with warnings.catch_warnings():  # of threads, from Python 3.12 on
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork(), type(x), type(y), type(y * 2), x * 2

    thread.start()
    assert inside.wait(60)
    child, *classes, doubled = fork(x, [x])
    if not child:
        left = autofuse.lending.loans or {"_af"} & {*vars(x), *vars(y)}
        classes += type(x), type(y), type(doubled)
        want = [autofuse.Tensor, *[torch.Tensor] * 5]
        os._exit(bool(left) or classes != want)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert type(x) is type(y) is torch.Tensor and not autofuse.lending.loans


def test_values_that_were_foreseen_for_a_shorter_chain(device, monkeypatch):
    """A flush is interrupted while another thread computes for itself, and the chain goes on."""
    if device == "cuda":
        pytest.skip("kernels run another way")
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    ways = []
    around_runs(monkeypatch, lambda run, chain: ways[-1](run, chain))
    x = torch.rand(8)
    w, got, begun, go_on = autofuse.wrap(x), [], threading.Event(), threading.Event()
    y = w * 2.0
    replayed = eager.replayed

    def slow(*args):
        values = replayed(*args)
        begun.set()
        assert go_on.wait(10)
        return values

    def other():
        with inside.being_inside():  # waits for nobody
            got.append(autofuse.unwrap(y).clone())

    def interrupted(run, chain):
        thread.start()
        assert begun.wait(10)
        raise KeyboardInterrupt

    def after_it(run, chain):
        go_on.set()
        thread.join(0.3)
        run(chain)

    thread = threading.Thread(target=other)
    monkeypatch.setattr(flushing, "replayed", slow)
    ways.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        autofuse.materialize(y)
    z = y + 1.0
    ways.append(after_it)
    autofuse.materialize(z)
    thread.join()
    assert torch.equal(autofuse.unwrap(z), x * 2.0 + 1.0)
    assert torch.equal(got[0], x * 2.0) and torch.equal(autofuse.unwrap(y), got[0])


def test_a_value_beside_is_of_the_flush_that_makes_it(device, monkeypatch):
    """Who asks is late: that flush is over, and another one by the same nodes goes on."""
    if device == "cuda":
        pytest.skip("kernels run another way")
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = torch.rand(8)
    w, got = autofuse.wrap(x), []
    foreseen, second, read = threading.Event(), threading.Event(), threading.Event()
    swap, guard = launching.swap, flushing.NoModes
    here, code, late = threading.get_ident(), flushing.beside.__code__, []

    def run_first(run, made):
        if not late and thread is not None:
            thread.start()
            assert foreseen.wait(10)
        run(made)

    def settle_second(*args):
        if late and threading.get_ident() == here:
            second.set()
            assert read.wait(10)
        swap(*args)

    def no_modes():
        if threading.get_ident() != here and sys._getframe(1).f_code is code:
            foreseen.set()
            assert second.wait(10)
        return guard()

    def other():
        with inside.being_inside():
            try:
                got.append(autofuse.unwrap(y).clone())
            finally:
                read.set()

    thread = None
    monkeypatch.setattr(launching, "swap", settle_second)
    around_runs(monkeypatch, run_first)
    autofuse.materialize(w * 2.0)
    y = w * 2.0
    thread = threading.Thread(target=other)
    monkeypatch.setattr(flushing, "NoModes", no_modes)
    autofuse.materialize(y)
    late.append(None)
    z = w * 7.0
    autofuse.materialize(z)
    thread.join()
    assert torch.equal(got[0], x * 2.0)


@pytest.fixture
def in_the_middle_of_launches(device, monkeypatch):
    """Takes what every launch begins with, as the driver allows it."""
    if device == "cuda":
        pytest.skip("for launches over kernels of the CPU")
    ways = []
    before_launches(monkeypatch, lambda entry: ways[-1]() if ways else 0)
    return ways.append


def test_a_launch_that_writes_is_over_before_others_see_its_values(in_the_middle_of_launches):
    x = torch.rand(8)
    w, v, got, held = autofuse.wrap(x), autofuse.wrap(torch.zeros(8)), [], []

    def write():
        held[:] = [w * 2.0 + 1.0]
        v.add_(held[0])

    for _ in range(4):
        write()

    def first():
        if not got:
            got.append(None)
            thread.start()
            thread.join(0.3)

    def other():
        with inside.being_inside():  # waits for nobody
            got.append(autofuse.unwrap(held[0]).clone())

    thread = threading.Thread(target=other)
    in_the_middle_of_launches(first)
    write()
    thread.join()
    assert torch.equal(got[1], x * 2.0 + 1.0)
    assert torch.equal(autofuse.unwrap(v), (x * 2.0 + 1.0) * 5.0)


@pytest.mark.parametrize("graded", [False, True])
def test_who_is_faster_than_a_launch_has_the_same_memory(
    in_the_middle_of_launches, graded, monkeypatch
):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = torch.rand(8).requires_grad_(graded)
    w, got, held = autofuse.wrap(x), [], []

    def compute():
        held[:] = [(w * 2.0 + 1.0).sigmoid()]
        autofuse.materialize(held[0])

    for _ in range(4):
        compute()

    def first():
        if not got:
            run(other)

    def other():
        with inside.being_inside():
            got.append(autofuse.unwrap(held[0]).detach())

    in_the_middle_of_launches(first)
    compute()
    assert len(got) == 1
    assert autofuse.unwrap(held[0]).data_ptr() == got[0].data_ptr()
    want = torch.sigmoid(x * 2.0 + 1.0)
    torch.testing.assert_close(autofuse.unwrap(held[0]), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("times", [1, 2])  # the second where Python does what machine code cannot
def test_a_launch_that_is_refused_keeps_versions(in_the_middle_of_launches, times, capsys):
    w, left = autofuse.wrap(torch.rand(8)), [0]

    def first():
        refuses = left[0] > 0
        left[0] -= refuses
        return refuses

    in_the_middle_of_launches(first)
    for refused in (0, 0, 0, 0, times):
        v = autofuse.wrap(torch.zeros(8))
        with torch.no_grad():
            y = (w * 2.0).mul_(3.0).add_(1.0)
            left[0] = refused
            v.add_(y)
        left[0] = 0
        assert (y._version, v._version) == (2, 1)
        assert torch.equal(autofuse.unwrap(v), autofuse.unwrap(y))


def test_nodes_that_cannot_be_made(in_the_middle_of_launches, monkeypatch, capsys):
    """An error of our own: the chain runs as eager ops."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x = torch.rand(8).requires_grad_()
    w = autofuse.wrap(x)
    for _ in range(4):
        autofuse.materialize((w * 2.5 + 1.0).abs())

    def attach(*args):
        raise RuntimeError("no node today")

    for runner in state.this_thread.current.runners:
        if runner.attach is not None and runner.words is not None:
            runner.words.attach = runner.run.__globals__["attach"] = attach
    y = autofuse.materialize((w * 2.5 + 1.0).abs())
    assert torch.equal(autofuse.unwrap(y.detach()), (x.detach() * 2.5 + 1.0).abs())
    assert "no node today" in capsys.readouterr().err
    forget_all("test")


def test_what_runs_while_a_thread_gets_its_recorders_finds_the_same(device, monkeypatch):
    seen = []

    class Own(state.OwnRecorders):
        def __init__(self):
            if not seen:  # a signal handler, or a finalizer, where Python makes the dict
                seen.append(None)
                x = autofuse.wrap(torch.ones(8, device=device))
                seen.extend([x * 2.0 + 1.0, state.this_thread.recorders])

    def first():
        x = autofuse.wrap(torch.ones(8, device=device))
        seen.extend([x * 3.0 - 1.0, state.this_thread.recorders])
        seen.extend([autofuse.unwrap(seen[1]), autofuse.unwrap(seen[3])])

    monkeypatch.setattr(state, "OwnRecorders", Own)
    run(first)
    _, _, inner, _, outer, a, b = seen
    assert inner is outer
    assert_same(a, torch.full((8,), 3.0, device=device), None)
    assert_same(b, torch.full((8,), 2.0, device=device), None)


# --- what others may remove as well -----------------------------------------------------------


def test_a_backward_whose_kernel_fails_in_another_thread_too(device, monkeypatch, capsys):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    p = torch.rand(8, device=device).requires_grad_()
    w = autofuse.wrap(p)

    def make():
        return autofuse.materialize(((w * 2.0 + 1.0) * w).sigmoid())

    def fail(*args):
        backward.layouts.clear()  # as the other thread does
        raise RuntimeError("no gradients today")

    ones = torch.ones(8, device=device)
    y = make()
    backward, _ = y.grad_fn.work
    want = torch.autograd.grad(y, w, ones)
    assert backward.layouts
    let_fail(backward, fail)
    assert_same(torch.autograd.grad(make(), w, ones), want, 1e-6)
    assert "no gradients today" in capsys.readouterr().err


def test_settings_that_two_threads_change_at_once(device, tmp_path):
    """Nobody goes on listening whom no setting names any more."""
    before = list(events._observers)
    try:

        def change(k):
            for _ in range(30):
                autofuse.config.logs = ("flush", "kernel", "")[k]
                autofuse.config.dump_dir = (tmp_path, None)[k % 2]

        run(*[lambda k=k: change(k) for k in range(3)])
    finally:
        autofuse.config.logs, autofuse.config.dump_dir = "", None
    assert events._observers == before


def at_every_line(module, action):
    """Have `action` run at every line of `module`, as a finalizer might."""

    def trace(frame, event, argument):
        if frame.f_code.co_filename != module.__file__:
            return None
        sys.settrace(None)
        action()
        sys.settrace(trace)
        return trace

    return trace


def test_a_report_that_grows_while_it_is_read(device):
    w = autofuse.wrap(torch.ones(4, device=device))
    with autofuse.explain() as report:
        names = iter(range(1000))  # each makes the report longer

        def grow():
            name = next(names, None)
            if name is not None:
                report._witness.ran_eagerly(f"op{name}", "new")

        for _ in range(4):
            w.sum()
            grow()
        for module in (findings, text):
            sys.settrace(at_every_line(module, grow))
            try:
                print(report.ops_seen, report)
            finally:
                sys.settrace(None)


@pytest.mark.parametrize("module", [listing, page, advice, findings])
def test_a_report_that_grows_while_its_page_is_made(device, module):
    w = autofuse.wrap(torch.ones(4, device=device))
    with autofuse.explain() as report:
        names = iter(range(1000))  # each makes the page longer

        def grow():
            name = next(names, None)
            if name is not None:
                report._witness.ran_eagerly(f"op{name}", "new")

        for _ in range(4):
            (w * 2 + 1).sum()
            grow()
        sys.settrace(at_every_line(module, grow))
        try:
            assert "so far" in report._repr_html_()
        finally:
            sys.settrace(None)


def test_requests_that_are_forgotten_while_others_are(device, monkeypatch, capsys):
    """Where there are too many, and a finalizer that comes in the middle needs a kernel too."""
    w = autofuse.wrap(torch.rand(4, device=device))
    requests = dict.fromkeys(range(8))
    more = iter(range(8, 10**6))
    monkeypatch.setattr(kernels, "_requests", requests)
    monkeypatch.setattr(autofuse.config, "max_kernels", 1)

    def exchange():
        requests.pop(next(iter(requests), None), None)
        requests[next(more)] = None

    sys.settrace(at_every_line(kernels, exchange))
    try:
        y = (w * 2.0 + 1.0).sigmoid() * 3.25 - w.abs().exp()
        autofuse.materialize(y)
    finally:
        sys.settrace(None)
    assert not requests.keys() & range(8)
    assert not capsys.readouterr().err  # such as that its kernel has failed
    torch.testing.assert_close(autofuse.unwrap(y), (autofuse.unwrap(w) * 2.0 + 1.0).sigmoid() * 3.25
                               - autofuse.unwrap(w).abs().exp())  # fmt: skip


# --- fused calls --------------------------------------------------------------------------------


def test_threads_that_lend_the_same_tensors(device):
    """First while a call that lends them goes on, then by themselves."""
    x, y = torch.arange(8.0, device=device), torch.arange(8.0, device=device) + 1
    shared = [x, (y, x)]
    want = x * 2.0 + y
    fused = autofuse.fuse(lambda x, y, items: [x * 2.0 + y, items])
    entered, leave = threading.Event(), threading.Event()

    @autofuse.fuse
    def slow(x, items):
        entered.set()
        assert leave.wait(60) and type(x) is autofuse.Tensor is type(items[1][0])
        return x * 3.0

    def work(*args):
        def body():
            for _ in range(300):
                (got, *_) = fused(*args)
                state = type(got) is torch.Tensor or (vars(got), autofuse.lending.loans)
                assert state is True  # both classes have one name
                assert_same(got, want, None)

        return body

    def stay():
        assert_same(slow(x, shared), x * 3.0, None)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(60)
    run(work(x, y, []), work(x, y, shared), work(x, y, {"x": x, "y": [y]}))
    assert type(x) is type(y) is autofuse.Tensor
    leave.set()
    thread.join()
    assert type(x) is type(y) is torch.Tensor and not autofuse.lending.loans
    run(work(x, y, []), work(x, y, shared), work(x, y, {"x": x, "y": [y]}))
    assert type(x) is type(y) is torch.Tensor and not autofuse.lending.loans
    assert not {"_af"} & (vars(x).keys() | vars(y).keys())


@pytest.mark.parametrize("beside", [False, True], ids=["", "beside one that is lent"])
@pytest.mark.parametrize("before", [False, True], ids=["its user's", "lent before"])
def test_what_a_user_has_wrapped_stays_so_whoever_lends_it_meanwhile(
    before, beside, device, on, always
):
    """A function in Python finds it plain, and so does a fused call that begins meanwhile."""
    w = autofuse.wrap(torch.ones(4, device=device, requires_grad=True))
    x = torch.ones(4, device=device, requires_grad=True) if before else w
    entered, leave, threads = threading.Event(), threading.Event(), []

    @autofuse.fuse
    def slow(x):
        entered.set()
        assert leave.wait(60)
        return x * 3.0

    def begin(gradient):
        threads.append(threading.Thread(target=slow, args=(x,)))
        threads[0].start()
        assert entered.wait(60)

    def differentiate(x, *others):
        y = (x * 2.0).sum() + sum(others).sum() if others else (x * 2.0).sum()
        hook = x.register_hook(begin)
        autofuse.materialize(y)
        torch.autograd.grad(y, (x, *others))
        hook.remove()

    others = [torch.ones(4, device=device, requires_grad=True)] if beside else []
    if before:
        autofuse.fuse(differentiate)(x, *others)
        leave.set()
        threads[0].join()
        assert type(x) is torch.Tensor
    else:
        autofuse.fuse(lambda *others: differentiate(w, *others))(*others)
        assert type(w) is autofuse.Tensor
        leave.set()
        threads[0].join()
        assert type(w) is autofuse.Tensor and autofuse.is_pending(w * 2.0)
    assert not autofuse.lending.loans


def test_a_dual_level_that_another_thread_ends(device):
    level = forward_ad.dual_level()
    level.__enter__()
    assert elsewhere(forward_ad.exit_dual_level) is None
    with pytest.raises(RuntimeError):
        level.__exit__(None, None, None)
    assert this_thread.closed == 0 and autofuse.is_pending(
        autofuse.wrap(torch.ones(2, device=device)) * 2.0
    )


def test_what_a_function_in_python_finds_plain_is_wrapped_again_after_an_interrupt(
    device, monkeypatch
):
    monkeypatch.setattr(autofuse.config, "native", False)
    w = autofuse.wrap(torch.ones(4, device=device, requires_grad=True))
    again, interrupts = dispatched.wrap_again, [KeyboardInterrupt()]

    def interrupted(*args):
        if interrupts:
            raise interrupts.pop()
        again(*args)

    monkeypatch.setattr(dispatched, "wrap_again", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad((w * 2.0).sum(), w)
    assert type(w) is autofuse.Tensor


@pytest.mark.parametrize("native", [False, True])
def test_threads_that_write_what_others_read(device, native, monkeypatch):
    """Without waiting for each other, as in Hogwild training: in eager PyTorch no error either."""
    monkeypatch.setattr(autofuse.config, "native", native)
    x, z = torch.rand(1 << 14, device=device), torch.rand(1 << 14, device=device)
    w, v, want = autofuse.wrap(x), autofuse.wrap(z), (x * 2.0 + z).abs() - x
    fused = autofuse.fuse(lambda x, z: (x * 2.0 + z).abs() - x)

    def write():
        for _ in range(400):
            z.add_(0.0)
            w.mul_(1.0)
            torch.Tensor.mul_(z, 1.0)
            v.add_(w * 0.0)
            z.data = z.detach()

    def call():
        for _ in range(400):
            assert_same(fused(x, z), want, None)

    def read():
        for _ in range(400):
            assert_same((w * 2.0 + v).abs() - w, want, None)

    run(write, call, read, call)


@pytest.mark.parametrize("native", [False, True])
def test_a_thread_that_first_records_in_the_middle_of_a_write(device, native, monkeypatch):
    """Which began where no other thread had anything to flush."""
    monkeypatch.setattr(autofuse.config, "native", native)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    gc.collect()
    x, errors = torch.ones(1 << 22, device=device), []
    begun, over = threading.Event(), threading.Event()
    w = autofuse.wrap(x)

    def read():
        assert begun.wait(20)
        y = w * 2.0
        assert over.wait(20)
        assert autofuse.unwrap(y).shape == x.shape

    thread = threading.Thread(target=lambda: errors.append(elsewhere(read)))
    thread.start()
    begun.set()
    x.digamma_()  # 40 ms on a CPU
    over.set()
    thread.join()
    assert errors == [None]


def test_a_write_to_what_another_thread_has_lent_until_now(device, monkeypatch):
    """Torch was to ask for what reads it, as of any wrapped tensor."""
    x, kept, inside, go_on = torch.ones(8, device=device), [], threading.Event(), threading.Event()
    fused = autofuse.fuse(lambda x: (inside.set(), go_on.wait(60)))
    thread = threading.Thread(target=fused, args=(x,))
    thread.start()
    assert inside.wait(60)
    assert elsewhere(lambda: kept.append(autofuse.wrap(x) * 2.0 + 1.0)) is None
    asks_us = memory._asks_us

    def end(*args):
        answer = asks_us(*args)
        go_on.set()
        thread.join()
        return answer

    monkeypatch.setattr(memory, "_asks_us", end)
    torch.Tensor.add_(x, 0.0)
    go_on.set()
    thread.join()
    assert kept[0].tolist() == [3.0] * 8


@pytest.mark.parametrize("off", [autofuse.disabled, contextlib.nullcontext])
def test_plain_calls_of_what_other_threads_lend(device, monkeypatch, off):
    """Calls that run plain, for that was faster, or recording is off: so does what they return."""
    monkeypatch.setattr(autofuse.config, "measure", True)
    x, y = torch.arange(8.0, device=device), torch.arange(8.0, device=device) + 1

    def decided(function, way):
        fused, contest = autofuse.fuse(function), Contest(HostClock())
        contest.way, contest.left = way, sys.maxsize
        with monkeypatch.context() as patch:
            patch.setattr(autofuse.fused, "contest_for", lambda *_: contest)
            fused(x, [y])
        return fused

    lending = decided(lambda x, items: x * 2.0 + items[0], FUSED)
    plain = decided(lambda x, items: [x * 2.0, {"y": x + items[0]}], PLAIN)

    def lend():
        for _ in range(500):
            assert type(lending(x, [y])) is torch.Tensor

    def call():
        with off():
            for _ in range(500):
                got, items = plain(x, [y])
                assert type(got) is type(items["y"]) is torch.Tensor

    run(lend, call, lend, call)
    assert type(x) is type(y) is torch.Tensor and not autofuse.lending.loans


@pytest.mark.parametrize("off", [autofuse.disabled, contextlib.nullcontext])
def test_what_a_plain_call_leaves_in_its_arguments(device, monkeypatch, off):
    """Of what is wrapped elsewhere: plain, as of a fused call, and so is what it returns."""
    monkeypatch.setattr(autofuse.config, "measure", True)
    x, w, contest = torch.ones(4, device=device), [], Contest(HostClock())
    contest.way, contest.left = PLAIN, sys.maxsize
    monkeypatch.setattr(autofuse.fused, "contest_for", lambda *_: contest)
    keep = autofuse.fuse(lambda x, cache: (cache.append(x * w[0]), x, cache)[1:])
    for stored in (torch.ones(4, device=device), autofuse.wrap(torch.ones(4, device=device))):
        w[:] = [stored]
        for _ in range(2):
            cache, held = [], [stored]
            with off():
                got, same = keep(x, cache)
                _, wrapped = keep(x, held)
            assert got is x and same is cache and type(cache[0]) is torch.Tensor
            assert type(wrapped[1]) is type(stored)  # results of what is wrapped stay so


AUDITED = """
import sys
import threading
import time

import torch

import autofuse

autofuse.config.measure = False
sys.addaudithook(lambda event, _: event == "object.__setattr__" and time.sleep(0))
sys.setswitchinterval(1e-6)
x, y, wrong = torch.ones(4), torch.ones(4), []
fused = autofuse.fuse(lambda x, items: [x * 2.0 + items[0]])


def body():
    for _ in range(400):
        (got,) = fused(x, [y, (x, y)])
        if type(got) is not torch.Tensor:
            wrong.append(got)


threads = [threading.Thread(target=body) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong and type(x) is type(y) is torch.Tensor and not autofuse.lending.loans
assert not {"_af"} & (vars(x).keys() | vars(y).keys())
"""


def test_a_change_of_class_runs_audit_hooks(device):
    """In the middle of which others lend and give back."""
    if device == "cuda":
        pytest.skip("no kernel takes part")
    done = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


SERVING = """
import threading

import torch

import autofuse
from autofuse import inside


class Index:
    def __index__(self):
        seen.append(type(w))
        return 1


def write():
    with torch.no_grad():
        h[Index() :] = w


def run(serves):
    ident = threading.get_ident()
    if serves:
        inside.serving[ident] = True
    begun.set()
    assert over.wait(20.0)
    autofuse.materialize(w * 2.0 + 1.0)  # as a finalizer does
    write()
    inside.serving.pop(ident, None)


h, w, seen = torch.ones(4, 4), autofuse.wrap(torch.ones(3, 4)), []
autofuse.materialize(w * 2.0 + 1.0)  # this thread has its recorder
write()
assert seen.pop() is torch.Tensor  # is lent
for serves in (True, False):
    over, begun = threading.Event(), threading.Event()
    thread = threading.Thread(target=run, args=(serves,))
    thread.start()
    assert begun.wait(20.0)
    for _ in range(3):
        write()
    over.set()
    thread.join()
    assert seen == [torch.Tensor if serves else autofuse.Tensor] * 3 + [autofuse.Tensor], seen
    seen.clear()
"""


@pytest.mark.skipif(not NATIVE[-1], reason="Python lends to no builtin")
def test_threads_that_serve_are_no_others(device):
    """A wrapped tensor is lent beside them as where there are none; by none of them itself."""
    if device == "cuda":
        pytest.skip("no kernel takes part")
    done = subprocess.run([sys.executable, "-c", SERVING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# --- backward -----------------------------------------------------------------------------------

SHARED_GRAPH = """
import sys
import threading

import torch

import autofuse
config = autofuse.config
config.measure, config.always_fuse, config.compile = False, True, "now"
x = torch.linspace(0.5, 2, 64, device=sys.argv[1]).requires_grad_()
y = autofuse.unwrap(((w := autofuse.wrap(x)) * 2.0 + 1.0).abs() * w)
gradients = [torch.full_like(x, float(k)) for k in range(4)]
want = [torch.autograd.grad(y, x, g, retain_graph=True)[0].clone() for g in gradients]
assert autofuse.stats().kernels_launched >= 2
wrong = []


def body(k):
    for _ in range(600):
        (got,) = torch.autograd.grad(y, x, gradients[k], retain_graph=True)
        if not torch.equal(got, want[k]):
            wrong.append(k)


sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=body, args=(k,)) for k in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
"""


def test_threads_that_differentiate_one_graph(device):
    """Each launches the same kernel, of whose parameters there are one."""
    command = [sys.executable, "-c", SHARED_GRAPH, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
