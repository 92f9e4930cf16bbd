"""What torch's machinery around an op decides: operand order, grad, modes, containers, threads."""

import contextlib
import copy
import dataclasses
import functools
import threading
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autofuse
from autofuse.chain.state import this_thread
from autofuse.record.flush import flush_all
from autofuse.record.modes import forget_all, renew, reopen_all
from support import DEVICES, assert_same, assert_same_as_eager, functions_called

W = autofuse.wrap
device_param = pytest.mark.parametrize("device", DEVICES)


@device_param
@pytest.mark.parametrize("op", ["+", "-", "*", "/"])
def test_a_plain_tensor_on_the_left(op, device):
    """Python calls the subclass's reflected method; torch's operand order decides the layout."""
    space = {}
    exec(f"def f(a, b): return a {op} b", space)
    a, b = torch.rand(2, 3, device=device), torch.rand(3, 2, device=device).t()
    assert_same(space["f"](a, W(b)), space["f"](a, b), None)
    assert_same(space["f"](W(a), W(b)), space["f"](a, b), None)
    with pytest.raises(RuntimeError) as ours:
        space["f"](torch.ones(2, device=device), W(torch.ones(3, device=device)))
    with pytest.raises(RuntimeError) as theirs:
        space["f"](torch.ones(2, device=device), torch.ones(3, device=device))
    assert str(ours.value) == str(theirs.value)


_COMPARISONS = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}
_SYMBOLS = "+ - * / // % ** & | ^ << >> @ += -= *= /= //= %= **= &= |= ^= <<= >>=".split()


@device_param
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("op", [*_SYMBOLS, *_COMPARISONS])
def test_an_error_names_the_operands_in_their_order(op, dtype, device):
    """Whatever stands on either side; of comparisons Python exchanges the sides, as in eager."""

    def text(a, op, b):
        space = {"a": a, "b": b}
        with pytest.raises((RuntimeError, TypeError)) as raised:
            exec(f"a {op} b", space)
        return type(raised.value), str(raised.value)

    def parameter(t):
        return torch.nn.Parameter(t, requires_grad=False)

    small = torch.ones(3, dtype=dtype, device=device)
    large = torch.ones(2, 4, dtype=dtype, device=device)
    for a, b in ((small, large), (large, small)):
        want = text(a.clone(), op, b)
        for left in (torch.clone, parameter, W, lambda t: W(t) * 1):
            for right in (W, lambda t: W(t) * 1):
                if left is torch.clone and op in _COMPARISONS:
                    assert text(a, op, parameter(b)) == text(b, _COMPARISONS[op], a)
                    assert text(left(a), op, right(b)) == text(b, _COMPARISONS[op], a)
                else:
                    assert text(left(a), op, right(b)) == want
            if left not in (torch.clone, parameter):
                assert text(left(a), op, b) == want
                assert text(left(a), op, parameter(b)) == want


@device_param
@pytest.mark.parametrize("name", "lt le gt ge eq ne sub pow maximum atan2 where".split())
def test_an_error_of_a_function_names_the_operands_in_their_order(name, device):
    def text(a, b):
        with pytest.raises(RuntimeError) as raised:
            torch.where(a > 0, a, b) if name == "where" else getattr(torch, name)(a, b)
        return str(raised.value)

    a, b = torch.ones(3, device=device), torch.ones(2, 4, device=device)
    for x, y in ((a, b), (b, a)):
        assert text(x, W(y)) == text(W(x), y) == text(W(x), W(y) * 1) == text(x, y)


@device_param
def test_division_by_a_wrapped_tensor_is_a_division(device):
    small = torch.full((3,), 1e-39, device=device)
    assert_same(small / W(small), small / small, None)


@device_param
def test_layout_of_rsub_and_of_copies(device):
    a, b = torch.rand(2, 3, device=device), torch.rand(3, 2, device=device).t()
    assert_same_as_eager(torch.rsub, a, b)
    odd = torch.rand(4, device=device).as_strided((1, 4), (100, 1))
    for call in (torch.clone, torch.Tensor.half, lambda t: t.to(torch.float64)):
        assert_same(call(W(odd)), call(odd), None)


def test_grad_mode_that_comes_on_after_a_parameter_was_read():
    p, w = torch.ones(4, requires_grad=True), W(torch.ones(4))
    with torch.no_grad():
        a = w + p
    assert (w * p).requires_grad and not a.requires_grad
    x = torch.ones(4)
    b = w + x
    x.requires_grad_()
    assert (w * x).requires_grad and not b.requires_grad


