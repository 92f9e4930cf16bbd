"""Code that runs in the middle of recording and flushing: at every place where Python lets it.

Signal handlers, finalizers and callbacks of weak references are Python functions that run between
two steps of another one. Here a program runs again and again, each time with one such function at
the next place; whatever that function does, the program computes what eager PyTorch does.
"""

import asyncio
import copy
import dataclasses
import functools
import gc
import io
import pickle
import signal
import subprocess
import sys
import threading
import zlib

import pytest
import torch
from reduced import REDUCED
from test_checkpoints import patient
from test_interrupts import (
    PLACES,
    AtJump,
    Interrupted,
    Late,
    Place,
    assert_whole,
    blocks,
    gradients,
    plain,
    take_grad_mode_back,
    take_hooks_back,
    writes,
)
from test_interrupts import PROGRAMS as OTHERS
from test_reductions import recorded, recording  # noqa: F401

import autofuse
from autofuse import inside, lending
from autofuse.chain import state
from autofuse.hot import native
from autofuse.lines import OURS
from autofuse.patches import memory
from autofuse.record import flush as flushing
from autofuse.record import writes as writing
from support import assert_same


class Middle(Place):
    """Call `action` at the `count`-th place in autofuse where Python looks for signals."""

    def __init__(self, count, action, later=None):
        """later: an Interrupted that begins after the action."""
        super().__init__(count)
        self.action, self.later = action, later

    def act(self):
        self.action()
        if self.later is not None:
            self.later.__enter__()


class JumpMiddle(Middle, AtJump):
    """The same at every jump of a condition."""

    def __init__(self, count, action, later=None):
        Middle.__init__(self, count, action, later)


def chains(held, w, v, p):
    """Chains of many Inputs, numbers and eager ops, of which some values stay."""
    y = w
    for k in range(4):
        y = torch.maximum(y * v + float(k), w) - w
        z = torch.where(y > 0.5, y, v)
        held.append(z)
    held.append(torch.minimum(y, z).to(torch.float64))
    held.append(y.sum() * 2.0)
    held.append((y + v).mm((z * 2.0).t()) if y.dim() == 2 else (y + v) * z.max())


PROGRAMS = [*OTHERS, chains]


class World:
    """What actions use; `w`, `v` and `p` are the program's own."""

    def __init__(self, held, w, v, p):
        self.held, self.w, self.v, self.p = held, w, v, p
        self.memory, self.kept = autofuse.wrap(torch.zeros(32)), []

    def record(self):
        self.kept.append(self.w * 7.0 + self.v)

    def read(self):
        assert (self.w * 7.0 + self.v).tolist() == self.want[0]

    def read_what_is_pending(self):
        for value in self.held:
            value.detach().tolist()

    def use_what_is_pending(self):
        with torch.no_grad():
            self.kept += [value * 1.0 for value in self.held[-1:]]
            self.read_what_is_pending()

    def write(self):
        """The values stay as they are, the versions do not."""
        with torch.no_grad():
            self.w.mul_(1.0)
            autofuse.unwrap(self.v).add_(0.0)
            self.memory.add_(self.w * 2.0)

    def write_to_what_is_pending(self):
        with torch.no_grad():
            for value in self.held[-1:]:
                if not value.requires_grad:
                    value.mul_(1.0)

    def copy_what_is_pending(self):
        with torch.no_grad():
            for value in self.held[-1:]:
                value = value.detach()
                saved = io.BytesIO()
                torch.save(value, saved)
                saved.seek(0)
                copies = [copy.copy(value), copy.deepcopy(value), torch.load(saved),
                          pickle.loads(pickle.dumps(value)), torch.from_dlpack(value)]  # fmt: skip
                assert all(made.tolist() == value.tolist() for made in copies)

    def switch_modes(self):
        with torch.no_grad(), torch.enable_grad():
            self.kept.append(self.w * 7.0 + self.v)
        with torch.inference_mode():
            self.read()

    def close(self):
        with autofuse.disabled():
            self.read()

    def train(self):
        with torch.enable_grad():
            q = self.p.detach().requires_grad_()
            y = trained(self.w, q)
            assert torch.autograd.grad(y, q)[0].tolist() == self.want[1]

    def flush(self):
        flushing.flush_all("test")

    def fail(self):
        failing(None, None)


