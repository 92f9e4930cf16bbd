"""In-place ops and every way to write memory that a pending op still has to read."""

import contextlib
import functools
import inspect
import operator
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.chain import state
from autofuse.dispatch import in_place
from autofuse.dispatch.protocol import OPTIONS
from autofuse.hot import native
from autofuse.ops import row as rows
from autofuse.record import modes
from autofuse.record import record as recording
from support import (
    DEVICES,
    assert_same,
    assert_same_as_eager,
    elsewhere,
    functions_called,
    is_called_on,
    outcome,
    write_unseen,
)

W = autofuse.wrap
INPLACE = {
    "add_": lambda t, y: t.add_(y),
    "iadd": lambda t, y: t.__iadd__(y),
    "imul": lambda t, y: t.__imul__(2),
    "isub": lambda t, y: t.__isub__(y),
    "itruediv": lambda t, y: t.__itruediv__(3.0),
    "mul_alpha": lambda t, y: t.add_(y, alpha=0.5),
    "sub_": lambda t, y: t.sub_(y),
    "relu_": lambda t, y: t.relu_(),
    "F.relu": lambda t, y: F.relu(t, inplace=True),
    "sigmoid_": lambda t, y: t.sigmoid_(),
    "torch.relu_": lambda t, y: torch.relu_(t),
    "clamp_": lambda t, y: t.clamp_(-0.5, 0.5),
    "masked_fill_": lambda t, y: t.masked_fill_(y > 0, 3.0),
    "zero_": lambda t, y: t.zero_(),
    "fill_": lambda t, y: t.fill_(2.0),
    "copy_": lambda t, y: t.copy_(y),
    "lerp_": lambda t, y: t.lerp_(y, 0.25),
    "addcmul_": lambda t, y: t.addcmul_(y, y, value=0.5),
    "comparison": lambda t, y: t.gt_(y),
    "setitem": lambda t, y: t.__setitem__(0, 5.0),
    "setitem_slice": lambda t, y: t.__setitem__((slice(None), 1), y[:, 0]),
    "unsqueeze_": lambda t, y: t.unsqueeze_(0),
    "t_": lambda t, y: t.t_(),
    "pow_": lambda t, y: t.pow_(2),
    "neg_": lambda t, y: t.neg_(),
}
device_param = pytest.mark.parametrize("device", DEVICES)
RANDOM = {"bernoulli", "binomial", "multinomial", "normal", "poisson"}
OUT = sorted(
    {f.__name__ for f in OPTIONS if getattr(torch, getattr(f, "__name__", ""), None) is f} - RANDOM
)  # every torch function that has a handler


def pair(device):
    return torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)


@device_param
def test_an_op_that_is_not_recorded_reads_nothing_any_more(device):
    a, b, c = (torch.randn(4, device=device) for _ in range(3))
    x, y = W(a) * 2, W(b)
    with pytest.raises((RuntimeError, OverflowError)):
        y + 2**70  # more than an int64; `y` was looked at before
    c.add_(1)
    assert autofuse.is_pending(x)
    if device == "cuda":
        y ** torch.tensor(2.5)  # torch takes a 0-d exponent on the CPU for a number
        c.add_(1)
        assert autofuse.is_pending(x)
        W(b.cpu()) + 1.0  # another recorder's
        c.add_(1)
        assert autofuse.is_pending(x)
    assert_same(x, a * 2, None)


@device_param
@pytest.mark.parametrize("name", INPLACE)
def test_on_memory(name, device):
    """On a concrete tensor: written at once, seen by every alias, version counter as eager's."""

    def f(t, y):
        before = t * 2
        INPLACE[name](t, y)
        return before, t + 1, t._version

    # a change of shape is the handle's own: the memory behind it is not touched
    assert_same_as_eager(f, *pair(device), rtol=1e-6, arguments=name not in ("t_", "unsqueeze_"))


@device_param
@pytest.mark.parametrize("name", INPLACE)
def test_on_a_pending_value(name, device):
    def f(t, y):
        z = t * 2 + 1
        old = z * 3
        INPLACE[name](z, y)
        return old, z, z + 1, z._version

    assert_same_as_eager(f, *pair(device), rtol=1e-6)