def test_requires_grad_that_comes_through_a_view():
    w = W(torch.ones(4))
    autofuse.materialize(w * 1.0)
    s = torch.ones((), requires_grad=True)
    w[0].mul_(s)
    (w * 3.0).sum().backward()
    assert s.grad.item() == 3.0
    v = W(torch.ones(4))
    autofuse.materialize(v * 1.0)
    t = torch.ones((), requires_grad=True)
    v[0].mul_(t)
    v.mul_(W(torch.ones(4)) * 3.0)
    v.sum().backward()
    assert t.grad.item() == 3.0


def test_user_function_keeps_its_gradient():
    p = torch.full((3,), 2.0, requires_grad=True)

    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.save_for_backward(x)
            return x * p + 1.0

        @staticmethod
        def backward(ctx, g):
            return None, g * ctx.saved_tensors[0]

    @autofuse.fuse
    def f(x):
        return Affine.apply(x, p)

    y = f(torch.full((3,), 5.0))
    assert y.requires_grad
    y.sum().backward()
    assert p.grad.tolist() == [5.0] * 3


class Surrogate(torch.autograd.Function):
    """A step, and in backward the slope of something smooth, as spiking networks have it."""

    inside = staticmethod(lambda: None)  # what runs in the middle of both

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        Surrogate.inside()
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        Surrogate.inside()
        return g / (10.0 * x.abs() + 1.0)


def test_ops_inside_a_users_function_run_without_python(on, always):
    """And what closes recording there opens no chain anew: a call takes 3 us more, not 17."""
    if not on:
        pytest.skip("there is machine code for this")
    x = torch.randn(5, requires_grad=True)
    w = W(x)
    for _ in range(3):
        Surrogate.apply(w).backward(torch.ones(5))
        w * 2.0
    for pending in (False, True):
        operand = w * 3.0 if pending else w
        called = functions_called(lambda operand=operand: Surrogate.apply(operand))
        assert not {"handler", "run_eager", "open", "record"} & {*called}, called
        y = Surrogate.apply(w)
        called = functions_called(lambda y=y: y.backward(torch.ones(5)))
        assert not {"handler", "run_eager", "record"} & {*called}, called


def _inside(monkeypatch):
    """What may change in the middle of a Function, by name."""
    kept = []

    def nested():
        kept.append(Through.apply(W(torch.ones(3)) * 2.0, lambda: W(torch.ones(2)) + 1.0) * 3.0)

    def raises():
        raise ZeroDivisionError

    def in_a_thread():
        thread = threading.Thread(target=nested)
        thread.start()
        thread.join()

    def other_modes():
        with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
            kept.append(W(torch.ones(3)) + 1.0)
        with torch.enable_grad():
            kept.append(W(torch.ones(3)) + 2.0)

    def another_default():
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)

    def of_functions():
        with Seen():
            W(torch.ones(3)) * 3.0

    return {
        "nothing": lambda: None, "nested": nested, "raises": raises, "a thread": in_a_thread,
        "modes": other_modes, "default dtype": another_default, "flush": lambda: flush_all("test"),
        "forget": lambda: forget_all("test"), "reopen": lambda: reopen_all("test"),
        "a function mode": of_functions, "hooks": _with_hooks,
        "a setting": lambda: monkeypatch.setattr(autofuse.config, "loop_nodes", 7),
        "a block without an end": lambda: autofuse.disabled().__enter__(),
        "off": lambda: monkeypatch.setattr(autofuse.config, "enabled", False),
    }  # fmt: skip


def _with_hooks():
    with torch.autograd.graph.save_on_cpu():
        W(torch.ones(3)) * 3.0


@pytest.mark.parametrize("pending", [False, True], ids=["concrete", "pending"])
@pytest.mark.parametrize("name", _inside(None))
def test_recording_goes_on_after_a_users_function(on, always, monkeypatch, name, pending):
    """In the modes of then, whatever has changed in its middle."""
    monkeypatch.setattr(Surrogate, "inside", staticmethod(_inside(monkeypatch)[name]))
    x = torch.linspace(-2.0, 2.0, 5)

    def run(x, wrap):
        x = wrap(x.clone().requires_grad_())
        h = x * 2.0 if pending else x
        with contextlib.suppress(ZeroDivisionError):
            h = Surrogate.apply(h) + h
        y = h * 3.0 + 1.0
        if wrap is W and name != "off":
            assert autofuse.is_pending(y)
        with contextlib.suppress(ZeroDivisionError):
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert wrap is not W or name == "off" or autofuse.is_pending(W(x.detach()) * 2.0)
            return autofuse.unwrap(y.detach()), autofuse.unwrap(gradient)
        return autofuse.unwrap(y.detach())

    want = run(x, lambda x: x)
    for _ in range(3):
        assert_same(run(x, W), want, None)
    assert this_thread.closed == this_thread.applies == 0


