"""Ops in place on memory that its tensor alone holds: recorded, and written by the kernel."""

import _thread
import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import operator
import os
import queue
import random
import selectors
import signal
import socket
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_interrupts import PLACES, Place
from test_middle import Middle

import autofuse
from autofuse import inside, sole
from autofuse.chain import state
from autofuse.record import flush as flushing
from autofuse.record import modes, ways
from autofuse.torch_private import NoModes, address_of
from support import (
    DEVICES,
    assert_same,
    elsewhere,
    failable_launches,
    functions_called,
    needs_cuda,
    write_unseen,
)

W = autofuse.wrap
pytestmark = [pytest.mark.usefixtures("always", "alone")]
device_param = pytest.mark.parametrize("device", DEVICES)
SEED = int(os.environ.get("AUTOFUSE_TEST_SEED", "0"))


def is_sole(x):
    with NoModes():
        reach = sole.reach_of(x, x.nbytes, sole.frees(x.device))
    return reach is not None and reach.is_sole()


def place_of(x):
    """The address of the memory of `x`, which it does not tell `x` that anybody knows."""
    with NoModes():
        return address_of(autofuse.materialize(x))


# what else reaches the memory of a tensor, held while it is looked at; then whether it goes again
OTHERS = {
    "nothing": (lambda x: None, True),
    "another name": (lambda x: [x, x], None),
    "a view": (lambda x: x[1:], False),
    "detach": (lambda x: x.detach(), False),
    "data": (lambda x: x.data, False),
    "an alias of ours": (autofuse.wrap, False),
    "a graph": (lambda x: x * torch.ones(4, device=x.device, requires_grad=True), False),
    "its storage": (lambda x: x.untyped_storage(), False),
    "an iterator": (lambda x: list(x.unbind()), False),
}


@device_param
@pytest.mark.parametrize("name", OTHERS)
def test_who_reaches_a_tensor(name, device):
    x = torch.ones(4, device=device)
    assert is_sole(x)
    other = OTHERS[name][0](x)
    assert is_sole(x) == (OTHERS[name][1] is not False), other
    del other
    assert is_sole(x) == (name != "its storage")  # by which its address may be known


def test_memory_that_is_not_torchs_own():
    assert not is_sole(torch.from_numpy(np.zeros(4)))
    assert not is_sole(torch.frombuffer(bytearray(16), dtype=torch.float32))
    assert not is_sole(torch.zeros(4).share_memory_())
    x = torch.zeros(4)
    x.numpy()
    assert is_sole(x)
    x.resize_(2)
    assert not is_sole(x)  # it may be made larger again
    assert not is_sole(torch.zeros(4, requires_grad=True))
    with torch.inference_mode():
        y = W(torch.zeros(4)) * 1.0
        y += 1.0
    assert y.tolist() == [1.0] * 4


@device_param
def test_who_has_asked_for_the_address_sees_each_write_at_once(on, device):
    x = W(torch.ones(4, device=device))
    if device == "cpu":
        seen = (ctypes.c_float * 4).from_address(x.data_ptr())
    else:
        x.data_ptr()
    for k in range(3):
        x += 1.0
        assert not autofuse.is_pending(x)
        if device == "cpu":
            assert list(seen) == [k + 2.0] * 4


def adam(p, g, m, v):
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)
    return p


@device_param
@pytest.mark.parametrize("shapes", [[(64, 6)], [(64, 6), (6,), (6, 6)]], ids=["one", "three"])
@pytest.mark.parametrize("leaves", [False, True])
def test_an_optimizer_by_hand_is_a_kernel_for_each_shape(on, shapes, leaves, device):
    """In memory that stays where it is; Parameters are written once all that they need is known."""
    made = [[torch.rand(shape, device=device) for _ in range(4)] for shape in shapes]
    plain = [[x.clone() for x in xs] for xs in made]
    wrapped = [[W(x.clone()) for x in xs] for xs in made]
    if leaves:
        for xs in wrapped:
            xs[0] = torch.nn.Parameter(autofuse.unwrap(xs[0]))
    places = [[place_of(x) for x in xs] for xs in wrapped]
    with torch.no_grad():
        for step in range(4):
            autofuse.reset_stats()
            for xs in wrapped:
                adam(*xs)
            pending = [autofuse.is_pending(x) for xs in wrapped for x in (xs[2], xs[3])]
            for xs in wrapped:
                autofuse.materialize(xs)
            assert autofuse.stats().kernels_launched == len(shapes), step
            assert any(pending) != leaves
            for xs in plain:
                adam(*xs)
    for xs, ys, at in zip(wrapped, plain, places, strict=True):
        assert [place_of(x) for x in xs] == at
        for x, y in zip(xs, ys, strict=True):
            assert_same(x.detach(), y, 1e-6 if device == "cpu" else None)
            assert x._version == y._version