@device_param
def test_in_place_on_a_pending_value_is_a_new_node(device):
    x, y = map(autofuse.wrap, pair(device))
    z = x * 2
    same = z
    z += y
    z.mul_(0.5).neg_()
    assert autofuse.is_pending(z) and same is z and z._version == 3
    autofuse.materialize(z)
    stats = autofuse.stats()
    assert stats.kernels_launched == 1 and stats.nodes_elided == 3
    assert z._version == 3
    plain = autofuse.unwrap(x) * 2
    plain += autofuse.unwrap(y)
    assert_same(z, plain.mul_(0.5).neg_(), None)


@device_param
def test_a_write_to_memory_is_fused_with_what_it_reads(device, always, alone):
    p, g = pair(device)
    wp, wg, state = autofuse.wrap(p), autofuse.wrap(g), autofuse.wrap(torch.zeros_like(p))
    want_state, want = torch.zeros_like(p), p.clone()
    for step in range(3):
        autofuse.reset_stats()
        state.mul_(0.9)
        state += wg * 0.1
        update = state / (wg.abs() + 1.0)
        wp.sub_(update * 0.01)
        stats = autofuse.stats()
        assert stats.kernels_launched == 1 and stats.flushes == {"write": 1}, step
        want_state.mul_(0.9)
        want_state += g * 0.1
        want.sub_(want_state / (g.abs() + 1.0) * 0.01)
        assert_same(state, want_state, None)
        assert_same(p, want, None)
    assert p._version == wp._version == 3 and state._version == 6


@device_param
def test_the_same_ops_as_a_write_and_as_a_value(device):
    """The kernel that writes is another one, whatever holds the values and whichever ran first."""
    for order in ((True, False), (False, True)):
        modes.forget(state.recorder_for(torch.empty(0, device=device).device))
        target, y = (autofuse.wrap(t) for t in pair(device))
        want = autofuse.unwrap(target).clone()
        for write in order:
            for references in range(16):  # runners are known by their numbers
                half = y * 0.5
                held = [half] * references
                result = target.sub_(half) if write else target - half
                del half
                autofuse.record.flush.flush_all("test")
                expected = want - autofuse.unwrap(y) * 0.5
                assert_same(result, expected, None)
                want = expected if write else want
                assert_same(target, want, None)
                del held, result


@device_param
@pytest.mark.parametrize("born", [True, False])
def test_writes_in_inference_mode_are_not_fused(born, device):
    """A tensor that was born there has no version that a kernel's write could count."""
    want = torch.ones(4, device=device) + 2.0
    for _ in range(3):
        with torch.inference_mode(born):
            target, y = (autofuse.wrap(torch.ones(4, device=device)) for _ in range(2))
        with torch.inference_mode():
            target.add_(y * 2.0)
            assert_same(autofuse.unwrap(target).clone(), want.clone(), None)
    stats = autofuse.stats()
    assert "write" not in stats.flushes and stats.replays == 0


@device_param
def test_a_write_to_memory_that_another_shape_reads(device):
    """By another kernel, which may come after the one that writes."""

    def f(target, small, large):
        grown = small * 2.0
        read = large * target
        target.add_(grown)
        return read, grown

    row = torch.randn(4, device=device)
    assert_same_as_eager(f, row, torch.randn(4, device=device), torch.randn(3, 4, device=device))


@device_param
@pytest.mark.parametrize("make", [torch.clone, torch.nn.Parameter], ids=["tensor", "parameter"])
def test_a_write_to_plain_memory_is_fused_with_what_it_reads(make, device):
    """Also where the chain reads that memory, as weight decay does."""
    x, g = pair(device)
    p, want, wg = make(x.clone()), x.clone(), autofuse.wrap(g)
    with torch.no_grad():
        for step in range(4):
            autofuse.reset_stats()
            assert p.sub_((wg + 0.1 * p) * 0.01) is p
            p += wg * 2
            assert torch.mul(wg * 3, p, out=p) is p
            stats = autofuse.stats()
            assert stats.kernels_launched == 3 and stats.flushes == {"write": 3}, step
            want.sub_((g + 0.1 * want) * 0.01)
            want += g * 2
            torch.mul(g * 3, want, out=want)
            assert_same(p.detach(), want, None)
            assert p._version == want._version
    assert type(p) is not autofuse.Tensor and p.requires_grad is (make is torch.nn.Parameter)
    assert "_af" not in vars(p)


