"""KeyboardInterrupt anywhere: what a program holds stays right."""

import contextlib
import dis
import gc
import os
import sys
from threading import get_ident

import pytest
import torch

import autofuse
from autofuse import inside
from autofuse.chain import state
from autofuse.hot import native
from autofuse.lines import OURS
from autofuse.record.modes import forget_all, reopen_all
from autofuse.supply.kernels import clear_kernels
from support import same_bits

PLACES = int(os.environ.get("AUTOFUSE_TEST_PLACES", "1"))  # of how many one is tried


def is_ours(frame):
    """Whether it is of autofuse."""
    return frame.f_code.co_filename.startswith(OURS)


class Late(Exception):
    """What the signal handler of an alarm raises."""


class Place:
    """Act at the `count`-th place in autofuse where Python looks for signals.

    That is where a function of Python begins, where a call of C has ended, and where a loop turns;
    never before a call of C, such as the end of a `with` that switches torch functions off.
    Nothing is collected meanwhile: Python 3.11 collects when it makes the frame that it shows to
    the profile, and calls the profile then, though a finalizer has ended it and it is freed.
    """

    def __init__(self, count):
        self.left = count

    def __enter__(self):
        gc.disable()
        self.begin()
        return self

    def __exit__(self, *exc):
        self.end()
        gc.enable()

    def begin(self):
        sys.setprofile(self.event)

    def end(self):
        sys.setprofile(None)

    def event(self, frame, event, argument):
        if event in ("return", "c_call") or not is_ours(frame):
            return
        self.left -= 1
        if self.left == 0:
            self.end()
            self.act()


class Interrupted(Place):
    """Raise `kind` there."""

    def __init__(self, count, kind=KeyboardInterrupt):
        super().__init__(count)
        self.kind = kind

    def act(self):
        raise self.kind


class AtJump(Interrupted):
    """Raise `kind` at the `count`-th jump of a condition: Python 3.10 looks there too."""

    def begin(self):
        self.last = {}
        sys.settrace(self.enter)

    def end(self):
        sys.settrace(None)

    def enter(self, frame, event, argument):
        if not is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.opcode

    def opcode(self, frame, event, argument):
        if event == "opcode":
            at, code = self.last.get(frame), frame.f_code.co_code
            self.last[frame] = frame.f_lasti
            while at is not None and dis.opname[code[at]] == "EXTENDED_ARG":
                at += 2
            jumped = at is not None and frame.f_lasti != at + 2
            if jumped and dis.opname[code[at]].startswith("POP_JUMP_IF"):
                self.left -= 1
                if self.left == 0:
                    self.end()
                    self.act()
        elif event == "return":
            self.last.pop(frame, None)
        return self.opcode


def values(held, w, v, p):
    """Values that are read, and others that stay."""
    for k in (2.0, 3.0):
        a = w * k + 1
        held.append(a)
        c = (a - v).abs()
        held.append(c)
    held.append(c * v)
    c.sum()


def writes(held, w, v, p):
    """Writes to memory by kernels, and in place on what is pending."""
    target = autofuse.wrap(torch.zeros(32))
    held.append(w * 3.0 - v)
    target.add_(w * 2.0)
    b = w - v
    b += 1.0
    held.append(b)
    target[1:31:3] = b[:10] * 2.0
    target[::2] += w[::2] * 3.0
    target[w > 0] = 0.5
    held.append(target * 1.0)


def gradients(held, w, v, p):
    held.append((w * p * 2.0).abs() - v)
    held.append(held[-1] * p + v)
    held[-1].sum()


def saved(held, w, v, p):
    """Gradients where torch's own hooks are told of what is saved."""
    with torch.autograd.graph.save_on_cpu():
        held.append((w * p * 2.0).abs() - v)
        held.append((held[-1] * p + v).relu() * p)
    held += torch.autograd.grad(held[-1].sum(), p)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g


def blocks(held, w, v, p):
    """Blocks of other modes, in which something is recorded and nothing."""
    with torch.no_grad():
        pass
    held.append(Through.apply(p) * w)
    with torch.no_grad():
        held.append(w * 2.0 - v)
        with torch.enable_grad():
            pass
        Through.apply(v)
    held.append(Through.apply(w * 3.0))


PROGRAMS = [values, writes, gradients, saved, blocks]


def plain(program, x, z, p):
    held = []
    with autofuse.disabled():
        program(held, x.clone(), z.clone(), p)
    return [value.detach() for value in held]