@needs_cuda
@pytest.mark.cuda
def test_nothing_is_allocated_for_it(on):
    xs = [W(torch.rand(64, 6, device="cuda")) for _ in range(4)]
    for _ in range(4):
        autofuse.materialize(adam(*xs))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(4):
        autofuse.materialize(adam(*xs))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# what comes before and after an op in place on `x`, and of which kernels it is
AROUND = {
    "a value of what was there": (lambda x, y: (x * 2.0, x.add_(y)), 1),
    "read after": (lambda x, y: (x.add_(y), x * y), 1),
    "of itself": (lambda x, y: (x.addcmul_(x, x), x.mul_(x)), 1),
    "of what comes of it": (lambda x, y: (x.sub_(torch.relu(x * y) * 0.5),), 1),
    "two of one shape": (lambda x, y: (x.add_(1.0), y.mul_(x)), 1),
    "what was there, turned": (lambda x, y: (x.t() * 2.0, x.add_(y)), None),
    "what was there, in a slice": (lambda x, y: ((x * 2.0)[1:] + 1.0, x.add_(y)), None),
    "what was there, rolled": (lambda x, y: (x.add_(torch.roll(x, 1, 1)),), None),
    "what was there, its sum": (lambda x, y: (x.div_(x.sum(-1, True)),), None),
    "what was there, in a row": (lambda x, y: (x[0] * 2.0, x.mul_(2.0), y + x), None),
    "a view of it": (lambda x, y: (x.add_(y)[1:] * 2.0, x), None),
    "a view that is written": (lambda x, y: (x.add_(y), x[0].mul_(3.0), x), None),
    "an item": (lambda x, y: (x.add_(y), x.__setitem__(0, x[1]), x), None),
    "its softmax": (lambda x, y: (x.add_(y), torch.softmax(x, -1), x.mul_(2.0)), None),
    "side by side": (lambda x, y: (torch.cat([x.add_(y), y * 2.0]), x), None),
    "copied into": (lambda x, y: (x.mul_(y), x.copy_(y + 1.0), x.add_(x)), None),
    "cleared": (lambda x, y: (x.mul_(y), x.zero_(), x.add_(y)), None),
    "out=": (lambda x, y: (x.mul_(y), torch.add(x, y, out=x), x.mul_(2.0)), None),
    "another dtype": (lambda x, y: (x.add_(y > 0), x.gt_(y), x.mul_(2)), None),
    "its shape": (lambda x, y: (x.add_(y).t_(), x.mul_(2.0), x.unsqueeze_(0)), None),
    "detached": (lambda x, y: (x.add_(y).detach(), x.mul_(2.0), x), None),
    "by functions": (lambda x, y: (torch.relu_(x), F.elu(x, inplace=True), F.relu(y, True)), 1),
    "with a mask": (lambda x, y: (x.masked_fill_(y > 0, 0.5), x.clamp_(-1.0, 1.0)), 1),
}


@device_param
@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_it(name, on, device):
    program, kernels = AROUND[name]
    for k in range(3):
        plain = [torch.randn(4, 6, device=device) for _ in "xy"]
        x, y = (W(t.clone()) for t in plain)
        autofuse.reset_stats()
        got = program(x, y)
        autofuse.materialize(got), autofuse.materialize((x, y))
        launched = autofuse.stats().kernels_launched
        want = program(*plain)
        assert_same([*got, x, y], [*want, *plain], 1e-6 if device == "cpu" else None)
        assert [x._version, y._version] == [t._version for t in plain]
        assert kernels is None or launched == kernels, k


@device_param
def test_memory_of_a_tensor_that_is_gone_is_not_written(device):
    x = W(torch.ones(4, 6, device=device))
    y = x.add_(1.0) * 2.0
    del x
    autofuse.reset_stats()
    autofuse.materialize(y)
    assert autofuse.stats().live_outs_stored == 1
    assert y.sum() == 96.0