PARTS = {
    "all": lambda x: x[:],
    "head": lambda x: x[:6],
    "tail": lambda x: x[18:],
    "steps": lambda x: x[1::3],
    "rows": lambda x: x.view(4, 6).T[2:4],
    "one": lambda x: x[5],
    "expanded": lambda x: x[7].expand(3),
    "none": lambda x: x[3:3],
    "words": lambda x: x.view(torch.int32)[4:8],
    "data": lambda x: x.data[12:],
    "another's": lambda x: torch.arange(24.0, device=x.device)[2:20],
}


@device_param
@pytest.mark.parametrize("read", PARTS)
@pytest.mark.parametrize("written", PARTS)
def test_a_write_to_plain_memory_ends_the_chains_that_read_it_alone(read, written, on, device):
    def program(wrap):
        base = torch.arange(48.0, device=device)[12:36]
        x, target = wrap(PARTS[read](base)), PARTS[written](base)
        if written == "expanded":  # nobody may write there but to all at once
            target = base[7]
        y = x * 2 + 1
        pending, versions = autofuse.is_pending(y), [x._version, target._version]
        for _ in range(2):
            assert target.add_(1) is target
            target -= 3
        versions += [x._version, target._version]
        return pending, autofuse.is_pending(y), autofuse.unwrap(y), target, versions

    for _ in range(3):
        want, got = program(lambda x: x), program(autofuse.wrap)
        assert_same(got[2:4], want[2:4], None)
        assert got[4] == want[4]
        if "none" not in (read, written):  # of no bytes
            assert got[1] is (got[0] and (read == "another's" or written == "another's"))


@device_param
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_write_to_plain_memory_that_nothing_reads_runs_no_python(devices, device, always):
    """Also where this thread has recorders of other devices, as many."""
    p, w = torch.zeros(3, 4, device=device), autofuse.wrap(torch.randn(3, 4, device=device))
    add = functools.partial(torch.Tensor.add_, p[1:], 1.0)  # called from C
    others = [torch.device("cpu", k) for k in range(devices)]  # no tensor is on these
    for other in others:
        recorder = state.Recorder(torch.device("cpu"), threading.get_ident(), False)
        state.all_recorders.add(recorder)
        state.this_thread.recorders[other] = recorder
        del recorder
    try:
        for _ in range(4):
            y = w * 2 + 1
            called = functions_called(add)
            assert autofuse.is_pending(y)
        assert bool(called) is not native.active(), called
        assert p.tolist() == [[0.0] * 4] + [[4.0] * 4] * 2
        reader = autofuse.wrap(p) * 2.0
        add()
        assert not autofuse.is_pending(reader) and reader.tolist() == [[0.0] * 4] + [[8.0] * 4] * 2
    finally:
        for other in others:
            state.this_thread.recorders.pop(other).leave()


@device_param
@pytest.mark.parametrize("kind", ["inference", "sparse", "meta", "functional", "strided"])
def test_a_write_to_what_has_other_memory_while_something_is_pending(kind, on, device):
    x = autofuse.wrap(torch.ones(3, 4, device=device))
    for _ in range(3):
        with torch.inference_mode(kind == "inference"):
            target = torch.zeros(3, 4, device="meta" if kind == "meta" else device)
        if kind == "sparse":
            target = target.to_sparse()
        elif kind == "functional":
            target = torch._to_functional_tensor(target)
        y = x * 2 + 1
        with torch.inference_mode(kind == "inference"):
            assert target.zero_() is target
        assert y.tolist() == [[3.0] * 4] * 3