@pytest.mark.parametrize("measure", [False, True])
def test_what_a_users_function_makes_inside_stays_plain(measure, monkeypatch, always, on):
    """There nothing is recorded; what it returns begins chains again."""
    monkeypatch.setattr(autofuse.config, "always_fuse", not measure)
    monkeypatch.setattr(autofuse.config, "measure", measure)
    kinds = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            inner = x.sin() * y
            ctx.save_for_backward(inner, y)
            kinds.extend(map(type, (inner, x @ x, x.sum(), x[:2], x.clone(), torch.cat([x, y]))))
            return inner + 1.0, inner.exp()

        @staticmethod
        def backward(ctx, g, h):
            inner, y = ctx.saved_tensors
            kinds.append(type(inner))
            return g * y + h, h * inner

    def trained(wrap):
        x, y = torch.rand(5, requires_grad=True), torch.rand(5)
        out, other = Scale.apply(wrap(x), wrap(y))
        assert type(out) is type(other) is type(wrap(y))
        (out * 2.0 - other).sum().backward()
        return out, other, x.grad

    for _ in range(3):
        torch.manual_seed(0)
        want = trained(torch.clone)
        torch.manual_seed(0)
        assert_same(trained(W), want, 1e-6)
    autofuse.reset_stats()
    Scale.apply(W(torch.ones(3)), torch.ones(3))
    assert {*kinds[-6:]} == {torch.Tensor if measure else autofuse.Tensor}
    assert (("mul", "recording is off") in autofuse.stats().eager_ops) is not measure
    assert type(Scale.apply(torch.ones(3), torch.ones(3))[0]) is torch.Tensor


class Total(torch.autograd.Function):
    """The sum of all tensors that it finds, one of which a container or a closure may hold."""

    @staticmethod
    def forward(ctx, x, *others):
        tensors = [x]
        for other in others:
            if callable(other):
                other = other()
            items = other.values() if isinstance(other, dict) else other
            tensors += [t for item in items for t in (item if type(item) is tuple else (item,))]
        ctx.count = len(others)
        return sum(torch.as_tensor(t) for t in tensors)

    @staticmethod
    def backward(ctx, g):
        return (g, *[None] * ctx.count)


Pair = namedtuple("Pair", "one other")
HIDDEN = {
    "tuple": lambda y: (y, 1.0), "tuples": lambda y: ((y, 2.0), 1.0), "list": lambda y: [y],
    "dict": lambda y: {"y": y}, "named": lambda y: Pair(y, 2.0), "empty": lambda y: (),
    "closure": lambda y: lambda: [y], "pending": lambda y: lambda: [y * 2.0],
}  # fmt: skip


@pytest.mark.parametrize("place", HIDDEN)
def test_apply_finds_values_wherever_wrapped_tensors_are(place, on, always):
    """Where they are not among its arguments, too, of which most need no look."""
    x, y = torch.rand(4), torch.rand(4)
    for first in (lambda x, wrap: x, lambda x, wrap: wrap(x), lambda x, wrap: wrap(x) * 3.0):
        found = []
        for wrap in (lambda t: t * 1.0, W):
            leaf = x.clone().requires_grad_()
            other = wrap(y.clone()) + 1.0
            total = Total.apply(first(leaf, wrap), HIDDEN[place](other))
            (total * other).sum().backward()
            found.append((total.detach(), leaf.grad))
            assert total.grad_fn.name() == "TotalBackward" and total.requires_grad
        assert_same(found[1], found[0], 1e-6)


def test_of_what_apply_returns_the_dense_is_wrapped(on):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, xs):
            return xs[0].to_sparse(), xs[0] * 2.0

        @staticmethod
        def backward(ctx, g, h):
            return None

    sparse, dense = Both.apply([W(torch.rand(3, 3))])
    assert type(sparse) is torch.Tensor and type(dense) is autofuse.Tensor
    assert_same(autofuse.unwrap(sparse).to_dense() * 2.0, dense, None)