@device_param
def test_arguments_of_fused_calls(on, device):
    """They are updated in place, and plain and where they were when the call ends, however."""

    @autofuse.fuse
    def step(x, v, force, fails=False):
        v += (force - x) * 0.5
        v *= 0.25
        x += v
        if fails:
            raise LookupError
        return x * 2.0

    plain = [torch.rand(4, 6, device=device) for _ in range(3)]
    ours = [x.clone() for x in plain]
    places = list(map(place_of, ours))
    with torch.no_grad():
        for k in range(6):
            autofuse.reset_stats()
            with pytest.raises(LookupError) if k == 4 else contextlib.nullcontext():
                got = step(*ours, fails=k == 4)
            # of what is lent others may be in the middle, in C
            assert autofuse.stats().kernels_launched == 1 or not inside.others_wait()
            plain[1].add_((plain[2] - plain[0]) * 0.5).mul_(0.25)
            plain[0].add_(plain[1])
            assert_same([*ours, got], [*plain, plain[0] * 2.0] if k != 4 else [*plain, got], 1e-6)
            assert all(type(x) is torch.Tensor and "_af" not in vars(x) for x in ours)
            assert list(map(place_of, ours)) == places
            assert [x._version for x in ours] == [x._version for x in plain]


def waits_for_an_event(over):
    over.wait()


def waits_for_a_queue(over):
    items = queue.Queue()
    threading.Thread(target=lambda: (over.wait(), items.put(None))).start()
    items.get()


def waits_for_a_thread(over):
    other = threading.Thread(target=over.wait)
    other.start()
    other.join()


def waits_for_a_socket(over):
    with contextlib.ExitStack() as stack:
        here, there = map(stack.enter_context, socket.socketpair())
        threading.Thread(target=lambda: (over.wait(), there.send(b"x"))).start()
        with selectors.DefaultSelector() as selector:
            selector.register(here, selectors.EVENT_READ)
            selector.select()


def waits_for_a_pipe(over):
    here, there = multiprocessing.Pipe()
    threading.Thread(target=lambda: (over.wait(), there.send(1))).start()
    here.recv()


def waits_for_work(over, initializer=None):
    with concurrent.futures.ThreadPoolExecutor(1, initializer=initializer) as pool:
        pool.submit(int).result()
        over.wait()


def may_begin_with_what_it_was_given(over):
    waits_for_work(over, int)


def sleeps(over):  # as something that it calls might, with a tensor
    while not over.is_set():
        time.sleep(0.01)


WAITS = {f.__name__: f for f in (waits_for_an_event, waits_for_a_queue, waits_for_a_thread,
                                 waits_for_a_socket, waits_for_a_pipe, waits_for_work)}  # fmt: skip
USES = {f.__name__: f for f in (sleeps, may_begin_with_what_it_was_given)}


def let_them_wait():
    """Wait until no other thread goes on."""
    before, now = {}, None
    while now != before:
        time.sleep(0.05)
        frames = sys._current_frames()
        before, now = now, {k: (frame.f_code, frame.f_lasti) for k, frame in frames.items()}


@pytest.mark.parametrize("module", inside._WAITS)
def test_where_threads_are_known_to_wait(module):
    """These functions are there, some in some versions of Python or torch alone."""
    found = pytest.importorskip(module, reason=f"this torch has no {module}")
    for path in inside._WAITS[module]:
        with contextlib.suppress(AttributeError):
            assert operator.attrgetter(path)(found).__code__
            return
    pytest.fail(f"none of {inside._WAITS[module]}")


@pytest.mark.parametrize("name", WAITS | USES)
def test_arguments_of_fused_calls_beside_threads_that_wait(on, name, monkeypatch):
    """They are updated in place as where there are none; not beside one that may use them."""
    own, real = threading.get_ident(), sys._current_frames
    others = {*inside.threads, *real()} - {own}  # of those who run these tests
    for ident in others & {*inside.threads}:
        monkeypatch.setitem(inside.serving, ident, True)
    monkeypatch.setattr(
        sys, "_current_frames",
        lambda: {k: frame for k, frame in real().items() if k not in others},
    )  # fmt: skip

    @autofuse.fuse
    def step(x, v):
        v += x * 0.5
        x += v

    over = threading.Event()
    thread = threading.Thread(target=(WAITS | USES)[name], args=(over,))
    thread.start()
    try:
        let_them_wait()
        for _ in range(4):
            x, v = torch.ones(4), torch.ones(4)
            autofuse.reset_stats()
            step(x, v)
            assert v.tolist() == [1.5] * 4 and x.tolist() == [2.5] * 4
        assert inside.others_waited.keys() == {own}
        assert inside.others_waited[own] == (name in WAITS)
        stats = autofuse.stats()
        assert stats.kernels_launched == 1 and (stats.ops_eager == 0) == (name in WAITS)
    finally:
        over.set()
        thread.join()