@device_param
def test_a_write_beside_a_chain_of_which_hooks_are_told_later(on, always, device):
    """A hook may end a checkpoint's run before the write."""
    x, p = torch.ones(3, 4, device=device, requires_grad=True), torch.zeros(3, device=device)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            y = autofuse.wrap(x * 1.0) * 2 * x
            p.add_(1.0)
            assert not autofuse.is_pending(y)
        y.sum().backward()
    assert p.tolist() == [3.0] * 3 and x.grad.tolist() == [[12.0] * 4] * 3


@device_param
def test_a_finalizer_writes_in_the_middle_of_a_flush(on, always, device):
    """Nothing is known then of what has been read."""
    seen = []

    class Writes:
        def __init__(self, target):
            self.target = target

        def __del__(self):
            seen.append(self.target.add_(1.0) is self.target)

    for _ in range(4):
        plain = torch.ones(3, 4, device=device)
        x = autofuse.wrap(torch.ones(3, 4, device=device))
        y = x * 2 + plain
        x.held = Writes(plain)
        del x
        assert y.tolist() == [[3.0] * 4] * 3
        del y
        assert plain.tolist() == [[2.0] * 4] * 3
    assert seen == [True] * 4


@device_param
@pytest.mark.parametrize("name", ["rrelu_with_noise_", "_amp_update_scale_"])
def test_a_function_that_writes_to_its_second_argument(name, on, device):
    for _ in range(3):
        second = torch.full((3,), 2, device=device, dtype=torch.float32)
        if name == "_amp_update_scale_":
            second = torch.full((1,), 2, device=device, dtype=torch.int32)
        want = (second * 2 + 1).tolist()
        y = autofuse.wrap(second) * 2 + 1
        if name == "_amp_update_scale_":
            scale, found = torch.ones(1, device=device), torch.zeros(1, device=device)
            torch._amp_update_scale_(scale, second, found, 2.0, 0.5, 100)
        else:
            torch._C._nn.rrelu_with_noise_(torch.randn(3, device=device), second, 0.1, 0.3, True)
        assert y.tolist() == want


@device_param
def test_a_write_to_a_plain_tensor_where_it_cannot_be_fused(device):
    """Eager decides about leaves, views, shapes and dtypes; other readers come first."""
    x, g = pair(device)

    def leaf(g, p):
        p.requires_grad_()
        p.add_(g * 2)

    def leaf_view(g, p):
        p.requires_grad_()
        with torch.no_grad():
            p[1:].add_((g * 2)[1:])
            p.T.mul_(g * 2)
        return p

    def other_reads(g, p):
        before = g * p
        row = g + p[0]
        p.add_(g * 2)
        p[0].mul_((g * 3)[1])
        return before, row, p

    def other_shapes(g, p):
        p.add_((g * 2)[0])
        p.unsqueeze(0).mul_(g * 2)
        p.add_((g * 2).unsqueeze(0))

    def other_dtypes(g, p):
        half, whole = p.half(), p.to(torch.int32)
        half.add_(g * 2)
        whole.clamp_(0, 1).mul_(whole * 2)
        return half, whole.add_(g * 2)

    def recorded_under_grad(g, p):
        g.requires_grad_()
        p.add_(g * 2)
        p.mul_(p * g)
        return p, torch.autograd.grad(p.sum(), g)

    def saved(g, p):
        p.requires_grad_()
        y = (p * p).sum() if type(p) is torch.Tensor else None
        with torch.no_grad():
            p.add_(g * 2)
        y.backward()

    for f in (leaf, leaf_view, other_reads, other_shapes, other_dtypes, recorded_under_grad, saved):
        plain, plain_target = g.clone(), x.clone()
        want, error = outcome(f, (plain, plain_target))
        wrapped, target = autofuse.wrap(g.clone()), x.clone()
        got, failure = outcome(f, (wrapped, target))
        assert repr(failure) == repr(error), f.__name__
        assert_same(target, plain_target, None, f.__name__)
        assert target._version == plain_target._version, f.__name__
        if error is None:
            assert_same(got, want, None, f.__name__)


def as_another_class(x, s):
    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})

    x.addcmul_(torch.ones_like(x).as_subclass(Other), s)