def trained(w, q):
    """Of ops that save operands and results, recorded and not."""
    x = (w * q * 2.0).relu()
    y = x * q
    return (y[None] @ q[:, None]).sum()


class Foreign(Exception):
    """What a signal handler raises."""


def failing(number, frame):
    raise Foreign


def test_a_write_at_every_place_of_another_to_the_same_memory(monkeypatch):
    """Neither is lost, whichever comes first."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    w = autofuse.wrap(torch.ones(32))
    for make in (torch.zeros, lambda n: autofuse.wrap(torch.zeros(n))):
        target = make(32)

        def write(target=target):
            target.add_(w * 2.0)

        for _ in range(3):
            write()
        done = count = 0
        while not done:
            count += 1
            before = target.tolist()[0]
            with Middle(count, write) as middle:
                write()
            done = middle.left > 0
            assert target.tolist() == [before + (2.0 if done else 4.0)] * 32, count
        # machine code is not interrupted: fewer places
        assert count > (0 if native.active() else 40)


@pytest.mark.parametrize("outer", [
    lambda x, w: x.mul_(w * 2.0), lambda x, w: x.copy_(w * 2.0),
    lambda x, w: x.__setitem__(slice(1, None), w[1:] * 2.0),
    lambda x, w: x.__setitem__(slice(1, None), x[1:] * 2.0),
], ids=["mul_", "copy_", "setitem", "setitem of itself"])  # fmt: skip
@pytest.mark.parametrize("inner", [
    lambda x: x.copy_(x.clone()), lambda x: x.copy_(x * 1.0),
    lambda x: x.copy_(torch.tensor(x.tolist())),
], ids=["clone", "op", "tolist"])  # fmt: skip
def test_a_write_of_what_was_read_at_every_place_of_another(outer, inner, monkeypatch):
    """The other write comes before both or after both: between them it would be lost."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    y = torch.arange(8.0) + 1.0
    want = torch.full((8,), 3.0)
    outer(want, y)
    done, count = False, -3  # first without it, till the kernel is there
    while not done:
        count += 1
        x, w = autofuse.wrap(torch.full((8,), 3.0)), autofuse.wrap(y)
        if count < 1:
            outer(x, w)
            inner(x)
        else:
            with Middle(count, lambda x=x: inner(x)) as middle:
                outer(x, w)
            done = middle.left > 0
        assert x.tolist() == want.tolist(), count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pending", [False, True])