@pytest.mark.parametrize("write", [
    lambda x, y: x.copy_(y), lambda x, y: torch.mul(y, 2.0, out=x), lambda x, y: x.add_(y),
    lambda x, y: x[:].copy_(y), lambda x, y: x.__setitem__(slice(None), y),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@torch.no_grad()
def test_a_write_to_memory_that_nobody_is_told_of(write, on, always):
    """It would be past the end."""

    def program(wrap, change):
        x, y = wrap(torch.zeros(1000, 10)), wrap(torch.ones(1000, 10)) * 2.0
        (x * 2.0).tolist()
        if change:
            torch.Tensor.set_(x, torch.zeros(2))
        try:
            write(x, y)
        except RuntimeError as error:
            return str(error)
        return x.tolist(), x._version

    for change in (False, False, False, True, True):
        assert program(W, change) == program(torch.clone, change)


def test_forward_mode_keeps_its_tangent():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(W(torch.ones(3)), torch.ones(3))
        assert forward_ad.unpack_dual(dual * 2.0).tangent.tolist() == [2.0] * 3


def test_exports_of_a_wrapped_tensor_come_after_pending_reads():
    for write in (
        lambda w: w.numpy().fill(5),
        lambda w: w.untyped_storage().fill_(0),
        lambda w: torch.from_dlpack(w).add_(1),
        lambda w: w.data_ptr(),
    ):
        w = W(torch.ones(4))
        y = w * 2.0
        write(w)
        assert y.tolist() == [2.0] * 4


def test_running_statistics_are_a_write():
    mean, var = torch.zeros(3), torch.ones(3)
    y = W(mean) + 1.0
    F.batch_norm(torch.randn(8, 3), mean, var, training=True)
    assert y.tolist() == [1.0] * 3
    memory = torch.ones(4)
    other = torch.from_numpy(memory.numpy())
    y = W(memory) * 2
    other.add_(1)
    assert y.tolist() == [2.0] * 4


@dataclasses.dataclass
class State:
    h: torch.Tensor


def test_fused_functions_may_change_their_containers():
    @autofuse.fuse
    def f(table, items, state):
        table["out"] = table["a"] * 2.0
        items.append(items[0] + 1.0)
        state.h = state.h * 0.5 + table["a"]

    a = torch.ones(3)
    table, items, state = {"a": a}, [a], State(a)
    for _ in range(3):
        f(table, items, state)
    assert table["a"] is a and items[0] is a
    assert [type(t) for t in (*table.values(), *items, state.h)] == [torch.Tensor] * 7
    assert table["out"].tolist() == [2.0] * 3 and len(items) == 4
    assert state.h.tolist() == [1.875] * 3


def test_fused_functions_keep_parameters_and_identity():
    @autofuse.fuse
    def f(p, a, b):
        assert type(p) is nn.Parameter and a is b
        with torch.no_grad():
            p.add_(p.grad * -0.5)

    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    t = torch.ones(3)
    f(p, t, t)
    assert p.tolist() == [0.5] * 3
    with pytest.raises(TypeError, match="generators or coroutines"):
        autofuse.fuse(lambda: (yield))
    with pytest.raises(TypeError, match="not the class"):
        autofuse.fuse(nn.Linear)


def test_jit_script_still_knows_inplace_functions():
    scripted = torch.jit.script(nn.Sequential(nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)))
    assert scripted(torch.tensor([-1.0, 0.5, 3.0])).tolist() == [0.0, 0.5, 1.0]


def test_compiled_functions_get_plain_tensors():
    seen = []

    def f(x):
        seen.append(type(x))
        return x * 2 + 1

    compiled = torch.compile(f, backend="eager")
    x = torch.ones(3)
    assert compiled(W(x) * 2).tolist() == [5.0] * 3
    assert torch.compile(autofuse.fuse(f), backend="eager")(x).tolist() == [3.0] * 3
    assert autofuse.Tensor not in seen


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.to(torch.uint8).clamp(0, 300),
        lambda t: torch.where(t.to(torch.uint8) > 5, t.to(torch.uint8), 300),
        lambda t: torch.add(t.char(), t.char(), alpha=200),
        lambda t: t.clamp(-1e300, 1e300),
        lambda t: F.leaky_relu(t, 1e300),
        lambda t: t.half().clamp(max=70000),
        lambda t: t.maximum(1),
        lambda t: t.logical_xor(True),
    ],
)
def test_scalars_that_do_not_fit(call):
    assert_same_as_eager(call, torch.arange(4.0))


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1])
def test_integers_about_the_largest(number):
    for dtype in (torch.int64, torch.float32, torch.bool):
        for call in (lambda t: t * number, lambda t: t < number, lambda t: t.clamp(max=number)):
            assert_same_as_eager(call, torch.arange(4).to(dtype))