def without_torch_functions(x, s):
    with torch._C.DisableTorchFunctionSubclass():
        x.add_(s)


UNASKED = {  # of what it takes for a number torch may ask no class, and sometimes it asks none
    "addmm_": lambda x, s: x.addmm_(torch.ones_like(x), torch.ones_like(x), alpha=s),
    "add_": lambda x, s: x.add_(torch.ones_like(x), alpha=s),
    "addr_": lambda x, s: x.addr_(torch.ones(4).to(x), torch.ones(4).to(x), alpha=s),
    "index_add_": lambda x, s: x.index_add_(
        0, torch.arange(4, device=x.device), torch.ones_like(x), alpha=s
    ),
    "uniform_": lambda x, s: x.uniform_(0.5, s),
    "exponential_": lambda x, s: x.exponential_(s),
    "normal_": lambda x, s: x.normal_(s, 0.1),
    "fill_": lambda x, s: x.fill_(s),
    "fill_diagonal_": lambda x, s: x.fill_diagonal_(s),
    "clamp_": lambda x, s: x.clamp_(s),
    "set_": lambda x, s: x.set_(s.expand(4, 4).clone()),
    "dropout_": lambda x, s: torch.dropout_(x, s * 0.1, True),
    "another class": as_another_class,
    "without torch functions": without_torch_functions,
}


@device_param
@pytest.mark.parametrize("name", UNASKED)
def test_writes_that_nobody_is_asked_about_come_after_reads(name, device):
    x, s = torch.ones(4, 4, device=device), autofuse.wrap(torch.tensor(3.0, device=device))
    s.tolist()
    for target in (x, x.data):  # whose version counter says nothing of x
        x.fill_(1.0)
        y = autofuse.wrap(torch.ones(4, 4, device=device)) + x
        UNASKED[name](target, s)
        assert y.tolist() == [[2.0] * 4] * 4


KEYWORDS = {
    "relu_": lambda x, s: torch.relu_(input=x),
    "sigmoid_": lambda x, s: torch.sigmoid_(input=x),
    "clamp_": lambda x, s: torch.clamp_(input=x, min=s),
    "F.relu_": lambda x, s: F.relu_(x),
    "F.leaky_relu_": lambda x, s: F.leaky_relu_(input=x),
    "F.hardtanh_": lambda x, s: F.hardtanh_(x, 0.0, 0.5),
    "F.elu_": lambda x, s: F.elu_(x),
    "F.threshold_": lambda x, s: F.threshold_(x, 0.0, 7.0),
}


@device_param
@pytest.mark.parametrize("name", KEYWORDS)
def test_functions_that_write_come_after_reads(name, device):
    """By keyword too, to a plain tensor and to a wrapped one."""
    write = KEYWORDS[name]
    for wrapped in (True, False):
        x = torch.full((4,), -3.0, device=device)
        s = torch.full((4,), 0.5, device=device)
        want = x.clone()
        write(want, s)
        target = autofuse.wrap(x) if wrapped else x.data
        for _ in range(2):
            x.fill_(-3.0)
            y = autofuse.wrap(torch.ones(4, device=device)) + x
            write(target, autofuse.wrap(s))
            assert y.tolist() == [-2.0] * 4
            assert_same(target, want, 1e-6 if device == "cpu" else None)
        write(target, s)  # with nothing pending


@device_param
def test_a_wrapped_target_without_torch_functions(device):
    x, ones = torch.full((4,), -3.0, device=device), torch.ones(4, device=device)
    w = autofuse.wrap(x)
    y = w + ones
    with torch._C.DisableTorchFunctionSubclass():
        torch.relu_(w)
    assert y.tolist() == [-2.0] * 4 and x.tolist() == [0.0] * 4


@device_param
@pytest.mark.parametrize("write", ["add_", "out"])
def test_a_write_to_a_plain_tensor_that_another_thread_reads(write, device):
    x, g = pair(device)
    want, begun, written = x * 2, threading.Event(), threading.Event()
    got = []

    def reader():
        y = autofuse.wrap(x) * 2
        begun.set()
        written.wait(20)
        got.append(autofuse.unwrap(y))

    thread = threading.Thread(target=reader)
    thread.start()
    begun.wait(20)
    values = autofuse.wrap(g) * 2
    torch.add(values, 1, out=x.data) if write == "out" else x.add_(values)
    written.set()
    thread.join()
    assert_same(got[0], want, None)