def test_arguments_of_fused_calls_beside_a_thread_without_a_name(on):
    """Nor is the one that it is."""

    @autofuse.fuse
    def step(x, v):
        v += x * 0.5
        x += v

    over, begun, done = threading.Event(), threading.Event(), []

    def others_use():
        begun.set()
        while not over.is_set():
            time.sleep(0.01)
        done.append(True)

    def run():
        try:
            for _ in range(4):
                autofuse.reset_stats()
                step(torch.ones(4), torch.ones(4))
                assert autofuse.stats().ops_eager > 0
        except BaseException as error:
            done.append(error)
        done.append(False)

    _thread.start_new_thread(others_use, ())
    assert begun.wait(20.0)
    run()
    _thread.start_new_thread(run, ())
    while len(done) < 2:
        time.sleep(0.01)
    over.set()
    while len(done) < 3:
        time.sleep(0.01)
    assert done == [False, False, True]


def test_a_thread_that_waits_for_torchs_c_may_use_what_is_lent(on):
    """It has the tensor in hand, as a plain one: what it was told to call waits."""

    class Index:
        def __index__(self):
            begun.set()
            assert over.wait(20.0)
            return 4

    @autofuse.fuse
    def step(x):
        x.mul_(2.0)
        over.set()
        thread.join()
        x.add_(1.0)

    for call in (
        lambda x: threading.Thread(target=lambda: views.append(x.view(2, Index()))),
        lambda x: threading.Thread(target=lambda: views.append(x.narrow(0, 0, Index()))),
        lambda x: threading.Thread(target=x.expand, args=(Index(), 8)),
        lambda x: threading.Thread(target=functools.partial(x.view, 2, Index())),
    ):
        x, views = torch.ones(8), []
        begun, over = threading.Event(), threading.Event()
        thread = call(x)
        thread.start()
        assert begun.wait(20.0)
        step(x)
        assert type(x) is torch.Tensor and "_af" not in vars(x) and x._version == 2
        assert all(view._version == 2 and view.flatten()[0] == 3.0 for view in views)


def test_a_thread_that_c_has_begun_may_use_what_is_lent(on):
    """Python does not count it among its own."""
    begun, over = threading.Event(), threading.Event()

    def use(_):
        begun.set()
        while not over.is_set():
            time.sleep(0.01)

    @autofuse.fuse
    def step(x):
        x.mul_(2.0)

    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(use)
    thread, libc = ctypes.c_ulong(), ctypes.CDLL(None)
    assert libc.pthread_create(ctypes.byref(thread), None, call, None) == 0
    try:
        assert begun.wait(20.0)
        for _ in range(4):
            autofuse.reset_stats()
            step(torch.ones(4))
            assert autofuse.stats().ops_eager > 0
    finally:
        over.set()
        libc.pthread_join(thread, None)