def test_interrupted_flush_tries_again(monkeypatch):
    y = W(torch.ones(3)) * 7.5 + 2.25

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(autofuse.record.flush, "runner_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        y.tolist()
    monkeypatch.undo()
    assert y.tolist() == [9.75] * 3


def test_writes_race_with_a_flush_from_another_thread():
    stop = threading.Event()

    def flushing():
        while not stop.is_set():
            autofuse.record.flush.flush_all("race")

    thread = threading.Thread(target=flushing)
    thread.start()
    try:
        w, x = W(torch.zeros(4)), W(torch.ones(4))
        for _ in range(3000):
            w.add_(x * 2.0)
    finally:
        stop.set()
        thread.join()
    assert w.tolist() == [6000.0] * 4


def test_layouts_that_are_met_again_are_read_once(monkeypatch):
    """What a place knows of plain tensors is true, whatever comes in which order."""
    from autofuse.chain import meta

    class Place:
        likely = ()

    x = torch.randn(6, 4)
    met = [
        x,
        x.t(),
        x[:, ::2],
        x[1:],
        x.half(),
        x.double(),
        x.unsqueeze(0),
        x.clone().requires_grad_(),
    ]
    more = [x[:2], x[:3], x.int(), x[0], torch.nn.Parameter(x), x.bool()]
    place, random = Place(), torch.Generator().manual_seed(0)
    for kinds in (met, more, met + more):
        for k in torch.randint(len(kinds), (300,), generator=random).tolist():
            assert meta.likely_meta(kinds[k], place) is meta.plain_meta(kinds[k])
    with torch.no_grad():
        w = autofuse.wrap(x)
        for p in (x, x.t().contiguous().t(), x[:1], x) * 3:
            assert_same(w * p, x * p, None)
    place = Place()
    for t in met * 2:
        meta.likely_meta(t, place)
    monkeypatch.setattr(meta, "plain_meta", None)
    assert all(meta.likely_meta(t, place) for t in met)
    assert len(place.likely) == 2 * len(met)  # as many as there is room for


def test_dtype_and_device_after_a_change_of_memory():
    w = autofuse.wrap(torch.ones(4))
    assert (w + 1).tolist() == [2.0] * 4 and w.dtype is torch.float32
    w.data = torch.ones(4, dtype=torch.float64)
    assert w.dtype is torch.float64 and (w + 1).dtype is torch.float64
    v = autofuse.wrap(torch.ones(4, dtype=torch.int32))
    assert (v + 1).tolist() == [2] * 4
    torch.utils.swap_tensors(v, w)
    assert w.dtype is torch.int32 and v.dtype is torch.float64
    assert (v * 0.5).device == v.device == torch.device("cpu")


@pytest.mark.parametrize("times", ["pending", "concrete", "read"])
@pytest.mark.parametrize("swap", [torch.utils.swap_tensors, "_swap_tensor_impl"])
def test_tensors_that_are_exchanged_in_c(swap, times):
    """What was known of them is not true any more."""

    def program(wrap):
        a, b = wrap(torch.ones(4)), wrap(torch.full((4,), 3, dtype=torch.int32))
        if times == "pending":
            a, b = a * 2.0, b + 1
        elif times == "read":
            a.add(1).tolist(), b.add(1).tolist()
        (getattr(torch._C, swap) if isinstance(swap, str) else swap)(a, b)
        return [a.clone(), b.clone(), a + 1, b * 0.5, a.dtype, b.dtype, a.tolist()]

    assert_same(program(W), program(torch.clone), None)


def test_python_functions_of_torch_ask_other_classes_and_modes():
    class Other(torch.Tensor):
        pass

    class Named(torch.overrides.TorchFunctionMode):
        names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **kwargs or {})

    w, x = autofuse.wrap(torch.ones(3)), torch.ones(3)
    other = x.as_subclass(Other)
    assert type(F.relu(other)) is Other
    assert type(F.mse_loss(w, other)) is Other
    with Named():
        assert F.relu(w - 2.0).tolist() == [0.0] * 3
    assert Named.names.count("relu") >= 1
    assert autofuse.is_pending(F.relu(w)) and autofuse.is_pending(F.silu(input=w))
    assert F.relu(F.silu(w), inplace=True).tolist() == F.silu(x).tolist()
    assert autofuse.is_pending(F.leaky_relu(w - x, negative_slope=0.1))
    assert F.pad(w, (1, 1)).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_memory_that_a_function_changes():
    def widened(t):
        if torch.overrides.has_torch_function_unary(t):
            return torch.overrides.handle_torch_function(widened, (t,), t)
        t.data = t.data.double()
        return t

    w = autofuse.wrap(torch.ones(4))
    assert (w + 1).tolist() == [2.0] * 4
    widened(w)
    assert w.dtype is torch.float64
    assert_same(w + 1, torch.full((4,), 2.0, dtype=torch.float64), None)