@device_param
def test_a_read_that_begins_where_another_thread_is_about_to_write(device, monkeypatch):
    """Readers have been flushed, memory is not written yet: this op is not recorded."""
    monkeypatch.setattr(autofuse.config, "native", False)
    monkeypatch.setattr(autofuse.config, "always_fuse", True)
    x, g = pair(device)
    w, want, got = autofuse.wrap(x), x * 2.0, []
    looked, read, written = threading.Event(), threading.Event(), threading.Event()
    flush_thread, raw_version_of = in_place.flush_thread, recording.raw_version_of

    def about_to_write(name):
        flush_thread(name)
        if threading.current_thread() is threading.main_thread():
            looked.set()
            assert read.wait(20)

    def version(tensor):
        number = raw_version_of(tensor)
        read.set()
        assert written.wait(20)
        return number

    def reader():
        assert looked.wait(20)
        y = autofuse.wrap(x) * 2.0
        read.set()
        assert written.wait(20)
        got.append(autofuse.unwrap(y))

    kept = []  # another recorder: this thread is not the only one
    assert elsewhere(lambda: kept.append(autofuse.wrap(g) * 2)) is None
    monkeypatch.setattr(in_place, "flush_thread", about_to_write)
    monkeypatch.setattr(recording, "raw_version_of", version)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(elsewhere(reader)))
    thread.start()
    w.add_(0.0)
    written.set()
    thread.join()
    assert errors == [None]
    assert_same(got[0], want, None)


@device_param
def test_a_write_where_the_memory_is_read_another_way(device):
    def f(t, y):
        row = t[0]
        t.add_(row * 2)
        t.mul_(t.T + 0.0)
        flipped = t.flip(0) * 1.0
        t.sub_(flipped)
        wide = t + y[0] * 2
        t[1].add_(t[0] * 3)
        t.copy_(y * 2)
        return t, wide, row, t._version

    assert_same_as_eager(f, *pair(device))


@device_param
def test_a_write_of_another_dtype_or_shape(device):
    def f(t, y):
        h = t.half()
        autofuse.materialize(h)
        h.add_(y * 2)
        h.add_((y * 2)[0] + 1)
        i = t.int()
        autofuse.materialize(i)
        i.add_(i * 2)
        return h, i, h._version

    assert_same_as_eager(f, *pair(device), rtol=2e-3)


@device_param
def test_in_place_keeps_dtype_or_raises_as_eager(device):
    x = torch.randn(4, device=device).half()
    i = torch.arange(4, device=device)

    def widened(t, k):
        z = t * 2
        z += torch.ones(4, device=t.device)
        return z

    assert_same_as_eager(widened, x, i)
    assert_same_as_eager(lambda t, k: (k * 2).add_(1.5), x, i)
    assert_same_as_eager(lambda t, k: (t * 2).add_(torch.ones(3, 4, device=t.device)), x, i)