def _is_left_wrapped(x):
    return type(x) is not torch.Tensor or "_af" in vars(x)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_arguments_are_plain_after_an_interrupt_of_the_last_flush(on):
    """Whatever a signal handler raises there, at any time."""

    @autofuse.fuse
    def step(x, v):
        v *= 0.5
        x += v
        return x * 2.0

    due = False

    def handler(*_):
        if due:  # one signal in 100,000 comes after the timer has been stopped
            raise KeyboardInterrupt

    step(torch.ones(4, 6), torch.ones(4, 6))
    before = signal.signal(signal.SIGALRM, handler)
    interrupted = 0
    try:
        for k in range(4000):
            x, v = torch.ones(4, 6), torch.ones(4, 6)
            try:
                try:
                    due = True
                    signal.setitimer(signal.ITIMER_REAL, 2e-6 * (1 + k % 150))
                    step(x, v)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    due = False
            except KeyboardInterrupt:
                interrupted += 1
                due = False
            assert not _is_left_wrapped(x) and not _is_left_wrapped(v)
            assert v[0, 0] in (0.5, 1.0) and x[0, 0] in (1.0, 1.5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100


def test_what_another_call_has_pending_is_left_to_it(on):
    """It was lent twice."""

    @autofuse.fuse
    def step(x):
        x.mul_(2.0)
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
        x.add_(1.0)

    @autofuse.fuse
    def other(x):
        return None

    for _ in range(3):
        x = torch.ones(4)
        autofuse.reset_stats()
        step(x)
        assert not _is_left_wrapped(x) and x.tolist() == [3.0] * 4
        assert sum(autofuse.stats().flushes.values()) <= 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_arguments_are_plain_after_what_hooks_raise_in_the_last_flush(on, kind):
    """Each time that they are called."""

    def pack(x):
        raise kind

    @autofuse.fuse
    def step(x, w):
        x += 1.0
        y = torch.sigmoid(w * 2.0)
        x *= 3.0
        return y * w

    for _ in range(3):
        x, w = torch.ones(4), torch.ones(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), pytest.raises(kind):
            step(x, w)
        assert not _is_left_wrapped(x) and x.tolist() == [2.0] * 4  # as eager leaves it


def test_arguments_are_plain_after_a_flush_that_had_no_room_on_the_stack(on):
    """But where there is none for making them so."""

    @autofuse.fuse
    def step(x):
        x.add_(1.0)
        return torch.relu(x) * 2.0

    def dive(k, x):
        return step(x) if k == 0 else dive(k - 1, x)

    step(torch.ones(4))
    here, frame = 0, sys._getframe()
    while frame is not None:
        here, frame = here + 1, frame.f_back
    limit, left = sys.getrecursionlimit(), []
    for depth in range(20, 120):
        x = torch.ones(4)
        with contextlib.suppress(RecursionError):
            try:
                sys.setrecursionlimit(here + 130)
                dive(depth, x)
            finally:
                sys.setrecursionlimit(limit)
        left += [depth] if _is_left_wrapped(x) else []
    assert len(left) < 4, left


def test_what_was_plain_for_a_while_is_looked_at_again(on):
    """Whoever waited may have begun something with it meanwhile."""
    seen = []

    @autofuse.fuse
    def step(x):
        x += x * 2.0
        seen.append(len(inside.others_waited))
        repr(x)
        seen.append(len(inside.others_waited))

    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        step(torch.ones(4))
    finally:
        over.set()
        thread.join()
    assert seen == [1, 0]


def test_what_another_thread_shows_when_its_lender_ends(on, monkeypatch):
    """It is plain, as it is for who shows it; and lent again where it is by then."""
    shows, ended = threading.Event(), threading.Event()
    show = torch._tensor_str._str

    def slow(*args, **kwargs):
        shows.set()
        assert ended.wait(20.0)
        return show(*args, **kwargs)

    monkeypatch.setattr(torch._tensor_str, "_str", slow)
    said, x = [], torch.ones(4)
    thread = threading.Thread(target=lambda: said.append(repr(x)))

    @autofuse.fuse
    def begin(x):
        if not thread.ident:
            thread.start()
            assert shows.wait(20.0)
        return x * 2.0

    assert type(begin(x)) is torch.Tensor
    ended.set()
    thread.join()
    assert said == ["tensor([1., 1., 1., 1.])"] and type(x) is torch.Tensor
    assert "_af" not in vars(x) and type(begin(x)) is torch.Tensor


def test_what_is_lent_later_is_looked_at_again(on):
    """Whoever waited may have begun something with it since."""
    seen = []

    @autofuse.fuse
    def step(x):
        seen.append(len(inside.others_waited))
        x += x * 2.0
        seen.append(len(inside.others_waited))

    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        for _ in range(3):
            step(torch.ones(4))
    finally:
        over.set()
        thread.join()
    assert seen[::2] == [0] * 3 and min(seen[1::2]) > 0


@device_param
def test_an_input_that_somebody_has_changed(on, device):
    """The op is as one that has raised: its tensor is what it was."""
    for _ in range(3):
        x, y = torch.ones(4, device=device), W(torch.zeros(4, device=device))
        with torch.no_grad():
            y.add_(W(x)).mul_(2.0)
            write_unseen(x)
            with pytest.raises(autofuse.StaleInputError):
                y.tolist()
        assert y.tolist() == [0.0] * 4 and y._version == 0
        assert (y + 1.0).tolist() == [1.0] * 4


@pytest.mark.parametrize("fails", [1, 2])
def test_a_launch_that_fails(on, fails, monkeypatch):
    """The first is repeated by eager ops; after it, what has been written cannot be."""
    calls, failing = failable_launches(monkeypatch)
    for k in range(5):
        x, y = W(torch.ones(4, 6)), W(torch.ones(6))
        failing |= {fails} if k == 4 else set()
        y.mul_(2.0)
        x.add_(y)
        calls.clear()
        if k == 4 and fails == 2:
            with pytest.raises(autofuse.AutofuseError):
                autofuse.materialize((x, y))
            assert not autofuse.is_pending(x) and not autofuse.is_pending(y)
            x.fill_(0.0)
            assert (x + y).shape == (4, 6)  # the thread goes on, and they have their memory
        else:
            assert x.tolist() == [[3.0] * 6] * 4 and y.tolist() == [2.0] * 6
            assert x._version == y._version == 1


@needs_cuda
@pytest.mark.cuda
def test_a_cuda_graph_reads_what_was_written_before_its_replay():
    x, out = W(torch.zeros(64, device="cuda")), torch.zeros(64, device="cuda")
    memory = autofuse.unwrap(x)
    with torch.no_grad():
        torch.mul(memory, 2.0, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(memory, 2.0, out=out)
        del memory
        for k in range(4):
            x.add_(1.0)
            graph.replay()
            assert out.tolist() == [2.0 * (k + 1)] * 64


def test_chains_of_other_threads_that_read_it():
    """They are flushed before, or the op is not recorded."""
    x = W(torch.ones(8))
    got, kept = [], []

    def read():
        kept.append(x * 3.0)  # pending in a thread that is gone

    assert elsewhere(read) is None
    x.add_(1.0)
    got.append(kept[0].tolist())
    assert got == [[3.0] * 8] and x.tolist() == [2.0] * 8
    assert elsewhere(lambda: got.append((x * 1.0).tolist())) is None
    x.mul_(2.0)
    assert elsewhere(lambda: got.append((x * 1.0).tolist())) is None
    assert got[1:] == [[2.0] * 8, [4.0] * 8]


ACTIONS = {
    "flush": lambda x, seen: flushing.flush_all("test"),
    "read": lambda x, seen: seen.append((x * 1.0).tolist()[0]),
    "hold": lambda x, seen: seen.append(x * 1.0),
    "update": lambda x, seen: x.add_(100.0),
    "collect": lambda x, seen: gc.collect(),
    "forget": lambda x, seen: modes.forget_all("test"),
}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("known", [False, True])
def test_what_runs_in_the_middle(name, known, monkeypatch):
    """Each of many places: what is read there is a value between two ops, and nothing is lost."""
    monkeypatch.setattr(autofuse.config, "native", False)  # which has no places
    values = {1.0, 3.0, 6.0, 6.5}
    values |= {v + 100 * f for v in values for f in (0.0, 1.0, 2.0)}  # written to before, or after

    def program(x):
        y = x * 0.0
        x.add_(2.0)
        x.mul_(2.0)
        x += y + 0.5
        return autofuse.materialize(x)

    step = 2 * PLACES
    done, count = 0, [*ACTIONS].index(name) % step + 1 - step  # others for each action
    while not done:
        count += step
        if not known:
            modes.forget_all("test")
        x, seen = W(torch.ones(32)), []
        with (
            torch.no_grad(),
            Middle(count, lambda x=x, seen=seen: ACTIONS[name](x, seen)) as middle,
        ):
            program(x)
        done = middle.left > 0
        held = [v if isinstance(v, float) else v.tolist()[0] for v in seen]
        assert set(held) <= values, (count, held)
        last = x.tolist()
        if name == "update" and not done:
            assert last[0] in (106.5, 206.5), (count, last[0])
        else:
            assert last == [6.5] * 32, (count, last[0])
        assert x._version == 3 + (name == "update" and not done), count
    assert count > 50


def test_what_is_found_concrete_stays_so(on):
    """Whatever a signal handler does to it before C looks; no write and no version is lost."""
    x, updates, over = W(torch.zeros(64)), 0, False

    def update(*_):
        nonlocal updates
        if over:
            return
        x.add_(1.0)
        updates += 1
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-4))

    reads = [x.tolist, x.sum, x.clone, lambda: x[3].item(), lambda: x[None] @ x[:, None]]
    before = signal.signal(signal.SIGALRM, update)
    try:
        update()
        for k in range(2000):
            reads[k % len(reads)]()
            x.mul_(1.0)
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert updates > 20 and x.tolist() == [float(updates)] * 64
    assert x._version == updates + 2000