def _unseen(change):
    """`change` as C meets it where nobody is told of functions."""

    def changing(x):
        with torch._C.DisableTorchFunctionSubclass():
            change(x)

    return changing


_CHANGES = [  # and whether the memory is another one then, with chains that still read it
    pytest.param(lambda x: torch.Tensor.set_(x, torch.full((5,), 3.0)), False, id="set_ unbound"),
    pytest.param(lambda x: torch.Tensor.resize_(x, (2,)), False, id="resize_ unbound"),
    pytest.param(lambda x: torch.Tensor.set_(x), False, id="set_ to nothing"),
    pytest.param(lambda x: torch.range(0, 4, out=x), True, id="range"),
    pytest.param(lambda x: torch.vmap(lambda t: t.unsqueeze_(0))(x), False, id="vmap"),
    pytest.param(lambda x: torch.ops.aten.t_(x), False, id="aten"),
    pytest.param(_unseen(lambda x: torch.Tensor.t_(x)), False, id="t_"),
    pytest.param(_unseen(lambda x: torch.sum(torch.ones(2, 6), 0, out=x)), True, id="out="),
    pytest.param(_unseen(lambda x: torch.Tensor.set_(x, torch.full((5,), 3.0))), False, id="set_"),
    pytest.param(_unseen(lambda x: setattr(x, "data", torch.ones(7).half())), False, id="data"),
]


@pytest.mark.parametrize("pending", [False, True], ids=["before", "in the middle"])
@pytest.mark.parametrize("change, moves", _CHANGES)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_memory_that_nobody_is_told_of(change, moves, pending, on, always):
    """What was known of an operand is looked at again, or a kernel would read past its end."""

    def program(wrap):
        seen = []
        for _ in range(5):
            x = wrap(torch.arange(6.0).reshape(2, 3))
            y = x * 2 + 1
            if not pending:
                seen.append(y.tolist())
            change(x)
            z = x * 2 + 1
            seen += [tuple(z.shape), z.dtype, z.tolist(), x.shape, x.stride(), x.dtype]
            seen.append((x.clamp(min=2) ** 2).tolist())
            seen.append(x.mul_(2).tolist())
            if pending:
                seen.append(y.tolist())
        return seen

    if pending and moves:
        with pytest.raises(autofuse.StaleInputError):
            program(W)
    else:
        assert program(W) == program(torch.clone)