WRITES = {
    "add_": lambda p: p.add_(1),
    "iadd": lambda p: p.__iadd__(1),
    "setitem": lambda p: p.__setitem__(0, 9.0),
    "copy_": lambda p: p.copy_(torch.zeros_like(p)),
    "zero_": lambda p: p.zero_(),
    "view": lambda p: p[1:].add_(1),
    "detach": lambda p: p.detach().mul_(3),
    "data_attribute": lambda p: p.data.add_(1),
    "data_assignment": lambda p: setattr(p, "data", torch.zeros_like(p)),
    "out": lambda p: torch.add(p, 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "init": lambda p: torch.nn.init.constant_(p, 3.0),
    "functional": lambda p: F.relu(p, inplace=True),
    "numpy": lambda p: p.add_(3) if p.is_cuda else p.numpy().fill(3),
    "storage": lambda p: p.untyped_storage().fill_(1),
    "set_": lambda p: p.set_(torch.zeros(4, device=p.device)),
}


@device_param
@pytest.mark.parametrize("name", WRITES)
def test_write_through_a_plain_alias(name, device):
    """Eager has read the old value: so has autofuse, or it says what went wrong."""
    x = torch.randn(4, device=device)
    want = x * 2
    y = autofuse.wrap(x) * 2
    try:
        WRITES[name](x)
        autofuse.materialize(y)
    except autofuse.StaleInputError as error:
        assert "'mul'" in str(error) and "autofuse.materialize" in str(error)
        assert name == "out", f"{name} can be seen and must not raise"
        with pytest.raises(autofuse.StaleInputError):
            autofuse.unwrap(y)
        return
    assert_same(y, want, None)


FUNCTIONS = [
    name for name, function in vars(F).items()
    if inspect.isfunction(function) and not name.endswith("_")
    and "inplace" in inspect.signature(function).parameters
]  # fmt: skip


@device_param
@pytest.mark.parametrize("name", [*FUNCTIONS, "swap_tensors"])
def test_write_to_a_plain_operand(name, device):
    """By functions of Python that reach C++ past what is exchanged on torch.Tensor."""

    def write(x):
        torch.manual_seed(0)
        if name == "swap_tensors":
            torch.utils.swap_tensors(x, torch.zeros_like(x))
        else:
            more = (0.1, 2.0) if "threshold" in name else ()
            getattr(F, name)(x, *more, inplace=True)

    ndim = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5}.get(name, 2)
    x = torch.randn((3,) * ndim, device=device)
    theirs, want = x.clone(), x + x
    y = autofuse.wrap(x.clone()) + x
    write(x)
    write(theirs)
    assert_same(y, want, None)
    assert_same(x, theirs, None)


INPLACE = [name for name in dir(operator) if name.startswith("__i") and hasattr(torch.Tensor, name)
           and name not in ("__invert__", "__index__", "__init__")]  # fmt: skip


@device_param
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", INPLACE)
def test_operators_that_write_to_a_plain_alias(name, dtype, device):
    """All that Python has: torch.Tensor has some that its base in C lacks."""
    done = 0
    for other in (3, True, 0.5, torch.ones(4, 4, device=device).to(dtype)):
        x = torch.ones(4, 4, device=device).to(dtype)
        y = autofuse.wrap(x) * x
        with contextlib.suppress(TypeError, RuntimeError):  # not for these dtypes
            getattr(operator, name)(x, other)
            done += 1
        assert autofuse.unwrap(y).bool().all()
    assert done or not dtype.is_floating_point or name in BITS


BITS = ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")


@device_param
@pytest.mark.parametrize("native", [False, True])
def test_an_error_of_the_flush_in_a_write_is_the_callers(native, device, monkeypatch):
    monkeypatch.setattr(autofuse.config, "native", native)
    for write in (
        lambda w, v: w.add_(v),
        lambda w, v: operator.iadd(w, v),
        lambda w, v: operator.iadd(autofuse.unwrap(w), v),
        lambda w, v: torch.add(w, v, out=w),
        lambda w, v: w.__setitem__(0, v[0]),
        lambda w, v: w.copy_(v),
    ):
        for _ in range(3):
            x, memory = torch.ones(4, device=device), torch.zeros(4, device=device)
            w = autofuse.wrap(memory)  # which is seen by another, and so written at once
            with torch.no_grad():
                v = autofuse.wrap(x) * 2
                write_unseen(x)
                with pytest.raises(autofuse.StaleInputError):
                    write(w, v)
            assert w.tolist() == [0.0] * 4
            assert (autofuse.wrap(x) * 0).tolist() == [0.0] * 4  # the thread goes on recording