class Every(Place):
    """Call `action` at the `start`-th place, and from there on at every `step`-th, 30 times: who
    is interrupted begins anew, inside of what was interrupted."""

    def __init__(self, start, step, action):
        super().__init__(start)
        self.step, self.action, self.done = step, action, 0

    def act(self):
        self.action()
        self.done += 1
        self.left = self.step
        if self.done < 30:
            self.begin()


@pytest.mark.parametrize("step", [3, 5, 9, 15])
@pytest.mark.parametrize("known", [False, True])
def test_writes_at_many_places_of_one_flush(on, known, step):
    """Of two one after the other one is to the value, one to the memory that takes it."""
    for start in range(1, 60, 4):
        if not known:
            modes.forget_all("test")
        x = W(torch.zeros(64))
        with Every(start, step, lambda x=x: x.add_(1.0)) as many:
            x.mul_(1.0)
            held = x.clone()
            x.sub_(0.0)
            autofuse.materialize(held)
        assert x.tolist() == [float(many.done)] * 64, start
        assert x._version == many.done + 2, start


def test_a_view_that_is_made_in_the_middle_of_a_flush(on, monkeypatch):
    """It shares the memory of its tensor then, as a write by it is one to that."""
    for write in (False, True):
        x, views, outputs_of = W(torch.arange(4.0)), [], ways.outputs_of

        def middle(*args, x=x, views=views, write=write, outputs_of=outputs_of):
            if not views:
                views.append(x.detach())
                if write:
                    x.add_(1.0)
            return outputs_of(*args)

        with monkeypatch.context() as patch:
            patch.setattr(ways, "outputs_of", middle)
            modes.forget_all("test")
            x.mul_(2.0)
            x.tolist()
        x.add_(100.0)
        assert views[0].tolist() == x.tolist() == [100.0 + 2 * k + write for k in range(4)]
        assert x._version == 2 + write


