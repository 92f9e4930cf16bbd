"""Who waits for whom: never for ever, and not at all in the middle of what another waits for."""

import gc
import queue
import signal
import threading
import time
import weakref

import pytest
import torch
from test_interrupts import Interrupted
from test_middle import Middle

import autofuse
from autofuse import inside, lending
from autofuse.chain import state
from autofuse.kernel import llvm
from autofuse.record import flush as flushing
from autofuse.record.modes import forget_all
from autofuse.supply import build
from autofuse.supply import kernels as compiling
from autofuse.supply.load import Kernel
from support import kernels_made

LONG = 60.0


class Foreign(Exception):
    """What a signal handler raises."""


class Held:
    """A compiler that stays in the middle of the next kernel until it is let go."""

    def __init__(self, monkeypatch):
        self.entered, self.leave = threading.Event(), threading.Event()
        self.real, self.first = build.compile_object, True
        monkeypatch.setattr(build, "compile_object", self.compile)

    def compile(self, source):
        if self.first:
            self.first = False
            self.entered.set()
            assert self.leave.wait(LONG)
        return self.real(source)


@pytest.fixture
def held(monkeypatch, tmp_path):
    """Such a compiler, and no kernels, in memory or on disk."""
    with monkeypatch.context() as patch:
        patch.setenv("AUTOFUSE_CACHE_DIR", str(tmp_path))
        compiling.clear_kernels()
        forget_all("test")
        compiler = Held(patch)
        yield compiler
        compiler.leave.set()
    compiling.clear_kernels()