@device_param
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", [name for name, row in rows.OPS.items() if row.result == "bool"])
def test_results_without_gradients_take_that_of_an_operand_in_place(name, dtype, device):
    """Where the op by itself knows none, its in-place form may make the target require grad."""
    if not hasattr(torch.Tensor, f"{name}_") or len(rows.OPS[name].names) < 2:
        pytest.skip("torch has none of two operands")
    p = torch.linspace(-1, 1, 4, device=device).requires_grad_()

    def write(t):
        t = t.type(torch.float64).to(dtype)  # pending, if it is wrapped
        kept = getattr(t, f"{name}_")(p)
        with torch.no_grad():
            getattr((t > 0).type(dtype), f"{name}_")(p)
        return t.tolist(), kept.requires_grad, kept.is_leaf, kept._version

    assert_same_as_eager(write, torch.ones(4, device=device))


@device_param
@pytest.mark.parametrize("write", [
    lambda x: x.add_(1), lambda x: x[:1].add_(1), lambda x: autofuse.wrap(x).add_(1),
    lambda x: autofuse.wrap(x).add_(autofuse.wrap(torch.ones((), device=x.device)) * 2),
])  # fmt: skip
def test_a_write_to_nothing(write, device):
    """A tensor without elements has a version too."""
    for shape in ((0,), (0, 3), (2, 0)):
        x = torch.ones(shape, device=device)
        y = autofuse.wrap(x) * 2
        write(x)
        assert y.shape == shape and y.tolist() == x.tolist()


def test_exports_of_a_plain_alias():
    """Others may write through them afterwards."""
    for export in (np.from_dlpack, np.asarray, torch.from_dlpack, lambda x: x.numpy()):
        x = torch.ones(3)
        y = autofuse.wrap(x) * 2
        export(x)[0] = 5.0
        assert y.tolist() == [2.0] * 3


@device_param
def test_write_through_another_wrapped_alias(device):
    x = torch.randn(4, device=device)
    a, b = autofuse.wrap(x), autofuse.wrap(x)
    want = x * 2
    y = a * 2
    b.add_(1)
    assert_same(y, want, None)
    assert_same(a * 2, x * 2, None)


@device_param
def test_optimizer_steps_come_after_pending_reads(device):
    p = torch.nn.Parameter(torch.randn(4, device=device))
    x = autofuse.wrap(torch.randn(4, device=device))
    for make in (
        lambda: torch.optim.SGD([p], lr=0.1),
        lambda: torch.optim.Adam([p], lr=0.1, foreach=True),
        lambda: torch.optim.Adam([p], lr=0.1, fused=True),
    ):
        optimizer = make()
        p.grad = torch.ones_like(p)
        with torch.no_grad():
            want = autofuse.unwrap(x) * p
            y = x * p
        optimizer.step()
        assert_same(y, want, None)


def test_a_lost_value_does_not_poison_the_thread():
    x = torch.randn(4)
    y = autofuse.wrap(x) * 2
    write_unseen(x)
    with pytest.raises(autofuse.StaleInputError):
        autofuse.materialize(y)
    z = autofuse.wrap(x) * 3
    assert_same(z, x * 3, None)


@device_param
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32], ids=str)
def test_out_of_another_dtype(dtype, device):
    """Some ops convert to the dtype of `out`, others raise."""
    operand = torch.tensor([1, 0, 1, 2, 3], device=device).to(dtype)

    def call(name, operands, out):
        values = [x.logical_not() if dtype is torch.bool else x + 0 for x in operands]
        return getattr(torch, name)(*values, out=out)

    for name in OUT:
        if not is_called_on(device, getattr(torch, name)):
            continue
        for count in (1, 2, 3):
            for other in (torch.int64, torch.bfloat16, torch.float32):
                plain = torch.zeros(5, dtype=other, device=device)
                wrapped = W(torch.zeros_like(plain))
                want, error = outcome(call, (name, [operand] * count, plain))
                got, failure = outcome(call, (name, [W(operand)] * count, wrapped))
                what = f"{name} of {count} to {other}"
                assert repr(failure) == repr(error), what
                if error is None:
                    assert_same(got, want, 1e-2 if device == "cpu" else None, what)
                    assert_same(wrapped, plain, 1e-2 if device == "cpu" else None, what)


def test_logit_of_a_tensor_raises_as_eager_does():
    x = torch.rand(4)
    assert_same_as_eager(lambda t: (t * 1).logit_(t), x)