def test_another_thread_that_reads(on):
    """What it reads is a value between two ops; memory stays under whoever is in the middle."""
    for _ in range(200):
        x, seen = W(torch.zeros(8)), []
        reader = threading.Thread(target=lambda x=x, seen=seen: seen.append((x + 1.0).tolist()))
        reader.start()
        for _ in range(20):
            x.add_(1.0)
        reader.join()
        assert x.tolist() == [20.0] * 8 and x._version == 20
        assert len(seen) == 1 and {*seen[0]} <= {*map(float, range(1, 22))}


def test_an_argument_that_another_thread_reads_is_plain_again():
    @autofuse.fuse
    def update(x):
        x.mul_(2.0)
        x.add_(0.0)

    for _ in range(100):
        x = torch.eye(32)
        reader = threading.Thread(target=lambda x=x: x.cumsum(0).cumsum(0))
        reader.start()
        update(x)
        reader.join()
        assert x.__class__ is torch.Tensor and x.sum() == 64.0


@device_param
def test_what_requires_a_gradient_after_it(on, device):
    """It is another chain's, in grad mode; and its graph is eager's."""
    for _ in range(4):
        plain, w = torch.rand(4, 6, device=device), torch.rand(6, device=device)
        x, p, q = W(plain.clone()), w.clone().requires_grad_(), w.clone().requires_grad_()
        got, want = [], []
        for t, leaf, found in ((x, p, got), (plain, q, want)):
            y = t * 2.0
            t.mul_(0.5).add_(y)
            z = torch.tanh(t * leaf)[1:] + y[1:]
            z.sum().backward()
            found += [y, t, z.detach(), leaf.grad]
        assert_same(got, want, 1e-5 if device == "cpu" else None)
        assert x._version == plain._version == 2


def test_threads_that_have_ended_are_none():
    before = len(inside.threads)
    assert inside.in_another_thread(lambda: threading.current_thread().name).startswith("Dummy")
    assert len(inside.threads) == before


def test_attributes_of_the_users_stay_on_no_shell(on):
    class Owner:
        pass

    x = W(torch.ones(4))
    x.owner = Owner()
    gone = weakref.ref(x.owner)
    x.mul_(2.0)
    y = x + 1.0
    del x
    assert y.tolist() == [3.0] * 4
    gc.collect()
    assert gone() is None


@device_param
def test_no_reference_is_kept(on, device):
    x = W(torch.ones(64, 64, device=device))

    def step():
        x.mul_(0.5)
        y = x.add_(1.0) * 2.0
        autofuse.materialize((x, y))

    for _ in range(5):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        step()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert len(state.this_thread.current.chain) == 0 and is_sole(x)


# --- random programs ------------------------------------------------------------------------------

UPDATES = [
    lambda x, a, b: x.add_(a), lambda x, a, b: x.mul_(a), lambda x, a, b: x.mul_(0.5),
    lambda x, a, b: x.addcmul_(a, b, value=0.25), lambda x, a, b: x.sub_(a, alpha=2),
    lambda x, a, b: x.clamp_(-3, 3), lambda x, a, b: x.neg_(), lambda x, a, b: x.lerp_(a, 0.25),
    lambda x, a, b: x.abs_(), lambda x, a, b: x.masked_fill_(a > 0, 0.5),
    lambda x, a, b: x.__iadd__(a), lambda x, a, b: x.__imul__(0.75), lambda x, a, b: x.zero_(),
    lambda x, a, b: x.gt_(a), lambda x, a, b: torch.relu_(x), lambda x, a, b: F.relu(x, True),
    lambda x, a, b: x.copy_(a), lambda x, a, b: x.fill_(1.5), lambda x, a, b: x.add_(x),
    lambda x, a, b: x.mul_(x).add_(a), lambda x, a, b: torch.add(x, a, out=x),
]  # fmt: skip
RESULTS = [
    lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b * 2, torch.maximum,
    lambda a, b: a.abs() + 1, lambda a, b: torch.where(a > b, a, b), lambda a, b: a * 0.5,
]  # fmt: skip
VIEWS = [
    lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 0], lambda x: x.reshape(-1),
    lambda x: x.unsqueeze(0), lambda x: x.detach(),
]  # fmt: skip
READS = [
    lambda x: x.sum(-1), lambda x: torch.softmax(x, -1) * 2, lambda x: torch.cat([x, x * 2]),
    lambda x: torch.roll(x, 1, -1) + x, lambda x: x.clone(),
]  # fmt: skip