def take_hooks_back():
    """Whether hooks of saved tensors are still on.

    An interrupt where `__exit__` begins leaves them on, in eager PyTorch too.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return False
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    reopen_all("test")
    return True


def take_grad_mode_back():
    """Whether grad mode is still off: an interrupt where an `__exit__` begins leaves it so, too."""
    off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return off


def assert_whole(recorder):
    """What recording relies on."""
    open_, tip = recorder.chain, recorder.chain.tip
    assert (tip.path() or [tip])[0] in (recorder.home, *recorder.home.next.values())
    assert recorder.ident and open_.into is None and not recorder.lock._is_owned()
    assert recorder.off or recorder.home is not recorder.nowhere
    assert len(open_) == tip.index + 1 and len(open_.consts) == len(tip.consts)
    assert len(open_.inputs) == len(open_.slots) == len(tip.inputs) == len(open_.marks) / 2
    nodes = [shell._af for shell in open_]
    assert nodes == tip.path() and [node.shell for node in nodes] == [*open_]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as it was closed
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_at_every_call(program, kind, monkeypatch):
    at_every_place(Interrupted, program, kind, monkeypatch)


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="Python 3.10 alone looks there")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_at_every_jump(program, monkeypatch):
    at_every_place(AtJump, program, KeyboardInterrupt, monkeypatch)


def at_every_place(places, program, kind, monkeypatch):
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, z = torch.randn(32), torch.randn(32)
    p = torch.nn.Parameter(torch.randn(32))
    w, v = autofuse.wrap(x), autofuse.wrap(z)
    want = plain(program, x, z, p)
    for _ in range(2):
        program([], w, v, p)  # its kernels are there
    done = count = left = grad_left = 0
    while not done:
        count += 1
        held = []
        try:
            with places(count, kind) as interrupted:
                program(held, w, v, p)
            assert interrupted.left > 0, count  # or nobody has heard of it
            done = True
        except kind:
            pass
        grad_left += take_grad_mode_back()
        assert not state.this_thread.closed and not state.this_thread.applies
        for recorder in state.this_thread.recorders.values():
            assert not recorder.off
        for recorder in state.all_recorders:
            assert_whole(recorder)
        left += take_hooks_back()
        for got, right in zip(held, want, strict=False):
            assert bool(same_bits(torch.tensor(got.tolist()), right).all()), count
        later = (w * 5.0 + 2.0) - v
        assert later.tolist() == (x * 5.0 + 2.0 - z).tolist(), count
    assert torch._C._is_torch_function_enabled()
    assert left <= 1 and grad_left <= (3 if program is blocks else 0)
    # machine code is not interrupted: fewer places
    assert count > (0 if native.active() else 50)


TARGETS = {
    "plain": lambda: torch.ones(6, 8),
    "wrapped": lambda: autofuse.wrap(torch.ones(6, 8)),
    "strided": lambda: autofuse.wrap(torch.ones(12, 8)[::2]),
    "transposed": lambda: torch.ones(8, 6).t(),
    "half": lambda: autofuse.wrap(torch.ones(6, 8).half()),
    "viewed": lambda: autofuse.wrap(torch.ones(2, 6, 8))[1],
}


def set_item(x, w):
    x[1:5, ::3] = w[:4, :3] * 2.0


WRITES = {
    "add_": lambda x, w: x.add_(w * 2.0),
    "setitem": set_item,
    "copy_": lambda x, w: x[:, 2].copy_(w[:, 0] * 2.0),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("places", [Interrupted, *[AtJump] * (sys.version_info < (3, 11))])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_done_and_counted_or_neither(write, target, places, kind):
    """Or backward would use a changed value that it has saved, or none."""
    w = autofuse.wrap(torch.rand(6, 8))
    for _ in range(4):
        write(target(), w)  # the kernel is there
    count, done, seen = 0, False, set()
    with torch.no_grad():
        want = autofuse.unwrap(target()).clone()
        write(want, autofuse.unwrap(w))
        want = want.tolist()
    while not done:
        count += 1
        t = target()
        before = t.tolist(), t._version
        after = want, t._version + 1
        try:
            with places(count, kind):
                write(t, w)
                done = True
        except kind:
            pass
        now = t.tolist(), t._version
        assert now in (before, after), count
        seen.add(now == after)
        for recorder in state.all_recorders:
            assert_whole(recorder)
    assert now == after and (count < 5 or len(seen) == 2)


def test_a_compile_that_is_interrupted_counts_once(monkeypatch, capsys):
    from autofuse.supply import build

    monkeypatch.setattr(autofuse.config, "max_kernels_per_line", 3)
    real, x = build.build, autofuse.wrap(torch.ones(4))

    def interrupted(*args):
        raise KeyboardInterrupt

    y = (x * 2.5).asinh().cosh().asinh()
    for k in range(9):
        monkeypatch.setattr(build, "build", interrupted if k < 8 else real)
        try:
            autofuse.materialize(y)
        except KeyboardInterrupt:
            assert autofuse.is_pending(y)
    assert autofuse.stats().kernels_launched == 1
    assert "has asked for" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Late])
def test_nobody_stays_inside(kind, monkeypatch):
    """Who was interrupted on the way to the kernel of a backward, and keeps the traceback."""
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    monkeypatch.setattr(sys.modules[__name__], "OURS", (*OURS, contextlib.__file__))
    x, p = autofuse.wrap(torch.ones(4)), torch.ones(4, requires_grad=True)
    kept, done, count = [], False, 0
    while not done:
        count += PLACES * (1 if kind is KeyboardInterrupt else 3)
        forget_all("test")
        clear_kernels()
        y = autofuse.materialize((x * p * 2.0 + 1.0).abs())
        try:
            with Interrupted(count, kind) as interrupted:
                (grad,) = torch.autograd.grad(y.sum(), p)
            done = interrupted.left > 0
        except kind as error:
            kept.append(error)
        assert get_ident() not in inside.inside, count
    assert grad.tolist() == [2.0] * 4 and count > 50 and kept