def test_hooks_are_told_the_same_whatever_else_is_saved_in_the_middle(pending, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, p = torch.rand(32), torch.rand(32, requires_grad=True)
    q, told = torch.rand(2, 2, requires_grad=True), []

    def pack(tensor):
        told.append(tensor.detach().clone())
        return tensor.detach()

    def program(w):
        y = (w * p).relu() * p
        z = y * w
        z.sum()
        return torch.autograd.grad(z.sum(), p)[0]

    def save():
        with torch.enable_grad():
            r = (autofuse.wrap(q) * q).relu() if pending else q
            assert torch.autograd.grad((r @ r).sum(), q)[0].shape == q.shape

    with patient(pack):
        gradient = program(x)
    want = told[:]
    for _ in range(2):
        with patient(pack):
            program(autofuse.wrap(x))  # its kernels are there
            save()
    done = count = 0
    while not done:
        count += 1
        told.clear()
        w = autofuse.wrap(x)
        with Middle(count, save) as middle, patient(pack):
            got = program(w)
        done = middle.left > 0
        own = [t for t in told if t.shape == x.shape]
        assert len(own) == len(want), count
        assert_same(own, want, None)
        assert_same(got, gradient, None)
    assert count > 60


class Callback:
    """A signal handler that is no function."""

    def __call__(self, number, frame):
        raise Foreign


@pytest.mark.parametrize("kind", ["partial", "object", "once", "any"])
def test_what_a_handler_of_any_kind_raises_is_foreign(kind):
    def once(number, frame):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        raise Foreign

    def some(*args, **options):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        raise Foreign

    handlers = {
        "partial": functools.partial(failing), "object": Callback(), "once": once, "any": some,
    }  # fmt: skip
    before = signal.signal(signal.SIGUSR1, handlers[kind])
    try:
        with pytest.raises(Foreign) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert inside.is_foreign(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)

    def divide(*numbers):
        numbers = iter(numbers)
        return next(numbers) / 0 + next(numbers)

    for own in (divmod, divide):
        with pytest.raises(ZeroDivisionError) as caught:
            own(1, 0)
        assert not inside.is_foreign(caught.value)


PLANNING = """
import random, signal, time, torch, autofuse

class Foreign(Exception): ...

def handler(number, frame):
    raise Foreign

signal.signal(signal.SIGALRM, handler)
autofuse.config.always_fuse, autofuse.config.measure, autofuse.config.compile = True, False, "now"
x, end, count = autofuse.wrap(torch.randn(200, requires_grad=True)), time.time() + 6, 0
while time.time() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 0.0012 + 1e-6)
        try:
            a = x * 2 + 1
            b = a.relu() - x
            c = torch.where(b > 0, b, a) * 3
            (torch.cat([c[:100] + c[100:], a]) * 2).sum().backward()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Foreign:
        count += 1
print(count)
"""


def test_of_what_is_interrupted_arguments_alone_are_looked_at():
    """Python 3.13.0 dies of a look at the names of a comprehension that has not begun."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLANNING], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


ACTIONS = [name for name in vars(World) if not name.startswith("_")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_an_action_at_every_place(program, action, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    count = act_at_places(program, action, name=program.__name__)
    assert count > (0 if native.active() else 60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", REDUCED)
def test_an_action_at_places_of_reductions(recorded, on, name, action):  # noqa: F811
    """At every 41st, others for each action, of values with gradients and without."""

    def program(held, w, v, p):
        x, y = w.view(4, 8), v.view(4, 8)
        held.append(REDUCED[name](x * 2.0 + y, y, w[:8], v[:8]))
        held.append(REDUCED[name](x * p.view(4, 8), y, w[:8], p[:8]))
        held.append(held[0] * 0.5)

    act_at_places(program, action, 41, name)


def act_at_places(program, action, step=1, name=""):
    """Run `program` with an action at every `step`-th place, others for each action and name; how
    many places there are."""
    step *= PLACES
    first = 1 + zlib.crc32(f"{name} {action}".encode()) % step
    x, z = torch.rand(32), torch.rand(32)
    p = torch.nn.Parameter(torch.rand(32))
    w, v = autofuse.wrap(x), autofuse.wrap(z)
    want = []
    with autofuse.disabled():
        program(want, x.clone(), z.clone(), p)
    for _ in range(2):
        program([], w, v, p)  # its kernels are there
    want = [value.detach() for value in want]
    before = signal.signal(signal.SIGUSR1, failing)
    q = p.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(trained(x, q), q)
    World.want = [(x * 7.0 + z).tolist(), gradient.tolist()]
    done = left = grad_left = 0
    count = first - step
    try:
        while not done:
            count += step
            world = World([], w, v, p)
            try:
                with Middle(count, getattr(world, action)) as middle:
                    program(world.held, w, v, p)
                done = middle.left > 0
            except Foreign:
                assert action == "fail"
            for recorder in state.all_recorders:
                assert_whole(recorder)
            for got, right in zip(world.held, want, strict=False):
                assert bool(torch.equal(autofuse.unwrap(got.detach()), right)), count
            if action != "fail":
                assert len(world.held) == len(want), count
            for got in world.kept if action in ("record", "switch_modes") else ():
                assert got.tolist() == World.want[0], count
            assert torch._C._is_torch_function_enabled()
            grad_left += take_grad_mode_back()
            left += take_hooks_back()
        assert left <= 1 and grad_left <= (3 if action == "fail" and program is blocks else 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    return count


@pytest.mark.parametrize("places", [Middle, *[JumpMiddle] * (sys.version_info < (3, 11))])
@pytest.mark.parametrize("action", ["read", "write"])
def test_a_thread_that_a_handler_waits_for_at_every_place(action, places, monkeypatch):
    """It needs what is pending, also where its lock is taken and no flush is at it yet."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(autofuse.config, "native", False)  # in machine code there are no places
    monkeypatch.setattr(flushing, "_WAIT_SECONDS", 0.01)
    x, stuck, errors = torch.rand(8), [], []
    w = autofuse.wrap(x)

    def program(held):
        held.append(w * 2.0 + 1.0)
        held[0].tolist()
        held.append(held[0] * w)

    def use(held):
        try:
            if action == "write":
                w.mul_(1.0)
            for value in held:
                value.tolist()
        except Exception as error:
            errors.append(error)

    want = [x * 2.0 + 1.0, (x * 2.0 + 1.0) * x]
    for _ in range(3):
        program([])
    done = count = 0
    while not done:
        count += 1
        held = []

        def wait(held=held, count=count):
            thread = threading.Thread(target=use, args=(held,))
            thread.start()
            thread.join(5)
            if thread.is_alive():  # it is not, once this thread goes on
                stuck.append((count, thread))

        with places(count, wait) as middle:
            program(held)
        done = middle.left > 0
        for _, thread in stuck:
            thread.join()
        assert not stuck and not errors, count
        assert [value.tolist() for value in held] == [value.tolist() for value in want], count
    assert count > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("program", [writes, gradients], ids=lambda f: f.__name__)
def test_a_flush_at_every_place_and_soon_an_interrupt(program, monkeypatch):
    """What has been computed meanwhile is given away all the same."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, z = torch.rand(32), torch.rand(32)
    p = torch.nn.Parameter(torch.rand(32))
    w, v = autofuse.wrap(x), autofuse.wrap(z)
    want, caught = plain(program, x, z, p), 0
    for _ in range(2):
        program([], w, v, p)
    for soon in range(1, 5):
        done = count = 0
        while not done:
            count += 1
            held = []
            try:
                later = Interrupted(soon, Late)
                with Middle(count, lambda: flushing.flush_all("test"), later) as middle:
                    program(held, w, v, p)
                done = middle.left > 0
            except Late:
                caught += 1
            for got, right in zip(held, want, strict=False):
                assert torch.equal(autofuse.unwrap(got.detach()), right), (soon, count)
    assert caught > 8


@pytest.mark.parametrize("target", [torch.zeros, lambda n: autofuse.wrap(torch.zeros(n))])
def test_the_same_chain_again_in_the_middle_of_a_write(target, monkeypatch):
    """Another chain has come to end with the same node of the trie: it is not what is written."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, z = torch.rand(32), torch.rand(32)
    w, u = autofuse.wrap(x), autofuse.wrap(z)
    for _ in range(4):
        target(32).add_(w * 2.0)
        held = [u + w * 3.0]
    done = count = 0

    def again():
        flushing.flush_all("test")
        other = w * 3.0
        held[:] = [other, u + other]

    while not done:
        count += 1
        t = target(32)
        with torch.no_grad(), Middle(count, again) as middle:
            t.add_(w * 2.0)
        done = middle.left > 0
        assert t.tolist() == (x * 2.0).tolist(), count
        if not done:
            assert held[0].tolist() == (x * 3.0).tolist(), count
            assert held[1].tolist() == (x * 3.0 + z).tolist(), count


@pytest.mark.parametrize("place", ["node_of", "Chain"])
def test_another_op_where_a_write_has_been_recorded(place, monkeypatch):
    """Where `node_of` ends, as Python 3.10 allows it, and where a spare chain is made."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, z = torch.rand(32), torch.rand(32)
    w, u, held, begun = autofuse.wrap(x), autofuse.wrap(z), [], []
    for _ in range(4):
        torch.zeros(32).add_(w * 2.0)
        autofuse.materialize(u + w * 3.0)

    def middle():
        begun.append(place)
        if place == "node_of":
            flushing.flush_all("test")
            held.append(u + w * 3.0)  # a chain that ends alike
        else:
            held.append(u + w * 3.0)  # one op more

    real, init = writing.node_of, state.Chain.__init__

    def node_of(result):
        node = real(result)
        if node is not None and not begun:
            middle()
        return node

    def made(self, tip):
        init(self, tip)
        if not begun:
            middle()

    with torch.no_grad():
        torch.zeros(32).add_(w * 2.0)
        t, y = torch.zeros(32), w * 2.0
        if place == "node_of":
            monkeypatch.setattr(writing, "node_of", node_of)
        else:
            state.this_thread.current.spare = None
            monkeypatch.setattr(state.Chain, "__init__", made)
        t.add_(y)
    assert begun or native.active()
    assert t.tolist() == (x * 2.0).tolist()
    for value in held:
        assert value.tolist() == (x * 3.0 + z).tolist()


def test_a_finalizer_at_every_allocation_of_a_write(monkeypatch):
    """Up to Python 3.11 the collector also runs where C makes a container."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    w, held = autofuse.wrap(torch.rand(8)), []

    class Reading:
        def __init__(self):
            self.me = self

        def __del__(self):
            held[0].tolist()

    def write(threshold):
        v = autofuse.wrap(torch.zeros(8))
        with torch.no_grad():
            held[:] = [w * 2.0 + 1.0]
            held[0].mul_(3.0)
            gc.disable()
            Reading()
            gc.set_threshold(threshold)
            gc.enable()
            v.add_(held[0])
        assert torch.equal(autofuse.unwrap(v), autofuse.unwrap(held[0])), threshold
        assert held[0]._version == v._version == 1, threshold

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # or every collection looks at all there is, what tests before have left too
    try:
        for threshold in range(1, 200):
            write(threshold)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_tasks_that_take_turns_in_the_middle_of_their_chains():
    async def work(wrap, seed, held):
        x = wrap(torch.full((8,), float(seed)))
        for k in range(6):
            x = x * 1.5 + float(k)
            held.append(x)
            await asyncio.sleep(0)
            x = (x - held[0]).abs()  # another task's, maybe pending
            await asyncio.sleep(0)
        return x

    async def together(wrap):
        held = []
        return await asyncio.gather(*(work(wrap, seed, held) for seed in range(5)))

    want = asyncio.run(together(torch.clone))
    got = asyncio.run(together(autofuse.wrap))
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.parametrize("program", PROGRAMS[:2])
def test_a_tracer_that_records(program):
    """At every line outside autofuse, as a debugger with watched expressions."""
    base, held = torch.linspace(-1, 2, 32), {}
    for name in ("eager", "traced"):
        wrap = autofuse.wrap if name == "traced" else torch.clone
        w, v, p = wrap(base), wrap(base.flip(0)), base.clone().requires_grad_()
        watched = wrap(torch.ones(32))

        def trace(frame, event, argument, watched=watched):
            if frame.f_code.co_filename.startswith(OURS):
                return None
            if event == "line":
                sys.settrace(None)
                assert ((watched * 2.0 + 1.0) - 0.5)[:1].tolist() == [2.5]
                sys.settrace(trace)
            return trace

        held[name] = []
        if name == "traced":
            sys.settrace(trace)
        try:
            with torch.no_grad():
                program(held[name], w, v, p)
        finally:
            sys.settrace(None)
    for ours, theirs in zip(held["traced"], held["eager"], strict=True):
        torch.testing.assert_close(autofuse.unwrap(ours), autofuse.unwrap(theirs))


@pytest.mark.parametrize("write", [
    lambda x: x.__setitem__(0, 5.0), lambda x: x.add_(5.0), lambda x: x.copy_(torch.zeros(4)),
    lambda x: torch.relu_(x), lambda x: x.mul_(x),
    lambda x: x.index_fill_(0, torch.tensor([0]), 5.0),
], ids=["item", "add", "copy", "relu", "mul", "index_fill"])  # fmt: skip
def test_what_a_finalizer_records_in_the_flush_before_a_write_reads_what_was_there(write):
    with torch.no_grad():
        for _ in range(4):  # by machine code, once it knows all this
            memory = torch.arange(4.0) - 1
            x, seen = autofuse.wrap(memory), []  # written at once, for another sees it

            class Late:
                def __del__(self, x=x, seen=seen):
                    seen.append(x * 3 + 1)

            w = autofuse.wrap(torch.ones(4))
            w.late = Late()
            y = w * 2 + 1
            del w  # the chain has it alone
            write(x)
            assert seen[0].tolist() == [-2.0, 1.0, 4.0, 7.0] and y.tolist() == [3.0] * 4


@dataclasses.dataclass
class Box:
    value: torch.Tensor


def fused_call(x, y, box, items):
    """Of a function that lends one tensor in several places."""
    x = x * 2.0 + 1.0
    items.append(x - box.value)
    return x * items[0], {"y": [y + x]}


def assert_all_plain(tensors):
    assert not lending.loans and state.this_thread.depth == 0
    for x in tensors:
        assert type(x) is torch.Tensor and "_af" not in vars(x)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("soon", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("places", [Middle, *[JumpMiddle] * (sys.version_info < (3, 11))])
@pytest.mark.parametrize("twice", [True, False])
def test_a_fused_call_at_every_place_of_another(places, soon, twice, monkeypatch):
    """With the same tensors, some of them twice; soon: an interrupt that many places after it."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    fused, x, y = autofuse.fuse(fused_call), torch.rand(8), torch.rand(8)
    p, q = (x, y) if twice else (torch.rand(8), torch.rand(8))

    def run():
        box, items = Box(p), [q]
        first, table = fused(x, y, box, items)
        made = [first, *table["y"], items[1]]
        assert box.value is p and items[0] is q
        a = autofuse.unwrap(x) * 2.0 + 1.0  # in the middle the other call has lent it
        for got, want in zip(made, (a * q, a + y, a - p), strict=True):
            assert_same(autofuse.unwrap(got), autofuse.unwrap(want), 1e-6)
            assert state.this_thread.depth or type(got) is torch.Tensor

    for _ in range(4):
        run()
    done = count = interrupts = 0
    while not done:
        count += 1
        try:
            with places(count, run, soon and Interrupted(soon, Late)) as middle:
                run()
            done = middle.left > 0
        except Late:
            interrupts += 1
        assert_all_plain([x, y, p, q])
        run()  # as ever, so that the next place is the next one
    assert count > 30 and (soon is None or interrupts > 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("places", [Interrupted, *[AtJump] * (sys.version_info < (3, 11))])
def test_containers_are_left_plain_after_an_interrupt_anywhere(places, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    fused, x, y = autofuse.fuse(fused_call), torch.rand(8), torch.rand(8)
    for _ in range(3):
        fused(x, y, Box(x), [y])
    done = count = 0
    while not done:
        count += 1
        box = Box(x)
        try:
            with places(count) as interrupted:
                fused(x, y, box, [y])
            done = interrupted.left > 0
        except KeyboardInterrupt:
            pass
        assert_all_plain([x, y, box.value])
        fused(x, y, box, [y])  # as ever, so that the next place is the next one
    assert count > 30


def test_a_finalizer_that_lends_where_a_loan_is_counted():
    """Up to Python 3.11 it may come wherever a container is made, in C too."""
    x, count = torch.rand(8), 0
    mine, others = [], []

    class Garbage:
        def __del__(self):
            lending.lend_one(x, others)

    thresholds = gc.get_threshold()
    while count < 20:
        count += 1
        gc.collect(0)
        garbage = Garbage()
        garbage.me, garbage = garbage, None
        gc.set_threshold(count)
        try:
            lending.lend_one(x, mine)
        finally:
            gc.set_threshold(*thresholds)
        gc.collect(0)
        assert lending.loans == {id(x): 2} and len(mine) == len(others) == 1
        lending.restore(others)
        lending.restore(mine)
        assert_all_plain([x])


class InTorch(Middle):
    """The same in Python functions of torch too."""

    def event(self, frame, event, argument):
        if event not in ("return", "c_call") and self.left > 0:
            if frame.f_globals.get("__name__", "").startswith(("torch", "autofuse")):
                self.left -= 1
                if self.left == 0:
                    self.end()
                    self.act()


def normalised(name, *training):
    """Writes running statistics, which are its arguments after the first three."""

    def write(x, mean, var):
        arguments = (x, None, None, mean, var, *training)
        if name == "instance_norm":
            torch.instance_norm(x[..., None].expand(8, 3, 4), *arguments[1:], 1.0, 1e-5, False)
        elif name == "batch_norm":
            torch.batch_norm(*arguments, 1.0, 1e-5, False)
        else:
            getattr(torch, name)(*arguments, 1.0, 1e-5)

    return write


def observed(x, mean, var):
    """Writes a scale and more besides running statistics."""
    ones = torch.ones(1, dtype=torch.int32)
    torch.fused_moving_avg_obs_fake_quant(
        torch.full((8, 3), 7.0),
        ones,
        ones,
        mean[:1],
        mean[1:2],
        var[:1],
        ones.clone(),
        1.0,
        0,
        255,
        0,
    )


STATISTICS = {
    "batch_norm": normalised("batch_norm", True),
    "instance_norm": normalised("instance_norm", True),
    "native_batch_norm": normalised("native_batch_norm", True),
    "_native_batch_norm_legit": normalised("_native_batch_norm_legit", True),
    "update_stats": lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 1.0),
    "fused_moving_avg_obs_fake_quant": observed,
    "functional": lambda x, mean, var: torch.nn.functional.batch_norm(
        x, mean, var, training=True, momentum=1.0
    ),
    "by name": lambda x, mean, var: torch.nn.functional.instance_norm(
        x[..., None].expand(8, 3, 4), running_mean=mean, running_var=var, momentum=1.0
    ),
}  # fmt: skip


def test_every_function_of_torch_that_writes_aside_is_known():
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        inputs = [a for a in schema.arguments if not a.is_out and str(a.type) == "Tensor"]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in inputs[1:])
        if space != "aten" or name.endswith("_") or not writes:
            continue
        if any(hasattr(module, name) for module in (torch, torch._C._nn)):
            assert name in memory.ASIDE or name in PRIVATE, name


# what a C function of torch's keeps its results in
PRIVATE = {"_cummax_helper", "_cummin_helper", "_flash_attention_forward_no_dropout_inplace",
           "fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation"}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_a_read_at_every_place_of_a_write_of_statistics(name, monkeypatch):
    """It is one before the write or one after it."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, plain_mean = torch.rand(8, 3), torch.zeros(3)
    mean, var, kept = autofuse.wrap(plain_mean), torch.ones(3), []
    values = [(mean * 2.0).tolist()]
    STATISTICS[name](x, plain_mean, var)
    values.append((mean * 2.0).tolist())
    assert values[0] != values[1]
    for place in (Middle, InTorch):
        done = count = 0
        while not done:
            count += 1
            plain_mean.zero_()
            kept[:] = [mean * 2.0]
            with place(count, lambda: kept.append(mean * 2.0)) as middle:
                STATISTICS[name](x, plain_mean, var)
            done = middle.left > 0
            assert kept[0].tolist() == values[0]
            assert done or kept[1].tolist() in values, count
        assert count > 2


def test_a_read_at_every_place_where_tensors_are_exchanged(monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    w, done, count, kept = autofuse.wrap(torch.ones(3)), 0, 0, []
    while not done:
        count += 1
        a, b = torch.ones(3), torch.zeros(3)
        with InTorch(count, lambda a=a: kept.append(w * a)) as middle:
            torch.utils.swap_tensors(a, b)
        done = middle.left > 0
        assert done or kept.pop().tolist() in ([1.0] * 3, [0.0] * 3), count
    assert count > 10