def started(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


def test_a_kernel_that_another_thread_compiles_for_long(held, monkeypatch):
    """Its chain runs as eager ops, and asks again."""
    monkeypatch.setattr(compiling, "_WAIT_SECONDS", 0.05)
    x = torch.rand(8)
    w = autofuse.wrap(x)
    thread = started(lambda: (autofuse.wrap(x.clone()) * 2.5 + 1.25).atan().tolist())
    assert held.entered.wait(LONG)
    before = kernels_made()
    for _ in range(2):
        assert (w * 3.5 - 1.75).tolist() == (x * 3.5 - 1.75).tolist()
    assert kernels_made() == before and autofuse.stats().eager_flushes == 2
    held.leave.set()
    thread.join()
    before = kernels_made()
    (w * 3.5 - 1.75).tolist()
    assert kernels_made() == before + 1


class Reads(torch.autograd.Function):
    """Whose backward reads what another thread is computing."""

    @staticmethod
    def forward(ctx, x, read):
        ctx.read = read
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.read()
        return gradient, None


def test_a_backward_waits_for_nobody(held):
    """On CUDA it is another thread's than the caller's, who may be in the middle of anything."""
    x = torch.rand(8)
    shared = []

    def compute():
        shared.append((autofuse.wrap(x.clone()) * 2.125 + 1.25).sqrt())
        shared[0].tolist()

    thread = started(compute)
    assert held.entered.wait(LONG)
    got = []

    def read():
        began = time.monotonic()
        got.append((shared[0].tolist(), time.monotonic() - began))

    Reads.apply(x.clone().requires_grad_(), read).sum().backward()
    ((values, seconds),) = got
    assert values == (x * 2.125 + 1.25).sqrt().tolist()
    assert seconds < flushing._WAIT_SECONDS / 2  # it does not wait at all
    held.leave.set()
    thread.join()


def test_a_handler_that_raises_interrupts_no_compiler(held):
    """llvmlite's lock would stay taken."""

    def handler(number, frame):
        raise Foreign

    x = torch.rand(8)
    y = (autofuse.wrap(x) * 2.375 + 1.25).tanh()
    before = signal.signal(signal.SIGUSR1, handler)
    here = threading.get_ident()
    threads = []
    real = held.real

    def compile(source):
        threads.append(threading.get_ident())
        return real(source)

    held.real = compile

    def interrupt():
        assert held.entered.wait(LONG)
        signal.pthread_kill(here, signal.SIGUSR1)

    thread = started(interrupt)
    try:
        with pytest.raises(Foreign):
            y.tolist()
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
    assert autofuse.is_pending(y)
    held.leave.set()
    assert torch.equal(torch.tensor(y.tolist()), autofuse.unwrap(y))
    assert torch.allclose(autofuse.unwrap(y), (x * 2.375 + 1.25).tanh())
    assert here not in threads and autofuse.stats().kernels_launched == 1


def test_what_waits_for_another_thread():
    assert inside.in_another_thread(lambda: 7) == 7
    assert inside.in_another_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        inside.in_another_thread(lambda: 1 // 0, LONG)
    leave = threading.Event()
    with pytest.raises(inside.BusyError, match="not done"):
        inside.in_another_thread(lambda: leave.wait(LONG), 0.01)
    leave.set()


def test_another_thread_ends_with_nothing_of_its_own():
    """Or what it has recorded goes while Python ends, where torch must not give the lock up."""
    gc.collect()  # of what came before
    before, known = len(state.all_recorders.refs), []

    def work():
        held.append(autofuse.wrap(torch.ones(4)) * 3.0)
        known.append(weakref.ref(state.recorder_for(torch.device("cpu"))))
        return len(state.all_recorders.refs)

    held = []
    assert inside.in_another_thread(work) == before + 1
    assert known[0]().ended and held.pop().tolist() == [3.0] * 4
    gc.collect()  # a Runner of CUDA's is in cycles, in which are nodes
    assert known[0]() is None
    held = [1.0]  # nothing is pending in this one
    assert inside.in_another_thread(lambda: (torch.ones(4), work(), held.pop())[1]) == before + 1
    gc.collect()
    assert len(state.all_recorders.refs) == before


def test_another_thread_waits_for_nobody():
    """Not for the locks of who waits for it: finalizers run there, which may need a kernel."""
    x = torch.rand(4)
    begun = time.monotonic()
    with compiling._lock:
        got = inside.in_another_thread(lambda: ((autofuse.wrap(x) * 1.75).tanh() - 0.625).tolist())
    assert time.monotonic() - begun < 2.0
    assert torch.allclose(torch.tensor(got), (x * 1.75).tanh() - 0.625)
    assert inside.in_another_thread(lambda: inside.patience(5.0)) == 0.0
    assert inside.patience(5.0) == 5.0


def test_an_interrupt_while_it_waits():
    """Ends the wait if that has an end, and comes after it if it has none."""
    done, go = [], threading.Event()

    def work():
        time.sleep(0.05)
        signal.pthread_kill(here, signal.SIGUSR1)
        go.wait(0.2 if seconds is None else LONG)
        done.append(True)

    def handler(number, frame):
        raise Foreign

    here, before = threading.get_ident(), signal.signal(signal.SIGUSR1, handler)
    try:
        for seconds in (None, LONG):
            done.clear()
            with pytest.raises(Foreign):
                inside.in_another_thread(work, seconds)
            assert bool(done) is (seconds is None)
    finally:
        go.set()
        signal.signal(signal.SIGUSR1, before)


def test_what_was_not_made_goes_without_an_error():
    kernel = Kernel.__new__(Kernel)
    del kernel


def test_libraries_go_with_the_next_one(held):
    held.leave.set()
    x = autofuse.wrap(torch.rand(8))
    autofuse.materialize((x * 2.625 + 1.25).sinh())
    (source,) = {kernel.source for kernel in compiling.kernels()}
    binary = build.compile_object(source)
    watches = []
    for _ in range(4):
        _, linked = llvm.link(binary, [source.name])
        watches.append(weakref.ref(linked.library))
    assert [watch() is None for watch in watches] == [True, True, False, False]
    del linked
    llvm.link(binary, [source.name])
    assert all(watch() is None for watch in watches)


# --- fused calls --------------------------------------------------------------------------------


def test_an_argument_that_another_fused_call_has_wrapped():
    """Of two arguments the first needs no look any more, the second does."""
    x, z = torch.rand(8), torch.rand(8)
    entered, leave = threading.Event(), threading.Event()

    @autofuse.fuse
    def slow(x):
        entered.set()
        leave.wait(LONG)
        return x * 2.0

    thread = started(slow, x)
    assert entered.wait(LONG)
    try:
        got = autofuse.fuse(lambda x, z: x * 2.0 + z)(x, z)
    finally:
        leave.set()
        thread.join()
    assert type(x) is type(z) is torch.Tensor and torch.equal(autofuse.unwrap(got), x * 2.0 + z)


def test_arguments_are_plain_after_an_interrupt_anywhere():
    x = torch.rand(8)
    want = x * 2.0 + 1.0
    fused = autofuse.fuse(lambda x: x * 2.0 + 1.0)
    for _ in range(3):
        fused(x)
    done = count = 0
    while not done:
        count += 1
        try:
            with Interrupted(count) as interrupted:
                fused(x)
            done = interrupted.left > 0
        except KeyboardInterrupt:
            pass
        assert type(x) is torch.Tensor and not lending.loans, count
        assert "_af" not in vars(x)
        assert torch.equal(fused(x), want), count
    assert count > 10


# --- a thread whose chain another one flushes ----------------------------------------------------


class Worker:
    """A thread that does what it is asked."""

    def __init__(self):
        self.asked, self.said = queue.SimpleQueue(), queue.SimpleQueue()
        self.thread = started(self.work)

    def work(self):
        while (job := self.asked.get()) is not None:
            try:
                self.said.put((job(), None))
            except BaseException as error:
                self.said.put((None, error))
            del job

    def do(self, job):
        self.asked.put(job)
        result, error = self.said.get(timeout=LONG)
        if error is not None:
            raise error
        return result


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.asked.put(None)
    worker.thread.join()


def test_it_records_at_every_place_of_the_flush(worker, monkeypatch):
    """What it then holds has the same shells, and is watched by a weak reference."""
    monkeypatch.setattr(flushing, "_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, z = torch.rand(8), torch.rand(8)
    w, v = worker.do(lambda: (autofuse.wrap(x), autofuse.wrap(z)))
    want, difference = (x * 3.0).tolist(), (x * 3.0 - z).tolist()
    kept = []

    def record():
        y = w * 3.0
        kept.append((y, weakref.ref(y)))

    def read():
        """After another flush, which must know that these are held."""
        assert (v * 2.0).tolist() == (z * 2.0).tolist()
        return [y.tolist() for y, _ in kept]

    for _ in range(3):
        assert worker.do(lambda: w * 3.0 - v).tolist() == difference
    done = count = 0
    while not done:
        count += 1
        shared = worker.do(lambda: w * 3.0 - v)
        with Middle(count, lambda: worker.do(record)) as middle:
            assert shared.tolist() == difference, count
        done = middle.left > 0
        assert worker.do(read) == [want] * len(kept), count
        worker.do(kept.clear)
    assert count > 40


def test_it_records_while_another_thread_is_at_a_flush_for_long(worker, held, monkeypatch):
    """Of its own chain, in a backward, which waits for nobody: the op runs at once."""
    monkeypatch.setattr(flushing, "_WAIT_SECONDS", 0.05)  # of which it waits nine times
    x = torch.rand(8)
    w = autofuse.wrap(x.clone())
    pending = worker.do(lambda: (w * 2.25 + 1.25).cosh())
    thread = started(pending.tolist)
    assert held.entered.wait(LONG)
    got = []

    def backward():
        leaf = x.clone().requires_grad_()
        Reads.apply(leaf, lambda: got.append((w * 4.0).tolist())).sum().backward()

    worker.do(backward)
    assert got == [(x * 4.0).tolist()]
    held.leave.set()
    thread.join()