@pytest.mark.parametrize("change", [
    lambda t: torch.sum(torch.ones(2, 6), 0, out=t), lambda t: t.t_(), lambda t: t.resize_(2, 3),
    lambda t: t.unsqueeze_(0), lambda t: setattr(t, "data", t.data.half()),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_value_that_c_holds_says_what_becomes_of_it(change, on):
    def program(wrap):
        t = wrap(torch.ones(4, 6)) * 2.0
        held = torch.tensor(t)  # noqa: F841
        change(t)
        size = t.shape, t.stride(), t.dtype, t.numel(), t.dim(), len(t), torch.numel(input=t)
        same = t.is_same_size(t), t.is_same_size(torch.ones(t.shape)), torch.ones(2).is_same_size(t)
        return *size, t.is_contiguous(), *same, t.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch.tensor
        assert program(W) == program(torch.clone)


def test_sizes_are_compared_without_a_graph(on):
    leaf = torch.ones(2, 3, requires_grad=True)
    for _ in range(3):
        x = W(leaf * 1.0) * 2.0
        assert x.is_same_size(torch.ones(2, 3)) and not torch.ones(3).is_same_size(x)
        assert x.is_same_size(other=x)


def test_writes_to_plain_tensors_under_a_default_device():
    x = torch.ones(4)
    with torch.device("cpu"):
        y = autofuse.wrap(torch.ones(4)) * 2.0
        x.add_(y)
        torch.mul(y + 1.0, x, out=x)
    assert x.tolist() == [9.0] * 4


def test_tensors_without_memory_are_not_read():
    zero = torch._efficientzerotensor(3)
    for a, b in ((W(torch.ones(3)), zero), (W(zero), torch.ones(3))):
        assert (a + b).tolist() == [1.0] * 3
    both = W(zero) + W(zero)
    assert not autofuse.is_pending(both) and autofuse.unwrap(both)._is_zerotensor()


@pytest.mark.skipif(not hasattr(torch.Tensor, "rename"), reason="needs a torch with names")
def test_names_of_dimensions_go_on():
    x, names = torch.ones(2, 3), ("a", "b")
    named = (
        lambda w: w(x.rename(*names)), lambda w: w(x).rename(*names),
        lambda w: w(x.clone()).rename_(*names), lambda w: (w(x) * 2).rename_(*names),
        lambda w: w(x).refine_names(*names) * 2, lambda w: w(x) * x.rename(*names),
        lambda w: torch.exp(w(x).rename(None, "b")) + w(x).rename("a", None),
        lambda w: w(x.clone()).rename_(*names).mul_(2),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names are experimental
        for make in named:
            for _ in range(3):
                y = make(W)
                assert y.names == (y * 2).names == torch.exp(y).names == names
            assert autofuse.fuse(lambda y: y * 2 + y)(make(lambda t: t)).names == names
        other = x.rename("b", "a")
        with pytest.raises(RuntimeError, match="dim 'b' and dim 'a' are at the same position"):
            W(x.rename(*names)) + other


NESTED = {
    "operand": lambda w, x, a, k: w(a) * 2 + x,
    "reflected": lambda w, x, a, k: x * (w(a) * 2),
    "function": lambda w, x, a, k: torch.add(w(a) * 2, x),
    "scalar": lambda w, x, a, k: (w(torch.tensor(2.0)) * 2 + 1) * x,
    "inplace": lambda w, x, a, k: x.clone().mul_(w(torch.tensor(2.0))),
    "out": lambda w, x, a, k: torch.add(w(a) * 2, 1, out=x.clone()),
    "linear": lambda w, x, a, k: torch.relu(nn.functional.linear(x, w(k)) * 2),
    "split": lambda w, x, a, k: torch.chunk(nn.functional.linear(x, w(k)), 3, -1),
    "fused": lambda w, x, a, k: autofuse.fuse(lambda t, u: t * 2 + (u if t.is_nested else t))(x, x),
    "list": lambda w, x, a, k: autofuse.fuse(lambda t: torch.relu(t[0]) * 2)([x]),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_tensor_without_sizes_or_strides_in_place_of_a_dense_one(name):
    dense, case = torch.arange(12.0).view(2, 2, 3), NESTED[name]
    a, k = torch.ones(2, 2, 3), torch.ones(3, 3)

    def lists(result):
        if isinstance(result, (tuple, list)):
            return [lists(item) for item in result]
        return lists(result.unbind()) if result.is_nested else result.tolist()

    def outcome(wrap, x):
        try:
            return lists(case(wrap, x, a, k))
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    def batched(wrap, x):
        try:
            return lists(torch.vmap(lambda x: case(wrap, x, a[0], k))(x))
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are experimental
        nested = torch.nested.nested_tensor([*dense])
        expected = outcome(lambda t: t, nested)
        for x in (dense, dense, dense, nested, dense, nested):  # then it has a check, too
            found = outcome(W, x)
        assert found == expected
        for x in (dense, dense, dense, nested, dense, nested):
            assert batched(W, x) == batched(lambda t: t, x)


def test_deepcopy_of_a_fused_model_is_fused():
    model = autofuse.fuse(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert type(copy.deepcopy(model)) is type(model)


# --- blocks that change modes -----------------------------------------------------------------


class Through(torch.autograd.Function):
    """Calls what it is given in the middle."""

    @staticmethod
    def forward(ctx, x, inside):
        inside()
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g, None


def within(*blocks):
    """What runs its argument within contexts, the first outermost."""

    def run(inside):
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block())
            inside()

    return run


def applied(inside):
    Through.apply(torch.ones(2, requires_grad=True), inside)


BLOCKS = {
    "no_grad": within(torch.no_grad),
    "enable_grad": within(torch.enable_grad),
    "set_grad_enabled": within(functools.partial(torch.set_grad_enabled, False)),
    "no_grad twice": within(torch.no_grad, torch.no_grad),
    "enable_grad in no_grad": within(torch.no_grad, torch.enable_grad),
    "no_grad in inference_mode": within(torch.inference_mode, torch.no_grad),
    "decorated": lambda inside: torch.no_grad()(inside)(),
    "apply": applied,
    "apply twice": lambda inside: applied(lambda: applied(inside)),
    "apply in no_grad": lambda inside: within(torch.no_grad)(lambda: applied(inside)),
    "no_grad in apply": lambda inside: applied(lambda: within(torch.no_grad)(inside)),
    "enable_grad in apply": lambda inside: applied(lambda: within(torch.enable_grad)(inside)),
}


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Seen(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def fails():
    raise ZeroDivisionError


def on_and_off(name):
    was = getattr(autofuse.config, name)
    setattr(autofuse.config, name, not was)
    setattr(autofuse.config, name, was)


# of x, which is wrapped
INSIDE = {
    "nothing": lambda x: None,
    "an op": lambda x: x * 2.0,
    "an op that is read": lambda x: (x * 2.0).tolist(),
    "an op that is held": lambda x: setattr(x, "held", x * 2.0),
    "an error": lambda x: fails(),
    "default dtype": lambda x: torch.set_default_dtype(torch.float64),
    "a setting": lambda x: setattr(autofuse.config, "relaxed", True),
    "a setting and back": lambda x: on_and_off("always_fuse"),
    "disabled": lambda x: setattr(autofuse.config, "enabled", False),
    "forgotten": lambda x: forget_all("test"),
    "anomaly": lambda x: torch.autograd.set_detect_anomaly(True),
    "grad mode": lambda x: torch.set_grad_enabled(False),
    "grad mode on": lambda x: torch.set_grad_enabled(True),
    "autocast": lambda x: within(functools.partial(torch.autocast, "cpu"))(lambda: x * 2.0),
    "hooks": lambda x: within(functools.partial(
        torch.autograd.graph.saved_tensors_hooks, abs, abs))(lambda: x * 2.0),
    "a mode": lambda x: within(Seen)(lambda: x * 2.0),
    "a mode of dispatch": lambda x: within(Quiet)(lambda: x * 2.0),
    "inference": lambda x: within(torch.inference_mode)(lambda: x * 2.0),
    "a vmap": lambda x: torch.vmap(torch.sin)(torch.ones(2)),
    "a backward": lambda x: within(
        functools.partial(torch.inference_mode, False), torch.enable_grad,
    )(lambda: torch.ones(2, requires_grad=True).sum().backward()),
}  # fmt: skip


@pytest.fixture
def modes_again():
    names = "relaxed", "enabled", "always_fuse"
    before = [getattr(autofuse.config, name) for name in names]
    yield
    for name, value in zip(names, before, strict=True):
        setattr(autofuse.config, name, value)
    torch.set_default_dtype(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(False)
    torch.set_grad_enabled(True)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    reopen_all("test")


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_leaves_recording_where_its_modes_say(block, inside, on, modes_again):
    x = autofuse.wrap(torch.ones(3, 4))
    torch.set_grad_enabled(block != "enable_grad")
    for _ in range(3):
        autofuse.materialize(x + 1)
        BLOCKS[block](lambda: None)  # both ways are known
    with contextlib.suppress(ZeroDivisionError):
        BLOCKS[block](lambda: INSIDE[inside](x))
    for _ in range(2):
        flush_all("test")
        autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)  # the next op looks at modes
        for recorder in this_thread.recorders.values():
            told = recorder.home, recorder.grad, recorder.hooks, recorder.inference, recorder.off
            assert recorder.chain.tip is recorder.home and recorder.grad is torch.is_grad_enabled()
            renew(recorder, "test")
            assert told == (
                recorder.home, recorder.grad, recorder.hooks, recorder.inference, recorder.off
            )  # fmt: skip
        BLOCKS[block](lambda: None)
    if hasattr(x, "held"):
        assert x.held.tolist() == [[2.0] * 4] * 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_check_made_while_a_thread_is_closed_meets_no_batch_of_nested_tensors(on):
    """They have no sizes: what was learnt before the inner block must not be asked of them."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            s * torch.ones(4)
            torch.vmap(lambda t: s * t)(nested)
            return x.detach()

    s = autofuse.wrap(torch.tensor(2.0))
    autofuse.materialize(autofuse.wrap(torch.ones(4)) * 2 + 1)
    assert Through.apply(torch.ones(4, requires_grad=True), s).shape == (4,)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_stands_beside_a_block_is_of_its_own_mode(block, on):
    x, leaf = autofuse.wrap(torch.ones(3)), torch.ones(3, requires_grad=True)
    for _ in range(3):
        made = []
        before = x * leaf
        BLOCKS[block](lambda: None)
        between = x * leaf
        BLOCKS[block](lambda made=made: made.append((x * leaf, torch.is_grad_enabled())))
        after = before + x * leaf
        assert made[0][0].requires_grad is made[0][1]
        for value in (before, between, after):
            assert value.requires_grad
        assert torch.autograd.grad((between + after).sum(), leaf)[0].tolist() == [3.0] * 3