def fits(x, a):
    """Whether `a` can be an operand of what is written to `x`."""
    try:
        return torch.broadcast_shapes(x.shape, a.shape) == x.shape
    except RuntimeError:
        return False


def run(seed, wrap, device):
    """A random program; every second tensor that it begins with is seen by another, too."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 6), (4, 6), (6,), (4, 1), (1,), (4, 6)]
    made = [torch.randint(-8, 9, s, generator=generator).float().div(4) for s in shapes]
    made = [x.to(device) for x in made]
    shared, xs, seen = made[::2], list(map(wrap, made)), []
    leaf = made[2].clone().requires_grad_()
    del made
    for _ in range(rng.randint(2, 14)):
        x, kind = rng.choice(xs), rng.random()
        a, b = (rng.choice([y for y in xs if fits(x, y)]) for _ in "ab")
        if kind < 0.45:
            rng.choice(UPDATES)(x, a, b)
        elif kind < 0.65:
            xs.append(rng.choice(RESULTS)(x, a))
        elif kind < 0.72 and x.dim() == 2:
            xs.append(rng.choice(VIEWS)(x))
        elif kind < 0.80 and x.dim() == 2:
            seen.append(rng.choice(READS)(x))
        elif kind < 0.85:
            seen.append(x._version)
        elif kind < 0.90 and len(xs) > 2:
            del xs[next(k for k, y in enumerate(xs) if y is x)]
        elif kind < 0.93:
            seen.append(x.tolist())
        elif kind < 0.97 and x.shape[-1] == 6:
            seen.append(torch.tanh(x * leaf) * leaf)
        elif x.dim() == 2 and x.shape[0] > 1:
            x[0] = x[1] * 2
    graded = [x.sum() for x in seen if isinstance(x, torch.Tensor) and x.requires_grad]
    if graded:  # an error where what is saved was written since
        sum(graded).backward()
        seen.append(leaf.grad)
    tensors = [x for x in [*xs, *seen, *shared] if isinstance(x, torch.Tensor)]
    versions = [x._version for x in tensors]
    return tensors, versions, [x for x in seen if not isinstance(x, torch.Tensor)]


@device_param
@pytest.mark.parametrize("part", range(4))
def test_random_programs(part, on, device):
    for k in range(60 if device == "cpu" else 25):
        seed = 1000 * SEED + 250 * part + k
        try:
            want = run(seed, lambda x: x, device)
        except (RuntimeError, ValueError) as error:  # such as of a view that cannot be written to
            with pytest.raises(type(error)):
                run(seed, W, device)
            continue
        for _ in range(2):
            tensors, versions, others = run(seed, W, device)
            assert_same(tensors, want[0], 1e-6 if device == "cpu" else None, f"seed {seed}")
            assert versions == want[1] and others == want[2], seed


# what comes right after an op in place, which ends its chain or reads a tensor in memory
AFTER = {
    "a slice": lambda x: x[1:] * 2.0, "an element": lambda x: x[0], "chunks": lambda x: x.chunk(2),
    "transposed": lambda x: x.t(), "a name": lambda x: x.T, "unsqueeze": lambda x: x.unsqueeze(0),
    "view": lambda x: x.view(-1) + 1.0, "a sum": lambda x: x.sum(), "a product": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, x]), "zeros_like": torch.zeros_like,
    "clone": lambda x: x.clone(), "a softmax": lambda x: torch.softmax(x, -1),
    "item": lambda x: x[0, 0].item(), "a shape": lambda x: x.shape,
    "another op in place": lambda x: x.add_(1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_what_follows_an_op_in_place_runs_no_python(name, on):
    """In a loop of a solver, once it is known; a view took 8 us by Python."""
    if not on:
        pytest.skip("there is machine code for this")
    x, want = W(torch.ones(4, 4)), torch.ones(4, 4)
    for _ in range(5):
        x *= 0.5
        autofuse.materialize(AFTER[name](x))
        want *= 0.5
        AFTER[name](want)
    x *= 0.5
    want *= 0.5
    assert autofuse.is_pending(x)
    called = functions_called(lambda: AFTER[name](x))
    assert not {"call", "record", "record_view", "run_eager", "handler"} & {*called}, called
    AFTER[name](want)
    assert_same(autofuse.unwrap(autofuse.materialize(x)), want, None)
